"""The recovery policies: how a stage without a replica left gets its state.

All else asks a policy's facts, never its name. So a new policy is a function and a line of
`POLICIES`, both here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from planaria.recovery.facts import (
    ANEW,
    PRETRAINED,
    UNKNOWN,
    Left,
    Rebuild,
    RollBack,
    Source,
    by_version,
    giver,
    newest_common,
)
from planaria.recovery.orders import partner

Answer = tuple[Rebuild | RollBack | None, str]
"""A policy's decision, or why it has none."""


@dataclass(frozen=True)
class Policy:
    """What a policy does about a lost stage, and what it needs while nothing is lost.

    Nodes keep their saves, and copy from replicas, with any policy.
    """

    rebuild: Callable[[int, Left], Answer]
    """The state of a lost stage without what is kept of it (`decide.KEPT`): a guess, or an exact
    one."""
    guesses: bool = False
    """A lost stage is guessed from other stages. Stage 0 can't be, so peers keep running snapshots
    of it, and of the first body stages, as many as the run file says."""
    snapshots: bool = False
    """Peers keep a running snapshot of each stage."""
    twins: bool = False
    """Each node keeps a twin of the next stage, and applies each commit to it. So a node with a
    twin of a vacant stage comes first for its seat, in the middle of a step, too."""
    checkpoints: bool = False
    """All stages write to a shared folder, and all go back to what is in it."""
    swapped: bool = False
    """Half of the microbatches visit the first and the last two body stages in swapped order."""

    @property
    def adapts(self) -> bool:
        """Whether links decide what is sent of a snapshot (snapshot_pace.py), for which a guess
        can stand in."""
        return self.snapshots and self.guesses

    @property
    def waits(self) -> bool:
        """Whether training waits until a joiner has its state, and a guessed stage has learned.
        Otherwise the joiner copies, and the stage relearns, while others train. A twin changes
        with each, so its node needs it first."""
        return self.twins

    @property
    def relearns(self) -> bool:
        """Whether a stage may be guessed, as a fallback at least: then nodes keep the tensors that
        cross its boundaries."""
        return not self.checkpoints

    def sends(self, stage: int, first: int) -> bool:
        """Whether peers have a running snapshot of `stage`.

        `first`: the first body stages with snapshots where stages are guessed. Guesses of these are
        the worst: all others build on them.
        """
        return self.snapshots or (self.guesses and stage <= first)

    def keeper(self, stage: int, stages: int) -> int:
        """The stage whose nodes keep data for a rebuild of `stage`: a snapshot (where stages are
        guessed, of the first body stage), a twin, or, for a guess, a neighbour's weights."""
        held = self.sends(stage, first=1)
        return holder_stage(stage, stages) if held else (stage - 1) % (stages + 1)


def holder_stage(stage: int, stages: int) -> int:
    """The stage whose nodes first hold the running snapshot of `stage`, of the stages 0..`stages`.

    The farthest on the ring 0..L, where stage 0 follows stage L. With 3 or more body stages it is
    never a neighbour, so no two consecutive stages hold each other's. Each stage has a
    different holder.
    """
    ring = stages + 1
    return (stage + ring // 2) % ring


def holder_count(stage: int, stages: int) -> int:
    """How many nodes hold the snapshot of `stage`: of stage 0 two, since nothing else determines
    it."""
    return 1 if stage else min(2, stages)


# Where the state comes from


def checkfree(stage: int, left: Left) -> Answer:
    """CheckFree, Algorithm 1: for 1 < stage < L only, since others lack a second body neighbour."""
    if left.adapters:
        return begin_anew(stage, f"stage {stage} has no replica left"), ""
    if stage == 0:
        return None, "no peer holds a whole snapshot of it"
    if left.origin:
        return pretrained(stage, left, f"stage {stage} has no replica left"), ""
    if not 1 < stage < left.stages:
        return (
            None,
            "checkfree rebuilds only stages between two body stages, and this is the first or last",
        )
    missing = [of for of in (stage - 1, stage + 1) if not left.trained(of)]
    if missing:
        names = " and ".join(map(str, missing))
        lost = f"stages {names} are" if len(missing) > 1 else f"stage {names} is"
        return None, f"checkfree needs both neighbours, and {lost} lost with it"
    reason = (
        f"stage {stage} has no replica left: average of stages {stage - 1} and {stage + 1}, "
        "weighted by their gradient norms"
    )
    sources = left.nodes(stage - 1) + left.nodes(stage + 1)
    return Rebuild(stage, "checkfree", sources, exact=False, reason=reason), ""


def begin_anew(stage: int, loss: str, fallback: bool = False) -> Rebuild:
    """The guess for a lost stage of which only adapters are trained: the initial ones."""
    reason = f"{loss}: its adapters begin anew, since other stages' adapters do not determine them"
    return Rebuild(stage, ANEW, (), exact=False, reason=reason, fallback=fallback)


def pretrained(stage: int, left: Left, loss: str, fallback: bool = False) -> Rebuild:
    """A guess, the checkpoint's weights: trained stages differ, and have moved little since."""
    source = Source(giver(stage, left.origin), stage, 0)
    reason = f"{loss}: its weights in the checkpoint from which the run began"
    return Rebuild(stage, PRETRAINED, (source,), exact=False, reason=reason, fallback=fallback)


def _checkfree_plus(stage: int, left: Left) -> Answer:
    """CheckFree+ (section 4.3): an end stage is a copy of its partner in swapped order."""
    other = partner(stage, left.stages)
    if stage == 0 or other is None or left.origin:
        return checkfree(stage, left)
    if not left.trained(other):
        return None, f"its weights would come from stage {other}, and stage {other} is lost with it"
    reason = (
        f"stage {stage} has no replica left: copy of stage {other}, which half of the microbatches "
        "have trained in its place"
    )
    return Rebuild(stage, "checkfree+", left.nodes(other), exact=False, reason=reason), ""


def _snapshot(stage: int, left: Left) -> Answer:
    return None, "no peer holds a whole snapshot of it"


def _redundant(stage: int, left: Left) -> Answer:
    holdings = sorted(left.holdings("redundant", stage), key=lambda held: held.source.node)
    twins = tuple(held.source for held in holdings if held.source.step == left.step)
    if not twins:
        return None, "the node of the stage before, which has its twin, is lost too, or new"
    reason = f"stage {stage} has no replica left: its twin at the stage before takes over"
    return Rebuild(stage, "redundant", twins, exact=True, reason=reason), ""


def _checkpoint(stage: int, left: Left) -> Answer:
    common = newest_common(by_version(left.held, "checkpoint"), left.stages)
    lineage, step, _ = common or (0, 0, UNKNOWN)
    where = f"the checkpoint of step {step}" if step else "the initial weights: no checkpoint is"
    reason = f"stage {stage} has no replica left: all stages go back to {where}"
    return RollBack(step, lineage, reason if step else f"{reason} whole yet"), ""


POLICIES: Final = {
    "auto": Policy(checkfree, guesses=True, snapshots=True),
    "checkfree": Policy(checkfree, guesses=True),
    "checkfree+": Policy(_checkfree_plus, guesses=True, swapped=True),
    "snapshot": Policy(_snapshot, snapshots=True),
    "redundant": Policy(_redundant, twins=True),
    "checkpoint": Policy(_checkpoint, checkpoints=True),
}
"""By `recovery.policy` of the run file."""
