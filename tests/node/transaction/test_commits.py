"""Which commits a member applies: signed by the attempt's driver, after the last one applied.
Factors of a commit are sent once where all stages have the same."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import NUMBERS
from planaria.node.report.events import MessageRefused
from planaria.node.transaction.commits import collapsed, has_for, of_stage
from planaria.node.transaction.effects import Apply, Ballot, Effect, StartAttempt, Suspect
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import head, seal
from tests.node.transaction import test_member

RUN = "run"
DRIVER = Identity.generate()
SWARM = {"driver": 0, "self": 1, "other": 1}
ATTEMPT, NEXT = Ballot(1, 1), Ballot(1, 2)


def view() -> registry.View:
    """The run's first view, with the driver's key."""
    signed = test_member.view(1, SWARM)
    signed.run, signed.members[0].key = RUN, DRIVER.public
    return signed


def commit(step: int = 1, after: pb.Commit | None = None, loss: float = 2.0) -> pb.Commit:
    """A commit as the driver decides and signs it."""
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
    """A member that has voted for step 1."""

    def __init__(self, keeps: Sequence[pb.Home] = ()) -> None:
        self.member = MemberSide("self", 1)
        self.member.viewed(view())
        places = [pb.Place(node=node, stage=stage) for node, stage in SWARM.items()]
        begin = pb.Begin(step=1, members=places, keeps=bool(keeps))
        self.hears(ATTEMPT, step=pb.Step(begin=begin))
        self.hears(ATTEMPT, records=pb.Records(microbatches=keeps))
        self.member.reduced(ATTEMPT, pb.Ready(squared_norm=1.0, finite=True))

    def hears(self, ballot: Ballot, **body: object) -> list[Effect]:
        return self.member.received("driver", pb.Message(ballot=ballot.message(), **body))

    def decided(self, decided: pb.Commit, **step: object) -> list[Effect]:
        return self.hears(NEXT, step=pb.Step(commit=decided, **step))


def test_a_signed_commit_is_applied_at_once_and_the_next_attempt_begins() -> None:
    replica = Replica()
    begin = pb.Begin(step=2, members=[pb.Place(node="self", stage=1)])
    apply, start = replica.decided(commit(), begin=begin)
    assert apply == Apply(commit())
    assert isinstance(start, StartAttempt)
    assert replica.decided(commit()) == [], "a repetition"


def foreign(made: pb.Commit) -> pb.Commit:
    seal(made, Identity.generate(), RUN)
    return made


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (foreign(commit()), "step 1, which driver hasn't signed"),
        (commit(after=commit(step=5)), "follows another commit of step 0"),
    ],
)
def test_another_commit_is_refused_and_its_driver_accused(made: pb.Commit, why: str) -> None:
    replica = Replica()
    refused, suspect = replica.decided(made)
    assert isinstance(refused, MessageRefused) and why in refused.why
    assert isinstance(suspect, Suspect)
    assert (suspect.node, suspect.cause) == ("driver", NUMBERS)
    assert replica.member.committed == 0


@given(st.lists(st.sampled_from([0.5, 1.0, 1.1]), min_size=2, max_size=12))
def test_each_stage_finds_its_own(by_stage: list[float]) -> None:
    compact = collapsed(by_stage)
    assert len(compact) == (1 if len(set(by_stage)) == 1 else len(by_stage))
    assert [of_stage(compact, stage) for stage in range(len(by_stage))] == by_stage
    assert all(has_for(compact, stage) for stage in range(len(by_stage)))


def test_a_stage_may_have_none() -> None:
    for scales, stage in (([], 0), ([1.0, 1.1], 2)):
        assert not has_for(scales, stage)
        with pytest.raises(IndexError):
            of_stage(scales, stage)
