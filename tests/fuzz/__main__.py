"""Coverage-guided fuzz of the targets, one process each, by atheris; `make fuzz` runs it.

An input fails if its target raises, takes too long or needs too much memory. It is printed with a
traceback and kept in OUT/TARGET/found; the exit status is then 1. Copy it to the folder `found`
beside this file, which each test run reads. Inputs that reach new code are kept for the next time,
in OUT/TARGET/corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import atheris

SECONDS_EACH = 10
"""The most seconds that an input may take."""
MEMORY = 2048
"""The most MiB that a target's process may use."""


def fuzz(name: str, seconds: int, out: Path) -> None:
    """Fuzz one target. This never returns: libFuzzer ends the process."""
    with atheris.instrument_imports(include=["planaria"]):
        from tests.fuzz.seeds import seeds
        from tests.fuzz.targets import TARGETS
    logging.disable()
    corpus, findings = out / name / "corpus", out / name / "found"
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    known: set[str] = set()

    def target(data: bytes) -> None:
        try:
            TARGETS[name](data)
        except Exception as error:  # noqa: BLE001 (any is a finding)
            last = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            if failure not in known:  # each failure is kept once
                known.add(failure)
                path = findings / hashlib.sha1(failure.encode()).hexdigest()[:12]
                path.write_bytes(data)
                print(f"FOUND by {name}: {path}", flush=True)
                traceback.print_exc()

    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            f"-timeout={SECONDS_EACH}",
            f"-rss_limit_mb={MEMORY}",
            "-max_len=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={findings}/",
        ],
        target,
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--here", action="store_true", help="in this process; one target")
    options = parser.parse_args()
    if options.here:
        fuzz(*options.targets, options.seconds, options.out)
    from tests.fuzz.targets import TARGETS

    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"{', '.join(unknown)}: no target; there are {', '.join(TARGETS)}")
    failed = []
    for name in options.targets or TARGETS:
        print(f"{name}, for {options.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", name, "--here"]
        command += ["--seconds", str(options.seconds), "--out", str(options.out)]
        log = options.out / name / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, env=os.environ, check=False)
        cases = sorted((options.out / name / "found").glob("*"))
        if done.returncode or cases:
            failed.append(name)
            print(f"  exit status {done.returncode}, found {', '.join(map(str, cases))}: see {log}")
    print(f"found something: {', '.join(failed)}" if failed else "found nothing")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
