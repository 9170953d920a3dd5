"""Losses of a fine-tuning run by planaria and by peft, with the same adapters, initial values and
samples: `python -m planaria_lab.bench.peft_losses RUN.toml STEPS`.

Both train in this process. Planaria's losses are those of the swarm of `planaria lab`, which has
the daemon's arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from planaria.node.data.corpus import TRAIN, UNSCORED
from planaria.node.data.mixture import Data, inputs_and_targets, open_data, training_windows
from planaria.node.launch.resolve import resolve
from planaria.node.model.learning_rate import rate_of
from planaria.node.model.shape import trained_shapes
from planaria.node.run_file import RunFile, load, override
from planaria.node.stage.initial import InitialStages
from planaria_lab.bench.rows import keep
from planaria_lab.convergence.training import TrainingSwarm


def losses_of_peft(run: RunFile, corpus: Data) -> Iterator[float]:
    """Train a resolved run with adapters by transformers, peft and torch's AdamW, and yield the
    loss of each step in nats a scored token. A step's window is one batch."""
    config, training = run.config, run.training
    model = peft_model(run)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = training.weight_decay
    optimizer = torch.optim.AdamW(trained, betas=training.betas, weight_decay=decay)
    drawn = training_windows(corpus, run.seed, config.context, run.batches)
    for step in range(1, run.steps + 1):
        pair = inputs_and_targets(corpus, TRAIN, config.context, drawn.ids(step))
        inputs, targets = map(torch.from_numpy, pair)
        logits = model(inputs).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=UNSCORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, training.clip)
        optimizer.param_groups[0]["lr"] = rate_of(step, run)
        optimizer.step()
        yield loss.item()


def peft_model(run: RunFile) -> nn.Module:
    """Return the checkpoint's model with peft's adapters, set to the run's initial values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config, lora, origin = run.config, run.training.lora, run.model.origin
    assert lora is not None
    assert origin is not None
    base = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    figures = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # fractions work, too
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    model: nn.Module = get_peft_model(base, figures)
    for stage in range(1, config.stages + 1):
        shapes = trained_shapes(config, stage)
        sizes = [rows * columns for rows, columns in shapes.values()]
        values = torch.split(InitialStages(run, config).adapters(stage), sizes)
        for (name, shape), flat in zip(shapes.items(), values, strict=True):
            local = name.removesuffix(".weight")
            parameter = model.get_parameter(f"base_model.model.{local}.default.weight")
            parameter.data.copy_(flat.view(shape))
    return model


def main(file: str, steps: str) -> None:
    run = resolve(override(load(Path(file)), wire={"activations": "none", "gradients": "none"}))
    corpus = open_data(run.data)
    ours, theirs = TrainingSwarm(run, corpus), losses_of_peft(run, corpus)
    print("step | planaria | peft")
    for step, reference in zip(range(1, int(steps) + 1), theirs, strict=False):
        loss = ours.step()
        print(f"{step:4} | {loss:8.4f} | {reference:.4f}", flush=True)
        keep("peft_losses", step=step, planaria=loss, peft=reference)


if __name__ == "__main__":
    main(*sys.argv[1:])
