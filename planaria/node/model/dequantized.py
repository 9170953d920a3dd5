"""Checkpoints whose matrices are quantized already, read as the values that these stand for.

- bitsandbytes, nf4 and fp4: each block's codes are values of a table, `W.quant_map`, scaled by
  `W.absmax`. With double quantization (QLoRA; Dettmers et al. 2023, arXiv 2305.14314, section 3)
  these scales are codes themselves. The values are rounded to the dtype in `W.quant_state`.
- bitsandbytes, int8: 127 steps to the largest magnitude of each row, `SCB`
- FP8: float8_e4m3fn, scaled by block (`W_scale_inv`; DeepSeek-V3, arXiv 2412.19437, section 3.3),
  or, of compressed-tensors, by tensor or row (`W_scale`)

Values are computed in the order of bitsandbytes and transformers, so all machines have the same
bits. The codes stay on disk until they are read, some at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from planaria.node.model.checkpoint import CHUNK, TensorPlace
from planaria.node.model.config import UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS: Final = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Kinds of parts, by safetensors' dtype."""
DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STATE: Final = ".quant_state.bitsandbytes__"
"""Precedes nf4 or fp4, in the name of a tensor with JSON."""
PARTS: Final = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
CODES_OF: Final = {"SCB": "I8", "weight_scale_inv": "F8_E4M3", "weight_scale": "F8_E4M3"}
"""Kinds of a module's codes, by the name of their scales."""
STEP: Final = 7.874015718698502e-3
"""1 / 127, as bitsandbytes has it."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint's matrix of codes and scales, in place of a float32 tensor's TensorPlace."""

    shape: tuple[int, ...]
    codes: TensorPlace
    parts: Mapping[str, TensorPlace]  # by the ends of their names
    kind = "F32"

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def check(self, fits: bool, **sizes: int) -> None:
        """Check that the matrix has all parts in these sizes. Raises UnsupportedModelError."""
        places = {"codes": self.codes, **self.parts}
        actual = {name: place.size for name, place in places.items()}
        kinds = [place.kind for place in places.values()]
        if not fits or actual != sizes or not {*kinds} <= KINDS.keys():
            raise UnsupportedModelError(
                f"{self.file}: a quantized matrix of {list(self.shape)} values has parts of "
                f"{actual} values ({', '.join(kinds)}), not {sizes}: quantize the model anew"
            )


@dataclass(frozen=True)
class FourBit(Quantized):
    dtype: torch.dtype
    block: int  # values of a scale
    outer: int  # scales of a nested scale; 0: they aren't nested
    offset: float  # of nested scales

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """The matrix's values, float32, in pieces. Raises OSError."""
        table, scales = _load(self.parts["quant_map"]), _load(self.parts["absmax"])
        if self.outer:
            of_scales = _load(self.parts["nested_absmax"]).repeat_interleave(self.outer)
            steps = _load(self.parts["nested_quant_map"])[scales.int()]
            scales = steps * of_scales[: len(scales)] + self.offset
        for start in range(0, self.size, CHUNK):
            stop = min(self.size, start + CHUNK)
            pairs = _load(self.codes, start // 2, -(-stop // 2))
            codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[: stop - start]
            blocks = scales[start // self.block : -(-stop // self.block)]
            values = table[codes.int()] * blocks.repeat_interleave(self.block)[: stop - start]
            yield values.to(self.dtype).float().numpy()


@dataclass(frozen=True)
class Scaled(Quantized):
    block: tuple[int, int]  # rows and columns of a scale
    factor: float  # of all values

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """The matrix's values, float32, in pieces. Raises OSError."""
        (rows, columns), (high, wide) = self.shape, self.block
        scales = _load(self.parts["scales"]).float().view(-(-rows // high), -1)
        for first in range(0, rows, step := max(1, CHUNK // columns)):
            last = min(rows, first + step)
            of_rows = scales[torch.arange(first, last) // high]
            codes = _load(self.codes, first * columns, last * columns).float().view(-1, columns)
            values = codes * of_rows.repeat_interleave(wide, dim=1)[:, :columns] * self.factor
            yield values.flatten().numpy()


def dequantized(
    places: Mapping[str, TensorPlace], quantization: Mapping[str, Any]
) -> dict[str, TensorPlace | FourBit | Scaled]:
    """A checkpoint's tensors, with quantized ones in place of their parts. `quantization`: the
    quantization_config of its config.json. Raises UnsupportedModelError, OSError, NO_SENSE."""
    left, whole = dict(places), dict[str, FourBit | Scaled]()
    for name in places:
        weight, _, kind = name.rpartition(STATE)
        module, _, part = name.rpartition(".")
        if kind and weight in left:
            state = json.loads(bytes(_load(left.pop(name)).tolist()))
            parts = {part: left.pop(at) for part in PARTS if (at := f"{weight}.{part}") in left}
            whole[weight] = _four_bit(left.pop(weight), parts, state)
        elif part in CODES_OF and (weight := f"{module}.weight") in left:
            order = left.pop(f"{weight}_format", None)
            if order is not None and any(_load(order)):
                raise UnsupportedModelError(f"{weight} isn't stored by rows: quantize it anew")
            whole[weight] = _scaled(left.pop(weight), left.pop(name), part, quantization)
    return {**left, **whole}


def _four_bit(
    codes: TensorPlace, parts: Mapping[str, TensorPlace], state: Mapping[str, Any]
) -> FourBit:
    as_bytes = codes._replace(kind="U8", shape=(codes.size * KINDS[codes.kind].itemsize,))
    shape, dtype = tuple(map(int, state["shape"])), DTYPES[state["dtype"]]
    block, outer = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
    offset = float(state.get("nested_offset", 0))
    matrix = FourBit(shape, as_bytes, parts, dtype, block, outer, offset)
    blocks = -(-matrix.size // block)
    nested = {"nested_absmax": -(-blocks // outer), "nested_quant_map": 256} if outer else {}
    halves, fits = -(-matrix.size // 2), CHUNK % block == 0
    matrix.check(fits, codes=halves, absmax=blocks, quant_map=16, **nested)
    return matrix


def _scaled(
    codes: TensorPlace, scales: TensorPlace, part: str, quantization: Mapping[str, Any]
) -> Scaled:
    rows, columns = codes.shape
    block = (rows, columns) if scales.size == 1 else (1, columns)
    if part == "weight_scale_inv" and (given := quantization.get("weight_block_size", (128, 128))):
        block = (int(given[0]), int(given[1]))
    factor = STEP if part == "SCB" else 1.0
    matrix = Scaled(codes.shape, codes, {"scales": scales}, block, factor)
    blocks = -(-rows // block[0]) * -(-columns // block[1])
    matrix.check(codes.kind == CODES_OF[part], codes=codes.size, scales=blocks)
    return matrix


def _load(place: TensorPlace, start: int = 0, stop: int | None = None) -> Tensor:
    """Values of a part, from `start` to before `stop`, flat, as they are stored. Raises OSError."""
    kind = KINDS[place.kind]
    size = kind.itemsize * ((place.size if stop is None else stop) - start)
    with place.file.open("rb") as file:
        file.seek(place.first + kind.itemsize * start)
        content = bytearray(file.read(size))
    if len(content) < size:
        raise OSError(f"{place.file} ends before its tensors do")
    return torch.frombuffer(content, dtype=kind)
