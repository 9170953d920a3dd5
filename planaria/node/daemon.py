"""The node daemon: one process, uvloop for I/O, one thread for torch.

A `Node` is one identity. It joins, keeps its links and its membership, and makes an `Agent` for
each seat that the registry assigns, for which it implements the ports. A node that the registry has
dropped starts over as a new one, in the same process, without its old state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.address import EVERYWHERE, Address, Reach
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.neighbours import to_link
from planaria.bootstrap.rules import PROTOCOL
from planaria.bootstrap.spelling import readable
from planaria.node.agent import Agent, frame_bytes, held_bytes
from planaria.node.data.mixture import Data
from planaria.node.data.windows import AnyWindows
from planaria.node.hugging_face.living_run import from_inside
from planaria.node.hugging_face.samples import sampler_of
from planaria.node.launch.errors import NodeError
from planaria.node.machine.compute import ComputeThread
from planaria.node.machine.cores import available_cores
from planaria.node.machine.device import memory_of
from planaria.node.machine.watch import COMPILING, FLOOR, Hang, Watch
from planaria.node.model.architecture import Architecture
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.shape import ModelConfig
from planaria.node.ports import Ports, Priority
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import (
    ComputeGoesOn,
    ComputeHangs,
    ComputeSlow,
    CostSoFar,
    Event,
    Finished,
    GivenBack,
    HandedOver,
    HoldingCost,
    Joined,
    LinkLost,
    LinkRelayed,
    Preempted,
    RebuildOrdered,
    Sampled,
    Serving,
    StageRebuilt,
    Stopped,
    Wall,
    WriteFailed,
    WrittenAgain,
    is_for_all,
)
from planaria.node.report.events import line as event_line
from planaria.node.report.experiment import ExperimentPipe
from planaria.node.report.ledger import Ledger, header_of, line, recording, windows_in
from planaria.node.report.line_file import BackgroundLineFile, LineFile
from planaria.node.report.log_stream import LastLines
from planaria.node.report.samples import SamplesFile, in_report
from planaria.node.report.wall_clock import WallClock
from planaria.node.run_file import RunFile
from planaria.node.seats import SeatCompute, SeatNet, Seats
from planaria.node.stage.arithmetic import TorchStage, layout_of, make_twin
from planaria.node.stage.initial import Beginning
from planaria.node.stage.room import DeviceRoom
from planaria.node.state.handover import FAREWELL
from planaria.node.state.holdings import CLOSE, Holdings
from planaria.node.state.saves import Contents, saves_on_disk
from planaria.node.transaction.attempt import NoRoomError
from planaria.node.transaction.leaving import Leaving
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.chain import has_records
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frames import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_speed import measure_all
from planaria.node.wire.link_table import Peer
from planaria.node.wire.looped import ClosedError, LoopedExchanges
from planaria.node.wire.missing_links import MissingLinks
from planaria.node.wire.naming import new_identity, node_of, seat_id
from planaria.node.wire.observers import Observers
from planaria.node.wire.relays import Relay
from planaria.recovery.facts import COPIED, OWN

log = logging.getLogger("planaria")

TICK = 0.05
"""Seconds between two ticks."""
LOOK_AT_FILES = 1.0
"""Seconds between two checks whether disks accept writes."""
MOST_MEASURED = 200
"""Maximum links that a node measures: each renewal carries the results."""
MOST_REBUILDS = 20
"""Maximum rebuilds reported in each renewal; the registry remembers more."""


@dataclass(frozen=True)
class NodePlace:
    """A node's settings and resources, whatever its identity."""

    stage: int | None  # requested stage
    listen: str | None  # HOST:PORT; None: does not listen
    advertise: str  # HOST:PORT, or empty: only dials out
    device: torch.device
    out: Path | None
    host: str
    save_dir: Path | None = None  # for saves of this node's stage
    credentials: Credentials = PLAIN
    insecure: bool = False
    identity: Identity = field(default_factory=Identity.generate)  # over all its ids
    saved: bool = False  # whether the stage is that of its saves
    room: int = 1  # seats that it can hold
    standby: bool = False  # whether it waits without a seat for a vacant one
    checkpoint: Checkpoint | None = None  # from which the run begins
    name: str = ""  # by its owner; each identity begins with it
    experiment: ExperimentPipe | None = None  # an external record of the run
    log: LastLines | None = None  # for observers; None: not shared
    reach: Reach = EVERYWHERE  # its network, in which it dials others
    own: Architecture | None = None  # built by the code of a run's own architecture
    checkpoint_dir: Path | None = None  # shared by all nodes; None: no checkpoints


class Node:
    """One identity of a node, from joining to leaving, and the seats that it holds."""

    def __init__(
        self,
        place: NodePlace,
        run_id: str,
        run: RunFile,
        config: ModelConfig,
        corpus: Data | None,
        client: RegistryClient,
        speed: float,
    ) -> None:
        self.node = new_identity(place.name)
        self.place, self.run_id, self.run, self.config = place, run_id, run, config
        self.corpus, self.client, self.speed = corpus, client, speed
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self.loop.create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        floor = COMPILING if run.training.compile else FLOOR
        watch = Watch(run.swarm.progress, floor)
        self.compute = ComputeThread(f"compute-{self.node}", self.loop, watch)
        self.hang: Hang | None = None
        self.abandoned = ""  # the task of a hanging compute thread
        self.observers = Observers()
        self.links = Links(
            run_id,
            self.node,
            place.identity,
            events=self,
            settings=LinkSettings(
                silence=run.swarm.silence,
                payload=frame_bytes(run, config),
                held=held_bytes(run, config),
                insecure=place.insecure,
                reach=place.reach,
            ),
            credentials=place.credentials,
            observers=self.observers,
        )
        self.events = EventLog(place.out, self.node, BackgroundLineFile)
        self.files = [] if self.events.file is None else [self.events.file]
        if place.experiment is not None:
            self.files.append(place.experiment)
        self.ledgers: dict[str, LineFile] = {}  # ledgers, by seat
        self.ordered: dict[str, bool] = {}  # by seat: whether its newest rebuild is exact
        self.rebuilds: deque[registry.Rebuild] = deque(maxlen=MOST_REBUILDS)
        self.sampler = sampler_of(run, corpus, self.spawn, self.sampled)
        self.samples: dict[str, Sampled] = {}  # the newest, by prompt
        self.samples_file: SamplesFile | None = None
        if place.out is not None:
            self.samples_file = SamplesFile(place.out, run.name, self._open_file)
        self.failing: set[LineFile] = set()
        self.files_checked = 0.0
        self.view = registry.View()
        self.needed: list[str] = []  # members with which it needs a link
        self.missing = MissingLinks()
        self.carriers: dict[str, str] = {}  # relays of indirect links, by peer
        self.seats: Seats[Agent] = Seats(self.node, self.links, self.observers.tell, self.read_log)
        self.observers.seats = self.seats
        self.on_message, self.on_frame = self.seats.on_message, self.seats.on_frame
        self.on_link_up = self.seats.on_link_up
        self.exchanges: dict[str, LoopedExchanges] = {}  # of each seat
        self.memory, self.room = memory_of(place.device), DeviceRoom(place.device)
        self.rehearsing: asyncio.Task[None] | None = None  # while it has no seat
        self.leaving = self.retiring = False
        self.leaves_by = 0.0  # on the loop's clock; 0: it wasn't asked to leave
        self.measuring: asyncio.Task[None] | None = None
        self.requested_measurement = 0  # number of the newest
        self.measured: tuple[int, list[registry.LinkReport]] = (0, [])
        self.wall = WallClock(time.monotonic())
        self.wall_reported = time.monotonic()

    # --- life

    async def live(self) -> str:
        """Join, serve until something ends it, and clean up. Returns why it is over: `rejoin: ...`
        or what `stop` said. Raises JoinRefused, RegistryUnreachable, or what crashed it."""
        try:
            port = await self.links.start(self.place.listen)
            reply = await self.client.join(
                registry.JoinRequest(
                    protocol=PROTOCOL,
                    node=self.node,
                    address=_address(self.place.advertise, port),
                    stage=self.place.stage,
                    data=self.corpus.content if self.corpus else "",
                    speed=self.speed,
                    host=self.place.host,
                    device=str(self.place.device),
                    run=self.run_id,
                    room=self.place.room,
                    standby=self.place.standby,
                    saved=self.place.saved,
                ),
                self.place.identity,
            )
            self.tell(Joined(reason=reply.reason, host=self.place.host, pid=os.getpid()))
            self.spawn(self._tick())
            self.spawn(
                self.client.keep_membership(
                    self.node, reply, self.viewed, self.evicted, self.asked_to_measure
                )
            )
            self.viewed(reply.view)
            return await asyncio.shield(self.over)
        finally:
            await self._clean_up()

    async def retire(self, grace: float, why: str = "") -> None:
        """Save, let an heir take over where possible, and leave, all within `grace` seconds, as a
        spot instance does on notice. `why`: the source of the notice."""
        self.tell(Preempted(grace=grace, reason=why))
        self.leaves_by = self.loop.time() + grace - FAREWELL
        await self._prepare_to_leave()
        await self.leave("stopped by its owner")

    async def _prepare_to_leave(self) -> None:
        """Saves and hands over seats; before a run begins, and after it ends, only saves count.
        Writes in progress when the node has left are awaited at its end."""
        seats = {} if self.hang else dict(self.seats.agents)
        needed = {n: s for n, s in seats.items() if s.member.halt is None and s.member.committed}
        leaving = Leaving(self.node, self.view, self.loop.time())
        self.leaving = self.retiring = True
        self.report()
        try:
            async with asyncio.timeout_at(self.leaves_by):
                await self._save_now(seats)
        except TimeoutError:
            log.warning("no save before the node leaves: %s", self.hang or "the disk is too slow")
        for name, seat in needed.items():
            await self._hand_over(name, seat, leaving)

    async def _save_now(self, seats: Mapping[str, Agent]) -> None:
        for name, seat in seats.items():
            if name in self.exchanges:  # it wasn't given back since then
                try:
                    await self.exchanges[name].outcome(seat.own_saves.save_now())
                except ClosedError as closed:
                    log.info("stage %s is not saved: %s", seat.stage, closed)

    async def _hand_over(self, name: str, seat: Agent, leaving: Leaving) -> None:
        """Hands over the seat if it is its stage's last; otherwise the remaining replicas go on."""
        stage, now = seat.stage, self.loop.time()
        while now < self.leaves_by and leaving.waits(stage, self.view, seat.members, now):
            await asyncio.sleep(TICK)
            now = self.loop.time()
        if heir := leaving.heir(stage, self.view, seat.members):
            self.tell(HandedOver(to=heir, stage=stage))
        elif leaving.lives_on(stage, self.view):
            return
        elif stage == 0:
            await self._deposit(name, seat)
        else:
            log.warning("no node has taken over stage %s", stage)

    async def _deposit(self, name: str, seat: Agent) -> None:
        """Leaves stage 0's exact state with a body node, until a node of the owner's is back."""
        try:
            async with asyncio.timeout_at(self.leaves_by):
                holder = await self.exchanges[name].outcome(seat.own_saves.deposit())
            log.info("%s has the exact state of stage 0", holder)
        except (TimeoutError, ClosedError, ComplaintError) as error:
            log.warning("no node has the exact state of stage 0: %s", error or "it took too long")

    async def leave(self, why: str) -> None:
        """Reports the departure to the registry, which then needn't detect it."""
        if self.view.number:
            await self.client.leave(self.node, why)

    def unsaved(self) -> list[int]:
        """Stages to be saved whose last step is in memory only."""
        seats = self.seats.agents.values() if self.place.save_dir is not None else ()
        return [seat.stage for seat in seats if seat.own_saves.lacks_last]

    def stop(self, why: str) -> None:
        """Ends `live`, which returns `why`."""
        if not self.over.done():
            self.over.set_result(why)

    def crashed(self, error: BaseException) -> None:
        if isinstance(error, NoRoomError):  # another process wouldn't have more
            error = NodeError(str(error))
        if not self.over.done():
            self.over.set_exception(error)

    async def _clean_up(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for exchanges in self.exchanges.values():
            exchanges.close()
        await self.links.stop()
        if not await asyncio.to_thread(self.compute.stop):
            self.abandoned = str(self.hang or "its compute thread doesn't end")
            log.error("%s", self.abandoned)
            for seat in self.seats.agents.values():
                await asyncio.to_thread(seat.own_saves.save_beside)
        self.tell(Wall(**self.wall.report()))
        for seat in self.seats.agents.values():
            await self._finish_saves(seat)
        self._tell_costs()
        own = [file for file in self.files if file is not self.place.experiment]
        await asyncio.gather(*(asyncio.to_thread(file.close) for file in own))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)

    # --- link speed

    def asked_to_measure(self, number: int) -> None:
        """A measurement already under way serves for this, too."""
        self.requested_measurement = number
        if self.measuring is None or self.measuring.done():
            self.measuring = self.spawn(self._measure_links())

    async def _measure_links(self) -> None:
        links = await measure_all(self.links, self.links.peers[:MOST_MEASURED])
        self.measured = self.requested_measurement, links
        self.report()

    # --- membership

    def evicted(self, reason: str) -> None:
        self.stop(f"rejoin: {reason}")

    def viewed(self, view: registry.View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        log.info("view %d: %s", view.number, view.reason)
        self.observers.bar(view.banned)
        own = next((member for member in view.members if member.node == self.node), None)
        if own is None:
            self.stop(f"rejoin: view {view.number} is without this node: {view.reason}")
            return
        self.needed = to_link(own, view, self.config.stages, self.run.policy.swapped)
        self.links.set_peers(view.number, _peers(view), self.needed)
        self.links.set_relays(Relay(relay.a, relay.b, relay.via) for relay in view.relays)
        if self.sampler is not None:
            self.sampler.viewed()
        new, closed = self.seats.viewed(view, self.loop.time())
        for name, seat in closed.items():
            self.spawn(self._close_seat(name, seat))
        for name, assigned in new.items():
            self.spawn(self._take_seat(name, assigned.stage))
        if not own.seats and self.rehearsing is None:
            self.rehearsing = self.spawn(self._rehearse())

    async def _rehearse(self) -> None:
        """Runs once, on a standby, what takes longer the first time, whichever seat it gets."""
        if self.corpus is not None:
            self.corpus.verify_in_background()
        place, began = self.place, self.loop.time()

        def rehearse() -> None:
            beginning = Beginning(self.run, self.config, own=place.own)
            TorchStage(self.node, 1, beginning, place.device, begun=True).rehearse()

        try:
            await self.compute.run(rehearse, Priority.BACKGROUND)
        except RuntimeError as error:  # of the device: for example, it has no memory for it
            log.warning("this node may not be able to serve a stage: %s", error)
        else:
            log.info("ready for a seat: rehearsed in %.1f s", self.loop.time() - began)

    async def _close_seat(self, name: str, seat: Agent) -> None:
        """Closes a seat and drops its state."""
        self.exchanges.pop(name).close("its seat was given back")
        self.tell(GivenBack(stage=seat.stage), seat.node)
        self.report()
        if (ledger := self.ledgers.pop(name, None)) is not None:
            self.files.remove(ledger)
            self.failing.discard(ledger)
            await asyncio.to_thread(ledger.close)
        await self._finish_saves(seat)

    async def _finish_saves(self, seat: Agent) -> None:
        """Waits for saves: CLOSE seconds, or all that is left to a leaving node."""
        left = max(CLOSE, self.leaves_by - self.loop.time())
        await asyncio.to_thread(seat.holdings.finish_saves, left)

    async def _take_seat(self, name: str, stage: int) -> None:
        corpus = self.corpus if stage == 0 else None
        if corpus is not None:
            corpus.verify_in_background()
        place, run, config, own = self.place, self.run, self.config, seat_id(self.node, name)
        exchanges = LoopedExchanges(self.compute, self.loop, self.crashed)
        ledger = await asyncio.to_thread(self._open_ledger, corpus, name)
        record = SeatRecord(self, own, ledger)

        def make_holdings(seat: Agent) -> Holdings:
            open_disk = saves_on_disk(
                self.run_id,
                stage,
                in_flight=run.saves.in_flight,
                on_loop=self.loop.call_soon_threadsafe,
                contents=Contents.of(config, stage),
            )
            twin = None
            if run.policy.twins:
                twin = make_twin(seat, place.device, place.checkpoint, place.own)
            folders = place.save_dir, place.checkpoint_dir
            return Holdings(seat, twin, partial(layout_of, config), open_disk, *folders)

        def build() -> Agent:
            # One committed step may be made again from the beginning, if all are lost.
            begun = self.view.committed > 1
            beginning = Beginning(run, config, place.checkpoint, place.own)
            arithmetic = TorchStage(own, stage, beginning, place.device, corpus, begun, self.room)
            net, compute = SeatNet(self.seats, name), SeatCompute(self.seats, name, self.compute)
            chance, identity = SystemRandom(), place.identity
            ports = Ports(net, exchanges, compute, tensors, arithmetic, record, chance, identity)
            return Agent(own, stage, run, config, ports, make_holdings)

        seat = await self.compute.run(build)
        self.tell(Serving(stage=stage, device=str(place.device)), own)
        self.exchanges[name] = exchanges
        if not self.seats.built(name, seat, self.loop.time()):
            await self._close_seat(name, seat)

    def _open_ledger(self, corpus: Data | None, name: str) -> tuple[Ledger, AnyWindows] | None:
        """Opens the ledger at stage 0, which has the corpus, with the windows of its lines."""
        if corpus is None or self.place.out is None:
            return None
        shares = corpus.shares(self.config.context)
        header = header_of(self.run, self.config.context, corpus.content, shares)
        path = self.place.out / f"ledger-{self.node}-{name}.jsonl"
        ledger = Ledger(path, header, self._open_file)
        windows = windows_in(header)
        self.ledgers[name] = ledger.file
        return ledger, windows

    # --- samples

    def committed(self, step: int) -> None:
        if self.sampler is not None and self.view.driver == self.node:
            access = from_inside(self.node, self.observers, self.run, self.view)
            self.sampler.committed(step, access)

    def sampled(self, sample: Sampled) -> None:
        self.tell(sample)
        self.samples[sample.prompt] = sample
        if self.samples_file is not None:
            self.samples_file.add(sample)
        self.report()

    def _open_file(self, path: Path) -> LineFile:
        file = BackgroundLineFile(path)
        self.files.append(file)
        return file

    # --- links

    def read_log(self, request: pb.LogRequest) -> pb.LogLines:
        """Returns log lines for an observer."""
        if self.place.log is None:
            return pb.LogLines(error="its owner does not share it (--no-share-log)")
        lines, last = self.place.log.after(request.after, request.lines)
        return pb.LogLines(lines=map(readable, lines), last=last)

    def on_link_lost(
        self, peer: str, reason: str, lost: list[Frame], now: float, cause: registry.Cause
    ) -> None:
        self.tell(LinkLost(peer=peer, reason=reason))
        if any(member.node == peer for member in self.view.members):
            self.client.suspect(peer, reason, cause)
        self.seats.on_link_lost(peer, reason, lost, now, cause)

    # --- reports

    def tell(self, event: Event, by: str = "") -> None:
        """Logs and reports an event. `by`: the event's seat; empty: the node."""
        log.log(event.severity.log_level, "%s", event.sentence(by or self.node))
        now = time.time()
        self.events.write(event, by, now)
        if is_for_all(event):
            record = event_line(event, by or self.node, now)
            self.client.tell(json.dumps(record))
            self.keep(record)
        if isinstance(event, RebuildOrdered):
            self.ordered[event.node] = event.exact
        if isinstance(event, StageRebuilt) and event.method not in (*OWN, *COPIED):
            rebuilt = registry.Rebuild(stage=event.stage, step=event.step, method=event.method)
            rebuilt.exact = self.ordered.pop(event.node, False)
            self.rebuilds.append(rebuilt)

    def keep(self, record: Mapping[str, Any]) -> None:
        """Adds a line of the event log or the ledger to the external record, if any."""
        if self.place.experiment is not None:
            self.place.experiment.tell(record)

    # --- the clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self.loop.time() - self.files_checked > LOOK_AT_FILES:
                self.files_checked = self.loop.time()
                self._look_at_files()
            self._mind_compute()
            if self.missing.look(self.needed, self.links.carrier, self.loop.time()):
                self.report()
            self._tell_carriers()
            self.seats.tick(self.loop.time())
            if not self.seats:
                continue
            now = time.monotonic()
            self.wall.sample(now, self.compute.busy_seconds(now), self._doing())
            if time.monotonic() - self.wall_reported > 2.0:
                self.wall_reported = time.monotonic()
                self.tell(Wall(**self.wall.report()))
                self._tell_costs()
                self.report()

    def _tell_carriers(self) -> None:
        carriers = {peer: via for peer in self.links.peers if (via := self.links.carrier(peer))}
        before, self.carriers = self.carriers, carriers
        for peer in sorted(before.keys() | carriers.keys()):
            via = carriers.get(peer, "")
            if via != before.get(peer, "") and self.links.linked(peer):
                self.tell(LinkRelayed(peer=peer, via=via))

    def _mind_compute(self) -> None:
        """Reports when the compute thread begins to hang, and when it goes on."""
        slow, before, self.hang = self.compute.watch.slow, self.hang, self.compute.look()
        if slow is None and self.compute.watch.slow is not None:
            self._tell_slow(*self.compute.watch.slow)
        if (before is None) == (self.hang is None):
            return
        if self.hang is not None:
            task, seconds, usual = self.hang
            self.tell(ComputeHangs(task=task, seconds=seconds, usual=usual or None))
        elif before is not None:
            self.tell(ComputeGoesOn(task=before.task))
            self.leaving = self.retiring
        for seat in list(self.seats.agents.values()):
            seat.compute_hangs(str(self.hang or ""), self.loop.time())
        self.report()

    def _tell_slow(self, task: str, seconds: float, usual: float) -> None:
        load, cores = os.getloadavg()[0], available_cores()
        self.tell(
            ComputeSlow(task=task, seconds=seconds, usual=usual or None, load=load, cores=cores)
        )

    def _look_at_files(self) -> None:
        """Reports when a disk begins, and ceases, to refuse writes."""
        for file in self.files:
            if file.trouble and file not in self.failing:
                self.failing.add(file)
                self.tell(WriteFailed(reason=file.report()))
            elif file in self.failing and not file.trouble:
                self.failing.remove(file)
                self.tell(WrittenAgain(path=str(file.path), dropped=file.waiting.dropped))
                file.waiting.dropped = 0

    def _tell_costs(self) -> None:
        """Reports the cost of keeping state for a loss."""
        parts: dict[str, HoldingCost] = {}
        for seat in self.seats.agents.values():
            for name, cost in seat.costs().items():
                parts[name] = parts.get(name, HoldingCost()) + cost
        if parts:
            self.tell(CostSoFar.of(parts))

    def _doing(self) -> str:
        doing = next(filter(None, (seat.doing() for seat in self.seats.agents.values())), "")
        return doing or ("send" if self.links.unacknowledged else "idle")

    def report(self) -> None:
        """Reports to the registry."""
        self.client.report(self.make_report())

    def make_report(self) -> registry.Report:
        """The report about the machine and its seats."""
        number, links = self.measured
        troubles = [file.report() for file in self.files if file.trouble]
        saves = [seat.own_saves for seat in self.seats.agents.values()]
        troubles += [own.trouble for own in saves if own.trouble]
        return registry.Report(
            seats=[seat.report() for seat in self.seats.agents.values()],
            bytes_in=self.links.bytes_in,
            bytes_out=self.links.bytes_out,
            leaving=self.leaving,
            trouble="; ".join(troubles),
            memory=self.memory,
            stalled_seconds=0.0 if self.hang is None else self.hang.seconds,
            measured=number,
            links=links,
            complaints=self.missing.complaints(),
            unlisted=self.missing.unlisted,
            samples=in_report(self.samples.values()),
            rebuilds=self.rebuilds,
        )


class SeatRecord:
    """The port `Record`: where the seat at a stage reports events."""

    def __init__(self, node: Node, seat: str, ledger: tuple[Ledger, AnyWindows] | None) -> None:
        self._node, self._seat, self._ledger = node, seat, ledger
        self._lacks_last = False  # others were sent the last step's records

    def tell(self, event: Event) -> None:
        self._node.tell(event, self._seat)

    def committed(self, commit: pb.Commit) -> None:
        self._lacks_last = not has_records(commit)
        if self._ledger is not None and commit.step > 0 and has_records(commit):
            ledger, windows = self._ledger
            record = line(commit, windows.epoch(commit.step), time.time())
            ledger.append(record)
            self._node.keep(record)
        elif self._node.place.experiment is not None and commit.step > 0:
            self._node.keep(line(commit, 0, time.time()))  # only stage 0 knows the epoch
        self._node.committed(commit.step)

    def recording(self) -> pb.Recording:
        if self._ledger is None:
            return pb.NO_LEDGER
        return recording(self._ledger[0].file, self._lacks_last)

    def changed(self) -> None:
        self._node.report()

    def halted(self, halt: pb.Halt) -> None:
        kind = Finished if halt.finished else Stopped
        self.tell(kind(step=halt.step, reason=halt.reason, validation=halt.validation_loss))
        log.info("the weights of %s are kept until Ctrl-C", self._seat)
        self._node.report()

    def suspect(self, node: str, why: str, cause: registry.Cause) -> None:
        if node_of(node) == self._node.node:
            self.over(why)  # no other node can be blamed
        else:
            self._node.client.suspect(node_of(node), why, cause)

    def replace(self, why: str) -> None:
        log.warning("%s", why)
        self._node.leaving = True
        self._node.report()

    def over(self, reason: str) -> None:
        self._node.stop(f"rejoin: {reason}")


def _address(advertise: str, port: int) -> str:
    """The address that peers dial; `port` is the one that this node listens on."""
    if not advertise:
        return ""
    address = Address.parse(advertise)
    return str(address if address.port else address._replace(port=port))


def _peers(view: registry.View) -> list[Peer]:
    return [Peer(member.node, member.address, member.key) for member in view.members]
