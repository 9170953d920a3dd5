"""Files, local or where fsspec finds them (`s3://`, `gs://`, `https://`, ...)."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from planaria.node.data.corpus import CorpusError
from planaria.node.machine.extras import remedy

if TYPE_CHECKING:
    from collections.abc import Collection


PACKED: Final = (".gz", ".zst")


@dataclass
class Listing:
    """Input files in order, and those left out: by reason, count and bytes (as far as known)."""

    files: list[str] = field(default_factory=list)
    left_out: dict[str, tuple[int, int]] = field(default_factory=dict)

    def leave_out(self, why: str, number: int, size: int) -> None:
        before = self.left_out.get(why, (0, 0))
        self.left_out[why] = before[0] + number, before[1] + size

    def extend(self, other: Listing) -> None:
        self.files += other.files
        for why, figures in other.left_out.items():
            self.leave_out(why, *figures)


def is_remote(place: str) -> bool:
    return "://" in place


def open_file(place: str) -> BinaryIO:
    """Open an input file, local or remote, to read. Raises CorpusError, OSError."""
    if not is_remote(place):
        return Path(place).open("rb")
    system, path = file_system_of(place)
    try:
        return cast("BinaryIO", system.open(path, "rb"))
    except Exception as error:  # each file system raises what it likes
        raise CorpusError(f"can't read {place}: {describe_error(error)}") from error


def packing(place: str) -> str:
    """Compression suffix of a file name: one of PACKED, or an empty string."""
    return next((suffix for suffix in PACKED if place.lower().endswith(suffix)), "")


@contextmanager
def unpacked(place: str) -> Iterator[BufferedReader]:
    """An input file's content, decompressed. Raises CorpusError, OSError, EOFError, zlib.error."""
    with open_file(place) as file, _decompressor(place, file) as data:
        yield BufferedReader(data)


def _decompressor(place: str, file: BinaryIO) -> Any:
    """Decompressing reader of an open file, by its suffix. Raises CorpusError."""
    if packing(place) == ".gz":
        return gzip.GzipFile(fileobj=file)
    if packing(place) != ".zst":
        return file
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {place}: {remedy(error)}") from error
    return pyarrow.input_stream(file, compression="zstd")


def files_in(place: str, suffixes: Collection[str]) -> Listing:
    """The input file at `place`, or all in that folder, linked folders included, with one of these
    suffixes, in the order of their paths. Hidden files are left out. Raises CorpusError."""
    return (
        _remote_files(place, suffixes) if is_remote(place) else _local_files(Path(place), suffixes)
    )


def file_version(place: str) -> str:
    """Text that identifies a version of an input file, as far as its file system tells; empty for a
    dataset. Raises CorpusError."""
    try:
        if place.startswith("hf:"):
            return ""
        if not is_remote(place):
            of = Path(place).stat()
            return f"{of.st_size} {of.st_mtime_ns}"
        system, path = file_system_of(place)
        return str(system.ukey(path))
    except CorpusError:
        raise
    except Exception as error:
        raise CorpusError(f"can't read {place}: {describe_error(error)}") from error


def file_size(place: str) -> int:
    """Size of a local input file in bytes; 0 if unknown."""
    if is_remote(place) or place.startswith("hf:"):
        return 0
    try:
        return Path(place).stat().st_size
    except OSError:  # a link to nothing
        return 0


def _local_files(path: Path, suffixes: Collection[str]) -> Listing:
    """`files_in` for a local path."""
    ends = tuple(suffixes)
    if path.is_dir():
        listing = Listing()
        for file in _walk(path, listing):
            why = _why_left_out(str(file.relative_to(path)), ends)
            if why or not file.is_file():
                why = why or "pipes, devices and links to nothing"
                listing.leave_out(why, 1, file_size(str(file)))
            else:
                listing.files.append(str(file))
        if not listing.files:
            raise CorpusError(f"the folder {path} has no file that ends in {', '.join(suffixes)}")
        return listing
    if not path.exists():
        raise CorpusError(
            f"there is no file or folder {path}: check the path, or write hf:{path} for a dataset"
        )
    if not path.is_file():
        raise CorpusError(f"{path} is no regular file: write its content into one")
    if not path.name.lower().endswith(ends):
        raise CorpusError(f"{path} does not end in {', '.join(suffixes)}: rename or convert it")
    return Listing([str(path)])


def _walk(path: Path, listing: Listing) -> list[Path]:
    """All files below a local folder, in order. Links to folders are followed; each folder is
    entered once, so cycles end. Raises CorpusError."""
    files, entered = [], set()

    def refuse(error: OSError) -> None:
        raise CorpusError(f"can't list {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(path, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in entered:
            listing.leave_out("folders that are linked once more", 1, 0)
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        files += [Path(folder, name) for name in names]
    return sorted(files)


def _why_left_out(path: str, ends: tuple[str, ...]) -> str:
    """Why an input file, with this path in its folder, isn't read; empty when it is."""
    if any(part.startswith(".") for part in path.split("/")):
        return "hidden files"
    return "" if path.lower().endswith(ends) else "files of other kinds"


def _remote_files(place: str, suffixes: Collection[str]) -> Listing:
    """`files_in` for a URL."""
    ends = tuple(suffixes)
    if place.lower().endswith(ends):
        return Listing([place])
    system, path = file_system_of(place)
    try:
        files = sorted(system.find(path))
    except Exception as error:
        raise CorpusError(f"can't list {place}: {describe_error(error)}") from error
    listing = Listing()
    for file in files:
        if why := _why_left_out(file.removeprefix(path), ends):
            listing.leave_out(why, 1, 0)
        else:
            listing.files.append(system.unstrip_protocol(file))
    if not listing.files:
        raise CorpusError(f"there is no file at {place} that ends in {', '.join(suffixes)}")
    return listing


def file_system_of(place: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path there. Raises CorpusError."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {place}: {remedy(error)}") from error
    try:
        system, path = url_to_fs(place)
    except ImportError as error:  # fsspec names the package that the protocol needs
        raise CorpusError(f"can't read {place}: {error}; pip install it beside planaria") from error
    except ValueError as error:
        raise CorpusError(f"can't read {place}: {error}") from error
    return system, str(path)


def describe_error(error: Exception) -> str:
    """A file system's error in words."""
    if isinstance(error.__cause__, OSError):  # fsspec turns a missing file into its own error
        return str(error.__cause__)
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return str(error) or type(error).__name__
