"""Votes, and how it shows that a driver has decided without one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.identity import SIGNATURE_BYTES, Identity
from planaria.bootstrap.registry_pb2 import Alike, Decision, Proof, Roll, Vote, Votes
from planaria.bootstrap.votes import each, gathered, hash_of, is_cast, is_without_vote

RUN = "r"
DRIVER, MEMBER, OTHER = (Identity.generate() for _ in range(3))
KEYS = {"n0": DRIVER.public, "n1": MEMBER.public, "n2": OTHER.public}
IDENTITIES = {"n0/0": DRIVER, "n1/0": MEMBER, "n2/0": OTHER}


def cast(node: str, identity: Identity | None = None, ready: bytes = b"so") -> Vote:
    vote = Vote(node=node, view=3, attempt=7, ready=ready)
    (identity or IDENTITIES[node]).sign_message(vote, RUN)
    return vote


def decided(*votes: Vote, voter: str, roll: list[str] | None = None, **fields: int) -> Proof:
    """With these; `roll`: who takes part, as the driver has signed it."""
    told = gathered(votes)
    decision = Decision(**{"step": 5, "view": 3, "attempt": 7, **fields}, votes=hash_of(told))
    DRIVER.sign_message(decision, RUN)
    proof = Proof(decisions=[decision], votes=told, voter=voter)
    if roll is not None:
        proof.roll.CopyFrom(Roll(view=3, attempt=7, nodes=roll))
        DRIVER.sign_message(proof.roll, RUN)
    return proof


def proves(proof: Proof) -> bool:
    return is_without_vote(proof, DRIVER.public, KEYS, RUN)


HONEST = [cast(node) for node in IDENTITIES]


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.tuples(
            st.sampled_from([b"", b"so", b"otherwise"]),
            st.binary(min_size=SIGNATURE_BYTES, max_size=SIGNATURE_BYTES),
        ),
        max_size=12,
    ),
    st.randoms(),
)
def test_votes_are_as_they_were_cast_in_an_order_that_all_have(
    said: dict[str, tuple[bytes, bytes]], chance: object
) -> None:
    votes = [
        Vote(node=node, view=3, attempt=7, ready=ready, signature=signature)
        for node, (ready, signature) in said.items()
    ]
    told = gathered(votes)
    assert sorted(each(told, 3, 7), key=lambda vote: vote.node) == sorted(
        votes, key=lambda vote: vote.node
    )
    chance.shuffle(votes)  # type: ignore[attr-defined]
    assert hash_of(gathered(votes)) == hash_of(told)


def test_those_who_say_the_same_say_it_once() -> None:
    votes = [cast(node, ready=b"x" * 1000) for node in IDENTITIES]
    assert gathered(votes).ByteSize() < 1000 + 3 * (SIGNATURE_BYTES + 10) + 20


def test_a_vote_is_of_one_member_in_one_attempt_of_one_run() -> None:
    vote = cast("n1/0")
    assert is_cast(vote, MEMBER.public, RUN)
    assert not is_cast(vote, MEMBER.public, "another")
    assert not is_cast(vote, OTHER.public, RUN)
    for field, value in {"node": "n1/1", "view": 4, "attempt": 8, "ready": b"not so"}.items():
        other = Vote()
        other.CopyFrom(vote)
        setattr(other, field, value)
        assert not is_cast(other, MEMBER.public, RUN), field


def test_signatures_that_are_not_as_many_as_votes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 votes, 65 bytes of signatures"):
        list(each(Votes(alike=[Alike(nodes=["a", "b"], signatures=bytes(65))]), 1, 1))


def test_a_vote_that_its_member_has_not_signed_proves_that_the_driver_has_made_it_up() -> None:
    forged = cast("n1/0", DRIVER)
    votes = HONEST[0], forged, HONEST[2]
    assert proves(decided(*votes, voter="n1/0"))
    assert not proves(decided(*votes, voter="n2/0")), "that one is genuine"
    assert not proves(decided(*HONEST, voter="n1/0"))
    assert not is_without_vote(decided(*votes, voter="n1/0"), DRIVER.public, {}, RUN), "who knows"


def test_a_vote_that_is_not_there_proves_it_where_the_driver_has_said_that_it_has_to_be() -> None:
    votes, everybody = (HONEST[0], HONEST[2]), list(IDENTITIES)
    assert proves(decided(*votes, voter="n1/0", roll=everybody))
    assert not proves(decided(*votes, voter="n1/0")), "it may only have followed"
    assert not proves(decided(*votes, voter="n1/0", roll=["n0/0", "n2/0"]))
    assert not proves(decided(*votes, voter="n3/0", roll=everybody))
    assert not proves(decided(*HONEST, voter="n1/0", roll=everybody))
    later = decided(*votes, voter="n1/0", roll=everybody, attempt=8)
    assert not proves(later), "it was lost, and the attempt went on without it"
    forged = decided(*votes, voter="n1/0", roll=everybody)
    OTHER.sign_message(forged.roll, RUN)
    assert not proves(forged)


def test_what_the_driver_has_not_signed_proves_nothing() -> None:
    proof = decided(HONEST[0], cast("n1/0", DRIVER), HONEST[2], voter="n1/0")
    OTHER.sign_message(proof.decisions[0], RUN)
    assert not proves(proof)
    proof = decided(*HONEST, voter="n1/0")
    proof.votes.CopyFrom(gathered([HONEST[0], cast("n1/0", DRIVER)]))
    assert not proves(proof), "those are other votes than it has signed"
    assert not proves(Proof())
    assert not proves(Proof(decisions=[Decision(votes=hash_of(Votes()))]))
