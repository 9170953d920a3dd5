"""Gradients of replicas as their driver hears of them: who stands out, and who doesn't."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from planaria.node.transaction.standing_out import STEPS, TOLD_OF, Gradients, told_by
from planaria.node.wire import stage_pb2 as pb

Vector = NDArray[np.float64]
SIZE = 300


def steps(
    gradients: Gradients,
    shares: dict[str, int],
    altered: dict[str, Callable[[Vector, np.random.Generator], Vector]],
    count: int,
    noise: float = 2.0,
) -> dict[str, str]:
    """Replicas whose microbatches have a gradient in common, and noise of their own; each adds up a
    piece. Who stands out in any of so many steps."""
    random, named = np.random.default_rng(1), dict[str, str]()
    stages = dict.fromkeys(shares, 1)
    for _ in range(count):
        common = random.normal(size=SIZE) / SIZE**0.5
        made = {}
        for node, k in shares.items():
            own = k * common + noise * k**0.5 * random.normal(size=SIZE) / SIZE**0.5
            made[node] = altered.get(node, lambda g, _: g)(own, random)
        ready = {by: pb.Ready() for by in shares}
        total = sum(made.values())
        for by, piece in zip(shares, np.array_split(np.arange(SIZE), len(shares)), strict=True):
            seen = []
            for node, k in shares.items():
                part = made[node][piece]
                squared = float(part @ part)
                seen.append(
                    pb.Contribution(
                        node=node,
                        squared_norm=squared,
                        projection=float(part @ total[piece]) - squared,
                        microbatches=k,
                        others=sum(shares.values()) - k,
                    )
                )
            ready[by].contributions.extend(told_by(by, seen))
        named |= gradients.heard(stages, ready)
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
    assert not steps(Gradients(), shares, {}, 20 * STEPS, noise)


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
    gradients = Gradients()
    assert steps(gradients, shares, {"b": alter}, 10 * STEPS, 1.0).keys() == {"b"}
    assert not steps(gradients, shares, {"b": alter}, 1, 1.0)  # that is known


def test_everybody_is_told_of_by_as_many() -> None:
    seen = [pb.Contribution(node=node) for node in "hbdfacegji"]
    told = {node: [one.node for one in told_by(node, seen)] for node in "abcdefghij"}
    assert told["e"] == [*"efghijab"]
    for node in "abcdefghij":
        assert sum(node in named for named in told.values()) == TOLD_OF


def test_one_liar_s_word_makes_nobody_stand_out() -> None:
    gradients, chance = Gradients(), Random(0)
    for _ in range(10 * STEPS):
        ready = {node: pb.Ready() for node in "abcd"}
        for by, said in ready.items():
            for node in "abcd":
                lie = by == "a" and node == "b"
                projection = -1e6 if lie else 1.0 + 0.1 * chance.random()
                said.contributions.add(
                    node=node, squared_norm=1.0, projection=projection, microbatches=1, others=3
                )
        assert not gradients.heard(dict.fromkeys("abcd", 1), ready)
