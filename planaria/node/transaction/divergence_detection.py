"""Replicas of a stage that differ: finds the wrong one from the digests in their votes.

Digests usually settle it. They don't if every replica's state has changed since its last update, or
if updates differ without a majority. Then `undecided` is true, and the driver queries what others
keep of the stage first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from planaria.node.wire import stage_pb2 as pb

NOBODY: Final[Mapping[str, bytes]] = MappingProxyType({})
STATE: Final = "weights or moments"
"""One digest covers both, so either may be wrong."""


class ReplicaDigest(NamedTuple):
    """A replica's report of its state and of the summed gradient."""

    applied: bytes  # digest of weights and moments right after their last change
    now: bytes  # digest of the current weights and moments
    squared_norm: float  # all non-finite values count as equal

    @classmethod
    def by(cls, ready: pb.Ready) -> ReplicaDigest:
        norm = ready.squared_norm if ready.finite else math.inf
        return cls(ready.applied or ready.digest, ready.digest, norm)


def changed(
    digests: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY
) -> set[str]:
    """Nodes whose weights or moments have changed since their last update. `accepted`: digests, by
    node, of changed ones with which the run goes on."""
    return {
        node
        for node, digest in digests.items()
        if digest.now not in (digest.applied, accepted.get(node))
    }


def undecided(digests: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY) -> bool:
    """Whether the replicas' digests leave open which weights are right."""
    if len(digests) > 1 and len({digest.now for digest in digests.values()}) == 1:
        return False
    wrong = changed(digests, accepted)
    if wrong == digests.keys():
        return True
    votes = Counter(digest.now for node, digest in digests.items() if node not in wrong)
    return 2 * max(votes.values()) <= votes.total()


def differing(
    digests: Mapping[str, ReplicaDigest],
    usual: float,
    strikes: Mapping[str, int],
    accepted: Mapping[str, bytes] = NOBODY,
    witnesses: Mapping[str, bytes] = NOBODY,
) -> dict[str, str]:
    """The wrong replicas, each with the reason; empty: all agree. At least one is always right.

    `usual`: the squared norm of the stage's last committed gradient; 0: there was none. `strikes`:
    how often each has been wrong before. `witnesses`: by node, its digest of its own computation of
    this stage from the same gradients.

    A replica whose weights changed since its last update is wrong. Among the others the majority is
    right; without one, a witness decides. Without a witness, one is believed: the one whose
    gradient is nearest to the last, if gradients differ; then the one with fewer strikes; then the
    smallest id. That is a guess, and the reason says so.
    """
    if len({(digest.now, digest.squared_norm) for digest in digests.values()}) < 2:
        return {}
    changed_nodes = changed(digests, accepted)
    wrong: dict[str, str] = {}
    remaining = dict(digests)
    if changed_nodes < digests.keys():
        reason = f"its {STATE} are not those that its last update has left"
        wrong = dict.fromkeys(sorted(changed_nodes), reason)
        remaining = {node: digest for node, digest in digests.items() if node not in changed_nodes}

    def like_the_last(node: str) -> float:
        return _distance(digests[node].squared_norm, usual)

    def unattested(node: str) -> float:
        return float(digests[node].now not in witnesses.values())

    def believed(node: str) -> tuple[int, str]:
        return strikes.get(node, 0), node

    def why(node: str) -> str:
        holders = sorted(
            other for other, digest in witnesses.items() if digest == digests[node].now
        )
        if holders:
            return f", since {holders[0]}, which keeps a twin of them, has the same"
        return ", which is a guess: nobody else can tell"

    wrong |= _outvoted(remaining, lambda digest: digest.now, STATE, unattested, believed, why)
    remaining = {node: digest for node, digest in remaining.items() if node not in wrong}
    norm = _outvoted(
        remaining,
        lambda digest: digest.squared_norm,
        "gradient",
        like_the_last,
        believed,
        lambda _: "",
    )
    return wrong | norm


def _outvoted(
    digests: Mapping[str, ReplicaDigest],
    value_of: Callable[[ReplicaDigest], Hashable],
    quantity: str,
    implausibility: Callable[[str], float],
    believed: Callable[[str], tuple[int, str]],
    why: Callable[[str], str],
) -> dict[str, str]:
    votes = Counter(value_of(digest) for digest in digests.values())
    if len(votes) < 2:
        return {}
    (most, count), *_ = votes.most_common()
    if 2 * count > len(digests):
        reason = f"its {quantity} differ from that of {count} of {len(digests)} replicas"
    else:
        order = {
            node: (-votes[value_of(digests[node])], implausibility(node), believed(node))
            for node in digests
        }
        right = min(order, key=lambda node: order[node])
        most = value_of(digests[right])
        names = ", ".join(sorted(digests))
        reason = (
            f"the {quantity} of {names} differ, there is no majority, and {right} is believed"
            f"{why(right)}"
        )
    return {node: reason for node, digest in sorted(digests.items()) if value_of(digest) != most}


def _distance(norm: float, usual: float) -> float:
    """Absolute difference of logarithms; inf: undefined."""
    if not (0 < norm < math.inf and 0 < usual < math.inf):
        return 0.0 if norm == usual else math.inf
    return abs(math.log(norm) - math.log(usual))
