from hypothesis import given
from hypothesis import strategies as st

from planaria.recovery.orders import order, partner, window_orders


@given(st.integers(0, 100), st.integers(1, 20), st.booleans())
def test_every_stage_is_visited_once(microbatch, stages, swapped):
    assert sorted(order(microbatch, stages, swapped and stages >= 4)) == list(range(1, stages + 1))


def test_every_second_microbatch_swaps_both_ends():
    assert order(0, 5, True) == (1, 2, 3, 4, 5)
    assert order(1, 5, True) == (2, 1, 3, 5, 4)
    assert order(1, 5, False) == (1, 2, 3, 4, 5)


@given(st.integers(1, 9), st.integers(4, 20))
def test_half_of_a_runs_microbatches_swap_however_many_are_in_a_step(microbatches, stages):
    steps = [window_orders(step, microbatches, stages, True) for step in range(1, 11)]
    assert all(len(orders) == microbatches for orders in steps)
    every = [order for orders in steps for order in orders]
    assert set(every[::2]) == {order(0, stages, True)}
    assert set(every[1::2]) == {order(1, stages, True)}
    natural = window_orders(2, microbatches, stages, False)
    assert natural == [order(0, stages, False)] * microbatches


@given(st.integers(4, 20), st.data())
def test_a_partner_is_visited_in_the_stage_s_place(stages, data):
    stage = data.draw(st.integers(1, stages))
    natural, swapped = order(0, stages, True), order(1, stages, True)
    other = swapped[natural.index(stage)]
    assert partner(stage, stages) == (other if other != stage else None)
