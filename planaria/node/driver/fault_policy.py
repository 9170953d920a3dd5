"""Whose fault failures are, and what that costs. A charge goes in, a verdict comes out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import NONFINITE, NUMBERS, SILENT, Cause
from planaria.node.report.events import Accused
from planaria.node.transaction.effects import Effect, Rejoin, Suspect
from planaria.node.transaction.routing import Pair
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of

NOBODY_ELSE: Final = "nobody else does"
LONGEST_PAUSE: Final = 5.0
"""Maximum seconds between attempts, after many failures in a row."""
LONGEST_REST: Final = 10
"""Limit of doublings of a rest."""
HELD_UP: Final = 12
"""Attempts that fail by a node's report take 40 s, in which two nodes that can't reach each other
get a relay."""
HELD_UP_BY_SEVERAL: Final = 4 * HELD_UP
VAIN: Final = 3
UNVOTED: Final = 2
UNEXPLAINED: Final = 2
SPOILT: Final = 3

Stages = Mapping[str, int]
"""Stages by node."""
Verdict = list[Effect]
"""What is to be done, in order: events, nodes to report to the registry, or to join anew."""


class FaultPolicy:
    """A driver's charges against members, and what follows from them. `node`: the driver's seat,
    which believes its own observations."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.failures = FailedAttempts()
        self.charges = Charges()
        self.idle = RestingMembers()
        self.spoiling = NonFiniteSources()
        self.cuts: set[Pair] = set()  # pairs of members without a link at one end

    def keep(self, members: Collection[str]) -> None:
        """Drops charges of and against nodes that are no longer members."""
        self.cuts = {pair for pair in self.cuts if pair <= set(members)}
        for part in (self.idle, self.spoiling, self.charges, self.failures):
            part.keep(members)

    def committed(self) -> None:
        self.failures = FailedAttempts()
        self.charges.committed()
        self.idle.committed()

    def is_here(self, seat: str) -> bool:
        """Whether this is a seat of the driver's node, which ends when it suspects itself."""
        return node_of(seat) == node_of(self.node)

    # --- accusations

    def is_known(self, by: str, node: str, members: Stages) -> bool:
        """Whether `by` has accused `node` since the last commit."""
        return self.failures.accused.get(by, {}).get(members[node]) == node

    def accuse(self, by: str, failed: pb.Failed, members: Stages, harmed: bool = True) -> Verdict:
        """Handles an accusation by a member or, for its own observations, by the driver. `harmed`:
        whether the attempt or the rebuild failed by it; if not, the accused stays a member, whoever
        accuses it."""
        verdict: Verdict = []
        for node in self.failures.guilty(by, failed, members):
            if failed.cause == SILENT:
                if not self.is_here(node):
                    verdict.append(Suspect(node, failed.reason, failed.cause))
                continue
            if self.believes(by, node) and harmed:
                verdict += self._remove(node, failed.reason, failed.cause)
            else:
                if self.charges.has_rest(by, node):
                    self.idle.rest(node, members[by] == members[node])
                if self.charges.is_in_vain_again(by):
                    why = f"it has accused others {VAIN} times, {node} the last time, and "
                    verdict += self._accuse(by, why + NOBODY_ELSE, members)
            accuser = by if by != node else self.node
            verdict.append(
                Accused(node=node, stage=members[node], by=accuser, reason=failed.reason)
            )
        return verdict

    def _accuse(self, node: str, why: str, members: Stages) -> Verdict:
        """Accuses a node in the driver's own name."""
        event = Accused(node=node, stage=members[node], by=self.node, reason=why)
        return [event, *self._remove(node, why, NUMBERS)]

    def _remove(self, node: str, why: str, cause: Cause) -> Verdict:
        """Gives a node no more work, and reports it. A seat of the driver's node only rests: it
        isn't removed, so its state counts."""
        if self.is_here(node):
            self.idle.rest(node, by_replica=False)
            return []
        self.idle.stop(node)
        return [Suspect(node, why, cause)]

    def believes(self, by: str, node: str) -> bool:
        """Whether the driver believes that member's accusation. It believes its own observations,
        and no other member alone: its accusation of a node must not rest on one member's."""
        if by in (node, self.node):
            return True
        if not self.charges.add(by, node):
            return False
        self.failures.corroborated(node)
        return True

    def convicted(self, by: str, failed: pb.Failed, members: Stages) -> list[str]:
        """The accused members that are found guilty. A single accuser gets as little as possible to
        do with the other accused, so that other members can find out."""
        accused = self.failures.guilty(by, failed, members)
        guilty = [node for node in accused if self.believes(by, node)]
        self.cuts |= {frozenset((by, node)) for node in accused if node not in guilty}
        return guilty

    # --- failures without an accusation

    def given_up(self, why: str, waited_for: Mapping[str, str]) -> tuple[str, Verdict]:
        """Why an attempt is given up. If two in a row fail for the same reason, the nodes that it
        waited for are suspected; `waited_for` has a sentence about each."""
        if not self.failures.is_same_reason(why) or not waited_for:
            return why, []
        why += f"; it waited for {', '.join(waited_for.values())}"
        return why, [Suspect(node, why) for node in waited_for if not self.is_here(node)]

    def charge_holdup(
        self, node: str, why: str, members: Stages, training: Stages, times: int = 1
    ) -> Verdict:
        """Charges a node that alone prevents commits, by its reports, link or silence. After enough
        charges it is accused. If it is the driver's node, that joins anew, provided that another
        can drive."""
        if not self.failures.charge(node, times):
            return []
        why = f"it holds up the run repeatedly, and {NOBODY_ELSE}: {why}"
        if not self.is_here(node):
            return self._accuse(node, why, members)
        others = self.successors(training)
        return [Rejoin(f"{why}; {others[0]} can drive")] if others else []

    def lost_between(
        self, pairs: Collection[Pair], why: str, members: Stages, training: Stages
    ) -> Verdict:
        """Handles that messages were lost between the nodes of each pair. Until it is known which
        one is wrong, one rests: then all goes well, or the other one loses something, too."""
        if guilty := self.failures.common_loser(pairs):
            known = guilty in members
            return self.charge_holdup(guilty, why, members, training, HELD_UP) if known else []
        for pair in sorted(pairs, key=sorted):
            self._let_one_rest(pair, training)
        return []

    def _let_one_rest(self, pair: Pair, training: Stages) -> None:
        """Lets a node of the pair rest if its stage has others that work."""
        working = Counter(stage for node, stage in training.items() if node not in self.idle)
        candidates = sorted(pair & training.keys() - {self.node})
        able = [n for n in candidates if working[training[n]] > (n not in self.idle)]
        if able:
            node = min(able, key=lambda node: node not in self.failures.lost_at)
            by_replica = {training.get(node) for node in pair} == {training[node]}
            self.idle.rest(node, by_replica)

    def successors(self, training: Stages) -> list[str]:
        """Nodes that could drive in this node's place."""
        own = training.get(self.node)
        return [node for node, stage in training.items() if stage == own and node != self.node]

    # --- non-finite values

    def lets_non_finite_through(self, training: Stages) -> bool:
        """Whether the model makes the non-finite values, as if a stage's working nodes all do."""
        working = {node: stage for node, stage in training.items() if node not in self.idle}
        left = {stage for node, stage in working.items() if node not in self.spoiling.why}
        return bool(self.spoiling.why) and left != set(working.values())

    def accuse_non_finite(self, begin: pb.Begin, members: Stages) -> Verdict:
        """Accuses repeated sources of non-finite values at the end of a step. If only one member
        reported a source, others are to find out."""
        verdict: Verdict = []
        for node, reason in self.spoiling.end_step(begin).items():
            reporters = self.spoiling.by.get(node, set())
            several = len({*map(node_of, reporters)}) > 1
            by = self.node if several else min(reporters, default=node)
            if by not in members:  # it has left, and was the only one to report
                continue
            self.cuts |= {frozenset((reporter, node)) for reporter in reporters if reporter != node}
            failed = pb.Failed(reason=reason, accused=[node], cause=NONFINITE)
            verdict += self.accuse(by, failed, members)
        return verdict


@dataclass
class FailedAttempts:
    """Failed attempts since the last commit, which resets them, and whose fault they may be."""

    count: int = 0  # attempts in a row
    last: str = ""  # kind of the last reason for giving up
    accused: dict[str, dict[int, str]] = field(default_factory=dict)  # nodes, by accuser and stage
    lost_at: frozenset[str] = frozenset()  # nodes that may have caused all losses so far
    lost: int = 0  # attempts in which something got lost
    by_node: Counter[str] = field(default_factory=Counter)  # failures by node

    def pause(self) -> float:
        """Seconds from a failure until the next attempt."""
        return min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self.count, 10)) if self.count > 1 else 0.0

    def is_same_reason(self, why: str) -> bool:
        """Whether an attempt failed for a reason of the same kind as the last one; notes it."""
        kind = re.sub(r"\b\d+(\.\d+)?\b", "#", why)  # reasons that differ only in numbers
        before, self.last = self.last, kind
        return self.last == before

    def charge(self, seat: str, times: int) -> bool:
        """Adds so many failures of this seat's node; whether it reached the limit."""
        self.by_node[node_of(seat)] += times
        times = self.by_node[node_of(seat)]
        return 2 * times - self.by_node.total() >= HELD_UP or times >= HELD_UP_BY_SEVERAL

    def common_loser(self, pairs: Collection[frozenset[str]]) -> str:
        """The one node that explains all losses so far, those between the nodes of each of these
        pairs included; empty: not known yet."""
        if not pairs:
            return ""
        self.lost += 1
        for pair in sorted(pairs, key=sorted):
            self.lost_at = (self.lost_at & pair) or pair
        *others, node = sorted(self.lost_at)
        return "" if others or self.lost < UNEXPLAINED else node

    def keep(self, members: Collection[str]) -> None:
        """Drops failures of nodes that are no longer members, and accusations of them: their
        successors may have the same fault."""
        self.accused = {
            by: {stage: node for stage, node in nodes.items() if node in members}
            for by, nodes in self.accused.items()
        }
        nodes = {node_of(member) for member in members}
        self.by_node = Counter({node: n for node, n in self.by_node.items() if node in nodes})
        if not self.lost_at <= set(members):
            self.lost_at, self.lost = frozenset(), 0

    def guilty(self, peer: str, failed: pb.Failed, members: Mapping[str, int]) -> list[str]:
        """The members that `peer` accuses; or `peer`, if it has accused another replica of their
        stage before: then all accusations have it in common."""
        accused = [node for node in failed.accused if node in members]
        if failed.cause == SILENT:
            return accused
        before = self.accused.setdefault(peer, {})
        if any(before.setdefault(members[node], node) != node for node in accused):
            return [peer]
        return accused

    def corroborated(self, accused: str) -> None:
        """Drops the accusations of a node that several nodes accuse. Its accusers may accuse
        another node of its stage without being suspected for it."""
        for by in self.accused.values():
            for stage in [stage for stage, node in by.items() if node == accused]:
                del by[stage]


class Charges:
    """Accusations for cause, while accuser and accused are members. One accusation keeps one
    replica from work for a while but costs no seat. A node that repeatedly accuses alone is
    wrong."""

    def __init__(self) -> None:
        self._by: dict[str, set[str]] = {}  # by accused node, its accusers
        self._kept: dict[str, str] = {}  # by accuser: the accused node that rests
        self._vain: Counter[str] = Counter()  # uncorroborated accusations, less one per commit

    def add(self, accuser: str, accused: str) -> bool:
        """Adds an accusation; whether several nodes make it, so that the accused is removed or the
        attempt goes on without it. Idempotent."""
        by = self._by.setdefault(accused, set())
        by.add(accuser)
        if len({*map(node_of, by)}) < 2:
            return False
        for other in by:
            self._vain.pop(other, None)
        return True

    def has_rest(self, accuser: str, accused: str) -> bool:
        """Whether this accuser's word makes the accused rest: it does for one accused node."""
        return self._kept.setdefault(accuser, accused) == accused

    def is_in_vain_again(self, accuser: str) -> bool:
        """Counts an accusation that nobody corroborates; whether that makes too many."""
        self._vain[accuser] += 1
        return self._vain[accuser] >= VAIN

    def committed(self) -> None:
        self._vain = self._vain - Counter(dict.fromkeys(self._vain, 1))

    def keep(self, members: Collection[str]) -> None:
        """Drops nodes that are no longer members."""
        present = set(members)
        self._by = {accused: by & present for accused, by in self._by.items() if accused in present}
        self._kept = {by: accused for by, accused in self._kept.items() if {by, accused} <= present}
        self._vain = Counter({by: times for by, times in self._vain.items() if by in present})


class RestingMembers:
    """Members that get no microbatches where their stage has others.

    Those are the nodes to be removed, and for some steps those that one member alone accuses.
    Meanwhile others may corroborate it; if none
    does, the next rest takes twice as many steps, so false accusations soon cost little. A member
    that a replica of its stage accuses, from which no plan can keep it apart, has no part in
    attempts: it follows as a joiner does."""

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}  # steps left
        self._times: Counter[str] = Counter()
        self._apart: set[str] = set()  # nodes without a part in attempts

    def __contains__(self, node: str) -> bool:
        return node in self._steps

    @property
    def nodes(self) -> set[str]:
        return set(self._steps)

    def is_to_go(self, node: str) -> bool:
        return self._steps.get(node) == math.inf

    def has_no_part(self, node: str) -> bool:
        return node in self._apart

    def stop(self, node: str) -> None:
        """Gives the node no more work: it is to be removed."""
        self._steps[node] = math.inf
        self._apart.add(node)

    def rest(self, node: str, by_replica: bool) -> None:
        """Starts a node's rest for some steps, unless it rests already. `by_replica`: a replica of
        its stage accuses it, so it has no part in attempts."""
        if by_replica:
            self._apart.add(node)
        if node not in self._steps:
            self._steps[node] = 2.0 ** min(self._times[node], LONGEST_REST)
            self._times[node] += 1

    def committed(self) -> None:
        self._steps = {node: left - 1 for node, left in self._steps.items() if left > 1}
        self._apart &= self._steps.keys()

    def keep(self, members: Collection[str]) -> None:
        """Drops nodes that are no longer members."""
        self._steps = {node: left for node, left in self._steps.items() if node in members}
        self._times = Counter({node: n for node, n in self._times.items() if node in members})
        self._apart &= self._steps.keys()


class NonFiniteSources:
    """Nodes that make non-finite values: in this step, and repeatedly."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}  # by node, in this step
        self.steps: Counter[str] = Counter()  # by node, steps in which it alone of its stage did
        self.by: dict[str, set[str]] = {}  # by node, the members that reported its values

    def heard(self, node: str, by: str, reason: str) -> None:
        self.why[node] = reason
        self.by.setdefault(node, set()).add(by)

    def end_step(self, begin: pb.Begin) -> dict[str, str]:
        """Ends the step: a node with non-finite values whose replicas had none was wrong. Returns
        the nodes that were wrong often enough, and why."""
        accused: dict[str, str] = {}
        why, self.why = self.why, {}
        for node, reason in why.items():
            if begin.non_finite:
                self.by.pop(node, None)
                continue
            self.steps[node] += 1
            if self.steps[node] >= SPOILT:
                accused[node] = f"{reason}, in {SPOILT} steps in which its replicas had none"
        return accused

    def keep(self, members: Collection[str]) -> None:
        """Drops nodes that are no longer members."""
        self.steps = Counter({node: n for node, n in self.steps.items() if node in members})
        self.by = {node: by & set(members) for node, by in self.by.items() if node in members}
