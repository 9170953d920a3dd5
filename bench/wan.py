"""Tokens per second of a swarm whose links have delay, against the same swarm without, and against
one that always has stages + 1 microbatches out at a time.

Five nodes train a model of width 256, in int8 on the links, each in a network namespace of its own.
Three swarms take turns, as in bench/pipeline.py: behind links of 100 Mbit/s with 50 ms there and
back, or of 50 Mbit/s with 200 ms, sources that find out how many microbatches to have out, and
sources that don't; and behind links of the same bandwidth without delay sources that do. A turn is
two steps, of which the first has TCP find out again what its links can do. It takes root.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.pipeline import CONTEXT, RUN, STAGES, TEXT, Processes, measure, ratio
from bench.rows import keep
from bench.swarm import swarm
from planaria.lab.emulation.emulation import EmulationError, emulate
from planaria.lab.emulation.links import all_alike
from planaria.lab.emulation.live_swarm import machines
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.local.processes import run_planaria
from planaria.node.resolve import resolve
from planaria.node.run_file import RunFile, loads, override

FAR, FIXED, NEAR = "far", "far, stages + 1 out", "near"
LINKS: Final = ((50.0, 100.0, 0.9), (200.0, 50.0, 0.8))
"""Milliseconds there and back, Mbit/s, and the ratio that is the goal."""
CHANGES: Final[dict[str, Any]] = {
    "training__batch": 24,
    "training__microbatch": 2,
    "wire__activations": "int8",
    "wire__gradients": "int8",
}
"""Of bench/pipeline.py's run: less to compute, so that there is less to hide delays behind."""


class WarmedUp(Processes):
    """Makes a step on cold links before each."""

    def step(self) -> float:
        super().step()
        return super().step()


def far_and_near(run: RunFile, delay: float, mbps: float, out: Path) -> list[dict[str, float]]:
    """Seconds of a step of each, by turns; `delay` in ms there and back. Raises EmulationError."""
    names = machines(run)
    nodes = {
        slot: ["node", "--stage", slot[0], "--threads", "1", "--cloud", "none"]
        for slot in names[1:]
    }
    fixed = override(run, training__in_flight=STAGES + 1)
    links = all_alike(names, delay / 2, mbps)
    with (
        emulate(links) as far,
        emulate(links) as farther,
        emulate(all_alike(names, 0.0, mbps)) as near,
        swarm(run, run_planaria, out / "far", nodes, homes=far.homes) as finding_out,
        swarm(fixed, run_planaria, out / "fixed", nodes, homes=farther.homes) as not_so,
        swarm(run, run_planaria, out / "near", nodes, homes=near.homes) as here,
    ):
        return measure(
            {
                FAR: partial(WarmedUp, finding_out),
                FIXED: partial(WarmedUp, not_so),
                NEAR: partial(WarmedUp, here),
            }
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(TEXT)]), out / "data")
        run = resolve(override(loads(RUN), data__path=str(out / "data"), **CHANGES))
        tokens = run.training.batch * CONTEXT
        for delay, mbps, goal in LINKS:
            try:
                rounds = far_and_near(run, delay, mbps, out / f"{delay:g}")
            except EmulationError as error:
                print(error)
                return
            rates = [{name: tokens / s for name, s in one.items()} for one in rounds]
            keep("wan", round_trip_ms=delay, mbps=mbps, tokens_per_second=rates)
            print(
                f"{delay:g} ms, {mbps:g} Mbit/s: ratio far / near: {ratio(rounds, FAR, NEAR):.2f} "
                f"(goal {goal}); far / {FIXED}: {ratio(rounds, FAR, FIXED):.2f} (goal 1.00)"
            )


if __name__ == "__main__":
    main()
