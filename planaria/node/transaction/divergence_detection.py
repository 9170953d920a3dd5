"""Replicas of a stage that differ: which of them is wrong, by what each tells when it is ready.

Most often that settles it. Where nobody's weights and moments are those that its last update has
left, or updates came out differently and none has a majority, it takes what others keep of the
stage: `undecided` says so, and the driver asks before it decides.
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
"""Either may be wrong: one digest is of both."""


class ReplicaDigest(NamedTuple):
    """What a replica says of its state, and of the gradient that all replicas have summed."""

    applied: bytes  # digest of weights and moments, as they were when they had last been changed
    now: bytes  # taken anew
    squared_norm: float  # not finite: all such are alike

    @classmethod
    def by(cls, ready: pb.Ready) -> ReplicaDigest:
        norm = ready.squared_norm if ready.finite else math.inf
        return cls(ready.applied or ready.digest, ready.digest, norm)


def changed(told: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY) -> set[str]:
    """Whose weights or moments are not those that its last update has left. `accepted`: digests, by
    node, of those with which the run goes on although they have changed."""
    return {node for node, one in told.items() if one.now not in (one.applied, accepted.get(node))}


def undecided(told: Mapping[str, ReplicaDigest], accepted: Mapping[str, bytes] = NOBODY) -> bool:
    """Whether what the replicas of a stage tell doesn't say whose weights are right."""
    if len(told) > 1 and len({one.now for one in told.values()}) == 1:
        return False
    wrong = changed(told, accepted)
    if wrong == told.keys():
        return True
    votes = Counter(one.now for node, one in told.items() if node not in wrong)
    return 2 * max(votes.values()) <= votes.total()


def differing(
    told: Mapping[str, ReplicaDigest],
    usual: float,
    strikes: Mapping[str, int],
    accepted: Mapping[str, bytes] = NOBODY,
    witnesses: Mapping[str, bytes] = NOBODY,
) -> dict[str, str]:
    """The replicas that are wrong, each with the reason; empty: all agree. One is always right.

    `usual`: the squared norm of the stage's last committed gradient; 0: none was. `strikes`: how
    often each has been wrong before. `witnesses`: by node, the digest of what it has computed of
    this stage itself, from the same gradients.

    Who has other weights now than after its last update is wrong. Of the others the majority is
    right. Where there is none, a witness decides. Where there is none either, one is believed:
    whose gradient is more like the last one, if it is that which differs, who has been wrong less
    often, and then whose id is smallest. That is a guess, and the reason says so.
    """
    if len({(one.now, one.squared_norm) for one in told.values()}) < 2:
        return {}
    since = changed(told, accepted)
    wrong: dict[str, str] = {}
    left = dict(told)
    if since < told.keys():
        reason = f"its {STATE} are not those that its last update has left"
        wrong = dict.fromkeys(sorted(since), reason)
        left = {node: one for node, one in told.items() if node not in since}

    def like_the_last(node: str) -> float:
        return _distance(told[node].squared_norm, usual)

    def unattested(node: str) -> float:
        return float(told[node].now not in witnesses.values())

    def believed(node: str) -> tuple[int, str]:
        return strikes.get(node, 0), node

    def why(node: str) -> str:
        found = sorted(other for other, digest in witnesses.items() if digest == told[node].now)
        if found:
            return f", since {found[0]}, which keeps a twin of them, has the same"
        return ", which is a guess: nobody else can tell"

    wrong |= _outvoted(left, lambda one: one.now, STATE, unattested, believed, why)
    left = {node: one for node, one in left.items() if node not in wrong}
    norm = _outvoted(
        left, lambda one: one.squared_norm, "gradient", like_the_last, believed, lambda _: ""
    )
    return wrong | norm


def _outvoted(
    told: Mapping[str, ReplicaDigest],
    of: Callable[[ReplicaDigest], Hashable],
    what: str,
    unlikely: Callable[[str], float],
    believed: Callable[[str], tuple[int, str]],
    why: Callable[[str], str],
) -> dict[str, str]:
    votes = Counter(of(one) for one in told.values())
    if len(votes) < 2:
        return {}
    (most, count), *_ = votes.most_common()
    if 2 * count > len(told):
        reason = f"its {what} differ from that of {count} of {len(told)} replicas"
    else:
        order = {node: (-votes[of(told[node])], unlikely(node), believed(node)) for node in told}
        right = min(order, key=lambda node: order[node])
        most = of(told[right])
        names = ", ".join(sorted(told))
        reason = (
            f"the {what} of {names} differ, there is no majority, and {right} is believed"
            f"{why(right)}"
        )
    return {node: reason for node, one in sorted(told.items()) if of(one) != most}


def _distance(norm: float, usual: float) -> float:
    """As powers of e; inf: it can't be told."""
    if not (0 < norm < math.inf and 0 < usual < math.inf):
        return 0.0 if norm == usual else math.inf
    return abs(math.log(norm) - math.log(usual))
