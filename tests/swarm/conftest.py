"""Fixtures for real swarms, with processes, sockets and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.data.corpus import Corpus
from planaria.node.local.plan import ADDRESS
from planaria.node.run_file import RunFile, dumps, override
from tests.forked import Forked, begin_fork_server
from tests.swarm.lines import Lines

DEADLINE = 600.0  # seconds; reached only by a hang


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return uvloop, the event loop of a daemon."""
    return {"uvloop": uvloop.new_event_loop}


class Up:
    """`planaria up` as a child process."""

    def __init__(self, out: Path, output: Path, *arguments: str, **how: Any) -> None:
        self.out, self.output, self.lines = out, output, Lines(out)
        self.process = Forked(output, "up", *arguments, **how)

    def finish(self) -> tuple[int, str]:
        """Wait for the end, and return exit status and output."""
        return self.process.wait(DEADLINE), self.output.read_text()

    def end(self, number: signal.Signals) -> None:
        """End it by a signal in the middle of training; check that no process is left behind."""
        pids = [event["pid"] for event in self.events("started")]
        self.process.send_signal(number)
        status, output = self.finish()
        assert status != 0
        assert "Traceback" not in output
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            *self.lines.events(kind, "logs/events-*.jsonl"),
            *self.lines.events(kind, "events.jsonl"),
        ]

    def committed(self) -> int:
        """Return the newest step in any ledger so far."""
        lines = self.lines.of("logs/ledger-*.jsonl")
        return max((line["step"] for line in lines if "step" in line), default=0)

    def pid(self, slot: str) -> int:
        """Return the pid of the newest process in a slot: `registry`, or STAGE.REPLICA."""
        return int([e for e in self.events("started") if e["slot"] == slot][-1]["pid"])

    def members(self) -> set[str]:
        """Return the members of the registry's newest view."""

        async def described() -> Description:
            client = RegistryClient([(self.out / ADDRESS).read_text().strip()])
            try:
                return await client.describe()
            finally:
                await client.close()

        return {member.node for member in asyncio.run(described()).view.members}

    def wait_until(self, awaited: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"ended before {awaited}:\n{self.finish()[1]}"
            assert time.monotonic() < deadline, f"still waiting for {awaited}"
            time.sleep(0.05)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Starts it where processes are to come; a `LocalSwarm` has none."""
    if not hasattr(request.module, "LocalSwarm"):
        begin_fork_server()


@pytest.fixture(scope="session")
def corpus(data: Path) -> Corpus:
    return Corpus.open(data)


@pytest.fixture
def up(data: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Return a function that starts `planaria up`, which is ended after the test in any case."""
    started: list[Up] = []

    def start(run: RunFile | Path, *arguments: str, at: Path = data, **how: Any) -> Up:
        """Start a new run, or resume the run in a folder; `how` as for Forked."""
        out, file, output = (
            tmp_path / f"{kind}{len(started)}" for kind in ("out", "run", "output")
        )
        if isinstance(run, Path):
            arguments = ("--resume", str(run), *arguments)
            out = run
        else:
            file.write_text(dumps(override(run, data__path=str(at))))
            arguments = (str(file), "--out", str(out), *arguments)
        started.append(Up(out, output, *arguments, **how))
        return started[-1]

    yield start
    for swarm in started:
        swarm.process.terminate()
        try:
            swarm.process.wait(20)
        except TimeoutError:
            swarm.process.kill()
