"""The chain of commits: each contains the hash of the one before it and its driver's signature.

A chain belongs to one lineage. Its first commit names none: the state that a run goes back to may
have been made by a different commit at each stage. The hash of a commit covers all fields but the
signature. The signature covers step, ballot, that hash and the hash of the votes. So two signed
commits of one attempt prove to anybody that their driver is faulty.

Only some members get the commit's records, which say what became of each microbatch, and its votes
(`record_replication`). All members get the hashes of both, and the hash of the commit covers those
hashes. So it is the same with and without records and votes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from planaria.bootstrap.identity import Identity, is_message_signed
from planaria.bootstrap.registry_pb2 import Decision, Votes
from planaria.node.wire import stage_pb2 as pb


def hash_of(commit: pb.Commit) -> bytes:
    unsigned = pb.Commit()
    unsigned.CopyFrom(commit)
    unsigned.ClearField("signature")
    unsigned.ClearField("votes")
    if commit.records:
        unsigned.ClearField("microbatches")
    return hashlib.sha256(unsigned.SerializeToString(deterministic=True)).digest()


def hash_of_records(microbatches: Iterable[pb.Home]) -> bytes:
    records = pb.Commit(microbatches=microbatches)
    return hashlib.sha256(records.SerializeToString(deterministic=True)).digest()


def without_records(commit: pb.Commit) -> pb.Commit:
    bare = pb.Commit()
    bare.CopyFrom(commit)
    if commit.records:
        bare.ClearField("microbatches")
    return bare


def with_records(commit: pb.Commit, microbatches: Iterable[pb.Home]) -> pb.Commit:
    whole = pb.Commit()
    whole.CopyFrom(commit)
    whole.microbatches.extend(microbatches)
    return whole


def without_votes(commit: pb.Commit) -> pb.Commit:
    bare = pb.Commit()
    bare.CopyFrom(commit)
    bare.ClearField("votes")
    return bare


def with_votes(commit: pb.Commit, votes: Votes) -> pb.Commit:
    whole = pb.Commit()
    whole.CopyFrom(commit)
    whole.votes.CopyFrom(votes)
    return whole


def has_records(commit: pb.Commit) -> bool:
    return bool(commit.microbatches) or not commit.records


def head(last: pb.Commit, lineage: int) -> bytes:
    """The hash that the next commit of the lineage contains, after `last`; b"": it is the first."""
    return hash_of(last) if last.step and last.lineage == lineage else b""


def decision(commit: pb.Commit) -> Decision:
    """The part of a commit that its driver signs."""
    return Decision(
        step=commit.step,
        view=commit.ballot.view,
        attempt=commit.ballot.attempt,
        hash=hash_of(commit),
        signature=commit.signature,
        votes=commit.voted,
    )


def seal(commit: pb.Commit, identity: Identity, run: str) -> None:
    """Sign the commit; it must not change afterwards."""
    signed = decision(commit)
    identity.sign_message(signed, run)
    commit.signature = signed.signature


def is_sealed(decision: Decision, key: bytes, run: str) -> bool:
    return _is_sealed(decision.SerializeToString(deterministic=True), key, run)


@lru_cache(maxsize=64)
def _is_sealed(decision: bytes, key: bytes, run: str) -> bool:
    """Cached: all seats of a node receive the same decision."""
    return is_message_signed(key, Decision.FromString(decision), run)
