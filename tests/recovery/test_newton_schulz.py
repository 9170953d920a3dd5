from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.recovery.newton_schulz import COARSE, FINE, QUINTIC, ROUNDS, orthogonalized
from tests.harness.processors import printed


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def iterated(matrix: Tensor) -> Tensor:
    """Compute the iteration in float64, without rounding of factors."""
    a, b, c = QUINTIC
    x = matrix.double() / torch.linalg.matrix_norm(matrix.double())
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@settings(deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 1000))
def test_the_singular_vectors_stay_and_the_values_are_evened(
    rows: int, columns: int, seed: int
) -> None:
    matrix = drawn(rows, columns, seed)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    product = u.T @ orthogonalized(matrix) @ vt.T
    large = s >= 0.003 * torch.linalg.vector_norm(s)
    values = product.diagonal()
    assert (values[large] > 0.66).all()
    assert (values < 1.23).all()
    torch.testing.assert_close(product, values.diag(), atol=0.02, rtol=0)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_rounding_leaves_it_close_to_the_iteration_in_float64(power: float) -> None:
    """In bfloat16 the result would be 0.03 to 0.3 off."""
    u, _, vt = torch.linalg.svd(drawn(96, 200), full_matrices=False)
    matrix = u * torch.arange(1, 97) ** -power @ vt
    wanted = iterated(matrix)
    assert (orthogonalized(matrix) - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_size_of_a_matrix_does_not_matter(size: float) -> None:
    matrix = drawn(6, 10)
    wanted = orthogonalized(matrix)
    torch.testing.assert_close(orthogonalized(matrix * size), wanted, atol=0.02, rtol=0)
    torch.testing.assert_close(orthogonalized(matrix.T * size), wanted.T, atol=0.02, rtol=0)
    zeros = torch.zeros(3, 2)
    assert torch.equal(orthogonalized(zeros), zeros)


@pytest.mark.parametrize(("rows", "columns"), [(17, 40), (200, 200), (64, 3000)])
def test_no_addition_rounds(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """No order of additions can round: the largest sum that the norms of a row and a column allow
    fits into 24 bits, and each product is exact."""
    products = []
    matmul = Tensor.__matmul__

    def checked(a: Tensor, b: Tensor) -> Tensor:
        product = matmul(a, b)
        steps = FINE * (COARSE if len(products) % 3 == 2 else FINE)
        bound = a.double().norm(dim=1).max() * b.double().norm(dim=0).max()
        assert bound * steps <= 2**24
        assert torch.equal(a * FINE, (a * FINE).round())
        assert torch.equal(b * FINE, (b * FINE).round())
        assert torch.equal(product.double(), matmul(a.double(), b.double()))
        products.append(product)
        return product

    monkeypatch.setattr(Tensor, "__matmul__", checked)
    orthogonalized(drawn(rows, columns, 1) ** 3)
    assert len(products) == 15


def test_processors_of_other_kinds_make_the_same_bits() -> None:
    script = (
        "import torch\n"
        "from planaria.node.stage.optimizer import StageOptimizer\n"
        "module = torch.nn.Linear(300, 170)\n"
        "optimizer = StageOptimizer(module, torch.device('cpu'), weight_decay=0.1, muon=20.0)\n"
        "numbers = torch.arange(len(optimizer.weights))\n"
        "optimizer.weights.copy_(numbers * 7919 % 10007)\n"
        "for step in range(3):\n"
        "    optimizer.gradient.copy_(numbers * (104729 + step) % 10009 - 5000)\n"
        "    optimizer.step(1e-3, 1 / (1 + step))\n"
        "print(optimizer.digest().hex(), torch.backends.cpu.get_cpu_capability())\n"
    )

    own = printed(script)
    plain = printed(
        script, ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="2"
    )
    if platform.machine() == "x86_64":
        assert plain[1:] == ["DEFAULT"]
    assert own[0] == plain[0]
