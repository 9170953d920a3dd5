"""Observer client of a running run: which nodes have which stages, on which route, at which step.

A node that can be dialled from here is asked directly, another one through nodes that can. For
weights of one committed step, all stages get the request before that commit. So each pins its
weights at the commit, and nobody waits; if it is too late, a later step is tried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Self

from planaria.bootstrap.address import EVERYWHERE, Reach
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import Description, Member, View
from planaria.node.hugging_face.export import ExportError
from planaria.node.run_file import RunFile, loads
from planaria.node.state.weight_pins import LEASE
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.observer_client import Converse, NoAnswerError, ObserverClient, over_streams
from planaria.node.wire.observers import Inside, Observers
from planaria.node.wire.seat_names import seat_id, seat_name

log = logging.getLogger(__name__)

REPLICAS: Final = 2
"""Number of seats per stage to use."""
TRIED: Final = 4
"""Limit of routes per kind before a stage counts as unreachable."""
LOOK: Final = 0.2
"""Seconds between two polls for a committed step."""


class SeatRoute(NamedTuple):
    """How to reach a seat of a running run: through this node, dialled at this address."""

    seat: str
    node: str
    address: str


def routes_to(stage: int, view: View) -> list[SeatRoute]:
    """Routes to try to a stage: first to seats of nodes that can be dialled, then to the others.
    These go through nodes that can be, those of neighbouring stages first."""
    dialled = [m for m in view.members if m.address and m.seats]
    holders = [m for m in view.members if stage in stages_of(m)]
    direct = [
        SeatRoute(_seat(member, stage), member.node, member.address)
        for member in holders
        if member.address
    ]

    def distance(member: Member) -> int:
        return min(abs(stage - other) for other in stages_of(member))

    near = sorted(dialled, key=distance)[:TRIED]
    through = [
        SeatRoute(_seat(member, stage), by.node, by.address)
        for by in near
        for member in holders
        if not member.address
    ]
    return direct[:TRIED] + through[:TRIED]


def _seat(member: Member, stage: int) -> str:
    (seat,) = (seat for seat in member.seats if seat.stage == stage)
    return seat_id(member.node, seat_name(seat))


class Access(NamedTuple):
    """How to reach the stages of a running run."""

    run: RunFile
    view: Callable[[], Awaitable[View]]  # the newest
    converse: Converse
    ways: Callable[[int, View], list[SeatRoute]]  # to a stage


async def outside_access(
    describe: Callable[[], Awaitable[Description]],
    credentials: Credentials,
    reach: Reach = EVERYWHERE,
) -> Access:
    """Access from another machine, by the registry's description; `reach`: where nodes are dialled.
    Raises RunFileError, and exceptions of `describe`."""
    description = await describe()
    run = loads(description.run_file, "the registry's run file")
    converse = over_streams(description.run, credentials, reach)

    async def view() -> View:
        return (await describe()).view

    return Access(run, view, converse, routes_to)


def inside_access(node: str, observers: Observers, run: RunFile, view: View) -> Access:
    """Access of a member to its run's stages, over its own links."""

    async def newest() -> View:
        return view

    def ways(stage: int, view: View) -> list[SeatRoute]:
        holders = [member for member in view.members if stage in stages_of(member)]
        return [SeatRoute(_seat(member, stage), node, "its own links") for member in holders]

    return Access(run, newest, partial(Inside, observers), ways)


class StageGoneError(ExportError):
    """Error of a stage whose seats have all stopped answering."""


class LivingRun:
    """The reachable seats of each stage of a running run, at their current state or, with `wait`,
    at one committed `step`. Used within `async with`."""

    def __init__(self, access: Access, wait: float | None = None) -> None:
        """`wait`: seconds for a step that all stages have. Raises ExportError."""
        self.run, self._view, self._ways = access.run, access.view, access.ways
        if self.run.model.vocabulary is None:
            raise ExportError("the registry's run file doesn't say model.vocabulary")
        self.config = self.run.config
        self.loop = asyncio.get_running_loop()
        self.asking = ObserverClient(access.converse, self.answered, self.lost)
        self.seats: dict[int, list[str]] = {}  # by stage
        self.step, self.lineage = 0, 0  # requested state; 0: the current one
        self._wait = wait
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Find the seats, and agree on a step. Raises ExportError when a stage can't be reached."""
        try:
            await self._find_seats()
            if self._wait is not None:
                await self._agree_on_step(self._wait)
                self._renewing = asyncio.create_task(self._renew_pins())
        except BaseException:
            await self.asking.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self.asking.close()

    async def exported(self) -> None:
        """Report to the seats that the whole model of this step has been written."""
        seats = [seat for those in self.seats.values() for seat in those]
        pins = (self.asking.pin(seat, self.step, exported=True) for seat in seats)
        await asyncio.gather(*pins, return_exceptions=True)

    def answered(self, seat: str, item: pb.Message | Frame) -> None:
        """Handle an answer of the seat."""

    def lost(self, seat: str, why: str) -> None:
        """Handle the loss of the link to the seat."""

    def drop_seat(self, seat: str, why: str) -> None:
        """Stop using a seat. Raises StageGoneError when its stage has no other."""
        for stage, seats in self.seats.items():
            if seat in seats:
                seats.remove(seat)
                if not seats:
                    raise StageGoneError(f"stage {stage} was lost meanwhile: {why}. Try again")

    async def _find_seats(self) -> None:
        """Find seats of all stages. Raises ExportError, and exceptions of `Access.view`."""
        view = await self._view()
        stages = range(self.config.stages + 1)
        seats = await asyncio.gather(*(self._find_stage(stage, view) for stage in stages))
        self.seats = dict(zip(stages, seats, strict=True))

    async def _find_stage(self, stage: int, view: View) -> list[str]:
        """Seats of a stage that answer. Raises ExportError when none does."""
        routes = self._ways(stage, view)
        if not any(stage in stages_of(member) for member in view.members):
            raise ExportError(
                f"stage {stage} has no node at the moment: try again when `planaria status` shows "
                "one, or use the run's saves"
            )
        seats: list[str] = []
        failures: list[str] = []
        for route in routes:
            if len(seats) == REPLICAS:
                break
            if route.seat in seats:
                continue
            self.asking.reach(*route)
            try:
                pinned = await self.asking.pin(route.seat, 0)
            except NoAnswerError as error:
                failures.append(str(error))
                continue
            if pinned.unheard:
                failures.append(f"{route.node} at {route.address}: {pinned.error}")
            else:
                seats.append(route.seat)
        if not seats:
            reasons = "; ".join(dict.fromkeys(failures)) or "no node of this run can be dialled"
            raise ExportError(
                f"stage {stage} can't be reached from here: {reasons}. Ask from a machine that "
                "reaches the nodes, or use the run's saves"
            )
        return seats

    # --- which step

    async def _agree_on_step(self, wait: float) -> None:
        """Try steps until all stages have pinned one's weights. Raises ExportError."""
        end = self.loop.time() + wait
        ahead = 0
        while self.loop.time() < end:
            try:
                answers = await self._pin_all(0)
                newest = max(answer.committed for answer in answers.values())
                if newest == 0:
                    raise ExportError(
                        "no step is committed yet, so there is no model: try again later"
                    )
                step = min(newest + ahead, max(self.run.steps, newest))
                if await self._await_pins(step, min(end, self.loop.time() + wait / 4)):
                    return
                ahead = max(1, 2 * ahead)
            except StageGoneError as gone:
                log.info("%s", gone)
                await self._find_seats()
        answers = await self._pin_all(0)
        stand = ", ".join(
            f"stage {stage}: {answers[seats[0]].error or answers[seats[0]].committed}"
            for stage, seats in self.seats.items()
        )
        raise ExportError(
            f"in {wait:g} s no step was committed that all stages could keep ({stand}): see "
            "`planaria status`, and try again, with a longer --wait if steps take that long"
        )

    async def _await_pins(self, step: int, until: float) -> bool:
        """Wait until all seats have pinned a step. False: one is beyond it, or time is over."""
        while True:
            answers = await self._pin_all(step)
            if all(answer.kept for answer in answers.values()):
                lineages = {answer.lineage for answer in answers.values()}
                self.step, self.lineage = step, max(lineages)
                return len(lineages) == 1
            passed = any(answer.committed > step and not answer.kept for answer in answers.values())
            if passed or self.loop.time() > until:
                return False
            await asyncio.sleep(LOOK)

    async def _pin_all(self, step: int) -> Mapping[str, pb.Pinned]:
        """Ask all seats to pin a step; drop those that don't answer. Raises ExportError."""
        seats = [seat for of_stage in self.seats.values() for seat in of_stage]
        results = await asyncio.gather(
            *(self.asking.pin(seat, step) for seat in seats), return_exceptions=True
        )
        answers: dict[str, pb.Pinned] = {}
        for seat, result in zip(seats, results, strict=True):
            if isinstance(result, pb.Pinned) and not result.unheard:
                answers[seat] = result
            elif isinstance(result, pb.Pinned):
                self.drop_seat(seat, f"{seat}: {result.error}")
            elif isinstance(result, NoAnswerError):
                self.drop_seat(seat, str(result))
            else:
                raise result
        return answers

    async def _renew_pins(self) -> None:
        """Renew the seats' pins until cancelled."""
        while True:
            await asyncio.sleep(LEASE / 4)
            with suppress(ExportError):  # the next request reports it
                await self._pin_all(self.step)
