"""A node: one identity, from joining to leaving, and the seats that it holds.

A `Node` joins, keeps its links and its membership, and makes an `Agent` for each seat that the
registry assigns. It runs on any event loop, in real and in virtual time: what needs a thread, a
file or a device is behind the port `Machine`, which node/daemon.py implements. A node that the
registry has dropped starts over as a new one, in the same process, without its old state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.address import EVERYWHERE, Address, Reach
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.neighbours import to_link
from planaria.bootstrap.operator_orders import changes_in_force
from planaria.bootstrap.rules import PROTOCOL
from planaria.bootstrap.step_time import MOST_WEIGHED
from planaria.node.agent import Agent, frame_bytes, held_bytes
from planaria.node.data.mixture import Data
from planaria.node.hugging_face.living_run import inside_access
from planaria.node.hugging_face.samples import sampler_of
from planaria.node.launch.errors import NodeError
from planaria.node.launch.notices import FAREWELL
from planaria.node.machine.cores import available_cores
from planaria.node.machine.hang_watch import Hang, HangWatch
from planaria.node.model.architecture import Architecture
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.shape import ModelConfig
from planaria.node.ports import Compute
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
    event_line,
    is_for_all,
)
from planaria.node.report.experiment import ExperimentPipe
from planaria.node.report.ledger import recording
from planaria.node.report.line_file import LineFile
from planaria.node.report.log_stream import LastLines
from planaria.node.report.samples import samples_to_report
from planaria.node.run_file import RunFile
from planaria.node.seats import Seats
from planaria.node.state.holdings import CLOSE
from planaria.node.transaction.attempt import NoRoomError
from planaria.node.transaction.leaving import Leaving
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import has_records
from planaria.node.wire.exchange import ClosedError, ComplaintError, Exchanges
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_speed import measure_all, speeds_seen
from planaria.node.wire.link_table import Peer
from planaria.node.wire.missing_links import MissingLinks
from planaria.node.wire.observers import Observers
from planaria.node.wire.relays import Relay
from planaria.node.wire.seat_names import node_of, seat_id
from planaria.recovery.facts import COPIED, OWN

log = logging.getLogger("planaria")

TICK = 0.1
"""Seconds between two ticks."""
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
    saves: Sequence[int] = ()  # stages of which it has saves, the newest first
    room: int = 1  # seats that it can hold
    standby: bool = False  # whether it waits without a seat for a vacant one
    checkpoint: Checkpoint | None = None  # from which the run begins
    name: str = ""  # by its owner; each identity begins with it
    experiment: ExperimentPipe | None = None  # an external record of the run
    log: LastLines | None = None  # for observers; None: not shared
    reach: Reach = EVERYWHERE  # its network, in which it dials others
    own: Architecture | None = None  # built by the code of a run's own architecture
    checkpoint_dir: Path | None = None  # shared by all nodes; None: no checkpoints
    speed: float = 1.0  # forward passes a second, as measured
    tick: float = TICK


@dataclass(frozen=True)
class LocalRun:
    """A run as one node has it: its file, model shape and data."""

    id: str
    file: RunFile
    config: ModelConfig
    corpus: Data | None = None  # None: it can't serve stage 0
    changes: Sequence[registry.Change] = ()  # of settings, that the file has from the registry


class WatchedCompute(Compute, Protocol):
    """The port `Compute`, with a watch that notices when it hangs."""

    @property
    def watch(self) -> HangWatch: ...

    def find_hang(self) -> Hang | None:
        """The compute thread's hanging task, if any. To be called on the event loop, at each of its
        ticks."""


class Machine(Protocol):
    """What one identity of a node has of its machine: compute, files, the wall clock."""

    @property
    def compute(self) -> WatchedCompute: ...

    @property
    def memory(self) -> int:
        """Bytes of the device's memory."""

    @property
    def ledgers(self) -> Mapping[str, LineFile]:
        """The ledgers that are written here, by seat."""

    async def build(self, name: str, stage: int, exchanges: Exchanges) -> Agent:
        """Builds a seat, and opens its ledger at stage 0. Raises what crashes the node."""

    async def close(self, name: str, seat: Agent, seconds: float) -> None:
        """A seat is given back: closes its files, and waits for its saves for so long."""

    async def rehearse(self) -> None:
        """Runs once, on a standby, what takes longer the first time."""

    async def finish(self, hang: str, seconds: float) -> str:
        """The node is over: ends the compute, waits for saves, closes files. Returns why the
        compute was abandoned; empty: it has ended."""

    def tick(self, now: float) -> None:
        """Looks after the files, and reports events about them; `now`: by the loop's clock."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def write(self, event: Event, by: str, time: float) -> None:
        """Adds an event to the log. `by`: the event's seat; empty: the node."""

    def track(self, record: Mapping[str, Any]) -> None:
        """Adds a line of the event log to the external record, if any."""

    def committed(self, name: str, commit: pb.Commit) -> None:
        """Adds a commit to the seat's ledger, if it has one."""

    def troubles(self) -> list[str]:
        """What is wrong with its files, a sentence each."""


M = TypeVar("M", bound=Machine)


class Node(Generic[M]):
    """One identity of a node, from joining to leaving, and the seats that it holds."""

    def __init__(
        self,
        node: str,
        place: NodePlace,
        run: LocalRun,
        client: RegistryClient,
        make_machine: Callable[[Node[M]], M],
        make_links: Callable[..., Links] = Links,
    ) -> None:
        """`node`: its name, of nobody else ever."""
        self.node, self.place, self.client = node, place, client
        self.run_id, self.run, self.config, self.corpus = run.id, run.file, run.config, run.corpus
        self._changes = list(run.changes)
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self.loop.create_future()
        self.tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start
        self.hang: Hang | None = None
        self.abandoned = ""  # the task of a hanging compute thread
        self.observers = Observers()
        self.links = make_links(
            run.id,
            self.node,
            place.identity,
            events=self,
            settings=LinkSettings(
                silence=self.run.swarm.silence,
                payload=frame_bytes(self.run, self.config),
                held=held_bytes(self.run, self.config),
                credentials=place.credentials,
                insecure=place.insecure,
                reach=place.reach,
            ),
            observers=self.observers,
        )
        self.ordered: dict[str, bool] = {}  # by seat: whether its newest rebuild is exact
        self.rebuilds: deque[registry.Rebuild] = deque(maxlen=MOST_REBUILDS)
        self.sampler = sampler_of(self.run, self.corpus, self.spawn, self.sampled)
        self.samples: dict[str, Sampled] = {}  # the newest, by prompt
        self.view = registry.View()
        self.needed: list[str] = []  # members with which it needs a link
        self.missing = MissingLinks()
        self.carriers: dict[str, str] = {}  # relays of indirect links, by peer
        self.seats: Seats[Agent] = Seats(self.node, self.links, self.observers.tell, self.read_log)
        self.observers.seats = self.seats
        self.on_message, self.on_frame = self.seats.on_message, self.seats.on_frame
        self.on_link_up = self.seats.on_link_up
        self.exchanges: dict[str, Exchanges] = {}  # of each seat
        self.rehearsing: asyncio.Task[None] | None = None  # while it has no seat
        self.leaving = self.retiring = False
        self.leaves_by = 0.0  # on the loop's clock; 0: it wasn't asked to leave
        self.membership: asyncio.Task[None] | None = None
        self.measuring: asyncio.Task[None] | None = None
        self.requested_measurement = 0  # number of the newest
        self.measured: tuple[int, list[registry.LinkReport]] = (0, [])
        self.machine = make_machine(self)

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
                    address=_advertised_address(self.place.advertise, port),
                    stage=self.place.stage,
                    data=self.corpus.content if self.corpus else "",
                    speed=self.place.speed,
                    host=self.place.host,
                    device=str(self.place.device),
                    run=self.run_id,
                    room=self.place.room,
                    standby=self.place.standby,
                    saves=self.place.saves,
                ),
                self.place.identity,
            )
            self.tell(Joined(reason=reply.reason, host=self.place.host, pid=os.getpid()))
            self.spawn(self._tick())
            self.membership = self.spawn(
                self.client.keep_membership(
                    self.node, reply, self.viewed, self.evicted, self.request_measurement
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

    @property
    def is_outdated(self) -> bool:
        """Whether the run has other settings than this node."""
        return changes_in_force(self.view) != self._changes

    async def _end(self, why: str) -> None:
        """Leaves a run that is stopped, or that has other settings."""
        await self.leave(why)
        self.stop(why)

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
        """Ends tasks and links, then the membership: the registry dials a node whose membership
        ends, and nobody must answer then."""
        others = [task for task in self.tasks if task is not self.membership]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for exchanges in self.exchanges.values():
            exchanges.close()
        await self.links.stop()
        if self.membership is not None:
            self.membership.cancel()
            await asyncio.gather(self.membership, return_exceptions=True)
        self.abandoned = await self.machine.finish(str(self.hang or ""), self._seconds_for_saves())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)

    # --- link speed

    def request_measurement(self, number: int) -> None:
        """Measures the node's links for the registry; one already under way serves, too."""
        self.requested_measurement = number
        if not self.over.done() and (self.measuring is None or self.measuring.done()):
            self.measuring = self.spawn(self._measure_links())

    async def _measure_links(self) -> None:
        links = await measure_all(self.links, self.links.peers[:MOST_MEASURED])
        self.measured = self.requested_measurement, links
        self.report()

    # --- membership

    def evicted(self, reason: str) -> None:
        self.stop(f"rejoin: {reason}")

    def viewed(self, view: registry.View) -> None:
        if view.number <= self.view.number or self.over.done():
            return
        self.view = view
        log.info("view %d: %s", view.number, view.reason)
        if view.order == registry.STOPPED:
            self.spawn(self._end("the run is stopped"))
            return
        self.observers.bar(view.banned)
        own = next((member for member in view.members if member.node == self.node), None)
        if own is None:  # `evicted` follows, and says why
            return
        if self.is_outdated:
            self.spawn(self._end("the run has other settings"))
            return
        self.needed = to_link(own, view, self.config.stages, self.run.policy.swapped)
        peers = [Peer(member.node, member.address, member.key) for member in view.members]
        self.links.set_peers(view.number, peers, self.needed)
        self.links.set_relays(Relay(relay.a, relay.b, relay.via) for relay in view.relays)
        if self.sampler is not None:
            self.sampler.view_changed()
        new, closed = self.seats.viewed(view, self.loop.time())
        for name, seat in closed.items():
            self.spawn(self._close_seat(name, seat))
        for name, assigned in new.items():
            self.spawn(self._take_seat(name, assigned.stage))
        if not own.seats and self.rehearsing is None:
            self.rehearsing = self.spawn(self.machine.rehearse())

    async def _take_seat(self, name: str, stage: int) -> None:
        exchanges = Exchanges(self.machine.compute, self.loop, self.crashed)
        seat = await self.machine.build(name, stage, exchanges)
        self.tell(Serving(stage=stage, device=str(self.place.device)), seat.node)
        self.exchanges[name] = exchanges
        if not self.seats.built(name, seat, self.loop.time()):
            await self._close_seat(name, seat)

    async def _close_seat(self, name: str, seat: Agent) -> None:
        """Closes a seat and drops its state."""
        self.exchanges.pop(name).close("its seat was given back")
        seat.carry_out(seat.driver.viewed(self.seats.view, self.loop.time()))  # it may have driven
        self.tell(GivenBack(stage=seat.stage), seat.node)
        self.report()
        await self.machine.close(name, seat, self._seconds_for_saves())

    def _seconds_for_saves(self) -> float:
        """CLOSE seconds, or all that is left to a leaving node."""
        return max(CLOSE, self.leaves_by - self.loop.time())

    # --- samples

    def committed(self, step: int) -> None:
        if self.sampler is not None and self.view.driver == self.node:
            access = inside_access(self.node, self.observers, self.run, self.view)
            self.sampler.committed(step, access)

    def sampled(self, sample: Sampled) -> None:
        self.tell(sample)
        self.samples[sample.prompt] = sample
        self.report()

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
        now = self.machine.time()
        self.machine.write(event, by, now)
        if is_for_all(event):
            record = event_line(event, by or self.node, now)
            self.client.tell(json.dumps(record))
            self.machine.track(record)
        if isinstance(event, RebuildOrdered):
            self.ordered[event.node] = event.exact
        if isinstance(event, StageRebuilt) and event.method not in (*OWN, *COPIED):
            rebuilt = registry.Rebuild(stage=event.stage, step=event.step, method=event.method)
            rebuilt.exact = self.ordered.pop(event.node, False)
            self.rebuilds.append(rebuilt)

    # --- the clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.place.tick)
            self._watch_compute()
            if self.missing.look(self.needed, self.links.carrier, self.loop.time()):
                self.report()
            self._tell_carriers()
            self.seats.tick(self.loop.time())
            self.machine.tick(self.loop.time())

    def _tell_carriers(self) -> None:
        carriers = {peer: via for peer in self.links.peers if (via := self.links.carrier(peer))}
        before, self.carriers = self.carriers, carriers
        for peer in sorted(before.keys() | carriers.keys()):
            via = carriers.get(peer, "")
            if via != before.get(peer, "") and self.links.linked(peer):
                self.tell(LinkRelayed(peer=peer, via=via))

    def _watch_compute(self) -> None:
        """Reports when the compute thread begins to hang, and when it goes on."""
        compute = self.machine.compute
        slow, before, self.hang = compute.watch.slow, self.hang, compute.find_hang()
        if slow is None and compute.watch.slow is not None:
            self._tell_slow(*compute.watch.slow)
        if (before is None) == (self.hang is None):
            return
        if self.hang is not None:
            task, seconds, usual = self.hang
            self.tell(ComputeHangs(task=task, seconds=seconds, usual=usual or None))
        elif before is not None:
            self.tell(ComputeGoesOn(task=before.task))
            self.leaving = self.retiring
        for seat in list(self.seats.agents.values()):
            seat.compute_hangs(str(self.hang or ""))
        self.report()

    def _tell_slow(self, task: str, seconds: float, usual: float) -> None:
        load, cores = os.getloadavg()[0], available_cores()
        self.tell(
            ComputeSlow(task=task, seconds=seconds, usual=usual or None, load=load, cores=cores)
        )

    def tell_costs(self) -> None:
        """Reports the cost of keeping state for a loss."""
        parts: dict[str, HoldingCost] = {}
        for seat in self.seats.agents.values():
            for name, cost in seat.costs().items():
                parts[name] = parts.get(name, HoldingCost()) + cost
        if parts:
            self.tell(CostSoFar.of(parts))

    def doing(self) -> str:
        """What the node waits for while its compute is idle: a part of the wall clock."""
        doing = next(filter(None, (seat.doing() for seat in self.seats.agents.values())), "")
        return doing or ("send" if self.links.unacknowledged else "idle")

    def report(self) -> None:
        """Sends the node's report to the registry."""
        self.client.report(self.make_report())

    def make_report(self) -> registry.Report:
        """The node's report to the registry: about its machine and its seats."""
        number, links = self.measured
        troubles = self.machine.troubles()
        saves = [seat.own_saves for seat in self.seats.agents.values()]
        troubles += [own.trouble for own in saves if own.trouble]
        return registry.Report(
            seats=[seat.report() for seat in self.seats.agents.values()],
            bytes_in=self.links.bytes_in,
            bytes_out=self.links.bytes_out,
            leaving=self.leaving,
            trouble="; ".join(troubles),
            memory=self.machine.memory,
            stalled_seconds=0.0 if self.hang is None else self.hang.seconds,
            measured=number,
            links=links,
            complaints=self.missing.complaints(),
            unlisted=self.missing.unlisted,
            samples=samples_to_report(self.samples.values()),
            rebuilds=self.rebuilds,
            seen=speeds_seen(self.links) if len(self.view.members) <= MOST_WEIGHED else (),
        )


class SeatRecord:
    """The port `Record`: where the seat at a stage reports events."""

    def __init__(self, node: Node[Any], name: str) -> None:
        self._node, self._name, self._seat = node, name, seat_id(node.node, name)
        self._lacks_last = False  # others were sent the last step's records

    def tell(self, event: Event) -> None:
        self._node.tell(event, self._seat)

    def committed(self, commit: pb.Commit) -> None:
        self._lacks_last = not has_records(commit)
        if commit.step > 0:
            self._node.machine.committed(self._name, commit)
        self._node.committed(commit.step)

    def recording(self) -> pb.Recording:
        ledger = self._node.machine.ledgers.get(self._name)
        return pb.NO_LEDGER if ledger is None else recording(ledger, self._lacks_last)

    def report_changed(self) -> None:
        self._node.report()

    def halted(self, halt: pb.Halt) -> None:
        kind = Finished if halt.finished else Stopped
        self.tell(kind(step=halt.step, reason=halt.reason, validation=halt.validation_loss))
        log.info("the weights of %s are kept until Ctrl-C", self._seat)
        self._node.report()

    def suspect(self, node: str, why: str, cause: registry.Cause) -> None:
        if node_of(node) == self._node.node:
            self.rejoin(why)  # no other node can be blamed
        else:
            self._node.client.suspect(node_of(node), why, cause)

    def request_heir(self, why: str) -> None:
        log.warning("%s", why)
        self._node.leaving = True
        self._node.report()

    def rejoin(self, reason: str) -> None:
        self._node.stop(f"rejoin: {reason}")


def _advertised_address(advertise: str, port: int) -> str:
    """The address that peers dial; `port` is the one that this node listens on."""
    if not advertise:
        return ""
    address = Address.parse(advertise)
    return str(address if address.port else address._replace(port=port))
