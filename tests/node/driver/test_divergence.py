"""Which of a stage's replicas is wrong when they differ."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.driver.divergence import ReplicaDigest, changed, differing, undecided
from planaria.node.wire import stage_pb2 as pb

RIGHT = ReplicaDigest(b"x", b"x", 4.0)
TOLD = st.builds(
    ReplicaDigest,
    st.sampled_from([b"x", b"y", b"z"]),
    st.sampled_from([b"x", b"y", b"z"]),
    st.sampled_from([0.0, 1.0, 4.0, math.inf]),
)
REPLICAS = st.dictionaries(st.sampled_from("abcde"), TOLD, min_size=1)
STRIKES = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 3))


@given(REPLICAS, st.sampled_from([0.0, 4.0]), STRIKES)
def test_who_is_left_agrees_and_somebody_is(
    digests: dict[str, ReplicaDigest], usual: float, strikes: dict[str, int]
) -> None:
    wrong = differing(digests, usual, strikes)
    left = [digest for node, digest in digests.items() if node not in wrong]
    assert len({(digest.now, digest.squared_norm) for digest in left}) == 1
    assert all(wrong.values()), "each has a reason"
    alike = len({(digest.now, digest.squared_norm) for digest in digests.values()}) == 1
    assert alike == (not wrong)


@given(REPLICAS, STRIKES)
def test_the_order_in_which_they_are_told_says_nothing(
    digests: dict[str, ReplicaDigest], strikes: dict[str, int]
) -> None:
    backwards = dict(reversed(digests.items()))
    assert differing(digests, 4.0, strikes) == differing(backwards, 4.0, strikes)


@given(st.integers(2, 5), TOLD, STRIKES)
def test_one_among_three_or_more_that_agree_is_wrong_and_nobody_else(
    others: int, odd: ReplicaDigest, strikes: dict[str, int]
) -> None:
    digests = {f"n{i}": RIGHT for i in range(others)} | {"odd": odd}
    wrong = differing(digests, 4.0, strikes).keys()
    same = (odd.now, odd.squared_norm) == (RIGHT.now, RIGHT.squared_norm)
    assert wrong == (set() if same else {"odd"})


def test_of_two_the_one_whose_weights_changed_since_its_update_is_wrong() -> None:
    flipped = ReplicaDigest(b"x", b"y", 4.0)
    for names in ("ab", "ba"):
        digests = {names[0]: RIGHT, names[1]: flipped}
        assert differing(digests, 4.0, {names[0]: 2}).keys() == {names[1]}


def test_of_two_gradients_the_one_more_like_the_last_is_believed() -> None:
    digests = {"a": RIGHT._replace(squared_norm=1e50), "b": RIGHT._replace(squared_norm=5.0)}
    assert differing(digests, 4.0, {}).keys() == {"a"}
    digests["a"] = digests["a"]._replace(squared_norm=math.inf)
    assert differing(digests, 4.0, {}).keys() == {"a"}
    assert differing(digests, 0.0, {}).keys() == {"b"}, "nobody knows what is usual"


def test_gradients_that_are_not_finite_are_alike() -> None:
    ready = pb.Ready(digest=b"x", applied=b"x", squared_norm=math.nan)
    other = pb.Ready(digest=b"x", applied=b"x", squared_norm=math.inf)
    assert differing({"a": ReplicaDigest.by(ready), "b": ReplicaDigest.by(other)}, 4.0, {}) == {}


SAME, OTHER = ReplicaDigest(b"x", b"x", 4.0), ReplicaDigest(b"y", b"y", 4.0)
FLIPPED, FLIPPED_TOO = ReplicaDigest(b"x", b"f", 4.0), ReplicaDigest(b"x", b"g", 4.0)


@pytest.mark.parametrize(
    ("digests", "accepted", "expected"),
    [
        ({"a": SAME}, {}, False),
        ({"a": FLIPPED}, {}, True),
        ({"a": FLIPPED}, {"a": b"f"}, False),
        ({"a": FLIPPED}, {"a": b"g"}, True),
        ({"a": FLIPPED}, {"b": b"f"}, True),
        ({"a": SAME, "b": SAME}, {}, False),
        ({"a": SAME, "b": FLIPPED}, {}, False),
        ({"a": SAME, "b": OTHER}, {}, True),
        ({"a": FLIPPED, "b": FLIPPED_TOO}, {}, True),
        ({"a": FLIPPED, "b": FLIPPED_TOO}, {"a": b"f"}, False),
        ({"a": FLIPPED, "b": ReplicaDigest(b"f", b"f", 4.0)}, {}, False),
        ({"a": SAME, "b": SAME, "c": OTHER}, {}, False),
        ({"a": SAME, "b": OTHER, "c": FLIPPED}, {}, True),
        ({"a": SAME, "b": SAME, "c": OTHER, "d": OTHER}, {}, True),
        ({"a": FLIPPED, "b": SAME._replace(squared_norm=5.0)}, {}, False),
        ({"a": SAME, "b": SAME._replace(squared_norm=5.0)}, {}, False),
    ],
)
def test_when_what_replicas_tell_is_not_enough(
    digests: dict[str, ReplicaDigest], accepted: dict[str, bytes], expected: bool
) -> None:
    assert undecided(digests, accepted) == expected


@pytest.mark.parametrize(
    ("digests", "strikes", "witnesses", "wrong"),
    [
        ({"a": SAME, "b": OTHER}, {}, {}, {"b"}),
        ({"a": SAME, "b": OTHER}, {}, {"w": b"y"}, {"a"}),
        ({"a": SAME, "b": OTHER}, {"b": 2}, {"w": b"y"}, {"a"}),
        ({"a": SAME, "b": OTHER}, {"a": 1}, {"w": b"z"}, {"a"}),
        ({"a": SAME, "b": OTHER}, {}, {"v": b"x", "w": b"y"}, {"b"}),
        ({"a": SAME, "b": SAME, "c": OTHER, "d": OTHER}, {}, {"w": b"y"}, {"a", "b"}),
        ({"a": SAME, "b": SAME, "c": OTHER}, {}, {"w": b"y"}, {"c"}),
        ({"a": FLIPPED, "b": FLIPPED_TOO}, {}, {"w": b"g"}, {"a"}),
        ({"a": FLIPPED, "b": SAME}, {}, {"w": b"f"}, {"a"}),
    ],
)
def test_who_keeps_a_twin_decides_between_updates_that_came_out_differently(
    digests: dict[str, ReplicaDigest],
    strikes: dict[str, int],
    witnesses: dict[str, bytes],
    wrong: set[str],
) -> None:
    verdicts = differing(digests, 4.0, strikes, {}, witnesses)
    assert verdicts.keys() == wrong
    attested = set(witnesses.values()) & {digest.now for digest in digests.values()}
    for why in verdicts.values():
        assert ("keeps a twin" in why) == bool(undecided(digests) and attested)


def test_whose_weights_are_accepted_has_not_changed() -> None:
    digests = {"a": FLIPPED, "b": ReplicaDigest(b"f", b"f", 4.0), "c": OTHER}
    assert differing(digests, 4.0, {}, {"a": b"f"}).keys() == {"c"}
    assert changed(digests) == {"a"}
    assert changed(digests, {"a": b"f"}) == set()
