from __future__ import annotations

import pytest

from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.budget import ITEM
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.outbox import NodeOutbox
from tests.harness.network import VirtualNet

LIMIT = 64 * ITEM


@pytest.fixture
def links() -> VirtualNet:
    return VirtualNet(set())


def message(attempt: int) -> pb.Message:
    return pb.Message(ballot=pb.Ballot(view=1, attempt=attempt))


def never(peer: str, item: object, reason: str) -> None:
    raise AssertionError(reason)


def test_what_waits_for_a_link_goes_first(links: VirtualNet) -> None:
    box = NodeOutbox(links, never, LIMIT)
    assert box.send("a", message(1), True, 0.0)
    links.up.add("a")  # before the outbox is told
    assert box.send("a", message(2), True, 0.1)
    assert links.sent == []
    box.linked("a")
    assert box.send("a", message(3), True, 0.2)
    assert links.sent == [("a", message(1)), ("a", message(2)), ("a", message(3))]
    assert links.demanded == ["a", "a"]


def test_nothing_waits_for_who_is_no_member(links: VirtualNet) -> None:
    box = NodeOutbox(links, never, LIMIT)
    assert not box.send("stranger", message(1), False, 0.0)
    assert links.demanded == []


def test_who_waits_too_long_is_told(links: VirtualNet) -> None:
    undelivered: list[tuple[str, object, str]] = []
    box = NodeOutbox(links, lambda *item: undelivered.append(item), LIMIT)
    box.send("a", message(1), True, 0.0)
    box.send("a", message(2), True, 2.0)
    box.tick(3.0)
    assert undelivered == []
    box.tick(3.1)
    assert undelivered == [("a", message(1), "no link to a came up in 3 s")]
    box.tick(5.1)
    assert [item for _, item, _ in undelivered] == [message(1), message(2)]
    links.up.add("a")
    assert box.send("a", message(3), True, 5.2)
    assert links.sent == [("a", message(3))]


def test_so_much_waits_and_no_more_for_one_and_in_all(links: VirtualNet) -> None:
    box = NodeOutbox(links, never, LIMIT)
    half = Frame("activation", (1, 1), {}, [], bytes(LIMIT // 2 - ITEM))
    assert [box.send("a", half, True, 0.0) for _ in range(3)] == [True, True, False]
    for peer in "bcd":
        assert [box.send(peer, half, True, 0.0) for _ in range(3)] == [True, True, False]
    assert not box.send("e", message(1), True, 0.0), "four have all that there is"
    links.up.add("a")
    box.tick(1.0)
    assert links.sent == [("a", half)] * 2
    assert [box.send("e", half, True, 1.0) for _ in range(3)] == [True, True, False]


def test_what_no_link_came_for_makes_room(links: VirtualNet) -> None:
    undelivered: list[tuple[str, object, str]] = []
    box = NodeOutbox(links, lambda *item: undelivered.append(item), LIMIT)
    frame = Frame("activation", (1, 1), {}, [], bytes(LIMIT - ITEM))
    assert box.send("a", frame, True, 0.0)
    assert not box.send("a", message(1), True, 3.0)
    box.tick(3.1)
    assert [item for _, item, _ in undelivered] == [frame]
    assert box.send("a", frame, True, 3.2)
