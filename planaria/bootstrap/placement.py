"""Placement: which node takes a vacant seat, and which node returns one.

A stage without a node that stays gets, in this order: a standby, a surplus replica, which moves, or
a node with room for one more seat. A newcomer has chosen before (`Membership.join`). With twins, a
node with room and a twin of the vacant stage comes first: it has the state, and the step in
progress continues with it. It is relieved later: a node alone at several stages gets a standby or a
surplus replica beside it at one of them. A node returns a seat when a node with fewer seats has the
stage's state too. A standby joins a stage whose nodes are all in one failure domain if it is in
another one: many nodes do not give their operator a whole stage (failure_domains.py). A node moves
only to a stage that is vacant, in one failure domain, or served alone by a node of several stages.
So none oscillates. While all is well, seats move so that steps become shorter (rebalancing.py).
Pure: maps node descriptions to changes, each with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planaria.bootstrap import rebalancing
from planaria.bootstrap.candidates import Candidate, SeatAssigned, SeatReleased
from planaria.bootstrap.failure_domains import Census, FailureDomain
from planaria.bootstrap.step_time import Outlook
from planaria.recovery.policy import POLICIES, Policy


@dataclass
class Staffing:
    """How each stage is staffed with nodes that stay: their number, how many of them serve no other
    stage, work per second, and places."""

    count: list[int]
    dedicated: list[int]
    capacity: list[float]
    places: list[Census]

    @classmethod
    def empty(cls, stages: int) -> Staffing:
        """`stages`: body stages, L."""
        numbers = range(stages + 1)
        zeros = [0 for _ in numbers]
        return cls(zeros, [*zeros], [0.0 for _ in numbers], [Census() for _ in numbers])

    def add(self, stages: Collection[int], speed: float, place: FailureDomain) -> None:
        """Adds a node that serves `stages`. `speed` 0: unknown."""
        for stage in stages:
            self.count[stage] += 1
            self.dedicated[stage] += len(stages) == 1
            self.capacity[stage] += (speed or 1.0) / len(stages)
            self.places[stage].add(place)

    def has_room(self, stage: int, most: int) -> bool:
        """Whether a newcomer has work at a stage for which `most` nodes have. Beside nodes of
        several stages it has: one of them may return its seat."""
        return self.count[stage] < most or (stage > 0 and not self.dedicated[stage])


def choose_among(fits: list[int], staff: Staffing, place: FailureDomain) -> tuple[int, str]:
    """Chooses the weakest stage for a newcomer, and says why. First, stages with several nodes in
    one failure domain other than the newcomer's. Else the stage of least capacity, or, up to twice
    that, the one with the fewest nodes in the newcomer's domain."""
    in_one = [s for s in fits if staff.count[s] > 1 and staff.places[s].is_apart(place)]
    least = min(staff.capacity[s] for s in in_one or fits)
    suitable = [s for s in in_one or fits if staff.capacity[s] <= 2 * least]

    def order(stage: int) -> tuple[bool, bool, float, int]:
        blocks, hosts = staff.places[stage].shared(place)
        return blocks > 0, hosts > 0, staff.capacity[stage], stage

    stage = min(suitable, key=order)
    if in_one:
        return stage, f"stage {stage} had all its nodes in one failure domain"
    if staff.capacity[stage] > least:
        return (
            stage,
            f"stage {stage} had no node in its failure domain (capacity {staff.capacity[stage]:g})",
        )
    return stage, f"stage {stage} had the least capacity ({staff.capacity[stage]:g})"


def assign(
    candidates: Sequence[Candidate],
    stages: int,
    begun: bool = True,
    policy: Policy = POLICIES["checkfree"],
    useful: int = 64,
    outlook: Outlook | None = None,
) -> list[SeatAssigned | SeatReleased]:
    """Decides which seats nodes take and return, in order of application. `candidates`: in the
    order of joining; `stages`: body stages, L, of the stages 0..L; `begun`: False at the start,
    while nodes are awaited and only standbys take vacant seats; `policy`: with twins, a holder of a
    stage's state has that of the next one too; `useful`: nodes per stage that have work; `outlook`:
    None while too little is measured to compare placements.

    A node that is alone at a stage, or the only one with its state, never leaves it; no stage stays
    vacant while a node has room."""
    nodes, twins = {node.node: node for node in candidates}, policy.twins
    changes: list[SeatAssigned | SeatReleased] = []

    def make(change: SeatAssigned | SeatReleased) -> None:
        node = nodes[change.node]
        if isinstance(change, SeatReleased):
            remaining = stages_after = node.stages - {change.stage}
        else:
            remaining = node.stages - {change.gives}
            stages_after = remaining | {change.stage}
        holds, waits = node.holds & remaining, node.waits or not stages_after
        nodes[node.node] = replace(node, stages=stages_after, holds=holds, waits=waits)
        changes.append(change)

    pairs = rebalancing.unfinished_moves(nodes, outlook) if outlook else {}
    for returned in _returned(nodes.values(), pairs):
        make(returned)
    if outlook and not changes and (ended := rebalancing.returned(pairs, nodes, outlook)):
        make(ended)
    served = {stage for node in candidates for stage in node.stages}
    staffed = {stage for node in candidates if not node.leaving for stage in node.stages}
    for stage in sorted(set(range(stages + 1)) - staffed):
        why = "has only nodes that will leave soon" if stage in served else "is vacant"
        why, current = f"stage {stage} {why}", list(nodes.values())
        assigned = None
        if twins and begun and stage not in served:
            assigned = _twin(current, stage, stages, why)
        keeper = policy.keeper(stage, stages)
        assigned = assigned or _find_node(current, stage, keeper, why, begun)
        if assigned is not None:
            make(assigned)
    if twins and begun:
        for assigned in _relief(nodes, weighed=outlook is not None):
            make(assigned)
    if begun:
        for assigned in _from_elsewhere(nodes.values(), stages, useful):
            make(assigned)
    if begun and outlook and not changes and (move := rebalancing.next_move(nodes, outlook)):
        make(move)
    return changes


def _twin(
    candidates: Sequence[Candidate], stage: int, stages: int, why: str
) -> SeatAssigned | None:
    """The fastest node with a twin of the vacant stage and room; None: no such node."""
    preceding = (stage - 1) % (stages + 1)
    suitable = [
        node
        for node in candidates
        if node.stays
        and stage in node.fits
        and preceding in node.holds
        and len(node.stages) < node.room
    ]
    if not suitable:
        return None
    node = max(suitable, key=_speed_per_seat)
    return SeatAssigned(node.node, stage, f"has its twin, and room: {why}")


def _relief(nodes: dict[str, Candidate], weighed: bool) -> Iterator[SeatAssigned]:
    """Assigns standbys and redundant replicas to stages of nodes that are alone at several stages.
    The caller applies each change before it requests the next. `weighed`: a standby that waits may
    be one because it makes steps longer."""
    for crowded in [node for node in nodes.values() if len(node.stages) > 1]:
        for stage in sorted(crowded.stages, reverse=True):  # stage 0, which may drive, comes last
            current = list(nodes.values())
            alone = [s for s in crowded.stages if sum(s in node.stages for node in current) == 1]
            if len(alone) < 2 or stage not in alone or not crowded.stays:
                continue
            why = f"stage {stage} is served only by {crowded.node}, which has other stages"
            suitable = [
                node
                for node in current
                if node.stays and stage in node.fits and _is_spared(node, current)
                if node.stages or not (weighed and node.waits)
            ]
            if (assigned := _standby_or_surplus(suitable, current, stage, why)) is not None:
                yield assigned


def _from_elsewhere(
    candidates: Iterable[Candidate], stages: int, useful: int
) -> Iterator[SeatAssigned]:
    """Assigns standbys to stages with all nodes in one failure domain. Such a stage may exceed
    `useful` by one node, unless `useful` is 1."""
    nodes = list(candidates)
    idle = [node for node in nodes if node.stays and not node.stages and not node.waits]
    for stage in range(stages + 1) if idle else ():
        domains = [node.place for node in nodes if node.stays and stage in node.stages]
        if len(domains) == 1 == useful or len({place.block for place in domains}) != 1:
            continue
        census = Census(domains)
        for node in idle:
            if stage in node.fits and census.is_apart(node.place):
                why = f"was a standby: all nodes of stage {stage} are in one failure domain"
                yield SeatAssigned(node.node, stage, why)
                idle.remove(node)
                break


def _is_spared(node: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether a node has no seat, or only one whose state a node without other seats has."""
    single = (s for s in candidates if s.node != node.node and s.stays and len(s.stages) == 1)
    return not node.stages or any(node.stages <= other.holds for other in single)


def _find_node(
    candidates: Sequence[Candidate], stage: int, keeper: int, why: str, begun: bool
) -> SeatAssigned | None:
    """Finds a node for a vacant stage. `keeper`: the stage whose nodes keep the data for a rebuild.
    Among nodes with room, one of these is preferred if it has at least half the best speed."""
    suitable = [
        node
        for node in candidates
        if node.stays and stage in node.fits and stage not in node.stages
    ]
    if not begun:
        suitable = [node for node in suitable if not node.stages]
    if (assigned := _standby_or_surplus(suitable, candidates, stage, why)) is not None or not begun:
        return assigned
    free = [node for node in suitable if len(node.stages) < node.room]
    if not free:
        return None
    best = max(map(_speed_per_seat, free))
    near = [node for node in free if keeper in node.holds and _speed_per_seat(node) >= best / 2]
    node = max(near or free, key=_speed_per_seat)
    return SeatAssigned(node.node, stage, f"has room for one more seat: {why}")


def _speed_per_seat(node: Candidate) -> float:
    """A node's speed per seat, if it takes one more."""
    return node.speed / (len(node.stages) + 1)


def _standby_or_surplus(
    able: Sequence[Candidate], candidates: Sequence[Candidate], stage: int, why: str
) -> SeatAssigned | None:
    """A standby, by preference of the least used failure domain; otherwise a surplus replica, by
    preference of a failure domain common at its stage; None: neither."""
    serving = Census(node.place for node in candidates if node.stages)
    if idle := [node for node in able if not node.stages]:
        node = min(idle, key=lambda node: serving.shared(node.place))
        return SeatAssigned(node.node, stage, f"was a standby: {why}")
    holders = Counter(stage for node in candidates if node.stays for stage in node.holds)
    surplus = [(node, of) for node in able if (of := _surplus(node, holders)) is not None]
    if not surplus:
        return None
    # Of the stage with the most holders; there not the first node by name, which may hold the
    # snapshot that the vacant stage needs (recovery/snapshot.py, `route`), and would lose it with
    # its seat; of the commonest domain; then the newest node.
    node, of = max(surplus, key=lambda pair: holders[pair[1]])
    serving_it = [node for node in candidates if node.stays and of in node.stages]
    first, domains = min(n.node for n in serving_it), Census(node.place for node in serving_it)
    node = max(
        reversed([node for node, at in surplus if at == of]),
        key=lambda node: (node.node != first, domains.shared(node.place)),
    )
    return SeatAssigned(
        node.node, stage, f"moves from stage {of}, which has other nodes: {why}", of
    )


def _surplus(node: Candidate, holders: Counter[int]) -> int | None:
    """The stage that can lose this node, by the number of `holders` of each stage's state; None:
    the node is needed, or drives."""
    if len(node.stages) != 1 or node.drives:
        return None
    (stage,) = node.stages
    return stage if holders[stage] > (node.stays and stage in node.holds) else None


def _returned(candidates: Iterable[Candidate], weighed: Container[int]) -> Iterator[SeatReleased]:
    """The seats that nodes return: one per node, from the node with the most seats on; a later call
    sees the changed placement. `weighed`: stages that rebalancing.py decides about."""
    nodes = list(candidates)
    several = [node for node in nodes if len(node.stages) > 1]
    for node in sorted(several, key=lambda node: -len(node.stages)):
        better = [
            (stage, other)
            for stage in sorted(node.stages, reverse=True)  # stage 0, which may drive, comes last
            for other in nodes
            if stage not in weighed
            if other.stays and stage in other.holds and len(other.stages) < len(node.stages)
        ]
        if better:
            stage, other = better[0]
            why = f"{other.node} serves stage {stage}, too, and has fewer seats"
            yield SeatReleased(node.node, stage, why)
