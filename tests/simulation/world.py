"""Virtual time, processes and the links between them, all from one seed, in one thread.

A link is what node/wire/link.py makes of connections that come and go: reliable and in order in
each of its channels while it is up, asleep for a while when something resets the connections, and
lost as a whole. Messages on different links, and on the channels of one link, overtake each other.
The registry's are plain streams, which break at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

SILENCE = 3.0
"""Seconds without a sign of life after which an end gives a link up."""
LOOK = 0.25
"""Seconds between two looks for a node that doesn't answer."""
REDIAL = 0.05
"""Seconds after which a link that sleeps is dialled, at the soonest."""
WATCH = 0.5
"""Seconds between two looks at the silence of all links."""


class World:
    """The clock and the events to come."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.straggling = self.random.choice([0.0, 0.03, 0.1])  # share of what takes long
        self.now = 0.0
        self.trace: deque[str] = deque(maxlen=400)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        event = (self.now + delay, next(self._numbers), call, arguments)
        heapq.heappush(self._events, event)

    def step(self) -> None:
        self.now, _, call, arguments = heapq.heappop(self._events)
        call(*arguments)

    def say(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now:9.3f} {who:>8} {what}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        """Seconds that something takes through the network: mostly a few ms, at times a second."""
        usual = 0.002 + self.random.expovariate(200.0)
        return usual + self.random.uniform(0.0, 1.5) if self.chance(self.straggling) else usual


class Process:
    """A process on a host: runs, stands still while the host is frozen, or is dead."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.alive = True
        self.frozen_since: float | None = None
        self.thawed_at = -1.0
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def responsive(self) -> bool:
        return self.alive and self.frozen_since is None

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self.world.after(delay, self._run, call, arguments)

    def _run(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen_since is not None:
            self._waiting.append((call, arguments))
        else:
            call(*arguments)

    def freeze(self) -> None:
        self.frozen_since = self.world.now

    def thaw(self) -> None:
        """Everything that came meanwhile is processed now, in the order in which it came."""
        self.frozen_since = None
        self.thawed_at = self.world.now
        waiting, self._waiting = self._waiting, []
        for call, arguments in waiting:
            self.after(0.0, call, *arguments)


class Endpoint(Protocol):
    """What has links: one identity of a node, or the registry."""

    name: str
    process: Process
    links: dict[str, Link]

    def admits(self, peer: str) -> bool: ...
    def on_link_up(self, peer: str) -> None: ...
    def on_link_lost(self, peer: str, reason: str, unacknowledged: list[Any]) -> None: ...
    def on_item(self, peer: str, channel: str, item: Any) -> None: ...


@dataclass(eq=False)
class Link:
    """`intact` is physical; each end believes in the link until it notices. While it is `asleep`,
    what is sent waits."""

    ends: tuple[Endpoint, Endpoint]
    intact: bool = True
    asleep: bool = False
    cut: bool = False  # what was on its way when the link broke is lost
    silent_since: float | None = None
    patience: float = SILENCE
    last: dict[tuple[str, str], float] = field(default_factory=dict)  # (to, channel) -> arrival
    sent: dict[str, dict[int, Any]] = field(default_factory=dict)  # sender -> unacknowledged frames
    stuck: list[tuple[Endpoint, str, int, Any]] = field(default_factory=list)

    def other(self, end: Endpoint) -> Endpoint:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    @property
    def resumes(self) -> bool:
        """A link between nodes is a session, which outlives its connections."""
        return all(end.name != "registry" for end in self.ends)

    def believed_by(self, end: Endpoint) -> bool:
        return end.links.get(self.other(end).name) is self


class Network:
    """Links between endpoints, and the partitions that block them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.endpoints: dict[str, Endpoint] = {}
        self.homes: dict[str, str] = {}  # of nodes, also of those that are gone -> host
        self.partitions: dict[int, tuple[frozenset[str], frozenset[str]]] = {}  # hosts, and hosts
        self.latency: dict[tuple[str, str], float] = {}  # from host, to host: more than usual
        self.links: list[Link] = []
        self._frames = itertools.count(1)
        self.world.after(WATCH, self._watch)

    def blocked(self, a: Endpoint, b: Endpoint) -> bool:
        return self.apart(a.process.host, b.process.host)

    def apart(self, one: str, other: str) -> bool:
        """Hosts."""
        return any(
            (one in left and other in right) or (one in right and other in left)
            for left, right in self.partitions.values()
        )

    # --- dialling

    def dial(self, dialler: Endpoint, peer: str, done: Callable[[bool], None]) -> None:
        """`done` hears whether the link is up; when it is not, the caller tries again later."""
        dialler.process.after(self.world.delay(), self._knock, dialler, peer, done)

    def _knock(self, dialler: Endpoint, peer: str, done: Callable[[bool], None]) -> None:
        acceptor = self.endpoints.get(peer)
        if (
            acceptor is None
            or not acceptor.process.responsive
            or self.blocked(dialler, acceptor)
            or not acceptor.admits(dialler.name)
            or not dialler.admits(peer)
        ):
            done(False)
            return
        link = Link((dialler, acceptor), patience=SILENCE + self.world.random.uniform(0.0, 1.0))
        self.links.append(link)
        delay = self.world.delay()
        for channel in ("control", "bulk"):
            link.last[dialler.name, channel] = self.world.now + delay
        dialler.process.after(delay, self._dialled, link, dialler, done)
        self._adopt(link, acceptor)

    def _dialled(self, link: Link, dialler: Endpoint, done: Callable[[bool], None]) -> None:
        if link.intact and dialler.admits(link.other(dialler).name):
            self._adopt(link, dialler)
            done(True)
        else:
            self._break(link)
            done(False)

    def _adopt(self, link: Link, end: Endpoint) -> None:
        peer = link.other(end).name
        if (existing := end.links.get(peer)) is not None:
            self.give_up(existing, end, "dialled anew")
        end.links[peer] = link
        end.on_link_up(peer)

    def ask(self, asker: Endpoint, node: str, seconds: float, done: Callable[[bool], None]) -> None:
        """What bootstrap/dial.py does: `done` hears whether the node is there."""
        end = self.world.now + seconds
        asker.process.after(self.world.delay(), self._look, asker, node, end, done)

    def _look(self, asker: Endpoint, node: str, end: float, done: Callable[[bool], None]) -> None:
        reached = not self.apart(asker.process.host, self.homes[node])
        there = self.endpoints.get(node)
        if reached and (there is None or there.process.responsive):
            asker.process.after(self.world.delay(), done, there is not None)
        elif self.world.now >= end:
            done(False)
        else:
            asker.process.after(LOOK, self._look, asker, node, end, done)

    # --- traffic

    def send(self, link: Link, sender: Endpoint, channel: str, item: Any) -> None:
        receiver = link.other(sender)
        number = 0
        if channel == "bulk":
            number = next(self._frames)
            link.sent.setdefault(sender.name, {})[number] = item
        if not link.intact:
            return
        key = (receiver.name, channel)
        delay = self.world.delay() + self._latency(sender, receiver)
        arrival = max(self.world.now + delay, link.last.get(key, 0.0))
        link.last[key] = arrival
        self.world.after(
            arrival - self.world.now, self._arrive, link, receiver, channel, number, item
        )

    def _latency(self, sender: Endpoint, receiver: Endpoint) -> float:
        return self.latency.get((sender.process.host, receiver.process.host), 0.0)

    def _arrive(self, link: Link, to: Endpoint, channel: str, number: int, item: Any) -> None:
        if link.cut:
            return
        if link.intact and (link.stuck or link.asleep or self.blocked(*link.ends)):
            link.stuck.append((to, channel, number, item))
        else:
            to.process._run(self._deliver, (link, to, channel, number, item))

    def _deliver(self, link: Link, to: Endpoint, channel: str, number: int, item: Any) -> None:
        if not link.believed_by(to):
            return
        if number and link.intact:
            sender = link.other(to).name
            self.world.after(self.world.delay(), self._acknowledge, link, sender, number)
        to.on_item(link.other(to).name, channel, item)

    def _acknowledge(self, link: Link, sender: str, number: int) -> None:
        if link.intact and link.asleep:  # it is said when the link goes on
            self.world.after(LOOK, self._acknowledge, link, sender, number)
        elif link.intact and not self.blocked(*link.ends):
            link.sent[sender].pop(number, None)

    # --- loss

    def give_up(self, link: Link, end: Endpoint, reason: str, report: bool = True) -> None:
        """`end` drops the link; the other end notices in a while."""
        if not link.believed_by(end):
            return
        other = link.other(end)
        del end.links[other.name]
        self._break(link)
        if report:
            lost = list(link.sent.get(end.name, {}).values())
            end.on_link_lost(other.name, reason, lost)

    def break_link(self, link: Link) -> None:
        """Something on the way resets the connections."""
        if not link.resumes:
            self._break(link)
        elif link.intact and not link.asleep:
            link.asleep = True
            self.world.after(REDIAL + 2 * self.world.delay(), self._wake, link)

    def _wake(self, link: Link) -> None:
        """By whichever end reaches the other."""
        if self.blocked(*link.ends) or not all(end.process.responsive for end in link.ends):
            if link.intact:
                self.world.after(LOOK, self._wake, link)
            return
        link.asleep = False
        self._pass_on(link)

    def _break(self, link: Link, at_once: float = 0.8) -> None:
        """`at_once`: how probable it is that an end notices before it has been silent for long."""
        if not link.intact:
            return
        link.intact = False
        blocked = self.blocked(*link.ends)
        link.cut = blocked or bool(link.stuck) or self.world.chance(0.5)
        for end in link.ends:
            slow = blocked or not self.world.chance(at_once)
            delay = self.world.random.uniform(1.0, link.patience) if slow else self.world.delay()
            if not link.cut:  # what was sent before the end comes before it
                coming = [at for (to, _), at in link.last.items() if to == end.name]
                delay = max([delay, *(at - self.world.now for at in coming)])
            end.process.after(delay, self.give_up, link, end, "the connection broke")

    def died(self, endpoint: Endpoint) -> None:
        """The endpoint is gone without a word. To a peer its link seems to sleep, until something
        else answers at its address."""
        del self.endpoints[endpoint.name]
        for link in self.links:
            if endpoint in link.ends:
                self._break(link, at_once=0.2 if link.resumes else 0.8)

    def part(self, number: int, left: frozenset[str], right: frozenset[str]) -> None:
        self.partitions[number] = left, right

    def heal(self, number: int) -> None:
        del self.partitions[number]
        for link in self.links:
            if not link.asleep and not self.blocked(*link.ends):
                link.silent_since = None  # a sign of life gets through at once
                self._pass_on(link)

    def _pass_on(self, link: Link) -> None:
        """What has waited for the link to be whole again."""
        stuck, link.stuck = link.stuck, []
        for to, channel, frame, item in stuck:
            key = (to.name, channel)
            arrival = max(self.world.now + self.world.delay(), link.last[key])
            link.last[key] = arrival
            delay = arrival - self.world.now
            self.world.after(delay, self._arrive, link, to, channel, frame, item)

    def _watch(self) -> None:
        """Each end notices when it has heard nothing for too long; a frozen one can't."""
        self.links = [
            link for link in self.links if link.intact or any(map(link.believed_by, link.ends))
        ]
        for link in self.links:
            frozen = [end for end in link.ends if not end.process.responsive]
            if not frozen and not link.asleep and not self.blocked(*link.ends):
                link.silent_since = None
                continue
            if link.silent_since is None:
                link.silent_since = self.world.now
            silent = self.world.now - link.silent_since
            if link.intact and silent > link.patience:
                for end in link.ends:
                    end.process._run(self.give_up, (link, end, f"silent for {silent:.1f} s"))
        self.world.after(WATCH, self._watch)
