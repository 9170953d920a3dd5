"""Steps until audits name a replica that lies about gradients, and the final loss of its run,
beside that of an honest run.

One of three replicas of a stage lies from step 20 on. It changes its own gradient, or the sums that
it makes, with a claim about its contribution that fits them. The runs are alike otherwise, and
follow each other. `--honest STEPS` only trains honest replicas for so many steps, and prints which
of them audits name.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from planaria.node.averaging.reduction import OutgoingFrames, Reduction
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria.node.transaction.attempt import Attempt
from planaria.node.wire.exchange import Exchanges
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Watched, swarm

STEPS, FIRST, LAST = 1000, 20, 10  # all steps, the first lie, and last steps of the mean loss
WITHIN, LOSS = 200, 0.05  # goals: steps until a liar is named, and nats from the honest loss
SLOTS: Final = {"0": 0, "1.a": 1, "1.b": 1, "1.c": 1}
LIAR: Final = "1.b"
LIES: Final = {
    "its own gradient x -1": ("gradient", -1.0),
    "its own gradient x -2": ("gradient", -2.0),
    "a sum x -0.3": ("sum", -0.3),
    "a sum x -1000": ("sum", -1000.0),
}
RUN: Final = """
name = "liars"
[model]
preset = "tiny"
stages = 1
[training]
optimizer = "adamw"
batch = 24
microbatch = 4
validation_microbatches = 0
[swarm]
replicas = 3
start_grace = 2
[trust]
gradients = "exclude"
"""


def work(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`; with `lie KIND FACTOR` before them, as a liar."""
    if arguments[0] == "lie":
        kind, factor, *arguments = arguments[1:]
        {"gradient": lie_about_gradient, "sum": lie_about_sum}[kind](float(factor))
    run_planaria(arguments)


def lie_about_gradient(factor: float) -> None:
    """Multiply this process's own gradients by `factor`, from the step FIRST on."""
    complete = Attempt.complete

    async def lies(self: Attempt, exchanges: Exchanges) -> None:
        await complete(self, exchanges)
        gradient = self.place.work.optimizer.gradient  # type: ignore[attr-defined]
        if self.begin.step >= FIRST:
            await exchanges.compute(lambda: gradient.mul_(factor))

    Attempt.complete = lies  # type: ignore[method-assign]


def lie_about_sum(factor: float) -> None:
    """Multiply the sums that this process makes by `factor`, from the step FIRST on, and claim a
    contribution that fits them."""
    send_sum = Reduction._send_sum

    def lies(self: Reduction, number: int, total: torch.Tensor) -> OutgoingFrames:
        if self.evidence is not None and self.round.step >= FIRST:
            piece = self.own[number]
            self.evidence.keep_contribution(piece, self._own_values(piece) + (factor - 1) * total)
            total = factor * total
        return send_sum(self, number, total)

    Reduction._send_sum = lies  # type: ignore[method-assign]


def trained(folder: Path, steps: int, lie: tuple[str, float] | None = None) -> dict[str, Any]:
    """Train a swarm; return the mean loss of the last steps, the slots that audits have named, and
    the steps in which they did."""
    words = ["lie", lie[0], str(lie[1])] if lie is not None else []
    nodes = {
        slot: [
            *(words if slot == LIAR else ()),
            *("node", "--stage", str(stage), "--threads", "1", "--save-dir", "none"),
            *("--cloud", "none", "--name", f"slot-{slot.replace('.', '-')}"),
        ]
        for slot, stage in SLOTS.items()
    }
    run = resolve(override(loads(RUN), data__path=str(folder / "data"), steps=steps))
    with (
        tempfile.TemporaryDirectory(dir=folder) as out,
        swarm(run, work, Path(out), nodes, mortal=[LIAR]) as living,
    ):
        watched = Watched(living, living.processes.logs)
        while not (lines := watched.committed()) or lines[-1]["step"] < steps:
            time.sleep(0.2)
        named = watched.events("gradient stands out")
    slots = sorted({event["node"].removeprefix("slot-").rsplit("-", 1)[0] for event in named})
    loss = statistics.mean(line["loss"] for line in lines[-LAST:])
    return {"loss": loss, "named": slots, "steps": [event["step"] for event in named]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, metavar="STEPS", default=0)
    honest = parser.parse_args().honest
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        if honest:
            result = trained(folder, honest)
            print(f"{honest} steps of honest replicas: named {result['named'] or 'nobody'}")
            keep("liars", honest=honest, **result)
            return
        reference = trained(folder, STEPS)
        print(f"honest: loss {reference['loss']:.3f}, named {reference['named'] or 'nobody'}")
        results = {"honest": reference}
        for name, lie in LIES.items():
            results[name] = result = trained(folder, STEPS, lie)
            after = result["steps"][0] - FIRST if result["steps"] else None
            off = result["loss"] - reference["loss"]
            print(
                f"{name}: loss {result['loss']:.3f} ({off:+.3f}; goal {LOSS}), named "
                f"{result['named'] or 'nobody'} after {after} steps (goal {WITHIN})",
                flush=True,
            )
        keep("liars", results=results)


if __name__ == "__main__":
    main()
