"""Torch's process-wide random state, from which constructors of layers draw."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_ALONE: Final = threading.Lock()


@contextmanager
def kept_random_state(seed: int | None = None) -> Iterator[None]:
    """Seed torch's random state in this block, if `seed` is given, and restore it afterwards.

    One thread at a time, and not only for reproducible draws. To read the state, torch locks the
    generator and makes a tensor; garbage collection there may switch threads. If the other thread
    reads the state, too, it waits for the generator with the interpreter's lock held: a deadlock of
    the process.
    """
    with _ALONE, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
