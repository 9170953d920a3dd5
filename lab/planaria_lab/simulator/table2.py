"""Simulates CheckFree's Table 2: iteration and train times of four policies at three failure rates.

Model, sites, links, speed, microbatches and losses are the constants of the published rig
(github.com/gensyn-ai/CheckFree at 8d7d547: trainer.py, communication/, failure_p_configs/). Nothing
is fitted. The rig's 0.055 s "per sample per layer" may mean a forward pass or both passes, so both
are simulated. Two assumptions are ours. A backward pass takes as long as two forward passes. A
weight of the head takes as long as one of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from planaria.node.model.shape import ModelConfig, model_config
from planaria.node.run_file import loads, override
from planaria_lab.emulation.links import Link
from planaria_lab.simulator.churn import HOUR, Churn, LostPlace
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.swarm import Group, Seconds, Swarm, sites

RATES: Final[Mapping[str, Mapping[int, tuple[LostPlace, ...]]]] = {
    "5 %": {},
    "10 %": {395: (LostPlace(4, None),)},
    "16 %": {395: (LostPlace(3, None),)},
}
"""Failure rate -> stages that the rig loses in its `ITERATIONS`, by iteration. The rig has no file
for 5 %."""
ITERATIONS: Final = 500
PAPER_ITERATION: Final[Mapping[str, Sequence[float]]] = {
    "checkpoint": (91.4, 91.4, 92.1),
    "redundant": (151.0, 151.0, 151.0),
    "checkfree": (91.3, 91.3, 92.1),
    "checkfree+": (91.3, 91.3, 92.1),
}
"""The paper's seconds of an iteration, by failure rate."""
PAPER_TRAIN: Final[Mapping[str, Sequence[float]]] = {
    "checkpoint": (558.2, 621.7, 634.4),
    "redundant": (419.6, 419.6, 419.6),
    "checkfree": (367.8, 405.9, 563.0),
    "checkfree+": (355.1, 367.8, 460.6),
}
"""The paper's hours of training to a validation loss of 2.85, by failure rate."""

PLACES: Final = ("Australia", "Belgium", "Canada", "Germany", "Iowa", "NL", "London")
"""Node i is at site i mod 7."""
REPLICAS: Final = 3
MICROBATCH, SENDS, IN_FLIGHT = 8, 6, 3
"""Samples in a microbatch; microbatches that each node of stage 0 sends in an iteration, and how
many of them are in flight."""
EACH: Final = 0.055
"""Seconds per sample and layer."""
Passes = Literal["forward", "both"]
"""How `EACH` is read: as the seconds of a forward pass, or of a forward and a backward pass."""
RUN: Final = f"""
steps = {ITERATIONS}
[model]
preset = "medium"
vocabulary = 32000
[training]
optimizer = "adamw"
batch = {REPLICAS * SENDS * MICROBATCH}
microbatch = {MICROBATCH}
in_flight = {IN_FLIGHT}
[recovery]
checkpoint.every = 100
relearn.passes = 0
[wire]
activations = "none"
gradients = "none"
averaging = "none"
[trust]
gradients = "off"
"""


@dataclass(frozen=True)
class Simulated:
    """A cell of the table: mean `seconds` of an iteration, with stalls. Iterations that were rolled
    back later count, too."""

    policy: str
    rate: str
    passes: Passes
    seconds: float


def iterations(policy: str) -> tuple[int, ...]:
    """Iterations of the paper's runs to its validation loss of 2.85, by rate: train time divided by
    iteration time."""
    pairs = zip(PAPER_TRAIN[policy], PAPER_ITERATION[policy], strict=True)
    return tuple(round(hours * HOUR / seconds) for hours, seconds in pairs)


def swarm(links: Iterable[Link], policy: str, passes: Passes) -> Swarm:
    """The swarm of the rig's 21 nodes. With redundant computation, microbatches are half as large
    and twice as many (section 5, baselines)."""
    microbatch = MICROBATCH // 2 if policy == "redundant" else MICROBATCH
    run = override(loads(RUN), training__microbatch=microbatch, recovery__policy=policy)
    config = model_config(run.model, 0)
    groups = []
    for node in range(REPLICAS * (config.stages + 1)):
        stage, site = node // REPLICAS, PLACES[node % len(PLACES)]
        groups.append(Group(stage, 1, site, _seconds(config, stage, microbatch, passes)))
    return Swarm(run, config, tuple(groups), sites(links))


def _seconds(config: ModelConfig, stage: int, samples: int, passes: Passes) -> Seconds:
    """Seconds of a node's tasks for a microbatch. A weight of the head takes as long as one of a
    layer."""
    ends, layer = config.parameters[0], config.values_in(1) // len(config.layers_of(1))
    forward = samples * EACH / (3 if passes == "both" else 1)
    if stage == 0:
        return Seconds(0.0, 0.0, head=3 * forward * (ends // 2) / layer)
    forward *= len(config.layers_of(stage))
    return Seconds(forward, 2 * forward)


def simulated(links: Sequence[Link]) -> list[Simulated]:
    """Simulates all cells, in the order of passes, policy and rate."""
    every: tuple[Passes, ...] = ("forward", "both")
    cells = []
    for passes in every:
        for policy in PAPER_ITERATION:
            as_in_rig = swarm(links, policy, passes)
            for rate, lost in RATES.items():
                outcome = simulate_run(as_in_rig, Churn(at=lost, replacement=0.0))
                seconds = outcome.seconds / outcome.iterations
                cells.append(Simulated(policy, rate, passes, seconds))
    return cells


def table(cells: Sequence[Simulated]) -> str:
    """The table in Markdown: each policy and rate beside the paper's figures."""
    lines = [
        "| policy, rate | paper, s an iteration | ours, 0.055 s for both passes | ours, for a "
        "forward pass | paper, h to the loss | ours, both passes | ours, forward |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_cell = {(cell.policy, cell.rate, cell.passes): cell.seconds for cell in cells}
    for policy, paper in PAPER_ITERATION.items():
        for column, rate in enumerate(RATES):
            pair = by_cell[policy, rate, "both"], by_cell[policy, rate, "forward"]
            seconds = [f"{each:.1f}" for each in (paper[column], *pair)]
            count = iterations(policy)[column]
            hours = [f"{PAPER_TRAIN[policy][column]:.1f}"]
            hours += [f"{each * count / HOUR:.0f}" for each in pair]
            lines.append(f"| {' | '.join([f'{policy}, {rate}', *seconds, *hours])} |")
    return "\n".join(lines) + "\n"


def rows(cells: Iterable[Simulated], origin: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells as JSON rows, each with the fields of `origin`."""
    return [{**origin, **asdict(cell)} for cell in cells]
