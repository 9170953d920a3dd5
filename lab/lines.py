"""How several lines are drawn of which none may hide another."""

from __future__ import annotations

from typing import Any

COLORS = ("#20507a", "#b0402f", "#2e8b57", "#8a5fa8", "#c98a1b", "#4aa5b8", "#7a7a7a", "#d3739b")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
MARKERS = "osD^vPX*<>phd8"
WIDEST = 3.6  # points
NARROWEST = 1.2


def told_apart(place: int, count: int, points: int = 0) -> dict[str, Any]:
    """Arguments of matplotlib's `plot` for the line `place` (from 0) of `count`, in this order.

    A line is narrower than those before it, so where they coincide all are seen, and no two have
    both color and dashes in common. With `points`, how many it has, it also gets some markers, at
    other points than the line before it.
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
