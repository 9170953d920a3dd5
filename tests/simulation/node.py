"""One identity of a node in virtual time: what node/daemon.py is around its seats. What these do,
and who of them hears what, is what ships."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from conversing import validate

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.client import (
    InQuarantine,
    JoinRefused,
    RegistryClient,
    RegistryUnreachable,
)
from planaria.bootstrap.neighbours import to_link
from planaria.bootstrap.rules import PROTOCOL
from planaria.node import ports
from planaria.node.agent import Agent
from planaria.node.driver.driver import Driver
from planaria.node.machine.watch import Hang
from planaria.node.ports import Ports, Priority
from planaria.node.report.events import Event
from planaria.node.report.ledger import recording
from planaria.node.report.line_file import LineFile
from planaria.node.seats import SeatCompute, SeatNet, Seats, SenselessError
from planaria.node.state.holdings import Holdings
from planaria.node.state.stage_state import Age
from planaria.node.state.twin import next_stage
from planaria.node.transaction.effects import Ballot, Effect, GoOn
from planaria.node.transaction.leaving import Leaving
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.chain import has_records
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.frames import Frame
from planaria.node.wire.missing_links import MissingLinks
from planaria.node.wire.naming import node_of, seat_id
from planaria.recovery.snapshot import Layout
from simulation.fingerprints import SHAPE
from simulation.links import NodeLinks
from simulation.ports import Compute, VirtualDisk, VirtualLineFile
from simulation.registry import ADDRESS, key_of
from simulation.stage import Stage, row
from simulation.transport import MemoryTransport
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster

TICK = 0.2
WRITE_AGAIN = 1.0
SHARD = 48
"""Bytes; a stage's state has 192."""


class Seat(Agent):
    """An agent with the machines that the test wants, of which some are faulty."""

    def __init__(self, host: Node, weights: Stage, *arguments: Any) -> None:
        self.host, self.weights = host, weights
        weights.seat = self
        super().__init__(*arguments)
        self.states.shard_size = SHARD
        self.member.holdings = self._announced

    @property
    def name(self) -> str:
        return self.node

    @property
    def process(self) -> Process:
        return self.host.process

    @property
    def has_state(self) -> bool:
        """What is in place is fit to train, or to be copied."""
        return not (self.member.void or self.member.weightless)

    @property
    def trains(self) -> bool:
        """Whether it has a part in the attempt that is under way, or was last."""
        return self.attempt is not None and not self.member.following

    def _announced(self) -> list[pb.Holding]:
        found = self.serving.listed()
        for one in found:
            held = self.states.weights(one.stage) if one.kind == "weights" else None
            if one.kind == "copy" and self.holdings.holder is not None:
                held = self.holdings.holder.state("copy", one.stage)
            if one.kind in ("copy", "weights"):
                assert held is not None
                self.host.cluster.check_announced(self, one, held)
        return found

    def _carry_out_one(self, effect: Effect) -> None:
        super()._carry_out_one(effect)
        if isinstance(effect, GoOn) and self.attempt is not None:
            check = partial(self._check_goes_on, self.attempt.began, effect)
            self.host.compute.post(check, lambda _: None, Priority.CONTROL)

    def _check_goes_on(self, began: Ballot, effect: GoOn) -> None:
        if self.weights.work.ballot == began:
            self.host.cluster.check_goes_on(self, effect.ballot, effect.begin)

    def _new_driver(self) -> Driver:
        return self.host.cluster.machines.driver(self.node, self.host.cluster.rules, self.chance)

    def _new_member(self) -> MemberSide:
        return self.host.cluster.machines.member(self.node, self.stage)


class Node:
    """From joining to leaving."""

    def __init__(
        self, cluster: Cluster, process: Process, stage: int | None, dials_only: bool, room: int
    ) -> None:
        self.cluster, self.world, self.process = cluster, cluster.world, process
        self.name = cluster.new_name()
        self.wanted, self.address = stage, "" if dials_only else f"h{self.name}:1"
        self.room = room
        self.ended = False
        self.identity = key_of(process.host)
        self.net = NodeLinks(self)
        self.compute = Compute(process, cluster.pace, cluster.rules.progress)
        self.hang: Hang | None = None
        self.leaving = self.retiring = False
        self.view = registry.View()
        self.seats: Seats[Seat] = Seats(self.name, self.net)
        self.ledgers: list[LineFile] = []
        self.fuse: int | None = None  # messages of commits left to send before the crash
        self.report = registry.Report()
        self.needed: list[str] = []
        self.missing = MissingLinks()
        cluster.network.homes[self.name] = process.host
        transport = MemoryTransport(cluster.network, process, self.name)
        self.client = RegistryClient([ADDRESS], transport=transport)
        self._living = process.spawn(self._live())
        self.process.after(self.world.random.uniform(0.0, TICK), self._tick)
        self.process.after(WRITE_AGAIN, self._write_again)

    @property
    def stages(self) -> set[int]:
        """Of its seats."""
        return {seat.stage for seat in self.seats.agents.values()}

    # --- life

    async def _live(self) -> None:
        await self.net.start(self.address or None)
        request = registry.JoinRequest(
            protocol=PROTOCOL,
            run="run",
            node=self.name,
            address=self.address,
            speed=1.0,
            stage=self.wanted,
            saved=self.wanted is not None and self.cluster.hosts[self.process.host].stage is None,
            room=self.room,
        )
        try:
            reply = await self.client.join(request, self.identity)
        except InQuarantine as refused:
            await asyncio.sleep(refused.seconds)
            self.stop(str(refused))
        except (JoinRefused, RegistryUnreachable) as refused:
            self.stop(str(refused))
        else:
            self.viewed(reply.view)
            await self.client.keep_membership(self.name, reply, self.viewed, self.stop)

    def stop(self, why: str) -> None:
        """This identity is over; the process starts another one, unless its compute hangs."""
        if not self.ended and self.compute.hangs:
            self.ended = True
            self.cluster.crash(self.process, f"since it hangs: {why}")
        elif not self.ended:
            self.ended = True
            self.compute.stopped = True
            self.world.say(self.name, f"is over: {why}")
            self.process.spawn(self._clean_up())

    def retire(self) -> None:
        """It has to leave for good, and lets heirs take over where there are any."""
        leaving = Leaving(self.name, self.view, self.world.now)
        seats = [s for s in self.seats.agents.values() if s.member.halt is None]
        self.retiring = self.leaving = True
        self.changed()
        for seat in self.seats.agents.values():
            seat.exchanges.start(seat.own_saves.save_now())
        self._leave_in_time(leaving, [seat for seat in seats if seat.member.committed > 0])

    def _leave_in_time(self, leaving: Leaving, needed: list[Seat]) -> None:
        now, view = self.world.now, self.view
        if self.ended:
            return
        if any(leaving.waits(seat.stage, view, seat.members, now) for seat in needed):
            self.process.after(TICK, self._leave_in_time, leaving, needed)
            return
        self.cluster.hosts[self.process.host].down = True
        self.process.spawn(self._leave())

    async def _leave(self) -> None:
        await self.client.leave(self.name, "stopped by its owner")
        self.stop("it has left")

    async def _clean_up(self) -> None:
        for ledger in self.ledgers:
            ledger.close()
        self._living.cancel()
        await self.client.close()
        await self.net.stop()
        self.cluster.identity_over(self)

    def _crashed(self, error: BaseException) -> None:
        raise error

    # --- membership

    def viewed(self, view: registry.View) -> None:
        if self.ended or view.number <= self.view.number:
            return
        self.view = view
        own = next((member for member in view.members if member.node == self.name), None)
        if own is None:
            self.stop(f"view {view.number} is without this node: {view.reason}")
            return
        rules = self.cluster.rules
        self.needed = to_link(own, view, rules.stages, rules.policy.swapped)
        self.net.viewed(view, self.needed)
        new, closed = self.seats.viewed(view, self.world.now)
        for seat in closed.values():
            self._close_seat(seat)
        for name, taken in new.items():
            seconds = self.world.random.uniform(0.01, 0.4)
            self.process.after(seconds, self._take_seat, name, taken.stage)
        self._validate()

    def _close_seat(self, seat: Seat) -> None:
        self.world.say(seat.name, "is given back")
        seat.exchanges.close()
        seat.holdings.finish_saves()
        self.changed()

    def _take_seat(self, name: str, stage: int) -> None:
        if self.ended:
            return
        own = seat_id(self.name, name)
        weights = Stage(self, own, stage)
        ledger = None
        if stage == 0:
            path = Path(f"{self.process.host}-{self.name}-{name}")
            ledger = VirtualLineFile(path, self.cluster.files, self.process)
            self.ledgers.append(ledger)
        net, compute = SeatNet(self.seats, name), SeatCompute(self.seats, name, self.compute)
        exchanges = TimedExchanges(self, compute)
        record = SeatRecord(self, own, ledger)
        chance, identity = Random(f"{self.cluster.seed} {own}"), self.identity
        ports = Ports(net, exchanges, compute, tensors, weights, record, chance, identity)
        run, config = self.cluster.run, self.cluster.config
        seat = Seat(self, weights, own, stage, run, config, ports, self._make_holdings)
        exchanges.seat = record.agent = seat
        if not self.seats.built(name, seat, self.world.now):
            self._close_seat(seat)
        self._validate()

    def _make_holdings(self, seat: Agent) -> Holdings:
        run, stages = self.cluster.run, self.cluster.rules.stages
        twin = None
        if run.policy.twins:
            optimizer = row(next_stage(seat.stage, stages))
            twin = self.cluster.machines.twin(
                node=seat.node,
                stage=seat.stage,
                stages=stages,
                optimizer=optimizer,
                exchanges=seat.exchanges,
                send=seat.send,
                tensors=tensors,
            )
            twin.cluster = self.cluster

        def open_disk(
            folder: Path,
            keep: int,
            saved: Callable[[Age], None],
            failed: Callable[[str], None],
        ) -> VirtualDisk:
            kind = folder.name
            owner = self.process.host if kind == "save" else ""
            place = kind, owner, seat.stage
            check = partial(self.cluster.check_saved, seat)
            return VirtualDisk(self.cluster.files, place, self.process, saved, failed, check)

        saves = self.cluster.hosts[self.process.host].saves and self.cluster.files.save_every
        folder = Path("save") if saves else None
        shared = Path("checkpoint") if run.policy.checkpoints else None
        holdings = Holdings(seat, twin, lambda _: Layout([SHAPE]), open_disk, folder, shared)
        self.cluster.machines.adapt(holdings)
        return holdings

    # --- links

    def on_message(self, peer: str, message: pb.Message, now: float) -> None:
        if not self.ended:
            with self._of(peer):
                self.seats.on_message(peer, message, now)
            self._validate()

    def on_frame(self, peer: str, frame: Frame, now: float) -> None:
        if not self.ended:
            with self._of(peer):
                self.seats.on_frame(peer, frame, now)
            self._validate()

    @contextmanager
    def _of(self, peer: str) -> Iterator[None]:
        """What comes of an honest peer makes sense."""
        may_lie = self.cluster.may_lie
        self.cluster.counts["babbled"] += may_lie(peer)
        try:
            yield
        except SenselessError as error:
            if not may_lie(self.name):
                raise AssertionError(f"{self.name} can't deal with {peer}") from error
            raise

    def on_link_up(self, peer: str, now: float) -> None:
        if not self.ended:
            self.seats.on_link_up(peer, now)
            self._validate()

    def on_link_lost(
        self, peer: str, reason: str, lost: list[Frame], now: float, cause: registry.Cause
    ) -> None:
        if self.ended:
            return
        if any(member.node == peer for member in self.view.members):
            self.world.say(self.name, f"lost the link to {peer}: {reason}")
            self.client.suspect(peer, reason, cause)
        self.seats.on_link_lost(peer, reason, lost, now, cause)
        self._validate()

    def sent_commit(self) -> None:
        """To one of those that are to hear it."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse == -1:  # what was sent up to now still leaves
                why = "between two messages of a commit"
                self.process.after(0.0, self.cluster.crash, self.process, why)

    # --- time

    def _tick(self) -> None:
        if self.ended:
            return
        if self.missing.look(self.needed, self.net.carrier, self.world.now):
            self.changed()
        before, self.hang = self.hang, self.compute.watch.look(self.world.now)
        if (before is None) != (self.hang is None):
            self.world.say(self.name, str(self.hang or "goes on"))
            self.leaving = self.retiring or (self.leaving and self.hang is not None)
            for seat in list(self.seats.agents.values()):
                seat.compute_hangs(str(self.hang or ""), self.world.now)
            self.changed()
        self.seats.tick(self.world.now)
        self._validate()
        self.process.after(TICK, self._tick)

    def _write_again(self) -> None:
        if not self.ended:
            self.write_again()
            self.process.after(WRITE_AGAIN, self._write_again)

    def write_again(self) -> None:
        for ledger in self.ledgers:
            ledger.flush()

    def _validate(self) -> None:
        for seat in () if self.ended else self.seats.agents.values():
            validate(seat)

    def changed(self) -> None:
        reports = [seat.report() for seat in self.seats.agents.values()]
        self.report = registry.Report(
            seats=reports,
            complaints=self.missing.complaints(),
            unlisted=self.missing.unlisted,
            leaving=self.leaving,
            stalled_seconds=0.0 if self.hang is None else self.hang.seconds,
        )
        self.client.report(self.report)


class TimedExchanges(Exchanges):
    """The exchanges of one seat, in virtual time."""

    seat: Seat

    def __init__(self, node: Node, compute: ports.Compute) -> None:
        super().__init__(compute, self._run_soon, self._crashed)
        self._node, self._alarm = node, math.inf
        self.at(node.world.now)

    def _crashed(self, error: BaseException) -> None:
        raise error

    def _run_soon(self) -> None:
        self._node.process.after(0.0, self._run)

    def _run(self) -> None:
        if self._node.ended:
            return
        self.run(self._node.world.now)
        if self.wake < self._alarm:
            self._alarm = self.wake
            self._node.process.after(self._alarm - self._node.world.now, self._woken)
        validate(self.seat)

    def _woken(self) -> None:
        self._alarm = math.inf
        self._run()


class SeatRecord:
    """Where a seat tells what happens: the port `Record`."""

    agent: Seat

    def __init__(self, node: Node, seat: str, ledger: LineFile | None) -> None:
        self._node, self._seat, self._ledger = node, seat, ledger
        self._cluster = node.cluster
        self._lacks_last = False

    def tell(self, event: Event) -> None:
        told = vars(event)
        self._node.world.say(self._seat, f"{event.kind} {told}")
        self._cluster.on_event(self.agent, event.kind, told)
        self._cluster.check_patience(self.agent, str(told.get("reason")))

    def committed(self, commit: pb.Commit) -> None:
        self._lacks_last = not has_records(commit)
        if self._ledger is not None and commit.step > 0 and has_records(commit):
            self._ledger.append(b"%d\n" % commit.step)

    def recording(self) -> pb.Recording:
        if self._ledger is None:
            return pb.NO_LEDGER
        return recording(self._ledger, self._lacks_last)

    def changed(self) -> None:
        self._node.changed()

    def halted(self, halt: pb.Halt) -> None:
        self._node.world.say(self._seat, f"halted at {halt.step}: {halt.reason or 'finished'}")
        self._cluster.check_halt(self.agent, halt)
        self.changed()

    def suspect(
        self,
        node: str,
        why: str,
        cause: registry.Cause,
    ) -> None:
        if node_of(node) == self._node.name:
            self.over(why)
        else:
            self._node.client.suspect(node_of(node), why, cause)

    def replace(self, why: str) -> None:
        self._node.leaving = True
        self.changed()

    def over(self, reason: str) -> None:
        self._node.stop(reason)
