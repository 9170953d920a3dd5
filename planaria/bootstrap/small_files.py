"""Small files named by users: run files, invites, indexes. A pipe or a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LARGEST = 16 << 20
"""Maximum size in bytes."""


def read_small(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file of at most `largest` bytes. Raises OSError for any other."""
    at_once = os.O_NONBLOCK  # otherwise opening a pipe waits for its writer
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | at_once), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes", str(path))
    return content
