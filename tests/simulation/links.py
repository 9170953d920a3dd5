"""The links of nodes in virtual time: what node/wire/link.py is around the very sessions that ship.

What crosses is bytes: messages, and frames in chunks. A connection begins with hellos, whoever
dials, and however dials cross; when it breaks, the link sleeps until one of the two has dialled
again, and is lost when that takes too long; or it rests, since neither needs it. Where the view
names a relay, a connection goes by way of a third node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.seats import SenselessError
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.background import Background
from planaria.node.wire.frames import (
    Buffer,
    Chunk,
    Frame,
    WireError,
    pack_chunk,
    parse_chunk,
    parse_message,
    seal,
)
from planaria.node.wire.idle import IdleEnd
from planaria.node.wire.link import (
    DIRECTLY,
    FAREWELL,
    FIRST_PAUSE,
    HEAD_START,
    LONGEST_PAUSE,
    LOOK,
    LinkSettings,
)
from planaria.node.wire.session import (
    Begun,
    Forgotten,
    Hello,
    Outdated,
    Session,
    SessionBounds,
    Silence,
)
from simulation.network import SILENCE, WATCH, Connection, Network

if TYPE_CHECKING:
    from simulation.node import Node

SETTINGS: Final = LinkSettings()
AGAIN: Final = 1.0
"""Seconds after which a first packet that was lost is sent once more; then twice as many."""
SETTLING: Final = 0.1
"""Seconds between two looks whether an own dial has come to something."""
ANOTHER: Final = 0.1
"""Probability that another process answers at the address of one that is gone."""
BOUNDS: Final = SessionBounds(
    **dict.fromkeys([bound.name for bound in fields(SessionBounds)], 1 << 30) | {"chunk": 160}
)


class OneChunk(Background):
    """A copy here is less than a window, and would be there in no time: so it takes as long as a
    large one does."""

    def room(self, flight: int, now: float) -> int:
        return 0 if flight else BOUNDS.chunk


def unpacked(data: Sequence[Buffer] = (), **fields: Any) -> Chunk:
    """In place of node/wire/frames.py's `pack_chunk`: bytes would take as long as all else."""
    chunk = Chunk(0, 0, 0, b"", memoryview(b"".join(data)))
    return chunk._replace(**fields)


def sealed(**body: Any) -> bytes:
    return seal(pb.Message(**body).SerializeToString())


def packed(chunk: Chunk) -> bytes:
    fields = chunk._asdict() | {"data": [chunk.data]}
    del fields["checksum"]
    return pack_chunk(**fields)


class Refused(Exception):  # noqa: N818 (not an error)
    """`over`: there is no such link there any more."""

    def __init__(self, over: bool) -> None:
        super().__init__()
        self.over = over


class Carrier(Connection):
    """A connection that carries a link."""

    ends: tuple[Node, Node]

    def is_wanted(self) -> bool:
        return self.intact

    def say_farewell(self, by: Node, reason: str) -> None:
        if self.intact:
            self.send(self.other(by), "control", sealed(farewell={"reason": reason or "no reason"}))
            self.world.after(FAREWELL, self.break_off)

    def _deliver(self, to: Node, channel: str, data: bytes | Chunk) -> None:  # type: ignore[override]
        if (link := self._link(to)) is not None:
            link.came(channel, data)

    def _noticed(self, end: Node) -> None:  # type: ignore[override]
        if (link := self._link(end)) is not None:
            link.sleep()

    def _link(self, end: Node) -> Link | None:
        """Of this end, if this is its connection still."""
        link = end.net.links.get(self.other(end).name)
        return link if link is not None and link.connection is self else None


class Link:
    """A session with a peer, from when it is up until it is lost."""

    def __init__(self, links: Links, peer: str, session: Session) -> None:
        self.links, self.node, self.peer, self.session = links, links.node, peer, session
        self.connection: Carrier | None = None  # None: it sleeps, or rests
        self.rests = False
        self._idle = IdleEnd(SETTINGS.rest, self.node.world.now)
        self.via = ""  # who carries it, or did last; empty: it is direct
        self.over = False
        self._silence: Silence | None = None  # None: all is well

    def send(self, item: pb.Message | Frame) -> None:
        if isinstance(item, Frame):
            self.session.send_frame(item)
        else:
            self.session.send(seal(item.SerializeToString()))
        self._idle.used(self.node.world.now)
        self._pump()
        self.wake()

    def _pump(self) -> None:
        if self.connection is None:
            return
        session, now = self.session, self.node.world.now
        while (message := session.next_message()) is not None:
            self._write("control", message)
        if received := session.inbox.acknowledged():
            pairs = [{"frame": frame, "bytes": size} for frame, size in received.items()]
            self._write("control", sealed(acknowledged={"received": pairs}))
        while (chunk := session.outbox.next(now)) is not None:
            self._write("bulk", chunk)

    def _write(self, channel: str, data: bytes | Chunk) -> None:
        assert self.connection is not None
        data = self.links.garbled(channel, data)
        self.connection.send(self.connection.other(self.node), channel, data)

    def came(self, channel: str, data: bytes | Chunk) -> None:
        self.node.cluster.counts["babbled"] += self.node.cluster.may_lie(self.peer)
        try:
            if isinstance(data, Chunk):
                self._collect(data)
            elif channel == "control":
                self._listen(data)
            else:
                chunk = parse_chunk(data)
                chunk.verify()
                self._collect(chunk)
        except WireError as error:
            honest = not self.node.cluster.may_lie(self.node.name)
            if isinstance(error, SenselessError) and honest:
                raise AssertionError(f"{self.node.name} can't deal with {self.peer}") from error
            cause = SILENT if self.via else error.cause  # who carries may have changed it
            self.end(f"{self.peer} sent an invalid message: {error}", cause=cause)

    def _listen(self, data: bytes) -> None:
        message = parse_message(data)
        body = message.WhichOneof("body")
        if body == "heartbeat":
            self.session.acknowledge_messages(message.heartbeat.received)
            if self._idle.hear(message.heartbeat.idle, self._is_spare(), self.node.world.now):
                self._rest()
            return
        self._idle.used(self.node.world.now)
        if body == "farewell":
            self.end(f"{self.peer} closed the link: {message.farewell.reason}")
            return
        if body == "acknowledged":
            for one in message.acknowledged.received:
                self.session.outbox.acknowledge(one.frame, one.bytes, self.node.world.now)
            self._pump()
            return
        self.session.message_came()
        if self.session.acknowledgement_due:  # others change nothing that could be seen
            self._beat()
        self.node.on_message(self.peer, message)

    def _beat(self) -> None:
        idle = self._idle.say(self._is_spare(), self.node.world.now)
        heartbeat = pb.Heartbeat(received=self.session.acknowledgement(), idle=idle)
        self._write("control", sealed(heartbeat=heartbeat))

    def _collect(self, chunk: Chunk) -> None:
        self._idle.used(self.node.world.now)
        frame = self.session.inbox.receive(chunk)
        self._pump()
        if frame is not None:
            self.node.on_frame(self.peer, frame)

    def _is_spare(self) -> bool:
        return not self.session.held and self._has_no_use()

    def _has_no_use(self) -> bool:
        """Where both say where they are, each reaches the other."""
        addresses = self.node.address, self.links.addresses.get(self.peer)
        asked_for = self.peer in self.links.kept or self.peer in self.links.vias
        return all(addresses) and not (self.via or asked_for)

    def _rest(self) -> None:
        self.node.cluster.counts["rested"] += 1
        self.rests = True
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.break_off()

    def wake(self) -> None:
        if self.rests:
            self.heard()
            self.rests = False
            self.links.dial_soon(self.peer, first=True)

    def carry_by(self, connection: Carrier) -> None:
        self.heard()
        self.rests = False
        self.connection = connection
        self.via = connection.via.name if connection.via is not None else ""
        self._pump()

    def sleep(self) -> None:
        """Nothing more comes by the connection that it has."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.break_off()
            if self._idle.rests(self._is_spare(), self.node.world.now):
                self._rest()
            self.links.dial_soon(self.peer)

    def look(self) -> None:
        """Every `WATCH` seconds, unless the node is frozen."""
        now = self.node.world.now
        if self.connection is not None and self._idle.is_spare(self._has_no_use(), now):
            self._beat()
        if self.rests or (self.connection is not None and self.connection.feeds(self.node)):
            self._silence = None
        elif self._silence is None:
            self._silence = Silence(SILENCE, WATCH, now)
        elif (silent := self._silence.tick(now)) is None:
            pass
        elif self._idle.rests(self._is_spare(), now):
            self._rest()
        else:
            self.end(f"silent for {silent:.1f} s")

    def heard(self) -> None:
        self._silence = None

    def end(self, reason: str, report: bool = True, cause: Cause = SILENT) -> None:
        if self.over:
            return
        self.over = True
        if self.connection is not None:
            self.connection.say_farewell(self.node, reason)
            self.connection = None
        self.links.forget(self)
        if report:
            unfinished = self.session.outbox.unfinished()
            self.node.on_link_lost(self.peer, reason, unfinished, cause)


@dataclass
class Dial:
    """On its way to the peer, directly or by way of a relay."""

    peer: str
    hello: Hello
    session: Session
    began: float
    done: Callable[[bool], None]
    via: str = ""
    patience: float = SETTINGS.handshake
    again: float = AGAIN


class Links:
    """The links of one identity."""

    def __init__(self, node: Node, network: Network) -> None:
        self.node, self.network, self.process = node, network, node.process
        self.links: dict[str, Link] = {}
        self.addresses: dict[str, str] = {}  # of the members
        self.kept: frozenset[str] = frozenset()  # those with whom there is always to be one
        self.demanded: set[str] = set()
        self.dialling: set[str] = set()
        self.calling: set[str] = set()
        self.settling: set[str] = set()  # peers that a dial is on its way to
        self.returning: set[str] = set()  # those of them for whom somebody has carried
        self.pairs: set[frozenset[str]] = set()  # for whom this node carries
        self.vias: dict[str, str] = {}  # who carries for it and these peers
        self._begun: dict[str, Session] = {}
        self._numbers = itertools.count(1)
        network.links[node.name] = self
        self.process.after(network.world.random.uniform(0.0, WATCH), self._look)

    # --- as the port has it

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        link = self.links.get(peer)
        if link is None or not self.process.alive:
            return False
        if tamper := self.node.cluster.tampering.get(self.process.host):
            item = tamper(item)
        if isinstance(item, Frame) and item.kind == "state":  # of which there would be much more
            seconds = self.process.world.random.uniform(0.01, 0.3) * self.node.cluster.state_size
            self.process.after(seconds, self._send_state, link, item)
            return True
        link.send(item)
        if isinstance(item, pb.Message) and item.step.HasField("commit"):
            self.node.sent_commit()
        return True

    def _send_state(self, link: Link, frame: Frame) -> None:
        if not link.over:
            link.send(frame)

    def garbled(self, channel: str, data: bytes | Chunk) -> bytes | Chunk:
        garble = self.node.cluster.garbling.get(self.process.host)
        if garble is None:
            return data
        return garble(channel, packed(data) if isinstance(data, Chunk) else data)

    def demand(self, peer: str) -> None:
        if self.addresses.get(peer) and peer not in self.links:
            self.demanded.add(peer)
            self.dial_soon(peer)

    def linked(self, peer: str) -> bool:
        return peer in self.links

    def unacknowledged_by(self, peer: str) -> int:
        link = self.links.get(peer)
        return link.session.outbox.unacknowledged if link is not None else 0

    # --- for the node

    def set_peers(self, view: registry.View, kept: Sequence[str]) -> None:
        self.kept = frozenset(kept)
        self.addresses = {member.node: member.address for member in view.members}
        self.demanded.clear()
        self._begun = {node: one for node, one in self._begun.items() if node in self.addresses}
        for peer, link in list(self.links.items()):
            if peer not in self.addresses:
                report = link.connection is None
                link.end(f"{peer} is no member of view {view.number}", report)
        for peer in sorted(self.kept):
            if peer in self.links:
                self.links[peer].wake()
            self.dial_soon(peer)
        self._set_relays(view)

    def _set_relays(self, view: registry.View) -> None:
        me = self.node.name
        self.pairs = {frozenset((r.a, r.b)) for r in view.relays if r.via == me}
        former, self.vias = self.vias, {}
        for relay in view.relays:
            if me in (relay.a, relay.b):
                self.vias[relay.b if relay.a == me else relay.a] = relay.via
        for peer, via in former.items():
            link = self.links.get(peer)
            if link is not None and link.via == via != self.vias.get(peer):
                link.sleep()
        for peer in sorted(self.vias):
            self.dial_soon(peer)

    def carrier(self, peer: str) -> str | None:
        """As in node/wire/link.py."""
        link = self.links.get(peer)
        return link.via if link is not None else None

    def give_up(self) -> None:
        for link in list(self.links.values()):
            link.end(f"{self.node.name} stops", report=False)
        del self.network.links[self.node.name]

    def _look(self) -> None:
        if not self.node.ended:
            for link in list(self.links.values()):
                link.look()
            self.process.after(WATCH, self._look)

    # --- for links

    def forget(self, link: Link) -> None:
        del self.links[link.peer]
        self._carries_no_more(link.peer)
        self.dial_soon(link.peer)

    def _carries_no_more(self, peer: str) -> None:
        """What goes by way of the peer, or of this node to the peer."""
        me = self.node
        for connection in self.network.connections:
            via, ends = connection.via, [end.name for end in connection.ends]
            if via is not None and (
                (via is me and peer in ends) or (via.name == peer and me.name in ends)
            ):
                connection.break_off()

    def dial_soon(self, peer: str, first: bool = False) -> None:
        """If it is for this node to do. `first`: before the other one."""
        if self._is_to_call(peer) and peer not in self.calling:
            self.calling.add(peer)
            self.process.after(0.0, self._keep_calling, peer, FIRST_PAUSE)
        if self._is_to_dial(peer) and peer not in self.dialling:
            self.dialling.add(peer)
            late = peer in self.links and not (first or self._dials(peer))
            self.process.after(HEAD_START if late else 0.0, self._keep_dialling, peer, FIRST_PAUSE)

    # --- dialling

    def _dials(self, peer: str) -> bool:
        return not self.node.address or self.node.name < peer

    def _is_to_dial(self, peer: str) -> bool:
        if self.node.ended or not self.addresses.get(peer):
            return False
        if (link := self.links.get(peer)) is not None:
            return (link.connection is None and not link.rests) or bool(link.via)
        return peer in self.demanded or (peer in self.kept and self._dials(peer))

    def _keep_dialling(self, peer: str, pause: float) -> None:
        if not self._is_to_dial(peer):
            self.dialling.discard(peer)
            return
        link = self.links.get(peer)
        if link is None or link.connection is None:
            self._dial(peer, pause)
            return

        def looked(there: bool) -> None:
            if there:
                self._dial(peer, pause)
            else:
                self.process.after(DIRECTLY, self._keep_dialling, peer, pause)

        self.network.ask(self.node, peer, LOOK, looked)

    def _dial(self, peer: str, pause: float) -> None:
        if not self._is_to_dial(peer):
            self.dialling.discard(peer)
            return
        patience = SETTINGS.handshake
        if (link := self.links.get(peer)) is not None and link.connection is not None:
            self.returning.add(peer)
            patience = LOOK
            link.connection.break_off()
            link.connection = None
        self.settling.add(peer)

        def done(up: bool) -> None:
            self.settling.discard(peer)
            self.returning.discard(peer)
            if not up:
                self.dial_soon(peer)
            longer = FIRST_PAUSE if up else min(2 * pause, LONGEST_PAUSE)
            self.process.after(pause, self._keep_dialling, peer, longer)

        self._knock_soon(peer, done, patience)

    def _is_to_call(self, peer: str) -> bool:
        if self.node.ended or peer not in self.addresses or peer not in self.vias:
            return False
        if peer in self.returning:
            return False
        link = self.links.get(peer)
        return self.node.name < peer and (link is None or link.connection is None)

    def _keep_calling(self, peer: str, pause: float) -> None:
        if not self._is_to_call(peer):
            self.calling.discard(peer)
            return

        def done(up: bool) -> None:
            longer = FIRST_PAUSE if up else min(2 * pause, LONGEST_PAUSE)
            self.process.after(pause, self._keep_calling, peer, longer)

        self._knock_soon(peer, done, via=self.vias[peer])

    def session(self, peer: str) -> Session:
        """That of the link that there is, or of the one to come."""
        if (link := self.links.get(peer)) is not None:
            return link.session
        if peer not in self._begun:
            self._begun[peer] = Session(next(self._numbers), BOUNDS, OneChunk)
        return self._begun[peer]

    def _knock_soon(
        self,
        peer: str,
        done: Callable[[bool], None],
        patience: float = SETTINGS.handshake,
        via: str = "",
    ) -> None:
        session, world = self.session(peer), self.process.world
        dial = Dial(peer, session.hello(), session, world.now, done, via, patience)
        self.process.after(world.delay(), self._knock, dial)

    def _knock(self, dial: Dial) -> None:
        """The hello is at the peer, if it gets through; what is lost is sent again for a while."""
        there, relay = self.network.endpoints.get(dial.peer), None
        waited = self.process.world.now - dial.began
        if dial.via and (relay := self._relay(dial)) is None:
            dial.done(False)
            return
        hosts = [self.process.host, self.network.homes[dial.peer]]
        if relay is not None:
            hosts.insert(1, relay.process.host)
        frozen = any(node is not None and not node.process.responsive for node in (there, relay))
        if frozen or not self.network.reach(*hosts):
            self._knock_again(dial, dial.again, dial.patience)
            dial.again *= 2
        elif there is None:
            self._refused(dial, over=self.process.world.chance(ANOTHER))
        elif dial.peer < self.node.name and self._crosses(there) and waited < HEAD_START:
            self._knock_again(dial, SETTLING, dial.patience)
        elif dial.via and self.node.name in self.network.links[dial.peer].returning:
            self._refused(dial, over=False)
        elif not there.admits(self.node.name):
            self._knock_again(dial, SETTLING, SETTINGS.view_wait, over=True)
        else:
            self._welcomed(dial, there, relay)

    def _relay(self, dial: Dial) -> Node | None:
        """Who carries, if it has links to both."""
        relay = self.network.links.get(dial.via)
        if relay is None or frozenset((self.node.name, dial.peer)) not in relay.pairs:
            return None
        direct = [links.carrier(to) for links, to in ((self, dial.via), (relay, dial.peer))]
        return relay.node if direct == ["", ""] else None

    def _crosses(self, peer: Any) -> bool:
        return self.node.name in self.network.links[peer.name].settling

    def _knock_again(self, dial: Dial, pause: float, limit: float, over: bool = False) -> None:
        if self.process.world.now + pause - dial.began < limit:
            self.process.after(pause, self._knock, dial)
        else:
            self._refused(dial, over)

    def _refused(self, dial: Dial, over: bool) -> None:
        link = self.links.get(dial.peer)
        if over and link is not None and link.session is dial.session:
            link.end(f"there is no such link at {dial.peer}")
        dial.done(False)

    def _welcomed(self, dial: Dial, there: Any, relay: Node | None) -> None:
        try:
            session = there.net.resume(self.node.name, dial.hello)
        except Refused as refused:
            link = self.links.get(dial.peer)
            if not refused.over and link is not None and link.session is dial.session:
                link.heard()
            delay = self.process.world.delay()
            self.process.after(delay, self._refused, dial, refused.over)
            return
        answer, connection = session.hello(), Carrier(self.network, self.node, there, relay)
        delay = connection.answer(self.node)
        self.process.after(delay, self._answered, dial, answer, connection)
        there.net.adopt(self.node.name, session, connection)

    def resume(self, peer: str, hello: Hello) -> Session:
        """Goes on with the session that the dialler names, or begins one. Raises Refused."""
        session, link = self.session(peer), self.links.get(peer)
        try:
            session.check(hello)
        except Outdated:
            raise Refused(over=False) from None
        except Forgotten:
            raise Refused(over=True) from None
        except Begun:
            if link is not None:
                link.end(f"{peer} has lost the link, and dialled anew")
            else:
                del self._begun[peer]
            if hello.other:  # of what is over now, which an old hello of this node has told it
                raise Refused(over=True) from None
            session, link = self.session(peer), None
        if link is not None:
            link.sleep()
        try:
            session.resume(hello)
        except WireError as error:
            if link is not None:
                link.end(f"{peer} sent an invalid message: {error}", cause=error.cause)
            raise Refused(over=False) from error
        return session

    def _answered(self, dial: Dial, answer: Hello, connection: Carrier) -> None:
        peer, gone = dial.peer, not connection.intact or self.node.ended
        if gone or peer not in self.addresses or dial.session is not self.session(peer):
            connection.break_off()
            dial.done(False)
            return
        try:
            dial.session.resume(answer, dial.hello)
        except (Outdated, Begun, Forgotten, WireError):
            connection.break_off()
            dial.done(False)
            return
        self.adopt(peer, dial.session, connection)
        dial.done(True)

    def adopt(self, peer: str, session: Session, connection: Carrier) -> None:
        """A connection that goes on with this session."""
        link = self.links.get(peer)
        if new := link is None:
            link = self.links[peer] = Link(self, peer, session)
            del self._begun[peer]
        link.carry_by(connection)
        if new:
            self.node.on_link_up(peer)
