"""The arithmetic of relearning: update rule, error and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from planaria.recovery.identical_arithmetic import exact
from planaria.recovery.newton_schulz import orthogonalized
from planaria.recovery.relearning import ratio

MOMENTUM: Final = 0.8

# Updates


class UpdateRule(Protocol):
    """Updates a relearning stage's weights by their gradients. `tensors`: its own state."""

    @property
    def tensors(self) -> list[Tensor]: ...

    def step(self, lr: float) -> None: ...


class Muon:
    """Momentum, orthogonalized (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    A matrix moves by lr sqrt(max(1, rows / columns)) times the orthogonal matrix nearest to its
    Nesterov momentum. It also moves by lr times `pull` of the way back to its initial value;
    otherwise, updates add up to a random walk in directions without training signal.

    Vectors, the weights of norms, stay: the matrix behind a norm can represent their effect. If
    both moved, one would shrink and the other grow, and training would continue with weights too
    large for its step size.

    torch.optim.Muon isn't used: its construction loads torch's compiler, which stalls the swarm for
    seconds, and it computes in bfloat16, which differs between processors.
    """

    def __init__(self, stage: nn.Module, pull: float = 0.0) -> None:
        self._pull = pull
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
            direction = orthogonalized(gradient.lerp(momentum, MOMENTUM))
            if guess is not None:
                weights.lerp_(guess, self._pull * lr)
            weights.sub_(direction, alpha=lr * scale)

    @property
    def tensors(self) -> list[Tensor]:
        """The matrices' pull targets, if any, and their momentum."""
        return [own for _, *kept in self._matrices for own in kept if own is not None]


# One stage


class Learner:
    """One stage in relearning: forward, then backward, which updates its weights.

    `stage` maps a float [B, T, dim] to the same; `bf16` runs it under autocast.
    """

    def __init__(
        self, stage: nn.Module, lr: float, bf16: bool = False, update: UpdateRule | None = None
    ) -> None:
        self.lr = lr
        self._stage, self._bf16 = stage, bf16
        self.update = update or Muon(stage)
        self._passed: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Maps float32 [B, T, dim] to the same, without a graph; call `backward` next."""
        x = x.detach().requires_grad_()
        y = self._compute(x)
        self._passed = x, y
        return y.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """One update from the error's gradient at the output; returns that at the input."""
        assert self._passed is not None, "backward goes with the forward before it"
        (x, y), self._passed = self._passed, None
        self._stage.zero_grad(set_to_none=False)
        y.backward(gradient)  # type: ignore[no-untyped-call]
        self.update.step(self.lr)
        assert x.grad is not None
        return x.grad

    @torch.no_grad()
    def measure(self, x: Tensor) -> Tensor:
        """The stage's output, as of `forward`, without a `backward` to follow."""
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16) if self._bf16 else nullcontext():
            y: Tensor = self._stage(x)
            return y.float()


def squared_distance(a: Tensor, b: Tensor) -> float:
    return float(exact(a - b).double().square_().sum())


def error_gradient(computed: Tensor, output: Tensor, squared_norm: float) -> Tensor:
    """Gradient, at `computed`, of the residual error ||computed - output||² / ||output - input||².

    A block adds to its input, so this is the error of the addition, relative to its target. The
    denominator is `squared_norm`; if it is 0, the gradient is 0.
    """
    return (computed - output).mul_(2 / squared_norm if squared_norm else 0.0)


# A chain in one process


def learn(chain: Sequence[Learner], x: Tensor, y: Tensor) -> None:
    """Updates each stage of a run of lost stages once, by the run's input and output."""
    activation = x
    for learner in chain:
        activation = learner.forward(activation)
    gradient = error_gradient(activation, y, squared_distance(y, x))
    for learner in reversed(chain):
        gradient = learner.backward(gradient)


def residual_error(chain: Sequence[Learner], pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """A run's error over pairs of input and output; inf if the targets add nothing."""
    error = norm = 0.0
    for x, y in pairs:
        activation = x
        for learner in chain:
            activation = learner.measure(activation)
        error += squared_distance(activation, y)
        norm += squared_distance(y, x)
    return ratio(error, norm)
