"""Write figures of benchmarks to BENCH.jsonl in the folder that the environment's OUT names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "out/bench"
"""The folder if OUT is not set."""


def keep(bench: str, **figures: Any) -> None:
    """Append a row: its origin, the load average of one minute, and these figures."""
    from planaria_lab.origin import origin  # here, since processes that only serve don't need it

    path = Path(os.environ.get("OUT") or FOLDER) / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {
        **origin(),
        "load": round(os.getloadavg()[0], 1),
        **figures,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
