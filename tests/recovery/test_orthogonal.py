from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.recovery.orthogonal import GRID, exactly_orthogonalized, orthogonalized

EITHER = pytest.mark.parametrize("function", [orthogonalized, exactly_orthogonalized])


@EITHER
@settings(deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 1000))
def test_orthogonalized_keeps_the_singular_vectors_and_evens_the_values(
    function: Callable[[Tensor], Tensor], rows: int, columns: int, seed: int
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ function(matrix) @ vt.T
    large = s >= 0.003 * torch.linalg.vector_norm(s)
    values = found.diagonal()
    assert (values[large] > 0.67).all()
    assert (values < 1.22).all()
    torch.testing.assert_close(found, values.diag(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_size_of_a_matrix_does_not_matter(size: float) -> None:
    matrix = torch.linspace(-1, 2, 60).reshape(6, 10).cos()
    torch.testing.assert_close(
        exactly_orthogonalized(matrix * size), orthogonalized(matrix), atol=1e-4, rtol=0
    )
    zeros = torch.zeros(3, 2)
    assert torch.equal(exactly_orthogonalized(zeros), zeros)


def test_no_addition_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of the iteration is the exact one, computed with whole numbers."""
    products = []
    matmul = Tensor.__matmul__

    def checked(a: Tensor, b: Tensor) -> Tensor:
        product = matmul(a, b)
        if a.dtype == torch.float64:
            whole = [[int(value * GRID) for value in row] for row in a.tolist()]
            other = [[int(value * GRID) for value in row] for row in b.T.tolist()]
            exact = [[sum(map(int.__mul__, x, y)) for y in other] for x in whole]
            assert exact == [
                [int(value * GRID * GRID) for value in row] for row in product.tolist()
            ]
            products.append(product)
        return product

    monkeypatch.setattr(Tensor, "__matmul__", checked)
    generator = torch.Generator().manual_seed(1)
    exactly_orthogonalized(torch.randn(17, 40, generator=generator) ** 3)
    assert len(products) == 15


def test_processors_of_other_kinds_make_the_same_bits() -> None:
    script = (
        "import torch\n"
        "from planaria.node.stage.optimizer import StageOptimizer, digest\n"
        "module = torch.nn.Linear(300, 170)\n"
        "optimizer = StageOptimizer(module, torch.device('cpu'), weight_decay=0.1, muon=20.0)\n"
        "numbers = torch.arange(len(optimizer.weights))\n"
        "optimizer.weights.copy_(numbers * 7919 % 10007)\n"
        "for step in range(3):\n"
        "    optimizer.gradient.copy_(numbers * (104729 + step) % 10009 - 5000)\n"
        "    optimizer.step(1e-3, 1 / (1 + step))\n"
        "print(optimizer.digest().hex(), torch.backends.cpu.get_cpu_capability())\n"
    )

    def words(**environment: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.split()

    own = words()
    plain = words(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="2")
    if platform.machine() == "x86_64":
        assert plain[1:] == ["DEFAULT"]
    assert own[0] == plain[0]
