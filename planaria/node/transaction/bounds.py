"""Range checks of messages between members and their driver.

A number out of range is its sender's failure. Valid numbers are finite, not negative, and no larger
than the window, the run or float32 allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from planaria.bootstrap.registry_pb2 import Cause
from planaria.node.transaction.commits import has_for
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of_records

MOST_STEPS: Final = 1 << 53
"""Limit of steps, lineages, attempts and bytes: integers that a double represents exactly."""
MOST_SENT: Final = 1 << 52
"""Limit of these in messages to the driver. The driver sends the value plus one, which must stay
below the other limit."""
LARGEST: Final = 3.5e38
"""Largest float32, and so the largest loss."""
LARGEST_NORM: Final = 1e90
"""Largest squared norm of a gradient: 10^12 values, each the largest float32."""
LONGEST: Final = 1e7
"""Maximum seconds of any duration that a node measures: four months."""
HASH: Final = 64
"""Maximum bytes of a digest."""
LONGEST_WORDS: Final = 500
"""Maximum characters of a node's text about itself."""
LISTED: Final = 4096
"""Maximum holdings or sources in a message."""
UNLIKE: Final = 2.0
"""Relative difference of unrelated results."""


def fault_to_driver(message: pb.Message, rules: TransactionRules) -> str:
    """What is out of range in a member's message to its driver; empty: nothing."""
    match message.WhichOneof("body"):
        case "status":
            return _status(message.status, rules)
        case "synced":
            return _synced(message.synced)
        case "home":
            return _home(message.home, rules)
        case "scored":
            losses = message.scored.microbatches
            if len(losses) > rules.microbatches:
                return f"{len(losses)} losses; a step has {rules.microbatches} microbatches"
            return _first(_home(loss, rules) for loss in losses)
        case "ready":
            return _ready(message.ready)
        case "account":
            return _account(message.account, rules)
        case "failed":
            failed = message.failed
            if len(failed.accused) > LISTED:
                return f"{len(failed.accused)} accused nodes; at most {LISTED}"
            return _words("a failure's reason", failed.reason) or _cause(failed.cause)
        case "cut":
            return _words("a complaint", message.cut.reason) or _cause(message.cut.cause)
        case "stale":
            return _count("attempt", message.ballot.attempt)
        case "compared":
            return _within("difference", message.compared.difference, UNLIKE)
    return ""


def fault_to_member(message: pb.Message, stage: int) -> str:
    """What is out of range in a driver's message to a member at `stage`; empty: nothing."""
    fault = _count("attempt", message.ballot.attempt) or _count("view", message.ballot.view)
    match message.WhichOneof("body"):
        case "step":
            step = message.step
            if step.HasField("commit"):
                fault = fault or _commit(step.commit) or _to_apply(step.commit, stage)
            return fault or _count("step", step.begin.step)
        case "sync":
            sync = message.sync
            fault = fault or _count("step", sync.step) or _count("lineage", sync.lineage)
            return fault or _seconds("time for relearning", sync.relearning)
    return fault


def _status(status: pb.Status, rules: TransactionRules) -> str:
    counts = {
        "committed step": status.committed,
        "ready step": status.ready,
        "ready attempt": status.ready_ballot.attempt,
        "ready view": status.ready_ballot.view,
        "boosted step": status.boosted_at,
        "attempted step": status.attempting,
        "lineage": status.lineage,
        "followed step": status.following,
        "followed lineage": status.following_lineage,
        "heard step": status.heard,
    }
    if len(status.holdings) > LISTED:
        return f"{len(status.holdings)} holdings; at most {LISTED}"
    return (
        _first(_count(name, count, MOST_SENT) for name, count in counts.items())
        or _seconds("seconds per microbatch", status.seconds_per_microbatch)
        or _words("a hang's reason", status.hang)
        or _hash("digest", status.digest)
        or _commit(status.last)
        or _first(_holding(holding, rules) for holding in status.holdings)
    )


def _holding(holding: pb.Holding, rules: TransactionRules) -> str:
    if holding.stage > rules.stages:
        return f"a holding of stage {holding.stage}; the last stage is {rules.stages}"
    counts = _count("held step", holding.step) or _count("held lineage", holding.lineage, MOST_SENT)
    oldest = _count("oldest step", holding.oldest_step)
    mean = _within("mean step", holding.mean_step, MOST_STEPS)
    return counts or oldest or mean or _hash("digest of a holding", holding.digest)


def _synced(synced: pb.Synced) -> str:
    if len(synced.sources) > LISTED:
        return f"{len(synced.sources)} sources; at most {LISTED}"
    return (
        _count("step", synced.step)
        or _count("number of bytes", synced.fetched_bytes)
        or _seconds("seconds", synced.seconds)
        or _hash("digest", synced.digest)
        or _seconds("seconds of relearning", synced.relearned.seconds)
    )


def _home(home: pb.Home, rules: TransactionRules) -> str:
    most = max(rules.microbatches, rules.validation_microbatches)
    if home.microbatch >= most:
        return f"a result of microbatch {home.microbatch}; a step has {most}"
    if home.tokens > rules.tokens:
        return f"{home.tokens} tokens in a microbatch of {rules.tokens}"
    if home.samples > rules.tokens:
        return f"{home.samples} samples in a microbatch of {rules.tokens} tokens"
    if home.loss and not home.tokens:
        return f"a loss of {home.loss} without tokens"
    finite = home.loss < math.inf  # what isn't may be the model's fault
    loss = _within("loss", home.loss, LARGEST) if finite else ""
    return loss or _hash("hash of the samples", home.samples_hash)


def _account(account: pb.Account, rules: TransactionRules) -> str:
    most = 4 * max(rules.microbatches, rules.validation_microbatches)
    if len(account.done) > most:
        return f"{len(account.done)} finished passes; at most {most}"
    if account.fetched > rules.state_bytes:
        return f"{account.fetched} bytes of a state; at most {rules.state_bytes}"
    return _words("a hang's reason", account.hang)


def _ready(ready: pb.Ready) -> str:
    if ready.finite != math.isfinite(ready.squared_norm):
        described = "finite" if ready.finite else "not finite"
        return f"its gradient is {described}, with a squared norm of {ready.squared_norm}"
    return (
        _count("step", ready.step)
        or (_within("squared norm", ready.squared_norm, LARGEST_NORM) if ready.finite else "")
        or _seconds("seconds per microbatch", ready.seconds_per_microbatch)
        or _hash("digest", ready.digest)
        or _hash("digest", ready.applied)
    )


def _commit(commit: pb.Commit) -> str:
    scales = [*commit.clip_scale, *commit.lr_scale]
    return (
        _count("committed step", commit.step)
        or _count("attempt of a commit", commit.ballot.attempt)
        or _count("number of tokens", commit.tokens)
        or _count("lineage of a commit", commit.lineage)
        or _hash("hash of a commit", commit.previous)
        or _hash("signature", commit.signature)
        or _records(commit)
        or _first(_within("scale", scale, LARGEST) for scale in scales)
        or _first(_within("score", each.score, LARGEST) for each in commit.suspicions)
        or _first(_within("usual norm", norm, LARGEST_NORM) for norm in commit.usual_norms)
        or _seconds("seconds of a step", commit.seconds)
        or ("" if commit.skipped else _within("gradient norm", commit.gradient_norm, LARGEST_NORM))
    )


def _records(commit: pb.Commit) -> str:
    has_records = commit.records and commit.microbatches
    if has_records and hash_of_records(commit.microbatches) != commit.records:
        return f"records of the commit of step {commit.step} that aren't those of its hash"
    return _hash("hash of records", commit.records)


def _to_apply(commit: pb.Commit, stage: int) -> str:
    scaled = has_for(commit.clip_scale, stage) and has_for(commit.lr_scale, stage)
    if not (commit.skipped or scaled):
        return f"the commit of step {commit.step} has no scale for stage {stage}"
    return ""


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")


def _count(name: str, count: int, most: int = MOST_STEPS) -> str:
    return f"{name} {count}; at most {most}" if count > most else ""


def _words(name: str, text: str) -> str:
    long = len(text) > LONGEST_WORDS
    return f"{name} of {len(text)} characters; at most {LONGEST_WORDS}" if long else ""


def _cause(cause: int) -> str:
    return "" if cause in Cause.values() else f"an unknown cause {cause}"


def _seconds(name: str, seconds: float) -> str:
    return _within(name, seconds, LONGEST)


def _within(name: str, value: float, most: float) -> str:
    return "" if 0 <= value <= most else f"a {name} of {value}"


def _hash(name: str, value: bytes) -> str:
    return f"a {name} of {len(value)} bytes" if len(value) > HASH else ""
