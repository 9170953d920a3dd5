"""Orthogonalized matrices, for Muon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from planaria.recovery.exact import squared_norm

ROUNDS: Final = 5
QUINTIC: Final = torch.tensor([3.4445, -4.7750, 2.0315]).tolist()
"""Float32: not all devices take numbers of 64 bits beside a tensor."""
GRID: Final = 2.0**24
"""Factors of an exact product are multiples of 1 / GRID."""


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximates U Vᵀ of the matrix's U S Vᵀ by a quintic Newton-Schulz iteration, steepest at 0,
    with the coefficients of Jordan et al. Five rounds map singular values of at least 0.3 % of the
    norm to between 0.68 and 1.21, and smaller ones to smaller values."""
    return _iterated(matrix / (torch.linalg.matrix_norm(matrix) + 1e-7), lambda x: x)


def exactly_orthogonalized(matrix: Tensor) -> Tensor:
    """As `orthogonalized`, with the same bits on every exact device: float32 [rows, columns].

    Matrix products add in an order that depends on the processor. Here no addition rounds, so the
    order doesn't matter: both factors are rounded to multiples of 2^-24 and multiplied in float64.
    A product of two is a multiple of 2^-48. By Cauchy and Schwarz no partial sum exceeds a row's
    norm times a column's. These are at most 1.21, the largest singular value that the iteration
    makes, and 2.81, the largest of its polynomial. So 50 bits are enough, of 53.

    A matrix of zeros stays as it is.
    """
    norm = torch.tensor(squared_norm(matrix.flatten()) ** 0.5).item()  # float32
    if norm == 0:
        return matrix
    return _iterated(matrix.double() / norm, _on_grid).float()


def _on_grid(x: Tensor) -> Tensor:
    return x.mul(GRID).round_().div_(GRID)


def _iterated(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The iteration, of a matrix whose singular values are at most 1. Each operation on elements
    rounds by itself: no fused multiply-add."""
    a, b, c = QUINTIC
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(ROUNDS):
        x = rounded(x)
        gram = x @ x.T
        near = rounded(gram)
        polynomial = rounded(gram * b + (near @ near) * c)
        x = x * a + polynomial @ x
    return x.T if tall else x
