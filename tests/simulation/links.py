"""The links that ship, in virtual time, of a node that may send other things than it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.background import Background
from planaria.node.wire.frames import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria.node.wire.relays import Relay
from simulation.transport import MemoryTransport

if TYPE_CHECKING:
    from simulation.node import Node

CHUNK: Final = 160
"""Bytes; a stage's state has 192."""


class OneChunk(Background):
    """A copy here is less than a window, and would be there in no time: so it takes as long as a
    large one does."""

    def room(self, flight: int, now: float) -> int:
        return 0 if flight else CHUNK


SETTINGS: Final = LinkSettings(chunk=CHUNK, background=OneChunk, heartbeat=1.0)


class NodeLinks(Links):
    """The links of one identity."""

    def __init__(self, owner: Node) -> None:
        process = owner.process
        transport = MemoryTransport(owner.cluster.network, process, owner.name)
        identity = owner.identity
        super().__init__("run", owner.name, identity, owner, SETTINGS, transport=transport)
        self.owner, self.process = owner, process

    def viewed(self, view: registry.View, linked: Sequence[str]) -> None:
        members = [Peer(member.node, member.address, member.key) for member in view.members]
        self.set_peers(view.number, members, linked)
        self.set_relays(Relay(relay.a, relay.b, relay.via) for relay in view.relays)

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        cluster, host = self.owner.cluster, self.process.host
        if not self.linked(peer):
            return False
        if self.owner.fuse is not None and self.owner.fuse < 0:
            return True  # it is as good as dead
        if (tamper := cluster.tampering.get(host)) is not None:
            altered = tamper(item)
            if altered is None:
                return True
            item = altered
        if isinstance(item, Frame) and item.kind == "state":  # of which there would be much more
            seconds = cluster.world.random.uniform(0.01, 0.3) * cluster.state_size
            self.process.after(seconds, self.send_as_is, peer, item)
            return True
        sent = self.send_as_is(peer, item)
        if isinstance(item, pb.Message) and item.step.HasField("commit"):
            self.owner.sent_commit()
        return sent

    def send_as_is(self, peer: str, item: pb.Message | Frame) -> bool:
        return super().send(peer, item)
