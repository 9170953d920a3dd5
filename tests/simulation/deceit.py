"""Scenarios in which a driver lies to some of those that it drives."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.node.transaction.chain import seal
from planaria.node.transaction.driver import Driver
from planaria.node.transaction.effects import Effect, Send
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from simulation.byzantine import Lying
from simulation.cluster import Host, Trap

LIES = ["another", "unsigned", "unchained", "nothing"]


class Deceitful(Driver):
    """Tells one replica of each stage of another commit than the rest, in whichever way."""

    lie: str
    told = 0  # lies

    def _send_step(self, step: pb.Step, now: float) -> list[Effect]:
        effects = super()._send_step(step, now)
        if not step.HasField("commit"):
            return effects
        deceived = self._deceived()
        return [told for one in effects for told in self._told(one, deceived)]

    def _deceived(self) -> set[str]:
        """The last one of each stage that has others."""
        last = {stage: node for node, stage in sorted(self.members.items()) if node != self.node}
        stages = list(self.members.values())
        return {node for stage, node in last.items() if stages.count(stage) > 1}

    def _told(self, effect: Effect, deceived: set[str]) -> Sequence[Effect]:
        if not isinstance(effect, Send) or effect.to not in deceived:
            return [effect]
        self.told += 1
        if self.lie == "nothing":
            return []
        message = pb.Message()
        message.CopyFrom(effect.message)
        commit = message.step.commit
        if self.lie == "unchained":
            commit.previous = bytes(32)
        else:
            commit.clip_scale[:] = [2 * scale + 1 for scale in commit.clip_scale]
        if self.lie != "unsigned":
            assert self.identity is not None
            seal(commit, self.identity, self.view.run)
        return [Send(effect.to, message)]


class Deceived(Lying):
    """All stages have replicas, and whoever drives after a few steps lies from then on."""

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        replicas, stages = self.random.choice([2, 2, 3]), range(rules.stages + 1)
        names = [f"{replica}{stage}" for replica in range(replicas) for stage in stages]
        return [Host(name, int(name[1:]), False) for name in names]

    def _plan_faults(self) -> float:
        self.cluster.guilty = set()
        nth = self.random.randint(1, self.cluster.rules.steps - 2)
        self.cluster.traps.append(Trap("committed", nth, self._deceive))
        return 30.0

    def _deceive(self) -> None:
        if (node := self._driver()) is None:
            return
        one = node.process.host
        assert self.cluster.guilty is not None
        self.cluster.guilty.add(one)
        self.cluster.lying.add(one)
        for seat in node.seats.agents.values():
            seat.driver.__class__ = Deceitful
            assert isinstance(seat.driver, Deceitful)
            seat.driver.lie = self.random.choice(LIES)
            self.world.say(seat.name, f"deceives from now on: {seat.driver.lie}")
        self.cluster.counts["deceits"] += 1
