"""Which members keep the records of a step, and what happens when all records are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from planaria.bootstrap.registry_pb2 import NUMBERS
from planaria.node.driver import records
from planaria.node.driver.attempting import Attempting
from planaria.node.driver.gathering import Gathering
from planaria.node.driver.phases import DriverPhase
from planaria.node.driver.records import LEDGERS, MEMORIES, record_holders, to_replicate
from planaria.node.report.events import MessageRefused
from planaria.node.transaction.bounds import fault_to_member
from planaria.node.transaction.effects import Apply, Effect, Note, Suspect
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import (
    has_records,
    hash_of,
    hash_of_records,
    seal,
    without_records,
)
from tests.node.driver.test_driver import SWARM, DrivenRun, begun, sent
from tests.node.transaction.test_commits import DRIVER, RUN, Replica, commit

THREE_ENDS = {**SWARM, "y": 0, "z": 0}


@pytest.fixture(autouse=True)
def one_ledger() -> Iterator[None]:
    with patch.object(records, "LEDGERS", 1):
        yield


def recorded(step: int = 1) -> pb.Commit:
    made = commit(step)
    made.microbatches.add(microbatch=0, loss=4.0, tokens=2)
    made.records = hash_of_records(made.microbatches)
    seal(made, DRIVER, RUN)
    return made


# --- hashes


def test_a_commit_has_the_same_hash_without_its_records_unless_it_is_an_old_one() -> None:
    made = recorded()
    bare = without_records(made)
    assert (hash_of(bare), has_records(bare), has_records(made)) == (hash_of(made), False, True)
    made.ClearField("records")
    assert without_records(made) == made
    other = commit()
    assert hash_of(other) != hash_of(made)
    assert has_records(other), "of one microbatch less: nothing is missing"


def test_records_that_are_not_those_of_the_hash_are_refused() -> None:
    made = recorded()
    made.microbatches[0].loss = 5.0
    message = pb.Message(ballot=pb.Ballot(view=1, attempt=1), step=pb.Step(commit=made))
    assert fault_to_member(message, 1) == (
        "records of the commit of step 1 that aren't those of its hash"
    )
    message.step.commit.CopyFrom(without_records(made))
    assert fault_to_member(message, 1) == ""


# --- record holders


def test_a_few_of_stage_0_are_told_and_as_many_of_the_others() -> None:
    stages = {f"{stage}-{node:02}": stage for stage in range(3) for node in range(20)}
    with patch.object(records, "LEDGERS", LEDGERS):
        holders = Counter(node[0] for node in record_holders(stages, {}))
    assert holders == {"0": LEDGERS, "1": MEMORIES / 2, "2": MEMORIES / 2}


@pytest.mark.parametrize(("body", "most"), [(1, 3), (2, 3), (4, 2), (6, 2), (8, 1), (20, 1)])
def test_of_many_stages_no_more_remember_a_step_than_of_a_few(body: int, most: int) -> None:
    stages = {f"{stage:02}-{node}": stage for stage in range(1, body + 1) for node in range(3)}
    holders = Counter(node[:2] for node in record_holders(stages, {}))
    assert holders.total() == min(MEMORIES, 3 * body)
    assert max(holders.values()) == most


def test_who_has_a_ledger_goes_on_with_it_and_a_full_disk_comes_last() -> None:
    stages = dict.fromkeys("abcde", 0)
    ledgers = {
        "a": pb.LEDGER_FAILING,
        "b": pb.NO_LEDGER,
        "c": pb.LEDGER_SPARE,
        "d": pb.LEDGER_WRITING,
    }
    ranked = []
    while stages:
        (node,) = record_holders(stages, ledgers)
        ranked.append(node)
        del stages[node]
    assert ranked == ["d", "e", "c", "b", "a"], "of e nothing is known"


def test_somebody_notes_the_last_step_when_no_ledger_has_it() -> None:
    spare = {"b": pb.LEDGER_SPARE, "a": pb.LEDGER_FAILING, "c": pb.NO_LEDGER}
    assert to_replicate(spare) == ["b"]
    assert to_replicate({**spare, "d": pb.LEDGER_WRITING}) == []
    assert to_replicate({"a": pb.LEDGER_FAILING, "c": pb.NO_LEDGER}) == []


# --- the driver


def votes(run: DrivenRun, ledger: pb.Recording) -> list[Effect]:
    """All members vote and report this about their ledgers, but `a`, whose ledger is gone."""
    run.comes_home()
    recording = {**dict.fromkeys(run.driver.members, ledger), "a": pb.NO_LEDGER}
    return run.votes(**{node: {"recording": own} for node, own in recording.items()})


def test_those_alone_who_keep_the_records_are_told_them_before_they_vote() -> None:
    run = begun(members=THREE_ENDS)
    noted = sent(run.comes_home(), "records")
    assert noted.keys() == {*SWARM}
    steps = run.commits()
    assert not any(has_records(message.step.commit) for message in steps.values())
    last = run.driver.standing.last
    assert {hash_of(message.step.commit) for message in steps.values()} == {hash_of(last)}
    assert noted["a"].records.microbatches == last.microbatches


def test_who_keeps_them_instead_of_one_whose_ledger_is_gone_is_told_them_with_the_commit() -> None:
    run = begun(members=THREE_ENDS)
    steps = sent(votes(run, pb.LEDGER_WRITTEN), "step")
    assert {node for node in steps if has_records(steps[node].step.commit)} == {"y"}


def test_a_step_that_is_in_no_ledger_any_more_is_told_once_more_and_only_once() -> None:
    run = begun(members=THREE_ENDS)
    run.commits()
    assert not sent(votes(run, pb.LEDGER_SPARE), "step"), "of step 1 no ledger would know"
    assert isinstance(run.driver.current, Gathering)
    last = run.driver.standing.last
    lacking = pb.Status(committed=1, last=without_records(last))
    spare = pb.Status(committed=1, last=without_records(last), recording=pb.LEDGER_SPARE)
    answers = {**dict.fromkeys("abcd", lacking), "e": run.has(), "y": spare, "z": spare}
    again = run.statuses(**answers)
    (told_to, message) = sent(again, "step").popitem()
    assert (told_to, message.step.commit) == ("y", last)
    assert run.driver.phase is DriverPhase.GATHERING
    begins = run.statuses(**answers)
    assert isinstance(run.driver.current, Attempting), "y lies, or can't"
    assert sent(begins, "step")["y"].step.begin.step == 2
    assert sent(votes(run, pb.LEDGER_SPARE), "step"), "nor is it waited for again"


# --- members


def test_a_member_that_lacks_the_records_notes_them_when_it_is_told_once_more() -> None:
    replica, made = Replica(), recorded()
    bare = without_records(made)
    assert replica.decided(bare) == [Apply(bare)]
    replica.member.applied(b"digest")
    other = recorded()
    other.loss = 9.0
    assert replica.decided(other) == [], "another commit"
    assert replica.decided(made) == [Note(made)]
    assert replica.member.last == made
    assert replica.decided(made) == [], "a repetition"


def test_a_commit_has_the_records_that_were_told_before_the_vote() -> None:
    made = recorded()
    replica = Replica(keeps=made.microbatches)
    assert replica.decided(without_records(made)) == [Apply(made)]
    assert replica.member.last == made


def test_a_commit_of_other_records_than_were_told_is_applied_and_its_driver_accused() -> None:
    """Members that were told no records have applied the commit."""
    bare = without_records(recorded())
    replica = Replica(keeps=[pb.Home(microbatch=7, loss=4.0, tokens=2)])
    refused, suspect, apply = replica.decided(bare)
    assert isinstance(refused, MessageRefused) and "other records" in refused.why
    assert isinstance(suspect, Suspect)
    assert (suspect.node, suspect.cause) == ("driver", NUMBERS)
    assert apply == Apply(bare)
