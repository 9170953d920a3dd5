"""Nodes as placement sees them, and the changes of their seats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planaria.bootstrap.failure_domains import NOWHERE, FailureDomain


@dataclass(frozen=True)
class Candidate:
    """A node with the attributes that placement uses."""

    node: str
    stages: frozenset[int]  # of its seats; empty: a standby
    holds: frozenset[int]  # stages whose state it has
    fits: frozenset[int]  # stages that it can serve
    room: int  # maximum number of seats
    speed: float  # relative work per second
    heard: bool = True
    leaving: bool = False
    drives: bool = False
    place: FailureDomain = NOWHERE
    waits: bool = False  # for a vacant stage
    joined: frozenset[int] = frozenset()  # stages of its seats since it joined
    requested: frozenset[int] = frozenset()  # stages that it asked for, and serves
    layer: float = 0.0  # seconds of a microbatch in a layer, as measured; 0: not yet
    ends: float = 0.0  # the same for stage 0
    since: Mapping[int, float] = field(default_factory=dict)  # stage -> when it got the seat

    @property
    def stays(self) -> bool:
        return self.heard and not self.leaving


@dataclass(frozen=True)
class SeatAssigned:
    """A node gets a seat at `stage` for its seat at `gives` (None: it keeps all)."""

    node: str
    stage: int
    why: str
    gives: int | None = None


@dataclass(frozen=True)
class SeatReleased:
    """The change that a node returns a seat; without any other, it becomes a standby."""

    node: str
    stage: int
    why: str
