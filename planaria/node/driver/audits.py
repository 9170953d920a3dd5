"""Audits of the sums of gradients: what is drawn, and who fails. Pure.

Each commit names a few blocks, which nobody could know while sums were sent; docs/protocol.md says
what becomes of them. There is one audit at a time. Stage 0 is the owner's and isn't audited.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from random import Random
from typing import Final

from planaria.node.averaging.evidence import REPLICAS
from planaria.node.averaging.examination import AuditResult
from planaria.node.averaging.outliers import SuspicionScores
from planaria.node.driver.attempt_state import AttemptState
from planaria.node.transaction.effects import AuditSum, Ballot
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb

BLOCKS: Final = 4
"""Blocks of each audited stage's gradient that a commit names."""


class Audits:
    """The driver's audits: which sums of gradients it has audited, and which members failed."""

    def __init__(self, rules: TransactionRules, chance: Random) -> None:
        self._rules, self._chance = rules, chance
        self._suspicions = SuspicionScores(rules.steps)
        self._audited = 0  # replicas in the audit under way
        self._named: set[str] = set()

    def restore(self, last: pb.Commit) -> None:
        """Takes over the suspicions that the last commit has, by whichever driver."""
        self._suspicions.restore(last.suspicions)
        self._audited = 0

    def draw(self, attempt: AttemptState, commit: pb.Commit) -> list[AuditSum]:
        """Names the blocks of an audit in the commit, unless there is nothing to audit or an audit
        is under way; the scores so far, too."""
        commit.suspicions.extend(self._suspicions.listed())
        if not self._rules.audits or self._audited or math.isnan(commit.gradient_norm):
            return []
        tokens = attempt.tokens_of_replicas()
        stages = {s: by_node for s, by_node in tokens.items() if s and len(by_node) >= REPLICAS}
        if not stages:
            return []
        self._audited = sum(map(len, stages.values()))
        commit.audited.extend(self._chance.getrandbits(32) for _ in range(BLOCKS))
        return [AuditSum(Ballot.of(commit.ballot), commit.step, [*commit.audited], stages)]

    def examined(self, result: AuditResult, members: Collection[str]) -> dict[str, str]:
        """Takes in an audit's result; returns the members that fail now, and why."""
        self._suspicions.keep(members)
        for node, outcomes in sorted(result.outcomes.items()):
            for test, stands_out in outcomes.items():
                self._suspicions.note(node, test, stands_out)
        failing = self._suspicions.outliers(max(1, self._audited)) | result.wrong
        self._audited = 0
        self._named &= set(members)
        new = {n: why for n, why in failing.items() if n in members and n not in self._named}
        self._named |= new.keys()
        return new
