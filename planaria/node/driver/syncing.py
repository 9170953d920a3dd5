"""Syncing: some members fetch a state, and nothing trains until all of them have it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import HANG
from planaria.node.driver.fault_policy import HELD_UP, UNVOTED
from planaria.node.driver.phases import DriverPhase, Phase, Turn
from planaria.node.driver.query_answers import Answers
from planaria.node.driver.rebuilds import rebuilt
from planaria.node.report.events import RebuildFailed, StageRebuilt
from planaria.node.transaction.effects import Ballot, Effect, Suspect
from planaria.node.transaction.rules import SLOWEST
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.facts import ARRIVED

if TYPE_CHECKING:
    from planaria.node.driver.driver import Driver


class Syncing(Phase):
    _kind = DriverPhase.SYNCING

    def __init__(self, driver: Driver, answers: Answers, awaited: set[str], now: float) -> None:
        super().__init__(driver)
        self.answers, self.awaited = answers, awaited
        self.began = self.progressed = now
        self.fetched = Counter[str]()  # bytes that have come, by awaited member

    def explain(self) -> str:
        return f"{self.answers.why}; {self._waits()}"

    def _waits(self) -> str:
        return f"waiting for the state of {', '.join(sorted(self.awaited))}"

    def received(self, peer: str, message: pb.Message, now: float) -> Turn:
        joins = peer in self.driver.joining.joiners
        if not joins and Ballot.of(message.ballot) == self.driver.ballot:
            match message.WhichOneof("body"):
                case "synced":
                    return self._synced(peer, message.synced, now)
                case "failed":
                    return self.accused_by(peer, message.failed, now)
                case "account" if peer in self.awaited:
                    self._note_fetched(peer, message.account.fetched, now)
        return super().received(peer, message, now)

    def viewed(self, view: registry.View, now: float) -> Turn | None:
        coming, gone = self.driver.adopt_later(view, now)
        return None if gone else self.stays(coming.greetings())

    def tick(self, now: float) -> Turn:
        """Gives up waiting after `rules.progress` seconds without any progress."""
        driver, hanging = self.driver, self.driver.hanging.why
        seconds = now - self.progressed
        if seconds < driver.rules.progress:
            return self.stays()
        driver.faults.failures.count += 1
        problem = "held up" if hanging else "no progress"
        waited = f"{problem} for {seconds:.0f} s: {self._waits()}"
        effects: list[Effect] = [
            Suspect(node, hanging[node], HANG) if node in hanging else Suspect(node, waited)
            for node in sorted({*self.awaited, *hanging})
            if not driver.faults.is_here(node)
        ]
        for node in () if hanging else sorted(self.awaited):
            effects += driver.charge_holdup(node, waited, HELD_UP // UNVOTED)
        return self.gather(waited, now).after(effects)

    def accused_by(self, peer: str, failed: pb.Failed, now: float) -> Turn:
        driver = self.driver
        driver.count_failure(now)
        charges = driver.accuse(peer, failed) + driver.charge_holdup(peer, failed.reason)
        event = RebuildFailed(node=peer, reason=failed.reason)
        return self.gather(f"{peer} says: {failed.reason}", now).after([*charges, event])

    def gather(self, why: str, now: float) -> Turn:
        if self.awaited:
            self.driver.rebuilds.spent += now - self.began
        return super().gather(why, now)

    def _synced(self, peer: str, synced: pb.Synced, now: float) -> Turn:
        self.awaited.discard(peer)
        self.progressed = now
        if synced.method != "twin":
            self.driver.divergence.trust(peer)
            seconds = now - self.began
            event = rebuilt(peer, self.answers.members[peer], synced, seconds, math.nan)
            self.driver.rebuilds.rebuilt.append(self._with_staleness(event, synced))
        return self.stays() if self.awaited else self.gather("state is in place", now)

    def _note_fetched(self, peer: str, fetched: int, now: float) -> None:
        """Takes in how many bytes of its state a member has; that is progress if it is fast
        enough."""
        expected = SLOWEST * (now - self.began - self.driver.rules.progress)
        if fetched > max(self.fetched[peer], expected):
            self.progressed = now
        self.fetched[peer] = max(self.fetched[peer], fetched)

    def _with_staleness(self, event: StageRebuilt, synced: pb.Synced) -> StageRebuilt:
        """Adds a state's age to its rebuild's event; a snapshot's is as its holder reported."""
        if synced.method in ARRIVED and synced.sources:
            step = synced.sources[0].step
            return replace(event, oldest_step=step, mean_step=step)
        snapshots = [
            holding
            for source in synced.sources[:1]
            for holding in self.answers.statuses.get(source.node, pb.Status()).holdings
            if (holding.kind, holding.stage) == ("snapshot", source.stage)
        ]
        if synced.method != "snapshot" or not snapshots:  # another one than planned was used
            return event
        return replace(
            event,
            oldest_step=snapshots[0].oldest_step,
            mean_step=snapshots[0].mean_step,
            perturbation=snapshots[0].perturbation,
        )
