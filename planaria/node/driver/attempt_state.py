"""An attempt as its driver sees it: its plan, what is home, which nodes are ready or lost, and the
plan that reroutes the microbatches of lost ones."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from planaria.node.driver.divergence import ReplicaDigest
from planaria.node.driver.hangs import StragglerDetector
from planaria.node.driver.query_answers import Standing
from planaria.node.driver.skipping import usual_norms, why_skipped
from planaria.node.driver.takeover import Takeover
from planaria.node.transaction.commits import collapsed
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.plan_encoding import in_order
from planaria.node.transaction.routing import (
    Pair,
    nodes_by_stage,
    paces,
    plan,
    route,
    routes,
    share_out,
)
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of_records, head
from planaria.node.wire.seat_names import node_of

UNREACHED = 2.0
"""Seconds within which a node that a member can't reach must turn out to be lost; then the attempt
is given up."""


@dataclass
class Vote:
    """The votes by one plan. A training member votes once its stage's gradient is the sum. Joiners
    that have caught up may vote once all microbatches are scored."""

    stages: Mapping[str, int]  # of training members
    keepers: frozenset[str] = frozenset()  # training members that get the records before they vote
    records: Sequence[pb.Home] = ()  # the records, once they have been sent
    hurried: bool = False  # whether `Reduce` was sent to those without a vote
    ready: dict[str, pb.Ready] = field(default_factory=dict)
    complete: float = 0.0  # when the last member was ready
    joiners: dict[str, pb.Ready] = field(default_factory=dict)
    """Joiners with the attempt's gradient, which can enter with the commit."""

    @property
    def awaited(self) -> list[str]:
        return sorted(self.stages.keys() - self.ready.keys())

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.stages)

    def replicas(self) -> dict[int, dict[str, ReplicaDigest]]:
        """Digests of each stage's replicas."""
        digests: dict[int, dict[str, ReplicaDigest]] = {}
        for node, ready in self.ready.items():
            digests.setdefault(self.stages[node], {})[node] = ReplicaDigest.by(ready)
        return digests

    def ledgers(self) -> dict[str, pb.Recording]:
        return {n: ready.recording for n, ready in self.ready.items() if self.stages[n] == 0}

    def relearned(self, stages: int) -> list[int]:
        """Relearning updates that enter the commit, by stage; 0 where other nodes have it, too."""
        replicas = Counter(self.stages.values())
        alone = {self.stages[n]: r.relearned for n, r in self.ready.items()}
        return [alone[of] if replicas[of] == 1 else 0 for of in range(stages)]

    def relearning(self) -> set[int]:
        """Stages that go on relearning, by their nodes' votes."""
        return {self.stages[node] for node, ready in self.ready.items() if ready.relearning}

    def norms(self) -> list[float]:
        """The norm of each stage's gradient, by the votes, which agree; NaN: not finite."""
        norms = {
            self.stages[node]: math.sqrt(ready.squared_norm) if ready.finite else math.nan
            for node, ready in self.ready.items()
        }
        return [norm for _, norm in sorted(norms.items())]

    def dissents_from(self, stage: int, ready: pb.Ready) -> str:
        """A voter of the stage with other weights or another gradient than a joiner's vote has;
        empty: none, or the joiner's gradient isn't finite."""
        replica = next(node for node in sorted(self.ready) if self.stages[node] == stage)
        other = self.ready[replica]
        same = (ready.squared_norm, ready.digest) == (other.squared_norm, other.digest)
        return "" if same or not ready.finite else replica


class Planning(NamedTuple):
    """What a new plan of an attempt goes by when it shares out microbatches."""

    rules: TransactionRules
    seconds: Mapping[str, float]  # per microbatch, by node
    apart: Collection[Pair]  # between these, as few microbatches as possible go


@dataclass
class AttemptState:
    """One attempt, from its `Begin` until it is decided or given up."""

    begin: pb.Begin
    since: Ballot  # ballot with which it began
    began: float
    progressed: float
    masked: frozenset[str]  # lost members without which it goes on
    vote: Vote
    unreached: dict[str, tuple[float, str, str]] = field(default_factory=dict)
    """Nodes that a member can't reach: since when, by which member, and why."""
    scored: dict[int, pb.Home] = field(default_factory=dict)  # microbatches with a known loss
    homes: dict[int, pb.Home] = field(default_factory=dict)  # those of `scored` that are back
    inquest: StragglerDetector = field(default_factory=StragglerDetector)
    passes: dict[str, int] = field(default_factory=dict)  # how many are known to be done, by member
    held_up: dict[str, str] = field(default_factory=dict)  # by node, why it is held up
    regather: str = ""  # why to gather when it is over
    takeover: Takeover | None = None
    """Set while a stage has no node: the lost node stays in the plan until the seat is taken."""
    given_up: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Microbatches that a node was too slow for, and won't compute in this attempt, by node."""

    def explain(self) -> str:
        held_up = "".join(f"; held up by {who}" for who in self._held_up_by().values())
        held_up += f"; waiting for {self.takeover}" if self.takeover is not None else ""
        if self.is_home():
            return f"step {self.begin.step}: waiting for {', '.join(self.awaited)}{held_up}"
        done, planned = len(self.homes), len(self.begin.plan)
        computed = f"step {self.begin.step}: {done} of {planned} microbatches computed{held_up}"
        return computed + "".join(f"; {joiner.node} follows" for joiner in self.begin.joining)

    def _held_up_by(self) -> dict[str, str]:
        return {
            place.node: f"{place.node} of stage {place.stage}: {self.held_up[place.node]}"
            for place in self.begin.members
            if place.node in self.held_up
        }

    def waited_for(self) -> dict[str, str]:
        """The nodes that hold up the attempt, each with a sentence about why, as far as known."""
        if held_up := self._held_up_by():
            return held_up
        if self.is_home():
            return {node: node for node in self.vote.awaited}
        awaited = self.inquest.awaited(self.begin, self.homes)
        return {visit.node: str(visit) for visit in reversed(awaited)}  # the first of each

    def lost_between(self) -> set[frozenset[str]]:
        """Pairs of nodes between which a microbatch was lost, as far as accounts show."""
        return set() if self.is_home() else self.inquest.lost_between(self.begin, self.homes)

    @property
    def awaited(self) -> list[str]:
        if self.takeover is not None and self.takeover.seat:
            return [self.takeover.seat]
        return self.vote.awaited if self.is_home() else []

    @property
    def lost(self) -> frozenset[str]:
        """Lost members, including one that no other node replaces yet."""
        return self.masked | ({self.takeover.lost} if self.takeover is not None else set())

    def is_source(self, peer: str, home: pb.Home) -> bool:
        """Whether `peer` is the microbatch's source by the current plan. Raises ValueError for a
        second, different result."""
        plan, identity = self.begin.plan, home.microbatch
        if identity >= len(plan) or plan[identity].source != peer:
            return False
        first = self.scored.setdefault(identity, home)
        # As bytes, since NaN differs from itself.
        if first is not home and first.SerializeToString() != home.SerializeToString():
            raise ValueError(f"two results of microbatch {identity} in one attempt")
        return True

    def account(self, peer: str, account: pb.Account, now: float) -> None:
        """Take in a member's account. It is progress if the member has done more passes."""
        self.inquest.heard(peer, account, now)
        before = self.passes.get(peer, 0)
        if len(account.done) > before and (done := self._passes_done(peer, account)) > before:
            self.passes[peer], self.progressed = done, now

    def _passes_done(self, node: str, account: pb.Account) -> int:
        """How many passes at the node are done, by its account."""
        plan = self.begin.plan
        done = {(item.microbatch, item.position, item.backward) for item in account.done}
        return sum(
            node in route(self.begin, plan[microbatch]).nodes[position : position + 1]
            for microbatch, position, _ in done
            if microbatch < len(plan)
        )

    def is_home(self) -> bool:
        return len(self.homes) == len(self.begin.plan)

    def mean_loss(self) -> float:
        """Mean loss over the scored tokens; 0 when there are none."""
        scored = sum(home.tokens for home in self.homes.values())
        return math.fsum(home.loss for home in self.homes.values()) / max(1, scored)

    def voted(self, peer: str, ready: pb.Ready, now: float) -> None:
        """Takes in the vote of a training member or a joiner."""
        if peer not in self.vote.stages:
            self.vote.joiners[peer] = ready
            return
        self.vote.ready[peer] = ready
        self.progressed = now
        if self.vote.is_complete:
            self.vote.complete = self.vote.complete or now

    def tokens_of_replicas(self) -> dict[int, dict[str, int]]:
        """The tokens scored in each node's microbatches, by stage and node."""
        tokens: dict[int, dict[str, int]] = {}
        for place in self.begin.members:
            tokens.setdefault(place.stage, {})[place.node] = 0
        for microbatch, way in routes(self.begin).items():
            for stage, node in way.by_stage.items():
                tokens[stage][node] += self.homes[microbatch].tokens
        return tokens

    def commit(
        self, ballot: Ballot, rules: TransactionRules, at: Standing, now: float
    ) -> pb.Commit:
        norms, records = self.vote.norms(), self.vote.records
        total = math.hypot(*norms)
        skipped = bool(why_skipped(norms, at.last))
        scale = 0.0 if skipped else min(1.0, rules.clip / (total + 1e-6))
        relearned = [] if skipped else self.vote.relearned(len(norms))
        return pb.Commit(
            step=self.begin.step,
            ballot=ballot.message(),
            skipped=skipped,
            clip_scale=[scale],
            lr_scale=collapsed(self.begin.lr_scale),
            loss=self.mean_loss(),
            tokens=len(self.homes) * rules.tokens,
            gradient_norm=total,
            microbatches=records,
            records=hash_of_records(records),
            seconds=now - self.began,
            skips=at.last.skips + 1 if skipped else 0,
            lineage=at.lineage,
            previous=head(at.last, at.lineage),
            relearned=relearned if any(relearned) else [],
            usual_norms=usual_norms(norms, at.last),
        )

    # --- going on without lost nodes

    def can_do_without(self, nodes: Collection[str], rules: TransactionRules) -> bool:
        """Whether the attempt can go on without these training nodes: for every microbatch their
        stages have a remaining node that hasn't given it up."""
        if not self.may_replan(rules):
            return False
        trains = {place.node for place in self.begin.members}
        nobodys: dict[int, frozenset[int]] = {}  # microbatches that no node left does, by stage
        for place in self.begin.members:
            if place.node not in nodes:
                given_up = self._given_up_by(place.node)
                nobodys[place.stage] = nobodys.get(place.stage, given_up) & given_up
        covered = len(nobodys) > rules.stages and not any(nobodys.values())
        return trains.issuperset(nodes) and covered

    def without(self, nodes: Collection[str], by: Planning, now: float) -> tuple[AttemptState, int]:
        """The attempt by a plan that gives these nodes' microbatches to others, and their number,
        counted at each stage. Members that were ready must reduce again."""
        masked = self.masked.union(nodes)
        begin, moved = self._plan_without(masked, by)
        plans = enumerate(zip(begin.plan, self.begin.plan, strict=True))
        stay = {identity for identity, (a, b) in plans if a.source == b.source}
        attempt = replace(
            self,
            begin=begin,
            masked=masked,
            scored={identity: home for identity, home in self.scored.items() if identity in stay},
            homes={identity: home for identity, home in self.homes.items() if identity in stay},
            progressed=now,
        )
        return attempt, moved

    def taken_over(self, by: Planning, now: float) -> tuple[AttemptState, int]:
        """The attempt by a plan that gives the lost node's microbatches to the new seat, and their
        number."""
        assert self.takeover is not None
        entering = {self.takeover.seat: self.takeover.stage}
        begin, moved = self._plan_without(self.lost, by, entering)
        return replace(self, begin=begin, masked=self.lost, progressed=now, takeover=None), moved

    def may_replan(self, rules: TransactionRules) -> bool:
        """Whether this attempt may go on by another plan."""
        return rules.masking and self.begin.kind == pb.Begin.TRAIN

    def relieved(
        self, node: str, given_up: Collection[int], by: Planning
    ) -> tuple[AttemptState, int] | None:
        """The attempt by a plan that gives these microbatches of a slow node to others of its
        stage, and their number. None: one has no node left, since those others were lost before the
        slow node answered."""
        of_node = self._given_up_by(node).union(given_up)
        attempt = replace(self, given_up={**self.given_up, node: of_node})
        if not attempt.can_do_without([], by.rules):
            return None
        attempt.begin, moved = attempt._plan_without(self.masked, by)
        return attempt, moved

    def _given_up_by(self, node: str) -> frozenset[int]:
        return self.given_up.get(node, frozenset())

    def _plan_without(
        self,
        masked: Collection[str],
        by: Planning,
        entering: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[pb.Begin, int]:
        """A plan that reroutes what masked nodes have, or nodes have given up, to others, and the
        number of moved visits. `entering`: nodes new in the attempt, with their stages."""
        begin = pb.Begin()
        begin.CopyFrom(self.begin)
        begin.since.CopyFrom(self.since.message())
        del begin.members[:], begin.entering[:]
        left = [place for place in self.begin.members if place.node not in masked]
        new = [pb.Place(node=node, stage=at) for node, at in entering.items()]
        begin.members.extend(in_order([*left, *new]))
        begin.entering.extend(entering)
        index = {place.node: index for index, place in enumerate(begin.members)}
        moved, stages = 0, range(by.rules.stages + 1)
        replicas = [[p.node for p in begin.members if p.stage == stage] for stage in stages]
        ways = [way.by_stage for way in routes(self.begin).values()]
        everywhere = [[way[stage] for way in ways] for stage in stages]
        pace = [paces(nodes, by.seconds) for nodes in replicas]
        busy = defaultdict[str, float](float)  # seconds that a node computes, in all its seats
        for served, seconds in zip(everywhere, pace, strict=True):
            for node in served:
                busy[node_of(node)] += seconds.get(node, 0.0)
        apart = [pair for pair in by.apart if pair.isdisjoint(masked)]
        for stage, served in enumerate(everywhere):
            lost = [
                identity
                for identity, node in enumerate(served)
                if node in masked or identity in self._given_up_by(node)
            ]

            def detours(identity: int, node: str, stage: int = stage) -> int:
                way = (0, *begin.plan[identity].order, 0)
                if identity in self._given_up_by(node):
                    return len(way)  # more than any other node can have
                beside = [b if a == stage else a for a, b in pairwise(way) if stage in (a, b)]
                return sum(frozenset((node, everywhere[s][identity])) in apart for s in beside)

            successors = share_out(lost, replicas[stage], pace[stage], detours, busy)
            for identity, node in zip(lost, successors, strict=True):
                served[identity] = node
                busy[node_of(node)] += pace[stage][node]
            moved += len(lost)
            for microbatch, node in zip(begin.plan, served, strict=True):
                if stage == 0:
                    microbatch.source = node
                else:
                    microbatch.places[list(microbatch.order).index(stage)] = index[node]
        return begin, moved

    def unreachable(self, now: float) -> tuple[str, str]:
        """The member by whose report the attempt must be given up, though all links of the driver
        are up, and why. Reports about links have no effect while microbatches come home."""
        for node, (since, by, why) in self.unreached.items():
            if node not in self.lost and now - max(since, self.progressed) >= UNREACHED:
                return by, why
        return "", ""


def planned(
    members: Mapping[str, int],
    orders: Sequence[Sequence[int]],
    seconds: Mapping[str, float],
    idle: Collection[str] = (),
    apart: Collection[Pair] = (),
) -> list[pb.Microbatch]:
    """The plan of an attempt: a microbatch for each order, with a node for each visit. `members`:
    stages by node, in the order of names. `idle` nodes get none where their stage has others. As
    few as possible go between nodes that are `apart`."""
    everybody = nodes_by_stage(members)
    at_work = nodes_by_stage({node: at for node, at in members.items() if node not in idle})
    replicas = [at_work[stage] or everybody[stage] for stage in range(len(orders[0]) + 1)]
    index = {node: index for index, node in enumerate(members)}
    return [
        pb.Microbatch(
            id=identity,
            source=route.nodes[0],
            order=route.stages[1:-1],
            places=[index[node] for node in route.nodes[1:-1]],
        )
        for identity, route in enumerate(plan(orders, replicas, seconds, apart))
    ]
