"""`planaria logs`: the last lines of a node's log, requested by an observer client.

The answer is untrusted text: it is cut to a size, and control characters are removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.neighbours import place_of, stages_of
from planaria.bootstrap.registry_pb2 import Description, Member
from planaria.node.report.log_stream import LONGEST, MOST_KEPT
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.observer_client import PATIENCE, Converse, ObserverClient
from planaria.node.wire.seat_names import seat_id

LOOK: Final = 1.0
"""Seconds between two requests for new lines."""
TRIED: Final = 4
"""Limit of relaying nodes to try for a node that can't be dialled."""


class NodeRoute(NamedTuple):
    """Route to a node: itself, or a relaying node, and its address."""

    node: str
    address: str


def find_member(name: str, description: Description) -> Member:
    """The member that a name means: a full name, the part before or after the last hyphen, or a
    prefix. Raises UserError."""
    members = description.members
    tests: list[Callable[[str], bool]] = [
        lambda node: node == name,
        lambda node: node.rpartition("-")[0] == name,
        lambda node: node.rpartition("-")[2] == name,
        lambda node: node.startswith(name),
    ]
    matches = ([entry.member for entry in members if fits(entry.member.node)] for fits in tests)
    matching = next(filter(None, matches), [])
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(
            f"{name} matches several nodes, give more of the name: {names_of(matching)}"
        )
    evicted = [entry for entry in description.evictions if entry.member.node.startswith(name)]
    reason = f" any more ({evicted[-1].reason})" if evicted else ""
    listing = names_of([entry.member for entry in members]) or "none yet"
    raise UserError(f"there is no node {readable(name)}{reason}. Name one of: {listing}")


def names_of(members: Sequence[Member]) -> str:
    return ", ".join(f"{member.node} ({place_of(member)})" for member in members)


def routes_to(member: Member, members: Sequence[Member]) -> list[NodeRoute]:
    """Routes to try: the member itself, if it can be dialled, else dialable nodes with a likely
    link to it, the likeliest first."""
    if member.address:
        return [NodeRoute(member.node, member.address)]

    def distance(other: Member) -> int:
        own, theirs = stages_of(member) or [0], stages_of(other)
        return min(abs(a - b) for a in own for b in theirs)

    dialable = [other for other in members if other.address and other.seats]
    return [
        NodeRoute(other.node, other.address) for other in sorted(dialable, key=distance)[:TRIED]
    ]


class LogReader:
    """Reader of one node's log."""

    def __init__(self, converse: Converse, member: Member, routes: Sequence[NodeRoute]) -> None:
        self._seat, self._routes = seat_id(member.node, ""), list(routes)
        self._answers: asyncio.Queue[pb.LogLines] = asyncio.Queue()
        self._client = ObserverClient(converse, self._answered, self._lost)
        self._route: NodeRoute | None = None
        self._last = 0  # number of the newest line read

    async def lines(self, most: int) -> list[str]:
        """The newest unread lines of the node's log. Raises UserError when the node can't be
        reached."""
        reason = f"neither {self._seat[:-1]} nor a node with a link to it can be dialled"
        while self._route or self._routes:
            if self._route is None:
                self._route = self._routes.pop(0)
                self._client.reach(self._seat, *self._route)
            answer = await self._ask(most)
            if not answer.error:
                self._last = answer.last
                return shown_lines(answer.lines, most)
            reason, self._route = readable(answer.error), None
        raise UserError(f"no log of {self._seat[:-1]}: {reason}")

    async def _ask(self, most: int) -> pb.LogLines:
        assert self._route is not None
        request = pb.LogRequest(lines=most, after=self._last)
        self._answers = asyncio.Queue()
        if not self._client.send(self._seat, pb.Message(log_request=request)):
            return pb.LogLines(error=self._client.why(self._seat))
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._answers.get()
        except TimeoutError:
            node, address = self._route
            reason = f"no answer from {node} at {address} within {PATIENCE:g} s"
            return pb.LogLines(error=reason)

    def _answered(self, seat: str, item: pb.Message | Frame) -> None:
        if seat == self._seat and isinstance(item, pb.Message) and item.HasField("log_lines"):
            self._answers.put_nowait(item.log_lines)

    def _lost(self, seat: str, reason: str) -> None:
        self._answers.put_nowait(pb.LogLines(error=reason))

    async def close(self) -> None:
        await self._client.close()


def shown_lines(lines: Sequence[str], most: int) -> list[str]:
    """The lines of a node's untrusted log to show."""
    shown, left = list[str](), 2 * MOST_KEPT
    for line in reversed(lines[-most:]):
        line = line[: 2 * LONGEST]
        left -= len(line) + 1
        if left < 0:
            break
        shown.append(readable(line))
    return shown[::-1]


async def print_logs(
    client: RegistryClient,
    converse: Callable[[str], Converse],
    name: str,
    most: int,
    follow: bool,
    say: Callable[[str], None],
) -> None:
    """Print the last lines of a node's log and, with `follow`, later ones until Ctrl-C. `converse`:
    connects to nodes of a run. Raises UserError, RegistryUnreachable, JoinRefused."""
    description = await client.describe(PATIENCE)
    member = find_member(name, description)
    routes = routes_to(member, [entry.member for entry in description.members])
    reading = LogReader(converse(description.run), member, routes)
    try:
        for line in await reading.lines(most):
            say(line)
        while follow:
            await asyncio.sleep(LOOK)
            for line in await reading.lines(MOST_KEPT):
                say(line)
    finally:
        await reading.close()
