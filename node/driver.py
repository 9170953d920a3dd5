"""The driver's side of the step transaction: a machine without clock, socket or tensor.

One procedure serves every new view, lost link, failed attempt and rebuild: *gather* asks all active
members what they have, commits the step that somebody has committed already, gets state to those
without it, and begins the next step. A commit needs `Ready` from every active member.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bootstrap import registry_pb2 as registry
from node import stage_pb2 as pb
from node.effects import NEVER, Ballot, Effect, Event, Send, Suspect
from node.routing import plan, share_out, stand_ins
from recovery.decide import (
    INEXACT,
    Decision,
    Held,
    Left,
    Masking,
    Policy,
    Rebuild,
    Resume,
    RollBack,
    Source,
    Stop,
    decide,
    resume,
)
from recovery.orders import adjoining, all_orders, blocks

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
EVICTED = 3.0
"""Seconds that an attempt that goes on without a lost node waits, once it is complete, for the view
without that node; then the node isn't lost, and the attempt is given up."""
UNREACHED = 2.0
"""Seconds in which a node that a member can't reach must turn out to be lost; then the attempt is
given up."""
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
    strict: bool  # stop where the policy can't serve
    masking: Masking
    relearn: bool  # what was rebuilt inexactly
    progress: float  # seconds without any before an attempt is given up
    lr_scale: Callable[[int, int], float]  # (step, boosted_at) -> factor

    @property
    def swapped(self) -> bool:
        """Half of the microbatches visit the end stages in swapped order."""
        return self.policy == "checkfree+"


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
    stall: float = 0.0  # seconds in which nothing trained because of it
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
        self.newer: registry.View | None = None  # adopted at a step boundary
        self.greeted: set[str] = set()  # newcomers in it that haven't answered yet
        self.greeted_at = 0.0
        self.ballot = NEVER
        self.members: dict[str, int] = {}  # active members of the ballot's view: node -> stage
        self.joining: dict[str, Joiner] = {}  # those of the members that don't train yet
        self.failed_to_follow: Counter[str] = Counter()
        self.regather = ""  # why to gather at the next step boundary
        self.complete = 0.0  # when the last of those who train was ready
        self.statuses: dict[str, pb.Status] = {}
        self.awaited: set[str] = set()  # nodes whose answer the phase waits for
        self.lineage = 0  # how often the run has gone back to files
        self.boosted_at: dict[int, int] = {}  # by stage: after which step it was guessed; 0: never
        self.committed = 0
        self.last = pb.Commit()
        self.begin = pb.Begin()
        self.began_under = NEVER  # the ballot of the attempt at first
        self.masked: dict[str, float] = {}  # members without which it goes on, and since when
        self.unreached: dict[str, tuple[float, str]] = {}  # by somebody: since when, and why
        self.homes: dict[int, pb.Home] = {}
        self.ready: dict[str, pb.Ready] = {}
        self.seconds: dict[str, float] = {}
        self.lr_scale: list[float] = []
        self.began = 0.0
        self.progressed = 0.0
        self.asked = 0.0
        self.stalled: float | None = None  # since when nothing trains
        self.taken_over = False  # the first gather after another driver
        self.gathered = self.gather_began = 0.0
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
            gone = [node for node, stage in self._training() if stay.get(node) != stage]
            if not gone:
                return self._greet(view, now)
            if self._can_mask(gone):
                return self._greet(view, now) + self._mask(gone, view.reason, now)
        taken_over = self.phase is Phase.INACTIVE
        self.newer = view
        return self._gather(f"view {view.number}: {view.reason}", now, taken_over)

    def received(self, peer: str, message: pb.Message, now: float) -> list[Effect]:
        """A control message for this machine has come from `peer`."""
        body = message.WhichOneof("body")
        ballot = Ballot.of(message.ballot)
        if body == "status":
            self.greeted.discard(peer)
        if self.phase is Phase.INACTIVE or peer not in self.members:
            return []
        if body == "stale":
            return self._superseded(peer, ballot, now)
        if peer in self.masked and body != "status":
            return []
        if peer in self.joining and body in ("synced", "ready", "failed"):
            return self._heard_of_joiner(peer, ballot, message, now)
        attempting = self.phase in (Phase.RUNNING, Phase.REDUCING)
        if body == "cut" and attempting and self.began_under <= ballot:
            return self._cut(peer, message.cut, now)
        if body == "home" and self.phase is Phase.RUNNING and self.began_under <= ballot:
            return self._home(peer, message.home, now)
        if ballot != self.ballot:
            return []
        match body, self.phase:
            case "status", Phase.GATHERING:
                return self._status(peer, message.status, now)
            case "synced", Phase.SYNCING:
                return self._synced(peer, message.synced, now)
            case "ready", Phase.REDUCING:
                return self._ready(peer, message.ready, now)
            case "failed", Phase.RUNNING | Phase.REDUCING | Phase.SYNCING:
                return self._failed(peer, message.failed, now)
            case _:
                return []

    def link_lost(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Messages to or from `peer` may be lost: nothing that waits for it can be trusted."""
        if self.phase is Phase.INACTIVE:
            return []
        if peer in self.greeted and self.newer is not None:
            return [self._greeting(peer, self.newer)]  # its link may only have been dialled anew
        if peer not in self.members:
            return []
        if peer in self.masked:
            return []
        lost = Event("lost", {"node": peer, "stage": self.members[peer], "reason": reason})
        if peer in self.joining and self.phase in (Phase.RUNNING, Phase.REDUCING):
            self.joining[peer].caught_up = self.joining[peer].ready = None
            return [lost, *self._if_all_ready(now)]
        if self._can_mask([peer]):
            return [lost, *self._mask([peer], f"the link to {peer} is lost: {reason}", now)]
        return [lost, *self._gather(f"the link to {peer} is lost: {reason}", now)]

    def link_up(self, peer: str, now: float) -> list[Effect]:
        """Who is masked and reached again was not lost: it is a member, without which nothing can
        be committed."""
        if peer in self.masked and self.phase in (Phase.RUNNING, Phase.REDUCING):
            return self._gather(f"{peer} isn't lost: its link is up again", now)
        return []

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
                effects = self._joiners_out_of_time(now) + self._unreached_too_long(now)
                return effects or self._out_of_patience(now)
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

    def _greet(self, view: registry.View, now: float) -> list[Effect]:
        """A newcomer that is still building its stage can't answer, so nobody waits for it yet."""
        self.newer, self.greeted_at = view, now
        self.greeted = _active(view).keys() - self.members.keys()
        return [self._greeting(node, view) for node in sorted(self.greeted)]

    def _greeting(self, node: str, view: registry.View) -> Send:
        return Send(node, pb.Message(ballot=Ballot(view.number, 0).message(), query=pb.Query()))

    def _adopts(self, now: float) -> bool:
        """Whether the newer view, if there is one, is to be adopted at this step boundary."""
        late = now - self.greeted_at >= self.rules.progress
        return self.newer is not None and (late or not self.greeted)

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
        self.masked, self.unreached = {}, {}
        self.regather = ""
        self.statuses = {}
        self.taken_over = taken_over
        self.asked = self.gathered = self.gather_began = now
        self.why = why
        return effects + [self._to(node, pb.Message(query=pb.Query())) for node in self.members]

    def _adopt(self) -> None:
        if self.newer is None:
            return
        self.view, self.newer = self.newer, None
        self.greeted = set()
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
        newest = max(self.statuses.values(), key=_age)
        effects: list[Effect] = []
        if self.taken_over and any(
            status.attempting == newest.committed + 1 for status in self.statuses.values()
        ):
            effects += self._aborted("its driver is gone", newest.committed + 1)
        self.taken_over = False
        self.lineage, self.committed, self.last = newest.lineage, newest.committed, newest.last
        known = self.view.lineage, self.view.committed
        reason = (
            f"everything is lost: step {self.view.committed} was committed once, but the "
            f"newest state that is left is of step {newest.committed}"
        )
        all_lost = (self.lineage, self.committed + 1) < known
        if self._only_joiners(newest):
            all_lost = True
            reason = (
                "everything is lost: none of those who trained is left, and they may have gone on "
                f"after step {newest.committed} without the joiners that have its state"
            )
        if all_lost or _age(newest) == (0, 0):
            found = resume(self._held(), self.rules.stages)
            if found is not None:
                return effects + self._resume(found, now)
        if all_lost and self.rules.policy == "checkpoint":
            if vacant := self._vacant():
                return effects + self._wait_for_nodes(vacant)
            reason = "everything is lost, and no checkpoint is whole yet: back to initial weights"
            return effects + self._roll_back(RollBack(0, 0, reason), now)
        if all_lost:
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

    def _only_joiners(self, newest: pb.Status) -> bool:
        """Whether all who have the newest state only follow: no commit has needed their vote."""
        having = [s for s in self.statuses.values() if _age(s) == _age(newest)]
        having += [s for s in self.statuses.values() if self._can_follow(s)]
        return newest.committed > 0 and all(status.following for status in having)

    # --- sync: state for those without it

    def _held(self) -> list[Held]:
        return [
            Held(
                one.kind,  # type: ignore[arg-type]
                Source(node, one.stage, one.step, one.lineage),
                (one.made.view, one.made.attempt),
            )
            for node, status in sorted(self.statuses.items())
            for one in status.holdings
        ]

    def _left(self) -> Left:
        survivors: dict[int, list[str]] = {}
        trained = set()
        self.boosted_at = {}
        for node, status in self.statuses.items():
            if _age(status) == (self.lineage, self.committed):
                survivors.setdefault(self.members[node], []).append(node)
                self.boosted_at[self.members[node]] = status.boosted_at
                if status.boosted_at < self.committed:
                    trained.add(self.members[node])
        return Left(
            self.rules.stages,
            self.committed,
            survivors,
            self.lineage,
            self._held(),
            untrained=frozenset(survivors.keys() - trained),
            made=Ballot.of(self.last.ballot),
        )

    def _nodes_of(self, stage: int) -> list[str]:
        return sorted(node for node, at in self.members.items() if at == stage)

    def _vacant(self) -> list[int]:
        return [stage for stage in range(self.rules.stages + 1) if not self._nodes_of(stage)]

    def _sync(self, now: float) -> list[Effect]:
        left = self._left()
        vacant = self._vacant()
        decisions: dict[int, Decision] = {}
        for stage in range(self.rules.stages + 1):
            whole = len(left.survivors.get(stage, ())) == len(self._nodes_of(stage))
            if (self.lineage, self.committed) > (0, 0) and (stage in vacant or not whole):
                decisions[stage] = decide(stage, left, self.rules.policy, self.rules.strict)
        for decision in decisions.values():
            if isinstance(decision, Stop):
                if self.finished:
                    return self._finish(now)
                return self._halt(pb.Halt(reason=decision.reason, step=self.committed), now)
        following = self._go_on_following(left, now)
        rebuilds = {of: d for of, d in decisions.items() if isinstance(d, Rebuild)}
        if vacant:  # who comes yet may tell more; replicas need not wait for that
            rebuilds = {of: d for of, d in rebuilds.items() if d.method == "replica"}
        elif len(rebuilds) < len(decisions) and not self.finished:
            return self._roll_back(
                next(d for d in decisions.values() if isinstance(d, RollBack)), now
            )
        copies: dict[int, Rebuild] = {}
        if not vacant and all(self._may_follow(d, left) for d in rebuilds.values()):
            rebuilds, copies = {}, rebuilds
        effects = self._sync_stages(rebuilds, left)
        if not vacant:
            effects = effects or self._sync_twins()
        if effects:
            return following + self._wait_for_state(effects, now)
        if vacant and not self.finished:
            return following + self._wait_for_nodes(vacant)
        return following + self._begin_following(copies, left, now) + self._next(now)

    def _wait_for_state(self, effects: list[Effect], now: float) -> list[Effect]:
        self.phase = Phase.SYNCING
        self.began = self.progressed = now
        for node in self.awaited:
            self.joining.pop(node, None)
        return effects

    def _wait_for_nodes(self, vacant: Sequence[int]) -> list[Effect]:
        self.phase = Phase.WAITING
        stages = ", ".join(map(str, vacant))
        self.why = f"waiting for a node to join stage {stages}: planaria node --join ..."
        return [Event("waiting", {"stages": list(vacant), "reason": self.why})]

    def _sync_stages(self, rebuilds: Mapping[int, Rebuild], left: Left) -> list[Effect]:
        """One node rebuilds a lost stage; its replicas copy from it later, so that they are
        identical."""
        joiners = {}
        for stage, decision in rebuilds.items():
            lacking = self._lacking(stage, left)
            if decision.method == "save":  # read by who has it
                lacking = [source.node for source in decision.sources]
            joiners[stage] = lacking if decision.method == "replica" else lacking[:1]
        self.awaited = {node for nodes in joiners.values() for node in nodes}
        guessed = [stage for stage, decision in rebuilds.items() if decision.method in INEXACT]
        together = {
            stage: block
            for block in blocks(all_orders(self.rules.stages, self.rules.swapped), guessed)
            for stage in block
        }
        effects: list[Effect] = []
        for stage, decision in rebuilds.items():
            sync = self._sync_message(decision.method, decision.reason, decision.sources)
            sync.last.CopyFrom(self.last)
            if self.rules.relearn and stage in together:
                block = together[stage]
                sync.lost.extend(pb.Place(node=joiners[of][0], stage=of) for of in block)
                sync.neighbours.extend(self._around(block, left))
            for node in joiners[stage]:
                effects.append(Event("rebuilding", {"node": node, **_described(decision)}))
                effects.append(self._to(node, pb.Message(sync=sync)))
        return effects

    def _lacking(self, stage: int, left: Left) -> list[str]:
        """Who has neither the state nor, since it follows, a way to it."""
        here = {*left.survivors.get(stage, ()), *self.joining}
        return [node for node in self._nodes_of(stage) if node not in here]

    def _around(self, block: Sequence[int], left: Left) -> list[pb.Place]:
        """Survivors that microbatches come from, and go to, before and after these stages."""
        return [
            pb.Place(node=node, stage=stage)
            for stage in adjoining(all_orders(self.rules.stages, self.rules.swapped), block)
            for node in sorted(left.survivors.get(stage, ()))
        ]

    def _sync_message(self, method: str, reason: str, sources: Sequence[Source]) -> pb.Sync:
        return pb.Sync(
            step=self.committed,
            lineage=self.lineage,
            method=method,
            reason=reason,
            sources=[
                pb.Source(node=s.node, stage=s.stage, step=s.step, lineage=s.lineage)
                for s in sources
            ],
        )

    def _roll_back(self, to: RollBack, now: float) -> list[Effect]:
        """All stages go back, as the checkpoint policy has it."""
        event = Event("rolled back", {"from": self.committed, "step": to.step, "reason": to.reason})
        self._open_lineage(to.step)
        effects: list[Effect] = [event]
        for node, stage in sorted(self.members.items()):
            source = Source(node, stage, to.step, to.lineage)
            sync = self._sync_message("checkpoint", to.reason, [source])
            effects.append(self._to(node, pb.Message(sync=sync)))
        self.awaited = set(self.members)
        return self._wait_for_state(effects, now)

    def _resume(self, found: Resume, now: float) -> list[Effect]:
        """Nothing is left but files: whoever has one that fits loads it, the others copy later."""
        if vacant := self._vacant():
            return self._wait_for_nodes(vacant)
        fields = {"step": found.step, "exact": found.exact, "reason": found.reason}
        effects: list[Effect] = [Event("resuming", fields)]
        self._open_lineage(found.step)
        self.awaited = set()
        for sources in found.sources.values():
            for source in sources:
                sync = self._sync_message("save", found.reason, [source])
                self.awaited.add(source.node)
                effects.append(self._to(source.node, pb.Message(sync=sync)))
        return self._wait_for_state(effects, now)

    def _open_lineage(self, step: int) -> None:
        """What is committed after `step` from now on is another thing than what was before."""
        held = [one.source.lineage for one in self._held()]
        self.lineage = 1 + max(self.lineage, self.view.lineage, *held)
        self.committed = step

    def _synced(self, peer: str, synced: pb.Synced, now: float) -> list[Effect]:
        self.awaited.discard(peer)
        self.progressed = now
        if synced.method != "twin":
            stale = self._staleness(synced) if synced.method == "snapshot" else {}
            who = {"node": peer, "stage": self.members[peer]}
            seconds = {"rebuild_seconds": now - self.began}
            self.rebuilt.append({**who, **_rebuilt(synced), **stale, **seconds})
        return [] if self.awaited else self._gather("state is in place", now)

    def _staleness(self, synced: pb.Synced) -> dict[str, Any]:
        """Of a snapshot that was used, as its holder has told."""
        source = synced.sources[0]
        held = next(
            one
            for one in self.statuses[source.node].holdings
            if (one.kind, one.stage) == ("snapshot", source.stage)
        )
        return {
            "oldest_step": held.oldest_step,
            "mean_step": held.mean_step,
            "perturbation": None if math.isnan(held.perturbation) else held.perturbation,
        }

    def _sync_twins(self) -> list[Effect]:
        """With redundant computation, who lacks a twin of this very step copies the next stage."""
        if self.rules.policy != "redundant" or (self.lineage, self.committed) == (0, 0):
            return []
        self.awaited = set()
        effects: list[Effect] = []
        for node, stage in sorted(self.members.items()):
            of = (stage + 1) % (self.rules.stages + 1)
            wanted = ("redundant", of, self.committed, self.lineage)
            held = self.statuses[node].holdings
            if wanted in [(one.kind, one.stage, one.step, one.lineage) for one in held]:
                continue
            sources = [Source(n, of, self.committed, self.lineage) for n in self._nodes_of(of)]
            sync = self._sync_message("twin", f"{node} lacks a twin of stage {of}", sources)
            sync.last.CopyFrom(self.last)
            self.awaited.add(node)
            effects.append(self._to(node, pb.Message(sync=sync)))
        return effects

    # --- joiners that follow while the others train

    def _training(self) -> list[tuple[str, int]]:
        without = self.joining.keys() | self.masked.keys()
        return [(n, stage) for n, stage in sorted(self.members.items()) if n not in without]

    def _may_follow(self, decision: Rebuild, left: Left) -> bool:
        """The replicas of a stage that has just been rebuilt are waited for, as was the first. With
        redundant computation all are, for a node needs its twin, too, before it can train."""
        stage = decision.stage
        tried = any(self.failed_to_follow[n] >= FOLLOWS for n in self._lacking(stage, left))
        rebuilt = any(r["stage"] == stage and r["method"] != "replica" for r in self.rebuilt)
        copied = decision.method == "replica" and self.rules.policy != "redundant"
        return copied and not (tried or rebuilt or self._is_over())

    def _begin_following(
        self, copies: Mapping[int, Rebuild], left: Left, now: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        for stage, decision in copies.items():
            sync = self._sync_message(decision.method, decision.reason, decision.sources)
            sync.last.CopyFrom(self.last)
            sync.follow = True
            for node in self._lacking(stage, left):
                effects.append(Event("rebuilding", {"node": node, **_described(decision)}))
                effects.append(self._to(node, pb.Message(sync=sync)))
                self.joining[node] = Joiner(self.committed, now, now - self.gather_began)
        return effects

    def _go_on_following(self, left: Left, now: float) -> list[Effect]:
        """Everybody has answered: who has the newest state is in, who is on the way to it goes on,
        and all others have to begin anew."""
        effects: list[Effect] = []
        before, self.joining = self.joining, {}
        for node, status in self.statuses.items():
            joiner = before.get(node)
            if node in left.survivors.get(self.members[node], ()):
                if joiner is not None:
                    self._enter(node, joiner, now)
                continue
            if joiner is None or joiner.step != status.following:
                joiner = Joiner(status.following, now)
            missed = self.committed - status.heard
            fed = left.survivors.get(self.members[node]) and status.following
            same = status.following_lineage == self.lineage and missed in (0, 1)
            if not (fed and same) or joiner.failed or self._is_over():
                continue
            if missed:
                effects.append(self._to(node, pb.Message(step=pb.Step(commit=self.last))))
            self.joining[node] = joiner
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
        joiner.failed, joiner.caught_up, joiner.ready = True, None, None
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
        """Decide when all who train are ready, and, for a short while, who would like to enter.

        Not while somebody without whom the attempt goes on is still a member: others may train with
        that node, and without this one, in a view that this node doesn't know."""
        if self.phase is not Phase.REDUCING or self.awaited:
            return []
        self.complete = self.complete or now
        if members := self._masked_members():
            if now - self.complete < EVICTED:
                return []
            return self._gather(f"{', '.join(members)} isn't lost after all", now)
        entering = [joiner for joiner in self.joining.values() if joiner.caught_up is not None]
        usual = max(ENTERING, ENTERING_SHARE * (self.complete - self.began))
        waited = now - self.complete
        late = [joiner for joiner in entering if joiner.ready is None]
        if any(waited < usual * 2.0 ** min(joiner.vain, 10) for joiner in late):
            return []
        for joiner in entering:
            joiner.stall += waited
        for joiner in late:
            joiner.vain += 1
        return self._decide(now)

    def _masked_members(self) -> list[str]:
        return sorted(self.masked.keys() & _active(self.newer or self.view).keys())

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
        who = {"node": node, "stage": self.members[node]}
        seconds = {"rebuild_seconds": now - joiner.began, "stall_seconds": joiner.stall}
        self.rebuilt.append({**who, **_rebuilt(synced), **seconds})

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
                plan=self._plan(rules.validation_microbatches, swapped=False),
                members=self._places(),
                joining=self._joiners(),
            )
        self.lr_scale = [
            rules.lr_scale(self.committed + 1, self.boosted_at.get(stage, 0))
            for stage in range(rules.stages + 1)
        ]
        return pb.Begin(
            step=self.committed + 1,
            plan=self._plan(rules.microbatches, rules.swapped),
            lr_scale=self.lr_scale,
            members=self._places(),
            joining=self._joiners(),
        )

    def _places(self) -> list[pb.Place]:
        return [pb.Place(node=node, stage=stage) for node, stage in self._training()]

    def _plan(self, count: int, swapped: bool) -> list[pb.Microbatch]:
        """Each microbatch with a node for each visit."""
        replicas = [self._training_at(stage) for stage in range(self.rules.stages + 1)]
        place = {place.node: index for index, place in enumerate(self._places())}
        return [
            pb.Microbatch(
                id=identity,
                source=route.nodes[0],
                order=route.stages[1:-1],
                places=[place[node] for node in route.nodes[1:-1]],
            )
            for identity, route in enumerate(plan(count, replicas, self.seconds, swapped))
        ]

    def _training_at(self, stage: int) -> list[str]:
        return [node for node, at in self._training() if at == stage]

    def _send_step(self, step: pb.Step, now: float) -> list[Effect]:
        if not step.ByteSize():
            return []
        self.ballot = Ballot(self.ballot.view, self.ballot.attempt + 1)
        effects: list[Effect] = [
            self._to(node, pb.Message(step=step))
            for node in sorted(self.members.keys() - self.masked.keys())
        ]
        if step.HasField("begin"):
            self.phase = Phase.RUNNING
            self.begin, self.began_under = step.begin, self.ballot
            self.homes, self.unreached = {}, {}
            self.began = self.progressed = now
            effects += self._report_rebuilds(now)
        return effects

    def _report_rebuilds(self, now: float) -> list[Effect]:
        stall = 0.0 if self.stalled is None else now - self.stalled
        self.stalled = None
        rebuilt, self.rebuilt = self.rebuilt, []
        return [Event("rebuilt", {"stall_seconds": stall, **fields}) for fields in rebuilt]

    def _home(self, peer: str, home: pb.Home, now: float) -> list[Effect]:
        if all((m.id, m.source) != (home.microbatch, peer) for m in self.begin.plan):
            return []  # another's by now
        self.homes[home.microbatch] = home
        self.progressed = now
        return self._if_all_home(now)

    def _if_all_home(self, now: float) -> list[Effect]:
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
        if self.newer is not None and self._adopts(now):
            self.phase = Phase.WAITING
            effects = self._send_step(step, now)
            return effects + self._gather(f"view {self.newer.number}: {self.newer.reason}", now)
        if self.regather:
            self.phase = Phase.WAITING
            return self._send_step(step, now) + self._gather(self.regather, now)
        begin = self._what_next(now)
        if begin is None and (self.joining or self.newer is not None):
            self.phase = Phase.WAITING
            return self._send_step(step, now) + self._gather("all shall have the end", now)
        if begin is not None:
            step.begin.CopyFrom(begin)
            return self._send_step(step, now)
        return self._send_step(step, now) + self._finish(now)

    # --- an attempt that goes on without lost nodes

    def _can_mask(self, nodes: Collection[str]) -> bool:
        """Whether the attempt can do without these: each of their stages has others that train."""
        attempting = self.phase in (Phase.RUNNING, Phase.REDUCING)
        if self.rules.masking == "abort" or not attempting or self.node in nodes:
            return False
        left = {stage for node, stage in self._training() if node not in nodes}
        trains = all((node, self.members.get(node)) in self._training() for node in nodes)
        return trains and self.begin.kind == pb.Begin.TRAIN and len(left) > self.rules.stages

    def _mask(self, nodes: Sequence[str], why: str, now: float) -> list[Effect]:
        """The attempt goes on, by a plan in which others have the microbatches of these nodes."""
        before = self.begin
        self.masked.update(dict.fromkeys(nodes, now))
        begin, moved = self._without_masked(before)
        self.begin = begin
        self.homes = {
            identity: home
            for identity, home in self.homes.items()
            if begin.plan[identity].source == before.plan[identity].source
        }
        self.ballot = Ballot(self.ballot.view, self.ballot.attempt + 1)
        self.phase = Phase.RUNNING
        self.ready, self.progressed = {}, now
        fields = {"step": begin.step, "nodes": sorted(nodes), "microbatches": moved, "reason": why}
        effects: list[Effect] = [Event("masked", fields)]
        for node in sorted(self.members.keys() - self.masked.keys()):
            effects.append(self._to(node, pb.Message(step=pb.Step(begin=begin))))
        return effects + self._if_all_home(now)

    def _without_masked(self, before: pb.Begin) -> tuple[pb.Begin, int]:
        """The plan with the microbatches of masked nodes shared out among the replicas that are
        left, and how many those are, counted at each stage."""
        begin = pb.Begin()
        begin.CopyFrom(before)
        begin.since.CopyFrom(self.began_under.message())
        del begin.members[:]
        begin.members.extend(self._places())
        place = {member.node: index for index, member in enumerate(begin.members)}
        moved = 0
        for stage in range(self.rules.stages + 1):
            served = [_server(before, microbatch, stage) for microbatch in before.plan]
            lost = [identity for identity, node in enumerate(served) if node in self.masked]
            for identity, node in zip(lost, self._successors(before, stage, lost), strict=True):
                served[identity] = node
            moved += len(lost)
            for microbatch, node in zip(begin.plan, served, strict=True):
                if stage == 0:
                    microbatch.source = node
                else:
                    microbatch.places[list(microbatch.order).index(stage)] = place[node]
        return begin, moved

    def _successors(self, before: pb.Begin, stage: int, lost: Sequence[int]) -> list[str]:
        """Who gets these microbatches of masked nodes: who has done a part of them ahead, if there
        is somebody; else all who are left, by their speed."""
        left = self._training_at(stage)
        shared = share_out(lost, left, self.seconds)
        if self.rules.masking != "spare":
            return shared
        ahead = stand_ins(before.members)
        owners = [_server(before, before.plan[identity], stage) for identity in lost]
        return [
            ahead[owner] if ahead[owner] in left else other
            for owner, other in zip(owners, shared, strict=True)
        ]

    def _cut(self, peer: str, cut: pb.Cut, now: float) -> list[Effect]:
        """`peer` can't reach a node, which is lost, or will be found to be."""
        if cut.node in self.masked:
            return []
        if not self._can_mask([cut.node]):
            return self._failed(peer, pb.Failed(reason=cut.reason, accused=[cut.node]), now)
        self.unreached.setdefault(cut.node, (now, f"{peer} can't reach {cut.node}: {cut.reason}"))
        return [Suspect(cut.node, cut.reason)]

    def _unreached_too_long(self, now: float) -> list[Effect]:
        for node, (since, why) in self.unreached.items():
            if node not in self.masked and now - since >= UNREACHED:
                return self._gather(why, now)
        return []

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


def _server(begin: pb.Begin, microbatch: pb.Microbatch, stage: int) -> str:
    """The node that has this microbatch at that stage."""
    if stage == 0:
        return microbatch.source
    return begin.members[microbatch.places[list(microbatch.order).index(stage)]].node


def _agree(ready: pb.Ready, twin: pb.Ready) -> bool:
    """Whether replicas have the same weights, and the same gradient if it counts."""
    same = (ready.squared_norm, ready.digest) == (twin.squared_norm, twin.digest)
    return same or not ready.finite


def _active(view: registry.View) -> dict[str, int]:
    return {member.node: member.stage for member in view.members if not member.spare}


def _age(status: pb.Status) -> tuple[int, int]:
    return status.lineage, status.committed


def _described(decision: Rebuild) -> dict[str, Any]:
    return {
        "stage": decision.stage,
        "method": decision.method,
        "sources": [source.node for source in decision.sources],
        "exact": decision.exact,
        "fallback": decision.fallback,
        "reason": decision.reason,
    }


def _rebuilt(synced: pb.Synced) -> dict[str, Any]:
    """What a node says of its rebuild, for the events."""
    fields: dict[str, Any] = {
        "method": synced.method,
        "step": synced.step,
        "sources": [{"node": s.node, "stage": s.stage, "step": s.step} for s in synced.sources],
        "bytes": synced.fetched_bytes,
        "fetch_seconds": synced.seconds,
    }
    if synced.HasField("relearned"):
        relearned = synced.relearned
        fields["relearned"] = {
            "residual_before": relearned.residual_before,
            "residual_after": relearned.residual_after,
            "passes": relearned.passes,
            "seconds": relearned.seconds,
            "bytes": relearned.fetched_bytes,
            "pairs": relearned.pairs,
            "left_out": relearned.left_out,
            "undone": relearned.undone,
        }
    return fields
