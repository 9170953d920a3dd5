"""Checksums of a shard's blocks, with which a reader of a part of the shard verifies it.

They are in a file beside the shard, with its name and `.blocks`: xxh3_64 of each BLOCK bytes, as 8
bytes each, big-endian, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

BLOCK: Final = 16 << 10
"""Block size in bytes; the last block of a shard may be shorter."""
SUM: Final = 8
_AT_ONCE: Final = 1 << 20


def checksums_name(shard: str) -> str:
    """File name of the list of a shard's block checksums."""
    return f"{shard}.blocks"


def write_checksums(file: Path) -> str:
    """Write a shard's block checksums. Returns the list's own, xxh3_128 in hex. Raises OSError."""
    checksums = b"".join(_block_checksums(file))
    file.with_name(checksums_name(file.name)).write_bytes(checksums)
    return xxhash.xxh3_128_hexdigest(checksums)


def block_matches(block: bytes, number: int, sums: bytes) -> bool:
    return xxhash.xxh3_64_digest(block) == sums[number * SUM : (number + 1) * SUM]


def checksums_length(size: int) -> int:
    """Length in bytes of the list of block checksums of a shard of `size` bytes."""
    return -(-size // BLOCK) * SUM


def _block_checksums(file: Path) -> Iterator[bytes]:
    with file.open("rb") as data:
        while piece := memoryview(data.read(_AT_ONCE)):
            for at in range(0, len(piece), BLOCK):
                yield xxhash.xxh3_64_digest(piece[at : at + BLOCK])
