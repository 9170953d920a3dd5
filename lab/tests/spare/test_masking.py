from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria_lab.spare.golomb import place
from planaria_lab.spare.masking import (
    NONE,
    Masked,
    Stacks,
    WipedOut,
    fewest_moves,
    reorder,
    shallowest,
    share,
    stack,
)

SIZES = [(7, 3), (13, 4), (23, 3), (40, 6)]


@st.composite
def losses(draw: st.DrawFn, sizes: list[tuple[int, int]] = SIZES) -> tuple[Stacks, list[list[int]]]:
    """Draw stacks, and rounds of groups to lose."""
    groups, redundancy = draw(st.sampled_from(sizes))
    order = draw(st.permutations(range(groups)))
    parts = draw(st.integers(1, 3))
    cuts = sorted(draw(st.sets(st.integers(1, groups - 1), min_size=1, max_size=groups - 1)))
    rounds = [order[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    kind = draw(st.sampled_from(["golomb", "shared"]))
    if kind == "golomb":
        return stack(place(groups, redundancy), parts), rounds
    return share(groups * parts + draw(st.integers(0, 3)), groups), rounds


def hosting(stacks: Stacks) -> list[set[int]]:
    return [set(row) for row in stacks.order.tolist()]


@settings(deadline=None)
@given(losses())
def test_every_type_is_computed_by_survivors_until_a_type_has_none(
    case: tuple[Stacks, list[list[int]]],
) -> None:
    stacks, rounds = case
    hosts = hosting(stacks)
    lost: set[int] = set()
    for more in rounds:
        before = stacks.without(more)
        lost |= set(more)
        survivors = [g for g in range(len(hosts)) if g not in lost]
        result = reorder(stacks, more)
        orphans = set(range(stacks.types)) - set().union(*(hosts[g] for g in survivors))
        if isinstance(result, WipedOut):
            assert set(result.types) == orphans
            return
        assert not orphans
        # This step: types that no survivor computed are computed by survivors that host them.
        assert set(result.patch) == set(np.flatnonzero(~before.covered()).tolist())
        assert all(g in survivors and t in hosts[g] for t, g in result.patch.items())
        loads = [list(result.patch.values()).count(g) for g in survivors]
        assert max(loads) == result.patch_depth
        # The next step: a survivor computes each type once, within the depth; hosts are the same.
        after = result.stacks
        assert hosting(after) == hosts
        owners = after.owners()
        assert set(owners.tolist()) <= set(survivors)
        assert all(t in after.order[g, : after.depth] for t, g in enumerate(owners))
        assert after.depth >= stacks.depth
        stacks = after


@settings(deadline=None, max_examples=40)
@given(losses(SIZES[:2]))
def test_depth_and_moves_are_the_fewest_there_are(case: tuple[Stacks, list[list[int]]]) -> None:
    stacks, rounds = case
    for more in rounds:
        before = stacks.without(more)
        result = reorder(stacks, more)
        if isinstance(result, WipedOut):
            return
        assert (result.stacks.depth, result.moves) == cheapest(before)
        stacks = result.stacks


def cheapest(stacks: Stacks) -> tuple[int, int]:
    """Return the smallest depth, at least the present one, and its fewest moves, by networkx."""
    if stacks.covered().all():
        return stacks.depth, 0
    for depth in range(stacks.depth, stacks.order.shape[1] + 1):
        graph = nx.DiGraph()
        for group in np.flatnonzero(stacks.alive).tolist():
            graph.add_edge(("group", group), "sink", capacity=depth, weight=0)
            for place_, type_ in enumerate(stacks.order[group].tolist()):
                cost = 0 if place_ < depth else 1
                graph.add_edge("source", ("type", type_), capacity=1, weight=0)
                graph.add_edge(("type", type_), ("group", group), capacity=1, weight=cost)
        flow = nx.max_flow_min_cost(graph, "source", "sink")
        if sum(flow["source"].values()) == stacks.types:
            return depth, nx.cost_of_flow(graph, flow)
    raise AssertionError("no depth has all types")


@settings(deadline=None)
@given(losses())
def test_types_that_neither_enter_nor_are_displaced_stay_where_they_are(
    case: tuple[Stacks, list[list[int]]],
) -> None:
    stacks, rounds = case
    result = reorder(stacks, rounds[0])
    assume(isinstance(result, Masked))
    assert isinstance(result, Masked)
    assert int((result.stacks.order != stacks.order).sum()) == 2 * result.moves


def test_nothing_moves_while_other_copies_serve() -> None:
    stacks = reorder(stack(place(13, 4)), [0])
    assert isinstance(stacks, Masked)
    assert stacks.stacks.depth == 2
    spared = [g for g in range(1, 13) if stacks.stacks.without([g]).covered().all()]
    result = reorder(stacks.stacks, spared[:1])
    assert isinstance(result, Masked)
    assert (result.patch, result.moves) == ({}, 0)
    assert (result.stacks.order == stacks.stacks.order).all()


def test_each_type_is_computed_once_at_the_start() -> None:
    stacks = stack(place(7, 3), parts=4)
    assert stacks.depth == 4
    assert sorted(stacks.order[:, :4].ravel().tolist()) == list(range(28))
    assert (stacks.owners() == np.repeat(np.arange(7), 4)).all()


def test_microbatches_need_no_whole_stack_more() -> None:
    shards = reorder(stack(place(40, 6)), [3])
    parts = reorder(stack(place(40, 6), parts=8), [3])
    assert isinstance(shards, Masked)
    assert isinstance(parts, Masked)
    assert shards.stacks.depth == 2  # stacks
    assert parts.stacks.depth == 9  # eighths of a stack
    assert (shards.patch_depth, parts.patch_depth) == (1, 2)


def test_replicas_share_the_microbatches_of_a_lost_one_evenly() -> None:
    result = reorder(share(12, 4), [2])
    assert isinstance(result, Masked)
    assert sorted(result.patch) == [2, 6, 10]
    assert sorted(result.patch.values()) == [0, 1, 3]
    assert result.stacks.depth == 4
    assert np.bincount(result.stacks.owners(), minlength=4).tolist() == [4, 4, 0, 4]


def test_the_last_replica_computes_everything() -> None:
    result = reorder(share(6, 3), [0, 2])
    assert isinstance(result, Masked)
    assert set(result.stacks.owners().tolist()) == {1}
    assert result.stacks.depth == 6


def test_nobody_left_is_a_wipe_out() -> None:
    result = reorder(share(4, 2), [0, 1])
    assert isinstance(result, WipedOut)
    assert result.types == (0, 1, 2, 3)
    assert "wiped out" in result.reason


def test_a_thousand_groups_that_lose_four_hundred() -> None:
    stacks = stack(place(1000, 9))
    lost = np.random.default_rng(0).permutation(1000)[:400]
    result = reorder(stacks, lost.tolist())
    assert isinstance(result, Masked)
    assert result.stacks.depth == 2
    assert result.stacks.covered().all()
    assert shallowest(result.stacks) == 2


def test_what_nobody_computes_has_no_owner() -> None:
    assert stack(place(7, 3)).without([4]).owners()[4] == NONE


def test_nonsense_is_refused() -> None:
    stacks = stack(place(7, 3))
    with pytest.raises(ValueError, match="depth 4 of stacks of 3 places"):
        replace(stacks, depth=4)
    with pytest.raises(ValueError, match=r"groups \[7\] lost, of groups 0 to 6"):
        reorder(stacks, [7])
    with pytest.raises(ValueError, match="no order has all types within 1"):
        fewest_moves(stacks.without([0]))
