"""Joiners as their driver sees them: members that copy their stage's state while the others train.

`following.py` is the joiner's side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from planaria.node.driver.attempt_state import Vote
from planaria.node.driver.query_answers import Answers
from planaria.node.driver.rebuilds import rebuilt
from planaria.node.report.events import StageRebuilt
from planaria.node.transaction.effects import Effect, Send
from planaria.node.wire import stage_pb2 as pb

FOLLOWS = 2
"""Times that a joiner may try to follow before all members wait for it."""
FOLLOWED = 2.0
"""Multiple of the progress deadline after which a try is given up."""
ENTERING = 0.1
"""Seconds that a commit waits for the vote of a joiner that has caught up; doubles with each
step."""
ENTERING_SHARE = 0.05
"""Minimum of that wait, as a share of the step's duration."""
IN_VAIN = 7
"""Votes awaited in vain after which a try is given up: 12.7 s, or six steps' time."""


@dataclass
class FollowingTry:
    """One try of a joiner to copy its stage's state while the others train."""

    stage: int
    step: int  # of the state that it copies
    began: float
    method: str = "replica"
    stall: float = 0.0  # seconds without training because of it
    fetched: int = 0  # bytes that have come
    progressed: float = -math.inf  # when the newest of them came
    caught_up: pb.Synced | None = None
    vain: int = 0  # attempts that waited in vain for its vote
    failed: bool = False

    def entered(self, node: str, now: float) -> StageRebuilt:
        """The event that the joiner has entered, and trains."""
        synced = self.caught_up or pb.Synced(step=self.step, method=self.method)
        return rebuilt(node, self.stage, synced, now - self.began, self.stall)


class Joiners:
    """The members that don't train yet, and how often each failed to follow. `patience`: maximum
    seconds that one waits until its stage has relearned; `stays_out`: whether a member should go on
    following instead of entering."""

    def __init__(self, patience: float, stays_out: Callable[[str], bool]) -> None:
        self.patience, self.stays_out = patience, stays_out
        self.joiners: dict[str, FollowingTry] = {}
        self.failures: Counter[str] = Counter()
        self.waiting: dict[str, tuple[int, float]] = {}  # stage that relearns, since when

    def listed(self) -> list[pb.Joiner]:
        return [
            pb.Joiner(node=node, stage=joiner.stage, step=joiner.step)
            for node, joiner in sorted(self.joiners.items())
        ]

    # --- once all members have answered

    def sort(
        self, answers: Answers, rebuilt: Collection[int], is_over: bool, now: float
    ) -> tuple[list[str], dict[str, FollowingTry]]:
        """Sorts joiners: those with the newest state are in, those on the way to it go on, and the
        others begin again. Returns the joiners that lack the last commit, and those that are in.
        `rebuilt`: stages whose state differs from the one that joiners are on the way to."""
        before, self.joiners = self.joiners, {}
        newest, having = answers.newest, answers.having()
        alive = {answers.members[node] for node in having}.difference(rebuilt)
        unsure = []
        for node, status in answers.statuses.items():
            stage, joiner = answers.members[node], before.get(node)
            if joiner is None or joiner.step != status.following:
                joiner = FollowingTry(stage, status.following, now)
            missed = newest.committed - status.heard
            astray = (status.lineage, status.committed) == (newest.lineage, newest.committed)
            astray = astray and not self.stays_out(node)
            on_the_way = status.following and status.following_lineage == newest.lineage
            fed = on_the_way and stage in alive and missed in (0, 1)
            if node in having or astray or not fed or joiner.failed or is_over:
                continue
            if missed:
                unsure.append(node)
            self.joiners[node] = joiner
        return unsure, {node: before[node] for node in having if node in before}

    def lacking(self, answers: Answers) -> dict[int, list[str]]:
        """Members without the newest state that don't follow either, by stage."""
        on_the_way = answers.having().keys() | self.joiners.keys()
        return {
            stage: [node for node in answers.nodes_of(stage) if node not in on_the_way]
            for stage in range(answers.stages + 1)
        }

    def put_off(
        self, lacking: Mapping[int, Collection[str]], relearning: Collection[int], now: float
    ) -> set[int]:
        """The relearning stages that no member copies yet, because that would end the relearning.
        `lacking`: members without the state, by stage."""
        before, self.waiting = self.waiting, {}
        stages: set[int] = set()
        for stage in relearning:
            waiting = {node: before.get(node, (stage, now)) for node in lacking[stage]}
            if waiting and all(now - since < self.patience for _, since in waiting.values()):
                self.waiting |= waiting
                stages.add(stage)
        return stages

    def no_longer_wait(self, relearning: Collection[int], now: float) -> list[str]:
        """The waiting members that may get their state now, since their stage relearns no more."""
        return [
            node
            for node, (stage, since) in self.waiting.items()
            if stage not in relearning or now - since >= self.patience
        ]

    def begin(self, syncs: list[Effect], answers: Answers, now: float) -> None:
        """Begins tries of members that are sent a `Sync` to follow; all have waited for them."""
        for send in [effect for effect in syncs if isinstance(effect, Send)]:
            stage, sync = answers.members[send.to], send.message.sync
            waited = now - answers.began
            self.joiners[send.to] = FollowingTry(stage, sync.step, now, sync.method, waited)

    # --- while the others train

    def fetches(self, node: str, fetched: int, now: float) -> None:
        """Notes how many bytes of its state a member has; few in a long time are no progress."""
        joiner = self.joiners.get(node)
        if joiner is not None and fetched > joiner.fetched:
            joiner.fetched, joiner.progressed = fetched, now

    def caught_up(self) -> dict[str, FollowingTry]:
        return {
            node: joiner
            for node, joiner in self.joiners.items()
            if joiner.caught_up is not None and not self.stays_out(node)
        }

    def may_enter(self, vote: Vote) -> list[tuple[str, FollowingTry]]:
        """Joiners that have voted, and may enter with the commit."""
        joiners = self.joiners.items()
        return [(n, j) for n, j in joiners if n in vote.joiners and not self.stays_out(n)]

    def give_up(self, node: str) -> bool:
        """Gives up a joiner's try; whether it hadn't been given up before."""
        joiner = self.joiners[node]
        if joiner.failed:
            return False
        joiner.failed, joiner.caught_up = True, None
        self.failures[node] += 1
        return True

    def hopeless(self, now: float, limit: float) -> dict[str, str]:
        """The joiners that take longer than `limit` seconds, or are awaited in vain; and why."""
        reasons: dict[str, str] = {}
        for node, joiner in self.joiners.items():
            if joiner.vain >= IN_VAIN:
                reasons[node] = f"its vote was missing {IN_VAIN} times"
            elif now - max(joiner.began, joiner.progressed) >= limit and not (
                joiner.caught_up is not None and self.stays_out(node)
            ):
                reasons[node] = f"it took more than {limit:.0f} s"
        return reasons

    def must_wait(self, vote: Vote, began: float, now: float) -> bool:
        """Whether the commit waits for joiners' votes; if not, counts the wait as theirs. `began`:
        when the attempt did."""
        entering = self.caught_up()
        late = [joiner for node, joiner in entering.items() if node not in vote.joiners]
        usual = max(ENTERING, ENTERING_SHARE * (vote.complete - began))
        waited = now - vote.complete
        if any(waited < usual * 2.0**joiner.vain for joiner in late):
            return True
        for joiner in entering.values():
            joiner.stall += waited
        for joiner in late:
            joiner.vain += 1
        return False
