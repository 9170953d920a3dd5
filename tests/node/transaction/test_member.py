from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import SHAPE
from planaria.node.report.events import MessageRefused
from planaria.node.transaction.effects import (
    NEVER,
    Adopt,
    AllHome,
    Apply,
    Ballot,
    DropAttempt,
    Effect,
    Fetch,
    GoOn,
    Rejoin,
    Send,
    StartAttempt,
    Suspect,
)
from planaria.node.transaction.member import FrameUse, MemberPhase, MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of_records, head

FIRST = pb.Commit()
READY = pb.Ready(squared_norm=2.0, finite=True, seconds_per_microbatch=0.1)
SWARM = {"driver": 0, "self": 1, "other": 2}


def view(number: int, members: dict[str, int] = SWARM, driver: str = "driver") -> registry.View:
    listed = [
        registry.Member(node=node, seats=[registry.Seat(stage=stage)])
        for node, stage in members.items()
    ]
    return registry.View(number=number, members=listed, driver=driver)


def message(ballot: Ballot, **body: object) -> pb.Message:
    return pb.Message(ballot=ballot.message(), **body)


def begin(step: int, **fields: object) -> pb.Step:
    return pb.Step(begin=pb.Begin(step=step, **fields))


def commit(step: int, ballot: Ballot, after: pb.Commit = FIRST) -> pb.Commit:
    scales = [1.0] * 3
    return pb.Commit(
        step=step,
        ballot=ballot.message(),
        clip_scale=scales,
        lr_scale=scales,
        previous=head(after, 0),
    )


def bodies(effects: Sequence[Effect]) -> list[str]:
    return [e.message.WhichOneof("body") for e in effects if isinstance(e, Send)]


def status(effects: Sequence[Effect]) -> pb.Status:
    (send,) = [e for e in effects if isinstance(e, Send)]
    assert send.to == "driver"
    assert send.message.WhichOneof("body") == "status"
    return send.message.status


class Told:
    """A member of stage 1 of 2 that receives the driver's messages."""

    def __init__(self) -> None:
        self.member = MemberSide("self", 1)
        self.member.viewed(view(1))

    def hears(self, ballot: Ballot, peer: str = "driver", **body: object) -> list[Effect]:
        return self.member.received(peer, message(ballot, **body))

    def queried(self, ballot: Ballot) -> list[Effect]:
        """Receives a query under this ballot, and first its view if that is newer."""
        if ballot.view > self.member.view.number:
            self.member.viewed(view(ballot.view))
        return self.hears(ballot, query=pb.Query())

    def make_ready(self, step: int, ballot: Ballot) -> list[Effect]:
        self.hears(ballot, step=begin(step))
        self.hears(ballot, reduce=pb.Reduce())
        return self.member.reduced(ballot, READY)

    def commits(self, step: int, ballot: Ballot) -> list[Effect]:
        """Receives the commit of attempt `ballot`, under the next ballot."""
        after = Ballot(ballot.view, ballot.attempt + 1)
        decided = commit(step, ballot, self.member.last)
        return self.hears(after, step=pb.Step(commit=decided))


@pytest.fixture
def seat() -> Told:
    return Told()


# --- fencing


def test_a_begin_that_says_what_is_other_than_in_a_view_is_of_the_view_that_was_asked_in(
    seat: Told,
):
    others = pb.Begin(step=1, members_of=pb.Ballot(view=1), left=["other"])
    assert not status(seat.queried(Ballot(1, 1))).viewless
    seat.member.viewed(view(2, {"driver": 0, "self": 1, "new": 2}))
    assert not status(seat.hears(Ballot(1, 2), query=pb.Query())).viewless, "it was here"
    (started,) = seat.hears(Ballot(1, 3), step=pb.Step(begin=others))
    assert isinstance(started, StartAttempt)
    assert {place.node: place.stage for place in started.begin.members} == {"driver": 0, "self": 1}


def test_who_has_only_a_newer_view_than_it_is_asked_in_says_so(seat: Told):
    seat.member.viewed(view(3))
    assert status(seat.hears(Ballot(2, 1), query=pb.Query())).viewless
    others = pb.Begin(step=1, members_of=pb.Ballot(view=2))
    (send,) = seat.hears(Ballot(2, 2), step=pb.Step(begin=others))
    assert "the plan lists changes since" in send.message.failed.reason
    assert not status(seat.hears(Ballot(3, 1), query=pb.Query())).viewless


def test_an_older_ballot_has_no_effect_and_is_answered_with_the_newer(seat: Told):
    seat.make_ready(1, Ballot(1, 5))
    (send,) = seat.hears(Ballot(1, 4), step=begin(1))
    assert send.message.WhichOneof("body") == "stale"
    assert Ballot.of(send.message.ballot) == Ballot(1, 5)
    assert seat.member.phase is MemberPhase.READY


def test_a_commit_of_before_a_query_has_no_effect_after_it(seat: Told):
    seat.make_ready(1, Ballot(1, 5))
    seat.queried(Ballot(1, 8))
    assert bodies(seat.commits(1, Ballot(1, 5))) == ["stale"]
    assert seat.member.committed == 0


@pytest.mark.parametrize("number", [1, 2, 1 << 40])
@pytest.mark.parametrize(
    "body",
    [
        {"query": pb.Query()},
        {"sync": pb.Sync(step=1, method="replica", sources=[pb.Source(node="other", stage=1)])},
        {"halt": pb.Halt(reason="because I say so")},
        {"step": begin(1)},
    ],
    ids=lambda body: next(iter(body)),
)
def test_nobody_but_the_driver_of_the_newest_view_is_obeyed(
    seat: Told, number: int, body: dict[str, object]
):
    (event,) = seat.hears(Ballot(number, 1), peer="other", **body)
    assert isinstance(event, MessageRefused)
    assert "driver drives view 1, the newest one here" in event.why
    assert (seat.member.promised, seat.member.halt) == (NEVER, None)
    assert seat.hears(Ballot(number, 2), peer="other", **body) == [], "it is said once"


def test_not_even_its_driver_is_obeyed_for_a_view_that_is_not_here(seat: Told):
    (event,) = seat.hears(Ballot(2, 1), query=pb.Query())
    assert isinstance(event, MessageRefused)
    seat.member.viewed(view(2, driver="other"))
    assert bodies(seat.hears(Ballot(2, 1), peer="other", query=pb.Query())) == ["status"]


def test_a_driver_of_before_is_obeyed_no_more(seat: Told):
    seat.make_ready(1, Ballot(1, 2))
    seat.member.viewed(view(2, driver="other"))
    (event,) = seat.commits(1, Ballot(1, 2))
    assert isinstance(event, MessageRefused)
    answer = seat.hears(Ballot(2, 1), peer="other", query=pb.Query())
    assert [e.message.status.ready for e in answer if isinstance(e, Send)] == [1]


def test_where_nobody_drives_nobody_is_obeyed(seat: Told):
    seat.member.viewed(view(2, driver=""))
    (event,) = seat.hears(Ballot(2, 1), peer="", query=pb.Query())
    assert isinstance(event, MessageRefused)


def test_a_repeated_query_is_answered_again(seat: Told):
    assert seat.queried(Ballot(1, 1)) == seat.queried(Ballot(1, 1))


# --- an attempt


def test_an_attempt_from_begin_to_commit(seat: Told):
    ballot = Ballot(1, 2)
    (start,) = seat.hears(ballot, step=begin(1))
    assert isinstance(start, StartAttempt)
    assert seat.hears(ballot, reduce=pb.Reduce()) == [AllHome(ballot)]
    (send,) = seat.member.reduced(ballot, READY)
    assert (send.message.ready.step, send.message.ready.squared_norm) == (1, 2.0)
    both = pb.Step(commit=commit(1, ballot), begin=begin(2).begin)
    apply, start = seat.hears(Ballot(1, 3), step=both)
    assert isinstance(apply, Apply), "the weights change before the next step begins"
    assert isinstance(start, StartAttempt)
    assert (seat.member.committed, seat.member.step) == (1, 2)


def test_who_keeps_the_records_votes_once_it_has_them(seat: Told):
    ballot, records = Ballot(1, 2), pb.Records(microbatches=[pb.Home(microbatch=0)])
    step = begin(1)
    step.begin.keeps = True
    seat.hears(ballot, step=step)
    assert seat.member.reduced(ballot, READY) == []
    assert seat.member.phase is MemberPhase.RUNNING
    assert bodies(seat.hears(ballot, records=records)) == ["ready"]
    assert seat.hears(ballot, reduce=pb.Reduce()) == []
    seat.queried(Ballot(1, 3))
    again = Ballot(1, 4)
    seat.hears(again, step=step)
    assert seat.hears(ballot, records=records) != [], "that is stale"
    assert seat.member.reduced(again, READY) == [], "they are another attempt's"
    assert bodies(seat.hears(again, records=records)) == ["ready"]


def test_who_has_voted_still_says_whom_it_cannot_reach_until_it_hears_the_commit(seat: Told):
    paired = {**SWARM, "other": 1}
    seat.member.viewed(view(2, paired))
    ballot = Ballot(2, 1)
    members = [pb.Place(node=node, stage=stage) for node, stage in paired.items()]
    seat.hears(ballot, step=begin(1, members=members))
    seat.member.reduced(ballot, READY)
    assert bodies(seat.member.cut_off(ballot, "driver", "the link broke")) == ["cut"]
    seat.commits(1, ballot)
    assert seat.member.cut_off(ballot, "driver", "the link broke") == []


@pytest.mark.parametrize(("step", "ballot"), [(1, Ballot(1, 1)), (2, Ballot(1, 2))])
def test_nothing_else_is_committed_than_what_is_ready(seat: Told, step: int, ballot: Ballot):
    seat.make_ready(1, Ballot(1, 2))
    assert seat.hears(Ballot(1, 3), step=pb.Step(commit=commit(step, ballot))) == []
    assert seat.member.committed == 0


@pytest.mark.parametrize(("fixed", "applied"), [([0, 3, 9], True), ([], True), ([0, 2, 0], False)])
def test_what_was_relearned_enters_as_it_was_offered_or_not_at_all(
    seat: Told, fixed: list[int], applied: bool
):
    seat.hears(Ballot(1, 2), step=begin(1))
    seat.hears(Ballot(1, 2), reduce=pb.Reduce())
    (send,) = seat.member.reduced(
        Ballot(1, 2), pb.Ready(squared_norm=2.0, finite=True, relearned=3, relearning=5)
    )
    assert (send.message.ready.relearned, send.message.ready.relearning) == (3, 5)
    decided = commit(1, Ballot(1, 2))
    decided.relearned.extend(fixed)
    effects = seat.hears(Ballot(1, 3), step=pb.Step(commit=decided))
    assert any(isinstance(effect, Apply) for effect in effects) == applied
    assert any(isinstance(effect, Suspect) for effect in effects) != applied


@pytest.mark.parametrize(("step", "kind"), [(2, pb.Begin.TRAIN), (1, pb.Begin.EVALUATE)])
def test_a_step_that_does_not_follow_is_not_begun(seat: Told, step: int, kind: int):
    (send,) = seat.hears(Ballot(1, 2), step=begin(step, kind=kind))
    assert f"asked to begin step {step}" in send.message.failed.reason
    assert seat.member.phase is MemberPhase.IDLE


def test_who_cannot_know_who_takes_part_says_so_and_begins_nothing(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1, members=[pb.Place(node="self", stage=1)]))
    since = Ballot(1, 3).message()
    (send,) = seat.hears(Ballot(1, 4), step=begin(1, members_of=since, left=["other"]))
    assert "the plan lists changes since" in send.message.failed.reason
    assert seat.member.attempt == Ballot(1, 2)


def test_what_was_reduced_for_an_older_attempt_is_nothing(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1))
    seat.hears(Ballot(1, 2), reduce=pb.Reduce())
    seat.queried(Ballot(1, 3))
    assert seat.member.reduced(Ballot(1, 2), READY) == []
    assert seat.member.phase is MemberPhase.IDLE


def test_a_failure_is_told_once_and_leaves_no_trace(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1))
    drop, send = seat.member.failed(Ballot(1, 2), "lost", ["other"])
    assert drop == DropAttempt(Ballot(1, 2))
    assert list(send.message.failed.accused) == ["other"]
    assert seat.member.failed(Ballot(1, 2), "lost again", []) == []
    seat.hears(Ballot(1, 4), step=begin(1))
    assert seat.member.failed(Ballot(1, 2), "lost", []) == [], "that is over"
    assert seat.member.phase is MemberPhase.RUNNING


# --- queries


def test_what_is_ready_outlives_a_query_and_can_be_committed_by_the_next_driver(seat: Told):
    seat.make_ready(1, Ballot(1, 2))
    answer = status(seat.queried(Ballot(2, 1)))
    assert (answer.committed, answer.ready) == (0, 1)
    assert Ballot.of(answer.ready_ballot) == Ballot(1, 2)
    (apply,) = seat.hears(Ballot(2, 1), step=pb.Step(commit=commit(1, Ballot(1, 2))))
    assert isinstance(apply, Apply)


def test_what_runs_is_dropped_by_a_query(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1))
    effects = seat.queried(Ballot(1, 3))
    assert effects[0] == DropAttempt(Ballot(1, 2))
    assert (status(effects).ready, status(effects).attempting) == (0, 1)


def test_a_query_while_applying_is_answered_afterwards(seat: Told):
    seat.make_ready(1, Ballot(1, 2))
    seat.commits(1, Ballot(1, 2))
    for ballot in (Ballot(1, 4), Ballot(1, 5)):
        (not_yet,) = seat.queried(ballot)
        assert not_yet.message.account.computing, "so that nobody suspects it"
    answer = status(seat.member.applied(b"new"))
    assert (answer.committed, answer.digest) == (1, b"new")
    assert seat.member.applied(b"new") == [], "once"


def test_who_hangs_while_applying_says_so_to_each_driver_that_asks(seat: Told):
    seat.make_ready(1, Ballot(1, 2))
    seat.commits(1, Ballot(1, 2))
    seat.member.hang = "its compute thread hangs"
    for view_number, driver in ((2, "b"), (3, "c")):
        seat.member.viewed(view(view_number, driver=driver))
        (reply,) = seat.hears(Ballot(view_number, 1), peer=driver, query=pb.Query())
        assert (reply.to, reply.message.account.hang) == (driver, "its compute thread hangs")
    answer = seat.member.applied(b"new")
    assert bodies(answer) == ["status"], "it has gone on"


# --- state from peers


def sync(step: int) -> pb.Sync:
    return pb.Sync(step=step, method="replica", lineage=2)


def test_state_is_fetched_and_put_in_place(seat: Told):
    (fetch,) = seat.hears(Ballot(1, 2), sync=sync(7))
    assert isinstance(fetch, Fetch)
    assert seat.member.arrived(fetch.ballot)
    effects = seat.member.fetched(pb.Synced(step=7, digest=b"d"), commit(7, Ballot(1, 1)), 3)
    assert bodies(effects) == ["synced"]
    assert (seat.member.committed, seat.member.boosted_at, seat.member.lineage) == (7, 3, 2)
    assert seat.member.phase is MemberPhase.IDLE


def test_state_that_comes_after_a_query_is_not_wanted(seat: Told):
    seat.hears(Ballot(1, 2), sync=sync(7))
    seat.queried(Ballot(1, 3))
    assert not seat.member.arrived(Ballot(1, 2))
    assert status(seat.queried(Ballot(1, 3))).committed == 0


def test_a_state_that_relearning_will_overwrite_is_offered_to_nobody(seat: Told):
    seat.hears(Ballot(1, 2), sync=sync(7))
    assert seat.member.voided(Ballot(1, 2))
    answer = status(seat.queried(Ballot(2, 1)))
    assert (answer.committed, answer.lineage) == (0, 0)
    assert not seat.member.voided(Ballot(1, 2)), "nobody wants it any longer"


def test_a_run_that_starts_over_does_so_without_weights_that_a_rebuild_has_overwritten():
    seat = Told()
    seat.queried(Ballot(1, 1))
    seat.hears(Ballot(1, 2), sync=pb.Sync(step=1, method="checkfree"))
    assert seat.member.voided(Ballot(1, 2))
    seat.queried(Ballot(1, 3))
    (effect,) = seat.hears(Ballot(1, 4), step=begin(1))
    assert isinstance(effect, Rejoin)


def test_a_query_while_state_is_put_in_place_is_answered_with_it(seat: Told):
    seat.hears(Ballot(1, 2), sync=sync(7))
    assert seat.member.arrived(Ballot(1, 2))
    assert bodies(seat.queried(Ballot(2, 1))) == ["account"]
    answer = status(seat.member.fetched(pb.Synced(step=7, digest=b"d"), pb.Commit(step=7), 0))
    assert (answer.committed, answer.digest, answer.last.step) == (7, b"d", 7)


def test_a_fetch_that_fails_is_told(seat: Told):
    seat.hears(Ballot(1, 2), sync=sync(7))
    assert bodies(seat.member.failed(Ballot(1, 2), "no source", [])) == ["failed"]


# --- following: a copy of a state while the others train

STAGE = [pb.Place(node="driver", stage=0), pb.Place(node="other", stage=1)]
JOINING = [pb.Joiner(node="self", stage=1, step=7)]


class Follows(Told):
    """A joiner that was told, in ballot (1, 1), to follow from the state of step 7."""

    def __init__(self) -> None:
        super().__init__()
        state = pb.Sync(step=7, method="replica", follow=True)
        (self.fetch,) = self.hears(Ballot(1, 1), sync=state)

    def begun(self, attempt: int, step: int, commit: pb.Commit | None = None) -> list[Effect]:
        """The members begin an attempt, with the commit of the step before."""
        begin = pb.Begin(step=step, members=STAGE, joining=JOINING)
        return self.hears(Ballot(1, attempt), step=pb.Step(commit=commit, begin=begin))

    def arrives(self) -> list[Effect]:
        assert self.member.arrived(Ballot(1, 1))
        return self.member.fetched(pb.Synced(step=7, digest=b"7"), commit(7, Ballot(0, 9)), 3)

    def gradient(self, attempt: int) -> list[Effect]:
        return self.member.gradient_came(Ballot(1, attempt), "other")


def adopts(effects: Sequence[Effect]) -> list[tuple[int, int]]:
    """Pairs the attempt of each adopted gradient with the step of the commit applied with it."""
    pairs = list(pairwise(effects))
    return [(a.ballot.attempt, b.commit.step) for a, b in pairs if isinstance(b, Apply)]


def test_commits_heard_while_the_state_comes_are_applied_in_order_once_their_gradients_are_here():
    seat = Follows()
    assert isinstance(seat.fetch, Fetch)
    seat.begun(2, 8)
    seat.gradient(2)
    seat.begun(3, 9, commit(8, Ballot(1, 2)))
    seat.begun(4, 10, commit(9, Ballot(1, 3)))
    assert adopts(seat.arrives()) == [(2, 8)]
    assert seat.gradient(3) == [], "one after the other"
    assert adopts(seat.member.applied(b"8")) == [(3, 9)]
    (send,) = seat.member.applied(b"9")
    assert send.message.synced.digest == b"9"
    assert (seat.member.committed, seat.member.boosted_at) == (9, 3)
    assert seat.member.phase is MemberPhase.FOLLOWING


def test_a_gradient_that_was_not_committed_comes_to_nothing():
    seat = Follows()
    seat.arrives()
    seat.begun(2, 8)
    seat.gradient(2)
    seat.queried(Ballot(1, 3))
    seat.begun(4, 8)
    seat.gradient(4)
    assert adopts(seat.begun(5, 9, commit(8, Ballot(1, 4)))) == [(4, 8)]


def test_who_has_caught_up_votes_when_asked_and_enters_with_the_commit():
    seat = Follows()
    assert bodies(seat.arrives()) == ["synced"]
    seat.begun(2, 8)
    assert seat.hears(Ballot(1, 2), reduce=pb.Reduce()) == [], "its gradient isn't here yet"
    assert seat.gradient(2) == [Adopt(Ballot(1, 2))]
    assert bodies(seat.member.reduced(Ballot(1, 2), READY)) == ["ready"]
    inside = pb.Begin(step=9, members=[*STAGE, pb.Place(node="self", stage=1)])
    apply, start = seat.hears(
        Ballot(1, 3),
        step=pb.Step(commit=commit(8, Ballot(1, 2), seat.member.last), begin=inside),
    )
    assert isinstance(apply, Apply)
    assert isinstance(start, StartAttempt)
    assert seat.member.following is None
    assert seat.member.phase is MemberPhase.RUNNING


def test_records_of_an_attempt_before_it_followed_are_none_of_one_that_it_enters():
    seat = Follows()
    seat.member.records = [pb.Home(microbatch=7)]
    seat.arrives()
    seat.begun(2, 8)
    seat.hears(Ballot(1, 2), reduce=pb.Reduce())
    seat.gradient(2)
    seat.member.reduced(Ballot(1, 2), READY)
    made = commit(8, Ballot(1, 2), seat.member.last)
    made.records = hash_of_records([pb.Home(microbatch=1)])
    assert seat.hears(Ballot(1, 3), step=pb.Step(commit=made)) == [Apply(made)], "no accusation"


@pytest.mark.parametrize("ready", [False, True])
def test_when_the_others_did_not_wait_for_its_vote_it_goes_on_following(ready: bool):
    seat = Follows()
    seat.arrives()
    seat.begun(2, 8)
    seat.gradient(2)
    seat.hears(Ballot(1, 2), reduce=pb.Reduce())
    if ready:
        seat.member.reduced(Ballot(1, 2), READY)
    effects = seat.begun(3, 9, commit(8, Ballot(1, 2), seat.member.last))
    assert [e.commit.step for e in effects if isinstance(e, Apply)] == [8]
    assert seat.member.phase is MemberPhase.FOLLOWING
    assert seat.member.reduced(Ballot(1, 2), READY) == []
    seat.member.applied(b"8")
    seat.gradient(3)
    assert seat.hears(Ballot(1, 3), reduce=pb.Reduce()) == [Adopt(Ballot(1, 3))]


def test_the_newest_commit_is_doubted_in_a_new_ballot_unless_it_is_applied():
    seat = Follows()
    seat.begun(2, 8)
    seat.begun(3, 9, commit(8, Ballot(1, 2)))
    seat.begun(4, 10, commit(9, Ballot(1, 3)))
    answer = status(seat.queried(Ballot(1, 5)))
    assert (answer.committed, answer.following, answer.heard) == (0, 7, 8)
    seat.hears(Ballot(1, 5), step=pb.Step(commit=commit(9, Ballot(1, 3))))
    assert status(seat.queried(Ballot(1, 6))).heard == 8
    seat.begun(7, 9)
    seat.begun(8, 10, commit(9, Ballot(1, 7)))
    seat.arrives()
    assert adopts(seat.gradient(2)) == [(2, 8)]
    seat.gradient(3)
    assert seat.member.applied(b"8") == [], "attempt 3 was void"
    assert adopts(seat.gradient(7)) == [(7, 9)]


def test_a_query_between_two_commits_is_answered_before_the_next_is_applied():
    seat = Follows()
    seat.arrives()
    for attempt in (2, 3, 4):
        seat.begun(attempt, attempt + 6, commit(attempt + 5, Ballot(1, attempt - 1)))
        seat.gradient(attempt)
    assert seat.member.changing
    assert bodies(seat.queried(Ballot(1, 6))) == ["account"]
    effects = seat.member.applied(b"8")
    assert status(effects[:1]).committed == 8


def test_gradients_that_overtake_the_drivers_messages_count_and_no_other_feeder_is_awaited():
    seat = Follows()
    seat.gradient(2)
    seat.gradient(3)
    seat.begun(2, 8)
    seat.begun(3, 9, commit(8, Ballot(1, 2)))
    seat.begun(4, 10, commit(9, Ballot(1, 3)))
    assert seat.gradient(4) == []
    assert seat.member.link_lost("other") == []
    assert adopts(seat.arrives()) == [(2, 8)]
    assert adopts(seat.member.applied(b"8")) == [(3, 9)]


def test_a_gradient_that_will_not_come_is_not_awaited_when_its_attempt_begins_later():
    seat = Follows()
    assert seat.member.gradient_missed(Ballot(1, 2)) == []
    seat.begun(2, 8)
    assert "failed" in bodies(seat.begun(3, 9, commit(8, Ballot(1, 2))))


@pytest.mark.parametrize(
    "how", ["missed commit", "feeder lost", "overtaken", "too many", "fetch", "relearned"]
)
def test_who_cannot_follow_any_more_says_so(how: str):
    seat = Follows()
    seat.begun(2, 8)
    effects: list[Effect] = []
    match how:
        case "missed commit":
            effects = seat.begun(4, 10, commit(9, Ballot(1, 3)))
        case "feeder lost":
            seat.begun(3, 9, commit(8, Ballot(1, 2)))
            assert seat.member.link_lost("driver") == []
            effects = seat.member.link_lost("other")
        case "overtaken":
            seat.begun(3, 9, commit(8, Ballot(1, 2)))
            effects = seat.gradient(3)
        case "too many":
            assert seat.member.gradient_missed(Ballot(1, 2)) == [], "it may come to nothing"
            effects = seat.begun(3, 9, commit(8, Ballot(1, 2)))
        case "fetch":
            effects = seat.member.failed(Ballot(1, 1), "no source", [])
        case "relearned":
            decided = commit(8, Ballot(1, 2))
            decided.relearned.extend([0, 3, 0])
            effects = seat.begun(3, 9, decided)
    assert "failed" in bodies(effects)
    assert seat.member.phase is MemberPhase.IDLE
    assert not seat.member.arrived(Ballot(1, 1))
    assert seat.gradient(5) == []
    assert seat.member.link_lost("other") == []


def test_a_joiner_that_was_told_to_wait_with_the_others_follows_no_longer():
    seat = Follows()
    seat.queried(Ballot(1, 2))
    seat.hears(Ballot(1, 2), sync=sync(9))
    assert seat.member.phase is MemberPhase.SYNCING
    assert not seat.member.arrived(Ballot(1, 1))
    assert seat.member.arrived(Ballot(1, 2))


# --- frames


def test_frames_of_the_attempt_are_taken_older_dropped_newer_held(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1))
    assert seat.member.frames(Ballot(1, 2)) is FrameUse.TAKE
    assert seat.member.frames(Ballot(1, 1)) is FrameUse.DROP
    assert seat.member.frames(Ballot(1, 3)) is FrameUse.HOLD
    seat.queried(Ballot(1, 3))
    assert seat.member.frames(Ballot(1, 2)) is FrameUse.DROP, "given up"
    assert seat.member.frames(Ballot(1, 4)) is FrameUse.HOLD


# --- views and halts


def test_a_newer_view_without_this_node_ends_it(seat: Told):
    assert seat.member.viewed(view(1, {"driver": 0})) == []
    (rejoin,) = seat.member.viewed(view(2, {"driver": 0, "other": 2}))
    assert isinstance(rejoin, Rejoin)
    assert "view 2" in rejoin.reason


def test_without_stage_0_a_newcomer_is_waited_for_and_what_is_ready_is_kept(seat: Told):
    seat.make_ready(1, Ballot(1, 2))
    assert seat.member.viewed(view(2, {"self": 1, "other": 2}, driver="")) == []
    seat.member.viewed(view(4))
    assert status(seat.hears(Ballot(4, 1), query=pb.Query())).ready == 1


def test_a_halted_member_goes_on_when_a_driver_asks(seat: Told):
    seat.hears(Ballot(1, 2), step=begin(1))
    effects = seat.hears(Ballot(1, 3), halt=pb.Halt(reason="lost"))
    assert effects[0] == DropAttempt(Ballot(1, 2))
    assert seat.member.frames(Ballot(1, 4)) is FrameUse.DROP
    seat.queried(Ballot(1, 4))
    seat.hears(Ballot(1, 5), step=begin(1))
    assert (seat.member.phase, seat.member.halt) == (MemberPhase.RUNNING, None)


# --- messages in any order

kinds = ["query", "begin", "ready", "commit", "sync", "halt", "failed", "changed", "arrived"]
ahead = st.sampled_from([0, 0, 1, 1, 1, -1])  # offset from the promised ballot
events = st.tuples(st.sampled_from(kinds), ahead, st.sampled_from([0, 0, 0, 1, -1]), st.booleans())


@given(st.lists(events, min_size=10, max_size=60))
def test_promises_hold_and_each_step_is_applied_once_on_the_one_before(
    happened: list[tuple[str, int, int, bool]],
):
    seat = Told()
    member = seat.member
    for kind, newer, further, of_this_attempt in happened:
        promised, committed, attempt = member.promised, member.committed, member.attempt
        was_ready = member.phase is MemberPhase.READY
        ballot = Ballot(max(1, promised.view), max(0, promised.attempt + newer))
        step = max(1, committed + 1 + further)
        effects: list[Effect] = []
        match kind:
            case "query":
                effects = seat.queried(ballot)
            case "begin":
                effects = seat.hears(ballot, step=begin(step))
            case "ready":
                effects = seat.make_ready(step, ballot)
            case "commit":
                of = attempt if of_this_attempt else ballot
                effects = seat.hears(
                    ballot, step=pb.Step(commit=commit(step, of, seat.member.last))
                )
            case "sync" if not member.changing:
                effects = seat.hears(ballot, sync=sync(committed + 1))
            case "halt":
                effects = seat.hears(ballot, halt=pb.Halt())
            case "failed":
                effects = member.failed(ballot, "", [])
            case "changed" if member.changing:
                effects = member.applied(b"")
            case "arrived" if not member.changing and member.arrived(ballot):
                effects = member.fetched(pb.Synced(step=member.sync.step), pb.Commit(), 0)
                committed = member.committed
        assert member.promised >= promised
        applies = [effect.commit for effect in effects if isinstance(effect, Apply)]
        assert member.committed == committed + len(applies)
        for applied in applies:
            assert was_ready
            assert (Ballot.of(applied.ballot), applied.step) == (attempt, member.committed)
        for effect in effects:
            if isinstance(effect, StartAttempt):
                assert effect.ballot >= promised
                assert effect.begin.step == member.committed + 1


# --- an attempt that goes on without lost nodes


def going_on(step: int, since: Ballot) -> pb.Step:
    return begin(step, since=since.message())


def attempting(seat: Told, phase: MemberPhase) -> None:
    seat.hears(Ballot(1, 1), step=begin(1))
    if phase is not MemberPhase.RUNNING:
        seat.hears(Ballot(1, 1), reduce=pb.Reduce())
    if phase is MemberPhase.READY:
        seat.member.reduced(Ballot(1, 1), READY)
    assert seat.member.phase is phase


@pytest.mark.parametrize("phase", [MemberPhase.RUNNING, MemberPhase.REDUCING, MemberPhase.READY])
def test_an_attempt_goes_on_from_wherever_it_stands(seat: Told, phase: MemberPhase):
    attempting(seat, phase)
    step = going_on(1, Ballot(1, 1))
    assert seat.hears(Ballot(1, 2), step=step) == [GoOn(Ballot(1, 2), step.begin)]
    assert seat.member.reduced(Ballot(1, 1), READY) == []  # the sum of the old ballot doesn't count
    assert seat.hears(Ballot(1, 2), reduce=pb.Reduce()) == [AllHome(Ballot(1, 2))]
    assert bodies(seat.member.reduced(Ballot(1, 2), READY)) == ["ready"]
    assert seat.commits(1, Ballot(1, 1)) == []  # the member voted under another ballot
    assert Apply(commit(1, Ballot(1, 2))) in seat.hears(
        Ballot(1, 4), step=pb.Step(commit=commit(1, Ballot(1, 2)))
    )


def test_what_was_sent_by_an_older_plan_is_taken_and_by_a_newer_one_kept_for_later(seat: Told):
    seat.hears(Ballot(1, 1), step=begin(1))
    assert seat.member.frames(Ballot(1, 2)) is FrameUse.HOLD
    seat.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))
    assert seat.member.frames(Ballot(1, 1)) is FrameUse.TAKE
    assert seat.member.frames(Ballot(1, 2)) is FrameUse.TAKE
    assert seat.member.frames(Ballot(1, 3)) is FrameUse.HOLD
    assert seat.member.frames(Ballot(1, 0)) is FrameUse.DROP


def test_nothing_goes_on_that_has_not_begun_here(seat: Told):
    assert bodies(seat.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))) == ["failed"]
    seat.hears(Ballot(1, 3), step=begin(1))
    assert bodies(seat.hears(Ballot(1, 5), step=going_on(1, Ballot(1, 2)))) == ["failed"]


def test_who_is_cut_off_tells_the_driver_and_goes_on(seat: Told):
    seat.hears(Ballot(1, 1), step=begin(1))
    (send,) = seat.member.cut_off(Ballot(1, 1), "other", "reset")
    assert (send.to, send.message.cut.node) == ("driver", "other")
    assert seat.member.phase is MemberPhase.RUNNING
    assert seat.member.cut_off(Ballot(1, 0), "other", "an older attempt's frame") == []
    seat.queried(Ballot(1, 2))
    assert seat.member.cut_off(Ballot(1, 1), "other", "it is over") == []


def test_a_failure_under_the_first_ballot_fails_the_attempt_that_goes_on(seat: Told):
    seat.hears(Ballot(1, 1), step=begin(1))
    seat.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))
    effects = seat.member.failed(Ballot(1, 1), "damaged", ["other"])
    assert DropAttempt(Ballot(1, 2)) in effects
    assert bodies(effects) == ["failed"]


def test_who_is_told_to_copy_what_it_has_has_nothing(seat: Told) -> None:
    """Its replicas have another state of this step."""
    seat.member.committed = 4
    sync = pb.Sync(step=4, method="replica", follow=True)
    seat.member.received("driver", message(Ballot(1, 1), sync=sync))
    answer = status(seat.member.received("driver", message(Ballot(1, 2), query=pb.Query())))
    assert (answer.committed, answer.following) == (0, 4)


def test_who_sends_a_state_that_cannot_be_used_is_named_to_the_driver_and_to_the_registry():
    seat = Told()
    assert seat.member.accuse("other", "so", SHAPE) == [Suspect("other", "so", SHAPE)]
    seat.queried(Ballot(1, 1))
    (send,) = seat.member.accuse("other", "so", SHAPE)
    assert (send.to, Ballot.of(send.message.ballot)) == ("driver", NEVER)
    assert send.message.cut == pb.Cut(node="other", reason="so", cause=SHAPE)
    assert seat.member.accuse("driver", "so", SHAPE) == [Suspect("driver", "so", SHAPE)]
