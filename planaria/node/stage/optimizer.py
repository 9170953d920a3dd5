"""AdamW over one flat view of a stage.

A stage's weights, gradient and moments are four flat float32 tensors. So averaging, digests,
transfers and rebuilds handle one tensor, and equal layouts make body stages interchangeable.

Replicas of a stage must stay bit-identical on any device. So the update uses only single operations
that IEEE 754 rounds exactly (no fused multiply-add, which not all kernels use). The norm adds in an
order that depends on the length alone. Where a device computes otherwise, the CPU does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

from planaria.node.model.shape import BETAS
from planaria.recovery.exact import exact, exactly

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile

EPSILON = 1e-8
# Elements per block: scratch stays small, and in a CPU's cache. A power of two.
BLOCK = 1 << 19
SUMMED = 1 << 11
"""Elements per sum of bits in a digest."""
TURNS = 8
"""Number of updates in which the digest covers all moments once: covering all of them in each would
double the cost of checks."""


def digest(*flats: Tensor, steps: int = 0) -> bytes:
    """Device-independent digest, 16 bytes, of the bits of each float32 [n], and of `steps`.

    The bits of each block of 8 KiB are added on the device as integers of 64 bits, in one pass over
    memory. The sums are hashed. Any single change is detected, and any two in different blocks.
    """
    hasher = xxhash.xxh3_128(steps.to_bytes(8, "little"))
    for flat in flats:
        whole = len(flat) - len(flat) % SUMMED
        for part in torch.split(flat.detach()[:whole], 32 * BLOCK):  # copied at a time
            bits = exact(part).view(torch.int64).view(len(part) // SUMMED, SUMMED // 2)
            hasher.update(bits.sum(dim=1).cpu().numpy().astype("<i8", copy=False).data)
        hasher.update(flat.detach()[whole:].cpu().numpy().astype("<f4", copy=False).data)
    return hasher.digest()


class StageOptimizer:
    """AdamW (arXiv 1711.05101) for a module with float32 parameters; those that require no gradient
    stay unchanged.

    `weights`, `gradient`, `first_moment` and `second_moment` are flat float32 tensors on `device`,
    in the order of `module.named_parameters()`. The module is moved there; its parameters and their
    `.grad` become views, so backward adds into `gradient`. `steps` is Adam's own count: a rebuilt
    stage restarts at 0. `seconds`: spent in `step`. Weight decay applies to matrices, not to norms
    and biases, which are vectors. Raises ValueError for a module without parameters or of other
    dtypes.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
    ) -> None:
        all_parameters = dict(module.to(device).named_parameters())
        if not all_parameters:
            raise ValueError(f"{type(module).__name__} has no parameters to optimize")
        parameters = {
            name: parameter for name, parameter in all_parameters.items() if parameter.requires_grad
        }
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}, only torch.float32 is optimized")
        flat = [parameter.detach().flatten() for parameter in parameters.values()]
        self.weights = torch.cat([torch.empty(0, device=device), *flat])
        self.gradient = torch.zeros_like(self.weights)
        self.first_moment = torch.zeros_like(self.weights)
        self.second_moment = torch.zeros_like(self.weights)
        self.steps = 0
        self.seconds = 0.0
        self._betas, self._weight_decay = betas, weight_decay
        self._parameters = list(parameters.values())
        for parameter, weights in self._split(self.weights):
            parameter.data = weights.view_as(parameter)
        self._accumulate_into(self.gradient)
        split = self._split(self.weights) if weight_decay else ()
        self._decaying = [weights for parameter, weights in split if parameter.dim() > 1]

    @classmethod
    def of_run(cls, module: nn.Module, device: torch.device, run: RunFile) -> StageOptimizer:
        """Optimizer with the run file's settings."""
        return cls(module, device, run.training.betas, run.training.weight_decay)

    def _split(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return zip(self._parameters, parts, strict=True)

    def _accumulate_into(self, flat: Tensor) -> None:
        for parameter, gradient in self._split(flat):
            parameter.grad = gradient.view_as(parameter)

    @contextmanager
    def accumulating_into(self, flat: Tensor) -> Iterator[None]:
        """Redirect backward from `gradient` to this float32 [n]."""
        self._accumulate_into(flat)
        try:
            yield
        finally:
            self._accumulate_into(self.gradient)

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    @torch.no_grad()
    def step(self, lr: float, clip_scale: float = 1.0) -> None:
        """Update once with `clip_scale` x gradient; the gradient itself stays unchanged."""
        started = time.perf_counter()
        self.steps += 1
        beta1, beta2 = self._betas
        step_size = lr / (1 - beta1**self.steps)
        second_scale = (1 - beta2**self.steps) ** -0.5
        first_share, second_share = (1 - beta1) * clip_scale, (1 - beta2) ** 0.5 * clip_scale
        for weights in self._decaying:
            with exactly(weights) as (w,):
                w.mul_(1 - lr * self._weight_decay)
        scratch = torch.empty_like(exact(self.weights[:BLOCK]))
        flats = (self.weights, self.gradient, self.first_moment, self.second_moment)
        for block in zip(*(torch.split(flat, BLOCK) for flat in flats), strict=True):
            with exactly(*block) as (w, g, m, v):
                t = scratch[: len(w)]
                m.mul_(beta1).add_(torch.mul(g, first_share, out=t))
                torch.mul(g, second_share, out=t)
                v.mul_(beta2).add_(t.mul_(t))
                torch.sqrt(v, out=t).mul_(second_scale).add_(EPSILON)
                w.sub_(torch.div(m, t, out=t).mul_(step_size))
        self.seconds += time.perf_counter() - started

    def squared_norm(self) -> float:
        """Squared norm of the gradient, in float64; inf or nan if any element is."""
        total = exact(self.gradient.new_zeros(BLOCK)).double()
        for part in torch.split(self.gradient, BLOCK):
            total[: len(part)].add_(exact(part).double().square_())  # these squares are exact
        while len(total) > 1:
            first, second = total.chunk(2)
            total = first + second
        return total.item()

    def finite(self) -> bool:
        """Whether the gradient is finite: float32 squares can't overflow float64."""
        return math.isfinite(self.squared_norm())

    def digest(self) -> bytes:
        """Digest, 16 bytes, of the weights, `steps`, and the slice `in_turn` of the moments."""
        covered = self.in_turn()
        return digest(
            self.weights, self.first_moment[covered], self.second_moment[covered], steps=self.steps
        )

    def in_turn(self) -> slice:
        """Slice of the moments that the digest covers until the next update."""
        turn, size = self.steps % TURNS, len(self.weights)
        first, end = size * turn // TURNS, size * (turn + 1) // TURNS
        return slice(first + first % 2, end + end % 2)  # integers of 64 bits

    def state(self, optimizer: bool) -> list[tuple[str, Tensor]]:
        """Named tensors, not copies: weights, and with `optimizer` Adam's moments too."""
        tensors = [("weights", self.weights)]
        if optimizer:
            tensors += [("first_moment", self.first_moment), ("second_moment", self.second_moment)]
        return tensors

    def load(self, tensors: Iterable[tuple[str, Tensor]], steps: int) -> None:
        """Copy in a `state`, from any device; the weights alone reset Adam.

        Raises ValueError, and changes nothing, for names, shapes or dtypes other than `state`'s, or
        `steps` that don't fit (weights alone need 0).
        """
        new = dict(tensors)
        has_moments = len(new) > 1
        own = dict(self.state(optimizer=True))
        wanted = list(own) if has_moments else ["weights"]
        if sorted(new) != sorted(wanted):
            raise ValueError(
                f"state of a stage has the tensors {', '.join(own)} or weights alone, "
                f"not {', '.join(new) or 'none'}"
            )
        for name, tensor in new.items():
            if tensor.shape != own[name].shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"this stage needs torch.float32 {list(own[name].shape)}"
                )
        if steps < 0 or (steps > 0 and not has_moments):
            raise ValueError(f"steps = {steps} doesn't fit a state of {', '.join(new)}")
        for name, tensor in own.items():
            if name in new:
                tensor.copy_(new[name])
            else:
                tensor.zero_()
        self.steps = steps
