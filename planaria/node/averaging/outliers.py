"""Outliers: sequential tests of replicas whose gradients are unlike the others'. Pure.

At each audit, each replica is compared with the other replicas of its stage, in the drawn blocks
that it adds up itself (as an *adder*), and in the others (as a *contributor*). A test asks whether
it stands out. A correct replica does so with a probability of at most `usual`. Wald's sequential
test (Annals of Mathematical Statistics 16, 1945) adds the logarithm of the likelihood ratio to a
score, which never falls below zero: so a replica that begins to lie is found as fast as one that
always has. The chance that a correct replica is ever named is below FALSE_ALARM for a run.

A test counts more than half of the others, so one liar of three can't make a correct one stand out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from statistics import median_high, median_low
from typing import Final, NamedTuple

from planaria.node.wire import stage_pb2 as pb

FALSE_ALARM: Final = 1e-6
"""Probability that any correct replica is named in a run."""
UNUSUAL: Final = 1.5
"""Ratio of lengths from which a gradient is long or short."""
COMPARED: Final = 2
"""Others that a replica is compared with, at least."""
SILENT: Final = "silent"
"""Name of the test for who owes an answer to an audit."""


class OutlierTest(NamedTuple):
    usual: float  # a correct replica stands out with this probability, at most
    lying: float  # a lying one, as far as the test looks for it
    reason: str

    def score(self, stands_out: bool) -> float:
        """Logarithm of the likelihood ratio of an outcome."""
        if stands_out:
            return math.log(self.lying / self.usual)
        return math.log((1 - self.lying) / (1 - self.usual))


TESTS: Final = {
    "against": OutlierTest(0.25, 0.75, "they point against those of the other replicas"),
    "long": OutlierTest(0.25, 0.75, f"they are more than {UNUSUAL} times as long as the others'"),
    "short": OutlierTest(
        0.25, 0.75, f"they are less than 1/{UNUSUAL} times as long as the others'"
    ),
    "reversed": OutlierTest(
        0.0625, 0.75, "they point against those of the other replicas, and are longer"
    ),
}
"""For a correct replica, two gradients that are only noise have a positive product half of the
time. So more than half of its products are negative, and those of the others positive, in a quarter
of the audits; with a gradient that all of them estimate, less often. It is longer than more than
half of the others at most half of the time, and seldom by as much. No ratio of lengths is
impossible: if no token of a replica went to an expert, its gradient there is zero, or what error
feedback has left. The sign of noise doesn't depend on its length, so a gradient is long and against
the others in a sixteenth of the audits at most."""
ROLES: Final = {"contributor": "its gradients", "adder": "its gradients in the sums that it makes"}
SILENCE: Final = OutlierTest(0.01, 0.5, "it doesn't answer audits")


def compare_gradients(
    node: str, products: Mapping[tuple[str, str], float], tokens: Mapping[str, int]
) -> dict[str, bool]:
    """Whether a replica stands out, by test. `products`: inner products of gradients, by pair in
    the order of names, with squared norms. `tokens`: in the microbatches of each replica.

    With k tokens, a squared norm grows with k for noise, and with k squared otherwise. Anything in
    between proves nothing, so a length is unusual only if it is in both ways. Without tokens a
    replica has nothing to contribute but its error feedback."""
    known = {name for name, _ in products}
    others = sorted(name for name in known - {node} if tokens[name])
    if node not in known or len(others) < COMPARED:
        return {}
    against = median_high(products[_pair(node, other)] for other in others) < 0
    agree = median_low(products[pair] for pair in combinations(others, 2)) > 0
    above, below = math.inf, math.inf  # logarithms of ratios of lengths
    for power in (1, 2) if tokens[node] else (0,):
        length, *lengths = (
            0.5 * (_log(products[name, name]) - power * math.log(tokens[name] or 1))
            for name in (node, *others)
        )
        above = min(above, _difference(length, median_high(lengths)))
        below = min(below, _difference(median_low(lengths), length))
    below = below if tokens[node] else -math.inf
    against, long = against and agree, above > math.log(UNUSUAL)
    return {
        "against": against,
        "long": long,
        "short": below > math.log(UNUSUAL),
        "reversed": against and long,
    }


class SuspicionScores:
    """The scores of all replicas in the tests for outliers."""

    def __init__(self, steps: int) -> None:
        """`steps`: of the run."""
        self._audits = steps
        self._scores: dict[tuple[str, str], float] = {}  # by node and test

    def restore(self, listed: Iterable[pb.Suspicion]) -> None:
        """Goes on with the scores of the driver before."""
        self._scores = {(each.node, each.test): each.score for each in listed}

    def listed(self) -> list[pb.Suspicion]:
        return [
            pb.Suspicion(node=node, test=test, score=score)
            for (node, test), score in sorted(self._scores.items())
        ]

    def keep(self, members: Collection[str]) -> None:
        """Drops the scores of nodes that are no longer members."""
        self._scores = {key: score for key, score in self._scores.items() if key[0] in members}

    def note(self, node: str, test: str, stands_out: bool) -> None:
        score = self._scores.pop((node, test), 0.0) + _test_of(test).score(stands_out)
        if score > 0:
            self._scores[node, test] = score

    def enough(self, replicas: int) -> float:
        """The score that names one of so many audited replicas."""
        tests = len(ROLES) * len(TESTS) + 1
        return math.log(self._audits * replicas * tests / FALSE_ALARM)

    def outliers(self, replicas: int) -> dict[str, str]:
        """The outliers of so many audited replicas, and why."""
        scores, enough = sorted(self._scores.items()), self.enough(replicas)
        return {node: _reason(test) for (node, test), score in scores if score >= enough}


def _test_of(test: str) -> OutlierTest:
    return SILENCE if test == SILENT else TESTS[test.split()[-1]]


def _reason(test: str) -> str:
    role = ROLES.get(test.split()[0])
    return f"{role}: {_test_of(test).reason}" if role else _test_of(test).reason


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _difference(a: float, b: float) -> float:
    return a - b if a != b else 0.0  # both may be infinite
