"""Scenarios in which one host sends random messages, frames and bytes to all others."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.transaction.bounds import fault_to_driver, fault_to_member
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.connection import Link
from planaria.node.wire.frame_format import Frame, pack_chunk, seal
from simulation.byzantine import Drawing, Lying
from simulation.node import Node

OUT: Final = 30.0
"""Seconds after which a babbling node must have been evicted."""
HEARD: Final = 200
"""How many of the newest received messages and frames a node keeps, to send them itself."""
GAP: Final = 0.05
"""Mean seconds between two bursts."""
WILD: Final = (0.0, 0.0, 0.0, 0.01, 0.2)
"""Shares of damaged or random bytes; a scenario draws one of them."""
CAREFUL: Final = (0.0, 0.9, 1.0)
"""Shares of the messages that pass all range checks; a scenario draws one of them."""
TRIES: Final = 20
"""Maximum draws for a message that passes them."""

OF_CONNECTIONS: Final = "heartbeat", "acknowledged", "farewell"

AnyMessage = TypeVar("AnyMessage", bound=Message)


def listen(node: Node) -> deque[pb.Message | Frame]:
    """Returns the newest messages and frames that the node receives from now on."""
    heard: deque[pb.Message | Frame] = deque(maxlen=HEARD)
    take_message, take_frame = node.on_message, node.on_frame

    def hear_message(peer: str, message: pb.Message, now: float) -> None:
        copy = pb.Message()
        copy.CopyFrom(message)
        heard.append(copy)
        take_message(peer, message, now)

    def hear_frame(peer: str, frame: Frame, now: float) -> None:
        heard.append(frame)
        take_frame(peer, frame, now)

    node.on_message, node.on_frame = hear_message, hear_frame
    return heard


class Babbling(Lying):
    """One host draws messages and frames, flips bits of real ones, and repeats its own and others',
    at random times. It does so to the registry, too, in its own name. Each of its nodes is soon
    evicted. While it drives it is honest, since members trust a driver."""

    lasting = (10.0, 60.0)
    at_once: tuple[int, ...] = (5, 50, 200)
    """Messages and frames that it sends to each peer in a burst; a scenario draws one number."""

    def __init__(self, *arguments: Any) -> None:
        self.since: dict[str, float] = {}  # by node: from when on it babbles
        self.heard: dict[str, deque[pb.Message | Frame]] = {}  # by node
        self.wild, self.careful, self.each = 0.0, 0.0, 0
        super().__init__(*arguments)

    def _lie(self) -> float:
        assert self.cluster.guilty is not None
        node_at = {host.name: host.node.name for host in self.cluster.hosts.values() if host.node}
        driver, chosen = self.cluster.registry.view().driver, self.random
        others = [host for host in node_at if node_at[host] != driver] or [*self.cluster.hosts]
        liar = chosen.choice(others)
        seconds = chosen.choice(self.lasting)
        self.wild, self.careful = chosen.choice(WILD), chosen.choice(CAREFUL)
        self.each = chosen.choice(self.at_once)
        self.cluster.guilty.add(liar)
        self.cluster.lying.add(liar)
        how = f"{self.wild:.0%} of it wild, {self.careful:.0%} careful"
        self.world.say(liar, f"babbles for {seconds:.0f} s, {how}")
        self.cluster.tampering[liar] = self._remembered
        self._babble(liar, self.world.now + seconds)
        return seconds + 5.0

    def _babble(self, host: str, until: float) -> None:
        if self.world.now > until:
            self.cluster.tampering.pop(host, None)
            return
        node = self.cluster.hosts[host].node
        if node is not None and not node.ended:
            node.process.run(self._speak, node)
        self.world.after(self.random.expovariate(1 / GAP), self._babble, host, until)

    def _speak(self, node: Node) -> None:
        if node.name not in self.heard:
            self.heard[node.name] = listen(node)
        if self.cluster.registry.view().driver in (node.name, "") or not node.links.by_peer:
            self.since.pop(node.name, None)
            return
        since = self.since.setdefault(node.name, self.world.now)
        member = node.name in self.cluster.registry.names()
        late = member and self.world.now > since + OUT
        self.cluster.demand(not late, "I6", f"{node.name} babbles, and is a member still")
        for link in sorted(node.links.by_peer.values(), key=lambda link: link.peer):
            for _ in range(self.each):
                if not link.over.is_set() and link.connection is not None:
                    self._blurt(node, link)
        if node.view.number:
            self._tell_registry(node)

    # --- to nodes

    def _blurt(self, node: Node, link: Link) -> None:
        self.cluster.counts["babbled"] += 1
        chosen, drawing = self.random, self._drawing(node)
        if chosen.random() < self.wild:
            self._rave(link, drawing)
            return
        careful = chosen.random() < self.careful
        for _ in range(TRIES):
            item = self._chosen(node, link.peer, drawing)
            if not careful or isinstance(item, Frame) or self._can_be(item):
                break
        node.links.send_as_is(link.peer, item)

    def _chosen(self, node: Node, peer: str, drawing: Drawing) -> pb.Message | Frame:
        item = self._lie_of(node, peer)
        heard = self.heard[node.name]
        if heard and self.random.random() < 0.4:
            item = self.random.choice(heard)
        if isinstance(item, pb.Message) and self.random.random() < 0.3:
            return _altered(item, drawing)
        return item

    def _can_be(self, message: pb.Message) -> bool:
        """Whether the message passes all range checks."""
        if message.WhichOneof("body") in OF_CONNECTIONS:  # almost all of these end a link
            return False
        rules = self.cluster.rules
        return not (fault_to_driver(message, rules) or fault_to_member(message, rules.stages))

    def _rave(self, link: Link, drawing: Drawing) -> None:
        """Sends a damaged message or chunk, or random bytes for a chunk."""
        real = drawing.envelope().SerializeToString()
        match self.random.randrange(4):
            case 0:
                link.send(seal(drawing.damaged(real)))
            case 1:
                link.send(drawing.damaged(seal(real)))
            case 2:
                head, frame = drawing.head(), drawing.whole(0, 2**32)
                chunk = pack_chunk(frame=frame, head=head, data=[drawing.data()])
                self._write_chunk(link, drawing.damaged(chunk))
            case _:
                self._write_chunk(link, drawing.data())

    def _write_chunk(self, link: Link, data: bytes) -> None:
        """Writes to each of the link's streams for chunks."""
        streams = link.connection._bulks.values() if link.connection is not None else ()
        for bulk in streams:
            link._links.process.spawn(bulk.stream.write(data))

    def _drawing(self, node: Node) -> Drawing:
        names = [*sorted(self.cluster.network.homes), ""]
        numbers = [0, 1, 2, self.cluster.rules.stages, self.cluster.rules.steps, node.view.number]
        return Drawing(self.random, names, numbers, rarely=0.0)

    # --- to the registry

    def _tell_registry(self, node: Node) -> None:
        """Sends a request in the node's own name, since the registry refuses others unread. No
        report says that the node leaves."""
        match self.random.randrange(20):
            case 0 | 1:
                join = self._drawn(registry.JoinRequest(), node)
                join.protocol, join.node, join.address = PROTOCOL, node.name, node.place.advertise
                join.key, join.run = node.place.identity.public, "run"
                node.place.identity.sign_message(join, "run")
                node.process.spawn(node.client._call("Join", join, 1.0))
            case 2:
                suspicion = self._drawn(registry.Suspicion(), node)
                suspicion.accuser = node.name
                node.client.sign(suspicion)
                node.process.spawn(node.client._call("Suspect", suspicion, 1.0))
            case _:
                renewal = self._drawn(registry.Renewal(report=node.make_report()), node)
                renewal.report.leaving = False
                node.client.report(renewal.report)

    def _drawn(self, real: AnyMessage, node: Node) -> AnyMessage:
        drawing = self._drawing(node)
        if self.random.random() < 0.5:
            return _altered(real, drawing)
        return drawing.message(type(real))


def _altered(item: AnyMessage, drawing: Drawing) -> AnyMessage:
    """A damaged copy of the item; the item itself if the copy can't be parsed."""
    try:
        return type(item).FromString(drawing.damaged(item.SerializeToString()))
    except DecodeError:
        return item
