"""Validates each member's `Status` against what the others know. Pure.

A commit needs its driver's signature and the vote of every training member. So a status that is
ahead of the others counts only with a commit that the driver of its view has signed, and that
follows the commit which the others have. A driver also knows all commits of its own time. If it
doesn't know the driver of that view, the members with and without a vote for the commit are
counted. The run goes on without members that lie.

Two commits of one attempt, both signed by its driver, mean that the driver is faulty. No member has
lied then, and nobody can say which commit is right: the run stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import Member
from planaria.node.driver.query_answers import age_of
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of, head, is_sealed
from planaria.node.wire.seat_names import node_of

Age = tuple[int, int]
"""Lineage and committed step."""
LINEAGES: Final = 16
"""Limit of lineages that the run may have opened without a survivor that knows."""
NAMED: Final = 3
"""Members named in a sentence for each commit."""
UNSIGNED: Final = "its record of the commit of step {} lacks the driver's signature"


@dataclass(frozen=True)
class KnownFacts:
    """The validating driver, and what it knows without trusting others."""

    seat: str
    registered: Age  # the newest that the registry knew at the view
    decided: Age | None = None  # the newest that it decided itself; None: it has just taken over
    run: str = ""
    drivers: Mapping[int, Member] = field(default_factory=dict)  # drivers, by view

    def has_signed(self, commit: pb.Commit) -> bool | None:
        """Whether the driver of the commit's view signed it; None: that driver is unknown."""
        driver = self.drivers.get(commit.ballot.view)
        if driver is None or not driver.key:
            return None
        return is_sealed(commit, driver.key, self.run)


@dataclass
class StatusVerdict:
    """Which members' statuses don't count, and why the run must stop, if it must."""

    lies: dict[str, str] = field(default_factory=dict)  # why the claim is impossible
    unproven: set[str] = field(default_factory=set)
    """Claims that may be true, but from which no member can go on."""
    parted: str = ""
    """Why the run must stop: members have applied different signed commits; empty: they haven't."""

    @property
    def doubted(self) -> set[str]:
        return self.unproven | self.lies.keys()


def to_reject(
    statuses: Mapping[str, pb.Status], known: KnownFacts, distrusted: Collection[str] = ()
) -> StatusVerdict:
    """Statuses to reject, since others contradict them. `distrusted`: members that are left out
    beforehand."""
    verdict = StatusVerdict()
    believed = {node: status for node, status in statuses.items() if node not in distrusted}
    while believed:
        newest = max(map(age_of, believed.values()))
        groups: dict[Ballot, set[str]] = {}
        for node, status in believed.items():
            if age_of(status) == newest and status.committed:
                groups.setdefault(Ballot.of(status.last.ballot), set()).add(node)
        for ballot, claimants in groups.items():
            if known.seat not in claimants:
                _judge(believed, claimants, (newest, ballot), known, verdict)
            _compare(believed, claimants - verdict.doubted, known, verdict)
            _compare_previous(believed, claimants - verdict.doubted, known, verdict)
        if not verdict.doubted & believed.keys():
            break
        believed = {
            node: status for node, status in believed.items() if node not in verdict.doubted
        }
    return verdict


def _judge(
    statuses: Mapping[str, pb.Status],
    claimants: Collection[str],
    claim: tuple[Age, Ballot],
    known: KnownFacts,
    verdict: StatusVerdict,
) -> None:
    """Checks whether the newest commit, which only the claimants have, is possible."""
    (lineage, step), ballot = claim
    others = {node: status for node, status in statuses.items() if node not in claimants}
    before = [status.lineage for status in others.values() if status.trained]
    claimed = f"it claims step {step} of lineage {lineage}"
    if known.decided is not None:
        if (lineage, step) > known.decided:
            why = f"{claimed}; the last committed step is {known.decided[1]}"
            verdict.lies |= dict.fromkeys(claimants, why)
    elif before and lineage > max(before):  # the driver that opened it may be lost
        most = max(*before, known.registered[0])
        if lineage > most + LINEAGES:
            why = f"{claimed}; the newest that others know is {most}"
            verdict.lies |= dict.fromkeys(claimants, why)
        else:
            verdict.unproven |= set(claimants)
    elif against := [n for n, status in others.items() if _denies(status, claim)]:
        in_favour = [n for n, status in others.items() if _voted(status, claim)] + [*claimants]
        of_attempt = f"{claimed}, by attempt {ballot.attempt} of view {ballot.view}"
        for node in claimants:
            last = statuses[node].last
            signed = known.has_signed(last) if last.step == step else False
            if signed is False:
                verdict.lies[node] = f"{of_attempt}, whose driver hasn't signed that commit"
            elif signed is None and not _outweighs(in_favour, against, statuses, step, known):
                deniers = ", ".join(sorted(against))
                verdict.lies[node] = f"{of_attempt}, for which {deniers} would have had to vote"


def _outweighs(
    in_favour: Collection[str],
    against: Collection[str],
    statuses: Mapping[str, pb.Status],
    step: int,
    known: KnownFacts,
) -> bool:
    """Whether a claimed commit stands without a known signature. The validating driver believes
    itself. On a tie, the distance to the registry's step decides."""
    if known.seat in in_favour or known.seat in against:
        return known.seat in in_favour
    yes, no = ({node_of(seat) for seat in seats} for seats in (in_favour, against))
    if len(yes) != len(no):
        return len(yes) > len(no)
    other = max(statuses[node].committed for node in against)
    return abs(step - known.registered[1]) <= abs(other - known.registered[1])


def _compare(
    statuses: Mapping[str, pb.Status],
    claimants: Collection[str],
    known: KnownFacts,
    verdict: StatusVerdict,
) -> None:
    """Checks that all claimants have the same commit of an attempt. A commit that a run went back
    to may be a different one at each stage."""
    last = {node: statuses[node].last for node in sorted(claimants)}
    if all(commit.lineage != statuses[node].lineage for node, commit in last.items()):
        return
    hashes = {node: hash_of(commit) for node, commit in last.items()}
    if len(set(hashes.values())) < 2:
        return
    signed = [node for node, commit in last.items() if known.has_signed(commit)]
    for node in last.keys() - {*signed, known.seat} if signed else ():
        if statuses[node].trained:  # a trained member refuses such a commit
            verdict.lies[node] = UNSIGNED.format(last[node].step)
    if len({hashes[node] for node in signed}) > 1:
        verdict.parted = _why_parted({node: last[node] for node in signed}, known)
    believed = signed or [*hashes]
    counts = Counter(hashes[node] for node in believed)
    most = max(counts, key=lambda commit: (counts[commit], commit))
    right = hashes[known.seat] if known.seat in believed else most
    differing = {node for node, commit in hashes.items() if commit != right}
    verdict.unproven |= differing - verdict.lies.keys()


def _compare_previous(
    statuses: Mapping[str, pb.Status],
    claimants: Collection[str],
    known: KnownFacts,
    verdict: StatusVerdict,
) -> None:
    """Checks that the newest commit follows those of members that are one step behind."""
    newest = min(claimants, default="")
    commit = statuses[newest].last if newest else pb.Commit()
    lineage, step = commit.lineage, commit.step
    if not newest or age_of(statuses[newest]) != (lineage, step):
        return  # the run went back to it
    for node, status in statuses.items():
        if not status.trained or age_of(status) != (lineage, step - 1):
            continue
        if head(status.last, lineage) == commit.previous:
            continue
        if known.has_signed(status.last) is False:
            verdict.lies[node] = UNSIGNED.format(step - 1)
        elif known.has_signed(status.last) and known.has_signed(commit):
            commits = {other: statuses[other].last for other in sorted(claimants)}
            verdict.parted = _why_parted({**commits, node: status.last}, known)
        else:
            verdict.unproven.add(node)


def _why_parted(commits: Mapping[str, pb.Commit], known: KnownFacts) -> str:
    """Why the run stops: members have applied different commits of a step, both signed."""
    step = min(commit.step for commit in commits.values())
    nodes: dict[str, list[str]] = {}
    for node, commit in commits.items():
        previous = commit.previous if commit.step > step else hash_of(commit)
        nodes.setdefault(previous.hex()[:16], []).append(node)
    drivers = {known.drivers[commit.ballot.view].node for commit in commits.values()}
    applied = "; ".join(
        f"{commit} at {', '.join(having[:NAMED])}" for commit, having in sorted(nodes.items())
    )
    return (
        f"the driver {', '.join(sorted(drivers))} has signed two commits of step {step}: "
        f"{applied}. All states are kept. Stop the nodes that have one of them, and the run goes "
        "on from the other; report this fault with the nodes' logs"
    )


def _voted(status: pb.Status, claim: tuple[Age, Ballot]) -> bool:
    """Whether that member voted for the claimed commit, or has received it."""
    (lineage, step), ballot = claim
    ready = Ballot.of(status.ready_ballot) == ballot and status.ready == step
    heard = (status.following_lineage, status.heard) == (lineage, step) and status.following > 0
    return (ready and age_of(status) == (lineage, step - 1)) or heard


def _denies(status: pb.Status, claim: tuple[Age, Ballot]) -> bool:
    """Whether that member should have voted for the claimed commit, and hasn't."""
    (lineage, step), _ = claim
    older = status.lineage == lineage and status.committed < step
    return status.trained and older and not _voted(status, claim)
