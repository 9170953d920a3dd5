"""CheckFree's models at their published widths on a CPU: seconds and memory by stage.

    OUT=lab/results/paper-on-cpu python -m planaria_lab.bench.paper [MODEL...]

Of 124M and 500M two iterations of four samples, with a loss of a stage between. Of 1.5B, which
takes more memory than most machines have, stage 0 and one body stage, and one sample of 4,096
tokens. Each iteration is forward, backward and update, in the lab's swarm.
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
            "recovery__policy": "checkpoint",  # so that no snapshots take memory
        },
        None,
    ),
}
"""Changes of the run, and the stage that is lost after the first of two iterations."""


@dataclass
class StageFigures:
    """What a stage took, over all iterations."""

    stage: int
    parameters: int
    forward: float = 0.0  # seconds; stage 0: embedding and loss
    backward: float = 0.0  # seconds; stage 0: what is left of the iterations
    update: float = 0.0  # seconds
    rss: float = 0.0  # bytes of the process after the stage's last forward pass


def run_of(changes: dict[str, Any]) -> RunFile:
    run = from_fields({**PUBLISHED, "model": {"vocabulary": 32_000, "norm_eps": 1e-6}})
    always = {"training__microbatch": 1, "recovery__relearn__passes": 0}
    return override(run, **always, recovery__snapshot__moments=False, **changes)


def measure(swarm: TrainingSwarm, lost: int | None) -> tuple[list[StageFigures], list[float]]:
    """The stages' figures, and the loss of each iteration, nats a token: one, or two with a stage
    `lost` between."""
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
    others = sum(of.forward + of.backward + of.update for of in figures)
    figures[0].backward = max(0.0, whole - others)
    return figures, losses


def rss() -> float:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def table(model: str, figures: Iterable[StageFigures], losses: Iterable[float]) -> str:
    """Markdown."""
    lines = [
        f"{model}; losses of its iterations: {', '.join(f'{loss:.3f}' for loss in losses)}",
        "",
        "| stage | parameters | forward, s | backward, s | update, s | RSS, GB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for of in figures:
        seconds = " | ".join(f"{s:.1f}" for s in (of.forward, of.backward, of.update))
        lines.append(f"| {of.stage} | {of.parameters:,} | {seconds} | {of.rss / GB:.1f} |")
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
            gc.collect()  # modules and what times them refer to each other


if __name__ == "__main__":
    main(*sys.argv[1:])
