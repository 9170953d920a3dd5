"""Seconds and memory by stage of CheckFree's models at their published widths on a CPU.

    OUT=lab/results/paper-on-cpu python -m planaria_lab.bench.paper [MODEL...]

The models of 124M and 500M train two iterations of four samples, with a loss of a stage between.
The model of 1.5B takes more memory than most machines have: of it, stage 0 and one body stage train
one sample of 4,096 tokens. An iteration is forward, backward and update, in the lab's swarm.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch import nn

from planaria.node.data.corpus import Corpus
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.run_file import RunFile, from_fields, override
from planaria_lab.bench.rows import keep
from planaria_lab.convergence.study import PUBLISHED
from planaria_lab.convergence.training import Ablation, TrainingSwarm

GB: Final = 1e9
MODELS: Final[dict[str, tuple[dict[str, Any], int | None]]] = {
    "124M": ({"model__preset": "small", "training__batch": 4}, 2),
    "500M": ({"model__preset": "medium", "training__batch": 4}, 2),
    "1.5B, stages 0 and 1": (
        {
            "model__preset": "large",
            "model__layers": 4,
            "model__stages": 1,
            "training__batch": 1,
            "recovery__policy": "checkpoint",  # it keeps no snapshots in memory
        },
        None,
    ),
}
"""Model -> changes of the run, and the stage that is lost after the first of two iterations; None:
one iteration without a loss."""


@dataclass
class StageFigures:
    """Seconds of a stage over all iterations, and its memory."""

    stage: int
    parameters: int
    forward: float = 0.0  # seconds; stage 0: embedding and loss
    backward: float = 0.0  # seconds; stage 0: the rest of the iterations' time
    update: float = 0.0  # seconds
    rss: float = 0.0  # bytes of the process after the stage's last forward pass


def run_of(changes: dict[str, Any]) -> RunFile:
    run = from_fields({**PUBLISHED, "model": {"vocabulary": 32_000, "norm_eps": 1e-6}})
    always = {"training__microbatch": 1, "recovery__relearn__passes": 0}
    return override(run, **always, recovery__snapshot__moments=False, **changes)


def measure(swarm: TrainingSwarm, lost: int | None) -> tuple[list[StageFigures], list[float]]:
    """Train one iteration, or two if a stage is `lost` between. Return the figures of the stages,
    and the loss of each iteration in nats a token."""
    sizes = [len(stage.optimizer.weights) for stage in swarm.stages]
    figures = [StageFigures(stage, size) for stage, size in enumerate(sizes)]
    began: defaultdict[int, float] = defaultdict(float)

    def timed(figure: StageFigures, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            started = time.perf_counter()
            result = call(*args)
            figure.forward += time.perf_counter() - started
            figure.rss = rss()
            return result

        return method

    def backward_begins(figure: StageFigures) -> Callable[..., None]:
        return lambda *_: began.__setitem__(figure.stage, time.perf_counter())

    def backward_ends(figure: StageFigures) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            figure.backward += time.perf_counter() - began[figure.stage]

        return hook

    for figure, stage in zip(figures, swarm.stages, strict=True):
        module: nn.Module = stage.module
        stage.passes = [timed(figure, each) for each in stage.passes]
        if figure.stage:
            module.register_full_backward_pre_hook(backward_begins(figure))
            module.register_full_backward_hook(backward_ends(figure))
    started = time.perf_counter()
    losses = [swarm.step()]
    whole = time.perf_counter() - started
    if lost is not None:
        swarm.lose([lost])
        started = time.perf_counter()
        losses.append(swarm.step())
        whole += time.perf_counter() - started
    for figure, stage in zip(figures, swarm.stages, strict=True):
        figure.update = stage.optimizer.seconds
    others = sum(figure.forward + figure.backward + figure.update for figure in figures)
    figures[0].backward = max(0.0, whole - others)
    return figures, losses


def rss() -> float:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def table(model: str, figures: Iterable[StageFigures], losses: Iterable[float]) -> str:
    """Return a Markdown table of the figures."""
    lines = [
        f"{model}; losses of its iterations: {', '.join(f'{loss:.3f}' for loss in losses)}",
        "",
        "| stage | parameters | forward, s | backward, s | update, s | RSS, GB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in figures:
        seconds = " | ".join(f"{s:.1f}" for s in (row.forward, row.backward, row.update))
        lines.append(f"| {row.stage} | {row.parameters:,} | {seconds} | {row.rss / GB:.1f} |")
    return "\n".join(lines) + "\n"


def main(*models: str) -> None:
    with TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(Recipe(["corpus/austen"], vocabulary=2048), data)
        for model in models or MODELS:
            changes, lost = MODELS[model]
            swarm = TrainingSwarm(run_of(changes), Corpus.open(data), Ablation(clip_scope="stage"))
            figures, losses = measure(swarm, lost)
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for figure in figures:
                keep("paper", model=model, **asdict(figure), losses=losses, peak=peak)
            print(table(model, figures, losses), flush=True)
            del swarm
            gc.collect()  # modules and their timing hooks refer to each other


if __name__ == "__main__":
    main(*sys.argv[1:])
