"""Orthogonalized matrices, for Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS: Final = 5
QUINTIC: Final = (3.4445, -4.7750, 2.0315)
FINE: Final = 2.0**11
COARSE: Final = 2.0**10


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximates U Vᵀ of the matrix's U S Vᵀ, float32 [rows, columns].

    It is a quintic Newton-Schulz iteration, steepest at 0, with the coefficients of Jordan et al.
    Five rounds map singular values of at least 0.3 % of the norm to between 0.66 and 1.23, and
    smaller ones to smaller values. A matrix of zeros stays as it is.

    All exact devices make the same bits. Matrix products add in an order that depends on the
    processor. Here no addition rounds, so the order doesn't matter. Factors are rounded to
    multiples of 2^-11, the polynomial to 2^-10. By Cauchy and Schwarz no partial sum exceeds a
    row's norm times a column's. These are at most the largest singular values: 1.3 of the iterated
    matrix, 1.7 of its square, 3 of the polynomial. So sums stay below 4 and are multiples of 2^-22,
    or below 8 and multiples of 2^-21: both fit into the 24 bits of a float32. The iterated matrix
    itself is rounded in products only. So small singular values keep their directions, and the
    result is about as exact as in bfloat16.
    """
    from planaria.recovery.identical_arithmetic import squared_norm  # loads torch

    norm = math.sqrt(squared_norm(matrix.flatten()))
    if norm == 0:
        return matrix
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / norm
    for _ in range(ROUNDS):
        near = _rounded(x, FINE)
        gram = near @ near.T
        square = _rounded(gram, FINE)
        polynomial = _rounded(gram * b + (square @ square) * c, COARSE)
        x.mul_(a).add_(polynomial @ near)
    return x.T if tall else x


def _rounded(x: Tensor, steps: float) -> Tensor:
    return x.mul(steps).round_().div_(steps)


def orthogonalizing_flops(shapes: Iterable[Sequence[int]]) -> float:
    """FLOPs of orthogonalizing tensors of these shapes for a Muon update: matrices, or batches of
    them. Each round multiplies a matrix with itself, the resulting square with itself, and their
    polynomial with the matrix."""
    batches = [(math.prod(shape[:-2]), *sorted(shape[-2:])) for shape in shapes if len(shape) > 1]
    return ROUNDS * math.fsum(count * (4.0 * m * m * n + 2.0 * m**3) for count, m, n in batches)
