"""Placement: which node takes a vacant seat, and which node returns one.

A stage without a node that stays gets, in this order: a standby, a surplus replica, which moves, or
a node with room for one more seat. A newcomer has chosen before (`Membership.join`). With twins, a
node with room and a twin of the vacant stage comes first: it has the state, and the step in
progress continues with it. It is relieved later: a node alone at several stages gets a standby or a
surplus replica beside it at one of them. A node returns a seat when a node with fewer seats has the
stage's state too. A standby joins a stage whose nodes are all in one failure domain if it is in
another one: many nodes do not give their operator a whole stage (failure_domains.py). A node moves
only to a stage that is vacant, in one failure domain, or served alone by a node of several stages.
So none oscillates. Pure: maps node descriptions to changes, each with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planaria.bootstrap.failure_domains import NOWHERE, FailureDomain, is_apart, shared
from planaria.recovery.decide import Policy, keeper_stage


@dataclass(frozen=True)
class Candidate:
    """A node with the attributes that placement uses."""

    node: str
    stages: frozenset[int]  # of its seats; empty: a standby
    holds: frozenset[int]  # stages whose state it has
    fits: frozenset[int]  # stages that it can serve
    room: int  # maximum number of seats
    speed: float  # relative work per second
    heard: bool = True
    leaving: bool = False
    drives: bool = False
    place: FailureDomain = NOWHERE
    waits: bool = False  # for a vacant stage of its choice

    @property
    def stays(self) -> bool:
        return self.heard and not self.leaving


@dataclass(frozen=True)
class SeatAssigned:
    """The node gets a seat at `stage` for its seat at `gives` (None: it keeps all)."""

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
    """Per stage, of the nodes that stay: their number, their work per second, and their number per
    address block and per host."""

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __init__(self, stages: int) -> None:
        """An empty staffing. `stages`: body stages, L."""
        numbers = range(stages + 1)
        self.count = [0 for _ in numbers]
        self.capacity = [0.0 for _ in numbers]
        self._blocks = [Counter[str]() for _ in numbers]
        self._hosts = [Counter[str]() for _ in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Staffing) and vars(self) == vars(other)

    def add(self, stages: Collection[int], speed: float, place: FailureDomain) -> None:
        """Adds a node that serves `stages`. `speed` 0: unknown."""
        for stage in stages:
            self.count[stage] += 1
            self.capacity[stage] += (speed or 1.0) / len(stages)
            self._blocks[stage][place.block] += 1
            self._hosts[stage][place.host] += 1

    def shared(self, place: FailureDomain, stage: int) -> tuple[int, int]:
        """Counts as `failure_domains.shared` does."""
        return self._blocks[stage][place.block], self._hosts[stage][place.host]

    def is_apart(self, place: FailureDomain, stage: int) -> bool:
        """Decides as `failure_domains.is_apart` does."""
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
    """The changes, in order of application. `sitters`: in the order of joining; `stages`: body
    stages, L, of the stages 0..L; `begun`: False at the start, while nodes are awaited and only
    standbys take vacant seats; `policy`: with "redundant", a holder of a stage's state has that of
    the next one too; `useful`: nodes per stage that have work.

    A node that is alone at a stage, or the only one with its state, never leaves it; no stage stays
    vacant while a node has room."""
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
    """The fastest node with a twin of the vacant stage and room; None: no such node."""
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
    """Assigns standbys and redundant replicas to stages of nodes that are alone at several stages.
    The caller applies each change before it requests the next."""
    for crowded in [one for one in nodes.values() if len(one.stages) > 1]:
        for stage in sorted(crowded.stages, reverse=True):  # stage 0, which may drive, comes last
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
    """Assigns standbys to stages with all nodes in one failure domain. Such a stage may exceed
    `useful` by one node, unless `useful` is 1."""
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
    """Whether the node has no seat, or only one whose state a node without other seats has."""
    single = (s for s in sitters if s.node != one.node and s.stays and len(s.stages) == 1)
    return not one.stages or any(one.stages <= other.holds for other in single)


def _find(
    sitters: Sequence[Candidate], stage: int, keeper: int, why: str, begun: bool
) -> SeatAssigned | None:
    """Finds a node for a vacant stage. `keeper`: the stage whose nodes keep the data for a rebuild.
    Among nodes with room, one of these is preferred if it has at least half the best speed."""
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
    """The node's speed per seat if it takes one more."""
    return one.speed / (len(one.stages) + 1)


def _idle(
    able: Sequence[Candidate], sitters: Sequence[Candidate], stage: int, why: str
) -> SeatAssigned | None:
    """A standby, by preference of the least used failure domain; otherwise a surplus replica, by
    preference of a failure domain common at its stage; None: neither."""
    serving = [one.place for one in sitters if one.stages]
    if idle := [one for one in able if not one.stages]:
        one = min(idle, key=lambda one: shared(one.place, serving))
        return SeatAssigned(one.node, stage, f"was a standby: {why}")
    holders = Counter(stage for one in sitters if one.stays for stage in one.holds)
    surplus = [(one, of) for one in able if (of := _surplus(one, holders)) is not None]
    if not surplus:
        return None
    # Of the stage with the most holders; there, of the commonest domain; then the newest node.
    one, of = max(surplus, key=lambda found: holders[found[1]])
    left = [one.place for one in sitters if one.stays and of in one.stages]
    one = max(
        reversed([one for one, at in surplus if at == of]), key=lambda one: shared(one.place, left)
    )
    return SeatAssigned(one.node, stage, f"moves from stage {of}, which has others: {why}", of)


def _surplus(one: Candidate, holders: Counter[int]) -> int | None:
    """The stage that can lose the node, given the `holders` of each stage's state; None: the node
    is needed, or drives."""
    if len(one.stages) != 1 or one.drives:
        return None
    (stage,) = one.stages
    return stage if holders[stage] > (one.stays and stage in one.holds) else None


def _returned(sitters: Iterable[Candidate]) -> Iterator[SeatReleased]:
    """Seats to return: one per node, from the node with the most seats on; a later call sees the
    changed placement."""
    nodes = list(sitters)
    several = [one for one in nodes if len(one.stages) > 1]
    for one in sorted(several, key=lambda one: -len(one.stages)):
        better = [
            (stage, other)
            for stage in sorted(one.stages, reverse=True)  # stage 0, which may drive, comes last
            for other in nodes
            if other.stays and stage in other.holds and len(other.stages) < len(one.stages)
        ]
        if better:
            stage, other = better[0]
            why = f"{other.node} serves stage {stage}, too, and has fewer seats"
            yield SeatReleased(one.node, stage, why)
