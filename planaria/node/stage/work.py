"""Arithmetic of one stage in torch, for an attempt.

After the constructor, every method is called in the compute thread, the only one to access this
state. Frames are bytes outside; they are decoded and encoded here.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.node.data.corpus import TRAIN, UNSCORED, VALIDATION
from planaria.node.data.mixture import (
    Data,
    count_scored,
    inputs_and_targets,
    training_windows,
)
from planaria.node.data.windows import microbatch_ids, samples_hash
from planaria.node.machine.compute import waiting_for_disk
from planaria.node.model.modules import BodyStage, EmbeddingStage
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile
from planaria.node.stage.activations import saved_bytes, working_bytes
from planaria.node.stage.memory_limit import DeviceRoom
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.transaction.attempt import NoRoomError, PassResult, Visit
from planaria.node.transaction.bounds import UNLIKE
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import (
    Codec,
    FiguresError,
    Form,
    Frame,
    NonFiniteError,
    WireError,
    check_forms,
)
from planaria.node.wire.tensors import decode, encode, finite

AHEAD = 2
"""Steps ahead whose samples are requested, if the data is remote."""


@dataclass
class _AttemptState:
    """What a stage keeps of the latest attempt, for its passes."""

    ballot: Ballot
    begin: pb.Begin
    saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output, by microbatch and position, for the backward pass; at position 0 targets
    and output."""
    homes: dict[int, pb.Home] = field(default_factory=dict)
    """Microbatches whose loss isn't known yet."""
    spent: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, by microbatch."""
    own: Tensor | None = None
    """The stage's gradient, before it was reduced."""
    touched: set[int] = field(default_factory=set)
    """Microbatches of which this node has computed something."""
    given_up: set[int] = field(default_factory=set)
    """Microbatches of which it hasn't, nor will."""
    doubles: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output of visits that another node computes, too."""
    scored: int | None = None
    """Scored tokens of the whole window, once counted."""


class TorchWork:
    """`attempt.StageWork` for a stage's module. Stage 0 needs the `corpus`."""

    def __init__(
        self,
        stage: int,
        module: EmbeddingStage | BodyStage,
        optimizer: StageOptimizer,
        run: RunFile,
        config: ModelConfig,
        corpus: Data | None = None,
        room: DeviceRoom | None = None,
    ) -> None:
        """`room`: shared by all users of the device."""
        self.optimizer, self.corpus = optimizer, corpus
        self.run, self.config, self.device = run, config, optimizer.weights.device
        codecs = {"activation": run.wire.activations, "gradient": run.wire.gradients}
        self._forms = {
            kind: frame_forms(config, run.training.microbatch, codec, kind)
            for kind, codec in codecs.items()
        }
        self._attempt = _AttemptState(NEVER, pb.Begin())
        self._room = room or DeviceRoom(self.device)
        self._needs = saved_bytes(run, config, stage) + (
            working_bytes(run, config, stage) if stage else 0
        )
        passes = stage_passes(module, run)
        if isinstance(module, EmbeddingStage):
            self._embed, self._loss = passes
        else:
            (self._blocks,) = passes
        if corpus is not None:
            self._windows = training_windows(corpus, run.seed, config.context, run.batches)

    def begin(self, ballot: Ballot, begin: pb.Begin) -> None:
        self._attempt = _AttemptState(ballot, begin)
        self.optimizer.zero_gradient()
        if self.corpus is not None and self.corpus.elsewhere and begin.step:
            self._expect_samples(self.corpus, begin.step)

    def _expect_samples(self, corpus: Data, step: int) -> None:
        context, training = self.config.context, self.run.training
        if self._evaluating:
            positions = range(training.validation_microbatches * training.microbatch)
            corpus.prefetch(VALIDATION, context, corpus.validation_ids(context, positions))
        else:
            for coming in range(step, step + AHEAD + 1):
                corpus.prefetch(TRAIN, context, self._windows.ids(coming))

    def drop(self) -> None:
        self.begin(NEVER, pb.Begin())

    def give_up(self, ballot: Ballot, microbatches: Collection[int]) -> list[int]:
        if ballot != self._attempt.ballot:
            return []
        given_up = sorted(set(microbatches) - self._attempt.touched)
        self._attempt.given_up.update(given_up)
        return given_up

    def rehearse(self) -> None:
        """Run a body stage's passes for one microbatch of zeros."""
        shape = self.run.training.microbatch, self.config.context, self.config.crossing
        with self._pass_context():
            y = self._blocks(torch.zeros(shape, device=self.device, requires_grad=True))
        y.backward(torch.zeros_like(y))

    # --- passes

    def _is_wanted(self, ballot: Ballot, visit: Visit) -> bool:
        """Whether a visit's pass is still wanted; if so, its microbatch counts as begun here."""
        if ballot != self._attempt.ballot or visit.microbatch in self._attempt.given_up:
            return False
        self._attempt.touched.add(visit.microbatch)
        return True

    @contextmanager
    def _room_for(self, visit: Visit) -> Iterator[None]:
        """Guard a visit's pass that keeps tensors on the device. Raises NoRoomError."""
        kept = len(self._attempt.saved)
        try:
            if visit.waits:
                self._room.check(kept, self._needs)
            with self._room.guarding(kept, visit.waits):
                yield
        except NoRoomError:
            self._attempt.touched.discard(visit.microbatch)  # another node may take it
            raise

    def embed(self, ballot: Ballot, visit: Visit) -> PassResult | None:
        if not self._is_wanted(ballot, visit):
            return None
        with self._room_for(visit):
            started = time.perf_counter()
            ids, targets, inputs = self._samples(visit.microbatch)
            self._attempt.homes[visit.microbatch] = pb.Home(
                microbatch=visit.microbatch, samples=len(ids), samples_hash=samples_hash(ids)
            )
            with self._pass_context():
                x = self._embed(*inputs)
            done = self._frame_onward("activation", visit, x, started)
        self._save(visit, targets, x)
        return done

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if not self._is_wanted(ballot, visit):
            return None
        if visit.at_head:
            with self._room.guarding(len(self._attempt.saved), waits=False):
                return self._head(visit, self._decode_valid(visit, peer, frame))
        with self._room_for(visit):
            x = self._decode_valid(visit, peer, frame)
            started = time.perf_counter()
            with self._pass_context():
                y = self._blocks(x.requires_grad_(not self._evaluating))
            done = self._frame_onward("activation", visit, y, started)
        self._save(visit, x, y)
        return done

    def backward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if not self._is_wanted(ballot, visit):
            return None
        with self._room.guarding(len(self._attempt.saved), waits=False):
            return self._backward(visit, self._decode_valid(visit, peer, frame))

    def _backward(self, visit: Visit, gradient: Tensor) -> PassResult:
        started = time.perf_counter()
        into, out = self._attempt.saved.pop((visit.microbatch, visit.position))
        if out.requires_grad:  # else the embedding is frozen
            out.backward(gradient)  # type: ignore[no-untyped-call]
        if visit.position == 0:
            self._spend(visit, started)
            done = PassResult()
        else:
            assert into.grad is not None
            done = self._frame_onward("gradient", visit, into.grad, started)
        return done._replace(seconds=self._attempt.spent.pop(visit.microbatch))

    def double(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if ballot != self._attempt.ballot:
            return None
        tensor, doubles = self._decode_valid(visit, peer, frame), self._attempt.doubles
        if frame.kind == "activation":
            with self._pass_context():
                y = self._blocks(tensor.requires_grad_())
            doubles[visit.key] = tensor, y
        else:
            into, out = doubles.pop(visit.key)
            (y,) = torch.autograd.grad(out, into, tensor)
        return self._frame_onward(frame.kind, visit, y, time.perf_counter())

    def difference(self, first: Frame, second: Frame) -> float:
        try:
            x, *beside = self._decode(first)
            y, *others = self._decode(second)
        except WireError:
            return UNLIKE
        if not all(map(torch.equal, beside, others)):
            return UNLIKE
        larger = max(x.norm().item(), y.norm().item())
        distance = (x - y).norm().item() / larger if larger else 0.0
        return distance if math.isfinite(distance) else UNLIKE

    def _head(self, visit: Visit, x: Tensor) -> PassResult:
        scored = 0 if self._evaluating else self._scored_in_window()
        started = time.perf_counter()
        targets, _ = self._attempt.saved[visit.microbatch, 0]
        with self._pass_context():
            loss = self._loss(x.requires_grad_(not self._evaluating), targets)
        home = self._attempt.homes.pop(visit.microbatch)
        home.loss, home.tokens = loss.item(), int((targets != UNSCORED).sum())
        if self._evaluating:
            del self._attempt.saved[visit.microbatch, 0]
            return PassResult(home=home)
        # Each scored token weighs the same in the window, on any node: gradients simply add up.
        (loss / max(1, scored)).backward()
        assert x.grad is not None
        return self._frame_onward("gradient", visit, x.grad, started)._replace(home=home)

    def _scored_in_window(self) -> int:
        """Scored tokens of the window, a function of the step and the data."""
        assert self.corpus is not None
        if self._attempt.scored is None:
            ids = self._windows.ids(self._attempt.begin.step)
            with waiting_for_disk():
                self._attempt.scored = count_scored(self.corpus, self.config.context, ids)
        return self._attempt.scored

    def _samples(self, microbatch: int) -> tuple[np.ndarray[Any, Any], Tensor, list[Tensor]]:
        """A microbatch's ids, targets and inputs; for block-causal attention also the beginnings of
        documents."""
        assert self.corpus is not None
        size = self.run.training.microbatch
        if self._evaluating:
            split, positions = VALIDATION, range(microbatch * size, (microbatch + 1) * size)
            ids = self.corpus.validation_ids(self.config.context, positions)
        else:
            split = TRAIN
            ids = microbatch_ids(self._windows.ids(self._attempt.begin.step), microbatch, size)
        with waiting_for_disk():
            context, apart = self.config.context, self.config.block_causal
            arrays = inputs_and_targets(self.corpus, split, context, ids, apart)
        x, y, *begins = (torch.from_numpy(array).to(self.device) for array in arrays)
        return ids, y, [x, *begins]

    def _decode_valid(self, visit: Visit, peer: str, frame: Frame) -> Tensor:
        """The tensor of a microbatch's frame, validated. Raises ComplaintError."""
        try:
            figures, *beside = self._decode(frame)
            if not (self._attempt.begin.non_finite or finite(figures)):
                raise NonFiniteError("it is not finite")
            if self.config.block_causal and beside and (beside[0][..., -1] > 1).any():
                raise FiguresError("a mark of a document's beginning is neither 0 nor 1")
        except WireError as error:
            reason = f"{frame.kind} of microbatch {visit.microbatch} from {peer}: {error}"
            raise ComplaintError(reason, [peer], error.cause) from error
        return join_features([figures, *beside], self.config)

    def _decode(self, frame: Frame) -> list[Tensor]:
        """The tensors of a microbatch's frame. Raises WireError."""
        check_forms(frame.descriptors, self._forms[frame.kind])
        return decode(frame.descriptors, frame.payload, self.device)

    def _frame_onward(self, kind: str, visit: Visit, tensor: Tensor, started: float) -> PassResult:
        figures, *_ = self._forms[kind]
        parts = split_features(tensor.detach(), self.config, kind)
        descriptors, buffers = encode(parts, figures.codec)
        onward = visit.after(kind)
        fields = {"microbatch": onward.microbatch, "position": onward.position}
        frame = Frame(kind, self._attempt.ballot, fields, descriptors, buffers)
        self._spend(visit, started)
        return PassResult(frame)

    def _spend(self, visit: Visit, since: float) -> None:
        self._attempt.spent[visit.microbatch] += time.perf_counter() - since

    def _save(self, visit: Visit, into: Tensor, out: Tensor) -> None:
        if not self._evaluating or visit.position == 0:
            self._attempt.saved[visit.microbatch, visit.position] = (into, out)

    @property
    def _evaluating(self) -> bool:
        return self._attempt.begin.kind == pb.Begin.EVALUATE

    def _pass_context(self) -> AbstractContextManager[Any]:
        if self._evaluating:
            return torch.no_grad()
        return autocast_of(self.run, self.device)

    # --- gradients

    def keep_gradient(self) -> int:
        own = self._attempt.own = self.optimizer.gradient.clone()
        return own.nbytes

    def restore_gradient(self) -> None:
        if self._attempt.own is not None:
            self.optimizer.gradient.copy_(self._attempt.own)
            self._attempt.own = None


# A token's figures are sent in a codec of [wire]. Its integer features, the id in a subspace and
# where documents begin, are sent as bytes: exactly, with any codec. Only figures have gradients.


def frame_forms(config: ModelConfig, rows: int, codec: Codec, kind: str) -> list[Form]:
    """Tensor forms of an "activation" or "gradient" of `rows` samples."""
    figures = Form("float32", (rows, config.context, config.written), codec)
    beside = Form("uint8", (rows, config.context, config.beside))
    return [figures, beside] if config.beside and kind == "activation" else [figures]


def split_features(x: Tensor, config: ModelConfig, kind: str) -> list[Tensor]:
    """Split float [B, T, crossing] into the tensors of such a frame."""
    figures, beside = x[..., : config.written], x[..., config.written :]
    return [figures, beside.byte()] if config.beside and kind == "activation" else [figures]


def join_features(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Inverse of `split_features`, float [B, T, crossing]; a gradient is 0 beside the figures."""
    figures, *beside = parts
    if not config.beside:
        return figures
    x = figures.new_zeros(*figures.shape[:-1], config.crossing)
    x[..., : config.written] = figures
    if beside:
        x[..., config.written :] = beside[0]
    return x


def stage_passes(module: EmbeddingStage | BodyStage, run: RunFile) -> list[Callable[..., Any]]:
    """The pass of a body stage, or embedding and loss of stage 0, as `run.training` says."""
    if isinstance(module, EmbeddingStage):
        passes: list[Callable[..., Any]] = [module.embed, module.loss]
    else:
        module.recompute = run.training.recompute
        passes = [module]
    return [torch.compile(each) for each in passes] if run.training.compile else passes


def autocast_of(run: RunFile, device: torch.device) -> AbstractContextManager[Any]:
    if run.training.precision == "float32":
        return nullcontext()  # not every device has autocast
    return torch.autocast(device.type, torch.bfloat16)
