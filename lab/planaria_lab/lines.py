"""Styles of several lines in one plot, such that none hides another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

COLORS = ("#20507a", "#b0402f", "#2e8b57", "#8a5fa8", "#c98a1b", "#4aa5b8", "#7a7a7a", "#d3739b")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
MARKERS = "osD^vPX*<>phd8"
WIDEST = 3.6  # points
NARROWEST = 1.2


def distinct_style(place: int, count: int, points: int = 0) -> dict[str, Any]:
    """Return arguments of matplotlib's `plot` for line `place` (from 0) of `count`, drawn in order.

    Each line is narrower than those before it, so that all are seen where they coincide. No two
    have the same color and dashes. `points`: how many points the line has; if given, some of them
    get markers, at other points than those of the line before.
    """
    narrower = (WIDEST - NARROWEST) / max(1, count - 1)
    style: dict[str, Any] = {
        "color": COLORS[place % len(COLORS)],
        "linestyle": DASHES[place // len(COLORS) % len(DASHES)],
        "linewidth": WIDEST - place * narrower if count > 1 else NARROWEST,
    }
    if points:
        every = max(1, points // 6)
        style["marker"] = MARKERS[place % len(MARKERS)]
        style["markevery"] = (place * every // count, every)
        style["markersize"] = 5
        style["markerfacecolor"] = "white"
        style["markeredgewidth"] = 1.2
    return style


def name_at_the_ends(axes: Any, size: float = 9.0) -> None:
    """Write the label of each line beside its right end, in its color, instead of a legend. `axes`
    are matplotlib's; their limits and size must be final."""
    to_axes = axes.transData + axes.transAxes.inverted()
    named, ends = [], []
    for line in axes.get_lines():
        finite = [point for point in line.get_xydata() if math.isfinite(point[1])]
        if finite and not line.get_label().startswith("_"):
            named.append(line)
            ends.append(float(to_axes.transform(finite[-1])[1]))
    height = axes.get_position().height * axes.figure.get_size_inches()[1] * 72  # points
    for line, end, place in zip(named, ends, spaced(ends, 1.35 * size / height), strict=True):
        color = line.get_color()
        axes.plot(
            *([1.0, 1.025], [end, place]),
            **{"transform": axes.transAxes, "clip_on": False, "color": color, "linewidth": 0.8},
        )
        axes.text(
            *(1.03, place, line.get_label()),
            **{"transform": axes.transAxes, "color": color, "fontsize": size, "va": "center"},
        )


def spaced(places: Sequence[float], gap: float) -> list[float]:
    """Return the nearest places in the same order that are at least `gap` apart. Each group of
    places that are closer keeps its mean."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[list[int]] = []

    def middle(group: list[int]) -> float:
        return sum(places[place] for place in group) / len(group)

    for place in order:
        groups.append([place])
        while len(groups) > 1:
            lower, upper = groups[-2:]
            room = gap * (len(lower) + len(upper)) / 2
            if middle(upper) - middle(lower) >= room:
                break
            groups[-2:] = [lower + upper]
    moved = {
        place: middle(group) + gap * (number - (len(group) - 1) / 2)
        for group in groups
        for number, place in enumerate(group)
    }
    return [moved[place] for place in range(len(places))]
