"""Visits that two nodes compute: state of their neighbours and the second node (spot_checks.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.wire.frame_format import Frame

DOUBLE: Final = "double"
"""Field of a frame to or from a double: the nodes of the microbatch's route."""
MOST: Final = 2
"""Maximum doubles of a visit."""
Key = tuple[int, int]
"""Microbatch and position of a visit."""


class DoubledResult(NamedTuple):
    """Two nodes' results of the same visit."""

    key: Key
    backward: bool
    node: str
    other: str
    made: tuple[Frame, Frame]


@dataclass
class _Doubled:
    doubles: list[str]
    sent: dict[str, Frame] = field(default_factory=dict)  # by kind, sent to the visit's own node
    made: dict[str, dict[str, Frame]] = field(default_factory=dict)  # results, by kind and node


class DoubledNeighbour:
    """A neighbour's part in doubled visits of one attempt: what it sent there, and the results."""

    def __init__(self, checks: Iterable[pb.Check]) -> None:
        self._doubled: dict[Key, _Doubled] = {}
        for check in checks:
            self.check(check)

    def check(self, check: pb.Check) -> list[Frame]:
        """Adds a double to the visit; returns the frames to send it at once."""
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
        """Keeps a frame to the visit's node; returns the doubles that get it, too."""
        doubled = self._doubled.get(key)
        if doubled is None:
            return []
        doubled.sent[frame.kind] = frame
        return doubled.doubles

    def made(self, key: Key, node: str, frame: Frame) -> Iterator[DoubledResult]:
        """Keeps a result of the visit's node or of a double; yields it with each earlier one."""
        doubled = self._doubled.get(key)
        if doubled is None:
            return
        made = doubled.made.setdefault(frame.kind, {})
        if node in made:
            return
        made[node] = frame
        for first, second in combinations(made, 2):
            if node in (first, second):
                yield DoubledResult(
                    key, frame.kind == "gradient", first, second, (made[first], made[second])
                )

    def knows(self, key: Key, double: str) -> bool:
        return key in self._doubled and double in self._doubled[key].doubles


class SecondVisits:
    """The passes of a double, each once, and forward before backward."""

    def __init__(self) -> None:
        self._forward: set[Key] = set()  # visits with a finished forward pass
        self._seen: set[tuple[Key, str]] = set()
        self._early: dict[Key, tuple[str, Frame]] = {}  # early gradients and their senders

    def takes(self, key: Key, peer: str, frame: Frame) -> bool:
        """Whether the double is to compute on this frame now; an early gradient is kept."""
        if (key, frame.kind) in self._seen:
            return False
        self._seen.add((key, frame.kind))
        if frame.kind == "gradient" and key not in self._forward:
            self._early[key] = peer, frame
            return False
        return True

    def went_forward(self, key: Key) -> tuple[str, Frame] | None:
        """Notes that a visit's forward pass is done; returns its gradient if that came early."""
        self._forward.add(key)
        return self._early.pop(key, None)
