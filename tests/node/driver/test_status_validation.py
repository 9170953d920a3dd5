"""Which claims in the statuses of members a driver believes."""

from __future__ import annotations

from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import Member
from planaria.node.driver.status_validation import LINEAGES, KnownFacts, StatusVerdict, to_reject
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of, seal

RUN = "run"
MADE = Ballot(3, 8)
"""The ballot of the attempt that made the newest step."""


def at(step: int, lineage: int = 0, made: Ballot = MADE, **more: object) -> pb.Status:
    fields: dict[str, object] = {"trained": True, **more}
    last = pb.Commit(step=step, ballot=made.message())
    if step == 8:
        last.previous = hash_of(ready(step).last)
    return pb.Status(committed=step, lineage=lineage, last=last, **fields)  # type: ignore[arg-type]


def ready(step: int, under: Ballot = MADE) -> pb.Status:
    """The status of a member that has voted for this step."""
    return at(step - 1, made=Ballot(3, 7), ready=step, ready_ballot=under.message())


NEW = pb.Status(weightless=True)


def judged(
    own: pb.Status, *others: pb.Status, registered: int = 0, decided: int = -1
) -> StatusVerdict:
    """The verdict on `own`, the status of the driver's seat, and on those of b/1, c/2, ..."""
    statuses = {f"{'bcdefg'[i]}/{i + 1}": status for i, status in enumerate(others)}
    knows = (0, decided) if decided >= 0 else None
    drove = {MADE.view: Member(node="gone/0", key=DRIVER.public)}
    return to_reject({"a/0": own} | statuses, KnownFacts("a/0", (0, registered), knows, RUN, drove))


def lies(*statuses: pb.Status, **more: int) -> set[str]:
    return set(judged(*statuses, **more).lies)


def counted(*statuses: pb.Status, registered: int = 0) -> StatusVerdict:
    """The verdict of a driver that doesn't know who drove before."""
    own, *others = statuses
    named = {"a/0": own} | {f"{'bcdefg'[i]}/{i + 1}": status for i, status in enumerate(others)}
    return to_reject(named, KnownFacts("a/0", (0, registered), run=RUN))


def test_a_driver_knows_what_was_committed_while_it_drove() -> None:
    assert lies(at(7), at(7), at(10**6), at(8, trained=False), decided=7) == {"c/2", "d/3"}
    assert lies(at(7), at(5), at(7), decided=7) == set()
    assert lies(at(7), at(10**6), at(10**5), at(7)) == {"b/1", "c/2"}, "one hides no other"


def test_a_commit_that_some_have_heard_of_is_believed_since_all_have_voted_for_it() -> None:
    assert judged(ready(8), at(8), ready(8), at(8)).doubted == set()
    assert judged(ready(8), at(8), NEW).doubted == set()
    following = at(5, trained=False, following=5, heard=8)
    assert judged(NEW, at(8), following).doubted == set()


def test_a_driver_that_does_not_know_its_predecessor_believes_itself() -> None:
    assert counted(at(7), at(8), at(8)).lies.keys() == {"b/1", "c/2"}
    assert counted(ready(8, under=Ballot(3, 9)), at(8)).lies.keys() == {"b/1"}
    (why,) = counted(at(7), at(10**6)).lies.values()
    assert why == (
        "it claims step 1000000 of lineage 0, by attempt 8 of view 3, for which a/0 "
        "would have had to vote"
    )


def test_without_a_vote_of_its_own_it_believes_the_majority() -> None:
    assert counted(NEW, at(10**6), at(7), at(7)).lies.keys() == {"b/1"}
    assert counted(NEW, at(8), ready(8), at(3)).lies == {}
    assert counted(NEW, at(10**6), at(7), registered=7).lies.keys() == {"b/1"}
    assert counted(NEW, at(9), at(1), registered=8).lies == {}, "whoever says less isn't better"


def test_nobody_is_doubted_who_may_be_right() -> None:
    behind = at(3, trained=False)
    assert judged(behind, at(8), behind, behind).doubted == set(), "they have only copied"
    assert judged(NEW, at(900), NEW).doubted == set(), "only one is left"
    other = at(7, made=Ballot(3, 2))  # its stage went back to a file of another step
    assert judged(at(7), other, at(7)).doubted == set(), "the last thing in common"


def test_a_lineage_that_nobody_knows_of_is_not_gone_on_from_and_may_have_been() -> None:
    verdict = judged(at(7), at(3, lineage=1), at(7))
    assert (verdict.lies, verdict.unproven) == ({}, {"b/1"})
    assert lies(at(7), at(3, lineage=LINEAGES + 1), at(7)) == {"b/1"}
    assert judged(NEW, at(3, lineage=1), at(7, trained=False)).doubted == set()


def told_by(identity: Identity, clip_scale: float, **more: object) -> pb.Status:
    """The status of a member at step 7 whose commit is signed with this key."""
    status = at(7, **more)
    status.last.clip_scale.append(clip_scale)
    seal(status.last, identity, RUN)
    return status


DRIVER = Identity.generate()
TOLD, OTHERWISE = told_by(DRIVER, 1.0), told_by(DRIVER, 0.5)
MADE_UP = told_by(Identity.generate(), 1e30)


def test_who_has_a_record_that_the_driver_has_not_signed_lies() -> None:
    verdict = judged(TOLD, MADE_UP, TOLD)
    why = "its record of the commit of step 7 lacks the driver's signature"
    assert verdict.lies == {"b/1": why}
    assert lies(NEW, MADE_UP, MADE_UP, TOLD) == {"b/1", "c/2"}, "however many they are"
    told_while_joining = told_by(Identity.generate(), 1e30, trained=False)
    verdict = judged(TOLD, told_while_joining)
    assert (verdict.lies, verdict.doubted) == ({}, {"b/1"}), "joiners believe their driver"


def test_a_driver_that_signed_two_commits_stops_the_run_and_nobody_lies() -> None:
    for verdict in judged(TOLD, OTHERWISE, TOLD), judged(NEW, TOLD, OTHERWISE, TOLD):
        assert verdict.lies == {}
        assert verdict.parted.startswith("the driver gone/0 has signed two commits of step 7: ")
        for node in ("b/1", "c/2"):
            assert node in verdict.parted
    verdict = judged(TOLD, OTHERWISE, MADE_UP)
    assert (verdict.lies.keys(), bool(verdict.parted)) == ({"c/2"}, True)
    assert not judged(TOLD, MADE_UP, TOLD).parted


def after(last: pb.Commit, identity: Identity) -> pb.Status:
    """The status of a member with the commit after `last`."""
    status = at(last.step + 1)
    status.last.previous = hash_of(last)
    seal(status.last, identity, RUN)
    return status


def test_the_newest_commit_follows_those_of_members_a_step_behind() -> None:
    newest = after(TOLD.last, DRIVER)
    assert judged(newest, TOLD, newest).doubted == set()
    parted = judged(newest, OTHERWISE, newest).parted
    assert "two commits of step 7" in parted and "at b/1" in parted and "at a/0, c/2" in parted
    verdict = judged(newest, MADE_UP, newest)
    assert (verdict.lies.keys(), verdict.parted) == ({"b/1"}, "")


def test_a_claim_of_a_step_that_others_deny_needs_its_drivers_signature() -> None:
    for own, claim in (at(7), at(8)), (NEW, after(TOLD.last, Identity.generate())):
        (why,) = judged(own, claim, at(7)).lies.values()
        assert why == (
            "it claims step 8 of lineage 0, by attempt 8 of view 3, whose driver hasn't "
            "signed that commit"
        )
    claim = after(TOLD.last, DRIVER)
    assert judged(NEW, claim, TOLD).doubted == set(), "however many deny it"
    claim.committed = 10**6
    assert judged(TOLD, claim).lies.keys() == {"b/1"}, "it has signed another step"


def test_where_nobody_knows_who_drove_the_run_goes_on_from_one_record_and_nobody_lies() -> None:
    ours, other = at(7), at(7)
    other.last.clip_scale.append(1e30)
    assert (judged(ours, other).doubted, lies(ours, other)) == ({"b/1"}, set())
    assert judged(NEW, other, ours, ours).doubted == {"b/1"}


def test_what_a_run_went_back_to_may_be_by_another_commit_at_each_stage() -> None:
    own, other = at(7, lineage=1), at(7, lineage=1)
    other.last.lr_scale.append(1.1)
    assert judged(own, other, other).doubted == set()
    own.last.lineage = 1
    assert judged(own, other, other).doubted == {"b/1", "c/2"}, "somebody has gone on"
