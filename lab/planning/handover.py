"""Whether a stage's last node that is told to go gets its state to an heir in time.

Told `notice` seconds ahead, it hears of it up to POLL seconds later, ends what it has of the step,
pushes the weights and then Adam's moments, and keeps FAREWELL seconds for leaving and MARGIN for a
notice that is only nearly right. `size` bytes are over after

    POLL + step + transfer(size) + FAREWELL + MARGIN    seconds,

where `transfer` (estimate.py) is over the worst link from the stage to any other node, or the
stage's uplink if that is slower: 2 delays for each of 1 + log2(size / TCP's first window) rounds,
and 8 bits a byte, 3.6 % for headers added, at the link's rate. There has to be an heir: a standby,
a replica that moves, or a node with room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from planaria.lab.emulation.links import Link
from planaria.lab.planning.estimate import Reach, transfer
from planaria.lab.planning.planner import Candidate
from planaria.lab.simulator.swarm import STATE, VALUE, parameters
from planaria.node.daemon import FAREWELL
from planaria.node.notices import MARGIN, POLL

NOTICES: Final = (120.0, 30.0, 10.0)
"""Seconds that AWS gives, that GCP and Azure give, and that are left where it is heard late."""


@dataclass(frozen=True)
class Handover:
    """A stage's. Sizes in bytes."""

    stage: int
    weights: int
    state: int  # weights and moments
    step: float  # seconds
    link: Link  # to the heir

    def seconds(self, size: float) -> float:
        """From the notice to the end, with so much pushed."""
        return POLL + self.step + transfer(size, self.link) + FAREWELL + MARGIN

    def possible(self, notice: float) -> str:
        """`exact`, `weights` without moments, or `part` of the weights."""
        if self.seconds(self.state) <= notice:
            return "exact"
        return "weights" if self.seconds(self.weights) <= notice else "part"


def handovers(plan: Candidate) -> list[Handover]:
    """By stage."""
    network = plan.swarm.network
    sites = [[machine.site for machine in of] for of in plan.nodes]
    found = []
    for stage, farthest in enumerate(Reach.of(network, sites).farthest):
        uplinks = (network.uplinks.get(site, math.inf) for site in sites[stage])
        link = farthest._replace(mbps=min(farthest.mbps, *uplinks))
        count = parameters(plan.swarm.config, stage)
        step = plan.estimate.step
        found.append(Handover(stage, VALUE * count, STATE * count, step, link))
    return found


def told(of: Sequence[Handover], notice: float) -> str:
    """What a notice of so many seconds is good for, in words."""
    by: dict[str, list[Handover]] = {}
    for one in of:
        by.setdefault(one.possible(notice), []).append(one)
    parts = []
    if exact := by.get("exact"):
        who = "every stage" if len(exact) == len(of) else _stages(exact)
        parts.append(f"exact: {who} (within {max(one.seconds(one.state) for one in exact):.0f} s)")
    if weights := by.get("weights"):
        longest = max(one.seconds(one.state) for one in weights)
        parts.append(f"weights without moments: {_stages(weights)} (all takes {longest:.0f} s)")
    if part := by.get("part"):
        longest = max(one.seconds(one.weights) for one in part)
        parts.append(f"not all weights: {_stages(part)} (they take {longest:.0f} s)")
    return "; ".join(parts)


def _stages(of: Iterable[Handover]) -> str:
    numbers = [one.stage for one in of]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(named)}"
