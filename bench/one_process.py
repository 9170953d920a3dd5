"""The reference: one process that trains the same model on the same windows, without a network."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from node.corpus import Corpus
from node.model import build_stage, model_config
from node.optimizer import StageOptimizer, learning_rate
from node.run_file import RunFile, policy_of
from node.windows import Windows, microbatch_ids
from recovery.orders import order


def train(run: RunFile, corpus: Corpus) -> Iterator[float]:
    """Yields the mean loss of each step (nats), after its update."""
    config = model_config(run.model, corpus.vocabulary)
    training = run.training
    modules = [build_stage(config, stage, run.seed) for stage in range(config.stages + 1)]
    optimizers = [StageOptimizer(module, torch.device("cpu")) for module in modules]
    swapped = policy_of(run) == "checkfree+"
    windows = Windows(run.seed, corpus.count("train", config.context), training.batch)
    window_tokens = training.batch * config.context
    for step in range(1, run.steps + 1):
        ids = windows.ids(step)
        losses = []
        for microbatch in range(training.microbatches):
            chosen = microbatch_ids(ids, microbatch, training.microbatch)
            tokens = torch.from_numpy(corpus.samples("train", config.context, chosen))
            x = modules[0].embed(tokens[:, :-1])
            for stage in order(microbatch, config.stages, swapped):
                x = modules[stage](x)
            loss = modules[0].loss(x, tokens[:, 1:])
            (loss / window_tokens).backward()
            losses.append(loss.item())
        norm = math.sqrt(math.fsum(optimizer.squared_norm() for optimizer in optimizers))
        scale = min(1.0, training.clip / (norm + 1e-6))
        peak = training.lr or config.learning_rate
        lr = learning_rate(step, run.steps, peak, training.warmup, training.lr_floor)
        for optimizer in optimizers:
            optimizer.step(lr, scale)
            optimizer.zero_gradient()
        yield math.fsum(losses) / window_tokens
