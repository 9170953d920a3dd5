"""What a local swarm asks of this machine, and what the machine has."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from planaria.node.launch.errors import SwarmError
from planaria.node.local.plan import SwarmPlan
from planaria.node.machine.cores import available_cores, total_memory
from planaria.node.model.shape import COMPUTED, VALUE, trained_shapes
from planaria.node.run_file import RunFile
from planaria.node.stage.activations import saved_bytes
from planaria.node.transaction.in_flight_window import most_out
from planaria.recovery.newton_schulz import orthogonalizing_flops
from planaria.recovery.policy import holder_count

ROCM: Final = Path("/dev/kfd")  # there if AMD's driver is
NODES_A_CORE = 16
"""Limit of nodes per core: with more, waiting for a core takes longer than a lease."""
NODE_BYTES = 120 * 2**20
"""Memory of a node without its stage: what it doesn't share with other nodes."""


def check_gpu(device: str, count: Callable[[], int]) -> None:
    """Check that --device exists, before PyTorch is loaded. Raises SwarmError."""
    if not device.startswith("cuda"):
        return
    number, gpus = int(device.partition(":")[2] or 0), count()
    if number >= gpus:
        numbers = "none" if not gpus else "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise SwarmError(
            f"--device {device}: this machine has {numbers}, as far as its driver says; "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )


def gpus_of_this_machine() -> int:
    """Number of visible NVIDIA GPUs, else of AMD's, at most; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return len([*Path("/dev/dri").glob("renderD*")]) if ROCM.exists() else 0
    count = ctypes.c_int(0)
    works = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


class MachineSize(NamedTuple):
    """This machine's resources that all processes of a swarm share."""

    memory: int  # bytes
    cores: int

    @classmethod
    def this(cls) -> MachineSize:
        return cls(total_memory(), available_cores())


class SwarmNeeds(NamedTuple):
    """Minimum resources that a swarm takes of this machine."""

    nodes: int
    states: int  # bytes of weights, gradients and moments in main memory
    kept: int  # bytes that it keeps in main memory for lost stages: snapshots or twins
    operations: float  # floating-point, per step, on processors; 0: on GPUs
    activations: int = 0  # bytes that a microbatch at each node keeps for its backward pass
    in_flight: int = 0  # microbatches that each node may keep

    @classmethod
    def of(cls, plan: SwarmPlan) -> SwarmNeeds:
        """Minimum resources of a swarm. A step multiplies and adds each parameter once a token
        forward, and twice backward if it is trained; embeddings are lookups. With Muon each node
        orthogonalizes its stage's matrices, too."""
        run, config = plan.run, plan.run.config
        nodes = (config.stages + 1) * run.swarm.replicas
        has_gpu = Path("/proc/driver/nvidia").exists() or ROCM.exists()
        if plan.device not in ("auto", "cpu") or (plan.device == "auto" and has_gpu):
            return cls(nodes, 0, _kept_bytes(run, on_gpus=True), 0.0)
        states = run.swarm.replicas * sum(map(config.bytes_of, range(config.stages + 1)))
        matrices = config.values - config.parameters[0] + config.vocabulary * config.dim
        passes = 3 if config.lora is None else 2
        operations = 2.0 * passes * matrices * run.training.batch * config.context
        for stage in range(1, config.stages + 1) if config.muon else ():
            shapes = trained_shapes(config, stage).values()
            operations += run.swarm.replicas * orthogonalizing_flops(shapes)
        saved = sum(saved_bytes(run, config, stage) for stage in range(config.stages + 1))
        share = math.ceil(run.training.microbatches / run.swarm.replicas)
        in_flight = min(share, most_out(run.training.in_flight, config.stages))
        activations = run.swarm.replicas * saved
        return cls(nodes, states, _kept_bytes(run), operations, activations, in_flight)

    @property
    def least_memory(self) -> int:
        """Minimum bytes of a swarm's processes, without computation."""
        return self.nodes * NODE_BYTES + self.states + self.kept

    def memory(self, available: int) -> float:
        """Bytes of a swarm's processes, computation included. Nodes keep fewer microbatches than
        are in flight, at least one, where no more than `available` bytes are there."""
        other = self.nodes * NODE_BYTES + COMPUTED * self.states + self.kept
        all_in_flight = other + self.in_flight * self.activations
        return min(all_in_flight, max(available, other + self.activations))


def _kept_bytes(run: RunFile, on_gpus: bool = False) -> int:
    """Bytes in main memory of what nodes keep for lost stages by the policy: twins; or snapshots,
    and their senders' copies of the weights sent. Twins and copies are where a stage computes."""
    config, policy, total = run.config, run.policy, 0
    for stage in range(config.stages + 1):
        if policy.twins and not on_gpus:
            total += run.swarm.replicas * config.bytes_of(stage)
        if policy.sends(stage, run.recovery.snapshot.first):
            weights = VALUE * config.trained_in(stage)
            held = config.state_bytes(stage) if run.recovery.snapshot.moments else weights
            total += holder_count(stage, config.stages) * (held + (0 if on_gpus else weights))
    return total


def check_processes(plan: SwarmPlan, machine: MachineSize) -> None:
    """Check that the machine has cores and memory for all nodes: for what they keep for lost stages
    and, where they compute on its processors, weights, gradients and moments. Raises SwarmError."""
    run, load = plan.run, SwarmNeeds.of(plan)
    stages, replicas = run.config.stages + 1, run.swarm.replicas
    size = f"{stages} stages with swarm.replicas = {replicas} are {load.nodes} nodes"
    remedy = "choose fewer --stages or --replicas, or skip this check with --oversubscribe"
    if load.nodes > NODES_A_CORE * machine.cores:
        raise SwarmError(
            f"{size}, but {machine.cores} core{'s' * (machine.cores > 1)} can run only "
            f"{NODES_A_CORE * machine.cores} in time, {NODES_A_CORE} a core: {remedy}"
        )
    if load.least_memory > machine.memory:
        raise SwarmError(
            f"{size}, which need {_gib(load.least_memory)}, {_gib(load.states)} of it for weights, "
            f"gradients and moments, {_gib(load.kept)} for what recovery.policy = "
            f"{run.recovery.policy} keeps, but this machine has {_gib(machine.memory)}: choose a "
            f"smaller model, or more machines; {remedy}"
        )


def forecast(plan: SwarmPlan, machine: MachineSize, speed: Callable[[], float]) -> Iterator[str]:
    """Messages about a swarm before its start: size, memory, minimum time of a step. `speed`:
    operations per second of a core, called where cores compute."""
    run, config, load = plan.run, plan.run.config, SwarmNeeds.of(plan)
    memory = load.memory(machine.memory)
    yield (
        f"{config.values:,} parameters at {load.nodes} nodes, which take about "
        f"{_gib(memory)} of this machine's {_gib(machine.memory)} of memory"
    )
    if memory > machine.memory:
        yield (
            "WARNING: that is more than this machine has, so nodes may be killed: choose a smaller "
            "--preset or training.microbatch, or start nodes on several machines"
        )
    # bf16 may be faster than what is measured, and own code may use a part of its parameters
    if load.operations and run.training.precision == "float32" and config.own is None:
        seconds = load.operations / (machine.cores * speed())
        least = f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:.2g} s"
        tokens = run.training.batch * config.context
        yield f"a step of {tokens:,} tokens takes at least {least} here; the run has {run.steps:,}"


def speed_of_a_core() -> float:
    """Floating-point operations per second of small matrix products in one thread. It is the
    maximum, since other processes may use the core meanwhile."""
    matrix, shortest, end = np.ones((64, 64), np.float32), math.inf, time.perf_counter() + 0.05
    while (began := time.perf_counter()) < end:
        np.matmul(matrix, matrix)
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * 64**3 / shortest


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
