"""The registry as a process, and the nodes' clients of it: bootstrap/service.py and client.py
without gRPC. The machine is the real one; its journal survives a crash."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.effects import (
    Contradict,
    Dial,
    Effect,
    Evict,
    Issue,
    Probe,
    Refused,
    Settle,
)
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from planaria.bootstrap.views import apply, difference, follows, is_genuine
from simulation.network import Stream
from simulation.world import Process
from tests.membership import join, validate_state

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.node import Node

TICK = 0.1
HELD_UP = 1.0
RENEW = 1.0
KEY = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))  # the run's
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0


@cache
def key_of(host: str) -> Identity:
    """Of whatever node is there."""
    return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(host.encode()).digest()))


class Registry:
    """One process after another with one journal."""

    name = "registry"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.journal = self.newest = pb.View()  # on disk, and in memory
        self.journal_fails = False
        self.issued: dict[int, pb.View] = {}
        self.rules = MembershipRules(
            run="run",
            stages=cluster.rules.stages,
            replicas=max(1, len(cluster.hosts) // (cluster.rules.stages + 1)),
            start_grace=10.0,
            policy=cluster.rules.policy,
        )
        self.restart()

    def crash(self) -> None:
        if self.process.alive:
            self.world.say(self.name, "crashes")
            self.process.alive = False
            self.cluster.network.died(self)

    def freeze(self, seconds: float) -> None:
        process = self.process
        if process.responsive:
            process.freeze()
            self.world.after(seconds, process.thaw)

    def restart(self) -> None:
        if getattr(self, "process", None) and self.process.alive:
            return
        self.process = Process(self.world, self.name)
        self.ticked = self.world.now
        self.streams: dict[str, Stream] = {}
        self.machine = Membership(self.rules, KEY)
        self.newest = self.journal
        if self.journal.number:
            self.machine.restore(self.journal, self.world.now)
            self.world.say(self.name, "is back")
        self.cluster.network.endpoints[self.name] = self
        self.process.after(TICK, self._tick)

    def view(self) -> pb.View:
        return self.newest

    def names(self) -> set[str]:
        return {member.node for member in self.newest.members}

    def fill_disk(self, seconds: float) -> None:
        self.journal_fails = True
        self.world.after(seconds, self._free_disk)

    def _free_disk(self) -> None:
        self.journal_fails, self.journal = False, self.newest

    def _tick(self) -> None:
        now = self.world.now
        if now - self.ticked > HELD_UP:
            self.machine.paused(now - self.ticked, now)
        self.ticked = now
        self._carry_out(self.machine.tick(now))
        self.process.after(TICK, self._tick)

    # --- streams

    def admits(self, peer: str) -> bool:
        return True

    def on_stream_up(self, peer: str) -> None:
        pass

    def on_stream_lost(self, peer: str) -> None:
        self._carry_out(self.machine.stream_lost(peer, self.world.now))

    def on_item(self, peer: str, item: Any) -> None:
        now = self.world.now
        match item:
            case pb.JoinRequest():
                try:
                    reply, effects = join(self.machine, item, now)
                except Refused as refused:
                    self._tell(peer, refused)
                else:
                    self._carry_out(effects)
                    self._tell(peer, reply)
            case pb.Renewal() if item.HasField("member"):
                try:
                    self._carry_out(self.machine.stream_opened(item, now))
                except Refused as refused:
                    self._tell(peer, refused)
                else:
                    self._tell(peer, self.machine.view)
            case pb.Renewal():
                self._carry_out(self.machine.renewed(item, now))
                self._tell(peer, pb.Notice(view=self.machine.view.number))
            case pb.LeaveRequest():
                self._carry_out(self.machine.leave(item.node, item.why, now))
            case pb.Suspicion():
                with contextlib.suppress(Refused):  # the accuser is told by its own eviction
                    self._carry_out(self.machine.suspect(item, now))

    def _tell(self, peer: str, item: Any) -> None:
        if (stream := self.streams.get(peer)) is not None:
            stream.send(stream.other(self), "control", item)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Issue(view):
                    self.world.say(self.name, f"view {view.number}: {view.reason}")
                    self.cluster.check_issued(self.newest, view)
                    told = apply(self.newest, difference(self.newest, view))
                    self.cluster.demand(told == view, "I6", "it isn't what its difference gives")
                    self.newest = self.issued[view.number] = view
                    if not self.journal_fails:
                        self.journal = view
                    for peer in sorted(self.streams):
                        self._tell(peer, view)
                case Probe(node, number):
                    self._tell(node, pb.Notice(probe=number, view=self.machine.view.number))
                case Evict(node, reason):
                    self._tell(node, pb.Notice(evicted=reason, view=self.machine.view.number))
                case Dial(question, node, _, seconds):
                    told = partial(self.machine.dialled, question, node)
                    self.cluster.network.ask(self, node, seconds, told)
                case Settle() | Contradict():
                    pass
        if effects:
            validate_state(self.machine)


class Client:
    """A node's side: joins, renews, answers probes, and comes back when the stream breaks."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.joined = self.stopped = False
        self.question, self.answered = 0, list[str]()  # that the registry asked; who answered
        self.told: tuple[list[pb.Complaint], bool, bool] = [], False, False  # what was news last
        self._connect(FIRST_PAUSE)
        node.process.after(RENEW, self._renew)

    def stop(self) -> None:
        self.stopped = True

    def _connect(self, pause: float) -> None:
        if self.stopped or "registry" in self.node.streams:
            return

        def done(up: bool) -> None:
            if not up:
                longer = min(2 * pause, LONGEST_PAUSE)
                self.node.process.after(pause, self._connect, longer)

        self.cluster.network.dial(self.node, "registry", done)

    def on_stream_up(self) -> None:
        if self.joined:
            self._open()
        else:
            self._join()

    def _join(self) -> None:
        node = self.node
        if self.stopped or "registry" not in node.streams:
            return
        request = pb.JoinRequest(
            protocol=PROTOCOL,
            node=node.name,
            address=node.address,
            speed=1.0,
            stage=node.wanted,
            saved=node.wanted is not None and node.cluster.hosts[node.process.host].stage is None,
            room=node.room,
            key=key_of(node.process.host).public,
            question=self.question,
            answered=self.answered,
        )
        self._tell(request)

    def _dial(self, asked: pb.JoinReply) -> None:
        """Those that the registry doesn't hear; it joins again when all have answered or not."""
        self.question, self.answered = asked.question, []
        waited = {member.node for member in asked.unheard}

        def told(name: str, there: bool | None) -> None:
            waited.discard(name)
            if there:
                self.answered.append(name)
            if not waited:
                self._join()

        for name in sorted(waited):
            self.cluster.network.ask(self.node, name, asked.dial_seconds, partial(told, name))
        if not waited:
            self._join()

    def _open(self) -> None:
        view = self.node.view
        own = next((m for m in view.members if m.node == self.node.name), None)
        self._tell(
            pb.Renewal(
                node=self.node.name, report=self.node.report, run="run", member=own, view=view
            )
        )

    def on_stream_lost(self) -> None:
        self._connect(FIRST_PAUSE)

    def on_item(self, item: Any) -> None:
        match item:
            case pb.JoinReply() if item.question:
                self._dial(item)
            case pb.JoinReply() if item.quarantine:
                self.node.process.after(item.quarantine, self._join)
            case pb.JoinReply():
                self.joined = True
                self._viewed(item.view)
                self._open()
            case Refused() if self.joined:
                self.node.process.after(LONGEST_PAUSE, self._open)
            case Refused():
                if item.code == "ALREADY_EXISTS":
                    self.node.stop(item.reason)
                else:
                    self.node.process.after(LONGEST_PAUSE, self._join)
            case pb.View():
                self._viewed(item)
            case pb.Notice():
                if item.evicted:
                    self.node.stop(item.evicted)
                elif item.probe:
                    self._tell(pb.Renewal(node=self.node.name, probe=item.probe))

    def _viewed(self, view: pb.View) -> None:
        """As client.py does."""
        former = self.node.view
        if not self.joined or view.number < former.number or view == former:
            return
        genuine = is_genuine(view, KEY.public, "run")
        self.cluster.demand(genuine, "I6", f"view {view.number} isn't the registry's")
        if follows(view, former):
            self.node.viewed(view)
        else:
            self.node.stop(f"view {view.number} doesn't follow view {former.number}")

    def reported(self) -> None:
        """There is a new report; it is sent at once when it is news."""
        report = self.node.report
        news = list(report.complaints), report.leaving, report.stalled_seconds > 0
        if news != self.told:
            self.told = news
            self._renew_now()

    def _renew(self) -> None:
        if not self.stopped:
            self._renew_now()
            self.node.process.after(RENEW, self._renew)

    def _renew_now(self) -> None:
        if self.joined and not self.stopped:
            self._tell(pb.Renewal(node=self.node.name, report=self.node.report))

    def leave(self) -> None:
        self._tell(pb.LeaveRequest(node=self.node.name))

    def suspect(
        self,
        accused: str,
        why: str,
        cause: pb.Cause = pb.SILENT,
    ) -> None:
        told = pb.Suspicion(accuser=self.node.name, accused=accused, why=why, cause=cause)
        self._tell(told)

    def _tell(self, item: Any) -> None:
        if (stream := self.node.streams.get("registry")) is not None:
            stream.send(stream.other(self.node), "control", item)
