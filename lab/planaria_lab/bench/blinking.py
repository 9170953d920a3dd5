"""Steps per second of a swarm whose links break repeatedly, over those while nothing breaks.

    python -m planaria_lab.bench.blinking [SECONDS]

One run has spells without and with resets in turn. In a spell with resets, of SECONDS (18), all
connections between nodes are reset every 1 s; in later ones every 2, 4 and 9 s. A quiet spell is as
long, but 36 s at most. The ratio is the steps per second in a spell with resets over those in the
two quiet spells around it. No node may be evicted, no stage rebuilt, no attempt aborted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.report.events import Committed
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.chaos.command import RUN
from planaria_lab.chaos.outcome import RunRecord, judge
from planaria_lab.chaos.schedule import BLINKS, EVERYBODY, Fault, Shape
from planaria_lab.chaos.swarm import SickSwarm

SPELL: Final = 18.0
"""Seconds of a spell with resets. Each kind of blinking resets at least twice in it."""
LONGEST_QUIET: Final = 36.0
GOAL: Final = 0.8


class Figures(NamedTuple):
    """The figures of one run. `ratios`: kind of fault -> steps per second over those in the quiet
    spells around it."""

    ratios: dict[str, float]
    usual: float  # steps a second in quiet spells
    evicted: int
    rebuilt: int
    aborted: int


def blinking(replicas: int, spell: float, out: Path) -> Figures:
    """Measure a swarm with `replicas` nodes per stage, and each kind of fault for `spell` seconds.
    Raises SystemExit if training stops or another promise is broken."""
    rest = min(spell, LONGEST_QUIET)
    faults = [
        Fault(rest + n * (spell + rest), kind, EVERYBODY, spell, {})
        for n, kind in enumerate(BLINKS)
    ]
    shape = Shape(stages=2, replicas=replicas, kinds=tuple(BLINKS))
    prepare(Recipe([str(SHIPPED)]), out / "data")
    run = override(
        loads(RUN),
        data__path=str(out / "data"),
        model__stages=shape.stages,
        model__layers=shape.stages,
        swarm__replicas=replicas,
    )

    async def train() -> str:
        minutes = (faults[-1].end + rest) / 60
        async with SickSwarm(resolve(run), shape, faults, minutes, out / "run") as swarm:
            return await swarm.train()

    outcome = judge(out / "run", {}, asyncio.run(train()))
    if outcome["broken"]:
        raise SystemExit("\n".join(outcome["broken"]))
    record = RunRecord.read(out / "run")
    committed = {e.event.step: e.time for e in record.events if isinstance(e.event, Committed)}
    commits = sorted(committed.values())
    ratios, quiet = {}, []
    for fault in record.faults:
        before = _steps(commits, fault.time - rest, fault.time)
        after = _steps(commits, fault.end, fault.end + rest)
        quiet.append((before + after) / (2 * rest))
        within = _steps(commits, fault.time, fault.end)
        ratios[fault.kind] = within / (fault.end - fault.time) / quiet[-1]
    return Figures(
        ratios,
        sum(quiet) / len(quiet),
        len(outcome["evictions"]),
        sum(outcome["rebuilds"].values()),
        outcome["aborted"],
    )


def _steps(commits: Sequence[float], start: float, end: float) -> int:
    """Count the commits from `start` to `end`."""
    return bisect(commits, end) - bisect(commits, start)


def main() -> None:
    spell = float(sys.argv[1]) if sys.argv[1:] else SPELL
    for replicas in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            rates = blinking(replicas, spell, Path(folder))
        nodes = "one node" if replicas == 1 else f"{replicas} nodes"
        print(f"{nodes} a stage, {rates.usual:.1f} steps a second while nothing breaks:")
        for kind, ratio in rates.ratios.items():
            print(f"  ratio {kind} / nothing: {ratio:.2f} (goal {GOAL})")
        counts = rates.evicted, rates.rebuilt, rates.aborted
        print("  evicted {}, rebuilt {}, aborted {} (goals 0)".format(*counts), flush=True)
        keep("blinking", replicas=replicas, spell=spell, **rates._asdict())


if __name__ == "__main__":
    main()
