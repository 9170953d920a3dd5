"""Remote prepared data, read with fsspec when its tokens are needed.

A local folder is its stand-in: the index, the tokenizer, and PLACE, which has the URL of the
shards. A sample takes one or two blocks of a shard, verified against their checksums (blocks.py),
so a node needn't download all of it. Blocks of the next windows are prefetched.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from planaria.bootstrap.files import replace_file
from planaria.node.data import blocks
from planaria.node.data.blocks import BLOCK
from planaria.node.data.corpus import (
    PLACE,
    CorpusError,
    TokenShard,
    file_checksum,
    read_index,
)
from planaria.node.data.file_access import describe_error, file_system_of, is_remote
from planaria.node.data.tokenizer import CONFIG, TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("planaria")

CACHED: Final = 256 << 20
"""Bytes of blocks that a corpus keeps in memory."""
AT_ONCE: Final = 16  # concurrent reads
PAUSES: Final = (0.5, 2.0)  # seconds before further attempts to read
PATIENCE: Final = 60.0
"""Seconds to wait for a block."""
LONGEST_INDEX: Final = 256 << 20  # bytes, also of a tokenizer


class RemoteFolder:
    """A folder at a URL. Any thread may read it."""

    def __init__(self, url: str) -> None:
        """Open the file system of the URL. Raises CorpusError."""
        self.url = url.rstrip("/")
        self._system, self._path = file_system_of(self.url)

    def read(self, name: str, first: int, end: int) -> bytes:
        """Bytes [first, end) of a file in the remote folder. Raises CorpusError."""
        for pause in PAUSES:
            try:
                return self._read(name, first, end)
            except CorpusError as error:
                log.warning("%s; retry in %.1f s", error, pause)
                time.sleep(pause)
        return self._read(name, first, end)

    def read_file(self, name: str) -> bytes:
        """The content of a small file in the remote folder. Raises CorpusError."""
        try:
            with self._system.open(f"{self._path}/{name}", "rb") as file:
                content: bytes = file.read(LONGEST_INDEX + 1)
        except Exception as error:  # each file system raises what it likes
            raise CorpusError(f"can't read {self.url}/{name}: {describe_error(error)}") from error
        if len(content) > LONGEST_INDEX:
            raise CorpusError(f"{self.url}/{name} has more than {LONGEST_INDEX} bytes")
        return content

    def has(self, name: str) -> bool:
        """Whether the remote folder has this file. Raises CorpusError."""
        try:
            return bool(self._system.exists(f"{self._path}/{name}"))
        except Exception as error:
            raise CorpusError(f"can't read {self.url}/{name}: {describe_error(error)}") from error

    def _read(self, name: str, first: int, end: int) -> bytes:
        where = f"bytes {first} to {end} of {self.url}/{name}"
        try:
            data: bytes = self._system.cat_file(f"{self._path}/{name}", start=first, end=end)
        except Exception as error:
            raise CorpusError(f"can't read {where}: {describe_error(error)}") from error
        if len(data) != end - first:
            raise CorpusError(
                f"can't read {where}: got {len(data)} bytes. Either the file was changed, or its "
                "server doesn't serve ranges of bytes"
            )
        return data


class Blocks:
    """The blocks of remote shards used last, and the reads in progress. Any thread may use it."""

    def __init__(self) -> None:
        self._reading = ThreadPoolExecutor(AT_ONCE, "reading-data")
        self.ask = lru_cache(CACHED // BLOCK)(self._ask)

    def _ask(self, shard: ShardElsewhere, number: int) -> Future[bytes]:
        return self._reading.submit(shard.read, number)


class ShardElsewhere:
    """A remote shard, with the interface of corpus._ShardFile."""

    def __init__(
        self,
        place: RemoteFolder,
        blocks_read: Blocks,
        folder: Path,
        shard: TokenShard,
        dtype: str,
        vocabulary: int,
    ) -> None:
        import numpy as np

        self._place, self._folder, self.shard, self._blocks = place, folder, shard, blocks_read
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._vocabulary = vocabulary
        self._size = shard.tokens * self._dtype.itemsize  # bytes
        self._listing = threading.Lock()

    def tokens(self, offset: int, count: int) -> NDArray[np.unsignedinteger]:
        """Up to `count` tokens of a remote shard from `offset` on, as far as it goes. Raises
        CorpusError."""
        import numpy as np

        numbers = self._blocks_with(offset, count)
        data = b"".join(map(self._await_block, numbers))
        at = offset * self._dtype.itemsize - numbers.start * BLOCK
        return np.frombuffer(data[at : at + count * self._dtype.itemsize], self._dtype)

    def prefetch(self, offset: int, count: int) -> None:
        """Begin to read the blocks that have these tokens."""
        for number in self._blocks_with(offset, count):
            self._blocks.ask(self, number)

    def _blocks_with(self, offset: int, count: int) -> range:
        """Numbers of the blocks that have these tokens."""
        first = offset * self._dtype.itemsize
        end = min(self._size, first + count * self._dtype.itemsize)
        return range(first // BLOCK, -(-end // BLOCK))

    def verify(self) -> None:
        """Verify all blocks of the remote shard, as training reads them. Raises CorpusError."""
        for number in range(-(-self._size // BLOCK)):
            self._await_block(number)

    def check(self) -> None:
        """Do nothing: each block is verified when it arrives."""

    def _await_block(self, number: int) -> bytes:
        block = self._blocks.ask(self, number)
        try:
            return block.result(PATIENCE)
        except CorpusError:
            return self.read(number)
        except TimeoutError as error:
            raise CorpusError(
                f"a block of {self._place.url}/{self.shard.name} was not received in "
                f"{PATIENCE:.0f} s"
            ) from error

    def read(self, number: int) -> bytes:
        """A block of the remote shard, read and verified. Raises CorpusError."""
        import numpy as np

        first = number * BLOCK
        block = self._place.read(self.shard.name, first, min(self._size, first + BLOCK))
        where = f"block {number} of {self._place.url}/{self.shard.name}"
        if not blocks.block_matches(block, number, self._sums()):
            raise CorpusError(
                f"{where} is damaged, its checksum is wrong: copy the data there anew"
            )
        highest = int(np.frombuffer(block, self._dtype).max(initial=0))
        if highest >= self._vocabulary:
            raise CorpusError(
                f"{where} has token {highest}, but by its index tokens are below "
                f"{self._vocabulary}: copy the data there anew"
            )
        return block

    def _sums(self) -> bytes:
        """Checksums of the remote shard's blocks, cached beside the index. Raises CorpusError."""
        name, length = blocks.checksums_name(self.shard.name), blocks.checksums_length(self._size)
        cached = self._folder / name
        with self._listing:
            if not cached.is_file() or not self._is_checksum_list(checksums := cached.read_bytes()):
                checksums = self._place.read(name, 0, length)
                if not self._is_checksum_list(checksums):
                    raise CorpusError(
                        f"{self._place.url}/{name} is damaged, its checksum is wrong: copy it "
                        "there anew"
                    )
                replace_file(cached, checksums)
            return checksums

    def _is_checksum_list(self, checksums: bytes) -> bool:
        return xxhash.xxh3_128_hexdigest(checksums) == self.shard.blocks


def local_folder_of(place: str, cache: Path) -> Path:
    """Folder of the data at `place`, for a URL its stand-in in `cache`. Raises CorpusError."""
    if not is_remote(place):
        return Path(place)
    folder = cache / xxhash.xxh3_64_hexdigest(place.rstrip("/").encode())
    make_stand_in(place, folder)
    return folder


def shard_constructor(folder: Path) -> Callable[[TokenShard, str, int], ShardElsewhere]:
    """Constructor of a stand-in's shards, from an entry, dtype and vocabulary. Raises
    CorpusError."""
    file = folder / PLACE
    try:
        url = json.loads(file.read_text(encoding="utf-8"))["place"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{file} is damaged ({error}): remove {folder}, and try again") from error
    return partial(ShardElsewhere, RemoteFolder(str(url)), Blocks(), folder)


def make_stand_in(url: str, folder: Path) -> None:
    """Make `folder` a stand-in for the prepared data at `url`, as it is now. Raises CorpusError."""
    if folder.exists() and not (folder / PLACE).is_file() and any(folder.iterdir()):
        raise CorpusError(f"{folder} exists, but isn't a link to data: choose another folder")
    place = RemoteFolder(url)
    names = ["index.json", TOKENIZER, *(name for name in (CONFIG, TEMPLATE) if place.has(name))]
    contents = {name: place.read_file(name) for name in names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            replace_file(folder / name, content)
        replace_file(folder / PLACE, json.dumps({"place": place.url}).encode())
    except OSError as error:
        raise CorpusError(f"can't write {folder}: {error.strerror}") from error
    if file_checksum(folder / TOKENIZER) != read_index(folder).tokenizer:
        raise CorpusError(f"{place.url}/tokenizer.json is damaged: copy it there anew")
