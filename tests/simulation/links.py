"""The links of nodes in virtual time: what node/wire/link.py is around the very sessions that ship.

What crosses is bytes: messages, and frames in chunks. A connection begins with hellos, whoever
dials, and however dials cross; when it breaks, the link sleeps until one of the two has dialled
again, and is lost when that takes too long; or it rests, since neither needs it. Where the view
names a relay, a connection goes by way of a third node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.seats import SenselessError
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.background import Background
from planaria.node.wire.connection import FAREWELL
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
from planaria.node.wire.link import DIRECTLY, LOOK, LinkSettings
from planaria.node.wire.link_table import (
    FIRST_PAUSE,
    HEAD_START,
    LONGEST_PAUSE,
    NO_LINK_THERE,
    LinkTable,
    Peer,
)
from planaria.node.wire.session import Hello, Refused, Session, SessionBounds, Silence
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
        link = end.net.by_peer.get(self.other(end).name)
        return link if link is not None and link.connection is self else None


class Link:
    """A session with a peer, from when it is up until it is lost."""

    def __init__(self, links: Links, peer: str, session: Session) -> None:
        self.links, self.node, self.peer, self.session = links, links.owner, peer, session
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
        return not (self.via or self.links.asks_for(self.peer))

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

    def detach(self, why: str) -> None:
        self.sleep()

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


class Links(LinkTable[Link]):
    """The links of one identity."""

    def __init__(self, owner: Node, network: Network) -> None:
        super().__init__(owner.name, lambda number: Session(number, BOUNDS, OneChunk))
        self.owner, self.network, self.process = owner, network, owner.process
        self.dialable = bool(owner.address)
        self.settling: set[str] = set()  # peers that a dial is on its way to
        self.pairs: set[frozenset[str]] = set()  # for whom this node carries
        self.vias: dict[str, str] = {}  # who carries for it and these peers
        network.links[self.node] = self
        self.process.after(network.world.random.uniform(0.0, WATCH), self._look)

    # --- as the port has it

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        link = self.by_peer.get(peer)
        if link is None or not self.process.alive:
            return False
        if tamper := self.owner.cluster.tampering.get(self.process.host):
            item = tamper(item)
        if isinstance(item, Frame) and item.kind == "state":  # of which there would be much more
            seconds = self.process.world.random.uniform(0.01, 0.3) * self.owner.cluster.state_size
            self.process.after(seconds, self._send_state, link, item)
            return True
        link.send(item)
        if isinstance(item, pb.Message) and item.step.HasField("commit"):
            self.owner.sent_commit()
        return True

    def _send_state(self, link: Link, frame: Frame) -> None:
        if not link.over:
            link.send(frame)

    def garbled(self, channel: str, data: bytes | Chunk) -> bytes | Chunk:
        garble = self.owner.cluster.garbling.get(self.process.host)
        if garble is None:
            return data
        return garble(channel, packed(data) if isinstance(data, Chunk) else data)

    # --- for the node

    def viewed(self, view: registry.View, kept: Sequence[str]) -> None:
        members = [Peer(member.node, member.address, b"") for member in view.members]
        self.set_peers(view.number, members, kept)
        self._set_relays(view)

    def _set_relays(self, view: registry.View) -> None:
        me = self.node
        self.pairs = {frozenset((r.a, r.b)) for r in view.relays if r.via == me}
        former, self.vias = self.vias, {}
        for relay in view.relays:
            if me in (relay.a, relay.b):
                self.vias[relay.b if relay.a == me else relay.a] = relay.via
        for peer, via in former.items():
            link = self.by_peer.get(peer)
            if link is not None and link.via == via != self.vias.get(peer):
                link.sleep()
        for peer in sorted(self.vias):
            self.dial_soon(peer)

    def give_up(self) -> None:
        for link in list(self.by_peer.values()):
            link.end(f"{self.node} stops", report=False)
        del self.network.links[self.node]

    def _look(self) -> None:
        if not self.stopping:
            for link in list(self.by_peer.values()):
                link.look()
            self.process.after(WATCH, self._look)

    # --- for links

    def forget(self, link: Link) -> None:
        del self.by_peer[link.peer]
        self._carries_no_more(link.peer)
        self.dial_soon(link.peer)

    def _carries_no_more(self, peer: str) -> None:
        """What goes by way of the peer, or of this node to the peer."""
        me = self.owner
        for connection in self.network.connections:
            via, ends = connection.via, [end.name for end in connection.ends]
            if via is not None and (
                (via is me and peer in ends) or (via.name == peer and me.name in ends)
            ):
                connection.break_off()

    def via(self, peer: str) -> str:
        return self.vias.get(peer, "")

    def start_trying(self, peer: str, by_relay: bool, wait: float) -> None:
        keep_trying = self._keep_calling if by_relay else self._keep_dialling
        self.process.after(wait, keep_trying, peer, FIRST_PAUSE)

    # --- dialling

    def _keep_dialling(self, peer: str, pause: float) -> None:
        if not self.is_to_dial(peer):
            self._dialling.discard(peer)
            return
        link = self.by_peer.get(peer)
        if link is None or link.connection is None:
            self._dial(peer, pause)
            return

        def looked(there: bool) -> None:
            if there:
                self._dial(peer, pause)
            else:
                self.process.after(DIRECTLY, self._keep_dialling, peer, pause)

        self.network.ask(self.owner, peer, LOOK, looked)

    def _dial(self, peer: str, pause: float) -> None:
        if not self.is_to_dial(peer):
            self._dialling.discard(peer)
            return
        patience = SETTINGS.handshake
        if (link := self.by_peer.get(peer)) is not None and link.connection is not None:
            self._returning.add(peer)
            patience = LOOK
            link.connection.break_off()
            link.connection = None
        self.settling.add(peer)

        def done(up: bool) -> None:
            self.settling.discard(peer)
            self._returning.discard(peer)
            if not up:
                self.dial_soon(peer)
            longer = FIRST_PAUSE if up else min(2 * pause, LONGEST_PAUSE)
            self.process.after(pause, self._keep_dialling, peer, longer)

        self._knock_soon(peer, done, patience)

    def _keep_calling(self, peer: str, pause: float) -> None:
        if not self.is_to_call(peer):
            self._calling.discard(peer)
            return

        def done(up: bool) -> None:
            longer = FIRST_PAUSE if up else min(2 * pause, LONGEST_PAUSE)
            self.process.after(pause, self._keep_calling, peer, longer)

        self._knock_soon(peer, done, via=self.vias[peer])

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
        elif dial.peer < self.node and self._crosses(there) and waited < HEAD_START:
            self._knock_again(dial, SETTLING, dial.patience)
        elif dial.via and self.node in self.network.links[dial.peer]._returning:
            self._refused(dial, over=False)
        elif not there.admits(self.node):
            self._knock_again(dial, SETTLING, SETTINGS.view_wait, over=True)
        else:
            self._welcomed(dial, there, relay)

    def _relay(self, dial: Dial) -> Node | None:
        """Who carries, if it has links to both."""
        relay = self.network.links.get(dial.via)
        if relay is None or frozenset((self.node, dial.peer)) not in relay.pairs:
            return None
        direct = [links.carrier(to) for links, to in ((self, dial.via), (relay, dial.peer))]
        return relay.owner if direct == ["", ""] else None

    def _crosses(self, peer: Any) -> bool:
        return self.node in self.network.links[peer.name].settling

    def _knock_again(self, dial: Dial, pause: float, limit: float, over: bool = False) -> None:
        if self.process.world.now + pause - dial.began < limit:
            self.process.after(pause, self._knock, dial)
        else:
            self._refused(dial, over)

    def _refused(self, dial: Dial, over: bool) -> None:
        link = self.by_peer.get(dial.peer)
        if over and link is not None and link.session is dial.session:
            link.end(f"there is no such link at {dial.peer}")
        dial.done(False)

    def _welcomed(self, dial: Dial, there: Any, relay: Node | None) -> None:
        try:
            session = there.net.resume(self.node, dial.hello)
        except (Refused, WireError) as refused:
            over = isinstance(refused, Refused) and refused.code in NO_LINK_THERE
            link = self.by_peer.get(dial.peer)
            if not over and link is not None and link.session is dial.session:
                link.heard()
            delay = self.process.world.delay()
            self.process.after(delay, self._refused, dial, over)
            return
        answer, connection = session.hello(), Carrier(self.network, self.owner, there, relay)
        delay = connection.answer(self.owner)
        self.process.after(delay, self._answered, dial, answer, connection)
        there.net.adopt(self.node, session, connection)

    def _answered(self, dial: Dial, answer: Hello, connection: Carrier) -> None:
        peer, gone = dial.peer, not connection.intact or self.stopping
        if gone or peer not in self.members or dial.session is not self.session(peer):
            connection.break_off()
            dial.done(False)
            return
        try:
            self.answered(peer, dial.session, dial.hello, answer)
        except (Refused, WireError):
            connection.break_off()
            dial.done(False)
            return
        self.adopt(peer, dial.session, connection)
        dial.done(True)

    def adopt(self, peer: str, session: Session, connection: Carrier) -> None:
        """A connection that goes on with this session."""
        link = self.by_peer.get(peer)
        if new := link is None:
            link = Link(self, peer, session)
            self.add(link)
        link.carry_by(connection)
        if new:
            self.owner.on_link_up(peer)
