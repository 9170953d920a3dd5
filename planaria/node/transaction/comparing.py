"""A commit that is heard and not applied yet: the replicas of the stage tell each other of it.

A driver that tells two replicas different things would part them. Each sends the others what the
driver has signed of the commit, and applies it when all have sent the same. Nobody waits for who
is lost, nor for long for who says nothing; what the driver says meanwhile comes after the update.
Of a driver that is gone the others may have heard something else, or nothing, so what isn't
applied by then is what its successor finds that others have applied, or never happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import Decision
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb

UNHEARD: Final = 3.0
"""Seconds that a replica has to tell of its commit; then the others go on without its word."""
Later = tuple[str, Ballot, pb.Message]
"""What a driver has said, and under which ballot."""


@dataclass
class Comparing:
    commit: pb.Commit
    own: Decision
    awaited: set[str]  # replicas that have told of no commit of this attempt
    since: float | None = None  # as of the first look at the clock
    later: list[Later] = field(default_factory=list)

    def put_off(self, peer: str, ballot: Ballot, message: pb.Message) -> None:
        """Of attempts that begin one after the other the last one counts. It begins here by the
        newest of its plans, by which others go on."""
        if message.step.HasField("begin"):
            self.later.clear()
            begin = message.step.begin
            if begin.HasField("since"):
                first = pb.Message(step=pb.Step(begin=begin))
                first.step.begin.ClearField("since")
                self.later.append((peer, Ballot.of(begin.since), first))
        self.later.append((peer, ballot, message))

    def look(self, told: Mapping[str, Decision]) -> dict[str, Decision]:
        """Notes who has told of the same one. Returns those that tell of another one."""
        of_attempt = {
            node: one
            for node in self.awaited
            if (one := told.get(node)) is not None and same_attempt(one, self.own)
        }
        self.awaited -= {node for node, one in of_attempt.items() if one.hash == self.own.hash}
        return {node: one for node, one in of_attempt.items() if one.hash != self.own.hash}

    def overdue(self, now: float) -> set[str]:
        """Who is waited for no longer."""
        self.since = now if self.since is None else self.since
        if now - self.since < UNHEARD:
            return set()
        mute, self.awaited = self.awaited, set()
        return mute


def same_attempt(one: Decision, other: Decision) -> bool:
    return (one.step, one.view, one.attempt) == (other.step, other.view, other.attempt)
