"""Tokens per second of two nodes, one four times as fast, over the sum of those of each node alone.

Each node has a core of its own. The slow node is stopped and resumed sixty times a second. Alone, a
node serves all stages; together, each serves the stages that the registry gives it by its speed. In
each round both train alone, at the same time, each in a swarm of its own, and then together. So
other load of the machine is about the same for both. A node's core also sends and receives; alone
it has nothing to send. It takes some minutes.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import NoReturn

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import die_with_parent, run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Lines, swarm

STAGES = 5
TURN = 0.005  # seconds that the slow node runs at a time
STILL = 2.6
"""Seconds that the slow node is stopped for each second that it runs. It is a quarter as fast then,
since a stop costs more than its time: caches are cold, and the neighbour on the same physical core
goes on."""
ROUNDS = 3
SECONDS = 40.0  # seconds of a measurement at least, after the first steps
UNMEASURED = 1  # first steps, which are not measured
GOAL = 0.85
RUN = f"""
name = "unequal"
steps = 100000
[model]
preset = "midi"
stages = {STAGES}
layers = {2 * STAGES}
context = 128
[training]
optimizer = "adamw"
batch = 64
microbatch = 2
validation_microbatches = 0
[swarm]
start_grace = 2
"""
FAST, SLOW = "fast", "slow"
CORES = {FAST: 0, SLOW: -1}


def run_pinned(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. With a node's name before them, run on its core at its speed."""
    if arguments[0] in CORES:
        name = arguments.pop(0)
        if name == SLOW and not os.fork():
            stop_and_go(os.getppid())
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[CORES[name]]})
    run_planaria(arguments)


def stop_and_go(process: int) -> NoReturn:
    """Let a process run for `TURN` seconds and stop it for `STILL` times as long, in turn, as long
    as it lives. Late wake-ups are made up for."""
    die_with_parent()
    still, since = 0.0, time.monotonic()  # seconds for which to stop it
    while True:
        time.sleep(TURN)
        os.kill(process, signal.SIGSTOP)
        still, since = still + STILL * (time.monotonic() - since), time.monotonic()
        time.sleep(max(0.0, still))
        os.kill(process, signal.SIGCONT)
        still, since = still - (time.monotonic() - since), time.monotonic()


def node(name: str) -> list[str]:
    seats = ["--seats", str(STAGES + 1)]
    return [name, "node", "--threads", "1", "--cloud", "none", *seats]


def train(run: RunFile, out: Path, *swarms: dict[str, list[str]]) -> list[float]:
    """Train swarms at the same time, and return the tokens per second of each. A swarm is a map of
    slots to arguments of nodes."""
    with ExitStack() as stack:
        looks = []
        for number, nodes in enumerate(swarms):
            looks.append(stack.enter_context(swarm(run, run_pinned, out / str(number), nodes)))
        while min(len(look()) for look in looks) < UNMEASURED:
            time.sleep(0.2)
        time.sleep(SECONDS)
        while min(len(look()) for look in looks) <= UNMEASURED:
            time.sleep(0.2)
        return [rate(look()) for look in looks]


def rate(lines: Lines) -> float:
    """Return the tokens per second of all steps but the unmeasured ones."""
    before, *measured = lines[UNMEASURED - 1 :]
    seconds = float(measured[-1]["time"] - before["time"])
    return float(sum(line["tokens"] for line in measured)) / seconds


def main() -> None:
    ratios = []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(Recipe([str(SHIPPED)]), data)
        run = resolve(override(loads(RUN), data__path=str(data)))
        outs = (Path(directory) / str(number) for number in count())
        for _ in range(ROUNDS):
            fast, slow = train(run, next(outs), {FAST: node(FAST)}, {SLOW: node(SLOW)})
            (both,) = train(run, next(outs), {FAST: node(FAST), SLOW: node(SLOW)})
            ratios.append(both / (fast + slow))
            print(
                f"alone: {fast:.0f} and {slow:.0f} tokens/s ({fast / slow:.1f} times as fast), "
                f"together: {both:.0f}; ratio {ratios[-1]:.2f}",
                flush=True,
            )
            keep("unequal", tokens_per_second={"fast": fast, "slow": slow, "both": both})
    print(f"ratio together / sum of both alone: {statistics.median(ratios):.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
