"""Scenarios, drawn from a seed: the shape of a cluster, its faults, and how long it may take."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar
from unittest.mock import patch

from planaria.bootstrap import identity
from planaria.node.averaging import coding
from planaria.node.report import line_file
from planaria.node.stage import optimizer
from planaria.node.state import copies, twin
from planaria.node.transaction.member import MemberPhase
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire.seat_names import node_of
from planaria.recovery.policy import POLICIES
from simulation.cluster import Cluster, Host, InvariantError, Machines, Trap
from simulation.keys import SIGNED, PublicKey
from simulation.network import Connection
from simulation.node import Node
from simulation.ports import Files, LedgerDisks
from simulation.registry import Registry
from simulation.world import Process

TRAPS = ["committed", "committed", "aborted", "rebuilding", "rebuilt", "validated", "finished"]
TRAPS += ["rebuilding", "rebuilding", "rolled back", "resuming"]
TAIL = 120
"""Lines of the trace in a report."""
PART = 48
"""Bytes of an update in a frame; the weights have 64."""
LONGEST = 480.0
"""Virtual seconds within which a run must end after the last fault. The longest took 334, with 23
slow hosts and numbers that overflow."""


@dataclass(frozen=True)
class Result:
    outcome: str
    seconds: float
    counts: Counter[str]
    scenario: Scenario = field(compare=False, repr=False)


class ScenarioError(AssertionError):
    """A scenario went wrong; the message says how, and how to repeat it."""


def run(
    seed: int,
    machines: Machines | None = None,
    policy: str | None = None,
    kind: type[Scenario] | None = None,
) -> Result:
    """Runs a scenario, with the seed's policy if none is given. Raises ScenarioError."""
    scenario = (kind or Scenario)(seed, machines or Machines(), policy)
    gc.disable()  # one scenario leaves only a few MiB of garbage
    try:
        disks = patch.object(line_file, "os", LedgerDisks(scenario.cluster.files))
        with small_pieces(), disks, patch.object(identity, "Ed25519PublicKey", PublicKey):
            return scenario.run()
    except InvariantError as broken:
        raise ScenarioError(scenario.report(str(broken))) from broken
    except Exception as error:
        raise ScenarioError(scenario.report(f"crashed: {error!r}")) from error
    finally:
        scenario.world.close()
        SIGNED.clear()
        gc.enable()


@contextmanager
def small_pieces() -> Iterator[None]:
    """Patches limits, so that data that travels in pieces does so here, too, though it is small."""
    with ExitStack() as patches:
        for module, name, value in (
            (coding, "PIECE", 5),
            (twin, "PIECE", 7),
            (copies, "FRAME", PART),
            (copies, "LEAST_FRAME", PART),
            (optimizer, "BLOCK", 16),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


class Scenario:
    averaging = "none"
    registry: ClassVar[type[Registry]] = Registry
    rest: ClassVar[int] = 3
    """Steps that a run makes once all is well again; it ends soon after them."""
    _well_since = 0  # number of commits

    def __init__(self, seed: int, machines: Machines, policy: str | None) -> None:
        self.seed = seed
        self.random = random.Random(f"scenario {seed}")
        rules = self._rules(policy)
        hosts, overflowing = self._hosts(rules), self._overflowing(rules)
        pace = self.random.choice([1.0, 4.0, 8.0])
        files = self._files(rules, hosts)
        relearning, averaging = self._relearning(), self.averaging
        machines = replace(machines, registry=self.registry)
        self.cluster = Cluster(
            seed, rules, hosts, overflowing, pace, files, machines, relearning, averaging
        )
        self.world = self.cluster.world
        self._partitions = itertools.count()
        self.merciful = self.random.random() < 0.7  # faults leave what a rebuild needs
        self.quiet_from = self._plan_faults()

    # --- the shape

    def _rules(self, policy: str | None) -> TransactionRules:
        chosen = self.random
        stages = chosen.randint(4 if policy == "checkfree+" else 1, 6)
        policies: list[str] = ["checkfree", "snapshot", "checkpoint", "redundant"]
        policies += ["checkfree+", "checkfree+"] if stages >= 4 else []
        return TransactionRules(
            stages=stages,
            steps=chosen.randint(5, 20),
            microbatches=chosen.randint(1, 8),
            validation_microbatches=chosen.choice([0, 0, 2]),
            validate_every=chosen.choice([0, 0, 3]),
            clip=1.0,
            policy=POLICIES[policy or chosen.choice(policies)],
            strict=chosen.random() < 0.3,
            masking=self.seed % 4 != 3,
            relearn=chosen.random() < 0.5,
            progress=chosen.choice([20.0, 40.0]),
            lr_scale=lambda step, boosted_at: 1.1 if boosted_at else 1.0,
            spot_check=(0.0, 0.1, 0.5)[self.seed % 3],
        )

    def _relearning(self) -> Mapping[str, float]:
        """Settings of relearning: while all others wait; in the gaps of steps; or with steps that
        wait."""
        return ({"enough": 0.0}, {"enough": 0.9}, {"enough": 0.9, "each_step": 2})[self.seed % 3]

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        """Replicas of each stage, and standbys. At most one host only dials out, since two such
        hosts can't be linked."""
        chosen = self.random
        replicas = chosen.choice([1, 1, 2, 2, 3])
        pinned = chosen.random() < 0.5
        stages = [s for s in range(rules.stages + 1) for _ in range(replicas)]
        standbys: list[int | None] = [None] * chosen.choice([0, 0, 1, 2])
        wanted = [stage if pinned else None for stage in stages] + standbys
        hidden = chosen.randrange(len(wanted)) if chosen.random() < 0.3 else -1
        return [Host(f"h{i}", stage, i == hidden) for i, stage in enumerate(wanted)]

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        """Draws which hosts save, and how often files are written."""
        chosen = self.random
        share = chosen.choice([0.0, 0.0, 0.8, 1.0, 1.0])
        for host in hosts:
            host.saves = chosen.random() < share
        checkpoint_every = chosen.randint(1, 4) if rules.policy.checkpoints else 0
        return Files(chosen.randint(1, 4) if share else 0, checkpoint_every)

    def _overflowing(self, rules: TransactionRules) -> set[int]:
        steps = range(1, rules.steps + 1)
        drawn = {step for step in steps if self.random.random() < 0.05}
        return {step for step in drawn if not {step - 1, step - 2} <= drawn}  # three pause the run

    # --- the faults

    def _plan_faults(self) -> float:
        """Schedules the faults. Returns when the last one is over."""
        chosen = self.random
        faults: list[tuple[Callable[[], float], int]] = [
            (self._crash, 6),
            (self._crash_driver, 3),
            (self._crash_committing, 4),
            (self._crash_ready, 3),
            (self._crash_stage, 4),
            (self._freeze, 4),
            (self._freeze_driver, 2),
            (self._part, 4),
            (self._isolate, 3),
            (self._part_pair, 4),
            (self._break_link, 4),
            (self._flap, 2),
            (self._crash_registry, 3),
            (self._freeze_registry, 1),
            (self._crash_two_in_a_row, 3),
            (self._crash_stage_0, 3),
            (self._crash_stage_0_and_another, 2),
            (self._cut_power, 2),
        ]
        kinds, weights = [fault for fault, _ in faults], [weight for _, weight in faults]
        when, gap = chosen.uniform(0.0, 4.0), chosen.choice([0.2, 1.0, 3.0])
        for fault in chosen.choices(kinds, weights, k=chosen.randint(0, 16)):
            self.world.after(when, self._strike, fault)
            when += chosen.expovariate(1.0 / gap)
        for _ in range(chosen.choice([0, 1, 2, 4])):
            kind = chosen.choice(TRAPS)
            nth = chosen.randint(1, self.cluster.rules.steps if kind == "committed" else 3)
            fault = chosen.choice(
                [
                    self._crash_driver,
                    self._crash_committing,
                    self._freeze_driver,
                    self._crash,
                    self._break_link_of_driver,
                    self._crash_registry,
                    self._part_pair,
                    self._crash_stage,
                    self._crash_stage,
                    self._crash_stage_0,
                    self._crash_two_in_a_row,
                    self._crash_stage_0_and_another,
                    self._cut_power,
                    self._isolate_driver,
                ]
                if kind != "rebuilding"
                else [
                    self._crash_rebuilding,
                    self._crash_source,
                    self._crash_driver,
                    self._crash,
                    self._break_link_of_driver,
                ]
            )
            wait = chosen.uniform(0.0, 1.2) if kind == "rebuilding" else 0.0
            strike = partial(self.world.after, wait, self._strike, fault)
            self.cluster.traps.append(Trap(kind, nth, strike))
        return when

    def _strike(self, fault: Callable[[], float]) -> None:
        self.cluster.counts[fault.__name__] += 1
        over = self.world.now + fault()
        self.quiet_from = max(self.quiet_from, over)

    def _some(self) -> list[Node]:
        return sorted(
            (node for node in self.cluster.nodes if node.process.responsive), key=lambda n: n.name
        )

    def _driver(self) -> Node | None:
        name = self.cluster.registry.view().driver
        return next((node for node in self._some() if node.name == name), None)

    def _spared(self, nodes: list[Node]) -> bool:
        return self.merciful and not self.cluster.recoverable_without(nodes)

    def _crash(self) -> float:
        nodes = [node for node in self._some() if not self._spared([node])]
        if nodes:
            self.cluster.crash(self.random.choice(nodes).process, "by a fault")
        return 8.0

    def _crash_driver(self) -> float:
        if (node := self._driver()) is not None and not self._spared([node]):
            self.cluster.crash(node.process, "by a fault, as the driver")
        return 8.0

    def _crash_committing(self) -> float:
        if (node := self._driver()) is not None and not self._spared([node]):
            node.machine.fuse = self.random.randint(0, 4)
        return 12.0

    def _crash_stage(self) -> float:
        stages = list(range(self.cluster.rules.stages + 1))
        self.random.shuffle(stages)
        for stage in stages:
            nodes = [node for node in self._some() if stage in node.stages]
            if not self._spared(nodes):
                for node in nodes:
                    self.cluster.crash(node.process, "with its whole stage")
                break
        return 8.0

    def _crash_stages(self, stages: Iterable[int]) -> float:
        """Crashes all nodes of these stages at once."""
        nodes = [node for node in self._some() if node.stages & set(stages)]
        if not self._spared(nodes):
            for node in nodes:
                self.cluster.crash(node.process, f"with all of stages {sorted(stages)}")
        return 8.0

    def _crash_two_in_a_row(self) -> float:
        first = self.random.randint(0, self.cluster.rules.stages - 1)
        return self._crash_stages({first, first + 1})

    def _crash_stage_0(self) -> float:
        return self._crash_stages({0})

    def _crash_stage_0_and_another(self) -> float:
        return self._crash_stages({0, self.random.randint(1, self.cluster.rules.stages)})

    def _cut_power(self) -> float:
        """Crashes all nodes at once, if the run can survive that; sometimes the registry, too."""
        if not self._spared(self._some()):
            self.world.say("power", "is cut")
            self.cluster.cut_power()
            if self.random.random() < 0.5:
                self._crash_registry()
                if self.random.random() < 0.5:
                    self.cluster.forget()
        return 12.0

    def _crash_ready(self) -> float:
        """Crashes a node between its vote and the commit, in any role."""
        ready = [node for node in self._some() if MemberPhase.READY in _phases(node)]
        return self._crash_soon(ready, 0.01)

    def _crash_rebuilding(self) -> float:
        """Crashes a node while it gets its state."""
        return self._crash_soon([n for n in self._some() if MemberPhase.SYNCING in _phases(n)])

    def _crash_source(self) -> float:
        """Crashes a node from which another one gets its state."""
        sources = {
            node_of(source.node)
            for node in self._some()
            for seat in node.seats.agents.values()
            if seat.member.phase is MemberPhase.SYNCING
            for source in seat.member.sync.sources
        }
        return self._crash_soon([node for node in self._some() if node.name in sources])

    def _crash_soon(self, nodes: list[Node], within: float = 0.3) -> float:
        if nodes and not self._spared(nodes[:1]):
            process = self.random.choice(nodes).process
            self.world.after(self.random.uniform(0.0, within), self._crash_if_alive, process)
        return 8.5

    def _crash_if_alive(self, process: Process) -> None:
        if process.alive:
            self.cluster.crash(process, "at the worst moment")

    def _freeze(self) -> float:
        nodes = [node for node in self._some() if not self._spared([node])]
        return self._freeze_one(self.random.choice(nodes)) if nodes else 0.0

    def _freeze_driver(self) -> float:
        node = self._driver()
        return self._freeze_one(node) if node is not None and not self._spared([node]) else 0.0

    def _freeze_one(self, node: Node) -> float:
        process, seconds = node.process, self.random.choice([1.0, 3.0, 6.0, 20.0])
        seconds *= self.random.uniform(0.3, 1.0)
        self.world.say(node.name, f"is frozen for {seconds:.1f} s")
        process.freeze()

        def thaw() -> None:
            if process.alive:
                self.world.say(node.name, "thaws")
                process.thaw()

        self.world.after(seconds, thaw)
        return seconds

    def _part(self) -> float:
        hosts = [*sorted(self.cluster.hosts), "registry"]
        side = self.random.sample(hosts, self.random.randint(1, len(hosts) - 1))
        return self._part_off(side, [host for host in hosts if host not in side])

    def _isolate(self) -> float:
        hosts = [*sorted(self.cluster.hosts), "registry"]
        alone = self.random.choice(hosts)
        return self._part_off([alone], [host for host in hosts if host != alone])

    def _isolate_driver(self) -> float:
        """Cuts the driver off, sometimes with one other host. Nobody else may know its last commit;
        its files stay."""
        if (node := self._driver()) is None:
            return 0.0
        hosts = [*sorted(self.cluster.hosts), "registry"]
        alone = [node.process.host]
        if self.random.random() < 0.5:
            alone.append(self.random.choice([host for host in hosts[:-1] if host not in alone]))
        return self._part_off(alone, [host for host in hosts if host not in alone])

    def _part_pair(self) -> float:
        """Cuts a host off from another one, or from the registry; all others reach both."""
        driver = self._driver()
        hosts = [*sorted(self.cluster.hosts), "registry", "registry"]
        own = self.random.choice(hosts) if driver is None else driver.process.host
        return self._part_off([own], [self.random.choice([host for host in hosts if host != own])])

    def _part_off(self, left: list[str], right: list[str]) -> float:
        number, seconds = next(self._partitions), self.random.choice([1.0, 3.0, 8.0, 15.0])
        seconds *= self.random.uniform(0.3, 1.0)
        if "registry" in left:
            left, right = right, left
        cut = [node for node in self._some() if node.process.host in left]
        if "registry" in right and len(cut) < len(self._some()) and self._spared(cut):
            seconds = min(seconds, 2.0)
        sides = f"{' '.join(sorted(left))} from {' '.join(sorted(right))}"
        self.world.say("network", f"parts {sides} for {seconds:.1f} s")
        self.cluster.network.part(number, frozenset(left), frozenset(right))

        def heal() -> None:
            self.world.say("network", f"joins {sides}")
            self.cluster.network.heal(number)

        self.world.after(seconds, heal)
        return seconds

    def _break_link(self) -> float:
        """Breaks a connection; its link goes on over another one."""
        if intact := [c for c in self.cluster.network.connections if c.intact]:
            self._break_off(self.random.choice(intact))
        return 0.0

    def _break_link_of_driver(self) -> float:
        driver = self._driver()
        if its_own := [
            connection
            for connection in self.cluster.network.connections
            if connection.intact
            and driver is not None
            and driver.process in [end.process for end in connection.ends]
        ]:
            self._break_off(self.random.choice(its_own))
        return 4.0

    def _break_off(self, connection: Connection) -> None:
        host, other = (end.process.host for end in connection.ends)
        self.world.say("network", f"breaks a connection of {host} and {other}")
        connection.break_off()

    def _freeze_registry(self) -> float:
        seconds = self.random.choice([1.0, 5.0, 15.0]) * self.random.uniform(0.3, 1.0)
        self.world.say("registry", f"is frozen for {seconds:.1f} s")
        self.cluster.registry.freeze(seconds)
        return seconds

    def _flap(self) -> float:
        """Breaks the connections of one pair of hosts again and again."""
        pair = self.random.sample(sorted(self.cluster.hosts), 2)
        times = self.random.randint(3, 10)
        pause = self.random.uniform(0.1, 2.0)
        for i in range(times):
            self.world.after(i * pause, self._break_between, pair)
        return times * pause

    def _break_between(self, pair: list[str]) -> None:
        for connection in self.cluster.network.connections:
            hosts = sorted(end.process.host for end in connection.ends)
            if connection.intact and hosts == sorted(pair):
                self._break_off(connection)

    def _crash_registry(self) -> float:
        seconds = self.random.choice([1.0, 5.0, 15.0]) * self.random.uniform(0.3, 1.0)
        self.cluster.registry.crash()
        self.world.after(seconds, self.cluster.registry.restart)
        return seconds

    # --- the run

    def run(self) -> Result:
        world, cluster = self.world, self.cluster
        committed, waits_since = 0, 0.0
        while True:
            world.run_until(world.now + 0.5)
            if cluster.settled():
                outcome = cluster.outcome()
                if outcome == "finished" or world.now > self.quiet_from + 15.0:
                    return Result(outcome, world.now, cluster.counts, self)
            if cluster.counts["committed"] > committed:  # it doesn't wait for a node
                committed, waits_since = cluster.counts["committed"], world.now
            self.end_soon_if_well()
            if world.now > max(self.quiet_from, waits_since) + 20.0:
                waits_since = world.now
                cluster.add_host()
            if world.now > self.quiet_from + LONGEST:
                cluster.demand(False, "I4", f"not over {LONGEST:.0f} s after the last fault")

    def end_soon_if_well(self) -> None:
        """Shortens a run that has made `rest` steps since all was well again."""
        committed = self.cluster.counts["committed"]
        if not self.is_well():
            self._well_since = committed
        elif committed >= self._well_since + self.rest:
            self.cluster.end_soon()

    def is_well(self) -> bool:
        """Whether all faults are over, no further step brings one, and all nodes train."""
        kinds = {"committed", "validated"} if self.cluster.rules.validate_every else {"committed"}
        due = any(trap.kind in kinds and trap.countdown > 0 for trap in self.cluster.traps)
        return self.world.now > self.quiet_from and not due and self.cluster.all_train()

    def report(self, problem: str) -> str:
        rules = self.cluster.rules
        shape = f"{rules.stages} body stages, {len(self.cluster.hosts)} hosts, {rules.steps} steps"
        return "\n".join(
            [
                f"seed {self.seed}: {problem}",
                f"at {self.world.now:.3f} s; faults over at {self.quiet_from:.1f} s; {shape}",
                *list(self.world.trace)[-TAIL:],
                self.cluster.who_waits(),
                f"again: pytest tests/simulation --seed {self.seed}",
            ]
        )


class Even(Scenario):
    """No number overflows, and no host saves."""

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        return Files(0, 2 if rules.policy.checkpoints else 0)

    def _overflowing(self, rules: TransactionRules) -> set[int]:
        return set()


class HoldingBack(Scenario):
    """Averaging leaves most of each gradient for later steps; each stage has 2 or 3 replicas."""

    averaging = "lowrank"

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        replicas = self.random.choice([2, 3])
        stages = [s for s in range(rules.stages + 1) for _ in range(replicas)]
        return [Host(f"h{i}", stage, False) for i, stage in enumerate(stages)]


class Rounding(HoldingBack):
    averaging = "int8"


class Crowded(Scenario):
    """So many replicas of each stage that not all of them exchange data."""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        chosen = POLICIES["checkfree"] if rules.policy.swapped else rules.policy
        return replace(rules, stages=1, microbatches=12, policy=chosen)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        replicas = self.random.choice([9, 10, 11])
        return [Host(f"h{i}", i % (rules.stages + 1), False) for i in range(2 * replicas)]


class InRows(HoldingBack):
    """More than eight replicas average in rows, and fewer once some are lost."""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        chosen = POLICIES["checkfree"] if rules.policy.swapped else rules.policy
        steps = min(rules.steps, 8)
        return replace(rules, stages=1, steps=steps, microbatches=12, policy=chosen)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = [0, 0] + [1] * self.random.choice([9, 10, 13])
        return [Host(f"h{i:02}", stage, False) for i, stage in enumerate(stages)]


class Orphaned(Scenario):
    """Only the driver knows a commit, and has saved it; the others make the step again. Then all
    nodes are lost, and files of both commits may be left."""

    def _plan_faults(self) -> float:
        files, self.merciful = self.cluster.files, False
        files.save_every = 3

        def isolate() -> None:
            driver = self._driver()
            for host in self.cluster.hosts.values():
                if driver is not None and host.node is not None and 0 in host.node.stages:
                    host.saves = host.node is driver
                else:
                    host.saves = True
            self._strike(self._isolate_driver)
            self.world.after(self.random.uniform(4.0, 9.0), self._strike, self._cut_power)

        self.cluster.traps.append(Trap("committed", 3, isolate))
        return 30.0


class Halved(Scenario):
    """Each half of the hosts has a node of every stage. The driver's half is cut off from the other
    one and from the registry."""

    def _rules(self, policy: str | None) -> TransactionRules:
        return replace(super()._rules(policy), masking=True, steps=20)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = range(rules.stages + 1)
        return [Host(f"{half}{stage}", stage, False) for half in "ab" for stage in stages]

    def _plan_faults(self) -> float:
        def halve() -> None:
            if (driver := self._driver()) is None:
                return
            half = driver.process.host[0]
            hosts = sorted(self.cluster.hosts)
            left = [host for host in hosts if host[0] == half]
            right = [host for host in hosts if host[0] != half]
            self._strike(lambda: self._part_off(left, [*right, "registry"]))

        self.cluster.traps.append(Trap("committed", 3, halve))
        return 30.0


class Superseded(Scenario):
    """A driver crashes between two messages of a commit. Their receivers get them late, and the new
    view even later. The next driver has that view by then."""

    def _rules(self, policy: str | None) -> TransactionRules:
        return replace(super()._rules(policy), steps=8)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = range(rules.stages + 1)
        return [Host(f"{replica}{stage}", stage, False) for replica in "ab" for stage in stages]

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("committed", self.random.randint(2, 5), self._supersede))
        return 30.0

    def _supersede(self) -> None:
        if (driver := self._driver()) is None:
            return
        chosen, latency = self.random, self.cluster.network.latency
        hosts = [node.process.host for node in self._some() if node is not driver]
        for pair in itertools.permutations(hosts, 2):
            if chosen.random() < 0.2:
                latency[pair] = chosen.uniform(0.0, 2.0)
        driver.machine.fuse = chosen.randint(0, 1)
        for host in hosts[: driver.machine.fuse + 1]:
            latency[driver.process.host, host] = chosen.uniform(0.4, 2.5)
            latency["registry", host] = 2.8
        self.world.after(6.0, latency.clear)


def _phases(node: Node) -> set[MemberPhase]:
    """The phases of the node's seats."""
    return {seat.member.phase for seat in node.seats.agents.values()}
