"""A stage's state in a peer's memory: what to send next, as which bytes, and the peer's side of it.

SCAR (Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4.2) keeps a
running checkpoint of which it renews a fraction r of the blocks every rC steps, instead of all of
them every C steps: those blocks that changed most since they were last saved. Here the running
checkpoint is in the memory of a peer, which starts with nothing; so whatever the choice is, blocks
that were never sent go first.

A block is a row of a parameter. `weights`, `first_moment` and `second_moment` are the flat float32
tensors of node/stage/optimizer.py, parameter after parameter. An update is the same rows of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from planaria.recovery.decide import Policy, holder_stage

Choice = Literal["priority", "round", "random"]
Codec = Literal["none", "int8"]

CODECS: Final = get_args(Codec)
NEVER: Final = -1  # step of a block that hasn't been sent
PIECE: Final = 256  # values of a row that share a scale in int8, at most
SCRATCH: Final = 1 << 18  # values worked on at a time: what fits a cache isn't allocated anew
MANTISSA: Final = 19  # bits that int8 drops of the 23 of a second moment's root
LARGEST: Final = torch.finfo(torch.float32).max
SMALLEST: Final = torch.finfo(torch.float32).tiny


class UpdateError(ValueError):
    """These bytes can't be an update of this stage; the message says why."""


class ValuesError(UpdateError):
    """They are one, of values from which nothing can be rebuilt."""


# Blocks


class Group(NamedTuple):
    """Neighbouring blocks of equal width, whichever parameters they belong to."""

    first: int  # block
    rows: int
    width: int
    offset: int  # of the first block's values


class Layout:
    """Where the blocks of a stage lie in its flat tensors.

    A parameter of two dimensions or more has a block for each row, any other is one block. Raises
    ValueError for a stage without values.
    """

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self._groups: list[Group] = []
        self.blocks = self.values = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            width = math.prod(shape) // max(rows, 1)
            if rows * width == 0:
                raise ValueError(f"a parameter of shape {tuple(shape)} has no values")
            self._append(rows, width)
        if not self.values:
            raise ValueError("a stage without parameters has no blocks")

    def _append(self, rows: int, width: int) -> None:
        if self._groups and self._groups[-1].width == width:
            last = self._groups[-1]
            self._groups[-1] = last._replace(rows=last.rows + rows)
        else:
            self._groups.append(Group(self.blocks, rows, width, self.values))
        self.blocks += rows
        self.values += rows * width

    @property
    def widths(self) -> list[int]:
        """Values of a block in each tensor of `rows`."""
        return [group.width for group in self._groups]

    def rows(self, flat: Tensor) -> list[Tensor]:
        """All blocks of `flat`, as views [rows, width], one for each width in turn."""
        return [
            flat[g.offset : g.offset + g.rows * g.width].view(g.rows, g.width) for g in self._groups
        ]

    def split(self, blocks: Tensor) -> list[Tensor]:
        """Growing numbers of blocks, int64 [k] on the CPU, as indices into each of `rows`."""
        firsts = torch.tensor([group.first for group in self._groups[1:]], dtype=torch.int64)
        parts = blocks.tensor_split(torch.searchsorted(blocks, firsts))
        return [part - group.first for part, group in zip(parts, self._groups, strict=True)]

    def gather(self, flat: Tensor, blocks: Tensor) -> list[Tensor]:
        """Copies of these blocks, [k, width] for each width in turn."""
        indices = [at.to(flat.device) for at in self.split(blocks)]
        return [rows.index_select(0, at) for rows, at in zip(self.rows(flat), indices, strict=True)]

    def pieces(self, flat: Tensor, blocks: Tensor) -> Iterator[Tensor]:
        """`gather`, some rows at a time."""
        for rows, at in zip(self.rows(flat), self.split(blocks), strict=True):
            for these in torch.split(at.to(flat.device), _some(rows.shape[1])):
                yield rows.index_select(0, these)

    def shapes(self, blocks: Tensor) -> list[tuple[int, int]]:
        """Of what `gather` gives."""
        parts = zip(self.split(blocks), self.widths, strict=True)
        return [(len(part), width) for part, width in parts]

    def scatter(self, flat: Tensor, blocks: Tensor, values: Sequence[Tensor]) -> None:
        """Put there what `gather` gave."""
        for rows, at, new in zip(self.rows(flat), self.split(blocks), values, strict=True):
            rows.index_copy_(0, at.to(flat.device), new)

    def squared_distances(self, a: Tensor, b: Tensor) -> Tensor:
        """float64 [blocks] on the CPU: of each block of `a` from the same of `b`, squared."""
        norms = []
        scratch = torch.empty(max(SCRATCH, *self.widths), device=a.device)
        for x, y in zip(self.rows(a), self.rows(b), strict=True):
            some = _some(x.shape[1])
            for part, other in zip(torch.split(x, some), torch.split(y, some), strict=True):
                difference = scratch[: part.numel()].view(part.shape)
                torch.sub(part, other, out=difference)
                norms.append(torch.linalg.vector_norm(difference, dim=1, dtype=torch.float64))
        return torch.cat(norms).square().cpu()


def _some(width: int) -> int:
    """Rows that are worked on at a time."""
    return max(1, SCRATCH // width)


def choose(
    choice: Choice, count: int, distances: Tensor, taken: Tensor, seed: Sequence[int]
) -> Tensor:
    """The numbers of `count` blocks, growing, int64.

    `distances`: float64 [blocks], how far each is from what was last sent; `taken`: int64 [blocks],
    the step it was sent at, or NEVER. `priority` takes the farthest, `round` the longest unsent,
    `random` any, drawn from `seed` alone; all of them what was never sent before anything else, and
    of equals the first.
    """
    match choice:
        case "priority":
            rank = -distances
        case "round":
            rank = taken.double()
        case "random":
            drawn = np.random.default_rng(list(seed)).permutation(len(taken))
            rank = torch.from_numpy(drawn).double()
    rank = rank.masked_fill(taken == NEVER, -math.inf)
    return torch.argsort(rank, stable=True)[:count].sort().values


# int8


def quantize(rows: Tensor, toward_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Scales, float32 [k, pieces], and codes, uint8 [k, width] (the bits of int8), of float32 rows.

    A piece is at most 256 values of one row, and its scale max(abs) / 127. The error of a value is
    at most half a scale; a whole one, and never upwards, with `toward_zero`.
    """
    pieces = _pieces(rows)
    scales = (pieces.abs().amax(dim=2) / 127).clamp_min(SMALLEST)
    codes = pieces / scales[:, :, None]
    codes = codes.trunc_() if toward_zero else codes.round_()
    return scales, _rows(codes.clamp_(-127, 127).to(torch.int8), rows.shape[1]).view(torch.uint8)


def dequantize(scales: Tensor, codes: Tensor) -> Tensor:
    """float32 [k, width] of what `quantize` made, the same bits on every machine."""
    pieces = _pieces(codes.view(torch.int8).float())
    return _rows(pieces.mul_(scales[:, :, None]), codes.shape[1])


def quantize_second_moment(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Tops, int32 [k, pieces], and codes, uint8 [k, width], of rows that are not negative.

    A code stands for sqrt(v), rounded *up* to 4 bits behind the point: counted down from the
    largest of its piece, 16 codes to each factor of two, so that it reaches a 50,000th of it; what
    is smaller rounds up to that, and only 0 becomes 0. With equal steps, as `quantize` has them,
    small moments would become 0, and Adam divides by them. So restored, sqrt(v) is never smaller
    than it was, and with a first moment rounded towards zero no element of an Adam step is larger
    than the exact one's (by more than float32's own rounding). And down to that 50,000th of its
    piece's largest it is at most a 16th too large.
    """
    bits = rows.sqrt().view(torch.int32)  # the bits of floats above 0 grow as the floats do
    codes = _pieces((bits + ((1 << MANTISSA) - 1)) >> MANTISSA)
    tops = codes.amax(dim=2)
    below = (codes - tops[:, :, None] + 255).clamp_min_(1)
    return tops, _rows(torch.where(codes > 0, below, 0).to(torch.uint8), rows.shape[1])


def dequantize_second_moment(tops: Tensor, codes: Tensor) -> Tensor:
    """float32 [k, width] of what `quantize_second_moment` made, the same bits on every machine."""
    below = _pieces(codes.int())
    bits = (below - 255 + tops[:, :, None]).clamp_min_(0) << MANTISSA
    roots = torch.where(below > 0, bits, 0).view(torch.float32)
    return _rows(roots.square_().clamp_max_(LARGEST), codes.shape[1])


def _pieces(rows: Tensor) -> Tensor:
    """[k, pieces, values], the last piece filled up with 0."""
    count, width = rows.shape
    size = min(PIECE, width)
    if tail := width % size:
        rows = torch.nn.functional.pad(rows, (0, size - tail))
    return rows.reshape(count, -(-width // size), size)


def _rows(pieces: Tensor, width: int) -> Tensor:
    return pieces.flatten(1)[:, :width].contiguous()


# An update as bytes


def encode(
    layout: Layout, blocks: Tensor | None, tensors: Sequence[Tensor], codec: Codec
) -> tuple[Tensor, list[Tensor]]:
    """The update's bytes, uint8 on the CPU, and the weights as the other side will have them.

    `tensors`: weights, or weights and both moments, flat; `blocks`: int64 [k], growing, or None for
    all of them. The bytes: the blocks' numbers (int32; not for all of them), the values of four
    bytes, the codes.
    """
    numbers = [] if blocks is None else [blocks.int()]
    chosen = torch.arange(layout.blocks) if blocks is None else blocks
    shapes = layout.shapes(chosen)
    values = sum(map(math.prod, shapes))
    heads = 0 if codec == "none" else 4 * sum(math.prod(_heads(shape)) for shape in shapes)
    codes = 4 * values if codec == "none" else values
    ahead = 4 * sum(map(len, numbers)) + len(tensors) * heads
    payload = torch.empty(ahead + len(tensors) * codes, dtype=torch.uint8)  # of the CPU
    first, second = _Writer(payload, 0), _Writer(payload, ahead)
    for number in numbers:
        first.put(number)
    restored = tensors[0].new_empty(values)
    weights = _Writer(restored.view(torch.uint8), 0)
    for of, flat in enumerate(tensors):
        for rows in layout.pieces(flat, chosen):
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
    """The blocks, int64 [count], and of each of the `tensors` (1 or 3) their values, as `gather`.

    With codec none the values share the payload's memory. Raises UpdateError for what can't be: the
    size, numbers of blocks that don't grow or aren't there, second moments below 0; and ValuesError
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
            [reader.take(_heads(shape), _head_dtype(of)) for shape in shapes]
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
    some = _some(codes.shape[1])
    pieces = (torch.split(of, some) for of in (values, heads, codes))
    for rows, head, code in zip(*pieces, strict=True):
        rows.copy_(restore(head, code))
    return values


def _head_dtype(tensor: int) -> torch.dtype:
    return torch.int32 if tensor == 2 else torch.float32


def _heads(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales, or tops, of so many rows of this width."""
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
    """Puts tensors into a payload, uint8, one behind the other."""

    def __init__(self, payload: Tensor, offset: int) -> None:
        self._payload, self._offset = payload, offset

    def put(self, part: Tensor) -> None:
        end = self._offset + part.nbytes
        if part.numel():
            there = self._payload[self._offset : end].view(part.dtype)
            there.view(part.shape).copy_(part)
        self._offset = end


class _Reader:
    """Takes tensors from the front of a payload."""

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


def largest_update(layout: Layout, tensors: int) -> int:
    """Bytes that no update of so many tensors exceeds, in any codec."""
    return 4 * layout.blocks + 4 * layout.values * tensors


# The sender's side


class SnapshotUpdate(NamedTuple):
    """What goes to a holder at a time."""

    payload: Tensor  # uint8 on the CPU; its own until the next `take`, and after `lost` for ever
    blocks: int
    tensors: int
    codec: Codec
    perturbation: float  # ||weights - what the holder has then||; NaN while it lacks blocks


class Sent(Protocol):
    """What one holder was sent, and so what it is to be sent next."""

    def take(self, at: tuple[int, int], tensors: Sequence[Tensor]) -> SnapshotUpdate:
        """The next update, from the flat tensors as they are at this lineage and step."""

    def lost(self, step: int) -> None:
        """The update of `step` may not have come."""

    @property
    def memory_bytes(self) -> int:
        """What is kept here besides the stage itself."""


class SentCopy:
    """All weights, every time. May serve several holders: an update is made once, and kept until
    one of another step is taken, which then takes its memory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._at: tuple[int, int] | None = None
        self._payload = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, at: tuple[int, int], tensors: Sequence[Tensor]) -> SnapshotUpdate:
        if self._at != at:
            if not len(self._payload):
                self._payload = torch.empty(4 * self._layout.values, dtype=torch.uint8)
            self._payload.view(torch.float32).copy_(tensors[0])
            self._at = at
        return SnapshotUpdate(self._payload, self._layout.blocks, 1, "none", 0.0)

    def lost(self, step: int) -> None:
        self._at, self._payload = None, torch.empty(0, dtype=torch.uint8)

    @property
    def memory_bytes(self) -> int:
        return self._payload.nbytes


class SentSnapshot:
    """A running snapshot: a fraction of the blocks at a time.

    `sent`: float32 [values], the weights as the holder has them (with int8 the restored ones), on
    the device of the weights; `taken`: int64 [blocks], the step that each is of, or NEVER.
    """

    def __init__(
        self,
        layout: Layout,
        choice: Choice,
        fraction: float,
        codec: Codec,
        moments: bool,
        seed: Sequence[int],
    ) -> None:
        self._layout, self._choice, self._codec = layout, choice, codec
        self._count = max(1, math.ceil(fraction * layout.blocks - 1e-9))
        self._tensors = 3 if moments else 1
        self._seed = tuple(seed)
        self.sent = torch.empty(0)
        self.taken = torch.full((layout.blocks,), NEVER)

    @torch.no_grad()
    def take(self, at: tuple[int, int], tensors: Sequence[Tensor]) -> SnapshotUpdate:
        _, step = at
        layout, weights = self._layout, tensors[0]
        if not len(self.sent):
            self.sent = torch.zeros_like(weights)
        distances = layout.squared_distances(weights, self.sent)
        seed = (*self._seed, step)
        chosen = choose(self._choice, self._count, distances, self.taken, seed)
        self.taken[chosen] = step
        blocks = None if len(chosen) == layout.blocks else chosen
        payload, restored = encode(layout, blocks, tensors[: self._tensors], self._codec)
        layout.scatter(self.sent, chosen, restored)
        distances[chosen] = 0.0
        perturbation = math.nan
        if not (self.taken == NEVER).any():
            if self._codec != "none":
                exact = layout.gather(weights, chosen)
                distances[0] += sum(
                    torch.linalg.vector_norm(x - y, dtype=torch.float64).item() ** 2
                    for x, y in zip(exact, restored, strict=True)
                )
            perturbation = math.sqrt(distances.sum().item())
        return SnapshotUpdate(payload, len(chosen), self._tensors, self._codec, perturbation)

    def lost(self, step: int) -> None:
        self.taken[self.taken == step] = NEVER

    @property
    def memory_bytes(self) -> int:
        return self.sent.nbytes + self.taken.nbytes


# The holder's side


class Staleness(NamedTuple):
    """The steps that the blocks of a snapshot are of."""

    oldest: int
    mean: float
    newest: int


class HeldSnapshot:
    """What a holder has of a stage's running snapshot: `tensors`, flat float32, 1 or 3 of them, of
    which the blocks that are missing have any values. To be made takes no time: whoever puts blocks
    in place waits for the memory."""

    def __init__(self, layout: Layout, tensors: int) -> None:
        self._layout = layout
        self.tensors = [torch.empty(layout.values) for _ in range(tensors)]
        self.taken = torch.full((layout.blocks,), NEVER)
        self.missing = layout.blocks  # blocks

    def overlay(self, step: int, blocks: Tensor, values: Sequence[Sequence[Tensor]]) -> None:
        """Put in place what `decode` gave."""
        for flat, parts in zip(self.tensors, values, strict=True):
            self._layout.scatter(flat, blocks, parts)
        self.taken[blocks] = step
        self.missing = int((self.taken == NEVER).sum())

    def staleness(self) -> Staleness:
        """Raises ValueError while blocks are missing."""
        if self.missing:
            raise ValueError(f"{self.missing} of {self._layout.blocks} blocks haven't come yet")
        steps = self.taken
        return Staleness(int(steps.min()), float(steps.double().mean()), int(steps.max()))

    @classmethod
    def whole(cls, layout: Layout, step: int, payload: Tensor, tensors: int) -> HeldSnapshot:
        """A copy of everything that `decode` has found right, in the payload's own memory."""
        held = cls(layout, 0)
        held.tensors = list(torch.split(payload.view(torch.float32), layout.values))
        assert len(held.tensors) == tensors
        held.taken.fill_(step)
        held.missing = 0
        return held

    @property
    def memory_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.tensors) + self.taken.nbytes


# Who holds what


def steps_between(fraction: float, period: int) -> int:
    """Two updates of a running snapshot: of the fraction r of the blocks, every r C steps."""
    return max(1, round(fraction * period))


def sent_as(policy: Policy, stage: int, first: int) -> Literal["copy", "snapshot"] | None:
    """As what the state of `stage` travels to peers by this policy; None: it doesn't.

    Where stages are guessed, stage 0 can't be, and for the `first` body stages a guess is worst:
    all others build on them.
    """
    if policy == "snapshot":
        return "snapshot"
    if policy not in ("checkfree", "checkfree+"):
        return None
    if stage == 0:
        return "copy"
    return "snapshot" if stage <= first else None


class CopyRoute(NamedTuple):
    """Who sends, to whom."""

    sender: str
    holders: tuple[str, ...]


def route(
    kind: Literal["copy", "snapshot"],
    stage: int,
    members: Iterable[tuple[str, int]],
    stages: int,
    machine: Callable[[str], str] = str,
) -> CopyRoute | None:
    """How this state of `stage` travels among these members (node, stage); None: nobody sends it.

    The first node of a stage, by name, speaks for it. Copies are of stage 0 and go to stages 1 and
    L, a snapshot goes to one stage. `machine` is the one that a node of that name is on: what is
    held on one that serves the stage itself would be lost with it, and two copies are on two, so
    other stages take the place of those that can't; there may be none.
    """
    at: dict[int, list[str]] = {}
    for node, of in sorted(members):
        at.setdefault(of, []).append(node)
    if stage not in at or (kind == "copy" and stage != 0):
        return None
    most, used = len({1, stages}) if kind == "copy" else 1, {machine(node) for node in at[stage]}
    holders: list[str] = []
    for of in _candidates(kind, stage, stages) * most:
        found = next((node for node in at.get(of, ()) if machine(node) not in used), None)
        if found is not None and len(holders) < most:
            holders.append(found)
            used.add(machine(found))
    return CopyRoute(at[stage][0], tuple(holders))


def _candidates(kind: Literal["copy", "snapshot"], stage: int, stages: int) -> list[int]:
    """Stages whose nodes may hold it, those that are to first."""
    ring = stages + 1
    others = [of for of in range(ring) if of != stage]
    if kind == "copy":
        return sorted(others, key=lambda of: of not in (1, stages))
    first = holder_stage(stage, stages)
    return sorted(
        others, key=lambda of: (min((of - first) % ring, (first - of) % ring), (of - stage) % ring)
    )


def held_at(stage: int, stages: int) -> Iterator[tuple[Literal["copy", "snapshot"], int]]:
    """What nodes of `stage` hold where each is on a machine of its own: kinds, and of which
    stage."""
    if stage in (1, stages):
        yield "copy", 0
    for of in range(stages + 1):
        if of != stage and holder_stage(of, stages) == stage:
            yield "snapshot", of
