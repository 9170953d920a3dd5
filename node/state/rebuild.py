"""How a node without its stage's state gets one, by the method that the driver has chosen."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from planaria.node.report.event_log import EventLog
from planaria.node.report.events import Fetching, Origin
from planaria.node.run_file import RunFile
from planaria.node.stage.compute import ComputeThread
from planaria.node.stage.model import BodyStage, EmbeddingStage, build_stage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.shape import ModelConfig
from planaria.node.state.boundary import BoundaryClient, Wanted
from planaria.node.state.holdings import Holdings
from planaria.node.state.relearn import Block, Relearning, Terms
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import Delivery, StateClient
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.member import Member
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.looped import LoopedExchanges
from planaria.recovery import checkfree
from planaria.recovery.decide import INEXACT
from planaria.recovery.relearning import passes, peak

log = logging.getLogger("planaria")

HELD: Final = {"stage0-copy": "copy", "snapshot": "snapshot", "redundant": "redundant"}
"""Methods that fetch what a node holds of another stage, and the kind of that holding."""
FROM_FILES: Final = ("save", "checkpoint")
TELL_AGAIN: Final = 0.2  # seconds
BOUNDARY_PATIENCE: Final = 15.0  # seconds for boundary tensors to come


class Rebuilding:
    """Gets this node a state, or its twin one. All methods belong to the event loop."""

    def __init__(
        self,
        stage: int,
        run: RunFile,
        config: ModelConfig,
        module: EmbeddingStage | BodyStage,
        optimizer: StageOptimizer,
        member: Member,
        holdings: Holdings,
        compute: ComputeThread,
        exchanges: LoopedExchanges,
        states: StateClient,
        boundary: BoundaryClient,
        relearning: Relearning,
        events: EventLog,
    ) -> None:
        self.stage, self.run, self.config = stage, run, config
        self.module, self.optimizer, self.member = module, optimizer, member
        self.holdings, self.compute, self.exchanges = holdings, compute, exchanges
        self.states, self.boundary, self.relearning = states, boundary, relearning
        self.events = events

    async def rebuild(self, ballot: Ballot, sync: pb.Sync) -> tuple[pb.Synced, StageState] | None:
        """The new state, which is in place when this returns; None: it was no longer wanted.

        Raises TransferError, ComplaintError or RelearnError when it can't be done; then the driver
        has to be told.
        """
        now = asyncio.get_running_loop().time
        started = now()
        deliveries = await self._fetch(ballot, sync)
        states = [delivery.state for delivery in deliveries]
        relearned: pb.Relearned | None = None
        if sync.lost and self.member.voided(ballot):
            omega = await self.compute.run(partial(self._put_in_place, sync, states))
            relearned = await self._relearn(ballot, sync)
        if not self.member.arrived(ballot):
            return None
        if relearned is None:
            omega = await self.compute.run(partial(self._put_in_place, sync, states))
        digest = await self.compute.run(self.optimizer.digest)
        synced = pb.Synced(
            step=sync.step,
            method=sync.method,
            sources=sync.sources,
            fetched_bytes=sum(delivery.bytes for delivery in deliveries),
            seconds=now() - started,
            digest=digest,
            relearned=relearned,
        )
        # The state may be older; it counts as of the step of `sync` from now on.
        last = sync.last if sync.HasField("last") else states[0].last
        return synced, StageState(
            id=StateId.after(last, self.stage, sync.lineage, sync.step),
            tensors=dict(self.optimizer.state(optimizer=True)),
            omega=omega,
            boosted_at=sync.step if sync.method in INEXACT else states[0].boosted_at,
            last=last,
            optimizer_step=self.optimizer.steps,
        )

    async def rebuild_twin(self, ballot: Ballot, sync: pb.Sync) -> pb.Synced | None:
        """As `rebuild`, for the twin of the next stage; this node's own state stays as it is."""
        twin = self.holdings.twin
        assert twin is not None
        (delivery,) = await self._fetch(ballot, sync)
        if not self.member.arrived(ballot):
            return None
        await self.compute.run(partial(twin.load, delivery.state))
        digest = await self.compute.run(self.optimizer.digest)
        return pb.Synced(
            step=sync.step,
            method=sync.method,
            sources=sync.sources,
            fetched_bytes=delivery.bytes,
            digest=digest,
        )

    # --- from where

    async def _fetch(self, ballot: Ballot, sync: pb.Sync) -> list[Delivery]:
        """The states to make the new one of: of each source stage, in their order."""
        if sync.method not in FROM_FILES:
            return await self._fetch_from_peers(ballot, sync)
        if sync.step == 0:
            initial = await self.compute.run(partial(self._initial, sync.lineage))
            return [Delivery(initial, bytes=0)]
        own = next(source for source in sync.sources if source.stage == self.stage)
        state = await self.exchanges.outcome(self.holdings.load(own, sync.method))
        return [Delivery(state, state.bytes)]

    async def _fetch_from_peers(self, ballot: Ballot, sync: pb.Sync) -> list[Delivery]:
        """Each from all its nodes at once. Methods that guess get weights only."""
        by_stage: dict[int, list[pb.Source]] = {}
        for source in sync.sources:
            by_stage.setdefault(source.stage, []).append(source)
        there = dict.fromkeys(by_stage, 0)
        tell = self._fetching(sync)
        tell(0)

        def told(stage: int, size: int) -> None:
            there[stage] = size
            tell(sum(there.values()))

        return await asyncio.gather(
            *(
                self.states.fetch(
                    stage,
                    Age(sources[0].lineage, sources[0].step),
                    [source.node for source in sources],
                    sync.method not in INEXACT,
                    self.run.swarm.progress,
                    partial(told, stage),
                    ballot,
                    HELD.get(sync.method, ""),
                )
                for stage, sources in sorted(by_stage.items())
            )
        )

    def _fetching(self, sync: pb.Sync) -> Callable[[int], None]:
        """Takes the bytes that are there; says so now and then, for whoever watches."""
        now = asyncio.get_running_loop().time
        started, written = now(), -math.inf
        sources = tuple(Origin(node=source.node, stage=source.stage) for source in sync.sources)

        def tell(size: int) -> None:
            nonlocal written
            if now() - written >= TELL_AGAIN:
                written = now()
                self.events.write(
                    Fetching(
                        stage=self.stage,
                        method=sync.method,
                        sources=sources,
                        bytes=size,
                        seconds=written - started,
                    )
                )

        return tell

    def _initial(self, lineage: int) -> StageState:
        """What the stage was before the first step, in the compute thread."""
        module = build_stage(self.config, self.stage, self.run.seed)
        optimizer = StageOptimizer(module, torch.device("cpu"))
        tensors = dict(optimizer.state(optimizer=True))
        return StageState(
            StateId(self.stage, lineage, step=0, made=NEVER), tensors, 0.0, 0, pb.Commit(), 0
        )

    # --- what is made of it

    def _put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> float:
        """In the compute thread; returns the stage's ω. What guesses the weights starts Adam
        afresh, as published."""
        if sync.method not in INEXACT:
            (state,) = states
            self.optimizer.load(state.tensors.items(), state.optimizer_step)
            return state.omega
        stages = sorted({source.stage for source in sync.sources})
        sources = [
            checkfree.Trained(stage, state.tensors["weights"], state.omega)
            for stage, state in zip(stages, states, strict=True)
        ]
        kind = self.run.recovery.omega
        weights, omega = checkfree.guess(self.stage, sync.method, sources, kind)
        self.optimizer.load([("weights", weights)], 0)
        return omega

    async def _relearn(self, ballot: Ballot, sync: pb.Sync) -> pb.Relearned:
        """Train the guess on what crossed the lost stages' boundaries in the last steps."""
        assert isinstance(self.module, BodyStage)
        recovery, training = self.run.recovery, self.run.training
        joiners = {place.stage: place.node for place in sync.lost}
        wanted = Wanted(
            step=sync.step,
            steps=recovery.relearn_steps,
            stage=self.stage,
            lost=frozenset(joiners),
            microbatches=training.microbatches,
            shape=(training.microbatch, self.config.context, self.config.dim),
        )
        neighbours = [place.node for place in sync.neighbours]
        fetched = await self.boundary.fetch(ballot, wanted, neighbours, BOUNDARY_PATIENCE)
        for complaint in fetched.complaints:
            log.warning("relearning without some boundary tensors: %s", complaint)
        terms = Terms(
            samples=recovery.relearn_samples,
            passes=passes(recovery.relearn_passes, joiners),
            seconds=recovery.relearn_seconds,
            lr=peak(recovery.relearn_lr, sync.step),
            bf16=training.precision == "bf16",
            patience=self.run.swarm.progress / 4,
        )
        block = Block(ballot, self.stage, joiners)
        return await self.relearning.run(block, self.module, self.optimizer, fetched, terms)
