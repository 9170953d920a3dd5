"""Moves of seats while all is well, towards the placement with the shortest expected step. Pure.

A move has two parts. A node gets a seat beside the stage's only one, and copies the state while
others train. Then one of the two seats is returned: the older one, unless steps would become longer
than without the newer one.

A move pays if the expected step falls to `GAIN` of the present one. A seat also moves from a node
that has two more than one at least as fast, if no step becomes longer.

Moves belong to a *block*: consecutive stages of one node, for one other node. Between the moves of
a block steps may be longer than before, since few stages cross links as often as many. So
placements are compared by the best that is a block away (`reach`). With constant measurements no
seat goes back and forth: the rest of a block stays within reach, so `reach` never grows, and at the
end steps are shorter than when the first block began. Against noise, a stage rests after its move,
each time longer (`Members.outlook`).

Of two nodes, the one that asked for the stage keeps its seat, however slow it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from planaria.bootstrap.candidates import Candidate, SeatAssigned, SeatReleased
from planaria.bootstrap.step_time import Outlook, Seats, crossings

GAIN: Final = 0.9
"""Expected step after a block of moves, of the present one, at most."""
SLOWER: Final = 1.02
"""Expected step with a newer seat, of that without it, from which that seat is returned."""
MOVE: Final = 0.01
"""Share of a step that a move has to gain beside another block with fewer moves."""
ROUNDING: Final = 9
"""Decimals of the seconds that are compared."""

Nodes = Mapping[str, Candidate]


class Cost(NamedTuple):
    """The cost of a placement of seats; the smaller is the better one."""

    seconds: float  # of a step
    crossings: int  # counts where nothing is known of links


class MovableStages(NamedTuple):
    """Consecutive body stages that one node alone serves, and a node that could."""

    giver: str
    taker: str
    stages: Sequence[int]

    def moved(self, seats: Seats, stages: Sequence[int] = ()) -> Seats:
        """The seats of all nodes after this block, or some `stages` of it, has moved."""
        gone = frozenset(stages or self.stages)
        given, taken = seats[self.giver] - gone, seats[self.taker] | gone
        return {**seats, self.giver: given, self.taker: taken}


def unfinished_moves(nodes: Nodes, outlook: Outlook) -> dict[int, tuple[Candidate, Candidate]]:
    """By body stage, the two nodes of a move that isn't finished, the one with the older seat
    first: one of them has several seats, and neither leaves. Empty while a stage is vacant."""
    by_stage = {}
    served = frozenset().union(*(node.stages for node in nodes.values()))
    for stage in range(1, len(served) if is_complete(served, outlook) else 0):
        at = [node for node in nodes.values() if stage in node.stages]
        if len(at) == 2 and all(n.stays for n in at) and any(len(n.stages) > 1 for n in at):
            older, newer = sorted(at, key=lambda n: (n.since.get(stage, 0.0), -len(n.stages)))
            by_stage[stage] = older, newer
    return by_stage


def returned(
    pairs: Mapping[int, tuple[Candidate, Candidate]], nodes: Nodes, outlook: Outlook
) -> SeatReleased | None:
    """The seat to return at the end of a move, or of a join beside a node with several seats. None:
    there is none, or the state is still copied, or their link not measured yet."""
    for stage, pair in pairs.items():
        asked = [node for node in pair if stage in node.requested]
        keeps = min(asked, key=lambda node: len(node.stages), default=None)
        if keeps is not None and stage in keeps.holds:  # the other need not copy it first
            (gives,) = (node for node in pair if node is not keeps)
            return SeatReleased(gives.node, stage, f"{keeps.node} has asked for stage {stage}")
    seats = {name: node.stages for name, node in nodes.items()}
    copied = [s for s, pair in pairs.items() if all(s in node.holds for node in pair)]
    if not copied:
        return None
    stage = copied[0]
    older, newer = pairs[stage]
    between = {(older.node, newer.node), (newer.node, older.node)}
    if not outlook.rested and between.isdisjoint(outlook.links):
        return None
    moved, kept = ({**seats, node.node: node.stages - {stage}} for node in (older, newer))
    with_newer, without = reach(nodes, moved, outlook, stage)[0], reach(nodes, kept, outlook)[0]
    if stage in newer.joined and with_newer.seconds > GAIN * _cost(moved, outlook).seconds:
        with_newer = _cost(moved, outlook)  # no other seat will follow
    if with_newer.seconds <= SLOWER * without.seconds:
        why = _compared(with_newer, without)  # after the best block that can follow
        return SeatReleased(older.node, stage, f"{newer.node} serves stage {stage}, too: {why}")
    standby = "" if len(newer.stages) > 1 else "standby: "
    why = f"{standby}without it at stage {stage} {_compared(without, with_newer)}"
    return SeatReleased(newer.node, stage, f"{why}, by its speed and links")


def next_move(nodes: Nodes, outlook: Outlook) -> SeatAssigned | None:
    """The next move of a body stage's seat. None: none pays, or the last one isn't over, or a stage
    is vacant, or a node copies, leaves, or isn't heard, or seats have just changed."""
    seats = {name: node.stages for name, node in nodes.items()}
    busy = any(not node.stays or node.stages - node.holds for node in nodes.values())
    complete = is_complete(frozenset().union(*seats.values()), outlook)
    if busy or not complete or unfinished_moves(nodes, outlook) or not outlook.rested:
        return None
    now = _cost(seats, outlook)
    best, block = reach(nodes, seats, outlook)
    if block is not None and best.seconds <= GAIN * now.seconds:
        why = _compared(_cost(block.moved(seats), outlook), now)
    elif (block := _evening_out(nodes, seats, outlook)) is not None:
        counts = len(seats[block.giver]), len(seats[block.taker])
        why = f"that has {counts[0]} seats, and this node {counts[1]}; no step becomes longer"
    else:
        return None
    first, last = block.stages[0], block.stages[-1]
    stage = min((first, last), key=lambda s: _cost(block.moved(seats, [s]), outlook))
    rest = f" (of stages {first} to {last})" if last > first else ""
    return SeatAssigned(block.taker, stage, f"moves from {block.giver}{rest}: {why}")


def reach(
    nodes: Nodes, seats: Seats, outlook: Outlook, stays: int | None = None
) -> tuple[Cost, MovableStages | None]:
    """The best placement that is at most one block away, and the block; each move counts as
    `MOVE` of a step more. None: `seats` itself. `stays`: a stage that stays where it is."""
    best: tuple[Cost, MovableStages | None] = (_cost(seats, outlook), None)
    for block in _movable_blocks(nodes, seats, outlook):
        if stays not in block.stages:
            seconds, crossed = _cost(block.moved(seats), outlook)
            cost = Cost(seconds * (1 + MOVE * len(block.stages)), crossed)
            best = min(best, (cost, block), key=lambda option: option[0])
    return best


def is_complete(served: Collection[int], outlook: Outlook) -> bool:
    """Whether each stage of the run is among those served."""
    return len(served) > len(outlook.load.layers)


def _evening_out(nodes: Nodes, seats: Seats, outlook: Outlook) -> MovableStages | None:
    """A move of one seat that makes no step longer, now or later, so that a loss takes fewer
    stages."""
    blocks = [
        block
        for block in _movable_blocks(nodes, seats, outlook)
        if len(block.stages) == 1
        and len(seats[block.giver]) >= len(seats[block.taker]) + 2
        and outlook.layer[block.giver] >= outlook.layer[block.taker]
    ]
    if not blocks:
        return None
    block = min(blocks, key=lambda block: _cost(block.moved(seats), outlook))
    after, (stage,) = block.moved(seats), block.stages
    longer = _cost(after, outlook).seconds > _cost(seats, outlook).seconds
    later, now = reach(nodes, after, outlook, stage)[0], reach(nodes, seats, outlook)[0]
    return None if longer or later.seconds > now.seconds else block


def _movable_blocks(nodes: Nodes, seats: Seats, outlook: Outlook) -> Iterator[MovableStages]:
    measured = {name for pair in outlook.links for name in pair}
    at: dict[int, list[str]] = {}
    for name, stages in seats.items():
        for stage in stages:
            at.setdefault(stage, []).append(name)
    for first in sorted(at.keys() - {0}):
        giver, *others = at[first]
        block: list[int] = []
        while not others and at.get(stage := first + len(block)) == [giver]:
            if stage in outlook.resting or stage in nodes[giver].requested:
                break
            block = [*block, stage]
            for name, node in nodes.items():
                has_room = len(seats[name]) + len(block) <= node.room
                able = has_room and node.stays and node.fits.issuperset(block)
                free = name != giver and (seats[name] or not node.waits)
                if able and free and name in measured:
                    yield MovableStages(giver, name, block)


def _cost(seats: Seats, outlook: Outlook) -> Cost:
    seconds = round(outlook.step_seconds(seats), ROUNDING)
    return Cost(seconds, crossings(seats, len(outlook.load.layers)))


def _compared(after: Cost, before: Cost) -> str:
    """How much a placement shortens the expected step, for people."""
    return (
        f"a step is expected to take {after.seconds:.2g} s instead of {before.seconds:.2g} s "
        f"({after.seconds / before.seconds - 1:+.0%})"
    )
