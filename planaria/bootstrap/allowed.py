"""The allow list of a run: a file of instances that may join."""

from __future__ import annotations

from pathlib import Path

from planaria.bootstrap.identity import INSTANCE_LETTERS
from planaria.bootstrap.invites import is_instance


class AllowedError(ValueError):
    """The file is unusable; the message names the line and the reason."""


def read_allowed(path: Path) -> frozenset[str]:
    """Reads instances, one per line; text after # is a comment. Raises AllowedError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AllowedError(f"can't read the allow list {path}: {error}") from error
    instances = set()
    for number, line in enumerate(text.splitlines(), 1):
        instance = line.partition("#")[0].strip()
        if instance and not is_instance(instance):
            raise AllowedError(
                f"line {number} of {path} has {instance[:40]!r}, which is no instance: give "
                f"{INSTANCE_LETTERS} lower-case hexadecimal digits"
            )
        instances.add(instance)
    instances.discard("")
    if not instances:
        raise AllowedError(f"{path} names no instance, so no node could join: write one per line")
    return frozenset(instances)
