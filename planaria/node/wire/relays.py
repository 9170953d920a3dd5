"""Relayed connections: a third member forwards between two that can't reach each other.

To a link it is a connection like any other: two ordered streams (connection.py). Their data go as
frames on the links that both ends have with the relay, which forwards them without parsing: kind
"call" for the handshake and the messages, kind "relayed" for the chunks. The former travel as
messages, by the control streams of those links.
`fields`: {"to": node} towards the relay, {"from": node} from it, "call": id of the connection,
"say": its type: hello, answer, item; refused, whose payload is a gRPC status's name and a sentence;
or over, which with an empty `call` ends any connection of the two.

A relay serves the pairs that the view gives it. It holds at most `LIMIT` bytes of chunks and
`CALL_LIMIT` of messages in each direction of a pair. Beyond that, or without a link to the other
end, it ends the connection, and the two begin another.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from planaria.node.wire.frame_format import Frame, Payload, buffers_of
from planaria.node.wire.session import DialRefused

LIMIT: Final = 48 << 20
CALL_LIMIT: Final = 16 << 20
KINDS: Final = ("call", "relayed")


class Relay(NamedTuple):
    """The member `via` relays for `a` and `b`."""

    a: str
    b: str
    via: str


class RelayStream:
    """One of the two streams of a relayed connection: reads yield what the peer writes."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read(self) -> bytes | None:
        return await self._came.get()

    async def write(self, data: bytes, /) -> None:
        self._send(data)

    def put(self, data: bytes | None) -> None:
        self._came.put_nowait(data)


@dataclass(eq=False)
class Call:
    """A relayed connection with `peer`, perhaps not answered yet."""

    peer: str
    name: str
    streams: dict[str, RelayStream]
    answer: asyncio.Future[str] = field(default_factory=asyncio.Future)
    over: bool = False

    def end(self, why: str) -> None:
        if not self.over:
            self.over = True
            for stream in self.streams.values():
                stream.put(None)
            if not self.answer.done():
                self.answer.set_exception(DialRefused("UNAVAILABLE", why))
                self.answer.exception()  # marked as retrieved: perhaps never awaited


class Relays:
    """The relays of one node, and the pairs that it relays for. `send` calls its callback when the
    frame has arrived, and returns False without a link."""

    def __init__(
        self,
        node: str,
        send: Callable[[str, Frame, Callable[[], None] | None], bool],
        called: Callable[[Call, str], None],
    ) -> None:
        """`called` gets each call that a peer begins, and the peer's hello."""
        self.node, self._send, self._called = node, send, called
        self._vias: dict[str, str] = {}
        self._pairs: list[frozenset[str]] = []
        self._calls: dict[str, Call] = {}  # by peer
        self.held: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Bytes that wait here for the second node, by (sender, receiver, kind)."""

    def set(self, relays: Iterable[Relay]) -> None:
        """Set the relays of the newest view."""
        relays = list(relays)
        self._pairs = [frozenset((r.a, r.b)) for r in relays if r.via == self.node]
        former, self._vias = self._vias, {}
        for relay in relays:
            if self.node in (relay.a, relay.b):
                self._vias[relay.b if relay.a == self.node else relay.a] = relay.via
        for peer, via in former.items():
            if self._vias.get(peer) != via and (call := self._calls.pop(peer, None)) is not None:
                call.end(f"{via} carries for {self.node} and {peer} no more")

    @property
    def peers(self) -> list[str]:
        """The peers that are reached through relays."""
        return sorted(self._vias)

    def via(self, peer: str) -> str:
        """The relay to `peer`; "": none."""
        return self._vias.get(peer, "")

    # --- at the ends

    def call(self, peer: str, hello: str) -> Call:
        """Call a peer by its relay; `Call.answer` will have its reply. Raises DialRefused."""
        call = self._begin(peer, f"{self.node} {hello}")
        if not self._say(call, "hello", hello.encode()):
            self.hang_up(call)
            raise DialRefused("UNAVAILABLE", f"there is no link to {self.via(peer)} either")
        return call

    def answer(self, call: Call, hello: str) -> None:
        self._say(call, "answer", hello.encode())

    def refuse(self, call: Call, code: str, sentence: str) -> None:
        self._say(call, "refused", f"{code} {sentence}".encode())

    def hang_up(self, call: Call) -> None:
        if not call.over:
            self._say(call, "over", b"")
            call.end("it is over")
        if self._calls.get(call.peer) is call:
            del self._calls[call.peer]

    def _begin(self, peer: str, name: str) -> Call:
        if (former := self._calls.get(peer)) is not None:
            former.end("another one has begun")
        call = self._calls[peer] = Call(peer, name, {})
        for stream, kind in zip(("Control", "Bulk"), KINDS, strict=True):
            call.streams[stream] = RelayStream(partial(self._send_item, call, kind))
        return call

    def _send_item(self, call: Call, kind: str, data: bytes) -> None:
        if not call.over and not self._say(call, "item", data, kind):
            call.end(f"the link to {self.via(call.peer)} is lost")

    def _say(self, call: Call, say: str, payload: bytes, kind: str = "call") -> bool:
        fields = {"to": call.peer, "call": call.name, "say": say}
        frame = Frame(kind, (0, 0), fields, [], payload)
        return self._send(self.via(call.peer), frame, None)

    def _came(self, sender: str, peer: str, frame: Frame) -> None:
        """Handle a frame of `peer` that `sender` has relayed."""
        name, say = frame.fields.get("call"), frame.fields.get("say")
        call = self._calls.get(peer)
        if not isinstance(name, str):
            return
        if self._vias.get(peer) != sender:
            if say == "hello":  # the view with the relay may be late: the peer retries
                fields = {"to": peer, "call": name, "say": "refused"}
                why = f"UNAVAILABLE {self.node} knows of no relay {sender}".encode()
                self._send(sender, Frame("call", (0, 0), fields, [], why), None)
            return
        if say == "hello" and frame.kind == "call":
            self._called(self._begin(peer, name), _text(frame.payload))
        elif call is None or name not in (call.name, ""):
            return
        elif say == "answer" and not call.answer.done():
            call.answer.set_result(_text(frame.payload))
        elif say == "refused" and not call.answer.done():
            code, _, sentence = _text(frame.payload).partition(" ")
            call.answer.set_exception(DialRefused(code, sentence))
        elif say == "item":
            stream = call.streams["Control" if frame.kind == "call" else "Bulk"]
            stream.put(b"".join(buffers_of(frame.payload)))
        elif say == "over":
            call.end(_text(frame.payload) or f"{peer} has ended it")
            self.hang_up(call)

    def lost(self, node: str) -> None:
        """End all calls through `node`: the link to it is lost."""
        for call in [call for call in self._calls.values() if self.via(call.peer) == node]:
            call.end(f"the link to {node} is lost")
            self.hang_up(call)
        for key in [key for key in self.held if node in key]:
            del self.held[key]
        for pair in self._pairs:
            if node in pair:
                (other,) = pair - {node}
                self._over(other, node, "", f"{self.node} has lost its link to {node}")

    # --- as a relay

    def on_frame(self, sender: str, frame: Frame) -> None:
        """Handle a received frame of one of `KINDS`."""
        to, by = frame.fields.get("to"), frame.fields.get("from")
        if isinstance(by, str):
            self._came(sender, by, frame)
        elif isinstance(to, str):
            self._pass_on(sender, to, frame)

    def _pass_on(self, sender: str, to: str, frame: Frame) -> None:
        """Forward a frame, or end the two nodes' connection if that is impossible."""
        name = str(frame.fields.get("call"))
        if frozenset((sender, to)) not in self._pairs:
            self._over(sender, to, name, f"{self.node} does not carry for {sender} and {to}")
            return
        size, key = frame.size, (sender, to, frame.kind)
        if self.held[key] + size > (CALL_LIMIT if frame.kind == "call" else LIMIT):
            why = f"{self.node} holds {self.held[key]} bytes for {to} already"
            self._over(sender, to, name, why)
            self._over(to, sender, name, why)
            return
        fields = {"from": sender, "call": name, "say": frame.fields.get("say")}
        onward = Frame(frame.kind, (0, 0), fields, [], frame.payload)
        self.held[key] += size
        if not self._send(to, onward, partial(self._passed, key, size)):
            del self.held[key]
            self._over(sender, to, name, f"{self.node} has no link to {to}")

    def _passed(self, key: tuple[str, str, str], size: int) -> None:
        """Note that a forwarded frame has arrived, and is held no more."""
        if key in self.held:
            self.held[key] = max(0, self.held[key] - size)
            if not self.held[key]:
                del self.held[key]

    def _over(self, node: str, peer: str, name: str, why: str) -> None:
        """Tell `node` that its connection with `peer` is over."""
        fields = {"from": peer, "call": name, "say": "over"}
        self._send(node, Frame("call", (0, 0), fields, [], why.encode()), None)


def _text(payload: Payload) -> str:
    return b"".join(buffers_of(payload)).decode(errors="replace")
