"""Train, lose, save and export a model of 124M parameters, and a stage of one of 1.2G, and compare
the memory with `planaria plan`.

Both are swarms of processes as on rented machines. Contexts are so short that a processor computes
a step in seconds; weights, gradients and Adam's moments have their full size. The ratio is the peak
memory of each node (VmHWM) without its libraries, over what the plan says that a node of its stage
needs. A node of the preset `tiny` in the same run gives the memory of the libraries.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Living, Watched, swarm
from planaria_lab.planning.memory import at_a_loss, needed, whole

MB = 1e6
RUN = """
name = "large"
steps = 4
[training]
optimizer = "adamw"
batch = 2
microbatch = 1
lr = 3e-4
validation_microbatches = 0
[saves]
every = 1
"""
TINY = {"model__preset": "tiny", "model__stages": 2, "model__layers": 2}
GPT2 = {  # 124M parameters, as the smallest GPT-2
    "model__dim": 768,
    "model__heads": 12,
    "model__layers": 12,
    "model__stages": 4,
    "model__vocabulary": 50_257,
    "model__tied": True,
    "model__context": 256,
}
LARGE = {  # two of the 24 blocks of the preset
    "model__preset": "large",
    "model__layers": 2,
    "model__stages": 1,
    "model__context": 128,
}
MIDDLE = 2  # the stage of the model of 124M that is lost


class Swarm:
    """A run whose nodes may be lost and replaced; each has a folder of saves."""

    def __init__(self, run: RunFile, saves: Path) -> None:
        self.run, self.saves = run, saves
        self.most: dict[str, int] = {}  # bytes, by slot

    def node(self, slot: str) -> list[str]:
        stage, _, _ = slot.partition(".")
        arguments = ["--save-dir", str(self.saves / slot)]
        return ["node", "--stage", stage, "--threads", "1", "--seats", "1", *arguments]

    def nodes(self, replicas: Mapping[int, int]) -> dict[str, list[str]]:
        slots = [
            f"{stage}.{number}" for stage, count in replicas.items() for number in range(count)
        ]
        return {slot: self.node(slot) for slot in slots}

    def until(self, look: Living, step: int) -> None:
        while not (lines := look()) or lines[-1]["step"] < step:
            for slot, process in look.processes.running().items():
                self.most[slot] = max(self.most.get(slot, 0), high_water(process))
            time.sleep(0.1)

    def exported(self, run_file: Path, out: Path, *options: str) -> float:
        """Export the saves to `out`, with these options; return the seconds."""
        started = time.monotonic()
        command = [sys.executable, "-m", "planaria", "export", *map(str, self.saves.iterdir())]
        command += ["--run", str(run_file), "--out", str(out), *options]
        subprocess.run(command, check=True, capture_output=True)
        return time.monotonic() - started

    def need(self, slot: str, replicas: Mapping[int, int], during: str = "") -> int:
        """Return the bytes that a node needs by the plan. `during`: a part of `at_a_loss` that it
        needs, too."""
        config = self.run.model.config
        counts = [replicas[stage] for stage in range(config.stages + 1)]
        stage = int(slot.partition(".")[0])
        parts = needed(self.run, config, stage, counts, saves=True)
        if during:
            parts[during] = at_a_loss(self.run, config, stage)[during]
        return round(whole(parts).both)


def high_water(process: int) -> int:
    """Return the peak memory of a process in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line), 0)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _summary(event: dict[str, Any]) -> str:
    sources = ", ".join(f"stage {source['stage']}" for source in event["sources"])
    return (
        f"stage {event['stage']} by {event['method']} from {sources}: {event['bytes'] / MB:.0f} MB "
        f"fetched, in place after {event['rebuild_seconds']:.1f} s"
    )


def libraries(run: RunFile, out: Path) -> int:
    """Return the peak bytes of a node of a tiny model."""
    tiny = Swarm(resolve(override(run, **TINY)), out / "saves")
    nodes = tiny.nodes({0: 1, 1: 1, 2: 1})
    with swarm(tiny.run, run_planaria, out, nodes, mortal=nodes) as look:
        tiny.until(look, tiny.run.steps)
    return max(most for slot, most in tiny.most.items() if slot in nodes)


def compare(
    name: str,
    trained: Swarm,
    replicas: Mapping[int, int],
    libraries: int,
    during: Mapping[str, str],
) -> None:
    """Print and keep each node's peak memory and its ratio to the plan. `during`: slot -> what it
    had in memory at a loss besides."""
    for slot, most in sorted(trained.most.items()):
        if slot == "registry":
            continue
        when = during.get(slot, "")
        need = trained.need(slot, replicas, when)
        ratio = (most - libraries) / need
        print(
            f"{name}, node {slot}{f' ({when})' if when else ''}: {most / MB:.0f} MB at most, "
            f"{libraries / MB:.0f} of them the libraries'; the plan says {need / MB:.0f}; "
            f"ratio {ratio:.2f} (goal 0.90 to 1.10)",
            flush=True,
        )
        keep("large", model=name, node=slot, bytes=most, libraries=libraries, needed=need)


def whole_model(run: RunFile, out: Path, base: int) -> None:
    """Train 124M parameters in four body stages, lose one stage, then all, and export the model."""
    name, steps = "124M", run.steps
    run = resolve(override(run, **GPT2, steps=steps + 2))
    replicas = dict.fromkeys(range(GPT2["model__stages"] + 1), 1)
    trained = Swarm(run, out / "saves")
    nodes, lost = trained.nodes(replicas), f"{MIDDLE}.0"
    with swarm(run, run_planaria, out / "first", nodes, mortal=[lost]) as look:
        watched = Watched(look, look.processes.logs)
        trained.until(look, steps // 2)
        look.processes.kill(lost)
        other = f"{MIDDLE}.1"
        look.processes.start(other, [*trained.node(other), *look.where])
        trained.until(look, steps)
        lines = look()
        for event in watched.events("rebuilt"):
            print(f"{name}, {_summary(event)}", flush=True)
            keep("large", model=name, rebuilt=event)
    seconds = statistics.median(line["seconds"] for line in lines)
    print(
        f"{name}: {seconds:.1f} s a step of {_tokens(run)} tokens; now all get SIGKILL", flush=True
    )
    nodes = trained.nodes(replicas) | {other: trained.node(other)}
    del nodes[lost]
    with swarm(run, run_planaria, out / "again", nodes, mortal=nodes) as look:
        trained.until(look, run.steps)
        lines = look()
    began = lines[0]["step"]
    print(
        f"{name}: went on at step {began}, {folder_size(trained.saves) / MB:.0f} MB of saves",
        flush=True,
    )
    exported = out / "exported"
    took = trained.exported(out / "again" / "run.toml", exported)
    print(f"{name}: exported, {folder_size(exported) / MB:.0f} MB in {took:.1f} s", flush=True)
    keep("large", model=name, step_seconds=seconds, again=began, export_seconds=took)
    compare(name, trained, replicas, base, {other: "relearning"})


def large_stage(run: RunFile, out: Path, base: int) -> None:
    """Train two of the 24 blocks of `large` as a stage of two nodes; a third node gets the state
    from both."""
    name = "1.2G"
    run = resolve(override(run, **LARGE, swarm__replicas=3, swarm__start_grace=5))
    trained = Swarm(run, out / "saves")
    nodes, third = trained.nodes({0: 1, 1: 2}), "1.2"
    with swarm(run, run_planaria, out / "run", nodes, mortal=[*nodes, third]) as look:
        watched = Watched(look, look.processes.logs)
        trained.until(look, 1)
        look.processes.start(third, [*trained.node(third), *look.where])
        while not (joined := [e for e in watched.events("rebuilt") if len(e["sources"]) > 1]):
            trained.until(look, look()[-1]["step"] + 1)
        trained.until(look, look()[-1]["step"] + 1)
    for event in joined:
        print(f"{name}, {_summary(event)}", flush=True)
        keep("large", model=name, rebuilt=event)
    print(f"{name}: {folder_size(trained.saves) / MB:.0f} MB of saves", flush=True)
    compare(name, trained, {0: 1, 1: 3}, base, dict.fromkeys(("1.0", "1.1"), "a newcomer"))


def _tokens(run: RunFile) -> int:
    return run.training.batch * run.model.config.context


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        run = override(loads(RUN), data__path=str(folder / "data"))
        base = libraries(run, folder / "tiny")
        whole_model(run, folder / "whole", base)
        large_stage(override(run, steps=100), folder / "large", base)


if __name__ == "__main__":
    main()
