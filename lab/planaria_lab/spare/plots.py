"""Plots of `planaria lab spare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from planaria_lab.lines import distinct_style


def plot_depths(curves: Mapping[tuple[int, int, int], NDArray[np.float64]], path: Path) -> None:
    """Plot stacks a step against failures so far, a panel for each number of groups.

    `curves`: by (groups, redundancy, parts). A panel shows the largest redundancy, with a line for
    each number of parts.
    """
    sizes = sorted({groups for groups, _, _ in curves})
    redundancy = max(r for _, r, _ in curves)
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 3.6), squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        shown = {m: curve for (n, r, m), curve in curves.items() if (n, r) == (size, redundancy)}
        for place, (parts, stacks) in enumerate(shown.items()):
            lost = np.arange(len(stacks))
            style = distinct_style(place, len(shown))
            ax.step(lost, stacks, where="post", label=f"m = {parts}", **style)
        ax.plot(lost, size / (size - lost), "k--", linewidth=1, label="N/(N-k)")
        ax.set(title=f"N = {size}, r = {redundancy}", xlabel="groups lost", ylabel="stacks a step")
        ax.legend(frameon=False)
    _save(figure, path)


def plot_by_redundancy(
    curves: Mapping[tuple[int, str], Mapping[int, float]], label: str, path: Path
) -> None:
    """Plot `label` against redundancy, a panel for each number of groups. `curves`: by (groups,
    line)."""
    sizes = sorted({groups for groups, _ in curves})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 3.8), squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        shown = {line: figures for (groups, line), figures in curves.items() if groups == size}
        for place, (line, figures) in enumerate(shown.items()):
            style = distinct_style(place, len(shown), len(figures))
            ax.plot(list(figures), list(figures.values()), label=line, **style)
        ax.set(title=f"N = {size}", xlabel="redundancy r", ylabel=label, ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
