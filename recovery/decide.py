"""What to do about a loss: one pure function, with its reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Sources = tuple[tuple[str, int], ...]
"""(node, stage) pairs to fetch from."""


@dataclass(frozen=True)
class Rebuild:
    """Give a node of `stage` the state of the step that the swarm stands at."""

    stage: int
    method: str
    sources: Sources
    exact: bool
    reason: str


@dataclass(frozen=True)
class Stop:
    """The run can't go on: nothing that is left tells what the stage's weights were."""

    stage: int
    reason: str


Decision = Rebuild | Stop


def decide(
    stage: int, survivors: Mapping[int, Sequence[str]], stages: int, policy: str
) -> Decision:
    """How does a node of `stage` get its state?

    `survivors` maps a stage to its nodes that hold the newest committed step; `stages` is L, the
    number of body stages. CheckFree's Algorithm 1 serves 1 < stage < L only: the others lack a
    second body neighbour.
    """
    if policy != "checkfree":
        raise ValueError(f"unknown recovery policy {policy!r}; known: checkfree")

    def nodes(of: int) -> Sources:
        return tuple((node, of) for node in sorted(survivors.get(of, ())))

    if replicas := nodes(stage):
        reason = f"stage {stage} lives on at {len(replicas)} of its nodes: copied from there"
        return Rebuild(stage, "replica", replicas, exact=True, reason=reason)
    if not 1 < stage < stages:
        what = "the embedding stage" if stage == 0 else "an end stage"
        return Stop(
            stage,
            f"stage {stage} is lost: it was {what} without a replica, and checkfree rebuilds only "
            f"stages between two body stages",
        )
    missing = [of for of in (stage - 1, stage + 1) if not nodes(of)]
    if missing:
        return Stop(
            stage,
            f"stages {', '.join(map(str, sorted([stage, *missing])))} are lost together: checkfree "
            f"needs both neighbours of stage {stage}",
        )
    return Rebuild(
        stage,
        "checkfree",
        nodes(stage - 1) + nodes(stage + 1),
        exact=False,
        reason=f"stage {stage} has no replica left: average of stages {stage - 1} and {stage + 1}, "
        "weighted by their gradient norms",
    )
