"""Tensors as the bytes of a frame's payload, and back: the port `Tensors`, with torch.

Each tensor is encoded by its codec, and all are concatenated; descriptors tell how to decode them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import torch
from xxhash import xxh3_64_intdigest

from planaria.node.wire import lowrank
from planaria.node.wire.frame_format import (
    BLOCK,
    CODECS,
    DIMENSION_LIMIT,
    TENSOR_LIMIT,
    TILE,
    Codec,
    DamagedError,
    Descriptor,
    Payload,
    WireError,
    buffers_of,
    check_forms,
)
from planaria.recovery.identical_arithmetic import exact

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ROUNDS: Final = 2
"""Rounds of subspace iteration. From a random start, one ends 0.45 nats higher than two, and four
end as two do (rank 4 in lab/results/averaging, seed 0)."""


def empty(values: int) -> torch.Tensor:
    """A tensor, float32 [values], on the CPU. Raises MemoryError when there is no room for it."""
    try:
        return torch.empty(values)
    except RuntimeError as error:
        raise MemoryError(f"no room for {4 * values} bytes") from error


def encode(
    tensors: Sequence[torch.Tensor], codec: Codec
) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
    """Encodes tensors for a frame: a descriptor and the bytes of each.

    The work is done on the tensor's device. With codec none, the bytes of a contiguous CPU tensor
    are its own memory: it stays alive with them, and must not change before they are sent. Integer
    tensors are sent unchanged with every codec.

    int8: per block of 256 values a float32 scale, max(abs) / 127; all scales first, then a signed
    byte for each value. The error is at most half a scale. A block with a value that is not finite
    is decoded without any finite value. fp16 turns values beyond 65504 into inf.

    int4: tiles of 32 values, multiplied by a Hadamard matrix, which spreads one large value over
    its whole tile (TAH-Quant, arXiv 2506.01352). Per tile a bfloat16 scale, max(abs) / 7, then two
    values a byte, the first one in its lower half. The last tile is padded with zeros.

    Raises WireError for an unsupported dtype.
    """
    if codec not in CODECS:
        raise WireError(f"codec {codec!r} is none of {', '.join(CODECS)}")
    if len(tensors) > TENSOR_LIMIT:
        raise WireError(f"{len(tensors)} tensors in a frame; at most {TENSOR_LIMIT}")
    descriptors, buffers = [], []
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise WireError(f"{tensor.dtype} doesn't travel; one of {', '.join(DTYPES)} does")
        if tensor.dim() > DIMENSION_LIMIT:
            raise WireError(f"a tensor of {tensor.dim()} dimensions; at most {DIMENSION_LIMIT}")
        used: Codec = codec if tensor.dtype.is_floating_point else "none"
        encoded = _compress(tensor.detach(), used).cpu().contiguous()
        buffer = encoded.reshape(-1).view(torch.uint8).numpy().data
        descriptors.append(
            Descriptor(
                dtype=DTYPE_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                codec=used,
                checksum=xxh3_64_intdigest(buffer),
                size=buffer.nbytes,
            )
        )
        buffers.append(buffer)
    return descriptors, tuple(buffers)


def decode(
    descriptors: Sequence[Descriptor], payload: Payload, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """The tensors of a frame, on `device`. With codec none on the CPU they share a writable
    payload's memory. `descriptors`: checked before, by `Frame.parse`.

    Raises WireError for a wrong size, and DamagedError, which names the tensor, for a wrong
    checksum.
    """
    tensors, parts = [], _split(descriptors, payload)
    for index, (descriptor, part) in enumerate(zip(descriptors, parts, strict=True)):
        checksum = xxh3_64_intdigest(part)
        if checksum != descriptor.checksum:
            raise DamagedError(
                f"tensor {index} ({descriptor.dtype} {descriptor.shape}) arrived damaged: its "
                f"checksum is {checksum:016x}, not {descriptor.checksum:016x}"
            )
        tensors.append(_decompress(descriptor, part, torch.device(device)))
    return tensors


def encode_low_rank(
    row: torch.Tensor, cuts: Sequence[lowrank.SlicePart], rank: int
) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
    """Encode a float32 row [n] in int8, its matrices as two factors each."""
    row, nothing = row.detach(), row.new_empty(0)
    factors, rest = [nothing], [nothing]
    for cut in cuts:
        values = row[cut.start : cut.stop]
        if cut.rows:
            factors += _factors(values.view(cut.rows, cut.columns), rank)
        else:
            rest.append(values)
    return encode([torch.cat(factors), torch.cat(rest)], "int8")


def decode_low_rank(
    descriptors: Sequence[Descriptor],
    payload: Payload,
    size: int,
    cuts: Sequence[lowrank.SlicePart],
    rank: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """float32 [size], decoded from what `encode_low_rank` made with the same cuts. The bits are
    the same on every device: products are added in order of ranks, not in a kernel's order. Raises
    WireError as `decode` does."""
    check_forms(descriptors, lowrank.forms(cuts, rank))
    factors, rest = decode(descriptors, payload, device)
    row = torch.empty(size, device=device)
    for cut in cuts:
        values = row[cut.start : cut.stop]
        if not cut.rows:
            values.copy_(rest[: len(values)])
            rest = rest[len(values) :]
            continue
        left, right = cut.rows * rank, cut.columns * rank
        p = factors[:left].view(rank, cut.rows, 1)
        q = factors[left : left + right].view(rank, 1, cut.columns)
        factors = factors[left + right :]
        matrix = torch.mul(p[0], q[0], out=values.view(cut.rows, cut.columns))
        for number in range(1, rank):
            matrix.add_(p[number] * q[number])
    return row


def _factors(matrix: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """P and Q of a matrix near P Qᵀ, each [rank x its side], concatenated by rank. Columns of P
    and Q have equal norms, since a block of int8 may have values of both.

    They are nearly optimal, by a few rounds of subspace iteration (Halko et al., SIAM Review 2011,
    algorithm 4.4). PowerSGD makes one round, from the Q of the step before."""
    start = torch.Generator().manual_seed(0)
    q = torch.randn(matrix.shape[1], rank, generator=start).to(matrix.device)
    p = matrix
    for _ in range(ROUNDS):
        p = torch.linalg.qr(exact(matrix @ q)).Q.to(matrix.device)  # MPS has none
        q = matrix.T @ p
    longer = torch.linalg.vector_norm(q, dim=0).sqrt()
    p, q = p * longer, q / longer.clamp_min(torch.finfo(torch.float32).tiny)
    return [p.T.reshape(-1), q.T.reshape(-1)]


def finite(tensor: torch.Tensor) -> bool:
    """Whether all values of a floating tensor are finite, mostly in one pass: a finite sum implies
    it. Values are checked one by one only if the sum isn't finite."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _compress(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    match codec:
        case "none":
            return tensor
        case "bf16":
            return tensor.to(torch.bfloat16)
        case "fp16":
            return tensor.to(torch.float16)
        case "int8":
            return _quantize(tensor)
        case "int4":
            return _to_int4(tensor)


def _quantize(tensor: torch.Tensor) -> torch.Tensor:
    """Any floating tensor in int8, as uint8 [4 * blocks + values]: scales, and then values."""
    values = tensor.reshape(-1).float()
    count = values.numel()
    if tail := count % BLOCK:
        values = torch.nn.functional.pad(values, (0, BLOCK - tail))
    blocks = values.view(-1, BLOCK)
    # Not zero: a block of zeros must not divide by it.
    scales = (blocks.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    quantized = (blocks / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), quantized.view(-1)[:count].view(torch.uint8)])


def _dequantize(raw: torch.Tensor, count: int) -> torch.Tensor:
    """The values of a tensor in int8, as `_quantize` made it, float32 [count]."""
    blocks = -(-count // BLOCK)
    scales, quantized = raw[: 4 * blocks].view(torch.float32), raw[4 * blocks :].view(torch.int8)
    values = torch.zeros(blocks * BLOCK, device=raw.device)
    values[:count] = quantized
    values.view(blocks, BLOCK).mul_(scales[:, None])
    return values[:count]


def _to_int4(tensor: torch.Tensor) -> torch.Tensor:
    """Any floating tensor in int4, as uint8 [18 * tiles]: scales, and then pairs of values."""
    values = tensor.reshape(-1).float()
    if tail := values.numel() % TILE:
        values = torch.nn.functional.pad(values, (0, TILE - tail))
    tiles = values.view(-1, TILE) @ _hadamard().to(values.device)
    smallest = torch.finfo(torch.float32).tiny
    scales = (tiles.abs().amax(dim=1) / 7).clamp_min(smallest).bfloat16()
    levels = (tiles / scales.float()[:, None]).round_().clamp_(-7, 7).to(torch.int8) + 8
    low, high = levels.view(torch.uint8).view(-1, 2).unbind(dim=1)
    return torch.cat([scales.view(torch.uint8), low | high << 4])


def _from_int4(raw: torch.Tensor, count: int) -> torch.Tensor:
    """The values of a tensor in int4, as `_to_int4` made it, float32 [count]."""
    tiles = -(-count // TILE)
    scales, pairs = raw[: 2 * tiles].view(torch.bfloat16).float(), raw[2 * tiles :]
    levels = torch.stack((pairs & 15, pairs >> 4), dim=1).view(tiles, TILE).float() - 8
    turned = levels * scales[:, None]
    return (turned @ _hadamard().to(raw.device)).view(-1)[:count]


@cache
def _hadamard() -> torch.Tensor:
    """The Hadamard matrix of a tile, float32 [TILE, TILE] on the CPU: its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < TILE:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(TILE)


def _decompress(descriptor: Descriptor, part: memoryview, device: torch.device) -> torch.Tensor:
    dtype = DTYPES[descriptor.dtype]
    if descriptor.values == 0:
        return torch.empty(descriptor.shape, dtype=dtype, device=device)
    if part.readonly:
        part = memoryview(bytearray(part))  # a tensor must be writable
    raw = torch.frombuffer(part, dtype=torch.uint8)
    if raw.data_ptr() % 8:  # after a tensor of odd size
        raw = raw.clone()
    raw = raw.to(device)
    match descriptor.codec:
        case "none":
            values = raw.view(dtype)
        case "bf16":
            values = raw.view(torch.bfloat16).to(dtype)
        case "fp16":
            values = raw.view(torch.float16).to(dtype)
        case "int8":
            values = _dequantize(raw, descriptor.values).to(dtype)
        case "int4":
            values = _from_int4(raw, descriptor.values).to(dtype)
    return values.view(descriptor.shape)


def _split(descriptors: Sequence[Descriptor], payload: Payload) -> Iterator[memoryview]:
    """The payload's part for each descriptor. Raises WireError when the sizes don't add up."""
    parts = buffers_of(payload)
    expected, size = sum(d.size for d in descriptors), sum(part.nbytes for part in parts)
    if expected != size:
        raise WireError(f"the descriptors say {expected} bytes, the payload has {size}")
    if [part.nbytes for part in parts] == [d.size for d in descriptors]:
        yield from parts  # as `encode` made them
        return
    whole = parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
    offset = 0
    for descriptor in descriptors:
        yield whole[offset : offset + descriptor.size]
        offset += descriptor.size
