"""The seats of one node, and the routing of messages and frames to them.

Links lead from node to node, so messages and frames name both seats. Two seats of one node exchange
them without a link. Pure, as the agents are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT, Cause
from planaria.node.agent import TO_MEMBER, Agent
from planaria.node.ports import Compute, Net, Priority
from planaria.node.state.weight_pins import PIN
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.budget import Budget
from planaria.node.wire.frame_format import Frame, WireError, buffers_of
from planaria.node.wire.seat_names import node_of, seat_id, seat_name, seated

log = logging.getLogger(__name__)

MOST_EARLY = 16 << 20
"""Maximum bytes of one peer's messages that wait for seats or views to come."""
VIEW_TO_COME = 10.0
"""Seconds that a message waits for its view. The sender of a query repeats it."""

A = TypeVar("A", bound=Agent)
T = TypeVar("T")

OBSERVER = "?"
"""Prefix of an observer's name, which stands where names of seats do."""
OBSERVER_MESSAGES: Final = frozenset(
    ["pin_request", "state_request", "shard_request", "log_request"]
)
"""Messages that an observer may send."""


class SenselessError(WireError):
    """A peer's message makes no sense here, in a way that wasn't foreseen."""

    cause = NUMBERS


class _EarlyMessage(NamedTuple):
    """A message for a seat that may have to wait for the seat, or for its view."""

    since: float
    sender: str
    message: pb.Message

    def waits_for(self, view: registry.View, now: float) -> bool:
        """Whether the message waits for its view. After too long, that view is taken not to
        exist."""
        return self.message.ballot.view > view.number and now < self.since + VIEW_TO_COME


@contextmanager
def _handling(peer: str, item: str | None) -> Iterator[None]:
    """Turns errors in handling a peer's item into SenselessError: none crashes this node."""
    try:
        yield
    except Exception as error:
        log.exception("can't handle a %s from %s", item, peer)
        reason = f"{item} that can't be handled: {type(error).__name__}: {error}"
        raise SenselessError(reason) from error


def _is_drivers(message: pb.Message) -> bool:
    """Whether only a driver may send that message."""
    return message.WhichOneof("body") in TO_MEMBER | {"inquiry"}


class Seats(Generic[A]):
    """The seats of one node, to which its links lead."""

    def __init__(
        self,
        node: str,
        links: Net,
        tell_observer: Callable[[str, pb.Message | Frame], None] = lambda _, __: None,
        log: Callable[[pb.LogRequest], pb.LogLines] = lambda _: pb.LogLines(),
    ) -> None:
        """`tell_observer` gets items for an observer of this node, by its name; `log` returns log
        lines of the node."""
        self.node, self.links, self._tell_observer = node, links, tell_observer
        self._log = log
        self.agents: dict[str, A] = {}  # by name
        self.view = registry.View()  # as they see it
        self._building: set[str] = set()
        self._given_back: set[str] = set()
        self._early: list[_EarlyMessage] = []
        self._early_bytes = Budget(MOST_EARLY)

    def viewed(
        self, view: registry.View, now: float
    ) -> tuple[Mapping[str, registry.Seat], Mapping[str, A]]:
        """Takes in the registry's view, which has this node. Returns the seats to be built now, and
        the agents of seats that were given back, by name, to be closed."""
        own = next(member for member in view.members if member.node == self.node)
        named = {seat_name(seat): seat for seat in own.seats}
        self.view = seated(view)
        given_back = sorted((self.agents.keys() | self._building) - named.keys())
        self._given_back |= set(given_back)
        to_build = {
            name: seat
            for name, seat in named.items()
            if name not in self.agents and name not in self._building
        }
        self._building = (self._building - set(given_back)) | to_build.keys()
        closed = {name: self.agents.pop(name) for name in given_back if name in self.agents}
        for agent in list(self.agents.values()):
            agent.viewed(self.view, now)
        self._deliver_early(now)
        return to_build, closed

    def tick(self, now: float) -> None:
        if self._early and now >= self._early[0].since + VIEW_TO_COME:
            self._deliver_early(now)
        for agent in list(self.agents.values()):
            agent.tick(now)

    def built(self, name: str, agent: A, now: float) -> bool:
        """The seat's agent is ready, and receives waiting messages. False: the seat was given back
        meanwhile."""
        if name not in self._building:
            return False
        self._building.remove(name)
        self.agents[name] = agent
        agent.viewed(self.view, now)
        self._deliver_early(now)
        return True

    def was_given_back(self, name: str) -> bool:
        return name in self._given_back

    # --- from other nodes

    def on_message(self, peer: str, message: pb.Message, now: float) -> None:
        """Delivers a peer's message to the seat that it names. Raises SenselessError."""
        sender = seat_id(peer, message.sender)
        if message.seat in self._building and message.WhichOneof("body") == "query":
            not_yet = pb.Message(ballot=message.ballot, account=pb.Account(computing=True))
            SeatNet(self, message.seat).send(sender, not_yet)
        self._handle(_EarlyMessage(now, sender, message), now)

    def _handle(self, early: _EarlyMessage, now: float) -> None:
        """Delivers a message to a seat. Raises SenselessError if it can't be handled. If the view's
        driver has sent it, this node is at fault and crashes: the driver belongs to the run's
        owner."""
        try:
            with _handling(early.sender, early.message.WhichOneof("body")):
                self._deliver(early, now)
        except SenselessError as error:
            agent = self.agents.get(early.message.seat)
            by_driver = early.sender == self.view.driver and _is_drivers(early.message)
            if agent is None or not by_driver:
                raise
            agent.crashed(error)

    def _deliver(self, early: _EarlyMessage, now: float) -> None:
        _, sender, message = early
        name = message.seat
        if name.startswith(OBSERVER):
            message.sender = sender
            self._tell_observer(name, message)
        elif message.WhichOneof("body") == "log_request":
            node, _, asker = sender.partition("/")
            if asker.startswith(OBSERVER):
                lines = self._log(message.log_request)
                self.links.send(node, pb.Message(seat=asker, log_lines=lines))
        elif name in self._building or (
            early.waits_for(self.view, now) and (name not in self.agents or _is_drivers(message))
        ):
            self._wait(early)
        elif (agent := self.agents.get(name)) is not None:
            agent.on_message(sender, message)

    def _wait(self, early: _EarlyMessage) -> None:
        """Keeps a driver's message whose view, or seat, this node doesn't have yet. One that
        exceeds the budget is dropped: its sender repeats it if it needs an answer."""
        if not self._early_bytes.spend(node_of(early.sender), early.message.ByteSize()):
            self._early.append(early)

    def _deliver_early(self, now: float) -> None:
        """Delivers waiting messages; those that still have to wait are kept."""
        waiting, self._early = self._early, []
        self._early_bytes.clear()
        for early in waiting:
            try:
                self._handle(early, now)
            except SenselessError as error:  # the link may be another one by now
                self.agents[early.message.seat].accuse(early.sender, str(error), error.cause)

    def on_frame(self, peer: str, frame: Frame, now: float) -> None:
        """Gives a peer's frame to its seat or observer; for a seat to be it is dropped, as it
        belongs to what began without that. Raises SenselessError."""
        with _handling(peer, f"frame of kind {frame.kind!r:.40}"):
            sender, agent = seat_id(peer, frame.sender), self.agents.get(frame.seat)
            if frame.seat.startswith(OBSERVER):
                self._tell_observer(frame.seat, replace(frame, sender=sender))
            elif agent is not None and frame.sender.startswith(OBSERVER):
                agent.observers.compute(sender, frame)
            elif agent is not None:
                agent.on_frame(sender, frame)

    def on_observer_gone(self, observer: str) -> None:
        """Forgets the pins of an observer that is gone; other nodes' seats notice its silence."""
        for agent in self.agents.values():
            agent.observers.pins.forget(seat_id(self.node, observer))

    def on_observer_frame(self, observer: str, frame: Frame, now: float) -> None:
        """Passes a frame of this node's observer to a seat, of any node, to compute with."""
        node, _, name = frame.seat.partition("/")
        frame = replace(frame, seat=name, sender=observer)
        if frame.kind == "state":  # which delays nothing else on a link
            if node == self.node:
                self.on_frame(node, frame, now)
            else:
                self.links.send(node, frame)

    def on_observer_message(self, observer: str, message: pb.Message, now: float) -> None:
        """Passes a message of this node's observer to the seat, of any node, that it names.
        Messages not allowed to observers have no effect."""
        body, to = message.WhichOneof("body"), message.seat
        node, _, name = to.partition("/")
        # An observer may request pinned weights only; other states are for nodes.
        if body not in OBSERVER_MESSAGES or getattr(getattr(message, body), "kind", PIN) != PIN:
            return
        message.seat, message.sender = name, observer
        if body == "log_request" and node == self.node:
            lines = self._log(message.log_request)
            self._tell_observer(observer, pb.Message(sender=to, log_lines=lines))
        elif node == self.node and self.has(name):
            self._deliver(_EarlyMessage(now, seat_id(node, observer), message), now)
        elif node == self.node or not self.links.send(node, message):
            cause = "no such seat here" if node == self.node else f"no link from {self.node} to it"
            request = message.pin_request
            refusal = pb.Pinned(transfer=request.transfer, error=f"there is {cause}", unheard=True)
            if body == "pin_request":
                self._tell_observer(observer, pb.Message(sender=to, pinned=refusal))
            elif body == "log_request":
                lines = pb.LogLines(error=refusal.error)
                self._tell_observer(observer, pb.Message(sender=to, log_lines=lines))
            self.links.demand(node)

    def on_link_up(self, peer: str, now: float) -> None:
        for seat in self._seats_of(peer):
            for agent in list(self.agents.values()):
                agent.on_link_up(seat, now)

    def on_link_lost(
        self,
        peer: str,
        reason: str,
        unacknowledged: Sequence[Frame],
        now: float,
        cause: Cause = SILENT,
    ) -> None:
        for name, agent in list(self.agents.items()):
            own = [frame for frame in unacknowledged if frame.sender == name]
            for seat in self._seats_of(peer):
                lost = [frame for frame in own if seat_id(peer, frame.seat) == seat]
                agent.on_link_lost(seat, reason, lost, now, cause)

    def _seats_of(self, peer: str) -> list[str]:
        """The peer's seats in the newest view; if it has none, the node itself."""
        seats = [m.node for m in self.view.members if m.seats and node_of(m.node) == peer]
        return seats or [peer]

    # --- between seats

    def pass_on(self, sender: str, name: str, item: pb.Message | Frame) -> bool:
        """Delivers an item from one seat to another soon. Copies it, since the sender may change
        its buffers. False: there is no such seat."""
        agent = self.agents.get(name)
        if isinstance(item, Frame):
            payload = tuple(memoryview(bytearray(part)) for part in buffers_of(item.payload))
            frame = replace(item, seat=name, sender=sender, payload=payload)
            hear = partial(self.on_frame, self.node, frame)
        else:
            message = pb.Message()
            message.CopyFrom(item)
            message.seat, message.sender = name, sender
            hear = partial(self.on_message, self.node, message)
        if agent is None:
            hear(0.0)  # that is, when it is built, or at once for an observer
        else:
            agent.exchanges.call_soon(lambda: hear(agent.exchanges.now))
        return self.has(name) or name.startswith(OBSERVER)

    def has(self, name: str) -> bool:
        """Whether there is such a seat, or will be soon."""
        return name in self.agents or name in self._building


class SeatNet:
    """The links of a node, for one of its seats: the port `Net`. Peers are seats."""

    def __init__(self, seats: Seats[Any], name: str) -> None:
        self._seats, self._name = seats, name

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        node, _, name = peer.partition("/")
        if self._seats.was_given_back(self._name):
            return False
        if node == self._seats.node:
            return self._seats.pass_on(self._name, name, item)
        if isinstance(item, Frame):
            item = replace(item, seat=name, sender=self._name)  # it may go to others, too
        else:
            item.seat, item.sender = name, self._name
        return self._seats.links.send(node, item)

    def demand(self, peer: str) -> None:
        if (node := node_of(peer)) != self._seats.node:
            self._seats.links.demand(node)

    def linked(self, peer: str) -> bool:
        node, _, name = peer.partition("/")
        if node == self._seats.node:
            return self._seats.has(name)
        return self._seats.links.linked(node)

    def unacknowledged_by(self, peer: str) -> int:
        node = node_of(peer)
        return 0 if node == self._seats.node else self._seats.links.unacknowledged_by(node)


class SeatCompute:
    """The compute thread of a node, for one of its seats: the port `Compute`."""

    def __init__(self, seats: Seats[Any], name: str, compute: Compute) -> None:
        self._seats, self._name, self._compute = seats, name, compute

    @property
    def now(self) -> float:
        return self._compute.now

    @property
    def computed(self) -> int:
        return self._compute.computed

    @property
    def computing(self) -> bool:
        return self._compute.computing

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        """The result is dropped once the seat is given back."""
        self._compute.post(work, partial(self._tell, then), priority)

    def _tell(self, then: Callable[[T | Exception], None], result: T | Exception) -> None:
        if not self._seats.was_given_back(self._name):
            then(result)
