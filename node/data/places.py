"""Files where they lie: here, or where fsspec finds them (`s3://`, `gs://`, `https://`, ...)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from planaria.node.data.corpus import CorpusError
from planaria.node.extras import remedy

if TYPE_CHECKING:
    from collections.abc import Collection


def is_remote(place: str) -> bool:
    return "://" in place


def opened(place: str) -> BinaryIO:
    """To read. Raises CorpusError, OSError."""
    if not is_remote(place):
        return Path(place).open("rb")
    system, path = system_of(place)
    try:
        return cast("BinaryIO", system.open(path, "rb"))
    except Exception as error:  # each file system raises what it likes
        raise CorpusError(f"can't read {place}: {said(error)}") from error


def files_in(place: str, suffixes: Collection[str]) -> list[str]:
    """The file at `place`, or the files of that folder that end so, in the order of their paths.
    Raises CorpusError."""
    return _remote_files(place, suffixes) if is_remote(place) else _files(Path(place), suffixes)


def stamp(place: str) -> str:
    """Another one when the file is another one, as far as its file system tells; of a dataset there
    is none. Raises CorpusError."""
    try:
        if place.startswith("hf:"):
            return ""
        if not is_remote(place):
            of = Path(place).stat()
            return f"{of.st_size} {of.st_mtime_ns}"
        system, path = system_of(place)
        return str(system.ukey(path))
    except CorpusError:
        raise
    except Exception as error:
        raise CorpusError(f"can't read {place}: {said(error)}") from error


def _files(path: Path, suffixes: Collection[str]) -> list[str]:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in suffixes and f.is_file())
        if not files:
            raise CorpusError(f"the folder {path} has no file that ends in {', '.join(suffixes)}")
        return list(map(str, files))
    if not path.exists():
        raise CorpusError(
            f"there is no file or folder {path}: check the path, or write hf:{path} for a dataset"
        )
    if path.suffix.lower() not in suffixes:
        raise CorpusError(f"{path} does not end in {', '.join(suffixes)}: rename or convert it")
    return [str(path)]


def _remote_files(place: str, suffixes: Collection[str]) -> list[str]:
    if place.lower().endswith(tuple(suffixes)):
        return [place]
    system, path = system_of(place)
    try:
        found = sorted(system.find(path))
    except Exception as error:
        raise CorpusError(f"can't list {place}: {said(error)}") from error
    files = [system.unstrip_protocol(one) for one in found if one.lower().endswith(tuple(suffixes))]
    if not files:
        raise CorpusError(f"there is no file at {place} that ends in {', '.join(suffixes)}")
    return files


def system_of(place: str) -> tuple[Any, str]:
    """The file system, and the path there. Raises CorpusError."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {place}: {remedy(error)}") from error
    try:
        system, path = url_to_fs(place)
    except ImportError as error:  # fsspec knows what the protocol needs, and it isn't there
        raise CorpusError(f"can't read {place}: {error}; pip install it beside planaria") from error
    except ValueError as error:
        raise CorpusError(f"can't read {place}: {error}") from error
    return system, str(path)


def said(error: Exception) -> str:
    if isinstance(error.__cause__, OSError):  # of which fsspec makes a file that isn't there
        return str(error.__cause__)
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return str(error) or type(error).__name__
