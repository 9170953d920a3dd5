"""Tokens per second of a swarm with spot checks, or with audits of gradients, over those of a swarm
without.

Both swarms train at the same time, so that other load of the machine is the same for both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import swarm
from planaria_lab.bench.trust import ALONE, RUN, STAGES, compare

SHARE: Final = 0.02
CHECKS: Final = {"spot_check": (2, 0.0, SHARE), "gradients": (3, "off", "name")}
"""Key of [trust] -> replicas per stage, and the settings of the key without and with checks."""
AS_FAST: Final = 0.97  # goal


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        for key, (replicas, without, checked) in CHECKS.items():
            ratios = compared(folder, key, replicas, [without, checked])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"ratio of tokens/s with trust.{key} = {checked} / {without}: {middle:.3f} "
                f"(quartiles {low:.3f} to {high:.3f}; goal {AS_FAST})",
                flush=True,
            )
            keep("spot_checks", key=key, ratios=ratios)


def compared(folder: Path, key: str, replicas: int, settings: Sequence[object]) -> list[float]:
    """Train swarms with each setting of a key of [trust]; return the ratios of tokens per second,
    the second swarm's over the first's, by round."""
    nodes = {
        f"{stage}.{replica}": ["node", "--stage", str(stage), "--threads", "1", *ALONE]
        for stage in range(STAGES + 1)
        for replica in range(replicas if stage else 1)
    }
    with ExitStack() as stack:
        looks = []
        for setting in settings:
            changed = override(
                loads(RUN),
                data__path=str(folder / "data"),
                swarm__replicas=replicas,
                **{"trust__spot_check": 0.0, f"trust__{key}": setting},
            )
            run, out = resolve(changed), folder / f"{key}-{setting}"
            looks.append(stack.enter_context(swarm(run, run_planaria, out, nodes)))
        return compare(*looks)[1]


if __name__ == "__main__":
    main()
