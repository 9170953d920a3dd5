"""The chain of commits: each contains the hash of the one before it and its driver's signature.

A chain belongs to one lineage. Its first commit names none: the state that a run goes back to may
have been made by a different commit at each stage. The hash of a commit covers all fields but the
signature. The driver signs that hash.

Only some members get the commit's records, which say what became of each microbatch
(`driver/records.py`). All members get the hash of the records, and the hash of the commit covers
it. So it is the same with and without records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from planaria.bootstrap.identity import Identity, is_signed
from planaria.node.wire import stage_pb2 as pb

PURPOSE: Final = "commit"  # of the signature


def hash_of(commit: pb.Commit) -> bytes:
    """The hash of a commit without its signature, the same with and without its records."""
    unsigned = without_records(commit)
    unsigned.ClearField("signature")
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


def has_records(commit: pb.Commit) -> bool:
    return bool(commit.microbatches) or not commit.records


def head(last: pb.Commit, lineage: int) -> bytes:
    """The hash that the next commit of the lineage contains, after `last`; b"": it is the first."""
    return hash_of(last) if last.step and last.lineage == lineage else b""


def seal(commit: pb.Commit, identity: Identity, run: str) -> None:
    """Sign the commit; it must not change afterwards."""
    commit.signature = identity.sign(PURPOSE, run.encode(), hash_of(commit))


def is_sealed(commit: pb.Commit, key: bytes, run: str) -> bool:
    """Whether the key has signed the commit, for this run."""
    return _is_sealed(hash_of(commit), commit.signature, key, run)


@lru_cache(maxsize=64)
def _is_sealed(commit: bytes, signature: bytes, key: bytes, run: str) -> bool:
    """Whether the key has signed a commit's hash. Cached: all seats of a node receive it."""
    return is_signed(key, signature, PURPOSE, run.encode(), commit)
