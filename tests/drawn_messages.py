"""Random messages and frames that a faulty peer may send, and damaged bytes of real ones.

Everything is drawn from one `random.Random`, so a seed determines it. Results are of the right type
(`Drawing.message`, `Drawing.frame`) or not even that (`Drawing.head`, `Drawing.damaged`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeVar

import msgpack
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from xxhash import xxh3_64_intdigest

from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import (
    CODECS,
    FLOATING,
    KINDS,
    NAME_LIMIT,
    SIZES,
    Codec,
    Descriptor,
    Frame,
    encoded_size,
)

AnyMessage = TypeVar("AnyMessage", bound=Message)

EDGES: Final = (0, 1, 2, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e300, -1e300, math.inf, -math.inf, math.nan)
WORDS: Final = (
    "",
    "a",
    "a\0b",
    "two\nlines\r",
    "\x1b[2J\x1b]0;title\x07",
    "../../etc/passwd",
    "unix:/var/run/docker.sock",
    "127.0.0.1:1",
    "\u202e\ufeff\U0001f40c",
    '{"kind": "step"}',
    "%s{0}$HOME",
    "é" * 300,
)
HUGE: Final = 1 << 20  # characters or bytes
RARELY: Final = 0.002  # probability of something huge, for each word and each list
LEAVES: Final = 2000  # values in a message, apart from a long list
LONG: Final = 5000  # elements of a huge list
DEEP: Final = 4  # levels of messages in messages

BODIES: Final = [field.name for field in pb.Message.DESCRIPTOR.oneofs_by_name["body"].fields]

_BITS: Final = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31),  # proto3 accepts numbers without a name
}


class Drawing:
    """Draws messages, frames and values. `names` and `numbers` are those of the swarm: about half
    of the drawn ones are among them, to pass first checks. `rarely`: probability of huge values."""

    def __init__(
        self,
        random: Random,
        names: Sequence[str] = (),
        numbers: Sequence[int] = (),
        rarely: float = RARELY,
    ) -> None:
        self.random, self.rarely = random, rarely
        self.names, self.numbers = tuple(names), tuple(numbers)
        self._left = 0  # values that the message may still have

    # --- protobuf

    def message(self, kind: type[AnyMessage]) -> AnyMessage:
        """A message of that kind; each field is unset, at an edge or anywhere."""
        self._left = LEAVES
        message = kind()
        self._fill(message, DEEP)
        return message

    def envelope(self, body: str = "") -> pb.Message:
        """A message of a link, without its seal; `body`: one of `BODIES`, or empty for any."""
        self._left = LEAVES
        message = pb.Message(seat=self.word(), sender=self.word())
        self._fill(message.ballot, DEEP)
        part = getattr(message, body or self.random.choice(BODIES))
        part.SetInParent()
        self._fill(part, DEEP)
        return message

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._left <= 0 or self.random.random() < 0.25:
                continue
            if field.message_type is not None:
                self._fill_messages(message, field, depth)
            elif field.is_repeated:
                values = [self._scalar(field) for _ in range(self._length())]
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, self._scalar(field))

    def _fill_messages(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if not depth:
            return
        part = getattr(message, field.name)
        if not field.is_repeated:
            part.SetInParent()
            self._fill(part, depth - 1)
            return
        for _ in range(self._length()):
            added = part.add()
            if self._left > 0:
                self._fill(added, depth - 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        self._left -= 1
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                return self.data() if field.type == FieldDescriptor.TYPE_BYTES else self.word()
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self.real()
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case kind:
                if field.enum_type is not None and self.random.random() < 0.8:
                    return self.random.choice(field.enum_type.values).number
                return self.whole(*_BITS[kind])

    def _length(self) -> int:
        if self.random.random() < self.rarely:
            return LONG
        return self.random.choice((0, 1, 1, 2, 3, 8))

    # --- values

    def whole(self, least: int = 0, end: int = 2**64) -> int:
        known = [number for number in self.numbers if least <= number < end]
        if known and self.random.random() < 0.5:
            number = self.random.choice(known) + self.random.choice((0, 0, 0, 1, -1))
        else:
            number = self.random.choice((*EDGES, self.random.getrandbits(64), least, end - 1))
        return min(max(number, least), end - 1)

    def real(self) -> float:
        return self.random.choice((*FLOATS, self.random.uniform(0, 10), self.random.gauss(0, 1e6)))

    def word(self) -> str:
        if self.random.random() < self.rarely:
            return "x" * HUGE
        if self.names and self.random.random() < 0.5:
            return self.random.choice(self.names)
        return self.random.choice(WORDS)

    def data(self) -> bytes:
        if self.random.random() < self.rarely:
            return bytes(HUGE)
        return self.random.randbytes(self.random.choice((0, 1, 8, 16, 32, 64, 300)))

    # --- frames

    def frame(self, kind: str = "") -> Frame:
        """A frame whose head and payload are well-formed, with random contents."""
        tensors = [self._tensor() for _ in range(self.random.choice((0, 1, 1, 2)))]
        return Frame(
            kind or self.random.choice(KINDS),
            (self.whole(), self.whole()),
            {self._name(): self.anything() for _ in range(self.random.randrange(5))},
            [descriptor for descriptor, _ in tensors],
            b"".join(data for _, data in tensors) if tensors else self.data(),
            self._name(),
            self._name(),
        )

    def _tensor(self) -> tuple[Descriptor, bytes]:
        dtype = self.random.choice(list(SIZES))
        codec: Codec = self.random.choice(CODECS) if dtype in FLOATING else "none"
        shape = tuple(self.random.choice((0, 1, 2, 7)) for _ in range(self.random.randrange(4)))
        data = self.random.randbytes(encoded_size(math.prod(shape), dtype, codec))
        return Descriptor(dtype, shape, codec, xxh3_64_intdigest(data), len(data)), data

    def head(self) -> bytes:
        """The head of a frame as msgpack, not always a valid one."""
        parts: list[Any] = msgpack.unpackb(self.frame().head(), strict_map_key=False)
        for _ in range(self.random.choice((0, 1, 1, 2))):
            parts[self.random.randrange(len(parts))] = self.anything()
        if self.random.random() < 0.1:
            parts = parts[: self.random.randrange(len(parts))]
        packed: bytes = msgpack.packb(parts)
        return packed

    def anything(self, depth: int = 3) -> Any:
        """A small value of a type that msgpack knows."""
        kinds: list[Callable[[], Any]] = [self.whole, self.real, self._name]
        kinds.append(lambda: self.data()[:NAME_LIMIT])
        kinds += [lambda: None, lambda: self.random.random() < 0.5, lambda: -self.whole(0, 2**63)]
        if depth:
            several = range(self.random.randrange(4))
            kinds.append(lambda: [self.anything(depth - 1) for _ in several])
            kinds.append(lambda: {self._name(): self.anything(depth - 1) for _ in several})
        return self.random.choice(kinds)()

    def _name(self) -> str:
        return self.word()[:NAME_LIMIT]

    # --- damage

    def damaged(self, data: bytes) -> bytes:
        """The data with bits flipped, or pieces left out, doubled or inserted; at times
        unchanged."""
        for _ in range(self.random.choice((0, 1, 1, 2, 5))):
            data = self._damaged_once(bytearray(data))
        return data

    def _damaged_once(self, data: bytearray) -> bytes:
        at, end = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
        match self.random.randrange(5):
            case 0:
                del data[at:end]
            case 1:
                data[at:at] = data[at:end]
            case 2:
                data[at:at] = self.random.randbytes(self.random.randrange(9))
            case _:
                if data:
                    data[at % len(data)] ^= 1 << self.random.randrange(8)
        return bytes(data)
