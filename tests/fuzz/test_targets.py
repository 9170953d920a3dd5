"""Short fuzz runs of all readers of bytes from outside; `make fuzz` runs long ones."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest
from drawn_messages import Drawing
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import FOUND, seeds
from tests.fuzz.targets import TARGETS

DAMAGED, DRAWN = 1000, 100


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_right_or_damaged_is_read_or_refused(target: str) -> None:
    drawing = Drawing(Random(crc32(target.encode())))
    right = seeds(target)
    for data in right:
        TARGETS[target](data)
    for _ in range(DAMAGED):
        TARGETS[target](drawing.damaged(drawing.random.choice(right)))


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_comes_is_read_or_refused(target: str) -> None:
    @seed(1)
    @settings(max_examples=DRAWN, database=None)
    @given(st.binary(max_size=300))
    def read(data: bytes) -> None:
        TARGETS[target](data)

    read()


def test_what_has_found_something_is_of_a_target() -> None:
    assert {path.name for path in FOUND.iterdir()} <= TARGETS.keys()
