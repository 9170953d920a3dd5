"""Simulates a whole run: steps, losses, rebuilds and joins, until its steps are committed.

Between two events that change the swarm, all steps are alike. So a step is simulated once for each
set of nodes (simulator/step.py), and counted as often as needed. The seconds that losses and
joiners cost are in closed form (simulator/reaction.py). recovery/decide.py decides how a lost stage
is rebuilt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import simpy

from planaria.node.state.copies import snapshot_section
from planaria.recovery.decide import decide
from planaria.recovery.facts import (
    ANEW,
    ORIGIN,
    Decision,
    Held,
    Left,
    Rebuild,
    RollBack,
    Source,
    Stop,
)
from planaria.recovery.relearning import time_for
from planaria.recovery.snapshot import steps_between
from planaria_lab.simulator import reaction
from planaria_lab.simulator.churn import Churn, Lives, LostPlace
from planaria_lab.simulator.step import MeanStep, simulate_step
from planaria_lab.simulator.swarm import Group, Swarm, SwarmFiguresError, held_at

Events = Generator[simpy.Event, object, None]
IN_VAIN: Final = 10_000
"""Losses in a row without a committed step after which a run is given up."""
TIME_OVER: Final = "the time limit is reached"
"""Why a run ended at its limit of seconds."""
NOT_LATE: Final = 1e-9
"""Rounding error of a step's progress, as a share of the step. A finished step may seem unfinished
by it."""


@dataclass(frozen=True)
class Rebuilt:
    """How a stage was rebuilt that had lost all its nodes."""

    stage: int
    method: str
    same_weights: bool  # the weights equal the lost ones
    fallback: bool  # not the policy's first choice


@dataclass(frozen=True)
class Loss:
    """A loss of nodes at about the same time, and its consequences. Times in seconds."""

    time: float  # of the first lost node, since the run's begin
    step: int  # that was under way
    nodes: int  # number of lost nodes that trained
    rebuilt: tuple[Rebuilt, ...]  # empty: every stage had replicas left
    detected: float  # from the loss until the driver had a view without the first lost nodes
    waited: float  # from then until every stage had a node again
    recovered: float  # from then until the next attempt began: gathering, fetching, relearning
    stall: float  # from the loss to the next commit
    masked: bool  # the attempt went on without the lost nodes
    rolled_back: int  # committed steps that had to be trained again


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run. The seconds of `kept`, `again`, `aborted` and `stalled` add up to
    `seconds`."""

    steps: int  # committed steps at the end
    iterations: int  # steps trained to their end, including those rolled back later
    seconds: float
    kept: float  # in steps that count
    again: float  # in steps that were rolled back
    aborted: float  # in attempts that failed
    stalled: float  # without training: noticing, waiting, rebuilding, admitting joiners
    attempts_aborted: int
    losses: tuple[Loss, ...]
    joined: int  # newcomers that copied their stage's state while others trained
    node_seconds: float  # sum over all nodes of the seconds in which they were present
    first_step: MeanStep | None  # a step with all nodes; None: a trace never had all of them
    stopped: str  # why the run ended before its steps were committed; empty: they were
    shapes: int  # number of different sets of nodes that trained

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps if self.steps else math.inf


def simulate_run(
    swarm: Swarm,
    churn: Churn = Churn(),  # noqa: B008 (a value)
    seed: int = 0,
    limit: float = math.inf,
    known: dict[tuple[int, ...], MeanStep] | None = None,
) -> RunOutcome:
    """Simulates a run until its steps are committed, or for `limit` seconds.

    `known`: steps of this swarm that were simulated before, by the number of nodes in each group.
    New ones are added to it. The same arguments give the same outcome. Raises SwarmFiguresError.
    """
    if churn.stages is not None and (bad := set(churn.stages) - {*range(swarm.config.stages + 1)}):
        raise SwarmFiguresError(
            f"stage {min(bad)} can't be lost: the stages are 0 to {swarm.config.stages}"
        )
    return _Run(swarm, churn, seed, {} if known is None else known).outcome(limit)


@dataclass
class _Node:
    """A node that is present."""

    group: int  # its index in the swarm
    trains: bool  # it has its stage's state
    since: int  # number of committed steps when it began to train
    leaving: bool = False  # it has been given notice


@dataclass
class _Struck:
    """Losses of nodes that trained, which aren't handled yet."""

    time: float  # of the first loss
    noticed: float  # time at which the driver has a view without all these nodes
    nodes: list[LostPlace] = field(default_factory=list)


class _Run:
    """The state of one simulated run: its nodes, its training, and the seconds so far."""

    def __init__(
        self,
        swarm: Swarm,
        churn: Churn,
        seed: int,
        known: dict[tuple[int, ...], MeanStep],
    ) -> None:
        self.swarm, self.churn, self.known = swarm, churn, known
        self.policy, self.masking = swarm.run.policy, swarm.run.recovery.masking
        self.environment = simpy.Environment()
        self.changed = self.environment.event()  # wakes the training
        self.lives = Lives(churn, seed)
        self.stages = range(swarm.config.stages + 1)
        self.nodes: dict[LostPlace, _Node] = {}
        self.training = [0] * len(swarm.groups)  # number of nodes that train, by group
        self.before: Counter[LostPlace] = Counter()  # number of nodes so far in the place
        self.driver: LostPlace | None = None
        self.struck: _Struck | None = None
        self.entering: list[LostPlace] = []  # joiners that have caught up
        self.listed = dict(churn.at)
        self.begun = False  # every stage has had a node
        self.left = 1.0  # share of the step under way that is still to be computed
        self.invested = 0.0  # seconds that its attempt has trained
        self.vain = 0  # losses since the last commit
        self.trains_since = 0.0  # time since which no whole stage was lost
        self.iterations = self.aborts = self.joined = 0
        self.spent: list[float] = []  # seconds of each committed step
        self.again = self.aborted = 0.0
        self.losses: list[Loss] = []
        self.node_seconds = self.counted = 0.0
        self.shapes: set[tuple[int, ...]] = set()
        self.stopped = ""

    @property
    def now(self) -> float:
        return float(self.environment.now)

    @property
    def committed(self) -> int:
        return len(self.spent)

    def outcome(self, limit: float) -> RunOutcome:
        """Simulates the run for at most `limit` seconds, and returns its outcome."""
        if self.churn.trace:
            self._follow_trace()
        else:
            self._start_all()
        training = self.environment.process(self.train())
        self._later(limit, partial(self._stop, TIME_OVER))
        try:
            self.environment.run(training)
        except RuntimeError:  # simpy has run out of events
            if training.triggered:
                raise
            vacant = ", ".join(map(str, self._vacant()))
            self.stopped = f"stage {vacant} has no node, and no replacement comes"
        self._count_nodes()
        kept = sum(self.spent)
        first = self.known.get(self.swarm.counts)
        return RunOutcome(
            steps=self.committed,
            iterations=self.iterations,
            seconds=self.now,
            kept=kept,
            again=self.again,
            aborted=self.aborted + self.invested,
            stalled=self.now - kept - self.again - self.aborted - self.invested,
            attempts_aborted=self.aborts,
            losses=tuple(self.losses),
            joined=self.joined,
            node_seconds=self.node_seconds,
            first_step=first,
            stopped=self.stopped,
            shapes=len(self.shapes),
        )

    # --- machines come and go

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds < math.inf:
            timeout = self.environment.timeout(max(0.0, seconds))
            timeout.callbacks.append(lambda _: then())

    def _signal_change(self) -> None:
        self.changed.succeed()
        self.changed = self.environment.event()

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        self._signal_change()

    def _count_nodes(self) -> None:
        self.node_seconds += len(self.nodes) * (self.now - self.counted)
        self.counted = self.now

    def _start_all(self) -> None:
        numbers: Counter[int] = Counter()
        for index, group in enumerate(self.swarm.groups):
            for _ in range(group.count):
                self._put(LostPlace(group.stage, numbers[group.stage]), index, trains=True)
                numbers[group.stage] += 1
        self.swarm.nodes()  # every stage has one
        self.begun = True
        if self.churn.of == "stage":
            for stage in self.stages:
                self._live_as_a_stage(stage)

    def _put(self, place: LostPlace, group: int, trains: bool) -> None:
        """Adds a node, and plans its loss."""
        self._count_nodes()
        self.nodes[place] = node = _Node(group, trains, self.committed)
        self.training[group] += trains
        before, self.before[place] = self.before[place], self.before[place] + 1
        if self.churn.of == "node" and self.churn.may_lose(place.stage):
            life, notice = self.lives.life(place, before), self.churn.notice
            if notice:
                self._later(life - notice, partial(self._warn, place, node))
            self._later(life, partial(self._lose, [(place, node)]))

    def _live_as_a_stage(self, stage: int) -> None:
        """Plans the next loss of the whole stage."""
        if self.churn.may_lose(stage):
            whole = LostPlace(stage, None)
            life = self.lives.life(whole, self.before[whole])
            self.before[whole] += 1
            self._later(life, partial(self._lose_stage, stage))

    def _lose_stage(self, stage: int) -> None:
        self._lose_place(LostPlace(stage, None))
        self._later(
            self.churn.replacement + self.churn.start, partial(self._live_as_a_stage, stage)
        )

    def _lose_place(self, place: LostPlace) -> None:
        stage, number = place
        self._lose(
            [
                (at, node)
                for at, node in self.nodes.items()
                if at.stage == stage and number in (None, at.number)
            ]
        )

    def _warn(self, place: LostPlace, node: _Node) -> None:
        """A node gets notice. It leaves at once if its stage has other nodes that train, else as
        late as it can."""
        if self.nodes.get(place) is not node:
            return
        if self._trained(place.stage) > node.trains:
            self._lose([(place, node)])
            return
        node.leaving = True
        self._replace(LostPlace(place.stage, self._free_number(place.stage)), node.group)

    def _lose(self, lost: Sequence[tuple[LostPlace, _Node]]) -> None:
        self._count_nodes()
        self.vain += 1
        if self.vain > IN_VAIN:
            self._stop(f"{IN_VAIN:,} losses in a row without a committed step")
            return
        struck = []
        for place, node in lost:
            if self.nodes.get(place) is not node:
                continue  # this node was lost before
            del self.nodes[place]
            if place in self.entering:
                self.entering.remove(place)
            if node.trains:
                self.training[node.group] -= 1
                struck.append(place)
            if not (node.leaving or self.churn.trace):
                self._replace(place, node.group)
        if struck:
            noticed = max(reaction.noticed(self.swarm, self.churn, stage) for stage, _ in struck)
            self.struck = self.struck or _Struck(self.now, 0.0)
            self.struck.noticed = max(self.struck.noticed, self.now + noticed)
            self.struck.nodes += struck
            self._signal_change()

    def _replace(self, place: LostPlace, group: int) -> None:
        wait = self.churn.replacement + self.churn.start
        self._later(wait, partial(self._join, place, group))

    def _join(self, place: LostPlace, group: int) -> None:
        """Adds a newcomer, and plans when it can begin to train or be rebuilt."""
        if place in self.nodes:  # because of a trace or a notice, another node has it
            place = LostPlace(place.stage, self._free_number(place.stage))
        self._put(place, group, trains=False)
        node, stage = self.nodes[place], place.stage
        if self.begun and self._trained(stage):
            ready = reaction.following(self.swarm, stage)
        else:
            ready = reaction.joining(self.swarm, stage)
        self._later(ready, partial(self._is_ready, place, node))

    def _is_ready(self, place: LostPlace, node: _Node) -> None:
        if self.nodes.get(place) is node and not node.trains:
            self.entering.append(place)
            self._signal_change()

    def _follow_trace(self) -> None:
        places: dict[str, LostPlace] = {}
        counts: Counter[int] = Counter()
        numbers: Counter[int] = Counter()  # stage -> number of its next node
        groups = {group.stage: i for i, group in reversed([*enumerate(self.swarm.groups)])}

        def add(name: str) -> None:
            stage = min(self.stages, key=lambda number: (counts[number], number))
            places[name] = place = LostPlace(stage, numbers[stage])
            counts[stage] += 1
            numbers[stage] += 1

            def start() -> None:
                if places.get(name) == place:
                    self._join(place, groups[stage])

            self._later(self.churn.start, start)

        def remove(name: str) -> None:
            if (place := places.pop(name, None)) is not None:
                counts[place.stage] -= 1
                self._lose_place(place)

        for row in self.churn.trace:
            self._later(row.time, partial(add if row.added else remove, row.node))

    def _free_number(self, stage: int) -> int:
        """A number that no node of the stage has had."""
        return 1 + max(
            (place.number or 0 for place in self.before if place.stage == stage), default=-1
        )

    # --- the nodes

    def _trained(self, stage: int) -> int:
        """The number of the stage's nodes that train."""
        counts = zip(self.swarm.groups, self.training, strict=True)
        return sum(count for group, count in counts if group.stage == stage)

    def _vacant(self) -> list[int]:
        """Stages without a node that trains or waits to begin."""
        ready = {place.stage for place in self.entering}
        return [stage for stage in self.stages if not self._trained(stage) and stage not in ready]

    def _present(self) -> Swarm:
        """The swarm of the nodes that train."""
        return self.swarm.with_counts(self.training)

    def _step(self) -> MeanStep:
        counts = tuple(self.training)
        self.shapes.add(counts)
        if counts not in self.known:
            self.known[counts] = simulate_step(self._present())
        return self.known[counts]

    def _duration(self) -> float:
        """Seconds of a step. A checkpoint for which all nodes wait adds an equal share to each step
        of its interval."""
        recovery = self.swarm.run.recovery
        seconds = self._step().seconds
        if self.policy.checkpoints and self.swarm.blocking:
            seconds += reaction.writing(self.swarm) / recovery.checkpoint.every
        return seconds

    # --- training

    def train(self) -> Events:
        while self._vacant() and not self.stopped:
            yield self.changed  # a trace has yet to add nodes
        self.begun, self.trains_since = True, self.now
        self._admit()
        while self.committed < self.swarm.run.steps and not self.stopped:
            if self.struck is not None and self._can_mask(self.struck):
                yield from self.go_on()
            elif self.struck is not None:
                yield from self.get_over()
            elif self.entering:
                yield from self.let_in()
            else:
                yield from self.work()

    def work(self) -> Events:
        """Trains steps until an event interrupts: a loss, a joiner, a stop, or the last step."""
        duration, began = self._duration(), self.now
        steps = self._until_listed(duration) if self.left == 1.0 else 1
        end = began + duration * (steps - 1 + self.left)
        while self.struck is None and self.now < end and not self.stopped:
            yield self.environment.any_of([self.environment.timeout(end - self.now), self.changed])
            if self.entering and self.struck is None:  # joiners enter at the end of the step
                over = math.ceil((self.now - began) / duration - self.left - NOT_LATE)
                end = min(end, began + (max(0, over) + self.left) * duration)
        progress = (self.now - began) / duration + 1 - self.left
        done = max(0, math.floor(progress + NOT_LATE))
        if done:
            began += (done - 1 + self.left) * duration
            self.commit(self.left * duration)
            self.spent += [duration] * (done - 1)
            self.iterations += done - 1
        if progress - done > NOT_LATE:
            self.invested += self.now - began
            self.left = 1 - (progress - done)

    def commit(self, seconds: float) -> None:
        """Commits the step under way. Its attempt has trained for `seconds` beyond `invested`."""
        self.spent.append(self.invested + seconds)
        self.iterations += 1
        self.vain = 0
        self.left, self.invested = 1.0, 0.0

    def _until_listed(self, duration: float) -> int:
        """Number of steps until the next listed loss, or to the run's end. A loss in the coming
        step is planned here."""
        coming = self.iterations + 1
        for place in self.listed.pop(coming, ()):
            self._later(self.churn.phase * duration, partial(self._lose_place, place))
        remaining = self.swarm.run.steps - self.committed
        return min([remaining, *(at - coming for at in self.listed if at > coming)])

    def _admit(self) -> None:
        """Lets all `entering` nodes train: they have their stage's state now."""
        for place in self.entering:
            node = self.nodes[place]
            node.trains, node.since = True, self.committed
            self.training[node.group] += 1
        self.entering = []
        if self.driver not in self.nodes:  # the oldest follows (bootstrap/membership.py)
            sources = [p for p, node in self.nodes.items() if p.stage == 0 and node.trains]
            self.driver = min(sources, key=lambda place: (self.nodes[place].since, place))

    def let_in(self) -> Events:
        """Admits joiners that have caught up, between two steps; all nodes wait for them."""
        joiners, present = len(self.entering), self._present()
        settling = max(reaction.settling(present, stage, "replica") for stage, _ in self.entering)
        seconds = reaction.entering(present) + settling + self.churn.warm_up
        yield from self.pause(seconds)
        if self.struck is None:
            self.joined += joiners
            self._admit()

    def pause(self, seconds: float) -> Events:
        """Waits for `seconds`, or less if nodes are lost or the run stops meanwhile."""
        end = self.now + seconds
        while self.struck is None and self.now < end and not self.stopped:
            yield self.environment.any_of([self.environment.timeout(end - self.now), self.changed])

    # --- losses

    def _can_mask(self, struck: _Struck) -> bool:
        """Whether the attempt can go on: masking is on, each stage has nodes that train, and the
        driver isn't lost."""
        return self.masking != "abort" and not self._lost() and self.driver not in struck.nodes

    def go_on(self) -> Events:
        """Continues the attempt by a new plan: the other replicas recompute the lost nodes' part.
        The commit waits for the view without the lost nodes. Then the driver gathers."""
        first = self.struck
        assert first is not None
        nodes: list[LostPlace] = []
        viewed = 0.0
        while self.struck is not None:
            struck, self.struck = self.struck, None
            nodes, viewed = nodes + struck.nodes, max(viewed, struck.noticed)
            if not self._can_mask(struck):
                self.struck = _Struck(first.time, viewed, nodes)
                return
            began, duration = self.now, self._duration()
            self.left = self._left_without(struck.nodes)
            yield from self.pause(self.left * duration)
            self.invested += self.now - began
            self.left -= (self.now - began) / duration
            yield from self.pause(viewed - self.now)
            if self.stopped:
                return
        self.commit(0.0)
        noticed, stall = first.noticed - first.time, self.now - first.time
        step = self.committed
        yield from self.pause(reaction.gathering(self._present()))
        loss = Loss(
            time=first.time,
            step=step,
            nodes=len(nodes),
            rebuilt=(),
            detected=noticed,
            waited=0.0,
            recovered=0.0,
            stall=stall,
            masked=True,
            rolled_back=0,
        )
        self.losses.append(loss)

    def _left_without(self, lost: Sequence[LostPlace]) -> float:
        """The rest of the step for the surviving nodes, in steps.

        The replicas of the lost nodes recompute what these had computed, and compute what was still
        to come. Other stages aren't affected. The step is longer only if this computing, or the
        sending for it, takes longer than the rest of the step.
        """
        step, present = self._step(), self._present()
        window = self.swarm.run.training.microbatches
        longest = self.left * step.seconds
        for stage, lost_count in Counter(stage for stage, _ in lost).items():
            present_count = self._trained(stage)
            redone = (1 - self.left) * window * lost_count / (lost_count + present_count)
            groups = [group for group in present.groups if group.stage == stage]
            notified = reaction.notified(present, self.churn, stage)
            speed = sum(group.count / group.seconds.microbatch for group in groups)
            computing = (redone + self.left * window) / speed
            sending = reaction.sending_again(present, stage, redone / present_count)
            longest = max(longest, notified + max(computing, sending) + step.reduce)
        return longest / step.seconds

    def get_over(self) -> Events:
        """Handles losses that abort the attempt. It waits until every stage has nodes that train,
        and the next attempt can begin."""
        first = self.struck
        assert first is not None
        nodes: list[LostPlace] = []
        waited, back, spent, syncing = 0.0, 0, 0.0, math.inf
        rebuilt: list[Rebuilt] = []
        trained = max(first.noticed, self.now) - self.trains_since
        while self.struck is not None or self._lost():
            if self.struck is not None:
                struck, self.struck = self.struck, None
                nodes += struck.nodes
                yield self.environment.timeout(max(0.0, struck.noticed - self.now))
                spent, syncing = spent + max(0.0, self.now - syncing), math.inf
            began = self.now
            while self._vacant() and self.struck is None and not self.stopped:
                yield self.changed
            waited += self.now - began
            if self.stopped:
                return
            if self.struck is not None:
                continue
            decisions = self._decide(self._lost())
            if self.stopped:
                return
            relearning = time_for(self.swarm.run.recovery.relearn.seconds, trained, spent)
            if decisions:
                syncing = self.now + reaction.gathering(self._present())
            yield from self.pause(self._rebuilding(decisions, relearning))
            if self.stopped:
                return
            if self.struck is None and not self._vacant():
                back += self._go_back(decisions)
                rebuilt += [_rebuilt(stage, decision) for stage, decision in decisions.items()]
                self._admit()
        self._abort()
        if rebuilt:
            self.trains_since = self.now
        noticed = first.noticed - first.time
        loss = Loss(
            time=first.time,
            step=self.committed + back + 1,
            nodes=len(nodes),
            rebuilt=tuple(rebuilt),
            detected=noticed,
            waited=waited,
            recovered=self.now - first.time - noticed - waited,
            stall=self.now - first.time + self._duration(),
            masked=False,
            rolled_back=back,
        )
        self.losses.append(loss)

    def _lost(self) -> list[int]:
        """Stages without a node that trains."""
        return [stage for stage in self.stages if not self._trained(stage)]

    def _abort(self) -> None:
        """Aborts the attempt under way; the whole step is left."""
        self.aborts += 1
        self.aborted += self.invested
        self.left, self.invested = 1.0, 0.0

    def _decide(self, lost: Sequence[int]) -> dict[int, Decision]:
        """The decision for each lost stage; a Stop stops the run. There are none before the first
        commit, since newcomers then make the initial weights themselves."""
        if not (lost and self.committed):
            return {}
        survivors: dict[int, list[str]] = {}
        for (stage, number), node in self.nodes.items():
            if node.trains:
                survivors.setdefault(stage, []).append(f"{stage}.{number}")
        run, config = self.swarm.run, self.swarm.config
        left = Left(
            config.stages,
            self.committed,
            survivors,
            held=[*self._held()],
            origin=[node for nodes in survivors.values() for node in nodes if run.model.origin],
            adapters=config.lora is not None,
        )
        strict = run.recovery.strict
        relearns = bool(run.recovery.relearn.passes)
        decisions = {s: decide(s, left, self.policy, strict, relearns) for s in lost}
        stops = [decision.reason for decision in decisions.values() if isinstance(decision, Stop)]
        self.stopped = stops[0] if stops else ""
        return decisions

    def _held(self) -> Iterator[Held]:
        """The states of other stages that surviving nodes or the shared folder hold, by the run's
        policy. A node that began to train in this step holds none yet, except for a twin."""
        stages, recovery = self.swarm.config.stages, self.swarm.run.recovery
        if self.policy.checkpoints:
            write = reaction.writing(self.swarm) / self._last_duration()
            every = recovery.checkpoint.every
            step = max(0, math.floor(self.committed - write)) // every * every
            for stage in self.stages if step else ():
                yield Held("checkpoint", Source("the shared folder", stage, step))
            return
        first: dict[int, LostPlace] = {}
        for place in sorted(at for at, node in self.nodes.items() if node.trains):
            if self.policy.twins or self.nodes[place].since < self.committed:
                first.setdefault(place.stage, place)
        snapshot = snapshot_section(self.swarm.run, self.swarm.config)
        due = steps_between(snapshot.fraction, snapshot.period)
        mean = self.committed - due / (2 * snapshot.fraction)  # step of the rows, as in Pace
        for place in first.values():
            name = f"{place.stage}.{place.number}"
            if self.policy.twins:
                other_stage = (place.stage + 1) % (stages + 1)
                yield Held("redundant", Source(name, other_stage, self.committed))
            for other_stage in held_at(place.stage, stages):
                if self.policy.sends(other_stage, snapshot.first):
                    step = max(0, self.committed - due)
                    source = Source(name, other_stage, step)
                    yield Held("snapshot", source, mean_step=max(0.0, mean))

    def _last_duration(self) -> float:
        """Seconds of the last committed step; infinite if there is none."""
        return self.spent[-1] if self.spent else math.inf

    def _rebuilding(self, decisions: Mapping[int, Decision], relearning: float) -> float:
        """Seconds of rebuilding by these decisions, with at most `relearning` seconds of training.

        The driver gathers. One node of each lost stage gets a state, and its replicas copy it. The
        driver gathers again. The additional seconds of a newcomer's first step are included.
        """
        present = self._present()
        gather = reaction.gathering(present)
        if not decisions:
            return gather + (self.churn.warm_up if self.entering else 0.0)
        if any(isinstance(decision, RollBack) for decision in decisions.values()):
            loading = [
                reaction.fetching(present, number, "checkpoint", ()) for number in self.stages
            ]
            settling = [reaction.settling(present, number, "checkpoint") for number in decisions]
            return 2 * gather + max(loading) + max(settling) + self.churn.warm_up
        longest = 0.0
        for stage, decision in decisions.items():
            assert isinstance(decision, Rebuild)
            seconds = reaction.fetching(present, stage, decision.method, self._sources(decision))
            seconds += reaction.relearning(present, stage, decision.method, relearning)
            newcomers = [place for place in self.entering if place.stage == stage]
            if len(newcomers) > 1:
                single = replace(self.swarm.groups[self.nodes[newcomers[0]].group], count=1)
                seconds += gather + reaction.fetching(present, stage, "replica", [single])
            if self.policy.twins:  # the new node needs its twin, too
                next_stage = (stage + 1) % len(self.stages)
                groups = [group for group in self.swarm.groups if group.stage == next_stage]
                seconds += gather + reaction.fetching(present, stage, "replica", groups, twin=True)
            longest = max(longest, seconds + reaction.settling(present, stage, decision.method))
        return 2 * gather + longest + self.churn.warm_up

    def _sources(self, rebuild: Rebuild) -> list[Group]:
        """Groups of the nodes from which the state is fetched. If only frozen weights are fetched,
        one node gives them."""
        places = [LostPlace(*map(int, source.node.split("."))) for source in rebuild.sources]
        if rebuild.method in (ANEW, ORIGIN):
            places = [next(place for place, node in self.nodes.items() if node.trains)]
        counts = Counter(self.nodes[place].group for place in places)
        return [replace(self.swarm.groups[group], count=n) for group, n in counts.items()]

    def _go_back(self, decisions: Mapping[int, Decision]) -> int:
        """Rolls back if a decision does, and returns the number of committed steps given up."""
        to = min(
            (decision.step for decision in decisions.values() if isinstance(decision, RollBack)),
            default=self.committed,
        )
        given_up = self.spent[to:]
        self.again += sum(given_up)
        del self.spent[to:]
        return len(given_up)


def _rebuilt(stage: int, decision: Decision) -> Rebuilt:
    if isinstance(decision, Rebuild):
        return Rebuilt(stage, decision.method, decision.same_weights, decision.fallback)
    return Rebuilt(stage, "checkpoint", same_weights=True, fallback=False)
