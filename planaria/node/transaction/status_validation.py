"""Validates each member's `Status` against what the others know. Pure.

A step is committed when all training members have voted for it. So a training member without a vote
for a step knows that it wasn't committed, and a driver knows all commits of its time. A `Status`
with an unknown commit is a lie, and the run goes on without it.

If others deny that they voted for a member's commit, the votes may be asked for. If those are
valid, no provable lie exists; if not, the driver lied. The majority decides which.

Where records of one commit differ, signatures show the liar: a member with one that its driver
hasn't signed, or the driver that signed two. In the second case no member has lied, and still the
run goes on from one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import Member, Proof
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.voting import about, has_voted, is_of
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chain import decision, hash_of, is_sealed
from planaria.node.wire.naming import node_of

Age = tuple[int, int]
"""Lineage and committed step."""
LINEAGES: Final = 16
"""Limit of lineages that the run may have opened without a survivor that knows."""


@dataclass(frozen=True)
class KnownFacts:
    """The validating driver, and what it knows without trusting others."""

    seat: str
    registered: Age  # the newest that the registry knew at the view
    decided: Age | None = (
        None  # the newest that it has decided itself; None: it has just taken over
    )
    run: str = ""
    drivers: Mapping[int, Member] = field(default_factory=dict)  # drivers, by view
    keys: Mapping[str, bytes] = field(default_factory=dict)  # of members

    def has_signed(self, commit: pb.Commit) -> bool:
        """Whether the driver of the commit's view signed it; False if that driver is unknown."""
        driver = self.drivers.get(commit.ballot.view)
        return driver is not None and is_sealed(decision(commit), driver.key, self.run)


@dataclass
class StatusVerdict:
    lies: dict[str, str] = field(default_factory=dict)  # why the claim is impossible
    unproven: set[str] = field(default_factory=set)
    """Claims that may be true, but from which no member can go on."""
    proofs: dict[str, Proof] = field(default_factory=dict)
    """Proofs against drivers that signed two commits of one attempt, or one without its votes."""
    to_show: bool = False
    """Whether votes must be examined first: their holders haven't lied until then."""

    @property
    def doubted(self) -> set[str]:
        return self.unproven | self.lies.keys()


def examine(
    statuses: Mapping[str, pb.Status], witness: KnownFacts, distrusted: Collection[str] = ()
) -> StatusVerdict:
    """The answers to reject. `distrusted`: members that don't count anyway."""
    verdict = StatusVerdict()
    believed = {node: one for node, one in statuses.items() if node not in distrusted}
    while believed:
        newest = max(map(_age, believed.values()))
        groups: dict[Ballot, set[str]] = {}
        for node, one in believed.items():
            if _age(one) == newest and one.committed:
                groups.setdefault(Ballot.of(one.last.ballot), set()).add(node)
        for ballot, claimants in groups.items():
            if witness.seat not in claimants:
                _judge(believed, claimants, (newest, ballot), witness, verdict)
            _compare(believed, claimants - verdict.doubted, witness, verdict)
        if not verdict.doubted & believed.keys():
            break
        believed = {node: one for node, one in believed.items() if node not in verdict.doubted}
    return verdict


def _judge(
    statuses: Mapping[str, pb.Status],
    claimants: Collection[str],
    claim: tuple[Age, Ballot],
    witness: KnownFacts,
    verdict: StatusVerdict,
) -> None:
    """Checks whether that commit is possible."""
    (lineage, step), ballot = claim
    others = {node: one for node, one in statuses.items() if node not in claimants}
    before = [one.lineage for one in others.values() if one.trained]
    what = f"it says that it has step {step} of lineage {lineage}"
    if witness.decided is not None:
        if (lineage, step) > witness.decided:
            why = f"{what}; what was committed last is step {witness.decided[1]}"
            verdict.lies |= dict.fromkeys(claimants, why)
    elif before and lineage > max(before):  # its opener may have died then
        most = max(*before, witness.registered[0])
        if lineage > most + LINEAGES:
            verdict.lies |= dict.fromkeys(claimants, f"{what}; others know of {most}")
        else:
            verdict.unproven |= set(claimants)
    else:
        against = [n for n, one in others.items() if _denies(one, claim)]
        in_favour = [n for n, one in others.items() if _voted(one, claim)] + [*claimants]
        signed = {node for node in claimants if against and witness.has_signed(statuses[node].last)}
        if (shown := _shown(statuses, signed)) is not None:
            _count(shown, against, witness, verdict)
        verdict.to_show = verdict.to_show or (bool(signed) and shown is None)
        if not _stands(in_favour, against, statuses, step, witness, shown is not None):
            deniers = ", ".join(sorted(against))
            why = f"{what}, by attempt {ballot.attempt} of view {ballot.view}, for which {deniers}"
            lies = claimants if shown is None else set(claimants) - signed
            verdict.lies |= dict.fromkeys(lies, f"{why} would have had to vote")
            verdict.unproven |= set(claimants) - verdict.lies.keys()


def _shown(statuses: Mapping[str, pb.Status], claimants: Collection[str]) -> Proof | None:
    """The votes for the claimants' commit, if one of them sent them."""
    for node in sorted(claimants):
        if is_of(statuses[node].votes, decision(statuses[node].last)):
            return statuses[node].votes
    return None


def _count(
    shown: Proof, against: Collection[str], witness: KnownFacts, verdict: StatusVerdict
) -> None:
    """Checks whether the members that deny a vote have cast it. If not, their driver lied."""
    (told,) = shown.decisions
    for node in sorted(against):
        key = witness.keys.get(node, b"")
        if key and not has_voted(shown, node, key, witness.run):
            verdict.proofs[witness.drivers[told.view].node] = about(shown, node)


def _stands(
    in_favour: Collection[str],
    against: Collection[str],
    statuses: Mapping[str, pb.Status],
    step: int,
    witness: KnownFacts,
    shown: bool,
) -> bool:
    """Whether a claim stands. The validating driver believes itself, unless votes are shown and
    more nodes support it. On a tie, shown votes decide, or the distance to the registry's step."""
    if not against or witness.seat in in_favour:
        return True
    yes, no = ({node_of(seat) for seat in seats} for seats in (in_favour, against))
    if witness.seat in against:
        return shown and len(yes) > len(no)
    if shown or len(yes) != len(no):
        return len(yes) >= len(no)
    other = max(statuses[node].committed for node in against)
    return abs(step - witness.registered[1]) <= abs(other - witness.registered[1])


def _compare(
    statuses: Mapping[str, pb.Status],
    claimants: Collection[str],
    witness: KnownFacts,
    verdict: StatusVerdict,
) -> None:
    """Checks that all members have the same record of a commit. A commit that a run went back to
    may have a different one at each stage."""
    last = {node: statuses[node].last for node in sorted(claimants)}
    if all(one.lineage != statuses[node].lineage for node, one in last.items()):
        return
    records = {node: hash_of(one) + one.signature for node, one in last.items()}
    if len(set(records.values())) < 2:
        return
    signed = {node: decision(one) for node, one in last.items() if witness.has_signed(one)}
    for node in last.keys() - signed.keys() - {witness.seat} if signed else ():
        if statuses[node].trained:  # else it would have refused it
            step = last[node].step
            verdict.lies[node] = f"its record of the commit of step {step} isn't its driver's"
    for other in signed.values():
        one = next(iter(signed.values()))
        if other.hash != one.hash:
            proof = Proof(decisions=[one, other])
            verdict.proofs[witness.drivers[one.view].node] = proof
    believed = signed.keys() or records.keys()
    votes = Counter(records[node] for node in believed)
    most = max(votes, key=lambda record: (votes[record], record))
    right = records[witness.seat] if witness.seat in believed else most
    differing = {node for node, record in records.items() if record != right}
    verdict.unproven |= differing - verdict.lies.keys()


def _voted(status: pb.Status, claim: tuple[Age, Ballot]) -> bool:
    """Whether it knows the commit, or was ready for it."""
    (lineage, step), ballot = claim
    ready = Ballot.of(status.ready_ballot) == ballot and status.ready == step
    heard = (status.following_lineage, status.heard) == (lineage, step) and status.following > 0
    return (ready and _age(status) == (lineage, step - 1)) or heard


def _denies(status: pb.Status, claim: tuple[Age, Ballot]) -> bool:
    (lineage, step), _ = claim
    older = status.lineage == lineage and status.committed < step
    return status.trained and older and not _voted(status, claim)


def _age(status: pb.Status) -> Age:
    return status.lineage, status.committed
