"""What a device is good for."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional

SPEED_TAKES: Final = 0.1
"""Seconds of one try to find out how fast this machine is: the period of a quota of Linux."""


def measure_speed(device: torch.device) -> float:
    """Relative work per second: GFLOP/s of a float32 matrix product, the better of two tries. Each
    takes so long that a machine which may use its cores in turns only, as a container with a quota,
    has had both."""
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
    """Why attention can't be computed in bfloat16 there, in torch's words; empty if it can. So it
    is on a processor with AMX when ATEN_CPU_CAPABILITY hides its AVX-512."""
    q = torch.ones(1, 1, 64, 16, dtype=torch.bfloat16, device=device)
    try:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    except RuntimeError as error:
        return str(error)
    return ""


def memory_of(device: torch.device) -> int:
    """Bytes that it has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = Path("/")) -> float:
    """Bytes of the machine's memory that may still be taken without swapping (proc(5)), and within
    a container's limit, where one is set (cgroups, version 2); infinite where nothing says so.
    `root`: of the files."""
    found = re.search(r"MemAvailable: *(\d+) kB", _read(root / "proc/meminfo"))
    machine = 1024 * float(found[1]) if found else math.inf
    group = root / "sys/fs/cgroup"
    limit = _read(group / "memory.max").strip()
    if not limit.isdecimal():
        return machine
    cache = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
    taken = int(_read(group / "memory.current") or 0) - (int(cache[1]) if cache else 0)
    return min(machine, int(limit) - taken)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
