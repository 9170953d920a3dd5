"""The random state that torch has for a whole process, which constructors of layers draw from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_ALONE: Final = threading.Lock()


@contextmanager
def kept_random_state(seed: int | None = None) -> Iterator[None]:
    """In this block it follows from `seed`, if there is one; then it is again what it was.

    For one thread at a time, and not only because another one's draws would come between. To read
    the state torch locks the generator and makes a tensor, where Python may collect garbage and let
    another thread go on. If that wants to read the state, too, it waits for the generator, and
    nothing in the process goes on any more, since it waits with the interpreter's lock.
    """
    with _ALONE, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
