"""A stage without a model: the port `Arithmetic` over sixteen numbers that record their commits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from attempt_swarm import VirtualWork
from torch import nn
from xxhash import xxh3_64_intdigest

from planaria.node.ports import Learned
from planaria.node.stage.lesson import boundary_tensor
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state.boundary import FetchedTensors
from planaria.node.state.relearn import PairSlice, PairSliceResult
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.twin import Twin
from planaria.node.transaction.attempt import PassResult, Visit
from planaria.node.transaction.commits import of_stage
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import (
    DamagedError,
    Descriptor,
    Form,
    Frame,
    NonFiniteError,
    WireError,
    buffers_of,
    check_forms,
)
from planaria.recovery import checkfree
from planaria.recovery.facts import INEXACT
from simulation.fingerprints import (
    SHAPE,
    TRAINED,
    fingerprint,
    numbers,
    read_chain,
    write_chain,
)

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.node import Node, Seat

CPU = torch.device("cpu")
CROSSING = Form("float32", (1, 2, 8))
"""The form of tensors that cross a boundary."""


def row(stage: int) -> StageOptimizer:
    """The stage's optimizer, with its weights at step 0."""
    module = nn.Linear(*SHAPE, bias=False)
    optimizer = StageOptimizer(module, CPU)
    optimizer.weights.zero_()
    optimizer.weights[TRAINED] = numbers("initial", stage) / 65536
    return optimizer


class Work(VirtualWork):
    """Adds numbers to the stage's gradient that identify the microbatch. In a step that overflows,
    the first number is infinite."""

    def __init__(self, owner: Stage) -> None:
        self.owner = owner
        self.step = 0
        self.lets_non_finite_through = self.tainted = False  # tainted: by its last input
        super().__init__(owner.name, owner.stage)
        self.gradient = owner.gradient.numpy()

    def begin(self, ballot: Ballot, begin: pb.Begin) -> None:
        super().begin(ballot, begin)
        self.step, self.lets_non_finite_through = begin.step, begin.non_finite
        if ballot != NEVER:
            self.owner.cluster.check_start(self.owner.seat, ballot, begin)

    def _add(self, microbatch: int, *parts: object) -> None:
        part = "head" if parts[0] == "head" else "stage"
        self.gradient[TRAINED] += contribution(self.step, self.stage, microbatch, part).numpy()
        if self.tainted or self.owner.cluster.overflows(self.step, self.stage):
            self.gradient[0] = np.inf

    def embed(self, ballot: Ballot, visit: Visit) -> PassResult | None:
        self.tainted = False
        return super().embed(ballot, visit)

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        done = super().forward(ballot, visit, peer, frame)
        if done is not None and visit.at_head and (self.tainted or self._spoils()):
            home = done.home or self.homes[visit.microbatch]
            home.loss = math.nan
        return done

    def _decoded(self, peer: str, frame: Frame) -> bytes:
        """Checks and decodes a frame, as node/wire/tensors.py does larger ones."""
        payload = b"".join(buffers_of(frame.payload))
        try:
            check_forms(frame.descriptors, [CROSSING])
            if xxh3_64_intdigest(payload) != frame.descriptors[0].checksum:
                raise DamagedError("its checksum is another one")
            values = np.frombuffer(payload, np.float32)
            self.tainted = not np.isfinite(values[0])
            if self.tainted and not self.lets_non_finite_through:
                raise NonFiniteError("it is not finite")
        except WireError as error:
            reason = f"{frame.kind} from {peer}: {error}"
            raise ComplaintError(reason, [peer], error.cause) from error
        return bytes(16) if self.tainted else values.astype(np.uint8).tobytes()

    def _onward(self, kind: str, visit: Visit, x: bytes) -> PassResult:
        done = super()._onward(kind, visit, x)
        assert done.frame is not None
        values = np.frombuffer(b"".join(buffers_of(done.frame.payload)), np.uint8)
        payload = values.astype(np.float32)
        if self.owner.cluster.miscomputes(self.owner.host):
            payload = (payload + 1) % 256
        if self.tainted or self._spoils():
            payload[:] = np.nan
        done.frame.payload = payload.tobytes()
        checksum = xxh3_64_intdigest(done.frame.payload)
        done.frame.descriptors = [Descriptor(*CROSSING, checksum, payload.nbytes)]
        return done

    def _spoils(self) -> bool:
        return self.owner.cluster.spoils(self.owner.host)


def contribution(step: int, stage: int, microbatch: int, part: str) -> torch.Tensor:
    """float32 [8]: what a microbatch of this step adds to the stage's gradient."""
    values = numbers("gradient", step, stage, microbatch, part)
    values[0] = 0.0
    return values


class ChainedTwin(Twin):
    """A twin whose weights hold the chain of its commits."""

    cluster: Cluster

    def apply(self, commit: pb.Commit, lr: float) -> None:
        before, chain = self.state.id, read_chain(self.optimizer.weights)
        super().apply(commit, lr)
        if self.state.id != before:
            write_chain(self.optimizer.weights, after(chain, commit))
            self.cluster.twin_applied(self)


def after(chain: bytes, commit: pb.Commit) -> bytes:
    return fingerprint(chain, hash_of(commit) + commit.signature)


class Stage:
    """The state and the arithmetic of one seat's stage, in its compute thread."""

    seat: Seat
    lacking = 0

    def __init__(self, node: Node, name: str, stage: int) -> None:
        self.name, self.stage = name, stage
        self.cluster, self.host = node.cluster, node.process.host
        self.optimizer, has = row(stage), self.cluster.hosts[self.host].origin
        self.weightless, self.origin = not has, has and self.cluster.from_checkpoint
        if self.weightless:
            self.optimizer.weights.zero_()
        self.tensors = dict(self.optimizer.state())
        self.gradient = self.optimizer.gradient
        self.lineage = self.step = 0
        self.void = False  # overwritten by weights that aren't fit to train yet
        self.corrupted = False  # the weights or moments aren't what the commits made
        self.misapplies = False  # makes the next update wrong
        self.last_digest = b""  # the newest digest taken
        self.work = Work(self)
        self._reduced = self.omega = 0.0

    @property
    def chain(self) -> bytes:
        return read_chain(self.optimizer.weights)

    def digest(self) -> bytes:
        self.last_digest = self.optimizer.digest()
        return self.last_digest

    def corrupt(self) -> None:
        self.corrupted = True
        chosen = self.cluster.world.random
        moment = chosen.choice([self.optimizer.first_moment, self.optimizer.second_moment])
        moment = moment[self.optimizer.in_turn()]  # others are found once they have done harm
        wrong = chosen.choice([self.optimizer.weights[TRAINED], moment])
        wrong[chosen.randrange(len(wrong))] += 1.0

    def reduced(self) -> float:
        self._reduced = self.optimizer.squared_norm()
        return self._reduced

    def replace_gradient(self, gradient: torch.Tensor) -> float:
        self.gradient.copy_(gradient)
        return self.reduced()

    def apply(self, commit: pb.Commit, lr: float, beside: torch.Tensor | None = None) -> Learned:
        self.cluster.check_apply(self.seat, commit)
        chain = self.chain  # an update from wrong moments changes the chain, too
        if not commit.skipped:
            scale = of_stage(commit.lr_scale, self.stage)
            self.optimizer.step(lr * scale, of_stage(commit.clip_scale, self.stage))
            self.omega = self._reduced
        if self.misapplies and not commit.skipped:
            self.misapplies = False
            self.corrupt()
        made = self.lesson_made() if beside is not None else 0
        self.cluster.check_relearned(self.seat, commit, made)
        if beside is not None:
            self.optimizer.weights.add_(beside)
        write_chain(self.optimizer.weights, after(chain, commit))
        self.step = commit.step
        self.optimizer.zero_gradient()
        self.cluster.check_applied(self.seat, commit)
        return self._learned()

    def _learned(self) -> Learned:
        return Learned(self.digest(), self.omega, self.optimizer.steps)

    def initial_state(self, stage: int, lineage: int) -> StageState:
        if not self.cluster.hosts[self.host].origin:
            raise ComplaintError("the checkpoint that the run begins from is not on this machine")
        made = StateId(stage, lineage, step=0, made=NEVER)
        tensors = dict(row(stage).state())
        return StageState(made, tensors, 0.0, 0, pb.Commit(), 0)

    def checkpoint_state(self, stage: int) -> StageState:
        initial = self.initial_state(stage, 0)
        return replace(initial, tensors={"weights": initial.tensors["weights"]})

    def take_frozen_weights(self, weights: torch.Tensor, giver: str) -> None:
        raise AssertionError("all that is here is trained")

    def put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> Learned:
        self.cluster.check_sources(self.seat, sync, states)
        came = {name: tensor.clone() for name, tensor in states[0].tensors.items()}
        if sync.method in INEXACT:
            stages = sorted({source.stage for source in sync.sources})
            sources = [
                checkfree.GuessSource(stage, state.tensors["weights"], state.omega)
                for stage, state in zip(stages, states, strict=True)
            ]
            weights, self.omega = checkfree.guess(self.stage, sync.method, sources)
            self.optimizer.load([("weights", weights)], 0)
        else:
            self.optimizer.load(states[0].tensors.items(), states[0].optimizer_step)
            self.omega = states[0].omega
        write_chain(self.optimizer.weights, self.cluster.chain_at(sync, states[0]))
        # Tensors of its own state that came are overwritten by now; `came` has copies of them.
        self._sync, self._state = sync, replace(states[0], tensors=came)
        self.corrupted = False
        if sync.lost:  # to be relearned before it counts as a state
            self.lineage, self.step, self.void = 0, 0, True
        else:
            self.learned()
        return self._learned()

    def learned(self) -> None:
        """Marks the weights in place as fit to train."""
        self.lineage, self.step, self.void = self._sync.lineage, self._sync.step, False
        self.cluster.check_installed(self.seat, self._sync, self._state)

    def lesson(self, fetched: FetchedTensors, lost: Collection[int]) -> Lesson:
        self.cluster.counts["lessons"] += 1
        self._lesson = Lesson(self, fetched)
        return self._lesson

    def lesson_made(self) -> int:
        """Updates of the lesson that are not in the stage's weights."""
        return self._lesson.made

    def boundary_tensor(self, frame: Frame) -> torch.Tensor:
        return boundary_tensor(frame)

    @property
    def age(self) -> Age:
        return Age(self.lineage, self.step)


class Lesson:
    """Relearning: each piece changes a copy of the weights a little, and lowers its error."""

    def __init__(self, stage: Stage, fetched: FetchedTensors) -> None:
        self._stage, self._fetched = stage, fetched
        self._copy = stage.optimizer.weights.clone()
        self._error = 1.0
        self.made = 0  # updates that are not in the stage's weights

    def start(self, piece: PairSlice, with_start: bool) -> list[torch.Tensor]:
        x = self._fetched.inputs[piece.pair][piece.first : piece.end].float()
        return [x, x] if with_start else [x]

    def pass_on(self, given: list[torch.Tensor], lr: float | None) -> list[torch.Tensor]:
        return given

    def pass_back(self, gradient: torch.Tensor) -> torch.Tensor:
        self._update()
        return gradient

    def end(
        self, piece: PairSlice, given: list[torch.Tensor], norm: float | None, lr: float | None
    ) -> PairSliceResult:
        output = self._fetched.outputs[piece.pair][piece.first : piece.end].float()
        assert given[0].shape == output.shape
        if lr is None:
            return PairSliceResult([], 1.0, self._error)
        self._update()
        return PairSliceResult([output], 1.0, None)

    def finish(self, undo: bool) -> None:
        if not undo:
            self._stage.optimizer.weights[TRAINED] = self._copy[TRAINED]
        self.made = 0
        self._stage.learned()

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._copy).all())

    def changed(self) -> torch.Tensor:
        difference = torch.zeros_like(self._copy)
        difference[TRAINED] = self._copy[TRAINED] - self._stage.optimizer.weights[TRAINED]
        return difference

    def renew(self) -> None:
        self.made = 0
        self._copy.copy_(self._stage.optimizer.weights)

    def _update(self) -> None:
        self._copy[TRAINED] *= 0.99
        self._error *= 0.97
        self.made += 1
