"""The driver's side of the step transaction: a machine without clock, socket or tensor.

One procedure serves every new view, lost link, failed attempt and rebuild: *gather* asks all active
members what they have, commits the step that somebody has committed already, gets state to those
without it, and begins the next step. A commit needs `Ready` from every active member.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bootstrap import registry_pb2 as registry
from node import stage_pb2 as pb
from node.effects import NEVER, Ballot, Effect, Event, Send, Suspect
from node.routing import share_out
from recovery.decide import Left, Policy, Rebuild, decide

QUERY_AGAIN = 1.0
"""Seconds before a member that hasn't answered is asked once more."""
ANSWER = 4.0
"""Seconds that a member has to answer before the registry is told."""
LONGEST_PAUSE = 5.0
"""Seconds between attempts at most, after many failed in a row."""
FOLLOWS = 2
"""Times that a joiner may try to follow before everybody waits for it."""
FOLLOWED = 2.0
"""A try is given up after so many times the deadline for progress."""
ENTERING = 0.1
"""Seconds that a commit waits for the vote of a joiner that has caught up; twice that in the next
step, and so on."""
ENTERING_SHARE = 0.05
"""And at least this share of the step's duration."""


@dataclass(frozen=True)
class Rules:
    """What the run file says to the driver."""

    stages: int  # body stages, L
    steps: int
    microbatches: int
    validation_microbatches: int
    validate_every: int  # steps; 0: only at the end
    clip: float
    clip_scope: str  # "global" or "stage"
    policy: Policy
    progress: float  # seconds without any before an attempt is given up
    lr_scale: Callable[[int, int], float]  # (step, boosted_at) -> factor


class Phase(enum.Enum):
    INACTIVE = "not the driver"
    GATHERING = "gathering"
    SYNCING = "syncing"
    RUNNING = "running"
    REDUCING = "reducing"
    WAITING = "waiting"
    PAUSING = "pausing"
    HALTED = "halted"


@dataclass
class Joiner:
    """A member that follows: it copies its stage's state while the others train."""

    step: int  # of the state
    began: float
    stall: float | None = None  # seconds in which nothing trained because of it; None: to be told
    caught_up: pb.Synced | None = None
    ready: pb.Ready | None = None  # it has the attempt's gradient, so it can enter with the commit
    vain: int = 0  # attempts that have waited for that in vain
    failed: bool = False


class Driver:
    """Every event method returns the effects to carry out, in order."""

    def __init__(self, node: str, rules: Rules) -> None:
        self.node = node
        self.rules = rules
        self.phase = Phase.INACTIVE
        self.view = registry.View()
        self.newer: registry.View | None = None  # adopted at the next step boundary
        self.ballot = NEVER
        self.members: dict[str, int] = {}  # active members of the ballot's view: node -> stage
        self.joining: dict[str, Joiner] = {}  # those of the members that don't train yet
        self.failed_to_follow: Counter[str] = Counter()
        self.regather = ""  # why to gather at the next step boundary
        self.complete = 0.0  # when the last of those who train was ready
        self.statuses: dict[str, pb.Status] = {}
        self.awaited: set[str] = set()  # nodes whose answer the phase waits for
        self.committed = 0
        self.last = pb.Commit()
        self.begin = pb.Begin()
        self.homes: dict[int, pb.Home] = {}
        self.ready: dict[str, pb.Ready] = {}
        self.seconds: dict[str, float] = {}
        self.lr_scale: list[float] = []
        self.began = 0.0
        self.progressed = 0.0
        self.asked = 0.0
        self.stalled: float | None = None  # since when nothing trains
        self.taken_over = False  # the first gather after another driver
        self.gathered = 0.0
        self.rebuilt: list[dict[str, Any]] = []  # to be reported with the next Begin
        self.failures = 0  # attempts in a row that failed
        self.pause_until = 0.0
        self.validated: tuple[int, float] = (0, math.nan)  # step, loss
        self.finished = False  # and stays so, whoever is lost afterwards
        self.why = ""

    # --- events

    def viewed(self, view: registry.View, now: float) -> list[Effect]:
        """The registry has issued `view`."""
        if view.number <= max(self.view.number, self.newer.number if self.newer else 0):
            return []
        if view.driver != self.node:
            self.phase, self.view, self.newer = Phase.INACTIVE, view, None
            return []
        if self.phase in (Phase.RUNNING, Phase.REDUCING, Phase.SYNCING):
            stay = _active(view)
            if all(stay.get(node) == stage for node, stage in self._training()):
                self.newer = view
                return []
        taken_over = self.phase is Phase.INACTIVE
        self.newer = view
        return self._gather(f"view {view.number}: {view.reason}", now, taken_over)

    def received(self, peer: str, message: pb.Message, now: float) -> list[Effect]:
        """A control message for this machine has come from `peer`."""
        body = message.WhichOneof("body")
        ballot = Ballot.of(message.ballot)
        if self.phase is Phase.INACTIVE or peer not in self.members:
            return []
        if body == "stale":
            return self._superseded(peer, ballot, now)
        if peer in self.joining and body in ("synced", "ready", "failed"):
            return self._heard_of_joiner(peer, ballot, message, now)
        if ballot != self.ballot:
            return []
        match body, self.phase:
            case "status", Phase.GATHERING:
                return self._status(peer, message.status, now)
            case "synced", Phase.SYNCING:
                return self._synced(peer, message.synced, now)
            case "home", Phase.RUNNING:
                return self._home(message.home, now)
            case "ready", Phase.REDUCING:
                return self._ready(peer, message.ready, now)
            case "failed", Phase.RUNNING | Phase.REDUCING | Phase.SYNCING:
                return self._failed(peer, message.failed, now)
            case _:
                return []

    def link_lost(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Messages to or from `peer` may be lost: nothing that waits for it can be trusted."""
        if peer not in self.members or self.phase is Phase.INACTIVE:
            return []
        lost = Event("lost", {"node": peer, "stage": self.members[peer], "reason": reason})
        if peer in self.joining and self.phase in (Phase.RUNNING, Phase.REDUCING):
            self.joining[peer].caught_up = None
            return [lost, *self._if_all_ready(now)]
        return [lost, *self._gather(f"the link to {peer} is lost: {reason}", now)]

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        match self.phase:
            case Phase.GATHERING if now - self.asked >= QUERY_AGAIN:
                return self._ask_again(now)
            case Phase.PAUSING if now >= self.pause_until:
                return self._next(now)
            case Phase.REDUCING if not self.awaited:
                return self._if_all_ready(now)
            case Phase.RUNNING | Phase.REDUCING | Phase.SYNCING:
                return self._joiners_out_of_time(now) + self._out_of_patience(now)
        return []

    def explain(self) -> str:
        """What is going on, or awaited, in words."""
        match self.phase:
            case Phase.GATHERING:
                return f"{self.why}; waiting for the status of {', '.join(self._unheard())}"
            case Phase.SYNCING:
                return f"{self.why}; waiting for the state of {', '.join(sorted(self.awaited))}"
            case Phase.RUNNING:
                home = f"step {self.begin.step}: {len(self.homes)} of {len(self.begin.plan)} home"
                return home + "".join(f"; {node} follows" for node in sorted(self.joining))
            case Phase.REDUCING:
                return f"step {self.begin.step}: waiting for {', '.join(sorted(self.awaited))}"
            case _:
                return self.why or self.phase.value

    # --- gather: who has what

    def _gather(self, why: str, now: float, taken_over: bool = False) -> list[Effect]:
        effects: list[Effect] = []
        if self.phase in (Phase.RUNNING, Phase.REDUCING):
            effects += self._aborted(why)
        if self.stalled is None:
            self.stalled = now
        self._adopt()
        self.ballot = Ballot(self.view.number, self.ballot.attempt + 1)
        self.phase = Phase.GATHERING
        self.regather = ""
        self.statuses = {}
        self.taken_over = taken_over
        self.asked = self.gathered = now
        self.why = why
        return effects + [self._to(node, pb.Message(query=pb.Query())) for node in self.members]

    def _adopt(self) -> None:
        if self.newer is None:
            return
        self.view, self.newer = self.newer, None
        self.members = _active(self.view)
        self.ballot = Ballot(self.view.number, 0)

    def _unheard(self) -> list[str]:
        return sorted(set(self.members) - set(self.statuses))

    def _ask_again(self, now: float) -> list[Effect]:
        self.asked = now
        effects: list[Effect] = []
        if now - self.gathered >= ANSWER:
            self.gathered = now
            why = f"no answer to the driver's query for {ANSWER:.0f} s"
            effects += [Suspect(node, why) for node in self._unheard()]
        return effects + [self._to(node, pb.Message(query=pb.Query())) for node in self._unheard()]

    def _status(self, peer: str, status: pb.Status, now: float) -> list[Effect]:
        self.statuses[peer] = status
        if status.seconds_per_microbatch:
            self.seconds[peer] = status.seconds_per_microbatch
        if self._unheard():
            return []
        return self._resolve(now)

    def _resolve(self, now: float) -> list[Effect]:
        """Everybody has answered: agree on the committed step, then get state to who lacks it."""
        newest = max(self.statuses.values(), key=lambda status: status.committed)
        effects: list[Effect] = []
        if self.taken_over and any(
            status.attempting == newest.committed + 1 for status in self.statuses.values()
        ):
            effects += self._aborted("its driver is gone", newest.committed + 1)
        self.taken_over = False
        self.committed, self.last = newest.committed, newest.last
        if newest.committed + 1 < self.view.committed:
            reason = (
                f"everything is lost: step {self.view.committed} was committed once, but the "
                f"newest state that is left is of step {newest.committed}"
            )
            return effects + self._halt(pb.Halt(reason=reason, step=newest.committed), now)
        behind = [node for node, status in self.statuses.items() if self._can_follow(status)]
        if behind:
            commit = pb.Message(step=pb.Step(commit=newest.last))
            effects += [self._to(node, commit) for node in behind]
            return effects + self._gather(f"step {self.committed} is committed by some", now)
        return effects + self._sync(now)

    def _can_follow(self, status: pb.Status) -> bool:
        return (
            status.committed + 1 == self.committed == status.ready
            and status.ready_ballot == self.last.ballot
        )

    # --- sync: state for those without it

    def _survivors(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for node, status in self.statuses.items():
            if status.committed == self.committed:
                found.setdefault(self.members[node], []).append(node)
        return found

    def _sync(self, now: float) -> list[Effect]:
        survivors = self._survivors()
        effects: list[Effect] = []
        following = self._go_on_following(survivors, now)
        to_follow: list[tuple[list[str], Rebuild]] = []
        self.awaited = set()
        vacant = []
        for stage in range(self.rules.stages + 1):
            nodes = [node for node, at in self.members.items() if at == stage]
            here = {*survivors.get(stage, ()), *self.joining}
            joiners = [node for node in nodes if node not in here]
            if nodes and not joiners:
                continue
            if not nodes:
                vacant.append(stage)
            if self.committed == 0:
                continue
            left = Left(self.rules.stages, self.committed, survivors)
            decision = decide(stage, left, self.rules.policy, strict=True)
            if not isinstance(decision, Rebuild):
                if self.finished:
                    return self._finish(now)
                return self._halt(pb.Halt(reason=decision.reason, step=self.committed), now)
            if decision.method == "replica" and self._may_follow(stage, joiners):
                to_follow.append((joiners, decision))
                continue
            # One node rebuilds a lost stage; the others copy from it, so that they are identical.
            effects += self._sync_one_stage(
                joiners if decision.method == "replica" else joiners[:1], decision
            )
        if effects or vacant:  # nothing trains anyway
            for joiners, decision in to_follow:
                effects += self._sync_one_stage(joiners, decision)
            to_follow = []
        if effects:
            self.phase = Phase.SYNCING
            effects += following
            self.began = self.progressed = now
            return effects
        if vacant and not self.finished:
            self.phase = Phase.WAITING
            stages = ", ".join(map(str, vacant))
            self.why = f"waiting for a node to join stage {stages}: planaria node --join ..."
            return [*following, Event("waiting", {"stages": vacant, "reason": self.why})]
        for joiners, decision in to_follow:
            following += self._begin_following(joiners, decision, now)
        return following + self._next(now)

    def _sync_one_stage(
        self, joiners: Sequence[str], decision: Rebuild, follow: bool = False
    ) -> list[Effect]:
        boosted_at = self.committed
        if decision.method == "replica":
            boosted_at = self.statuses[decision.sources[0].node].boosted_at
        sync = pb.Sync(
            step=self.committed,
            method=decision.method,
            reason=decision.reason,
            sources=[
                pb.Source(node=source.node, stage=source.stage, step=source.step)
                for source in decision.sources
            ],
            boosted_at=boosted_at,
            follow=follow,
        )
        self.awaited.update(joiners)
        effects: list[Effect] = []
        for node in joiners:
            effects.append(Event("rebuilding", {"node": node, **_described(decision)}))
            effects.append(self._to(node, pb.Message(sync=sync)))
        return effects

    def _synced(self, peer: str, synced: pb.Synced, now: float) -> list[Effect]:
        self.awaited.discard(peer)
        self.progressed = now
        self.rebuilt.append(self._rebuilt(peer, synced, now - self.began))
        return [] if self.awaited else self._gather("state is in place", now)

    def _rebuilt(self, peer: str, synced: pb.Synced, seconds: float) -> dict[str, Any]:
        return {
            "node": peer,
            "stage": self.members[peer],
            "method": synced.method,
            "step": synced.step,
            "sources": [
                {"node": source.node, "stage": source.stage, "step": source.step}
                for source in synced.sources
            ],
            "bytes": synced.fetched_bytes,
            "fetch_seconds": synced.seconds,
            "rebuild_seconds": seconds,
        }

    # --- joiners that follow while the others train

    def _training(self) -> list[tuple[str, int]]:
        return [(n, stage) for n, stage in sorted(self.members.items()) if n not in self.joining]

    def _may_follow(self, stage: int, joiners: Sequence[str]) -> bool:
        """The replicas of a stage that has just been rebuilt are waited for, as was the first."""
        tried = any(self.failed_to_follow[node] >= FOLLOWS for node in joiners)
        rebuilt = any(r["stage"] == stage and r["method"] != "replica" for r in self.rebuilt)
        return not (tried or rebuilt or self._is_over())

    def _begin_following(
        self, joiners: Sequence[str], decision: Rebuild, now: float
    ) -> list[Effect]:
        effects = self._sync_one_stage(joiners, decision, follow=True)
        for node in joiners:
            self.awaited.discard(node)
            del self.statuses[node]  # it tells nothing of its stage
            self.joining[node] = Joiner(self.committed, now)
        return effects

    def _go_on_following(self, survivors: Mapping[int, Sequence[str]], now: float) -> list[Effect]:
        """Everybody has answered: who has the newest state is in, who is on the way to it goes on,
        and all others have to begin anew."""
        effects: list[Effect] = []
        before, self.joining = self.joining, {}
        for node, status in list(self.statuses.items()):
            joiner = before.get(node)
            if status.committed == self.committed:
                if joiner is not None:
                    self._enter(node, joiner, now)
                continue
            if joiner is None or joiner.step != status.following:
                joiner = Joiner(status.following, now, stall=0.0)
            missed = self.committed - status.heard
            fed = status.following and self.members[node] in survivors
            if not fed or joiner.failed or missed not in (0, 1) or self._is_over():
                continue
            if missed:
                effects.append(self._to(node, pb.Message(step=pb.Step(commit=self.last))))
            self.joining[node] = joiner
            del self.statuses[node]
        return effects

    def _heard_of_joiner(
        self, peer: str, ballot: Ballot, message: pb.Message, now: float
    ) -> list[Effect]:
        """Under whatever ballot: a joiner may not have heard of this one yet."""
        joiner = self.joining[peer]
        match message.WhichOneof("body"):
            case "synced":
                joiner.caught_up = message.synced
            case "ready" if self.phase is Phase.REDUCING and ballot == self.ballot:
                joiner.ready = message.ready
                return self._if_all_ready(now)
            case "failed":
                gave_up = self._give_up_following(peer, message.failed.reason, now)
                return gave_up + self._if_all_ready(now)
        return []

    def _give_up_following(self, peer: str, reason: str, now: float) -> list[Effect]:
        """It is told what to do at the next step boundary."""
        joiner = self.joining[peer]
        if joiner.failed:
            return []
        joiner.failed, joiner.caught_up = True, None
        self.failed_to_follow[peer] += 1
        why = f"{peer} can't follow: {reason}"
        failed = Event("rebuild failed", {"node": peer, "reason": why})
        match self.phase:
            case Phase.RUNNING | Phase.REDUCING:
                self.regather = why
            case Phase.PAUSING | Phase.WAITING:
                return [failed, *self._gather(why, now)]
        return [failed]

    def _joiners_out_of_time(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        limit = FOLLOWED * self.rules.progress
        for node, joiner in list(self.joining.items()):
            if now - joiner.began >= limit and self.phase is not Phase.SYNCING:
                effects += self._give_up_following(node, f"not even in {limit:.0f} s", now)
        return effects

    def _if_all_ready(self, now: float) -> list[Effect]:
        """Decide when all who train are ready, and, for a short while, who would like to enter."""
        if self.phase is not Phase.REDUCING or self.awaited:
            return []
        self.complete = self.complete or now
        entering = [joiner for joiner in self.joining.values() if joiner.caught_up is not None]
        usual = max(ENTERING, ENTERING_SHARE * (self.complete - self.began))
        waited = now - self.complete
        late = [joiner for joiner in entering if joiner.ready is None]
        if any(waited < usual * 2.0 ** min(joiner.vain, 10) for joiner in late):
            return []
        for joiner in entering:
            joiner.stall = (joiner.stall or 0.0) + waited
        for joiner in late:
            joiner.vain += 1
        return self._decide(now)

    def _let_in(self, now: float) -> list[Effect]:
        """Who has the attempt's gradient, and agrees with a replica on it, trains from now on."""
        effects: list[Effect] = []
        for node, joiner in list(self.joining.items()):
            if joiner.ready is None:
                continue
            stage = self.members[node]
            twin = next(n for n in sorted(self.ready) if self.members[n] == stage)
            if _agree(joiner.ready, self.ready[twin]):
                self._enter(node, joiner, now)
                continue
            fields = {"stage": stage, "nodes": [twin, node], "step": self.committed}
            effects.append(Event("diverged", fields))
            effects += self._give_up_following(node, f"its weights are not those of {twin}", now)
        return effects

    def _enter(self, node: str, joiner: Joiner, now: float) -> None:
        self.joining.pop(node, None)
        synced = joiner.caught_up or pb.Synced(step=joiner.step, method="replica")
        rebuilt = self._rebuilt(node, synced, now - joiner.began)
        self.rebuilt.append(rebuilt | {"stall_seconds": joiner.stall or 0.0})

    def _joiners(self) -> list[pb.Joiner]:
        return [
            pb.Joiner(node=node, stage=self.members[node], step=joiner.step)
            for node, joiner in sorted(self.joining.items())
        ]

    # --- attempt

    def _next(self, now: float) -> list[Effect]:
        """Begin what comes next: the next step, a validation, or the end."""
        if now < self.pause_until:
            self.phase = Phase.PAUSING
            return []
        begin = self._what_next(now)
        return self._finish(now) if begin is None else self._send_step(pb.Step(begin=begin), now)

    def _is_over(self) -> bool:
        validated = not self.rules.validation_microbatches or self.validated[0] == self.committed
        return self.committed >= self.rules.steps and validated

    def _finish(self, now: float) -> list[Effect]:
        self.finished = True
        loss = self.validated[1]
        return self._halt(pb.Halt(finished=True, step=self.committed, validation_loss=loss), now)

    def _what_next(self, now: float) -> pb.Begin | None:
        rules = self.rules
        if self._is_over():
            return None
        due = self.committed >= rules.steps or (
            rules.validate_every and self.committed and self.committed % rules.validate_every == 0
        )
        if due and rules.validation_microbatches and self.validated[0] != self.committed:
            return pb.Begin(
                step=self.committed,
                kind=pb.Begin.EVALUATE,
                plan=self._plan(rules.validation_microbatches),
                members=self._places(),
                joining=self._joiners(),
            )
        boosted = {self.members[node]: s.boosted_at for node, s in self.statuses.items()}
        self.lr_scale = [
            rules.lr_scale(self.committed + 1, boosted.get(stage, 0))
            for stage in range(rules.stages + 1)
        ]
        return pb.Begin(
            step=self.committed + 1,
            plan=self._plan(rules.microbatches),
            lr_scale=self.lr_scale,
            members=self._places(),
            joining=self._joiners(),
        )

    def _places(self) -> list[pb.Place]:
        return [pb.Place(node=node, stage=stage) for node, stage in self._training()]

    def _plan(self, count: int) -> list[pb.Microbatch]:
        sources = [node for node, stage in self._training() if stage == 0]
        order = range(1, self.rules.stages + 1)
        return [
            pb.Microbatch(id=identity, source=source, order=order)
            for identity, source in enumerate(share_out(range(count), sources, self.seconds))
        ]

    def _send_step(self, step: pb.Step, now: float) -> list[Effect]:
        if not step.ByteSize():
            return []
        self.ballot = Ballot(self.ballot.view, self.ballot.attempt + 1)
        effects: list[Effect] = [
            self._to(node, pb.Message(step=step)) for node in sorted(self.members)
        ]
        if step.HasField("begin"):
            self.phase = Phase.RUNNING
            self.begin = step.begin
            self.homes = {}
            self.began = self.progressed = now
            effects += self._report_rebuilds(now)
        return effects

    def _report_rebuilds(self, now: float) -> list[Effect]:
        stall = 0.0 if self.stalled is None else now - self.stalled
        self.stalled = None
        for joiner in self.joining.values():
            joiner.stall = stall if joiner.stall is None else joiner.stall
        rebuilt, self.rebuilt = self.rebuilt, []
        return [Event("rebuilt", {"stall_seconds": stall, **fields}) for fields in rebuilt]

    def _home(self, home: pb.Home, now: float) -> list[Effect]:
        self.homes[home.microbatch] = home
        self.progressed = now
        if len(self.homes) < len(self.begin.plan):
            return []
        if self.begin.kind == pb.Begin.EVALUATE:
            loss = self._mean_loss()
            self.validated = (self.committed, loss)
            event = Event("validated", {"step": self.committed, "loss": loss})
            return [event, *self._after_step(pb.Step(), now)]
        self.phase = Phase.REDUCING
        self.ready = {}
        self.awaited = {node for node, _ in self._training()}
        self.complete = 0.0
        for joiner in self.joining.values():
            joiner.ready = None
        asked = self.awaited | {n for n, j in self.joining.items() if j.caught_up is not None}
        return [self._to(node, pb.Message(reduce=pb.Reduce())) for node in sorted(asked)]

    def _mean_loss(self) -> float:
        tokens = sum(home.tokens for home in self.homes.values())
        return math.fsum(home.loss for home in self.homes.values()) / tokens

    def _ready(self, peer: str, ready: pb.Ready, now: float) -> list[Effect]:
        self.ready[peer] = ready
        self.seconds[peer] = ready.seconds_per_microbatch
        self.awaited.discard(peer)
        self.progressed = now
        return self._if_all_ready(now)

    def _decide(self, now: float) -> list[Effect]:
        """All are ready: commit, and begin what comes next in the same message."""
        effects = self._let_in(now)
        norms: dict[int, float] = {}
        for node in sorted(self.ready):
            stage, ready = self.members[node], self.ready[node]
            twin = next(n for n in sorted(self.ready) if self.members[n] == stage)
            if not _agree(ready, self.ready[twin]):
                effects.append(
                    Event(
                        "diverged", {"stage": stage, "nodes": [twin, node], "step": self.committed}
                    )
                )
            norms[stage] = ready.squared_norm
        commit = self._commit(norms, now)
        self.committed, self.last = commit.step, commit
        self.failures = 0
        effects.append(Event("committed", {"step": commit.step, "loss": commit.loss}))
        return effects + self._after_step(pb.Step(commit=commit), now)

    def _commit(self, norms: Mapping[int, float], now: float) -> pb.Commit:
        finite = all(ready.finite for ready in self.ready.values())
        total = math.sqrt(math.fsum(norms.values())) if finite else math.nan
        each = [math.sqrt(norms[s]) if finite else math.nan for s in sorted(norms)]
        clipped = [total] * len(each) if self.rules.clip_scope == "global" else each
        return pb.Commit(
            step=self.begin.step,
            ballot=self.ballot.message(),
            skipped=not finite,
            clip_scale=[min(1.0, self.rules.clip / (n + 1e-6)) if finite else 0.0 for n in clipped],
            lr_scale=self.lr_scale,
            loss=self._mean_loss(),
            tokens=sum(home.tokens for home in self.homes.values()),
            gradient_norm=total,
            microbatches=[self.homes[identity] for identity in sorted(self.homes)],
            seconds=now - self.began,
        )

    def _after_step(self, step: pb.Step, now: float) -> list[Effect]:
        """A step boundary: a newer view is adopted here, if there is one."""
        if self.newer is not None:
            self.phase = Phase.WAITING
            effects = self._send_step(step, now)
            return effects + self._gather(f"view {self.newer.number}: {self.newer.reason}", now)
        if self.regather:
            self.phase = Phase.WAITING
            return self._send_step(step, now) + self._gather(self.regather, now)
        begin = self._what_next(now)
        if begin is None and self.joining:
            self.phase = Phase.WAITING
            return self._send_step(step, now) + self._gather("all shall have the end", now)
        if begin is not None:
            step.begin.CopyFrom(begin)
            return self._send_step(step, now)
        return self._send_step(step, now) + self._finish(now)

    # --- what goes wrong

    def _failed(self, peer: str, failed: pb.Failed, now: float) -> list[Effect]:
        self.failures += 1
        if self.failures > 1:
            self.pause_until = now + min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self.failures, 10))
        effects: list[Effect] = [Suspect(node, failed.reason) for node in failed.accused]
        if self.phase is Phase.SYNCING:
            effects.append(Event("rebuild failed", {"node": peer, "reason": failed.reason}))
        return effects + self._gather(f"{peer} says: {failed.reason}", now)

    def _out_of_patience(self, now: float) -> list[Effect]:
        if now - self.progressed < self.rules.progress:
            return []
        waited = f"no progress for {now - self.progressed:.0f} s: {self.explain()}"
        effects: list[Effect] = []
        if self.phase is not Phase.RUNNING:
            effects = [Suspect(node, waited) for node in sorted(self.awaited)]
        self.failures += 1
        return effects + self._gather(waited, now)

    def _superseded(self, peer: str, newer: Ballot, now: float) -> list[Effect]:
        """`peer` has promised itself to a newer ballot."""
        if newer.view > self.ballot.view or newer <= self.ballot:
            return []  # the registry's next view tells who drives
        self.ballot = newer
        return self._gather(f"{peer} has heard of attempt {newer.attempt}", now)

    def _aborted(self, why: str, step: int = 0) -> list[Effect]:
        if not step and self.begin.kind == pb.Begin.EVALUATE:
            return []
        fields = {"step": step or self.begin.step, "view": self.ballot.view, "reason": why}
        return [Event("aborted", fields)]

    def _halt(self, halt: pb.Halt, now: float) -> list[Effect]:
        self.phase = Phase.HALTED
        self.why = "all steps are committed" if halt.finished else halt.reason
        message = pb.Message(halt=halt)
        effects: list[Effect] = [self._to(node, message) for node in sorted(self.members)]
        return effects + self._report_rebuilds(now)

    def _to(self, node: str, message: pb.Message) -> Send:
        addressed = pb.Message()
        addressed.CopyFrom(message)
        addressed.ballot.CopyFrom(self.ballot.message())
        return Send(node, addressed)


def _agree(ready: pb.Ready, twin: pb.Ready) -> bool:
    """Whether replicas have the same weights, and the same gradient if it counts."""
    same = (ready.squared_norm, ready.digest) == (twin.squared_norm, twin.digest)
    return same or not ready.finite


def _active(view: registry.View) -> dict[str, int]:
    return {member.node: member.stage for member in view.members if not member.spare}


def _described(decision: Rebuild) -> dict[str, Any]:
    return {
        "stage": decision.stage,
        "method": decision.method,
        "sources": [source.node for source in decision.sources],
        "exact": decision.exact,
        "reason": decision.reason,
    }
