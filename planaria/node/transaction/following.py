"""A joiner's state while it follows: it copies a state while the others train.

Between the state's step and the newest one lie commits, which the driver sends in order. A replica
of the stage, the joiner's *feeder*, sends the reduced gradient of each attempt. A commit is applied
when its gradient has arrived. Gradients of uncommitted attempts are dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from planaria.node.transaction.commits import entering
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb

NOBODY = ""
"""Stands for the feeder of a gradient that won't come."""


def feeders(begin: pb.Begin) -> dict[str, str]:
    """The feeders of the attempt's reduced gradient: joiner -> replica of its stage."""
    feeder_of: dict[str, str] = {}
    for stage in {joiner.stage for joiner in begin.joining}:
        replicas = sorted(place.node for place in begin.members if place.stage == stage)
        joiners = sorted(joiner.node for joiner in begin.joining if joiner.stage == stage)
        for i, joiner in enumerate(joiners):
            feeder_of[joiner] = replicas[i % len(replicas)] if replicas else NOBODY
    return feeder_of


@dataclass
class FollowingJoiner:
    """A joiner's way from the state of `step` to the newest one."""

    ballot: Ballot  # of the Sync that began it
    step: int
    heard: int  # step of the newest commit received: no earlier one is missing
    state: pb.Synced | None = None  # how the state came, once it is in place
    caught_up: bool = False  # whether the driver knows that it has caught up
    attempt: tuple[Ballot, int] = (NEVER, 0)  # the newest attempt begun, and its step
    vote: Ballot = NEVER  # the attempt after which the driver would let it enter
    commits: deque[pb.Commit] = field(default_factory=deque)  # not applied yet
    gradients: set[Ballot] = field(default_factory=set)  # that have arrived
    feeders: dict[Ballot, str] = field(default_factory=dict)  # by attempt, until it is here

    def begun(self, ballot: Ballot, begin: pb.Begin, node: str) -> None:
        """Notes an attempt of the others, and who feeds `node` its gradient, unless that has come
        before: it takes another link than the driver's messages."""
        self.attempt = ballot, begin.step
        if ballot not in self.gradients:
            self.feeders.setdefault(ballot, feeders(begin).get(node, NOBODY))

    def came(self, ballot: Ballot, feeder: str) -> None:
        """Notes that an attempt's gradient has arrived. Links keep order, so the feeder's earlier
        ones have arrived, too, or are lost."""
        for earlier, by in self.feeders.items():
            if by == feeder and earlier < ballot:
                self.feeders[earlier] = NOBODY
        self.feeders.pop(ballot, None)
        self.gradients.add(ballot)

    def missed(self, ballot: Ballot) -> None:
        """Notes that an attempt's gradient was dropped: too many wait."""
        self.feeders[ballot] = NOBODY

    def lost(self, peer: str) -> None:
        """Notes that the gradients that `peer` feeds won't come."""
        self.feeders = {b: NOBODY if by == peer else by for b, by in self.feeders.items()}

    def fault_in(self, commit: pb.Commit, stage: int) -> str:
        """Why the joiner can't go on with this commit; empty: it can."""
        if commit.step > self.heard + 1:
            return f"the commit of step {self.heard + 1} was missed"
        if entering(commit, stage):
            return f"step {commit.step} contains relearning updates that this node lacks"
        return ""

    def hear(self, commit: pb.Commit) -> None:
        """Adds a received commit, the one after `heard`."""
        self.commits.append(commit)
        self.heard = commit.step

    def doubt(self) -> None:
        """Drops the newest commit received, unless it is applied: by a new ballot, it may be void.
        Earlier ones are certain: all members had applied them before they voted for the newest."""
        self.vote = NEVER
        if self.commits:
            self.heard = self.commits.pop().step - 1

    def due(self) -> pb.Commit | None:
        """The next commit that the joiner can apply, since its gradient has arrived; None: none."""
        commit = self.commits[0] if self.commits else None
        return commit if commit and Ballot.of(commit.ballot) in self.gradients else None

    def applied(self, commit: pb.Commit) -> None:
        """Drops the gradients and feeders up to a commit that was applied."""
        if self.commits:
            self.commits.popleft()
        self.heard = max(self.heard, commit.step)
        ballot = Ballot.of(commit.ballot)
        self.gradients = {other for other in self.gradients if other > ballot}
        self.feeders = {other: by for other, by in self.feeders.items() if other > ballot}

    def may_vote(self, committed: int) -> bool:
        """Whether the joiner lacks only the commit of the attempt that it is asked to vote for."""
        ballot, step = self.attempt
        ready = not self.commits and step == committed + 1
        return ready and ballot == self.vote and ballot in self.gradients

    def broken(self) -> str:
        """Why the joiner can't go on following; empty: it can."""
        for commit in self.commits:
            if self.feeders.get(Ballot.of(commit.ballot)) == NOBODY:
                return f"the gradient of step {commit.step} won't come"
        return ""
