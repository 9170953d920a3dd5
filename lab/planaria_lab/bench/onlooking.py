"""Committed steps per second of a swarm while its model is exported, and while it generates text,
over those without observers.

A swarm of processes trains. A round has three equal parts: no observer; repeated exports of the
model; repeated generation of text. The observer has a core of its own, as on a machine of its own,
so that only the nodes' work for it counts. Each rate is divided by that without an observer in the
same round.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import PLAIN
from planaria.node.data.prepare import prepare
from planaria.node.data.progress import untracked
from planaria.node.data.recipe import Recipe
from planaria.node.hugging_face.from_swarm import export_swarm
from planaria.node.hugging_face.generate import Sampling, continuation
from planaria.node.hugging_face.options import ExportOptions
from planaria.node.hugging_face.through_swarm import reply_living
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Lines, swarm

STAGES = 4
ROUNDS = 5
SECONDS = 10.0  # of each part of a round
GOAL = 0.95
RUN = f"""
name = "onlooking"
steps = 1000000
[model]
preset = "mini"
stages = {STAGES}
[training]
optimizer = "adamw"
batch = 16
microbatch = 4
validation_microbatches = 0
[swarm]
start_grace = 2
"""

Ask = Callable[[RegistryClient], Awaitable[object]]


def run_beside(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...` on all cores except the last."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    run_planaria(arguments)


def export_once(out: Path, client: RegistryClient) -> Awaitable[object]:
    shutil.rmtree(out, ignore_errors=True)
    return export_swarm(client, PLAIN, ExportOptions(out=out, wait=60.0), untracked)


def speak_once(data: Path, client: RegistryClient) -> Awaitable[object]:
    reply = partial(continuation, prompt="It was", tokens=10, sampling=Sampling())
    return reply_living(client, PLAIN, data, reply, lambda _: None, data)


@contextmanager
def asking(address: str, ask: Ask, done: list[float]) -> Iterator[None]:
    """Call `ask` repeatedly in a thread until the block ends; append the seconds of each to
    `done`."""
    over = threading.Event()

    async def go_on() -> None:
        client = RegistryClient([address])
        while not over.is_set():
            began = time.monotonic()
            await ask(client)
            done.append(time.monotonic() - began)
        await client.close()

    def work() -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])  # and its new threads
        asyncio.run(go_on())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rate(look: Callable[[], Lines]) -> float:
    """Return the committed steps per second of the next `SECONDS` seconds."""
    began = time.time()
    time.sleep(SECONDS)
    times = [float(line["time"]) for line in look() if line["time"] >= began]
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    relative: dict[str, list[float]] = {"an export": [], "text being made": []}
    took: dict[str, list[float]] = {request: [] for request in relative}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        run = resolve(override(loads(RUN), data__path=str(folder / "data")))
        out = folder / "run"
        nodes = {
            f"{stage}.0": ["node", "--stage", str(stage), "--threads", "1", "--save-dir", "none"]
            for stage in range(STAGES + 1)
        }
        requests: dict[str, Ask] = {
            "an export": partial(export_once, folder / "exported"),
            "text being made": partial(speak_once, folder / "data"),
        }
        with swarm(run, run_beside, out, nodes) as look:
            address = (out / "address").read_text().strip()
            while len(look()) < 10:
                time.sleep(0.2)
            for _ in range(ROUNDS):
                alone = rate(look)
                for request, work in requests.items():
                    with asking(address, work, took[request]):
                        relative[request].append(rate(look) / alone)
    for request, ratios in relative.items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"ratio of steps/s with {request} / without: {middle:.3f} (quartiles {low:.3f} to "
            f"{high:.3f}; {len(took[request])} of them, "
            f"{statistics.median(took[request]):.1f} s each)"
        )
        keep("onlooking", what=request, ratios=ratios, seconds=took[request])
    print(f"goal for an export: {GOAL}")


if __name__ == "__main__":
    main()
