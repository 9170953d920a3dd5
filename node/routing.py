"""Which node serves which visit of a microbatch: its source decides, by work and speed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SMOOTHING = 0.3
"""Weight of the newest measurement in a node's average seconds per microbatch."""


def earliest_finish(
    nodes: Sequence[str], outstanding: Mapping[str, int], seconds: Mapping[str, float]
) -> str:
    """The node that would finish one more microbatch first; ties go to the smallest id.

    A node that was never measured counts as fast as the average of those that were.
    """
    known = [seconds[node] for node in nodes if seconds.get(node)]
    usual = sum(known) / len(known) if known else 1.0
    return min(
        nodes,
        key=lambda node: ((outstanding.get(node, 0) + 1) * (seconds.get(node) or usual), node),
    )


def share_out(ids: Iterable[int], nodes: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """A source for each microbatch, so that all sources would finish together."""
    given: Counter[str] = Counter()
    chosen = []
    for _ in ids:
        node = earliest_finish(nodes, given, seconds)
        given[node] += 1
        chosen.append(node)
    return chosen


@dataclass(frozen=True)
class Route:
    """Node and stage of each visit; the first and the last are the source, at stage 0."""

    nodes: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass
class Routing:
    """The source's side of one node: which microbatch to inject next, and through whom.

    At most `in_flight` microbatches are out at a time, which is the back-pressure of the pipeline.
    """

    node: str
    in_flight: int
    seconds: dict[str, float] = field(default_factory=dict)
    waiting: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque)
    out: dict[int, Route] = field(default_factory=dict)
    outstanding: Counter[str] = field(default_factory=Counter)
    replicas: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def begin(
        self,
        replicas: Mapping[int, Sequence[str]],
        microbatches: Iterable[tuple[int, Sequence[int]]],
    ) -> None:
        """Forget the attempt before; `microbatches` are (id, order) pairs that start here."""
        self.replicas = {stage: tuple(sorted(nodes)) for stage, nodes in replicas.items()}
        self.waiting = deque((identity, tuple(order)) for identity, order in microbatches)
        self.out = {}
        self.outstanding = Counter()

    def inject(self) -> tuple[int, Route] | None:
        """The next microbatch with its route; None while the window is full or nothing is left."""
        if not self.waiting or len(self.out) >= self.in_flight:
            return None
        identity, order = self.waiting.popleft()
        visits = [
            earliest_finish(self.replicas[stage], self.outstanding, self.seconds) for stage in order
        ]
        self.outstanding.update(visits)
        route = Route((self.node, *visits, self.node), (0, *order, 0))
        self.out[identity] = route
        return identity, route

    def home(self, identity: int, seconds: Mapping[str, float]) -> None:
        """A microbatch came back; `seconds` is the compute time that each visited node measured."""
        route = self.out.pop(identity)
        self.outstanding.subtract(route.nodes[1:-1])
        for node, measured in seconds.items():
            before = self.seconds.get(node, measured)
            self.seconds[node] = before + SMOOTHING * (measured - before)
