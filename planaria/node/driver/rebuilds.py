"""Rebuilds and copies: which node fetches which state from where, and the events about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from planaria.node.driver.query_answers import Answers
from planaria.node.report.events import Origin, RebuildOrdered, RelearningResult, StageRebuilt
from planaria.node.transaction.effects import Effect, Send
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import decide
from planaria.recovery.facts import (
    ARRIVED,
    COPIED,
    INEXACT,
    OWN,
    Decision,
    Rebuild,
    Source,
    Stop,
    giver,
)
from planaria.recovery.orders import adjoining, all_orders, blocks


@dataclass
class Rebuilds:
    """The rebuilds since the last attempt began, and how long nothing trained."""

    stalled: float | None = None  # since when
    spent: float = 0.0  # seconds of that on abandoned rebuilds
    rebuilt: list[StageRebuilt] = field(default_factory=list)

    def stages(self) -> set[int]:
        """The rebuilt stages whose state no node had any more."""
        return {event.stage for event in self.rebuilt if event.method not in COPIED}

    def events(self, now: float) -> list[Effect]:
        stall = 0.0 if self.stalled is None else now - self.stalled
        return [
            replace(event, stall_seconds=stall) if math.isnan(event.stall_seconds) else event
            for event in self.rebuilt
        ]


def rebuilt(node: str, stage: int, synced: pb.Synced, seconds: float, stall: float) -> StageRebuilt:
    """A node's rebuild as an event. `stall`: seconds without training; NaN: until all go on."""
    has_relearned = synced.HasField("relearned")
    return StageRebuilt(
        stall_seconds=stall,
        node=node,
        stage=stage,
        method=synced.method,
        step=synced.step,
        sources=tuple(Origin(node=s.node, stage=s.stage, step=s.step) for s in synced.sources),
        bytes=synced.fetched_bytes,
        fetch_seconds=synced.seconds,
        relearned=RelearningResult.of(synced.relearned) if has_relearned else None,
        rebuild_seconds=seconds,
    )


# --- sources


def decide_each(
    answers: Answers, rules: TransactionRules, saved: Collection[int]
) -> dict[int, Decision]:
    """Decides about each stage of which some node, or every one, lacks the newest state. If no body
    stage is left, those of which nothing is kept come later: they are guessed from the others,
    also from one whose save is awaited.
    `saved`: stages that wait for a node with a save."""
    left = replace(answers.left(), adapters=rules.adapters)
    having = {stage: len(left.survivors.get(stage, ())) for stage in range(rules.stages + 1)}
    if (left.lineage, left.step) == (0, 0) and not answers.distrusted:
        lacking = [s for s in answers.weightless() if left.origin or having[s]]
    else:
        lacking = [s for s, n in having.items() if n < max(1, len(answers.nodes_of(s)))]
    made = {s: decide(s, left, rules.policy, rules.strict, rules.relearn) for s in lacking}
    if rules.strict or not any(s and (s in saved or isinstance(made[s], Rebuild)) for s in made):
        return made
    return {s: d for s, d in made.items() if s in (0, *saved) or not isinstance(d, Stop)}


def order_rebuilds(
    answers: Answers,
    rebuilds: Mapping[int, Rebuild],
    lacking: Mapping[int, list[str]],
    rules: TransactionRules,
    follow: bool = False,
    relearning: float = 0.0,
) -> list[Effect]:
    """The `Sync`s that carry out these rebuilds, with their events. One node rebuilds a lost stage;
    its replicas copy from it later, so that they are identical. `lacking`: nodes without the state,
    by stage; `follow`: no node waits for them; `relearning`: seconds that it may take."""
    standing, joiners = answers.standing(), {}
    for stage, decision in rebuilds.items():
        nodes = lacking[stage]
        if decision.method in (*OWN, *ARRIVED):
            nodes = [source.node for source in decision.sources]
        joiners[stage] = nodes if decision.method in (*COPIED, "memory") else nodes[:1]
    orders = all_orders(rules.stages, rules.policy.swapped)
    guessed = [stage for stage, decision in rebuilds.items() if decision.method in INEXACT]
    together = {stage: block for block in blocks(orders, guessed) for stage in block}
    effects: list[Effect] = []
    for stage, decision in rebuilds.items():
        what_and_whence = decision.method, decision.reason, decision.sources
        sync = standing.sync(*what_and_whence, last=standing.last, follow=follow)
        if rules.relearn and stage in together:
            block = together[stage]
            having = sorted(answers.having())
            sync.relearning = relearning
            alone = len(block) == 1 and len(answers.nodes_of(stage)) == 1
            sync.goes_on = alone and not rules.policy.waits
            sync.lost.extend(
                pb.Place(node=joiners[lost_stage][0], stage=lost_stage) for lost_stage in block
            )
            sync.neighbours.extend(  # where microbatches come from and go to
                pb.Place(node=node, stage=lost_stage)
                for lost_stage in adjoining(orders, block)
                for node in having
                if answers.members[node] == lost_stage
            )
        for node in joiners[stage]:
            effects.append(order_event(node, decision))
            effects.append(answers.ballot.send(node, sync=sync))
    return name_checkpoint_givers(effects, answers) if rules.adapters else effects


def name_checkpoint_givers(effects: list[Effect], answers: Answers) -> list[Effect]:
    """Names the giver of checkpoint weights in each Sync to a node that lacks those."""
    for effect in effects:
        if not isinstance(effect, Send) or not answers.statuses[effect.to].weightless:
            continue
        stage = answers.members[effect.to]
        effect.message.sync.giver = giver(stage, answers.checkpoint_holders(stage))
    return effects


def copy_twins(answers: Answers, rules: TransactionRules) -> list[Effect]:
    """The `Sync`s to nodes that lack a twin of the next stage, with redundant computation."""
    standing = answers.standing()
    if not rules.policy.twins or (standing.lineage, standing.committed) == (0, 0):
        return []
    effects: list[Effect] = []
    for node, stage in sorted(answers.members.items()):
        next_stage = (stage + 1) % (rules.stages + 1)
        wanted = ("redundant", next_stage, standing.committed, standing.lineage)
        holdings = answers.statuses[node].holdings
        if wanted not in [(kept.kind, kept.stage, kept.step, kept.lineage) for kept in holdings]:
            sources = [
                Source(n, next_stage, standing.committed, standing.lineage)
                for n in answers.nodes_of(next_stage)
            ]
            reason = f"{node} lacks a twin of stage {next_stage}"
            sync = standing.sync("twin", reason, sources, last=standing.last)
            effects.append(answers.ballot.send(node, sync=sync))
    return effects


def order_event(node: str, decision: Rebuild) -> RebuildOrdered:
    """The event that a node is sent the `Sync` of a rebuild."""
    return RebuildOrdered(
        node=node,
        stage=decision.stage,
        method=decision.method,
        sources=tuple(source.node for source in decision.sources),
        exact=decision.exact,
        fallback=decision.fallback,
        reason=decision.reason,
    )
