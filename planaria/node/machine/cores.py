"""How many processors this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """At least 1: the processors that the process may run on, and no more than the CPU quota of
    its container, rounded up (`cpu.max` of cgroups, version 2). `root`: of the files."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # there is no such file, or no quota ("max")
        return cores
