"""Tests of which nodes are asked for the stages of a living run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import virtual_time

from planaria.bootstrap.registry_pb2 import (
    Description,
    Member,
    MemberDescription,
    Rebuild,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.node.hugging_face.from_swarm import living_card
from planaria.node.hugging_face.living_run import TRIED, Access, LivingRun, SeatRoute, routes_to
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.observer_client import ObserverConversation
from tests.swarm.small import small


def member(node: str, *stages: int, address: str = "10.0.0.1:7401") -> Member:
    seats = [Seat(stage=stage, since=7 if stage == 3 else 0) for stage in stages]
    return Member(node=node, seats=seats, address=address)


def test_a_node_that_can_be_dialled_is_asked_directly() -> None:
    view = View(members=[member("a", 0), member("b", 1, 3), member("c", 3, address="")])
    assert routes_to(1, view) == [SeatRoute("b/1", "b", "10.0.0.1:7401")]
    assert routes_to(3, view)[0] == SeatRoute("b/3.7", "b", "10.0.0.1:7401")
    assert routes_to(2, view) == []


def test_one_that_only_dials_out_is_asked_through_its_neighbours_first() -> None:
    hidden = member("x", 4, address="")
    view = View(members=[*(member(f"n{stage}", stage) for stage in range(7)), hidden])
    view.members[4].address = ""
    ways = routes_to(4, view)
    assert [way.seat for way in ways] == ["n4/4", "x/4"] * (TRIED // 2)
    assert [way.node for way in ways] == ["n3", "n3", "n5", "n5"]


def test_a_standby_leads_nowhere_and_nobody_can_be_asked_without_an_address() -> None:
    assert routes_to(1, View(members=[member("a"), member("b", 1, address="")])) == []


class OneNode:
    """A node that grants all requests to its seats, and says which seats it doesn't have."""

    def __init__(self, seats: set[str], node: str, address: str) -> None:
        self.seats, self.node, self.address, self.lost = seats, node, address, ""

    def open(self, heard: Callable[[pb.Message], None], ended: object) -> None:
        self.heard = heard

    def send(self, message: pb.Message) -> bool:
        asked, is_here = message.pin_request, message.seat in self.seats
        pinned = pb.Pinned(transfer=asked.transfer, step=asked.step, unheard=not is_here)
        if is_here:
            pinned.committed, pinned.kept = 7, asked.step >= 7
        asyncio.get_running_loop().call_soon(self.heard, pb.Message(pinned=pinned))
        return True

    async def close(self) -> None: ...


def test_a_stage_is_asked_at_its_new_seat_when_the_one_that_was_found_is_given_back() -> None:
    """This happens after a rebuild, when a newcomer relieves the node that took the lost stage."""
    seats = {"a/0", "b/1.4", "b/2"}
    views = [[("a", 0), ("b", 1, 2)], [("a", 0), ("c", 1), ("b", 2)]]

    async def view() -> View:
        members = [member(node, *stages) for node, *stages in views[0]]
        members[1].seats[0].since = 4 if len(views) > 1 else 0
        return View(members=members)

    class Healing(LivingRun):
        async def _agree_on_step(self, wait: float) -> None:
            seats.remove("b/1.4")
            seats.add("c/1")
            del views[0]
            await super()._agree_on_step(wait)

    def converse(node: str, address: str) -> ObserverConversation:
        return OneNode(seats, node, address)

    async def ask() -> dict[int, list[str]]:
        run = small(stages=2, model__vocabulary=256)
        async with Healing(Access(run, view, converse, routes_to), 60.0) as living:
            assert living.step == 7
            return living.seats

    assert virtual_time.run(ask()) == {0: ["a/0"], 1: ["c/1"], 2: ["b/2"]}


class AtStepSeven:
    def __init__(self) -> None:
        self.run = small(stages=2, model__vocabulary=256)
        self.config, self.loop = self.run.config, asyncio.get_running_loop()
        self.step, self.loss = 7, 3.0

    async def read(self, stage: int, first: int, count: int) -> None: ...


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_card_has_a_rebuild_that_the_registry_hears_of_last(goes_on: bool) -> None:
    """The card has it if the run goes on after it. Otherwise waiting for the run ends in time."""

    def description(committed: int, *rebuilds: tuple[int, int]) -> Description:
        report = Report(seats=[SeatReport(committed=committed)])
        return Description(
            view=View(driver="a"),
            members=[
                MemberDescription(member=Member(node="b"), report=Report(seats=[SeatReport()])),
                MemberDescription(member=Member(node="a"), report=report),
            ],
            rebuilds=[Rebuild(stage=of, step=at, method="checkfree") for of, at in rebuilds],
        )

    heard = [description(7), description(7), description(8, (2, 7), (1, 9))]

    async def describe() -> Description:
        return heard.pop(0) if goes_on else heard[0]

    async def card() -> str:
        return await living_card(AtStepSeven(), describe, False, "")  # type: ignore[arg-type]

    text = virtual_time.run(card())
    assert ("| 2 | 7 | checkfree | no |" in text) == goes_on
    assert "| 1 | 9 |" not in text
