"""Run a swarm of processes under a schedule of faults, and record all that happens to it.

`SickSwarm` starts a registry and nodes, each node behind a proxy and under sick_node.py. It injects
the faults when they are due, ends them, and replaces each process that has ended. A fault waits
until its stage can bear it, and a loss of stages until all nodes are healthy. The class draws no
conclusions: outcome.py does, from the files that it writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import grpc

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import NewView, View, WatchRequest
from planaria.bootstrap.service import SERVICE
from planaria.bootstrap.views import unpacked, view_in
from planaria.node.launch.own_folders import folder_options
from planaria.node.local.plan import ADDRESS
from planaria.node.local.resume import JOURNAL, RUN_FILE
from planaria.node.machine.processes import PLANARIA, Processes, describe_status
from planaria.node.report.event_log import EventLog, LineReader
from planaria.node.report.events import (
    Applied,
    Committed,
    Exited,
    Killed,
    Started,
    SwarmEnding,
    parse,
)
from planaria.node.report.live_view import RunStory
from planaria.node.run_file import RunFile, dumps
from planaria.node.transaction.plan_encoding import active
from planaria.node.wire.seat_names import node_of, seated
from planaria_lab.chaos.proxy import Proxy, Way
from planaria_lab.chaos.schedule import BLINKS, LOSSES, REGISTRY, STAGES, Fault, Shape
from planaria_lab.chaos.sick_node import KINDS as SICK
from planaria_lab.chaos.sick_node import run_sick, set_faults

LOOK: Final = 0.05
"""Seconds between two rounds of the loop."""
SAMPLE: Final = 2.0
"""Seconds between two samples of the processes' resources."""
AGAIN: Final = 0.5
"""Seconds until a process that has ended by itself is replaced."""
START: Final = 120.0
"""Seconds that the registry has to listen, and then the swarm to commit its first step."""
END: Final = 120.0
"""Seconds after the last fault in which `STEPS_AT_THE_END` steps must be committed, and again
seconds in which all nodes must apply them."""
STEPS_AT_THE_END: Final = 3
"""Steps that must be committed after all faults have ended."""
OWN_STEPS: Final = 3
"""Steps that a node must have applied to count as taking part. It applies the first ones as a
newcomer, without a vote. If only newcomers are left, they can't know whether the others have gone
on, and the run goes back."""
BETWEEN_LOSSES: Final = 23
"""Steps between two losses of stages. A snapshot needs 8 or more to be whole. Saves are 10 apart,
so that a loss is not at the step of a save."""
KILLS: Final = {"kill", "registry kill", *LOSSES}
FAULTS, VIEWS, TAKEN = "faults.jsonl", "views.jsonl", "taken.jsonl"
CHECKPOINTS: Final = "checkpoints"
NODES: Final = "nodes"
"""Name of the folder that has a folder for each node, named by its slot."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class ChaosError(UserError):
    """A swarm under faults can't start; the message says why and what to do."""


class Taken(NamedTuple):
    """The resources that a process uses at a time (Unix seconds)."""

    time: float
    slot: str
    pid: int
    rss: int  # bytes
    descriptors: int
    threads: int


class SickSwarm:
    """A swarm under faults, as an async context manager, which ends all processes at its end.

    `run` is a resolved run file, `out` the folder for all files. `say` gets a sentence for each
    event.
    """

    def __init__(
        self,
        run: RunFile,
        shape: Shape,
        faults: Sequence[Fault],
        minutes: float,
        out: Path,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Remove the files of an interrupted run from `out`. Raises ChaosError if it has others."""
        if (out / FAULTS).exists():
            shutil.rmtree(out)
        if out.exists() and any(out.iterdir()):
            raise ChaosError(f"{out} is not empty: remove it, or choose another --logs")
        self.run, self.shape, self.minutes, self.out, self.say = run, shape, minutes, out, say
        self.logs, self.sick = out / "logs", out / "sick"
        self.logs.mkdir(parents=True)
        self.sick.mkdir()
        (out / RUN_FILE).write_text(dumps(run), encoding="utf-8")
        self.due = sorted(faults, key=lambda fault: fault.at)
        self.healing: list[tuple[float, Fault, int | None]] = []  # end (loop time), fault, pid
        self.starting: dict[str, float] = {}  # slot -> when (loop time) to start its process
        self.processes = Processes(
            self.logs,
            {"OMP_NUM_THREADS": "1"},
            ["planaria_lab.chaos.sick_node", *PLANARIA],
            run_sick,
        )
        running = self.processes.running
        self.proxies = {slot: Proxy(processes=running) for slot in shape.slots}
        self.events = EventLog(self.logs, "chaos")
        self.story = RunStory(run.steps)
        self.tails: dict[Path, LineReader] = {}
        self.quarantined: set[str] = set()  # instances, see node/launch/instance.py
        self.seats: dict[str | None, set[int]] = {}  # node -> its stages in the newest view
        self.driver: str | None = None  # node
        self.lost_at = 0  # step of the last loss of stages
        self.applied: dict[str | None, range] = {}  # node -> steps that it has applied
        self.blinking: set[asyncio.Task[None]] = set()
        self.sampled = 0.0
        self._files = ExitStack()
        self._written = {
            name: self._files.enter_context((out / name).open("w", encoding="utf-8"))
            for name in (FAULTS, VIEWS, TAKEN)
        }

    async def __aenter__(self) -> Self:
        for proxy in self.proxies.values():
            await proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.events.write(SwarmEnding())
        for task in self.blinking:
            task.cancel()
        try:
            await self.processes.stop()
        finally:
            self.processes.kill_all()
            for proxy in self.proxies.values():
                await proxy.close()
            self._files.close()
            self.events.close()

    # --- the run

    async def train(self) -> str:
        """Train under the faults for the given minutes, and then until all nodes have the newest
        step. Return why the swarm did not go on; empty: it did. Raises ChaosError."""
        clock = asyncio.get_running_loop().time
        self._start(REGISTRY)
        address = await self._registry_address(clock)
        watching = asyncio.create_task(self._watch(address))
        try:
            for slot in self.shape.slots:
                self._start(slot)
            if not await self._until(lambda: self.story.committed > 0, START, clock):
                return self._stuck(f"no step was committed in {START:.0f} s")
            begun = clock()
            self.say(f"{len(self.due)} faults in {self.minutes:g} minutes; logs are in {self.logs}")
            while clock() < begun + 60 * self.minutes and self.story.stopped is None:
                self._make_sick(clock() - begun, clock())
                self._attend(clock())
                await asyncio.sleep(LOOK)
            wanted = self.story.committed + STEPS_AT_THE_END
            if not await self._until(lambda: self.story.committed >= wanted, END, clock):
                few = f"fewer than {STEPS_AT_THE_END} steps were committed in {END:.0f} s"
                return self._stuck(few)
            await self._until(lambda: {*self._behind(wanted)} <= {*self._kept_out()}, END, clock)
            missing = sorted({*self._behind(wanted)} - {*self._kept_out()})
            return (
                f"{END:.0f} s after the last fault {missing} have not joined again"
                if missing
                else ""
            )
        finally:
            watching.cancel()

    def _stuck(self, failure: str) -> str:
        stopped = self.story.stopped
        return f"the run was stopped: {stopped.reason}" if stopped else failure

    def _behind(self, step: int) -> list[str]:
        """Return the slots whose node does not take part, or has not applied this step yet.
        Standbys are left out."""
        nodes = {
            slot: node for slot, node in self._nodes().items() if self.seats.get(node) != set()
        }
        applied = {slot: self.applied.get(node, range(0)) for slot, node in nodes.items()}
        return [s for s, steps in applied.items() if steps.stop <= step or len(steps) < OWN_STEPS]

    def _nodes(self) -> dict[str, str | None]:
        """Map each slot to the node that its process has joined as."""
        running = self.processes.running()
        return {slot: self.story.node_of(running.get(slot, 0)) for slot in self.shape.slots}

    def _serves(self, slot: str) -> set[int]:
        """Return the stages that the slot's node serves."""
        return self.seats.get(self._nodes().get(slot), set())

    def _kept_out(self) -> list[str]:
        """Return the slots whose node is in quarantine."""
        return [
            path.parent.name
            for path in self.out.glob(f"{NODES}/*/instance-*")
            if Identity.from_pem(path.read_bytes()).instance in self.quarantined
        ]

    async def _until(
        self, condition: Callable[[], bool], seconds: float, clock: Callable[[], float]
    ) -> bool:
        """Wait until the condition holds and return True, or return False after `seconds` or when
        the run is stopped."""
        deadline = clock() + seconds
        while not condition():
            if clock() > deadline or self.story.stopped is not None:
                return False
            self._attend(clock())
            await asyncio.sleep(LOOK)
        return True

    def _attend(self, now: float) -> None:
        """Do all work of one round except starting new faults."""
        self._read()
        self._heal(now)
        self._replace_ended(now)
        for slot, when in list(self.starting.items()):
            if when <= now:
                del self.starting[slot]
                if slot not in self.processes.running():
                    self._start(slot)
        if now - self.sampled >= SAMPLE:
            self.sampled = now
            self._sample()

    def _read(self) -> None:
        for path in (*self.logs.glob("*.jsonl"), *self.out.glob(f"{NODES}/*/*.jsonl")):
            self.tails.setdefault(path, LineReader(path))
        lines = [line for tail in self.tails.values() for line in tail.lines() if "time" in line]
        for line in sorted(lines, key=lambda line: float(line["time"])):
            if entry := parse(line):
                self.story.hear(entry)
                if isinstance(entry.event, Committed):
                    self.driver = node_of(entry.node or "")
                if isinstance(entry.event, Applied):
                    step = entry.event.step
                    node = node_of(entry.node or "")
                    first = self.applied.get(node, range(step, step)).start
                    self.applied[node] = range(first, step + 1)

    # --- faults

    def _make_sick(self, passed: float, now: float) -> None:
        """Start the faults that are due and bearable. `passed`: seconds since the first step."""
        for due in [fault for fault in self.due if fault.at <= passed]:
            fault = self._placed(due) if due.slot == STAGES else due
            if fault is None or not self._bears(fault):
                continue  # it must wait
            self.due.remove(due)
            pid = self.processes.running().get(fault.slot)
            where = " and ".join((fault.slot, *fault.others))
            self.say(f"{passed:6.1f} s: {fault.kind} at {where} for {fault.seconds:.1f} s")
            stages = sorted(set[int]().union(*map(self._serves, fault.slots)))
            self._append(FAULTS, {**asdict(fault), "time": time.time(), "pid": pid, STAGES: stages})
            if fault.kind in LOSSES:
                self.lost_at = self.story.committed
            self._begin(fault, pid)
            self.healing.append((now + fault.seconds, fault, pid))

    def _placed(self, loss: Fault) -> Fault | None:
        """Return the loss with the slots of its nodes. None: it must wait, since the states that a
        rebuild needs may not be whole yet, or a node of its stages serves another stage, too."""
        if self.story.committed < self.lost_at + BETWEEN_LOSSES:
            return None
        driving = set[str]()
        if loss.kind == "lost driver":
            driving = {s for s, node in self._nodes().items() if node and node == self.driver}
            after = {max(self._serves(slot), default=0) + 1 for slot in driving}
            stages = {stage % (self.shape.stages + 1) for stage in after}
        else:
            stages = {*range(int(loss.figures["first"]), int(loss.figures["last"]) + 1)}
        serving = {slot for slot in self.shape.slots if self._serves(slot) & stages}
        if not serving or any(self._serves(slot) - stages for slot in serving - driving):
            return None
        slot, *others = sorted(driving | serving)
        return replace(loss, slot=slot, others=tuple(others))

    def _bears(self, fault: Fault) -> bool:
        """Return whether the fault can begin now: its slots have no other fault. For a guilty
        fault, its nodes must also take part in steps, and so must a healthy replica. Without
        replicas, or for a loss of stages, all other nodes must."""
        if any(not other.slots.isdisjoint(fault.slots) for _, other, _ in self.healing):
            return False
        if fault.blame == "innocent":
            return True
        alone = self.shape.replicas == 1 or fault.kind in LOSSES
        others = [slot for slot in self.shape.slots if slot not in fault.slots]
        needed = [s for s in others if alone or s.partition(".")[0] == fault.stage]
        if behind := {*self._behind(self.story.committed - 1)}:
            behind -= {*self._kept_out()}
        sick = {current.slot for _, current, _ in self.healing if current.blame == "guilty"}
        well = [slot not in behind and slot not in sick for slot in needed]
        return behind.isdisjoint(fault.slots) and (all(well) if alone else any(well))

    def _begin(self, fault: Fault, pid: int | None) -> None:
        match fault.kind:
            case kind if kind in KILLS:
                for slot in sorted(fault.slots):
                    self._kill(slot)
            case "stop" if pid is not None:
                os.kill(pid, signal.SIGSTOP)
            case "reset":
                self.proxies[fault.slot].reset()
            case kind if kind in BLINKS:
                for proxy in self.proxies.values():
                    task = asyncio.create_task(proxy.blink(BLINKS[kind], fault.seconds))
                    self.blinking.add(task)
                    task.add_done_callback(self.blinking.discard)
            case "one way":
                self.proxies[fault.slot].hold(Way(fault.figures["way"]))
            case "cut":
                slot, other = fault.slots
                self.proxies[slot].cut(other)
                self.proxies[other].cut(slot)
            case kind if kind in SICK:
                set_faults(self._sick_file(fault.slot), {kind: fault.figures})

    def _heal(self, now: float) -> None:
        for sick in [sick for sick in self.healing if sick[0] <= now]:
            self.healing.remove(sick)
            _, fault, pid = sick
            match fault.kind:
                case kind if kind in KILLS:
                    for slot in sorted(fault.slots):
                        if fault.figures.get("saves") == "gone":
                            for saves in self.out.glob(f"{NODES}/{slot}/*/saves"):
                                shutil.rmtree(saves)
                        self.starting.setdefault(slot, now)
                case "stop" if pid is not None and pid in self.processes.running().values():
                    os.kill(pid, signal.SIGCONT)
                case "one way":
                    self.proxies[fault.slot].release()
                case "cut":
                    for slot in fault.slots:
                        self.proxies[slot].cut()
                case kind if kind in SICK:
                    set_faults(self._sick_file(fault.slot), {})

    def _sick_file(self, slot: str) -> Path:
        return self.sick / f"{slot}.json"

    # --- processes

    def _kill(self, slot: str) -> None:
        pid = self.processes.kill(slot)
        if pid is None or slot == REGISTRY:
            return
        step = self.story.committed + 1
        self.events.write(Killed(slot=slot, pid=pid, step=step, **self._victim(slot, pid)))

    def _victim(self, slot: str, pid: int) -> dict[str, Any]:
        stage = slot.partition(".")[0]
        left = sum(other.startswith(f"{stage}.") for other in self.processes.running())
        return {"node": self.story.node_of(pid), "stage": int(stage), "left": left}

    def _replace_ended(self, now: float) -> None:
        for ended in self.processes.ended():
            slot = ended.slot
            log, how = str(self.processes.log(slot)), describe_status(ended.status)
            victim = {"node": None} if slot == REGISTRY else self._victim(slot, ended.pid)
            self.events.write(Exited(slot=slot, pid=ended.pid, log=log, how=how, **victim))
            self.say(f"{slot} {how}; its log is {log}")
            self.starting.setdefault(slot, now + AGAIN)

    def _start(self, slot: str) -> None:
        pid = self.processes.start(slot, self._command(slot))
        self.events.write(Started(slot=slot, pid=pid))

    def _command(self, slot: str) -> list[str]:
        address = self.out / ADDRESS
        if slot == REGISTRY:
            listen = address.read_text().strip() if address.exists() else "127.0.0.1:0"
            files = ["--address-file", str(address), "--journal", str(self.logs / JOURNAL)]
            return ["bootstrap", "--run", str(self.out / RUN_FILE), "--listen", listen, *files]
        proxy = self.proxies[slot]
        return [
            *("--faults", str(self._sick_file(slot)), "node"),
            *("--join", address.read_text().strip(), "--stage", slot.partition(".")[0]),
            *("--listen", proxy.behind, "--advertise", proxy.address),
            *("--device", "cpu", "--threads", "1", "--seats", self.shape.seats),
            *("--out", str(self.out / NODES / slot)),
            *folder_options(self.run, checkpoints=self.out / CHECKPOINTS),
        ]

    async def _registry_address(self, clock: Callable[[], float]) -> str:
        """Wait until the registry listens, and return its address. Raises ChaosError."""
        file, deadline = self.out / ADDRESS, clock() + START
        while not file.exists():
            if self.processes.ended() or clock() > deadline:
                log = self.processes.log(REGISTRY)
                raise ChaosError(f"the registry didn't start to listen; its log is {log}")
            await asyncio.sleep(LOOK)
        return file.read_text().strip()

    # --- records

    async def _watch(self, address: str) -> None:
        """Record every view that the registry issues, until cancelled."""
        while True:
            with suppress(grpc.aio.AioRpcError):  # the registry was killed; another will start
                async with grpc.aio.insecure_channel(address) as channel:
                    watch: Any = channel.unary_stream(f"/{SERVICE}/Watch")
                    call = watch(WatchRequest().SerializeToString(), wait_for_ready=True)
                    view = View()
                    async for news in call:
                        view = view_in(unpacked(NewView.FromString(news)), view)
                        self.quarantined = {member.instance for member in view.quarantined}
                        self.seats = {m.node: {at.stage for at in m.seats} for m in view.members}
                        members = list(active(seated(view)).items())
                        fields = {"number": view.number, "reason": view.reason, "members": members}
                        self._append(VIEWS, {"time": time.time(), **fields})
            await asyncio.sleep(LOOK)

    def _sample(self) -> None:
        for slot, pid in self.processes.running().items():
            with suppress(OSError):  # it has just ended
                self._append(TAKEN, take(slot, pid)._asdict())

    def _append(self, name: str, fields: dict[str, Any]) -> None:
        self._written[name].write(json.dumps(fields) + "\n")
        self._written[name].flush()


def take(slot: str, pid: int) -> Taken:
    """Return the resources that process `pid` uses now. Raises OSError if it has ended."""
    folder = Path("/proc") / str(pid)
    rss = int((folder / "statm").read_text().split()[1]) * _PAGE
    descriptors = len(os.listdir(folder / "fd"))  # noqa: PTH208 (names are enough)
    threads = len(os.listdir(folder / "task"))  # noqa: PTH208
    return Taken(time.time(), slot, pid, rss, descriptors, threads)
