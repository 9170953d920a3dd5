"""Files that are replaced atomically, that only their owner may read, or that must be small."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

PUBLIC, SECRET, SECRET_FOLDER = 0o666, 0o600, 0o700  # permissions, before the umask
SMALL = 16 << 20
"""Maximum bytes of a small file."""


def replace_file(path: Path, content: bytes, permissions: int = PUBLIC) -> None:
    """Writes the file atomically; flushes it and its folder. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_secret(path: Path, content: bytes) -> None:
    """Replaces a file that only its owner may read, in such a folder. Raises OSError."""
    path.parent.mkdir(mode=SECRET_FOLDER, parents=True, exist_ok=True)
    replace_file(path, content, SECRET)


def flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_small(path: Path, largest: int = SMALL) -> bytes:
    """The content of a regular file of at most `largest` bytes, such as users name: run files,
    invites, indexes. A pipe or a device may never end. Raises OSError for any other."""
    at_once = os.O_NONBLOCK  # otherwise opening a pipe waits for its writer
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | at_once), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes", str(path))
    return content
