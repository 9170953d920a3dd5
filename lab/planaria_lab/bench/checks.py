"""Seconds of a stage's checks of its numbers, as a share of a step.

In a step the stage computes the digest of its state twice: after the update and when it is ready.
It also checks each tensor that it receives: activations, gradients, and what another replica sends
for averaging, which is half of the gradient as contribution and half as sums. A step is what the
stage computes: forward, backward, norm and update. Both are timed alternately, on one thread.
"""

from __future__ import annotations

import statistics
import time

import torch

from planaria.node.averaging.coding import PIECE
from planaria.node.model.modules import build_stage
from planaria.node.model.shape import model_config
from planaria.node.run_file import ModelSection
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.wire.tensors import finite
from planaria_lab.bench.rows import keep

MICROBATCHES, SAMPLES = 4, 1
REPEATS = 5
GOAL = 0.01


def main() -> None:
    torch.set_num_threads(1)
    section = ModelSection(dim=256, heads=4, stages=2, layers=4, context=256, hidden=704)
    config = model_config(section, 256)
    stage = build_stage(config, 1, 0)
    optimizer = StageOptimizer(stage, torch.device("cpu"))
    x = torch.randn(SAMPLES, config.context, config.dim)
    averaged = torch.randn(len(optimizer.weights))
    halves = averaged[: len(averaged) // 2], averaged[len(averaged) // 2 :]
    pieces = [half[i : i + PIECE] for half in halves for i in range(0, len(half), PIECE)]

    def step() -> None:
        for _ in range(MICROBATCHES):
            stage(x.clone().requires_grad_()).backward(x)
        optimizer.squared_norm()
        optimizer.step(1e-4)
        optimizer.zero_gradient()

    def checks() -> None:
        for _ in range(2 * MICROBATCHES):  # activations and gradients
            finite(x)
        for piece in pieces:
            finite(piece)
        optimizer.digest()
        optimizer.digest()

    steps: list[float] = []
    checked: list[float] = []
    for _ in range(REPEATS):
        for work, times in ((step, steps), (checks, checked)):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    share = statistics.median(checked) / statistics.median(steps)
    parameters = len(optimizer.weights)
    print(
        f"{parameters / 1e6:.1f} M parameters, {MICROBATCHES * SAMPLES * config.context} tokens: "
        f"step {statistics.median(steps) * 1e3:.0f} ms, checks {share:.2%} of it"
    )
    print(f"goal: below {GOAL:.0%}: {'met' if share < GOAL else 'missed'}")
    keep("checks", parameters=parameters, seconds={"steps": steps, "checks": checked})


if __name__ == "__main__":
    main()
