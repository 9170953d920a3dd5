"""Gathering: all members are queried. Once they have answered, the driver gets state to those
without it, or begins the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from planaria.bootstrap.awaited_saves import awaited_in_words
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import HANG, NUMBERS
from planaria.node.driver.hangs import is_last
from planaria.node.driver.joiners import FOLLOWS
from planaria.node.driver.phases import DriverPhase, Phase, Resting, Turn
from planaria.node.driver.query_answers import Answers
from planaria.node.driver.rebuilds import (
    copy_twins,
    decide_each,
    name_checkpoint_givers,
    order_rebuilds,
)
from planaria.node.driver.records import unrecorded, unwritten
from planaria.node.driver.status_validation import to_reject
from planaria.node.driver.syncing import Syncing
from planaria.node.report.events import Paused, Resuming, RolledBack, Waiting
from planaria.node.transaction.effects import Ballot, Effect, Rejoin, Send, Suspect
from planaria.node.transaction.leaving import may_have_heir
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import Resume, await_saves, resume
from planaria.recovery.facts import COPIED, Rebuild, RollBack, Source, Stop
from planaria.recovery.relearning import time_for

if TYPE_CHECKING:
    from planaria.node.driver.driver import Driver

QUERY_AGAIN = 1.0
"""Seconds before a member without an answer is queried again."""
ANSWER = 4.0
"""Seconds that a member has to answer before it is reported to the registry."""
UNRECORDED_PAUSE = 2.0
"""Seconds between two checks whether a ledger can be written again."""
UNWRITTEN_PAUSE = 0.05
"""Seconds between two checks whether the last step is in the ledger."""
REPLACED = 2.0
"""Seconds until the driver checks whether a node has been replaced."""


class Gathering(Phase):
    _kind = DriverPhase.GATHERING

    def __init__(self, driver: Driver, answers: Answers, taken_over: bool) -> None:
        """`taken_over`: whether it is the first one after another driver."""
        super().__init__(driver)
        self.answers, self.taken_over = answers, taken_over
        self.asked = self.suspected = answers.began  # when silent members were reported
        self.preparing: dict[str, float] = {}  # when a member last said that it will answer later

    def explain(self) -> str:
        unheard = ", ".join(self.answers.unheard())
        return f"{self.answers.why}; waiting for the status of {unheard}"

    def received(self, peer: str, message: pb.Message, now: float) -> Turn:
        driver, status = self.driver, message.status
        is_current = Ballot.of(message.ballot) == driver.ballot
        body = message.WhichOneof("body")
        if body == "account" and is_current:
            self.preparing[peer] = now
        if body != "status" or not is_current:
            return super().received(peer, message, now)
        self.answers.statuses[peer] = status
        if status.following:
            driver.divergence.trust(peer)  # it knows that its old state is void
        driver.hanging.hear(peer, status.hang, now)
        if status.seconds_per_microbatch:
            driver.seconds[peer] = status.seconds_per_microbatch
            driver.hanging.knows(peer)
        complete = len(self.answers.statuses) == len(self.answers.members)
        return self._resolve(now) if complete else self.stays()

    def tick(self, now: float) -> Turn:
        """Queries silent members again."""
        if now - self.asked < QUERY_AGAIN:
            return self.stays()
        driver, answers = self.driver, self.answers
        self.asked, unheard, effects = now, answers.unheard(), list[Effect]()
        if now - self.suspected >= ANSWER:
            self.suspected = now
            why = f"no answer to the driver's query for {ANSWER:.0f} s"
            hanging = driver.hanging.to_remove(driver.members, answers.statuses, now)
            effects += [
                Suspect(node, hanging[node], HANG) if node in hanging else Suspect(node, why)
                for node in unheard
                if node in hanging or now - self.preparing.get(node, -math.inf) >= ANSWER
            ]
        return self.stays([*effects, *answers.ballot.send_all(unheard, query=pb.Query())])

    # --- all members have answered: agree on the step

    def _resolve(self, now: float) -> Turn:
        """Decides by the answers which step is the run's, and what the driver does next."""
        driver, answers, rules = self.driver, self.answers, self.driver.rules
        effects = driver.divergence.settle_doubts(answers, rules, driver.standing.committed)
        verdict = to_reject(answers.statuses, driver.known_facts(), driver.divergence.distrusted)
        if verdict.parted:
            halt = pb.Halt(reason=verdict.parted, step=driver.standing.committed)
            return driver.halt(halt, now).after(effects)
        for node, why in verdict.lies.items():
            failed = pb.Failed(reason=why, accused=[node], cause=NUMBERS)
            effects += driver.accuse(driver.node, failed)
        answers.distrusted = driver.divergence.distrusted | verdict.doubted
        answers.distrusted |= self._without_part() | self._far_ahead()
        if answers.distrusted >= answers.statuses.keys():
            answers.distrusted = verdict.doubted
        driver.agree(answers)
        at = driver.standing.lineage, driver.standing.committed
        tried = {status.attempting for status in answers.statuses.values()}
        if self.taken_over and at[1] + 1 in tried:
            effects.append(driver.aborted(at[1] + 1, "its driver is gone"))
        behind, all_lost = answers.behind(), answers.all_lost(driver.view)
        if all_lost and driver.resent != at:
            driver.resent, behind = at, behind + answers.missing_one()
        if behind:
            effects += driver.tell_commit(behind)
            return self.gather(f"only some have committed step {at[1]}", now).after(effects)
        if noting := driver.to_note():
            driver.noted_again = at
            effects += driver.tell_commit(noting)
            return self.gather(f"no ledger has step {at[1]}", now).after(effects)
        without = answers.without_checkpoint() if rules.adapters else []
        if without and not driver.finished:
            return self._wait_for_origin(without).after(effects)
        if all_lost or at == (0, 0):
            saved = resume(answers.held(), rules.stages)
            if saved is not None:
                return self._resume(saved, all_lost, now).after(effects)
        if all_lost:
            return self._start_again(all_lost, now).after(effects)
        members, halt = driver.paused
        if driver.members.keys() <= members.keys() and halt.step == at[1]:
            return driver.halt(halt, now).after(effects)
        return self._sync(now).after(effects)

    def _without_part(self) -> set[str]:
        """The nodes that must only follow, since replicas can't use what they send, or they must
        go. While their stage has others, they can copy from those, and no node has to wait for
        them."""
        driver, answers = self.driver, self.answers
        if driver.is_over() or driver.rules.policy.waits or not answers.newest.committed:
            return set()
        idle, stages = driver.faults.idle, answers.members
        apart = {n for n in stages if idle.has_no_part(n) and n != driver.node}
        left = {stages[n] for n, s in answers.having().items() if not s.following}
        stay = {stages[n] for n in answers.having().keys() - apart} & left
        return {
            node
            for node in apart
            if stages[node] in stay - driver.rebuilds.stages()
            and driver.joining.failures[node] < FOLLOWS
        }

    def _far_ahead(self) -> set[str]:
        """Nodes that are to be removed and claim a state that no other node has."""
        statuses, is_to_go = self.answers.statuses, self.driver.faults.idle.is_to_go
        ages = {node: (status.lineage, status.committed) for node, status in statuses.items()}
        others = [age for node, age in ages.items() if not is_to_go(node)]
        return {n for n, age in ages.items() if is_to_go(n) and age > max(others, default=age)}

    # --- everything is lost

    def _start_again(self, all_lost: str, now: float) -> Turn:
        """Begins the run anew by the checkpoint policy, or stops it: all states are lost."""
        if not self.driver.rules.policy.checkpoints:
            reason = (
                f"everything is lost: {all_lost}; start nodes that have saves (--save-dir) of it, "
                "or a new run"
            )
            halt = pb.Halt(reason=reason, step=self.driver.standing.committed)
            return self.driver.halt(halt, now)
        if vacant := self.answers.vacant():
            return self._wait_for_nodes(vacant)
        reason = "everything is lost, and no checkpoint is whole yet: back to initial weights"
        return self._roll_back(RollBack(0, 0, reason), now)

    def _roll_back(self, to: RollBack, now: float) -> Turn:
        """Takes all stages back, by the checkpoint policy."""
        event = RolledBack(lost=self.driver.standing.committed, step=to.step, reason=to.reason)
        members = sorted(self.driver.members.items())
        sources = [Source(node, stage, to.step, to.lineage) for node, stage in members]
        return self._go_back(event, to.reason, [("checkpoint", s) for s in sources], now)

    def _resume(self, saved: Resume, why: str, now: float) -> Turn:
        """Resumes from files, the only state left to go on from: nodes with a fitting one go back
        to it, the others copy later."""
        if vacant := self.answers.vacant():
            return self._wait_for_nodes(vacant)
        reason = "; ".join(filter(None, (why, saved.reason)))
        event = Resuming(step=saved.step, exact=saved.exact, reason=reason)
        held = chain.from_iterable(saved.held.values())
        sources = [("save" if h.kind == "checkpoint" else h.kind, h.source) for h in held]
        return self._go_back(event, reason, sources, now)

    def _go_back(
        self,
        event: RolledBack | Resuming,
        reason: str,
        sources: Sequence[tuple[str, Source]],
        now: float,
    ) -> Turn:
        """Sends nodes back to states that they have themselves, each by its method."""
        driver = self.driver
        if self._has_just_failed(now):
            return self._try_later()
        driver.open_lineage(self.answers, event.step)
        effects: list[Effect] = [event]
        for method, source in sources:
            sync = driver.standing.sync(method, reason, [source])
            effects.append(driver.ballot.send(source.node, sync=sync))
        if driver.rules.adapters:
            name_checkpoint_givers(effects, self.answers)
        return self._wait_for_state(effects, now)

    # --- state for those without it

    def _sync(self, now: float) -> Turn:
        """Gets state to the members without it; begins what comes next if nobody lacks a state."""
        driver, answers, rules = self.driver, self.answers, self.driver.rules
        saved = {save.stage: save.step for save in driver.view.awaited}
        vacant, decisions = answers.vacant(), decide_each(answers, rules, saved)
        stops = {of: d for of, d in decisions.items() if isinstance(d, Stop)}
        for stage, stop in stops.items():
            if driver.finished:
                return driver.finish(now)
            if rules.strict or stage not in saved:
                halt = pb.Halt(reason=stop.reason, step=driver.standing.committed)
                return driver.halt(halt, now)
        effects = self._go_on_following(now)
        rebuilds = {of: d for of, d in decisions.items() if isinstance(d, Rebuild)}
        if driver.finished:
            rebuilds = {of: d for of, d in rebuilds.items() if d.same_weights}
        step, single = driver.standing.committed, rules.single_waits
        vacant = vacant or [*stops] or await_saves(rebuilds.values(), saved, step, single)
        if vacant:  # a later newcomer may have more; replicas need not wait for that
            rebuilds = {of: d for of, d in rebuilds.items() if d.method in COPIED}
        elif len(rebuilds) < len(decisions) and not driver.finished:
            back = next(d for d in decisions.values() if isinstance(d, RollBack))
            return self._roll_back(back, now)
        lacking = driver.joining.lacking(answers)
        for stage in self._put_off(lacking, now):
            rebuilds.pop(stage, None)
        follow = not vacant and all(self._may_follow(d, lacking) for d in rebuilds.values())
        relearning = self._time_to_relearn(now)
        syncs = order_rebuilds(answers, rebuilds, lacking, rules, follow, relearning)
        if follow:
            driver.joining.begin(syncs, answers, now)
            fetching = {effect.to for effect in syncs if isinstance(effect, Send)}
            effects, syncs = effects + syncs, []
            # They must know it before anything is committed without them.
            has_no_part = driver.faults.idle.has_no_part
            if anew := driver.divergence.distrusted.union(filter(has_no_part, fetching)):
                names = ", ".join(sorted(anew))
                return self.gather(f"{names} copies its state anew", now).after(effects)
        if not (vacant or driver.finished):
            syncs = syncs or copy_twins(answers, rules)
        if syncs and self._has_just_failed(now):
            return self._try_later().after(effects)
        if syncs:
            return self._wait_for_state(syncs, now).after(effects)
        if vacant and not driver.finished:
            if driver.is_to_rest and saved.keys().isdisjoint(vacant):
                return driver.finish(now).after(effects)
            return self._wait_for_nodes(vacant).after(effects)
        if weightless := answers.weightless():
            return self._wait_for_origin(weightless).after(effects)
        return self._go_on(now).after(effects)

    def _go_on(self, now: float) -> Turn:
        """Begins what comes next, since nobody lacks a state, unless there is a reason to wait."""
        driver, answers = self.driver, self.answers
        if node := driver.hanging.to_replace(driver.members, answers.having(), now):
            return self._replace(node, now)
        over, paused = driver.is_over(), driver.unrecorded
        ledgers = driver.ledgers.values()
        driver.unrecorded = unwritten(ledgers) if over else unrecorded(ledgers)
        if driver.unrecorded:
            driver.pause(now + (UNWRITTEN_PAUSE if over else UNRECORDED_PAUSE))
            event = [] if paused or over else [Paused(reason=driver.unrecorded)]
            return Turn([*event], Resting(driver, DriverPhase.PAUSING, driver.unrecorded))
        if now < driver.pause_until:
            return Turn([], Resting(driver, DriverPhase.PAUSING, answers.why))
        return driver.begin_next(now)

    def _go_on_following(self, now: float) -> list[Effect]:
        """Lets joiners in that have caught up; sends the last commit to those that lack it."""
        driver = self.driver
        rebuilt, over = driver.rebuilds.stages(), driver.is_over()
        unsure, entered = driver.joining.sort(self.answers, rebuilt, over, now)
        driver.rebuilds.rebuilt += [joiner.entered(n, now) for n, joiner in entered.items()]
        return [*driver.tell_commit(unsure)]

    def _put_off(self, lacking: Mapping[int, list[str]], now: float) -> set[int]:
        """Stages that no node copies yet, since they relearn; never those of leaving
        them."""
        driver = self.driver
        leaving = {stage for m in driver.view.members if m.leaving for stage in stages_of(m)}
        relearning = set() if driver.is_over() else self.answers.relearning() - leaving
        return driver.joining.put_off(lacking, relearning, now)

    def _may_follow(self, decision: Rebuild, lacking: Mapping[int, list[str]]) -> bool:
        """Whether nodes may get this rebuild while the others train. Replicas of a just rebuilt
        stage are awaited, as was its first node; with some policies, all are."""
        driver = self.driver
        tried = any(driver.joining.failures[node] >= FOLLOWS for node in lacking[decision.stage])
        new = decision.stage in driver.rebuilds.stages()
        copied = decision.method in COPIED and not driver.rules.policy.waits
        copied = copied and driver.standing.committed > 0
        copied = copied and any(s.node not in driver.hanging.why for s in decision.sources)
        return copied and not (tried or new or driver.is_over())

    def _time_to_relearn(self, now: float) -> float:
        driver, rebuilds = self.driver, self.driver.rebuilds
        stalled = now if rebuilds.stalled is None else rebuilds.stalled
        trained = 0.0 if driver.trains_since is None else stalled - driver.trains_since
        return time_for(driver.rules.relearn_seconds, max(0.0, trained), rebuilds.spent)

    # --- what the driver waits for

    def _has_just_failed(self, now: float) -> bool:
        """Whether a rebuild has failed, and the pause after that isn't over."""
        return now < self.driver.pause_until < math.inf

    def _try_later(self) -> Turn:
        why = self.answers.why
        return Turn([], Resting(self.driver, DriverPhase.PAUSING, why, again=True))

    def _wait_for_state(self, effects: list[Effect], now: float) -> Turn:
        awaited = {effect.to for effect in effects if isinstance(effect, Send)}
        for node in awaited:
            self.driver.joining.joiners.pop(node, None)
        return Turn(effects, Syncing(self.driver, self.answers, awaited, now))

    def _wait_for_nodes(self, stages: Sequence[int]) -> Turn:
        """Waits for nodes to join vacant stages, or for lost nodes that have saves."""
        why = [awaited_in_words(save for save in self.driver.view.awaited if save.stage in stages)]
        if vacant := ", ".join(map(str, self.answers.vacant())):
            why.append(f"waiting for a node to join stage {vacant}: planaria node --join ...")
        return self._wait(stages, "; ".join(filter(None, why)))

    def _wait_for_origin(self, stages: Sequence[int]) -> Turn:
        why = (
            "waiting for a node that has the checkpoint which the run begins from, for stage "
            f"{', '.join(map(str, stages))}: planaria node --join ... --model DIR"
        )
        return self._wait(stages, why)

    def _wait(self, stages: Sequence[int], why: str) -> Turn:
        waiting = Waiting(stages=tuple(stages), reason=why)
        return Turn([waiting], Resting(self.driver, DriverPhase.WAITING, why))

    def _replace(self, node: str, now: float) -> Turn:
        """Lets an heir copy the state of a stage's last node, if possible; then that node goes."""
        driver, hanging = self.driver, self.driver.hanging
        why = f"{node} of stage {driver.members[node]} is to be replaced: {hanging.why[node]}"
        driver.pause(now + REPLACED)
        effect: Effect = Suspect(node, why, HANG)
        last = is_last(node, driver.members, driver.members)
        if last and may_have_heir(driver.view, node) and hanging.heir_has_time(node, now):
            effect = driver.ballot.send(node, inquiry=pb.Inquiry(replace=why))
        elif node == driver.node:
            effect = Rejoin(why)
        return Turn([effect], Resting(driver, DriverPhase.PAUSING, why))
