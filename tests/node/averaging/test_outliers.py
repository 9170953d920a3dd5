"""Sequential tests of replicas: liars are named soon, correct replicas never."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from random import Random

import pytest
import torch

from planaria.node.averaging.outliers import SILENT, SuspicionScores, compare_gradients

WIDTH = 512
Lie = Callable[[torch.Tensor], torch.Tensor]
Shares = Sequence[int]


class Stage:
    """Replicas whose gradients are audited in each step."""

    def __init__(self, shares: Shares, signal: float = 1.0, seed: int = 0, steps: int = 10_000):
        """`signal`: norm of the gradient that replicas estimate; a token's noise has norm 16."""
        self.generator = torch.Generator().manual_seed(seed)
        self.names = [f"n{number}" for number in range(len(shares))]
        self.shares, self.signal = shares, signal
        self.suspicions = SuspicionScores(steps)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Each replica's sum over its tokens, with up to 1.5 times the usual noise."""
        common = torch.randn(WIDTH, generator=self.generator)
        common *= self.signal / common.norm()
        gradients = {}
        for name, tokens in zip(self.names, self.tokens().values(), strict=True):
            scale = 16 * tokens**0.5 / WIDTH**0.5
            wild = 1 + 0.5 * float(torch.rand(1, generator=self.generator))
            noise = torch.randn(WIDTH, generator=self.generator) * scale * wild
            gradients[name] = tokens * common + noise
        return gradients

    def tokens(self) -> dict[str, int]:
        return dict(zip(self.names, self.shares, strict=True))

    def step(self, lies: Mapping[str, Lie]) -> dict[str, str]:
        gradients = self.gradients()
        for name, lie in lies.items():
            gradients[name] = lie(gradients[name])
        pairs = combinations_with_replacement(self.names, 2)
        products = {(a, b): float(gradients[a] @ gradients[b]) for a, b in pairs}
        for name in self.names:
            for test, stands_out in compare_gradients(name, products, self.tokens()).items():
                self.suspicions.note(name, f"contributor {test}", stands_out)
        return self.suspicions.outliers(len(self.names))

    def named(self, steps: int, **lies: Lie) -> dict[str, str]:
        for _ in range(steps):
            if named := self.step(lies):
                return named
        return {}


@pytest.mark.parametrize("signal", [0.0, 0.1, 1.0, 16.0])
@pytest.mark.parametrize("shares", [(4, 4, 4), (1, 4, 40), (1, 1, 2, 8), (3, 0, 5, 5, 6)])
def test_correct_replicas_are_never_named(shares: Shares, signal: float) -> None:
    """The part of the gradients that is noise and the shares of tokens make no difference."""
    assert Stage(shares, signal).named(1000) == {}


@pytest.mark.parametrize("shares", [(4, 4, 4), (2, 3, 5, 7), (8, 8, 8, 8, 8)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("residual", [0.0, 0.004])
def test_who_has_no_tokens_for_an_expert_is_not_named(
    shares: Shares, share: float, residual: float
) -> None:
    """`residual`: what error feedback leaves of a gradient in the next step."""
    stage, chance = Stage(shares), Random(0)
    none = {n: lambda x: x * (residual if chance.random() < share else 1.0) for n in stage.names}
    assert stage.named(2000, **none) == {}


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda x: -x, "against"),
        (lambda x: -2 * x, ""),
        (lambda x: 3 * x, "more than 1.5 times as long"),
        (lambda x: -1000 * x, ""),
        (lambda x: 0 * x, "less than 1/1.5 times as long"),
        (lambda x: x / 4, "less than 1/1.5 times as long"),
    ],
)
@pytest.mark.parametrize("shares", [(4, 4, 4), (2, 3, 5, 7), (8, 8, 8, 8, 8)])
def test_a_liar_is_named_soon_and_nobody_else(shares: Shares, lie: Lie, reason: str) -> None:
    for liar in ("n0", f"n{len(shares) - 1}"):
        named = Stage(shares, 8.0).named(100, **{liar: lie})
        assert named.keys() == {liar}
        assert reason in named[liar]


def test_who_reverses_and_doubles_a_gradient_is_named_after_a_dozen_audits() -> None:
    """Its lie undoes what two others teach, so each audit until then costs a step."""
    assert Stage((4, 4, 4), 8.0).named(13, n1=lambda x: -2 * x).keys() == {"n1"}


@pytest.mark.parametrize("lie", [-1.0, 1.0])
def test_who_contributes_without_tokens_is_named(lie: float) -> None:
    stage = Stage((0, 4, 4), 8.0)
    gradient = stage.gradients()["n1"]
    assert stage.named(100, n0=lambda x: 2 * lie * gradient).keys() == {"n0"}


def test_a_liar_is_named_as_soon_after_a_long_honest_time() -> None:
    stage = Stage((4, 4, 4), 8.0)
    assert stage.named(1000) == {}
    assert stage.named(100, n2=lambda x: -x).keys() == {"n2"}


def test_of_two_nobody_is_compared() -> None:
    assert (
        compare_gradients(
            "a", {("a", "a"): 1.0, ("a", "b"): -9.0, ("b", "b"): 90.0}, {"a": 1, "b": 1}
        )
        == {}
    )


def test_who_owes_answers_is_named_but_not_for_one() -> None:
    suspicions = SuspicionScores(1000)
    suspicions.note("a", SILENT, True)
    assert suspicions.outliers(3) == {}
    for _ in range(10):
        suspicions.note("a", SILENT, True)
        suspicions.note("b", SILENT, False)
    assert suspicions.outliers(3) == {"a": "it doesn't answer audits"}


def test_the_next_driver_goes_on_with_the_scores() -> None:
    stage, after = Stage((4, 4, 4), 8.0), Stage((4, 4, 4), 8.0, seed=1)
    assert stage.named(15, n1=lambda x: -x) == {}
    after.suspicions.restore(stage.suspicions.listed())
    assert after.named(20, n1=lambda x: -x).keys() == {"n1"}
    after.suspicions.keep(["n0", "n2"])
    assert after.suspicions.listed() == []
