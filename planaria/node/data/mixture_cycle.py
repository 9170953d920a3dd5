"""Shares of several corpora in a run's samples, as turns in a cycle. It needs no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Final, NamedTuple

MOST_TURNS: Final = 10_000
"""Length limit of the cycle of turns."""


class Share(NamedTuple):
    """A corpus's part in a mixture of corpora."""

    samples: int
    turns: int  # in a cycle


def turns_of(shares: Sequence[float]) -> list[int]:
    """The least whole numbers of turns with the ratios of these shares. Raises ValueError for a
    share that isn't greater than 0, and for a cycle of more than MOST_TURNS."""
    if not all(share > 0 for share in shares):
        raise ValueError(f"the shares {_listed(shares)} must all be greater than 0")
    exact = [Fraction(str(share)) for share in shares]
    whole = [int(share * lcm(*(fraction.denominator for fraction in exact))) for share in exact]
    turns = [number // gcd(*whole) for number in whole]
    if sum(turns) > MOST_TURNS:
        raise ValueError(
            f"the shares {_listed(shares)} come out even only after {sum(turns)} samples, and at "
            f"most {MOST_TURNS} can be planned: give them with fewer digits, as in 7 and 3"
        )
    return turns


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:g}" for share in shares)
