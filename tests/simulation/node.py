"""The production node, on a machine in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from conversing import validate

from planaria.bootstrap.client import RegistryClient
from planaria.node import node as shipped
from planaria.node.agent import Agent
from planaria.node.driver.driver import Driver
from planaria.node.node import LocalRun, NodePlace, SeatRecord
from planaria.node.ports import Ports, Priority
from planaria.node.report.events import Event, Joined
from planaria.node.report.line_file import LineFile
from planaria.node.seats import SeatCompute, SeatNet
from planaria.node.state.holdings import Holdings
from planaria.node.state.stage_state import Age
from planaria.node.state.twin import next_stage
from planaria.node.transaction.effects import Ballot, Effect, GoOn
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.commit_chain import has_records
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.seat_names import seat_id
from planaria.recovery.snapshot import Layout
from simulation.fingerprints import SHAPE
from simulation.links import NodeLinks
from simulation.ports import Compute, VirtualDisk, VirtualLineFile
from simulation.registry import key_of
from simulation.stage import Stage, row
from simulation.transport import MemoryTransport
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster, Host

TICK = 0.2
FLUSH = 1.0
SHARD = 48
"""Maximum bytes of a shard; a stage's state has 192."""


class Seat(Agent):
    """An agent with the driver and member classes that the test chooses; some are faulty."""

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
        """Whether its weights are fit to train, or to be copied."""
        return not (self.member.void or self.member.weightless)

    @property
    def trains(self) -> bool:
        """Whether it takes part in the current or last attempt."""
        return self.attempt is not None and not self.member.following

    def _announced(self) -> list[pb.Holding]:
        listed = self.serving.listed()
        for holding in listed:
            held = self.states.weights(holding.stage) if holding.kind == "weights" else None
            if holding.kind == "snapshot" and holding.oldest_step == holding.step:
                assert self.holdings.holder is not None
                held = self.holdings.holder.state("snapshot", holding.stage)
            if held is not None:
                self.host.cluster.check_announced(self, holding, held)
        return listed

    def _carry_out_one(self, effect: Effect) -> None:
        super()._carry_out_one(effect)
        if isinstance(effect, GoOn) and self.attempt is not None:
            check = partial(self._check_goes_on, self.attempt.began, effect)
            self.host.machine.compute.post(check, lambda _: None, Priority.CONTROL)

    def _check_goes_on(self, began: Ballot, effect: GoOn) -> None:
        if self.weights.work.ballot == began:
            self.host.cluster.check_goes_on(self, effect.ballot, effect.begin)

    def _new_driver(self) -> Driver:
        return self.host.cluster.machines.driver(self.node, self.host.cluster.rules, self.chance)

    def _new_member(self) -> MemberSide:
        return self.host.cluster.machines.member(self.node, self.stage)


class Node(shipped.Node["VirtualMachine"]):
    """A production node on a host of the cluster."""

    def __init__(self, cluster: Cluster, host: Host, saves: Sequence[int]) -> None:
        assert host.process is not None
        self.cluster, self.process = cluster, host.process
        name = cluster.new_name()
        place = NodePlace(
            stage=host.stage,
            listen=None if host.dials_only else f"h{name}:1",
            advertise="" if host.dials_only else f"h{name}:1",
            device=torch.device("cpu"),
            out=None,
            host=host.name,
            identity=key_of(host.name),
            saves=saves,
            room=host.room,
            tick=TICK,
        )
        cluster.network.homes[name] = host.name
        transport = MemoryTransport(cluster.network, self.process, name)
        client = RegistryClient(cluster.registry.addresses, transport=transport)
        run = LocalRun("run", cluster.run, cluster.config, changes=cluster.changes)
        links = partial(NodeLinks, cluster, self.process, transport)
        super().__init__(name, place, run, client, VirtualMachine, links)

    @property
    def name(self) -> str:
        return self.node

    @property
    def ended(self) -> bool:
        return self.over.done()

    @property
    def stages(self) -> set[int]:
        """The stages of its seats."""
        return {seat.stage for seat in self.seats.agents.values()}

    def validate(self) -> None:
        if not self.over.done():
            for seat in self.seats.agents.values():
                validate(seat)


class VirtualMachine:
    """The port `Machine` in virtual time."""

    memory = 0

    def __init__(self, node: Node) -> None:
        self._node, self._process, self._cluster = node, node.process, node.cluster
        self.compute = Compute(self._process, self._cluster.pace, self._cluster.rules.progress)
        self.ledgers: dict[str, LineFile] = {}
        self.fuse: int | None = None  # messages of a commit that it sends before it crashes
        self._seats: dict[str, Seat] = {}
        self._flushed, self._clock = 0.0, Random(node.node)

    def time(self) -> float:
        """A random time: nothing may depend on this clock."""
        return self._clock.uniform(0.0, 2e9)

    # --- seats

    async def build(self, name: str, stage: int, exchanges: Exchanges) -> Seat:
        await asyncio.sleep(self._cluster.world.random.uniform(0.01, 0.4))
        node, cluster = self._node, self._cluster
        own = seat_id(node.node, name)
        if stage == 0:
            path = Path(f"{self._process.host}-{node.node}-{name}")
            self.ledgers[name] = VirtualLineFile(path, cluster.files, self._process)
        weights = Stage(node, own, stage)
        net, compute = SeatNet(node.seats, name), SeatCompute(node.seats, name, self.compute)
        record, chance = SeatRecord(node, name), Random(f"{cluster.seed} {own}")
        identity = node.place.identity
        ports = Ports(net, exchanges, compute, tensors, weights, record, chance, identity)
        run, config = cluster.run, cluster.config
        seat = Seat(node, weights, own, stage, run, config, ports, self._make_holdings)
        self._seats[own] = seat
        return seat

    def _make_holdings(self, seat: Agent) -> Holdings:
        run, cluster, host = self._cluster.run, self._cluster, self._process.host
        twin = None
        if run.policy.twins:
            stages = cluster.rules.stages
            twin = cluster.machines.twin(
                node=seat.node,
                stage=seat.stage,
                stages=stages,
                optimizer=row(next_stage(seat.stage, stages)),
                exchanges=seat.exchanges,
                send=seat.send,
                tensors=tensors,
            )
            twin.cluster = cluster

        def open_disk(
            folder: Path,
            keep: int,
            saved: Callable[[Age], None],
            failed: Callable[[str], None],
        ) -> VirtualDisk:
            owner = host if folder.name == "save" else ""
            place = folder.name, owner, seat.stage
            check = partial(cluster.check_saved, seat)
            return VirtualDisk(cluster.files, place, self._process, saved, failed, check)

        saves = cluster.hosts[host].saves and cluster.files.save_every
        folder = Path("save") if saves else None
        shared = Path("checkpoint") if run.policy.checkpoints else None
        holdings = Holdings(seat, twin, lambda _: Layout([SHAPE]), open_disk, folder, shared)
        cluster.machines.adapt(holdings)
        return holdings

    async def close(self, name: str, seat: Agent, seconds: float) -> None:
        if (ledger := self.ledgers.pop(name, None)) is not None:
            ledger.close()
        seat.holdings.finish_saves(seconds)

    async def rehearse(self) -> None:
        """Does nothing."""

    async def finish(self, hang: str, seconds: float) -> str:
        self.compute.stopped = True
        for ledger in self.ledgers.values():
            ledger.close()
        await self._node.client.close()
        return (hang or "it hangs") if self.compute.hangs else ""

    # --- files

    def tick(self, now: float) -> None:
        if now - self._flushed > FLUSH:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        for ledger in self.ledgers.values():
            ledger.flush()

    def write(self, event: Event, by: str, time: float) -> None:
        fields = {} if isinstance(event, Joined) else vars(event)
        self._cluster.world.say(by or self._node.node, f"{event.kind} {fields}")
        reason = str(fields.get("reason"))
        if "that can't be handled" in reason and not self._cluster.may_lie(self._node.node):
            raise AssertionError(f"{self._node.node}: {reason}")
        if (seat := self._seats.get(by)) is not None:
            self._cluster.on_event(seat, event.kind, fields)
            self._cluster.check_patience(seat, reason)

    def track(self, record: Mapping[str, Any]) -> None:
        """Does nothing: there is no external record."""

    def committed(self, name: str, commit: pb.Commit) -> None:
        if name in self.ledgers and has_records(commit):
            self.ledgers[name].append(b"%d\n" % commit.step)

    def troubles(self) -> list[str]:
        return []

    def sent_commit(self) -> None:
        """Counts a sent message of a commit; crashes the node when `fuse` has run out."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse == -1:  # messages sent up to now still leave
                why = "between two messages of a commit"
                self._process.after(0.0, self._cluster.crash, self._process, why)
