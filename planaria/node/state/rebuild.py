"""Gets a node the state of its stage, by the method that the driver has chosen."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planaria.node.report.events import Fetching, Origin
from planaria.node.state.background_relearning import BackgroundRelearning
from planaria.node.state.boundary import WantedTensors
from planaria.node.state.relearn import RelearningBlock, RelearningCourse, RelearningTerms
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import WEIGHTS, Delivery, WantedState
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.recovery.facts import ANEW, INEXACT, ORIGIN, PRETRAINED, SEEDED
from planaria.recovery.relearning import pass_count, peak_rate, samples_at_a_time

if TYPE_CHECKING:
    from planaria.node.agent import Agent

log = logging.getLogger("planaria")

HELD: Final = {
    "snapshot": "snapshot",
    "deposit": "deposit",
    "redundant": "redundant",
    ORIGIN: ORIGIN,
    PRETRAINED: ORIGIN,
}
"""Methods that fetch a holding of another stage's state from a node, and the kind of holding."""
FROM_FILES: Final = ("save", "checkpoint")
REPORT_PERIOD: Final = 0.2  # seconds
LOGGED_AFTER: Final = 5.0  # seconds of a transfer, then after twice as many each time
BOUNDARY_PATIENCE: Final = 15.0  # seconds to wait for boundary tensors


class Rebuilt(NamedTuple):
    """What a rebuild of a stage's state has produced."""

    synced: pb.Synced
    state: StageState
    relearning_task: BackgroundRelearning | None = None  # the rest of the relearning


def counted_as_of(step: int, state: StageState) -> StageState:
    """The state, to count as of `step`. It may be of a later one that the run has undone; then
    nothing in it is later any more, as in any state of that step."""
    return replace(
        state,
        boosted_at=min(state.boosted_at, step),
        optimizer_step=min(state.optimizer_step, step),
        last=state.last if state.last.step <= step else pb.Commit(),
    )


class Rebuilding:
    """Gets this node's seat, or its twin, a state."""

    def __init__(self, seat: Agent) -> None:
        self.exchanges, self.arithmetic = seat.exchanges, seat.arithmetic
        self.tell = seat.record.tell
        self.run, self.config = seat.run, seat.config
        self.member, self.stage, self.holdings = seat.member, seat.member.stage, seat.holdings
        self.states, self.boundary, self.relearning = seat.states, seat.crossings, seat.relearning
        self.own_state, self.account = seat.committed_state, seat.account
        self.fetched = 0  # bytes, of the state that comes or has come

    async def rebuild(self, ballot: Ballot, sync: pb.Sync) -> Rebuilt | None:
        """Gets the seat its stage's state, in place when this returns; None: no longer wanted.

        Raises ComplaintError when it can't be done; report that to the driver.
        """
        compute, started = self.exchanges.compute, self.exchanges.now
        self.fetched = 0
        frozen_bytes = await self._fetch_frozen(ballot, sync)
        deliveries = await self._fetch_sources(ballot, sync)
        states = [counted_as_of(sync.step, delivery.state) for delivery in deliveries]
        put_in_place = partial(self.arithmetic.put_in_place, sync, states)
        relearned: pb.Relearned | None = None
        relearning_task: BackgroundRelearning | None = None
        if sync.lost and self.member.voided(ballot):
            learned = await compute(put_in_place)
            relearned, relearning_task = await self._relearn(ballot, sync)
            learned = learned._replace(digest=await compute(self.arithmetic.digest))
        if not self.member.arrived(ballot):
            return None
        if relearned is None:
            learned = await compute(put_in_place)
        synced = pb.Synced(
            step=sync.step,
            method=sync.method,
            sources=sync.sources,
            fetched_bytes=frozen_bytes + sum(delivery.bytes for delivery in deliveries),
            seconds=self.exchanges.now - started,
            digest=learned.digest,
            relearned=relearned,
        )
        # The state may be older; it counts as of the step of `sync` from now on.
        last = sync.last if sync.HasField("last") else states[0].last
        state = StageState(
            id=StateId.after(last, self.stage, sync.lineage, sync.step),
            tensors=self.arithmetic.tensors,
            omega=learned.omega,
            boosted_at=sync.step if sync.method in INEXACT else states[0].boosted_at,
            last=last,
            optimizer_step=learned.optimizer_step,
        )
        return Rebuilt(synced, state, relearning_task)

    async def rebuild_twin(self, ballot: Ballot, sync: pb.Sync) -> pb.Synced | None:
        """As `rebuild`, for the twin of the next stage; this node's own state stays as it is."""
        twin = self.holdings.twin
        assert twin is not None
        self.fetched = 0
        (delivery,) = await self._fetch_sources(ballot, sync)
        if not self.member.arrived(ballot):
            return None
        await self.exchanges.compute(partial(twin.load, delivery.state))
        return pb.Synced(
            step=sync.step,
            method=sync.method,
            sources=sync.sources,
            fetched_bytes=delivery.bytes,
            digest=await self.exchanges.compute(self.arithmetic.digest),
        )

    # --- sources

    async def _fetch_frozen(self, ballot: Ballot, sync: pb.Sync) -> int:
        """Fetch the stage's frozen weights, if they are missing; returns the bytes fetched."""
        lacking = self.arithmetic.lacking
        if not lacking:
            return 0
        wanted = WantedState(self.stage, Age(0, 0), {WEIGHTS: lacking}, kind=ORIGIN, ballot=ballot)
        deadline, report = self.run.swarm.progress, self._progress_report(sync, 0)
        (delivery,) = await self.exchanges.together(
            [self.states.fetch(wanted, [sync.giver], deadline, report)]
        )
        weights = delivery.state.tensors[WEIGHTS]
        await self.exchanges.compute(
            partial(self.arithmetic.take_frozen_weights, weights, sync.giver)
        )
        return delivery.bytes

    async def _fetch_sources(self, ballot: Ballot, sync: pb.Sync) -> list[Delivery]:
        """Gets the states to make the new one from: one of each source stage, in order."""
        if sync.method in ("memory", "joiner"):
            return [Delivery(self._state_in_memory(sync), bytes=0)]
        if sync.method == WEIGHTS:
            arrived = self._arrived_weights(sync)
            return [Delivery(arrived, arrived.bytes)]
        adapters = self.run.training.lora is not None
        from_checkpoint = sync.method == ORIGIN and not adapters
        at_start = sync.method in FROM_FILES and sync.step == 0
        here = self.member.origin and sync.method == PRETRAINED
        initialise = at_start or here or sync.method in (ANEW, ORIGIN, SEEDED)
        if from_checkpoint or not (initialise or sync.method in FROM_FILES):
            return await self._fetch_from_peers(ballot, sync)
        if initialise:
            initial = partial(self.arithmetic.initial_state, self.stage, sync.lineage)
            try:
                return [Delivery(await self.exchanges.compute(initial), bytes=0)]
            except ComplaintError:
                self.member.origin = False  # another node is to give it
                raise
        own = next(source for source in sync.sources if source.stage == self.stage)
        state = await self.holdings.load(own, sync.method)
        return [Delivery(state, state.bytes)]

    def _state_in_memory(self, sync: pb.Sync) -> StageState:
        """The state in place, to count as of another lineage. Raises ComplaintError."""
        own = self.own_state()
        source = next(source for source in sync.sources if source.node == self.member.node)
        if own.id.age != (source.lineage, source.step):
            raise ComplaintError(
                f"step {source.step} is requested, but step {own.id.step} is in memory"
            )
        return own

    def _arrived_weights(self, sync: pb.Sync) -> StageState:
        """The weights that had arrived when their last source was lost. Raises ComplaintError."""
        state = self.states.weights(self.stage)
        (source,) = sync.sources
        if state is None or state.id.age != (source.lineage, source.step):
            have = "none are here" if state is None else f"those of {state.id.step} are here"
            raise ComplaintError(f"weights of step {source.step} are requested, but {have}")
        return state

    async def _fetch_from_peers(self, ballot: Ballot, sync: pb.Sync) -> list[Delivery]:
        """Fetch each state from all its nodes at once. Methods that guess get weights only."""
        by_stage: dict[int, list[pb.Source]] = {}
        for source in sync.sources:
            by_stage.setdefault(source.stage, []).append(source)
        tensors = self.arithmetic.tensors
        if sync.method == "twin" and self.holdings.twin is not None:
            tensors = self.holdings.twin.state.tensors
        own = {name: tensor.numel() for name, tensor in tensors.items()}
        received = dict.fromkeys(by_stage, 0)
        report = self._progress_report(sync, self.fetched)
        report(0)

        def received_from(stage: int, size: int) -> None:
            received[stage] = size
            report(sum(received.values()))

        def fetch(stage: int, sources: list[pb.Source]) -> Coroutine[Any, Any, Delivery]:
            expected = own
            if sync.method in INEXACT and stage != self.stage and not self.config.alike:
                expected = dict.fromkeys(own, self.config.trained_in(stage))
            wanted = WantedState(
                stage,
                Age(sources[0].lineage, sources[0].step),
                expected,
                optimizer=sync.method not in (*INEXACT, ORIGIN),
                kind=HELD.get(sync.method, ""),
                ballot=ballot,
            )
            nodes = [source.node for source in sources]
            deadline = self.run.swarm.progress
            return self.states.fetch(wanted, nodes, deadline, partial(received_from, stage))

        return await self.exchanges.together(
            [fetch(stage, sources) for stage, sources in sorted(by_stage.items())]
        )

    def _progress_report(self, sync: pb.Sync, before: int) -> Callable[[int], None]:
        """A function that takes the bytes received so far, beside those received `before`, and
        reports them now and then."""
        started, reported_at, logged_after = self.exchanges.now, -math.inf, LOGGED_AFTER
        sources = tuple(Origin(node=source.node, stage=source.stage) for source in sync.sources)

        def report(size: int) -> None:
            nonlocal reported_at, logged_after
            now = self.exchanges.now
            self.fetched = before + size
            if now - reported_at < REPORT_PERIOD:
                return
            reported_at = now
            progress = Fetching(
                stage=self.stage,
                method=sync.method,
                sources=sources,
                bytes=size,
                seconds=now - started,
            )
            self.tell(progress)
            if progress.seconds >= logged_after:
                logged_after = 2 * progress.seconds
                log.info("%s", progress.sentence(self.member.node))
            self.account()

        return report

    # --- relearning a guess

    async def _relearn(
        self, ballot: Ballot, sync: pb.Sync
    ) -> tuple[pb.Relearned, BackgroundRelearning | None]:
        """Train the guess on what crossed the lost stages' boundaries in the last steps."""
        recovery, training = self.run.recovery, self.run.training
        joiners = {place.stage: place.node for place in sync.lost}
        wanted = WantedTensors(
            step=sync.step,
            steps=recovery.relearn.steps,
            stage=self.stage,
            lost=frozenset(joiners),
            microbatches=training.microbatches,
            shape=(training.microbatch, self.config.context, self.config.crossing),
            beside=self.config.beside,
        )
        neighbours = [place.node for place in sync.neighbours]
        fetched = await self.boundary.fetch(ballot, wanted, neighbours, BOUNDARY_PATIENCE)
        for complaint in fetched.complaints:
            log.warning("boundary tensors are missing for relearning: %s", complaint)
        seconds = recovery.relearn.seconds
        if sync.HasField("relearning"):
            seconds = min(seconds, sync.relearning)
        terms = RelearningTerms(
            samples=samples_at_a_time(recovery.relearn.tokens, self.config.context),
            passes=pass_count(recovery.relearn.passes, joiners),
            seconds=seconds,
            lr=peak_rate(recovery.relearn.lr, sync.step),
            patience=self.run.swarm.progress / 4,
            enough=recovery.relearn.enough if sync.goes_on and len(joiners) == 1 else 0.0,
            each_step=recovery.relearn.each_step,
            within=recovery.relearn.within,
        )
        block = RelearningBlock(ballot, self.stage, joiners)
        lesson = await self.exchanges.compute(
            partial(self.arithmetic.lesson, fetched, frozenset(joiners))
        )
        relearned = await self.relearning.run(block, lesson, fetched, terms)
        if not relearned.left:
            return relearned, None
        course = RelearningCourse(fetched.complete_pairs(), fetched.shape[0], terms)
        return relearned, BackgroundRelearning(lesson, course, relearned)
