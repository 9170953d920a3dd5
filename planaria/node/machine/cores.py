"""Processors and memory available to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """The processors that the process may run on, limited by its container's CPU quota, rounded up
    (`cpu.max` of cgroups, version 2); at least 1. `root`: of the files."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no quota ("max")
        return cores


def total_memory(root: Path = Path("/")) -> int:
    """The machine's memory in bytes, limited by its container's (`memory.max` of cgroups, version
    2). `root`: of the files."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int((root / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return memory
