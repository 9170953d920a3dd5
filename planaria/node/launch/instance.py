"""Identity of a node over all of its starts: a key in a file of its folder.

A node joins under a new id each time, so that it isn't taken for its predecessor. The hash of its
key, its instance, stays: it authenticates the node, and identifies one that was evicted for cause
(bootstrap/quarantine.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from planaria.bootstrap.identity import Identity

log = logging.getLogger("planaria")

LONGEST: Final = 4096  # bytes of a key's file


class Instance(NamedTuple):
    identity: Identity
    lock: int | None  # descriptor of the locked file; None: the key is only this process's
    number: int | None = None  # unique among processes with this folder; None as `lock`


def find_instance(folder: Path | None) -> Instance:
    """Find a node's key in `folder`, or make one. Each process that shares a folder has its own,
    from the first file that isn't locked. Without a writable folder, the key is the process's."""
    if folder is None:
        return Instance(Identity.generate(), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(filter(None, (_lock_key(folder, number) for number in count())))
    except OSError as error:
        log.warning("this node's key can't be kept in %s: %s", folder, error.strerror)
        return Instance(Identity.generate(), None)


def release_key(instance: Instance) -> None:
    """Unlock an instance's key file for another process."""
    if instance.lock is not None:
        os.close(instance.lock)


def _lock_key(folder: Path, number: int) -> Instance | None:
    """Lock and read a key file. None: another process has it. Raises OSError."""
    lock = os.open(folder / f"instance-{number}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(lock, 0o600)
        return Instance(_read_or_make(lock), lock, number)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise


def _read_or_make(lock: int) -> Identity:
    """The key in a locked file, or a new one if it has none. Raises OSError."""
    try:
        return Identity.from_pem(os.read(lock, LONGEST))
    except ValueError:
        identity = Identity.generate()
        os.ftruncate(lock, 0)
        os.pwrite(lock, identity.to_pem(), 0)
        return identity
