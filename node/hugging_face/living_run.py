"""A run that is under way, as who is no member of it asks its stages: which nodes, and how.

A node that can be dialled from here is asked directly, another one through nodes that can.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, Self

from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.membership import stages_of
from planaria.bootstrap.registry_pb2 import Description, Member, View
from planaria.node.hugging_face.export import ExportError
from planaria.node.naming import seat_id, seat_name
from planaria.node.run_file import loads
from planaria.node.stage.shape import model_config
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.asking import Asking, NoAnswerError
from planaria.node.wire.frames import Frame

REPLICAS: Final = 2
"""Of a stage, that are asked."""
TRIED: Final = 4
"""Ways to a stage that are tried before it counts as out of reach, of each kind."""


class Way(NamedTuple):
    """To ask a seat: by this node, which is dialled there."""

    seat: str
    node: str
    address: str


def ways_to(stage: int, view: View) -> list[Way]:
    """Those to try, the most direct first: seats of nodes that can be dialled, then the others,
    each by way of some that can be, neighbours of the stage before the rest."""
    dialled = [m for m in view.members if m.address and m.seats]
    there = [m for m in view.members if stage in stages_of(m)]
    direct = [
        Way(_seat(member, stage), member.node, member.address) for member in there if member.address
    ]

    def distance(member: Member) -> int:
        return min(abs(stage - other) for other in stages_of(member))

    near = sorted(dialled, key=distance)[:TRIED]
    through = [
        Way(_seat(member, stage), by.node, by.address)
        for by in near
        for member in there
        if not member.address
    ]
    return direct[:TRIED] + through[:TRIED]


def _seat(member: Member, stage: int) -> str:
    (seat,) = (seat for seat in member.seats if seat.stage == stage)
    return seat_id(member.node, seat_name(seat))


class LivingRun:
    """The seats of each stage that answer. Used within `async with`."""

    def __init__(self, description: Description, credentials: Credentials) -> None:
        """Raises RunFileError, ExportError."""
        self.view = description.view
        self.run = loads(description.run_file, "the registry's run file")
        if self.run.model.vocabulary is None:
            raise ExportError("the registry's run file doesn't say model.vocabulary")
        self.config = model_config(self.run.model, self.run.model.vocabulary)
        self.loop = asyncio.get_running_loop()
        self.asking = Asking(description.run, credentials, self.answered, self.lost)
        self.seats: dict[int, list[str]] = {}  # by stage

    async def __aenter__(self) -> Self:
        """Raises ExportError when a stage can't be asked."""
        try:
            found = await asyncio.gather(*map(self._find, range(self.config.stages + 1)))
            self.seats = dict(enumerate(found))
            await self.begin()
        except BaseException:
            await self.asking.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.asking.close()

    async def begin(self) -> None:
        """All stages can be asked now. Raises ExportError."""

    def answered(self, seat: str, item: pb.Message | Frame) -> None:
        """The seat has said this."""

    def lost(self, seat: str, why: str) -> None:
        """It can't be asked any more."""

    def give_up(self, seat: str, why: str) -> None:
        """It is asked no more. Raises ExportError when its stage has no other."""
        for stage, seats in self.seats.items():
            if seat in seats:
                seats.remove(seat)
                if not seats:
                    raise ExportError(f"stage {stage} has gone: {why}. Try again")

    async def _find(self, stage: int) -> list[str]:
        """Seats of the stage that answer. Raises ExportError when none does."""
        ways = ways_to(stage, self.view)
        if not any(stage in stages_of(member) for member in self.view.members):
            raise ExportError(
                f"stage {stage} has nobody at the moment: try again when it has been rebuilt, "
                "which `planaria status` tells, or take what was saved"
            )
        found: list[str] = []
        why: list[str] = []
        for way in ways:
            if len(found) == REPLICAS:
                break
            if way.seat in found:
                continue
            self.asking.reach(*way)
            try:
                told = await self.asking.pin(way.seat, 0)
            except NoAnswerError as error:
                why.append(str(error))
                continue
            if told.unheard:
                why.append(f"{way.node} at {way.address}: {told.error}")
            else:
                found.append(way.seat)
        if not found:
            said = "; ".join(dict.fromkeys(why)) or "no node of this run can be dialled"
            raise ExportError(
                f"stage {stage} can't be reached from here: {said}. Ask from a machine that "
                "reaches the nodes, or take what was saved"
            )
        return found
