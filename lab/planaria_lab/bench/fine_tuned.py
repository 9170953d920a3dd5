"""Fine-tune a model of billions of parameters on this machine with a base of four bits, lose a
stage, and export it: `OUT=lab/results/fine-tuned python -m planaria_lab.bench.fine_tuned [MODEL]`.

A registry and four processes of one thread train adapters. The model has the shapes of
TinyLlama-1.1B or Llama-3-8B, and random weights in bf16. After two steps the only node of stage 2
gets SIGKILL, and a new node takes its place. After four steps the model is exported from the saves,
with its adapters merged. Seconds, bytes and the peak memory of each node (VmHWM) are printed and
kept.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.report.ledger import audit
from planaria.node.run_file import loads, override
from planaria_lab.bench.frozen import MODELS, written
from planaria_lab.bench.large import MB, Swarm, folder_size
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Watched, swarm

BATCHES: Final = {"TinyLlama-1.1B": 4, "Llama-3-8B": 1}
"""Model -> samples of 128 tokens per step."""
STAGES, LOST, AFTER = 3, 2, 2
RUN: Final = f"""
name = "fine-tuned"
steps = 4
[model]
stages = {STAGES}
context = 128
[training]
microbatch = 1
validation_microbatches = 0
[training.lora]
rank = 16
base = "nf4"
[saves]
every = 1
"""


def main() -> None:
    (name,) = sys.argv[1:] or ["TinyLlama-1.1B"]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(SHIPPED)], vocabulary=2048), out / "data")
        model = written(MODELS[name], out / "data", out / "model")
        changes = {"data__path": str(out / "data"), "model__from": str(model)}
        started = time.monotonic()
        run = resolve(override(loads(RUN), training__batch=BATCHES[name], **changes))
        taken_in = time.monotonic() - started
        trained = Swarm(run, out / "saves")
        nodes = trained.nodes(dict.fromkeys(range(STAGES + 1), 1))
        lost, other = f"{LOST}.0", f"{LOST}.1"
        with swarm(run, run_planaria, out / "run", nodes, mortal=[*nodes, other]) as look:
            watched = Watched(look, look.processes.logs)
            trained.until(look, AFTER)
            look.processes.kill(lost)
            killed = time.time()
            look.processes.start(other, [*trained.node(other), *look.where])
            trained.until(look, run.steps)
            lines, events = look(), watched.events("rebuilt")
        stall = min(line["time"] for line in lines if line["time"] > killed) - killed
        seconds = statistics.median(line["seconds"] for line in lines)
        options = "--merged", "--model", str(model), "--dtype", "bf16"
        exported = trained.exported(out / "run/run.toml", out / "merged", *options)
        audited = audit(out / "run/logs")
        print(f"{name}, {folder_size(model) / MB:,.0f} MB: taken in after {taken_in:.0f} s")
        print(f"{seconds:.1f} s a step; {stall:.1f} s from the SIGKILL to the next commit")
        for event in events:
            print(f"stage {event['stage']} by {event['method']}: {event['bytes'] / MB:,.0f} MB")
        print(f"merged: {folder_size(out / 'merged') / MB:,.0f} MB, {exported:.0f} s")
        print(f"steps {audited.steps}; duplicates {audited.duplicates}, missing {audited.missing}")
        for slot, most in sorted(trained.most.items()):
            print(f"{slot}: {most / MB:,.0f} MB at most")
        keep(
            "fine_tuned",
            **{
                "model": name,
                "batch": BATCHES[name],
                "stages": STAGES,
                "taken_in": taken_in,
                "step": seconds,
            },
            **{"stall": stall, "rebuilt": events, "export": exported, "memory": trained.most},
            **{"checkpoint": folder_size(model), "merged": folder_size(out / "merged")},
            **{"steps": audited.steps, "exact": audited.exact},
        )


if __name__ == "__main__":
    main()
