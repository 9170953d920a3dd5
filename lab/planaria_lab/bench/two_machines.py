"""Tokens per second before and after a second machine joins the first, which serves all stages.

Each machine has a core and a network namespace of its own. Between them is a link with 100 Mbit/s
and a round trip of 20 ms. The second machine joins after `ALONE` seconds. When seats have not
changed for `STILL` seconds, both train for `BOTH` seconds. For the small model, links take longer
than computing, so the second machine should become a standby. For the larger model, two machines
should be faster. Arguments: names of models. It needs root, three cores (the third one emulates the
link), and some four minutes per model.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria.node.wire.seat_names import node_of
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Lines, Watched, swarm
from planaria_lab.emulation.emulation import emulate
from planaria_lab.emulation.links import all_alike

MBPS, ROUND_TRIP = 100.0, 20.0  # ms
ALONE, STILL, BOTH = 40.0, 30.0, 40.0  # seconds
LONGEST = 300.0  # seconds after the join within which seats must settle
STAGES = 4
RUN = f"""
name = "two-machines"
steps = 100000
[model]
stages = {STAGES}
[training]
optimizer = "adamw"
validation_microbatches = 0
[swarm]
start_grace = 2
"""
MODELS: Final = {
    "tiny": {"model__preset": "tiny", "training__batch": 32, "training__microbatch": 4},
    "midi": {
        "model__preset": "midi",
        "model__context": 128,
        "training__batch": 32,
        "training__microbatch": 2,
    },
}
"""The model of the demo, and one in which computing takes longer than links."""
GOALS: Final = {"tiny": 0.95, "midi": 1.2}
FIRST, SECOND = "first", "second"
CORES: Final = {FIRST: 0, SECOND: 1}


class Measured(NamedTuple):
    alone: float  # tokens per second
    both: float
    seats: dict[str, list[int]]  # node -> stages at the end


def run_pinned(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. With a machine's name and a file before them, run on the core of
    that machine; the second machine starts when the file exists."""
    if arguments[0] in CORES:
        name, go = arguments.pop(0), Path(arguments.pop(0))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[CORES[name]]})
        if name == SECOND:
            at = arguments.index("--data")
            del arguments[at : at + 2]  # with data it would get stage 0
            while not go.exists():
                time.sleep(0.1)
    run_planaria(arguments)


def measure(run: RunFile, out: Path) -> Measured:
    """Train with the first machine, then with both, and measure. Raises EmulationError."""
    go = out / "go"
    node = ["node", "--threads", "1", "--cloud", "none", "--seats", str(STAGES + 1)]
    nodes = {
        FIRST: [FIRST, str(go), *node, "--stage", "0"],
        SECOND: [SECOND, str(go), *node],
    }
    links = all_alike(["registry", *CORES], ROUND_TRIP / 2, MBPS)
    with emulate(links) as network, swarm(run, run_pinned, out, nodes, homes=network.homes) as look:
        watched = Watched(look, out / "logs")
        watched.train(2)
        alone = rate(watched, ALONE)
        go.touch()
        settle(watched)
        both = rate(watched, BOTH)
        return Measured(alone, both, seats(watched))


def rate(watched: Watched, seconds: float) -> float:
    """Return the tokens per second of the steps of the next `seconds`, of at least two steps."""
    since = watched.committed()[-1]["time"]
    lines: Lines = []
    while len(lines) < 2 or lines[-1]["time"] < since + seconds:
        time.sleep(0.5)
        lines = [line for line in watched.committed() if line["time"] > since]
    return float(sum(line["tokens"] for line in lines) / (lines[-1]["time"] - since))


def settle(watched: Watched) -> None:
    """Wait until the second machine has joined and seats have not changed for `STILL` seconds.
    Raises SystemExit after `LONGEST` seconds."""
    since = time.time()
    while time.time() < since + LONGEST:
        changes = [event["time"] for event in watched.events("serving", "given back")]
        copied = sum(map(len, seats(watched).values())) == STAGES + 1
        if copied and max(changes) > since and time.time() > max(changes) + STILL:
            return
        time.sleep(1.0)
    raise SystemExit(f"after {LONGEST:.0f} s seats still change, or the second machine has none")


def seats(watched: Watched) -> dict[str, list[int]]:
    """Map each node to the stages that it serves."""
    held: dict[str, set[int]] = {}
    for event in watched.events("serving", "given back"):
        stages = held.setdefault(node_of(event["node"]), set())
        (stages.add if event["kind"] == "serving" else stages.discard)(event["stage"])
    return {node: sorted(stages) for node, stages in held.items()}


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory)
            prepare(Recipe([str(SHIPPED)]), out / "data")
            sizes = {"data__path": str(out / "data"), **MODELS[name]}
            measured = measure(resolve(override(loads(RUN), **sizes)), out / "run")
        link = {"mbps": MBPS, "round_trip_ms": ROUND_TRIP}
        keep("two_machines", model=name, **link, **measured._asdict())
        print(
            f"{name}, {MBPS:g} Mbit/s, {ROUND_TRIP:g} ms: alone {measured.alone:.0f} tokens/s, "
            f"both {measured.both:.0f}: ratio {measured.both / measured.alone:.2f} (goal "
            f"{GOALS[name]}), seats {measured.seats}",
            flush=True,
        )


if __name__ == "__main__":
    main()
