"""Quarantine of instances that were evicted for cause.

Node ids are new at each start, so quarantine applies to the *instance*, which is permanent. Its
duration is `FIRST` seconds, and doubles each time. After a failed audit of gradients it is always
`LONGEST`: each return would cost the run more wrong steps. Pure: `now` is passed in, seconds of a
monotonic clock. Views therefore contain the seconds left; these do not pass while the registry is
down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planaria.bootstrap.registry_pb2 import AUDIT, DIVERGENCE, Cause, Quarantined

FIRST, LONGEST = 30.0, 3600.0  # seconds
FORGOTTEN = 6 * 3600.0  # seconds after the end of a quarantine until its record is dropped
MOST_DIVERGENCES = 3  # evictions for divergence after which an instance is excluded
MOST_KEPT = 200  # instances; the earliest to end are dropped first


@dataclass
class _Entry:
    record: Quarantined  # without the seconds left
    until: float


class Quarantine:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, instance: str, node: str, cause: Cause, why: str, now: float) -> None:
        """Puts an instance in quarantine: it was evicted for cause, as `node`."""
        self._forget(now)
        former = self._entries.get(instance)
        record = Quarantined(instance=instance, node=node, cause=cause, why=why, times=1)
        if former is not None:
            record.times += former.record.times
            record.divergences = former.record.divergences
        record.divergences += cause == DIVERGENCE
        seconds = min(LONGEST, FIRST * 2.0 ** min(record.times - 1, 30))
        if cause == AUDIT:
            seconds = LONGEST
        if record.divergences >= MOST_DIVERGENCES:
            seconds = math.inf
        self._entries[instance] = _Entry(record, now + seconds)
        if len(self._entries) > MOST_KEPT:
            first = min(self._entries, key=lambda instance: self._entries[instance].until)
            del self._entries[first]

    def seconds_left(self, instance: str, now: float) -> float:
        """Seconds until the instance may join; infinite: never."""
        entry = self._entries.get(instance)
        return 0.0 if entry is None else max(0.0, entry.until - now)

    def why_excluded(self, instance: str, now: float) -> str:
        """Why the instance may not join now, as text."""
        record, seconds = self._entries[instance].record, self.seconds_left(instance, now)
        if seconds == math.inf:
            return (
                "this node may not join again: its weights differed from those of its replicas "
                f"{record.divergences} times, the last time as {record.node} ({record.why}); "
                "check the machine's memory and device"
            )
        times = "" if record.times == 1 else f"; {record.times} evictions so far"
        return (
            f"this node was evicted for cause as {record.node} ({record.why}{times}); "
            f"it may join again in {seconds:.0f} s"
        )

    def listed(self, now: float) -> list[Quarantined]:
        """The quarantined instances, as a view has them, with the seconds left."""
        self._forget(now)
        records = []
        for instance, entry in self._entries.items():
            record = Quarantined(seconds=self.seconds_left(instance, now))
            record.MergeFrom(entry.record)
            records.append(record)
        return records

    def restore(self, listed: Iterable[Quarantined], now: float) -> None:
        """Restores the quarantined instances of a view."""
        self._entries = {}
        for record in listed:
            copy = Quarantined()
            copy.CopyFrom(record)
            copy.ClearField("seconds")
            self._entries[record.instance] = _Entry(copy, now + record.seconds)

    def _forget(self, now: float) -> None:
        entries = self._entries.items()
        self._entries = {key: entry for key, entry in entries if now < entry.until + FORGOTTEN}
