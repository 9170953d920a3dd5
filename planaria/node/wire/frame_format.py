"""Binary format of frames and chunks.

A frame is a small msgpack head and a payload. The payload is the encoded tensors, concatenated; the
descriptors in the head say how to decode them (without descriptors it is plain bytes). A frame
crosses a link as chunks: protobuf messages of stage.proto, written and read by hand here.

All numbers are little-endian. What is received is checked before memory is spent on it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgpack
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from planaria.bootstrap.registry_pb2 import CHECKSUM, NONFINITE, NUMBERS, SHAPE, Cause
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.model.shape import ModelConfig
    from planaria.node.run_file import WireSection

Codec = Literal["none", "bf16", "fp16", "int8", "int4"]
Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | tuple[Buffer, ...]

CODECS: Final = get_args(Codec)
SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""Bytes of a value, by dtype."""
FLOATING: Final = ("float32", "float16", "bfloat16")
# In order of urgency. A gradient comes early: it frees memory and ends a microbatch. A joiner needs
# a state before the gradients that follow it, of which a slow link holds many.
KINDS: Final = (
    "call",
    "gradient",
    "activation",
    "relayed",
    "average",
    "twin",
    "state",
    "follow",
    "audit",
    "boundary",
    "relearn",
    "probe",
    "copy",
)

BLOCK: Final = 256  # values that share a scale in int8
TILE: Final = 32  # ... in int4
HEAD_LIMIT: Final = 64 << 10  # bytes
PAYLOAD_LIMIT: Final = 4 << 30  # bytes
TENSOR_LIMIT: Final = 4096  # tensors in a frame
DIMENSION_LIMIT: Final = 8
NAME_LIMIT: Final = 64  # characters in the name of a field
SEAT_LIMIT: Final = 192  # ... in the id of a seat, of which its node's takes up to 128
EXTENT_LIMIT: Final = 1 << 48  # values of a tensor, were its empty dimensions of extent 1
FORMS_NAMED: Final = 3  # in an error message
UINT64: Final = 1 << 64


class WireError(ValueError):
    """Bytes, or a tensor, that can't be valid on a link; the message says why. `cause`: what their
    sender is accused of."""

    cause: Cause = SHAPE


class DamagedError(WireError):
    """Bytes that differ from those sent."""

    cause = CHECKSUM


class NonFiniteError(WireError):
    """A tensor with an element that is inf or nan."""

    cause = NONFINITE


class FiguresError(WireError):
    """A description of tensors that is impossible, or makes no sense."""

    cause = NUMBERS


class Form(NamedTuple):
    """The required dtype, shape and codec of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    codec: Codec = "none"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} in codec {self.codec}"


class Descriptor(NamedTuple):
    """Format of a tensor in a payload. msgpack: an array of these five."""

    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    checksum: int  # xxh3_64 of the bytes
    size: int  # bytes

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape, self.codec)

    @classmethod
    def parse(cls, raw: Any) -> Descriptor:
        """Parse a received descriptor. Raises WireError."""
        if not isinstance(raw, list | tuple) or len(raw) != 5:
            raise WireError(f"a descriptor is [dtype, shape, codec, checksum, size], not {raw!r}")
        dtype, shape, codec, checksum, size = raw
        if not isinstance(dtype, str) or dtype not in SIZES:
            raise WireError(f"dtype {dtype!r} is none of {', '.join(SIZES)}")
        if not isinstance(codec, str) or codec not in CODECS:
            raise WireError(f"codec {codec!r} is none of {', '.join(CODECS)}")
        if codec != "none" and dtype not in FLOATING:
            raise WireError(f"codec {codec} is for floating point, not for {dtype}")
        if not isinstance(shape, list | tuple) or len(shape) > DIMENSION_LIMIT:
            raise WireError(f"shape {shape!r} is no list of at most {DIMENSION_LIMIT} numbers")
        if not all(_is_uint64(extent) for extent in shape):
            raise WireError(f"shape {shape!r} has an extent that is no whole number")
        if not _is_uint64(checksum) or not _is_uint64(size):
            raise WireError(f"checksum {checksum!r} or size {size!r} is no whole number of 64 bits")
        if math.prod(extent or 1 for extent in shape) > EXTENT_LIMIT:
            raise WireError(f"shape {shape!r} is of more than {EXTENT_LIMIT} values")
        descriptor = cls(dtype, tuple(shape), codec, checksum, size)  # type: ignore[arg-type]
        expected = encoded_size(descriptor.values, dtype, descriptor.codec)
        if size != expected:
            raise WireError(
                f"a {dtype} tensor of shape {tuple(shape)} in codec {codec} is {expected} bytes, "
                f"not {size}"
            )
        return descriptor


def check_forms(descriptors: Sequence[Descriptor], forms: Sequence[Form]) -> None:
    """Raises WireError unless the tensors have the required forms."""
    actual = [descriptor.form for descriptor in descriptors]
    if actual != list(forms):
        raise WireError(f"{_in_words(actual)}, where {_in_words(forms)} is due")


def _in_words(forms: Sequence[Form]) -> str:
    more = f" and {len(forms) - FORMS_NAMED} more" if len(forms) > FORMS_NAMED else ""
    return (", ".join(map(str, forms[:FORMS_NAMED])) or "no tensor") + more


def encoded_size(count: int, dtype: str, codec: Codec) -> int:
    """Bytes of `count` encoded values of a tensor."""
    match codec:
        case "none":
            return count * SIZES[dtype]
        case "bf16" | "fp16":
            return count * 2
        case "int8":
            return -(-count // BLOCK) * 4 + count
        case "int4":
            return -(-count // TILE) * (2 + TILE // 2)


def crossing_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> tuple[int, int]:
    """Bytes that cross between two stages for `tokens` tokens: of activations, and of gradients."""
    figures = tokens * config.written
    activations, gradients = (
        encoded_size(figures, "float32", codec) for codec in (wire.activations, wire.gradients)
    )
    return activations + tokens * config.beside, gradients


def buffers_of(payload: Payload) -> tuple[memoryview, ...]:
    """The payload as memoryviews of bytes, without a copy."""
    buffers = payload if isinstance(payload, tuple) else (payload,)
    return tuple(memoryview(buffer).cast("B") for buffer in buffers)


# Frames


@dataclass(slots=True)
class Frame:
    """Unit of sending: tensors, or plain bytes, and their description."""

    kind: str  # one of KINDS
    ballot: tuple[int, int]  # view, attempt
    fields: dict[str, Any]  # by kind; small, of types that msgpack supports
    descriptors: list[Descriptor]  # of the tensors in the payload; none: plain bytes
    payload: Payload
    seat: str = ""  # receiver, among the seats of its node
    sender: str = ""  # the seat that sends it, of the other node

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(buffer.nbytes for buffer in buffers_of(self.payload))

    def head(self) -> bytes:
        """The head: [kind, view, attempt, fields, descriptors, seat, sender]. Raises WireError."""
        _check_names(self.fields)
        try:
            content = self.fields, self.descriptors, self.seat, self.sender
            head: bytes = msgpack.packb([self.kind, *self.ballot, *content])
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"the fields of a frame can't be packed: {error}") from error
        if len(head) > HEAD_LIMIT:
            raise WireError(f"the head of a frame takes {len(head)} bytes; at most {HEAD_LIMIT}")
        return head

    def in_message(self) -> pb.Message:
        """The frame as a message, for streams without frames."""
        payload = b"".join(buffers_of(self.payload))
        return pb.Message(carried=pb.Carried(head=self.head(), payload=payload))

    @classmethod
    def parse(cls, head: Buffer, payload: Payload, limit: int = PAYLOAD_LIMIT) -> Frame:
        """Parse a received frame. Raises WireError. `limit`: bytes of payload."""
        kind, view, attempt, fields, descriptors, *seats = _unpack_head(head)
        if not isinstance(kind, str) or kind not in KINDS:
            raise WireError(f"a frame of kind {kind!r}, which is none of {', '.join(KINDS)}")
        if not _is_uint64(view) or not _is_uint64(attempt):
            raise WireError(f"the ballot ({view!r}, {attempt!r}) is not two whole numbers")
        if not isinstance(fields, dict):
            raise WireError(f"the fields of a frame are a {type(fields).__name__}, not a map")
        _check_names(fields)
        if not isinstance(descriptors, list) or len(descriptors) > TENSOR_LIMIT:
            raise WireError(f"the descriptors are no list of at most {TENSOR_LIMIT}")
        for seat in seats:
            if not isinstance(seat, str) or len(seat) > SEAT_LIMIT:
                raise WireError(
                    f"a seat is named by at most {SEAT_LIMIT} characters, not {str(seat)[:80]!r}"
                )
        parsed = [Descriptor.parse(raw) for raw in descriptors]
        frame = cls(kind, (view, attempt), fields, parsed, payload, *seats)
        check_payload_size(frame.size, limit)
        if frame.descriptors and (size := sum(d.size for d in frame.descriptors)) != frame.size:
            raise WireError(f"the descriptors say {size} bytes, the payload has {frame.size}")
        return frame


def _check_names(fields: dict[str, Any]) -> None:
    for name in fields:
        if not isinstance(name, str) or len(name) > NAME_LIMIT:
            raise WireError(
                f"a field is named by at most {NAME_LIMIT} characters, not {str(name)[:80]!r}"
            )


def check_payload_size(size: int, limit: int) -> None:
    """Raises WireError for a payload that is too large."""
    if size > limit:
        raise WireError(f"a payload of {size} bytes; at most {limit} are allowed")


def _unpack_head(head: Buffer) -> list[Any]:
    if len(head) > HEAD_LIMIT:
        raise WireError(f"the head of a frame takes {len(head)} bytes; at most {HEAD_LIMIT}")
    try:
        parts = msgpack.unpackb(head, ext_hook=_refuse_extension)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # msgpack gives no message for some kinds of damage
        raise WireError(
            f"the head of a frame is not msgpack: {error or type(error).__name__}"
        ) from error
    if not isinstance(parts, list) or len(parts) != 7:
        raise WireError(
            "the head of a frame is not [kind, view, attempt, fields, descriptors, seat, sender]"
        )
    return parts


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code} is not used")


def _is_uint64(value: object) -> bool:
    return type(value) is int and 0 <= value < UINT64


# Messages

_SEAL: Final = b"\xd1\x01"  # the tag of stage.proto's Message.checksum
_SEAL_SIZE: Final = len(_SEAL) + 8


def seal(message: bytes) -> bytes:
    """Append to a serialised message the field `checksum`, over all bytes before it."""
    return message + _SEAL + xxh3_64_intdigest(message).to_bytes(8, "little")


def unseal(data: bytes) -> bytes:
    """The message without its checksum. Raises DamagedError."""
    message = data[:-_SEAL_SIZE]
    if seal(message) != data:
        raise DamagedError("the checksum of a message is not that sent")
    return message


def parse_message(data: bytes) -> pb.Message:
    """Parse a sealed message. Raises WireError."""
    try:
        return pb.Message.FromString(unseal(data))
    except DecodeError as error:
        raise WireError(f"a message that is not one of stage.proto's: {error}") from error


# Chunks


class Chunk(NamedTuple):
    """stage.proto's message of this name; `data` is a view of the parsed message."""

    frame: int
    offset: int
    size: int
    head: bytes
    data: memoryview
    checksum: int = 0
    order: int = 0

    def verify(self) -> None:
        """Raises DamagedError unless all fields but `data` are as sent; the checksums of `data` are
        in the frame's head."""
        numbers = self.frame, self.offset, self.size, len(self.data), self.order
        if self.checksum != _checksum(*numbers, head=self.head):
            raise DamagedError(f"the checksum of a chunk of frame {self.frame} is not that sent")


def _checksum(*numbers: int, head: bytes) -> int:
    """Checksum of frame, offset, size, bytes of data and order, and of the head."""
    return xxh3_64_intdigest(_NUMBERS.pack(*numbers) + head)


_NUMBERS: Final = struct.Struct("<5Q")
_VARINT, _FIXED64, _BYTES = 0, 1, 2


def pack_chunk(
    *,
    frame: int = 0,
    offset: int = 0,
    size: int = 0,
    head: bytes = b"",
    data: Sequence[Buffer] = (),
    order: int = 0,
) -> bytes:
    """Encode a chunk as protobuf would, with its checksum; `data` is copied once."""
    parts: list[Buffer] = []
    for number, value in ((1, frame), (2, offset), (3, size)):
        if value:
            parts.append(bytes((number << 3 | _VARINT,)) + _pack_varint(value))
    if head:
        parts += (bytes((4 << 3 | _BYTES,)) + _pack_varint(len(head)), head)
    if length := sum(map(len, data)):
        parts += (bytes((5 << 3 | _BYTES,)) + _pack_varint(length), *data)
    checksum = _checksum(frame, offset, size, length, order, head=head)
    parts.append(bytes((7 << 3 | _FIXED64,)) + checksum.to_bytes(8, "little"))
    if order:
        parts.append(bytes((8 << 3 | _VARINT,)) + _pack_varint(order))
    return b"".join(parts)


def parse_chunk(message: bytes) -> Chunk:
    """Decode a chunk as protobuf would, but refuse groups; not verified. Raises WireError."""
    numbers = {1: 0, 2: 0, 3: 0, 8: 0}
    checksum = 0
    contents = {4: memoryview(b""), 5: memoryview(b"")}
    view = memoryview(message)
    position = 0
    while position < len(message):
        tag, position = _parse_varint(message, position, longest=5)
        field, wire_type = tag >> 3, tag & 7
        if field == 0 or tag >> 32:
            raise WireError(f"a chunk with the impossible tag {tag}")
        match wire_type:
            case 0:  # _VARINT
                value, position = _parse_varint(message, position)
                if field in numbers:
                    numbers[field] = value
                continue
            case 1:  # _FIXED64
                length = 8
            case 2:  # _BYTES
                length, position = _parse_varint(message, position)
            case 5:  # of four bytes
                length = 4
            case _:
                raise WireError(f"a chunk with a field of wire type {wire_type}")
        if length > len(message) - position:
            raise WireError(f"a chunk that ends inside its field {field}")
        if field in contents and wire_type == _BYTES:
            contents[field] = view[position : position + length]
        elif field == 7 and wire_type == _FIXED64:
            checksum = int.from_bytes(view[position : position + length], "little")
        position += length
    frame, offset, size, order = numbers.values()
    head, data = bytes(contents[4]), contents[5]
    return Chunk(frame, offset, size, head, data, checksum, order)


def _pack_varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def _parse_varint(message: bytes, position: int, longest: int = 10) -> tuple[int, int]:
    """The number that begins at `position`, and the position behind it. Raises WireError."""
    value = 0
    for index in range(longest):
        if position + index >= len(message):
            raise WireError("a chunk that ends inside a number")
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value >= UINT64:
                raise WireError("a chunk with a number of more than 64 bits")
            return value, position + index + 1
    raise WireError(f"a chunk with a number of more than {longest} bytes")
