"""Where figures are kept: BENCH.jsonl in the folder that the environment's OUT names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "out/bench"
"""Without OUT."""


def keep(bench: str, **figures: Any) -> None:
    """Adds a row: its origin, how many processes want its cores, and these figures."""
    from planaria_lab.origin import origin  # not in processes that only serve

    path = Path(os.environ.get("OUT") or FOLDER) / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {
        **origin(),
        "load": round(os.getloadavg()[0], 1),
        **figures,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
