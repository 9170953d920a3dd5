"""Replicas whose gradients stand out from the others' of their stage, over many steps. Pure.

With k microbatches at one replica and K at all others, the inner product of its gradient with the
sum of theirs is k K times the squared norm of the gradient that all of them estimate, plus noise
that averages out. Divided by k K it is the same for all replicas that do their work, whatever their
shares. Of one that sends noise it is zero, and of one that turns its gradient round it is negative.
A norm that is far from all others' tells of what is large besides.

Each replica looks at a piece of the gradients of some others, that it adds up, and keeps what it
has seen; who stands out it tells the driver with its votes. So that costs the driver nothing as
long as nobody does. Of two replicas nobody can tell which stands out.

Where replicas are more than one row (bootstrap/neighbours.py), "all others" are those of the row,
whose contributions a node sees, and those who look at one are, too. Who stands out then is unlike
its row: a row most of which is wrong isn't found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from planaria.bootstrap.neighbours import places, row_of, rows
from planaria.node.wire import stage_pb2 as pb

STEPS: Final = 50
"""In which a node has looked at another before that counts; older ones fade out at this rate."""
LEAST, MOST = 0.5, 2.0
"""Of the usual projection, between which nobody stands out."""
SIGNIFICANT: Final = 8.0
"""Standard errors."""
FAR: Final = math.log(10.0)
"""Of the logarithm of a squared norm from the usual one."""
COMPARABLE: Final = 3
"""Replicas without which nobody can tell who stands out."""
LOOKED_AT: Final = 8
"""Replicas that a node looks at, at most, itself among them."""


class Contribution(NamedTuple):
    """Of a replica, to a piece of the stage's gradient, as who adds that piece up has seen it."""

    node: str
    squared_norm: float
    projection: float  # inner product with the sum of all others of its row
    microbatches: int  # that are in it
    others: int  # that are in those of all others of its row

    @property
    def tells(self) -> bool:
        finite = math.isfinite(self.squared_norm) and math.isfinite(self.projection)
        return finite and self.squared_norm > 0 and min(self.microbatches, self.others) > 0


@dataclass
class ReplicaStatistics:
    """Of one replica; means over steps that fade out."""

    steps: int = 0
    projection: float = 0.0  # per microbatch and other microbatch
    usual: float = 0.0  # the median replica's
    square: float = 0.0  # of the difference
    norm: float = 0.0  # logarithm of the squared norm, above the median's

    def add(self, projection: float, usual: float, norm: float) -> None:
        self.steps += 1
        share = 1.0 / min(self.steps, STEPS)
        self.projection += share * (projection - self.projection)
        self.usual += share * (usual - self.usual)
        self.square += share * ((projection - usual) ** 2 - self.square)
        self.norm += share * (norm - self.norm)

    def why(self) -> str:
        """It stands out; empty: it doesn't, as far as is known."""
        if self.steps < STEPS:
            return ""
        if abs(self.norm) > FAR:
            return f"they are {math.exp(self.norm / 2):.2g} times as long as the others'"
        off = self.projection - self.usual
        error = math.sqrt(max(0.0, self.square - off**2) / STEPS)
        low, high = LEAST * max(0.0, self.usual), MOST * max(0.0, self.usual)
        if abs(off) > SIGNIFICANT * error and not low <= self.projection <= high:
            return (
                f"along the others' they are {self.projection:.2g} a microbatch, and a gradient "
                f"usually is {self.usual:.2g}"
            )
        return ""


class ReplicaGradients:
    """As a node has seen those of other replicas of its stage."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._seen: dict[str, ReplicaStatistics] = {}

    def note(self, told: Iterable[Contribution], replicas: Collection[str]) -> None:
        """What was added up in a step that is committed, and who has a part in that."""
        row = row_of(self._node, rows({*replicas, self._node}))
        self._seen = {node: seen for node, seen in self._seen.items() if node in row}
        told = [one for one in told if one.tells]
        if len(told) < COMPARABLE:
            return
        projections = [one.projection / (one.microbatches * one.others) for one in told]
        usual = median(projections)
        for one, projection, norm in zip(told, projections, _lengths(told), strict=True):
            if one.node != self._node:
                self._seen.setdefault(one.node, ReplicaStatistics()).add(projection, usual, norm)

    def standing_out(self) -> list[pb.StandsOut]:
        whys = {node: seen.why() for node, seen in sorted(self._seen.items())}
        return [pb.StandsOut(node=node, reason=why) for node, why in whys.items() if why]


class GradientOutliers:
    """Of whom its replicas say so, as the driver hears of it."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def heard(self, stages: Mapping[str, int], ready: Mapping[str, pb.Ready]) -> dict[str, str]:
        """What those who train say with their votes; returns who stands out now, and didn't before,
        and why: more than half of those who look at it say so."""
        said: dict[str, dict[str, str]] = {}
        for by, one in ready.items():
            for told in one.standing_out:
                if stages.get(told.node) == stages[by]:
                    said.setdefault(told.node, {})[by] = told.reason
        found = {}
        for node, reasons in sorted(said.items()):
            replicas = [other for other, stage in stages.items() if stage == stages[node]]
            looking = who_looks_at(node, replicas)
            whys = [reasons[by] for by in looking if by in reasons]
            if 2 * len(whys) > len(looking):
                found[node] = whys[0]
        new = {node: why for node, why in found.items() if node not in self._named}
        self._named = set(found)
        return new


def looked_at(node: str, replicas: Iterable[str]) -> list[str]:
    """By this one, of these replicas: itself and those that come next, in the ring of their names.
    It is the same ones in each step, else it takes many until a node has seen enough of another."""
    return sorted(replicas, key=lambda one: (one < node, one))[:LOOKED_AT]


def who_looks_at(node: str, replicas: Iterable[str]) -> list[str]:
    """The others of its row that come before it in that ring, and add something up."""
    some = rows([*replicas])
    row = row_of(node, some)
    others = [one for one in row if one != node]
    before = sorted(others, key=lambda one: (one < node, one), reverse=True)[: LOOKED_AT - 1]
    return [one for one in before if one in row[: places(some)]]


def _lengths(told: Sequence[Contribution]) -> list[float]:
    """Logarithms of squared norms, above the median's. Of k microbatches a squared norm grows with
    k where it is noise, and with its square where it isn't: what is in between tells nothing."""
    above = []
    for power in (1, 2):
        logs = [math.log(one.squared_norm) - power * math.log(one.microbatches) for one in told]
        above.append([log - median(logs) for log in logs])
    return [min(a, b, key=abs) if a * b > 0 else 0.0 for a, b in zip(*above, strict=True)]
