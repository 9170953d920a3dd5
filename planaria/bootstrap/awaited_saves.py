"""Saves on the disks of lost nodes that may come back. Pure: `now` is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from planaria.bootstrap.members import Node
from planaria.bootstrap.registry_pb2 import AwaitedSave


class AwaitedSaves:
    """At most one a stage: of the node that served it last."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for which a node is awaited."""
        self._seconds = seconds
        self._until: dict[int, tuple[float, AwaitedSave]] = {}

    def restore(self, listed: Iterable[AwaitedSave], now: float) -> None:
        self._until = {save.stage: (now + save.seconds, save) for save in listed}

    def lost(self, node: Node, vacant: Collection[int], now: float) -> None:
        """The node is gone; of the stages that it served, no node has the `vacant` ones."""
        for seat in node.report.seats:
            if self._seconds and seat.saves and seat.stage in vacant:
                step, key = seat.saves[0], node.member.key
                save = AwaitedSave(stage=seat.stage, step=step, node=node.name, key=key)
                self._until[seat.stage] = now + self._seconds, save

    def joined(self, key: bytes) -> None:
        """A node with this key is back: a save that it doesn't have now is gone."""
        for stage, (_, save) in list(self._until.items()):
            if save.key == key:
                del self._until[stage]

    def ended(self, now: float) -> list[int]:
        """Ends waits that have lasted long enough; returns the stages."""
        over = [stage for stage, (until, _) in self._until.items() if now >= until]
        for stage in over:
            del self._until[stage]
        return over

    def listed(self, now: float) -> list[AwaitedSave]:
        """The saves, for a view."""
        listed = []
        for _, (until, save) in sorted(self._until.items()):
            listed.append(AwaitedSave())
            listed[-1].CopyFrom(save)  # it may be an issued view's
            listed[-1].seconds = max(0.0, until - now)
        return listed


def in_words(awaited: Iterable[AwaitedSave]) -> str:
    """For whom a run waits, and how long."""
    stages: dict[tuple[str, int, float], list[str]] = {}
    for save in awaited:
        stages.setdefault((save.node, save.step, save.seconds), []).append(str(save.stage))
    return "; ".join(
        f"waits for {node}, which has a save of stage{'s' * (len(of) > 1)} {', '.join(of)} of step "
        f"{step}, for {seconds:.0f} s"
        for (node, step, seconds), of in stages.items()
    )
