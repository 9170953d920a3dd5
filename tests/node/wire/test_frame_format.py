from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire import frame_format, tensors
from planaria.node.wire.frame_format import (
    Descriptor,
    Form,
    Frame,
    WireError,
    check_forms,
    pack_chunk,
    parse_chunk,
)
from planaria.node.wire.stage_pb2 import Chunk as ProtobufChunk
from planaria.node.wire.stage_pb2 import Message
from planaria.node.wire.tensors import decode, encode

SHAPES = [(), (1,), (0,), (3, 0, 2), (255,), (256,), (257,), (3, 5, 100)]
UINT64 = st.integers(0, 2**64 - 1)


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def joined(buffers: tuple[memoryview, ...]) -> bytearray:
    return bytearray().join(buffers)


def sent(tensor: torch.Tensor, codec: frame_format.Codec) -> torch.Tensor:
    """The tensor as it arrives."""
    descriptors, buffers = encode([tensor], codec)
    (read,) = decode(descriptors, joined(buffers))
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    return read


@pytest.mark.parametrize(
    ("tensor", "codec"),
    [(torch.arange(1000) * 10**12, "int8"), (torch.arange(12.0).view(3, 4).t(), "none")],
    ids=["whole numbers", "strided"],
)
def test_what_no_codec_changes(tensor: torch.Tensor, codec: frame_format.Codec) -> None:
    assert torch.equal(sent(tensor, codec), tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_of_halves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(shape, dtype)
    torch.testing.assert_close(sent(tensor, "int8"), tensor, atol=1.0, rtol=0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", tensors.DTYPES.values())
def test_codec_none_keeps_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(shape, dtype)
    assert torch.equal(sent(tensor, "none"), tensor)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("codec", "through"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_codecs_round_once(
    codec: frame_format.Codec, through: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = sample(shape, dtype)
    assert torch.equal(sent(tensor, codec), tensor.to(through).to(dtype))


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=600),
    st.sampled_from([1.0, 2.0**-140, 0.0]),
)
def test_int8_is_wrong_by_half_a_scale_at_most(values: list[float], factor: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float32) * factor
    read = sent(tensor, "int8")
    tiny = torch.finfo(torch.float32).tiny
    blocks = zip(torch.split(tensor, 256), torch.split(read, 256), strict=True)
    for before, after in blocks:
        if before.numel():
            scale = max(before.abs().max().item() / 127, tiny)
            assert (before - after).abs().max().item() <= scale * 0.5001


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=200),
    st.sampled_from([1.0, 2.0**-140, 0.0]),
)
def test_int4_is_wrong_by_less_than_a_seventh_of_a_tile(values: list[float], factor: float) -> None:
    """The error of a tile, as a vector: half a scale in each of 32 directions. The scale is a
    seventh of the largest rotated value, which is no longer than the tile."""
    tensor = torch.tensor(values, dtype=torch.float32) * factor
    read = sent(tensor, "int4")
    for before, after in zip(torch.split(tensor, 32), torch.split(read, 32), strict=True):
        if before.numel():
            longest = max(float(before.double().norm()), 1e-36)
            assert (before - after).double().norm() <= 0.41 * longest


def test_int4_spreads_what_is_far_out() -> None:
    """The error is small beside the tensor, and beside its outliers."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(64, 32, generator=generator)
    tensor[:, 3] *= 100
    read = sent(tensor, "int4")
    assert (read - tensor).norm() < 0.05 * tensor.norm()
    assert (read - tensor)[:, 3].norm() < 0.05 * tensor[:, 3].norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", frame_format.CODECS)
def test_what_is_not_finite_stays_so(codec: frame_format.Codec, bad: float) -> None:
    tensor = torch.ones(700)
    tensor[300] = bad
    read = sent(tensor, codec)
    assert not read[300].isfinite()
    assert read[:256].isfinite().all()
    assert read[512:].isfinite().all()


def test_codec_none_copies_nothing() -> None:
    tensor = torch.zeros(4, 4, requires_grad=True)
    descriptors, buffers = encode([tensor], "none")
    address = tensor.data_ptr()
    assert torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() == address
    assert decode(descriptors, buffers)[0].data_ptr() == address
    payload = joined(buffers)
    read = decode(descriptors, payload)[0]
    assert read.data_ptr() == torch.frombuffer(payload, dtype=torch.uint8).data_ptr()


def test_tensors_behind_an_odd_one_and_read_only_payloads() -> None:
    tensors = [torch.arange(3, dtype=torch.uint8), torch.arange(5.0), torch.arange(7)]
    descriptors, buffers = encode(tensors, "none")
    payloads: list[frame_format.Payload] = [
        joined(buffers),
        bytes(joined(buffers)),
        buffers,
        (joined(buffers[:2]), bytes(buffers[2])),
    ]
    for payload in payloads:
        read = decode(descriptors, payload)
        assert all(torch.equal(a, b) for a, b in zip(read, tensors, strict=True))
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in read)
        read[0].zero_() if payload is not buffers else None


def test_a_flipped_bit_is_noticed_and_named() -> None:
    descriptors, buffers = encode([torch.ones(3), torch.ones(5)], "none")
    payload = joined(buffers)
    payload[-1] ^= 1
    with pytest.raises(WireError, match=r"tensor 1 \(float32 \(5,\)\) arrived damaged"):
        decode(descriptors, payload)


def descriptor(**changes: object) -> list[object]:
    (good,), _ = encode([torch.ones(4)], "none")
    return list((good._asdict() | changes).values())


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (descriptor(dtype="float64"), "dtype 'float64' is none of"),
        (descriptor(dtype=["float32"]), "dtype"),
        (descriptor(codec="zip"), "codec 'zip' is none of"),
        (descriptor(dtype="int32", codec="bf16", size=8), "bf16 is for floating point"),
        (descriptor(shape=[5]), "is 20 bytes, not 16"),
        (descriptor(shape=[-4]), "no whole number"),
        (descriptor(shape=[4.0]), "no whole number"),
        (descriptor(shape=[True, 4]), "no whole number"),
        (descriptor(shape=[1] * 9 + [4]), "at most 8"),
        (descriptor(shape=[2**40, 2**40]), "of more than"),
        (descriptor(shape=[0, 2**63], size=0), "of more than"),
        (descriptor(size=2**70), "64 bits"),
        (descriptor(checksum="a"), "64 bits"),
        (descriptor()[:4], "a descriptor is"),
        ("float32", "a descriptor is"),
    ],
)
def test_bad_descriptors_are_refused(raw: object, why: str) -> None:
    with pytest.raises(WireError, match=why):
        Descriptor.parse(raw)


def test_sizes_must_add_up() -> None:
    descriptors, buffers = encode([torch.ones(4)], "none")
    with pytest.raises(WireError, match="say 16 bytes, the payload has 17"):
        decode(descriptors, (*buffers, b"x"))
    head = msgpack.packb(["state", 0, 0, {}, [None] * 5000, "", ""])
    with pytest.raises(WireError, match="the descriptors are no list of at most 4096"):
        Frame.parse(head, b"")


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(1, dtype=torch.float64), "float64 doesn't travel"),
        (torch.ones([1] * 9), "9 dimensions"),
    ],
)
def test_what_does_not_travel_is_said_before_it_is_sent(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(WireError, match=why):
        encode([tensor], "none")


# Frames


def test_a_frame_comes_back_from_its_head_and_payload() -> None:
    descriptors, buffers = encode([torch.ones(4), torch.arange(3)], "bf16")
    fields = {"microbatch": 7, "route": ["a", "b"], "hash": b"\x00\xff", "loss": None}
    frame = Frame("activation", (3, 2**63), fields, descriptors, buffers, seat="4", sender="2.1")
    assert frame.size == 8 + 24
    payload = joined(buffers)
    read = Frame.parse(frame.head(), payload)
    assert read == Frame(
        "activation", (3, 2**63), fields, descriptors, payload, seat="4", sender="2.1"
    )
    assert all(isinstance(d, Descriptor) for d in read.descriptors)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (["activation", 1, 1, {}], "is not \\[kind"),
        ({}, "is not \\[kind"),
        (["pickle", 1, 1, {}, [], "1", "0"], "kind 'pickle', which is none of"),
        (["state", -1, 1, {}, [], "1", "0"], "not two whole numbers"),
        (["state", 1, 1.5, {}, [], "1", "0"], "not two whole numbers"),
        (["state", 1, 1, [], [], "1", "0"], "not a map"),
        (["state", 1, 1, {3: 4}, [], "1", "0"], "not msgpack"),
        (["state", 1, 1, {"a" * 65: 4}, [], "1", "0"], "at most 64 characters"),
        (["state", 1, 1, {"a": msgpack.ExtType(1, b"")}, [], "1", "0"], "extension type 1"),
        (["state", 1, 1, {}, {}, "1", "0"], "no list"),
        (["state", 1, 1, {}, [[]], "1", "0"], "a descriptor is"),
        (["state", 1, 1, {"a": ["b" * 1000] * 70}, [], "1", "0"], "at most 65536"),
        (["state", 1, 1, {}, [], 1, "0"], "a seat is named by"),
        (["state", 1, 1, {}, [], "1", "0" * 193], "a seat is named by"),
    ],
)
def test_bad_heads_are_refused(head: object, why: str) -> None:
    with pytest.raises(WireError, match=why):
        Frame.parse(msgpack.packb(head), b"")


@given(st.binary(max_size=200))
def test_any_bytes_as_a_head_give_a_frame_or_a_wire_error(head: bytes) -> None:
    try:
        assert Frame.parse(head, b"").kind in frame_format.KINDS
    except WireError as error:
        assert str(error)


def test_limits_of_a_frame() -> None:
    with pytest.raises(WireError, match="5 bytes; at most 4"):
        Frame.parse(Frame("state", (1, 1), {}, [], b"").head(), b"12345", limit=4)
    with pytest.raises(WireError, match="at most 65536"):
        Frame("state", (1, 1), {"a": b"a" * 70_000}, [], b"").head()
    with pytest.raises(WireError, match="can't be packed"):
        Frame("state", (1, 1), {"a": object()}, [], b"").head()


# Chunks

CHUNKS = st.fixed_dictionaries(
    {
        "frame": UINT64,
        "offset": UINT64,
        "size": UINT64,
        "head": st.binary(max_size=300),
        "data": st.binary(max_size=300),
        "order": UINT64,
    }
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)])]


@given(CHUNKS, st.lists(st.integers(0, 300), max_size=3))
def test_chunks_are_written_byte_for_byte_as_protobuf_does(
    fields: dict[str, object], cuts: list[int]
) -> None:
    data = fields["data"]
    assert isinstance(data, bytes)
    packed = pack_chunk(**fields | {"data": split(data, cuts)})  # type: ignore[arg-type]
    read = parse_chunk(packed)
    read.verify()
    expected = ProtobufChunk(**fields, checksum=read.checksum)  # type: ignore[arg-type]
    assert packed == expected.SerializeToString()


@given(CHUNKS, st.integers(0))
def test_any_flipped_bit_of_a_chunk_beside_its_data_is_noticed(
    fields: dict[str, Any], position: int
) -> None:
    """The head has checksums of the data."""
    data = fields["data"]
    packed = pack_chunk(**fields | {"data": [data]})
    behind = pack_chunk(order=fields["order"])
    start = len(packed) - len(behind) - len(data)
    bits = [bit for bit in range(8 * len(packed)) if not 0 <= bit // 8 - start < len(data)]
    with pytest.raises(WireError):
        parse_chunk(flip(packed, bits[position % len(bits)])).verify()


def flip(packed: bytes, bit: int) -> bytes:
    flipped = bytearray(packed)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@given(st.binary(max_size=300), st.integers(0))
def test_any_flipped_bit_of_a_message_is_noticed(message: bytes, position: int) -> None:
    sealed = frame_format.seal(message)
    assert frame_format.unseal(sealed) == message
    with pytest.raises(frame_format.DamagedError, match="checksum of a message"):
        frame_format.unseal(flip(sealed, position % (8 * len(sealed))))


def test_the_checksum_of_a_message_is_a_field_of_it() -> None:
    message = Message(ballot={"view": 1, "attempt": 2}, ready={"step": 3}, seat="4", sender="2")
    sealed = Message.FromString(frame_format.seal(message.SerializeToString()))
    assert sealed.checksum
    sealed.ClearField("checksum")
    assert sealed == message


def same(read: frame_format.Chunk, expected: ProtobufChunk) -> bool:
    return all(value == getattr(expected, name) for name, value in read._asdict().items())


def field(number: int, wire_type: int, content: bytes) -> bytes:
    return frame_format._pack_varint(number << 3 | wire_type) + content


FIELDS = st.one_of(
    st.builds(
        lambda n, v: field(n, 0, frame_format._pack_varint(v)),
        st.integers(1, 2**29 - 1) | st.integers(1, 8),
        UINT64,
    ),
    st.builds(
        lambda n, v: field(n, 2, frame_format._pack_varint(len(v)) + v),
        st.integers(1, 2**29 - 1) | st.integers(1, 8),
        st.binary(max_size=200),
    ),
    st.builds(lambda n, v: field(n, 1, v), st.integers(1, 9), st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: field(n, 5, v), st.integers(1, 9), st.binary(min_size=4, max_size=4)),
)


@given(st.lists(FIELDS, max_size=12).map(b"".join))
def test_chunks_are_read_as_protobuf_does_unknown_and_repeated_fields_too(message: bytes) -> None:
    assert same(parse_chunk(message), ProtobufChunk.FromString(message))


@given(st.binary(max_size=40) | st.lists(FIELDS | st.binary(max_size=3), max_size=5).map(b"".join))
def test_any_bytes_as_a_chunk_are_read_as_protobuf_does_or_refused(message: bytes) -> None:
    try:
        read = parse_chunk(message)
    except WireError as error:
        assert str(error)
    else:
        assert same(read, ProtobufChunk.FromString(message))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x08", "ends inside a number"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "more than 10 bytes"),
        (b"\x08" + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        (b"\x2a\x05abc", "ends inside its field 5"),
        (b"\x00\x00", "impossible tag"),
        (b"\x0b", "wire type 3"),
        (b"\x39abc", "ends inside its field 7"),
    ],
)
def test_malformed_chunks_are_refused(message: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        parse_chunk(message)


def test_tensors_that_are_not_what_is_due_are_refused() -> None:
    tensor = Descriptor("float32", (2, 2), "none", 0, 16)
    check_forms([tensor], [Form("float32", (2, 2))])
    changes: list[dict[str, Any]] = [{"shape": (4,)}, {"codec": "bf16"}, {"dtype": "int64"}]
    unlike = [[tensor._replace(**change)] for change in changes]
    for others in ([], [tensor] * 5, *unlike):
        with pytest.raises(WireError, match=r"where float32 \[2, 2\] in codec none is due"):
            check_forms(others, [Form("float32", (2, 2))])
