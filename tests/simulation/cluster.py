"""A whole cluster in one thread: hosts, processes, the registry, and checks of the invariants.

The invariants are those of the step transaction. `chain` is a fingerprint of all commits in a
node's weights, so equal chains mean equal histories. A step is *confirmed* once any node applies a
commit of the next one: every member of the view voted for that one, so all had the step.

- I1  A node that applies a commit has each microbatch of the window in its gradient exactly once.
- I2  All nodes that apply one commit have the same digest at the same stage, cut-off nodes
      included. All that start one attempt have the same chain, and replicas the same digest. A
      confirmed step has one chain for ever. The last, unconfirmed commit of a driver that was cut
      off or died may differ from the others', on nodes whose state is thrown away.
- I3  No attempt in a newer ballot starts from a step before the newest confirmed one, and no node
      goes back. If no node with any state is left, and the registry has heard of one step at most,
      the run starts over. A new *lineage* may go back: with the policy checkpoint when a stage is
      lost, else only when no node is left that has trained and has the newest step. It then begins
      at the newest step that all stages have, in a file or at a joiner. No node goes back to an
      older lineage.
- I4  After the last fault the run finishes in time, or stops for a valid reason.
- I5  A holding is what its holder says. An exact method gives the very weights that the lost stage
      had, and only a fallback uses a commit that the survivors didn't make.
- I6  While nobody dies, no node without fault is evicted, and no state is lost. No step is skipped
      while each stage has a node without fault that can make it.
- I7  When the run has finished, each of its steps is in a ledger, whichever nodes have died.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.client import InQuarantine, JoinRefused, RegistryUnreachable
from planaria.bootstrap.neighbours import stages_of
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.driver.driver import Driver
from planaria.node.driver.fault_policy import NOBODY_ELSE
from planaria.node.driver.phases import DriverPhase
from planaria.node.model.shape import model_config
from planaria.node.run_file import RunFile, from_fields
from planaria.node.seats import SenselessError
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.optimizer import digest_of as weights_digest
from planaria.node.state.copies import CopyHolder
from planaria.node.state.holdings import Holdings
from planaria.node.state.stage_state import StageState
from planaria.node.transaction.commits import entering
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.member import MemberSide
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.seat_names import node_of, seated
from planaria.recovery.decide import decide, resume
from planaria.recovery.facts import (
    ARRIVED,
    COPIED,
    INEXACT,
    ORIGIN,
    UNKNOWN,
    Decision,
    Held,
    Left,
    Source,
    Stop,
)
from planaria.recovery.policy import POLICIES
from simulation.fingerprints import TRAINED, chain_of, fingerprint, read_chain
from simulation.network import Network
from simulation.node import Node, Seat
from simulation.ports import Files
from simulation.registry import Registry
from simulation.stage import ChainedTwin, contribution, row
from simulation.world import Process, World


def run_of(
    rules: TransactionRules,
    files: Files,
    relearning: Mapping[str, float],
    averaging: str = "none",
) -> RunFile:
    """The run file with these rules and settings."""
    return from_fields(
        {
            "steps": rules.steps,
            "model": {
                "dim": 8,
                "heads": 1,
                "hidden": 8,
                "context": 2,
                "stages": rules.stages,
                "layers": rules.stages,
            },
            "training": {
                "batch": rules.microbatches,
                "microbatch": 1,
                "validate_every": rules.validate_every,
                "validation_microbatches": rules.validation_microbatches,
                "clip": rules.clip,
            },
            "recovery": {
                "policy": next(n for n, policy in POLICIES.items() if policy == rules.policy),
                "strict": rules.strict,
                "masking": "reassign" if rules.masking else "abort",
                "relearn": {
                    "passes": 4 * rules.relearn,
                    "steps": 2,
                    "seconds": 2.0,
                    **relearning,
                },
                "snapshot": {"codec": "none", "fraction": 0.34, "period": 3},
                "checkpoint": {"dir": "checkpoint", "every": files.checkpoint_every or 1},
            },
            "saves": {"every": files.save_every or 1},
            "swarm": {"progress": rules.progress},
            "wire": {"averaging": averaging, "rank": 1, "rank_after": 2},
        }
    )


def _more(held_back: ErrorFeedback, ballot: Ballot) -> torch.Tensor:
    """How much a commit of this ballot changes what is held back of the trained values."""
    begun, coming = held_back._coming
    row = held_back.row
    assert begun == ballot
    nothing = torch.zeros(TRAINED.stop)
    if coming is None:  # a lone replica drops what it held back
        return nothing[1:]
    return (coming[TRAINED] - (nothing if row is None else row[TRAINED]))[1:]


GRACE = 60.0
"""Seconds that a node has to leave."""


class InvariantError(BaseException):
    """An invariant does not hold. Only `scenario.run` catches it."""


@dataclass
class Attempt:
    """What the nodes that start an attempt have in common."""

    step: int
    chain: bytes
    digests: dict[int, bytes] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    parted: bool = False  # whether a faulty driver began it at nodes with different histories


@dataclass
class Host:
    """A machine on which a process runs a node; after a crash, a new process does."""

    name: str
    stage: int | None
    dials_only: bool
    saves: bool = False
    room: int = 1  # seats that its node can hold
    origin: bool = True  # has the weights that the run begins with
    down: bool = False  # no process is started on it
    process: Process | None = None
    node: Node | None = None
    restart_at: float | None = None


@dataclass
class Trap:
    """A fault at the moment of the n-th event of a kind; `countdown`: events until then."""

    kind: str
    countdown: int
    spring: Callable[[], None]


@dataclass(frozen=True)
class Machines:
    """The classes that the cluster runs; a test replaces some by faulty ones."""

    member: type[MemberSide] = MemberSide
    driver: type[Driver] = Driver
    holder: type[CopyHolder] = CopyHolder
    twin: type[ChainedTwin] = ChainedTwin
    registry: type[Registry] = Registry

    def adapt(self, holdings: Holdings) -> None:
        if holdings.holder is not None:
            holdings.holder.__class__ = self.holder


def _digests(optimizer: StageOptimizer) -> tuple[bytes, bytes]:
    """Digests of weights and moments, and of the weights alone, which some holdings have."""
    return optimizer.digest(), weights_digest(optimizer.weights)


class Cluster:
    def __init__(
        self,
        seed: int,
        rules: TransactionRules,
        hosts: list[Host],
        overflowing: set[int],
        pace: float,
        files: Files,
        machines: Machines,
        relearning: Mapping[str, float],
        averaging: str = "none",
    ) -> None:
        """`relearning`: keys of `recovery.relearn` that say how much of it others wait for."""
        self.seed, self.world = seed, World(seed)
        self.network = Network(self.world)
        self.rules, self.overflowing, self.pace = rules, overflowing, pace
        self.run = run_of(rules, files, relearning, averaging)
        self.changes: list[registry.Change] = []  # of the run's settings, in force
        self.config = model_config(self.run.model, vocabulary=8)
        self.files, self.machines = files, machines
        files.chance = self.world.chance
        self.hosts = {host.name: host for host in hosts}
        self.from_checkpoint = not all(host.origin for host in hosts)
        self.state_size = self.world.random.choice([1.0, 4.0, 16.0])
        self.counts: Counter[str] = Counter()
        self.attempts: dict[Ballot, Attempt] = {}
        self.commits: dict[Ballot, Attempt] = {}
        self.voted: dict[tuple[Ballot, int], bytes] = {}  # digest in the votes of a stage
        self.owed: dict[tuple[Ballot, int], dict[str, torch.Tensor]] = {}
        """By commit and stage: how much more each replica holds back than before."""
        self.replicas: dict[tuple[Ballot, int], set[str]] = {}
        self.confirmed: dict[int, bytes] = {0: b""}
        self.confirmed_in = NEVER
        self.heard_in = NEVER  # the newest ballot under which a driver has had all answers
        self.lineage = 0
        self.lineage_from = NEVER
        self.bases: dict[tuple[int, int], bytes | None] = {}  # a lineage's first state -> chain
        self.opened: set[tuple[int, int]] = set()  # those of them without an attempt yet
        self.known: dict[tuple[bytes, int], set[bytes]] = {}  # chain, stage -> digests it had
        for stage in range(rules.stages + 1):
            self.known[b"", stage] = set(_digests(row(stage)))
        self.twins: dict[tuple[bytes, int], set[bytes]] = {}  # the same for its twins
        self.fallbacks: set[str] = set()  # reasons of rebuilds that needn't be exact
        self.guessed: set[int] = set()  # stages at which the driver guessed which replica is right
        self.traps: list[Trap] = []
        self.miscomputing: dict[str, Callable[[], bool]] = {}
        """By host: whether its next result is wrong."""
        self.guilty: set[str] | None = None
        """Hosts that have done something wrong, if nobody dies; None: some die."""
        self.lying: set[str] = set()
        """Hosts that send arbitrary messages."""
        self.unheard: set[str] = set()
        """Hosts that the registry may miss for so long that it evicts them, if others have their
        stage."""
        self.parting = False  # whether a driver signs two commits of one step
        self.tampering: dict[str, Callable[[pb.Message | Frame], pb.Message | Frame | None]] = {}
        """By host: returns what it sends in place of an item; None: nothing."""
        self.garbling = self.network.garbling
        self.spoiling: dict[str, Callable[[], bool]] = {}
        """By host: whether its next result is not finite."""
        self.windows: dict[tuple[int, int], torch.Tensor] = {}
        self.steps: dict[bytes, int] = {}  # by chain: its last step
        self._names = itertools.count(1)
        self.registry = machines.registry(self)
        for host in hosts:
            self.world.after(self.world.random.uniform(0.0, 2.0), self.start, host)

    # --- hosts

    def new_name(self) -> str:
        number = next(self._names)
        return f"{self.world.random.randrange(16):x}{number}"

    def start(self, host: Host) -> None:
        host.restart_at = None
        if not host.down and (host.process is None or not host.process.alive):
            host.process = Process(self.world, host.name)
            host.process.run(self._new_node, host)

    def _new_node(self, host: Host) -> None:
        assert host.process is not None
        saves = self.files.stages_of(host.name) if host.saves else ()
        host.node = Node(self, host, saves)
        host.process.check = host.node.validate
        self.world.say(host.node.name, f"starts on {host.name}")
        host.process.spawn(self._live(host, host.node))

    async def _live(self, host: Host, node: Node) -> None:
        try:
            why = await node.live()
        except InQuarantine as refused:
            await asyncio.sleep(refused.seconds)
            why = str(refused)
        except (JoinRefused, RegistryUnreachable) as refused:
            why = str(refused)
        except SenselessError as error:
            if not self.may_lie(node.name):
                raise
            self.crash(node.process, f"by its own code: {error}")
            return
        self.world.say(node.name, f"is over: {why}")
        if node.abandoned:
            self.crash(node.process, f"since it hangs: {why}")
            return
        host.node = None
        if host.down:
            node.process.alive = False
        else:
            node.process.after(self.world.random.uniform(0.0, 0.5), self._new_node, host)

    def retire(self, node: Node) -> None:
        """Tells the node to leave for good."""
        node.process.spawn(self._retire(node))

    async def _retire(self, node: Node) -> None:
        await node.retire(GRACE)
        if not node.ended:
            self.hosts[node.process.host].down = True
            node.stop("it has left")

    def crash(self, process: Process, why: str) -> None:
        host = self.hosts[process.host]
        process.alive = False
        if host.node is not None:
            self.world.say(host.node.name, f"crashes {why}")
            self.network.died(process)
        host.node = None
        host.restart_at = self.world.now + self.world.random.uniform(0.3, 8.0)
        self.world.after(host.restart_at - self.world.now, self.start, host)

    def add_host(self) -> None:
        """Adds a host, as a person does whose run waits for a node."""
        host = Host(f"h{len(self.hosts)}", None, False, origin=not self.from_checkpoint)
        self.hosts[host.name] = host
        self.world.after(0.0, self.start, host)

    def cut_power(self) -> None:
        for host in self.hosts.values():
            if host.process is not None and host.process.alive:
                self.crash(host.process, "with all others")

    def forget(self) -> None:
        """Deletes the registry's journal, when no node is left: ballots begin anew."""
        self.registry.forget()
        self.attempts.clear()
        self.commits.clear()
        self.voted.clear()
        self.bases.clear()
        self.confirmed_in = self.heard_in = self.lineage_from = NEVER
        self.lineage = 0
        self.counts["forgotten"] += 1

    def recoverable_without(self, nodes: list[Node]) -> bool:
        """Whether the run could go on if these nodes were lost."""
        newest = max(self.confirmed)
        left = [
            seat
            for seat in self.seats
            if seat.host not in nodes
            and seat.host.name in self.registry.names()
            and seat.process.responsive
        ]
        having = [s for s in left if s.weights.step >= newest and s.has_state]
        if not having:
            return self.files.newest_common(self.rules.stages) is not None
        decisions = self.decisions(newest, having, left)
        return not any(isinstance(decision, Stop) for decision in decisions)

    def held(self, seats: list[Seat]) -> list[Held]:
        own = [
            Held(
                "memory",
                Source(seat.name, seat.stage, seat.member.committed, seat.member.lineage),
                Ballot.of(seat.member.last.ballot),
            )
            for seat in seats
            if seat.member.committed
        ]
        return own + [
            Held(
                holding.kind,  # type: ignore[arg-type]
                Source(seat.name, holding.stage, holding.step, holding.lineage),
                Ballot.of(holding.made),
                holding.digest,
            )
            for seat in seats
            for holding in seat.serving.listed()
        ]

    def decisions(self, step: int, having: list[Seat], left: list[Seat]) -> list[Decision]:
        """The decision about each stage, if only `having` had the step and `left` were alive."""
        rules = self.rules
        survivors: dict[int, list[str]] = {}
        for seat in having:
            survivors.setdefault(seat.stage, []).append(seat.name)
        members = [seat.member for seat in having]
        lasts = {Ballot.of(m.last.ballot) for m in members if m.committed == step}
        made = lasts.pop() if len(lasts) == 1 else UNKNOWN
        trained = {seat.stage for seat in having if seat.member.boosted_at < step}
        guessed = frozenset(survivors.keys() - trained)
        held, givers = self.held(left), [seat.name for seat in left if seat.weights.origin]
        remains = Left(rules.stages, step, survivors, self.lineage, held, guessed, made, givers)
        stages = range(rules.stages + 1)
        return [decide(stage, remains, rules.policy, rules.strict) for stage in stages]

    @property
    def nodes(self) -> list[Node]:
        return [host.node for host in self.hosts.values() if host.node is not None]

    @property
    def seats(self) -> list[Seat]:
        return [seat for node in self.nodes for seat in node.seats.agents.values()]

    def may_lie(self, node: str) -> bool:
        """Whether the node is on a host that sends arbitrary messages."""
        return self.network.homes[node] in self.lying

    def miscomputes(self, host: str) -> bool:
        return host in self.miscomputing and self.miscomputing[host]()

    def spoils(self, host: str) -> bool:
        return host in self.spoiling and self.spoiling[host]()

    def corrupt(self, seat: Seat, update: bool) -> None:
        """Corrupts its weights or moments, now or in its next update."""
        if update:
            seat.weights.misapplies = True
        else:
            seat.weights.corrupt()
            weights = seat.weights  # which others may copy
            self.known[weights.chain, weights.stage].update(_digests(weights.optimizer))

    # --- what must hold

    def overflows(self, step: int, stage: int) -> bool:
        return step in self.overflowing and stage == step % (self.rules.stages + 1)

    def on_event(self, seat: Seat, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        self.counts[kind] += 1
        if fields is not None and self.guilty is not None:
            self.check_kept(kind, fields)
        if fields is not None and kind in ("rolled back", "resuming"):
            self.check_back(seat, kind, fields)
        if fields is not None and kind == "diverged" and "which is a guess" in fields["reason"]:
            self.guessed.add(fields["stage"])
        if fields is not None and kind in ("computed wrong", "results differ"):
            self.check_found(fields.get("nodes") or [fields["node"]])
        if fields is not None and kind == "rebuilding":
            self.check_fallback(seat, fields)
        for trap in self.traps:
            if trap.kind == kind:
                trap.countdown -= 1
                if trap.countdown == 0:
                    trap.spring()

    def demand(self, holds: bool, invariant: str, why: str) -> None:
        if not holds:
            raise InvariantError(f"{invariant}: {why}")

    def check_issued(self, before: registry.View, view: registry.View) -> None:
        if self.guilty is None or view.number > before.number + 1:
            return  # a registry without its journal has learned of newer views; nodes that joined
            # it meanwhile have no state, and join again
        stay = {member.node for member in view.members}
        gone = [member for member in before.members if member.node not in stay]
        left = [member for member in before.members if member.node in stay]
        innocent = [member.node for member in gone if not self._may_go(member, left, view.reason)]
        self.demand(not innocent, "I6", f"{innocent} evicted: {view.reason}")

    def _may_go(
        self, member: registry.Member, left: Sequence[registry.Member], reason: str
    ) -> bool:
        """Whether the member may be evicted: it is guilty, or a guess takes it for guilty. Or the
        registry doesn't hear it, and others have its stages, or no node that the registry hears is
        linked to it."""
        assert self.guilty is not None
        host, stages = self.network.homes[member.node], set(stages_of(member))
        wrong = [m for m in left if self.network.homes[m.node] in self.guilty]
        guessed = "which is a guess" in reason and any(stages & {*stages_of(m)} for m in wrong)
        guessed |= NOBODY_ELSE in reason and bool(wrong)  # one of two is: a repeated accuser goes
        lives_on = stages <= {stage for other in left for stage in stages_of(other)}
        if host in self.guilty or guessed:
            return True
        if host not in self.unheard:
            return False
        if lives_on or not self.counts["committed"]:  # there is nothing to lose
            return True
        linked = {node.name for node in self.nodes if member.node in node.links.by_peer}
        return not any(
            other.node in linked and self.network.reach(self.network.homes[other.node], "registry")
            for other in left
        )

    def check_found(self, nodes: Sequence[str]) -> None:
        """Demands that nodes found to compute wrongly include a guilty one."""
        guilty = self.miscomputing.keys() | (self.guilty or set())
        wrong = any(self.network.homes[node] in guilty for node in map(node_of, nodes))
        self.demand(wrong, "I6", f"{nodes} are said to compute wrongly")

    def check_kept(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self.guilty:
            return  # their state may be lost with them
        lost = kind in ("rolled back", "resuming")
        lost = lost or (kind == "rebuilding" and fields["method"] not in (*COPIED, "twin"))
        self.demand(not lost, "I6", f"{kind}, although nobody has died: {fields}")

    def agree(self, holds: bool, why: str) -> None:
        """Demands one history, unless a driver signs two commits. `check_apply` then rejects a step
        of nodes with different histories."""
        self.demand(holds or self.parting, "I2", why)

    def check_start(self, seat: Seat, ballot: Ballot, begin: pb.Begin) -> None:
        """Checks a start, in the compute thread, when all work before the attempt is done."""
        weights, stage = seat.weights, seat.stage
        self.heard_in = max(self.heard_in, ballot)
        base = begin.step - (begin.kind == pb.Begin.TRAIN)
        who = f"{seat.name} of stage {stage} starts {ballot} for step {begin.step}"
        self.demand(weights.step == base, "I2", f"{who} with weights of step {weights.step}")
        attempt = self.attempts.setdefault(ballot, Attempt(begin.step, weights.chain))
        attempt.nodes.add(seat.name)
        self.replicas[ballot, stage] = {at.node for at in begin.members if at.stage == stage}
        self.agree(attempt.chain == weights.chain, f"{who} with another history")
        attempt.parted |= attempt.chain != weights.chain
        own = weights.optimizer.digest()
        digest = own if weights.corrupted else attempt.digests.setdefault(stage, own)
        self.agree(digest == own, f"{who}; its replicas have other weights")
        known = self.known.get((weights.chain, stage), ())
        self.demand(not weights.void and own in known, "I5", f"{who}, unfit weights")
        if ballot <= self.confirmed_in or ballot < self.lineage_from:
            return  # its driver is cut off: no commit can follow
        if weights.lineage >= self.lineage and (weights.lineage, base) in self.opened:
            self._go_back(ballot, weights.lineage, base, weights.chain)
        gone = max(self.confirmed) > 0 or self.lineage > weights.lineage
        if gone and (weights.lineage, base) == (0, 0) and self._may_start_over(ballot):
            self.confirmed = {0: b""}
            self.lineage, self.lineage_from = 0, ballot
            self.counts["started over"] += 1
        self.demand(weights.lineage == self.lineage, "I3", f"{who} in lineage {weights.lineage}")
        newest = max(self.confirmed)
        self.demand(base >= newest, "I3", f"{who}, but step {newest} was committed by all")
        if base in self.confirmed:
            same = self.confirmed[base] == weights.chain
            self.agree(same, f"{who} with another history than was confirmed")

    def check_goes_on(self, seat: Seat, ballot: Ballot, begin: pb.Begin) -> None:
        """Checks that the seat began the attempt that now goes on without lost nodes."""
        before = self.attempts[Ballot.of(begin.since)]
        who = f"{seat.name} goes on with {ballot}"
        self.demand(seat.name in before.nodes, "I2", f"{who}, which it hasn't begun")
        attempt = Attempt(before.step, before.chain, before.digests)
        self.attempts.setdefault(ballot, attempt).nodes.add(seat.name)
        members = {at.node for at in begin.members if at.stage == seat.stage}
        self.replicas[ballot, seat.stage] = members

    def _go_back(self, ballot: Ballot, lineage: int, step: int, chain: bytes) -> None:
        """Forgets later confirmed steps, when the first attempt of a lineage starts."""
        self.opened.discard((lineage, step))
        before = {of: c for of, c in self.confirmed.items() if of < step}
        self.counts["steps lost"] += max(0, max(self.confirmed) - step)
        self.lineage, self.lineage_from = lineage, ballot
        self.confirmed = before | {step: chain}

    def _may_start_over(self, ballot: Ballot) -> bool:
        """Whether the registry had heard of one step at most, at the ballot's view."""
        view = self.registry.journal.issued[ballot.view]
        return (view.lineage, view.committed) <= (0, 1)

    def check_apply(self, seat: Seat, commit: pb.Commit) -> None:
        weights, stage = seat.weights, seat.stage
        who = f"{seat.name} of stage {stage} applies step {commit.step}"
        self.demand(weights.step == commit.step - 1, "I3", f"{who} on step {weights.step}")
        gradient = weights.gradient[TRAINED][1:]
        window = self.window(commit.step, weights.stage)
        if self.run.wire.averaging != "none":
            self.check_owed(seat, commit, gradient - window)
        elif not torch.equal(gradient, window):
            self.demand(False, "I1", f"{who} with {gradient}, not {window}")
        ballot = Ballot.of(commit.ballot)
        attempt = self.attempts[ballot]
        same = attempt.chain == weights.chain and not attempt.parted
        self.demand(same, "I2", f"{who} with another history")
        if seat.name in attempt.nodes:
            voted = self.voted.setdefault((ballot, weights.stage), weights.last_digest)
            same = voted == weights.last_digest
            self.demand(same, "I2", f"{who}, and its replicas told of others")
        if ballot < self.lineage_from:
            return
        before = self.confirmed.setdefault(commit.step - 1, weights.chain)
        self.demand(before == weights.chain, "I2", f"{who} on a history that was not confirmed")
        self.confirmed_in = max(self.confirmed_in, ballot)

    def check_relearned(self, seat: Seat, commit: pb.Commit, made: int) -> None:
        """Demands that a stage has relearned `made` updates beside a step, as the commit says, and
        has no other node in the attempt."""
        updates = entering(commit, seat.stage)
        who = f"{seat.name} of stage {seat.stage} applies step {commit.step}"
        fixed = f"{who} with {updates} updates of relearning"
        self.demand(made == updates, "I2", f"{fixed}, and has made {made}")
        ready = self.attempts[Ballot.of(commit.ballot)].nodes if updates else ()
        others = [o.name for o in self.seats if o.stage == seat.stage and o.name in ready]
        self.demand(others in ([], [seat.name]), "I2", f"{fixed}, beside {others}")
        self.counts["relearned beside"] += updates > 0

    def check_owed(self, seat: Seat, commit: pb.Commit, above: torch.Tensor) -> None:
        """Demands that the sum exceeds the window's by what the replicas hold back less than
        before. So nothing of another attempt is in it."""
        ballot, stage = Ballot.of(commit.ballot), seat.stage
        trained = self.replicas[ballot, stage]
        if commit.skipped or seat.name not in trained:
            return
        feedback = self.owed.setdefault((ballot, stage), {})
        feedback[seat.name] = _more(seat.averaging.feedback, ballot)
        if feedback.keys() == trained:
            left = sum(feedback.values()) + above
            who = f"the replicas of stage {stage} in step {commit.step}"
            self.demand(bool(left.abs().max() < 1.0), "I1", f"{who} leave {left} out")
            self.counts["owed"] += len(trained) > 1

    def check_applied(self, seat: Seat, commit: pb.Commit) -> None:
        weights, stage = seat.weights, seat.stage
        who = f"{seat.name} of stage {stage} has applied step {commit.step}"
        ballot = Ballot.of(commit.ballot)
        ready = self.attempts[ballot].nodes
        applied = self.commits.setdefault(ballot, Attempt(commit.step, weights.chain, nodes=ready))
        self.agree(applied.chain == weights.chain, f"{who}; others committed another thing")
        own = weights.optimizer.digest()
        digest = own if weights.corrupted else applied.digests.setdefault(stage, own)
        self.agree(digest == own, f"{who}; its replicas have other weights")
        known = self.known.setdefault((weights.chain, stage), set())
        known.update((own, weights_digest(weights.optimizer.weights)))
        self.steps[weights.chain] = commit.step
        self.counts["applied"] += 1
        self.counts["skipped"] += commit.skipped
        if commit.skipped and self.guilty is not None:
            self.check_skipped(who, commit.step, ready)

    def check_skipped(self, who: str, step: int, trained: Collection[str]) -> None:
        """Demands that the step overflows, or that a stage has only guilty nodes."""
        stages = range(self.rules.stages + 1)
        seats = [seat for seat in self.seats if seat.name in trained]
        well = {seat.stage for seat in seats if seat.process.host not in (self.guilty or ())}
        overflows = any(self.overflows(step, stage) for stage in stages)
        self.demand(overflows or well < set(stages), "I6", f"{who}, which was skipped")

    def check_back(self, seat: Seat, kind: str, fields: Mapping[str, Any]) -> None:
        """Checks a new lineage that a driver opens."""
        lineage, step = seat.driver.standing.lineage, int(fields["step"])
        who = f"{seat.name} goes to step {step} of lineage {lineage}: {fields['reason']}"
        mixed = kind == "resuming" and not fields["exact"]
        if seat.driver.ballot < self.heard_in:
            return  # the driver is cut off: members that two drivers asked obey the newer one
        self.heard_in = seat.driver.ballot
        self.counts["mixed"] += mixed
        # A lineage of which no survivor knows may be opened a second time.
        self.bases = {at: chain for at, chain in self.bases.items() if at[0] != lineage}
        self.opened = {at for at in self.opened if at[0] != lineage} | {(lineage, step)}
        self.bases[lineage, step] = fingerprint("mixed", lineage, step) if mixed else None
        self.steps[fingerprint("mixed", lineage, step)] = step
        if step == 0:
            self.bases[lineage, step] = b""
        asked = set(seat.driver.members)
        members = [other for other in self.seats if other.name in asked]
        newest = max(int(fields.get("lost", 0)), *self.confirmed)
        holders = [other for other in self._holders(newest) if other in members]
        trained = {name for attempt in self.attempts.values() for name in attempt.nodes}
        if kind == "rolled back":
            self.demand(self.rules.policy.checkpoints, "I3", f"{who}, by another policy")
            complete = len({holder.stage for holder in holders}) == self.rules.stages + 1
            needless = complete and step < newest  # before the first step all have initial weights
            self.demand(not needless, "I3", f"{who}, but no stage is lost")
            return
        names = ", ".join(holder.name for holder in holders if holder.name in trained)
        self.demand(not names or newest == 0, "I3", f"{who}, but {names} had the newest step")
        self.lineage = min(self.lineage, lineage)  # no survivor knows of newer ones
        best = resume(self.held(members), self.rules.stages)
        assert best is not None
        self.demand(best.step == step, "I3", f"{who}, but there is step {best.step}")
        common = self.files.newest_common(self.rules.stages)
        if common is not None and (mixed or common > (best.lineage, best.step)):
            self.counts["resumed too early"] += 1  # a host that comes later has more
            self.world.say(seat.name, f"goes to {step}, although there is {common}")

    def check_fallback(self, seat: Seat, fields: Mapping[str, Any]) -> None:
        """Counts a fallback, which a strict run must not use."""
        self.counts["fallback"] += fields["fallback"]
        if fields["fallback"]:
            self.fallbacks.add(fields["reason"])
        self.demand(not (fields["fallback"] and self.rules.strict), "I4", f"{fields} with --strict")

    def window(self, step: int, stage: int) -> torch.Tensor:
        """The sum of all microbatches' contributions, without the number that overflows."""
        if (step, stage) not in self.windows:
            parts = ("head", "stage") if stage == 0 else ("stage",)
            ids = range(self.rules.microbatches)
            each = [contribution(step, stage, number, part) for number in ids for part in parts]
            self.windows[step, stage] = torch.stack(each).sum(dim=0)[1:]
        return self.windows[step, stage]

    def chain_at(self, sync: pb.Sync, state: StageState) -> bytes:
        """The chain of the step that `sync` names; `state`: what came from its sources."""
        if sync.method in COPIED:
            return chain_of(state)
        at = sync.lineage, sync.step
        if at in self.bases:
            base = self.bases[at]
            if base is None:
                base = self.bases[at] = chain_of(state)
            return base
        if not sync.step:
            return b""
        if not sync.HasField("last"):
            return chain_of(state)  # from a driver that is cut off and goes back
        return self.commits[Ballot.of(sync.last.ballot)].chain

    def check_saved(self, seat: Seat, state: StageState) -> None:
        """Demands, in the compute thread, that a state to be written describes itself correctly."""
        weights = seat.weights
        says = state.id.step, state.omega, state.optimizer_step
        own = weights.step, weights.omega, weights.optimizer.steps
        self.counts["saved while it relearned"] += seat.gaps.task is not None
        who = f"{seat.name} of stage {seat.stage}"
        self.demand(says == own, "I5", f"{who} saves {own} and says that it is {says}")

    def check_sources(self, seat: Seat, sync: pb.Sync, states: Sequence[StageState]) -> None:
        """Checks states from the sources that the driver named, before they are put in place."""
        who = f"{seat.name} of stage {seat.stage} fetches step {sync.step} by {sync.method}"
        newer = (sync.lineage, sync.step) >= seat.weights.age
        self.demand(newer, "I3", f"{who} over {seat.weights.age}")
        for state in states:
            named = {(s.lineage, s.step) for s in sync.sources if s.stage == state.id.stage}
            is_named = state.id.age in named or not state.id.step
            self.demand(is_named, "I5", f"{who}, and got {state.id.age}, not one of {named}")
        if sync.method in (*COPIED, *INEXACT):
            self.demand(len(set(map(chain_of, states))) == 1, "I2", f"{who}: two histories")
        self.counts[sync.method] += 1
        back = (sync.lineage, sync.step) in self.bases  # all go there, as `check_back` allowed
        guessed = seat.stage in self.guessed  # the node with the right state may count as wrong
        if sync.method not in (*COPIED, ORIGIN) and not (back or guessed):
            left = [n.name for n in self._holders(sync.step) if n.stage == seat.stage]
            stale = sync.lineage < self.lineage
            self.demand(not left or stale, "I4", f"{who}, but {', '.join(left)} had it")

    def check_installed(self, seat: Seat, sync: pb.Sync, state: StageState) -> None:
        """Checks a state that is now in place: its history and its digest."""
        weights = seat.weights
        who = f"{seat.name} of stage {seat.stage} has step {sync.step} by {sync.method}"
        known = self.known.setdefault((weights.chain, weights.stage), set())
        same_step = state.id.age == (sync.lineage, sync.step)
        back = (sync.lineage, sync.step) in self.bases and sync.step == state.id.step
        exact = sync.method not in INEXACT and sync.method != "snapshot"
        exact = exact and sync.reason not in self.fallbacks
        at = sync.lineage, sync.step
        mixed = self.bases.get(at) == fingerprint("mixed", *at)
        if exact and (same_step or back) and not mixed:
            self.demand(chain_of(state) == weights.chain, "I5", f"{who}, of another history")
            whole, alone = _digests(weights.optimizer)
            digest = whole if "first_moment" in state.tensors else alone
            had = self._had(weights.chain, weights.stage)
            self.demand(digest in had, "I5", f"{who}, which it never had")
        if sync.method in ARRIVED and not self.guilty:
            had = self._had(chain_of(state), weights.stage)
            alone = weights_digest(state.tensors["weights"])
            self.demand(alone in had, "I5", f"{who}, of weights that it never had")
        known.update(_digests(weights.optimizer))

    def twin_applied(self, twin: ChainedTwin) -> None:
        """Notes a twin's digests after an update, in its holder's compute thread."""
        had = self.twins.setdefault((read_chain(twin.optimizer.weights), twin.stage), set())
        had.update(_digests(twin.optimizer))

    def _had(self, chain: bytes, stage: int) -> set[bytes]:
        """Digests of the stage's state after the commits of `chain`. If all its nodes died before
        they applied the last one, only its twins and their copies have that state."""
        return self.known.get((chain, stage)) or self.twins.get((chain, stage), set())

    def check_announced(self, seat: Seat, holding: pb.Holding, held: StageState) -> None:
        """Checks that an announced holding was committed, at the step that the node says."""
        if self.guilty:
            return  # its weights may have changed while they were sent
        claim = f"{seat.name} announces a {holding.kind} of stage {holding.stage} at {held.id.age}"
        known = self._had(chain_of(held), holding.stage)
        digest = weights_digest(held.tensors["weights"])
        self.demand(digest in known, "I5", f"{claim}, which was never committed")
        step = self.steps.get(chain_of(held), 0)
        self.demand(step == holding.step, "I5", f"{claim}, which is of step {step}")

    def _holders(self, step: int) -> list[Seat]:
        """Live members that have the step in their weights, or voted to commit it."""
        last = [a for b, a in self.commits.items() if a.step == step and b >= self.lineage_from]
        ready = {name for commit in last for name in commit.nodes}
        return [
            seat
            for seat in self.seats
            if seat.host.name in self.registry.names()
            and seat.has_state
            and seat.weights.lineage == self.lineage
            and (seat.weights.step == step or seat.name in ready)
        ]

    def check_patience(self, seat: Seat, reason: str) -> None:
        """Demands that no driver reaches the deadline for progress, which is for unforeseen faults.
        Each loss here is noticed sooner, unless the driver was frozen itself, or a guilty host
        garbled data so that it is missing."""
        vain = reason.startswith("no progress") and seat.process.thawed_at < self.world.now
        vain = vain and not self.guilty
        self.demand(not vain, "I4", f"{seat.name} has waited in vain: {reason}")

    # --- how it ends

    def all_train(self) -> bool:
        """Whether each node without fault is a member, and each seat of a member trains and has
        nothing to relearn."""
        names, guilty = self.registry.names(), self.guilty or ()
        there = {node.name for node in self.nodes if node.process.responsive}
        due = [h for h in self.hosts.values() if not (h.down or h.name in guilty)]
        if not names <= there or any(h.node is None or h.node.name not in names for h in due):
            return False
        seats = [seat for seat in self.seats if seat.host.name in names]
        return bool(seats) and all(s.trains and not s.member.relearning for s in seats)

    def end_soon(self) -> None:
        """Makes the step after the next one the last, at all nodes at once."""
        newest = max(max(seat.weights.step, seat.member.committed) for seat in self.seats)
        self.rules = replace(self.rules, steps=min(self.rules.steps, newest + 2))
        for seat in self.seats:
            seat.driver.rules = self.rules

    def settled(self) -> bool:
        """All members of the newest view are alive and have halted under its driver."""
        view = self.registry.view()
        seats, heard = {seat.name: seat for seat in self.seats}, seated(view)
        active = [member.node for member in heard.members if member.seats]
        changing = any(change.pending for change in view.changes)
        return bool(active) and all(
            (seat := seats.get(name)) is not None
            and seat.host.view.number == view.number
            and seat.member.halt is not None
            and not (changing and seat.member.halt.finished)
            and not seat.member.changing
            and (name != heard.driver or seat.driver.phase is DriverPhase.HALTED)
            for name in active
        )

    def outcome(self) -> str:
        """`finished` or `stopped: reason` of a settled cluster. Raises InvariantError."""
        view = self.registry.view()
        seats = {seat.name: seat for seat in self.seats}
        active = [seats[member.node] for member in seated(view).members if member.seats]
        halts = [seat.member.halt for seat in active]
        stopped = [halt.reason for halt in halts if halt is not None and not halt.finished]
        newest = max(seat.weights.step for seat in active)
        if not stopped:
            self.demand(newest == self.rules.steps, "I4", f"finished at step {newest}")
            chains = {seat.weights.chain for seat in active if seat.weights.step == newest}
            self.demand(len(chains) == 1, "I2", "the run has finished with two histories")
            self.files.failing.clear()
            self.files.stalled.clear()
            for node in self.nodes:
                node.machine.flush()
            missing = set(range(1, newest + 1)) - self.files.noted
            self.demand(not missing, "I7", f"no ledger has steps {sorted(missing)}")
            return "finished"
        holders = self._holders(newest)
        decisions = self.decisions(newest, holders, active)
        lost = newest < max(self.confirmed) and not self.rules.policy.checkpoints
        trained = {name for attempt in self.attempts.values() for name in attempt.nodes}
        joiners_only = not trained.intersection(seat.name for seat in holders)
        gone = (lost or joiners_only) and resume(self.held(active), self.rules.stages) is None
        justified = gone or any(isinstance(decision, Stop) for decision in decisions)
        # If a lying host was alone at its stage, the stage's state is lost with it.
        justified |= bool(self.lying) and all(" is lost and " in reason for reason in stopped)
        justified |= bool(self.guilty) and all(reason.startswith("paused: 3") for reason in stopped)
        justified |= self.parting and all("two commits of step" in reason for reason in stopped)
        self.demand(justified, "I4", f"stopped without need: {stopped[0]}")
        return f"stopped: {stopped[0]}"

    def who_waits(self) -> str:
        """A report for a person: what each node and each seat is doing."""
        view = self.registry.view()
        members = ", ".join(member.node for member in seated(view).members)
        lines = [f"view {view.number}, driver {view.driver or 'none'}: {members} ({view.reason})"]
        for node in self.nodes:
            links = " ".join(sorted(node.links.by_peer))
            lines.append(
                f"{node.name} on {node.process.host}: view {node.view.number}, links {links}"
            )
            for seat in node.seats.agents.values():
                member = seat.member
                lines.append(
                    f"    {seat.name}: {member.phase.value}, committed {member.committed}, "
                    f"promised {tuple(member.promised)} to {member.driver}"
                )
                if seat.driver.phase is not DriverPhase.INACTIVE:
                    driver = seat.driver
                    lines.append(f"    drives {tuple(driver.ballot)}: {driver.explain()}")
        return "\n".join(lines)
