"""Tokens per second of a swarm whose links have delay, or lose packets too, against the same swarm
without, and against what that was built to be better than.

Five nodes train a model of width 256, in int8 on the links, each in a network namespace of its own.
Three swarms take turns, as in bench/pipeline.py: one behind the links of `LINKS`; one behind the
same links that has always stages + 1 microbatches out, where the sources of the others find out how
many, or, where packets are lost, one with no more than one TCP connection for what a link carries;
and one behind links of the same bandwidth without delay. A turn is two steps, of which the first
has TCP find out again what its links can do; where packets are lost, some come before the first
turn, in which links find out how many connections they take. It takes root.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from bench.pipeline import CONTEXT, RUN, STAGES, TEXT, Processes, measure, ratio
from bench.rows import keep
from bench.swarm import Living, swarm
from planaria.lab.emulation.emulation import Emulation, EmulationError, emulate
from planaria.lab.emulation.links import all_alike
from planaria.lab.emulation.live_swarm import machines
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.local.processes import run_planaria
from planaria.node.resolve import resolve
from planaria.node.run_file import RunFile, loads, override
from planaria.node.wire import streams

FAR, FIXED, ONE, NEAR = "far", "far, stages + 1 out", "far, one connection", "near"


class Links(NamedTuple):
    """`delay` in ms there and back, `jitter` one way; `loss`: a share. `goal`: of the ratio."""

    delay: float
    mbps: float
    goal: float
    jitter: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        more = f", {self.jitter:g} ms jitter, {self.loss:.1%} lost" if self.loss else ""
        return f"{self.delay:g} ms, {self.mbps:g} Mbit/s{more}"


LINKS: Final = (
    Links(50.0, 100.0, 0.9),
    Links(200.0, 50.0, 0.8),
    Links(50.0, 100.0, 0.7, jitter=10.0, loss=0.001),
)
FIRST: Final = 16
"""Steps in which links that lose packets find out what they take."""
CHANGES: Final[dict[str, Any]] = {
    "training__batch": 24,
    "training__microbatch": 2,
    "wire__activations": "int8",
    "wire__gradients": "int8",
}
"""Of bench/pipeline.py's run: less to compute, so that there is less to hide delays behind."""


class WarmedUp(Processes):
    """Makes a step on cold links before each."""

    def __init__(self, living: Living, links: Emulation, first: int = 0) -> None:
        super().__init__(living)
        self._links = links
        self.bytes: list[int] = []  # of each step, as on a wire, in all
        for _ in range(first):
            super().step()

    def step(self) -> float:
        super().step()
        before = self._carried()
        seconds = super().step()
        self.bytes.append(self._carried() - before)
        return seconds

    def _carried(self) -> int:
        return sum(way.bytes for way in self._links.traffic().values())


def run_with_one(arguments: list[str]) -> None:
    """As `run_planaria`, but for links that have one stream for what they carry."""
    with patch.object(streams, "MOST", 1):
        run_planaria(arguments)


def compare(run: RunFile, how: Links, out: Path) -> tuple[list[dict[str, float]], float, str]:
    """Seconds of a step of each, by turns; bytes of one behind `how`; TCP's congestion control.
    Raises EmulationError."""
    names = machines(run)
    nodes = {
        slot: ["node", "--stage", slot[0], "--threads", "1", "--cloud", "none"]
        for slot in names[1:]
    }
    other = run if how.loss else override(run, training__in_flight=STAGES + 1)
    work, first = (run_with_one, FIRST) if how.loss else (run_planaria, 0)
    links = all_alike(names, how.delay / 2, how.mbps, loss=how.loss, jitter_ms=how.jitter)
    with (
        emulate(links) as far,
        emulate(links) as farther,
        emulate(all_alike(names, 0.0, how.mbps)) as near,
        swarm(run, run_planaria, out / "far", nodes, homes=far.homes) as ours,
        swarm(other, work, out / "other", nodes, homes=farther.homes) as others,
        swarm(run, run_planaria, out / "near", nodes, homes=near.homes) as here,
    ):
        begun: list[WarmedUp] = []

        def begin(living: Living, links: Emulation, first: int) -> WarmedUp:
            begun.append(WarmedUp(living, links, first))
            return begun[-1]

        rounds = measure(
            {
                NEAR: partial(begin, here, near, 0),
                ONE if how.loss else FIXED: partial(begin, others, farther, first),
                FAR: partial(begin, ours, far, first),
            }
        )
        return rounds, median(begun[-1].bytes), far.congestion


def main() -> None:
    chosen = [LINKS[int(word) - 1] for word in sys.argv[1:]] or LINKS
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(TEXT)]), out / "data")
        run = resolve(override(loads(RUN), data__path=str(out / "data"), **CHANGES))
        tokens = run.training.batch * CONTEXT
        for number, how in enumerate(chosen):
            try:
                rounds, size, control = compare(run, how, out / str(number))
            except EmulationError as error:
                print(error)
                return
            rates = [{name: tokens / s for name, s in one.items()} for one in rounds]
            keep("wan", **how._asdict(), control=control, bytes=size, tokens_per_second=rates)
            other = ONE if how.loss else FIXED
            print(
                f"{how}, {control}: ratio far / near: {ratio(rounds, FAR, NEAR):.2f} (goal "
                f"{how.goal}), {size / 1e6:.1f} MB a step; far / {other}: "
                f"{ratio(rounds, FAR, other):.2f} (goal {'more' if how.loss else '1.00'})"
            )


if __name__ == "__main__":
    main()
