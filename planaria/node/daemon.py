"""The node daemon: one process, uvloop for I/O, one thread for torch.

A `DaemonMachine` is what a node (node.py) has of this process and its machine: the compute thread,
the files and the device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeAlias

from planaria.node.agent import Agent
from planaria.node.data.windows import Windows
from planaria.node.machine.compute import ComputeThread
from planaria.node.machine.device import memory_of
from planaria.node.machine.hang_watch import COMPILING, FLOOR, HangWatch
from planaria.node.node import Node, SeatRecord
from planaria.node.ports import Ports, Priority
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import Event, Sampled, Wall, WriteFailed, WrittenAgain
from planaria.node.report.ledger import Ledger, header_of, ledger_line, windows_in
from planaria.node.report.line_file import BackgroundLineFile, LineFile
from planaria.node.report.samples import SamplesFile
from planaria.node.report.wall_clock import WallClock
from planaria.node.seats import SeatCompute, SeatNet
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.memory_limit import DeviceRoom
from planaria.node.stage.torch_stage import TorchStage, make_twin
from planaria.node.state.copies import layout_of
from planaria.node.state.holdings import Holdings
from planaria.node.state.save_file import Contents
from planaria.node.state.saves_on_disk import saves_on_disk
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.commit_chain import has_records
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.seat_names import seat_id

log = logging.getLogger("planaria")

FILES_CHECKED = 1.0
"""Seconds between two checks whether disks accept writes."""
LOADED = 10e6
"""Values of a stage that a slow machine reads and packs in a second."""
WALL_REPORTED = 2.0
"""Seconds between two reports of wall time and costs."""


class DaemonMachine:
    """The port `Machine` in a process of its own."""

    def __init__(self, node: DaemonNode) -> None:
        self._node, self._place, self._run = node, node.place, node.run
        floor = COMPILING if node.run.training.compile else FLOOR
        loading = max(node.config.parameters) / LOADED
        spins = self._place.device.type != "cpu"
        watch = HangWatch(node.run.swarm.progress + loading, floor, spins)
        self.compute = ComputeThread(f"compute-{node.node}", node.loop, watch)
        self.memory, self._room = memory_of(self._place.device), DeviceRoom(self._place.device)
        self._events = EventLog(self._place.out, node.node, BackgroundLineFile)
        self.files: list[LineFile] = []
        if self._events.file is not None:
            self.files.append(self._events.file)
        if self._place.experiment is not None:
            self.files.append(self._place.experiment)
        self._samples: SamplesFile | None = None
        if self._place.out is not None:
            self._samples = SamplesFile(self._place.out, node.run.name, self._open_file)
        self._ledgers: dict[str, tuple[Ledger, Windows]] = {}
        self._failing: set[LineFile] = set()
        self._files_checked = 0.0
        self.wall = WallClock(time.monotonic())
        self._wall_reported = time.monotonic()

    def time(self) -> float:
        return time.time()

    @property
    def ledgers(self) -> Mapping[str, LineFile]:
        return {name: ledger.file for name, (ledger, _) in self._ledgers.items()}

    # --- seats

    async def build(self, name: str, stage: int, exchanges: Exchanges) -> Agent:
        node, place, run, config = self._node, self._place, self._run, self._node.config
        corpus = node.corpus if stage == 0 else None
        if corpus is not None:
            corpus.verify_in_background()
            await asyncio.to_thread(self._open_ledger, name)
        own = seat_id(node.node, name)

        def build() -> Agent:
            # One committed step may be made again from the beginning, if all are lost.
            begun = node.view.committed > 1
            beginning = InitialStages(run, config, place.checkpoint, place.own)
            arithmetic = TorchStage(stage, beginning, place.device, corpus, begun, self._room)
            net, compute = SeatNet(node.seats, name), SeatCompute(node.seats, name, self.compute)
            chance, identity, record = SystemRandom(), place.identity, SeatRecord(node, name)
            ports = Ports(net, exchanges, compute, tensors, arithmetic, record, chance, identity)
            return Agent(own, stage, run, config, ports, self._make_holdings)

        return await self.compute.run(build)

    def _make_holdings(self, seat: Agent) -> Holdings:
        place, run, config = self._place, self._run, self._node.config
        open_disk = saves_on_disk(
            self._node.run_id,
            seat.stage,
            in_flight=run.saves.in_flight,
            on_loop=self._node.loop.call_soon_threadsafe,
            contents=Contents.of(config, seat.stage),
            milestones=run.saves.milestones,
        )
        twin = None
        if run.policy.twins:
            twin = make_twin(seat, place.device, place.checkpoint, place.own)
        folders = place.save_dir, place.checkpoint_dir
        return Holdings(seat, twin, partial(layout_of, config), open_disk, *folders)

    def _open_ledger(self, name: str) -> None:
        """Opens the ledger at stage 0, which has the corpus."""
        corpus = self._node.corpus
        if corpus is None or self._place.out is None:
            return
        context = self._node.config.context
        header = header_of(self._run, context, corpus.content, corpus.shares(context))
        path = self._place.out / f"ledger-{self._node.node}-{name}.jsonl"
        self._ledgers[name] = Ledger(path, header, self._open_file), windows_in(header)

    async def close(self, name: str, seat: Agent, seconds: float) -> None:
        if name in self._ledgers:
            file = self._ledgers.pop(name)[0].file
            self.files.remove(file)
            self._failing.discard(file)
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(seat.holdings.finish_saves, seconds)

    async def rehearse(self) -> None:
        node, place, began = self._node, self._place, time.monotonic()
        if node.corpus is not None:
            node.corpus.verify_in_background()

        def rehearse() -> None:
            beginning = InitialStages(self._run, node.config, own=place.own)
            TorchStage(1, beginning, place.device, begun=True).rehearse()

        try:
            await self.compute.run(rehearse, Priority.BACKGROUND)
        except RuntimeError as error:  # of the device: for example, it has no memory for it
            log.warning("this node may not be able to serve a stage: %s", error)
        else:
            log.info("ready for a seat: rehearsed in %.1f s", time.monotonic() - began)

    async def finish(self, hang: str, seconds: float) -> str:
        abandoned, seats = "", self._node.seats.agents.values()
        if not await asyncio.to_thread(self.compute.stop):
            abandoned = hang or "its compute thread doesn't end"
            log.error("%s", abandoned)
            for seat in seats:
                await asyncio.to_thread(seat.own_saves.save_despite_hang)
        self._node.tell(Wall(**self.wall.report()))
        # Together: else several seats wait for a hung disk longer than the supervisor does.
        saves = [asyncio.to_thread(seat.holdings.finish_saves, seconds) for seat in seats]
        await asyncio.gather(*saves)
        self._node.tell_costs()
        own = [file for file in self.files if file is not self._place.experiment]
        await asyncio.gather(*(asyncio.to_thread(file.close) for file in own))
        return abandoned

    # --- files

    def _open_file(self, path: Path) -> LineFile:
        file = BackgroundLineFile(path)
        self.files.append(file)
        return file

    def write(self, event: Event, by: str, time: float) -> None:
        self._events.write(event, by, time)
        if isinstance(event, Sampled) and self._samples is not None:
            self._samples.add(event)

    def track(self, record: Mapping[str, Any]) -> None:
        if self._place.experiment is not None:
            self._place.experiment.tell(record)

    def committed(self, name: str, commit: pb.Commit) -> None:
        if name in self._ledgers and has_records(commit):
            ledger, windows = self._ledgers[name]
            record = ledger_line(commit, windows.epoch(commit.step), time.time())
            ledger.append(record)
            self.track(record)
        elif self._place.experiment is not None:
            self.track(ledger_line(commit, 0, time.time()))  # only stage 0 knows the epoch

    def troubles(self) -> list[str]:
        return [file.report() for file in self.files if file.trouble]

    def tick(self, now: float) -> None:
        if now - self._files_checked > FILES_CHECKED:
            self._files_checked = now
            self._check_files()
        if self._node.seats.agents:
            self._measure(time.monotonic())

    def _check_files(self) -> None:
        """Reports when a disk begins, and ceases, to refuse writes."""
        for file in self.files:
            if file.trouble and file not in self._failing:
                self._failing.add(file)
                self._node.tell(WriteFailed(reason=file.report()))
            elif file in self._failing and not file.trouble:
                self._failing.remove(file)
                self._node.tell(WrittenAgain(path=str(file.path), dropped=file.waiting.dropped))
                file.waiting.dropped = 0

    def _measure(self, now: float) -> None:
        """Samples what the node spends its wall time on, and reports that and its costs."""
        self.wall.sample(now, self.compute.busy_seconds(now), self._node.doing())
        if now - self._wall_reported > WALL_REPORTED:
            self._wall_reported = now
            self._node.tell(Wall(**self.wall.report()))
            self._node.tell_costs()
            self._node.report()


DaemonNode: TypeAlias = Node[DaemonMachine]
