from __future__ import annotations

import pytest
from conversing import VirtualNet

from planaria.node.wire import outbox
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.outbox import NodeOutbox


@pytest.fixture
def links() -> VirtualNet:
    return VirtualNet(set())


def message(attempt: int) -> pb.Message:
    return pb.Message(ballot=pb.Ballot(view=1, attempt=attempt))


def never(peer: str, item: object, reason: str) -> None:
    raise AssertionError(reason)


def test_what_waits_for_a_link_goes_first(links: VirtualNet) -> None:
    box = NodeOutbox(links, never)
    assert box.send("a", message(1), True, 0.0)
    links.up.add("a")  # and nobody has said so yet
    assert box.send("a", message(2), True, 0.1)
    assert links.sent == []
    box.linked("a")
    assert box.send("a", message(3), True, 0.2)
    assert links.sent == [("a", message(1)), ("a", message(2)), ("a", message(3))]
    assert links.demanded == ["a", "a"]


def test_a_link_that_came_up_unsaid_is_found(links: VirtualNet) -> None:
    box = NodeOutbox(links, never)
    box.send("a", message(1), True, 0.0)
    links.up.add("a")
    box.tick(99.0)
    assert links.sent == [("a", message(1))]


def test_nothing_waits_for_who_is_no_member(links: VirtualNet) -> None:
    box = NodeOutbox(links, never)
    assert not box.send("stranger", message(1), False, 0.0)
    assert links.demanded == []


def test_who_waits_too_long_is_told(links: VirtualNet) -> None:
    told: list[tuple[str, object, str]] = []
    box = NodeOutbox(links, lambda *what: told.append(what))
    box.send("a", message(1), True, 0.0)
    box.send("a", message(2), True, 2.0)
    box.tick(3.0)
    assert told == []
    box.tick(3.1)
    assert told == [("a", message(1), "no link to a came up in 3 s")]
    box.tick(5.1)
    assert [item for _, item, _ in told] == [message(1), message(2)]
    links.up.add("a")
    assert box.send("a", message(3), True, 5.2)
    assert links.sent == [("a", message(3))]


def test_so_much_waits_and_no_more(links: VirtualNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LIMIT", 2)
    box = NodeOutbox(links, never)
    assert [box.send("a", message(i), True, 0.0) for i in range(3)] == [True, True, False]
