"""Replicas of a stage that differ: which one is wrong by the digests in their votes, and what
becomes of it.

Digests usually settle it. They don't if every replica's state has changed since its last update, or
if updates differ without a majority. Then `undecided` is true, and the driver queries what others
keep of the stage first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.bootstrap.registry_pb2 import DIVERGENCE
from planaria.node.driver.query_answers import Answers
from planaria.node.report.events import Diverged, WeightsChanged, changed_by_themselves
from planaria.node.transaction.effects import Effect, Suspect
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import decide
from planaria.recovery.facts import Rebuild

if TYPE_CHECKING:
    from planaria.node.driver.attempt_state import Vote

NOBODY: Final[Mapping[str, bytes]] = MappingProxyType({})
STATE: Final = "weights or moments"
"""One digest covers both, so either may be wrong."""
STRIKES: Final = 3
"""Times that a node may differ from its replicas; the last time it is accused."""


class ReplicaDigest(NamedTuple):
    """A replica's report of its state and of the summed gradient."""

    applied: bytes  # digest of weights and moments right after their last change
    now: bytes  # digest of the current weights and moments
    squared_norm: float  # all non-finite values count as equal

    @classmethod
    def by(cls, ready: pb.Ready) -> ReplicaDigest:
        norm = ready.squared_norm if ready.finite else math.inf
        return cls(ready.applied or ready.digest, ready.digest, norm)


def changed(
    digests: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY
) -> set[str]:
    """The replicas whose weights or moments have changed since their last update. `accepted`: the
    digests of changed ones with which the run goes on, by node."""
    return {
        node
        for node, digest in digests.items()
        if digest.now not in (digest.applied, accepted.get(node))
    }


def undecided(digests: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY) -> bool:
    """Whether the replicas' digests leave open which weights are right."""
    if len(digests) > 1 and len({digest.now for digest in digests.values()}) == 1:
        return False
    wrong = changed(digests, accepted)
    if wrong == digests.keys():
        return True
    votes = Counter(digest.now for node, digest in digests.items() if node not in wrong)
    return 2 * max(votes.values()) <= votes.total()


def differing(
    digests: Mapping[str, ReplicaDigest],
    usual: float,
    strikes: Mapping[str, int],
    accepted: Mapping[str, bytes] = NOBODY,
    witnesses: Mapping[str, bytes] = NOBODY,
) -> dict[str, str]:
    """The wrong replicas, each with the reason; empty: all agree. At least one is always right.

    `usual`: the squared norm of the stage's last committed gradient; 0: there was none. `strikes`:
    how often each has been wrong before. `witnesses`: by node, its digest of its own computation of
    this stage from the same gradients.

    A replica whose weights changed since its last update is wrong. Among the others the majority is
    right; without one, a witness decides. Without a witness, one is believed: the one whose
    gradient is nearest to the last, if gradients differ; then the one with fewer strikes; then the
    smallest id. That is a guess, and the reason says so.
    """
    if len({(digest.now, digest.squared_norm) for digest in digests.values()}) < 2:
        return {}
    wrong: dict[str, str] = {}
    changed_nodes = changed(digests, accepted)
    if changed_nodes < digests.keys():
        reason = f"its {STATE} have changed since its last update"
        wrong = dict.fromkeys(sorted(changed_nodes), reason)

    def why(node: str) -> str:
        holders = [other for other, digest in witnesses.items() if digest == states[node]]
        if holders:
            return f", since {min(holders)}, which keeps a twin of them, has the same"
        return ", a guess: no node has a twin of them"

    states = {node: digest.now for node, digest in digests.items() if node not in wrong}
    attested = {node: digest in witnesses.values() for node, digest in states.items()}
    wrong |= _outvoted(states, STATE, lambda n: (not attested[n], strikes.get(n, 0), n), why)
    norms = {n: digest.squared_norm for n, digest in digests.items() if n not in wrong}
    far = {node: _distance(norm, usual) for node, norm in norms.items()}
    return wrong | _outvoted(norms, "gradient", lambda n: (far[n], strikes.get(n, 0), n))


def _outvoted(
    values: Mapping[str, Hashable],
    quantity: str,
    doubt: Callable[[str], tuple[float, int, str]],
    why: Callable[[str], str] = lambda node: "",
) -> dict[str, str]:
    """The nodes whose value isn't the majority's or, without one, that of the least doubted."""
    votes = Counter(values.values())
    if len(votes) < 2:
        return {}
    (most, count), *_ = votes.most_common()
    if 2 * count > len(values):
        reason = f"its {quantity} differ from that of {count} of {len(values)} replicas"
    else:
        right = min(values, key=lambda node: (-votes[values[node]], doubt(node)))
        most, names = values[right], ", ".join(sorted(values))
        reason = (
            f"the {quantity} of {names} differ, there is no majority, and {right} is believed"
            f"{why(right)}"
        )
    return {node: reason for node, value in sorted(values.items()) if value != most}


def _distance(norm: float, usual: float) -> float:
    """How far a squared norm is from usual: the difference of logarithms; inf: undefined."""
    if not (0 < norm < math.inf and 0 < usual < math.inf):
        return 0.0 if norm == usual else math.inf
    return abs(math.log(norm) - math.log(usual))


@dataclass(frozen=True)
class AcceptedWeights:
    """Changed weights with which the run goes on, since no node has the right ones."""

    node: str
    stage: int
    step: int  # after which they changed
    digest: bytes

    def __str__(self) -> str:
        changed = changed_by_themselves(self.node, self.stage, self.step)
        return f"{changed}, and training goes on with them: have its memory and device checked"


class DivergenceRepair:
    """Detects and repairs diverged replicas. `step` is always the newest committed one."""

    def __init__(self) -> None:
        self.distrusted: set[str] = set()  # nodes whose state differs from their replicas'
        # By node: weights that changed outside an update.
        self.accepted: dict[str, AcceptedWeights] = {}
        self.strikes: Counter[str] = Counter()  # how often a node differed from its replicas
        # By stage: digests that leave open which replica is right.
        self._open: dict[int, dict[str, ReplicaDigest]] = {}
        self._norms: dict[int, float] = {}  # by stage, squared, of the last committed gradient

    # --- trust

    def trust(self, node: str) -> None:
        """Trusts a replica again: it has copied its state, or knows that it needs one."""
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
        """Drops the open doubts about replicas: the run went back, so all weights have changed."""
        self._open.clear()

    # --- votes

    def compare(self, vote: Vote, step: int) -> tuple[list[Effect], str]:
        """Compares the replicas' digests in the votes. Returns events about those that differ, and
        why the step can't be committed; empty: they agree."""
        effects: list[Effect] = []
        wrong: dict[str, str] = {}
        for stage, digests in sorted(vote.replicas().items()):
            if undecided(digests, self._digests()):
                self._open[stage] = digests
            else:
                usual = self._norms.get(stage, 0.0)
                of_stage = differing(digests, usual, self.strikes, self._digests())
                effects += self.report_wrong(stage, digests, of_stage, step)
                wrong |= of_stage
        reasons = [f"{node} differs: {reason}" for node, reason in wrong.items()]
        for stage, digests in self._open.items():
            reasons.append(
                f"digests don't show whether stage {stage} is right at {', '.join(sorted(digests))}"
            )
        self.distrusted |= wrong.keys()
        return effects, "; ".join(reasons)

    def committed(self, vote: Vote) -> None:
        self._norms = {vote.stages[node]: ready.squared_norm for node, ready in vote.ready.items()}

    def report_wrong(
        self, stage: int, replicas: Collection[str], wrong: Mapping[str, str], step: int
    ) -> list[Effect]:
        """Reports wrong replicas; accuses a node that is wrong for the third time."""
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

    def settle_doubts(self, answers: Answers, rules: TransactionRules, step: int) -> list[Effect]:
        """Decides which replicas are wrong at the stages in doubt, by what members keep."""
        effects: list[Effect] = []
        doubted, self._open = self._open, {}
        for stage, before in sorted(doubted.items()):
            digests = {n: digest for n, digest in before.items() if answers.members.get(n) == stage}
            if not digests:
                continue
            if changed(digests, self._digests()) == digests.keys() and (
                rebuild := self._how_to_restore(answers, stage, digests, rules)
            ):
                self._open[stage] = digests  # a holding may turn out to be damaged
                if not digests.keys() <= self.distrusted:
                    effects += self._restore(stage, digests, rebuild, step)
            else:
                effects += self._believe(stage, digests, answers.twins(stage), step)
        return effects

    def _how_to_restore(
        self, answers: Answers, stage: int, nodes: Collection[str], rules: TransactionRules
    ) -> Rebuild | None:
        """How to restore the stage's right weights without these nodes' state; None: impossible."""
        distrusted = {*self.distrusted, *nodes}
        if not answers.statuses.keys() - distrusted:
            return None
        without = replace(answers, distrusted=distrusted)
        decision = decide(stage, without.left(), rules.policy, rules.strict, rules.relearn)
        return decision if isinstance(decision, Rebuild) and decision.same_weights else None

    def _restore(
        self, stage: int, digests: Mapping[str, ReplicaDigest], rebuild: Rebuild, step: int
    ) -> list[Effect]:
        """Distrusts all of these replicas, so that they get the state of `rebuild`."""
        self.distrusted |= digests.keys()
        if len(digests) > 1:
            reason = f"its {STATE} have changed since its last update; {rebuild.reason}"
            return self.report_wrong(stage, digests, dict.fromkeys(sorted(digests), reason), step)
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
        effects = self.report_wrong(stage, replicas, wrong, step)
        self.distrusted |= wrong.keys()
        for node in sorted(changed(replicas, digests) - wrong.keys()):
            self.distrusted.discard(node)
            self.accepted[node] = AcceptedWeights(node, stage, step, replicas[node].now)
            if not wrong:
                self.strikes[node] += 1
                effects.append(WeightsChanged(node=node, stage=stage, step=step, restored=False))
        return effects
