"""What a node is called over all of its identities: an id in a file of its folder.

A node joins under a new identity each time, so that nobody takes it for what it was; who was
evicted for cause is told apart by its instance (bootstrap/quarantine.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger("planaria")

ID_BYTES: Final = 16


class Instance(NamedTuple):
    id: str
    held: int | None  # descriptor of the locked file; None: the id is that of this process only
    number: int | None = None  # that no other process with this folder has; None as `held`


def find_instance(folder: Path | None) -> Instance:
    """Finds the id in `folder`, or makes one. Processes that share a folder have one each, of the
    first file that no other one holds. Without a folder, or one that can be written, the id is as
    new as the process."""
    if folder is None:
        return Instance(secrets.token_hex(ID_BYTES), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(filter(None, (_take(folder, number) for number in count())))
    except OSError as error:
        log.warning("%s keeps no id of this node: %s", folder, error.strerror)
        return Instance(secrets.token_hex(ID_BYTES), None)


def release(instance: Instance) -> None:
    """Lets another process have it."""
    if instance.held is not None:
        os.close(instance.held)


def _take(folder: Path, number: int) -> Instance | None:
    """None: another process has it. Raises OSError."""
    held = os.open(folder / f"instance-{number}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.read(held, 4 * ID_BYTES).decode("ascii", errors="replace").strip()
        if len(found) != 2 * ID_BYTES or not set(found) <= set("0123456789abcdef"):
            found = secrets.token_hex(ID_BYTES)
            os.ftruncate(held, 0)
            os.pwrite(held, f"{found}\n".encode(), 0)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:
        os.close(held)
        raise
    return Instance(found, held, number)
