"""Real swarms: processes, sockets, signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.node.run_file import RunFile, dumps, override

DEADLINE = 600.0  # seconds; only a hanging swarm gets there


class Up:
    """`planaria up` as a child process."""

    def __init__(self, run: RunFile, out: Path, *arguments: str) -> None:
        self.out = out
        run_file = out.parent / f"{out.name}.toml"
        run_file.write_text(dumps(run))
        command = [
            sys.executable,
            "-m",
            "planaria",
            "up",
            str(run_file),
            "--out",
            str(out),
        ]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Exit status and output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output

    def lines(self, pattern: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.out.glob(pattern)):
            whole = path.read_text().rpartition("\n")[0]
            found += [json.loads(line) for line in whole.splitlines()]
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = self.lines("logs/events-*.jsonl") + self.lines("events.jsonl")
        return [event for event in events if event["kind"] == kind]

    def committed(self) -> int:
        """The newest step in any ledger so far."""
        lines = self.lines("logs/ledger-*.jsonl")
        return max((line["step"] for line in lines if "step" in line), default=0)

    def pid(self, slot: str) -> int:
        """Of the newest process in a slot: `registry`, or STAGE.REPLICA."""
        return int([e for e in self.events("started") if e["slot"] == slot][-1]["pid"])

    def wait_until(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.finish()[1]}"
            assert time.monotonic() < deadline, f"still waiting for {what}"
            time.sleep(0.05)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())


@pytest.fixture
def up(data: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts `planaria up` with the given run; ends it, whatever happens."""
    started: list[Up] = []

    def start(run: RunFile, *arguments: str) -> Up:
        run = override(run, data__path=str(data))
        swarm = Up(run, tmp_path / f"out{len(started)}", *arguments)
        started.append(swarm)
        return swarm

    yield start
    for swarm in started:
        if swarm.process.poll() is None:
            swarm.process.send_signal(signal.SIGTERM)
            try:
                swarm.process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                swarm.process.kill()
                swarm.process.communicate()
