"""State pins and reduced gradients for joiners that follow, and the bounds on their memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from planaria.node.state import feeding
from planaria.node.state.feeding import (
    FEWEST,
    ReducedGradients,
    StatePins,
    gradient_frame,
    missed_gradient_frame,
)
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.frame_format import Frame, WireError, buffers_of
from tests.harness.network import damaged

GRADIENT = torch.arange(4.0)
BALLOT = Ballot(2, 3)


def state(step: int, weights: torch.Tensor) -> StageState:
    made = StateId(stage=1, lineage=0, step=step, made=NEVER)
    return StageState(made, {"weights": weights}, 0.0, 0, pb.Commit(step=step), step - 1)


def received(frame: Frame) -> Frame:
    """Return a frame as its receiver has it, with a contiguous payload."""
    return replace(frame, payload=bytearray().join(buffers_of(frame.payload)))


def test_a_pin_is_the_state_before_it_changed() -> None:
    pins, weights = StatePins(tensors), torch.ones(3)
    copy = pins.keep({5}, state(5, weights))
    copy()
    weights.zero_()
    pinned = pins.get(5)
    assert pinned is not None
    assert (pinned.id.step, pinned.optimizer_step, pinned.last.step) == (5, 4, 5)
    assert pinned.tensors["weights"].tolist() == [1.0, 1.0, 1.0]


def test_nothing_is_copied_of_a_state_that_nobody_fetches() -> None:
    pins = StatePins(tensors)
    pins.keep({4}, state(5, torch.ones(3)))()
    assert pins.get(5) is None


def test_a_pin_goes_when_nobody_fetches_it_any_more() -> None:
    pins, weights = StatePins(tensors), torch.ones(3)
    pins.keep({5}, state(5, weights))()
    pins.keep({5, 6}, state(6, weights))()
    assert pins.get(5) is not None
    pins.keep({6}, state(7, weights))()
    assert pins.get(5) is None
    assert pins.get(6) is not None


def test_a_gradient_comes_as_it_was_when_it_was_sent() -> None:
    gradient = GRADIENT.clone()
    frame = gradient_frame(BALLOT, gradient, tensors)
    gradient.zero_()
    assert (frame.kind, frame.ballot) == ("follow", BALLOT)
    arrived = ReducedGradients(GRADIENT, tensors).parse(received(frame))
    assert torch.equal(arrived, GRADIENT)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (missed_gradient_frame(BALLOT), "no tensor, where"),
        (gradient_frame(BALLOT, torch.ones(5), tensors), r"float32 \[5\]"),
        (
            Frame("follow", BALLOT, {}, *tensors.encode([torch.ones(4).to(torch.int64)], "none")),
            r"int64 \[4\]",
        ),
        (
            Frame("follow", BALLOT, {}, *tensors.encode([GRADIENT.half()], "none")),
            r"float16 \[4\] in codec none, where float32 \[4\]",
        ),
        (replace(gradient_frame(BALLOT, GRADIENT, tensors), payload=b"short"), "16 bytes"),
        (damaged(gradient_frame(BALLOT, GRADIENT, tensors)), "damaged"),
    ],
    ids=["none", "of another length", "of whole numbers", "of halves", "short", "damaged"],
)
def test_what_is_no_gradient_of_this_stage_is_not_taken(frame: Frame, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        ReducedGradients(GRADIENT, tensors).parse(received(frame))


@pytest.mark.parametrize(
    ("backlog", "most"), [(0, FEWEST), (2 * FEWEST * GRADIENT.nbytes, 2 * FEWEST)]
)
def test_gradients_wait_in_bounds_until_they_are_applied(backlog: int, most: int) -> None:
    waiting, frame = ReducedGradients(GRADIENT, tensors), gradient_frame(BALLOT, GRADIENT, tensors)

    def take(number: int) -> bool:
        with waiting.parsing(frame) as fits:
            if fits:
                waiting.put(Ballot(1, number), GRADIENT + number)
            return fits

    with patch.object(feeding, "BACKLOG", backlog):
        assert [take(number) for number in range(most + 1)] == [True] * most + [False]
        assert torch.equal(waiting.get(Ballot(1, 2)), GRADIENT + 2)
        waiting.forget(Ballot(1, 1))
        assert take(99)
    with pytest.raises(KeyError):
        waiting.get(Ballot(1, 1))


def test_what_is_parsed_counts_among_what_waits() -> None:
    waiting, frame = ReducedGradients(GRADIENT, tensors), gradient_frame(BALLOT, GRADIENT, tensors)
    with patch.object(feeding, "BACKLOG", 0), ExitStack() as parsing:
        waiting.put(BALLOT, GRADIENT)
        fit = [parsing.enter_context(waiting.parsing(frame)) for _ in range(FEWEST + 1)]
        assert fit == [True] * (FEWEST - 1) + [False] * 2
        parsing.close()
        with waiting.parsing(frame) as fits:
            assert fits
