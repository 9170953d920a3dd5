"""Train with PyTorch's pipeline engine (torch.distributed.pipelining, gloo, 1F1B) as a reference:
the same model, windows and updates as a swarm's. Each body stage has a process. The embedding is at
the first of them, the head at the last."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planaria.node.data.corpus import TRAIN, Corpus
from planaria.node.data.mixture import inputs_and_targets, training_windows
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.model.learning_rate import rate_of
from planaria.node.model.modules import BodyStage, EmbeddingStage, build_stage
from planaria.node.run_file import RunFile, dumps, load
from planaria.node.stage.optimizer import StageOptimizer
from planaria_lab.bench.swarm import Lines, Living

STEPS = "steps.jsonl"
"""File of lines as in a ledger, written by the last process."""


class Part(nn.Module):
    """The part of the model that one process computes."""

    def __init__(self, body: BodyStage, ends: EmbeddingStage | None, first: bool) -> None:
        super().__init__()
        self.body, self.ends, self.first = body, ends, first

    def forward(self, x: Tensor) -> Tensor:
        """Map int64 [B, T] at the first process, float32 [B, T, dim] at the others, to float32
        [B, T, dim]."""
        if self.first:
            assert self.ends is not None
            x = self.ends.embed(x)
        y: Tensor = self.body(x)
        return y


class TorchPipeline(Living):
    """The processes of PyTorch's pipeline. A call returns the lines of STEPS so far."""

    def __call__(self) -> Lines:
        super().__call__()
        path = self.processes.logs / STEPS
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


@contextmanager
def torch_pipeline(run: RunFile, out: Path) -> Iterator[TorchPipeline]:
    """Train while the block lasts. `run`: a run file, resolved or not, with its data prepared."""
    out.mkdir(parents=True)
    (out / "run.toml").write_text(dumps(run))
    processes = Processes(out, {"OMP_NUM_THREADS": "1"}, PLANARIA, train_part)
    try:
        for rank in range(run.model.body_stages):
            processes.start(str(rank), [str(rank), str(out)])
        yield TorchPipeline(processes)
    finally:
        processes.kill_all()


def train_part(arguments: list[str]) -> None:
    """Train the part of one process. `arguments`: its rank, and the folder of all processes."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # loads torch's compiler

    rank, out = int(arguments[0]), Path(arguments[1])
    run = resolve(load(out / "run.toml"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    corpus = Corpus.open(Path(str(run.data.path)))
    config = run.config_for(corpus.vocabulary)
    dist.init_process_group(
        "gloo", init_method=f"file://{out / 'meeting'}", rank=rank, world_size=config.stages
    )
    training, last = run.training, rank == config.stages - 1
    body = build_stage(config, rank + 1, run.seed)
    ends = build_stage(config, 0, run.seed) if last or rank == 0 else None
    assert isinstance(body, BodyStage) and (ends is None or isinstance(ends, EmbeddingStage))
    part = Part(body, ends, rank == 0)
    optimizer = StageOptimizer.of_run(part, torch.device("cpu"), run)
    tokens = training.batch * config.context

    def loss_of(y: Tensor, targets: Tensor) -> Tensor:
        assert ends is not None
        return ends.loss(y, targets) / tokens

    stage = PipelineStage(part, rank, config.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, training.microbatches, loss_of, scale_grads=False)
    order = training_windows(corpus, run.seed, config.context, run.batches)
    with (out / STEPS if last else Path(os.devnull)).open("a") as file:
        for step in range(1, run.steps + 1):
            batch = inputs_and_targets(corpus, TRAIN, config.context, order.ids(step))
            inputs, targets = map(torch.from_numpy, batch)
            losses: list[Tensor] = []
            schedule.step(
                *([inputs] if rank == 0 else []),
                target=targets if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
            squared = torch.tensor(optimizer.squared_norm(), dtype=torch.float64)
            dist.all_reduce(squared)
            scale = min(1.0, training.clip / (math.sqrt(squared.item()) + 1e-6))
            optimizer.step(rate_of(step, run), scale)
            optimizer.zero_gradient()
            loss = math.fsum(loss.item() for loss in losses)
            line = {"step": step, "tokens": tokens, "loss": loss, "time": time.time()}
            file.write(json.dumps(line) + "\n")
            file.flush()
