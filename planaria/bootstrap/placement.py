"""Who takes a seat that nobody has, and who gives one back.

A stage without a node that will stay is filled by the first there is of: a standby, a surplus
replica, which moves, and a node that has room for one more seat; a newcomer has chosen before
(`Membership.join`). Where nodes have twins of the next stage, one that has the vacant stage's, and
room, comes before all these: it has the state at once, and the step under way goes on with it. It
is relieved later: who sits alone at several stages gets a standby, or a surplus replica, beside it
at one of them. A seat is given back when somebody who has fewer has the state of its stage, too.
A standby gets a seat beside others if all nodes of a stage are in one failure domain and it is in
another: nobody gets a whole stage by having many nodes (failure_domains.py). A node moves only to a
stage that is vacant or in one failure domain, or that such a node serves alone, so none moves to
and fro. Pure: what is known of the nodes goes in, what is to change comes out, each
with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planaria.bootstrap.failure_domains import NOWHERE, FailureDomain, is_apart, shared
from planaria.recovery.decide import Policy, keeper_stage


@dataclass(frozen=True)
class Candidate:
    """A node, and what matters for where it sits."""

    node: str
    stages: frozenset[int]  # of its seats; none: a standby
    holds: frozenset[int]  # of those, whose state it has
    fits: frozenset[int]  # that it could serve
    room: int  # seats that it can hold
    speed: float  # relative work per second
    heard: bool = True
    leaving: bool = False
    drives: bool = False
    place: FailureDomain = NOWHERE
    waits: bool = False  # for a stage that has nobody, as it wants to

    @property
    def stays(self) -> bool:
        return self.heard and not self.leaving


@dataclass(frozen=True)
class SeatAssigned:
    """The node gets a seat there; `gives` one at another stage for it (None: it keeps what it
    has)."""

    node: str
    stage: int
    why: str
    gives: int | None = None


@dataclass(frozen=True)
class SeatReleased:
    node: str
    stage: int
    why: str


class Staffing:
    """What each stage has of nodes that will stay: how many, how much work they do a second, and
    how many are in each block of addresses and at each host."""

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __init__(self, stages: int) -> None:
        """Of nobody. `stages`: body stages, L."""
        numbers = range(stages + 1)
        self.count = [0 for _ in numbers]
        self.capacity = [0.0 for _ in numbers]
        self._blocks = [Counter[str]() for _ in numbers]
        self._hosts = [Counter[str]() for _ in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Staffing) and vars(self) == vars(other)

    def add(self, stages: Collection[int], speed: float, place: FailureDomain) -> None:
        """A node that serves these. `speed` 0: not known."""
        for stage in stages:
            self.count[stage] += 1
            self.capacity[stage] += (speed or 1.0) / len(stages)
            self._blocks[stage][place.block] += 1
            self._hosts[stage][place.host] += 1

    def shared(self, place: FailureDomain, stage: int) -> tuple[int, int]:
        """As places.shared says."""
        return self._blocks[stage][place.block], self._hosts[stage][place.host]

    def is_apart(self, place: FailureDomain, stage: int) -> bool:
        """As places.is_apart says."""
        blocks, hosts = self._blocks[stage], self._hosts[stage]
        if len(blocks) != 1:
            return False
        return place.block not in blocks or (len(hosts) == 1 and place.host not in hosts)


def assign(
    sitters: Sequence[Candidate],
    stages: int,
    begun: bool = True,
    policy: Policy = "checkfree",
    useful: int = 64,
) -> list[SeatAssigned | SeatReleased]:
    """What is to change, in this order. `sitters`: in the order of joining; `stages`: body stages,
    L, of the stages 0..L; `begun`: nobody else is awaited, as at the start, when only standbys take
    what is vacant; `policy`: with "redundant" who has a stage's state has that of the next, too;
    `useful`: nodes a stage that have something to do.

    Who sits alone at a stage, or is the only one with its state, is never taken from there; no
    stage stays vacant while somebody has room.
    """
    nodes, twins = {one.node: one for one in sitters}, policy == "redundant"
    changes: list[SeatAssigned | SeatReleased] = []
    for returned in _returned(nodes.values()):
        one = nodes[returned.node]
        left = one.stages - {returned.stage}
        nodes[one.node] = replace(one, stages=left, holds=one.holds & left)
        changes.append(returned)
    served = {stage for one in sitters for stage in one.stages}
    staffed = {stage for one in sitters if not one.leaving for stage in one.stages}
    for stage in sorted(set(range(stages + 1)) - staffed):
        why = "has only nodes that will leave soon" if stage in served else "is vacant"
        why, there = f"stage {stage} {why}", list(nodes.values())
        taken = None
        if twins and begun and stage not in served:
            taken = _twin(there, stage, stages, why)
        keeper = keeper_stage(policy, stage, stages)
        taken = taken or _find(there, stage, keeper, why, begun)
        if taken is not None:
            changes.append(taken)
            _take(nodes, taken)
    if twins and begun:
        for taken in _relief(nodes):
            changes.append(taken)
            _take(nodes, taken)
    if begun:
        for taken in _from_elsewhere(nodes.values(), stages, useful):
            changes.append(taken)
            _take(nodes, taken)
    return changes


def _take(nodes: dict[str, Candidate], taken: SeatAssigned) -> None:
    one = nodes[taken.node]
    left = one.stages - {taken.gives}
    nodes[one.node] = replace(one, stages=left | {taken.stage}, holds=one.holds & left)


def _twin(sitters: Sequence[Candidate], stage: int, stages: int, why: str) -> SeatAssigned | None:
    """Who has a twin of the vacant stage, and room."""
    before = (stage - 1) % (stages + 1)
    able = [
        one
        for one in sitters
        if one.stays and stage in one.fits and before in one.holds and len(one.stages) < one.room
    ]
    if not able:
        return None
    one = max(able, key=_share)
    return SeatAssigned(one.node, stage, f"has its twin, and room: {why}")


def _relief(nodes: dict[str, Candidate]) -> Iterator[SeatAssigned]:
    """Standbys for who sits alone at several stages, and replicas of stages that somebody else
    serves who has no other; what is yielded has been taken when the next one is looked for."""
    for crowded in [one for one in nodes.values() if len(one.stages) > 1]:
        for stage in sorted(crowded.stages, reverse=True):  # 0, where it may drive, comes last
            there = list(nodes.values())
            alone = [s for s in crowded.stages if sum(s in one.stages for one in there) == 1]
            if len(alone) < 2 or stage not in alone or not crowded.stays:
                continue
            why = f"stage {stage} is served by {crowded.node} alone, which has others"
            able = [
                one for one in there if one.stays and stage in one.fits and _is_spared(one, there)
            ]
            if (taken := _idle(able, there, stage, why)) is not None:
                yield taken


def _from_elsewhere(
    sitters: Iterable[Candidate], stages: int, useful: int
) -> Iterator[SeatAssigned]:
    """Standbys for stages all of whose nodes are in one place. There may be one more for a stage
    than have something to do, unless that is one."""
    nodes = list(sitters)
    idle = [one for one in nodes if one.stays and not one.stages and not one.waits]
    for stage in range(stages + 1) if idle else ():
        there = [one.place for one in nodes if one.stays and stage in one.stages]
        if len(there) == 1 == useful or len({place.block for place in there}) != 1:
            continue
        for one in idle:
            if stage in one.fits and is_apart(one.place, there):
                why = f"was a standby: all of stage {stage} are in one place"
                yield SeatAssigned(one.node, stage, why)
                idle.remove(one)
                break


def _is_spared(one: Candidate, sitters: Sequence[Candidate]) -> bool:
    """Whether it serves no stage, or one whose state another node has that serves no other."""
    single = (s for s in sitters if s.node != one.node and s.stays and len(s.stages) == 1)
    return not one.stages or any(one.stages <= other.holds for other in single)


def _find(
    sitters: Sequence[Candidate], stage: int, keeper: int, why: str, begun: bool
) -> SeatAssigned | None:
    """`keeper`: the stage whose nodes keep what a rebuild needs. Of those with room one of these
    takes the seat, if it isn't much slower than others."""
    able = [one for one in sitters if one.stays and stage in one.fits and stage not in one.stages]
    if not begun:
        able = [one for one in able if not one.stages]
    if (taken := _idle(able, sitters, stage, why)) is not None or not begun:
        return taken
    free = [one for one in able if len(one.stages) < one.room]
    if not free:
        return None
    best = max(map(_share, free))
    near = [one for one in free if keeper in one.holds and _share(one) >= best / 2]
    one = max(near or free, key=_share)
    return SeatAssigned(one.node, stage, f"has room for one more seat: {why}")


def _share(one: Candidate) -> float:
    """Of its speed, what one more seat would have."""
    return one.speed / (len(one.stages) + 1)


def _idle(
    able: Sequence[Candidate], sitters: Sequence[Candidate], stage: int, why: str
) -> SeatAssigned | None:
    """A standby, of whose place fewest serve; or a replica that its stage can do without, and whose
    place it has others of, if there is one."""
    serving = [one.place for one in sitters if one.stages]
    if idle := [one for one in able if not one.stages]:
        one = min(idle, key=lambda one: shared(one.place, serving))
        return SeatAssigned(one.node, stage, f"was a standby: {why}")
    holders = Counter(stage for one in sitters if one.stays for stage in one.holds)
    surplus = [(one, of) for one in able if (of := _surplus(one, holders)) is not None]
    if not surplus:
        return None
    # Of the stage that has most, where most are beside it; of these whoever came last.
    one, of = max(surplus, key=lambda found: holders[found[1]])
    left = [one.place for one in sitters if one.stays and of in one.stages]
    one = max(
        reversed([one for one, at in surplus if at == of]), key=lambda one: shared(one.place, left)
    )
    return SeatAssigned(one.node, stage, f"moves from stage {of}, which has others: {why}", of)


def _surplus(one: Candidate, holders: Counter[int]) -> int | None:
    """The stage that can do without it, by how many have the state of each; None: it is needed, or
    drives."""
    if len(one.stages) != 1 or one.drives:
        return None
    (stage,) = one.stages
    return stage if holders[stage] > (one.stays and stage in one.holds) else None


def _returned(sitters: Iterable[Candidate]) -> Iterator[SeatReleased]:
    """Seats of the fullest first, one of each node at a time: what is left is looked at again when
    that has changed."""
    nodes = list(sitters)
    several = [one for one in nodes if len(one.stages) > 1]
    for one in sorted(several, key=lambda one: -len(one.stages)):
        better = [
            (stage, other)
            for stage in sorted(one.stages, reverse=True)  # 0, where it may drive, comes last
            for other in nodes
            if other.stays and stage in other.holds and len(other.stages) < len(one.stages)
        ]
        if better:
            stage, other = better[0]
            why = f"{other.node} serves stage {stage}, too, and has fewer seats"
            yield SeatReleased(one.node, stage, why)
