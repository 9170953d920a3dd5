"""The process's random state, kept while layers draw from it."""

from __future__ import annotations

import threading

import pytest
import torch

from planaria.node.model import random_state
from planaria.node.model.modules import build_stage, empty_stage
from planaria.node.model.random_state import kept_random_state
from tests.node.stage.shapes import GROUPED

PATIENCE = 10.0


def test_it_follows_from_a_seed_and_is_put_back() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with kept_random_state(seed=7):
            drawn.append(torch.rand(3))
    with kept_random_state():
        assert not torch.equal(torch.rand(3), drawn[0])
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), before)


class Seen:
    """A lock that sets `awaited` when a thread has to wait for it."""

    def __init__(self) -> None:
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            assert self._lock.acquire(timeout=PATIENCE)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_are_built_one_after_the_other(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Seats build their stages in threads of their own."""
    lock = Seen()
    monkeypatch.setattr(random_state, "_ALONE", lock)
    built = []
    other = threading.Thread(target=lambda: built.append(build_stage(GROUPED, stage, seed=3)))
    with kept_random_state():
        other.start()
        assert lock.awaited.wait(PATIENCE)
        assert not built
    other.join(PATIENCE)
    again = build_stage(GROUPED, stage, seed=3)
    for built_values, same in zip(built[0].parameters(), again.parameters(), strict=True):
        assert torch.equal(built_values, same)
    empty_stage(GROUPED, stage)
