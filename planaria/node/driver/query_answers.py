"""The answers to a query: which member has which state, and what that leaves of the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.transaction.effects import Ballot, Send
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import has_records, hash_of
from planaria.recovery.facts import Held, Left, Source


@dataclass
class ComingView:
    """A newer view than the driver's, which it adopts at a step boundary. A newcomer that is still
    building its stage can't answer, so the driver doesn't wait for it yet."""

    view: registry.View
    since: float
    unanswered: set[str]  # newcomers

    def greeting(self, newcomer: str) -> Send:
        return Ballot(self.view.number, 0).send(newcomer, query=pb.Query())

    def greetings(self) -> list[Send]:
        return [self.greeting(node) for node in sorted(self.unanswered)]

    def is_due(self, now: float, patience: float) -> bool:
        return not self.unanswered or now - self.since >= patience


@dataclass(frozen=True)
class Standing:
    """The newest state that a member has, or the one to which the run goes back."""

    lineage: int = 0  # how often the run has gone back to files
    committed: int = 0
    last: pb.Commit = field(default_factory=pb.Commit)
    boosted_at: Mapping[int, int] = field(default_factory=dict)
    """The step after which a stage was guessed, by stage; 0: never."""

    def sync(self, method: str, reason: str, sources: Iterable[Source], **more: Any) -> pb.Sync:
        """The `Sync` that orders a node to get this state."""
        named = [
            pb.Source(node=s.node, stage=s.stage, step=s.step, lineage=s.lineage) for s in sources
        ]
        at = self.committed
        return pb.Sync(
            step=at, lineage=self.lineage, method=method, reason=reason, sources=named, **more
        )


@dataclass
class Answers:
    """The answers of all active members to one query."""

    why: str
    ballot: Ballot
    members: Mapping[str, int]  # node -> stage
    stages: int  # body stages
    began: float
    distrusted: Collection[str] = ()  # nodes whose state differs from their replicas'
    leaving: Collection[str] = ()  # nodes that are leaving
    statuses: dict[str, pb.Status] = field(default_factory=dict)

    def unheard(self) -> list[str]:
        return sorted(self.members.keys() - self.statuses.keys())

    @property
    def newest(self) -> pb.Status:
        return max((s for n, s in self.statuses.items() if n not in self.distrusted), key=age_of)

    def having(self) -> dict[str, pb.Status]:
        """The answers of the members that have the newest state. A joiner's state doesn't count if
        no training member of its stage has it: the stage was rebuilt while it followed."""
        age, statuses = age_of(self.newest), self.statuses.items()
        newest = {
            n: s
            for n, s in statuses
            if age_of(s) == age and n not in self.distrusted and not s.weightless
        }
        trained: dict[int, set[bytes]] = {}
        for node, status in newest.items():
            if not status.following:
                trained.setdefault(self.members[node], set()).add(status.digest)
        return {
            node: status
            for node, status in newest.items()
            if status.digest in trained.get(self.members[node], [status.digest])
        }

    def standing(self) -> Standing:
        """The newest state that a member has; its commit has its records if any member has them."""
        newest, having = self.newest, self.having()
        boosted_at = {self.members[node]: status.boosted_at for node, status in having.items()}
        recorded = (status.last for status in having.values() if has_records(status.last))
        same = (commit for commit in recorded if hash_of(commit) == hash_of(newest.last))
        last = next(same, newest.last)
        return Standing(newest.lineage, newest.committed, last, boosted_at)

    def all_lost(self, view: registry.View) -> str:
        """Why the run can't go on from the newest state among the answers; empty: it can."""
        newest = self.newest
        having = [*self.having(), *self.behind()]
        if newest.committed and all(self.statuses[node].following for node in having):
            return (
                f"no member that trained is left, and steps after {newest.committed} may be "
                "committed that joiners lack"
            )
        if (newest.lineage, newest.committed + 1) < (view.lineage, view.committed):
            return (
                f"step {view.committed} was committed once, but the newest state that is left is "
                f"of step {newest.committed}"
            )
        return ""

    def behind(self) -> list[str]:
        """Members that were ready for the very attempt that others have committed."""
        newest = self.newest
        return [
            node
            for node, status in self.statuses.items()
            if node not in self.distrusted
            and status.committed + 1 == newest.committed == status.ready
            and status.ready_ballot == newest.last.ballot
        ]

    def missing_one(self) -> list[str]:
        """Joiners that may lack the newest commit, and nothing before it."""
        newest = self.newest
        return [
            node
            for node, status in self.statuses.items()
            if status.following
            and status.following_lineage == newest.lineage
            and status.heard + 1 == newest.committed
        ]

    def held(self) -> list[Held]:
        """The states that members keep: their own ones, in files, and of other stages. A stage's
        received weights don't count if some of its nodes are distrusted: they may come from
        those."""
        doubted = {at for node, at in self.members.items() if node in self.distrusted}
        own = [
            Held(
                "memory",
                Source(node, self.members[node], status.committed, status.lineage),
                Ballot.of(status.last.ballot),
            )
            for node, status in sorted(self.statuses.items())
            if status.committed and node not in self.distrusted
        ]
        return own + [
            Held(
                holding.kind,  # type: ignore[arg-type]
                Source(node, holding.stage, holding.step, holding.lineage),
                (holding.made.view, holding.made.attempt),
                holding.digest,
                holding.mean_step if holding.kind == "snapshot" else math.inf,
            )
            for node, status in sorted(self.statuses.items())
            for holding in status.holdings
            if holding.kind != "weights" or holding.stage in {self.members[node]} - doubted
        ]

    def left(self) -> Left:
        """What is left of the run by these answers, as recovery/decide.py needs it."""
        newest = self.newest
        survivors: dict[int, list[str]] = {}
        trained = set()
        for node, status in self.having().items():
            survivors.setdefault(self.members[node], []).append(node)
            if status.boosted_at < newest.committed:
                trained.add(self.members[node])
        return Left(
            self.stages,
            newest.committed,
            survivors,
            newest.lineage,
            self.held(),
            untrained=frozenset(survivors.keys() - trained),
            made=Ballot.of(newest.last.ballot),
            origin=[n for n, s in self.statuses.items() if s.origin and n not in self.distrusted],
            leaving=self.leaving,
        )

    def relearning(self) -> set[int]:
        """Stages whose only node relearns while it trains, and doesn't hang."""
        return {
            self.members[node]
            for node, status in self.having().items()
            if status.relearning and not status.hang
        }

    def weightless(self) -> list[int]:
        """Stages with a node without the run's initial weights; only before the first step."""
        if age_of(self.newest) != (0, 0):
            return []
        return sorted({self.members[n] for n, status in self.statuses.items() if status.weightless})

    def checkpoint_holders(self, stage: int) -> list[str]:
        """Nodes with the stage's checkpoint weights, where those aren't trained."""
        return [
            node
            for node, status in sorted(self.statuses.items())
            if status.origin or (self.members[node] == stage and not status.weightless)
        ]

    def without_checkpoint(self) -> list[int]:
        """Stages whose checkpoint weights no node has."""
        stages = {self.members[n] for n, status in self.statuses.items() if status.weightless}
        return sorted(stage for stage in stages if not self.checkpoint_holders(stage))

    def twins(self, stage: int) -> dict[str, bytes]:
        """Digests of the stage's twins of the newest step, by the node that keeps them."""
        newest = age_of(self.newest)
        return {
            node: holding.digest
            for node, status in self.statuses.items()
            for holding in status.holdings
            if (holding.kind, holding.stage) == ("redundant", stage)
            and (holding.lineage, holding.step) == newest
            and holding.digest
        }

    def ledgers(self) -> dict[str, pb.Recording]:
        return {n: s.recording for n, s in self.statuses.items() if self.members[n] == 0}

    def nodes_of(self, stage: int) -> list[str]:
        return sorted(node for node, at in self.members.items() if at == stage)

    def vacant(self) -> list[int]:
        return [stage for stage in range(self.stages + 1) if not self.nodes_of(stage)]


def age_of(status: pb.Status) -> tuple[int, int]:
    """Lineage and committed step of a member's state."""
    return status.lineage, status.committed
