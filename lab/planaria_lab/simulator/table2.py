"""CheckFree's Table 2 from the simulator: iteration and train times of four policies, three rates.

The paper (section 5.1, A.1, A.4) gives the model, its stages, 20 nodes at five of Google Cloud's
sites, the rates and what redundant computation changes. It gives neither the sites, nor the batch,
nor the speed of a node. So sites are drawn, the speed is assumed, and the batch is chosen so that
one figure, the iteration time of checkpointing, is the paper's; the others follow.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from planaria.node.model.shape import model_config
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.convergence.times import RATES as LAB_RATES
from planaria_lab.convergence.times import more_iterations, read_runs
from planaria_lab.emulation.links import Link
from planaria_lab.simulator.churn import HOUR, Churn
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.step import simulate_step
from planaria_lab.simulator.swarm import Swarm, seconds_at, sites, uniform

RATES: Final = {"5 %": 0.05, "10 %": 0.10, "16 %": 0.16}
PAPER_ITERATION: Final[Mapping[str, Sequence[float]]] = {
    "checkpoint": (91.4, 91.4, 92.1),
    "redundant": (151.0, 151.0, 151.0),
    "checkfree": (91.3, 91.3, 92.1),
    "checkfree+": (91.3, 91.3, 92.1),
}
"""Seconds, by rate."""
PAPER_TRAIN: Final[Mapping[str, Sequence[float]]] = {
    "checkpoint": (558.2, 621.7, 634.4),
    "redundant": (419.6, 419.6, 419.6),
    "checkfree": (367.8, 405.9, 563.0),
    "checkfree+": (355.1, 367.8, 460.6),
}
"""Hours, by rate."""
TARGET: Final = PAPER_ITERATION["checkpoint"][0]

MICROBATCH: Final = 4
"""Samples; half of it with redundant computation, as in the paper."""
FLOPS: Final = 0.4 * 989e12 * 8 / 20
"""Of a node: 20 nodes share 8 H100, at 40 % of their bf16 peak."""
MEMORY: Final = 3.35e12 * 8 / 20
"""Bytes a second of a node, likewise."""
STORAGE: Final = 500.0
"""Mbit/s of the checkpoints' folder (the paper's footnote 2)."""
REPLICAS, SITES, VOCABULARY, MOST_MICROBATCHES = 3, 5, 94_000, 8192
RUN: Final = f"""
[model]
preset = "medium"
vocabulary = {VOCABULARY}
[training]
precision = "bf16"
in_flight = 7  # one for each stage, as in 1F1B
[recovery]
checkpoint.every = 100
relearn.passes = 0
[wire]
activations = "bf16"
gradients = "bf16"
"""


@dataclass(frozen=True)
class Drawn:
    """Sites in the order of the stages, and what came of them."""

    sites: tuple[str, ...]
    batch: int  # samples
    iteration: Mapping[str, tuple[float, ...]]
    """Policy -> seconds of an iteration by rate, stalls included."""
    train: Mapping[str, tuple[float, ...]]
    """Policy -> hours by rate, with the paper's iterations."""
    rolled_back: tuple[float, ...]
    """Hours of checkpointing by rate, when what it has to make again is simulated too."""


def iterations(policy: str) -> tuple[int, ...]:
    """Iterations that the paper's runs took to its validation loss of 2.85, by rate: train time
    over iteration time."""
    pairs = zip(PAPER_TRAIN[policy], PAPER_ITERATION[policy], strict=True)
    return tuple(round(hours * HOUR / seconds) for hours, seconds in pairs)


def lab_factors(results: Path) -> dict[str, tuple[float, ...]]:
    """Policy -> by rate, iterations to a loss for each that a run without losses takes. Raises
    StudyError."""
    by_run = read_runs(results)
    factors: dict[str, tuple[float, ...]] = {"redundant": (1.0,) * len(LAB_RATES)}
    for policy in ("checkpoint", "checkfree", "checkfree+"):
        factors[policy] = tuple(more_iterations(by_run, f"{policy}, {rate}") for rate in LAB_RATES)
    return factors


def swarm(places: Sequence[str], links: Sequence[Link], policy: str, batch: int) -> Swarm:
    """Three nodes for each of seven stages; a stage's are at one site (the paper's note 4)."""
    microbatch = MICROBATCH // 2 if policy == "redundant" else MICROBATCH
    run = _run(policy, batch, microbatch)
    config = model_config(run.model, VOCABULARY)
    seconds = {s: seconds_at(run, config, s, FLOPS, MEMORY) for s in range(config.stages + 1)}
    uniform_swarm = uniform(run, config, sites(links), seconds, REPLICAS, places)
    return Swarm(
        uniform_swarm.run, config, uniform_swarm.groups, uniform_swarm.network, storage_mbps=STORAGE
    )


def _run(policy: str, batch: int, microbatch: int, steps: int = 1) -> RunFile:
    changes = {"training__batch": batch, "training__microbatch": microbatch}
    return override(loads(RUN), **changes, recovery__policy=policy, steps=steps)


def fit_batch(places: Sequence[str], links: Sequence[Link]) -> int:
    """The batch with which an iteration of checkpointing takes closest to `TARGET`."""

    @cache
    def seconds(microbatches: int) -> float:
        checkpointing = swarm(places, links, "checkpoint", microbatches * MICROBATCH)
        return simulate_step(checkpointing, steps=2).seconds

    low, high = 1, 2
    while seconds(high) < TARGET and high < MOST_MICROBATCHES:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) < TARGET else (low, middle)
    return MICROBATCH * min((low, high), key=lambda count: abs(seconds(count) - TARGET))


def draw(links: Sequence[Link], seed: int, number: int) -> Drawn:
    """The `number`-th choice of five sites, and the four policies there."""
    names = sorted({site for link in links for site in link[:2]})
    chosen = np.random.default_rng([seed, number]).permutation(len(names))[:SITES]
    places = tuple(names[i] for i in chosen)
    batch = fit_batch(places, links)
    iteration: dict[str, tuple[float, ...]] = {}
    hours: dict[str, tuple[float, ...]] = {}
    for policy in PAPER_ITERATION:
        simulated = swarm(places, links, policy, batch)
        lasting = [*_lasting(simulated, policy, seed, number, iterations(policy))]
        iteration[policy] = tuple(seconds for seconds, _ in lasting)
        hours[policy] = tuple(whole for _, whole in lasting)
    lossless = iterations("redundant")
    simulated = swarm(places, links, "checkpoint", batch)
    again = tuple(
        whole for _, whole in _lasting(simulated, "checkpoint", seed, number, lossless, True)
    )
    return Drawn(places, batch, iteration, hours, again)


def _lasting(
    simulated: Swarm,
    policy: str,
    seed: int,
    number: int,
    wanted: Sequence[int],
    rolled_back: bool = False,
) -> Iterator[tuple[float, float]]:
    """For each rate, seconds an iteration and hours until `wanted` of them are made. They are all
    made iterations, or, with `rolled_back`, those that count in the end."""
    for rate, count in zip(RATES.values(), wanted, strict=True):
        run = override(simulated.run, steps=count)
        training = Swarm(
            run,
            simulated.config,
            simulated.groups,
            simulated.network,
            storage_mbps=simulated.storage_mbps,
        )
        churn = Churn(
            hourly=rate,
            of="stage",
            stages=tuple(range(1, simulated.config.stages + 1)),
            replacement=0.0,
        )
        outcome = simulate_run(training, churn, seed=number + 1000 * seed)
        each = outcome.seconds / outcome.iterations
        yield each, (outcome.seconds if rolled_back else each * count) / HOUR


def table(drawn: Sequence[Drawn], factors: Mapping[str, Sequence[float]] | None) -> str:
    """Markdown: medians over the draws, with the range of nine in ten."""
    lines = [
        "| policy, rate | paper, s an iteration | ours | paper, h to the loss | ours, with the "
        "paper's iterations | ours, with our lab's |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lossless = iterations("redundant")[0]
    for policy in PAPER_ITERATION:
        for column, rate in enumerate(RATES):
            seconds = [choice.iteration[policy][column] for choice in drawn]
            hours = [choice.train[policy][column] for choice in drawn]
            lab = "-"
            if factors is not None:
                count = lossless * factors[policy][column]
                lab = f"{statistics.median(s * count / HOUR for s in seconds):.0f}"
            cells = (
                f"{policy}, {rate}",
                f"{PAPER_ITERATION[policy][column]:.1f}",
                _spread(seconds, 1),
                f"{PAPER_TRAIN[policy][column]:.1f}",
                _spread(hours, 0),
                lab,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def findings(drawn: Sequence[Drawn], factors: Mapping[str, Sequence[float]] | None) -> str:
    """What the table shows, in sentences."""
    ratios = [
        choice.iteration["redundant"][0] / choice.iteration["checkpoint"][0] for choice in drawn
    ]
    paper = PAPER_ITERATION["redundant"][0] / PAPER_ITERATION["checkpoint"][0]
    lines = [
        f"An iteration with redundant computation takes {_spread(ratios, 2)} of one with "
        f"checkpoints; {paper:.2f} in the paper.",
        f"Batch, samples: {_spread([choice.batch for choice in drawn], 0)}.",
    ]
    lossless = iterations("redundant")[0]
    for column, rate in enumerate(RATES):
        train, iteration = (
            {
                policy: statistics.median(
                    getattr(choice, figures)[policy][column] for choice in drawn
                )
                for policy in PAPER_TRAIN
            }
            for figures in ("train", "iteration")
        )
        theirs = _order({policy: hours[column] for policy, hours in PAPER_TRAIN.items()})
        same = sum(
            _order({policy: hours[column] for policy, hours in choice.train.items()}) == theirs
            for choice in drawn
        )
        text = (
            f"At {rate}: paper {theirs}; ours with its iterations {_order(train)} by the medians, "
            f"the paper's order in {same} of {len(drawn)} choices"
        )
        if factors is not None:
            ours = {policy: factors[policy][column] * iteration[policy] for policy in iteration}
            text += f"; with our lab's {_order(ours)}"
        back = _spread([choice.rolled_back[column] for choice in drawn], 0)
        text += f". Checkpointing until {lossless:,} iterations count, simulated: {back} h."
        lines.append(text)
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _order(hours: Mapping[str, float]) -> str:
    return " < ".join(sorted(hours, key=hours.__getitem__))


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
