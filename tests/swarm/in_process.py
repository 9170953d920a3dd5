"""A swarm in one process and one event loop, with real nodes, links and tensors. Only the
registry's gRPC is left out: nodes call its membership machine directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.effects import Dial, Evict, Issue, Probe, Refused
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.rules import MembershipRules
from planaria.node.agent import Agent
from planaria.node.daemon import DaemonMachine
from planaria.node.data.mixture import Data
from planaria.node.launch.own_folders import checkpoint_dir
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.node import LocalRun, Node, NodePlace
from planaria.node.run_file import RunFile, dumps
from planaria.node.stage.own_code import load_checked
from planaria.node.state.holdings import Holdings
from planaria.node.transaction.member import MemberSide
from planaria.node.wire.seat_names import new_identity
from tests.membership import join
from tests.swarm.lines import Lines


class LocalRegistry:
    """A membership machine that ticks on this event loop."""

    def __init__(self, rules: MembershipRules) -> None:
        self.membership = Membership(rules)
        self.nodes: dict[str, LocalClient] = {}

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for name, client in self.nodes.items():
                if client.heard:
                    self.carry_out(
                        self.membership.lease_renewed(
                            registry.Renewal(node=name, report=client.reported), self.now()
                        )
                    )
            self.carry_out(self.membership.tick(self.now()))

    def carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Issue(view):
                    for client in self.nodes.values():
                        if not client.away:
                            client.on_view(view)
                case Probe(node, number) if self.nodes[node].heard:
                    renewal = registry.Renewal(node=node, probe=number)
                    self.carry_out(self.membership.lease_renewed(renewal, self.now()))
                case Evict(node, reason):
                    self.nodes.pop(node).on_evicted(reason)
                case Dial(question, node):
                    self.membership.dialled(question, node, self.nodes[node].alive)


class LocalClient:
    def __init__(self, registry: LocalRegistry) -> None:
        self.registry = registry
        self.alive = True
        self.away = False  # node and registry don't hear each other
        self.reported = None
        self.on_view: Callable = lambda view: None
        self.on_evicted: Callable = lambda reason: None

    @property
    def heard(self) -> bool:
        return self.alive and not self.away

    async def join(self, request: registry.JoinRequest, identity: Identity) -> registry.JoinReply:
        self.node, request.key = request.node, identity.public
        self.registry.nodes[self.node] = self
        while True:
            try:
                reply, effects = join(self.registry.membership, request, self.registry.now())
            except Refused as refused:
                if refused.code != "UNAVAILABLE":
                    raise
                await asyncio.sleep(0.02)
                continue
            self.registry.carry_out(effects)
            if not reply.question:
                return reply
            request.question = reply.question
            alive = (m.node for m in reply.unheard if self.registry.nodes[m.node].alive)
            request.answered[:] = alive

    async def keep_membership(self, node, reply, on_view, on_evicted, on_measure) -> None:
        self.on_view, self.on_evicted = on_view, on_evicted
        renewal = registry.Renewal(node=node)
        self.registry.carry_out(
            self.registry.membership.stream_opened(renewal, self.registry.now())
        )
        on_view(self.registry.membership.view)
        await asyncio.get_running_loop().create_future()

    def report(self, report: registry.Report) -> None:
        self.reported = report

    def tell(self, line: str) -> None: ...

    def suspect(
        self,
        accused: str,
        why: str,
        cause: registry.Cause = registry.SILENT,
    ) -> None:
        if self.heard and self.node in self.registry.nodes:
            suspicion = registry.Suspicion(accuser=self.node, accused=accused, why=why, cause=cause)
            self.registry.carry_out(
                self.registry.membership.suspect(suspicion, self.registry.now())
            )

    async def leave(self, node: str, why: str) -> None:
        self.registry.carry_out(self.registry.membership.leave(node, why, self.registry.now()))

    def die(self) -> None:
        """Let the node look like a killed process to the registry."""
        self.alive = False
        self.registry.carry_out(
            self.registry.membership.stream_lost(self.node, self.registry.now())
        )


class OneSeat(Node[DaemonMachine]):
    """A node with access to the parts of its only seat; None: it has no seat yet."""

    @property
    def seat(self) -> Agent | None:
        return next(iter(self.seats.agents.values()), None)

    @property
    def stage(self) -> int | None:
        return self.seat and self.seat.stage

    @property
    def member(self) -> MemberSide | None:
        return self.seat and self.seat.member

    @property
    def holdings(self) -> Holdings:
        return self.seat.holdings


class LocalLines(Lines):
    """All lines that the nodes of a `LocalSwarm` have logged by now: it waits for the threads that
    write their files."""

    def __init__(self, swarm: LocalSwarm) -> None:
        super().__init__(swarm.out)
        self.swarm = swarm

    def of(self, pattern: str) -> list[dict[str, Any]]:
        files = [file for node, _ in self.swarm.nodes.values() for file in node.machine.files]
        while any(file.writing for file in files):
            time.sleep(0.0005)
        return super().of(pattern)


class LocalSwarm:
    """A registry and nodes by slot (stage, replica). `kill` ends a node without a leave."""

    def __init__(
        self,
        run: RunFile,
        corpus: Data,
        out: Path,
        saves: Path | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """`checkpoint`: the one that the run begins from, which nodes of stage 0 get."""
        self.run, self.corpus, self.out, self.saves = run, corpus, out, saves
        self.lines = LocalLines(self)
        self.config = run.config_for(corpus.vocabulary)
        replicas = run.swarm.replicas
        self.registry = LocalRegistry(
            MembershipRules(
                "run",
                self.config.stages,
                replicas,
                max_replicas=replicas,
                start_grace=run.swarm.start_grace,
                lease=run.swarm.lease,
                policy=run.policy,
            )
        )
        self.checkpoint = checkpoint
        self.own = None if self.config.own is None else load_checked(run, self.config)
        self.nodes: dict[tuple[int, int], tuple[OneSeat, asyncio.Task[str]]] = {}

    async def __aenter__(self) -> LocalSwarm:
        self.ticking = asyncio.create_task(self.registry.run())
        for stage in range(self.config.stages + 1):
            for replica in range(self.run.swarm.replicas):
                self.start(stage, replica)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node, task in self.nodes.values():
            node.stop("the test is over")
            await asyncio.gather(task, return_exceptions=True)
        self.ticking.cancel()

    def start(
        self,
        stage: int | None,
        replica: int,
        advertise: str = "127.0.0.1:0",
        listen: str = "127.0.0.1:0",
    ) -> OneSeat:
        """Start a node. `stage`: None for a standby, if every stage has its replicas. A node that
        advertises no address doesn't listen."""
        saves = self.saves and self.saves / f"{stage}.{replica}"
        cpu, listens = torch.device("cpu"), listen if advertise else None
        place = NodePlace(stage, listens, advertise, cpu, self.out, "here", saves)
        shared = checkpoint_dir(self.run, self.out, None)
        place = replace(place, own=self.own, checkpoint_dir=shared)
        if stage == 0 or self.run.policy.twins:  # twins need it at all stages
            place = replace(place, checkpoint=self.checkpoint)
        client = LocalClient(self.registry)
        corpus = None if stage else self.corpus
        local = LocalRun("run", self.run, self.config, corpus)
        node = OneSeat(new_identity(place.name), place, local, client, DaemonMachine)
        self.nodes[stage, replica] = (node, asyncio.create_task(node.live()))
        return node

    async def kill(self, stage: int, replica: int) -> None:
        node, task = self.nodes.pop((stage, replica))
        node.client.die()
        node.stop("killed")
        await task

    async def replace(self, stage: int, replica: int) -> None:
        """Kill a node, and start another one in its place."""
        await self.kill(stage, replica)
        self.start(stage, replica)

    async def until(
        self, condition: Callable[[], object], deadline: float = 300.0, pause: float = 0.005
    ) -> None:
        """Wait until the condition holds. With `pause` 0, it is checked at each turn of the loop.

        Raises the error with which a node crashed, or TimeoutError.
        """
        async with asyncio.timeout(deadline):
            while not condition():
                for _, task in self.nodes.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(pause)

    async def describe(self) -> registry.Description:
        """Describe the run as the registry does for observers."""
        view = self.registry.membership.view
        return registry.Description(run="run", run_file=dumps(self.run), view=view)

    def committed(self) -> int:
        members = [node.member for node, _ in self.nodes.values() if node.member]
        return max((member.committed for member in members), default=0)

    def finished(self) -> bool:
        members = [node.member for node, _ in self.nodes.values()]
        return all(m and m.halt is not None and m.halt.finished for m in members)
