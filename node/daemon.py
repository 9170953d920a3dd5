"""The node daemon: one process, uvloop for I/O, one thread for torch, serving one stage.

The machines of the step transaction decide; this module feeds them what happens and carries out
their effects. A `Node` is one identity: a node that the registry has dropped starts over as a new
one, in the same process, with nothing of the old.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.address import Address
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.membership import PROTOCOL, related
from planaria.node.data.corpus import Corpus
from planaria.node.data.windows import Windows
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import (
    Applied,
    Cost,
    CostSoFar,
    Event,
    Finished,
    HandedOver,
    Joined,
    LinkLost,
    Preempted,
    RelearningRound,
    Saved,
    SaveFailed,
    Serving,
    Stopped,
    Wall,
)
from planaria.node.report.ledger import Header, Ledger, line
from planaria.node.report.wall_clock import WallClock
from planaria.node.run_file import RunFile
from planaria.node.stage import learning_rate
from planaria.node.stage.compute import ComputeThread
from planaria.node.stage.model import BodyStage, build_stage, parameter_shapes
from planaria.node.stage.next_stage import build as build_next_stage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.shape import ModelConfig
from planaria.node.stage.work import TorchWork
from planaria.node.state.boundary import BoundaryClient, BoundaryServer
from planaria.node.state.feeding import Gradients, Pins, backlog, gradient_frame, no_gradient
from planaria.node.state.holdings import Holdings
from planaria.node.state.rebuild import Rebuilding
from planaria.node.state.relearn import RelearnError, Relearning
from planaria.node.state.saves import saves_on_disk
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import StateClient, StateServer, TransferError
from planaria.node.transaction.attempt import Attempt, Workplace
from planaria.node.transaction.averaging import Averaging
from planaria.node.transaction.driver import Driver
from planaria.node.transaction.driver import Phase as DriverPhase
from planaria.node.transaction.effects import (
    NEVER,
    Adopt,
    Apply,
    Ballot,
    DropAttempt,
    Effect,
    Fetch,
    GoOn,
    Halted,
    Reduce,
    Rejoin,
    Send,
    StartAttempt,
    Suspect,
)
from planaria.node.transaction.following import feeders
from planaria.node.transaction.member import Frames, Member, Phase
from planaria.node.transaction.rules import Rules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange, PeerLostError
from planaria.node.wire.frames import Frame
from planaria.node.wire.link import Links, LinkSettings, Peer
from planaria.node.wire.looped import LoopedExchanges
from planaria.node.wire.measuring import measure
from planaria.recovery.decide import Kind
from planaria.recovery.snapshot import Layout

log = logging.getLogger("planaria")

TICK = 0.05
"""Seconds between two looks at the clock."""
FAREWELL = 2.0
"""Seconds of its grace that a node keeps for leaving properly."""
LINK_PATIENCE = 3.0
"""Seconds that something waits for a link to come up."""
TO_DRIVER = frozenset(["status", "synced", "home", "ready", "failed", "cut", "stale"])
TO_MEMBER = frozenset(["query", "sync", "step", "reduce", "halt"])
OF_AN_ATTEMPT = frozenset(["activation", "gradient", "average", "twin"])
"""Kinds of frames without which the attempt fails."""
MOST_MEASURED = 200
"""Links that a node measures: what it says of them goes into each of its renewals."""
MOST_HELD = 4096
"""Frames of a coming attempt, and parked ones for a peer, at most."""


@dataclass(frozen=True)
class Place:
    """What a node brings along, whatever its identity."""

    stage: int | None
    listen: str | None  # HOST:PORT; None: does not listen
    advertise: str  # HOST:PORT, or empty: only dials out
    device: torch.device
    out: Path | None
    host: str
    save_dir: Path | None = None  # for saves of this node's stage
    credentials: Credentials = PLAIN
    insecure: bool = False


class Registry(Protocol):
    """What a node needs of the registry; `planaria.bootstrap.client` has it over gRPC."""

    async def join(self, request: registry.JoinRequest) -> registry.JoinReply: ...
    async def keep_membership(
        self,
        node: str,
        reply: registry.JoinReply,
        on_view: Callable[[registry.View], None],
        on_evicted: Callable[[str], None],
        on_measure: Callable[[int], None],
    ) -> None: ...
    def report(self, report: registry.Report) -> None: ...
    def suspect(self, accused: str, why: str) -> None: ...
    async def leave(self, node: str, why: str) -> None: ...


class Node:
    """One identity of a node, from joining to leaving."""

    def __init__(
        self,
        place: Place,
        run_id: str,
        run: RunFile,
        config: ModelConfig,
        corpus: Corpus | None,
        client: Registry,
        speed: float,
    ) -> None:
        self.node = secrets.token_hex(6)
        self.place, self.run_id, self.run, self.config = place, run_id, run, config
        self.corpus, self.client, self.speed = corpus, client, speed
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self.loop.create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        self.compute = ComputeThread(f"compute-{self.node}", self.loop)
        self.exchanges = LoopedExchanges(self.compute, self.loop, self.crashed)
        self.links = Links(
            *(run_id, self.node, self, LinkSettings(silence=run.swarm.silence)),
            *(place.credentials, place.insecure),
        )
        self.events = EventLog(place.out, self.node)
        self.view = registry.View()
        self.stage: int | None = None
        self.member: Member | None = None
        self.early: list[tuple[str, pb.Message]] = []
        self.held: list[tuple[str, Frame]] = []
        self.parked: dict[str, list[tuple[float, pb.Message | Frame]]] = {}
        self.fetching: asyncio.Task[None] | None = None
        self.attempt: Attempt | None = None
        self.reducing: tuple[Ballot, Exchange[None]] | None = None
        self.reduced_norm = self.omega = 0.0
        self.tokens_per_second = 0.0
        self.trouble = ""  # with saving
        self.memory = memory_of(place.device)
        self.leaving = False
        self.measuring: asyncio.Task[None] | None = None
        self.asked = 0  # number of the newest measurement that was asked for
        self.measured: tuple[int, list[registry.LinkReport]] = (0, [])
        self.wall = WallClock(time.monotonic())
        self.wall_told = time.monotonic()
        self.state_client = StateClient(self.send_message, self.compute.run)
        self.state_server = StateServer(
            self.send_message, self.links.send_frame, self._served_state, self.compute.run
        )
        self.pins = Pins(tensors)
        self.based_on = (0, pb.Commit())  # step of the attempt's weights, newest commit in them
        self.boundary_client = BoundaryClient(self.send_message, self.compute.run)
        self.boundary_server: BoundaryServer | None = None
        self.relearning = Relearning(
            *(self.send_message, self.send_frame, self.compute.run, time.monotonic),
            self._relearning,
        )
        self.averaging = Averaging(
            self.node, self.exchanges, self.send_frame, tensors, run.wire.averaging
        )

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
                    address=self._address(port),
                    stage=self.place.stage,
                    data=self.corpus.content if self.corpus else "",
                    speed=self.speed,
                    host=self.place.host,
                    device=str(self.place.device),
                )
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

    def _address(self, port: int) -> str:
        """What peers dial; `port` is the one that this node listens on."""
        if not self.place.advertise:
            return ""
        address = Address.parse(self.place.advertise)
        return str(address if address.port else address._replace(port=port))

    async def retire(self, grace: float) -> None:
        """Save, let a standby take over where there is one, and leave, all within `grace` seconds:
        what a spot instance does when it is told that its time is over."""
        deadline = self.loop.time() + grace - FAREWELL
        self.tell(Preempted(grace=grace))
        if self.member is not None:
            await self._save_now()
            await self._hand_over(deadline)
            left = max(0.0, deadline - self.loop.time())
            await asyncio.to_thread(self.holdings.finish_saves, left)
        await self.leave("stopped by its owner")

    async def _save_now(self) -> None:
        assert self.member is not None
        state = self.own_state()
        if state is not None and state.id.step > 0:  # a commit in progress is posted before this
            await self.compute.run(lambda: self.holdings.save(state, first=False, always=True))

    async def _hand_over(self, deadline: float) -> None:
        """Nobody but a standby could miss this node: a stage with replicas lives on."""
        assert self.stage is not None
        own = [m.node for m in self.view.members if m.stage == self.stage and not m.spare]
        if own != [self.node] or not any(member.spare for member in self.view.members):
            return
        self.leaving = True
        self._report()
        while self.loop.time() < deadline:
            members = self.attempt.begin.members if self.attempt else []
            heirs = [m.node for m in members if m.stage == self.stage and m.node != self.node]
            if heirs:
                self.tell(HandedOver(to=heirs[0], stage=self.stage))
                return
            await asyncio.sleep(TICK)
        log.warning("no standby has taken over stage %s in time", self.stage)

    async def leave(self, why: str) -> None:
        """Tell the registry, so that nobody has to find out."""
        if self.view.number:
            await self.client.leave(self.node, why)

    def stop(self, why: str) -> None:
        """End `live`."""
        if not self.over.done():
            self.over.set_result(why)

    def crashed(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    async def _clean_up(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.exchanges.close()
        await self.state_server.close()
        await self.links.stop()
        await asyncio.to_thread(self.compute.stop)
        self.tell(Wall(**self.wall.report()))
        if self.member is not None:
            await asyncio.to_thread(self.holdings.finish_saves)
            self._write_cost()
        self.events.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)

    # --- how fast links are

    def asked_to_measure(self, number: int) -> None:
        """One that is under way serves for this, too."""
        self.asked = number
        if self.measuring is None or self.measuring.done():
            self.measuring = self.spawn(self._measure_links())

    async def _measure_links(self) -> None:
        """One after the other, so that they don't get into each other's way here."""
        found: list[registry.LinkReport] = []
        for peer in self.links.peers[:MOST_MEASURED]:

            async def send(size: int, peer: str = peer) -> None:
                await self.links.deliver(peer, Frame("probe", NEVER, {}, [], bytes(size)))

            try:
                rtt, rate = await measure(send, time.perf_counter)
            except ConnectionError as error:
                log.warning("not measured: %s", error)
                continue
            found.append(registry.LinkReport(peer=peer, rtt_ms=rtt * 1e3, mbps=rate * 8 / 1e6))
        self.measured = self.asked, found
        self._report()

    # --- membership

    def evicted(self, reason: str) -> None:
        self.stop(f"rejoin: {reason}")

    def viewed(self, view: registry.View) -> None:
        if view.number <= self.view.number:
            return
        self.exchanges.at(self.loop.time())
        self.view = view
        log.info("view %d: %s", view.number, view.reason)
        own = next((member for member in view.members if member.node == self.node), None)
        if own is None:
            self.stop(f"rejoin: view {view.number} is without this node: {view.reason}")
            return
        if own.spare:
            self.links.set_peers(view.number, _peers(view), [])
            return
        self.links.set_peers(view.number, _peers(view), self._to_link(own, view))
        if self.stage is None:
            self.stage = own.stage
            self.spawn(self._take_up_stage(own.stage))
        elif self.member is not None:
            self._tell_machines(view)

    def _to_link(self, own: registry.Member, view: registry.View) -> list[str]:
        """Who this node needs in every step; everybody, if nobody can dial it when it is needed."""
        swapped = self.run.recovery.policy == "checkfree+"
        stages = self.config.stages
        return [
            member.node
            for member in view.members
            if member.node != self.node
            and not member.spare
            and (not own.address or related(own.stage, member.stage, stages, swapped))
        ]

    async def _take_up_stage(self, stage: int) -> None:
        run, device = self.run, self.place.device

        def build() -> tuple[Any, StageOptimizer, Holdings]:
            module = build_stage(self.config, stage, run.seed).to(device)
            if isinstance(module, BodyStage):
                module.recompute = run.training.recompute
            holdings = Holdings(
                host=self,
                stage=stage,
                stages=self.config.stages,
                run=run,
                tensors=tensors,
                layout=lambda stage: Layout(parameter_shapes(self.config, stage)),
                build=partial(build_next_stage, config=self.config, run=run, device=device),
                open_disk=saves_on_disk(
                    self.run_id, stage, run.saves.in_flight, self.loop.call_soon_threadsafe
                ),
                save_dir=self.place.save_dir,
            )
            return module, StageOptimizer(module, device), holdings

        module, self.optimizer, self.holdings = await self.compute.run(build)
        holdings = self.holdings
        self.gradients = Gradients(self.optimizer.gradient, tensors)
        corpus = self.corpus if stage == 0 else None
        self.workplace = Workplace(
            node=self.node,
            masking=run.recovery.masking,
            in_flight=run.training.in_flight or self.config.stages + 1,
            work=TorchWork(
                *(self.node, module, self.optimizer, run, self.config, device),
                *(corpus, holdings.twin),
            ),
            compute=self.compute,
            host=self,
            boundary=holdings.boundary,
            redundant=holdings.twin is not None,
        )
        if corpus is not None and self.place.out is not None:
            header = self._ledger_header(corpus)
            self.windows = Windows(header["seed"], header["samples"], header["batch"])
            self.ledger: Ledger | None = Ledger(
                self.place.out / f"ledger-{self.node}.jsonl", header
            )
        else:
            self.ledger = None
        self.driver = Driver(self.node, self._rules())
        member = Member(self.node, stage)
        member.holdings = holdings.listed
        member.digest = await self.compute.run(self.optimizer.digest)
        if holdings.boundary is not None:
            self.boundary_server = BoundaryServer(
                holdings.boundary, self.send_message, self.links.send_frame
            )
        self.rebuilding = Rebuilding(
            *(stage, run, self.config, module, self.optimizer, member, holdings, self.compute),
            *(
                self.exchanges,
                self.state_client,
                self.boundary_client,
                self.relearning,
                self.events,
            ),
        )
        self.tell(Serving(stage=stage, device=str(device)))
        self.member = member  # from here on it answers
        early, self.early = self.early, []
        self._tell_machines(self.view)
        for peer, message in early:
            self.on_message(peer, message)

    def _tell_machines(self, view: registry.View) -> None:
        assert self.member is not None
        self._carry_out(self.member.viewed(view))
        self._carry_out(self.driver.viewed(view, self.loop.time()))

    def _rules(self) -> Rules:
        run, recovery = self.run, self.run.recovery
        return Rules(
            stages=self.config.stages,
            steps=run.steps,
            microbatches=run.training.microbatches,
            validation_microbatches=run.training.validation_microbatches,
            validate_every=run.training.validate_every,
            clip=run.training.clip,
            clip_scope=run.training.clip_scope,
            policy=run.recovery.policy,
            strict=recovery.strict,
            masking=recovery.masking,
            relearn=recovery.relearn_passes > 0,
            progress=run.swarm.progress,
            lr_scale=partial(
                learning_rate.boost, factor=recovery.lr_boost, over=recovery.lr_boost_steps
            ),
        )

    def _ledger_header(self, corpus: Corpus) -> Header:
        training = self.run.training
        return {
            "ledger": 1,
            "run": self.run.name,
            "seed": self.run.seed,
            "samples": corpus.count("train", self.config.context),
            "batch": training.batch,
            "microbatch": training.microbatch,
            "context": self.config.context,
            "content": corpus.content,
        }

    # --- links

    def on_message(self, peer: str, message: pb.Message) -> None:
        self.exchanges.at(self.loop.time())
        if self.member is None:
            self.early.append((peer, message))
            return
        body = message.WhichOneof("body")
        if body in TO_DRIVER:
            self._carry_out(self.driver.received(peer, message, self.loop.time()))
        elif body in TO_MEMBER:
            self._carry_out(self.member.received(peer, message))
        elif body in ("state_request", "shard_request"):
            self.state_server.on_message(peer, message)
        elif body in ("state_manifest", "shard_refusal"):
            self.state_client.on_message(peer, message)
        elif body == "kept":
            self.holdings.on_message(peer, message)
        elif body == "boundary_request" and self.boundary_server is not None:
            self.boundary_server.on_message(peer, message)
        elif body == "boundary_manifest":
            self.boundary_client.on_message(peer, message)
        elif body == "relearn":
            self.relearning.on_message(peer, message)

    def on_frame(self, peer: str, frame: Frame) -> None:
        self.exchanges.at(self.loop.time())
        if frame.kind == "state":
            self.state_client.on_frame(peer, frame)
        elif frame.kind == "average":
            self.averaging.on_frame(peer, frame)
        elif frame.kind == "boundary":
            self.boundary_client.on_frame(peer, frame)
        elif frame.kind == "relearn":
            self.relearning.on_frame(peer, frame)
        elif frame.kind == "probe":
            return  # that it came is all there is to it
        elif self.member is None:
            return  # what it belongs to has begun without this node
        elif frame.kind == "follow":
            self.exchanges.start(self._take_gradient(peer, frame))
        elif frame.kind in ("twin", "copy"):
            self.holdings.on_frame(peer, frame)
        else:
            match self.member.frames(Ballot(*frame.ballot)):
                case Frames.TAKE if self.attempt is not None:
                    self.attempt.take(peer, frame)
                case Frames.HOLD if len(self.held) < MOST_HELD:
                    self.held.append((peer, frame))

    def on_link_up(self, peer: str) -> None:
        self.exchanges.at(self.loop.time())
        if self.member is not None:
            self._carry_out(self.driver.link_up(peer, self.loop.time()))
        self._send_parked(peer)

    def _send_parked(self, peer: str) -> None:
        for _, item in self.parked.pop(peer, []):
            if isinstance(item, Frame):
                self.links.send_frame(peer, item)
            else:
                self.links.send(peer, item)

    def on_link_lost(self, peer: str, reason: str, unacknowledged: list[Frame]) -> None:
        self.exchanges.at(self.loop.time())
        self.averaging.on_peer_lost(peer, reason)
        self.state_client.on_peer_lost(peer, reason)
        self.boundary_client.on_peer_lost(peer, reason)
        self.relearning.on_peer_lost(peer, reason)
        if all(member.node != peer for member in self.view.members):
            return
        self.tell(LinkLost(peer=peer, reason=reason))
        self.client.suspect(peer, reason)
        if self.member is None:
            return
        self.holdings.on_peer_lost(peer, reason)
        for frame in unacknowledged:
            # Who is ready can't fail the attempt any more, so what is lost is sent again.
            if frame.kind == "twin" and frame.ballot == self.member.attempt:
                self.send_frame(peer, frame)
        lost = [f.ballot for f in unacknowledged if f.kind in ("activation", "gradient")]
        if lost:  # those of older attempts may be among them
            why = f"the link to {peer} broke before a frame was through: {reason}"
            self.cut_off(Ballot(*max(lost)), peer, why)
        self._carry_out(self.member.link_lost(peer))
        self._carry_out(self.driver.link_lost(peer, reason, self.loop.time()))

    def send_message(self, peer: str, message: pb.Message) -> bool:
        return self.send(peer, message)

    def send_frame(self, peer: str, frame: Frame) -> bool:
        return self.send(peer, frame)

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        """A link to a member that isn't up yet is waited for; False when there will be none."""
        send: Callable[..., bool] = (
            self.links.send_frame if isinstance(item, Frame) else self.links.send
        )
        if peer not in self.parked and send(peer, item):
            return True
        parked = self.parked.setdefault(peer, [])
        if all(member.node != peer for member in self.view.members) or len(parked) >= MOST_HELD:
            return False
        self.links.demand(peer)
        parked.append((self.loop.time(), item))
        return True

    def linked(self, peer: str) -> bool:
        return self.links.linked(peer)

    def demand(self, peer: str) -> None:
        self.links.demand(peer)

    def _forget_parked(self, now: float) -> None:
        for peer, parked in list(self.parked.items()):
            if self.links.linked(peer):
                self._send_parked(peer)
                continue
            late = [item for since, item in parked if now - since > LINK_PATIENCE]
            del parked[: len(late)]
            if not parked:
                del self.parked[peer]
            for item in late:
                if isinstance(item, Frame) and item.kind in OF_AN_ATTEMPT:
                    why = f"no link to {peer} came up in {LINK_PATIENCE:.0f} s"
                    self.cut_off(Ballot(*item.ballot), peer, why)

    # --- what the attempt says

    def microbatch_home(self, ballot: Ballot, home: pb.Home) -> None:
        assert self.member is not None
        message = pb.Message(ballot=ballot.message(), home=home)
        self._carry_out([Send(self.member.driver, message)])

    def cut_off(self, ballot: Ballot, node: str, reason: str) -> None:
        assert self.member is not None
        self._carry_out(self.member.cut_off(ballot, node, reason))

    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None:
        assert self.member is not None
        self._carry_out(self.member.failed(ballot, reason, accused))

    # --- effects

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Send(to, message) if to == self.node:
                self.loop.call_soon(self.on_message, to, message)
            case Send(to, message):
                self.send_message(to, message)
            case StartAttempt(ballot, begin):
                assert self.member is not None
                self.based_on = self.member.committed, self.member.last
                self._abandon(ballot)
                self.holdings.attempted(ballot, begin)
                self._follow_plan(self._begin_attempt, ballot, begin)
            case GoOn(ballot, begin):
                self._abandon(ballot)
                self.holdings.follow(begin)
                assert self.attempt is not None
                self._follow_plan(self.attempt.go_on, ballot, begin)
            case DropAttempt(ballot):
                self._abandon(Ballot(ballot.view, ballot.attempt + 1))
                self.holdings.dropped()
                if self.attempt is not None:
                    self.attempt.drop()
                    self.attempt = None
            case Reduce(ballot, _):
                assert self.attempt is not None
                reducing = self.exchanges.start(self._reduce(ballot, self.attempt))
                self.reducing = ballot, reducing
            case Apply(commit):
                # Posts at once: what comes next must find it before itself in the thread.
                self.exchanges.start(self._apply(commit))
            case Adopt(ballot):
                self.exchanges.start(self._adopt(ballot))
            case Fetch(ballot, sync):
                self.gradients.forget(ballot)
                if self.fetching is not None:
                    self.fetching.cancel()
                self.fetching = self.spawn(self._fetch(ballot, sync))
            case Suspect(node, why):
                self.client.suspect(node, why)
            case Rejoin(reason):
                self.stop(f"rejoin: {reason}")
            case Halted(halt):
                self._halted(halt)
            case Event():
                self.tell(effect)

    def tell(self, event: Event) -> None:
        log.log(event.severity.log_level, "%s", event.sentence(self.node))
        self.events.write(event)

    def _begin_attempt(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Raises ValueError."""
        if self.attempt is not None:
            self.attempt.end()
        self.attempt = None
        self.attempt = Attempt(self.workplace, ballot, begin)
        self.attempt.start()

    def _follow_plan(
        self, follow: Callable[[Ballot, pb.Begin], None], ballot: Ballot, begin: pb.Begin
    ) -> None:
        try:
            follow(ballot, begin)
        except ValueError as error:
            self.attempt_failed(ballot, str(error), [])
            return
        held, self.held = self.held, []
        for peer, frame in held:
            self.on_frame(peer, frame)

    def _abandon(self, before: Ballot) -> None:
        """Ballots older than that are void."""
        if self.reducing is not None and self.reducing[0] < before:
            self.reducing[1].cancel()
        self.averaging.forget(before)
        self.holdings.forget(before)

    async def _reduce(self, ballot: Ballot, attempt: Attempt) -> None:
        assert self.member is not None
        try:
            norm = await self._reduce_all(ballot, attempt)
        except PeerLostError as error:
            for node in error.accused:
                self.cut_off(ballot, node, str(error))
            return
        except ComplaintError as error:
            self.attempt_failed(ballot, str(error), error.accused)
            return
        seconds = self.workplace.seconds_per_microbatch
        self._carry_out(self.member.reduced(ballot, norm, math.isfinite(norm), seconds))
        self.exchanges.start(self._feed(ballot, attempt.begin))

    async def _reduce_all(self, ballot: Ballot, attempt: Attempt) -> float:
        """The stage's gradient, summed over its replicas, and the twin's; the squared norm of the
        former. Raises ComplaintError."""
        begin, gradient = attempt.begin, self.optimizer.gradient
        progress = self.run.swarm.progress
        replicas = sorted(place.node for place in begin.members if place.stage == self.stage)
        await attempt.complete(self.exchanges, progress)
        await self.averaging.reduce(
            ballot, replicas, gradient, attempt.applied, len(begin.plan), progress
        )
        norm = await self.exchanges.compute(self._squared_norm)
        if self.holdings.twin is not None:
            await self.holdings.twin.exchange(ballot, begin.members, gradient, norm, progress)
        return norm

    def _squared_norm(self) -> float:
        """Of the reduced gradient. In the compute thread, where the commit needs it again."""
        self.reduced_norm = self.optimizer.squared_norm()
        return self.reduced_norm

    # --- joiners that follow

    async def _feed(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Send the reduced gradient to the joiners that this node feeds."""
        joiners = [joiner for joiner, by in feeders(begin).items() if by == self.node]
        if not joiners:
            return
        gradient = self.optimizer.gradient
        frame = await self.exchanges.compute(partial(gradient_frame, ballot, gradient, tensors))
        for joiner in joiners:
            fits = self.links.unacknowledged_by(joiner) + frame.size <= backlog(gradient)
            self.send_frame(joiner, frame if fits else no_gradient(ballot))

    async def _take_gradient(self, peer: str, frame: Frame) -> None:
        """A replica of this node's stage has sent what it has reduced."""
        ballot = Ballot(*frame.ballot)
        if self.member is None or self.member.following is None:
            return
        gradient = await self.exchanges.compute(partial(self.gradients.parse, frame))
        if gradient is not None and self.gradients.put(ballot, gradient):
            self._carry_out(self.member.gradient_came(ballot, peer))
        else:
            self._carry_out(self.member.gradient_missed(ballot))

    async def _adopt(self, ballot: Ballot) -> None:
        """What a replica has reduced is as good as if this node had."""
        assert self.member is not None
        gradient = self.gradients.get(ballot)

        def adopt() -> float:
            self.optimizer.gradient.copy_(gradient)
            return self._squared_norm()

        norm = await self.exchanges.compute(adopt)
        self._carry_out(self.member.reduced(ballot, norm, math.isfinite(norm), 0.0))

    # --- commits and state

    async def _apply(self, commit: pb.Commit) -> None:
        assert self.stage is not None and self.member is not None
        training, stage = self.run.training, self.stage
        peak = training.lr or self.config.learning_rate
        lr = learning_rate.scheduled(
            commit.step, self.run.steps, peak, training.warmup, training.lr_floor
        )
        lineage, boosted_at = self.member.lineage, self.member.boosted_at
        begin = self.attempt.begin if self.attempt else pb.Begin()  # a joiner has none
        replicas = [place.node for place in begin.members if place.stage == stage]
        first = self.node == min(replicas, default="")
        self.holdings.committing(commit.step, lineage)
        fetched = {joiner.step for joiner in begin.joining if joiner.stage == stage}
        keep = self.pins.keep(fetched, self._state(lineage, *self.based_on, boosted_at))
        self.gradients.forget(Ballot.of(commit.ballot))

        def apply() -> bytes:
            keep()
            if not commit.skipped:
                self.optimizer.step(lr * commit.lr_scale[stage], commit.clip_scale[stage])
                self.omega = self.reduced_norm
            self.holdings.apply(commit, lr)
            self.optimizer.zero_gradient()
            digest = self.optimizer.digest()
            self.holdings.save(self._state(lineage, commit.step, commit, boosted_at), first)
            return digest

        digest = await self.exchanges.compute(apply)
        self._note(commit)
        if commit.seconds:
            self.tokens_per_second = commit.tokens / commit.seconds
        lineage = self.member.lineage
        self.tell(Applied(lineage=lineage, step=commit.step, digest=digest.hex()))
        self._carry_out(self.member.applied(digest))
        self.holdings.in_place(StateId.after(commit, self.member.stage, lineage, commit.step))
        self._report()

    def _note(self, commit: pb.Commit) -> None:
        """A line in the ledger, at stage 0."""
        if self.ledger is not None and commit.step > 0:
            epoch = self.windows.epoch(commit.step)
            self.ledger.append(line(commit, epoch, time.time()))

    async def _fetch(self, ballot: Ballot, sync: pb.Sync) -> None:
        assert self.member is not None
        log.info("%s", sync.reason)
        rebuilding = self.rebuilding
        try:
            if sync.method == "twin":
                synced = await rebuilding.rebuild_twin(ballot, sync)
                if synced is not None:
                    member = self.member
                    self._carry_out(member.fetched(synced, member.last, member.boosted_at))
                return
            rebuilt = await rebuilding.rebuild(ballot, sync)
        except (TransferError, ComplaintError, RelearnError) as error:
            accused = [] if isinstance(error, TransferError) else error.accused
            self._carry_out(self.member.failed(ballot, str(error), accused))
            return
        if rebuilt is None:
            return
        synced, state = rebuilt
        self.omega = state.omega
        log.info(
            "stage %s is at step %d by %s: %d bytes, %.2f s",
            *(self.stage, sync.step, sync.method, synced.fetched_bytes, synced.seconds),
        )
        if sync.HasField("last"):
            self._note(state.last)  # who was to note it may be gone
        self._carry_out(self.member.fetched(synced, state.last, state.boosted_at))
        self.holdings.in_place(state.id)

    def _relearning(self, round: int, residual: float) -> None:
        assert self.stage is not None
        self.tell(RelearningRound(stage=self.stage, round=round, residual=residual))

    # --- the state

    def own_state(self) -> StageState | None:
        """Of this node's stage, as of the newest commit; None: there is none."""
        member = self.member
        if member is None or (member.phase is Phase.SYNCING and member.sync.method != "twin"):
            return None
        if member.following is not None and member.following.state is None:
            return None
        return self._state(member.lineage, member.committed, member.last, member.boosted_at)

    def _state(self, lineage: int, step: int, last: pb.Commit, boosted_at: int) -> StageState:
        assert self.stage is not None
        return StageState(
            id=StateId.after(last, self.stage, lineage, step),
            tensors=dict(self.optimizer.state(optimizer=True)),
            omega=self.omega,
            boosted_at=boosted_at,
            last=last,
            optimizer_step=self.optimizer.steps,
        )

    def _served_state(self, kind: str, stage: int, step: int) -> StageState | None:
        if self.member is None:
            return None
        if kind:
            return self.holdings.served(kind, stage)
        return self.pins.get(step) or self.own_state()

    def saved(self, kind: Kind, save: Age) -> None:
        self.trouble = ""
        self.tell(Saved(holding=kind, step=save.step))

    def save_failed(self, reason: str) -> None:
        self.trouble = reason
        self.tell(SaveFailed(reason=reason))
        self._report()

    def _halted(self, halt: pb.Halt) -> None:
        step, reason, validation = halt.step, halt.reason, halt.validation_loss
        if halt.finished:
            self.spawn(self._save_now())
            self.tell(Finished(step=step, reason=reason, validation=validation))
        else:
            self.tell(Stopped(step=step, reason=reason, validation=validation))
        log.info("the weights of stage %s are kept until Ctrl-C", self.stage)
        self._report()

    # --- the clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = self.loop.time()
            self.exchanges.at(now)
            if self.member is None:
                continue
            self._carry_out(self.driver.tick(now))
            self._forget_parked(now)
            self.wall.sample(time.monotonic(), self._busy_seconds(), self._doing())
            if time.monotonic() - self.wall_told > 2.0:
                self.wall_told = time.monotonic()
                self.tell(Wall(**self.wall.report()))
                self._write_cost()
                self._report()

    def _write_cost(self) -> None:
        """What keeping things for the day of a loss has cost."""
        parts = self.holdings.costs()
        parts["masking"] = Cost(memory_bytes=self.most_kept)
        self.tell(CostSoFar.of(parts))

    @property
    def most_kept(self) -> int:
        """Bytes, at the end of an attempt, of what might have had to be sent or averaged again."""
        kept = self.attempt.kept if self.attempt is not None else 0
        return max(kept, self.workplace.most_kept)

    def _busy_seconds(self) -> float:
        since = self.compute.busy_since
        return self.compute.busy_seconds + (time.monotonic() - since if since else 0.0)

    def _doing(self) -> str:
        assert self.member is not None
        if self.reducing is not None and not self.reducing[1].done:
            return "average"
        if self.member.phase is Phase.SYNCING or self.driver.phase is DriverPhase.SYNCING:
            return "rebuild"
        return "send" if self.links.unacknowledged else "idle"

    def _report(self) -> None:
        number, links = self.measured
        of_machine = registry.Report(memory=self.memory, measured=number, links=links)
        if self.member is None:  # a spare, or one that still builds its stage
            self.client.report(of_machine)
            return
        member, halt = self.member, self.member.halt
        driving = self.driver.phase is not DriverPhase.INACTIVE
        explained = self.driver.explain() if driving else ""
        self.client.report(
            registry.Report(
                memory=self.memory,
                measured=number,
                links=links,
                committed=member.committed,
                lineage=member.lineage,
                phase=member.phase.value,
                loss=member.last.loss,
                microbatches=self.workplace.computed,
                bytes_in=self.links.bytes_in,
                bytes_out=self.links.bytes_out,
                tokens_per_second=self.tokens_per_second,
                message=(halt.reason if halt else "") or self.trouble or explained,
                leaving=self.leaving,
                stopped=halt is not None and not halt.finished,
                finished=halt is not None and halt.finished,
            )
        )


def _peers(view: registry.View) -> list[Peer]:
    return [Peer(member.node, member.address) for member in view.members]


def measure_speed(device: torch.device) -> float:
    """Relative work per second: GFLOP/s of a float32 matrix product, best of a few."""
    a = torch.ones(384, 384, device=device)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, 2 * 384**3 / (time.perf_counter() - started) / 1e9)
    return best


def memory_of(device: torch.device) -> int:
    """Bytes that it has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def own_address(registry_address: str) -> str:
    """The address by which this machine reaches the registry, and so probably its peers."""
    host, port = Address.to_dial(registry_address)
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
