"""Votes, which members sign when ready for a step, and proof of a missing one. Pure.

A driver decides when all participants have voted. It signs a hash of the votes with its decision,
and, before the vote, a roll of the participants. So its own signatures prove a decision with a
forged or missing vote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from planaria.bootstrap.identity import SIGNATURE_BYTES, is_message_signed
from planaria.bootstrap.registry_pb2 import Alike, Decision, Proof, Roll, Vote, Votes


def gathered(cast: Iterable[Vote]) -> Votes:
    """The votes of one attempt, in canonical order."""
    by_content: dict[bytes, list[Vote]] = {}
    for vote in sorted(cast, key=lambda vote: vote.node):
        by_content.setdefault(vote.ready, []).append(vote)
    return Votes(
        alike=[
            Alike(
                ready=ready,
                nodes=[vote.node for vote in votes],
                signatures=b"".join(vote.signature.ljust(SIGNATURE_BYTES, b"\0") for vote in votes),
            )
            for ready, votes in by_content.items()
        ]
    )


def each(votes: Votes, view: int, attempt: int) -> Iterator[Vote]:
    """The single votes. Raises ValueError if the numbers of nodes and signatures differ."""
    for alike in votes.alike:
        if len(alike.signatures) != SIGNATURE_BYTES * len(alike.nodes):
            raise ValueError(
                f"{len(alike.nodes)} votes, {len(alike.signatures)} bytes of signatures"
            )
        for number, node in enumerate(alike.nodes):
            signature = alike.signatures[SIGNATURE_BYTES * number :][:SIGNATURE_BYTES]
            ready = alike.ready
            yield Vote(node=node, view=view, attempt=attempt, ready=ready, signature=signature)


def hash_of(votes: Votes) -> bytes:
    return hashlib.sha256(votes.SerializeToString(deterministic=True)).digest()


def is_cast(vote: Vote, key: bytes, run: str) -> bool:
    """Whether the key has signed this vote."""
    return _is_cast(vote.SerializeToString(deterministic=True), key, run)


@lru_cache(maxsize=4096)
def _is_cast(vote: bytes, key: bytes, run: str) -> bool:
    """Cached, since a driver and the holders of votes may share a machine."""
    return is_message_signed(key, Vote.FromString(vote), run)


def is_without_vote(proof: Proof, key: bytes, keys: Mapping[str, bytes], run: str) -> bool:
    """Whether the proof shows that the key's holder decided without a participant's vote.
    `keys`: of members, by node."""
    if len(proof.decisions) != 1:
        return False
    (decision,) = proof.decisions
    if decision.votes != hash_of(proof.votes) or not is_message_signed(key, decision, run):
        return False
    try:
        cast = list(each(proof.votes, decision.view, decision.attempt))
    except ValueError:
        return True  # the signed votes are malformed
    of_voter = [vote for vote in cast if vote.node == proof.voter]
    if not of_voter:
        return _is_on(proof.roll, proof.voter, decision) and is_message_signed(key, proof.roll, run)
    voter = keys.get(proof.voter.partition("/")[0], b"")
    return voter != b"" and not any(is_cast(vote, voter, run) for vote in of_voter)


def _is_on(roll: Roll, voter: str, decision: Decision) -> bool:
    of_attempt = (roll.view, roll.attempt) == (decision.view, decision.attempt)
    return of_attempt and voter in roll.nodes
