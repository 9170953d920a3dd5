"""How far something has come that goes through items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    def __call__(self, items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
        """The items; shows how far they have come, of so many."""
        ...


def untracked(items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
    return items
