"""Swarms whose nodes kill themselves with SIGKILL at given points of a step, or whose compute
threads hang there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.run_file import RunFile, dumps, override
from tests.swarm.lines import Lines

DEADLINE = 600.0  # seconds; reached only by a hang


class Swarm:
    """A registry, and `swarm.replicas` nodes of each stage of the run. `deaths`: slot -> where its
    process dies, as POINT@STEP, or where its compute thread hangs, as POINT~STEP. `seats`: slot ->
    number of seats that its node can hold, if more than one."""

    def __init__(
        self,
        out: Path,
        data: Path,
        run: RunFile,
        deaths: Mapping[str, str],
        seats: Mapping[str, int] = {},
    ) -> None:
        self.out, self.deaths, self.seats = out, deaths, seats
        self.deadline = time.monotonic() + DEADLINE
        self.run = run = override(run, data__path=str(data))
        (out / "run.toml").write_text(dumps(resolve(run)))
        (out / "logs").mkdir()
        self.processes = Processes(
            out / "logs",
            {"OMP_NUM_THREADS": "1"},
            PLANARIA,
            run_planaria_until,
        )
        self.lines = Lines(out / "logs")
        self.killed: list[str] = []

    def train(self) -> None:
        """Start all processes, and wait until all nodes have finished or died."""
        try:
            nodes = self.start()
            while len({e["node"] for e in self.read("finished")}) + len(self.killed) < len(nodes):
                for ended in self.processes.ended():
                    log = self.processes.log(ended.slot).read_text()
                    assert ended.status == -signal.SIGKILL, log
                    self.killed.append(ended.slot)
                self.pause()
        finally:
            self.processes.kill_all()

    def start(self) -> list[str]:
        """Start the registry and all nodes, and return the nodes' slots."""
        address = self.out / "address"
        arguments = ["--run", str(self.out / "run.toml"), "--listen", "127.0.0.1:0"]
        self.processes.start("registry", ["bootstrap", *arguments, "--address-file", str(address)])
        while not address.exists():
            self.pause()
        stages, replicas = self.run.model.stages, self.run.swarm.replicas
        assert stages is not None
        nodes = [f"{stage}.{replica}" for stage in range(stages + 1) for replica in range(replicas)]
        for slot in nodes:
            self.start_node(slot)
        return nodes

    def start_node(self, slot: str) -> None:
        address = (self.out / "address").read_text()
        death = [self.deaths[slot]] if slot in self.deaths else []
        self.processes.start(
            slot,
            [
                *(*death, "node", "--join", address.strip(), "--stage", slot.partition(".")[0]),
                *(*self.reached_at(slot), "--out", str(self.out / "logs"), "--threads", "1"),
                *("--seats", str(self.seats.get(slot, 1))),
                *("--save-dir", "none"),
                *folder_options(self.run),
            ],
        )

    def reached_at(self, slot: str) -> list[str]:
        """Return the options with the addresses at which others reach the node."""
        return ["--listen", "127.0.0.1:0"]

    def pause(self) -> None:
        assert time.monotonic() < self.deadline, f"hangs; died: {self.killed}"
        time.sleep(0.02)

    def read(self, kind: str) -> list[dict[str, Any]]:
        return self.lines.events(kind)


def _points() -> dict[str, tuple[type, str, Callable[..., int]]]:
    """Map names of points to the method at whose call a node dies, and to the call's step."""
    from planaria.node.averaging.averaging import Averaging
    from planaria.node.driver.attempting import Attempting
    from planaria.node.driver.phases import DriverPhase
    from planaria.node.stage.work import TorchWork
    from planaria.node.transaction.attempt import Attempt
    from planaria.node.wire import stage_pb2 as pb

    def trained(begin: pb.Begin) -> int:
        return begin.step if begin.kind == pb.Begin.TRAIN else 0

    def computed(work: Any, *_: Any) -> int:
        return trained(work._attempt.begin)

    def counted(attempt: Attempt, *_: Any) -> int:
        return trained(attempt.begin)

    def brought_home(attempt: Any, *_: Any) -> int:
        drives = attempt.place.host.driver.phase is not DriverPhase.INACTIVE
        return 0 if drives else trained(attempt.begin)

    def averaged(averaging: Any, peer: str, frame: Any) -> int:
        agent = averaging._send.__self__
        return agent.member.step if agent.attempt and agent.attempt.is_complete else 0

    return {
        # between Ready and Commit: the driver has decided, but told nobody
        "decide": (Attempting, "_decide", lambda phase, now: phase.state.begin.step),
        # before a forward pass, before a backward pass, after it, while replicas average, and at a
        # source that doesn't drive
        "forward": (TorchWork, "forward", computed),
        "backward": (TorchWork, "backward", computed),
        "counted": (Attempt, "_count", counted),
        "average": (Averaging, "on_frame", averaged),
        "source": (Attempt, "_came_home", brought_home),
    }


def run_planaria_until(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. A first argument POINT@STEP: die there, at that step or later.
    POINT~STEP: hang there; in the compute thread, the event loop then stays alive."""
    if match := re.fullmatch(r"(\w+)([@~])(\d+)", arguments[0]):
        point, how, step = match.groups()
        _arm(*_points()[point], int(step), _die if how == "@" else _hang)
        arguments.pop(0)
    from planaria.node.machine.processes import run_planaria

    run_planaria(arguments)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    threading.Event().wait()


def _arm(
    owner: type, name: str, step_of: Callable[..., int], step: int, strike: Callable[[], None]
) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def struck(*arguments: Any) -> Any:
        if step_of(*arguments) >= step:
            strike()
        return method(*arguments)

    setattr(owner, name, struck)
