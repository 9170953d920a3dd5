"""Count false alarms of audits of gradients: correct replicas with real gradients, in one process.

A small model trains on real text. Each step's microbatches are divided among the replicas of a body
stage, unequally. Their contributions are compared as by the driver, in each codec, with error
feedback where the run has it. Every 500 steps the stage is rebuilt from its neighbour, as after a
loss. For each replica, the highest score is printed, as a share of the score at which it is named.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from itertools import combinations_with_replacement
from typing import Final

import torch

from planaria.node.averaging.coding import has_error_feedback
from planaria.node.averaging.evidence import block_length
from planaria.node.averaging.outliers import ROLES, SuspicionScores, compare_gradients
from planaria.node.driver.audits import BLOCKS
from planaria.node.launch.resolve import SHIPPED
from planaria.node.model.modules import BodyStage, EmbeddingStage, build_stage
from planaria.node.model.shape import model_config
from planaria.node.run_file import AUDITED, ModelSection
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.wire import tensors
from planaria_lab.bench.rows import keep

STEPS: Final = 10_000
SHARES: Final = ((1, 2, 5), (1, 1, 1, 2, 3))  # microbatches of each replica
SAMPLES, CONTEXT, RATE = 2, 32, 1e-3
AUDITED_STAGE: Final = 1
REBUILT: Final = 500  # steps between two rebuilds
MODEL: Final = ModelSection(dim=48, heads=4, stages=2, layers=2, context=CONTEXT, hidden=128)


class Model:
    """A model of stage 0 and two body stages, trained on windows of text as bytes."""

    def __init__(self) -> None:
        config = model_config(MODEL, 256)
        stages = [build_stage(config, stage, 0) for stage in range(3)]
        self.ends, self.bodies = stages[0], stages[1:]
        self.optimizers = [StageOptimizer(stage, torch.device("cpu")) for stage in stages]
        text = b"".join(path.read_bytes() for path in sorted(SHIPPED.glob("*.txt")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def backward(self, chance: random.Random) -> torch.Tensor:
        """Return the audited stage's gradient of a microbatch, and add it to the step's."""
        starts = [chance.randrange(len(self.text) - CONTEXT) for _ in range(SAMPLES)]
        window = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
        gradient = self.optimizers[AUDITED_STAGE].gradient
        before = gradient.clone()
        assert isinstance(self.ends, EmbeddingStage)
        x = self.ends.embed(window[:, :-1])
        for body in self.bodies:
            assert isinstance(body, BodyStage)
            x = body(x)
        self.ends.loss(x, window[:, 1:]).backward()  # type: ignore[no-untyped-call]
        return gradient - before

    def step(self) -> None:
        for optimizer in self.optimizers:
            norm = optimizer.squared_norm() ** 0.5
            optimizer.step(RATE, min(1.0, 1.0 / max(norm, 1e-9)))
            optimizer.zero_gradient()

    def rebuild(self) -> None:
        """Rebuild the audited stage as CheckFree does with one neighbour: copy the neighbour's
        weights, and set the moments to zero."""
        optimizer, neighbour = self.optimizers[AUDITED_STAGE : AUDITED_STAGE + 2]
        optimizer.weights.copy_(neighbour.weights)
        optimizer.first_moment.zero_()
        optimizer.second_moment.zero_()


class Audited:
    """The replicas of the audited stage, which send their gradients in one codec."""

    def __init__(self, codec: str, shares: tuple[int, ...], steps: int, seed: int) -> None:
        self.codec, self.shares = codec, shares
        self.names = [f"n{number}" for number in range(len(shares))]
        self.tokens = dict(zip(self.names, (100 * share for share in shares), strict=True))
        self.owed: dict[str, torch.Tensor] = {}
        self.suspicions = SuspicionScores(steps)
        self.chance = random.Random(seed)
        self.highest: defaultdict[str, float] = defaultdict(float)
        self.named: set[str] = set()

    def step(self, microbatches: list[torch.Tensor]) -> None:
        gradients, first = {}, 0
        for name, share in zip(self.names, self.shares, strict=True):
            values = torch.stack(microbatches[first : first + share]).sum(dim=0)
            first += share
            if has_error_feedback(self.codec):  # type: ignore[arg-type]
                values = values + self.owed.get(name, 0.0)
            encoded = tensors.encode([values], self.codec)  # type: ignore[arg-type]
            (sent,) = tensors.decode(*encoded)
            self.owed[name] = values - sent
            gradients[name] = sent
        self._compare(gradients)

    def _compare(self, gradients: dict[str, torch.Tensor]) -> None:
        products: defaultdict[tuple[str, str], float] = defaultdict(float)
        size = len(gradients[self.names[0]])
        length = block_length(size)
        for _ in range(BLOCKS):
            start = self.chance.randrange(0, size, length)
            for a, b in combinations_with_replacement(self.names, 2):
                span = slice(start, start + length)
                products[a, b] += float(gradients[a][span] @ gradients[b][span])
        for role in ROLES:
            for name in self.names:
                for test, stands_out in compare_gradients(name, products, self.tokens).items():
                    self.suspicions.note(name, f"{role} {test}", stands_out)
        for each in self.suspicions.listed():
            self.highest[each.node] = max(self.highest[each.node], each.score)
        self.named |= self.suspicions.outliers(len(self.names)).keys()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    model, chance = Model(), random.Random(0)
    audited = [Audited(codec, shares, steps, 1) for codec in AUDITED for shares in SHARES]
    for step in range(steps):
        microbatches = [model.backward(chance) for _ in range(sum(SHARES[0]))]
        for each in audited:
            each.step(microbatches)
        model.step()
        if step % REBUILT == REBUILT - 1:
            model.rebuild()
    rows = {}
    for each in audited:
        enough = each.suspicions.enough(len(each.names))
        highest = {name: round(score / enough, 2) for name, score in each.highest.items()}
        rows[f"{each.codec} {each.shares}"] = {"named": sorted(each.named), "highest": highest}
        print(f"{each.codec}, shares {each.shares}: named {sorted(each.named) or 'nobody'}")
        print(f"  highest scores, of the one that names: {highest}")
    keep("alarms", steps=steps, rows=rows)


if __name__ == "__main__":
    main()
