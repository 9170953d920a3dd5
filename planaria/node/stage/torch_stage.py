"""The port `Arithmetic` with torch: one stage's module, its optimizer, and their results."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from planaria.bootstrap.registry_pb2 import CHECKSUM
from planaria.node.data.corpus import UNSCORED
from planaria.node.data.mixture import Data
from planaria.node.data.tokenizer import read_part
from planaria.node.model.architecture import Architecture
from planaria.node.model.checkpoint import Checkpoint, digest_of, first_few
from planaria.node.model.layout import Weight, counterparts
from planaria.node.model.lora import Frozen
from planaria.node.model.modules import (
    BodyStage,
    EmbeddingStage,
    Stage,
    build_stage,
    copy_with,
)
from planaria.node.model.quantized import slots, words_of
from planaria.node.ports import Learned
from planaria.node.stage.initial import InitialStages, NotHereError
from planaria.node.stage.lesson import StageLesson, boundary_tensor
from planaria.node.stage.memory_limit import DeviceRoom
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.work import TorchWork
from planaria.node.state.boundary import FetchedTensors
from planaria.node.state.stage_state import TENSORS, StageState, StateId
from planaria.node.state.twin import Twin, next_stage
from planaria.node.transaction.commits import of_stage
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import Frame
from planaria.recovery import checkfree
from planaria.recovery.facts import ANEW, INEXACT, ORIGIN, PRETRAINED

if TYPE_CHECKING:
    from planaria.node.agent import Agent

log = logging.getLogger("planaria")


class TorchStage:
    """One stage on `device`, in its state before the first step. Stage 0 needs the `corpus`. It
    is `weightless` if the run's checkpoint isn't on this machine; without one, if it has `begun`.

    It is made and used in the compute thread, except the sizes of its tensors.
    """

    def __init__(
        self,
        stage: int,
        beginning: InitialStages,
        device: torch.device,
        corpus: Data | None = None,
        begun: bool = False,
        room: DeviceRoom | None = None,
    ) -> None:
        """`room`: shared by all stages of a node."""
        run, config, checkpoint, _ = beginning
        self.stage, self.run, self.config = stage, run, config
        self._device, self._beginning = device, beginning
        self._folders = [] if corpus is None else [corpus.path]
        self._folders += [] if checkpoint is None else [checkpoint.folder]
        module, self.weightless = self._beginning.stage_or_zeros(stage, begun)
        self.origin = checkpoint is not None and not self.weightless
        self._module = module.to(device)
        bf16 = run.training.precision == "bf16"
        self._base = None if config.lora is None else Frozen(self._module, bf16)
        self.optimizer = StageOptimizer.of_run(self._module, device, run)
        self.tensors = dict(self.optimizer.state())
        self.gradient = self.optimizer.gradient
        self.work = TorchWork(stage, self._module, self.optimizer, run, config, corpus, room)
        self._reduced_norm = self._omega = 0.0
        self._other: tuple[weakref.ref[Tensor], Stage] | None = None  # cached

    def rehearse(self) -> None:
        """Run once whatever takes longer the first time. The stage must be discarded afterwards."""
        self.work.rehearse()
        self.optimizer.step(0.0)
        self.optimizer.digest()

    def digest(self) -> bytes:
        return self.optimizer.digest()

    def reduced(self) -> float:
        self._reduced_norm = self.optimizer.squared_norm()
        return self._reduced_norm

    def replace_gradient(self, gradient: Tensor) -> float:
        self.gradient.copy_(gradient)
        return self.reduced()

    def apply(self, commit: pb.Commit, lr: float, beside: Tensor | None = None) -> Learned:
        if not commit.skipped:
            scale = of_stage(commit.lr_scale, self.stage)
            self.optimizer.step(lr * scale, of_stage(commit.clip_scale, self.stage))
            self._omega = self._reduced_norm
        if beside is not None:
            self.optimizer.weights.add_(beside)
        self.optimizer.zero_gradient()
        return self._learned()

    def _learned(self) -> Learned:
        return Learned(self.digest(), self._omega, self.optimizer.steps)

    def initial_state(self, stage: int, lineage: int) -> StageState:
        if self._base is None:
            weights = self._initial_weights(stage)
        else:
            weights = self._beginning.adapters(stage)
        moments = TENSORS[1 : self.config.tensors_in(stage)]
        tensors = {"weights": weights} | {name: torch.zeros_like(weights) for name in moments}
        return StageState(_initial_id(stage, lineage), tensors, 0.0, 0, pb.Commit(), 0)

    def checkpoint_state(self, stage: int) -> StageState:
        if self._base is None or stage != self.stage or self.weightless:
            words = self._beginning.words(stage)
        else:
            words = self._base.words()
        tensors = {"weights": torch.empty(words.size, device="meta")}
        id = _initial_id(stage, 0)
        return StageState(id, tensors, 0.0, 0, pb.Commit(), 0, read=words.between)

    def _initial_weights(self, stage: int) -> Tensor:
        """Flat initial weights, float32 [n] on the CPU. Raises ComplaintError."""
        try:
            module = self._beginning.base(stage)
        except NotHereError as error:
            raise ComplaintError(str(error)) from error
        return torch.cat([words_of(slot) for slot in slots(module)])

    @property
    def lacking(self) -> int:
        return self._base.size if self._base is not None and self.weightless else 0

    def take_frozen_weights(self, weights: Tensor, giver: str) -> None:
        assert self._base is not None
        self._check_origin(weights, giver)
        self._base.put(weights.to(self._device))
        self.weightless = False

    def put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> Learned:
        if sync.method in (ORIGIN, PRETRAINED) and self._base is None:
            (state,), (source,) = states, sync.sources
            self._check_origin(state.tensors["weights"], source.node)
        if sync.method not in INEXACT or sync.method == ANEW:
            (state,) = states
            self.optimizer.load(state.tensors.items(), state.optimizer_step)
            self._omega = state.omega
            return self._learned()
        stages = sorted({source.stage for source in sync.sources})
        sources = [
            checkfree.GuessSource(stage, state.tensors["weights"], state.omega)
            for stage, state in zip(stages, states, strict=True)
        ]
        weights, self._omega = guess_stage(self._beginning, self.stage, sync.method, sources)
        self.optimizer.load([("weights", weights)], 0)
        return self._learned()

    def _check_origin(self, weights: Tensor, giver: str) -> None:
        """Check that these are the run's initial weights. Raises ComplaintError."""
        content = self.run.model.content or ()
        if self.stage >= len(content) or digest_of([weights.cpu().numpy()]) != content[self.stage]:
            raise ComplaintError(
                f"the weights of stage {self.stage} from {giver} are not those of the checkpoint "
                "that the run begins from",
                [giver],
                CHECKSUM,
            )

    def lesson(self, fetched: FetchedTensors, lost: Collection[int]) -> StageLesson:
        assert isinstance(self._module, BodyStage), "stage 0 is not guessed"
        bf16 = self.run.training.precision == "bf16"
        return StageLesson(self._module, self.optimizer, fetched, lost, bf16)

    @torch.no_grad()
    def evaluate(
        self, shown: Sequence[Tensor], head: bool, weights: Tensor | None = None
    ) -> Tensor:
        forms = self._input_forms(head, len(shown))
        if [(x.dtype, x.shape[2:]) for x in shown] != forms or any(x.dim() < 2 for x in shown):
            shapes = " and ".join(f"{x.dtype} {list(x.shape)}" for x in shown)
            raise ValueError(f"stage {self.stage} can't evaluate {shapes}")
        rows, length = shown[0].shape[:2]
        if not 0 < rows <= self.run.training.microbatch:
            raise ValueError(f"{rows} rows, not 1 to {self.run.training.microbatch}")
        if not 0 < length <= self.config.context:
            raise ValueError(f"{length} tokens, not 1 to {self.config.context}")
        if any(x.shape[:2] != (rows, length) for x in shown):
            raise ValueError("the inputs have different rows or tokens")
        for x in (shown[1:] if head else shown[:1]) if self.stage == 0 else ():
            tokens = x[x != UNSCORED] if head else x  # of targets
            if ((tokens < 0) | (tokens >= self.config.vocabulary)).any():
                raise ValueError(f"a token outside the vocabulary of {self.config.vocabulary}")
        try:
            module = self._module if weights is None else self._module_with(weights)
            x, *beside = (tensor.to(self._device) for tensor in shown)
            if not isinstance(module, EmbeddingStage):
                y: Tensor = module(x)
                return y
            if not head:
                return module.embed(x, *(begins != 0 for begins in beside))
            return module.loss(x, *beside).reshape(1) if beside else module.logits(x[:, -1:])
        except RuntimeError as error:  # out of memory, for example
            raise ValueError(f"stage {self.stage} can't evaluate it: {error}") from error

    def tokenizer_part(self, name: object, first: object) -> Tensor:
        part = bytearray(read_part(self._folders, name, first))
        return torch.from_numpy(np.frombuffer(part, np.uint8))

    def _input_forms(self, head: bool, count: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Expected dtypes, and shapes without rows and tokens, of an evaluation's inputs. The
        second input is targets for the head, or document starts for block-causal attention."""
        inner: tuple[torch.dtype, tuple[int, ...]] = (torch.float32, (self.config.crossing,))
        tokens: tuple[torch.dtype, tuple[int, ...]] = (torch.int64, ())
        first = inner if self.stage > 0 or head else tokens
        beside = self.stage == 0 and count > 1 and (head or self.config.block_causal)
        return [first, tokens] if beside else [first]

    def _module_with(self, weights: Tensor) -> Stage:
        """The stage's torch module with other weights, float32 [n]; cached while they exist."""
        if self._other is None or self._other[0]() is not weights:
            module = copy_with(self._module, weights.data.to(self._device))
            self._other = weakref.ref(weights, self._drop_other), module
        return self._other[1]

    def _drop_other(self, dropped: weakref.ref[Tensor]) -> None:
        if self._other is not None and self._other[0] is dropped:
            self._other = None

    def boundary_tensor(self, frame: Frame) -> Tensor:
        return boundary_tensor(frame)


def guess_stage(
    beginning: InitialStages, stage: int, method: str, sources: Sequence[checkfree.GuessSource]
) -> tuple[Tensor, float]:
    """`checkfree.guess` of each tensor that all sources have in its shape, at its relative depth.
    Others begin anew, and are named in the log. A source's ω counts in relation to its layers."""
    config, placed, lacking = beginning.config, [], dict[str, Weight]()
    for source in sources:
        rows = counterparts(config, stage, source.stage)
        lacking |= {own.name: own for own, match in rows if match is None}
        weights = source.weights[: sum(own.size for own, _ in rows)]
        if any(match is None or match.first != own.first for own, match in rows):
            parts = [weights.new_zeros(own.size) for own, _ in rows]
            for part, (_, match) in zip(parts, rows, strict=True):
                if match is not None:
                    part.copy_(source.weights[match.first :][: match.size])
            weights = torch.cat(parts)
        share = len(config.layers_of(stage)) / len(config.layers_of(source.stage))
        placed.append(source._replace(weights=weights, omega=source.omega * share))
    weights, omega = checkfree.guess(stage, method, placed)
    if lacking:
        initial = build_stage(config, stage, beginning.run.seed, beginning.own)
        anew = torch.cat([part.detach().flatten() for part in initial.parameters()])
        for own in lacking.values():
            weights[own.first :][: own.size] = anew[own.first :][: own.size]
        log.warning(
            "stage %d: %d of %d tensors begin anew, since not all stages that it is estimated from "
            "have them in the same shape: %s",
            *(stage, len(lacking), len(rows), first_few(list(lacking))),
        )
    return weights, omega


def _initial_id(stage: int, lineage: int) -> StateId:
    """Id of the state before the first step."""
    return StateId(stage, lineage, step=0, made=NEVER)


def make_twin(
    seat: Agent,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
    own: Architecture | None = None,
) -> Twin:
    """A twin of the next stage, in its state at step 0. Called in the compute thread. Raises
    NotHereError."""
    twin_stage = next_stage(seat.stage, seat.config.stages)
    module = InitialStages(seat.run, seat.config, checkpoint, own).stage(twin_stage).to(device)
    return Twin(
        node=seat.node,
        stage=seat.stage,
        stages=seat.config.stages,
        optimizer=StageOptimizer.of_run(module, device, seat.run),
        exchanges=seat.exchanges,
        send=seat.send,
        tensors=tensors,
    )
