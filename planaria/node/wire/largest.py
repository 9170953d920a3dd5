"""The largest values of a row in few bytes: how many they are, and where they were.

Of k places in a row of n, ascending, each is cut in two (Elias and Fano). The lower bits, about
log2(n / k) of them, lie side by side. The upper ones rise from place to place, so they are told by
how much: for each step up a 0, for each place a 1. That is about log2(n / k) + 2 bits a place,
hardly more than any code needs, and as many for each choice of k, so that whoever gets them knows
beforehand how many bytes are due.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planaria.node.wire.frames import Codec, Form, WireError, encoded_size

Places = NDArray[np.int64]

FEW = 8
"""In a row of which one value in so many isn't zero, or fewer, those are told by their places."""


def count_of(size: int, share: float) -> int:
    """Values that travel of a row of that size."""
    return min(size, max(1, round(share * size)))


def forms(size: int, share: float) -> list[Form]:
    """What a row of that size travels as: places, and values."""
    count = count_of(size, share)
    return [
        Form("uint8", (places_size(count, size),)),
        Form("float32", (count,), "int8"),
    ]


def row_bytes(size: int, codec: Codec | Literal["topk"], share: float) -> int:
    """Of float32 values in this codec, or of that share of them."""
    if codec != "topk":
        return encoded_size(size, "float32", codec)
    count = count_of(size, share)
    return places_size(count, size) + encoded_size(count, "float32", "int8")


def places_size(count: int, size: int) -> int:
    """Bytes of so many places in a row of that size."""
    low, ups = _bits(count, size)
    return -(-low * count // 8) + -(-ups // 8)


def _bits(count: int, size: int) -> tuple[int, int]:
    """Lower bits of a place, and the bits that tell all upper ones."""
    if not count:
        return 0, 0
    low = (size // count).bit_length() - 1
    return low, count + ((size - 1) >> low)


def pack(places: Places, size: int) -> NDArray[np.uint8]:
    """Of ascending places below `size`."""
    low, ups = _bits(len(places), size)
    lower = (places[:, None] >> np.arange(low)) & 1
    upper = np.zeros(ups, np.uint8)
    upper[(places >> low) + np.arange(len(places))] = 1
    return np.concatenate((np.packbits(lower.astype(np.uint8)), np.packbits(upper)))


def unpack(packed: NDArray[Any], count: int, size: int) -> Places:
    """`count` places below `size`, ascending. Raises WireError for bytes that `pack` doesn't
    make."""
    if packed.dtype != np.uint8 or packed.shape != (places_size(count, size),):
        raise WireError(
            f"{count} places in a row of {size} are uint8 [{places_size(count, size)}], not "
            f"{packed.dtype} {list(packed.shape)}"
        )
    low, ups = _bits(count, size)
    cut = -(-low * count // 8)
    lower, upper = np.unpackbits(packed[:cut]), np.unpackbits(packed[cut:])
    ones = np.flatnonzero(upper)
    if len(ones) != count or lower[low * count :].any() or upper[ups:].any():
        raise WireError(f"{len(ones)} places, where {count} are due, or bits behind them")
    bits = lower[: low * count].reshape(count, low).astype(np.int64)
    places: Places = (ones - np.arange(count) << low) + (bits << np.arange(low)).sum(axis=1)
    if count and (places[-1] >= size or (np.diff(places) <= 0).any()):
        raise WireError(f"places in a row of {size} that don't rise, or lie beyond it")
    return places
