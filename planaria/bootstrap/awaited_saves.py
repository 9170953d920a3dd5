"""Saves on the disks of lost nodes that may come back. Pure: `now` is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from planaria.bootstrap.member_table import NodeRecord
from planaria.bootstrap.registry_pb2 import AwaitedSave

CRASHED: Final = "it crashed: "
"""How the reason of a node that leaves begins if it has crashed: its supervisor may restart it."""


class AwaitedSaves:
    """The saves that the run waits for, at most one a stage: of the node that served it last."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for which a node is awaited."""
        self._seconds = seconds
        self._saves: dict[int, AwaitedSave] = {}  # `seconds`: when the wait ends

    @property
    def stages(self) -> Collection[int]:
        """The stages whose saves are awaited."""
        return self._saves.keys()

    def restore(self, listed: Iterable[AwaitedSave], now: float) -> None:
        self._saves = {save.stage: _shifted(save, now) for save in listed}

    def lost(self, node: NodeRecord, vacant: Collection[int], now: float) -> None:
        """Awaits the saves of a node that is gone, of the stages that are `vacant` now."""
        until, key = now + self._seconds, node.member.key
        for at in node.report.seats if self._seconds else ():
            if at.saves and at.stage in vacant:
                self._saves[at.stage] = AwaitedSave(
                    stage=at.stage, step=at.saves[0], node=node.name, key=key, seconds=until
                )

    def joined(self, key: bytes) -> None:
        """Awaits no save of the node with this key any longer: it is back, with what it has."""
        self._saves = {of: save for of, save in self._saves.items() if save.key != key}

    def ended(self, now: float) -> list[int]:
        """Ends the waits for saves that have lasted long enough; returns the stages."""
        over = [stage for stage, save in self._saves.items() if now >= save.seconds]
        self._saves = {of: save for of, save in self._saves.items() if of not in over}
        return over

    def paused(self, seconds: float) -> None:
        """Extends the waits by a pause of the registry."""
        for save in self._saves.values():
            save.seconds += seconds

    def listed(self, now: float) -> list[AwaitedSave]:
        """The awaited saves, as a view has them."""
        return [_shifted(save, -now) for _, save in sorted(self._saves.items())]


def awaited_in_words(awaited: Iterable[AwaitedSave]) -> str:
    """For which nodes with saves the run waits, and how long."""
    stages: dict[tuple[str, int, str], list[str]] = {}
    for save in awaited:
        stages.setdefault((save.node, save.step, f"{save.seconds:.0f}"), []).append(str(save.stage))
    return "; ".join(
        f"waits for {node}, which has a save of stage{'s' * (len(of) > 1)} {', '.join(of)} of step "
        f"{step}, for {seconds} s"
        for (node, step, seconds), of in stages.items()
    )


def _shifted(save: AwaitedSave, seconds: float) -> AwaitedSave:
    copy = AwaitedSave()
    copy.CopyFrom(save)
    copy.seconds = max(0.0, save.seconds + seconds)
    return copy
