"""The network between hosts in virtual time: partitions, delays, and connections that break.

What one end writes into a connection reaches the other end in order, until the connection breaks.
Data in transit is then lost or not. While a partition blocks the way, data waits, as in TCP.
Connections overtake each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planaria.bootstrap.transport import Broken
from simulation.world import Process, World

if TYPE_CHECKING:
    from simulation.transport import End, MemoryTransport

SILENCE = 3.0
"""Seconds without a sign of life after which an end gives a connection up."""
WATCH = 0.5
"""Seconds between two checks for silent connections and waiting data."""
BROKEN: Final = Broken("UNAVAILABLE", "the connection broke")


class Partition(NamedTuple):
    """A partition between two sets of hosts."""

    left: frozenset[str]
    right: frozenset[str]
    both_ways: bool
    """False: only what goes from left to right is lost."""

    def stops(self, sender: str, receiver: str) -> bool:
        if sender in self.left and receiver in self.right:
            return True
        return self.both_ways and sender in self.right and receiver in self.left


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.homes: dict[str, str] = {}  # node, also a former one -> host
        self.listeners: dict[str, MemoryTransport] = {}  # by address
        self.hosts: dict[str, str] = {}  # address, also of a former node -> host
        self.garbling: dict[str, Callable[[str, bytes], bytes]] = {}
        """By host: changes bytes that it writes, given the kind of stream."""
        self.partitions: dict[int, Partition] = {}
        self.latency: dict[tuple[str, str], float] = {}  # from host, to host -> additional seconds
        self.connections: list[Connection] = []
        self.world.after(WATCH, self._watch)

    # --- ways

    def passes(self, sender: str, receiver: str) -> bool:
        """Whether data from the first host reaches the other."""
        return not any(each.stops(sender, receiver) for each in self.partitions.values())

    def reach(self, host: str, other: str) -> bool:
        """Whether the hosts reach each other."""
        return self.passes(host, other) and self.passes(other, host)

    def delay(self, sender: str, receiver: str) -> float:
        """Seconds from the first host to the other."""
        return self.world.delay() + self.latency.get((sender, receiver), 0.0)

    def part(
        self, number: int, left: frozenset[str], right: frozenset[str], both_ways: bool = True
    ) -> None:
        self.partitions[number] = Partition(left, right, both_ways)

    def heal(self, number: int) -> None:
        del self.partitions[number]
        for connection in self.connections:
            connection.pass_on()

    def died(self, process: Process) -> None:
        """Removes the listeners of a process that died, and breaks its connections."""
        self.listeners = {at: end for at, end in self.listeners.items() if end.process != process}
        for connection in self.connections:
            if process in [end.process for end in connection.ends]:
                connection.break_off()

    # --- looking for silence

    def _watch(self) -> None:
        self.connections = [connection for connection in self.connections if connection.intact]
        for connection in self.connections:
            connection.pass_on()
            connection.look()
        self.world.after(WATCH, self._watch)


class Connection:
    """The connection of one stream. Items, each with its kind, arrive in order."""

    def __init__(self, network: Network, near: End, far: End) -> None:
        self.network, self.world = network, network.world
        self.ends = near, far
        self.intact = True
        self._cut = False  # what was in transit when it broke is lost
        # by receiver
        self._queues: dict[End, deque[tuple[str, Any]]] = {near: deque(), far: deque()}
        self._last = {near: 0.0, far: 0.0}  # arrival of the newest item, by receiver
        self._held: Counter[End] = Counter()  # items that wait for the way to be free
        self._patience = SILENCE + self.world.random.uniform(0.0, SILENCE)
        self._silent_since: float | None = None
        network.connections.append(self)

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def _way(self, to: End) -> tuple[str, str]:
        return self.other(to).process.host, to.process.host

    def reaches(self, end: End) -> bool:
        """Whether items sent to `end` arrive at present."""
        return not self.network.partitions or self.network.passes(*self._way(end))

    def send(self, to: End, item: tuple[str, Any]) -> None:
        if self.intact:
            self._queues[to].append(item)
            self._on_its_way(to)

    def _on_its_way(self, to: End) -> None:
        arrival = self.world.now + self.network.delay(*self._way(to))
        arrival = self._last[to] = max(arrival, self._last[to])
        to.process.after(arrival - self.world.now, self._arrive, to)

    def _arrive(self, to: End) -> None:
        if self._cut:
            return
        if self.intact and (self._held[to] or not self.reaches(to)):
            self._held[to] += 1
        else:
            to.came(*self._queues[to].popleft())

    def pass_on(self) -> None:
        """Sends on the items that have waited, where the way is free."""
        if not (self._held and self.intact):
            return
        for end in self.ends:
            if self.reaches(end):
                for _ in range(self._held.pop(end, 0)):
                    self._on_its_way(end)

    def break_off(self, at_once: float = 0.8) -> None:
        """Breaks the connection. `at_once`: probability that an end notices soon, not late."""
        if not self.intact:
            return
        self.intact = False
        blocked = not all(self.reaches(end) for end in self.ends)
        self._cut = blocked or bool(self._held) or self.world.chance(0.5)
        for end in self.ends:
            slow = blocked or not self.world.chance(at_once)
            delay = self.world.random.uniform(1.0, SILENCE + 1.0) if slow else self.world.delay()
            if not self._cut:  # items sent before the break arrive before it is noticed
                delay = max(delay, self._last[end] - self.world.now)
            end.process.after(delay, end.broke, BROKEN)

    def close_if_over(self) -> None:
        """Closes the connection once neither end expects anything more."""
        self.intact = self.intact and not all(end.is_over for end in self.ends)

    def look(self) -> None:
        """Breaks the connection after too long a silence, as keepalive does."""
        near, far = (end.process for end in self.ends)
        hear = near.responsive and far.responsive
        if hear and self.network.reach(near.host, far.host):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = self.world.now
        elif self.world.now - self._silent_since > self._patience:
            self.break_off()
