"""Schedules of faults: drawn from a seed, and bearable."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria_lab.chaos.schedule import (
    EVERYBODY,
    KINDS,
    LOSS_RECOVERY,
    LOSSES,
    QUIET_AT_FIRST,
    QUIET_AT_LAST,
    RECOVERY,
    REGISTRY,
    STAGES,
    Fault,
    Shape,
    schedule,
)
from planaria_lab.chaos.sick_node import KINDS as SICK

shapes = st.builds(
    Shape,
    stages=st.integers(1, 5),
    replicas=st.integers(1, 3),
    kinds=st.sets(st.sampled_from(sorted(KINDS))).map(sorted),
    rate=st.just(0.0) | st.floats(0.01, 60),
)


@given(seed=st.integers(0, 2**32), minutes=st.floats(0, 30), shape=shapes)
def test_every_fault_is_bearable_and_healed(seed, minutes, shape):
    faults = schedule(seed, minutes, shape)
    assert faults == schedule(seed, minutes, shape)
    assert all(a.at <= b.at for a, b in pairwise(faults))
    for number, fault in enumerate(faults):
        assert fault.kind in shape.kinds
        assert fault.slot in (*shape.slots, REGISTRY, EVERYBODY, STAGES)
        assert QUIET_AT_FIRST <= fault.at <= fault.end <= 60 * minutes - QUIET_AT_LAST + 1e-3
        near = [earlier for earlier in faults[:number] if earlier.end + RECOVERY > fault.at]
        assert all(fault.slots.isdisjoint(earlier.slots) for earlier in near)
        guilty = [fault_near for fault_near in (*near, fault) if fault_near.blame == "guilty"]
        if shape.replicas == 1:
            assert len(guilty) <= 1 or fault.blame == "innocent"
        of_stages = Counter(sick.stage for sick in guilty)
        if fault.blame == "guilty" and shape.replicas > 1:
            assert of_stages[fault.stage] < shape.replicas


@given(seed=st.integers(0, 2**32), stages=st.integers(1, 5), replicas=st.integers(1, 3))
def test_no_node_is_ill_around_a_loss(seed, stages, replicas):
    faults = schedule(seed, 5, Shape(stages, replicas, ("kill", "reset", *LOSSES), rate=30))
    guilty = [fault for fault in faults if fault.blame == "guilty"]
    for earlier, later in pairwise(guilty):
        assert earlier.kind not in LOSSES or earlier.end + LOSS_RECOVERY <= later.at
        assert later.kind not in LOSSES or earlier.end + RECOVERY <= later.at
    for fault in guilty:
        first, last = (int(fault.figures.get(key, 0)) for key in ("first", "last"))
        match fault.kind:
            case "lost stage 0":
                assert (first, last) == (0, 0)
            case "lost stage":
                assert 1 <= first == last <= stages
            case "lost neighbours":
                assert 1 <= first == last - 1 < stages


def test_a_schedule_is_the_same_on_any_machine():
    assert schedule(1, 1, Shape(2, 2, ("kill", "one way"), 12))[:3] == [
        Fault(5.721, "one way", "0.1", 7.874, {"way": "out"}),
        Fault(5.865, "one way", "2.1", 4.895, {"way": "out"}),
        Fault(5.994, "kill", "0.0", 1.878),
    ]


@given(seed=st.integers(0, 2**32), stages=st.integers(1, 6))
def test_who_is_cut_off_from_each_other_would_talk_in_every_step(seed, stages):
    for fault in schedule(seed, 3, Shape(stages, 2, ("cut",), rate=20)):
        stage, other_stage = (int(slot.partition(".")[0]) for slot in fault.slots)
        assert abs(stage - other_stage) <= 1 or 0 in (stage, other_stage)


def test_long_schedules_have_every_kind():
    assert {fault.kind for fault in schedule(0, 400, Shape(2, 2))} == KINDS.keys()


def test_a_lone_node_is_spared_what_would_rightly_pause_the_run():
    kinds = {fault.kind for fault in schedule(0, 400, Shape(2, 1))}
    assert kinds == {kind for kind in KINDS if not KINDS[kind].needs_replica}


def test_a_kind_that_there_is_not():
    with pytest.raises(ValueError, match="'fever' is not a kind of fault: choose from kill, "):
        schedule(0, 1, Shape(1, 1, ("fever",)))


def test_all_that_can_be_wrong_with_a_node_is_drawn():
    assert SICK.keys() <= KINDS.keys()
