"""Visits that two nodes do, as their neighbours and the second node see them (spot_checks.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.wire.frames import Frame

DOUBLE: Final = "double"
"""Field of a frame that goes to a double, or comes from one: the nodes of the microbatch's way."""
MOST: Final = 2
"""Doubles of a visit."""
Key = tuple[int, int]
"""Microbatch and position of a visit."""


class DoubledResult(NamedTuple):
    """What two nodes have made of the same."""

    key: Key
    backward: bool
    node: str
    other: str
    made: tuple[Frame, Frame]


@dataclass
class _Doubled:
    doubles: list[str]
    sent: dict[str, Frame] = field(default_factory=dict)  # by kind, to the visit's own node
    made: dict[str, dict[str, Frame]] = field(default_factory=dict)  # by kind and node


class DoubledNeighbour:
    """What a node beside them knows of visits that are done twice, in one attempt."""

    def __init__(self, checks: Iterable[pb.Check]) -> None:
        self._doubled: dict[Key, _Doubled] = {}
        for check in checks:
            self.check(check)

    def check(self, check: pb.Check) -> list[Frame]:
        """The visit has one more double; what it is to be sent at once."""
        doubled = self._doubled.setdefault((check.microbatch, check.position), _Doubled([]))
        if check.double in doubled.doubles or len(doubled.doubles) >= MOST:
            return []
        doubled.doubles.append(check.double)
        return list(doubled.sent.values())

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._doubled.pop(key, None)

    def visits(self) -> list[Key]:
        return list(self._doubled)

    def sends(self, key: Key, frame: Frame) -> list[str]:
        """This goes to the visit's node; who is to have it, too."""
        doubled = self._doubled.get(key)
        if doubled is None:
            return []
        doubled.sent[frame.kind] = frame
        return doubled.doubles

    def made(self, key: Key, node: str, frame: Frame) -> Iterator[DoubledResult]:
        """This has come from the visit's node, or from a double; with what it is to be compared."""
        doubled = self._doubled.get(key)
        if doubled is None:
            return
        made = doubled.made.setdefault(frame.kind, {})
        if node in made:
            return
        made[node] = frame
        for one, other in combinations(made, 2):
            if node in (one, other):
                yield DoubledResult(
                    key, frame.kind == "gradient", one, other, (made[one], made[other])
                )

    def knows(self, key: Key, double: str) -> bool:
        return key in self._doubled and double in self._doubled[key].doubles


class SecondVisits:
    """What a double does: the order of its passes."""

    def __init__(self) -> None:
        self._forward: set[Key] = set()  # done
        self._seen: set[tuple[Key, str]] = set()
        self._early: dict[Key, tuple[str, Frame]] = {}  # gradients, with who sent them

    def takes(self, key: Key, peer: str, frame: Frame) -> bool:
        """Whether that is to be computed now."""
        if (key, frame.kind) in self._seen:
            return False
        self._seen.add((key, frame.kind))
        if frame.kind == "gradient" and key not in self._forward:
            self._early[key] = peer, frame
            return False
        return True

    def went_forward(self, key: Key) -> tuple[str, Frame] | None:
        """It has; the gradient, if that is there already."""
        self._forward.add(key)
        return self._early.pop(key, None)
