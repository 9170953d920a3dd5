"""Checks that take too long for each change, in pieces: many seeds of each scenario, a fuzz of each
target, the decoders, the GPU command on a CPU, all tests with the kernels of another processor, and
the container image.

    make nightly SEEDS=500 SECONDS=120

Each piece adds a line to out/nightly/COMMIT.jsonl: its name (a scenario with its seed, or what it
runs), its outcome or its error, and its seconds. A piece that has passed at a commit is not run
again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from simulation import scenario
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out/nightly"
LONGEST = 600
"""Maximum processor seconds of a seed."""
OTHER_PROCESSOR = "env", "ONEDNN_MAX_CPU_ISA=AVX2", "ATEN_CPU_CAPABILITY=default"
ENGINES = {"docker": "docker compose", "podman": "podman-compose"}
NO_SCENARIOS = "Even", "Turning", "Dying"
"""Scenarios that are left out: base classes, and one that breaks an invariant on purpose."""


def scenarios() -> dict[str, type[scenario.Scenario]]:
    """All scenarios, by MODULE.NAME, but those of `test_hangs`, which has its own invariants."""
    kinds = {}
    for path in sorted((ROOT / "tests/simulation").glob("*.py")):
        if path.stem not in ("conftest", "test_hangs"):
            module = importlib.import_module(f"simulation.{path.stem}")
            for name, kind in vars(module).items():
                own = isinstance(kind, type) and kind.__module__ == module.__name__
                if own and issubclass(kind, scenario.Scenario) and name not in NO_SCENARIOS:
                    kinds[f"{path.stem}.{name}"] = kind
    return kinds


SCENARIOS = scenarios()


class Piece(NamedTuple):
    """One seed of a scenario, or one command."""

    name: str
    seed: int = 0
    command: tuple[str, ...] = ()


def pieces(seeds: int, seconds: int) -> Iterator[Piece]:
    """Yields all pieces. All scenarios with one seed come before any with the next one."""
    for seed in range(seeds):
        yield from (Piece(f"{name} {seed}", seed) for name in SCENARIOS)
    python = sys.executable, "-m"
    for target in TARGETS:
        fuzz = *python, "tests.fuzz", target, "--seconds", str(seconds)
        yield Piece(f"fuzz {target} for {seconds} s", command=fuzz)
    yield Piece("families of decoders", command=(*python, "planaria_lab.bench.decoders"))
    rows = OUT / f"gpu-{_git('rev-parse', '--short=12', 'HEAD')}"
    on_cpu = *python, "planaria_lab.gpu", "--device", "cpu", "--out", str(rows)
    yield Piece("pieces of the GPU command", command=on_cpu)
    for folder in sorted({test.parent for test in ROOT.glob("**/tests/**/test_*.py")}):
        tests = map(str, sorted(folder.glob("test_*.py")))
        test = *OTHER_PROCESSOR, *python, "pytest", *tests
        yield Piece(str(folder.relative_to(ROOT)), command=test)
    for engine, compose in ENGINES.items():
        if _runs(engine):
            check = "env", f"ENGINE={engine}", f"COMPOSE={compose}", "docker/check.sh"
            yield Piece(f"image by {engine}", command=check)


def _runs(engine: str) -> bool:
    return shutil.which(engine) is not None and not subprocess.call(
        [engine, "info"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def run(piece: Piece) -> dict[str, Any]:
    """Runs a piece; returns its line of the record."""
    began, line = time.monotonic(), {"piece": piece.name}
    try:
        line["outcome"] = execute(piece) if piece.command else simulate(piece)
    except Exception as error:  # noqa: BLE001 (any error is recorded)
        line["error"] = f"{type(error).__name__}: {error}"
    return line | {"seconds": round(time.monotonic() - began, 1)}


def simulate(piece: Piece) -> str:
    logging.disable()
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    try:
        return scenario.run(piece.seed, kind=SCENARIOS[piece.name.split()[0]]).outcome
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not over after {LONGEST} s of a processor")


def execute(piece: Piece) -> str:
    log = OUT / f"{piece.name.replace('/', '.')}.log"
    with log.open("wb") as file:
        status = subprocess.call(
            piece.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    if status:
        raise RuntimeError(f"exit status {status}, see {log}")
    return "passed"


def commit() -> str:
    """The short hash of HEAD. Raises SystemExit if tracked files have changed."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise SystemExit(f"commit these changes first; results are kept by commit:\n{changed}")
    return _git("rev-parse", "--short=12", "HEAD")


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly")
    parser.add_argument("--seeds", type=int, default=500, help="of each scenario")
    parser.add_argument("--seconds", type=int, default=120, help="for each target of the fuzz")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="pieces whose names begin so")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    record = OUT / f"{commit()}.jsonl"
    lines = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    )
    passed = {line["piece"] for line in lines if "outcome" in line}
    wanted = [p for p in pieces(options.seeds, options.seconds) if p.name.startswith(options.only)]
    left = [piece for piece in wanted if piece.name not in passed]
    print(f"{record}: {len(wanted) - len(left)} pieces have passed, {len(left)} are left")
    failed = 0
    with ProcessPoolExecutor(options.jobs) as pool, record.open("a") as file:
        for future in as_completed([pool.submit(run, piece) for piece in left]):
            line = future.result()
            print(json.dumps(line), file=file, flush=True)
            if "error" in line:
                failed += 1
                print(f"{line['piece']}: {line['error']}", flush=True)
    print(f"{failed} pieces failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
