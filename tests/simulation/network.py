"""The network between hosts in virtual time: what gets through, how late, and until when.

What one end writes into a connection comes at the other end in order, on each of its channels,
until it breaks; then what was on its way is lost or not. While the way is blocked it waits, as in
TCP. Connections, and channels of one, overtake each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from simulation.world import Process, World

if TYPE_CHECKING:
    from simulation.links import Links

SILENCE = 3.0
"""Seconds without a sign of life after which an end gives a connection up."""
LOOK = 0.25
"""Seconds between two looks for a node that doesn't answer."""
WATCH = 0.5
"""Seconds between two looks at what has been silent, or waits."""


class Endpoint(Protocol):
    """What has connections: one identity of a node, or the registry."""

    name: str
    process: Process
    streams: dict[str, Stream]

    def admits(self, peer: str) -> bool: ...
    def on_stream_up(self, peer: str) -> None: ...
    def on_stream_lost(self, peer: str) -> None: ...
    def on_item(self, peer: str, item: Any) -> None: ...


class Partition(NamedTuple):
    """Of hosts."""

    left: frozenset[str]
    right: frozenset[str]
    both_ways: bool
    """Else only what goes from left to right is lost."""

    def stops(self, sender: str, receiver: str) -> bool:
        if sender in self.left and receiver in self.right:
            return True
        return self.both_ways and sender in self.right and receiver in self.left


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.endpoints: dict[str, Endpoint] = {}
        self.homes: dict[str, str] = {}  # of nodes, also of those that are gone -> host
        self.links: dict[str, Links] = {}  # of nodes
        self.partitions: dict[int, Partition] = {}
        self.latency: dict[tuple[str, str], float] = {}  # from host, to host: more than usual
        self.connections: list[Connection] = []
        self.world.after(WATCH, self._watch)

    # --- ways

    def passes(self, *way: str) -> bool:
        """Whether what the first host sends gets to the last, by way of those between."""
        if not self.partitions:
            return True
        stops = [partition.stops for partition in self.partitions.values()]
        hops = list(pairwise(way))
        return not any(stop(*hop) for stop in stops for hop in hops)

    def reach(self, *way: str) -> bool:
        """Whether those hosts can talk to each other."""
        return self.passes(*way) and self.passes(*reversed(way))

    def delay(self, *way: str) -> float:
        """Seconds."""
        if len(way) == 2:
            return self.world.delay() + self.latency.get(way, 0.0)
        return sum(self.delay(*hop) for hop in pairwise(way))

    def part(
        self, number: int, left: frozenset[str], right: frozenset[str], both_ways: bool = True
    ) -> None:
        self.partitions[number] = Partition(left, right, both_ways)

    def heal(self, number: int) -> None:
        del self.partitions[number]
        for connection in self.connections:
            connection.pass_on()

    def died(self, endpoint: Endpoint) -> None:
        """The endpoint is gone without a word."""
        del self.endpoints[endpoint.name]
        self.links.pop(endpoint.name, None)
        for connection in self.connections:
            if endpoint in (*connection.ends, connection.via):
                connection.break_off()

    # --- looking for nodes, and for silence

    def ask(
        self, asker: Endpoint, node: str, seconds: float, done: Callable[[bool | None], None]
    ) -> None:
        """What bootstrap/liveness.py does: `done` hears whether the node is there."""
        end = self.world.now + seconds
        asker.process.after(self.world.delay(), self._look, asker, node, end, done)

    def _look(
        self, asker: Endpoint, node: str, end: float, done: Callable[[bool | None], None]
    ) -> None:
        reached = self.reach(asker.process.host, self.homes[node])
        there = self.endpoints.get(node)
        if reached and (there is None or there.process.responsive):
            asker.process.after(self.world.delay(), done, there is not None)
        elif self.world.now >= end:
            done(None)
        else:
            asker.process.after(LOOK, self._look, asker, node, end, done)

    def _watch(self) -> None:
        self.connections = [one for one in self.connections if one.is_wanted()]
        for connection in self.connections:
            connection.pass_on()
            connection.look()
        self.world.after(WATCH, self._watch)

    # --- streams to the registry

    def dial(self, dialler: Endpoint, peer: str, done: Callable[[bool], None]) -> None:
        """`done` hears whether the stream is up; when it is not, the caller tries again later."""
        dialler.process.after(self.world.delay(), self._knock, dialler, peer, done)

    def _knock(self, dialler: Endpoint, peer: str, done: Callable[[bool], None]) -> None:
        acceptor = self.endpoints.get(peer)
        if (
            acceptor is None
            or not acceptor.process.responsive
            or not self.reach(dialler.process.host, acceptor.process.host)
            or not acceptor.admits(dialler.name)
            or not dialler.admits(peer)
        ):
            done(False)
            return
        stream = Stream(self, dialler, acceptor)
        delay = stream.answer(dialler)
        dialler.process.after(delay, self._dialled, stream, dialler, done)
        self._adopt(stream, acceptor)

    def _dialled(self, stream: Stream, dialler: Endpoint, done: Callable[[bool], None]) -> None:
        if stream.intact and dialler.admits(stream.other(dialler).name):
            self._adopt(stream, dialler)
            done(True)
        else:
            stream.break_off()
            done(False)

    def _adopt(self, stream: Stream, end: Endpoint) -> None:
        peer = stream.other(end).name
        if (existing := end.streams.get(peer)) is not None:
            existing.give_up(end)
        end.streams[peer] = stream
        end.on_stream_up(peer)


class Connection:
    """What one of two has dialled, by way of a third one or not."""

    def __init__(
        self, network: Network, one: Endpoint, other: Endpoint, via: Endpoint | None = None
    ) -> None:
        self.network, self.world = network, network.world
        self.ends, self.via = (one, other), via
        self.intact = True
        self._cut = False  # what was on its way when it broke is lost
        between = [via.process.host] if via is not None else []
        way = (one.process.host, *between, other.process.host)
        self._ways: Mapping[str, tuple[str, ...]] = {one.name: way[::-1], other.name: way}  # to it
        self._queues: dict[tuple[str, str], deque[Any]] = {}  # by receiver and channel
        self._last: dict[tuple[str, str], float] = {}  # when that comes
        self._held: Counter[tuple[str, str]] = Counter()  # how many of those wait
        network.connections.append(self)

    def other(self, end: Endpoint) -> Endpoint:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def reaches(self, end: Endpoint) -> bool:
        """Whether what is sent to it comes, at the moment."""
        if self.via is None and not self.network.partitions:
            return True
        carried = self.via is None or self.via.process.responsive
        return carried and self.network.passes(*self._ways[end.name])

    def feeds(self, end: Endpoint) -> bool:
        """Whether signs of life come to this end."""
        return self.intact and self.other(end).process.responsive and self.reaches(end)

    def send(self, to: Endpoint, channel: str, item: Any) -> None:
        if not self.intact:
            return
        key = to.name, channel
        self._queues.setdefault(key, deque()).append(item)
        self._on_its_way(to, key)

    def _on_its_way(self, to: Endpoint, key: tuple[str, str]) -> None:
        arrival = self.world.now + self.network.delay(*self._ways[to.name])
        arrival = self._last[key] = max(arrival, self._last.get(key, 0.0))
        self.world.after(arrival - self.world.now, self._arrive, to, key)

    def answer(self, dialler: Endpoint) -> float:
        """Seconds until the dialler hears that it is up; nothing comes to it before."""
        delay = self.network.delay(*self._ways[dialler.name])
        for channel in ("control", "bulk"):
            self._last[dialler.name, channel] = self.world.now + delay
        return delay

    def _arrive(self, to: Endpoint, key: tuple[str, str]) -> None:
        if self._cut:
            return
        if self.intact and (self._held[key] or not self.reaches(to)):
            self._held[key] += 1
        else:
            to.process.run(self._deliver, to, key[1], self._queues[key].popleft())

    def pass_on(self) -> None:
        """What has waited for the way to be free."""
        if not (self._held and self.intact):
            return
        for end in self.ends:
            if self.reaches(end):
                for key in [key for key in self._held if key[0] == end.name]:
                    for _ in range(self._held.pop(key)):
                        self._on_its_way(end, key)

    def break_off(self, at_once: float = 0.8) -> None:
        """`at_once`: how probable it is that an end notices before it has been silent for long."""
        if not self.intact:
            return
        self.intact = False
        blocked = not all(self.reaches(end) for end in self.ends)
        self._cut = blocked or bool(self._held) or self.world.chance(0.5)
        for end in self.ends:
            slow = blocked or not self.world.chance(at_once)
            delay = self.world.random.uniform(1.0, SILENCE + 1.0) if slow else self.world.delay()
            if not self._cut:  # what was sent before the end comes before it
                coming = [at for (to, _), at in self._last.items() if to == end.name]
                delay = max([delay, *(at - self.world.now for at in coming)])
            end.process.after(delay, self._noticed, end)

    # --- what kind of connection it is

    def is_wanted(self) -> bool:
        """Whether one of the ends may still have something of it."""
        raise NotImplementedError

    def look(self) -> None:
        """At how long it has been silent."""

    def _deliver(self, to: Endpoint, channel: str, item: Any) -> None:
        raise NotImplementedError

    def _noticed(self, end: Endpoint) -> None:
        """That it has broken."""
        raise NotImplementedError


class Stream(Connection):
    """Of a node to the registry. It is lost when it breaks, or when it was silent for too long; a
    frozen end can't notice."""

    def __init__(self, network: Network, one: Endpoint, other: Endpoint) -> None:
        super().__init__(network, one, other)
        self.patience = SILENCE + self.world.random.uniform(0.0, 1.0)
        self.silent_since: float | None = None

    def believed_by(self, end: Endpoint) -> bool:
        return end.streams.get(self.other(end).name) is self

    def is_wanted(self) -> bool:
        return self.intact or any(map(self.believed_by, self.ends))

    def look(self) -> None:
        if all(end.process.responsive and self.reaches(end) for end in self.ends):
            self.silent_since = None
            return
        if self.silent_since is None:
            self.silent_since = self.world.now
        if self.intact and self.world.now - self.silent_since > self.patience:
            for end in self.ends:
                end.process.run(self.give_up, end)

    def give_up(self, end: Endpoint, report: bool = True) -> None:
        """`end` drops it; the other end notices in a while."""
        if not self.believed_by(end):
            return
        peer = self.other(end).name
        del end.streams[peer]
        self.break_off()
        if report:
            end.on_stream_lost(peer)

    def _noticed(self, end: Endpoint) -> None:
        self.give_up(end)

    def _deliver(self, to: Endpoint, channel: str, item: Any) -> None:
        if self.believed_by(to):
            to.on_item(self.other(to).name, item)
