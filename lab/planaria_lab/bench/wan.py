"""Tokens per second of a swarm behind links with delay, over those of the same swarm without delay,
and over those of simpler methods. Some links also lose packets.

Five nodes train a model of width 256 with int8 on the links, each in a network namespace of its
own. Three swarms take turns, as in bench/pipeline.py:

- one behind the links of `LINKS`;
- one behind the same links by a simpler method: always stages + 1 microbatches in flight, where
  sources of the other swarms find their number; or, if packets are lost, one TCP connection a link;
- one behind links of the same bandwidth without delay.

A turn is two steps; only the second is timed, since in the first TCP adapts to its links again. If
packets are lost, `FIRST` steps before the first turn let links find their number of connections. It
needs root.

Emulated links take time of the same cores, which real links don't. Those with delay take three
times that of the others, since packets come one by one. So each ratio is given twice: as measured,
and without the processor seconds of the relay of packets. These are divided by the number of cores,
since cores are busy most of the time.
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
    """Links to emulate, and the sizes of a step. `batch`: samples, each of `context` tokens."""

    delay: float  # ms, round trip
    mbps: float
    goal: float  # of the ratio; 0: none
    jitter: float = 0.0  # ms, one way
    loss: float = 0.0  # share of packets
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
"""Steps in which links that lose packets find their number of connections."""
CHANGES: Final = {"wire__activations": "int8", "wire__gradients": "int8"}
"""Changes of bench/pipeline.py's run. Microbatches are smaller, too, so that less computing hides
delays."""


class WarmedUp(Processes):
    """Processes that train a step before each timed step, since their links are cold after a
    stop."""

    def __init__(self, living: Living, links: Emulation, first: int = 0) -> None:
        super().__init__(living)
        self._links = links
        self.bytes: list[int] = []  # bytes of each step, on all wires
        self.emulating: list[float] = []  # seconds per core of each step that the relay took
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
    """Return the processor time of a process so far, in seconds."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]  # proc_pid_stat(5)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run_with_one(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...` with one stream on each link."""
    with patch.object(streams, "MOST", 1):
        run_planaria(arguments)


class Compared(NamedTuple):
    rounds: list[dict[str, float]]  # for each round, seconds of a step of each swarm
    alone: list[dict[str, float]]  # the same without the seconds that emulation took
    bytes: float  # of a step behind the links with delay
    congestion: str  # TCP's congestion control


def compare(run: RunFile, profile: Links, out: Path) -> Compared:
    """Train the three swarms behind such links, and measure. Raises EmulationError."""
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
