"""Gradient outliers: replicas whose gradients differ from the others' over many steps. Pure.

With k microbatches at one replica and K at all others, take the inner product of its gradient with
the sum of theirs. It is k K times the squared norm of the gradient that all of them estimate, plus
noise that averages out. Divided by k K it is the same for all correct replicas, whatever their
shares. It is zero for a replica that sends noise, and negative for one that inverts its gradient. A
norm far from all others' shows values that are too large.

Each replica examines a piece of some others' gradients, which it sums, and keeps statistics. It
reports outliers to the driver with its votes, so the driver has no cost without outliers. With two
replicas the outlier can't be identified.

Where replicas are more than one row (bootstrap/neighbours.py), "all others" are those of the row,
whose contributions a node receives. Its examiners are of the row, too. So an outlier differs from
its row: a row with a wrong majority isn't found.
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
"""Steps of examination before a node's statistics count; older steps decay at this rate."""
LEAST, MOST = 0.5, 2.0
"""Range of projections, relative to the usual one, in which no node is an outlier."""
SIGNIFICANT: Final = 8.0
"""Standard errors beyond which a difference counts."""
FAR: Final = math.log(10.0)
"""Distance of the logarithm of a squared norm from the usual one that makes an outlier."""
COMPARABLE: Final = 3
"""Minimum number of replicas for which outliers can be identified."""
LOOKED_AT: Final = 8
"""Maximum number of replicas that a node examines, including itself."""


class Contribution(NamedTuple):
    """A replica's contribution to a piece of the stage's gradient, as its owner received it."""

    node: str
    squared_norm: float
    projection: float  # inner product with the sum of all others of its row
    microbatches: int  # number of microbatches in it
    others: int  # number of microbatches in the others of its row

    @property
    def tells(self) -> bool:
        finite = math.isfinite(self.squared_norm) and math.isfinite(self.projection)
        return finite and self.squared_norm > 0 and min(self.microbatches, self.others) > 0


@dataclass
class ReplicaStatistics:
    """Statistics of one replica: means over steps that decay."""

    steps: int = 0
    projection: float = 0.0  # per microbatch and other microbatch
    usual: float = 0.0  # the median replica's
    square: float = 0.0  # squared difference
    norm: float = 0.0  # logarithm of the squared norm, above the median's

    def add(self, projection: float, usual: float, norm: float) -> None:
        self.steps += 1
        share = 1.0 / min(self.steps, STEPS)
        self.projection += share * (projection - self.projection)
        self.usual += share * (usual - self.usual)
        self.square += share * ((projection - usual) ** 2 - self.square)
        self.norm += share * (norm - self.norm)

    def why(self) -> str:
        """Why it is an outlier; empty: it isn't, as far as known."""
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
    """A node's statistics of the other replicas of its stage."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._seen: dict[str, ReplicaStatistics] = {}

    def note(self, contributions: Iterable[Contribution], replicas: Collection[str]) -> None:
        """Adds the contributions to a committed step; `replicas`: its members at the stage."""
        row = row_of(self._node, rows({*replicas, self._node}))
        self._seen = {node: seen for node, seen in self._seen.items() if node in row}
        contributions = [contribution for contribution in contributions if contribution.tells]
        if len(contributions) < COMPARABLE:
            return
        projections = [
            contribution.projection / (contribution.microbatches * contribution.others)
            for contribution in contributions
        ]
        usual = median(projections)
        for contribution, projection, norm in zip(
            contributions, projections, _lengths(contributions), strict=True
        ):
            if contribution.node != self._node:
                self._seen.setdefault(contribution.node, ReplicaStatistics()).add(
                    projection, usual, norm
                )

    def standing_out(self) -> list[pb.StandsOut]:
        whys = {node: seen.why() for node, seen in sorted(self._seen.items())}
        return [pb.StandsOut(node=node, reason=why) for node, why in whys.items() if why]


class GradientOutliers:
    """The driver's outliers, from the replicas' reports."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def heard(self, stages: Mapping[str, int], ready: Mapping[str, pb.Ready]) -> dict[str, str]:
        """New outliers by the reports in votes, and why: more than half of a replica's examiners
        report it."""
        reasons_of: dict[str, dict[str, str]] = {}
        for by, vote in ready.items():
            for report in vote.standing_out:
                if stages.get(report.node) == stages[by]:
                    reasons_of.setdefault(report.node, {})[by] = report.reason
        outliers = {}
        for node, reasons in sorted(reasons_of.items()):
            replicas = [other for other, stage in stages.items() if stage == stages[node]]
            examiners = who_looks_at(node, replicas)
            reports = [reasons[by] for by in examiners if by in reasons]
            if 2 * len(reports) > len(examiners):
                outliers[node] = reports[0]
        new = {node: why for node, why in outliers.items() if node not in self._named}
        self._named = set(outliers)
        return new


def looked_at(node: str, replicas: Iterable[str]) -> list[str]:
    """The replicas that this node examines: itself and the next ones in the ring of names. They are
    the same in each step; otherwise statistics would take many more steps."""
    return sorted(replicas, key=lambda replica: (replica < node, replica))[:LOOKED_AT]


def who_looks_at(node: str, replicas: Iterable[str]) -> list[str]:
    """The examiners of a replica: the nodes before it in its row's ring that own a part."""
    all_rows = rows([*replicas])
    row = row_of(node, all_rows)
    others = [other for other in row if other != node]
    examiners = sorted(others, key=lambda other: (other < node, other), reverse=True)[
        : LOOKED_AT - 1
    ]
    return [other for other in examiners if other in row[: places(all_rows)]]


def _lengths(contributions: Sequence[Contribution]) -> list[float]:
    """Logarithms of squared norms, above the median's. With k microbatches a squared norm grows
    with k for noise, and with k squared otherwise; anything in between proves nothing."""
    logarithms = []
    for power in (1, 2):
        logs = [
            math.log(each.squared_norm) - power * math.log(each.microbatches)
            for each in contributions
        ]
        logarithms.append([log - median(logs) for log in logs])
    return [min(a, b, key=abs) if a * b > 0 else 0.0 for a, b in zip(*logarithms, strict=True)]
