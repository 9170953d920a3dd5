"""Running snapshots of a stage in a peer's memory: selection, encoding and storage of updates.

SCAR (Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4.2) keeps a
running checkpoint. It renews a fraction r of the blocks every rC steps, instead of all every C
steps: those that changed most since they were last saved. Here the running checkpoint is in a
peer's memory and starts empty, so blocks never sent go first.

A block is a row of a parameter. `weights`, `first_moment` and `second_moment` are the flat float32
tensors of node/stage/optimizer.py, parameter after parameter. An update has the same rows of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from planaria.recovery.identical_arithmetic import exact
from planaria.recovery.policy import holder_count, holder_stage

Codec = Literal["none", "int8"]

CODECS: Final = get_args(Codec)
NEVER: Final = -1  # step of a block never sent
PIECE: Final = 256  # maximum number of values of a row that share a scale in int8
SCRATCH: Final = 1 << 18  # values per batch of work: what fits a cache needs no new allocation
MANTISSA: Final = 19  # bits dropped by int8 of the 23 mantissa bits of a second moment's root
HEAD_DTYPES: Final = torch.float32, torch.float32, torch.int32  # scales, scales and tops
LARGEST: Final = torch.finfo(torch.float32).max
SMALLEST: Final = torch.finfo(torch.float32).tiny


class UpdateError(ValueError):
    """The bytes are no update of this stage; the message says why."""


class ValuesError(UpdateError):
    """The update is well-formed, but has unusable values."""


# Blocks


class Group(NamedTuple):
    """Consecutive blocks of equal width, across parameters."""

    first: int  # block
    rows: int
    width: int
    offset: int  # of the first block's values


class Layout:
    """Positions of a stage's blocks in its `tensors` flat tensors: weights and moments.

    A parameter of two or more dimensions has a block per row, any other is one block.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], tensors: int = 3) -> None:
        self.groups: list[Group] = []
        self.tensors, self.blocks, self.values = tensors, 0, 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            self._append(rows, math.prod(shape) // rows)

    def _append(self, rows: int, width: int) -> None:
        if self.groups and self.groups[-1].width == width:
            last = self.groups[-1]
            self.groups[-1] = last._replace(rows=last.rows + rows)
        else:
            self.groups.append(Group(self.blocks, rows, width, self.values))
        self.blocks += rows
        self.values += rows * width

    @property
    def widths(self) -> list[int]:
        """The width of the blocks of each group."""
        return [group.width for group in self.groups]

    def rows(self, flat: Tensor) -> list[Tensor]:
        """All blocks of a flat tensor, as views [rows, width], one per group."""
        return [
            flat[g.offset : g.offset + g.rows * g.width].view(g.rows, g.width) for g in self.groups
        ]

    def split(self, blocks: Tensor) -> list[Tensor]:
        """Splits ascending block numbers, int64 [k] on the CPU, into indices for each of `rows`."""
        firsts = torch.tensor([group.first for group in self.groups[1:]], dtype=torch.int64)
        parts = blocks.tensor_split(torch.searchsorted(blocks, firsts))
        return [part - group.first for part, group in zip(parts, self.groups, strict=True)]

    def gather(self, flat: Tensor, blocks: Tensor) -> list[Tensor]:
        """Copies of these blocks of a flat tensor, [k, width] per group."""
        indices = [at.to(flat.device) for at in self.split(blocks)]
        return [rows.index_select(0, at) for rows, at in zip(self.rows(flat), indices, strict=True)]

    def pieces(self, flat: Tensor, blocks: Tensor) -> Iterator[Tensor]:
        """Copies of these blocks of a flat tensor, as `gather`, in batches of rows."""
        for rows, at in zip(self.rows(flat), self.split(blocks), strict=True):
            for these in torch.split(at.to(flat.device), _batch_rows(rows.shape[1])):
                yield rows.index_select(0, these)

    def shapes(self, blocks: Tensor) -> list[tuple[int, int]]:
        """The shapes of these blocks, as `gather` copies them."""
        parts = zip(self.split(blocks), self.widths, strict=True)
        return [(len(part), width) for part, width in parts]

    def scatter(self, flat: Tensor, blocks: Tensor, values: Sequence[Tensor]) -> None:
        """Writes these blocks of a flat tensor, from the format of `gather`."""
        for rows, at, new in zip(self.rows(flat), self.split(blocks), values, strict=True):
            rows.index_copy_(0, at.to(flat.device), new)

    def squared_distances(self, a: Tensor, b: Tensor) -> Tensor:
        """Squared distances between the blocks of `a` and `b`, float64 [blocks] on the CPU."""
        norms = []
        scratch = torch.empty(max(SCRATCH, *self.widths), device=a.device)
        for x, y in zip(self.rows(a), self.rows(b), strict=True):
            some = _batch_rows(x.shape[1])
            for part, other in zip(torch.split(x, some), torch.split(y, some), strict=True):
                difference = scratch[: part.numel()].view(part.shape)
                torch.sub(part, other, out=difference)
                difference = exact(difference)
                norms.append(torch.linalg.vector_norm(difference, dim=1, dtype=torch.float64))
        return torch.cat(norms).square().cpu()


def _batch_rows(width: int) -> int:
    """Rows of a block group in a batch of work."""
    return max(1, SCRATCH // width)


def choose(rank: Tensor, taken: Tensor, count: int) -> Tensor:
    """The numbers of `count` blocks for a snapshot's update, ascending, int64. Those never sent
    come first, then those of the least `rank`, float64 [blocks]; ties go to the lower number.
    `taken`: int64 [blocks], the step of a block's last sent value, or NEVER."""
    rank = rank.masked_fill(taken == NEVER, -math.inf)
    return torch.argsort(rank, stable=True)[:count].sort().values


# int8


def quantize(rows: Tensor, toward_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Rows in int8, from float32: scales, float32 [k, pieces], and codes, uint8 [k, width].

    A piece has at most 256 values of one row; its scale is max(abs) / 127. A value's error is at
    most half a scale; with `toward_zero` at most one, and never upwards.
    """
    pieces = _pieces(rows)
    scales = (pieces.abs().amax(dim=2) / 127).clamp_min(SMALLEST)
    codes = pieces / scales[:, :, None]
    codes = codes.trunc_() if toward_zero else codes.round_()
    return scales, _rows(codes.clamp_(-127, 127).to(torch.int8), rows.shape[1]).view(torch.uint8)


def dequantize(scales: Tensor, codes: Tensor) -> Tensor:
    """Inverts `quantize`: float32 [k, width], with the same bits on every machine."""
    pieces = _pieces(codes.view(torch.int8).float())
    return _rows(pieces.mul_(scales[:, :, None]), codes.shape[1])


def quantize_second_moment(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments in 8 bits: tops, int32 [k, pieces], and codes, uint8 [k, width].

    A code is sqrt(v), rounded *up* to 4 mantissa bits, relative to the largest of its piece. Codes
    have 16 values per factor of two, down to a 50,000th of the largest; smaller values round up to
    that, and only 0 becomes 0. Equal steps, as in `quantize`, would turn small moments into 0, and
    Adam divides by them. A restored sqrt(v) is never smaller than the original. With a first moment
    rounded towards zero, no element of an Adam step exceeds the exact one's (except by float32
    rounding). Above a 50,000th of its piece's largest, a restored root is at most a 16th too large.
    """
    bits = rows.sqrt().view(torch.int32)  # bits of floats above 0 ascend as the floats do
    codes = _pieces((bits + ((1 << MANTISSA) - 1)) >> MANTISSA)
    tops = codes.amax(dim=2)
    below = (codes - tops[:, :, None] + 255).clamp_min_(1)
    return tops, _rows(torch.where(codes > 0, below, 0).to(torch.uint8), rows.shape[1])


def dequantize_second_moment(tops: Tensor, codes: Tensor) -> Tensor:
    """Inverts `quantize_second_moment`: float32 [k, width], the same bits on every machine."""
    below = _pieces(codes.int())
    bits = (below - 255 + tops[:, :, None]).clamp_min_(0) << MANTISSA
    roots = torch.where(below > 0, bits, 0).view(torch.float32)
    return _rows(roots.square_().clamp_max_(LARGEST), codes.shape[1])


def _pieces(rows: Tensor) -> Tensor:
    """Rows as [k, pieces, values], the last piece padded with 0."""
    count, width = rows.shape
    size = min(PIECE, width)
    if tail := width % size:
        rows = torch.nn.functional.pad(rows, (0, size - tail))
    return rows.reshape(count, -(-width // size), size)


def _rows(pieces: Tensor, width: int) -> Tensor:
    return pieces.flatten(1)[:, :width].contiguous()


# Encoding of updates


def encode(
    layout: Layout, blocks: Tensor, tensors: Sequence[Tensor], codec: Codec
) -> tuple[Tensor, list[Tensor]]:
    """A snapshot's update as bytes, uint8 on the CPU, and the weights that its receiver restores.

    `tensors`: weights, or weights and moments, flat; `blocks`: int64 [k], ascending. The bytes:
    block numbers (int32; omitted for all blocks), the values of four bytes, the codes.
    """
    numbers = blocks.int()[: 0 if len(blocks) == layout.blocks else None]
    shapes = layout.shapes(blocks)
    heads, codes = _sizes(shapes, codec)
    ahead = numbers.nbytes + len(tensors) * heads
    payload = torch.empty(ahead + len(tensors) * codes, dtype=torch.uint8)  # on the CPU
    first, second = _Writer(payload, 0), _Writer(payload, ahead)
    first.put(numbers)
    restored = tensors[0].new_empty(sum(map(math.prod, shapes)))
    weights = _Writer(restored.view(torch.uint8), 0)
    for of, flat in enumerate(tensors):
        for rows in layout.pieces(flat, blocks):
            again = rows
            if codec == "none":
                second.put(rows)
            else:
                head, code = _quantize(of, rows)
                first.put(head)
                second.put(code)
                if of == 0:
                    again = dequantize(head, code)
            if of == 0:
                weights.put(again)
    parts = torch.split(restored, [math.prod(shape) for shape in shapes])
    return payload, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def decode(
    layout: Layout, payload: Tensor, count: int, tensors: int, codec: Codec
) -> tuple[Tensor, list[list[Tensor]]]:
    """A received update: its blocks, int64 [count], and their values in each of `tensors` (1 to 3)
    tensors, as `gather`.

    With codec none the values share the payload's memory. Raises UpdateError for a wrong size,
    block numbers not ascending or out of range, and negative second moments; raises ValuesError
    for values that aren't finite.
    """
    whole = count == layout.blocks
    if not 0 < count <= layout.blocks:
        raise UpdateError(f"{count} blocks, where the stage has {layout.blocks}")
    reader = _Reader(payload)
    if whole:
        blocks = torch.arange(count)
    else:
        blocks = reader.take((count,), torch.int32).long()
        if blocks[0] < 0 or blocks[-1] >= layout.blocks or not (blocks.diff() > 0).all():
            raise UpdateError(f"its blocks aren't {count} growing numbers below {layout.blocks}")
    shapes = layout.shapes(blocks)
    if codec == "none":
        values = [[reader.take(shape, torch.float32) for shape in shapes] for _ in range(tensors)]
    else:
        heads = [
            [reader.take(_heads(shape), HEAD_DTYPES[of]) for shape in shapes]
            for of in range(tensors)
        ]
        values = [
            [
                _dequantize(of, head, reader.take(shape, torch.uint8))
                for head, shape in zip(heads[of], shapes, strict=True)
            ]
            for of in range(tensors)
        ]
    reader.end()
    for of, of_tensor in enumerate(values):
        _check_values(of, of_tensor)
    return blocks, values


def _quantize(tensor: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor`: 0 the weights, 1 and 2 the moments."""
    return quantize_second_moment(rows) if tensor == 2 else quantize(rows, toward_zero=tensor == 1)


def _dequantize(tensor: int, heads: Tensor, codes: Tensor) -> Tensor:
    restore = dequantize_second_moment if tensor == 2 else dequantize
    values = torch.empty(codes.shape)
    some = _batch_rows(codes.shape[1])
    pieces = (torch.split(of, some) for of in (values, heads, codes))
    for rows, head, code in zip(*pieces, strict=True):
        rows.copy_(restore(head, code))
    return values


def _heads(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales, or tops, of rows of this shape."""
    return shape[0], -(-shape[1] // min(PIECE, shape[1]))


def _check_values(tensor: int, parts: Sequence[Tensor]) -> None:
    for part in parts:
        if part.numel() == 0:
            continue
        least, most = (bound.item() for bound in torch.aminmax(part))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise ValuesError("it has values that aren't finite")
        if tensor == 2 and least < 0:
            raise UpdateError(f"it has the second moment {least}, which is below 0")


class _Writer:
    """Writes tensors consecutively into a uint8 payload."""

    def __init__(self, payload: Tensor, offset: int) -> None:
        self._payload, self._offset = payload, offset

    def put(self, part: Tensor) -> None:
        end = self._offset + part.nbytes
        if part.numel():
            target = self._payload[self._offset : end].view(part.dtype)
            target.view(part.shape).copy_(part)
        self._offset = end


class _Reader:
    """Reads tensors consecutively from a payload."""

    def __init__(self, payload: Tensor) -> None:
        self._payload, self._offset = payload, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        end = self._offset + math.prod(shape) * dtype.itemsize
        if end > len(self._payload):
            raise UpdateError(f"its {len(self._payload)} bytes are too few for its blocks")
        part = self._payload[self._offset : end].view(dtype).view(shape)
        self._offset = end
        return part

    def end(self) -> None:
        if self._offset != len(self._payload):
            raise UpdateError(f"its {len(self._payload)} bytes are not {self._offset}")


def _sizes(shapes: Iterable[tuple[int, int]], codec: Codec) -> tuple[int, int]:
    """The sizes of an update's tensor in bytes: of values of four bytes, and of codes."""
    shapes = list(shapes)
    values = sum(map(math.prod, shapes))
    if codec == "none":
        return 0, 4 * values
    return 4 * sum(math.prod(_heads(shape)) for shape in shapes), values


def bytes_of_all(layout: Layout, tensors: int, codec: Codec) -> int:
    """Bytes of the updates that send each block of a stage once, with `tensors` tensors."""
    shapes = zip([group.rows for group in layout.groups], layout.widths, strict=True)
    return 4 * layout.blocks + tensors * sum(_sizes(shapes, codec))


def largest_update(layout: Layout, tensors: int) -> int:
    """Most bytes of a snapshot's update with `tensors` tensors, in any codec."""
    return 4 * layout.blocks + 4 * layout.values * tensors


# The sender


class SnapshotUpdate(NamedTuple):
    """One update of a running snapshot, for a holder."""

    payload: Tensor  # uint8 on the CPU; valid until the next `take`, and permanently after `lost`
    blocks: int
    tensors: int
    codec: Codec
    perturbation: float  # ||weights - the holder's then||; NaN while it lacks blocks


@torch.no_grad()
def whole_update(layout: Layout, tensors: Sequence[Tensor]) -> SnapshotUpdate:
    """The update that has a whole state, weights and moments, exactly."""
    payload = torch.empty(4 * layout.values * len(tensors), dtype=torch.uint8)
    copies = payload.view(torch.float32).view(len(tensors), -1)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return SnapshotUpdate(payload, layout.blocks, len(tensors), "none", 0.0)


class SentSnapshot:
    """The record of a running snapshot: each update has a fraction of the blocks, those that
    changed most. While the holder lacks blocks, it has at least the fraction `at_first`.

    `sent`: float32 [values], the holder's weights (with int8 the restored ones), on the device of
    the weights; `taken`: int64 [blocks], the step of each, or NEVER.
    """

    def __init__(
        self, layout: Layout, fraction: float, codec: Codec, moments: bool, at_first: float = 0.0
    ) -> None:
        self._layout, self._codec = layout, codec
        self._count, self._at_first = (
            max(1, math.ceil(share * layout.blocks - 1e-9))
            for share in (fraction, max(fraction, at_first))
        )
        self._tensors = layout.tensors if moments else 1
        self.sent = torch.empty(0)
        self.taken = torch.full((layout.blocks,), NEVER)

    @torch.no_grad()
    def take(self, step: int, tensors: Sequence[Tensor]) -> SnapshotUpdate:
        """Makes the holder's next update of the flat tensors at this step."""
        layout, weights = self._layout, tensors[0]
        if not len(self.sent):
            self.sent = torch.zeros_like(weights)
        distances = layout.squared_distances(weights, self.sent)
        count = self._at_first if self.lacks_blocks else self._count
        chosen = choose(self.rank(distances, step), self.taken, count)
        self.taken[chosen] = step
        payload, restored = encode(layout, chosen, tensors[: self._tensors], self._codec)
        layout.scatter(self.sent, chosen, restored)
        distances[chosen] = 0.0
        perturbation = math.nan
        if not self.lacks_blocks:
            if self._codec != "none":
                unrounded = layout.gather(weights, chosen)
                distances[0] += sum(
                    torch.linalg.vector_norm(exact(x - y), dtype=torch.float64).item() ** 2
                    for x, y in zip(unrounded, restored, strict=True)
                )
            perturbation = math.sqrt(distances.sum().item())
        return SnapshotUpdate(payload, len(chosen), self._tensors, self._codec, perturbation)

    def rank(self, distances: Tensor, step: int) -> Tensor:
        """The order of blocks in an update, by their squared distances from what was sent."""
        return -distances

    def lost(self, step: int) -> None:
        """Records that updates of `step` may not have arrived."""
        self.taken[self.taken == step] = NEVER

    @property
    def lacks_blocks(self) -> bool:
        """Whether blocks were never sent."""
        return bool((self.taken == NEVER).any())

    @property
    def memory_bytes(self) -> int:
        """Bytes kept here besides the stage itself."""
        return self.sent.nbytes + self.taken.nbytes


# The holder


class Staleness(NamedTuple):
    """The steps that the blocks of a held snapshot are of."""

    oldest: int
    mean: float
    newest: int


class HeldSnapshot:
    """A holder's running snapshot of a stage: `tensors`, flat float32, 1 to 3; missing blocks have
    arbitrary values. Construction is fast; the first write to a block allocates its memory."""

    def __init__(self, layout: Layout, tensors: int) -> None:
        self._layout = layout
        self.tensors = [torch.empty(layout.values) for _ in range(tensors)]
        self.taken = torch.full((layout.blocks,), NEVER)
        self.missing = layout.blocks  # number of blocks

    def overlay(self, step: int, blocks: Tensor, values: Sequence[Sequence[Tensor]]) -> None:
        """Writes the blocks of a decoded update."""
        for flat, parts in zip(self.tensors, values, strict=True):
            self._layout.scatter(flat, blocks, parts)
        self.taken[blocks] = step
        self.missing = int((self.taken == NEVER).sum())

    def staleness(self) -> Staleness:
        """How old the blocks of a snapshot are that lacks none."""
        steps = self.taken
        return Staleness(int(steps.min()), float(steps.double().mean()), int(steps.max()))

    @classmethod
    def whole(cls, layout: Layout, step: int, payload: Tensor) -> HeldSnapshot:
        """A whole state as a snapshot, in the memory of a payload that `decode` has checked."""
        held = cls(layout, 0)
        held.tensors = list(torch.split(payload.view(torch.float32), layout.values))
        held.taken.fill_(step)
        held.missing = 0
        return held

    @property
    def memory_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.tensors) + self.taken.nbytes


# Placement of copies and snapshots


def steps_between(fraction: float, period: int) -> int:
    """Steps between two updates of a running snapshot: r C, for the fraction r of the blocks."""
    return max(1, round(fraction * period))


class CopyRoute(NamedTuple):
    """The sender and the holders of a stage's snapshot."""

    sender: str
    holders: tuple[str, ...]


def route(
    stage: int, members: Iterable[tuple[str, int]], stages: int, machine: Callable[[str], str] = str
) -> CopyRoute | None:
    """The route of the snapshot of `stage` among members (node, stage); None: no sender.

    A stage's first node, by name, sends. The snapshot goes to `holder_count` holders. `machine`:
    maps a node to its machine. A holder on a machine that serves the stage would be lost with it,
    and two holders need two machines. So other stages replace unsuitable ones; the result may have
    no holder.
    """
    at: dict[int, list[str]] = {}
    for node, of in sorted(members):
        at.setdefault(of, []).append(node)
    if stage not in at:
        return None
    most, used = holder_count(stage, stages), {machine(node) for node in at[stage]}
    holders: list[str] = []
    for of in _holder_stages(stage, stages) * most:
        holder = next((node for node in at.get(of, ()) if machine(node) not in used), None)
        if holder is not None and len(holders) < most:
            holders.append(holder)
            used.add(machine(holder))
    return CopyRoute(at[stage][0], tuple(holders))


def _holder_stages(stage: int, stages: int) -> list[int]:
    """The stages whose nodes may hold the snapshot of `stage`, by preference."""
    ring, first = stages + 1, holder_stage(stage, stages)
    return sorted(
        (of for of in range(ring) if of != stage),
        key=lambda of: (min((of - first) % ring, (first - of) % ring), (of - stage) % ring),
    )
