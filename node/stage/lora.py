"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685), in any stage: they take the places of
its linear modules, by name, and are all that is trained of it."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from planaria.node.stage.architecture import Architecture
from planaria.node.stage.model import Stage, with_weights
from planaria.node.stage.shape import ModelConfig, adapted, trained_shapes


class AdaptedLinear(nn.Module):
    """What `base` makes of x, and scale B A x beside it."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        device = base.weight.device
        self.base, self.scale = base, scale
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Float [.., in] to [.., out]."""
        added = F.linear(F.linear(x, self.lora_A), self.lora_B)
        out: Tensor = self.base(x) + self.scale * added
        return out


def adapt(module: Stage, config: ModelConfig, stage: int, weights: Tensor) -> Stage:
    """The module with the adapters of `config.lora`, which have these flat weights, float32 [n];
    nothing else of it is trained."""
    lora = config.lora
    assert lora is not None
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    places = adapted(config, stage)
    linear = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    names = [name for name in linear if name.rpartition(".")[2] in lora.targets and stage > 0]
    assert len(names) == len(places), "the shape's names are the module's"
    for name in names:
        parent, _, local = name.rpartition(".")
        owner, base = module.get_submodule(parent), module.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(owner, local, AdaptedLinear(base, lora.rank, lora.scale))
    at = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = weights[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
    return module


def initial_adapters(config: ModelConfig, stage: int, seed: int) -> Tensor:
    """Flat, float32 [n] on the CPU, from (seed, stage): B = 0, so that the model computes what it
    does without, and A uniform in ± 1 / sqrt(in), as peft has it."""
    key = struct.pack("<4sQQ", b"lora", seed, stage)
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key))
    parts = [torch.empty(0)]
    for name, (rows, columns) in trained_shapes(config, stage).items():
        part = torch.zeros(rows, columns)
        if name.endswith(".lora_A.weight"):
            drawn = torch.empty(rows, columns, dtype=torch.float64)  # see model.build_stage
            part.copy_(drawn.uniform_(-1, 1, generator=generator) / columns**0.5)
        parts.append(part.flatten())
    return torch.cat(parts)


def frozen(module: nn.Module) -> Tensor:
    """What isn't trained of it, flat, float32 [n]; its parameters are views of that from now on."""
    parameters = [one for one in module.parameters() if not one.requires_grad]
    flat = torch.cat([one.detach().flatten() for one in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat


def looked_with(
    config: ModelConfig, stage: int, base: Tensor, weights: Tensor, own: Architecture | None = None
) -> Stage:
    """A stage of these flat weights, of the model and of its adapters; nothing is copied."""
    return adapt(with_weights(config, stage, base, own), config, stage, weights)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """One matrix that does what it and its adapter do: float32 [out, in]."""
    return weight + scale * (b @ a)
