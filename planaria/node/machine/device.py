"""Capabilities of a device."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional

from planaria.node.machine.cores import total_memory

SPEED_TAKES: Final = 0.1
"""Seconds of one speed measurement: the period of a CPU quota in Linux."""


def accelerators() -> list[torch.device]:
    """This machine's GPUs, by CUDA, ROCm, MPS or XPU: of the one kind that torch is built for."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if kind is None else torch.accelerator.device_count()
    return [torch.device(kind.type, number) for number in range(count) if kind]


def find_device(name: str) -> torch.device | None:
    """The device that --device names; None: it isn't there."""
    gpus, cpu = {str(gpu): gpu for gpu in accelerators()}, torch.device("cpu")
    if name in ("auto", "cpu"):
        return next(iter(gpus.values()), cpu) if name == "auto" else cpu
    return gpus.get(name if ":" in name else f"{name}:0")


def measure_speed(device: torch.device) -> float:
    """GFLOP/s of a float32 matrix product, the better of two measurements. Each is long enough for
    a full period of a container's CPU quota."""
    a = torch.ones(384, 384, device=device)
    best = 0.0
    for _ in range(2):
        products, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < SPEED_TAKES or not products:
            (a @ a).sum().item()
            products += 1
        best = max(best, 2 * 384**3 * products / seconds / 1e9)
    return best


def why_no_bf16(device: torch.device) -> str:
    """Torch's error if attention can't be computed in bfloat16; empty if it can. It fails on a
    processor with AMX when ATEN_CPU_CAPABILITY hides its AVX-512, and on old versions of MPS."""
    try:
        q = torch.ones(1, 1, 64, 16, dtype=torch.bfloat16, device=device)
        functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        with torch.autocast(device.type, torch.bfloat16):
            product = q.float() @ q.float().mT
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "" if product.dtype == torch.bfloat16 else f"{device.type} has no autocast to it"


def memory_of(device: torch.device) -> int:
    """Total memory of the device in bytes; a CPU and MPS use the machine's."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is not None:
        return int(properties(device).total_memory)
    return total_memory()


def empty_pinned(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape on the CPU, pinned if that is possible: copies are faster."""
    try:
        return torch.empty(like.shape, pin_memory=like.device.type != "cpu")
    except RuntimeError:
        return torch.empty(like.shape)


def available_memory(root: Path = Path("/")) -> float:
    """Bytes of the machine's memory that can be taken without swapping (proc(5)), and within a
    container's limit, if any (cgroups, version 2); infinite if unknown. `root`: of the files."""
    match = re.search(r"MemAvailable: *(\d+) kB", _read_text(root / "proc/meminfo"))
    machine = 1024 * float(match[1]) if match else math.inf
    group = root / "sys/fs/cgroup"
    limit = _read_text(group / "memory.max").strip()
    if not limit.isdecimal():
        return machine
    cache = re.search(r"^inactive_file (\d+)", _read_text(group / "memory.stat"), re.MULTILINE)
    used = int(_read_text(group / "memory.current") or 0) - (int(cache[1]) if cache else 0)
    return min(machine, int(limit) - used)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
