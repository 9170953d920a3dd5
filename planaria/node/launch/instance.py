"""What a node is over all of its identities: a key in a file of its folder.

A node joins under a new id each time, so that nobody takes it for what it was; by its key, whose
hash its instance is, others know that it speaks for itself, and that it was evicted for cause
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
    held: int | None  # descriptor of the locked file; None: the key is that of this process only
    number: int | None = None  # that no other process with this folder has; None as `held`


def find_instance(folder: Path | None) -> Instance:
    """Finds the key in `folder`, or makes one. Processes that share a folder have one each, of the
    first file that no other one holds. Without a folder, or one that can be written, the key is as
    new as the process."""
    if folder is None:
        return Instance(Identity.generate(), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(filter(None, (_take(folder, number) for number in count())))
    except OSError as error:
        log.warning("%s keeps no key of this node: %s", folder, error.strerror)
        return Instance(Identity.generate(), None)


def release(instance: Instance) -> None:
    """Lets another process have it."""
    if instance.held is not None:
        os.close(instance.held)


def _take(folder: Path, number: int) -> Instance | None:
    """None: another process has it. Raises OSError."""
    held = os.open(folder / f"instance-{number}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(held, 0o600)
        return Instance(_read_or_make(held), held, number)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:
        os.close(held)
        raise


def _read_or_make(held: int) -> Identity:
    """What is in the file, if that is a key. Raises OSError."""
    try:
        return Identity.from_pem(os.read(held, LONGEST))
    except ValueError:
        made = Identity.generate()
        os.ftruncate(held, 0)
        os.pwrite(held, made.to_pem(), 0)
        return made
