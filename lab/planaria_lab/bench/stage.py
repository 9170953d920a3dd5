"""Tokens per second of a node's body stage, over those of a plain loop of the same blocks, on any
device.

The node's stage does a whole step without the network: it decodes frames, computes forward and
backward passes, encodes frames, updates its weights and hashes them. The plain loop has its tensors
on the device, and uses torch's AdamW. Both compute steps in turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from planaria.node.model.lora import Frozen
from planaria.node.model.modules import BodyStage, Stage, empty_stage
from planaria.node.model.quantized import Packed, QuantizedLinear, pack, put_values, slots
from planaria.node.model.shape import Base
from planaria.node.run_file import RunFile
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.stage.work import autocast_of, stage_passes
from planaria.node.transaction.attempt import Visit
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.routing import Route
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import encode
from planaria_lab.simulator.swarm import seconds_at

BALLOT: Final = Ballot(1, 1)
ROUTE: Final = Route(("a", "b", "a"), (0, 1, 0))
LR: Final = 1e-4
ROUNDS: Final = 7
"""Steps of each."""
WARM: Final = 2
"""First steps, in which kernels are compiled; they are not counted."""


class Drawn(InitialStages):
    """Initial stages with random weights that are the same in each block. To draw and pack 7G
    values would take minutes, and 28 GB in float32."""

    def base(self, stage: int) -> Stage:
        module = empty_stage(self.config, stage)
        for slot in slots(module):
            if isinstance(slot, QuantizedLinear):
                slot.put(packed(slot.shape, slot.base))
            else:
                put_values(slot, [drawn(slot.shape)])
        return module


@cache
def packed(shape: torch.Size, base: Base) -> Packed:
    return pack([drawn(shape)], shape, base)


def drawn(shape: torch.Size) -> Tensor:
    """Return a random matrix, or ones for the weights of a norm."""
    generator = torch.Generator().manual_seed(0)
    values = torch.ones(shape)
    return values.normal_(0, 0.02, generator=generator) if len(shape) > 1 else values


def compare(run: RunFile, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare both on a device; return the sizes, and the figures. These are tokens/s of both, the
    median ratio, and the peak bytes of the device's memory. `mfu`: the stage's FLOP/s over those of
    the device's matrix product."""
    training, config = run.training, run.config
    beginning = Drawn(run, config)
    stage = TorchStage(1, beginning, device)
    shape = training.microbatch, config.context, config.crossing
    x, gradient = torch.randn(shape), torch.randn(shape) / math.prod(shape)
    step = {
        "stage": node_step(stage, run, x, gradient),
        "plain": plain_step(beginning, run, device, x, gradient),
    }
    took: dict[str, list[float]] = {name: [] for name in step}
    for _ in range(ROUNDS):
        for name, make in step.items():
            took[name].append(seconds(make, device))
    tokens = training.batch * config.context
    counted = {name: each[WARM:] for name, each in took.items()}
    speed = {name: tokens / statistics.median(each) for name, each in counted.items()}
    pairs = zip(counted["plain"], counted["stage"], strict=True)
    flops = product_flops(device, torch.bfloat16 if training.precision == "bf16" else torch.float32)
    ideal = seconds_at(run, config, 1, flops, math.inf)
    share = training.microbatches * (ideal.forward + ideal.backward) * speed["stage"] / tokens
    made = {"tokens": tokens, "blocks": config.layers, "trained": len(stage.optimizer.weights)}
    return made, {
        **{f"{name}_tokens_per_second": each for name, each in speed.items()},
        "ratio": statistics.median(plain / own for plain, own in pairs),
        "mfu": share,
        "product_flops": flops,
        "bytes": most_bytes(device),
    }


def node_step(stage: TorchStage, run: RunFile, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Return a function that computes a step of a node, without its network."""
    activation = Frame("activation", BALLOT, {}, *encode([x], run.wire.activations))
    at_output = Frame("gradient", BALLOT, {}, *encode([gradient], run.wire.gradients))
    ones = [1.0] * (run.config.stages + 1)
    commit = pb.Commit(lr_scale=ones, clip_scale=ones)

    def make() -> None:
        stage.work.begin(BALLOT, pb.Begin(step=1, kind=pb.Begin.TRAIN))
        for microbatch in range(run.training.microbatches):
            visit = Visit(microbatch, 1, ROUTE, waits=False)
            stage.work.forward(BALLOT, visit, "a", activation)
            stage.work.backward(BALLOT, visit, "a", at_output)
        stage.reduced()
        stage.apply(commit, LR)

    return make


def plain_step(
    beginning: InitialStages, run: RunFile, device: torch.device, x: Tensor, gradient: Tensor
) -> Callable[[], object]:
    """Return a function that computes a step of a plain training loop."""
    module = beginning.stage(1).to(device)
    assert isinstance(module, BodyStage)
    if run.training.lora is not None:
        Frozen(module, run.training.precision == "bf16")
    (blocks,) = stage_passes(module, run)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LR, fused=device.type == "cuda")
    on_device, gradient = x.to(device), gradient.to(device)

    def make() -> None:
        for _ in range(run.training.microbatches):
            with autocast_of(run, device):
                y: Tensor = blocks(on_device.detach().requires_grad_())
            y.backward(gradient)  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, run.training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return make


def seconds(make: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `make`, until the device has finished."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    started = time.perf_counter()
    make()
    synchronize()
    return time.perf_counter() - started


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a product of two square matrices on the device, the median of five."""
    size = 512 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=dtype)
    times = [seconds(lambda: a @ a, device) for _ in range(8)]
    return 2 * size**3 / statistics.median(times[3:])


def most_bytes(device: torch.device) -> int:
    """Return the peak bytes of this process's tensors on the device; 0 if that isn't counted."""
    counted = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return 0 if counted is None else int(counted(device))
