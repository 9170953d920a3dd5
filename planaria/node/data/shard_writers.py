"""Writers of token shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from planaria.node.data.blocks import write_checksums
from planaria.node.data.corpus import BEGINS, SCORED, CorpusError, Split, TokenShard

SHARD_TOKENS = 64 << 20
BLOCK_TOKENS = 1 << 20
"""Tokens copied at a time."""


class SplitWriter:
    """Writes the token shards of one split, and with `masked` their masks."""

    def __init__(self, folder: Path, name: str, dtype: str, masked: bool) -> None:
        self._tokens = ShardWriter(folder, name, ".bin", dtype)
        self._masks = ShardWriter(folder, name, ".mask", "uint8") if masked else None
        self._documents, self._text_bytes, self._scored = 0, 0, 0

    def write(
        self, document: NDArray[np.int64], mask: NDArray[np.uint8] | None, text_bytes: int
    ) -> None:
        """Append a document's tokens. `mask`: of its first tokens; later tokens are not scored."""
        self._documents += 1
        self._text_bytes += text_bytes
        self._tokens.write(document)
        if self._masks is not None and mask is not None:
            marks = np.zeros(len(document), np.int64)
            marks[: len(mask)] = SCORED * mask
            marks[:1] |= BEGINS
            self._masks.write(marks)
            self._scored += int(mask.sum())

    def append(self, split: Split, folder: Path) -> None:
        """Append another writer's split, with its folder. Raises CorpusError, OSError."""
        self._documents += split.documents
        self._text_bytes += split.text_bytes
        self._scored += split.scored or 0
        self._tokens.append(split.shards, folder)
        if self._masks is not None:
            self._masks.append(split.masks or [], folder)

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        if self._masks is not None:
            self._masks.close()

    def split(self) -> Split:
        return Split(
            documents=self._documents,
            text_bytes=self._text_bytes,
            shards=self._tokens.shards,
            masks=None if self._masks is None else self._masks.shards,
            scored=None if self._masks is None else self._scored,
        )


class ShardWriter:
    """Writes files of numbers, tokens or masks, each closed and on disk before the next begins."""

    def __init__(self, folder: Path, name: str, suffix: str, dtype: str) -> None:
        self._folder, self._name, self._suffix = folder, name, suffix
        self._dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self.shards: list[TokenShard] = []
        self._file: BinaryIO | None = None
        self._hash = xxhash.xxh3_128()
        self._tokens = 0  # in the open shard

    def append(self, shards: list[TokenShard], folder: Path) -> None:
        """Append the content of another writer's shards. Raises CorpusError, OSError."""
        for shard in shards:
            for block in _read_blocks(folder / shard.name, shard, self._dtype):
                self.write(block)

    def write(self, document: NDArray[np.integer[Any]]) -> None:
        while document.size:
            if self._file is None:
                name = f"{self._name}-{len(self.shards):05d}{self._suffix}"
                self._file = (self._folder / name).open("wb")
            head, document = np.split(document, [SHARD_TOKENS - self._tokens])
            data = head.astype(self._dtype, copy=False).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens += head.size
            if self._tokens == SHARD_TOKENS:
                self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        file = Path(self._file.name)
        self.shards.append(
            TokenShard(
                name=file.name,
                tokens=self._tokens,
                checksum=self._hash.hexdigest(),
                blocks=write_checksums(file),
            )
        )
        self._file, self._tokens = None, 0
        self._hash.reset()


def _read_blocks(
    file: Path, shard: TokenShard, dtype: np.dtype[Any]
) -> Iterator[NDArray[np.integer[Any]]]:
    """A shard's blocks. Raises OSError, and CorpusError after the last on a wrong checksum."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as data:
        while (block := np.fromfile(data, dtype, BLOCK_TOKENS)).size:
            digest.update(block.tobytes())
            yield block
    if digest.hexdigest() != shard.checksum:
        raise CorpusError(f"{file} is damaged: remove the folder {file.parent}, and try again")
