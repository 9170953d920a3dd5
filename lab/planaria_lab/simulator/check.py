"""Compares the simulator with live swarms: processes and sockets behind emulated links.

Nothing is fitted to a swarm that is predicted. The inputs of a prediction are measured elsewhere.
The seconds of each task are measured in this process alone. Swarms without delays (`CALIBRATIONS`)
give the seconds of a frame and of a message. They also give a newcomer's seconds to start, and the
additional seconds of its first step. Both depend on the policy, as each policy loads other code.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter

from planaria.node.local.loss_schedule import Kill, parse_kill
from planaria.node.local.plan import SwarmPlan
from planaria.node.model.modules import BodyStage, EmbeddingStage, build_stage
from planaria.node.model.shape import PRESETS, ModelConfig, model_config
from planaria.node.report.event_log import LineReader
from planaria.node.report.events import (
    Committed,
    Entry,
    Joined,
    Killed,
    StageRebuilt,
    Started,
    entries,
)
from planaria.node.run_file import RunFile, loads, override
from planaria.node.stage.optimizer import StageOptimizer
from planaria.recovery.facts import COPIED
from planaria.recovery.learner import Learner, learn
from planaria_lab.emulation.emulation import emulate
from planaria_lab.emulation.links import WAN_LINKS, Network, all_alike, read_links
from planaria_lab.emulation.live_study import POLICIES, at_sites, machine, plan_run, with_data
from planaria_lab.emulation.live_swarm import LiveError, machines, measure, train
from planaria_lab.origin import origin
from planaria_lab.simulator.churn import Churn, LostPlace
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.step import simulate_step
from planaria_lab.simulator.swarm import (
    Group,
    Seconds,
    Swarm,
    Transport,
    relearned_at_a_time,
    sites,
)

SAMPLES, TABLE = "check.jsonl", "check.md"
SCRATCH: Final = Path("out/check")
STEPS: Final = 24
GOALS: Final = {"step": 0.10, "stall": 0.25}
"""Predicted figure -> highest median error that counts as met."""
REPEATS: Final = 15  # timed runs of a task
MOST_SECONDS: Final = 0.1  # upper bound of the fitted seconds of a frame
LOOKED_AT: Final = 6  # simulated steps


@dataclass(frozen=True)
class LiveCase:
    """A live swarm to compare with. All links are alike; with `sites`, they follow its table."""

    name: str
    policy: str = "plain"  # a key of POLICIES in emulation/live_study.py
    preset: str = "tiny"
    stages: int = 4
    replicas: int = 1
    batch: int = 16
    kill: str = "2@16"
    delay: float = 40.0  # ms
    mbps: float = 100.0
    sites: tuple[str, ...] = ()
    codec: str = "none"

    def run(self) -> RunFile:
        """The run file, not resolved and without a policy. Raises RunFileError."""
        preset = PRESETS[self.preset]
        text = 'name = "check"\n[training]\nmicrobatch = 2\nvalidation_microbatches = 0\n'
        return override(
            loads(text),
            training__optimizer="adamw",
            steps=STEPS,
            model__preset=self.preset,
            model__stages=self.stages,
            model__layers=preset.layers // preset.stages * self.stages,
            training__batch=self.batch,
            training__in_flight=self.stages + 1,  # as when lab/results/simulator was measured
            swarm__replicas=self.replicas,
            wire__activations=self.codec,
            wire__gradients=self.codec,
        )

    def network(self, names: Sequence[str]) -> Network:
        """The network of the registry and the nodes. Raises LinkError."""
        if self.sites:
            return at_sites(names, self.sites, read_links(WAN_LINKS))
        return all_alike(names, self.delay, self.mbps)


CASES: Final = (
    LiveCase("one node a stage"),
    LiveCase("three sites", "checkfree", sites=("Iowa", "Oregon", "LA")),
    LiveCase("swapped orders", "checkfree+", delay=20.0, kill="1@16"),
    LiveCase("redundant", "redundant", delay=20.0, kill="3@16"),
    LiveCase("snapshots, slow links", "snapshot", mbps=20.0),
    LiveCase("checkpoints, wide", "checkpoint", delay=80.0, kill="1@16"),
    LiveCase("two replicas, one lost", stages=3, replicas=2, delay=30.0, kill="2.1@16"),
    LiveCase("two replicas, both lost", "checkfree", stages=3, replicas=2, delay=30.0),
    LiveCase("two replicas, slow links", "checkfree", stages=2, replicas=2, delay=15.0, mbps=40.0),
    LiveCase("two replicas, farther", "snapshot", stages=3, replicas=2, delay=45.0, kill="1.1@16"),
    LiveCase("larger, bf16 on the wire", "checkfree", preset="mini", delay=10.0, codec="bf16"),
)


@dataclass(frozen=True)
class Live:
    """The measurements of a live swarm, in seconds."""

    case: str
    steps: tuple[float, ...]  # between commits, after links have settled and before the kill
    stall: float  # from the SIGKILL to the next commit
    start: float  # from the SIGKILL until the newcomer has joined
    after: float  # from the first begin with the newcomer, or without the lost, to the next commit
    late: float  # mean delay of packets that the relay itself caused

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)


LIVE: Final = TypeAdapter(Live)
CALIBRATIONS: Final = {
    policy: LiveCase(f"no delay, {policy}", policy, delay=0.0, mbps=1000.0)
    for policy in sorted({case.policy for case in CASES})
}
PLAIN: Final = CALIBRATIONS["plain"]


# --- live


def measure_case(case: LiveCase, device: str, on_step: Callable[[int], None]) -> Live:
    """Runs the swarm in network namespaces, and returns its measurements. This needs root. Raises
    LiveError, EmulationError, RunFileError, CorpusError, SwarmError."""
    run = with_data(case.run())
    folder = SCRATCH / case.name.replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    with emulate(case.network(machines(run))) as links:
        plan = SwarmPlan(plan_run(run, case.policy, folder), folder, None, device, links.homes)
        kills = [parse_kill(case.kill, plan.run)]
        with links.inside("registry"):
            carried = asyncio.run(train(plan, kills, links, on_step))
    measured = measure(folder, kills, carried)
    events = entries(LineReader(folder / "events.jsonl").lines())
    return Live(case.name, tuple(measured.step_seconds), *after_kill(events), late=measured.late)


def after_kill(events: Sequence[Entry]) -> tuple[float, float, float]:
    """The fields `stall`, `start` and `after` of `Live`, from a swarm's events in the order of
    time. Raises LiveError if there is no kill, or no commit or join after it."""
    kills = [(entry.time, entry.event.step) for entry in events if isinstance(entry.event, Killed)]
    if not kills:
        raise LiveError("the swarm ended before a node was killed")
    killed, step = kills[0]
    later = [entry for entry in events if entry.time > killed]
    commits = [entry.time for entry in later if isinstance(entry.event, Committed)]
    pid = next((entry.event.pid for entry in later if isinstance(entry.event, Started)), None)
    joined = [
        entry.time for entry in later if isinstance(entry.event, Joined) and entry.event.pid == pid
    ]
    begun = [
        entry.time
        for entry in later
        if isinstance(entry.event, StageRebuilt) and entry.event.method not in COPIED
    ]
    if not (commits and joined):
        raise LiveError(f"after the kill at step {step} no step was committed, or no node joined")
    begin = next((time for time in begun if time < commits[0]), commits[0])
    return commits[0] - killed, joined[0] - killed, commits[0] - begin


def read_samples(path: Path) -> list[Live]:
    """Reads the samples so far, and drops an unfinished line from the file. Creates the file with a
    header if it is missing. Raises LiveError."""
    header = {"check": 1, "machine": machine(), "steps": STEPS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()] or [header]
        if header.items() - lines[0].items():
            raise LiveError(
                f"{path} has results of other settings or of another machine: choose another "
                "--out, or remove the file"
            )
        path.write_text(whole or json.dumps(origin() | header) + "\n", encoding="utf-8")
        return [LIVE.validate_python(line) for line in lines[1:]]
    except (OSError, ValueError) as error:
        raise LiveError(f"can't use {path}: {error}; remove it to start again") from error


def missing(samples: Sequence[Live], blocks: int) -> list[LiveCase]:
    """The cases still to be measured, block by block. Each case is measured once in each block."""
    done = [sample.case for sample in samples]
    turns = [(block, case) for block in range(blocks) for case in (*CALIBRATIONS.values(), *CASES)]
    return [case for block, case in turns if done.count(case.name) <= block]


def append(path: Path, sample: Live) -> None:
    """Appends the sample to the file as a JSON row."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(LIVE.dump_python(sample, mode="json") | origin()) + "\n")


# --- simulated


@dataclass(frozen=True)
class Calibration:
    """The figures from which stalls and steps are predicted, measured without delays."""

    transport: Transport
    cores: int
    start: Mapping[str, float]  # policy -> seconds from a kill until a newcomer has joined
    warm_up: Mapping[str, float]  # policy -> additional seconds of a newcomer's first step


def time_tasks(run: RunFile, config: ModelConfig, stage: int) -> Seconds:
    """Median seconds of each task of one stage, measured in this process on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_tasks(run, config, stage)
    finally:
        torch.set_num_threads(before)


def _time_tasks(run: RunFile, config: ModelConfig, stage: int) -> Seconds:
    module = build_stage(config, stage, seed=0)
    optimizer = StageOptimizer(module, torch.device("cpu"))
    shape = (run.training.microbatch, config.context)
    tokens = torch.zeros(shape, dtype=torch.int64)
    activation = torch.zeros(*shape, config.crossing)
    gradient = optimizer.gradient.clone()

    def apply() -> None:
        optimizer.step(1e-9)
        optimizer.zero_gradient()
        optimizer.digest()

    rest = {
        "norm": _median(optimizer.squared_norm),
        "apply": _median(apply),
        "add": _median(partial(gradient.add_, optimizer.gradient)) + _median(gradient.clone),
    }

    def crossing() -> torch.Tensor:
        return activation.clone().requires_grad_()

    if isinstance(module, EmbeddingStage):
        loss = _median(lambda: module.loss(crossing(), tokens).backward())  # type: ignore[no-untyped-call]
        return Seconds(
            forward=_median(lambda: module.embed(tokens)),
            backward=_back(lambda: module.embed(tokens), activation),
            head=loss,
            **rest,
        )
    assert isinstance(module, BodyStage)
    forward = _median(lambda: module(crossing()))
    backward = _back(lambda: module(crossing()), activation)
    chain = [Learner(module, 1e-9, run.training.precision == "bf16")]
    inputs = torch.randn(relearned_at_a_time(run, config), config.context, config.crossing)
    relearn = _median(lambda: learn(chain, inputs, 2 * inputs))
    return Seconds(forward, backward, relearn=relearn, **rest)


def _back(forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> float:
    """Median seconds of a backward pass. The forward passes aren't timed."""
    outputs = iter([forward() for _ in range(REPEATS + 1)])
    return _median(lambda: next(outputs).backward(gradient))  # type: ignore[no-untyped-call]


def _median(task: Callable[[], object]) -> float:
    task()  # the first run may be slower
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


Timed = Callable[[RunFile, ModelConfig, int], Seconds]


def swarm_of(
    case: LiveCase, vocabulary: int, transport: Transport, cores: int, timed: Timed
) -> Swarm:
    """The swarm of the case for the simulator. Each node is a group, as it has its own site."""
    run = override(case.run(), **POLICIES[case.policy])
    config = model_config(run.model, vocabulary)
    seconds = {stage: timed(run, config, stage) for stage in range(min(2, config.stages + 1))}
    names = machines(run)
    network = case.network(names)
    groups = []
    for name in names[1:]:
        stage = int(name.partition(".")[0])
        groups.append(Group(stage, 1, network.sites[name], seconds[min(1, stage)]))
    every = sites(network.links, network.uplinks, network.sites.values())
    place = network.sites["registry"]
    return Swarm(run, config, tuple(groups), every, transport, cores, registry=place)


def calibrate(samples: Sequence[Live], vocabulary: int, timed: Timed = time_tasks) -> Calibration:
    """The calibration from the samples of swarms without delays.

    The seconds of a frame and of a message are equal. They are fitted so that a simulated step of
    the case `PLAIN` is as long as its live step. Raises LiveError if that wasn't measured.
    """
    by_case: dict[str, list[Live]] = {}
    for sample in samples:
        by_case.setdefault(sample.case, []).append(sample)
    if PLAIN.name not in by_case:
        raise LiveError(
            f"the swarm {PLAIN.name!r} was not measured, so nothing can be predicted: let the "
            "check run to its end"
        )
    step = statistics.median(sample.step for sample in by_case[PLAIN.name])
    cores = len(os.sched_getaffinity(0))
    plain = swarm_of(PLAIN, vocabulary, Transport(), cores, timed)
    by_policy = {policy: by_case[c.name] for policy, c in CALIBRATIONS.items() if c.name in by_case}

    def seconds(overhead: float) -> float:
        slower = replace(plain, transport=Transport(overhead, overhead))
        return simulate_step(slower, LOOKED_AT).seconds

    low, high = 0.0, MOST_SECONDS
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < step else (low, middle)
    return Calibration(
        Transport(low, low),
        cores,
        {
            policy: statistics.median(sample.start for sample in measured)
            for policy, measured in by_policy.items()
        },
        {
            policy: max(0.0, statistics.median(sample.after - sample.step for sample in measured))
            for policy, measured in by_policy.items()
        },
    )


@dataclass(frozen=True)
class Compared:
    """Live and simulated seconds of a step and a stall. Errors are shares of the live seconds."""

    case: LiveCase
    live_step: float
    step: float
    live_stall: float
    stall: float

    @property
    def step_error(self) -> float:
        return abs(self.step / self.live_step - 1)

    @property
    def stall_error(self) -> float:
        return abs(self.stall / self.live_stall - 1)


def compare(
    samples: Sequence[Live], vocabulary: int, timed: Timed = time_tasks
) -> tuple[Calibration, list[Compared]]:
    """The calibration, and medians of each case that was measured along with its policy's
    calibration. Raises LiveError."""
    calibration = calibrate(samples, vocabulary, timed)
    compared = []
    for case in CASES:
        measured = [sample for sample in samples if sample.case == case.name]
        if not measured or case.policy not in calibration.start:
            continue
        swarm = swarm_of(case, vocabulary, calibration.transport, calibration.cores, timed)
        kill = parse_kill(case.kill, swarm.run)
        compared.append(
            Compared(
                case,
                live_step=statistics.median(sample.step for sample in measured),
                step=simulate_step(swarm, LOOKED_AT).seconds,
                live_stall=statistics.median(sample.stall for sample in measured),
                stall=predicted_stall(
                    swarm, kill, calibration.start[case.policy], calibration.warm_up[case.policy]
                ),
            )
        )
    return calibration, compared


def predicted_stall(swarm: Swarm, kill: Kill, start: float, warm_up: float) -> float:
    """Simulated seconds from the kill to the next commit. The kill happens as soon as the step
    before is committed, and the newcomer starts at once."""
    churn = Churn(
        at={kill.step: (LostPlace(kill.stage, kill.replica),)},
        phase=0.0,
        replacement=0.0,
        start=start,
        warm_up=warm_up,
    )
    return simulate_run(swarm, churn).losses[0].stall


def table(calibration: Calibration, compared: Sequence[Compared]) -> str:
    """The comparison as a table in Markdown, with median errors and the calibration."""
    lines = [
        "| swarm | s a step, live | simulated | error | stall, live | simulated | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in compared:
        cells = (
            f"{row.case.name} ({row.case.policy})",
            f"{row.live_step:.3f}",
            f"{row.step:.3f}",
            f"{row.step_error:.1%}",
            f"{row.live_stall:.2f}",
            f"{row.stall:.2f}",
            f"{row.stall_error:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for figure, goal in GOALS.items():
        errors = [row.step_error if figure == "step" else row.stall_error for row in compared]
        if errors:
            median = statistics.median(errors)
            verdict = "met" if median <= goal else "missed"
            lines += [
                "",
                f"Median error of the {figure}: {median:.1%} (goal {goal:.0%}: {verdict}).",
            ]
    newcomers = ", ".join(
        f"{policy} {calibration.start[policy]:.2f} and {calibration.warm_up[policy]:.2f}"
        for policy in calibration.start
    )
    lines += [
        "",
        f"Calibrated on swarms without delays: {calibration.transport.frame * 1e3:.2f} ms for "
        f"each frame and message at each end; seconds until a newcomer has joined, and more in "
        f"its first step: {newcomers}. {calibration.cores} cores for all nodes. {machine()}.",
    ]
    return "\n".join(lines) + "\n"
