"""Which links a node has, and which end of a link dials when. Pure.

A link comes up by a dial of one end: of the only one that can dial the other, else of the one with
the smaller id. Either end dials a link that sleeps, the other end a moment later. A link that rests
sleeps until one end has something to send. Where the view names a relay, the end with the smaller
id calls by it, and both try to dial directly until that works.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planaria.node.wire.budget import PEERS
from planaria.node.wire.frame_format import WireError
from planaria.node.wire.session import Begun, DialRefused, Forgotten, Hello, Outdated, Session

if TYPE_CHECKING:
    from planaria.node.wire.connection import Link

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two dials
HEAD_START: Final = 1.0  # seconds that the side not in charge of dialling waits before it dials
NO_LINK_THERE: Final = frozenset(["DATA_LOSS", "NOT_FOUND", "PERMISSION_DENIED", "ABORTED"])
"""Codes of a peer that has no such link."""


@dataclass(frozen=True)
class Peer:
    """A member of a view. `address`: HOST:PORT; "": it only dials. `key`: its public key."""

    node: str
    address: str
    key: bytes


class LinkTable:
    """The links of one node. A subclass makes connections, and calls these methods in order."""

    def __init__(self, node: str, new_session: Callable[[int], Session]) -> None:
        self.node = node
        self.view = 0
        self.stopping = False
        self.dialable = False  # whether others can dial this node
        self.members: dict[str, Peer] = {}  # of the newest view
        self._linked: frozenset[str] = frozenset()  # peers that the view requires a link with
        self._demanded: set[str] = set()
        self.by_peer: dict[str, Link] = {}  # up, asleep or at rest
        self._begun: dict[str, Session] = {}  # of links not up yet
        self._new_session, self._numbers = new_session, itertools.count(1)
        self._dialling: set[str] = set()
        self._calling: set[str] = set()
        self._returning: set[str] = set()  # dialled directly, relayed before

    # --- for the subclass to implement

    def via(self, peer: str) -> str:
        """The relay to `peer` in the newest view; "": none."""
        raise NotImplementedError

    def start_trying(self, peer: str, by_relay: bool, wait: float) -> None:
        """Dial, or call by the relay, after `wait` seconds, for as long as that is due."""
        raise NotImplementedError

    # --- what the view asks for

    def set_peers(self, view: int, peers: Iterable[Peer], linked: Iterable[str]) -> None:
        """Set the members of the newest view (own node included or not), and those of them that
        need a link. Links to other nodes end, reported as lost only if they sleep or rest. An older
        view than the last has no effect."""
        if view < self.view or self.stopping:
            return
        self.view = view
        self.members = {peer.node: peer for peer in peers}
        self._linked = frozenset(linked) & self.members.keys() - {self.node}
        if (own := self.members.get(self.node)) is not None:
            self.dialable = bool(own.address)
        self._demanded.clear()
        self._begun = {node: begun for node, begun in self._begun.items() if node in self.members}
        for link in list(self.by_peer.values()):
            if link.peer not in self.members:
                sleeps = link.connection is None
                link.end(f"{link.peer} is no member of view {view}", report=sleeps)
        for node in sorted(self._linked):
            if not self.dialable and not self.members[node].address and node not in self.by_peer:
                log.info(
                    "neither this node nor %s can be dialled: another member has to relay", node
                )
            if node in self.by_peer:
                self.by_peer[node].wake()
            self.dial_soon(node)

    def demand(self, node: str) -> None:
        """Dial a member that needs no link by `set_peers`, whichever id is smaller. The link rests
        once neither side has used it for a while."""
        if node in self.members and node not in self.by_peer and self.members[node].address:
            self._demanded.add(node)
            self.dial_soon(node)

    def needs_connection(self, peer: str) -> bool:
        """Whether the connection to a peer must always be up: the view requires it, or a side with
        something to send could not dial."""
        member = self.members.get(peer)
        dialable = member is not None and bool(member.address) and self.dialable
        return peer in self._linked or not dialable or bool(self.via(peer))

    # --- the links

    @property
    def peers(self) -> list[str]:
        """Peers with a link, awake or asleep, that doesn't rest."""
        return sorted(peer for peer, link in self.by_peer.items() if not link.rests)

    def linked(self, peer: str) -> bool:
        """Whether a link to `peer` exists; it may rest."""
        return peer in self.by_peer

    def carrier(self, peer: str) -> str | None:
        """The relay of the link to `peer`; "": the link is direct; None: there is no link."""
        link = self.by_peer.get(peer)
        return link.via if link is not None else None

    def unacknowledged_by(self, peer: str) -> int:
        """Bytes of payload in unacknowledged frames, queued ones too, on the link to `peer`."""
        link = self.by_peer.get(peer)
        return link.session.outbox.unacknowledged if link is not None else 0

    @property
    def unacknowledged(self) -> int:
        """Bytes of payload in unacknowledged frames on all links."""
        return sum(map(self.unacknowledged_by, self.by_peer))

    def add(self, link: Link) -> None:
        """Add a link that has come up; its session was begun by `session`."""
        self.by_peer[link.peer] = link
        del self._begun[link.peer]

    def bound_what_is_held(self, link: Link, held: int) -> None:
        """Enforce the limits after something was queued on `link`. All links together may hold
        `PEERS` times the bytes `held` of one; beyond that, the link that holds most is lost."""
        if why := link.session.why_overfull():
            link.end(f"{link.peer} {why}")
        elif sum(other.session.held for other in self.by_peer.values()) > PEERS * held:
            greedy = max(self.by_peer.values(), key=lambda other: other.session.held)
            greedy.end(f"{greedy.peer} has not taken the last {greedy.session.held} bytes")

    # --- who dials

    def dials(self, node: str) -> bool:
        """Whether this side brings a link up: the only one that can, else the smaller id."""
        return bool(self.members[node].address) and (not self.dialable or self.node < node)

    def is_to_dial(self, node: str) -> bool:
        """Whether this node must dial that one now. Both sides dial a link that sleeps."""
        if self.stopping or node not in self.members or not self.members[node].address:
            return False
        if (link := self.by_peer.get(node)) is not None:
            return (link.connection is None and not link.rests) or bool(link.via)
        return node in self._demanded or (node in self._linked and self.dials(node))

    def is_to_call(self, node: str) -> bool:
        """Whether this node must call that one by a relay: it has the smaller id. It doesn't call
        while it tries a direct dial: a call takes less time, and would overtake it."""
        if self.stopping or node not in self.members or not self.via(node):
            return False
        link = self.by_peer.get(node)
        sleeps = link is None or link.connection is None
        return node not in self._returning and self.node < node and sleeps

    def dial_soon(self, node: str, first: bool = False) -> None:
        """Dial a peer if that is this node's task. `first`: without delay, since the other side
        doesn't know that the link is needed."""
        if self.is_to_call(node) and node not in self._calling:
            self._calling.add(node)
            self.start_trying(node, by_relay=True, wait=0.0)
        if self.is_to_dial(node) and node not in self._dialling:
            self._dialling.add(node)
            late = node in self.by_peer and not (first or self.dials(node))
            self.start_trying(node, by_relay=False, wait=HEAD_START if late else 0.0)

    # --- sessions

    def session(self, node: str) -> Session:
        """The session of the link to `node`, or of the link to come."""
        if (link := self.by_peer.get(node)) is not None:
            return link.session
        if node not in self._begun:
            self._begun[node] = self._new_session(next(self._numbers))
        return self._begun[node]

    def resume(self, dialler: str, hello: Hello) -> Session:
        """Resume, or begin, a session by a dialler's hello. Raises DialRefused, and WireError."""
        session, link = self.session(dialler), self.by_peer.get(dialler)
        try:
            session.check(hello)
        except Outdated as why:
            newer = f"{self.node} has a newer connection: {why}"
            raise DialRefused("ALREADY_EXISTS", newer) from None
        except Forgotten as why:
            raise DialRefused("DATA_LOSS", f"{self.node} has no such link: {why}") from None
        except Begun:
            if link is not None:
                link.end(f"{dialler} has lost the link, and dialled anew")
            else:
                del self._begun[dialler]
            if hello.other:  # of a session now over, known from an old hello
                raise DialRefused("DATA_LOSS", f"{self.node} has no such link any more") from None
            session, link = self.session(dialler), None
        if link is not None:
            link.detach(f"{dialler} dialled anew")
        try:
            session.resume(hello)
        except WireError as error:
            if link is not None:
                link.end(f"{dialler} sent an invalid message: {error}", cause=error.cause)
            raise
        return session

    def answered(self, node: str, session: Session, own_hello: Hello, answer: Hello) -> None:
        """Resume a session by the answer to this node's hello. Raises DialRefused; WireError for an
        impossible answer."""
        if session is not self.session(node):
            raise DialRefused("CANCELLED", "another link has come up")
        try:
            session.resume(answer, own_hello)
        except Outdated as why:
            raise DialRefused("CANCELLED", str(why)) from None
        except (Begun, Forgotten) as why:
            raise WireError(f"{node} answers for another link: {why}") from None

    def dialled_in_vain(self, node: str, session: Session, refused: DialRefused) -> None:
        """Record a failed dial; the link ends if the peer answers that it has none."""
        link = self.by_peer.get(node)
        if link is None or link.session is not session:
            return
        if refused.code == "ALREADY_EXISTS":
            link.heard()
        elif refused.code in NO_LINK_THERE:
            link.end(str(refused))
