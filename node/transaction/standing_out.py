"""Replicas whose gradients stand out from the others' of their stage, over many steps. Pure.

With k microbatches at one replica and K at all others, the inner product of its gradient with the
sum of theirs is k K times the squared norm of the gradient that all of them estimate, plus noise
that averages out. Divided by k K it is the same for all replicas that do their work, whatever their
shares. Of one that sends noise it is zero, and of one that turns its gradient round it is negative.
A norm that is far from all others' tells of what is large besides.

Each replica tells of a piece of everybody's gradient, that it adds up; what one tells of itself
doesn't count. Of two replicas nobody can tell which stands out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from planaria.node.wire import stage_pb2 as pb

STEPS: Final = 50
"""In which a node has told of another one before that counts; older ones fade out at this rate."""
LEAST, MOST = 0.5, 2.0
"""Of the usual projection, between which nobody stands out."""
SIGNIFICANT: Final = 8.0
"""Standard errors."""
FAR: Final = math.log(10.0)
"""Of the logarithm of a squared norm from the usual one."""
COMPARABLE: Final = 3
"""Replicas that a node has to tell of."""
TOLD_OF: Final = 8
"""Replicas that a node tells of, at most, itself among them."""


@dataclass
class Seen:
    """Of one replica, by one other; means over steps that fade out."""

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


class Gradients:
    """As the driver hears of them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Seen] = {}  # by who tells, and of whom
        self._named: set[str] = set()

    def heard(self, stages: Mapping[str, int], ready: Mapping[str, pb.Ready]) -> dict[str, str]:
        """What those who train say at a commit; returns who stands out now, and didn't before, and
        why: more than half of those who tell of it say so."""
        self._seen = {key: seen for key, seen in self._seen.items() if stages.keys() >= {*key}}
        for by, said in ready.items():
            self._note(
                by, [one for one in said.contributions if stages.get(one.node) == stages[by]]
            )
        reasons: dict[str, list[str]] = {}
        for (_, node), seen in self._seen.items():
            reasons.setdefault(node, []).append(seen.why())
        found = {
            node: next(filter(None, whys))
            for node, whys in sorted(reasons.items())
            if 2 * sum(map(bool, whys)) > len(whys)
        }
        new = {node: why for node, why in found.items() if node not in self._named}
        self._named = set(found)
        return new

    def _note(self, by: str, told: list[pb.Contribution]) -> None:
        told = [one for one in told if one.microbatches and one.others and one.squared_norm > 0]
        if len({one.node for one in told}) < COMPARABLE:
            return
        projections = [one.projection / (one.microbatches * one.others) for one in told]
        usual = median(projections)
        for one, projection, norm in zip(told, projections, _lengths(told), strict=True):
            if one.node != by:
                seen = self._seen.setdefault((by, one.node), Seen())
                seen.add(projection, usual, norm)


def told_by(node: str, seen: Sequence[pb.Contribution]) -> list[pb.Contribution]:
    """What a node tells of what it has seen: of itself and those that come next, in the ring of
    their names. So what a driver hears grows with the replicas, and not with their square."""
    ring = sorted(seen, key=lambda one: (one.node < node, one.node))
    return ring[:TOLD_OF]


def _lengths(told: Sequence[pb.Contribution]) -> list[float]:
    """Logarithms of squared norms, above the median's. Of k microbatches a squared norm grows with
    k where it is noise, and with its square where it isn't: what is in between tells nothing."""
    above = []
    for power in (1, 2):
        logs = [math.log(one.squared_norm) - power * math.log(one.microbatches) for one in told]
        above.append([log - median(logs) for log in logs])
    return [min(a, b, key=abs) if a * b > 0 else 0.0 for a, b in zip(*above, strict=True)]
