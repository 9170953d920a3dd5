"""`planaria up`: a whole swarm on this machine, as processes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import STOP, STOPPED, TRAIN, Description
from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.launch.errors import SwarmError
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.supervisor import FINAL
from planaria.node.local.loss_schedule import Kill, Losses, choose_losses, stage_of
from planaria.node.local.machine_size import (
    MachineSize,
    check_gpu,
    check_processes,
    forecast,
    gpus_of_this_machine,
    speed_of_a_core,
)
from planaria.node.local.plan import ADDRESS, SwarmPlan, create_folder, resume_from, write_plan
from planaria.node.local.results import Ending, print_error, wrap_up
from planaria.node.local.resume import RUN_FILE
from planaria.node.machine.cores import available_cores
from planaria.node.machine.processes import (
    GRACE,
    PLANARIA,
    EndedProcess,
    Processes,
    describe_status,
    last_lines,
)
from planaria.node.model import learning_rate
from planaria.node.report.event_log import EventLog, LineReader
from planaria.node.report.events import (
    Exited,
    Killed,
    Sampled,
    Severity,
    Started,
    SwarmEnding,
    parse,
)
from planaria.node.report.experiment import ExperimentPipe, Opening
from planaria.node.report.ledger import MERGED
from planaria.node.report.live_view import LiveScreen, RunStory
from planaria.node.report.samples import SamplesFile
from planaria.node.report.unsaved import stage_names, unsaved_stages
from planaria.node.run_file import loads, without_private

SAVING_GRACE = 30.0
"""Seconds for nodes with saves to end after SIGTERM."""
POLL = 0.02
"""Seconds between two polls of event logs, ledgers and processes."""
DESCRIBE = 0.25
"""Seconds between two requests to the registry, for the page."""
REGISTRY_START = 60.0
"""Seconds for the registry to start listening."""
SLOW_SAVE = 5.0
"""Seconds after which unsaved stages are reported."""
LAST_NODES = 60.0
"""Seconds for nodes, replacements too, to get the last state once the run is finished."""
PATIENCE = 5
"""Multiple of `swarm.progress` without a committed step that ends the run."""
MOST_RESTARTS = 3
"""Number of times that a slot's process may end by itself."""


async def up(
    plan: SwarmPlan,
    kills: Sequence[Kill],
    console: Console,
    resumed: SwarmPlan | None = None,
    replacing: bool = True,
    losses: Losses | None = None,
) -> Ending:
    """Train a resolved run (see `resolve`) with a swarm of processes, and write the results to
    `out`. It continues the saved run of `resumed`, if given. Without `replacing`, lost nodes are
    not replaced; `losses` come besides `kills`. The status is 0 only if every step is committed,
    the audit is all zero and replicas are identical. Raises SwarmError when it can't be started."""
    run, out = plan.run, plan.out
    losses = losses or choose_losses(run)
    check_gpu(plan.device, gpus_of_this_machine)
    if not plan.options.oversubscribe:
        check_processes(plan, MachineSize.this())
    for sentence in forecast(plan, MachineSize.this(), speed_of_a_core):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    if resumed is not None:
        plan, sentences = resume_from(plan, resumed, losses.first())
        for sentence in sentences:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        (out / MERGED).unlink(missing_ok=True)  # until the run ends again
    else:
        create_folder(plan)
        write_plan(plan)
    stop = stop_signals()
    with LiveScreen(console, run.steps) as screen:
        swarm = _Swarm(plan, kills, screen, replacing, losses)
        try:
            ending = await swarm.train(stop)
        except SwarmError as error:
            ending = Ending(1, str(error))
        finally:
            await swarm.end()
    if resumed is None and stop.done() and swarm.client is None:  # no node was started
        shutil.rmtree(out / "logs")  # so that another run can use the folder
        print_error(console, ending.reason)
        return ending
    return wrap_up(swarm.run, out, console, ending)


class _Swarm:
    """The processes of a swarm, what they report, and the remaining kills."""

    def __init__(
        self,
        plan: SwarmPlan,
        kills: Sequence[Kill],
        screen: LiveScreen,
        replacing: bool,
        losses: Losses,
    ) -> None:
        self.run, self.kills, self.screen = plan.run, list(kills), screen
        self.replacing = replacing  # lost nodes; a lost registry always is replaced
        self.losses, self.training, self.options = losses, False, plan.options
        self.device, self.save_dir, self.homes = plan.device, plan.kept.saves, plan.homes
        self.data, self.checkpoints = plan.data, plan.kept.checkpoints
        self.out, run = plan.out.absolute(), plan.run
        self.run_text = without_private(run)  # as the registry has it
        self.logs, self.journal = self.out / "logs", plan.kept.journal.absolute()
        self.stages, self.replicas = run.model.body_stages, run.swarm.replicas
        nodes = (self.stages + 1) * self.replicas
        self.threads = max(1, available_cores() // nodes)
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        self.processes = Processes(self.logs, environment, PLANARIA, plan.work)
        self.events = EventLog(self.logs, "up")
        self.samples = SamplesFile(self.out, run.name)
        self.experiment: ExperimentPipe | None = None
        if (track := plan.options.track) is not None:
            opening = Opening(track, run.name, plan.out.name, self.run_text, str(self.out))
            self.experiment = ExperimentPipe(opening)
        self.experiment_works = True  # its trouble isn't reported yet
        self.story = RunStory(run.steps)
        self.tails: dict[Path, LineReader] = {}
        for path in self.logs.glob("*.jsonl"):  # of the resumed run
            tail = self.tails[path] = LineReader(path)
            tail.skip()
        self.restarts: Counter[str] = Counter()
        self.at_large: set[str] = set()  # slots whose process the registry places
        self.address = ""  # of the registry
        log = plan.options.log
        self.log = "--log-level", log.log_level, "--log-format", log.log_format
        self.page = ""  # its URL
        self.description: Description | None = None
        self.describing: asyncio.Task[None] | None = None
        self.client: RegistryClient | None = None

    # --- the run

    async def train(self, stop: asyncio.Future[int]) -> Ending:
        """Run the swarm until the run is over. Raises SwarmError."""
        self.screen.say(f"starting; logs are in {self.logs}")
        self.screen.say(learning_rate.describe_rate(self.run))
        if problem := learning_rate.warmup_too_long(self.run):
            self.screen.say(problem, Severity.WARNING)
        self._start("registry")
        self.address = await self._registry_address(stop)
        if not stop.done():
            self._start_nodes()
        progressed, committed, announced = time.monotonic(), 0, False
        patience = PATIENCE * self.run.swarm.progress
        while not stop.done():
            self._read()
            self._apply_due_kills()
            self._apply_due_losses()
            order = self.description.view.order if self.description is not None else TRAIN
            if order == STOPPED:
                at = f"at step {self.story.committed}"
                return Ending(1, f"stopped by its operator {at}; {self._continues()}")
            if self.story.finished is not None and order != STOP:
                await self._wait_for_nodes(stop)
                return await self._wait_for_saves(stop)
            self._replace_ended()
            self.screen.show(self.story, self.description, self.stages)
            if self.story.committed != committed or order != TRAIN:
                progressed, committed = time.monotonic(), self.story.committed
            if self.story.stopped is not None:
                if not self.screen.interactive:
                    return Ending(1, self.story.stopped.reason)
                if not announced:
                    self.screen.say("the nodes keep their weights; Ctrl-C ends them")
                announced = True
            elif time.monotonic() - progressed > patience:
                raise SwarmError(
                    f"no step was committed for {patience:.0f} s (step {committed} was the last); "
                    f"{self._awaited()}. The logs are in {self.logs}"
                )
            await _pause(stop, POLL)
        if self.story.stopped is not None:
            return Ending(1, f"the run was stopped: {self.story.stopped.reason}")
        name = signal.Signals(stop.result()).name
        saving = self.save_dir is not None or self.run.policy.checkpoints
        saved = f"; {self._continues()}" if saving else ""
        reason = f"ended by {name} at step {self.story.committed}{saved}"
        return Ending(128 + stop.result(), reason)

    def _continues(self) -> str:
        return f"planaria up --resume {self.out} continues from there"

    async def end(self) -> None:
        """End every process of the swarm, and close all logs."""
        self.events.write(SwarmEnding())
        if self.describing is not None:
            self.describing.cancel()
        try:
            await self.processes.stop(GRACE if self.save_dir is None else SAVING_GRACE)
        finally:
            self.processes.kill_all()
        if self.client is not None:
            await self.client.close()
        self.events.close()
        self.samples.close()
        if self.experiment is not None:
            await asyncio.to_thread(self.experiment.close)

    async def _registry_address(self, stop: asyncio.Future[int]) -> str:
        """Wait until the registry's process has written its address."""
        file = self.out / ADDRESS
        deadline = time.monotonic() + REGISTRY_START
        while not file.exists() and not stop.done():
            for ended in self.processes.ended():
                raise SwarmError(self._failure(ended))
            if time.monotonic() > deadline:
                log = self.processes.log("registry")
                raise SwarmError(
                    f"the registry isn't listening after {REGISTRY_START:g} s; its log {log} ends:"
                    f"\n{last_lines(log)}"
                )
            await _pause(stop, POLL)
        return "" if stop.done() else file.read_text().strip()

    def _start_nodes(self) -> None:
        self.client = RegistryClient([self.address])
        self.describing = asyncio.get_running_loop().create_task(self._describe())
        for place in self.losses.first():
            self._start(place)

    async def _describe(self) -> None:
        assert self.client is not None
        while True:
            with suppress(RegistryUnreachable, JoinRefused):  # the page shows the last answer
                self.description = await self.client.describe(deadline=1.0)
                if (page := self.description.page) and page != self.page:
                    self.page = page
                    self.screen.say(f"watch it at {page}")
                if self.description.run_file not in ("", self.run_text):
                    self.run_text = self.description.run_file
                    self.run = loads(self.run_text)
                    self.story.steps = self.run.steps
                    self._keep({"run_file": self.run_text})
            await asyncio.sleep(DESCRIBE)

    def _awaited(self) -> str:
        reports = [entry.report for entry in self.description.members] if self.description else []
        messages = {seat.message for report in reports for seat in report.seats if seat.message}
        return "; ".join(sorted(messages)) or "no node reports what it waits for"

    async def _wait_for_nodes(self, stop: asyncio.Future[int]) -> None:
        """Wait until every node that serves a stage, late replacements too, has the state of the
        last step."""
        deadline = time.monotonic() + LAST_NODES
        while not stop.done():
            self._read()
            self.screen.show(self.story, self.description, self.stages)
            for ended in self.processes.ended():
                self.screen.say(self._failure(ended))
            standbys = [node for node, stages in self._seats().items() if not stages]
            late = [
                slot
                for slot, pid in self.processes.running().items()
                if slot != "registry"
                and self.story.node_of(pid) not in standbys
                and self.story.held_by(pid) != {self.run.steps}
            ]
            if not late and not self._samples_due():
                return
            if time.monotonic() > deadline:
                names = ", ".join(f"node-{slot}" for slot in late) or "samples"
                purpose = "to get the last state" if late else "of the last step"
                self.screen.say(f"no longer waiting for {names} {purpose}")
                return
            await _pause(stop, POLL)

    async def _wait_for_saves(self, stop: asyncio.Future[int]) -> Ending:
        """Keep the nodes while the last step of any stage is in memory only."""
        began, reported = time.monotonic(), False
        while stages := self._unsaved():
            self._read()
            self.screen.show(self.story, self.description, self.stages)
            state, waited = f"the last step of {stage_names(stages)}", time.monotonic() - began
            if stop.done():
                name = signal.Signals(stop.result()).name
                return Ending(128 + stop.result(), f"ended by {name}; {state} was not saved")
            if waited > SLOW_SAVE + self.options.hold:
                return Ending(1, f"{state} was neither saved nor exported")
            if not reported and waited > SLOW_SAVE:
                reported = True
                self.screen.say(
                    f"{state} is in memory only. The nodes run for {self.options.hold:g} s more, "
                    f"and retry to save it: free space in {self.save_dir}, or export the model by "
                    f"planaria export --join {self.address} --out DIR. Ctrl-C discards it",
                    Severity.ERROR,
                )
            self._replace_ended()
            await _pause(stop, POLL)
        return Ending(0, "")

    def _unsaved(self) -> list[int]:
        stages = range(self.stages + 1) if self.save_dir is not None else ()
        return unsaved_stages(self.description, stages, self.run.steps)

    def _samples_due(self) -> bool:
        """Whether generated texts of the last step are outstanding."""
        training, made = self.run.training, self.story.samples
        if not training.sample_every or self.run.steps % training.sample_every:
            return False
        return {p for p in made if made[p].step == self.run.steps} != set(training.prompts)

    # --- events

    def _read(self) -> None:
        for path in self.logs.glob("*.jsonl"):
            if path not in self.tails:
                self.tails[path] = LineReader(path)
        lines = [line for tail in self.tails.values() for line in tail.lines() if "time" in line]
        for line in sorted(lines, key=lambda line: float(line["time"])):
            self._keep(line)
            if "kind" not in line:
                self.story.record(line)
            elif entry := parse(line):
                if isinstance(entry.event, Sampled):
                    self.samples.add(entry.event)
                if news := self.story.hear(entry):
                    self.screen.say(*news)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """Pass a line of a log, or a changed run file, on to the experiment tracker."""
        if self.experiment is not None:
            self.experiment.tell(line)
            if self.experiment_works and self.experiment.trouble:
                self.experiment_works = False
                self.screen.say(self.experiment.report(), Severity.ERROR)

    # --- processes

    def _start(self, slot: str) -> None:
        try:
            home = self.homes.get(slot)
            namespace = home.namespace if home else None
            pid = self.processes.start(slot, self._command(slot), namespace)
        except OSError as error:
            raise SwarmError(f"can't start a process for {slot}: {error}") from error
        self.events.write(Started(slot=slot, pid=pid))
        if slot != "registry":
            self.losses.started(slot, time.monotonic())

    def _command(self, slot: str) -> list[str]:
        home = self.homes.get(slot)
        host, plain = (home.host, ["--insecure"]) if home else ("127.0.0.1", [])
        if slot == "registry":
            return [
                *("bootstrap", "--run", str(self.out / RUN_FILE), *plain),
                *("--listen", self.address or f"{host}:0"),
                *("--address-file", str(self.out / ADDRESS)),
                *("--journal", str(self.journal)),
                *("--http", self.options.http, *self.log),
                *([] if self.options.price is None else ["--price", str(self.options.price)]),
            ]
        saves = "none" if self.save_dir is None else str(self.save_dir / slot)
        stage = [] if slot in self.at_large else ["--stage", slot.partition(".")[0]]
        module = self.run.model.module
        folders = folder_options(self.run, self.data, self.checkpoints)
        own_code = [] if module is None else ["--allow-module", module]
        return [
            *("node", "--join", self.address, "--name", f"node-{slot}", *stage),
            *("--listen", f"{host}:0", *plain, "--device", self.device, "--cloud", "none"),
            *("--out", str(self.logs), "--threads", str(self.threads), "--save-dir", saves),
            *("--seats", str(self.options.seats or "auto"), *self.log, *own_code, *folders),
        ]

    def _apply_due_kills(self) -> None:
        due = [kill for kill in self.kills if self._has_begun(kill.step)]
        for kill in due:
            self.kills.remove(kill)
            over = "the run is over" if self.story.finished is not None else ""
            if kill.step <= self.story.resumed:
                over = f"the run goes on from step {self.story.resumed}"
            if over:
                self.screen.say(f"too late to kill at step {kill.step}: {over}")
                continue
            self._kill_slots(kill)

    def _has_begun(self, step: int) -> bool:
        if step > 1:
            return self.story.committed >= step - 1
        # A driver begins as soon as it is named and all nodes have built their stages.
        running = [pid for slot, pid in self.processes.running().items() if slot != "registry"]
        return (
            self.description is not None
            and bool(self.description.view.driver)
            and all(self.story.serves(pid) for pid in running)
        )

    def _kill_slots(self, kill: Kill) -> None:
        slots = kill.slots(self.replicas)
        for slot in slots:
            if not self._kill(slot, kill.step):
                self.screen.say(f"node-{slot} has no process to kill at step {kill.step}")
        for slot in slots if self.replacing else ():
            self._start(slot)
        self._check_any_node_left()

    def _kill(self, slot: str, step: int) -> bool:
        """Kill the process in a slot, and remove its saves. Returns whether there was one."""
        now = time.time()
        pid = self.processes.kill(slot)
        if pid is not None:
            if self.save_dir is not None:
                for saves in (self.save_dir / slot).glob("stage-*"):
                    shutil.rmtree(saves, ignore_errors=True)
            victim = self._describe_victim(slot, pid)
            self.events.write(Killed(slot=slot, pid=pid, step=step, **victim), at=now)
        return pid is not None

    def _apply_due_losses(self) -> None:
        """Apply the schedule's losses and replacements."""
        if self.story.finished is not None:
            return
        if not self.training and (self.story.committed or self._has_begun(1)):
            self.training = True
            self.losses.begin(time.monotonic())
        changes = self.losses.due_changes(time.monotonic())
        for place, starts in changes:
            if starts and self.replacing:
                self.at_large |= {place} if self.losses.at_large else set()
                self._start(place)
            elif not starts:
                self._kill(place, self.story.committed + 1)
        if changes:
            self._check_any_node_left()

    def _check_any_node_left(self) -> None:
        """Check that a node is left, or will be started. Raises SwarmError."""
        more = self.replacing and self.losses.more_to_come()
        if not more and not any(slot != "registry" for slot in self.processes.running()):
            raise SwarmError("no node is left, and none will be started")

    def _seats(self) -> dict[str, Sequence[int]]:
        """The stages of each member, by the registry's last answer."""
        members = self.description.view.members if self.description is not None else ()
        return {member.node: stages_of(member) for member in members}

    def _describe_victim(self, slot: str, pid: int) -> dict[str, Any]:
        node, stage = self.story.node_of(pid), stage_of(slot)
        running = self.processes.running()
        left = sum(other.startswith(f"{stage}.") for other in running)
        if seats := self._seats():  # it may serve another stage
            others = map(self.story.node_of, running.values())
            served = Counter(of for other in others for of in seats.get(other or "", ()))
            stage = min(seats.get(node or "", ()), key=lambda of: served[of], default=stage)
            left = served[stage]
        return {"node": node, "stage": stage, "left": left}

    def _replace_ended(self) -> None:
        for ended in self.processes.ended():
            slot = ended.slot
            log = self.processes.log(slot)
            how = describe_status(ended.status)
            exited = Exited(slot=slot, pid=ended.pid, node=None, log=str(log), how=how)
            if slot != "registry":
                exited = replace(exited, **self._describe_victim(slot, ended.pid))
            self.events.write(exited)
            self._read()
            if slot != "registry" and not self.replacing:
                self.screen.say(f"the log {log} ends:\n{last_lines(log, 4)}")
                self._check_any_node_left()
                continue
            self.restarts[slot] += 1
            hopeless = not self.training and ended.status in FINAL - {0}  # another would fail, too
            if hopeless or self.restarts[slot] > MOST_RESTARTS:
                raise SwarmError(self._failure(ended))
            self.screen.say(f"the log {log} ends:\n{last_lines(log, 4)}")
            self._start(slot)

    def _failure(self, ended: EndedProcess) -> str:
        process = "the registry" if ended.slot == "registry" else f"node-{ended.slot}"
        log = self.processes.log(ended.slot)
        repeated = f", {self.restarts[ended.slot]} times" if self.restarts[ended.slot] else ""
        status = describe_status(ended.status) + repeated
        return f"{process} {status}; its log {log} ends:\n{last_lines(log)}"


async def _pause(stop: asyncio.Future[int], seconds: float) -> None:
    await asyncio.wait([stop], timeout=seconds)
