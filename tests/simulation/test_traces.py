"""One seed gives the same trace in each process and with each version of Python."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulation.scenario import Scenario, run

ROOT = Path(__file__).parents[2]
SEED = 14
DIGEST = "5c2e7ba5890bb9a3d5aaaf20de4bb7f6087c4ca17ae5d85fd2d88a0efef52334"
"""SHA-256 of the registry's lines in the trace of a run with crashes, and of their times. What
nodes compute may differ by processor."""


def trace(hash_seed: str) -> str:
    command = [sys.executable, "-m", "simulation.test_traces"]
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_gives_the_trace_that_it_has_always_given(hash_seed: str) -> None:
    assert trace(hash_seed) == DIGEST


def main() -> None:
    logging.disable()
    lines: list[str] = []

    class Noted(Scenario):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            say = self.world.say

            def note(who: str, text: str) -> None:
                if who == "registry":
                    lines.append(f"{self.world.now:.6f} {text}")
                say(who, text)

            self.world.say = note  # type: ignore[method-assign]

    run(SEED, kind=Noted)
    print(hashlib.sha256("\n".join(lines).encode()).hexdigest())


if __name__ == "__main__":
    main()
