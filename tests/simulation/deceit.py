"""Scenarios in which a driver lies to some members, or to the registry."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.bootstrap.registry_pb2 import DIVERGENCE, HANG, NONFINITE, NUMBERS, SHAPE
from planaria.node.driver.driver import Driver
from planaria.node.driver.phases import Turn
from planaria.node.transaction.effects import Effect, Send
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import seal
from simulation.byzantine import Lying
from simulation.cluster import Host, Trap
from simulation.node import Node
from simulation.scenario import Crowded

LIES = ["another", "unsigned", "unchained", "nothing"]


class Deceitful(Driver):
    """Sends one replica of each stage another commit than the rest, or none; `lie` says how."""

    lie: str
    changes_weights = True
    lies = 0

    def send_step(self, step: pb.Step, now: float) -> Turn:
        turn = super().send_step(step, now)
        if not step.HasField("commit"):
            return turn
        deceived = self._deceived()
        effects = [sent for effect in turn.effects for sent in self._lie_to(effect, deceived)]
        return Turn(effects, turn.phase)

    def _deceived(self) -> set[str]:
        """The last node, other than the driver, of each stage that has several."""
        last = {stage: node for node, stage in sorted(self.members.items()) if node != self.node}
        stages = list(self.members.values())
        return {node for stage, node in last.items() if stages.count(stage) > 1}

    def _lie_to(self, effect: Effect, deceived: set[str]) -> Sequence[Effect]:
        if not isinstance(effect, Send) or effect.to not in deceived:
            return [effect]
        self.lies += 1
        if self.lie == "nothing":
            return []
        message = pb.Message()
        message.CopyFrom(effect.message)
        commit = message.step.commit
        if self.lie == "unchained":
            commit.previous = bytes(32)
        else:
            commit.loss += 1.0
            if self.changes_weights:
                commit.clip_scale[:] = [2 * scale + 1 for scale in commit.clip_scale]
        if self.lie != "unsigned":
            assert self.identity is not None
            seal(commit, self.identity, self.view.run)
        return [Send(effect.to, message)]


class Dividing(Deceitful):
    """Sends half of the replicas of each stage another commit than the rest."""

    lie = "another"

    def _deceived(self) -> set[str]:
        stages = {
            stage: sorted(n for n, at in self.members.items() if at == stage)
            for stage in self.members.values()
        }
        halves = [nodes[: len(nodes) // 2] for nodes in stages.values()]
        return {node for nodes in halves for node in nodes if node != self.node}


class Vanishing(Deceitful):
    """Sends a commit only to itself and to one replica of each stage, a different one to each."""

    lie = "another"

    def _lie_to(self, effect: Effect, deceived: set[str]) -> Sequence[Effect]:
        if not isinstance(effect, Send) or effect.to == self.node:
            return [effect]
        if effect.to not in deceived:
            return []
        for _ in range(1 + self.members[effect.to]):
            (effect,) = super()._lie_to(effect, deceived)
        return [effect]


class Turning(Lying):
    """The node that drives after a few steps lies from then on."""

    def _plan_faults(self) -> float:
        self.cluster.guilty = set()
        nth = self.random.randint(1, self.cluster.rules.steps - 2)
        self.cluster.traps.append(Trap("committed", nth, self._turn_driver))
        return 30.0

    def _turn_driver(self) -> None:
        if (node := self._driver()) is None:
            return
        assert self.cluster.guilty is not None
        self.cluster.guilty.add(node.process.host)
        self.cluster.lying.add(node.process.host)
        self._begin(node)

    def _begin(self, node: Node) -> None:
        raise NotImplementedError


class Deceived(Turning):
    """All stages have replicas, and the driver sends some of them another commit, or none."""

    lie = ""

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        replicas, stages = self.random.choice([2, 2, 3]), range(rules.stages + 1)
        names = [f"{replica}{stage}" for replica in range(replicas) for stage in stages]
        return [Host(name, int(name[1:]), False) for name in names]

    def _begin(self, node: Node) -> None:
        for seat in node.seats.agents.values():
            self._turn(seat.driver)
        self.cluster.counts["deceits"] += 1

    def _turn(self, driver: Driver) -> None:
        driver.__class__ = Deceitful
        assert isinstance(driver, Deceitful)
        driver.lie = self.lie or self.random.choice(LIES)
        driver.changes_weights = self.random.choice([True, False])
        self.cluster.parting |= driver.lie == "another"
        self.world.say(driver.node, f"deceives from now on: {driver.lie}")


class DeceivedCrowd(Crowded, Deceived):
    """Each stage has so many replicas that they average in rows."""


class Parted(Deceived):
    lie = "another"


class DividedCrowd(DeceivedCrowd):
    def _turn(self, driver: Driver) -> None:
        driver.__class__ = Dividing
        self.cluster.parting = True


class Abandoned(Deceived):
    """The driver crashes after it has sent a commit to one replica of each stage."""

    def _begin(self, node: Node) -> None:
        super()._begin(node)
        self._look(node)

    def _turn(self, driver: Driver) -> None:
        driver.__class__ = Vanishing
        self.cluster.parting = True

    def _look(self, node: Node) -> None:
        drivers = [seat.driver for seat in node.seats.agents.values()]
        if any(isinstance(driver, Vanishing) and driver.lies for driver in drivers):
            self.cluster.counts["vanished"] += 1
            self.cluster.crash(node.process, "when it has told some of a commit")
        elif not node.ended:
            self.world.after(0.02, self._look, node)


class Accusing(Turning):
    """The driver keeps accusing others to the registry, even when another node drives. Stage 0 has
    several nodes; the other stages may have one each."""

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        ends, replicas = self.random.choice([2, 3]), self.random.choice([1, 2])
        names = [f"{replica}0" for replica in range(ends)]
        names += [f"{n}{stage}" for n in range(replicas) for stage in range(1, rules.stages + 1)]
        return [Host(name, int(name[1:]), False) for name in names]

    def _begin(self, node: Node) -> None:
        self.world.say(node.name, "accuses others from now on")
        self._accuse(node.process.host, self.world.now + self.random.choice(self.lasting))

    def _accuse(self, host: str, until: float) -> None:
        node = self.cluster.hosts[host].node
        others = sorted(self.cluster.registry.names() - {node.name if node is not None else ""})
        if self.world.now > until or not others:
            return
        if node is not None and node.process.responsive:
            cause = self.random.choice([SHAPE, NUMBERS, HANG, DIVERGENCE, NONFINITE])
            accused = self.random.choice(others)
            node.process.run(node.client.suspect, accused, "so I say", cause)
            self.cluster.counts["accusations"] += 1
        self.world.after(self.random.expovariate(1.0), self._accuse, host, until)
