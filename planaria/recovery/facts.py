"""Facts about a loss: what is left, and the decisions that are possible."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["snapshot", "deposit", "redundant", "checkpoint", "save", "memory", "weights"]
Made = tuple[int, int]
"""View and attempt of the commit that made a step. If only lost nodes knew a commit, the step is
made again: with the same number, but not the same state."""
UNKNOWN: Made = (0, 0)
SEEDED = "initial-weights"
"""The method that gives a stage the weights that the run began with, from its seed."""
ANEW = "adapters-anew"
"""The method that resets a stage's adapters to their state before the first step."""
PRETRAINED = "pretrained"
"""The method that resets a stage to the weights of the run's initial checkpoint."""
INEXACT = ("checkfree", "checkfree+", "interpolate", ANEW, PRETRAINED)
"""Methods that lack the stage's learned state: they guess from other stages' weights, or start
anew; relearning improves the result."""
COPIED = ("replica", "handover")
"""Methods that copy a stage from nodes that train it: from staying ones, or leaving ones."""
OWN = ("save", "memory")
"""Methods by which a node continues from its own state, in a file or in memory."""
ARRIVED = ("joiner", "weights")
"""Methods by which a node continues from what it had received when its last source was lost: a
state that had not caught up, or weights without its moments."""
ORIGIN = "origin"
"""The method that gives a stage its initial weights: those of a checkpoint."""


@dataclass(frozen=True)
class Source:
    """A node from which a stage's state can come: it has that after `step`. `lineage`: how often
    the run had gone back to files when that step was made."""

    node: str
    stage: int
    step: int
    lineage: int = 0


@dataclass(frozen=True)
class Held:
    """State of a stage that a node keeps besides training it.

    `snapshot`: a running snapshot, `deposit`: stage 0's exact state, left by its last node,
    `redundant`: a twin, each of another node's stage, in memory. `checkpoint`, `save`: of the
    node's own stage, in a file. `memory`: its own state, which counts if the run goes back to it,
    or none is newer. `weights`: of its own stage, received from a node that was lost before it had
    sent the moments.
    """

    kind: Kind
    source: Source
    made: Made = UNKNOWN  # the commit
    digest: bytes = b""  # of the values; empty: not known
    mean_step: float = math.inf  # of the rows of a snapshot, which are of different steps

    @property
    def as_of(self) -> float:
        """The step that its values are of, on average."""
        return min(self.mean_step, self.source.step)


@dataclass(frozen=True)
class Left:
    """What is left of the run's state after a loss, once all nodes have reported."""

    stages: int  # body stages, L
    step: int  # the newest committed step
    survivors: Mapping[int, Sequence[str]]  # stage -> nodes that have that step
    lineage: int = 0
    held: Sequence[Held] = ()
    untrained: frozenset[int] = field(default_factory=frozenset)  # survivors guessed at this step
    made: Made = UNKNOWN  # the commit of `step`
    origin: Sequence[str] = ()  # nodes with the checkpoint from which the run began
    adapters: bool = False  # whether only adapters are trained, beside the checkpoint's weights
    leaving: Collection[str] = ()  # nodes that were asked to leave

    def nodes(self, stage: int) -> tuple[Source, ...]:
        nodes = sorted(self.survivors.get(stage, ()))
        return tuple(Source(node, stage, self.step, self.lineage) for node in nodes)

    def trained(self, stage: int) -> bool:
        """Whether nodes are left that have trained the stage; it isn't just guessed."""
        return bool(self.survivors.get(stage)) and stage not in self.untrained

    def newest(self, kind: Kind, stage: int) -> tuple[Source, ...]:
        """The node with the newest state of this kind, not of `step` by another commit; or none."""
        usable = [
            held.source
            for held in self.holdings(kind, stage)
            if held.source.step < self.step or held.made in (self.made, UNKNOWN)
        ]
        return tuple(sorted(usable, key=lambda source: (-source.step, source.node))[:1])

    def holdings(self, kind: Kind, stage: int) -> list[Held]:
        """The kept states of this kind and stage that are of this lineage, up to `step`."""
        return [
            held
            for held in self.held
            if (held.kind, held.source.stage) == (kind, stage)
            and held.source.lineage == self.lineage
            and held.source.step <= self.step
        ]


@dataclass(frozen=True)
class Rebuild:
    """The decision to give a node of `stage` the state of the swarm's current step."""

    stage: int
    method: str
    sources: tuple[Source, ...]
    exact: bool  # weights and optimizer state equal the lost ones
    reason: str
    fallback: bool = False  # a method other than the policy's
    fresh: bool = False  # the weights equal the lost ones, the optimizer starts anew

    @property
    def same_weights(self) -> bool:
        return self.exact or self.fresh


@dataclass(frozen=True)
class RollBack:
    """All stages go back to `step`, by their files of `lineage`; 0: to the initial weights."""

    step: int
    lineage: int
    reason: str


@dataclass(frozen=True)
class Stop:
    """The decision to stop the run: nothing left determines the stage's weights."""

    reason: str


Decision = Rebuild | RollBack | Stop


def giver(stage: int, nodes: Sequence[str]) -> str:
    """The node that gives this stage's weights from the checkpoint: a single one, so that the
    source of missing weights is known."""
    return sorted(nodes)[stage % len(nodes)]


def age_in_words(steps: int) -> str:
    """The age of a state in steps, to append to a reason; empty: 0."""
    return f", {steps} step{'s' if steps > 1 else ''} old" if steps else ""


# Holdings by version


Version = tuple[int, int, Made]
"""Lineage, step and commit; the greater is the newer."""
Files = dict[int, dict[Version, list[Held]]]
"""Stage -> version -> holdings, at most one per node."""


def by_version(held: Iterable[Held], *kinds: Kind) -> Files:
    """What nodes keep of these kinds, by stage and version, in the order of `kinds`: memory is
    preferred to files. The holdings of one version have the same values."""
    files: Files = {}
    wanted = [holding for holding in held if holding.kind in kinds]
    for holding in sorted(wanted, key=lambda h: (h.source.node, kinds.index(h.kind))):
        version = holding.source.lineage, holding.source.step, holding.made
        holdings = files.setdefault(holding.source.stage, {}).setdefault(version, [])
        if all(earlier.source.node != holding.source.node for earlier in holdings):
            holdings.append(holding)
    return {
        stage: {version: _of_equal_values(holdings) for version, holdings in versions.items()}
        for stage, versions in files.items()
    }


def _of_equal_values(holdings: list[Held]) -> list[Held]:
    """The holdings of one version whose values are those of most. A stage that was guessed after a
    commit, and what was saved before it was lost, are of one version."""
    digests = sorted(holding.digest for holding in holdings if holding.digest)
    most = max(digests, key=digests.count, default=b"")
    return [holding for holding in holdings if holding.digest in (b"", most)]


def newest_common(files: Files, stages: int) -> Version | None:
    """The newest version that is kept of every stage, 0 to `stages`; None: there is none."""
    common = set.intersection(*(set(files.get(of, ())) for of in range(stages + 1)))
    return max(common, default=None)


def newest_saves(stage: int, left: Left) -> tuple[Source, ...]:
    """The nodes with the newest save of a stage, up to the run's step. Older lineages count, too:
    after a resume there are no other saves yet."""
    files = by_version(left.held, "save").get(stage, {})
    usable = [version for version in files if version[:2] <= (left.lineage, left.step)]
    return tuple(held.source for held in files[max(usable)]) if usable else ()
