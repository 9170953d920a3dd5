"""Relearning: a rebuilt stage is trained on what went into and came out of the lost one.

The nodes around a lost stage keep what went into it and what came out, of the last committed steps.
Stages lost next to each other are learned as one: the input of the first, the output of the last.

Many tokens, small updates, few passes and a rate that falls to 0 teach most in a given time: each
pair is cut into parts of a few samples, and each part makes an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import Tensor

CLIP: Final = 1.0
"""Norm of a stage's gradient, at most, in one update."""


# How


def parts(samples: int, at_a_time: int) -> list[slice]:
    """Samples of a pair to be learned at a time: at most so many, as evenly as can be; 0: all."""
    count = -(-samples // at_a_time) if at_a_time else 1
    size, larger = divmod(samples, count)
    ends = [number * size + min(number, larger) for number in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def rate(lr: float, updates: float, time: float = 0.0) -> float:
    """Learning rate of the next update. It falls in a line to 0 at the last update, or when the
    time is over, if that comes first; of both the share that is done, 0 to 1."""
    return lr * (1 - min(1.0, max(updates, time)))


# One pair


class Optimizer(Protocol):
    """Of one stage, with its flat weights; backward adds to its gradient."""

    weights: Tensor

    def zero_gradient(self) -> None: ...
    def squared_norm(self) -> float: ...
    def step(self, lr: float, clip_scale: float) -> None: ...


class Learner:
    """One stage's part: forward, then backward, which updates its weights.

    `stage` maps a float [B, T, dim] to the same; `bf16` has it computed under autocast.
    """

    def __init__(
        self, stage: Callable[[Tensor], Tensor], optimizer: Optimizer, lr: float, bf16: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.lr = lr
        self._stage, self._bf16 = stage, bf16
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
        self.optimizer.zero_gradient()
        y.backward(gradient)  # type: ignore[no-untyped-call]
        norm = self.optimizer.squared_norm() ** 0.5
        self.optimizer.step(self.lr, min(1.0, CLIP / (norm + 1e-6)))
        assert x.grad is not None
        return x.grad

    @torch.no_grad()
    def measure(self, x: Tensor) -> Tensor:
        """As `forward`, with nothing to follow."""
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            return self._stage(x).float()


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


def ratio(error: float, norm: float) -> float:
    return error / norm if norm else float("inf")
