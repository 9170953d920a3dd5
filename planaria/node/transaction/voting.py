"""Votes for a step: what a member signs with its `Ready`, and whether all are there. Pure.

A vote is over what its `Ready` says of the stage's gradient and state, for one attempt. The driver
takes it if it is signed by who casts it. With the commit it signs a hash of all votes, and has told
some, before anybody votes, who takes part. Those few are told the votes, keep them for a while, and
show them to whoever asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from random import Random
from typing import Final

from google.protobuf.message import DecodeError

from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import Decision, Proof, Roll, Vote, Votes
from planaria.bootstrap.votes import each, hash_of, is_cast
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb

BESIDE: Final = ("seconds_per_microbatch", "recording", "standing_out", "signature")
"""Of a `Ready`: what no vote is about."""
CHECKED: Final = 16
"""Signatures that each of those who are told the votes checks in a step, drawn by chance."""
KEPT: Final = 4
"""Steps for which votes are kept."""


def vote_of(node: str, ballot: Ballot, ready: pb.Ready) -> Vote:
    said = pb.Ready()
    said.CopyFrom(ready)
    said.DiscardUnknownFields()
    for field in BESIDE:
        said.ClearField(field)
    return Vote(
        node=node,
        view=ballot.view,
        attempt=ballot.attempt,
        ready=said.SerializeToString(deterministic=True),
        signature=ready.signature,
    )


def sign(ready: pb.Ready, node: str, ballot: Ballot, identity: Identity, run: str) -> None:
    """Nothing that the vote is about may change afterwards."""
    vote = vote_of(node, ballot, ready)
    identity.sign_message(vote, run)
    ready.signature = vote.signature


def roll_of(members: Iterable[str], ballot: Ballot, signature: bytes = b"") -> Roll:
    """Of those who take part in an attempt."""
    return Roll(
        view=ballot.view, attempt=ballot.attempt, nodes=sorted(members), signature=signature
    )


def norm(squared: Mapping[int, float]) -> float:
    """Of the whole gradient, by the squared norms of the stages'."""
    return math.sqrt(math.fsum(squared.values()))


class UnvotedError(Exception):
    """A commit that isn't what was voted for. `proof`: what its driver has signed; None: it takes
    one's word."""

    def __init__(self, why: str, proof: Proof | None = None) -> None:
        super().__init__(why)
        self.proof = proof


def check(
    commit: pb.Commit,
    shown: Proof,
    stages: Mapping[str, int],
    keys: Mapping[str, bytes],
    run: str,
    chance: Random,
) -> None:
    """Raises UnvotedError unless all who took part, at their stages, have voted for this commit,
    and what they have said is what it says. Of the signatures a few are looked at."""
    try:
        cast = list(each(shown.votes, commit.ballot.view, commit.ballot.attempt))
    except ValueError as error:
        raise UnvotedError(str(error), shown) from error
    voters = [vote.node for vote in cast]
    for node in sorted(stages.keys() - set(voters)):
        proof = about(shown, node) if shown.roll.signature else None
        raise UnvotedError(f"without the vote of {node}", proof)
    if len(voters) > len(stages):
        more = sorted(set(voters) - stages.keys()) or ["somebody who has cast another one"]
        raise UnvotedError(f"with a vote of {more[0]}, which has none")
    if why := _differ(commit, {vote.node: vote.ready for vote in cast}, stages):
        raise UnvotedError(why)
    known = [vote for vote in cast if keys.get(vote.node)]
    for vote in known if len(known) <= CHECKED else chance.sample(known, CHECKED):
        if not is_cast(vote, keys[vote.node], run):
            why = f"with a vote that {vote.node} hasn't signed"
            raise UnvotedError(why, about(shown, vote.node))


def _differ(commit: pb.Commit, votes: Mapping[str, bytes], stages: Mapping[str, int]) -> str:
    """In what the commit isn't what these have voted for; empty: in nothing."""
    try:
        said = {node: pb.Ready.FromString(ready) for node, ready in sorted(votes.items())}
    except DecodeError as error:
        return f"with a vote that can't be read: {error}"
    for node, one in said.items():
        if one.step != commit.step:
            return f"with a vote of {node} for step {one.step}"
    finite = all(one.finite for one in said.values())
    if finite == commit.skipped:
        return "as skipped, by finite gradients" if finite else "by a gradient that is not finite"
    voted = norm({stages[node]: one.squared_norm for node, one in said.items()})
    if commit.skipped or math.isclose(voted, commit.gradient_norm, rel_tol=1e-9):
        return ""
    return f"by a gradient of norm {commit.gradient_norm:g}, and what was voted for is of {voted:g}"


def about(shown: Proof, node: str) -> Proof:
    """That the vote of this node isn't there, or isn't its own."""
    proof = Proof()
    proof.CopyFrom(shown)
    proof.voter = node
    return proof


def has_voted(shown: Proof, node: str, key: bytes, run: str) -> bool:
    """Whether its vote is there, signed by it."""
    (decision,) = shown.decisions
    try:
        cast = list(each(shown.votes, decision.view, decision.attempt))
    except ValueError:
        return False
    return any(vote.node == node and is_cast(vote, key, run) for vote in cast)


def is_of(shown: Proof, decision: Decision) -> bool:
    """Whether these are the votes for that decision."""
    return [*shown.decisions] == [decision] and hash_of(shown.votes) == decision.votes


class KeptVotes:
    """Of the last commits that a member was told the votes for."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Proof] = OrderedDict()  # by hash of the commit
        self._shown: set[tuple[str, bytes]] = set()

    def keep(self, decision: Decision, votes: Votes, roll: Roll) -> Proof:
        shown = Proof(decisions=[decision], votes=votes, roll=roll)
        self._kept[decision.hash] = shown
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self._shown = {(by, commit) for by, commit in self._shown if commit in self._kept}
        return shown

    def get(self, commit: bytes) -> Proof | None:
        return self._kept.get(commit)

    def show(self, peer: str, commit: bytes) -> Proof | None:
        """Once to each, since they are much more than what it takes to ask for them."""
        if (peer, commit) in self._shown or commit not in self._kept:
            return None
        self._shown.add((peer, commit))
        return self._kept[commit]
