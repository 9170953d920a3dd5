import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.state import feeding
from planaria.node.state.feeding import ReducedGradients, StatePins, gradient_frame, no_gradient
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.following import FollowingJoiner, feeders
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.frames import DamagedError, Frame, WireError
from planaria.node.wire.tensors import encode

names = st.text("abcdef", min_size=1, max_size=3)
placed = st.lists(st.tuples(names, st.integers(0, 3)), max_size=12, unique_by=lambda p: p[0])


# --- who feeds whom


@given(placed, placed)
def test_every_joiner_has_a_replica_of_its_stage_and_the_work_is_shared(
    trains: list[tuple[str, int]], joins: list[tuple[str, int]]
) -> None:
    begin = pb.Begin(
        members=[pb.Place(node=node, stage=stage) for node, stage in trains],
        joining=[pb.Joiner(node=f"j{node}", stage=stage) for node, stage in joins],
    )
    found = feeders(begin)
    assert found.keys() == {f"j{node}" for node, _ in joins}
    for stage in range(4):
        replicas = [node for node, at in trains if at == stage]
        fed = [found[f"j{node}"] for node, at in joins if at == stage]
        shares = [fed.count(node) for node in replicas]
        if replicas:
            assert sum(shares) == len(fed)
            assert max(shares) - min(shares) <= 1
        else:
            assert set(fed) <= {""}
    members = list(begin.members)
    del begin.members[:]
    begin.members.extend(reversed(members))
    assert feeders(begin) == found, "whatever the order"


# --- what a joiner keeps in mind


def commit(step: int, attempt: int) -> pb.Commit:
    return pb.Commit(step=step, ballot=Ballot(1, attempt).message())


def test_each_commit_is_due_once_in_order_with_the_gradient_of_its_attempt() -> None:
    following = FollowingJoiner(Ballot(1, 1), 4, 4)
    following.hear(commit(5, 2))
    following.hear(commit(6, 4))
    assert following.due() is None
    following.came(Ballot(1, 3), "a")
    following.came(Ballot(1, 4), "a")
    assert following.due() is None, "step 5 comes first"
    following.came(Ballot(1, 2), "b")
    assert following.due() == commit(5, 2)
    following.applied(commit(5, 2))
    assert following.due() == commit(6, 4)
    following.applied(commit(6, 4))
    assert (following.due(), following.heard) == (None, 6)
    assert following.gradients == set(), "and that of attempt 3 is forgotten"


def test_what_was_doubted_can_be_heard_again_or_replaced() -> None:
    following = FollowingJoiner(Ballot(1, 1), 4, 4)
    following.hear(commit(5, 2))
    following.doubt()
    assert following.heard == 4
    following.doubt()
    assert following.heard == 4, "no commit is left to doubt"
    following.hear(commit(5, 6))
    following.came(Ballot(1, 2), "a")
    assert following.due() is None
    following.came(Ballot(1, 6), "a")
    assert following.due() == commit(5, 6)


# --- states of the past


def state(step: int, values: torch.Tensor) -> StageState:
    last = pb.Commit(step=step)
    return StageState(StateId.after(last, 1, 0, step), {"weights": values}, 1.0, 0, last, step)


def test_a_pin_keeps_the_state_while_the_weights_change() -> None:
    weights, pins = torch.arange(4.0), StatePins(tensors)
    pins.keep({3}, state(3, weights))()
    weights.add_(1)
    pins.keep({3}, state(4, weights))()
    pinned = pins.get(3)
    assert pinned is not None
    assert pinned.tensors["weights"].tolist() == [0, 1, 2, 3]
    assert (pinned.id.step, pinned.optimizer_step, pinned.last.step) == (3, 3, 3)
    assert pins.get(4) is None


def test_a_pin_is_given_up_when_no_joiner_needs_it() -> None:
    weights, pins = torch.arange(4.0), StatePins(tensors)
    pins.keep({3}, state(3, weights))()
    pins.keep({4}, state(4, weights))()
    assert pins.get(3) is None
    assert pins.get(4) is not None
    pins.keep(set(), state(5, weights))()
    assert pins.get(4) is None


# --- gradients


def sent(frame: Frame) -> Frame:
    """As it comes out of a link."""
    payload = frame.payload if isinstance(frame.payload, tuple) else (frame.payload,)
    return Frame.parse(frame.head(), bytearray().join(payload))


def test_a_gradient_arrives_as_it_was_when_it_was_sent() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = gradient.clone()
    frame = gradient_frame(Ballot(2, 3), gradient, tensors)
    gradient.zero_()
    gradients = ReducedGradients(gradient, tensors)
    parsed = gradients.parse(sent(frame))
    assert gradients.put(Ballot(*frame.ballot), parsed)
    assert torch.equal(gradients.get(Ballot(2, 3)), before)
    gradients.forget(Ballot(2, 3))
    with pytest.raises(KeyError):
        gradients.get(Ballot(2, 3))


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (no_gradient(Ballot(1, 2)), "no tensor, where"),
        (gradient_frame(Ballot(1, 2), torch.ones(9), tensors), r"float32 \[9\] in codec none"),
        (
            Frame("follow", Ballot(1, 2), {}, *encode([torch.zeros(8).half()], "none")),
            r"float16 \[8\] in codec none, where float32 \[8\]",
        ),
    ],
)
def test_what_is_no_gradient_of_this_stage_is_refused(frame: Frame, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        ReducedGradients(torch.zeros(8), tensors).parse(frame)


def test_a_damaged_gradient_is_refused() -> None:
    frame = sent(gradient_frame(Ballot(1, 2), torch.ones(8), tensors))
    assert isinstance(frame.payload, bytearray)
    frame.payload[5] ^= 1
    with pytest.raises(DamagedError):
        ReducedGradients(torch.zeros(8), tensors).parse(frame)


def test_only_so_many_bytes_wait_but_a_few_gradients_may_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradient = torch.zeros(8)
    monkeypatch.setattr(feeding, "BACKLOG", 6 * gradient.nbytes)
    gradients = ReducedGradients(gradient, tensors)
    assert [gradients.put(Ballot(1, i), gradient) for i in range(8)] == 6 * [True] + 2 * [False]
    gradients.forget(Ballot(1, 2))
    assert gradients.put(Ballot(1, 9), gradient)
    monkeypatch.setattr(feeding, "BACKLOG", 1)
    few = ReducedGradients(gradient, tensors)
    assert [few.put(Ballot(1, i), gradient) for i in range(5)] == 4 * [True] + [False]
