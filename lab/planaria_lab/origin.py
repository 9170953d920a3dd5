"""The origin of a row of results: machine, torch, commit, time; and which rows may be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

KEYS: Final = ("machine", "torch", "commit", "at")
CODE: Final = ("planaria", "lab/planaria_lab")
ROOT: Final = Path(__file__).parents[2]


def origin(device: str = "cpu") -> dict[str, Any]:
    """Return processor, torch's version, the last commit that changed the code, and the time in
    seconds since 1970. The commit is empty outside a checkout, and ends with "+changes" if the code
    has uncommitted changes."""
    commit = _git("log", "-1", "--abbrev=8", "--format=%h")
    return {
        "machine": machine(device),
        "torch": torch.__version__.partition("+")[0],
        "commit": commit + "+changes" * bool(_git("status", "--porcelain")),
        "at": round(time.time()),
    }


def paired(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two rows may be compared: they have the same processor, whatever the number of
    its cores, and the same version of torch."""
    return _arithmetic(row) == _arithmetic(other)


def lacking(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of an origin that a row lacks."""
    return [key for key in KEYS if not row.get(key)]


def machine(device: str) -> str:
    """Return the name of the processor or GPU. A run's digits depend on it: others sum in another
    order."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def _arithmetic(row: Mapping[str, Any]) -> tuple[str, str]:
    name, comma, cores = row["machine"].rpartition(", ")
    return name if comma and cores.endswith("cores") else row["machine"], row.get("torch", "")


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    with suppress(OSError):
        command = ["git", *words, "--", *CODE]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""
