"""Messages of any content: no state machine raises, and senders of invalid ones are charged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import NUMBERS
from planaria.node.driver.attempting import EVICTED
from planaria.node.transaction.bounds import fault_to_driver, fault_to_member
from planaria.node.transaction.effects import Ballot, Effect, Suspect
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from tests.node.driver.test_driver import RULES, DrivenRun, charges, sent, without
from tests.node.transaction.test_member import view

TWINS = {"a": 0, "b": 1, "c": 2, "a2": 0, "b2": 1, "c2": 2}
PAIRED = replace(RULES, stages=2, tokens=2)
NAMES = ["", "a", "c", "c2", "copy", "snapshot", "save", "replica", "twin", "nobody", "x" * 500]
FLOATS = [0.0, 1.0, -1.0, 5e-324, -1e30, 1e30, 1e300, math.inf, -math.inf, math.nan]
WHOLES = [0, 1, 2, 3, 7, 1 << 31, (1 << 32) - 1]
LARGE = [*WHOLES, 1 << 53, (1 << 53) + 1, (1 << 64) - 1]


def drawn(draw: Callable[[Any], Any], kind: type[Message], depth: int = 3) -> Any:
    """Draws a message of type `kind` with any values in some of its fields."""
    message = kind()
    body = kind.DESCRIPTOR.oneofs_by_name.get("body")
    within = [field.name for field in body.fields] if body is not None else []
    names = [field.name for field in kind.DESCRIPTOR.fields if field.name not in within]
    chosen = draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
    if within:
        chosen = chosen | {draw(st.sampled_from(within))}
    for name in sorted(chosen):
        field = kind.DESCRIPTOR.fields_by_name[name]
        count = draw(st.integers(1, 3)) if field.is_repeated else 1
        values = [_value(draw, message, field, depth) for _ in range(count)]
        if any(value is None for value in values):
            continue
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(values[0])
        else:
            setattr(message, field.name, values[0])
    return message


def _value(draw: Callable[[Any], Any], of: Message, field: FieldDescriptor, depth: int) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            if depth == 0:
                return None
            return drawn(draw, field.message_type._concrete_class, depth - 1)
        case FieldDescriptor.TYPE_DOUBLE:
            return draw(st.sampled_from(FLOATS))
        case FieldDescriptor.TYPE_STRING:
            return draw(st.sampled_from(NAMES))
        case FieldDescriptor.TYPE_BYTES:
            return draw(st.sampled_from([b"", b"same", bytes(100)]))
        case FieldDescriptor.TYPE_BOOL:
            return draw(st.booleans())
        case FieldDescriptor.TYPE_UINT32:
            return draw(st.sampled_from(WHOLES))
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            return draw(st.sampled_from(LARGE))
        case FieldDescriptor.TYPE_ENUM:
            return draw(st.sampled_from([0, 1, 2, 99]))
    raise AssertionError(field.type)


@st.composite
def anything(draw: Callable[[Any], Any]) -> pb.Message:
    message: pb.Message = drawn(draw, pb.Message)
    return message


def gathering() -> DrivenRun:
    run = DrivenRun(PAIRED, TWINS)
    run.views()
    return run


def running() -> DrivenRun:
    run = gathering()
    run.statuses()
    return run


def reducing() -> DrivenRun:
    run = running()
    run.comes_home()
    run.ready("a")
    return run


def syncing() -> DrivenRun:
    run = gathering()
    run.statuses(5, b=pb.Status(), b2=pb.Status())
    return run


def joining() -> DrivenRun:
    run = running()
    run.views({**TWINS, "c3": 2})
    run.hears("c3", Ballot(2, 0), status=pb.Status())
    run.commits()
    run.statuses(c3=pb.Status())
    return run


@given(
    begin=st.sampled_from([gathering, running, reducing, syncing, joining]),
    says=st.lists(st.tuples(st.sampled_from(["c", "c3"]), anything(), st.booleans()), max_size=6),
)
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
def test_no_message_of_any_content_is_too_much_for_a_driver(
    begin: Callable[[], DrivenRun], says: Sequence[tuple[str, pb.Message, bool]]
) -> None:
    run = begin()
    for peer, message, current in says:
        if current:
            message.ballot.CopyFrom(run.driver.ballot.message())
        run.driver.received(peer, message, run.now)
        run.waits(0.3)
        run.driver.explain()
    run.waits(EVICTED + 1)
    run.views(without(run.members, "c", "c3"))
    run.waits(RULES.progress)


@given(says=st.lists(anything(), max_size=6), begun=st.booleans())
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
def test_no_message_of_any_content_is_too_much_for_a_member(
    says: Sequence[pb.Message], begun: bool
) -> None:
    member = MemberSide("c", 2)
    member.viewed(view(1, TWINS, "a"))
    if begun:
        ballot = Ballot(1, 1)
        step = pb.Step(begin=pb.Begin(step=1))
        member.received("a", pb.Message(ballot=ballot.message(), step=step))
        member.received("a", pb.Message(ballot=ballot.message(), reduce=pb.Reduce()))
        member.reduced(ballot, pb.Ready(squared_norm=2.0, finite=True))
    for message in says:
        message.ballot.view = 1
        member.received("a", message)
        member.applied(b"digest")
        member.link_lost("a")


@given(anything())
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
def test_nonsense_changes_nothing_but_its_senders_fate(message: pb.Message) -> None:
    run, other = running(), running()
    message.ballot.CopyFrom(run.driver.ballot.message())
    if not fault_to_driver(message, PAIRED):
        return
    effects = run.driver.received("c", message, run.now)
    assert charges(effects) == [("c", NUMBERS)]
    for each in (run, other):
        each.views(without(TWINS, "c"))
    commit, expected = (each.commits()["a"].step.commit for each in (run, other))
    assert (commit.clip_scale, commit.loss) == (expected.clip_scale, expected.loss)


@pytest.mark.parametrize(
    "body",
    [
        {"ready": pb.Ready(step=1, squared_norm=-1e30, finite=True)},
        {"ready": pb.Ready(step=1, squared_norm=1e300, finite=True)},
        {"ready": pb.Ready(step=1, squared_norm=math.nan, finite=True)},
        {"ready": pb.Ready(step=1, squared_norm=1.0, finite=False)},
        {"ready": pb.Ready(step=1, finite=True, seconds_per_microbatch=-1.0)},
        {"ready": pb.Ready(step=1, finite=True, digest=bytes(1 << 20))},
        {"home": pb.Home(microbatch=0, loss=-1.0, tokens=1)},
        {"home": pb.Home(microbatch=0, loss=1.0, tokens=0)},
        {"home": pb.Home(microbatch=0, loss=1.0, tokens=3)},
        {"home": pb.Home(microbatch=9, loss=1.0, tokens=1)},
        {"scored": pb.Scored(microbatches=[pb.Home(loss=1.0, tokens=1)] * 9)},
        {"scored": pb.Scored(microbatches=[pb.Home(loss=1.0, tokens=0)])},
        {"status": pb.Status(committed=1 << 60)},
        {"status": pb.Status(seconds_per_microbatch=math.inf)},
        {"status": pb.Status(holdings=[pb.Holding(stage=9)])},
        {"status": pb.Status(last=pb.Commit(clip_scale=[math.nan]))},
        {"synced": pb.Synced(seconds=-1.0)},
    ],
)
def test_figures_that_cannot_be(body: dict[str, Any]) -> None:
    assert fault_to_driver(pb.Message(**body), PAIRED)


def test_what_is_usual_is_no_nonsense() -> None:
    for message in (
        pb.Message(status=pb.Status()),
        pb.Message(ready=pb.Ready(squared_norm=math.inf)),
        pb.Message(home=pb.Home(microbatch=1, loss=math.nan, tokens=2, samples=1)),
        pb.Message(home=pb.Home(microbatch=1, loss=0.0, tokens=0, samples=1)),
        pb.Message(synced=pb.Synced(relearned=pb.Relearned(residual_before=math.nan))),
    ):
        assert fault_to_driver(message, PAIRED) == ""


def test_a_wild_norm_is_its_senders_failure_and_sets_nobodys_clip_scale() -> None:
    run = running()
    run.comes_home()
    usual = {node: {"squared_norm": 4.0} for node in TWINS}
    run.votes(but="c", **usual)
    effects = run.ready("c", 1e300)
    assert charges(effects) == [("c", NUMBERS)]
    run.views(without(TWINS, "c"))
    run.comes_home()
    effects = run.votes(**usual)
    assert sent(effects, "step")["a"].step.commit.gradient_norm == pytest.approx(math.sqrt(12))


def test_who_cannot_say_what_it_has_has_not_answered() -> None:
    run = gathering()
    for node in ("a", "b", "a2", "b2", "c2"):
        run.hears(node, status=pb.Status())
    effects = run.hears("c", status=pb.Status(committed=1 << 60))
    assert charges(effects) == [("c", NUMBERS)]
    assert "waiting for the status of c" in run.driver.explain()


def test_a_driver_whose_commit_cannot_be_applied_is_accused_by_its_members() -> None:
    member = MemberSide("c", 2)
    member.viewed(view(1, TWINS, "a"))
    commit = pb.Commit(step=1, clip_scale=[1.0], lr_scale=[1.0, 1.1])
    message = pb.Message(ballot=pb.Ballot(view=1, attempt=1), step=pb.Step(commit=commit))
    assert fault_to_member(message, 0) == ""
    assert fault_to_member(message, 1) == ""
    effects: list[Effect] = member.received("a", message)
    (suspect,) = [effect for effect in effects if isinstance(effect, Suspect)]
    assert (suspect.node, suspect.cause) == ("a", NUMBERS)
