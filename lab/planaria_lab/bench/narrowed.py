"""Which snapshots the policy `auto` keeps when links become slow, and how a stage is rebuilt then.

    sudo python -m planaria_lab.bench.narrowed

A swarm of real processes trains behind emulated links (`planaria_lab.emulation`): four body stages
of one block of width 384, one sample per step. At step 40 the bandwidth of all links falls from
1000 to 4 Mbit/s. At step 80 the only node of stage 3 is killed. These are printed and kept: when
and why each stage stopped or resumed sending its snapshot, how stage 3 was rebuilt, and the audit.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Final

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.local.loss_schedule import parse_kill
from planaria.node.local.plan import SwarmPlan
from planaria.node.report.event_log import LineReader
from planaria.node.report.events import SnapshotPaced, StageRebuilt, entries
from planaria.node.report.ledger import audit
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.emulation.emulation import emulate
from planaria_lab.emulation.links import all_alike
from planaria_lab.emulation.live_swarm import machines, train

DELAY_MS, WIDE, NARROW = 5, 1000, 4
AT, LOST = 40, "3@80"
RUN: Final = """
name = "narrowed"
steps = 120
[model]
dim = 384
heads = 6
layers = 4
stages = 4
context = 16
[training]
optimizer = "adamw"
batch = 1
microbatch = 1
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(SHIPPED)], vocabulary=512), out / "data")
        run = resolve(override(loads(RUN), data__path=str(out / "data")))
        nodes = machines(run)
        with emulate(all_alike(nodes, DELAY_MS, WIDE)) as links:
            narrowed = False

            def on_step(step: int) -> None:
                nonlocal narrowed
                if step >= AT and not narrowed:
                    narrowed = True
                    links.change(all_alike(nodes, DELAY_MS, NARROW))

            plan = SwarmPlan(run, out / "swarm", None, "cpu", links.homes)
            with links.inside("registry"):
                asyncio.run(train(plan, [parse_kill(LOST, run)], links, on_step))
        report(plan.out)


def report(swarm: Path) -> None:
    """Print and keep the changes of snapshots, the rebuilds and the audit."""
    step, paced, rebuilt = 0, list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in entries(LineReader(swarm / "events.jsonl").lines()):
        event = entry.event
        step = max(step, getattr(event, "step", None) or 0)
        if isinstance(event, SnapshotPaced):
            paced.append({"step": step, "stage": event.stage, "kept": event.kept, "age": event.age})
            print(f"step {step}: {event.sentence(entry.node)}")
        elif isinstance(event, StageRebuilt):
            rebuilt.append({"step": step, "stage": event.stage, "method": event.method})
            print(f"step {step}: {event.sentence(entry.node)}")
    audited = audit(swarm)
    counts = {key: getattr(audited, key) for key in ("duplicates", "missing", "extra")}
    print(f"committed steps: {audited.steps}; {counts}")
    keep("narrowed", paced=paced, rebuilt=rebuilt, steps=audited.steps, audit=counts)


if __name__ == "__main__":
    main()
