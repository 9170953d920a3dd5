"""Files that are replaced atomically, and files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

PUBLIC, SECRET, SECRET_FOLDER = 0o666, 0o600, 0o700  # permissions, before the umask


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
    flush_folder(path.parent)


def write_secret(path: Path, content: bytes) -> None:
    """Replaces a file that only its owner may read, in such a folder. Raises OSError."""
    path.parent.mkdir(mode=SECRET_FOLDER, parents=True, exist_ok=True)
    replace_file(path, content, SECRET)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
