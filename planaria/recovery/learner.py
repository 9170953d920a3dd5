"""The arithmetic of relearning: how a stage's weights move, by which error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from planaria.recovery.relearning import ratio

MOMENTUM: Final = 0.8
ROUNDS: Final = 5
QUINTIC: Final = (3.4445, -4.7750, 2.0315)

# One update


class UpdateRule(Protocol):
    """Changes a stage's weights by their gradients. `tensors`: all that it has of its own."""

    @property
    def tensors(self) -> list[Tensor]: ...

    def step(self, lr: float) -> None: ...


class Muon:
    """Momentum, orthogonalized (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    A matrix moves by lr sqrt(max(1, rows / columns)) times the orthogonal matrix that is nearest to
    its Nesterov momentum, and by lr times `pull` of the way back to what it was at first. In
    directions that no pair tells anything about, updates otherwise add up to a random walk.

    Vectors, the weights of norms, stay: the matrix behind a norm can do all that they do, and when
    both move, the one shrinks, the other grows, and training goes on with large weights that it
    moves too slowly.

    torch.optim.Muon isn't used: making one loads torch's compiler, for seconds in which the whole
    swarm waits, and it computes in bfloat16, which differs from one processor to the next.
    """

    def __init__(self, stage: nn.Module, pull: float = 0.0, rounds: int = ROUNDS) -> None:
        self._pull, self._rounds = pull, rounds
        matrices = [p for p in stage.parameters() if p.dim() == 2 and p.requires_grad]
        self._matrices = [
            (p, p.detach().clone() if pull else None, torch.zeros_like(p)) for p in matrices
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for weights, guess, momentum in self._matrices:
            if (gradient := weights.grad) is None:
                continue
            momentum.lerp_(gradient, 1 - MOMENTUM)
            rows, columns = weights.shape
            scale = math.sqrt(max(1.0, rows / columns))
            direction = orthogonalized(gradient.lerp(momentum, MOMENTUM), self._rounds)
            if guess is not None:
                weights.lerp_(guess, self._pull * lr)
            weights.sub_(direction, alpha=lr * scale)

    @property
    def tensors(self) -> list[Tensor]:
        """What each matrix is pulled to, if it is, and its momentum."""
        return [own for _, *kept in self._matrices for own in kept if own is not None]


def orthogonalized(matrix: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Nearly U Vᵀ of the matrix's U S Vᵀ: by a quintic Newton-Schulz iteration that is steepest at
    0, with the coefficients of Jordan et al. After five rounds singular values of 0.3 % of the norm
    or more come out between 0.68 and 1.21, smaller ones smaller."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.T if tall else x
    return out


def orthogonalizing_flops(shapes: Iterable[Sequence[int]], rounds: int = ROUNDS) -> float:
    """Of an update by Muon, for all matrices of these shapes: each round multiplies a matrix with
    itself, the square that comes of it with itself, and both."""
    matrices = [sorted(shape) for shape in shapes if len(shape) == 2]
    return rounds * math.fsum(4.0 * m * m * n + 2.0 * m**3 for m, n in matrices)


# One pair


class Learner:
    """One stage's part: forward, then backward, which updates its weights.

    `stage` maps a float [B, T, dim] to the same; `bf16` has it computed under autocast.
    """

    def __init__(
        self, stage: nn.Module, lr: float, bf16: bool = False, update: UpdateRule | None = None
    ) -> None:
        self.lr = lr
        self._stage, self._bf16 = stage, bf16
        self.update = update or Muon(stage)
        self._passed: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """float32 [B, T, dim] to the same, without a graph; `backward` is to follow."""
        x = x.detach().requires_grad_()
        y = self._compute(x)
        self._passed = x, y
        return y.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """One update from the error's gradient at the output; gives that at the input."""
        assert self._passed is not None, "backward goes with the forward before it"
        (x, y), self._passed = self._passed, None
        self._stage.zero_grad(set_to_none=False)
        y.backward(gradient)  # type: ignore[no-untyped-call]
        self.update.step(self.lr)
        assert x.grad is not None
        return x.grad

    @torch.no_grad()
    def measure(self, x: Tensor) -> Tensor:
        """Computes as `forward` does, with nothing to follow."""
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            y: Tensor = self._stage(x)
            return y.float()


def squared_distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().square_().sum())


def error_gradient(found: Tensor, output: Tensor, squared_norm: float) -> Tensor:
    """Gradient, at `found`, of the residual error ||found - output||² / ||output - input||².

    Blocks add to their input, so this is the error of what they add, in units of what they should
    add. `squared_norm` is the denominator; where it is 0, there is nothing to be learned.
    """
    return (found - output).mul_(2 / squared_norm if squared_norm else 0.0)


# All in one process


def learn(chain: Sequence[Learner], x: Tensor, y: Tensor) -> None:
    """One update of every stage of a run, in the order of the visits, from its input and output."""
    found = x
    for learner in chain:
        found = learner.forward(found)
    gradient = error_gradient(found, y, squared_distance(y, x))
    for learner in reversed(chain):
        gradient = learner.backward(gradient)


def residual_error(chain: Sequence[Learner], pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Of a run, over all pairs of its input and output; inf where nothing was to be added."""
    error = norm = 0.0
    for x, y in pairs:
        found = x
        for learner in chain:
            found = learner.measure(found)
        error += squared_distance(found, y)
        norm += squared_distance(y, x)
    return ratio(error, norm)
