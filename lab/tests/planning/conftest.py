"""A cache of plans: tests ask some questions twice, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest

from planaria_lab.planning import planner


@pytest.fixture(autouse=True, scope="session")
def planned_once() -> Iterator[None]:
    original = planner.candidates

    @lru_cache(maxsize=8)
    def candidates(question: planner.Question) -> tuple[planner.Candidate | str, ...]:
        return tuple(original(question))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "candidates", candidates)
        yield
