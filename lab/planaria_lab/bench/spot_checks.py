"""What spot checks cost: tokens per second of a swarm with them over those of one without.

Both train at the same time, so that whatever else the machine does is the same for both.
"""

from __future__ import annotations

import statistics
import tempfile
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
from planaria_lab.bench.trust import ALONE, REPLICAS, RUN, STAGES, compare

SHARE: Final = 0.02
AS_FAST: Final = 0.97  # goal


def main() -> None:
    nodes = {
        f"{stage}.{replica}": ["node", "--stage", str(stage), "--threads", "1", *ALONE]
        for stage in range(STAGES + 1)
        for replica in range(REPLICAS)
    }
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        looks = []
        for share in (0.0, SHARE):
            changed = override(loads(RUN), data__path=str(folder / "data"), trust__spot_check=share)
            run, out = resolve(changed), folder / f"{share}"
            looks.append(stack.enter_context(swarm(run, run_planaria, out, nodes)))
        _, ratios = compare(*looks)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"ratio of tokens/s with {SHARE:.0%} of visits done twice / without: {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f}; goal {AS_FAST})"
    )
    keep("spot_checks", ratios=ratios)


if __name__ == "__main__":
    main()
