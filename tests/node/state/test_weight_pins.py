"""Weight pins: which steps' weights a node keeps for observers, and for how long."""

from __future__ import annotations

import torch

from planaria.node.state.stage_state import StageState, StateId
from planaria.node.state.weight_pins import LEASE, MOST, WeightPins
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors


def state(step: int, weights: torch.Tensor) -> StageState:
    values = {"weights": weights, "first_moment": torch.zeros(weights.numel())}
    return StageState(StateId(1, 0, step, NEVER), values, 0.0, 0, pb.Commit(), 0)


def committed(taken: WeightPins, step: int, weights: torch.Tensor, now: float = 0.0) -> None:
    """Offer the weights of `step` to the pins, then change them as the next step does."""
    taken.keep(state(step, weights), step + 1, now)()
    weights += 1


def test_a_step_that_is_wanted_is_kept_as_it_was_without_the_moments() -> None:
    taken, weights = WeightPins(tensors), torch.zeros(3)
    assert taken.want("a/?1", 5, 0.0) == ""
    committed(taken, 4, weights)
    assert taken.get(4, None) is None
    committed(taken, 5, weights)
    committed(taken, 6, weights)
    kept = taken.get(5, state(7, weights))
    assert kept is not None
    assert {name: values.tolist() for name, values in kept.tensors.items()} == {
        "weights": [1.0, 1.0, 1.0]
    }
    assert kept.id.step == 5


def test_the_newest_step_needs_no_copy() -> None:
    own = state(5, torch.ones(3))
    assert WeightPins(tensors).get(5, own) is own
    assert WeightPins(tensors).get(4, own) is None


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    taken, weights = WeightPins(tensors), torch.zeros(3)
    taken.want("a/?1", 5, 0.0)
    committed(taken, 5, weights)
    taken.renew("a/?1", 5, LEASE / 2)
    taken.expire(LEASE)
    assert taken.get(5, None) is not None
    taken.expire(2 * LEASE)
    assert taken.get(5, None) is None
    taken.renew("a/?1", 5, 2 * LEASE)
    assert taken.want("a/?1", 9, 2 * LEASE) == "", "a step that isn't there any more isn't wanted"


def test_an_onlooker_has_one_step_and_all_of_them_a_few() -> None:
    taken = WeightPins(tensors)
    for step in range(9):
        assert taken.want("a/?1", step, 0.0) == ""
    for other in range(1, MOST):
        assert taken.want(f"b/?{other}", other, 0.0) == ""
    assert "try again" in taken.want("c/?1", 99, 0.0)
    assert taken.want("c/?1", 8, 0.0) == "", "it is kept anyway"
    assert taken.want("c/?1", 99, LEASE) == "", "the others have gone"


def test_who_is_gone_wants_nothing() -> None:
    taken = WeightPins(tensors)
    for other in range(MOST):
        taken.want(f"b/?{other}", other, 0.0)
    taken.forget("b/?0")
    taken.forget("nobody")
    assert taken.want("c/?1", 99, 0.0) == ""


def test_who_follows_with_an_older_state_to_show_keeps_nothing() -> None:
    taken, weights = WeightPins(tensors), torch.zeros(3)
    taken.want("a/?1", 5, 0.0)
    taken.keep(state(5, weights), 9, 0.0)()
    assert taken.get(5, None) is None


class NoRoom:
    """Stand-in for the port `Tensors` that has no memory left."""

    def empty(self, values: int) -> torch.Tensor:
        raise MemoryError("no room")


def test_a_node_without_memory_for_it_trains_on() -> None:
    taken = WeightPins(NoRoom())  # type: ignore[arg-type]
    taken.want("a/?1", 5, 0.0)
    committed(taken, 5, torch.zeros(3))
    assert taken.get(5, None) is None
