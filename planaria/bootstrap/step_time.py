"""The expected time of a step, from who serves what. Pure.

A pipeline takes one trip of a microbatch, and for each further one as long as its busiest resource
(Huang et al., GPipe, 2019): a node, or what one node sends or receives. A node computes one thing
at a time, whatever the number of its seats. What links carry isn't computing, so it delays nothing
but itself. Averaging among replicas isn't counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Final, NamedTuple

from planaria.bootstrap.candidates import Candidate

MOST_WEIGHED: Final = 16
"""Members up to which links are reported and placements compared: more have a seat each."""
ROUND_TRIPS: Final = 2
"""Between the driver and the farthest node, in each step: Reduce and Ready, Commit and Begin."""


class LinkSpeed(NamedTuple):
    """The speed of a link, from one node to another."""

    delay: float  # seconds, one way
    rate: float  # bytes per second


UNKNOWN: Final = LinkSpeed(0.0, math.inf)
"""Nothing is assumed of a link that nobody has measured."""

Seats = Mapping[str, frozenset[int]]
"""The stages of each node."""


@dataclass(frozen=True)
class Load:
    """What a step asks of nodes and links."""

    layers: tuple[int, ...]  # of each body stage
    microbatches: int
    activation: int  # bytes of a microbatch from a stage to the next
    gradient: int  # and back


@dataclass(frozen=True)
class Outlook:
    """What is known of the speeds of nodes and links."""

    load: Load
    layer: Mapping[str, float]  # node -> seconds of a microbatch in one layer
    ends: Mapping[str, float]  # node -> seconds of a microbatch at stage 0, where it serves that
    links: Mapping[tuple[str, str], LinkSpeed]  # from, to
    rested: bool = True  # whether seats have stayed for long enough to measure
    resting: frozenset[int] = frozenset()  # stages that moved too lately, or too often

    def step_seconds(self, seats: Seats) -> float:
        """The expected seconds of a step with these seats, if each stage has a node. Replicas share
        a stage's microbatches by their speed."""
        shares = [self._shares(nodes, stage) for stage, nodes in enumerate(self._at(seats))]
        busy = defaultdict[tuple[str, str], float](float)  # seconds of a resource, a microbatch
        trip = 0.0
        for stage, share in enumerate(shares):
            for node, part in share.items():
                seconds = part * self._seconds(node, stage)
                busy["computes", node] += seconds
                trip += seconds
        for here, after in pairwise([*shares, shares[0]]):
            for a, b in product(here, after):
                if a != b:
                    part, onward, back = here[a] * after[b], self.link(a, b), self.link(b, a)
                    forth = part * self.load.activation / onward.rate
                    returned = part * self.load.gradient / back.rate
                    busy["sends", a] += forth
                    busy["receives", b] += forth
                    busy["sends", b] += returned
                    busy["receives", a] += returned
                    trip += part * (onward.delay + back.delay) + forth + returned
        others = (node for node, stages in seats.items() if stages)
        far = max(
            self.link(a, b).delay + self.link(b, a).delay for a, b in product(shares[0], others)
        )
        return trip + (self.load.microbatches - 1) * max(busy.values()) + ROUND_TRIPS * far

    def link(self, a: str, b: str) -> LinkSpeed:
        """The link's speed from a to b; if only the other direction was measured, that one's."""
        if a == b:
            return UNKNOWN
        return self.links.get((a, b)) or self.links.get((b, a)) or UNKNOWN

    def _seconds(self, node: str, stage: int) -> float:
        """The seconds of one microbatch at a node's stage, forward and back."""
        return self.layer[node] * self.load.layers[stage - 1] if stage else self.ends[node]

    def _at(self, seats: Seats) -> list[list[str]]:
        """The nodes of stages 0, 1, .., L."""
        at: list[list[str]] = [[] for _ in range(len(self.load.layers) + 1)]
        for node, stages in seats.items():
            for stage in stages:
                at[stage].append(node)
        return at

    def _shares(self, nodes: Sequence[str], stage: int) -> dict[str, float]:
        """The part of the stage's microbatches for each of its nodes."""
        if len(nodes) == 1:
            return {nodes[0]: 1.0}
        speeds = {node: 1 / self._seconds(node, stage) for node in nodes}
        total = sum(speeds.values())
        return {node: speed / total for node, speed in speeds.items()}


def crossings(seats: Seats, stages: int) -> int:
    """Seats whose node doesn't serve the next stage, too, of 0..`stages` in a ring."""
    return sum((stage + 1) % (stages + 1) not in at for at in seats.values() for stage in at)


def outlook(
    load: Load,
    nodes: Iterable[Candidate],
    links: Mapping[tuple[str, str], LinkSpeed],
    rested: bool = True,
    resting: frozenset[int] = frozenset(),
) -> Outlook | None:
    """What measurements tell of speeds. A node that has not computed a body stage yet counts by its
    `speed`. None: too little was measured."""
    known = list(nodes)
    usual = [node.layer * node.speed for node in known if node.layer]
    unmeasured = any(0 in node.stages and not node.ends for node in known)
    if not usual or unmeasured:
        return None
    work = median(usual)
    layer = {node.node: node.layer or work / node.speed for node in known}
    ends = {node.node: node.ends for node in known if node.ends}
    return Outlook(load, layer, ends, links, rested, resting)
