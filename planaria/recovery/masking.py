"""Masking: the reaction to the loss of a node within a step if its stage has replicas left.

- `reassign`: the driver gives its microbatches to other replicas. A death costs 0.13 steps.
- `spare`: as `reassign`, and a replica has computed part of them in advance. A death costs 0.03
  steps; steps without failures take 1.15 to 1.6 times as long.
- `abort`: all nodes retry the step. A death costs 1.21 steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, Protocol

Masking = Literal["abort", "reassign", "spare"]


class Placed(Protocol):
    """A node at a stage."""

    @property
    def node(self) -> str: ...
    @property
    def stage(self) -> int: ...


def stand_ins(members: Iterable[Placed]) -> dict[str, str]:
    """Each node's stand-in under `spare`: the next replica of its stage, by id. (SPARe's placement
    with a redundancy of 2: the Golomb ruler of two marks is 0, 1.)"""
    by_stage = sorted((place.stage, place.node) for place in members)
    pairs: dict[str, str] = {}
    for _, replicas in groupby(by_stage, lambda place: place[0]):
        nodes = [node for _, node in replicas]
        if len(nodes) > 1:
            pairs.update(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return pairs
