"""Which end of a link dials, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from planaria.node.wire.budget import ITEM, PEERS
from planaria.node.wire.link_table import HEAD_START, LinkTable, Peer
from planaria.node.wire.session import DialRefused, Session, SessionBounds

HELD = 1 << 20
BOUNDS = SessionBounds(chunk=10, window=99, payload=99, messages=100 + 2 * ITEM, held=HELD)


@dataclass
class End:
    """A link that is up, unless a test changes that."""

    peer: str
    session: Session
    connection: object | None = "a connection"
    rests: bool = False
    via: str = ""
    ended: str = ""

    def heard(self) -> None: ...
    def wake(self) -> None:
        self.rests = False

    def detach(self, why: str) -> None:
        self.connection = None

    def end(self, reason: str, *_: Any, **__: Any) -> None:
        self.ended = reason


class Table(LinkTable):
    """The link table of node b. `tries` has its dials: peer, whether by a relay, and wait."""

    def __init__(self, relay: str = "", address: str = "b:1") -> None:
        super().__init__("b", lambda number: Session(number, BOUNDS))
        self.relay, self.tries = relay, []
        self.peers_are(address=address)

    def peers_are(self, view: int = 1, address: str = "b:1", linked: str = "", **at: str) -> None:
        members = {"a": "a:1", "b": address, "c": "c:1", **at}
        self.set_peers(view, [Peer(node, at, b"") for node, at in members.items() if at], linked)

    def via(self, peer: str) -> str:
        return self.relay

    def start_trying(self, peer: str, by_relay: bool, wait: float) -> None:
        self.tries.append((peer, by_relay, wait))

    def up(self, peer: str, **state: Any) -> End:
        link = End(peer, self.session(peer), **state)
        self.add(link)
        return link


@pytest.mark.parametrize(
    ("address", "linked", "dialled"), [("b:1", "ac", "c"), ("b:1", "", ""), ("", "ac", "ac")]
)
def test_who_alone_can_dial_does_else_the_smaller_id(address, linked, dialled) -> None:
    table = Table()
    members = [Peer("a", "a:1", b""), Peer("b", address, b""), Peer("c", "c:1", b"")]
    table.set_peers(2, members, linked)
    assert table.tries == [(peer, False, 0.0) for peer in dialled]


def test_a_link_that_is_demanded_is_dialled_until_the_next_view() -> None:
    table = Table()
    table.demand("a")
    table.demand("stranger")
    assert table.tries == [("a", False, 0.0)]
    assert table.is_to_dial("a")
    table.peers_are(view=2)
    assert not table.is_to_dial("a")


def test_both_dial_a_link_that_sleeps_and_the_larger_id_later() -> None:
    table = Table()
    for peer in "ac":
        link = table.up(peer)
        assert not table.is_to_dial(peer)
        link.connection = None
        table.dial_soon(peer)
    assert table.tries == [("a", False, HEAD_START), ("c", False, 0.0)]
    table.by_peer["a"].rests = True
    assert not table.is_to_dial("a")
    assert (table.peers, table.linked("a")) == (["c"], True)


def test_the_smaller_id_calls_by_the_relay_and_not_while_it_dials() -> None:
    table = Table(relay="d")
    assert [table.is_to_call(peer) for peer in "ac"] == [False, True]
    link = table.up("c", via="d")
    assert not table.is_to_call("c")
    assert table.is_to_dial("c"), "a direct link is better"
    link.connection = None
    table._returning.add("c")
    assert not table.is_to_call("c")


def test_a_link_to_who_is_no_member_ends() -> None:
    table = Table()
    link = table.up("c")
    table.peers_are(view=2, c="")
    assert link.ended == "c is no member of view 2"
    assert not table.is_to_dial("c")


def test_so_much_may_be_held_for_one_peer_and_for_all() -> None:
    table = Table()
    a, c = table.up("a"), table.up("c")
    a.session.send(bytes(50))
    table.bound_what_is_held(a, HELD)
    assert not a.ended
    a.session.send(bytes(51))
    table.bound_what_is_held(a, HELD)
    assert a.ended.startswith("a has not taken the last ") and a.ended.endswith(" of messages")
    c.session.send(bytes(10))
    table.bound_what_is_held(c, a.session.held // PEERS)
    assert a.ended.endswith(f"last {a.session.held} bytes"), "it holds most"
    assert not c.ended


def test_who_has_forgotten_the_link_ends_it_with_its_answer() -> None:
    table = Table()
    link = table.up("c")
    for code, ended in (("UNAVAILABLE", ""), ("ALREADY_EXISTS", ""), ("DATA_LOSS", "it is over")):
        table.dialled_in_vain("c", link.session, DialRefused(code, "it is over"))
        assert link.ended == ended
