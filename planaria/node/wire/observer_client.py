"""Client side of observers (observers.py): queries to a run's seats by a process that is no member.

A node that can be dialled is queried directly, any other through a node that has a link to it. A
node that needs the same information queries all seats through itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeAlias

from planaria.bootstrap.address import EVERYWHERE, Reach
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.transport import Broken, Channel, DialledStream, Transport
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame, WireError, parse_message, seal
from planaria.node.wire.greetings import metadata
from planaria.node.wire.link import SERVICE
from planaria.node.wire.observers import FRAME_LIMIT
from planaria.node.wire.seat_names import node_of

log = logging.getLogger(__name__)

PATIENCE: Final = 10.0
"""Seconds within which a node must answer."""
FREE: Final = 1 << 20
"""Bytes of an answer beside its frame."""


class NoAnswerError(Exception):
    """A seat can't be queried, or doesn't answer; the message says why, and names it."""


class ObserverConversation(Protocol):
    """A conversation with one node, about its own seats and those that it has links to."""

    node: str
    address: str  # for display
    lost: str  # reason; "": not lost

    def open(
        self, heard: Callable[[pb.Message], None], ended: Callable[[ObserverConversation], None]
    ) -> None:
        """Start the conversation. `heard` gets each answer; `ended` gets this conversation once it
        is lost. Neither is called before the next turn of the event loop."""

    def send(self, message: pb.Message) -> bool:
        """Send a query. False: the conversation is lost."""

    async def close(self) -> None: ...


Converse: TypeAlias = Callable[[str, str], ObserverConversation]
"""Makes a conversation with a node, given its id and address."""


def over_streams(run: str, credentials: Credentials, reach: Reach = EVERYWHERE) -> Converse:
    """Conversations over gRPC; `reach`: addresses at which nodes may be dialled."""
    transport = GrpcTransport(credentials, _OPTIONS, reach=reach)
    return partial(ObserverStream, run, transport)


_OPTIONS: Final = (
    ("grpc.max_receive_message_length", FRAME_LIMIT + FREE),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class ObserverStream:
    """An observer's conversation with a node, over a stream."""

    def __init__(self, run: str, transport: Transport, node: str, address: str) -> None:
        self.node, self.address = node, address
        self._run, self._transport = run, transport
        self._channel: Channel | None = None
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.lost = ""  # reason; "": not lost

    def open(
        self, heard: Callable[[pb.Message], None], ended: Callable[[ObserverConversation], None]
    ) -> None:
        self._tasks = [asyncio.create_task(self._converse(heard, ended))]

    async def _converse(
        self, heard: Callable[[pb.Message], None], ended: Callable[[ObserverConversation], None]
    ) -> None:
        if why := await self._transport.not_to_dial(self.address):
            self.lost = f"{self.node} is not asked: {why}"
            ended(self)
            return
        self._channel = self._transport.channel(self.address)
        greeting = metadata(self._run, f"onlooker-{secrets.token_hex(4)}", self.node)
        stream = self._channel.stream(f"{SERVICE}/Ask", greeting)
        self._tasks.append(asyncio.create_task(self._speak(stream)))
        await self._listen(stream, heard, ended)

    def send(self, message: pb.Message) -> bool:
        if not self.lost:
            self._unsent.put_nowait(seal(message.SerializeToString()))
        return not self.lost

    async def _speak(self, stream: DialledStream) -> None:
        with suppress(Broken):  # _listen reports the reason
            await stream.accepted()  # an earlier write would hide a refusal
            while True:
                await stream.write(await self._unsent.get())

    async def _listen(
        self,
        stream: DialledStream,
        heard: Callable[[pb.Message], None],
        ended: Callable[[ObserverConversation], None],
    ) -> None:
        why = "it has ended the conversation"
        try:
            while (data := await stream.read()) is not None:
                heard(parse_message(data))
        except WireError as error:
            why = f"it sent an invalid message: {error}"
        except Broken as broken:
            why = broken.details or broken.code
        self.lost = f"{self.node} at {self.address}: {why}"
        ended(self)

    async def close(self) -> None:
        self.lost = self.lost or "the conversation is over"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


class ObserverClient:
    """Conversations with seats. `answered` gets messages and frames, except answers to `pin`, with
    their seat; `lost` gets each seat that can't be queried any more, with the reason."""

    def __init__(
        self,
        converse: Converse,
        answered: Callable[[str, pb.Message | Frame], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._converse = converse
        self._answered, self._lost = answered, lost
        self._conversations: dict[str, ObserverConversation] = {}  # by dialled node
        self._over: list[ObserverConversation] = []  # former ones, lost
        self._by: dict[str, str] = {}  # dialled node, by seat
        self._waiting: dict[int, tuple[str, asyncio.Future[pb.Pinned]]] = {}  # with the seat
        self._numbers = itertools.count(1)

    def reach(self, seat: str, node: str, address: str) -> None:
        """Query this seat by way of `node`, which is dialled at `address`."""
        if (conversation := self._conversations.get(node)) is None or conversation.lost:
            self._over += [conversation] if conversation is not None else []
            self._conversations[node] = self._converse(node, address)
            self._conversations[node].open(self._heard, self._ended)
        self._by[seat] = node

    def send(self, seat: str, item: pb.Message | Frame) -> bool:
        """Send a seat a query. False: the seat can't be queried."""
        conversation = self._conversations.get(self._by.get(seat, ""))
        if conversation is None:
            return False
        if isinstance(item, Frame):
            item = replace(item, seat=seat).in_message()
        item.seat = seat
        return conversation.send(item)

    def why(self, seat: str) -> str:
        """Why the seat can't be queried any more; "": it can."""
        return self._conversations[self._by[seat]].lost

    async def pin(self, seat: str, step: int, exported: bool = False) -> pb.Pinned:
        """Have a seat pin its state of a step, and return its answer. `exported`: the whole model
        of that step has been written. Raises NoAnswerError."""
        number = next(self._numbers)
        answer: asyncio.Future[pb.Pinned] = asyncio.get_running_loop().create_future()
        request = pb.PinRequest(transfer=number, step=step, exported=exported)
        if not self.send(seat, pb.Message(pin_request=request)):
            raise NoAnswerError(self.why(seat))
        self._waiting[number] = seat, answer
        try:
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            conversation = self._conversations[self._by[seat]]
            through = "" if conversation.node == node_of(seat) else f" of {seat} through it"
            raise NoAnswerError(
                f"{conversation.node} at {conversation.address}: no answer{through} in "
                f"{PATIENCE:g} s"
            ) from None
        finally:
            del self._waiting[number]

    def _heard(self, message: pb.Message) -> None:
        match message.WhichOneof("body"):
            case "pinned":
                _, answer = self._waiting.get(message.pinned.transfer, ("", None))
                if answer is not None and not answer.done():
                    answer.set_result(message.pinned)
            case "carried":
                frame = Frame.parse(message.carried.head, message.carried.payload)
                self._answered(message.sender, frame)
            case _:
                self._answered(message.sender, message)

    def _ended(self, conversation: ObserverConversation) -> None:
        log.info("%s", conversation.lost)
        for seat, answer in self._waiting.values():
            if self._by[seat] == conversation.node and not answer.done():
                answer.set_exception(NoAnswerError(conversation.lost))
        for seat, node in self._by.items():
            if node == conversation.node:
                self._lost(seat, conversation.lost)

    async def close(self) -> None:
        conversations = (*self._over, *self._conversations.values())
        await asyncio.gather(*(conversation.close() for conversation in conversations))
