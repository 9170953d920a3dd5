"""Measures what each policy costs a real swarm whose links have delay and bandwidth.

A swarm of processes trains behind emulated links (emulation.py), once for each policy and block. It
loses a stage near the end. A block measures each policy once; their order rotates from block to
block, so that variations of the machine's speed affect all alike. Each measurement is a line of a
file. After an interruption, the study continues there.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from planaria.node.commands.terminal import console
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import resolve, text_to_prepare
from planaria.node.local.loss_schedule import parse_kill
from planaria.node.local.plan import SwarmPlan
from planaria.node.run_file import RunFile, override
from planaria_lab.emulation.emulation import Emulation, emulate
from planaria_lab.emulation.links import Link, Network
from planaria_lab.emulation.live_swarm import (
    FIRST,
    LiveError,
    MeasuredSwarm,
    OnStep,
    measure,
    train,
)
from planaria_lab.emulation.relay import NETWORK
from planaria_lab.origin import origin

PLAIN: Final = "plain"
POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {
        "recovery__policy": "checkpoint",
        "recovery__checkpoint__every": 1_000_000,
        "recovery__relearn__passes": 0,
    },
    "auto": {"recovery__policy": "auto"},
    "checkfree": {"recovery__policy": "checkfree"},
    "checkfree+": {"recovery__policy": "checkfree+"},
    "snapshot": {"recovery__policy": "snapshot"},
    "checkpoint": {"recovery__policy": "checkpoint"},
    "redundant": {"recovery__policy": "redundant"},
}
"""Policy name -> changes to the run. `plain` keeps no state for a loss, since it ends before its
first checkpoint. The others are compared with it."""
RUN: Final = """
name = "live"
steps = 30
[model]
preset = "tiny"
stages = 4
[training]
batch = 16
microbatch = 2
validation_microbatches = 0
"""
KILL: Final = "2@25"
SAMPLES, FIGURES, TABLE = "samples.jsonl", "live.json", "table.md"
SCRATCH: Final = Path("out/live")
"""Folder to which swarms write. The results have what is needed of it."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one policy's swarm in one block."""

    block: int
    policy: str
    measured: MeasuredSwarm


SAMPLE: Final = TypeAdapter(Sample)


# --- the measurement


def with_data(run: RunFile) -> RunFile:
    """The run, resolved except for the policy. The shipped prose is prepared if the run names no
    other data. Raises RunFileError, CorpusError."""
    text = text_to_prepare(run)
    if text is not None:
        prepare(Recipe([str(text)]), Path(run.data.path))
    return resolve(override(run, recovery__policy="checkfree"))


@dataclass(frozen=True)
class Setting:
    """The setting of a study. Samples of different settings can't be mixed. Raises LiveError,
    SwarmError."""

    run: RunFile  # its policy is replaced by each measured one
    network: Network
    kills: tuple[str, ...]  # as STAGE@STEP

    def __post_init__(self) -> None:
        if early := [text for text in self.kills if parse_kill(text, self.run).step <= FIRST]:
            raise LiveError(
                f"--kill {early[0]}: seconds a step are measured from step {FIRST} to the first "
                f"kill, so choose a step after {FIRST}"
            )

    def header(self) -> dict[str, Any]:
        """The first line of the file of samples."""
        open_to_policies = {"data": {"path"}, "recovery": {"policy"}}
        run = self.run.model_dump(mode="json", exclude_none=True, exclude=open_to_policies)
        network = NETWORK.dump_python(self.network, mode="json")
        return {"live": 1, "run": run, "network": network, "kills": [*self.kills]}


def at_sites(
    nodes: Sequence[str], sites: Sequence[str], links: Sequence[Link], uplink: float | None = None
) -> Network:
    """A network with the registry at the first site and the nodes at all sites in turn, so that
    neighbouring stages are at different sites. Each site sends at most `uplink` Mbit/s to all
    others together. Raises LinkError."""
    placed = {nodes[0]: sites[0]}
    placed |= {node: sites[number % len(sites)] for number, node in enumerate(nodes[1:])}
    return Network(placed, links, {} if uplink is None else dict.fromkeys(sites, uplink))


def open_samples(path: Path, setting: Setting) -> list[Sample]:
    """Reads the samples in the file, and drops an unfinished line. Creates the file with the
    setting if it is missing. Raises LiveError."""
    header = setting.header()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # without the rest of an interrupted write
        lines = [json.loads(line) for line in whole.splitlines()] or [header]
        if differ := ", ".join(key for key in header if lines[0].get(key) != header[key]):
            raise LiveError(
                f"{path} has results of other settings ({differ}): choose another --out, or "
                "remove the file"
            )
        if whole != text or not text:
            path.write_text(whole or json.dumps(header | origin()) + "\n", encoding="utf-8")
        return [SAMPLE.validate_python(line) for line in lines[1:]]
    except (OSError, ValueError, AttributeError) as error:
        raise LiveError(f"can't use {path}: {error}; remove it to start again") from error


def schedule(policies: Sequence[str], blocks: int) -> Iterator[tuple[int, str]]:
    """Pairs (block, policy) in the order of measuring. Each block begins with another policy."""
    for block in range(blocks):
        shift = block % len(policies)
        for policy in (*policies[shift:], *policies[:shift]):
            yield block, policy


def measure_all(
    setting: Setting, policies: Sequence[str], blocks: int, device: str, out: Path
) -> list[Sample]:
    """Measures the swarms that are missing in `out`, and returns all samples. Raises LiveError,
    EmulationError, RunFileError, CorpusError, SwarmError."""
    if unknown := set(policies) - POLICIES.keys():
        raise LiveError(f"--policy {min(unknown)}: unknown; choose from {', '.join(POLICIES)}")
    path = out / SAMPLES
    samples = open_samples(path, setting)
    done = {(sample.block, sample.policy) for sample in samples}
    todo = [turn for turn in schedule(policies, blocks) if turn not in done]
    if not todo:
        return samples
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[unit]}"), TimeElapsedColumn()),
    )
    with emulate(setting.network) as links, Progress(*columns, console=console) as progress:
        swarms = progress.add_task("in all", total=len(todo), unit="swarms")
        for block, policy in todo:
            name = f"block {block + 1}, {policy}"
            task = progress.add_task(name, total=setting.run.steps, unit="steps")
            on_step = partial(_show, progress, task)
            sample = _measure_one(setting, block, policy, device, links, on_step)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(SAMPLE.dump_python(sample, mode="json") | origin()) + "\n")
            samples.append(sample)
            progress.console.print(f"{name}: {_in_short(sample)}", soft_wrap=True, highlight=False)
            progress.remove_task(task)
            progress.advance(swarms)
    return samples


def _show(progress: Progress, task: TaskID, step: int) -> None:
    progress.update(task, completed=step)


def _measure_one(
    setting: Setting, block: int, policy: str, device: str, links: Emulation, on_step: OnStep
) -> Sample:
    folder = SCRATCH / f"{block + 1}-{policy}"
    shutil.rmtree(folder, ignore_errors=True)  # the files of an interrupted swarm
    plan = SwarmPlan(plan_run(setting.run, policy, folder), folder, None, device, links.homes)
    kills = [parse_kill(text, plan.run) for text in setting.kills]
    with links.inside("registry"):
        carried = asyncio.run(train(plan, kills, links, on_step))
    return Sample(block, policy, measure(folder, kills, carried))


def plan_run(run: RunFile, policy: str, folder: Path) -> RunFile:
    """The resolved run of this policy's swarm. Raises RunFileError, CorpusError."""
    shared = str((folder / "checkpoints").absolute())
    return resolve(override(run, **POLICIES[policy], recovery__checkpoint__dir=shared))


def _in_short(sample: Sample) -> str:
    """A line for the terminal about a sample."""
    stalls = ", ".join(f"{loss.stall:.1f} s" for loss in sample.measured.losses) or "none"
    return (
        f"{statistics.median(sample.measured.step_seconds):.3f} s a step, "
        f"{decimal(round(sample.measured.step_bytes))} a step, stalls: {stalls}; "
        f"packets {sample.measured.late * 1e3:.1f} ms late"
    )


# --- results


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; for a single value, all three are that value."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {"low": low, "median": middle, "high": high}


def figures(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Policy -> its figures over all blocks. `against_plain` has ratios of a block's medians."""
    by_policy: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.block):
        by_policy.setdefault(sample.policy, []).append(sample)
    plain = {
        sample.block: statistics.median(sample.measured.step_seconds)
        for sample in by_policy.get(PLAIN, ())
    }
    return {name: _figures(by_policy[name], plain) for name in POLICIES if name in by_policy}


def _figures(samples: Sequence[Sample], plain: Mapping[int, float]) -> dict[str, Any]:
    steps = [seconds for sample in samples for seconds in sample.measured.step_seconds]
    ratios = [
        statistics.median(sample.measured.step_seconds) / plain[sample.block]
        for sample in samples
        if sample.block in plain
    ]
    lost = [loss for sample in samples for loss in sample.measured.losses]
    row: dict[str, Any] = {
        "swarms": len(samples),
        "steps": len(steps),
        "step_seconds": {**quartiles(steps), "mean": statistics.fmean(steps)},
        "step_bytes": quartiles([sample.measured.step_bytes for sample in samples]),
        "dropped": sum(sample.measured.dropped for sample in samples),
        "late": max(sample.measured.late for sample in samples),
    }
    if ratios:
        row["against_plain"] = quartiles(ratios)
    if lost:
        row["methods"] = sorted({loss.method for loss in lost})
        row["stall_seconds"] = quartiles([loss.stall for loss in lost])
        row["caught_up_seconds"] = quartiles([loss.caught_up for loss in lost])
    return row


def table(figures_of: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a table in Markdown. Ranges are from the lower to the upper quartile."""
    rows = [
        "| policy | swarms | seconds a step | mean | of plain | bytes a step | rebuilt by "
        "| stall, s | caught up, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for name, row in figures_of.items():
        steps = row["step_seconds"]
        cells = [
            name,
            str(row["swarms"]),
            _spread(steps, 3),
            f"{steps['mean']:.3f}",
            _spread(row.get("against_plain"), 3),
            decimal(round(row["step_bytes"]["median"])),
            ", ".join(row.get("methods", ())) or "-",
            _spread(row.get("stall_seconds"), 1),
            _spread(row.get("caught_up_seconds"), 1),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _spread(quartiles: Mapping[str, float] | None, digits: int) -> str:
    if quartiles is None:
        return "-"
    middle, low, high = (f"{quartiles[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def machine() -> str:
    """A description of this machine: cores, kernel, versions of Python and torch."""
    return (
        f"{os.cpu_count()} cores of {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def write_results(setting: Setting, samples: Sequence[Sample], out: Path) -> str:
    """Writes the figures to `out`, as JSON and as a table. Returns the table."""
    measured = figures(samples)
    content = {"machine": machine(), "setting": setting.header(), "policies": measured}
    (out / FIGURES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (out / TABLE).write_text(table(measured), encoding="utf-8")
    return table(measured)
