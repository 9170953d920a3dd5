"""AdamW or Muon over one flat view of a stage.

A stage's weights, gradient and moments are flat float32 tensors. So averaging, digests,
transfers and rebuilds handle one tensor, and equal layouts make body stages interchangeable.

Replicas of a stage must stay bit-identical on any device. So the update uses only single operations
that IEEE 754 rounds exactly (no fused multiply-add, which not all kernels use). The norm adds in an
order that depends on the length alone. Where a device computes otherwise, the CPU does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import torch
import xxhash
from torch import Tensor, nn

from planaria.node.model.learning_rate import peak_of
from planaria.node.model.modules import BodyStage
from planaria.node.model.shape import BETAS
from planaria.recovery.identical_arithmetic import BLOCK, exact, exactly, squared_norm
from planaria.recovery.newton_schulz import orthogonalized

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile

EPSILON = 1e-8
MOMENTUM: Final = 0.95
"""Muon's."""
SIGN_SHARE: Final = 0.3
"""Of lr, for vectors: the root mean square of AdamW's updates is 0.2 to 0.4 of it (Liu et al. 2025,
arXiv 2502.16982, section 2.2)."""
SUMMED = 1 << 11
"""Elements per sum of bits in a digest."""
TURNS = 8
"""Number of updates in which the digest covers all moments once: covering all of them in each would
double the cost of checks."""


def digest_of(*flats: Tensor, steps: int = 0) -> bytes:
    """Device-independent digest, 16 bytes, of the bits of each float32 [n], and of `steps`.

    The bits of each block of 8 KiB are added on the device as integers of 64 bits, in one pass over
    memory. The sums are hashed. Any single change is detected, and any two in different blocks.
    """
    hasher = xxhash.xxh3_128(steps.to_bytes(8, "little"))
    for flat in flats:
        whole = len(flat) - len(flat) % SUMMED
        for first in range(0, whole, 32 * BLOCK):  # copied at a time
            part = flat.detach()[first : min(first + 32 * BLOCK, whole)]
            bits = exact(part).view(torch.int64).view(len(part) // SUMMED, SUMMED // 2)
            hasher.update(bits.sum(dim=1).cpu().numpy().astype("<i8", copy=False).data)
        hasher.update(flat.detach()[whole:].cpu().numpy().astype("<f4", copy=False).data)
    return hasher.digest()


class StageOptimizer:
    """AdamW (arXiv 1711.05101) or Muon, for a module with float32 parameters; those that require no
    gradient stay unchanged.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) moves a matrix [rows,
    columns] by `muon` lr sqrt(max(1, rows / columns)) times the orthogonal matrix nearest to its
    Nesterov momentum; a tensor of three dimensions is a batch of matrices. An element of a vector,
    of a norm or a bias, moves by SIGN_SHARE lr against the sign of its momentum. So there is one
    moment, and `second_moment` has no elements.

    `weights`, `gradient`, `first_moment` and `second_moment` are flat float32 tensors on `device`,
    in the order of `module.named_parameters()`. The module is moved there; its parameters and their
    `.grad` become views, so backward adds into `gradient`. `steps` is Adam's own count: a rebuilt
    stage restarts at 0. `seconds`: spent in `step`. Weight decay applies to matrices, not to norms
    and biases, which are vectors.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
        muon: float = 0.0,
    ) -> None:
        """`muon`: rate of matrices as a multiple of `lr`; 0: AdamW."""
        parameters = module.to(device).parameters()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        flat = [parameter.detach().flatten() for parameter in self._parameters]
        self.weights = torch.cat([torch.empty(0, device=device), *flat])
        self.gradient = torch.zeros_like(self.weights)
        self.first_moment = torch.zeros_like(self.weights)
        self.second_moment = torch.zeros_like(self.weights[: 0 if muon else None])
        self.steps = 0
        self.seconds = 0.0
        self._betas, self._weight_decay, self._muon = betas, weight_decay, muon
        for parameter, weights in self._split(self.weights):
            parameter.data = weights.view_as(parameter)
        self.accumulate_into(self.gradient)
        split = self._split(self.weights) if weight_decay else ()
        self._decaying = [weights for parameter, weights in split if parameter.dim() > 1]

    @classmethod
    def of_run(cls, module: nn.Module, device: torch.device, run: RunFile) -> StageOptimizer:
        """Optimizer with the run file's settings. Muon is for the blocks; embedding and head have
        AdamW."""
        training = run.training
        by_muon = run.optimizer == "muon" and isinstance(module, BodyStage)
        muon = training.muon_lr / peak_of(run) * by_muon
        return cls(module, device, training.betas, training.weight_decay, muon)

    def _split(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return zip(self._parameters, parts, strict=True)

    def accumulate_into(self, flat: Tensor) -> None:
        """Have backward add to this float32 [n]: to `gradient`, unless told otherwise."""
        for parameter, gradient in self._split(flat):
            parameter.grad = gradient.view_as(parameter)

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    @torch.no_grad()
    def step(self, lr: float, clip_scale: float = 1.0) -> None:
        """Update once with `clip_scale` x gradient; the gradient itself stays unchanged."""
        started = time.perf_counter()
        self.steps += 1
        rate = lr * (self._muon or 1.0)
        for weights in self._decaying:
            with exactly(weights) as (w,):
                w.mul_(1 - rate * self._weight_decay)
        if self._muon:
            self._step_muon(lr, rate, clip_scale)
        else:
            self._step_adam(lr, clip_scale)
        self.seconds += time.perf_counter() - started

    def _step_adam(self, lr: float, clip_scale: float) -> None:
        beta1, beta2 = self._betas
        step_size = lr / (1 - beta1**self.steps)
        second_scale = (1 - beta2**self.steps) ** -0.5
        first_share, second_share = (1 - beta1) * clip_scale, (1 - beta2) ** 0.5 * clip_scale
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

    def _step_muon(self, lr: float, rate: float, clip_scale: float) -> None:
        flats = (self.weights, self.gradient, self.first_moment)
        for parts in zip(*(self._split(flat) for flat in flats), strict=True):
            parameter = parts[0][0]
            with exactly(*(part for _, part in parts)) as (w, g, m):
                t = g * ((1 - MOMENTUM) * clip_scale)
                m.mul_(MOMENTUM).add_(t)
                ahead = t.add_(m * MOMENTUM)
                if parameter.dim() == 1:
                    w.sub_(ahead.sign_().mul_(SIGN_SHARE * lr))
                    continue
                shape = parameter.shape[-2:]
                scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
                for matrix, weights in zip(ahead.view(-1, *shape), w.view(-1, *shape), strict=True):
                    weights.sub_(orthogonalized(matrix).mul(scale))

    def squared_norm(self) -> float:
        """Squared norm of the gradient, in float64, which float32 squares can't overflow; inf or
        nan if any element is."""
        return squared_norm(self.gradient)

    def digest(self) -> bytes:
        """Digest, 16 bytes, of the weights, `steps`, and the slice `in_turn` of the moments."""
        covered = self.in_turn()
        moments = [moment[covered] for _, moment in self.state()[1:]]
        return digest_of(self.weights, *moments, steps=self.steps)

    def in_turn(self) -> slice:
        """Slice of the moments that the digest covers until the next update."""
        turn, size = self.steps % TURNS, len(self.weights)
        first, end = size * turn // TURNS, size * (turn + 1) // TURNS
        return slice(first + first % 2, end + end % 2)  # integers of 64 bits

    def state(self) -> list[tuple[str, Tensor]]:
        """The stage's weights and moments themselves, by name."""
        tensors = [("weights", self.weights), ("first_moment", self.first_moment)]
        if not self._muon:
            tensors.append(("second_moment", self.second_moment))
        return tensors

    def load(self, tensors: Iterable[tuple[str, Tensor]], steps: int) -> None:
        """Copy in a `state`, from any device; the weights alone reset the moments.

        Raises ValueError, and changes nothing, for names, shapes or dtypes other than `state`'s, or
        `steps` that don't fit (weights alone need 0).
        """
        new = dict(tensors)
        has_moments = len(new) > 1
        own = dict(self.state())
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
