"""Tokens per second of a swarm whose links have delay, or lose packets too, against the same swarm
without, and against simpler methods.

Five nodes train a model of width 256, in int8 on the links, each in a network namespace of its own.
Three swarms take turns, as in bench/pipeline.py: one behind the links of `LINKS`; one behind the
same links that has always stages + 1 microbatches out, where the sources of the others find out how
many, or, where packets are lost, one with no more than one TCP connection for what a link carries;
and one behind links of the same bandwidth without delay. A turn is two steps, of which the first
has TCP find out again what its links can do; where packets are lost, some come before the first
turn, in which links find out how many connections they take. It needs root.

Emulated links take of the same cores what real ones don't, and those with delay three times what
the others do: packets come one by one. So each ratio is given twice, as it was, and without the
seconds of processors that passing packets on has taken, divided by the cores, which are busy for
most of it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria.node.wire import streams
from planaria_lab.bench.pipeline import CONTEXT, RUN, STAGES, Processes, measure, ratio
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Living, swarm
from planaria_lab.emulation.emulation import Emulation, EmulationError, emulate
from planaria_lab.emulation.links import all_alike
from planaria_lab.emulation.live_swarm import machines

FAR, FIXED, ONE, NEAR = "far", "far, stages + 1 out", "far, one connection", "near"


class Links(NamedTuple):
    """`delay` in ms there and back, `jitter` one way; `loss`: a share. `goal`: of the ratio; 0:
    none. `batch`: samples of a step, each of `context` tokens."""

    delay: float
    mbps: float
    goal: float
    jitter: float = 0.0
    loss: float = 0.0
    batch: int = 24
    microbatch: int = 2
    context: int = CONTEXT

    def __str__(self) -> str:
        more = f", {self.jitter:g} ms jitter, {self.loss:.1%} lost" if self.loss else ""
        size = f"{self.batch // self.microbatch} x {self.microbatch} x {self.context} tokens a step"
        return f"{self.delay:g} ms, {self.mbps:g} Mbit/s{more}, {size}"


LINKS: Final = (
    Links(50.0, 100.0, 0.9),
    Links(200.0, 50.0, 0.8),
    Links(50.0, 100.0, 0.7, jitter=10.0, loss=0.001),
    Links(50.0, 100.0, 0.9, batch=96),
    Links(200.0, 50.0, 0.8, batch=96),
    Links(200.0, 50.0, 0.0, batch=64, microbatch=1, context=64),
    Links(50.0, 100.0, 0.9, batch=192),
)
FIRST: Final = 16
"""Steps in which links that lose packets find out what they take."""
CHANGES: Final = {"wire__activations": "int8", "wire__gradients": "int8"}
"""Of bench/pipeline.py's run; and microbatches are smaller, so that there is less to hide delays
behind."""


class WarmedUp(Processes):
    """Makes a step on cold links before each."""

    def __init__(self, living: Living, links: Emulation, first: int = 0) -> None:
        super().__init__(living)
        self._links = links
        self.bytes: list[int] = []  # of each step, as on a wire, in all
        self.emulating: list[float] = []  # seconds of each step that the links took of each core
        for _ in range(first):
            super().step()

    def step(self) -> float:
        super().step()
        before, processors = self._carried(), processor_seconds(self._links.relay.pid)
        seconds = super().step()
        self.bytes.append(self._carried() - before)
        took = processor_seconds(self._links.relay.pid) - processors
        self.emulating.append(took / len(os.sched_getaffinity(0)))
        return seconds

    def _carried(self) -> int:
        return sum(traffic.bytes for traffic in self._links.traffic().values())


def processor_seconds(process: int) -> float:
    """Seconds of all cores that the process has taken so far."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]  # proc_pid_stat(5)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run_with_one(arguments: list[str]) -> None:
    """Runs as `run_planaria` does, but with one stream on each link."""
    with patch.object(streams, "MOST", 1):
        run_planaria(arguments)


class Compared(NamedTuple):
    rounds: list[dict[str, float]]  # seconds of a step of each, by turns
    alone: list[dict[str, float]]  # ... without those that emulation took
    bytes: float  # of a step behind these links
    congestion: str  # TCP's control of it


def compare(run: RunFile, profile: Links, out: Path) -> Compared:
    """Raises EmulationError."""
    names = machines(run)
    nodes = {
        slot: ["node", "--stage", slot[0], "--threads", "1", "--cloud", "none"]
        for slot in names[1:]
    }
    other = run if profile.loss else override(run, training__in_flight=STAGES + 1)
    work, first = (run_with_one, FIRST) if profile.loss else (run_planaria, 0)
    links = all_alike(
        names, profile.delay / 2, profile.mbps, loss=profile.loss, jitter_ms=profile.jitter
    )
    with (
        emulate(links) as far,
        emulate(links) as farther,
        emulate(all_alike(names, 0.0, profile.mbps)) as near,
        swarm(run, run_planaria, out / "far", nodes, homes=far.homes) as ours,
        swarm(other, work, out / "other", nodes, homes=farther.homes) as others,
        swarm(run, run_planaria, out / "near", nodes, homes=near.homes) as nearby,
    ):
        begun: dict[str, WarmedUp] = {}

        def begin(name: str, living: Living, links: Emulation, first: int) -> WarmedUp:
            begun[name] = WarmedUp(living, links, first)
            return begun[name]

        other_name = ONE if profile.loss else FIXED
        rounds = measure(
            {
                NEAR: partial(begin, NEAR, nearby, near, 0),
                other_name: partial(begin, other_name, others, farther, first),
                FAR: partial(begin, FAR, ours, far, first),
            }
        )
        took = {name: trainer.emulating[-len(rounds) :] for name, trainer in begun.items()}
        alone = [
            {name: seconds - took[name][turn] for name, seconds in times.items()}
            for turn, times in enumerate(rounds)
        ]
        return Compared(rounds, alone, median(begun[FAR].bytes), far.congestion)


def main() -> None:
    chosen = [LINKS[int(word) - 1] for word in sys.argv[1:]] or LINKS
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(SHIPPED)]), out / "data")
        data = str(out / "data")
        for number, profile in enumerate(chosen):
            sizes: dict[str, Any] = {
                "training__batch": profile.batch,
                "training__microbatch": profile.microbatch,
                "model__context": profile.context,
            }
            run = resolve(override(loads(RUN), data__path=data, **CHANGES, **sizes))
            try:
                rounds, alone, size, control = compare(run, profile, out / str(number))
            except EmulationError as error:
                print(error)
                return
            tokens = profile.batch * profile.context
            rates, rates_alone = (
                [{name: tokens / seconds for name, seconds in times.items()} for times in compared]
                for compared in (rounds, alone)
            )
            rows = {"tokens_per_second": rates, "without_emulation": rates_alone}
            keep("wan", **profile._asdict(), control=control, bytes=size, **rows)
            other = ONE if profile.loss else FIXED
            goal = f" (goal {profile.goal})" if profile.goal else ""
            print(
                f"{profile}, {control}: ratio far / near: {ratio(rounds, FAR, NEAR):.2f}, without "
                f"emulation {ratio(alone, FAR, NEAR):.2f}{goal}, {size / 1e6:.1f} MB "
                f"a step; far / {other}: {ratio(rounds, FAR, other):.2f} "
                f"(goal {'more' if profile.loss else '1.00'})"
            )


if __name__ == "__main__":
    main()
