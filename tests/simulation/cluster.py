"""A whole cluster in one thread: hosts, processes, the registry, and what must always hold.

The invariants are those of the step transaction. `chain` is a fingerprint of all commits in a
node's weights, so equal chains mean equal histories. A step is *confirmed* once a commit of the
next one is applied anywhere: every member of the view was ready for that one, so all had the step.

- I1  Whoever applies a commit has in its gradient each microbatch of the window exactly once.
- I2  All who apply one commit get the same digest in the same stage, cut-off nodes included; all
      who start one attempt have the same chain, and replicas the same digest; a confirmed step has
      one chain for ever. What is allowed: the last, unconfirmed commit of a driver that was cut off
      or died may differ from what the others do instead, on nodes whose state is thrown away.
- I3  No attempt in a newer ballot starts from a step before the newest confirmed one, and no node
      goes back. When no node with any state is left, and the registry has heard of one step at
      most, the run starts over.
- I4  After the last fault the run finishes in time, or stops for a reason that holds. One is that
      nobody is left who has trained: joiners that only followed don't go on alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from node import stage_pb2 as pb
from node.driver import Driver, Rules
from node.driver import Phase as DriverPhase
from node.effects import NEVER, Ballot
from node.member import Member
from recovery.decide import Decision, Left, Stop, decide
from simulation.registry import Client, Registry
from simulation.shell import SHARDS, Node
from simulation.world import Network, Process, World


class InvariantError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Attempt:
    """What those who start it have in common."""

    step: int
    chain: bytes
    digests: dict[int, bytes] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)


@dataclass
class Host:
    """A machine on which one process runs a node; another one after it has crashed."""

    name: str
    stage: int | None
    dials_only: bool
    process: Process | None = None
    node: Node | None = None
    restart_at: float | None = None


@dataclass
class Trap:
    """A fault in the very moment in which a machine says something for the n-th time."""

    kind: str
    countdown: int
    spring: Callable[[], None]


class Cluster:
    def __init__(
        self,
        seed: int,
        rules: Rules,
        hosts: list[Host],
        overflowing: set[int],
        pace: float,
        member: type[Member] = Member,
        driver: type[Driver] = Driver,
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.rules, self.overflowing, self.pace = rules, overflowing, pace
        self.member_class, self.driver_class = member, driver
        self.hosts = {host.name: host for host in hosts}
        self.state_size = self.world.random.choice([1.0, 4.0, 16.0])
        self.counts: Counter[str] = Counter()
        self.attempts: dict[Ballot, Attempt] = {}
        self.commits: dict[Ballot, Attempt] = {}
        self.confirmed: dict[int, bytes] = {0: b""}
        self.confirmed_in = NEVER
        self.lineage_from = NEVER
        self.traps: list[Trap] = []
        self._names = itertools.count(1)
        self.registry = Registry(self)
        for host in hosts:
            self.world.after(self.world.random.uniform(0.0, 2.0), self.start, host)

    # --- hosts

    def new_name(self) -> str:
        number = next(self._names)
        return f"{self.world.random.randrange(16):x}{number}"

    def new_client(self, node: Node) -> Client:
        return Client(self, node)

    def make_member(self, name: str, stage: int) -> Member:
        return self.member_class(name, stage, self.rules.stages, self.rules.policy)

    def make_driver(self, name: str) -> Driver:
        return self.driver_class(name, self.rules)

    def start(self, host: Host) -> None:
        host.restart_at = None
        if host.process is None or not host.process.alive:
            host.process = Process(self.world, host.name)
            self._new_node(host)

    def _new_node(self, host: Host) -> None:
        assert host.process is not None
        host.node = Node(self, host.process, host.stage, host.dials_only)
        self.world.say(host.node.name, f"starts on {host.name}")

    def identity_over(self, node: Node) -> None:
        host = self.hosts[node.process.host]
        host.node = None
        node.process.after(self.world.random.uniform(0.0, 0.5), self._new_node, host)

    def crash(self, process: Process, why: str) -> None:
        host = self.hosts[process.host]
        process.alive = False
        if host.node is not None:
            self.world.say(host.node.name, f"crashes {why}")
            if host.node.name in self.network.endpoints:
                self.network.died(host.node)
        host.node = None
        host.restart_at = self.world.now + self.world.random.uniform(0.3, 8.0)
        self.world.after(host.restart_at - self.world.now, self.start, host)

    def add_host(self) -> None:
        """What a person does whose run waits for a node."""
        host = Host(f"h{len(self.hosts)}", None, False)
        self.hosts[host.name] = host
        self.start(host)

    def recoverable_without(self, nodes: list[Node]) -> bool:
        """Whether the run could go on if these nodes were lost."""
        left: dict[int, list[str]] = {}
        newest = max(self.confirmed)
        for node in self.nodes:
            listed = node.name in self.registry.names() and node.process.responsive
            if node in nodes or not listed or node.member is None or node.weights.step < newest:
                continue
            left.setdefault(node.member.stage, []).append(node.name)
        return 0 in left and not any(isinstance(d, Stop) for d in self.decisions(newest, left))

    def decisions(self, step: int, survivors: dict[int, list[str]]) -> list[Decision]:
        rules = self.rules
        left = Left(rules.stages, step, survivors)
        stages = range(rules.stages + 1)
        return [decide(stage, left, rules.policy, rules.strict) for stage in stages]

    @property
    def nodes(self) -> list[Node]:
        return [host.node for host in self.hosts.values() if host.node is not None]

    # --- what must hold

    def overflows(self, step: int, stage: int) -> bool:
        return step in self.overflowing and stage == step % (self.rules.stages + 1)

    def on_event(self, node: Node, kind: str) -> None:
        self.counts[kind] += 1
        for trap in self.traps:
            if trap.kind == kind:
                trap.countdown -= 1
                if trap.countdown == 0:
                    trap.spring()

    def demand(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            raise InvariantError(f"{invariant}: {what}")

    def check_start(self, node: Node, ballot: Ballot, begin: pb.Begin) -> None:
        """In the compute thread, when everything before the attempt is done."""
        weights, stage = node.weights, node.stage
        assert stage is not None
        base = begin.step - (begin.kind == pb.Begin.TRAIN)
        who = f"{node.name} of stage {stage} starts {ballot} for step {begin.step}"
        self.demand(weights.step == base, "I2", f"{who} with weights of step {weights.step}")
        attempt = self.attempts.setdefault(ballot, Attempt(begin.step, weights.chain))
        attempt.nodes.add(node.name)
        self.demand(attempt.chain == weights.chain, "I2", f"{who} with another history")
        digest = attempt.digests.setdefault(stage, weights.digest)
        self.demand(digest == weights.digest, "I2", f"{who}; its replicas have other weights")
        if ballot <= self.confirmed_in:
            return  # of a driver that is cut off: no commit can come of it
        if base == 0 and max(self.confirmed) > 0 and self._may_start_over(ballot):
            self.confirmed = {0: b""}
            self.lineage_from = ballot
            self.counts["started over"] += 1
        newest = max(self.confirmed)
        self.demand(base >= newest, "I3", f"{who}, but step {newest} was committed by all")
        if base in self.confirmed:
            same = self.confirmed[base] == weights.chain
            self.demand(same, "I2", f"{who} with another history than was confirmed")

    def _may_start_over(self, ballot: Ballot) -> bool:
        """Nobody is left, and the registry has not heard of more than one step."""
        view = self.registry.issued[ballot.view]
        return view.committed <= 1

    def check_apply(self, node: Node, commit: pb.Commit) -> None:
        weights, stage = node.weights, node.stage
        who = f"{node.name} of stage {stage} applies step {commit.step}"
        self.demand(weights.step == commit.step - 1, "I3", f"{who} on step {weights.step}")
        parts = ("head", "stage") if stage == 0 else ("stage",)
        window = range(self.rules.microbatches)
        expected = Counter((identity, part) for identity in window for part in parts)
        self.demand(weights.gradient == expected, "I1", f"{who} with {sorted(weights.gradient)}")
        ballot = Ballot.of(commit.ballot)
        attempt = self.attempts[ballot]
        self.demand(attempt.chain == weights.chain, "I2", f"{who} with another history")
        if ballot < self.lineage_from:
            return
        before = self.confirmed.setdefault(commit.step - 1, weights.chain)
        self.demand(before == weights.chain, "I2", f"{who} on a history that was not confirmed")
        self.confirmed_in = max(self.confirmed_in, ballot)

    def check_applied(self, node: Node, commit: pb.Commit) -> None:
        weights, stage = node.weights, node.stage
        assert stage is not None
        who = f"{node.name} of stage {stage} has applied step {commit.step}"
        ballot = Ballot.of(commit.ballot)
        ready = self.attempts[ballot].nodes
        applied = self.commits.setdefault(ballot, Attempt(commit.step, weights.chain, nodes=ready))
        self.demand(applied.chain == weights.chain, "I2", f"{who}; others committed another thing")
        digest = applied.digests.setdefault(stage, weights.digest)
        self.demand(digest == weights.digest, "I2", f"{who}; its replicas have other weights")
        self.counts["applied"] += 1
        self.counts["skipped"] += commit.skipped

    def check_sources(
        self, node: Node, sync: pb.Sync, stages: list[int], states: list[dict[str, Any]]
    ) -> None:
        who = f"{node.name} of stage {node.stage} fetches step {sync.step}"
        self.demand(sync.step >= node.weights.step, "I3", f"{who} over step {node.weights.step}")
        self.demand(len({state["chain"] for state in states}) == 1, "I2", f"{who}: two histories")
        for at in range(0, len(states), SHARDS):
            digests = {state["digest"] for state in states[at : at + SHARDS]}
            self.demand(len(digests) == 1, "I2", f"{who}: replicas of {stages[at]} differ")
        self.counts[sync.method] += 1
        if sync.method != "replica":
            left = [n.name for n in self._holders(sync.step) if n.stage == node.stage]
            self.demand(not left, "I4", f"{who}, but {', '.join(left)} had it")

    def _holders(self, step: int) -> list[Node]:
        """Live members that have the step in their weights, or were ready to commit it."""
        last = [a for b, a in self.commits.items() if a.step == step and b >= self.lineage_from]
        ready = {name for commit in last for name in commit.nodes}
        return [
            node
            for node in self.nodes
            if node.name in self.registry.names()
            and node.member is not None
            and (node.weights.step == step or node.name in ready)
        ]

    def check_halt(self, node: Node, halt: pb.Halt) -> None:
        self.on_event(node, "finished" if halt.finished else "stopped")

    def check_patience(self, node: Node, reason: str) -> None:
        """The deadline for progress is for what nobody has thought of: each loss known here is
        noticed sooner, but for a driver that was frozen itself."""
        vain = reason.startswith("no progress") and node.process.thawed_at < self.world.now
        self.demand(not vain, "I4", f"{node.name} has waited in vain: {reason}")

    # --- how it ends

    def settled(self) -> bool:
        """All members of the newest view are alive and have halted under its driver."""
        view = self.registry.view()
        nodes = {node.name: node for node in self.nodes}
        active = [nodes.get(member.node) for member in view.members if not member.spare]
        return bool(active) and all(
            node is not None
            and node.view.number == view.number
            and node.member is not None
            and node.member.halt is not None
            and not node.member.changing
            and (node.name != view.driver or node.driver.phase is DriverPhase.HALTED)
            for node in active
        )

    def outcome(self) -> str:
        """`finished` or `stopped: reason` of a settled cluster. Raises InvariantError."""
        view = self.registry.view()
        nodes = {node.name: node for node in self.nodes}
        active = [nodes[member.node] for member in view.members if not member.spare]
        halts = [node.member.halt for node in active if node.member is not None]
        stopped = [halt.reason for halt in halts if halt is not None and not halt.finished]
        newest = max(node.weights.step for node in active)
        if not stopped:
            self.demand(newest == self.rules.steps, "I4", f"finished at step {newest}")
            chains = {node.weights.chain for node in active if node.weights.step == newest}
            self.demand(len(chains) == 1, "I2", "the run has finished with two histories")
            return "finished"
        survivors: dict[int, list[str]] = {}
        for node in self._holders(newest):
            survivors.setdefault(node.weights.stage, []).append(node.name)
        decisions = self.decisions(newest, survivors)
        lost = newest < max(self.confirmed)
        trained = {name for attempt in self.attempts.values() for name in attempt.nodes}
        joiners_only = not any(trained.intersection(names) for names in survivors.values())
        stops = any(isinstance(decision, Stop) for decision in decisions)
        justified = lost or stops or joiners_only
        self.demand(justified, "I4", f"stopped without need: {stopped[0]}")
        return f"stopped: {stopped[0]}"

    def who_waits(self) -> str:
        """For a person: what everybody is up to."""
        view = self.registry.view()
        members = ", ".join(f"{m.node}@{'spare' if m.spare else m.stage}" for m in view.members)
        lines = [f"view {view.number}, driver {view.driver or 'none'}: {members} ({view.reason})"]
        for node in self.nodes:
            member = node.member
            if member is None:
                lines.append(f"{node.name} on {node.process.host}: view {node.view.number}")
                continue
            lines.append(
                f"{node.name} on {node.process.host}: stage {node.stage}, view {node.view.number}, "
                f"{member.phase.value}, committed {member.committed}, promised "
                f"{tuple(member.promised)} to {member.driver}, links {' '.join(sorted(node.links))}"
            )
            if node.driver.phase is not DriverPhase.INACTIVE:
                lines.append(f"    drives {tuple(node.driver.ballot)}: {node.driver.explain()}")
        return "\n".join(lines)
