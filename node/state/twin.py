"""The twin of the next stage: redundant computation, after Bamboo (Thorpe et al., NSDI 2023).

A node of stage s also holds stage s + 1 (stage L holds stage 0), and keeps it bit-identical: the
replicas of s + 1 send their reduced gradient to the nodes of s *before* either of them answers
Ready. So a commit finds both with the same gradient, and both apply it, whoever dies next.

Bamboo's node also computes the forward pass of what it holds, in the bubbles of its pipeline, and
keeps the results for the backward pass of a neighbour that dies within the step. Here a step whose
attempt fails is tried again whole, so the results are dropped: what is left is the state, which
takes over exactly, and the cost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from planaria.node.ports import Priority
from planaria.node.run_file import RunFile
from planaria.node.stage.model import EmbeddingStage, build_stage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.shape import ModelConfig
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.averaging import Abandoned, AveragingError, ReplicaLostError
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame, WireError
from planaria.node.wire.tensors import decode, encode

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE: Final = 1 << 20  # values of the gradient that travel in one frame: 4 MiB


class TwinError(AveragingError):
    """The next stage's gradient can't be had; the attempt has failed. `accused`: whose fault."""


class InComputeThread(Protocol):
    """Posts work at once; what is posted with the same priority runs in order."""

    def __call__(self, task: Callable[[], T], priority: Priority = ..., /) -> Awaitable[T]: ...


def next_stage(stage: int, stages: int) -> int:
    """Whose twin a node of `stage` holds, with body stages 1..`stages`."""
    return (stage + 1) % (stages + 1)


def servers(of: int, stages: int, members: Iterable[pb.Place]) -> dict[str, str]:
    """Who holds a twin of stage `of` -> which of its replicas sends the gradient there.

    Replica j of R, in the order of the ids, serves the holders k with k mod R = j.
    Raises ValueError when the stage has no member.
    """
    members = list(members)
    replicas = sorted(place.node for place in members if place.stage == of)
    holders = sorted(place.node for place in members if next_stage(place.stage, stages) == of)
    if not replicas:
        raise ValueError(f"stage {of} has no member to send its gradient to {holders}")
    return {holder: replicas[k % len(replicas)] for k, holder in enumerate(holders)}


class Twin:
    """The next stage, as a node holds it beside its own.

    `send_frame` queues a frame for a peer and says False when there is no way to it. Takes 16 bytes
    for each of the stage's parameters, and the gradient's 4 once more while it travels. `apply`,
    `forward` and `load` run in the compute thread, all else on one event loop.
    """

    def __init__(
        self,
        node: str,
        stage: int,
        config: ModelConfig,
        run: RunFile,
        device: torch.device,
        send_frame: Callable[[str, Frame], bool],
        in_compute_thread: InComputeThread,
    ) -> None:
        """`stage` is the node's own. At step 0 the twin is exact: weights follow from the seed."""
        self._node, self._own_stage, self._stages = node, stage, config.stages
        self._send_frame, self._in_compute_thread = send_frame, in_compute_thread
        self.stage = next_stage(stage, config.stages)
        module = build_stage(config, self.stage, run.seed).to(device)
        self.optimizer = StageOptimizer(module, device)
        self._forward: Callable[[torch.Tensor], torch.Tensor]
        self._forward = module.logits if isinstance(module, EmbeddingStage) else module
        if run.training.compile:
            self._forward = torch.compile(self._forward)
        # Not of the node's committed step: it is stale.
        initial = StateId(self.stage, lineage=0, step=0, made=NEVER)
        tensors = dict(self.optimizer.state(optimizer=True))
        self.state = StageState(initial, tensors, 0.0, 0, pb.Commit(), 0)
        self._reduced = (NEVER, 0.0)  # whose gradient is whole in the optimizer's; its squared norm
        self._running: _Gathering | None = None
        self._oldest = NEVER  # below it nothing has an effect
        self._early: dict[str, list[Frame]] = {}  # by sender, of one ballot each
        # What it costs
        self.forwards = 0
        self.forward_seconds = 0.0  # in the compute thread, most of them while it had nothing else
        self.critical_seconds = 0.0  # that Ready and the next step had to wait for the twin
        self.bytes_sent = 0  # of this node's gradient, to those who hold its stage's twin

    @property
    def memory_bytes(self) -> int:
        """Weights, gradient and both moments."""
        return 4 * self.optimizer.weights.nbytes

    # --- training

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next stage makes of this stage's output, float [B, T, dim] to the same.

        The twin of stage 0 gives the logits, float [B, T, vocabulary]: the targets, and with them
        the loss, are at the source.
        """
        started = time.perf_counter()
        y = self._forward(x)
        if y.is_cuda:
            torch.cuda.synchronize(y.device)  # the seconds are to be those of the work
        self.forwards += 1
        self.forward_seconds += time.perf_counter() - started
        return y

    async def exchange(
        self,
        ballot: Ballot,
        members: Sequence[pb.Place],
        gradient: torch.Tensor,
        squared_norm: float,
        deadline: float,
    ) -> None:
        """Send this stage's reduced `gradient` to who holds its twin, get the next stage's, and let
        the redundant forwards finish. Only then may the node answer Ready.

        `squared_norm` is the gradient's, `deadline` the seconds that each frame is waited for.
        Raises TwinError, ReplicaLostError, or Abandoned when a newer ballot has made this one void.
        """
        if ballot < self._oldest:
            raise Abandoned(f"ballot {ballot} is void since {self._oldest}")
        self.abandon(ballot)
        started = time.monotonic()
        server = servers(self.stage, self._stages, members)[self._node]
        parts = torch.split(self.optimizer.gradient, PIECE)
        running = self._running = _Gathering(ballot, self.stage, server, parts)
        early, self._early = self._early, {}
        for peer, frames in early.items():
            for frame in frames:
                self.on_frame(peer, frame)
        try:
            await self._serve(running, members, gradient, squared_norm)
            await self._gather(running, deadline)
            await self._compute(running, _nothing, Priority.BACKGROUND)
            self._reduced = (ballot, running.squared_norm)
        finally:
            if self._running is running:
                self._running = None
            self.abandon(Ballot(ballot.view, ballot.attempt + 1))
            self.critical_seconds += time.monotonic() - started

    async def _serve(
        self,
        running: _Gathering,
        members: Sequence[pb.Place],
        gradient: torch.Tensor,
        squared_norm: float,
    ) -> None:
        plan = servers(self._own_stage, self._stages, members)
        holders = [holder for holder, server in plan.items() if server == self._node]
        if not holders:
            return
        fields = {"squared_norm": squared_norm}
        for number, part in enumerate(torch.split(gradient.detach(), PIECE)):
            make = partial(_frame, running.ballot, fields | {"piece": number}, part)
            frame = await self._compute(running, make)
            for holder in holders:
                if not self._send_frame(holder, frame):
                    raise ReplicaLostError(
                        f"there is no link to {holder}, which holds a twin", [holder]
                    )
                self.bytes_sent += frame.size

    async def _gather(self, running: _Gathering, deadline: float) -> None:
        while running.missing:
            try:
                async with asyncio.timeout(deadline):
                    item = await running.inbox.get()
            except TimeoutError:
                raise TwinError(
                    f"{running.describe_missing()} from {running.server} did not come for "
                    f"{deadline:g} s",
                    [running.server],
                ) from None
            running.check()
            if item is None:
                continue
            peer, frame = item
            if peer != running.server:
                log.warning(
                    "dropped a gradient for the twin of stage %d from %s: %s is to send it",
                    *(self.stage, peer, running.server),
                )
                continue
            await self._compute(running, partial(running.absorb, frame))

    async def _compute(
        self, running: _Gathering, work: Callable[[], T], priority: Priority = Priority.CONTROL
    ) -> T:
        result = await self._in_compute_thread(work, priority)
        running.check()
        return result

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of kind "twin" has come. It waits for its exchange if that is to start yet; if it
        is over or void, the frame has no effect."""
        if self._running is not None and frame.ballot == self._running.ballot:
            self._running.inbox.put_nowait((peer, frame))
        elif frame.ballot >= self._oldest:
            self._keep_early(peer, frame)

    def _keep_early(self, peer: str, frame: Frame) -> None:
        kept = self._early.setdefault(peer, [])
        if kept and frame.ballot < kept[0].ballot:
            return  # who has begun a newer attempt has given up the older ones
        if kept and frame.ballot > kept[0].ballot:
            kept.clear()
        size = sum(f.size for f in kept)
        if size + frame.size > 2 * self.optimizer.gradient.nbytes:  # some may come twice
            log.warning(
                "dropped a gradient from %s: %d bytes are kept, more than it can need", peer, size
            )
            return
        kept.append(frame)

    def abandon(self, before: Ballot) -> None:
        """Ballots older than `before` are void: their exchange raises Abandoned."""
        self._oldest = max(self._oldest, before)
        self._early = {
            peer: frames
            for peer, frames in self._early.items()
            if frames and frames[0].ballot >= self._oldest
        }
        if self._running is not None and self._running.ballot < self._oldest:
            self._running.void = True
            self._running.inbox.put_nowait(None)

    def apply(self, commit: pb.Commit, lr: float) -> None:
        """Apply the commit as the next stage does; a stale twin stays as it is.

        `lr` is the step's, before the stage's scale.
        """
        if commit.step != self.state.id.step + 1:
            return
        started = time.perf_counter()
        ballot, squared_norm = self._reduced
        assert ballot == Ballot.of(commit.ballot), f"{commit.step} without the gradient of {ballot}"
        if not commit.skipped:
            self.optimizer.step(lr * commit.lr_scale[self.stage], commit.clip_scale[self.stage])
        self.state = replace(
            self.state,
            id=StateId.after(commit, self.stage, self.state.id.lineage, commit.step),
            omega=self.state.omega if commit.skipped else squared_norm,
            last=commit,
            optimizer_step=self.optimizer.steps,
        )
        self.critical_seconds += time.perf_counter() - started

    # --- the state

    def load(self, state: StageState) -> None:
        """Take over what a replica of the next stage has served: that is the twin's state then.

        Raises ValueError when it isn't a state of that stage; nothing changes then.
        """
        self.optimizer.load(state.tensors.items(), state.optimizer_step)
        self.state = replace(state, tensors=self.state.tensors)


class _Gathering:
    """The next stage's reduced gradient on its way into the twin's."""

    def __init__(
        self, ballot: Ballot, stage: int, server: str, parts: Sequence[torch.Tensor]
    ) -> None:
        self.ballot, self.stage, self.server, self.parts = ballot, stage, server, parts
        self.missing = set(range(len(parts)))
        self.squared_norm = 0.0
        self.void = False
        self.inbox: asyncio.Queue[tuple[str, Frame] | None] = asyncio.Queue()  # None: wake up

    def check(self) -> None:
        """Raises Abandoned."""
        if self.void:
            raise Abandoned(f"ballot {self.ballot} is void: there is a newer one")

    def describe_missing(self) -> str:
        return (
            f"{len(self.missing)} of {len(self.parts)} pieces of stage {self.stage}'s gradient "
            "for its twin"
        )

    def absorb(self, frame: Frame) -> None:
        """In the compute thread. Raises TwinError for a frame that can't be right."""
        piece, squared_norm = frame.fields.get("piece"), frame.fields.get("squared_norm")
        if type(piece) is not int or not 0 <= piece < len(self.parts):
            raise self._complain(f"piece {piece!r} of {len(self.parts)}")
        if type(squared_norm) is not float or squared_norm < 0:
            raise self._complain(f"{squared_norm!r} as a squared norm")
        part = self.parts[piece]
        try:
            tensors = decode(frame.descriptors, frame.payload, part.device)
        except WireError as error:
            raise self._complain(f"damaged bytes: {error}") from error
        if [(t.dtype, t.shape) for t in tensors] != [(part.dtype, part.shape)]:
            found = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors)
            raise self._complain(f"{found or 'nothing'} for {part.dtype} {tuple(part.shape)}")
        part.copy_(tensors[0])  # once more does no harm: a link that broke sends again
        self.squared_norm = squared_norm
        self.missing.discard(piece)

    def _complain(self, what: str) -> TwinError:
        reason = f"{self.server} sent {what}, in a gradient for the twin of stage {self.stage}"
        return TwinError(reason, [self.server])


def _frame(ballot: Ballot, fields: dict[str, float], part: torch.Tensor) -> Frame:
    # A copy: what waits to be sent must not change, whatever becomes of the gradient.
    descriptors, payload = encode([part.clone()], "none")
    return Frame("twin", ballot, fields, descriptors, payload)


def _nothing() -> None:
    """Runs behind all that was posted before with its priority."""
