"""Frozen matrices of fewer bits.

- `bf16`: rounded to bfloat16
- `int8`: 127 steps to the largest magnitude of each row
- `nf4`: 16 quantiles of a normal distribution, scaled to the largest magnitude of each 64 values
  (QLoRA; Dettmers et al. 2023, arXiv 2305.14314, appendix E), without double quantization

All machines make the same bits of the same values, since packing uses only operations that IEEE 754
rounds exactly. A packed matrix packs to itself. A layer unpacks its matrix for each pass.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planaria.node.model.shape import NF4_BLOCK, Base

log = logging.getLogger("planaria")

NF4: Final = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""Values of the codes, float32 [16]."""
MIDDLES: Final = (NF4[1:] + NF4[:-1]) / 2
BINS: Final = 64
"""Bins per unit, each with at most one of the middles."""
BINS_OF_MIDDLES: Final = (MIDDLES * BINS + BINS).int()
LOWEST: Final = (BINS_OF_MIDDLES[:, None] < torch.arange(2 * BINS + 1)).sum(0, dtype=torch.uint8)
"""The lowest code of each bin, uint8 [129]."""
MIDDLE_OF: Final = torch.full((2 * BINS + 1,), 2.0).index_put((BINS_OF_MIDDLES,), MIDDLES)
"""The middle in each bin, float32 [129]; 2: none."""
PAIRS: Final = torch.stack([NF4.repeat_interleave(16), NF4.repeat(16)], dim=1)
"""Values of the two codes in a byte, float32 [256, 2]."""
SMALLEST: Final = 1e-38
"""Scale of values that are all 0, as in bitsandbytes."""
AT_ONCE: Final = 1 << 14
"""Number of values that are packed, or compared, at a time: too few for torch to divide among
threads. On busy cores these would wait for each other 16 ms in each operation."""
BY_LIBRARY: tuple[str, ...] = ("cpu", "cuda", "xpu")
"""Devices whose matrices bitsandbytes unpacks. On others it would load code from a hub."""


class Packed(NamedTuple):
    codes: Tensor  # uint8 [n], n a multiple of 4
    scales: Tensor  # float32 [m]

    @property
    def words(self) -> Tensor:
        """A matrix's bits as float32 [n / 4 + m], in which form they are hashed and sent."""
        return torch.cat([self.codes.view(torch.float32), self.scales])

    @classmethod
    def of(cls, words: Tensor, shape: tuple[int, ...], base: Base) -> Packed:
        """A matrix [out, in] as a view of its words."""
        codes, _ = packed_sizes(shape, base)
        return cls(words[: codes // 4].view(torch.uint8), words[codes // 4 :])


def packed_sizes(shape: torch.Size | tuple[int, ...], base: Base) -> tuple[int, int]:
    """Numbers of codes' bytes and of scales of a packed matrix [out, in]."""
    rows, columns = shape
    size = rows * columns
    match base:
        case "nf4":
            blocks = -(-size // NF4_BLOCK)
            return blocks * NF4_BLOCK // 2, blocks
        case "int8":
            return size + -size % 4, rows
        case "bf16":
            return 2 * size + -2 * size % 4, 0


def pack(pieces: Iterable[Tensor], shape: torch.Size | tuple[int, ...], base: Base) -> Packed:
    """Pack a matrix [out, in] on the CPU; of its pieces, float32, few are kept at a time."""
    words = torch.zeros(words_in(shape, base))
    for _ in packing(pieces, shape, base, words):
        pass
    return Packed.of(words, shape, base)


def packing(
    pieces: Iterable[Tensor], shape: torch.Size | tuple[int, ...], base: Base, words: Tensor
) -> Iterator[int]:
    """Pack a matrix as `pack` does into its `words`, which are zeros, step by step. Yields after
    each how many of the first words are final."""
    (codes, scales), done = Packed.of(words, shape, base), 0
    unit = {"nf4": NF4_BLOCK, "int8": shape[1], "bf16": 1}[base]
    values_in_word = {"nf4": 8, "int8": 4, "bf16": 2}[base]
    for values in _in_units(pieces, unit):
        end = done + len(values)
        match base:
            case "nf4":
                blocks = F.pad(values, (0, -len(values) % NF4_BLOCK)).view(-1, NF4_BLOCK)
                largest = blocks.abs().amax(dim=1).clamp_(min=SMALLEST)
                shares = (blocks / largest[:, None]).flatten()
                bins = (shares * BINS + BINS).int()  # a tenth of the time of torch.bucketize
                is_upper = shares > MIDDLE_OF.index_select(0, bins)
                nibbles = LOWEST.index_select(0, bins).add_(is_upper)
                scales[done // NF4_BLOCK :][: len(blocks)] = largest
                codes[done // 2 :][: len(nibbles) // 2] = nibbles[0::2] << 4 | nibbles[1::2]
            case "int8":
                rows = values.view(-1, unit)
                largest = scales[done // unit : end // unit]
                largest.copy_((rows.abs().amax(dim=1) / 127).clamp_(min=SMALLEST))
                steps = (rows / largest[:, None]).round_()
                codes[done:end].view(torch.int8).copy_(steps.flatten())
            case "bf16":
                codes[2 * done : 2 * end].view(torch.bfloat16).copy_(values)
        done = end
        yield done // values_in_word
    yield len(words)


def _in_units(pieces: Iterable[Tensor], unit: int) -> Iterator[Tensor]:
    """A matrix's values, flat, some whole units at a time; the last unit may have fewer."""
    left = torch.empty(0)
    for piece in pieces:
        for part in torch.split(piece.flatten(), AT_ONCE):
            values = torch.cat((left, part))
            whole = len(values) - len(values) % unit
            left = values[whole:]
            if whole:
                yield values[:whole]
    if len(left):
        yield left


def unpack(packed: Packed, shape: torch.Size, base: Base, dtype: torch.dtype) -> Tensor:
    """The values of a packed matrix [out, in], rounded from float32 to `dtype`."""
    codes, scales = packed
    size = shape.numel()
    match base:
        case "nf4" if codes.device.type in BY_LIBRARY and (library := _bitsandbytes()) is not None:
            state = library.QuantState(
                absmax=scales,
                shape=(len(scales), NF4_BLOCK),  # 0.50.2 unpacks some others wrongly on CPUs
                code=NF4.to(codes.device),
                blocksize=NF4_BLOCK,
                quant_type="nf4",
                dtype=dtype,
            )
            weight: Tensor = library.dequantize_4bit(codes[:, None], state)
            return weight.flatten()[:size].view(shape)
        case "nf4":
            pairs = PAIRS.to(codes.device)[codes.int()]
            blocks = pairs.view(-1, NF4_BLOCK) * scales[:, None]
            return blocks.to(dtype).flatten()[:size].view(shape)
        case "int8":
            return (codes[:size].view(torch.int8).view(shape) * scales[:, None]).to(dtype)
        case "bf16":
            return codes[: 2 * size].view(torch.bfloat16).view(shape).to(dtype)


@cache
def _bitsandbytes() -> Any:
    """`bitsandbytes.functional`; None: it can't be used here."""
    if find_spec("bitsandbytes") is None:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    kernels = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # it would load code from a hub
    try:
        from bitsandbytes import functional
    except Exception as error:  # noqa: BLE001 (of a library that isn't needed)
        log.warning("nf4 is slower here, since bitsandbytes can't be loaded: %s", error)
        return None
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return functional


class QuantizedLinear(nn.Module):
    """A frozen linear module with a packed matrix, on the device of `linear`."""

    def __init__(self, linear: nn.Linear, base: Base) -> None:
        super().__init__()
        self.shape, self.base = linear.weight.shape, base
        codes, scales = packed_sizes(self.shape, base)
        device = linear.weight.device
        self.codes = nn.Buffer(torch.empty(codes, dtype=torch.uint8, device=device))
        self.scales = nn.Buffer(torch.empty(scales, device=device))
        self.bias = linear.bias
        self._product = _uncompiled_product()

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def out_features(self) -> int:
        return self.shape[0]

    def put(self, packed: Packed) -> None:
        self.codes.data, self.scales.data = packed

    def weight(self, dtype: torch.dtype) -> Tensor:
        return unpack(Packed(self.codes, self.scales), self.shape, self.base, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [.., in] by the packed matrix, in the dtype of x or of autocast."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        out: Tensor = self._product(x, self)
        return out


class _Product(torch.autograd.Function):
    """The product with a packed matrix, which is unpacked again for the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        context.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight(x.dtype), bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ context.layer.weight(gradient.dtype), None


@cache
def _uncompiled_product() -> Callable[[Tensor, QuantizedLinear], Tensor]:
    """The product with a packed matrix, which `torch.compile` leaves as it is. Made when a layer
    is, since that loads torch's compiler, which takes a second."""

    def product(x: Tensor, layer: QuantizedLinear) -> Tensor:
        out: Tensor = _Product.apply(x, layer)  # type: ignore[no-untyped-call]
        return out

    disable: Any = torch.compiler.disable
    uncompiled: Callable[[Tensor, QuantizedLinear], Tensor] = disable(product)
    return uncompiled


def quantize(module: nn.Module, base: Base) -> None:
    """Replace all linear modules of a stage by packed ones, with undefined matrices."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, local = name.rpartition(".")
            setattr(module.get_submodule(parent), local, QuantizedLinear(linear, base))


Slot: TypeAlias = nn.Parameter | QuantizedLinear
"""A parameter, or the layer whose packed matrix is in its place."""


def slots(module: nn.Module) -> Iterator[Slot]:
    """All parameters and packed matrices of a module, in the order of `named_parameters`."""
    passed = set()  # tied parameters come once
    for part in module.modules():
        packed: list[Slot] = [part] if isinstance(part, QuantizedLinear) else []
        for slot in (*packed, *part.parameters(recurse=False)):
            if id(slot) not in passed:
                passed.add(id(slot))
                yield slot


def size_of(slot: Slot) -> int:
    """Number of words of a parameter or packed matrix."""
    return words_in(slot.shape, slot.base if isinstance(slot, QuantizedLinear) else None)


def words_in(shape: tuple[int, ...], base: Base | None) -> int:
    """Number of words of a parameter, or of a matrix packed as `base`."""
    if base is None:
        return math.prod(shape)
    codes, scales = packed_sizes(shape, base)
    return codes // 4 + scales


def words_of(slot: Slot) -> Tensor:
    """All bits of a slot as float32 [n]; a parameter's are its values."""
    if isinstance(slot, QuantizedLinear):
        return Packed(slot.codes, slot.scales).words
    return slot.detach().flatten().float()


def put_words(slot: Slot, words: Tensor) -> None:
    """Make a slot a view of `words_of` such a slot."""
    if isinstance(slot, QuantizedLinear):
        slot.put(Packed.of(words, slot.shape, slot.base))
    else:
        slot.data = words.view(slot.shape)


def put_values(slot: Slot, pieces: Iterable[Tensor]) -> None:
    """Set a slot to float32 values of any shapes, on the CPU, concatenated."""
    if isinstance(slot, QuantizedLinear):
        slot.put(pack(pieces, slot.shape, slot.base))
    else:
        first = 0
        for piece in pieces:
            slot.data.view(-1)[first : first + piece.numel()] = piece.flatten()
            first += piece.numel()


class _PartlyRead:
    """The words of a slot, float32 [n], of which the first are final."""

    def __init__(self, size: int, read: Callable[[Tensor], Iterator[int]]) -> None:
        self._words = torch.zeros(size)
        self._final, self._reading = 0, read(self._words)

    def first(self, count: int) -> Tensor:
        """The first `count` words; they are read as far as that. Raises what reading does."""
        while self._final < count:
            self._final = next(self._reading)
        return self._words[:count]


class Words:
    """The words of several slots in a row. `read(slot, words)` puts a slot's into `words`, float32
    [n] of zeros on the CPU, step by step as they are needed, and yields after each how many of the
    first are final. Those of the last two slots stay in memory."""

    def __init__(self, sizes: Sequence[int], read: Callable[[int, Tensor], Iterator[int]]) -> None:
        self._sizes, self._read = sizes, read
        self._newest: dict[int, _PartlyRead] = {}
        self.size = sum(sizes)

    def between(self, start: int, stop: int) -> Tensor:
        """The words [start, stop), float32, as a copy."""
        words = torch.empty(stop - start)
        first = -start
        for number, size in enumerate(self._sizes):
            end = first + size
            if first < len(words) and end > 0:
                part, skipped = words[max(first, 0) : end], max(-first, 0)
                part.copy_(self._first(number, skipped + len(part))[skipped:])
            first = end
        return words

    def _first(self, number: int, count: int) -> Tensor:
        """The first words of a slot. An error of its reading is raised; the next call begins it
        anew."""
        slot = self._newest.pop(number, None)
        slot = slot or _PartlyRead(self._sizes[number], partial(self._read, number))
        words = slot.first(count)
        self._newest = dict([*self._newest.items(), (number, slot)][-2:])
        return words
