"""What members vote for, and what is found in the votes for a commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import NUMBERS, Proof
from planaria.bootstrap.votes import gathered, is_cast, is_without_vote
from planaria.bootstrap.votes import hash_of as hash_of_votes
from planaria.node.transaction.bounds import fault_to_member
from planaria.node.transaction.effects import Apply, Ballot, Effect, Send, Suspect
from planaria.node.transaction.member import MemberSide
from planaria.node.transaction.record_replication import WITNESSES, witnesses
from planaria.node.transaction.voting import (
    CHECKED,
    KEPT,
    KeptVotes,
    UnvotedError,
    check,
    has_voted,
    is_of,
    roll_of,
    sign,
    vote_of,
)
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chain import decision, hash_of, seal, with_votes, without_votes
from tests.node.transaction.test_driver import Told, sent, suspected

RUN = "run"
DRIVER = "driver/0"
STAGES = {DRIVER: 0, "self/0": 0, "b/1": 1, "c/1": 1}
IDENTITIES = {node: Identity.generate() for node in STAGES}
KEYS = {node: identity.public for node, identity in IDENTITIES.items()}
ATTEMPT = Ballot(1, 4)


def ready(node: str, by: Identity | None = None, **more: object) -> pb.Ready:
    """Its vote: stage 0 has a gradient of norm 3, stage 1 one of 4."""
    fields: dict[str, object] = {"step": 1, "squared_norm": 16.0 if STAGES[node] else 9.0, **more}
    fields["finite"] = math.isfinite(float(str(fields["squared_norm"])))
    said = pb.Ready(**fields)  # type: ignore[arg-type]
    sign(said, node, ATTEMPT, by or IDENTITIES[node], RUN)
    return said


def decided(cast: dict[str, pb.Ready], norm: float = 5.0, skipped: bool = False) -> pb.Commit:
    """By these votes, as the driver has sealed it."""
    votes = gathered(vote_of(node, ATTEMPT, one) for node, one in cast.items())
    commit = pb.Commit(
        step=1,
        ballot=ATTEMPT.message(),
        gradient_norm=norm,
        skipped=skipped,
        clip_scale=[1.0, 1.0],
        lr_scale=[1.0, 1.0],
        votes=votes,
        voted=hash_of_votes(votes),
    )
    seal(commit, IDENTITIES[DRIVER], RUN)
    return commit


def votes(**instead: pb.Ready) -> dict[str, pb.Ready]:
    """Of all; `instead`: of the node of that letter, or of `self`."""
    found = {node: ready(node) for node in STAGES}
    found |= {node: instead[node[:-2]] for node in STAGES if node[:-2] in instead}
    return found


def found_in(commit: pb.Commit, members: dict[str, int] = STAGES) -> tuple[str, Proof | None]:
    roll = roll_of(members, ATTEMPT)
    IDENTITIES[DRIVER].sign_message(roll, RUN)
    shown = KeptVotes().keep(decision(commit), commit.votes, roll)
    try:
        check(commit, shown, members, KEYS, RUN, Random(0))
    except UnvotedError as error:
        return str(error), error.proof
    return "", None


def proves(proof: Proof | None) -> bool:
    keys = {node.partition("/")[0]: key for node, key in KEYS.items()}
    return proof is not None and is_without_vote(proof, KEYS[DRIVER], keys, RUN)


# --- what is signed


def test_a_vote_is_about_gradient_and_state_and_not_about_what_is_said_beside() -> None:
    said = ready("b/1")
    said.seconds_per_microbatch, said.recording = 2.0, pb.LEDGER_SPARE
    said.standing_out.add(node="c/1", reason="it is long")
    assert is_cast(vote_of("b/1", ATTEMPT, said), KEYS["b/1"], RUN)
    for field, value in {"step": 2, "squared_norm": 17.0, "digest": b"x", "applied": b"x"}.items():
        other = pb.Ready()
        other.CopyFrom(said)
        setattr(other, field, value)
        assert not is_cast(vote_of("b/1", ATTEMPT, other), KEYS["b/1"], RUN), field
    assert not is_cast(vote_of("b/1", ATTEMPT.next(), said), KEYS["b/1"], RUN)


def test_a_commit_has_the_same_hash_without_its_votes_which_its_signature_is_over() -> None:
    commit = decided(votes())
    bare = without_votes(commit)
    assert not bare.HasField("votes")
    assert (hash_of(bare), decision(bare)) == (hash_of(commit), decision(commit))
    assert decision(bare).votes == hash_of_votes(commit.votes)
    assert with_votes(bare, commit.votes) == commit
    bare.voted = b"other"
    assert hash_of(bare) != hash_of(commit)


def test_votes_that_are_not_those_of_the_hash_are_refused() -> None:
    commit = decided(votes())
    message = pb.Message(ballot=pb.Ballot(view=1, attempt=5), step=pb.Step(commit=commit))
    assert fault_to_member(message, 1) == ""
    message.step.commit.votes.alike[0].nodes[0] = "somebody"
    what = "votes for the commit of step 1 that aren't those of its hash"
    assert fault_to_member(message, 1) == what


# --- what is found in them


def test_in_the_votes_of_all_nothing_is_found() -> None:
    assert found_in(decided(votes())) == ("", None)
    spoilt = {node: ready(node, squared_norm=math.nan) for node in STAGES}
    assert found_in(decided(spoilt, norm=math.nan, skipped=True)) == ("", None)


def test_a_vote_that_is_missing_is_found_and_proven() -> None:
    cast = votes()
    del cast["c/1"]
    why, proof = found_in(decided(cast))
    assert (why, proves(proof)) == ("without the vote of c/1", True)


def test_a_vote_that_is_made_up_is_found_and_proven() -> None:
    why, proof = found_in(decided(votes(c=ready("c/1", by=IDENTITIES[DRIVER]))))
    assert (why, proves(proof)) == ("with a vote that c/1 hasn't signed", True)


def test_what_the_commit_says_has_to_follow_from_the_votes() -> None:
    assert found_in(decided(votes(), norm=6.0)) == (
        "by a gradient of norm 6, and what was voted for is of 5",
        None,
    )
    spoilt = votes(b=ready("b/1", squared_norm=math.inf), c=ready("c/1", squared_norm=math.inf))
    assert found_in(decided(spoilt))[0] == "by a gradient that is not finite"
    assert found_in(decided(votes(), skipped=True))[0] == "as skipped, by finite gradients"
    assert found_in(decided(votes(b=ready("b/1", step=2))))[0] == "with a vote of b/1 for step 2"


def test_who_takes_no_part_has_no_vote() -> None:
    members = {node: stage for node, stage in STAGES.items() if node != "c/1"}
    assert found_in(decided(votes()), members)[0] == "with a vote of c/1, which has none"


def test_of_many_votes_each_looks_at_some() -> None:
    members = {f"m{number:02}/0": 0 for number in range(4 * CHECKED)}
    looked: list[int] = []
    for seed in range(40):
        cast = {node: pb.Ready(step=1, squared_norm=25.0, finite=True) for node in members}
        cast["m07/0"].signature = b"forged"
        commit = decided(cast)
        shown = KeptVotes().keep(decision(commit), commit.votes, roll_of(members, ATTEMPT))
        try:
            check(commit, shown, members, {"m07/0": KEYS["b/1"]}, RUN, Random(seed))
        except UnvotedError:
            looked.append(seed)
    assert len(looked) == 40, "of those whose key is known"
    keys = dict.fromkeys(members, KEYS["b/1"])
    with pytest.raises(UnvotedError, match="hasn't signed"):
        check(commit, shown, members, keys, RUN, Random(0))


def test_votes_are_kept_for_a_few_steps_and_shown_once_to_each() -> None:
    kept, commits = KeptVotes(), []
    for step in range(KEPT + 1):
        commit = decided(votes(), norm=float(step))
        kept.keep(decision(commit), commit.votes, roll_of(STAGES, ATTEMPT))
        commits.append(hash_of(commit))
    assert [kept.get(commit) is not None for commit in commits] == [False] + [True] * KEPT
    assert kept.show("b/1", commits[0]) is None
    assert kept.show("b/1", commits[-1]) is not None
    assert kept.show("b/1", commits[-1]) is None
    assert kept.show("c/1", commits[-1]) is not None


def test_a_few_of_stage_0_that_take_part_are_told_the_votes() -> None:
    stages = {f"{stage}-{node:02}": stage for stage in range(2) for node in range(20)}
    assert witnesses(stages, {}) == {f"0-{node:02}" for node in range(WITNESSES)}
    failing = {"0-00": pb.LEDGER_FAILING, "0-02": pb.LEDGER_SPARE}
    assert "0-00" not in witnesses(stages, failing)


# --- members


class Voter:
    """One that takes part, and what its driver tells it."""

    def __init__(self, node: str, votes_itself: bool = True) -> None:
        self.member = MemberSide(node, STAGES[node])
        self.member.identity = IDENTITIES[node]
        listed = [
            registry.Member(node=one, key=KEYS[one], seats=[registry.Seat(stage=stage)])
            for one, stage in STAGES.items()
        ]
        self.member.viewed(registry.View(run=RUN, number=1, members=listed, driver=DRIVER))
        places = [pb.Place(node=one, stage=stage) for one, stage in STAGES.items()]
        roll = roll_of(STAGES, ATTEMPT)
        IDENTITIES[DRIVER].sign_message(roll, RUN)
        begin = pb.Begin(step=1, members=places, roll=roll.signature)
        self.hears(ATTEMPT, step=pb.Step(begin=begin))
        self.hears(ATTEMPT, reduce=pb.Reduce())
        if votes_itself:
            (self.said,) = self.member.reduced(ATTEMPT, 9.0, True, 0.1, b"digest")

    def hears(self, ballot: Ballot, **body: object) -> list[Effect]:
        return self.member.received(DRIVER, pb.Message(ballot=ballot.message(), **body))

    def is_told(self, commit: pb.Commit) -> list[Effect]:
        return self.hears(ATTEMPT.next(), step=pb.Step(commit=commit))

    def status(self, **query: bool) -> pb.Status:
        (send,) = self.hears(Ballot(1, 9), query=pb.Query(**query))
        assert isinstance(send, Send)
        return send.message.status


def accused(effects: Sequence[Effect]) -> Suspect:
    (suspect,) = [effect for effect in effects if isinstance(effect, Suspect)]
    assert (suspect.node, suspect.cause) == (DRIVER, NUMBERS)
    return suspect


def applied(effects: Sequence[Effect]) -> list[pb.Commit]:
    return [effect.commit for effect in effects if isinstance(effect, Apply)]


def test_who_is_ready_signs_it() -> None:
    said = Voter("self/0").said
    assert isinstance(said, Send)
    assert is_cast(vote_of("self/0", ATTEMPT, said.message.ready), KEYS["self/0"], RUN)


def test_who_is_told_the_votes_keeps_them_and_shows_them_to_who_asks() -> None:
    one, commit = Voter("b/1"), decided(votes())
    one.is_told(commit)
    wanted = pb.VotesRequest(commit=hash_of(commit))
    (answer,) = one.member.asked_for_votes("c/1", wanted)
    assert isinstance(answer, Send)
    shown = answer.message.votes_shown.votes
    assert is_of(shown, decision(commit))
    assert has_voted(shown, "c/1", KEYS["c/1"], RUN)
    assert not has_voted(shown, "c/1", KEYS["b/1"], RUN)
    assert one.member.asked_for_votes("c/1", wanted) == []
    assert one.member.asked_for_votes("stranger/0", wanted) == []
    assert one.member.asked_for_votes("self/0", pb.VotesRequest(commit=b"unknown")) == []


def test_a_driver_that_asks_for_them_is_shown_them_with_the_status() -> None:
    one, commit = Voter("self/0"), decided(votes())
    for message in (pb.Heard(decision=decision(commit)),):
        one.member.told(DRIVER, message)
    assert applied(one.is_told(commit)) == [without_votes(commit)], "that is what others have"
    one.member.applied(b"digest")
    assert not one.status().HasField("votes")
    (send,) = one.hears(Ballot(1, 10), query=pb.Query(votes=True))
    assert isinstance(send, Send)
    assert is_of(send.message.status.votes, decision(commit))


def test_a_driver_that_does_without_a_vote_is_accused_with_proof_and_the_commit_applied() -> None:
    cast = votes()
    del cast["c/1"]
    forged = votes(c=ready("c/1", by=IDENTITIES[DRIVER]))
    for commit in decided(cast), decided(forged):
        one = Voter("self/0")
        one.member.told(DRIVER, pb.Heard(decision=decision(commit)))
        effects = one.is_told(commit)
        assert proves(accused(effects).proof)
        assert applied(effects), "all others have it"


def test_who_has_not_voted_for_a_commit_accuses_its_driver_and_asks_for_the_proof() -> None:
    one, honest = Voter("c/1", votes_itself=False), decided(votes())
    effects = one.is_told(honest)
    assert accused(effects).why == f"{DRIVER} has committed step 1 without the vote of c/1"
    assert accused(effects).proof is None
    assert sent(effects, "votes_request").keys() == {DRIVER, "self/0"}
    assert one.member.committed == 0
    cast = votes(c=ready("c/1", by=IDENTITIES[DRIVER]))
    one = Voter("c/1", votes_itself=False)
    commit = decided(cast)
    one.is_told(without_votes(commit))
    keeper = Voter("self/0")
    keeper.is_told(commit)
    (answer,) = keeper.member.asked_for_votes("c/1", pb.VotesRequest(commit=hash_of(commit)))
    assert isinstance(answer, Send)
    shown = answer.message.votes_shown.votes
    other = Proof()
    other.CopyFrom(shown)
    del other.votes.alike[0].nodes[0]
    assert one.member.shown_votes(other) == [], "those are of no commit"
    assert proves(accused(one.member.shown_votes(shown)).proof)
    assert one.member.shown_votes(shown) == [], "said once"


def test_a_commit_of_an_attempt_that_went_on_without_this_node_is_no_lie() -> None:
    commit = decided(votes())
    commit.ballot.CopyFrom(ATTEMPT.next().message())
    seal(commit, IDENTITIES[DRIVER], RUN)
    assert Voter("c/1", votes_itself=False).is_told(commit) == []


# --- the driver


class Counting(Told):
    """With keys. a drives; d and e are at one stage."""

    def __init__(self) -> None:
        super().__init__(members={"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4, "g": 0})
        self.identities = {node: Identity.generate() for node in self.members}
        self.driver.identity = self.identities["a"]
        self.begun = self.begins()
        self.driver.keys |= {node: one.public for node, one in self.identities.items()}

    def votes(self, node: str, by: str = "", step: int = 1) -> list[Effect]:
        ready = pb.Ready(step=step, squared_norm=1.0, finite=True, digest=b"same")
        sign(ready, node, self.driver.ballot, self.identities[by or node], "")
        return self.hears(node, ready=ready)


def test_a_vote_that_is_not_its_members_own_is_as_if_it_had_failed() -> None:
    told = Counting()
    told.comes_home()
    assert suspected(told.votes("f", by="e")) == ["f"]
    told = Counting()
    told.comes_home()
    assert suspected(told.votes("f", step=2)) == ["f"]


def test_a_commit_has_the_hash_of_the_votes_which_those_are_told_who_take_part_at_stage_0() -> None:
    told = Counting()
    assert {node for node, one in told.begun.items() if one.step.begin.roll} == {"a", "g"}
    ballot = told.driver.ballot
    told.comes_home()
    effects: list[Effect] = []
    for node in told.members:
        effects = told.votes(node)
    steps = sent(effects, "step")
    commits = {node: message.step.commit for node, message in steps.items()}
    assert {node for node, commit in commits.items() if commit.HasField("votes")} == {"a", "g"}
    assert len({hash_of(commit) for commit in commits.values()}) == 1
    assert commits["b"].voted == hash_of_votes(commits["g"].votes)
    assert not told.driver.standing.last.HasField("votes")
    roll = roll_of(told.members, ballot, told.begun["g"].step.begin.roll)
    shown = KeptVotes().keep(decision(commits["g"]), commits["g"].votes, roll)
    keys = {node: one.public for node, one in told.identities.items()}
    check(commits["g"], shown, told.members, keys, "", Random(0))
