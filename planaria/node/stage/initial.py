"""Initial state of the stages, before the first step: from the run's seed, or from the checkpoint
that the run begins from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.node.model.architecture import Architecture
from planaria.node.model.checkpoint import Checkpoint, digest_of
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.lora import add_adapters, initial_adapters
from planaria.node.model.modules import Stage, build_stage, empty_stage
from planaria.node.model.quantized import Words, put_values, slots, words_in, words_of
from planaria.node.model.shape import ModelConfig, named_shapes, packed_as
from planaria.node.run_file import RunFile

log = logging.getLogger("planaria")


class NotHereError(ValueError):
    """Error of a stage's initial weights that this machine lacks; the message says why."""


class InitialStages(NamedTuple):
    """The stages before the first step, by their sources. `checkpoint`: of `model.from`; None: this
    machine lacks it, or the run has none. `own`: what the code of `model.module` builds."""

    run: RunFile
    config: ModelConfig
    checkpoint: Checkpoint | None = None
    own: Architecture | None = None

    def stage(self, stage: int) -> Stage:
        """The stage, float32 on the CPU, with its adapters, if any. Raises NotHereError."""
        return self._adapted(self.base(stage), stage)

    def _adapted(self, module: Stage, stage: int) -> Stage:
        if self.config.lora is None:
            return module
        return add_adapters(module, self.config, stage, self.adapters(stage))

    def adapters(self, stage: int) -> Tensor:
        """Initial adapters, flat, float32 [n]; they need no checkpoint."""
        return initial_adapters(self.config, stage, self.run.seed)

    def base(self, stage: int) -> Stage:
        """A stage's initial module without adapters. Raises NotHereError."""
        origin, content = self.run.model.origin, self.run.model.content
        if origin is None:
            return build_stage(self.config, stage, self.run.seed, self.own)
        if self.checkpoint is None or content is None:
            raise NotHereError(f"{origin} is not on this machine")
        folder, expected = self.checkpoint.folder, content[stage]
        try:
            module = empty_stage(self.config, stage, self.own)
            names = list(named_shapes(self.config, stage))
            for name, slot in zip(names, slots(module), strict=True):
                put_values(slot, map(torch.from_numpy, self.checkpoint.pieces(name)))
        except OSError as error:
            raise NotHereError(f"{folder} can't be read: {error}") from error
        actual = digest_of(words_of(slot).numpy() for slot in slots(module))
        if actual != expected:
            raise NotHereError(
                f"{folder} is not the checkpoint that the run begins from: the digest of "
                f"stage {stage} is {actual}, not {expected}"
            )
        return module

    def words(self, stage: int) -> Words:
        """The words of a stage in the run's checkpoint, whose digest isn't checked. Raises
        NotHereError, as reading does."""
        if self.checkpoint is None:
            raise NotHereError(f"{self.run.model.origin} is not on this machine")
        checkpoint, config = replace(self.checkpoint), self.config
        shapes = named_shapes(config, stage)
        names = list(shapes)

        def read(number: int, words: Tensor) -> Iterator[int]:
            try:
                yield from checkpoint.reading(config, stage, names[number], words.numpy())
            except (OSError, UnsupportedModelError) as error:
                raise NotHereError(f"{checkpoint.folder} can't be read: {error}") from error

        sizes = [words_in(shapes[name], packed_as(config, stage, name)) for name in names]
        return Words(sizes, read)

    def stage_or_zeros(self, stage: int, begun: bool = False) -> tuple[Stage, bool]:
        """The stage, and whether all but its adapters are zeros: this machine lacks the weights, or
        the run has `begun`. In that case the node gets another state, and drawing this one would
        take longer than all other preparation of a seat. A checkpoint is read even then: the node
        may have to give it to others."""
        if begun and self.config.lora is None and self.checkpoint is None:
            return empty_stage(self.config, stage, self.own), True
        try:
            return self.stage(stage), False
        except NotHereError as error:
            level = logging.INFO if self.checkpoint is None else logging.WARNING
            log.log(level, "%s: another node will send this one its weights", error)
            return self._adapted(empty_stage(self.config, stage, self.own), stage), True
