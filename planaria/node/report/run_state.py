"""State of a run, from the registry's description and from events. The page, `planaria status`, the
terminal and Prometheus are views of it. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.neighbours import place_of, stages_of
from planaria.bootstrap.truncation import omitted_from

if TYPE_CHECKING:
    from planaria.node.report.live_view import RunStory

_STATES = {
    "syncing": "rebuilding",
    "following": "joining",
    "reducing": "averaging",
    **{phase: phase for phase in ("idle", "running", "ready", "halted")},
}
"""Names of a seat's phases for people."""


class SeatState(NamedTuple):
    """A member's seat at `stage`; None: a standby. The report is empty until the member sends one;
    `why`: the reason of the placement."""

    stage: int | None
    entry: pb.MemberDescription
    report: pb.SeatReport
    why: str

    @property
    def place(self) -> str:
        return "standby" if self.stage is None else f"stage {self.stage}"

    @property
    def state(self) -> str:
        """The seat's state in a word."""
        if self.entry.suspected:
            return "suspected"
        if self.entry.reached_by:
            return "not heard"
        if self.entry.report.stalled_seconds:
            return "hangs"
        if self.stage is None:
            return "waiting"
        return _STATES.get(self.report.phase, "joining")


class CutLink(NamedTuple):
    """Two members that can't reach each other, by name; `via` relays for them, if not empty;
    `state`: current attempt to connect."""

    a: str
    b: str
    via: str
    state: str
    seconds: float


class RunState:
    """What a registry's description says of a run and, with `story`, what its events say."""

    def __init__(self, description: pb.Description, story: RunStory | None = None) -> None:
        self.description = description
        self.seats = [seat for entry in description.members for seat in _seat_states(entry)]
        self._at: defaultdict[int | None, list[SeatState]] = defaultdict(list)
        for seat in self.seats:
            self._at[seat.stage].append(seat)
        self.reports = [seat for entry in description.members for seat in entry.report.seats]
        self.newest = max(
            self.reports, key=lambda seat: (seat.lineage, seat.committed), default=None
        )
        self.committed, self.loss = self._committed(story)

    def _committed(self, story: RunStory | None) -> tuple[int, float]:
        """The newest committed step, and its loss. A run that went back to files is at an older
        step, of a newer lineage."""
        view, newest = self.description.view, self.newest
        reported = (newest.lineage, newest.committed) if newest else (0, 0)
        _, step = max(reported, (view.lineage, view.committed))
        if story is not None:
            if not max(step, story.committed):
                return 0, math.nan
            if not self.reports or (step, math.isfinite(story.loss)) == (story.committed, True):
                return max(step, story.committed), story.loss
        has_loss = newest is not None and step == newest.committed > 0
        return step, newest.loss if has_loss and newest is not None else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Maximum of the nodes' figures; 0: unknown."""
        return max((seat.tokens_per_second for seat in self.reports), default=0.0)

    def at(self, stage: int | None) -> list[SeatState]:
        """The seats of a stage; None: the standbys."""
        return self._at.get(stage, [])

    @cached_property
    def driving(self) -> pb.SeatReport | None:
        """The driver's seat at stage 0."""
        driver = self.description.view.driver
        return next(
            (seat.report for seat in self.at(0) if seat.entry.member.node == driver and driver),
            None,
        )

    def troubles(self) -> Iterator[str]:
        """Problems that need a person, at the registry and at nodes."""
        if self.description.trouble:
            yield f"the registry: {self.description.trouble}"
        for entry in self.description.members:
            if entry.report.trouble:
                yield f"{name_and_place(entry.member)}: {entry.report.trouble}"

    def unsent(self) -> Iterator[str]:
        """Snapshots that aren't sent, and why."""
        return (seat.unsent for seat in self.reports if seat.unsent)

    def omitted(self) -> list[str]:
        """Parts that the registry omitted from its answer."""
        return omitted_from(self.description)

    def cuts(self) -> Iterator[CutLink]:
        names = {
            entry.member.node: name_and_place(entry.member) for entry in self.description.members
        }
        for cut in self.description.cuts:
            a, b, via = (names.get(node, node) for node in (cut.a, cut.b, cut.via))
            yield CutLink(a, b, via if cut.carried else "", cut.state, cut.seconds)

    def quarantined(self) -> list[pb.Quarantined]:
        """Instances that were evicted for cause and are still excluded."""
        return [instance for instance in self.description.quarantined if instance.seconds > 0]

    def evictions(self) -> Iterator[tuple[pb.Eviction, str]]:
        """Evictions, each with a sentence."""
        for eviction in self.description.evictions:
            yield eviction, f"{name_and_place(eviction.member)}: {eviction.reason}"


def _seat_states(entry: pb.MemberDescription) -> Iterator[SeatState]:
    reports = {seat.stage: seat for seat in entry.report.seats}
    reasons = iter(entry.why)
    if not entry.member.seats:
        yield SeatState(None, entry, pb.SeatReport(), next(reasons, ""))
    for stage in stages_of(entry.member):
        yield SeatState(stage, entry, reports.get(stage, pb.SeatReport()), next(reasons, ""))


def name_and_place(member: pb.Member) -> str:
    """The node's name with its place."""
    return f"{member.node} ({place_of(member)})"
