"""Computes whether a stage's last node can hand its state to an heir within a termination notice.

The node sees the notice up to POLL seconds late, and ends its part of the step. It pushes the
weights, then the moments. It keeps FAREWELL seconds for leaving, and MARGIN seconds because the
announced time is approximate. So a push of `size` bytes ends after

    POLL + step + rtt (1 + log2(size / INITIAL_WINDOW + 1)) + size / rate + FAREWELL + MARGIN

seconds. The logarithm bounds the round trips of TCP's slow start on a new connection. The link is
the slowest to any node. There must be an heir: a standby, a replica that moves, or a node with
room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from planaria.node.launch.notices import FAREWELL, MARGIN, POLL
from planaria.node.model.shape import VALUE

NOTICES: Final = (120.0, 30.0, 10.0)
"""Seconds of notice: AWS's; GCP's and Azure's; the rest of theirs if it is seen late."""
INITIAL_WINDOW: Final = 10 * 1448
"""Bytes of TCP's initial window."""


@dataclass(frozen=True)
class Handover:
    """The figures of one stage's handover."""

    stage: int
    parameters: int  # number of trained parameters
    step: float  # seconds of a step
    rtt: float  # round trip time to the heir, seconds
    mbps: float  # Mbit/s of payload, without headers
    tensors: int  # in a state, each as large as the weights: weights and moments

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return VALUE * self.parameters

    @property
    def state(self) -> int:
        """Bytes of weights and moments."""
        return self.tensors * self.weights

    def seconds(self, size: float) -> float:
        """Seconds from the notice to the end of a push of `size` bytes."""
        rounds = 1 + math.log2(size / INITIAL_WINDOW + 1)
        pushing = self.rtt * rounds + 8e-6 * size / self.mbps
        return POLL + self.step + pushing + FAREWELL + MARGIN

    def possible(self, notice: float) -> str:
        """What can be handed over within `notice` seconds: `exact` (all), `weights` without all
        moments, or `part` of the weights."""
        if self.seconds(self.state) <= notice:
            return "exact"
        return "weights" if self.seconds(self.weights) <= notice else "part"


def notice_summary(handovers: Sequence[Handover], notice: float) -> str:
    """A line of text: which stages can hand over what within `notice` seconds."""
    by_kind: dict[str, list[Handover]] = {}
    for handover in handovers:
        by_kind.setdefault(handover.possible(notice), []).append(handover)
    parts = []
    if exact := by_kind.get("exact"):
        longest = max(handover.seconds(handover.state) for handover in exact)
        parts.append(f"exact: {_stages(exact)} (within {longest:.0f} s)")
    if weights := by_kind.get("weights"):
        longest = max(handover.seconds(handover.state) for handover in weights)
        parts.append(f"weights without moments: {_stages(weights)} (all takes {longest:.0f} s)")
    if part := by_kind.get("part"):
        longest = max(handover.seconds(handover.weights) for handover in part)
        parts.append(f"not all weights: {_stages(part)} (they take {longest:.0f} s)")
    return "; ".join(parts)


def _stages(handovers: Iterable[Handover]) -> str:
    """The stages' numbers as text, such as "stages 0-2, 4"."""
    runs: list[list[int]] = []
    for handover in handovers:
        if runs and handover.stage == runs[-1][-1] + 1:
            runs[-1].append(handover.stage)
        else:
            runs.append([handover.stage])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"stage{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(names)}"
