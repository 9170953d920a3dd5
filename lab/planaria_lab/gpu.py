"""Measurements on a GPU that is borrowed for half an hour, or for days (lab/docs/gpu.md).

    python -m planaria_lab.gpu --minutes 25
    python -m planaria_lab.gpu --hours 12 lab/results/paper-124m/study.toml

`pieces` lists the measurements, the most useful first. `next_piece` chooses the first that isn't
done and fits in the time left. Each piece runs in its own process, and adds a row to gpu.jsonl. On
a CPU the same pieces use models of width 64.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from planaria.node.data.corpus import Corpus
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.device import find_device
from planaria.node.machine.processes import run_planaria
from planaria.node.model.shape import PRESETS
from planaria.node.run_file import RunFile, from_fields, override
from planaria_lab.bench import codecs, left, pipeline, stage
from planaria_lab.bench.swarm import swarm
from planaria_lab.convergence.runner import resolved, run_one
from planaria_lab.convergence.study import Study, append_result, jobs, read_results
from planaria_lab.convergence.training import TrainingSwarm
from planaria_lab.origin import ROOT, machine, origin

ROWS: Final = "gpu.jsonl"
LONGEST: Final = 9.0
"""Most minutes of a piece: a borrowed GPU runs a command for ten at most."""
ON_CPU: Final = 0.5
"""Estimated minutes of each piece on a CPU."""
TESTS: Final = "tests/node/stage/test_any_device.py", "lab/tests/convergence/test_any_device.py"


def _shape(preset: str) -> dict[str, int]:
    return {k: v for k, v in PRESETS[preset]._asdict().items() if k != "learning_rate"}


MODELS: Final[Mapping[str, Mapping[str, int]]] = {
    "124M": _shape("small"),
    "500M": _shape("medium"),
    "8B": {
        **{"dim": 4096, "heads": 32, "kv_heads": 8, "layers": 32, "stages": 1},
        **{"context": 2048, "hidden": 14_336},
    },
}
"""Shapes: two presets, by their names in CheckFree, and LLaMA 3 8B."""
SMALL: Final = {"dim": 64, "heads": 4, "hidden": 128, "context": 32}
"""Sizes of every model on a CPU, where each stage has one block."""
POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {"losses": {}},
    "checkfree": {"run": {"recovery": {"policy": "checkfree", "relearn": {"passes": 0}}}},
    "auto": {"run": {"recovery": {"policy": "auto", "snapshot": {"first": 1}}}},
    "snapshot": {"run": {"recovery": {"policy": "snapshot"}}},
}
SEEDS: Final = 3
LOSSES: Final = 10

Figures = dict[str, Any]
"""A row: figures that are equal in every run on a machine, and under `measured` all others."""


class Place(NamedTuple):
    """Where a piece runs."""

    device: torch.device
    data: Path  # folder of prepared data

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"

    def run(self, model: str, training: Mapping[str, Any], **sections: Any) -> RunFile:
        """Return the run file of a model of `MODELS`; `sections` replace its other sections."""
        shape = dict(MODELS[model])
        if self.cpu:
            shape |= {**SMALL, "layers": shape["stages"]}
            shape |= {"kv_heads": 2} if "kv_heads" in shape else {}
        precision = "float32" if self.cpu else "bf16"
        fields: Figures = {
            "name": model,
            "steps": 100_000,
            "model": shape,
            "data": {"path": str(self.data)},
            "training": {"validation_microbatches": 0, "precision": precision, **training},
        }
        return from_fields(fields | sections)


class Piece(NamedTuple):
    """A measurement that makes one row."""

    name: str
    minutes: float  # estimate
    measure: Callable[[Place], Figures]


def pieces(cpu: bool) -> list[Piece]:
    """Return all pieces, the most useful first. On a CPU, runs have one seed."""
    stages = [
        Piece(f"stage, compile = {compiled}", 2, partial(of_stage, "124M", {"compile": compiled}))
        for compiled in (False, True)
    ]
    losses = [
        Piece(f"loss of a stage, {model}", 4, partial(of_loss, model)) for model in ("124M", "500M")
    ]
    runs = [
        Piece(f"124M, {policy}, seed {seed}", 4, partial(of_run, policy, seed))
        for seed in range(1 if cpu else SEEDS)
        for policy in POLICIES
    ]
    listed = [
        Piece("CUDA tests", 5, run_tests),
        *stages,
        Piece("codecs", 1, of_codecs),
        Piece("swarm", 4, of_swarm),
        *losses,
        *runs,
        Piece("124M as published", 3, of_published),
        Piece("8B, base in four bits", 5, partial(of_stage, "8B", {"lora": {"base": "nf4"}})),
    ]
    return [piece._replace(minutes=ON_CPU) for piece in listed] if cpu else listed


def next_piece(listed: Sequence[Piece], done: Collection[str], minutes: float) -> Piece | None:
    """Return the first piece that isn't `done` and takes at most `minutes`, or None."""
    fits = min(minutes, LONGEST)
    return next((it for it in listed if it.name not in done and it.minutes <= fits), None)


# --- pieces


def run_tests(place: Place) -> Figures:
    """Run the tests marked `cuda`; count those that passed and were skipped. Raises RuntimeError
    with the end of pytest's output."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *TESTS], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    counts = re.findall(r"(\d+) (passed|skipped)", done.stdout)
    return {outcome: int(count) for count, outcome in counts}


def of_stage(model: str, training: Mapping[str, Any], place: Place) -> Figures:
    batch = {"batch": 4, "microbatch": 2} if place.cpu else {"batch": 64, "microbatch": 16}
    if model == "8B" and not place.cpu:
        batch = {"batch": 8, "microbatch": 2}
    run = override(place.run(model, {**batch, **training}), model__vocabulary=512)
    made, measured = stage.compare(run, place.device)
    return {**made, "measured": measured}


def of_codecs(place: Place) -> Figures:
    sizes, speeds = codecs.measure(place.device, 1 << 18 if place.cpu else 1 << 26)
    return {"codecs": sizes, "measured": speeds}


def of_swarm(place: Place) -> Figures:
    """Measure seconds a step of a swarm of one node a stage, and of one process, in turns."""
    batch = {"batch": 8, "microbatch": 2} if place.cpu else {"batch": 64, "microbatch": 8}
    run = resolve(place.run("124M", batch, swarm={"start_grace": 2}))
    corpus = Corpus.open(place.data)
    with (
        tempfile.TemporaryDirectory() as out,
        swarm(run, run_planaria, Path(out), pipeline.one_each(run, place.device)) as living,
    ):
        rounds = pipeline.measure(
            {
                pipeline.ONE: lambda: pipeline.OneProcess(run, corpus, place.device),
                pipeline.SWARM: lambda: pipeline.Processes(living),
            }
        )
    ratio = pipeline.ratio(rounds, pipeline.SWARM, pipeline.ONE)
    return {"measured": {"seconds_a_step": rounds, "ratio": ratio}}


def of_loss(model: str, place: Place) -> Figures:
    """Kill the only node of stage 2 in a live swarm, and measure its recovery."""
    batch = {"batch": 4, "microbatch": 2} if place.cpu else {"batch": 16, "microbatch": 4}
    run = resolve(place.run(model, batch, swarm={"start_grace": 2}))
    with (
        tempfile.TemporaryDirectory() as out,
        left.training(run, Path(out), place.device) as watched,
    ):
        loss = left.lose(watched, stage=2)
    return {"stage": loss.stage, "measured": loss._asdict()}


def of_run(policy: str, seed: int, place: Place) -> Figures:
    """Train a run of 124M's shape in one process, with ten losses of stages; `none` loses none."""
    steps, batch = (33, 4) if place.cpu else (800, 64)
    training = {"batch": batch, "microbatch": batch // 4, "validate_every": steps // 3}
    run = place.run("124M", {**training, "validation_microbatches": 8})
    every, last = steps // (LOSSES + 1), MODELS["124M"]["stages"]
    fields = run.model_dump(exclude_none=True, exclude_defaults=True) | {"steps": steps}
    study = Study.model_validate(
        {
            "title": "124M",
            "seeds": [seed],
            "run": fields,
            "losses": {"at": [f"{n % last + 1}@{(n + 1) * every}" for n in range(LOSSES)]},
            "baseline": policy,
            "target": 1,
            "variants": [{"name": policy, **POLICIES[policy]}],
        }
    )
    ((key, job),) = resolved(jobs(study))
    row = run_one(key, job, str(place.device))
    measured = {"seconds": row["seconds"], "bytes": stage.most_bytes(place.device)}
    return {name: row[name] for name in ("validation", "rebuilds")} | {"measured": measured}


def of_published(place: Place) -> Figures:
    """Time two iterations of 512 samples in microbatches of 64, with a vocabulary of 32,000. On a
    CPU all three are smaller."""
    batch = {"batch": 8, "microbatch": 4} if place.cpu else {"batch": 512, "microbatch": 64}
    run = place.run("124M", batch)
    if not place.cpu:
        run = override(run, model__vocabulary=32_000)
    made = TrainingSwarm(resolve(run), Corpus.open(place.data), device=place.device)
    losses: list[float] = []
    took = [stage.seconds(lambda: losses.append(made.step()), place.device) for _ in range(2)]
    measured = {"seconds": took, "bytes": stage.most_bytes(place.device)}
    return {"tokens": made.window_tokens, "losses": losses, "measured": measured}


# --- the command


def measure(piece: Piece, place: Place) -> Figures:
    """Measure a piece; return its row, which has `error` if the measurement failed."""
    row: Figures = {"key": key_of(piece.name, place.device), "piece": piece.name}
    try:
        row |= piece.measure(place)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (other pieces go on)
        row["error"] = f"{type(error).__name__}: {error}"
    return row | origin(str(place.device))


def key_of(piece: str, device: torch.device) -> str:
    return f"{piece} on {machine(str(device))}"


def run_pieces(minutes: float, rows: Path, place: Place) -> int:
    """Measure pieces until none is left that fits in the time; return the number that failed. The
    next call measures pieces with an error again."""
    end = time.monotonic() + 60 * minutes
    listed, results = pieces(place.cpu), read_results(rows)
    tried = {
        piece.name
        for piece in listed
        if "error" not in results.get(key_of(piece.name, place.device), {"error": ""})
    }
    failed = 0
    print(f"{rows}: {len(tried)} of {len(listed)} pieces are measured", flush=True)
    while piece := next_piece(listed, tried, (end - time.monotonic()) / 60):
        tried.add(piece.name)
        row = apart(piece, rows, place, min(60 * LONGEST, end - time.monotonic()))
        failed += "error" in row
        print(f"{piece.name}: {row.get('error') or row.get('measured', 'done')}", flush=True)
    return failed


def apart(piece: Piece, rows: Path, place: Place, seconds: float) -> Figures:
    """Measure a piece in another process, for at most `seconds`; return its row."""
    command = [sys.executable, "-m", "planaria_lab.gpu", "--piece", piece.name, "--out"]
    command += [str(rows.parent), "--device", str(place.device), "--data", str(place.data)]
    try:
        status = subprocess.run(command, timeout=seconds, check=False).returncode
        error = f"its process ended with status {status}"
    except subprocess.TimeoutExpired:
        status, error = 1, f"stopped after {seconds:.0f} s"
    key = key_of(piece.name, place.device)
    if status:
        row = {"key": key, "piece": piece.name, "error": error, **origin(str(place.device))}
        append_result(rows, row)
    return read_results(rows)[key]


def run_studies(hours: float, studies: Sequence[Path], device: torch.device) -> int:
    """Run the missing runs of these studies, one at a time; return 1 if a study failed, else 0. The
    state of a run is kept every five minutes."""
    end = time.monotonic() + 3600 * hours
    for study in studies:
        command = [sys.executable, "-m", "planaria", "lab", "run", str(study), "--jobs", "1"]
        try:
            seconds_left = end - time.monotonic()
            subprocess.run([*command, "--device", str(device)], timeout=seconds_left, check=True)
        except subprocess.TimeoutExpired:
            print(f"{hours:g} hours are over; the same command goes on in {study}")
            return 0
        except subprocess.CalledProcessError as error:
            print(f"{study}: ended with status {error.returncode}")
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m planaria_lab.gpu", description=__doc__)
    parser.add_argument("studies", nargs="*", type=Path, help="with --hours; default: CheckFree's")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for the measurements")
    parser.add_argument("--hours", type=float, help="run studies for this time instead")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help=f"folder for {ROWS}")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--data", type=Path, help="prepared data; default: of corpus/austen")
    parser.add_argument("--piece", help="measure only this piece")
    options = parser.parse_args()
    device = find_device(options.device)
    if device is None:
        parser.error(f"--device {options.device}: torch sees no such device; use cpu")
    if options.hours:
        sizes = ("124m", "500m", "1.5b")
        published = [ROOT / f"lab/results/paper-{size}/study.toml" for size in sizes]
        return run_studies(options.hours, options.studies or published, device)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.out / ROWS
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        if options.data is None:
            vocabulary = 512 if device.type == "cpu" else 2048
            prepare(Recipe([str(SHIPPED)], vocabulary=vocabulary), data)
        place = Place(device, data)
        if place.cpu:
            torch.set_num_threads(1)  # the models are tiny
        if options.piece is None:
            return 1 if run_pieces(options.minutes, rows, place) else 0
        chosen = [piece for piece in pieces(place.cpu) if piece.name == options.piece]
        if not chosen:
            names = ", ".join(piece.name for piece in pieces(place.cpu))
            parser.error(f"--piece {options.piece}: choose one of {names}")
        append_result(rows, measure(chosen[0], place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
