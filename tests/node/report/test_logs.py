"""Reading a node's log as an observer, in virtual time and without connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import virtual_time

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.registry_pb2 import (
    Description,
    Eviction,
    Member,
    MemberDescription,
    Seat,
)
from planaria.node.report.log_stream import LONGEST, MOST_KEPT, LastLines
from planaria.node.report.logs import NodeRoute, find_member, print_logs, routes_to, shown_lines
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.observer_client import PATIENCE


def member(node: str, stage: int, address: str = "") -> Member:
    return Member(node=node, seats=[Seat(stage=stage)], address=address)


SWARM = [
    member("box-aaaaaa", 0, "10.0.0.1:7401"),
    member("box-bbbbbb", 1),
    member("node-2.0-cccccc", 2, "10.0.0.3:7401"),
    member("0123456789ab", 3, "10.0.0.4:7401"),
]
DESCRIPTION = Description(
    run="r",
    members=[MemberDescription(member=node) for node in SWARM],
    evictions=[Eviction(member=member("old-dddddd", 2), reason="its lease ran out")],
)


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("node-2.0-cccccc", "node-2.0-cccccc"),
        ("node-2.0", "node-2.0-cccccc"),
        ("bbbbbb", "box-bbbbbb"),
        ("0123456789ab", "0123456789ab"),
        ("0123", "0123456789ab"),
        ("box-a", "box-aaaaaa"),
    ],
)
def test_a_node_is_called_by_as_much_as_tells_it_from_others(name: str, node: str) -> None:
    assert find_member(name, DESCRIPTION).node == node


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("box", r"^box matches several nodes, .*: box-aaaaaa \(stage 0\), box-bbbbbb \(stage 1\)$"),
        ("x\x1b[2J", r"^there is no node x\\x1b\[2J. Name one of: box-aaaaaa \(stage 0\), box-b"),
        ("old", r"^there is no node old any more \(its lease ran out\). Name one of: box-aaaaaa"),
    ],
)
def test_a_node_that_nobody_is_or_several_are_called_is_refused(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        find_member(name, DESCRIPTION)


def test_who_can_not_be_dialled_is_asked_through_its_neighbours() -> None:
    assert routes_to(SWARM[0], SWARM) == [NodeRoute("box-aaaaaa", "10.0.0.1:7401")]
    assert [route.node for route in routes_to(SWARM[1], SWARM)] == [
        "box-aaaaaa",
        "node-2.0-cccccc",
        "0123456789ab",
    ]


def test_of_what_a_stranger_sends_a_part_is_shown_and_none_of_it_moves_the_cursor() -> None:
    assert shown_lines(["one", "two\x1b[31m\r", "three"], 2) == ["two\\x1b[31m\\r", "three"]
    (long,) = shown_lines(["x" * 10**6], 5)
    assert len(long) <= 2 * LONGEST
    assert sum(map(len, shown_lines(["y" * LONGEST] * 1000, 1000))) <= 2 * MOST_KEPT


class Talk:
    """A conversation with one node. `answer` returns its reply to a message, or None for none."""

    def __init__(
        self, node: str, address: str, answer: Callable[[pb.Message], pb.Message | None]
    ) -> None:
        self.node, self.address, self.lost = node, address, ""
        self._answer = answer

    def open(self, heard: Callable[[pb.Message], None], ended: Callable[[Any], None]) -> None:
        self._heard = heard

    def send(self, message: pb.Message) -> bool:
        if (answer := self._answer(message)) is not None:
            asyncio.get_running_loop().call_soon(self._heard, answer)
        return True

    async def close(self) -> None:
        self.lost = "closed"


class Registry:
    async def describe(self, deadline: float) -> Description:
        return DESCRIPTION


def read(
    node: str,
    answer: Callable[[str, pb.Message], pb.Message | None],
    shown: list[str],
    follow: bool = False,
) -> list[str]:
    """Read a node's log and return the lines shown. `answer` replies for each node dialled."""

    def converse(run: str) -> Callable[[str, str], Talk]:
        def talk(dialled: str, address: str) -> Talk:
            return Talk(dialled, address, lambda message: answer(dialled, message))

        return talk

    registry = cast(RegistryClient, Registry())
    virtual_time.run(print_logs(registry, converse, node, 3, follow, shown.append))
    return shown


def test_the_last_lines_come_by_the_first_way_that_answers() -> None:
    def answer(dialled: str, message: pb.Message) -> pb.Message | None:
        assert (message.seat, message.log_request.lines) == ("box-bbbbbb/", 3)
        answers = {
            "box-aaaaaa": pb.LogLines(error="no link"),
            "0123456789ab": pb.LogLines(lines=["a", "b"], last=2),
        }
        log_lines = answers.get(dialled)  # node-2.0-cccccc is too old to answer
        return None if log_lines is None else pb.Message(sender="box-bbbbbb/", log_lines=log_lines)

    assert read("bbbbbb", answer, []) == ["a", "b"]


def test_that_nobody_answers_is_said() -> None:
    with pytest.raises(
        UserError, match=f"no answer from node-2.0-cccccc at .* within {PATIENCE:g} s"
    ):
        read("node-2.0", lambda dialled, message: None, [])


def test_what_comes_next_is_shown_once() -> None:
    log = LastLines()
    log.add("one\ntwo\nthree\nfour")

    def answer(dialled: str, message: pb.Message) -> pb.Message:
        request = message.log_request
        if request.after == 5:
            return pb.Message(sender=f"{dialled}/", log_lines=pb.LogLines(error="it is over"))
        lines, last = log.after(request.after, request.lines)
        log.add("five")
        log_lines = pb.LogLines(lines=lines, last=last)
        return pb.Message(sender=f"{dialled}/", log_lines=log_lines)

    shown: list[str] = []
    with pytest.raises(UserError, match="it is over"):
        read("node-2.0", answer, shown, follow=True)
    assert shown == ["two", "three", "four", "five"]
