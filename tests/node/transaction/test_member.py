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
    """A member of stage 1 of 2, and what the driver tells it."""

    def __init__(self) -> None:
        self.member = MemberSide("self", 1)
        self.member.viewed(view(1))

    def hears(self, ballot: Ballot, peer: str = "driver", **body: object) -> list[Effect]:
        return self.member.received(peer, message(ballot, **body))

    def queried(self, ballot: Ballot) -> list[Effect]:
        """By the driver of a view that has come, too."""
        if ballot.view > self.member.view.number:
            self.member.viewed(view(ballot.view))
        return self.hears(ballot, query=pb.Query())

    def make_ready(self, step: int, ballot: Ballot) -> list[Effect]:
        self.hears(ballot, step=begin(step))
        self.hears(ballot, reduce=pb.Reduce())
        return self.member.reduced(ballot, READY)

    def commits(self, step: int, ballot: Ballot) -> list[Effect]:
        """The commit of what is ready, in the next ballot."""
        after = Ballot(ballot.view, ballot.attempt + 1)
        decided = commit(step, ballot, self.member.last)
        return self.hears(after, step=pb.Step(commit=decided))


@pytest.fixture
def told() -> Told:
    return Told()


# --- fencing


def test_a_begin_that_says_what_is_other_than_in_a_view_is_of_the_view_that_was_asked_in(
    told: Told,
):
    others = pb.Begin(step=1, members_of=pb.Ballot(view=1), left=["other"])
    assert not status(told.queried(Ballot(1, 1))).viewless
    told.member.viewed(view(2, {"driver": 0, "self": 1, "new": 2}))
    assert not status(told.hears(Ballot(1, 2), query=pb.Query())).viewless, "it was here"
    (started,) = told.hears(Ballot(1, 3), step=pb.Step(begin=others))
    assert isinstance(started, StartAttempt)
    assert {place.node: place.stage for place in started.begin.members} == {"driver": 0, "self": 1}


def test_who_has_only_a_newer_view_than_it_is_asked_in_says_so(told: Told):
    told.member.viewed(view(3))
    assert status(told.hears(Ballot(2, 1), query=pb.Query())).viewless
    others = pb.Begin(step=1, members_of=pb.Ballot(view=2))
    (send,) = told.hears(Ballot(2, 2), step=pb.Step(begin=others))
    assert "the plan lists changes since" in send.message.failed.reason
    assert not status(told.hears(Ballot(3, 1), query=pb.Query())).viewless


def test_an_older_ballot_has_no_effect_and_is_answered_with_the_newer(told: Told):
    told.make_ready(1, Ballot(1, 5))
    (send,) = told.hears(Ballot(1, 4), step=begin(1))
    assert send.message.WhichOneof("body") == "stale"
    assert Ballot.of(send.message.ballot) == Ballot(1, 5)
    assert told.member.phase is MemberPhase.READY


def test_a_commit_of_before_a_query_has_no_effect_after_it(told: Told):
    told.make_ready(1, Ballot(1, 5))
    told.queried(Ballot(1, 8))
    assert bodies(told.commits(1, Ballot(1, 5))) == ["stale"]
    assert told.member.committed == 0


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
    told: Told, number: int, body: dict[str, object]
):
    (event,) = told.hears(Ballot(number, 1), peer="other", **body)
    assert isinstance(event, MessageRefused)
    assert "driver drives view 1, the newest one here" in event.why
    assert (told.member.promised, told.member.halt) == (NEVER, None)
    assert told.hears(Ballot(number, 2), peer="other", **body) == [], "it is said once"


def test_not_even_its_driver_is_obeyed_for_a_view_that_is_not_here(told: Told):
    (event,) = told.hears(Ballot(2, 1), query=pb.Query())
    assert isinstance(event, MessageRefused)
    told.member.viewed(view(2, driver="other"))
    assert bodies(told.hears(Ballot(2, 1), peer="other", query=pb.Query())) == ["status"]


def test_a_driver_of_before_is_obeyed_no_more(told: Told):
    told.make_ready(1, Ballot(1, 2))
    told.member.viewed(view(2, driver="other"))
    (event,) = told.commits(1, Ballot(1, 2))
    assert isinstance(event, MessageRefused)
    answer = told.hears(Ballot(2, 1), peer="other", query=pb.Query())
    assert [e.message.status.ready for e in answer if isinstance(e, Send)] == [1]


def test_where_nobody_drives_nobody_is_obeyed(told: Told):
    told.member.viewed(view(2, driver=""))
    (event,) = told.hears(Ballot(2, 1), peer="", query=pb.Query())
    assert isinstance(event, MessageRefused)


def test_a_repeated_query_is_answered_again(told: Told):
    assert told.queried(Ballot(1, 1)) == told.queried(Ballot(1, 1))


# --- an attempt


def test_an_attempt_from_begin_to_commit(told: Told):
    ballot = Ballot(1, 2)
    (start,) = told.hears(ballot, step=begin(1))
    assert isinstance(start, StartAttempt)
    assert told.hears(ballot, reduce=pb.Reduce()) == [AllHome(ballot)]
    (send,) = told.member.reduced(ballot, READY)
    assert (send.message.ready.step, send.message.ready.squared_norm) == (1, 2.0)
    both = pb.Step(commit=commit(1, ballot), begin=begin(2).begin)
    apply, start = told.hears(Ballot(1, 3), step=both)
    assert isinstance(apply, Apply), "the weights change before the next step begins"
    assert isinstance(start, StartAttempt)
    assert (told.member.committed, told.member.step) == (1, 2)


def test_who_keeps_the_records_votes_once_it_has_them(told: Told):
    ballot, records = Ballot(1, 2), pb.Records(microbatches=[pb.Home(microbatch=0)])
    step = begin(1)
    step.begin.keeps = True
    told.hears(ballot, step=step)
    assert told.member.reduced(ballot, READY) == []
    assert told.member.phase is MemberPhase.RUNNING
    assert bodies(told.hears(ballot, records=records)) == ["ready"]
    assert told.hears(ballot, reduce=pb.Reduce()) == []
    told.queried(Ballot(1, 3))
    again = Ballot(1, 4)
    told.hears(again, step=step)
    assert told.hears(ballot, records=records) != [], "that is stale"
    assert told.member.reduced(again, READY) == [], "they are another attempt's"
    assert bodies(told.hears(again, records=records)) == ["ready"]


def test_who_has_voted_still_says_whom_it_cannot_reach_until_it_hears_the_commit(told: Told):
    paired = {**SWARM, "other": 1}
    told.member.viewed(view(2, paired))
    ballot = Ballot(2, 1)
    members = [pb.Place(node=node, stage=stage) for node, stage in paired.items()]
    told.hears(ballot, step=begin(1, members=members))
    told.member.reduced(ballot, READY)
    assert bodies(told.member.cut_off(ballot, "driver", "the link broke")) == ["cut"]
    told.commits(1, ballot)
    assert told.member.cut_off(ballot, "driver", "the link broke") == []


@pytest.mark.parametrize(("step", "ballot"), [(1, Ballot(1, 1)), (2, Ballot(1, 2))])
def test_nothing_else_is_committed_than_what_is_ready(told: Told, step: int, ballot: Ballot):
    told.make_ready(1, Ballot(1, 2))
    assert told.hears(Ballot(1, 3), step=pb.Step(commit=commit(step, ballot))) == []
    assert told.member.committed == 0


@pytest.mark.parametrize(("fixed", "applied"), [([0, 3, 9], True), ([], True), ([0, 2, 0], False)])
def test_what_was_relearned_enters_as_it_was_offered_or_not_at_all(
    told: Told, fixed: list[int], applied: bool
):
    told.hears(Ballot(1, 2), step=begin(1))
    told.hears(Ballot(1, 2), reduce=pb.Reduce())
    (send,) = told.member.reduced(
        Ballot(1, 2), pb.Ready(squared_norm=2.0, finite=True, relearned=3, relearning=5)
    )
    assert (send.message.ready.relearned, send.message.ready.relearning) == (3, 5)
    decided = commit(1, Ballot(1, 2))
    decided.relearned.extend(fixed)
    effects = told.hears(Ballot(1, 3), step=pb.Step(commit=decided))
    assert any(isinstance(effect, Apply) for effect in effects) == applied
    assert any(isinstance(effect, Suspect) for effect in effects) != applied


@pytest.mark.parametrize(("step", "kind"), [(2, pb.Begin.TRAIN), (1, pb.Begin.EVALUATE)])
def test_a_step_that_does_not_follow_is_not_begun(told: Told, step: int, kind: int):
    (send,) = told.hears(Ballot(1, 2), step=begin(step, kind=kind))
    assert f"asked to begin step {step}" in send.message.failed.reason
    assert told.member.phase is MemberPhase.IDLE


def test_who_cannot_know_who_takes_part_says_so_and_begins_nothing(told: Told):
    told.hears(Ballot(1, 2), step=begin(1, members=[pb.Place(node="self", stage=1)]))
    since = Ballot(1, 3).message()
    (send,) = told.hears(Ballot(1, 4), step=begin(1, members_of=since, left=["other"]))
    assert "the plan lists changes since" in send.message.failed.reason
    assert told.member.attempt == Ballot(1, 2)


def test_what_was_reduced_for_an_older_attempt_is_nothing(told: Told):
    told.hears(Ballot(1, 2), step=begin(1))
    told.hears(Ballot(1, 2), reduce=pb.Reduce())
    told.queried(Ballot(1, 3))
    assert told.member.reduced(Ballot(1, 2), READY) == []
    assert told.member.phase is MemberPhase.IDLE


def test_a_failure_is_told_once_and_leaves_no_trace(told: Told):
    told.hears(Ballot(1, 2), step=begin(1))
    drop, send = told.member.failed(Ballot(1, 2), "lost", ["other"])
    assert drop == DropAttempt(Ballot(1, 2))
    assert list(send.message.failed.accused) == ["other"]
    assert told.member.failed(Ballot(1, 2), "lost again", []) == []
    told.hears(Ballot(1, 4), step=begin(1))
    assert told.member.failed(Ballot(1, 2), "lost", []) == [], "that is over"
    assert told.member.phase is MemberPhase.RUNNING


# --- queries


def test_what_is_ready_outlives_a_query_and_can_be_committed_by_the_next_driver(told: Told):
    told.make_ready(1, Ballot(1, 2))
    answer = status(told.queried(Ballot(2, 1)))
    assert (answer.committed, answer.ready) == (0, 1)
    assert Ballot.of(answer.ready_ballot) == Ballot(1, 2)
    (apply,) = told.hears(Ballot(2, 1), step=pb.Step(commit=commit(1, Ballot(1, 2))))
    assert isinstance(apply, Apply)


def test_what_runs_is_dropped_by_a_query(told: Told):
    told.hears(Ballot(1, 2), step=begin(1))
    effects = told.queried(Ballot(1, 3))
    assert effects[0] == DropAttempt(Ballot(1, 2))
    assert (status(effects).ready, status(effects).attempting) == (0, 1)


def test_a_query_while_applying_is_answered_afterwards(told: Told):
    told.make_ready(1, Ballot(1, 2))
    told.commits(1, Ballot(1, 2))
    assert told.queried(Ballot(1, 4)) == []
    assert told.queried(Ballot(1, 5)) == []
    answer = status(told.member.applied(b"new"))
    assert (answer.committed, answer.digest) == (1, b"new")
    assert told.member.applied(b"new") == [], "once"


def test_who_hangs_while_applying_says_so_to_each_driver_that_asks(told: Told):
    told.make_ready(1, Ballot(1, 2))
    told.commits(1, Ballot(1, 2))
    told.member.hang = "its compute thread hangs"
    for view_number, driver in ((2, "b"), (3, "c")):
        told.member.viewed(view(view_number, driver=driver))
        (said,) = told.hears(Ballot(view_number, 1), peer=driver, query=pb.Query())
        assert (said.to, said.message.account.hang) == (driver, "its compute thread hangs")
    answer = told.member.applied(b"new")
    assert bodies(answer) == ["status"], "it has gone on"


# --- state from peers


def sync(step: int) -> pb.Sync:
    return pb.Sync(step=step, method="replica", lineage=2)


def test_state_is_fetched_and_put_in_place(told: Told):
    (fetch,) = told.hears(Ballot(1, 2), sync=sync(7))
    assert isinstance(fetch, Fetch)
    assert told.member.arrived(fetch.ballot)
    effects = told.member.fetched(pb.Synced(step=7, digest=b"d"), commit(7, Ballot(1, 1)), 3)
    assert bodies(effects) == ["synced"]
    assert (told.member.committed, told.member.boosted_at, told.member.lineage) == (7, 3, 2)
    assert told.member.phase is MemberPhase.IDLE


def test_state_that_comes_after_a_query_is_not_wanted(told: Told):
    told.hears(Ballot(1, 2), sync=sync(7))
    told.queried(Ballot(1, 3))
    assert not told.member.arrived(Ballot(1, 2))
    assert status(told.queried(Ballot(1, 3))).committed == 0


def test_a_state_that_relearning_will_overwrite_is_offered_to_nobody(told: Told):
    told.hears(Ballot(1, 2), sync=sync(7))
    assert told.member.voided(Ballot(1, 2))
    answer = status(told.queried(Ballot(2, 1)))
    assert (answer.committed, answer.lineage) == (0, 0)
    assert not told.member.voided(Ballot(1, 2)), "nobody wants it any longer"


def test_a_run_that_starts_over_does_so_without_weights_that_a_rebuild_has_overwritten():
    told = Told()
    told.queried(Ballot(1, 1))
    told.hears(Ballot(1, 2), sync=pb.Sync(step=1, method="checkfree"))
    assert told.member.voided(Ballot(1, 2))
    told.queried(Ballot(1, 3))
    (effect,) = told.hears(Ballot(1, 4), step=begin(1))
    assert isinstance(effect, Rejoin)


def test_a_query_while_state_is_put_in_place_is_answered_with_it(told: Told):
    told.hears(Ballot(1, 2), sync=sync(7))
    assert told.member.arrived(Ballot(1, 2))
    assert told.queried(Ballot(2, 1)) == []
    answer = status(told.member.fetched(pb.Synced(step=7, digest=b"d"), pb.Commit(step=7), 0))
    assert (answer.committed, answer.digest, answer.last.step) == (7, b"d", 7)


def test_a_fetch_that_fails_is_told(told: Told):
    told.hears(Ballot(1, 2), sync=sync(7))
    assert bodies(told.member.failed(Ballot(1, 2), "no source", [])) == ["failed"]


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
        """The others begin an attempt, with the commit of the one before."""
        begin = pb.Begin(step=step, members=STAGE, joining=JOINING)
        return self.hears(Ballot(1, attempt), step=pb.Step(commit=commit, begin=begin))

    def arrives(self) -> list[Effect]:
        assert self.member.arrived(Ballot(1, 1))
        return self.member.fetched(pb.Synced(step=7, digest=b"7"), commit(7, Ballot(0, 9)), 3)

    def gradient(self, attempt: int) -> list[Effect]:
        return self.member.gradient_came(Ballot(1, attempt), "other")


def adopts(effects: Sequence[Effect]) -> list[tuple[int, int]]:
    """The attempt of each gradient that is adopted, and the step of the commit applied with it."""
    pairs = list(pairwise(effects))
    return [(a.ballot.attempt, b.commit.step) for a, b in pairs if isinstance(b, Apply)]


def test_commits_heard_while_the_state_comes_are_applied_in_order_once_their_gradients_are_here():
    told = Follows()
    assert isinstance(told.fetch, Fetch)
    told.begun(2, 8)
    told.gradient(2)
    told.begun(3, 9, commit(8, Ballot(1, 2)))
    told.begun(4, 10, commit(9, Ballot(1, 3)))
    assert adopts(told.arrives()) == [(2, 8)]
    assert told.gradient(3) == [], "one after the other"
    assert adopts(told.member.applied(b"8")) == [(3, 9)]
    (send,) = told.member.applied(b"9")
    assert send.message.synced.digest == b"9"
    assert (told.member.committed, told.member.boosted_at) == (9, 3)
    assert told.member.phase is MemberPhase.FOLLOWING


def test_a_gradient_that_was_not_committed_comes_to_nothing():
    told = Follows()
    told.arrives()
    told.begun(2, 8)
    told.gradient(2)
    told.queried(Ballot(1, 3))
    told.begun(4, 8)
    told.gradient(4)
    assert adopts(told.begun(5, 9, commit(8, Ballot(1, 4)))) == [(4, 8)]


def test_who_has_caught_up_votes_when_asked_and_enters_with_the_commit():
    told = Follows()
    assert bodies(told.arrives()) == ["synced"]
    told.begun(2, 8)
    assert told.hears(Ballot(1, 2), reduce=pb.Reduce()) == [], "its gradient isn't here yet"
    assert told.gradient(2) == [Adopt(Ballot(1, 2))]
    assert bodies(told.member.reduced(Ballot(1, 2), READY)) == ["ready"]
    inside = pb.Begin(step=9, members=[*STAGE, pb.Place(node="self", stage=1)])
    apply, start = told.hears(
        Ballot(1, 3),
        step=pb.Step(commit=commit(8, Ballot(1, 2), told.member.last), begin=inside),
    )
    assert isinstance(apply, Apply)
    assert isinstance(start, StartAttempt)
    assert told.member.following is None
    assert told.member.phase is MemberPhase.RUNNING


def test_records_of_an_attempt_before_it_followed_are_none_of_one_that_it_enters():
    told = Follows()
    told.member.records = [pb.Home(microbatch=7)]
    told.arrives()
    told.begun(2, 8)
    told.hears(Ballot(1, 2), reduce=pb.Reduce())
    told.gradient(2)
    told.member.reduced(Ballot(1, 2), READY)
    made = commit(8, Ballot(1, 2), told.member.last)
    made.records = hash_of_records([pb.Home(microbatch=1)])
    assert told.hears(Ballot(1, 3), step=pb.Step(commit=made)) == [Apply(made)], "no accusation"


@pytest.mark.parametrize("ready", [False, True])
def test_when_the_others_did_not_wait_for_its_vote_it_goes_on_following(ready: bool):
    told = Follows()
    told.arrives()
    told.begun(2, 8)
    told.gradient(2)
    told.hears(Ballot(1, 2), reduce=pb.Reduce())
    if ready:
        told.member.reduced(Ballot(1, 2), READY)
    effects = told.begun(3, 9, commit(8, Ballot(1, 2), told.member.last))
    assert [e.commit.step for e in effects if isinstance(e, Apply)] == [8]
    assert told.member.phase is MemberPhase.FOLLOWING
    assert told.member.reduced(Ballot(1, 2), READY) == []
    told.member.applied(b"8")
    told.gradient(3)
    assert told.hears(Ballot(1, 3), reduce=pb.Reduce()) == [Adopt(Ballot(1, 3))]


def test_the_newest_commit_is_doubted_in_a_new_ballot_unless_it_is_applied():
    told = Follows()
    told.begun(2, 8)
    told.begun(3, 9, commit(8, Ballot(1, 2)))
    told.begun(4, 10, commit(9, Ballot(1, 3)))
    answer = status(told.queried(Ballot(1, 5)))
    assert (answer.committed, answer.following, answer.heard) == (0, 7, 8)
    told.hears(Ballot(1, 5), step=pb.Step(commit=commit(9, Ballot(1, 3))))
    assert status(told.queried(Ballot(1, 6))).heard == 8
    told.begun(7, 9)
    told.begun(8, 10, commit(9, Ballot(1, 7)))
    told.arrives()
    assert adopts(told.gradient(2)) == [(2, 8)]
    told.gradient(3)
    assert told.member.applied(b"8") == [], "attempt 3 was void"
    assert adopts(told.gradient(7)) == [(7, 9)]


def test_a_query_between_two_commits_is_answered_before_the_next_is_applied():
    told = Follows()
    told.arrives()
    for attempt in (2, 3, 4):
        told.begun(attempt, attempt + 6, commit(attempt + 5, Ballot(1, attempt - 1)))
        told.gradient(attempt)
    assert told.member.changing
    assert told.queried(Ballot(1, 6)) == []
    effects = told.member.applied(b"8")
    assert status(effects[:1]).committed == 8


@pytest.mark.parametrize(
    "how", ["missed commit", "feeder lost", "overtaken", "too many", "fetch", "relearned"]
)
def test_who_cannot_follow_any_more_says_so(how: str):
    told = Follows()
    told.begun(2, 8)
    effects: list[Effect] = []
    match how:
        case "missed commit":
            effects = told.begun(4, 10, commit(9, Ballot(1, 3)))
        case "feeder lost":
            told.begun(3, 9, commit(8, Ballot(1, 2)))
            assert told.member.link_lost("driver") == []
            effects = told.member.link_lost("other")
        case "overtaken":
            told.begun(3, 9, commit(8, Ballot(1, 2)))
            effects = told.gradient(3)
        case "too many":
            assert told.member.gradient_missed(Ballot(1, 2)) == [], "it may come to nothing"
            effects = told.begun(3, 9, commit(8, Ballot(1, 2)))
        case "fetch":
            effects = told.member.failed(Ballot(1, 1), "no source", [])
        case "relearned":
            decided = commit(8, Ballot(1, 2))
            decided.relearned.extend([0, 3, 0])
            effects = told.begun(3, 9, decided)
    assert "failed" in bodies(effects)
    assert told.member.phase is MemberPhase.IDLE
    assert not told.member.arrived(Ballot(1, 1))
    assert told.gradient(5) == []
    assert told.member.link_lost("other") == []


def test_a_joiner_that_was_told_to_wait_with_the_others_follows_no_longer():
    told = Follows()
    told.queried(Ballot(1, 2))
    told.hears(Ballot(1, 2), sync=sync(9))
    assert told.member.phase is MemberPhase.SYNCING
    assert not told.member.arrived(Ballot(1, 1))
    assert told.member.arrived(Ballot(1, 2))


# --- frames


def test_frames_of_the_attempt_are_taken_older_dropped_newer_held(told: Told):
    told.hears(Ballot(1, 2), step=begin(1))
    assert told.member.frames(Ballot(1, 2)) is FrameUse.TAKE
    assert told.member.frames(Ballot(1, 1)) is FrameUse.DROP
    assert told.member.frames(Ballot(1, 3)) is FrameUse.HOLD
    told.queried(Ballot(1, 3))
    assert told.member.frames(Ballot(1, 2)) is FrameUse.DROP, "given up"
    assert told.member.frames(Ballot(1, 4)) is FrameUse.HOLD


# --- views and halts


def test_a_newer_view_without_this_node_ends_it(told: Told):
    assert told.member.viewed(view(1, {"driver": 0})) == []
    (rejoin,) = told.member.viewed(view(2, {"driver": 0, "other": 2}))
    assert isinstance(rejoin, Rejoin)
    assert "view 2" in rejoin.reason


def test_without_stage_0_a_newcomer_is_waited_for_and_what_is_ready_is_kept(told: Told):
    told.make_ready(1, Ballot(1, 2))
    assert told.member.viewed(view(2, {"self": 1, "other": 2}, driver="")) == []
    told.member.viewed(view(4))
    assert status(told.hears(Ballot(4, 1), query=pb.Query())).ready == 1


def test_a_halted_member_goes_on_when_a_driver_asks(told: Told):
    told.hears(Ballot(1, 2), step=begin(1))
    effects = told.hears(Ballot(1, 3), halt=pb.Halt(reason="lost"))
    assert effects[0] == DropAttempt(Ballot(1, 2))
    assert told.member.frames(Ballot(1, 4)) is FrameUse.DROP
    told.queried(Ballot(1, 4))
    told.hears(Ballot(1, 5), step=begin(1))
    assert (told.member.phase, told.member.halt) == (MemberPhase.RUNNING, None)


# --- whatever comes

kinds = ["query", "begin", "ready", "commit", "sync", "halt", "failed", "changed", "arrived"]
ahead = st.sampled_from([0, 0, 1, 1, 1, -1])  # of the ballot promised, and of the next step
events = st.tuples(st.sampled_from(kinds), ahead, st.sampled_from([0, 0, 0, 1, -1]), st.booleans())


@given(st.lists(events, min_size=10, max_size=60))
def test_promises_hold_and_each_step_is_applied_once_on_the_one_before(
    happened: list[tuple[str, int, int, bool]],
):
    told = Told()
    member = told.member
    for kind, newer, further, of_this_attempt in happened:
        promised, committed, attempt = member.promised, member.committed, member.attempt
        was_ready = member.phase is MemberPhase.READY
        ballot = Ballot(max(1, promised.view), max(0, promised.attempt + newer))
        step = max(1, committed + 1 + further)
        effects: list[Effect] = []
        match kind:
            case "query":
                effects = told.queried(ballot)
            case "begin":
                effects = told.hears(ballot, step=begin(step))
            case "ready":
                effects = told.make_ready(step, ballot)
            case "commit":
                of = attempt if of_this_attempt else ballot
                effects = told.hears(
                    ballot, step=pb.Step(commit=commit(step, of, told.member.last))
                )
            case "sync" if not member.changing:
                effects = told.hears(ballot, sync=sync(committed + 1))
            case "halt":
                effects = told.hears(ballot, halt=pb.Halt())
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


def attempting(told: Told, phase: MemberPhase) -> None:
    told.hears(Ballot(1, 1), step=begin(1))
    if phase is not MemberPhase.RUNNING:
        told.hears(Ballot(1, 1), reduce=pb.Reduce())
    if phase is MemberPhase.READY:
        told.member.reduced(Ballot(1, 1), READY)
    assert told.member.phase is phase


@pytest.mark.parametrize("phase", [MemberPhase.RUNNING, MemberPhase.REDUCING, MemberPhase.READY])
def test_an_attempt_goes_on_from_wherever_it_stands(told: Told, phase: MemberPhase):
    attempting(told, phase)
    step = going_on(1, Ballot(1, 1))
    assert told.hears(Ballot(1, 2), step=step) == [GoOn(Ballot(1, 2), step.begin)]
    assert told.member.reduced(Ballot(1, 1), READY) == []  # of the sum that came to nothing
    assert told.hears(Ballot(1, 2), reduce=pb.Reduce()) == [AllHome(Ballot(1, 2))]
    assert bodies(told.member.reduced(Ballot(1, 2), READY)) == ["ready"]
    assert told.commits(1, Ballot(1, 1)) == []  # it is ready for another one
    assert Apply(commit(1, Ballot(1, 2))) in told.hears(
        Ballot(1, 4), step=pb.Step(commit=commit(1, Ballot(1, 2)))
    )


def test_what_was_sent_by_an_older_plan_is_taken_and_by_a_newer_one_kept_for_later(told: Told):
    told.hears(Ballot(1, 1), step=begin(1))
    assert told.member.frames(Ballot(1, 2)) is FrameUse.HOLD
    told.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))
    assert told.member.frames(Ballot(1, 1)) is FrameUse.TAKE
    assert told.member.frames(Ballot(1, 2)) is FrameUse.TAKE
    assert told.member.frames(Ballot(1, 3)) is FrameUse.HOLD
    assert told.member.frames(Ballot(1, 0)) is FrameUse.DROP


def test_nothing_goes_on_that_has_not_begun_here(told: Told):
    assert bodies(told.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))) == ["failed"]
    told.hears(Ballot(1, 3), step=begin(1))
    assert bodies(told.hears(Ballot(1, 5), step=going_on(1, Ballot(1, 2)))) == ["failed"]


def test_who_is_cut_off_tells_the_driver_and_goes_on(told: Told):
    told.hears(Ballot(1, 1), step=begin(1))
    (send,) = told.member.cut_off(Ballot(1, 1), "other", "reset")
    assert (send.to, send.message.cut.node) == ("driver", "other")
    assert told.member.phase is MemberPhase.RUNNING
    assert told.member.cut_off(Ballot(1, 0), "other", "an older attempt's frame") == []
    told.queried(Ballot(1, 2))
    assert told.member.cut_off(Ballot(1, 1), "other", "it is over") == []


def test_a_failure_under_the_first_ballot_fails_the_attempt_that_goes_on(told: Told):
    told.hears(Ballot(1, 1), step=begin(1))
    told.hears(Ballot(1, 2), step=going_on(1, Ballot(1, 1)))
    effects = told.member.failed(Ballot(1, 1), "damaged", ["other"])
    assert DropAttempt(Ballot(1, 2)) in effects
    assert bodies(effects) == ["failed"]


def test_who_is_told_to_copy_what_it_has_has_nothing(told: Told) -> None:
    """Its replicas have something else."""
    told.member.committed = 4
    sync = pb.Sync(step=4, method="replica", follow=True)
    told.member.received("driver", message(Ballot(1, 1), sync=sync))
    answer = status(told.member.received("driver", message(Ballot(1, 2), query=pb.Query())))
    assert (answer.committed, answer.following) == (0, 4)


def test_who_sends_a_state_that_cannot_be_used_is_named_to_the_driver_and_to_the_registry():
    told = Told()
    assert told.member.accuse("other", "so", SHAPE) == [Suspect("other", "so", SHAPE)]
    told.queried(Ballot(1, 1))
    (send,) = told.member.accuse("other", "so", SHAPE)
    assert (send.to, Ballot.of(send.message.ballot)) == ("driver", NEVER)
    assert send.message.cut == pb.Cut(node="other", reason="so", cause=SHAPE)
    assert told.member.accuse("driver", "so", SHAPE) == [Suspect("driver", "so", SHAPE)]
