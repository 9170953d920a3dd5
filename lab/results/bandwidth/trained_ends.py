"""Narrow boundaries with trained ends, instead of a model that writes into a subspace.

Each stage has a matrix [rank, dim] where it begins and one [dim, rank] where it ends, trained with
the rest, in the manner of ResBM (arXiv 2604.11947). They begin as the basis of a subspace of that
rank and its transpose, so that what lies in it passes unchanged. Either the whole stream crosses
so, or what is left of it without a fixed embedding of the token, whose id crosses then, as in
node/model/subspace.py. The runs, seeds and data are those of study.toml beside this file.

    python lab/results/bandwidth/trained_ends.py ROWS.jsonl
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from planaria.node.data.mixture import open_data
from planaria.node.launch.resolve import resolve
from planaria.node.model import modules as model
from planaria.node.model.shape import ModelConfig
from planaria.node.model.subspace import Subspace
from planaria.node.run_file import RunFile
from planaria_lab.convergence import training
from planaria_lab.origin import origin

STUDY: Final = tomllib.loads((Path(__file__).parent / "study.toml").read_text())
RANKS: Final = 16, 64


class Variant(NamedTuple):
    rank: int
    fixed: bool  # around a fixed embedding of each token
    seed: int


class Narrow(nn.Module):
    """What a stage narrows its boundaries by."""

    def __init__(self, config: ModelConfig, variant: Variant) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.subspace = Subspace(config.vocabulary, config.dim, variant.rank)
        self.fixed = variant.fixed
        self.enters = nn.Parameter(self.subspace.basis.clone())
        self.leaves = nn.Parameter(self.subspace.basis.T.clone())

    def begun(self, tokens: Tensor, x: Tensor) -> Tensor:
        """What crosses from stage 0, which embeds tokens as x [B, T, dim]."""
        figures = x @ self.leaves
        return self.subspace.with_digits(tokens, figures) if self.fixed else figures

    def entered(self, x: Tensor) -> Tensor:
        """The stream [B, T, dim] of what has crossed."""
        if not self.fixed:
            return x @ self.enters
        figures, fixed, _ = self.subspace.split(x)
        return fixed + figures @ self.enters

    def left(self, x: Tensor, came: Tensor) -> Tensor:
        """What crosses of the stream [B, T, dim]; `came`: what had crossed before."""
        if not self.fixed:
            return x @ self.leaves
        _, fixed, digits = self.subspace.split(came)
        return torch.cat(((x - fixed) @ self.leaves, digits), dim=-1)


def narrow(variant: Variant) -> None:
    """From here on this process builds stages with trained ends."""

    class Body(model.LlamaBody):
        def __init__(self, config: ModelConfig) -> None:
            super().__init__(config)
            self.narrow = Narrow(config, variant)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow.left(super().forward(self.narrow.entered(x)), x)

    class Ends(model.LlamaEnds):
        def __init__(self, config: ModelConfig) -> None:
            super().__init__(config)
            self.narrow = Narrow(config, variant)

        def embed(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
            return self.narrow.begun(tokens, super().embed(tokens, begins))

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(self.narrow.entered(x))

    deviation = model._llama_deviation

    def drawn(config: ModelConfig, name: str, shape: tuple[int, ...]) -> float:
        return 0.0 if name.startswith("narrow.") else deviation(config, name, shape)

    model_parts = {"LlamaBody": Body, "LlamaEnds": Ends, "_deviation": drawn}
    wire_parts = {
        "taken_apart": lambda x, config, kind: [x],
        "put_together": lambda parts, config: parts[0],
    }
    for module, parts in ((model, model_parts), (training, wire_parts)):
        for name, value in parts.items():
            setattr(module, name, value)


def run_one(variant: Variant) -> dict[str, Any]:
    torch.set_num_threads(1)
    narrow(variant)
    bf16 = {"activations": "bf16", "gradients": "bf16"}
    recovery = {"policy": "checkpoint", "checkpoint": {"dir": "memory"}}  # nothing is lost
    fields = {**STUDY["run"], "seed": variant.seed, "wire": bf16, "recovery": recovery}
    run = resolve(RunFile.model_validate(fields))
    swarm = training.TrainingSwarm(run, open_data(run.data))
    curve = [(0, round(swarm.validate(), 6))]
    for step in range(1, run.steps + 1):
        swarm.step()
        if step == 10 or step % 50 == 0:
            curve.append((step, round(swarm.validate(), 6)))
    return {**variant._asdict(), "validation": curve}


def main() -> None:
    variants = [
        Variant(rank, fixed, seed)
        for fixed in (False, True)
        for rank in RANKS
        for seed in STUDY["seeds"]
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        for row in pool.map(run_one, variants):
            with Path(sys.argv[1]).open("a") as rows:
                rows.write(json.dumps(row | origin()) + "\n")


if __name__ == "__main__":
    main()
