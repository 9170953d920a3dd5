"""Progress over items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    def __call__(self, items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
        """Yield the items, and show progress towards `total`."""


def untracked(items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
    return items
