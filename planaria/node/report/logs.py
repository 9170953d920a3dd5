"""`planaria logs`: the last lines of a node's log, requested by an observer client.

The answer is untrusted text: it is cut to a size, and control characters are removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.membership import place_of
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import Description, Member
from planaria.bootstrap.spelling import readable
from planaria.node.report.log_stream import LONGEST, MOST_KEPT
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame
from planaria.node.wire.naming import seat_id
from planaria.node.wire.observer_client import PATIENCE, Converse, ObserverClient

LOOK: Final = 1.0
"""Seconds between two requests for new lines."""
TRIED: Final = 4
"""Limit of relaying nodes to try for a node that can't be dialled."""


class LogsError(Exception):
    """Error of a missing log; the message says why and what to do."""


class NodeRoute(NamedTuple):
    """Route to a node: itself, or a relaying node, and its address."""

    node: str
    address: str


def called(said: str, description: Description) -> Member:
    """The member that a name means: a full name, the part before or after the last hyphen, or a
    prefix. Raises LogsError."""
    members = description.members
    meant: list[Callable[[str], bool]] = [
        lambda node: node == said,
        lambda node: node.rpartition("-")[0] == said,
        lambda node: node.rpartition("-")[2] == said,
        lambda node: node.startswith(said),
    ]
    matches = ([one.member for one in members if fits(one.member.node)] for fits in meant)
    found = next(filter(None, matches), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise LogsError(f"{said} may be any of {listed(found)}")
    gone = [one for one in description.evictions if one.member.node.startswith(said)]
    why = f" any more: {gone[-1].reason}" if gone else ""
    there = listed([one.member for one in members]) or "none yet"
    raise LogsError(f"there is no node {readable(said)}{why}. The nodes are {there}")


def listed(members: Sequence[Member]) -> str:
    return ", ".join(f"{member.node} ({place_of(member)})" for member in members)


def ways_to(member: Member, members: Sequence[Member]) -> list[NodeRoute]:
    """Routes to try: the member itself, if it can be dialled, else dialable nodes with a likely
    link to it, the likeliest first."""
    if member.address:
        return [NodeRoute(member.node, member.address)]

    def distance(other: Member) -> int:
        own, theirs = stages_of(member) or [0], stages_of(other)
        return min(abs(a - b) for a in own for b in theirs)

    dialled = [one for one in members if one.address and one.seats]
    return [NodeRoute(one.node, one.address) for one in sorted(dialled, key=distance)[:TRIED]]


class Reading:
    """Reader of one node's log."""

    def __init__(self, converse: Converse, member: Member, ways: Sequence[NodeRoute]) -> None:
        self._seat, self._ways = seat_id(member.node, ""), list(ways)
        self._answers: asyncio.Queue[pb.LogLines] = asyncio.Queue()
        self._asking = ObserverClient(converse, self._answered, self._lost)
        self._way: NodeRoute | None = None
        self._last = 0  # number of the newest line read

    async def lines(self, most: int) -> list[str]:
        """The newest unread lines. Raises LogsError when the node can't be reached."""
        why = f"{self._seat[:-1]} can't be dialled, nor anybody who has a link to it"
        while self._way or self._ways:
            if self._way is None:
                self._way = self._ways.pop(0)
                self._asking.reach(self._seat, *self._way)
            answer = await self._ask(most)
            if not answer.error:
                self._last = answer.last
                return cut(answer.lines, most)
            why, self._way = readable(answer.error), None
        raise LogsError(f"no log of {self._seat[:-1]}: {why}")

    async def _ask(self, most: int) -> pb.LogLines:
        assert self._way is not None
        request = pb.LogRequest(lines=most, after=self._last)
        self._answers = asyncio.Queue()
        if not self._asking.send(self._seat, pb.Message(log_request=request)):
            return pb.LogLines(error=self._asking.why(self._seat))
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._answers.get()
        except TimeoutError:
            node, address = self._way
            why = f"no answer by {node} at {address} in {PATIENCE:g} s"
            return pb.LogLines(error=why)

    def _answered(self, seat: str, item: pb.Message | Frame) -> None:
        if seat == self._seat and isinstance(item, pb.Message) and item.HasField("log_lines"):
            self._answers.put_nowait(item.log_lines)

    def _lost(self, seat: str, why: str) -> None:
        self._answers.put_nowait(pb.LogLines(error=why))

    async def close(self) -> None:
        await self._asking.close()


def cut(lines: Sequence[str], most: int) -> list[str]:
    """The part of an untrusted answer to show."""
    shown, left = list[str](), 2 * MOST_KEPT
    for line in reversed(lines[-most:]):
        line = line[: 2 * LONGEST]
        left -= len(line) + 1
        if left < 0:
            break
        shown.append(readable(line))
    return shown[::-1]


async def logs(
    client: RegistryClient,
    converse: Callable[[str], Converse],
    said: str,
    most: int,
    follow: bool,
    say: Callable[[str], None],
) -> None:
    """Print the last lines of a node's log and, with `follow`, later ones until Ctrl-C. `converse`:
    connects to nodes of a run. Raises LogsError, RegistryUnreachable, JoinRefused."""
    description = await client.describe(PATIENCE)
    member = called(said, description)
    ways = ways_to(member, [one.member for one in description.members])
    reading = Reading(converse(description.run), member, ways)
    try:
        for line in await reading.lines(most):
            say(line)
        while follow:
            await asyncio.sleep(LOOK)
            for line in await reading.lines(MOST_KEPT):
                say(line)
    finally:
        await reading.close()
