"""Gradients of replicas as they see each other's: who stands out, and who doesn't."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from planaria.bootstrap.neighbours import row_of, rows
from planaria.node.transaction.gradient_outliers import (
    LOOKED_AT,
    STEPS,
    Contribution,
    GradientOutliers,
    ReplicaGradients,
    looked_at,
    who_looks_at,
)
from planaria.node.wire import stage_pb2 as pb

Vector = NDArray[np.float64]
SIZE = 300


class Stage:
    """Replicas, and the driver that hears of them."""

    def __init__(self, replicas: Iterable[str]) -> None:
        self.seen = {node: ReplicaGradients(node) for node in replicas}
        self.stages = dict.fromkeys(self.seen, 1)
        self.driver = GradientOutliers()

    def step(self, seen: Mapping[str, Iterable[Contribution]]) -> dict[str, str]:
        """By each replica. Who stands out, and didn't before."""
        for node, contributions in seen.items():
            self.seen[node].note(contributions, self.stages.keys() - {node})
        return self.heard({node: one.standing_out() for node, one in self.seen.items()})

    def heard(self, said: Mapping[str, Iterable[pb.StandsOut]]) -> dict[str, str]:
        ready = {node: pb.Ready(standing_out=told) for node, told in said.items()}
        return self.driver.heard(self.stages, ready)


def steps(
    stage: Stage,
    shares: dict[str, int],
    altered: dict[str, Callable[[Vector, np.random.Generator], Vector]],
    count: int,
    noise: float = 2.0,
) -> dict[str, str]:
    """Replicas whose microbatches have a gradient in common, and noise of their own; each adds up a
    piece. Who stands out in any of so many steps."""
    random, named = np.random.default_rng(1), dict[str, str]()
    for _ in range(count):
        common = random.normal(size=SIZE) / SIZE**0.5
        made = {}
        for node, k in shares.items():
            own = k * common + noise * k**0.5 * random.normal(size=SIZE) / SIZE**0.5
            made[node] = altered.get(node, lambda g, _: g)(own, random)
        seen: dict[str, list[Contribution]] = {}
        for by, piece in zip(shares, np.array_split(np.arange(SIZE), len(shares)), strict=True):
            seen[by] = []
            row = row_of(by, rows(shares))
            total = sum(made[node] for node in row)
            for node in looked_at(by, row):
                part, k = made[node][piece], shares[node]
                squared = float(part @ part)
                projection = float(part @ total[piece]) - squared
                others = sum(shares[one] for one in row) - k
                seen[by].append(Contribution(node, squared, projection, k, others))
        named |= stage.step(seen)
    return named


@pytest.mark.parametrize(
    "shares",
    [
        {"a": 4, "b": 4, "c": 4},
        {"a": 1, "b": 8, "c": 8},
        {"a": 1, "b": 1, "c": 20, "d": 2},
        {"a": 4, "b": 4},
    ],
)
@pytest.mark.parametrize("noise", [0.1, 2.0, 10.0])
def test_nobody_stands_out_among_those_who_do_their_work(
    shares: dict[str, int], noise: float
) -> None:
    assert not steps(Stage(shares), shares, {}, 20 * STEPS, noise)


@pytest.mark.parametrize(
    "alter",
    [
        lambda g, _: -g,
        lambda g, random: random.normal(size=SIZE) * np.linalg.norm(g) / SIZE**0.5,
        lambda g, _: np.roll(g, 1),
        lambda g, _: 10.0 * g,
        lambda g, _: 0.1 * g,
    ],
    ids=["turned round", "noise", "shifted", "long", "short"],
)
@pytest.mark.parametrize("replicas", [3, 5, 20])
def test_who_sends_something_else_stands_out(
    alter: Callable[[Vector, np.random.Generator], Vector], replicas: int
) -> None:
    shares = dict.fromkeys("abcdefghijklmnopqrst"[:replicas], 4)
    stage = Stage(shares)
    assert steps(stage, shares, {"b": alter}, 10 * STEPS, 1.0).keys() == {"b"}
    assert not steps(stage, shares, {"b": alter}, 1, 1.0)  # that is known


def test_everybody_is_looked_at_by_as_many() -> None:
    ring = [*"hbdfacegji"]
    assert looked_at("e", ring) == [*"efghijab"]
    for count in (3, 8, 100, 101):
        nodes = [f"{number:03}" for number in range(count)]
        places = min(map(len, rows(nodes)))
        looked = {
            node: looked_at(node, row) for row in rows(nodes) for node in row[:places]
        }  # who is behind those owns no part, and sees nothing
        for node in nodes:
            by = {one for one, others in looked.items() if node in others and one != node}
            assert by == {*who_looks_at(node, nodes)}
            least = min(LOOKED_AT, places) - 1
            assert least - (count == 101) <= len(by) <= LOOKED_AT - 1
    assert {*who_looks_at("b", "abc")} == {*"ac"}


def test_one_liar_s_word_makes_nobody_stand_out() -> None:
    stage = Stage("abcd")
    lie = [pb.StandsOut(node="b", reason="I say so")]
    assert not stage.heard({"a": lie, "b": [], "c": [], "d": []})
    assert stage.heard({"a": lie, "b": [], "c": lie, "d": []}) == {"b": "I say so"}


def test_who_does_not_look_at_a_replica_has_no_say() -> None:
    nodes = [f"n{number:02}" for number in range(20)]
    stage = Stage(nodes)
    lie = [pb.StandsOut(node="n00", reason="I say so")]
    looking = who_looks_at("n00", nodes)
    others = [node for node in nodes if node not in looking]
    half = len(looking) // 2
    assert not stage.heard(dict.fromkeys([*others, *looking[:half]], lie))
    assert stage.heard(dict.fromkeys(looking[: half + 1], lie))


def test_who_is_in_another_row_now_is_forgotten() -> None:
    """It is nobody's there to say what it does."""
    nodes = [*"abcdefgh"]
    stage, shares = Stage(nodes), dict.fromkeys(nodes, 4)
    assert steps(stage, shares, {"h": lambda g, _: 10.0 * g}, STEPS, 1.0).keys() == {"h"}
    stage.seen["a"].note([], {*nodes, "i"})
    assert not stage.seen["a"].standing_out()
    stage.seen["g"].note([], {*nodes, "i"})
    assert [one.node for one in stage.seen["g"].standing_out()] == ["h"]


def test_a_step_with_what_is_not_finite_is_not_looked_at() -> None:
    stage, shares = Stage("abc"), dict.fromkeys("abc", 4)
    infinite = [Contribution(node, math.inf, math.nan, 4, 8) for node in "abc"]
    assert not stage.step(dict.fromkeys("abc", infinite))
    assert steps(stage, shares, {"b": lambda g, _: -g}, 10 * STEPS, 1.0).keys() == {"b"}


def test_what_was_seen_of_a_replica_that_is_gone_is_forgotten() -> None:
    stage, shares = Stage("abcd"), dict.fromkeys("abcd", 4)
    assert steps(stage, shares, {"b": lambda g, _: 10.0 * g}, STEPS, 1.0).keys() == {"b"}
    assert [one.node for one in stage.seen["a"].standing_out()] == ["b"]
    stage.seen["a"].note([], {"c", "d"})
    stage.seen["a"].note([], {"b", "c", "d"})
    assert not stage.seen["a"].standing_out()
