"""What members say that they have, and what of that can be."""

from __future__ import annotations

from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import Member, Proof, Vote
from planaria.bootstrap.votes import gathered
from planaria.bootstrap.votes import hash_of as hash_of_votes
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.status_validation import LINEAGES, KnownFacts, StatusVerdict, examine
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chain import decision, hash_of, seal

RUN = "run"
MADE = Ballot(3, 8)
"""The attempt that made the newest step."""


def at(step: int, lineage: int = 0, made: Ballot = MADE, **more: object) -> pb.Status:
    fields: dict[str, object] = {"trained": True, **more}
    last = pb.Commit(step=step, ballot=made.message())
    return pb.Status(committed=step, lineage=lineage, last=last, **fields)  # type: ignore[arg-type]


def ready(step: int, under: Ballot = MADE) -> pb.Status:
    """For that step."""
    return at(step - 1, made=Ballot(3, 7), ready=step, ready_ballot=under.message())


NEW = pb.Status(weightless=True)


def judged(
    own: pb.Status, *others: pb.Status, registered: int = 0, decided: int = -1
) -> StatusVerdict:
    """`own`: of the driver's own seat; the others are of b/1, c/2, ..."""
    statuses = {f"{'bcdefg'[i]}/{i + 1}": status for i, status in enumerate(others)}
    knows = (0, decided) if decided >= 0 else None
    drove = {MADE.view: Member(node="gone/0", key=DRIVER.public)}
    return examine({"a/0": own} | statuses, KnownFacts("a/0", (0, registered), knows, RUN, drove))


def lies(*statuses: pb.Status, **more: int) -> set[str]:
    return set(judged(*statuses, **more).lies)


def test_a_driver_knows_what_was_committed_while_it_drove() -> None:
    assert lies(at(7), at(7), at(10**6), at(8, trained=False), decided=7) == {"c/2", "d/3"}
    assert lies(at(7), at(6), at(7), decided=7) == set()


def test_a_commit_that_some_have_heard_of_is_believed_since_all_have_voted_for_it() -> None:
    assert judged(ready(8), at(8), ready(8), at(8)).doubted == set()
    assert judged(ready(8), at(8), NEW).doubted == set()
    following = at(5, trained=False, following=5, heard=8)
    assert judged(NEW, at(8), following).doubted == set()


def test_what_who_asks_would_have_had_to_vote_for_was_not_committed() -> None:
    assert lies(at(7), at(8), at(8)) == {"b/1", "c/2"}
    assert lies(ready(8, under=Ballot(3, 9)), at(8)) == {"b/1"}
    (why,) = judged(at(7), at(10**6)).lies.values()
    assert why == (
        "it says that it has step 1000000 of lineage 0, by attempt 8 of view 3, for which a/0 "
        "would have had to vote"
    )


def test_a_driver_without_a_vote_believes_those_who_are_most() -> None:
    assert lies(NEW, at(10**6), at(7), at(7)) == {"b/1"}
    assert lies(NEW, at(8), ready(8), at(3)) == set()
    assert lies(NEW, at(10**6), at(7), registered=7) == {"b/1"}
    assert lies(NEW, at(9), at(1), registered=8) == set(), "whoever says less isn't believed more"


def test_who_has_only_copied_may_be_behind() -> None:
    behind = at(3, trained=False)
    assert judged(behind, at(8), behind, behind).doubted == set()


def test_the_only_one_that_is_left_is_believed() -> None:
    assert judged(NEW, at(900), NEW).doubted == set()


def test_a_lineage_that_nobody_knows_of_is_not_gone_on_from_and_may_have_been() -> None:
    verdict = judged(at(7), at(3, lineage=1), at(7))
    assert (verdict.lies, verdict.unproven) == ({}, {"b/1"})
    assert lies(at(7), at(3, lineage=LINEAGES + 1), at(7)) == {"b/1"}
    assert judged(NEW, at(3, lineage=1), at(7, trained=False)).doubted == set()


def told_by(identity: Identity, clip_scale: float, **more: object) -> pb.Status:
    """Who has step 7, as whoever has this key has told of it."""
    status = at(7, **more)
    status.last.clip_scale.append(clip_scale)
    seal(status.last, identity, RUN)
    return status


DRIVER = Identity.generate()
TOLD, OTHERWISE = told_by(DRIVER, 1.0), told_by(DRIVER, 0.5)
MADE_UP = told_by(Identity.generate(), 1e30)


def test_who_has_a_record_that_the_driver_has_not_signed_lies() -> None:
    verdict = judged(TOLD, MADE_UP, TOLD)
    assert verdict.lies == {"b/1": "its record of the commit of step 7 isn't its driver's"}
    assert lies(NEW, MADE_UP, MADE_UP, TOLD) == {"b/1", "c/2"}, "however many they are"
    told_while_joining = told_by(Identity.generate(), 1e30, trained=False)
    verdict = judged(TOLD, told_while_joining)
    assert (verdict.lies, verdict.doubted) == ({}, {"b/1"}), "joiners believe their driver"


def test_a_driver_that_has_signed_two_commits_is_the_liar_and_nobody_else() -> None:
    for verdict in judged(TOLD, OTHERWISE, TOLD), judged(NEW, TOLD, OTHERWISE, TOLD):
        assert verdict.lies == {}
        ((node, proof),) = verdict.proofs.items()
        assert node == "gone/0"
        assert {one.hash for one in proof.decisions} == {
            hash_of(TOLD.last),
            hash_of(OTHERWISE.last),
        }
    assert judged(TOLD, OTHERWISE, TOLD).doubted == {"b/1"}, "the run goes on from one of them"
    assert len(judged(NEW, TOLD, OTHERWISE).doubted) == 1, "from either"
    verdict = judged(TOLD, OTHERWISE, MADE_UP)
    assert (verdict.lies.keys(), verdict.proofs.keys()) == ({"c/2"}, {"gone/0"})


# --- votes for a commit that others haven't voted for, they say


MEMBERS = {node: Identity.generate() for node in ("a/0", "b/1", "c/2", "d/3")}


def shown(*voters: str, forged: str = "") -> pb.Status:
    """Who has step 8, and shows the votes of these for it; one of them has the driver's key."""
    cast = [Vote(node=node, view=MADE.view, attempt=MADE.attempt) for node in voters]
    for vote in cast:
        (DRIVER if vote.node == forged else MEMBERS[vote.node]).sign_message(vote, RUN)
    votes, status = gathered(cast), at(8)
    status.last.voted = hash_of_votes(votes)
    seal(status.last, DRIVER, RUN)
    status.votes.CopyFrom(Proof(decisions=[decision(status.last)], votes=votes))
    return status


def unshown(status: pb.Status) -> pb.Status:
    kept = pb.Status()
    kept.CopyFrom(status)
    kept.ClearField("votes")
    return kept


def counted(own: pb.Status, *others: pb.Status, registered: int = 0) -> StatusVerdict:
    """As `judged`, by who knows everybody's key."""
    drove = {MADE.view: Member(node="gone/0", key=DRIVER.public)}
    keys = {node: one.public for node, one in MEMBERS.items()}
    witness = KnownFacts("a/0", (0, registered), None, RUN, drove, keys)
    return examine({"a/0": own} | dict(zip(list(MEMBERS)[1:], others, strict=False)), witness)


def test_votes_are_asked_for_where_somebody_says_that_it_has_not_voted() -> None:
    claim = unshown(shown(*MEMBERS))
    assert counted(NEW, claim, at(7)).to_show
    assert not counted(ready(8), claim, ready(8)).to_show, "all have"
    assert not counted(NEW, at(8), at(7)).to_show, "its driver hasn't signed it"


def test_who_shows_all_votes_has_not_lied_and_is_believed_unless_most_say_otherwise() -> None:
    claim = shown(*MEMBERS)
    verdict = counted(NEW, claim, at(7), registered=7)
    assert (verdict.doubted, verdict.proofs, verdict.to_show) == (set(), {}, False)
    verdict = counted(NEW, claim, at(7), at(7))
    assert (verdict.lies, verdict.doubted, verdict.proofs) == ({}, {"b/1"}, {}), (
        "it may be of an attempt that was given up"
    )
    assert counted(at(7), claim).doubted == {"b/1"}, "who asks knows what it has done since"


def test_a_driver_that_did_without_a_vote_is_the_liar_and_not_who_has_applied_its_commit() -> None:
    for claim in shown("a/0", "b/1", "d/3"), shown(*MEMBERS, forged="c/2"):
        verdict = counted(NEW, claim, at(7), unshown(claim))
        assert (verdict.lies, verdict.doubted) == ({}, set())
        ((node, proof),) = verdict.proofs.items()
        assert (node, proof.voter) == ("gone/0", "c/2")
        verdict = counted(NEW, claim, at(7), at(7))
        assert (verdict.lies, verdict.doubted) == ({}, {"b/1"})
        assert "gone/0" in verdict.proofs


def test_votes_for_another_commit_show_nothing() -> None:
    claim, other = shown(*MEMBERS), shown("a/0", "b/1")
    claim.votes.CopyFrom(other.votes)
    verdict = counted(NEW, claim, at(7), at(7))
    assert (verdict.lies.keys(), verdict.to_show) == ({"b/1"}, True)


def test_where_nobody_knows_who_drove_the_run_goes_on_from_one_record_and_nobody_lies() -> None:
    ours, other = at(7), at(7)
    other.last.clip_scale.append(1e30)
    assert (judged(ours, other).doubted, lies(ours, other)) == ({"b/1"}, set())
    assert judged(NEW, other, ours, ours).doubted == {"b/1"}


def test_one_lie_does_not_hide_another() -> None:
    assert lies(at(7), at(10**6), at(10**5), at(7)) == {"b/1", "c/2"}


def test_it_may_be_the_last_thing_that_a_mixed_state_has_in_common() -> None:
    """Stages that went back to files of several steps."""
    assert judged(at(7), at(7, made=Ballot(3, 2)), at(7)).doubted == set()


def test_what_a_run_went_back_to_may_be_by_another_commit_at_each_stage() -> None:
    one, other = at(7, lineage=1), at(7, lineage=1)
    other.last.lr_scale.append(1.1)
    assert judged(one, other, other).doubted == set()
    one.last.lineage = 1
    assert judged(one, other, other).doubted == {"b/1", "c/2"}, "somebody has gone on"
