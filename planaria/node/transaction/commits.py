"""What a commit says to a stage, and whether it may follow the last one applied there.

Factors of learning rate and gradient: one for each stage, or one for all. Stages mostly have equal
factors; then one is sent, because every node receives each commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import head


def collapsed(by_stage: Sequence[float]) -> Sequence[float]:
    """The stages' factors as a commit has them: a single one if all are equal."""
    return by_stage[:1] if len(set(by_stage)) == 1 else by_stage


def has_for(scales: Sequence[float], stage: int) -> bool:
    """Whether a commit's factors have one for the stage."""
    return len(scales) == 1 or stage < len(scales)


def of_stage(scales: Sequence[float], stage: int) -> float:
    """A stage's factor among a commit's. Raises IndexError if there is none (`has_for`)."""
    return scales[0] if len(scales) == 1 else scales[stage]


def entering(commit: pb.Commit, stage: int) -> int:
    """How many of the stage's relearning updates enter with the commit."""
    return commit.relearned[stage] if stage < len(commit.relearned) else 0


def fault_in_chain(commit: pb.Commit, last: pb.Commit, lineage: int) -> str:
    """Why the commit can't follow the last one applied here; empty: it can."""
    if commit.lineage != lineage:
        return f"step {commit.step} of lineage {commit.lineage}; the lineage here is {lineage}"
    if commit.previous != head(last, lineage):
        return (
            f"step {commit.step} that follows another commit of step {last.step} than this node's"
        )
    return ""


def fault_in_relearned(commit: pb.Commit, stage: int, offered: int) -> str:
    """Why the relearned updates can't enter with the commit; empty: they can."""
    fixed = entering(commit, stage)
    if fixed in (0, offered):
        return ""
    return (
        f"step {commit.step} with {fixed} relearning updates of stage {stage}; {offered} were "
        "offered"
    )
