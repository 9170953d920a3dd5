"""Limits of what waits to be read: for each peer, and for all together."""

from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.budget import ITEM, PEERS, Budget, HeldFrames
from planaria.node.wire.frame_format import Frame
from tests.harness.at_rest import check_at_rest

EACH = 10 * ITEM
COMES = st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 12 * ITEM))


@given(st.lists(COMES, max_size=60))
def test_no_peer_has_more_than_its_share_nor_all_together(story: list[tuple[str, int]]) -> None:
    budget = Budget(EACH)
    waiting: dict[str, list[int]] = {}
    for peer, size in story:
        while greedy := budget.spend(peer, size):
            if greedy == peer:
                break
            assert sum(waiting[greedy]) == max(map(sum, waiting.values())), "it has most"
            del waiting[greedy]
            budget.drop(greedy)
        else:
            waiting.setdefault(peer, []).append(size + ITEM)
        assert budget.used == sum(map(sum, waiting.values())) <= PEERS * EACH
        assert all(sum(sizes) <= EACH for sizes in waiting.values())


@given(st.lists(COMES, max_size=60))
def test_what_is_read_is_free_again(story: list[tuple[str, int]]) -> None:
    budget = Budget(EACH)
    taken = [(peer, size) for peer, size in story if not budget.spend(peer, size)]
    for peer, size in taken:
        budget.free(peer, size)
    assert budget.used == 0
    assert budget.spend("a", 9 * ITEM) == ""


def test_who_flooded_this_node_is_heard_again_in_the_next_attempt() -> None:
    held = HeldFrames(EACH)
    large, small = (Frame("activation", (1, 1), {}, [], bytes(n)) for n in (EACH, 1))
    assert held.hold("a", large).keys() == {"a"}
    held.hold("a", small)
    assert held.take() == []
    held.hold("a", small)
    assert held.take() == [("a", small)]
    check_at_rest(held)
