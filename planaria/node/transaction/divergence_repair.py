"""Diverged weights: which replica copies its state again, and which is accused.

divergence_detection.py finds the wrong replica; here the driver decides what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from planaria.bootstrap.registry_pb2 import DIVERGENCE
from planaria.node.report.events import Diverged, WeightsChanged, changed_by_themselves
from planaria.node.transaction.attempting import Vote
from planaria.node.transaction.divergence_detection import (
    STATE,
    ReplicaDigest,
    changed,
    differing,
    undecided,
)
from planaria.node.transaction.effects import Effect, Suspect
from planaria.node.transaction.gathering import Gathering
from planaria.node.transaction.rules import TransactionRules
from planaria.recovery.decide import decide
from planaria.recovery.facts import Rebuild

STRIKES: Final = 3
"""Times that a node may differ from its replicas; the last time it is accused."""


@dataclass(frozen=True)
class Accepted:
    """Changed weights with which the run goes on, since no node has the right ones."""

    node: str
    stage: int
    step: int  # after which they changed
    digest: bytes

    def __str__(self) -> str:
        changed = changed_by_themselves(self.node, self.stage, self.step)
        return f"{changed}, and training goes on with them: have its memory and device checked"


class DivergenceRepair:
    """Repairs diverged replicas. `step` is always the newest committed one."""

    def __init__(self) -> None:
        self.distrusted: set[str] = set()  # nodes whose state differs from their replicas'
        self.accepted: dict[str, Accepted] = {}  # by node: weights that changed outside an update
        self.strikes: Counter[str] = Counter()  # how often a node differed from its replicas
        self._open: dict[
            int, dict[str, ReplicaDigest]
        ] = {}  # by stage: digests that leave the right replica open
        self._norms: dict[int, float] = {}  # by stage, squared, of the last committed gradient

    # --- trust

    def trust(self, node: str) -> None:
        """The node has copied its state, or knows that it needs one."""
        self.distrusted.discard(node)
        self.accepted.pop(node, None)
        for digests in self._open.values():
            digests.pop(node, None)

    def keep(self, members: Mapping[str, int]) -> None:
        """Drops nodes that are no longer members. Trusts a stage's last one: it beats a guess."""
        right = {stage for node, stage in members.items() if node not in self.distrusted}
        self.distrusted = {node for node in self.distrusted if members.get(node) in right}
        self.accepted = {
            node: weights for node, weights in self.accepted.items() if node in members
        }

    def went_back(self) -> None:
        """The run went back: all weights have changed."""
        self._open.clear()

    # --- votes

    def look(self, vote: Vote, step: int) -> tuple[list[Effect], str]:
        """Events about replicas that differ, and why the step can't be committed: a wrong replica
        must copy its state, or which one is wrong is unknown. Empty: they agree."""
        effects: list[Effect] = []
        wrong: dict[str, str] = {}
        for stage, digests in sorted(vote.replicas().items()):
            if undecided(digests, self._digests()):
                self._open[stage] = digests
            else:
                usual = self._norms.get(stage, 0.0)
                of_stage = differing(digests, usual, self.strikes, self._digests())
                effects += self.differ(stage, digests, of_stage, step)
                wrong |= of_stage
        reasons = [f"{node} differs: {reason}" for node, reason in wrong.items()]
        for stage, digests in self._open.items():
            reasons.append(
                f"nobody knows whether stage {stage} is right at {', '.join(sorted(digests))}"
            )
        self.distrusted |= wrong.keys()
        return effects, "; ".join(reasons)

    def committed(self, vote: Vote) -> None:
        self._norms = {vote.stages[node]: ready.squared_norm for node, ready in vote.ready.items()}

    def differ(
        self, stage: int, replicas: Collection[str], wrong: Mapping[str, str], step: int
    ) -> list[Effect]:
        """Events about wrong replicas; accuses a node that is wrong for the third time."""
        if not wrong:
            return []
        reasons = "; ".join(f"{node}: {reason}" for node, reason in wrong.items())
        right = sorted(set(replicas) - wrong.keys())
        nodes = (*right, *wrong)
        effects: list[Effect] = [Diverged(stage=stage, nodes=nodes, step=step, reason=reasons)]
        for node, reason in wrong.items():
            self.strikes[node] += 1
            if self.strikes[node] >= STRIKES:
                effects.append(Suspect(node, f"{reason}, {STRIKES} times", DIVERGENCE))
        return effects

    def _digests(self) -> dict[str, bytes]:
        return {node: weights.digest for node, weights in self.accepted.items()}

    # --- once the holdings are known

    def settle(self, gathering: Gathering, rules: TransactionRules, step: int) -> list[Effect]:
        """Decides about the stages in doubt."""
        effects: list[Effect] = []
        doubted, self._open = self._open, {}
        for stage, before in sorted(doubted.items()):
            digests = {
                n: digest for n, digest in before.items() if gathering.members.get(n) == stage
            }
            if not digests:
                continue
            if changed(digests, self._digests()) == digests.keys() and (
                rebuild := self._restorable(gathering, stage, digests, rules)
            ):
                self._open[stage] = digests  # a holding may turn out to be damaged
                if not digests.keys() <= self.distrusted:
                    effects += self._restore(stage, digests, rebuild, step)
            else:
                effects += self._believe(stage, digests, gathering.twins(stage), step)
        return effects

    def _restorable(
        self, gathering: Gathering, stage: int, nodes: Collection[str], rules: TransactionRules
    ) -> Rebuild | None:
        """How to restore the stage's right weights without these nodes' state; None: impossible."""
        distrusted = {*self.distrusted, *nodes}
        if not gathering.statuses.keys() - distrusted:
            return None
        without = replace(gathering, distrusted=distrusted)
        decision = decide(stage, without.left(), rules.policy, rules.strict)
        return decision if isinstance(decision, Rebuild) and decision.same_weights else None

    def _restore(
        self, stage: int, digests: Mapping[str, ReplicaDigest], rebuild: Rebuild, step: int
    ) -> list[Effect]:
        self.distrusted |= digests.keys()
        if len(digests) > 1:
            reason = f"its {STATE} are not those that its last update has left; {rebuild.reason}"
            return self.differ(stage, digests, dict.fromkeys(sorted(digests), reason), step)
        (node,) = digests
        self.strikes[node] += 1
        return [
            WeightsChanged(node=node, stage=stage, step=step, restored=True, reason=rebuild.reason)
        ]

    def _believe(
        self,
        stage: int,
        replicas: Mapping[str, ReplicaDigest],
        witnesses: Mapping[str, bytes],
        step: int,
    ) -> list[Effect]:
        """Believes one replica or, if all have changed, goes on with what is left."""
        usual, digests = self._norms.get(stage, 0.0), self._digests()
        wrong = differing(replicas, usual, self.strikes, digests, witnesses)
        effects = self.differ(stage, replicas, wrong, step)
        self.distrusted |= wrong.keys()
        for node in sorted(changed(replicas, digests) - wrong.keys()):
            self.distrusted.discard(node)
            self.accepted[node] = Accepted(node, stage, step, replicas[node].now)
            if not wrong:
                self.strikes[node] += 1
                effects.append(WeightsChanged(node=node, stage=stage, step=step, restored=False))
        return effects
