"""Replicas of a stage tell each other which commit they have heard before they apply it."""

from collections.abc import Sequence

import pytest

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT
from planaria.node.transaction.comparing import UNHEARD
from planaria.node.transaction.effects import (
    AllHome,
    Apply,
    Ballot,
    Effect,
    GoOn,
    Send,
    StartAttempt,
    Suspect,
)
from planaria.node.transaction.member import Frames, MemberPhase, MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chain import (
    decision,
    hash_of_records,
    head,
    seal,
    without_records,
)

RUN = "run"
DRIVER = Identity.generate()
SWARM = {"driver": 0, "self": 1, "other": 1, "third": 1}
ATTEMPT, NEXT = Ballot(1, 1), Ballot(1, 2)


def view(number: int, members: dict[str, int] = SWARM, driver: str = "driver") -> registry.View:
    listed = [
        registry.Member(node=node, seats=[registry.Seat(stage=stage)])
        for node, stage in members.items()
    ]
    listed[0].key = DRIVER.public
    return registry.View(run=RUN, number=number, members=listed, driver=driver)


def commit(step: int = 1, after: pb.Commit | None = None, loss: float = 2.0) -> pb.Commit:
    """As the driver has decided it."""
    decided = pb.Commit(
        step=step,
        ballot=ATTEMPT.message(),
        clip_scale=[1.0, 1.0],
        lr_scale=[1.0, 1.0],
        loss=loss,
        previous=head(after or pb.Commit(), 0),
    )
    seal(decided, DRIVER, RUN)
    return decided


class Replica:
    """One of a stage's, with or without a third one, ready for step 1."""

    def __init__(self, *replicas: str, keeps: Sequence[pb.Home] = ()) -> None:
        self.member = MemberSide("self", 1)
        members = {node: at for node, at in SWARM.items() if at == 0 or node in (*replicas, "self")}
        self.member.viewed(view(1, members))
        places = [pb.Place(node=node, stage=stage) for node, stage in members.items()]
        begin = pb.Begin(step=1, members=places, keeps=bool(keeps))
        self.hears(ATTEMPT, step=pb.Step(begin=begin))
        self.hears(ATTEMPT, records=pb.Records(microbatches=keeps))
        self.member.reduced(ATTEMPT, 1.0, True, 0.1)

    def hears(self, ballot: Ballot, **body: object) -> list[Effect]:
        return self.member.received("driver", pb.Message(ballot=ballot.message(), **body))

    def decided(self, decided: pb.Commit, **step: object) -> list[Effect]:
        return self.hears(NEXT, step=pb.Step(commit=decided, **step))

    def told(self, peer: str, decided: pb.Commit, answer: bool = False) -> list[Effect]:
        return self.member.told(peer, pb.Heard(decision=decision(decided), answer=answer))


def heard(effects: Sequence[Effect]) -> list[str]:
    return [e.to for e in effects if isinstance(e, Send) and e.message.HasField("heard")]


def test_a_commit_is_applied_once_all_replicas_have_told_of_the_same() -> None:
    one = Replica("other", "third")
    assert heard(one.decided(commit())) == ["other", "third"]
    assert one.told("other", commit()) == []
    assert one.told("third", commit()) == [Apply(commit())]
    assert one.member.committed == 1


def test_who_is_alone_at_its_stage_asks_nobody() -> None:
    assert Replica().decided(commit()) == [Apply(commit())]


def test_who_has_told_before_is_not_waited_for() -> None:
    one = Replica("other")
    assert one.told("other", commit()) == []
    assert Apply(commit()) in one.decided(commit())


def test_two_that_the_driver_has_signed_prove_that_it_lies_and_neither_is_applied() -> None:
    one = Replica("other")
    one.decided(commit())
    (suspect,) = one.told("other", commit(loss=3.0))
    assert isinstance(suspect, Suspect)
    assert (suspect.node, suspect.cause) == ("driver", NUMBERS)
    assert list(suspect.proof.decisions) == [decision(commit()), decision(commit(loss=3.0))]
    assert (one.member.committed, one.member.phase) == (0, MemberPhase.READY)


def test_what_others_have_committed_is_applied_when_a_newer_driver_tells_of_it() -> None:
    one = Replica("other")
    one.decided(commit())
    one.told("other", commit(loss=3.0))
    assert heard(one.decided(commit())) == ["other"]
    assert one.told("other", commit()) == [Apply(commit())]


def test_a_replica_that_makes_a_commit_up_is_not_waited_for_and_goes() -> None:
    one, forged = Replica("other"), commit(loss=3.0)
    forged.signature = Identity.generate().sign("anything")
    one.decided(commit())
    suspect, apply = one.told("other", forged)
    assert isinstance(suspect, Suspect)
    assert (suspect.node, suspect.cause, suspect.proof) == ("other", NUMBERS, None)
    assert apply == Apply(commit())


def test_a_commit_that_the_driver_has_not_signed_is_applied_and_told_by_nobody() -> None:
    one, forged = Replica("other"), commit()
    forged.clip_scale[1] = 2.0
    effects = one.decided(forged)
    assert [e.node for e in effects if isinstance(e, Suspect)] == ["driver"]
    assert heard(effects) == []
    assert one.member.committed == 0


def test_a_commit_after_another_one_is_told_and_not_applied() -> None:
    one = Replica("other")
    other = commit(after=commit(step=9))
    effects = one.decided(other)
    assert [e.node for e in effects if isinstance(e, Suspect)] == ["driver"]
    assert heard(effects) == ["other"], "it may have been told of the right one"
    assert one.told("other", commit()) == []
    assert one.member.committed == 0


def test_of_another_lineage_no_commit_is_applied() -> None:
    one, strange = Replica(), commit()
    strange.lineage = 1
    seal(strange, DRIVER, RUN)
    assert not any(isinstance(e, Apply) for e in one.decided(strange))


def test_who_is_lost_is_waited_for_no_longer() -> None:
    one = Replica("other")
    one.decided(commit())
    assert one.member.link_lost("other") == [Apply(commit())]
    one = Replica("other")
    one.decided(commit())
    assert one.member.viewed(view(2, {"driver": 0, "self": 1})) == [Apply(commit())]


def test_who_says_nothing_is_waited_for_once() -> None:
    one = Replica("other")
    one.decided(commit())
    assert one.member.tick(10.0) == []
    suspect, apply = one.member.tick(10.0 + UNHEARD)
    assert isinstance(suspect, Suspect)
    assert (suspect.node, suspect.cause) == ("other", SILENT)
    assert apply == Apply(commit())
    assert one.member.mute == {"other"}
    one.told("other", commit())
    assert not one.member.mute


def test_what_a_driver_has_told_that_drives_no_more_waits_for_the_next_one() -> None:
    """Two stages, each of which has heard of another commit, would apply them in the end."""
    one = Replica("other")
    one.decided(commit())
    assert one.member.viewed(view(2, {"self": 1, "other": 1, "heir": 0}, "heir")) == []
    assert one.member.tick(10.0) == one.member.tick(10.0 + UNHEARD) == []
    assert one.member.link_lost("other") == []
    query = pb.Message(ballot=Ballot(2, 1).message(), query=pb.Query())
    (answer,) = one.member.received("heir", query)
    assert isinstance(answer, Send)
    status = answer.message.status
    assert (status.committed, status.ready, Ballot.of(status.ready_ballot)) == (0, 1, ATTEMPT)
    found = pb.Message(ballot=Ballot(2, 2).message(), step=pb.Step(commit=commit(loss=3.0)))
    assert heard(one.member.received("heir", found)) == ["other"]
    assert one.told("other", commit(loss=3.0)) == [Apply(commit(loss=3.0))]


@pytest.mark.parametrize("in_time", [True, False])
def test_the_records_of_it_are_known_when_the_next_one_tells_of_it_without(in_time: bool) -> None:
    """Others have applied it, and none of those who keep the records, whether they have heard of
    the commit or not."""
    homes = [pb.Home(microbatch=0, loss=2.0, tokens=4)]
    one, whole = Replica("other", keeps=homes), commit()
    whole.microbatches.extend(homes)
    whole.records = hash_of_records(homes)
    seal(whole, DRIVER, RUN)
    if in_time:
        one.decided(without_records(whole))
    one.member.viewed(view(2, {"self": 1, "other": 1, "heir": 0}, "heir"))
    one.member.received("heir", pb.Message(ballot=Ballot(2, 1).message(), query=pb.Query()))
    found = pb.Message(ballot=Ballot(2, 2).message(), step=pb.Step(commit=without_records(whole)))
    one.member.received("heir", found)
    assert one.told("other", whole) == [Apply(whole)]


def test_what_replicas_have_told_of_it_comes_too_late_then() -> None:
    one = Replica("other", "third")
    one.decided(commit())
    one.told("other", commit())
    one.member.viewed(view(2, {"self": 1, "other": 1, "third": 1, "heir": 0}, "heir"))
    assert one.told("third", commit()) == []
    assert (one.member.committed, one.member.phase) == (0, MemberPhase.READY)


def test_what_the_driver_says_meanwhile_comes_after_the_update() -> None:
    one = Replica("other")
    begin = pb.Begin(step=2)
    one.decided(commit(), begin=begin)
    assert one.hears(Ballot(1, 3), step=pb.Step(begin=begin)) == []
    assert one.member.frames(Ballot(1, 3)) is Frames.HOLD
    assert one.hears(Ballot(1, 3), reduce=pb.Reduce()) == []
    apply, start, home = one.told("other", commit())
    assert apply == Apply(commit())
    assert start == StartAttempt(Ballot(1, 3), begin), "the one before it is void"
    assert one.member.phase is MemberPhase.REDUCING
    assert home == AllHome(Ballot(1, 3))


def test_who_takes_part_is_known_though_the_plan_that_told_of_it_has_had_no_turn() -> None:
    one = Replica("other")
    third = pb.Place(node="third", stage=1)
    second = pb.Begin(step=2, members=[third], members_of=ATTEMPT.message())
    one.decided(commit(), begin=second)
    newest = pb.Begin(step=2, left=["other"], members_of=NEXT.message(), since=NEXT.message())
    assert one.hears(NEXT.next(), step=pb.Step(begin=newest)) == []
    effects = one.told("other", commit())
    (goes_on,) = [effect for effect in effects if isinstance(effect, GoOn)]
    assert [place.node for place in goes_on.begin.members] == ["driver", "self", "third"]


def test_a_query_is_answered_when_it_is_known_what_is_committed() -> None:
    one = Replica("other")
    one.decided(commit(), begin=pb.Begin(step=2))
    assert one.hears(Ballot(1, 3), query=pb.Query()) == []
    assert one.told("other", commit()) == [Apply(commit())], (
        "nothing is begun under the older ballot"
    )
    (answer,) = one.member.applied(b"1")
    assert isinstance(answer, Send)
    assert answer.message.status.committed == 1


def test_a_query_is_answered_when_a_commit_is_refused_too() -> None:
    one = Replica("other")
    one.decided(commit())
    one.hears(Ballot(1, 3), query=pb.Query())
    _, answer = one.told("other", commit(loss=3.0))
    assert isinstance(answer, Send)
    assert (answer.message.status.committed, answer.message.status.ready) == (0, 1)


def test_who_has_applied_it_answers_once() -> None:
    one = Replica("other")
    one.told("other", commit())
    one.decided(commit())
    (answer,) = one.told("other", commit())
    assert isinstance(answer, Send)
    assert answer.message.heard.answer
    assert one.told("other", commit(), answer=True) == []
    (suspect,) = one.told("other", commit(loss=3.0))
    assert isinstance(suspect, Suspect)
    assert suspect.node == "driver", "it was told of another one than this node has applied"


def test_nobody_of_another_stage_has_a_say() -> None:
    one = Replica("other")
    one.decided(commit())
    assert one.told("driver", commit(loss=3.0)) == []
    assert one.told("stranger", commit(loss=3.0)) == []


def test_an_attempt_that_goes_on_meanwhile_begins_by_its_newest_plan() -> None:
    """What others send by that plan would be taken for what the first one doesn't have."""
    one = Replica("other")
    first = pb.Begin(step=2, plan=[pb.Microbatch(id=0, source="driver")])
    one.decided(commit(), begin=first)
    plan = pb.Begin(step=2, plan=[pb.Microbatch(id=0, source="self")])
    newest = pb.Begin(step=2, plan=plan.plan, since=NEXT.message())
    for attempt, begin in (
        (3, pb.Begin(step=2, plan=first.plan, since=NEXT.message())),
        (4, newest),
    ):
        assert one.hears(Ballot(1, attempt), step=pb.Step(begin=begin)) == []
    _, start, go_on = one.told("other", commit())
    assert start == StartAttempt(NEXT, plan)
    assert go_on == GoOn(Ballot(1, 4), newest)
