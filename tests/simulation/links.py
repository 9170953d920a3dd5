"""The production links in virtual time, of a node that may send wrong items."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.background import Background
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.observers import Observers
from simulation.transport import MemoryTransport
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.node import Node

CHUNK: Final = 160
"""Bytes of a chunk; a stage's state has 192."""


class OneChunk(Background):
    """Sends copies one chunk at a time, so that a copy takes as long as a large one. Copies here
    are smaller than a window, and would arrive at once."""

    def room(self, flight: int, now: float) -> int:
        return 0 if flight else CHUNK


CHANGED: Final[dict[str, Any]] = {"chunk": CHUNK, "background": OneChunk, "heartbeat": 1.0}
"""Settings that differ from those in production."""


class NodeLinks(Links):
    """The links of one node."""

    def __init__(
        self,
        cluster: Cluster,
        process: Process,
        transport: MemoryTransport,
        *arguments: Any,
        events: Node,
        settings: LinkSettings,
        observers: Observers,
    ) -> None:
        self.owner, self.cluster, self.process = events, cluster, process
        settings = replace(settings, **CHANGED)
        super().__init__(*arguments, events, settings, observers=observers, transport=transport)

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        cluster, host, machine = self.cluster, self.process.host, self.owner.machine
        if not self.linked(peer):
            return False
        if machine.fuse is not None and machine.fuse < 0:
            return True  # its crash is due now
        if (tamper := cluster.tampering.get(host)) is not None:
            altered = tamper(item)
            if altered is None:
                return True
            item = altered
        if isinstance(item, Frame) and item.kind == "state":  # a real state would be much larger
            seconds = cluster.world.random.uniform(0.01, 0.3) * cluster.state_size
            self.process.after(seconds, self.send_as_is, peer, item)
            return True
        sent = self.send_as_is(peer, item)
        if isinstance(item, pb.Message) and item.step.HasField("commit"):
            machine.sent_commit()
        return sent

    def send_as_is(self, peer: str, item: pb.Message | Frame) -> bool:
        return super().send(peer, item)
