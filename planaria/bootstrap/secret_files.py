"""Files that only their owner may read, written atomically."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER, FILE = 0o700, 0o600


def write_secret(path: Path, content: bytes) -> None:
    """Writes the file and flushes it and its folder. Raises OSError."""
    path.parent.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
