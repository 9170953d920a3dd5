"""What node/daemon.py is to the machines, without sockets, threads and tensors.

Weights are a digest, a gradient is the list of what was added to it, compute is a delay. The order
in which effects are carried out, messages are parked and frames are held is the daemon's.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.membership import related
from planaria.node.ports import Priority
from planaria.node.report.events import Event, fields
from planaria.node.transaction.attempt import Pass, Visit
from planaria.node.transaction.driver import Driver
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
from planaria.node.transaction.routing import Route, routes
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import INEXACT
from simulation.holdings import Holdings, State
from simulation.relearning import BODIES as RELEARNING
from simulation.relearning import Relearning
from simulation.world import Link, Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster

TICK = 0.1
LINK_PATIENCE = 3.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
NOTICE = 0.1
"""Seconds after which a link that broke is dialled anew."""
TO_DRIVER = frozenset(["status", "synced", "home", "ready", "failed", "cut", "stale"])
TO_MEMBER = frozenset(["query", "sync", "step", "reduce", "halt"])
SHARDS = 2
MOST_GRADIENTS = 6  # that wait at a joiner


def fingerprint(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


@dataclass(frozen=True)
class Frame:
    kind: str
    ballot: Ballot
    fields: Any


class Compute:
    """The compute thread: one task at a time, most urgent first."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._tasks: list[tuple[Priority, int, float, Callable[[], Any], Callable[[Any], None]]]
        self._tasks = []
        self._numbers = itertools.count()
        self._busy = False

    def run(
        self,
        task: Callable[[], Any],
        then: Callable[[Any], None],
        seconds: float = 0.0005,
        priority: Priority = Priority.CONTROL,
    ) -> None:
        heapq.heappush(self._tasks, (priority, next(self._numbers), seconds, task, then))
        self._work()

    def _work(self) -> None:
        if self._busy or not self._tasks:
            return
        self._busy = True
        _, _, seconds, task, then = heapq.heappop(self._tasks)
        self.process.after(seconds, self._done, task, then)

    def _done(self, task: Callable[[], Any], then: Callable[[Any], None]) -> None:
        result = task()
        self.process.after(0.0, then, result)
        self._busy = False
        self._work()


class Weights:
    """A stage's weights and gradient, as the compute thread sees them."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.digest = fingerprint("initial", stage)
        self.chain = b""  # fingerprint of all commits that made these weights
        self.lineage = self.step = 0
        self.void = False  # overwritten by what isn't fit to train yet
        self.gradient: Counter[tuple[int, str]] = Counter()
        self.adopted = b""  # digest of a gradient that a replica has sent; empty: it is the own
        self.own: Counter[tuple[int, str]] | None = None  # before it was reduced

    def make_void(self) -> None:
        self.lineage = self.step = 0
        self.digest, self.chain, self.void = fingerprint("unfit", self.digest), b"", True

    def add(self, microbatch: int, part: str) -> None:
        self.gradient[microbatch, part] += 1

    def gradient_digest(self) -> bytes:
        return self.adopted or fingerprint(sorted(self.gradient.items()), self.digest)

    def clear(self) -> None:
        self.gradient.clear()
        self.adopted = b""
        self.own = None

    def keep(self) -> None:
        self.own = Counter(self.gradient)

    def restore(self) -> None:
        if self.own is not None:
            self.gradient, self.own = self.own, None


class Node:
    """One identity of a node, from joining to leaving."""

    def __init__(self, cluster: Cluster, process: Process, stage: int | None, dials_only: bool):
        self.cluster, self.world, self.process = cluster, cluster.world, process
        self.name = cluster.new_name()
        self.wanted, self.address = stage, "" if dials_only else f"{self.name}:1"
        self.over = False
        self.links: dict[str, Link] = {}
        self.dialling: set[str] = set()
        self.addresses: dict[str, str] = {}  # of the members
        self.linked: frozenset[str] = frozenset()
        self.view = registry.View()
        self.stage: int | None = None
        self.member: Member | None = None
        self.driver: Driver
        self.early: list[tuple[str, pb.Message]] = []
        self.held: list[tuple[str, Frame]] = []
        self.parked: dict[str, list[tuple[float, pb.Message | Frame]]] = {}
        self.compute = Compute(process)
        self.pipeline: Pipeline
        self.averaging = Averaging(self)
        self.transfers = Transfers(self)
        self.relearning = Relearning(self)
        self.holdings = Holdings(self)
        self.gradients: dict[
            Ballot, tuple[Counter[tuple[int, str]], bytes]
        ] = {}  # for a joiner to follow with
        self.based_on = pb.Commit()
        self.fuse: int | None = None  # messages of commits left to send before the crash
        self.report = registry.Report()
        cluster.network.endpoints[self.name] = self
        cluster.network.homes[self.name] = process.host
        self.client = cluster.new_client(self)
        self.process.after(self.world.random.uniform(0.0, TICK), self._tick)

    # --- life

    def stop(self, why: str) -> None:
        """This identity is over; the process starts another one."""
        if not self.over:
            self.over = True
            self.world.say(self.name, f"is over: {why}")
            self.process.after(0.0, self._clean_up)

    def _clean_up(self) -> None:
        for link in list(self.links.values()):
            self.cluster.network.give_up(link, self, f"{self.name} stops", report=False)
        self.client.stop()
        del self.cluster.network.endpoints[self.name]
        self.cluster.identity_over(self)

    # --- membership

    def viewed(self, view: registry.View) -> None:
        if self.over or view.number <= self.view.number:
            return
        self.view = view
        own = next((member for member in view.members if member.node == self.name), None)
        if own is None:
            self.stop(f"view {view.number} is without this node: {view.reason}")
            return
        linked = [
            member.node
            for member in view.members
            if not own.spare
            and member.node != self.name
            and not member.spare
            and (not own.address or self._related(own.stage, member.stage))
        ]
        self._set_peers(view, linked)
        if own.spare:
            return
        if self.stage is None:
            self.stage = own.stage
            self._take_up_stage(own.stage)
        elif self.member is not None:
            self._tell_machines(view)

    def _related(self, a: int, b: int) -> bool:
        rules = self.cluster.rules
        return related(a, b, rules.stages, rules.swapped)

    def _set_peers(self, view: registry.View, linked: Sequence[str]) -> None:
        self.linked = frozenset(linked)
        self.addresses = {member.node: member.address for member in view.members}
        for peer, link in list(self.links.items()):
            if peer != "registry" and peer not in self.addresses:
                why = f"{peer} is no member of view {view.number}"
                self.cluster.network.give_up(link, self, why, report=False)
        for peer in sorted(self.linked):
            if self._dials(peer) and peer not in self.dialling:
                self.dialling.add(peer)
                self._keep_dialled(peer, FIRST_PAUSE)

    def _take_up_stage(self, stage: int) -> None:
        self.weights = Weights(stage)
        if self.holdings.twin is not None:
            self.holdings.twin.take_up(stage)
        self.compute.run(lambda: None, lambda _: self._taken_up(stage), seconds=0.2)

    def _taken_up(self, stage: int) -> None:
        self.pipeline = Pipeline(self)
        self.driver = self.cluster.make_driver(self.name)
        self.member = self.cluster.make_member(self.name, stage)
        self.member.digest = self.weights.digest
        self.member.holdings = self.holdings.listed
        early, self.early = self.early, []
        self._tell_machines(self.view)
        for peer, message in early:
            self.on_message(peer, message)

    def _tell_machines(self, view: registry.View) -> None:
        assert self.member is not None
        self.carry_out(self.member.viewed(view))
        self.carry_out(self.driver.viewed(view, self.world.now))

    # --- links

    def admits(self, peer: str) -> bool:
        return not self.over and (peer == "registry" or peer in self.addresses)

    def _dials(self, peer: str) -> bool:
        if not self.addresses[peer]:
            return False
        return not self.address or self.name < peer

    def _demand(self, peer: str) -> None:
        if self.addresses.get(peer) and peer not in self.links and peer not in self.dialling:
            self.dialling.add(peer)
            done = partial(self._keep_dialled, peer, FIRST_PAUSE)
            self.cluster.network.dial(self, peer, lambda up: done())

    def _keep_dialled(self, peer: str, pause: float) -> None:
        kept = not self.over and peer in self.linked and self._dials(peer)
        if not kept or peer in self.links:
            self.dialling.discard(peer)
            return

        def done(up: bool) -> None:
            longer = FIRST_PAUSE if up else min(2 * pause, LONGEST_PAUSE)
            self.process.after(pause, self._keep_dialled, peer, longer)

        self.cluster.network.dial(self, peer, done)

    def on_item(self, peer: str, channel: str, item: Any) -> None:
        if self.over:
            return
        if peer == "registry":
            self.client.on_item(item)
        elif isinstance(item, Frame):
            self.on_frame(peer, item)
        else:
            self.on_message(peer, item)

    def on_message(self, peer: str, message: pb.Message) -> None:
        if self.over:
            return
        if self.member is None:
            self.early.append((peer, message))
            return
        body = message.WhichOneof("body")
        if body in TO_DRIVER:
            self.carry_out(self.driver.received(peer, message, self.world.now))
        elif body in TO_MEMBER:
            self.carry_out(self.member.received(peer, message))
        elif body in RELEARNING:
            self.relearning.on_message(peer, message)
        elif body == "kept":
            self.holdings.on_kept(peer, message.kept)
        else:
            self.transfers.on_message(peer, message)

    def on_frame(self, peer: str, frame: Frame) -> None:
        if frame.kind == "state":
            self.transfers.on_frame(peer, frame)
        elif frame.kind == "average":
            self.averaging.on_frame(peer, frame)
        elif self.member is None:
            pass
        elif frame.kind == "copy":
            self.holdings.holder.on_frame(peer, frame.fields["update"], frame.fields["part"])
        elif frame.kind == "twin":
            assert self.holdings.twin is not None
            self.holdings.twin.on_gradient(peer, frame.ballot, frame.fields)
        elif frame.kind == "follow":
            self._take_gradient(peer, frame)
        else:
            match self.member.frames(frame.ballot):
                case Frames.TAKE:
                    self.pipeline.take(peer, frame)
                case Frames.HOLD:
                    self.held.append((peer, frame))

    def on_link_up(self, peer: str) -> None:
        if peer == "registry":
            self.client.on_link_up()
            return
        if self.member is not None and not self.over:
            self.carry_out(self.driver.link_up(peer, self.world.now))
        self._send_parked(peer)

    def _send_parked(self, peer: str) -> None:
        for _, item in self.parked.pop(peer, []):
            self._send(peer, item)

    def on_link_lost(self, peer: str, reason: str, unacknowledged: list[Any]) -> None:
        if self.over:
            return
        if peer == "registry":
            self.client.on_link_lost()
            return
        if peer in self.linked and self._dials(peer) and peer not in self.dialling:
            self.dialling.add(peer)
            self.process.after(NOTICE, self._keep_dialled, peer, FIRST_PAUSE)
        self.averaging.on_peer_lost(peer, reason)
        self.transfers.on_peer_lost(peer, reason)
        self.relearning.on_peer_lost(peer)
        self.holdings.on_peer_lost(peer)
        if all(member.node != peer for member in self.view.members):
            return
        self.world.say(self.name, f"lost the link to {peer}: {reason}")
        self.client.suspect(peer, reason)
        if self.member is None:
            return
        for frame in unacknowledged:
            # Who is ready can't fail the attempt any more, so what is lost is sent again.
            if frame.kind == "twin" and frame.ballot == self.member.attempt:
                self.send(peer, frame)
        lost = [f.ballot for f in unacknowledged if f.kind in ("activation", "gradient")]
        if lost:  # those of older attempts may be among them
            why = f"the link to {peer} broke before a frame was through: {reason}"
            self.cut_off(max(lost), peer, why)
        self.carry_out(self.member.link_lost(peer))
        self.carry_out(self.driver.link_lost(peer, reason, self.world.now))

    def _send(self, peer: str, item: pb.Message | Frame) -> bool:
        link = self.links.get(peer)
        if link is None:
            return False
        channel = "bulk" if isinstance(item, Frame) else "control"
        self.cluster.network.send(link, self, channel, item)
        return True

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        """A link to a member that isn't up yet is waited for; False when there will be none."""
        if peer not in self.parked and self._send(peer, item):
            return True
        parked = self.parked.setdefault(peer, [])
        if all(member.node != peer for member in self.view.members):
            return False
        self._demand(peer)
        parked.append((self.world.now, item))
        return True

    def _forget_parked(self, now: float) -> None:
        for peer, parked in list(self.parked.items()):
            if peer in self.links:
                self._send_parked(peer)
                continue
            late = [item for since, item in parked if now - since > LINK_PATIENCE]
            del parked[: len(late)]
            if not parked:
                del self.parked[peer]
            for item in late:
                if isinstance(item, Frame) and item.kind not in ("state", "copy", "follow"):
                    why = f"no link to {peer} came up in {LINK_PATIENCE:.0f} s"
                    self.cut_off(item.ballot, peer, why)

    def cut_off(self, ballot: Ballot, node: str, reason: str) -> None:
        assert self.member is not None
        self.carry_out(self.member.cut_off(ballot, node, reason))

    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None:
        assert self.member is not None
        self.carry_out(self.member.failed(ballot, reason, accused))

    # --- effects

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if self.process.alive and not self.over:
                self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        assert self.member is not None
        match effect:
            case Send(to, message) if to == self.name:
                self.process.after(0.0, self.on_message, to, message)
            case Send(to, message):
                self.send(to, message)
                if self.fuse is not None and message.step.HasField("commit"):
                    self.fuse -= 1
                    if self.fuse < 0:
                        self.cluster.crash(self.process, "between two messages of a commit")
            case StartAttempt(ballot, begin):
                self.based_on = self.member.last
                self.averaging.abandon(ballot)
                self.pipeline.start(ballot, begin)
                self.holdings.start(ballot, begin)
                self._take_held()
            case GoOn(ballot, begin):
                self.averaging.abandon(ballot)
                self.pipeline.go_on(ballot, begin)
                self.holdings.start(ballot, begin)
                self._take_held()
            case DropAttempt(ballot):
                self.averaging.abandon(Ballot(ballot.view, ballot.attempt + 1))
                self.pipeline.drop(ballot)
                self.holdings.drop()
            case Reduce(ballot, _):
                self.pipeline.when_complete = partial(self.averaging.reduce, ballot)
                self.pipeline.check_complete()
            case Adopt(ballot):
                self._adopt(ballot)
            case Apply(commit):
                steps = {j.step for j in self.pipeline.begin.joining if j.stage == self.stage}
                based_on = self.based_on
                self._forget_gradients(Ballot.of(commit.ballot))
                self.compute.run(
                    lambda: self._apply(commit, steps, based_on),
                    self._applied,
                    seconds=self.world.random.uniform(0.001, 0.05),
                )
            case Fetch(ballot, sync):
                self._forget_gradients(ballot)
                self.transfers.fetch(ballot, sync)
            case Suspect(node, why):
                self.client.suspect(node, why)
            case Rejoin(reason):
                self.stop(reason)
            case Halted(halt):
                self.world.say(self.name, f"halted at {halt.step}: {halt.reason or 'finished'}")
                self.cluster.check_halt(self, halt)
                self._report()
            case Event():
                told = fields(effect)
                self.world.say(self.name, f"{effect.kind} {told}")
                self.cluster.on_event(self, effect.kind, told)
                self.cluster.check_patience(self, str(told.get("reason")))

    def _take_held(self) -> None:
        held, self.held = self.held, []
        for peer, frame in held:
            self.on_frame(peer, frame)

    def _take_gradient(self, peer: str, frame: Frame) -> None:
        if self.member is None or self.member.following is None:
            return
        if len(self.gradients) < MOST_GRADIENTS:
            self.gradients[frame.ballot] = frame.fields
            self.carry_out(self.member.gradient_came(frame.ballot, peer))
        else:
            self.carry_out(self.member.gradient_missed(frame.ballot))

    def _forget_gradients(self, through: Ballot) -> None:
        self.gradients = {b: g for b, g in self.gradients.items() if b > through}

    def _adopt(self, ballot: Ballot) -> None:
        member, gradient = self.member, self.gradients[ballot]
        assert member is not None
        finite = not self.cluster.overflows(member.step, member.stage)

        def adopted(norm: float) -> None:
            if not self.over:
                self.carry_out(member.reduced(ballot, norm, finite, 0.0))

        self.compute.run(lambda: self.averaging.install(*gradient), adopted)

    def _apply(self, commit: pb.Commit, fetched: set[int], based_on: pb.Commit) -> bytes:
        """`fetched`: steps whose states joiners may be fetching still."""
        self.transfers.pin(fetched, based_on)
        self.cluster.check_apply(self, commit)
        weights, twin = self.weights, self.holdings.twin
        if twin is not None:
            twin.apply(commit)
        weights.digest, weights.chain = self.advanced(
            weights.stage, weights.digest, weights.chain, weights.gradient_digest(), commit
        )
        weights.step = commit.step
        weights.clear()
        self.cluster.check_applied(self, commit)
        return weights.digest

    def _applied(self, digest: bytes) -> None:
        assert self.member is not None
        self.carry_out(self.member.applied(digest))
        self.holdings.applied()
        self._report()

    def advanced(
        self, stage: int, digest: bytes, chain: bytes, gradient: bytes, commit: pb.Commit
    ) -> tuple[bytes, bytes]:
        """Digest and chain of a stage's weights after the commit."""
        if not commit.skipped:
            scales = commit.clip_scale[stage], commit.lr_scale[stage]
            digest = fingerprint(digest, gradient, scales)
        return digest, fingerprint(chain, commit.SerializeToString(deterministic=True))

    # --- for the holdings

    def state(self) -> State:
        """What the weights are now."""
        assert self.member is not None
        weights, member = self.weights, self.member
        return State(
            *(weights.stage, weights.lineage, weights.step, weights.digest, weights.chain),
            *(member.last, member.boosted_at),
        )

    def weights_age(self) -> tuple[int, int]:
        return self.weights.lineage, self.weights.step

    def fingerprint(self, *parts: Any) -> bytes:
        return fingerprint(*parts)

    def frame(self, kind: str, ballot: Ballot, fields: Any) -> Frame:
        return Frame(kind, ballot, fields)

    def send_to_twin(self, holder: str, ballot: Ballot, gradient: bytes) -> None:
        if not self.send(holder, Frame("twin", ballot, gradient)):
            self.cut_off(ballot, holder, "it holds a twin")

    def _report(self) -> None:
        assert self.member is not None
        member, halt = self.member, self.member.halt
        self.report = registry.Report(
            committed=member.committed,
            lineage=member.lineage,
            phase=member.phase.value,
            stopped=halt is not None and not halt.finished,
            finished=halt is not None and halt.finished,
        )

    # --- the clock

    def _tick(self) -> None:
        if self.over:
            return
        if self.member is not None:
            self.carry_out(self.driver.tick(self.world.now))
            self._forget_parked(self.world.now)
        self.process.after(TICK, self._tick)


class Pipeline:
    """node/stage/pipeline.py: the microbatches of one attempt at one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stage = node.stage
        self.weights = node.weights
        self.in_flight = node.cluster.rules.stages + 1
        self.began = self.ballot = self.live = NEVER
        self.begin = pb.Begin()
        self.routes: dict[int, Route] = {}
        self.applied: set[int] = set()
        self.when_complete: Callable[[], None] | None = None
        self._waiting: deque[int] = deque()
        self._out: set[int] = set()
        self._seen: set[Pass] = set()
        self._done: set[Pass] = set()
        self._early: dict[Pass, list[tuple[str, Frame]]] = {}
        self._sent: dict[Pass, Frame] = {}
        self.speed = node.cluster.pace * node.world.random.uniform(0.5, 2.0)

    def start(self, ballot: Ballot, begin: pb.Begin) -> None:
        self._reset(ballot, begin)
        self._waiting.extend(m.id for m in begin.plan if m.source == self.node.name)
        self._inject()

    def go_on(self, ballot: Ballot, begin: pb.Begin) -> None:
        before, self.routes = self.routes, routes(begin)
        self.ballot, self.begin = ballot, begin
        self.when_complete = None

        def restore() -> None:
            self.weights.restore()
            if self.live == self.began:
                self.node.cluster.check_goes_on(self.node, ballot, begin)

        self.node.compute.run(restore, lambda _: None)
        for work, frame in list(self._sent.items()):
            node = self.routes[work.microbatch].nodes[work.position]
            if node != before[work.microbatch].nodes[work.position]:
                self._send(node, work, frame)
        self._waiting.extend(
            m.id for m in begin.plan if m.source == self.node.name != before[m.id].nodes[0]
        )
        self._inject()

    def drop(self, ballot: Ballot) -> None:
        if ballot == self.ballot:
            self._reset(NEVER, pb.Begin())

    def _reset(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.began = self.ballot = ballot
        self.begin, self.routes = begin, routes(begin)
        self.when_complete = None
        self.applied, self._seen, self._done, self._out = set(), set(), set(), set()
        self._waiting, self._early, self._sent = deque(), {}, {}

        def reset() -> None:
            self.live = ballot
            self.weights.clear()
            if ballot != NEVER:
                self.node.cluster.check_start(self.node, ballot, begin)

        self.node.compute.run(reset, lambda _: None)

    def check_complete(self) -> None:
        mine = [m for m, route in self.routes.items() if self.node.name in route.nodes]
        if self.when_complete is not None and len(self.applied) == len(mine):
            then, self.when_complete = self.when_complete, None
            self.node.compute.run(self.weights.keep, lambda _: then())

    def _inject(self) -> None:
        while self._waiting and len(self._out) < self.in_flight:
            microbatch = self._waiting.popleft()
            self._out.add(microbatch)
            visit = Visit(microbatch, 0, self.routes[microbatch])
            work = Pass(microbatch, 0, "activation")
            self._post(
                Priority.FORWARD, work, lambda visit=visit: self._onward("activation", visit)
            )

    def take(self, peer: str, frame: Frame) -> None:
        microbatch, position = frame.fields
        visit = Visit(microbatch, position, self.routes[microbatch])
        sender = replace(visit, position=2 * position - visit.after(frame.kind).position)
        if visit.node != self.node.name or sender.node != peer:
            if frame.ballot == self.ballot:
                self.node.attempt_failed(self.ballot, f"{peer} sent what is off its route", [peer])
            return
        work = Pass(microbatch, position, frame.kind)
        if work in self._seen:
            return
        before = visit.before(frame.kind)
        if before is not None and before not in self._done:
            self._early.setdefault(before, []).append((peer, frame))
            return
        self._seen.add(work)
        if frame.kind == "activation":
            compute = self._head if visit.at_head else self._forward
            priority = Priority.BACKWARD if visit.at_head else Priority.FORWARD
        else:
            compute, priority = self._backward, Priority.BACKWARD
        self._post(priority, work, lambda: compute(visit))

    def _forward(self, visit: Visit) -> Callable[[], None]:
        return self._onward("activation", visit)

    def _head(self, visit: Visit) -> Callable[[], None]:
        if self.begin.kind == pb.Begin.EVALUATE:
            return lambda: self._came_home(visit)
        self.weights.add(visit.microbatch, "head")
        return self._onward("gradient", visit)

    def _backward(self, visit: Visit) -> Callable[[], None]:
        self.weights.add(visit.microbatch, "stage")
        if visit.position == 0:
            return lambda: self._came_home(visit)
        onward = self._onward("gradient", visit)

        def done() -> None:
            self._count(visit.microbatch)
            onward()

        return done

    def _count(self, microbatch: int) -> None:
        self.applied.add(microbatch)
        self.check_complete()

    def _came_home(self, visit: Visit) -> None:
        if self.begin.kind == pb.Begin.TRAIN:
            self._count(visit.microbatch)
        self._out.discard(visit.microbatch)
        home = pb.Home(microbatch=visit.microbatch, loss=1.0, tokens=1)
        member = self.node.member
        assert member is not None
        message = pb.Message(ballot=self.ballot.message(), home=home)
        self.node.carry_out([Send(member.driver, message)])
        self._inject()

    def _onward(self, kind: str, visit: Visit) -> Callable[[], None]:
        onward = visit.after(kind)
        frame = Frame(kind, self.live, (onward.microbatch, onward.position))

        def send() -> None:
            node = self.routes[onward.microbatch].nodes[onward.position]
            self._send(node, Pass(onward.microbatch, onward.position, kind), frame)

        return send

    def _send(self, node: str, work: Pass, frame: Frame) -> None:
        frame = replace(frame, ballot=self.ballot)
        self._sent[work] = frame
        if not self.node.send(node, frame):
            reason = f"no link to {node} for microbatch {work.microbatch}"
            self.node.cut_off(self.ballot, node, reason)

    def _post(self, priority: Priority, work: Pass, task: Callable[[], Callable[[], None]]) -> None:
        ballot = self.began

        def compute() -> Callable[[], None] | None:
            return task() if ballot == self.live else None

        def then(done: Callable[[], None] | None) -> None:
            if done is None or ballot != self.began or self.node.over:
                return
            done()
            self._done.add(work)
            for peer, frame in self._early.pop(work, []):
                self.take(peer, frame)

        seconds = self.speed * self.node.world.random.uniform(0.002, 0.02)
        self.node.compute.run(compute, then, seconds, priority)


class Averaging:
    """averaging.py: the replicas of a stage tell each other what they have accumulated."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.oldest = NEVER
        self.ballot: Ballot | None = None  # of the reduction under way
        self.parts: dict[Ballot, dict[str, tuple[frozenset[int], Counter[tuple[int, str]]]]] = {}

    def abandon(self, before: Ballot) -> None:
        self.oldest = max(self.oldest, before)
        self.parts = {ballot: p for ballot, p in self.parts.items() if ballot >= before}
        if self.ballot is not None and self.ballot < before:
            self.ballot = None

    def reduce(self, ballot: Ballot) -> None:
        node, pipeline = self.node, self.node.pipeline
        self.ballot = ballot
        begin = pipeline.begin
        self.replicas = sorted(p.node for p in begin.members if p.stage == node.stage)
        self.window = len(begin.plan)

        def read() -> tuple[frozenset[int], Counter[tuple[int, str]]]:
            return frozenset(pipeline.applied), Counter(pipeline.weights.gradient)

        node.compute.run(read, lambda part: self._spread(ballot, part))

    def _spread(self, ballot: Ballot, part: Any) -> None:
        if self.ballot != ballot:
            return
        self.parts.setdefault(ballot, {})[self.node.name] = part
        for peer in self.replicas:
            if peer != self.node.name:
                self.node.send(peer, Frame("average", ballot, part))
        self.node.process.after(self.node.cluster.rules.progress, self._late, ballot)
        self._check()

    def on_frame(self, peer: str, frame: Frame) -> None:
        if frame.ballot >= self.oldest:
            self.parts.setdefault(frame.ballot, {})[peer] = frame.fields
            self._check()

    def on_peer_lost(self, peer: str, reason: str) -> None:
        waiting = self.ballot is not None and peer in self.replicas
        if waiting and peer not in self.parts.get(self.ballot, {}):
            ballot, self.ballot = self.ballot, None
            assert ballot is not None
            self.node.cut_off(ballot, peer, f"lost while averaging: {reason}")

    def _late(self, ballot: Ballot) -> None:
        if self.ballot == ballot:
            missing = [peer for peer in self.replicas if peer not in self.parts[ballot]]
            self._fail(f"waited in vain for {', '.join(missing)}", missing)

    def _fail(self, reason: str, accused: list[str]) -> None:
        ballot, self.ballot = self.ballot, None
        if not self.node.over:
            self.node.attempt_failed(ballot, reason, accused)

    def _check(self) -> None:
        if self.ballot is None:
            return
        parts = self.parts.get(self.ballot, {})
        if self.node.name not in parts or any(peer not in parts for peer in self.replicas):
            return
        ids = Counter(i for peer in self.replicas for i in parts[peer][0])
        if ids != Counter(range(self.window)):
            self._fail(f"the window is not covered once: {sorted(ids.items())}", [])
            return
        ballot, self.ballot = self.ballot, None
        total: Counter[tuple[int, str]] = Counter()
        for peer in self.replicas:
            total.update(parts[peer][1])
        self.node.compute.run(lambda: self.install(total), lambda norm: self._done(ballot, norm))

    def install(self, total: Counter[tuple[int, str]], adopted: bytes = b"") -> float:
        weights = self.node.weights
        weights.gradient, weights.adopted = Counter(total), adopted
        return 0.5 + int.from_bytes(weights.gradient_digest()[:4], "big") / 2**32

    def _done(self, ballot: Ballot, norm: float) -> None:
        member = self.node.member
        if member is None or self.node.over or ballot < self.oldest:
            return
        node, twin = self.node, self.node.holdings.twin
        finite = not node.cluster.overflows(member.step, member.stage)
        speed = node.pipeline.speed
        begin, weights = node.pipeline.begin, node.weights
        gradient = Counter(weights.gradient), weights.gradient_digest()

        def ready() -> None:
            node.carry_out(member.reduced(ballot, norm, finite, speed))

        if twin is None:
            ready()
        else:
            twin.exchange(ballot, weights.gradient_digest(), ready)
        for joiner, feeder in feeders(begin).items():
            if feeder == node.name:
                node.send(joiner, Frame("follow", ballot, gradient))


HELD = {"stage0-copy": "copy", "snapshot": "snapshot", "redundant": "redundant", "save": "save"}
"""Methods that fetch what a node holds: the kind of the holding."""


class Transfers:
    """transfer.py: state from peers in shards, each retried elsewhere when a source fails."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._numbers = itertools.count(1)
        self.ballot: Ballot | None = None
        self.wanted: dict[int, tuple[int, int, list[str]]] = {}  # transfer -> stage, step, left
        self.asked: dict[int, str] = {}
        self.got: dict[int, State] = {}
        self.pins: dict[int, State] = {}  # by step: states of the past

    def fetch(self, ballot: Ballot, sync: pb.Sync) -> None:
        self.ballot, self.sync = ballot, sync
        self.wanted, self.asked, self.got = {}, {}, {}
        self.node.relearning.stop()
        self.node.process.after(self.node.cluster.rules.progress, self._late, ballot)
        own = [source for source in sync.sources if source.node == self.node.name]
        if own:
            self._load(ballot, own[0])
            return
        by_stage: dict[int, list[pb.Source]] = {}
        for source in sync.sources:
            by_stage.setdefault(source.stage, []).append(source)
        for stage, sources in sorted(by_stage.items()):
            nodes = [source.node for source in sources]
            for shard in range(SHARDS):
                start = shard % len(nodes)
                number = next(self._numbers)
                self.wanted[number] = (stage, sources[0].step, nodes[start:] + nodes[:start])
        for number in self.wanted:
            self._ask(number)

    def _load(self, ballot: Ballot, source: pb.Source) -> None:
        """From this node's own files."""
        kind, age = self.sync.method, (source.lineage, source.step)

        def loaded(state: State | None) -> None:
            if self.ballot != ballot:
                return
            if state is None:
                self._fail(f"there is no {kind} of step {source.step} here")
                return
            self.wanted, self.got = {0: (source.stage, source.step, [])}, {0: state}
            self._arrived()

        seconds = self.node.world.random.uniform(0.01, 0.3)
        self.node.compute.run(lambda: self.node.holdings.file(kind, age), loaded, seconds)

    def _ask(self, number: int) -> None:
        stage, step, left = self.wanted[number]
        while left and self.ballot is not None:
            source = left.pop(0)
            self.asked[number] = source
            kind = HELD.get(self.sync.method, "")
            request = pb.StateRequest(transfer=number, step=step, kind=kind, stage=stage)
            if self.node.send(source, pb.Message(state_request=request)):
                return
        self._fail(f"no source of stage {stage} is left")

    def _fail(self, reason: str) -> None:
        ballot, self.ballot = self.ballot, None
        self.node.relearning.stop()
        if ballot is not None and not self.node.over:
            assert self.node.member is not None
            self.node.carry_out(self.node.member.failed(ballot, reason, []))

    def _late(self, ballot: Ballot) -> None:
        if self.ballot == ballot:
            self._fail(f"no state in time from {sorted(set(self.asked.values()))}")

    def on_peer_lost(self, peer: str, reason: str) -> None:
        for number, source in list(self.asked.items()):
            if self.ballot is not None and source == peer and number not in self.got:
                self._ask(number)

    def on_message(self, peer: str, message: pb.Message) -> None:
        if message.WhichOneof("body") == "state_request":
            request = message.state_request
            process, seconds = self.node.process, self.node.world.random.uniform(0.01, 0.3)
            self.node.compute.run(
                lambda: {"transfer": request.transfer, "state": self._served(request)},
                lambda fields: process.after(
                    seconds * self.node.cluster.state_size, self._serve, peer, fields
                ),
            )

    def _serve(self, peer: str, fields: dict[str, Any]) -> None:
        if not self.node.over:
            self.node.send(peer, Frame("state", NEVER, fields))

    def _served(self, request: pb.StateRequest) -> State | None:
        node = self.node
        member = node.member
        assert member is not None
        if request.kind:
            return node.holdings.state(request.kind, request.stage, request.step)
        if request.step in self.pins:
            return self.pins[request.step]
        syncing = member.phase is Phase.SYNCING and member.sync.method != "twin"
        whole = not syncing and (member.following is None or member.following.state)
        return node.state() if whole and member.committed == request.step else None

    def pin(self, steps: set[int], last: pb.Commit) -> None:
        """In the compute thread, before the weights change."""
        weights = self.node.weights
        self.pins = {step: pin for step, pin in self.pins.items() if step in steps}
        if weights.step in steps:
            self.pins[weights.step] = replace(self.node.state(), step=weights.step, last=last)

    def on_frame(self, peer: str, frame: Frame) -> None:
        number, state = frame.fields["transfer"], frame.fields["state"]
        if self.ballot is None or self.asked.get(number) != peer:
            return
        if state is None:
            self._ask(number)
            return
        self.got[number] = state
        if len(self.got) == len(self.wanted):
            self._arrived()

    def _arrived(self) -> None:
        """The state is here; what is guessed may have to be relearned before it is fit to train."""
        ballot, sync = self.ballot, self.sync
        assert ballot is not None
        if not sync.lost:
            self._install()
        elif self.node.relearning.start(ballot, sync, self._install, self._fail):
            self.node.compute.run(self.node.weights.make_void, lambda _: None)
        else:
            self.ballot = None

    def _install(self) -> None:
        ballot, self.ballot = self.ballot, None
        member = self.node.member
        assert ballot is not None and member is not None
        if not member.arrived(ballot):
            return
        sync, weights = self.sync, self.node.weights
        states = [self.got[number] for number in sorted(self.got)]
        stages = [self.wanted[number][0] for number in sorted(self.got)]
        if sync.method == "twin":
            self._install_twin(states[0])
            return
        last = sync.last if sync.HasField("last") else states[0].last

        def install() -> bytes:
            cluster = self.node.cluster
            cluster.check_sources(self.node, sync, stages, states)
            digests = [states[stages.index(stage)].digest for stage in sorted(set(stages))]
            exact = sync.method not in INEXACT
            weights.digest = digests[0] if exact else fingerprint("average", *digests)
            weights.chain = cluster.chain_at(sync, states[0])
            weights.lineage, weights.step = sync.lineage, sync.step
            weights.void = False
            cluster.check_installed(self.node, sync, states[0])
            return weights.digest

        def installed(digest: bytes) -> None:
            synced = pb.Synced(
                step=sync.step, method=sync.method, sources=sync.sources, digest=digest
            )
            if not self.node.over:
                boosted_at = sync.step if sync.method in INEXACT else states[0].boosted_at
                self.node.carry_out(member.fetched(synced, last, boosted_at))
                self.node.holdings.committed()

        self.node.compute.run(install, installed, seconds=0.05)

    def _install_twin(self, state: State) -> None:
        """The node's own weights stay as they are."""
        node, member, sync = self.node, self.node.member, self.sync
        assert member is not None and node.holdings.twin is not None
        node.holdings.twin.state = state
        digest = node.weights.digest
        synced = pb.Synced(step=sync.step, method=sync.method, sources=sync.sources, digest=digest)

        def installed(_: None) -> None:
            if not node.over:
                node.carry_out(member.fetched(synced, member.last, member.boosted_at))

        node.compute.run(lambda: None, installed, seconds=0.05)
