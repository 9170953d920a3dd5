"""A swarm of processes on this machine, trained for a benchmark."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planaria.node.launch.own_folders import folder_options
from planaria.node.local.plan import ProcessHome
from planaria.node.machine.processes import PLANARIA, Processes, Work
from planaria.node.run_file import RunFile, dumps
from planaria.node.wire.seat_names import node_of

PATIENCE = 600.0  # seconds that a swarm may take for its next step while it is not stopped
LOOK = 0.05  # seconds between two reads of the ledgers

Lines = list[dict[str, Any]]


class Living:
    """The processes of a swarm that trains. A call returns the ledger's lines so far. It raises
    SystemExit if a process has ended that isn't `mortal`, or if no step was committed for PATIENCE
    seconds."""

    def __init__(
        self, processes: Processes, mortal: Collection[str] = (), where: Sequence[str] = ()
    ) -> None:
        """`mortal`: slots whose processes may end. `where`: a node's arguments for where it joins,
        listens and writes."""
        self.processes, self.mortal, self.where = processes, mortal, where
        self._lines: Lines = []
        self._advanced = time.monotonic()

    def __call__(self) -> Lines:
        logs, now = self.processes.logs, time.monotonic()
        if ended := [
            process for process in self.processes.ended() if process.slot not in self.mortal
        ]:
            raise SystemExit(f"these processes ended early: {ended}; logs are in {logs}")
        before, self._lines = self._lines, _ledger(logs)
        if len(self._lines) > len(before):
            self._advanced = now
        if now > self._advanced + PATIENCE:
            raise SystemExit(f"no step was committed for {PATIENCE:.0f} s; logs are in {logs}")
        return self._lines

    def stand_still(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._advanced = time.monotonic()
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes.running().values():
            os.kill(process, number)


class Watched:
    """A swarm that trains, seen through its ledgers and events."""

    def __init__(self, look: Callable[[], Lines], logs: Path) -> None:
        self._look, self._logs = look, logs

    def committed(self) -> Lines:
        """Return the ledger's lines, in the order of time."""
        return sorted(self._look(), key=lambda line: float(line["time"]))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        files = [path.read_text() for path in self._logs.glob("events-*.jsonl")]
        texts = [line for file in files for line in file.rpartition("\n")[0].splitlines()]
        chosen = [event for event in map(json.loads, texts) if event["kind"] in kinds]
        return sorted(chosen, key=lambda event: float(event["time"]))

    def train(self, steps: int) -> Lines:
        """Wait until more than `steps` steps have been committed from now on; return their lines.
        The next step is in progress when this returns."""
        after = time.time()
        while len(trained := [o for o in self.committed() if o["time"] > after]) <= steps:
            time.sleep(LOOK)
        return trained

    def next_view(self, than: int) -> dict[str, Any]:
        """Wait for the first commit in a view newer than `than`, and return its line."""
        while not (newer := [commit for commit in self.committed() if commit["view"] > than]):
            time.sleep(LOOK)
        return newer[0]

    def serving(self, stage: int) -> tuple[str, int]:
        """Return the name and the process id of the only node that serves the stage. Seats that
        were given back as other nodes joined are left out."""
        given_back = {event["node"] for event in self.events("given back")}
        seats = [e["node"] for e in self.events("serving") if e["stage"] == stage]
        node = node_of(next(seat for seat in seats if seat not in given_back))
        return node, next(e["pid"] for e in self.events("joined") if e["node"] == node)


def train(run: RunFile, work: Work, out: Path, before: Mapping[str, Sequence[str]]) -> Lines:
    """Train a run to its end, and return the lines of its ledger. Each process runs `work` with the
    arguments of `planaria`. Those that `before` has for its slot precede them; only processes of
    these slots may end early. Raises SystemExit."""
    slots = [
        (stage, f"{stage}.{replica}")
        for stage in range(run.model.body_stages + 1)
        for replica in range(run.swarm.replicas)
    ]
    nodes = {
        slot: [*before.get(slot, ()), "node", "--stage", str(stage), "--threads", "1"]
        for stage, slot in slots
    }
    with swarm(run, work, out, nodes, before) as look:
        while not (lines := look()) or lines[-1]["step"] < run.steps:
            time.sleep(0.2)
    return lines


@contextmanager
def swarm(
    run: RunFile,
    work: Work,
    out: Path,
    nodes: Mapping[str, Sequence[str]],
    mortal: Collection[str] = (),
    tls: bool = False,
    homes: Mapping[str, ProcessHome] | None = None,
) -> Iterator[Living]:
    """Run a registry and nodes while the block lasts. `nodes`: slot -> arguments, without those for
    where to join, listen and write. `mortal`: slots whose processes may end. `tls`: nodes join by
    an invite. `homes`: slot, or registry -> its network namespace behind emulated links."""
    logs = out / "logs"
    logs.mkdir(parents=True)
    (out / "run.toml").write_text(dumps(run))
    processes = Processes(logs, {"OMP_NUM_THREADS": "1"}, PLANARIA, work)
    try:
        address, authority = out / "address", out / "authority"
        joined_by = authority / "owner.invite" if tls else address
        registry = ["--run", str(out / "run.toml"), "--address-file", str(address)]
        registry += ["--authority", str(authority)] if tls else []
        listening, namespace = _at_home(homes, "registry")
        processes.start("registry", ["bootstrap", *listening, *registry], namespace)
        joining = ["--join", f"@{joined_by}", *folder_options(run), "--out", str(logs)]
        living = Living(processes, mortal, [*joining, *_at_home(None, "")[0]])
        while not joined_by.exists():
            living()  # raises if the registry has ended
            time.sleep(0.05)
        for slot, arguments in nodes.items():
            listening, namespace = _at_home(homes, slot)
            processes.start(slot, [*arguments, *joining, *listening], namespace)
        yield living
    finally:
        processes.kill_all()


def _at_home(homes: Mapping[str, ProcessHome] | None, slot: str) -> tuple[list[str], Path | None]:
    """Return a slot's arguments for where it listens, and its network namespace."""
    if homes is None:
        return ["--listen", "127.0.0.1:0"], None
    return ["--listen", f"{homes[slot].host}:0", "--insecure"], homes[slot].namespace


def _ledger(logs: Path) -> Lines:
    """Return the ledgers' lines in the order of steps, the newest line of each step. Each node of
    stage 0 has a file, whose last line may be incomplete."""
    text = "\n".join(path.read_text().rpartition("\n")[0] for path in logs.glob("ledger-*.jsonl"))
    lines = [line for line in map(json.loads, text.splitlines()) if "step" in line]
    last = {line["step"]: line for line in sorted(lines, key=lambda line: float(line["time"]))}
    return [last[step] for step in sorted(last)]
