import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import (
    CHECKSUM,
    DIVERGENCE,
    HANG,
    NONFINITE,
    NUMBERS,
    SHAPE,
    SILENT,
    Cause,
)
from planaria.node.averaging.examination import AuditResult
from planaria.node.driver.attempt_state import UNREACHED, AttemptState
from planaria.node.driver.attempting import COMPLAINED, EVICTED, Attempting
from planaria.node.driver.driver import Driver
from planaria.node.driver.fault_policy import (
    HELD_UP,
    HELD_UP_BY_SEVERAL,
    LONGEST_PAUSE,
    UNVOTED,
    VAIN,
    FailedAttempts,
)
from planaria.node.driver.gathering import ANSWER, QUERY_AGAIN, REPLACED, Gathering
from planaria.node.driver.hangs import ASK, HEIR
from planaria.node.driver.joiners import FOLLOWS, IN_VAIN
from planaria.node.driver.phases import DriverPhase
from planaria.node.report.events import (
    Aborted,
    Accused,
    AttemptMasked,
    Diverged,
    Event,
    GradientStandsOut,
    HeldUp,
    NodeLost,
    NonFinite,
    Paused,
    RebuildFailed,
    RebuildOrdered,
    Relieved,
    Resuming,
    RolledBack,
    StageRebuilt,
    StepSkipped,
    Waiting,
    WeightsChanged,
)
from planaria.node.transaction.effects import NEVER, AuditSum, Ballot, Effect, Rejoin, Send, Suspect
from planaria.node.transaction.plan_encoding import PlanDecoder
from planaria.node.transaction.routing import routes
from planaria.node.transaction.rules import SLOWEST, TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of, seal
from planaria.recovery.policy import POLICIES
from tests.harness import rules

RULES = replace(
    rules.RULES,
    steps=10,
    microbatches=2,
    validation_microbatches=0,
    lr_scale=lambda step, boosted_at: 1.1 if boosted_at else 1.0,
)
Happened = TypeVar("Happened", bound=Event)
SWARM = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}  # a drives


def sent(effects: Sequence[Effect], body: str) -> dict[str, pb.Message]:
    """Returns the messages with this body, by recipient."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return {s.to: s.message for s in sends if s.message.WhichOneof("body") == body}


def events(effects: Sequence[Effect], kind: type[Happened]) -> list[Happened]:
    return [effect for effect in effects if isinstance(effect, kind)]


def suspected(effects: Sequence[Effect]) -> list[str]:
    return [effect.node for effect in effects if isinstance(effect, Suspect)]


def without(members: dict[str, int], *nodes: str) -> dict[str, int]:
    return {node: stage for node, stage in members.items() if node not in nodes}


def at(step: int, **more: Any) -> pb.Status:
    """The status of a member that has committed this step."""
    return pb.Status(committed=step, last=pb.Commit(step=step), **more)


class DrivenRun:
    """A run as its driver, node `a`, sees it. Only a test advances `now`."""

    def __init__(self, rules: TransactionRules = RULES, members: dict[str, int] = SWARM) -> None:
        self.driver = Driver("a", rules, Random(0))
        self.members = members
        self.number = 0
        self.now = 100.0

    @property
    def attempt(self) -> AttemptState:
        assert isinstance(self.driver.current, Attempting)
        return self.driver.current.state

    def views(
        self, members: dict[str, int] | None = None, leaving: str = "", **fields: object
    ) -> list[Effect]:
        """The driver gets the next view; `a` drives unless `fields` say otherwise."""
        self.number += 1
        if members is not None:
            self.members = members
        listed = [
            registry.Member(node=n, seats=[registry.Seat(stage=s)], leaving=n == leaving)
            for n, s in self.members.items()
        ]
        fields = {"number": self.number, "driver": "a", "reason": "so", **fields}
        return self.driver.viewed(registry.View(members=listed, **fields), self.now)

    def hears(self, peer: str, ballot: Ballot | None = None, **body: object) -> list[Effect]:
        ballot = self.driver.ballot if ballot is None else ballot
        return self.driver.received(peer, pb.Message(ballot=ballot.message(), **body), self.now)

    def hears_all(self, **body: object) -> list[Effect]:
        """Delivers this message from each member; returns the effects of the last one."""
        effects: list[Effect] = []
        for node in list(self.driver.members):
            effects = self.hears(node, **body)
        return effects

    def has(self, **more: Any) -> pb.Status:
        """The status of a member that has the newest state."""
        standing = self.driver.standing
        return pb.Status(committed=standing.committed, last=standing.last, **more)

    def statuses(self, committed: int | None = None, **differing: pb.Status) -> list[Effect]:
        """All members answer: as in `differing`, else with this step or the newest state."""
        usual = self.has() if committed is None else at(committed)
        effects: list[Effect] = []
        for node in list(self.driver.members):
            effects = self.hears(node, status=differing.get(node, usual))
        return effects

    def whole(self, message: pb.Message) -> pb.Begin:
        """Decodes the message's plan as a member does that was queried in the newest view."""
        heard = PlanDecoder()
        heard.queried(self.number, self.members)
        return heard.whole(self.driver.ballot, message.step.begin)

    def begins(self, committed: int = 0) -> dict[str, pb.Message]:
        self.views()
        return sent(self.statuses(committed), "step")

    def comes_home(self) -> list[Effect]:
        effects: list[Effect] = []
        for microbatch in range(len(self.attempt.begin.plan)):
            home = pb.Home(microbatch=microbatch, loss=4.0, tokens=2)
            effects = self.hears(self.attempt.begin.plan[microbatch].source, home=home)
        return effects

    def ready(self, node: str, squared_norm: float = 1.0, **more: Any) -> list[Effect]:
        figures = {"step": self.attempt.begin.step, "digest": b"same", "applied": b"same", **more}
        finite = math.isfinite(squared_norm)
        return self.hears(node, ready=pb.Ready(squared_norm=squared_norm, finite=finite, **figures))

    def votes(self, but: str = "", **differing: dict[str, Any]) -> list[Effect]:
        """All members `but` one vote, some with other figures; returns the last effects."""
        effects: list[Effect] = []
        for node in [node for node in self.driver.members if node != but]:
            effects = self.ready(node, **differing.get(node, {}))
        return effects

    def commits(self) -> dict[str, pb.Message]:
        self.comes_home()
        return sent(self.votes(), "step")

    def waits(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.driver.tick(self.now)


def asked(
    rules: TransactionRules = RULES, members: dict[str, int] = SWARM, **view: object
) -> DrivenRun:
    """A run whose driver has queried all members in the first view."""
    run = DrivenRun(rules, members)
    run.views(**view)
    return run


def begun(rules: TransactionRules = RULES, members: dict[str, int] = SWARM) -> DrivenRun:
    """A run whose first step has begun."""
    run = DrivenRun(rules, members)
    run.begins()
    return run


def tries_again(run: DrivenRun) -> None:
    """The step begins again: all members answer, and the longest pause passes."""
    run.statuses()
    run.waits(LONGEST_PAUSE)


# --- ledgers


TWO_ENDS = {**SWARM, "z": 0}


def reduced(run: DrivenRun, **ledgers: pb.Recording) -> list[Effect]:
    """All members vote and report these ledgers, or none; returns the effects of the last vote."""
    run.comes_home()
    recording = {node: ledgers.get(node, pb.NO_LEDGER) for node in run.members}
    return run.votes(**{node: {"recording": ledger} for node, ledger in recording.items()})


@pytest.mark.parametrize(
    ("a", "z", "pauses"),
    [
        (pb.LEDGER_FAILING, pb.LEDGER_FAILING, True),
        (pb.LEDGER_FAILING, pb.NO_LEDGER, True),
        (pb.LEDGER_FAILING, pb.LEDGER_WRITTEN, False),
        (pb.NO_LEDGER, pb.NO_LEDGER, False),
    ],
)
def test_a_run_pauses_when_no_ledger_can_be_written(
    a: pb.Recording, z: pb.Recording, pauses: bool
) -> None:
    run = begun(members=TWO_ENDS)
    effects = reduced(run, a=a, z=z, b=pb.LEDGER_FAILING)
    assert bool(sent(effects, "step")) != pauses, "else the step before may be in no ledger"
    assert bool(events(effects, Aborted)) == pauses
    assert (run.driver.phase is DriverPhase.GATHERING) == pauses


def test_a_paused_run_says_why_and_goes_on_when_a_ledger_is_written() -> None:
    run = begun(members=TWO_ENDS)
    reduced(run, a=pb.LEDGER_FAILING, z=pb.LEDGER_FAILING)
    failing = at(1, recording=pb.LEDGER_FAILING)  # some committed step 1 under the previous driver
    written = at(1, recording=pb.LEDGER_WRITTEN)
    (paused,) = events(run.statuses(1, a=failing, z=failing), Paused)
    assert paused.reason.startswith("no node of stage 0 can write its ledger (--out): free space")
    assert run.driver.explain() == paused.reason
    for _ in range(3):
        assert run.waits(1.0) == []
        assert sent(run.waits(2.0), "query").keys() == TWO_ENDS.keys()
        assert events(run.statuses(1, a=failing, z=failing), Paused) == [], "said once"
    run.waits(3.0)
    begins = sent(run.statuses(1, a=failing, z=written), "step")
    assert begins["c"].step.begin.step == 2


def test_a_run_whose_steps_are_done_ends_though_no_ledger_can_be_written() -> None:
    run = asked(replace(RULES, steps=1), members=TWO_ENDS)
    failing = at(1, recording=pb.LEDGER_FAILING)
    assert sent(run.statuses(1, a=failing, z=failing), "halt").keys() == TWO_ENDS.keys()


# --- orders


def test_a_run_that_is_paused_begins_no_step_until_it_may_go_on() -> None:
    run = begun()
    run.views(order=registry.PAUSE, ordered="over night")
    steps = run.commits()
    assert not any(message.step.HasField("begin") for message in steps.values())
    assert sent(run.statuses(1), "step") == {}
    assert run.driver.explain() == "paused by the run's operator: over night"
    assert run.waits(1000.0) == []
    run.views(order=registry.PAUSE)
    assert sent(run.statuses(1), "step") == {}
    run.views()
    assert run.whole(sent(run.statuses(1), "step")["c"]).step == 2


def test_a_rebuild_while_a_run_is_paused_is_told_then_and_the_pause_is_not_its_stall() -> None:
    run = begun()
    run.views(order=registry.PAUSE)
    run.commits()
    run.statuses(1)
    run.now += 1000.0
    run.views({**without(SWARM, "c"), "new": 2}, order=registry.PAUSE)
    run.statuses(1, new=pb.Status())
    run.now += 3.0
    run.hears("new", synced=pb.Synced(step=1, method="checkfree"))
    (rebuilt,) = events(run.statuses(1), StageRebuilt)
    assert rebuilt.stall_seconds == 3.0
    run.views()
    assert events(run.statuses(1), StageRebuilt) == []


def test_links_that_are_lost_while_a_run_is_paused_cost_no_seat() -> None:
    run = begun()
    run.views(order=registry.PAUSE)
    run.commits()
    for _ in range(HELD_UP_BY_SEVERAL):
        run.statuses(1)
        effects = run.driver.link_lost("c", "silent for 3 s", run.now)
        assert sent(effects, "query").keys() == SWARM.keys()
        assert suspected(effects) == []


def test_a_run_that_is_stopped_is_over_with_the_step_that_it_has() -> None:
    run = begun(replace(RULES, validation_microbatches=1))
    run.views(order=registry.STOP)
    assert not any(message.step.HasField("begin") for message in run.commits().values())
    begins = sent(run.statuses(1), "step")
    assert begins["c"].step.begin.kind == pb.Begin.EVALUATE, "its loss is known at the end"
    run.comes_home()
    halts = sent(run.statuses(1), "halt")
    assert {(h.halt.finished, h.halt.step) for h in halts.values()} == {(True, 1)}
    assert halts.keys() == SWARM.keys()


def test_so_is_one_that_is_paused_or_has_not_begun() -> None:
    run = asked(order=registry.PAUSE)
    assert sent(run.statuses(), "step") == {}
    run.views(order=registry.STOP)
    assert sent(run.statuses(), "halt")["b"].halt.finished


def test_a_run_that_is_stopped_does_not_wait_for_a_node_at_a_vacant_stage() -> None:
    run = asked(replace(RULES, validation_microbatches=1), without(SWARM, "d"))
    run.statuses(4)
    run.driver.validated = 3, 1.0
    awaited = registry.AwaitedSave(stage=SWARM["d"], step=2, node="d", seconds=60.0)
    for order in ({"order": registry.STOP}, {"changes": [registry.Change(step=4, pending=True)]}):
        run.views(awaited=[awaited], **order)
        assert "waits for d, which has a save" in events(run.statuses(4), Waiting)[0].reason
        run.views(**order)
        halts = sent(run.statuses(4), "halt")
        assert {(h.halt.finished, h.halt.step) for h in halts.values()} == {(True, 4)}
        assert math.isnan(halts["b"].halt.validation_loss)
        run.views(**order)
        assert sent(run.statuses(4), "halt").keys() == run.members.keys(), "it stays so"
    run.views(changes=[registry.Change(step=9, pending=True)])
    assert events(run.statuses(4), Waiting), "it isn't at that step yet"


def test_a_stage_that_is_lost_while_a_stopped_run_is_saved_is_rebuilt_first() -> None:
    """The run goes on later, and what peers keep of the stage in memory is gone by then."""
    run = begun()
    run.views(order=registry.STOP)
    run.commits()
    assert sent(run.statuses(1), "halt").keys() == SWARM.keys()
    run.views({**without(SWARM, "d"), "new": SWARM["d"]}, order=registry.STOP)
    assert sent(run.statuses(1, new=pb.Status()), "sync").keys() == {"new"}
    run.hears("new", synced=pb.Synced(step=1, method="checkfree"))
    assert sent(run.statuses(1), "halt")["new"].halt.finished


# --- a step


def test_everybody_is_asked_and_the_step_begins_when_all_have_answered():
    run = DrivenRun()
    assert sent(run.views(), "query").keys() == SWARM.keys()
    for node in "abcd":
        assert run.hears(node, status=pb.Status()) == []
    begins = sent(run.hears("e", status=pb.Status()), "step")
    assert begins.keys() == SWARM.keys()
    begin = run.whole(begins["c"])
    assert begin.step == 1
    assert members(begin) == SWARM.keys()
    assert [(m.id, m.source, list(m.order)) for m in begin.plan] == [
        (0, "a", [1, 2, 3, 4]),
        (1, "a", [1, 2, 3, 4]),
    ]


def test_who_lacks_the_view_is_told_who_takes_part_and_the_others_what_is_other_than_in_it():
    run = asked()
    begins = sent(run.statuses(c=pb.Status(viewless=True)), "step")
    assert members(begins["c"].step.begin) == SWARM.keys()
    assert PlanDecoder().whole(run.driver.ballot, begins["c"].step.begin)
    for node in SWARM.keys() - {"c"}:
        assert members(begins[node].step.begin) == set()
        with pytest.raises(ValueError, match="the plan lists changes since"):
            PlanDecoder().whole(run.driver.ballot, begins[node].step.begin)


def test_reduce_waits_for_the_last_microbatch_and_a_repeated_one_is_not_another():
    run = begun()
    home = pb.Home(microbatch=0, loss=1.0, tokens=1)
    assert run.hears("a", home=home) == []
    assert run.hears("a", home=home) == []
    reduces = sent(run.hears("a", home=pb.Home(microbatch=1, loss=1.0, tokens=1)), "reduce")
    assert reduces.keys() == SWARM.keys()


def scored(run: DrivenRun, peer: str) -> list[Effect]:
    """The source `peer` reports the losses of all its microbatches."""
    mine = [m.id for m in run.attempt.begin.plan if m.source == peer]
    homes = [pb.Home(microbatch=m, loss=4.0, tokens=2) for m in mine]
    return run.hears(peer, scored=pb.Scored(microbatches=homes))


def test_once_all_losses_are_known_the_records_are_told_and_votes_come_before_all_is_home():
    run = DrivenRun(members=TWO_ENDS)
    begins = run.begins()
    assert {n for n in begins if begins[n].step.begin.keeps} == {*TWO_ENDS}, "few as they are"
    assert scored(run, "a") == []
    noted = sent(scored(run, "z"), "records")
    assert noted.keys() == {*TWO_ENDS}
    assert [home.loss for home in noted["b"].records.microbatches] == [4.0] * RULES.microbatches
    assert scored(run, "a") == [], "that is known"
    for node in TWO_ENDS.keys() - {"z"}:
        assert run.ready(node) == []
    assert run.driver.phase is DriverPhase.RUNNING
    assert sent(run.comes_home(), "reduce").keys() == {"z"}, "who hasn't voted is told to hurry"
    steps = sent(run.ready("z"), "step")
    assert steps["b"].step.commit.step == 1


def test_a_step_is_committed_with_the_last_gradient_home_when_all_have_voted():
    run = begun()
    scored(run, "a")
    for node in SWARM:
        assert run.ready(node) == [], "it isn't home by the sources' word"
    steps = sent(run.comes_home(), "step")
    assert steps["e"].step.commit.step == 1


def test_a_source_that_tells_two_results_of_a_microbatch_is_accused():
    run = begun(members=TWO_ENDS)
    scored(run, "z")
    mine = next(m.id for m in run.attempt.begin.plan if m.source == "z")
    run.hears("z", home=pb.Home(microbatch=mine, loss=4.0, tokens=2))
    other = run.hears("z", home=pb.Home(microbatch=mine, loss=4.5, tokens=2))
    (accused,) = events(other, Accused)
    assert (accused.node, accused.reason) == (
        "z",
        f"it sent two results of microbatch {mine} in one attempt",
    )


def test_what_is_not_finite_is_the_same_when_it_is_told_twice():
    run = begun()
    run.attempt.begin.non_finite = True
    home = pb.Home(microbatch=0, loss=math.nan, tokens=2)
    run.hears("a", scored=pb.Scored(microbatches=[home]))
    assert not events(run.hears("a", home=home), Accused)
    assert 0 in run.attempt.homes


def test_a_commit_needs_ready_from_every_member_each_counted_once():
    run = begun()
    run.comes_home()
    ballot = run.driver.ballot
    for node in "abcdabcd":
        assert run.ready(node) == []
    commits = sent(run.ready("e"), "step")
    assert commits.keys() == SWARM.keys()
    step = commits["b"].step
    assert Ballot.of(step.commit.ballot) == ballot, "the attempt's, not the next one's"
    assert Ballot.of(commits["b"].ballot) > ballot
    assert (step.commit.step, step.begin.step) == (1, 2), "the next begins in the same message"
    assert step.commit.loss == 2.0


def test_the_clip_scale_is_that_of_the_whole_models_norm_replicas_counted_once():
    run = begun(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2, "twin": 2})
    run.comes_home()
    norms = {"a": 3.0, "b": 4.0, "c": 12.0, "twin": 12.0}
    effects = run.votes(**{node: {"squared_norm": norm**2} for node, norm in norms.items()})
    commit = sent(effects, "step")["a"].step.commit
    assert commit.gradient_norm == 13.0
    assert list(commit.clip_scale) == pytest.approx([1 / 13], rel=1e-6), "for all stages"


@given(st.lists(st.floats(0, 1e12), min_size=3, max_size=3), st.floats(0.01, 100))
def test_the_clipped_norm_is_never_above_the_limit_and_short_gradients_are_left_alone(
    squared: list[float], clip: float
):
    run = begun(replace(RULES, stages=2, clip=clip), ALONE)
    run.comes_home()
    norms = dict(zip(ALONE, squared, strict=True))
    effects = run.votes(**{node: {"squared_norm": norm} for node, norm in norms.items()})
    (scale,) = set(sent(effects, "step")["a"].step.commit.clip_scale)
    norm = math.sqrt(math.fsum(squared))
    assert scale * norm <= clip
    assert scale == 1.0 or norm > clip - 1e-5


def test_late_and_foreign_messages_have_no_effect():
    run = begun()
    old = Ballot(run.driver.ballot.view, run.driver.ballot.attempt - 1)
    assert run.hears("b", old, failed=pb.Failed(reason="old")) == []
    assert run.hears("stranger", failed=pb.Failed(reason="foreign")) == []
    assert run.hears("b", ready=pb.Ready(step=1, finite=True)) == [], "nobody has asked yet"
    assert run.hears("b", home=pb.Home(microbatch=0, loss=1.0, tokens=1)) == []
    assert run.attempt.homes == {}, "b isn't its source"
    assert run.driver.phase is DriverPhase.RUNNING


# --- commits of the previous driver

THIRD = Ballot(7, 5).message()
"""The ballot of the attempt that made step 3."""


def of_third_step() -> pb.Status:
    return pb.Status(committed=3, last=pb.Commit(step=3, ballot=THIRD))


def test_what_some_have_committed_the_ready_commit_too():
    run = asked()
    has, ready = of_third_step(), pb.Status(committed=2, ready=3, ready_ballot=THIRD)
    effects = run.statuses(a=ready, b=ready, c=has, d=has, e=has)
    commits = sent(effects, "step")
    assert commits.keys() == {"a", "b"}
    assert commits["a"].step.commit == has.last
    assert not commits["a"].step.HasField("begin")
    assert sent(effects, "query").keys() == SWARM.keys(), "and then all are asked again"
    assert sent(run.statuses(3), "step")["a"].step.begin.step == 4


def test_what_nobody_has_committed_is_tried_again():
    run = asked()
    ready = pb.Status(committed=2, ready=3, ready_ballot=THIRD, attempting=3)
    effects = run.statuses(**dict.fromkeys(SWARM, ready))
    (aborted,) = events(effects, Aborted)
    assert aborted.step == 3
    assert sent(effects, "step")["a"].step.begin.step == 3


def test_ready_in_another_attempt_is_not_committed_but_copied():
    run = asked(members={**SWARM, "twin": 2})
    other = pb.Status(committed=2, ready=3, ready_ballot=Ballot(7, 4).message())
    effects = run.statuses(**dict.fromkeys(SWARM, of_third_step()), twin=other)
    assert not any(message.step.HasField("commit") for message in sent(effects, "step").values())
    sync = sent(effects, "sync")["twin"].sync
    assert (sync.method, sync.step) == ("replica", 3)
    assert [source.node for source in sync.sources] == ["c"]


# --- loss and joiners


def test_a_lost_stage_is_rebuilt_at_one_node_and_copied_by_its_replicas():
    run = asked(members={**SWARM, "twin": 2})
    effects = run.statuses(5, c=pb.Status(), twin=pb.Status())
    syncs = sent(effects, "sync")
    assert syncs.keys() == {"c"}
    assert syncs["c"].sync.method == "checkfree"
    assert {(s.node, s.stage) for s in syncs["c"].sync.sources} == {("b", 1), ("d", 3)}
    effects = run.hears("c", synced=pb.Synced(step=5, method="checkfree"))
    assert sent(effects, "query").keys() == {*SWARM, "twin"}
    syncs = sent(run.statuses(5, twin=pb.Status()), "sync")
    assert syncs.keys() == {"twin"}
    assert (syncs["twin"].sync.method, syncs["twin"].sync.follow) == ("replica", False)


@pytest.mark.parametrize(("fetched", "patient"), [(8, False), (2 * SLOWEST * RULES.progress, True)])
def test_a_rebuild_lasts_as_long_as_its_state_comes_fast_enough(fetched: float, patient: bool):
    run = asked()
    run.statuses(5, c=pb.Status())
    run.now += 0.9 * RULES.progress
    run.hears("c", account=pb.Account(fetched=1))
    assert suspected(run.waits(0.9 * RULES.progress)) == []
    run.hears("c", account=pb.Account(fetched=int(fetched)))
    assert suspected(run.waits(0.2 * RULES.progress)) == ([] if patient else ["c"])


def test_whose_state_never_comes_is_accused_and_the_reason_grows_no_longer() -> None:
    """It answers the registry's probes, for example while its disk hangs."""
    run, reasons = asked(), set[str]()
    for _ in range(UNVOTED):
        assert reasons == set()
        run.statuses(5, c=pb.Status())
        accused = events(run.waits(RULES.progress), Accused)
        reasons = {event.reason for event in accused if event.node == "c"}
    (reason,) = reasons
    assert reason.count("no progress") == 1


@pytest.mark.parametrize("lost", ["b", "e"])
def test_the_loss_of_an_end_stage_halts_the_run(lost: str):
    run = asked()
    effects = run.statuses(5, **{lost: pb.Status()})
    halts = sent(effects, "halt")
    assert halts.keys() == SWARM.keys()
    assert f"stage {SWARM[lost]} is lost" in halts["a"].halt.reason
    assert "--strict" in halts["a"].halt.reason
    assert not halts["a"].halt.finished


def test_when_everything_is_lost_the_run_does_not_begin_anew():
    run = asked(committed=7)
    halt = sent(run.statuses(0), "halt")["a"].halt
    assert "everything is lost" in halt.reason
    assert "7" in halt.reason


def test_when_only_joiners_are_left_the_run_goes_back_to_what_all_of_them_have():
    """The members that trained may have committed more, so the run opens a new lineage."""
    run = asked(committed=7)
    last = pb.Commit(step=5, ballot=Ballot(1, 9).message())
    joiner = pb.Status(committed=5, last=last, following=4, heard=5)
    effects = run.statuses(**dict.fromkeys(SWARM, joiner))
    (resuming,) = events(effects, Resuming)
    assert (resuming.step, resuming.exact) == (5, True)
    assert "no member that trained is left" in resuming.reason
    syncs = {node: message.sync for node, message in sent(effects, "sync").items()}
    assert syncs.keys() == SWARM.keys()
    for node, sync in syncs.items():
        assert (sync.method, sync.step, sync.lineage) == ("memory", 5, 1)
        assert [(s.node, s.step, s.lineage) for s in sync.sources] == [(node, 5, 0)]
    run.hears_all(synced=pb.Synced(step=5, method="memory"))
    back = pb.Status(committed=5, last=last, lineage=1)
    effects = run.statuses(**dict.fromkeys(SWARM, back))
    assert sent(effects, "step")["a"].step.begin.step == 6


def test_joiners_are_told_the_newest_commit_once_more_before_all_go_back() -> None:
    """A joiner may lack only that commit. The driver doesn't wait for one that never gets its
    gradient."""
    run = asked(committed=5)
    last = pb.Commit(step=5, ballot=Ballot(1, 9).message())
    has = pb.Status(committed=5, last=last, following=3, heard=5)
    late = at(4, following=3, heard=4)
    mixed = {**dict.fromkeys(SWARM, has), "c": late}
    again = sent(run.statuses(**mixed), "step")
    assert {node: message.step.commit.step for node, message in again.items()} == {"c": 5}
    assert run.driver.phase is DriverPhase.GATHERING
    (resuming,) = events(run.statuses(**mixed), Resuming)
    assert (resuming.step, resuming.exact) == (5, False)


def test_who_has_not_heard_of_going_back_before_its_driver_died_still_goes_there():
    run = asked(committed=5)
    last = pb.Commit(step=5, ballot=Ballot(1, 9).message())
    back = pb.Status(committed=5, last=last, lineage=1)
    told_late = pb.Status(committed=5, last=last, following=4, heard=5)
    effects = run.statuses(**{**dict.fromkeys(SWARM, told_late), "c": back})
    syncs = {node: message.sync for node, message in sent(effects, "sync").items()}
    assert syncs.keys() == SWARM.keys() - {"c"}
    assert {(s.method, s.step, s.lineage) for s in syncs.values()} == {("memory", 5, 1)}


def test_a_commit_that_was_lost_with_its_driver_is_not_everything():
    run = asked(committed=4)
    assert sent(run.statuses(3), "step")["a"].step.begin.step == 4


def test_a_vacant_stage_is_waited_for():
    run = asked(members={"a": 0, "b": 1, "c": 2, "e": 4})
    effects = run.statuses(0)
    (waiting,) = events(effects, Waiting)
    assert waiting.stages == (3,)
    assert run.waits(1000) == []
    assert "join stage 3" in run.driver.explain()
    assert sent(run.views(SWARM), "query").keys() == SWARM.keys()


WEIGHTLESS, ORIGIN = pb.Status(weightless=True), pb.Status(origin=True)


def test_who_lacks_what_the_run_begins_with_gets_it_from_who_has_the_checkpoint() -> None:
    run = asked(members={**SWARM, "b2": 1, "c2": 2})
    lacking = dict.fromkeys(("b", "b2", "c2", "d", "e"), WEIGHTLESS)
    syncs = sent(run.statuses(a=ORIGIN, c=ORIGIN, **lacking), "sync")
    methods = {node: message.sync.method for node, message in syncs.items()}
    assert methods == {"b": "origin", "c2": "replica", "d": "origin", "e": "origin"}
    assert [source.node for source in syncs["b"].sync.sources] == ["c"]
    for node in syncs:
        run.hears(node, synced=pb.Synced(method=methods[node]))
    syncs = sent(run.statuses(a=ORIGIN, c=ORIGIN, b2=WEIGHTLESS), "sync")
    assert {node: message.sync.method for node, message in syncs.items()} == {"b2": "replica"}
    assert sent(run.hears("b2", synced=pb.Synced(method="replica")), "query")
    assert sent(run.statuses(a=ORIGIN, c=ORIGIN), "step")


def test_a_run_begins_when_somebody_has_the_checkpoint() -> None:
    run = asked()
    effects = run.statuses(**dict.fromkeys(SWARM, WEIGHTLESS))
    assert not sent(effects, "step")
    (waiting,) = events(effects, Waiting)
    assert "waiting for a node that has the checkpoint" in waiting.reason
    assert "--model DIR" in run.driver.explain()
    assert sent(run.views({**SWARM, "z": 1}), "query")
    effects = run.statuses(**dict.fromkeys(SWARM, WEIGHTLESS), z=ORIGIN)
    methods = {node: message.sync.method for node, message in sent(effects, "sync").items()}
    assert methods == {"a": "origin", "b": "replica", "c": "origin", "d": "origin", "e": "origin"}


def test_beside_adapters_a_giver_of_the_checkpoint_is_named_to_whoever_lacks_it() -> None:
    run = begun(replace(RULES, adapters=True))
    run.commits()
    run.views(without(SWARM, "c") | {"new": 2})
    assert not sent(run.statuses(new=WEIGHTLESS), "sync")
    assert "waiting for a node that has the checkpoint" in run.driver.explain()
    run.views({**run.members, "z": 0})
    giving = run.has(origin=True)
    syncs = sent(run.statuses(d=giving, new=WEIGHTLESS, z=WEIGHTLESS), "sync")
    named = {n: (m.sync.method, m.sync.giver) for n, m in syncs.items()}
    assert named == {"new": ("adapters-anew", "d"), "z": ("replica", "a")}


def test_a_joiner_waits_for_the_end_of_the_step():
    run = begun()
    assert sent(run.views({**SWARM, "new": 2}), "query").keys() == {"new"}
    assert run.commits()["b"].step.HasField("begin"), "it is building its stage"
    run.hears("new", Ballot(2, 0), status=pb.Status())
    effects = run.commits()
    assert not effects["b"].step.HasField("begin"), "the view is taken up first"
    assert run.driver.phase is DriverPhase.GATHERING
    assert run.driver.members.keys() == {*SWARM, "new"}


def test_a_newcomer_whose_link_is_dialled_anew_is_asked_again():
    """The query may be lost with the link."""
    run = begun()
    run.views({**SWARM, "new": 2})
    again = run.driver.link_lost("new", "dialled anew", run.now)
    assert sent(again, "query").keys() == {"new"}
    assert sent(again, "query")["new"].ballot == Ballot(2, 0).message()
    assert run.driver.phase is DriverPhase.RUNNING
    run.hears("new", Ballot(2, 0), status=pb.Status())
    assert run.driver.link_lost("new", "dialled anew", run.now) == []


# --- joiners that follow while the others train


class Joined(DrivenRun):
    """A run whose stage 2 gets a second node, `new`, after step 1."""

    def __init__(self, rules: TransactionRules = RULES) -> None:
        super().__init__(rules)
        self.begins()
        self.views({**SWARM, "new": 2})
        self.hears("new", Ballot(2, 0), status=pb.Status())
        self.commits()
        self.effects = self.gathered()

    def gathered(self, **status: object) -> list[Effect]:
        """All members answer, `new` with this status; returns the effects of the last answer."""
        return self.statuses(new=pb.Status(**status), newer=pb.Status())

    def trains(self) -> list[Effect]:
        """All members that train vote; returns the effects of the last vote."""
        self.comes_home()
        return self.votes(but="new")

    def loses_stage_2(self) -> dict[str, int]:
        """Drops `c`, which trained at stage 2; returns the members that are left."""
        self.views(without(SWARM, "c") | {"new": 2})
        return self.members

    def catches_up(self) -> list[Effect]:
        synced = pb.Synced(step=1, method="replica", fetched_bytes=8)
        return self.hears("new", synced=synced, ballot=Ballot(2, 1))


def joining(message: pb.Message) -> list[str]:
    return [joiner.node for joiner in message.step.begin.joining]


def members(begin: pb.Begin) -> set[str]:
    return {place.node for place in begin.members}


def test_a_newcomer_that_does_not_answer_is_asked_with_all_others_in_the_end():
    run = begun()
    run.views({**SWARM, "new": 2})
    run.now += RULES.progress
    assert not run.commits()["b"].step.HasField("begin")
    assert isinstance(run.driver.current, Gathering)
    assert run.driver.current.answers.unheard() == sorted([*SWARM, "new"])


def test_a_joiner_copies_a_replica_while_the_others_go_on():
    run = Joined()
    sync = sent(run.effects, "sync")["new"].sync
    assert (sync.follow, sync.step, [s.node for s in sync.sources]) == (True, 1, ["c"])
    begins = sent(run.effects, "step")
    assert begins.keys() == {*SWARM, "new"}, "the joiner hears of every attempt"
    assert members(run.whole(begins["new"])) == SWARM.keys()
    assert [(j.node, j.stage, j.step) for j in begins["c"].step.begin.joining] == [("new", 2, 1)]
    steps = sent(run.trains(), "step")
    assert (steps["new"].step.commit.step, joining(steps["c"])) == (2, ["new"])
    assert joining(steps["b"]) == [], "it is of another stage"


class Relearning(Joined):
    """A run whose stage 2 is still relearning when it gets its second node."""

    left = 9

    def gathered(self, **status: object) -> list[Effect]:
        return self.statuses(c=self.has(relearning=self.left), new=pb.Status(**status))

    def trains_with(self, relearned: int, left: int) -> list[Effect]:
        """All members that train vote; `c` offers `relearned` updates and has `left` more."""
        self.left = left
        self.comes_home()
        return self.votes(but="new", c={"relearned": relearned, "relearning": left})


def test_what_a_stage_has_relearned_enters_with_the_commit():
    run = Relearning()
    steps = sent(run.trains_with(3, 6), "step")
    assert {tuple(m.step.commit.relearned) for m in steps.values()} == {(0, 0, 3, 0, 0)}
    assert hash_of(steps["b"].step.commit) != hash_of(pb.Commit(step=2))
    steps = sent(run.trains_with(0, 6), "step")
    assert {tuple(m.step.commit.relearned) for m in steps.values()} == {()}


def test_who_comes_to_a_stage_that_relearns_copies_it_when_the_lesson_is_over():
    run = Relearning()
    assert sent(run.effects, "sync") == {}
    begins = sent(run.effects, "step")
    assert begins.keys() == SWARM.keys(), "nobody else is told of attempts"
    assert joining(begins["c"]) == []
    assert "new waits until stage 2 has relearned" in run.driver.explain()
    steps = sent(run.trains_with(4, 5), "step")
    assert steps["b"].step.HasField("begin")
    assert events(run.driver.link_lost("new", "reset", run.now), NodeLost)
    assert run.driver.phase is DriverPhase.RUNNING, "its loss costs no attempt"
    effects = run.trains_with(5, 0)
    assert not sent(effects, "step")["b"].step.HasField("begin")
    sync = sent(run.gathered(), "sync")["new"].sync
    assert (sync.follow, [s.node for s in sync.sources]) == (True, ["c"])
    assert joining(sent(run.trains(), "step")["c"]) == ["new"]


@pytest.mark.parametrize("leaves", [True, False])
def test_who_leaves_or_takes_too_long_is_copied_though_it_relearns(leaves: bool):
    run = Relearning()
    if leaves:
        run.views(leaving="c")
    else:
        run.now += RULES.relearn_seconds
    assert not sent(run.trains_with(1, 8), "step")["b"].step.HasField("begin")
    assert sent(run.gathered(), "sync").keys() == {"new"}


def test_who_has_caught_up_votes_and_enters_with_the_commit():
    run = Joined()
    run.catches_up()
    reduces = sent(run.comes_home(), "reduce")
    assert reduces.keys() == {*SWARM, "new"}
    run.ready("new")
    effects = run.votes(but="new")
    steps = sent(effects, "step")
    assert all(members(step.step.begin) == {"new"} for step in steps.values()), "others are known"
    assert all(step.step.begin.HasField("members_of") for step in steps.values())
    assert joining(steps["c"]) == []
    (rebuilt,) = events(effects, StageRebuilt)
    assert (rebuilt.node, rebuilt.method) == ("new", "replica")
    assert (rebuilt.bytes, rebuilt.stall_seconds) == (8, 0.0)
    run.comes_home()
    assert "new" in run.attempt.awaited


def test_a_commit_waits_for_a_joiners_vote_a_short_while_and_longer_the_next_time():
    run = Joined()
    run.catches_up()
    waits = []
    for _ in range(3):
        assert sent(run.trains(), "step") == {}
        before, effects = run.now, run.waits(0)
        while not effects:
            effects = run.waits(0.01)
        assert joining(sent(effects, "step")["c"]) == ["new"]
        waits.append(run.now - before)
    assert waits == pytest.approx([0.1, 0.2, 0.4], abs=0.02)
    run.trains()
    run.now += 0.3
    (rebuilt,) = events(run.ready("new"), StageRebuilt)
    assert rebuilt.stall_seconds == pytest.approx(sum(waits) + 0.3), "all of it is told"


def test_a_joiner_whose_vote_never_comes_is_not_waited_for_for_ever():
    run = Joined()
    run.catches_up()
    given_up: list[RebuildFailed] = []
    for _ in range(IN_VAIN + 1):
        run.trains()
        while run.driver.phase is DriverPhase.REDUCING:
            run.waits(0.1)
        given_up += events(run.waits(0), RebuildFailed)
    assert [event.node for event in given_up] == ["new"]
    assert "its vote was missing" in given_up[0].reason


def test_a_joiner_with_other_weights_does_not_enter():
    run = Joined()
    run.catches_up()
    run.trains()
    effects = run.ready("new", squared_norm=2.0)
    assert events(effects, Diverged)[0].nodes == ("c", "new")
    assert not sent(effects, "step")["c"].step.HasField("begin")
    assert sent(effects, "query").keys() == {*SWARM, "new"}
    assert sent(run.gathered(committed=2), "step")["c"].step.begin.step == 3


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_joiner_that_is_lost_costs_no_attempt(is_waited_for: bool):
    run = Joined()
    run.catches_up()
    assert not is_waited_for or run.trains() == []
    lost, *effects = run.driver.link_lost("new", "reset", run.now)
    assert isinstance(lost, NodeLost)
    if is_waited_for:
        assert sent(effects, "step")["c"].step.commit.step == 2
        return
    assert effects == []
    assert run.views(SWARM) == []
    assert sent(run.trains(), "query").keys() == SWARM.keys()
    assert sent(run.statuses(2), "step")["c"].step.begin.step == 3


def test_a_gather_does_not_disturb_who_follows_and_tells_it_the_commit_it_doubts():
    run = Joined()
    run.trains()
    run.hears("b", failed=pb.Failed(reason="x"))
    effects = run.gathered(committed=1, following=1, heard=1)
    assert "new" not in sent(effects, "sync")
    resent = [e.message.step for e in effects if isinstance(e, Send) and e.to == "new"]
    assert [(step.commit.step, step.begin.step) for step in resent] == [(2, 0), (0, 3)]
    run.hears("b", failed=pb.Failed(reason="x"))
    run.gathered(committed=1, following=1, heard=2)
    assert run.driver.joining.joiners["new"].step == 1


@pytest.mark.parametrize("heard", [0, 3])
def test_who_has_missed_commits_begins_anew(heard: int):
    run = Joined()
    run.trains()
    run.hears("b", failed=pb.Failed(reason="x"))
    sync = sent(run.gathered(following=1, heard=heard), "sync")["new"].sync
    assert (sync.follow, sync.step) == (True, 2)


def test_another_driver_lets_joiners_go_on():
    run = asked(members={**SWARM, "new": 2})
    joiner = pb.Status(committed=3, following=2, heard=5)
    effects = run.statuses(5, new=joiner)
    assert sent(effects, "sync") == {}
    assert joining(sent(effects, "step")["c"]) == ["new"]


def test_who_is_caught_up_at_a_gather_is_a_member_and_can_stand_for_its_stage():
    run = Joined()
    run.trains()
    left = run.loses_stage_2()
    effects = run.gathered(committed=2, following=1, heard=2, last=run.driver.standing.last)
    assert members(run.whole(sent(effects, "step")["new"])) == left.keys()
    (rebuilt,) = events(effects, StageRebuilt)
    assert rebuilt.node == "new"


def test_who_drives_no_longer_reports_what_was_rebuilt_and_once():
    run = Joined()
    run.trains()
    run.loses_stage_2()
    effects = run.gathered(committed=1, following=1, heard=2, last=pb.Commit(step=1))
    sync = sent(effects, "sync")["new"].sync
    run.now += 2.0
    run.hears("new", synced=pb.Synced(step=2, method="joiner", sources=sync.sources))
    run.now += 1.0
    (rebuilt,) = events(run.views(driver="b"), StageRebuilt)
    assert (rebuilt.node, rebuilt.stage, rebuilt.stall_seconds) == ("new", 2, 3.0)
    run.now += 60.0
    run.views()
    assert not events(run.statuses(2), StageRebuilt)


def test_who_is_behind_when_its_stage_is_lost_rebuilds_it():
    run = Joined()
    run.trains()
    run.loses_stage_2()
    effects = run.gathered(committed=1, following=1, heard=2, last=pb.Commit(step=1))
    sync = sent(effects, "sync")["new"].sync
    assert (sync.method, sync.follow) == ("joiner", False)
    assert [(source.node, source.step) for source in sync.sources] == [("new", 1)]
    (ordered,) = events(effects, RebuildOrdered)
    assert (ordered.exact, ordered.fallback) == (False, False)
    assert "1 step old" in ordered.reason
    run.hears("new", synced=pb.Synced(step=2, method="joiner", sources=sync.sources))
    (rebuilt,) = events(run.statuses(2), StageRebuilt)
    assert (rebuilt.oldest_step, rebuilt.mean_step) == (1, 1)


@pytest.mark.parametrize("step", [1, 2])
def test_who_had_got_the_weights_when_its_stage_was_lost_goes_on_with_them(step: int) -> None:
    run = Joined()
    run.trains()
    run.loses_stage_2()
    made = run.driver.standing.last.ballot if step == 2 else pb.Ballot(view=1, attempt=1)
    here = [pb.Holding(kind="weights", stage=2, step=step, made=made)]
    effects = run.gathered(holdings=here)
    sync = sent(effects, "sync")["new"].sync
    assert (sync.method, sync.follow, sync.step) == ("weights", False, 2)
    assert [(source.node, source.step) for source in sync.sources] == [("new", step)]
    assert not sync.lost, "there is nothing to relearn"


def test_weights_of_a_stage_that_a_node_does_not_serve_are_none() -> None:
    run = asked()
    liar = at(2, holdings=[pb.Holding(kind="weights", stage=2, step=2)])
    syncs = sent(run.statuses(2, c=pb.Status(), b=liar), "sync")
    assert {node: message.sync.method for node, message in syncs.items()} == {"c": "checkfree"}


def test_who_followed_a_stage_that_is_rebuilt_copies_it_anew():
    """The gradients that the joiner holds are those of the lost replicas."""
    run = asked(members={**SWARM, "new": 2})
    follows = pb.Status(following=3, heard=4)  # its copy of the state hasn't arrived
    assert sent(run.statuses(5, c=pb.Status(), new=follows), "sync").keys() == {"c"}
    run.hears("c", synced=pb.Synced(step=5, method="checkfree"))
    effects = run.statuses(5, new=follows)
    sync = sent(effects, "sync")["new"].sync
    assert (sync.method, [s.node for s in sync.sources]) == ("replica", ["c"])
    assert sent(effects, "step") == {}, "the commit that it lacks would make it another replica"


@pytest.mark.parametrize("digest", [b"rebuilt", b"of those that are gone"])
def test_a_joiner_with_other_weights_does_not_enter_at_a_gather_either(digest: bytes):
    """An earlier driver may have ordered a rebuild of the stage."""
    run = asked(members={**SWARM, "new": 2})
    last = pb.Commit(step=5)
    rebuilt = pb.Status(committed=5, last=last, digest=b"rebuilt")
    caught_up = pb.Status(committed=5, last=last, following=3, heard=5, digest=digest)
    effects = run.statuses(5, c=rebuilt, new=caught_up)
    trains = members(run.whole(sent(effects, "step")["c"]))
    if digest == rebuilt.digest:
        assert trains == {*SWARM, "new"}
    else:
        assert trains == SWARM.keys()
        assert [s.node for s in sent(effects, "sync")["new"].sync.sources] == ["c"]


def test_who_fails_to_follow_twice_is_waited_for():
    run = Joined()
    for _ in range(2):
        effects = run.hears("new", failed=pb.Failed(reason="too slow"), ballot=Ballot(2, 1))
        (failed,) = events(effects, RebuildFailed)
        assert "too slow" in failed.reason
        assert run.hears("new", failed=pb.Failed(reason="too slow")) == [], "said once"
        assert sent(run.trains(), "query"), "it is told what to do at the step boundary"
        effects = run.gathered()
    assert not sent(effects, "sync")["new"].sync.follow
    assert sent(effects, "step") == {}
    assert run.driver.phase is DriverPhase.SYNCING


@pytest.mark.parametrize("comes", [False, True])
def test_who_never_catches_up_is_given_up_unless_its_state_still_comes(comes: bool):
    run = Joined(replace(RULES, progress=1.0))
    run.now += 1.9
    if comes:
        run.hears("new", account=pb.Account(fetched=8))
    run.comes_home()
    for node in "abcd":
        run.ready(node)
    failed = events(run.waits(0.2), RebuildFailed)
    assert [event.node for event in failed] == ([] if comes else ["new"])


def test_at_the_end_joiners_get_the_last_state_before_all_is_over():
    run = Joined(replace(RULES, steps=2))
    effects = run.trains()
    assert sent(effects, "query").keys() == {*SWARM, "new"}
    sync = sent(run.gathered(committed=1, following=1, heard=2), "sync")["new"].sync
    assert (sync.follow, sync.step) == (False, 2)
    run.hears("new", synced=pb.Synced(step=2, method="replica"))
    assert sent(run.gathered(committed=2), "halt")["new"].halt.finished


@pytest.mark.parametrize("by_view", [True, False])
def test_the_loss_of_a_stages_last_node_ends_the_attempt_at_once(by_view: bool):
    run = begun()
    assert sent(run.views({**SWARM, "new": 2}), "step") == {}
    if by_view:
        effects = run.views(without(SWARM, "c") | {"new": 2})
    else:
        effects = run.driver.link_lost("c", "reset", run.now)
        assert [e.stage for e in events(effects, NodeLost)] == [2]
        assert run.driver.link_lost("stranger", "reset", run.now) == []
    assert len(events(effects, Aborted)) == 1
    assert sent(effects, "query").keys() == run.members.keys()


def test_who_drives_no_longer_is_silent():
    run = begun()
    assert run.views(driver="b") == []
    assert run.hears("c", failed=pb.Failed(reason="x")) == []
    assert run.driver.link_lost("c", "reset", run.now) == []
    assert run.waits(1000) == []


# --- deadlines


def test_a_silent_member_is_asked_again_and_then_suspected():
    run = asked()
    for node in "abcd":
        run.hears(node, status=pb.Status())
    effects = run.waits(QUERY_AGAIN)
    assert sent(effects, "query").keys() == {"e"}
    assert suspected(effects) == []
    assert "e" in run.driver.explain()
    assert suspected(run.waits(ANSWER)) == ["e"]


def test_who_says_that_it_cannot_answer_yet_is_suspected_only_once_it_is_silent():
    run = asked()
    for node in "bcd":
        run.hears(node, status=pb.Status())
    for _ in range(30):  # the seat of `a` is being built from a large model
        assert suspected(run.waits(QUERY_AGAIN)) in ([], ["e"])
        run.hears("a", account=pb.Account(computing=True))
    effects = run.waits(QUERY_AGAIN)
    assert sent(effects, "query").keys() == {"a", "e"}
    assert set(suspected(run.waits(ANSWER))) == {"a", "e"}


def test_who_is_not_ready_in_time_is_suspected():
    run = begun()
    run.comes_home()
    run.votes(but="c")
    assert suspected(run.waits(RULES.progress)) == [], "others are to say so first"
    effects = run.waits(COMPLAINED)
    assert suspected(effects) == ["c"]
    assert "waiting for c" in events(effects, Aborted)[0].reason


def test_passes_that_members_have_done_are_progress_each_once_and_each_of_its_own():
    run = begun()
    last = len(routes(run.attempt.begin)[0].nodes) - 1
    passes = [pb.Pass(microbatch=0, position=n, backward=b) for b in (False, True) for n in (1, 2)]
    own = [item for item in passes if item.position == 1]  # b's
    head = pb.Pass(microbatch=0, position=last)
    accounts = ([], False), (own[:1], True), (own, True), ([*own, head], False), (passes, False)
    for done, is_progress in accounts:
        before = run.attempt.progressed
        run.waits(RULES.progress - 1)
        run.hears("b", account=pb.Account(computing=True, done=done))
        assert (run.attempt.progressed > before) == is_progress
        run.attempt.progressed = run.now
    run.hears("b", account=pb.Account(done=[*passes, pb.Pass(microbatch=9, position=1)]))
    (aborted,) = events(run.waits(RULES.progress), Aborted)
    assert "no progress for" in aborted.reason and "(swarm.progress)" in aborted.reason


def test_the_first_failure_is_retried_at_once_later_ones_after_longer_pauses():
    run = begun()
    pauses = []
    for _ in range(8):
        run.hears("c", failed=pb.Failed(reason="out of memory"))
        run.statuses(0)
        before = run.now
        while run.driver.phase is DriverPhase.PAUSING:
            run.waits(0.05)
        assert run.driver.phase is DriverPhase.RUNNING
        pauses.append(run.now - before)
    assert pauses[0] == 0
    assert pauses[1] > 0
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=0.1)
    run.commits()
    run.hears("c", failed=pb.Failed(reason="again"))
    run.statuses(1)
    assert run.driver.phase is DriverPhase.RUNNING, "a commit ends the row"


@pytest.mark.parametrize("all_go_back", [False, True])
def test_a_failed_rebuild_is_retried_after_pauses_too(all_go_back: bool) -> None:
    run, pauses = asked(), []
    others = {n: saves(s, 5) for n, s in SWARM.items()} if all_go_back else {"c": pb.Status()}
    for _ in range(4):
        run.statuses(5, **others)
        before = run.now
        while run.driver.phase is DriverPhase.PAUSING:
            run.waits(0.05)
        if run.now > before:
            run.statuses(5, **others)
        assert run.driver.phase is DriverPhase.SYNCING
        pauses.append(run.now - before)
        run.hears("c", failed=pb.Failed(reason="its disk fails"))
    assert pauses[:2] == [0, 0]
    assert 0 < pauses[2] < pauses[3]


@pytest.mark.parametrize("at_stage", ["lost", "replicated"])
def test_who_always_fails_to_get_its_state_is_accused(at_stage: str) -> None:
    """All others wait for it, and the registry could give its seat to another node."""
    run = asked(members=SWARM if at_stage == "lost" else {**SWARM, "r": 2})
    run.driver.joining.failures["c"] = FOLLOWS
    suspects: list[str] = []
    for _ in range(HELD_UP):
        assert suspects == []
        run.statuses(5, c=pb.Status())
        if run.driver.phase is DriverPhase.PAUSING:
            run.waits(LONGEST_PAUSE)
            run.statuses(5, c=pb.Status())
        assert run.driver.phase is DriverPhase.SYNCING
        suspects = suspected(run.hears("c", failed=pb.Failed(reason="not enough memory")))
    assert suspects == ["c"]


def test_a_driver_that_leaves_begins_nothing_whatever_fails_meanwhile() -> None:
    run = asked()
    run.driver.rest("it leaves", run.now)
    for _ in range(2):
        run.statuses(5, c=pb.Status())
        run.hears("c", failed=pb.Failed(reason="out of memory"))
    run.statuses(5)
    run.waits(2 * LONGEST_PAUSE)
    assert run.driver.phase is DriverPhase.PAUSING


# --- compute that hangs


PAIRED = {"a": 0, "z": 0, "b": 1, "y": 1, "c": 2, "x": 2}


PAIRED_RULES = replace(RULES, stages=2, microbatches=6)


def late(rules: TransactionRules = PAIRED_RULES, members: dict[str, int] = PAIRED) -> DrivenRun:
    """A run in its second step, whose first step took a second."""
    run = begun(rules, members)
    run.now += 1.0
    run.commits()
    return run


def accounts(run: DrivenRun, seconds: float, hanging: str) -> list[Effect]:
    """Members answer inquiries for `seconds`; those `hanging` have work and do none."""
    effects: list[Effect] = []
    end, computed = run.now + seconds, 0
    while run.now < end:
        computed += 1
        effects += run.waits(ASK)
        for node in sent(effects[-20:], "inquiry"):
            stuck = node in hanging
            account = pb.Account(computed=0 if stuck else computed, computing=stuck)
            effects += run.hears(node, account=account)
    return effects


def causes(effects: Sequence[Effect]) -> dict[str, int]:
    return {effect.node: effect.cause for effect in effects if isinstance(effect, Suspect)}


def test_nobody_is_asked_in_a_step_that_takes_as_long_as_usual():
    run = late()
    assert sent(run.waits(1.4), "inquiry") == {}
    assert sent(run.waits(0.2), "inquiry").keys() == PAIRED.keys()
    assert sent(run.waits(ASK / 2), "inquiry") == {}, "not at each tick"


def test_an_attempt_goes_on_without_a_replica_that_stands_still():
    run = late()
    effects = accounts(run, 8.0, hanging="y")
    (held_up,) = events(effects, HeldUp)
    assert (held_up.step, held_up.node, held_up.stage) == (2, "y", 1)
    assert causes(effects) == {"y": HANG}
    (masked,) = events(effects, AttemptMasked)
    assert masked.nodes == ("y",)
    assert {m.places[0] for m in run.attempt.begin.plan} == {
        [place.node for place in run.attempt.begin.members].index("b")
    }


def test_a_node_that_says_that_it_hangs_is_believed_at_once():
    run = late()
    effects = run.hears("c", account=pb.Account(hang="stuck"))
    assert causes(effects) == {"c": HANG}
    assert run.attempt.masked == {"c"}


@pytest.mark.parametrize("when", ["averaging", "validation"])
def test_who_hangs_when_nothing_can_be_masked_or_all_is_home_is_found_too(when):
    rules = replace(RULES, stages=2, microbatches=6, validation_microbatches=2, validate_every=2)
    run = late(rules)
    if when == "averaging":
        run.comes_home()
        run.votes(but="y")
    else:
        run.commits()
        assert run.attempt.begin.kind == pb.Begin.EVALUATE
    effects = accounts(run, 8.0, hanging="y")
    assert events(effects, HeldUp)[0].node == "y"
    assert causes(effects) == {"y": HANG}


def test_a_driver_that_hangs_makes_room_for_another_one_that_does_not():
    run = late()
    effects = run.hears("a", account=pb.Account(hang="stuck"))
    assert [effect for effect in effects if isinstance(effect, Rejoin)]
    assert causes(effects) == {}
    alone = late(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2})
    effects = alone.hears("a", account=pb.Account(hang="stuck"))
    assert not [effect for effect in effects if isinstance(effect, Rejoin)]


def test_the_last_node_of_a_stage_is_named_at_once_and_replaced_when_there_was_no_progress():
    run = late(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2})
    effects = run.hears("b", account=pb.Account(hang="stuck"))
    assert [event.node for event in events(effects, HeldUp)] == ["b"]
    assert causes(effects) == {}
    assert "held up by b of stage 1: stuck" in run.driver.explain()
    effects = run.waits(RULES.progress)
    assert "held up by b of stage 1: stuck" in events(effects, Aborted)[0].reason
    effects = run.statuses(b=run.has(hang="stuck"))
    assert causes(effects) == {"b": HANG}
    assert run.driver.phase is DriverPhase.PAUSING
    assert sent(run.waits(REPLACED), "query").keys() == {"a", "b", "c"}, "is it there yet?"


def test_a_replica_that_its_stage_can_do_without_copies_the_state_of_a_last_node_that_hangs():
    run = late(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2, "x": 2})
    run.hears("b", account=pb.Account(hang="stuck"))
    run.waits(RULES.progress)
    hung = run.has(hang="stuck")
    effects = run.statuses(b=hung)
    assert sent(effects, "inquiry")["b"].inquiry.replace.endswith("to be replaced: stuck")
    assert causes(effects) == {}, "its stage would be lost"
    run.waits(HEIR)
    assert causes(run.statuses(b=hung)) == {"b": HANG}, "nobody has come"


def test_who_goes_on_is_not_replaced():
    run = late(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2})
    run.hears("b", account=pb.Account(hang="stuck"))
    run.hears("b", account=pb.Account())
    run.waits(RULES.progress)
    assert sent(run.statuses(1), "step").keys() == {"a", "b", "c"}


def test_what_a_slow_node_has_given_up_goes_to_its_replicas_and_who_had_voted_does_so_anew():
    run = late()
    mine = [m.id for m in run.attempt.begin.plan if m.source == "z"]
    run.ready("b")
    effects = run.hears("z", account=pb.Account(given_up=mine[1:], computing=True))
    (relieved,) = events(effects, Relieved)
    assert (relieved.node, relieved.microbatches) == ("z", len(mine) - 1)
    assert [m.id for m in run.attempt.begin.plan if m.source == "z"] == mine[:1]
    begins = sent(effects, "step")
    assert begins.keys() == PAIRED.keys(), "it stays a member"
    assert begins["z"].step.begin.HasField("since")
    assert sent(run.comes_home(), "reduce").keys() == PAIRED.keys()


def share(attempt: AttemptState, node: str) -> list[int]:
    """The microbatches that the plan gives to `node`."""
    return [m for m, route in routes(attempt.begin).items() if node in route.nodes]


def test_a_step_is_tried_again_when_who_gives_up_a_microbatch_is_alone_by_then() -> None:
    """`y` is asked during a long pass, and answers after its replica is lost."""
    run = late()
    mine = share(run.attempt, "y")
    run.driver.link_lost("b", "given back", run.now)
    assert share(run.attempt, "y") == list(range(6))
    effects = run.hears("y", account=pb.Account(given_up=mine[-1:], computing=True))
    assert events(effects, Relieved) == []
    (aborted,) = events(effects, Aborted)
    assert aborted.reason.startswith("y of stage 1 is slow, and no other node is left for")
    assert run.driver.phase is DriverPhase.GATHERING


@given(
    st.lists(
        st.tuples(st.sampled_from("yvw"), st.booleans(), st.sets(st.integers(0, 5))), max_size=5
    )
)
def test_nobody_gets_again_what_it_has_given_up(
    happens: list[tuple[str, bool, set[int]]],
) -> None:
    """Whatever replicas are lost, others compute the microbatch, or the step is tried again."""
    run = late(members={"a": 0, "y": 1, "v": 1, "w": 1, "c": 2})
    given_up: set[tuple[str, int]] = set()
    left = set("yvw")
    for node, lost, some in happens:
        if node not in left:
            continue
        if lost:
            left.remove(node)
            run.driver.link_lost(node, "reset", run.now)
        else:
            some &= set(share(run.attempt, node))
            run.hears(node, account=pb.Account(given_up=some, computing=True))
            given_up |= {(node, identity) for identity in some}
        if not all(any((node, m) not in given_up for node in left) for m in range(6)):
            assert run.driver.phase is DriverPhase.GATHERING
            return
        for node in left:
            assert not {(node, identity) for identity in share(run.attempt, node)} & given_up


def test_a_slow_node_is_not_asked_to_give_up_what_only_it_can_do() -> None:
    run = late()
    run.hears("z", account=pb.Account(given_up=share(run.attempt, "z"), computing=True))
    asked: list[str] = []
    for computed in range(8):  # a has all microbatches of stage 0, and z is idle
        inquiries = sent(run.waits(ASK), "inquiry")
        asked += [node for node, message in inquiries.items() if message.inquiry.relieve]
        for node in inquiries:
            run.hears(node, account=pb.Account(computed=computed, computing=node in "ab"))
    assert asked == ["b"]


def test_no_attempt_fails_twice_in_a_row_for_one_reason_with_nobody_named():
    run = begun()
    for times in range(2):
        effects = run.hears("c", failed=pb.Failed(reason=f"after {times} s nothing has come"))
        (aborted,) = events(effects, Aborted)
        assert ("it waited for" in aborted.reason) == (times == 1)
        tries_again(run)
    assert "microbatch 0, forward at a of stage 0" in aborted.reason


def test_a_driver_whose_own_vote_was_invalid_rests_and_keeps_its_state():
    run = begun(replace(RULES, microbatches=4), PAIRS)
    run.comes_home()
    run.ready("a", squared_norm=1e300)
    run.statuses(0)
    assert all(microbatch.source != "a" for microbatch in run.attempt.begin.plan)
    run.commits()
    assert any(microbatch.source == "a" for microbatch in run.attempt.begin.plan)
    run.views({node: stage for node, stage in PAIRS.items() if stage or node == "a"})
    run.statuses(1)
    assert run.attempt.begin.step == 2, "it isn't far ahead of the others"


# --- the end


def test_after_the_last_step_comes_a_validation_and_then_the_end():
    run = begun(replace(RULES, steps=1, validation_microbatches=3))
    begin = run.commits()["b"].step.begin
    assert (begin.kind, begin.step, len(begin.plan)) == (pb.Begin.EVALUATE, 1, 3)
    assert sent(run.comes_home(), "query").keys() == SWARM.keys()
    halts = sent(run.statuses(1), "halt")
    assert halts.keys() == SWARM.keys()
    assert halts["a"].halt.finished
    assert halts["a"].halt.validation_loss == 2.0


def test_the_end_is_told_when_the_last_step_is_in_the_ledger():
    """The only ledger is the driver's, and the driver may be gone right after the halt."""
    run = begun(replace(RULES, steps=1))
    run.commits()
    writing = run.has(recording=pb.LEDGER_WRITING)
    assert run.statuses(a=writing) == []
    assert run.driver.explain() == "the last step is on its way to the ledger"
    assert sent(run.waits(0.1), "query").keys() == SWARM.keys()
    assert sent(run.statuses(1), "halt").keys() == SWARM.keys()


def test_once_the_run_is_over_nobody_guesses_what_its_nodes_have_taken_along():
    run = begun(replace(RULES, steps=1))
    run.commits()
    run.statuses(1)
    run.views(without(SWARM, "c") | {"n": 2})
    effects = run.statuses(1, n=pb.Status())
    assert not sent(effects, "sync")
    assert sent(effects, "halt").keys() == run.members.keys()


def test_validation_comes_at_its_steps_and_aborts_nothing():
    run = begun(replace(RULES, validation_microbatches=1, validate_every=2))
    assert run.commits()["a"].step.begin.kind == pb.Begin.TRAIN
    assert run.commits()["a"].step.begin.kind == pb.Begin.EVALUATE
    effects = run.hears("c", failed=pb.Failed(reason="x"))
    assert events(effects, Aborted) == []
    begin = sent(run.statuses(2), "step")["a"].step.begin
    assert begin.kind == pb.Begin.EVALUATE
    assert sent(run.comes_home(), "step")["a"].step.begin.step == 3


@pytest.mark.parametrize("members", [SWARM, {"a": 0, "c": 2, "d": 3, "e": 4}])
def test_a_finished_run_stays_finished_whoever_is_lost(members: dict[str, int]):
    run = begun(replace(RULES, steps=1))
    run.commits()
    run.views(members)
    effects = run.statuses(1, b=pb.Status())
    assert all(message.halt.finished for message in sent(effects, "halt").values())
    assert run.driver.phase is DriverPhase.HALTED


def test_a_run_that_another_driver_finished_stays_finished_whoever_leaves():
    run = DrivenRun(RULES)
    run.driver.run_finished(pb.Halt(finished=True, step=10, validation_loss=2.5))
    run.views({"a": 0, "c": 2})
    halts = sent(run.statuses(10), "halt")
    assert {node: m.halt for node, m in halts.items()} == dict.fromkeys(
        "ac", pb.Halt(finished=True, step=10, validation_loss=2.5)
    )


# --- recovery policies


def lost(*nodes: str) -> dict[str, pb.Status]:
    """Statuses of nodes that have just joined."""
    return dict.fromkeys(nodes, pb.Status())


def at_step_5(rules: TransactionRules, **statuses: pb.Status) -> list[Effect]:
    run = asked(rules, committed=5)
    return run.statuses(5, **statuses)


LOOSE = replace(RULES, strict=False)


def test_with_swapped_orders_and_one_microbatch_a_step_every_second_step_swaps():
    run = DrivenRun(replace(RULES, policy=POLICIES["checkfree+"], microbatches=1))
    begun = [run.begins(), run.commits(), run.commits()]
    orders = [list(m.order) for messages in begun for m in messages["c"].step.begin.plan]
    assert orders == [[1, 2, 3, 4], [2, 1, 4, 3], [1, 2, 3, 4]]


def test_a_lost_stage_is_rebuilt_only_when_every_stage_has_a_node():
    """The driver decides about all lost stages together."""
    run = asked(LOOSE, {"a": 0, "b": 1, "c": 2, "e": 4}, committed=5)
    effects = run.statuses(5, **lost("c"))
    assert not sent(effects, "sync")
    assert run.driver.phase is DriverPhase.WAITING
    run.views(SWARM)
    effects = run.statuses(5, **lost("c", "d"))
    syncs = {node: message.sync for node, message in sent(effects, "sync").items()}
    assert {n: s.method for n, s in syncs.items()} == dict.fromkeys("cd", "interpolate")
    assert [s.stage for s in syncs["c"].sources] == [1, 4]
    assert syncs["c"].last.step == 5
    assert all(event.fallback for event in events(effects, RebuildOrdered))


def test_stages_lost_in_a_row_relearn_together_with_what_is_around_them():
    effects = at_step_5(replace(LOOSE, relearn=True), **lost("c", "d"))
    for node in "cd":
        sync = sent(effects, "sync")[node].sync
        assert [(p.node, p.stage) for p in sync.lost] == [("c", 2), ("d", 3)]
        assert [p.node for p in sync.neighbours] == ["b", "e"]


def test_relearning_takes_no_longer_than_a_share_of_the_time_since_the_last_loss() -> None:
    run = asked(replace(LOOSE, relearn=True, relearn_seconds=10.0), committed=5)

    def seconds(*gone: str) -> set[float]:
        return {m.sync.relearning for m in sent(run.statuses(5, **lost(*gone)), "sync").values()}

    def rebuilt(*gone: str) -> None:
        for node in gone:
            run.hears(node, synced=pb.Synced(step=5, method="interpolate"))
        run.statuses(5)
        assert run.attempt.begin.step == 6

    assert seconds("c") == {2.0}, "nobody knows how often stages are lost"
    run.now += 1.5
    run.driver.link_lost("e", "gone", run.now)
    run.now += 10.0  # in this time the stage had no node
    assert seconds("c", "e") == {0.5}, "1.5 are spent"
    run.now += 3.0
    run.driver.link_lost("c", "gone", run.now)
    assert seconds("c", "e") == {0.4}
    rebuilt("c", "e")
    for trained, time in ((20.0, 5.0), (100.0, 10.0), (4.0, 2.0)):
        run.now += trained
        run.driver.link_lost("b", "gone", run.now)
        run.now += 1.0
        assert seconds("b") == {time}
        rebuilt("b")


@pytest.mark.parametrize(
    ("gone", "more", "policy", "goes_on"),
    [
        (["c"], {}, "checkfree", True),
        (["c", "d"], {}, "checkfree", False),
        (["c", "c2"], {"c2": 2}, "checkfree", False),
        (["c", "d"], {}, "redundant", False),
    ],
)
def test_only_a_stage_with_one_node_that_relearns_alone_may_train_before_it_is_through(
    gone: list[str], more: dict[str, int], policy: str, goes_on: bool
) -> None:
    run = asked(replace(LOOSE, relearn=True, policy=POLICIES[policy]), {**SWARM, **more})
    syncs = sent(run.statuses(5, **lost(*gone)), "sync")
    relearning = [message.sync for message in syncs.values() if message.sync.lost]
    assert relearning
    assert {sync.goes_on for sync in relearning} == {goes_on}


def test_a_stage_that_is_not_guessed_relearns_nothing():
    rules = replace(RULES, policy=POLICIES["checkfree+"], relearn=True)
    kept = pb.Holding(kind="snapshot", stage=0, step=5, mean_step=3)
    effects = at_step_5(rules, a=pb.Status(), b=at(5, holdings=[kept]))
    sync = sent(effects, "sync")["a"].sync
    assert (sync.method, sync.sources[0].node, len(sync.lost)) == ("snapshot", "b", 0)


@pytest.mark.parametrize("more", ["", "--strict", "a save"])
def test_if_all_body_stages_are_lost_one_with_a_snapshot_comes_back_and_others_are_guessed(
    more: str,
) -> None:
    rules = replace(RULES, stages=2, policy=POLICIES["auto"], strict=more == "--strict")
    save = registry.AwaitedSave(stage=1, step=5, node="former", seconds=60.0)
    awaited = [save] if more == "a save" else []
    run = asked(rules, {"a": 0, "b": 1, "c": 2}, committed=5, awaited=awaited)
    kept = pb.Holding(kind="snapshot", stage=2, step=5, mean_step=3)
    effects = run.statuses(a=at(5, holdings=[kept]), b=pb.Status(), c=pb.Status())
    assert bool(sent(effects, "halt")) == rules.strict
    syncs = sent(effects, "sync")
    if more:
        assert not syncs
        return
    assert {node: m.sync.method for node, m in syncs.items()} == {"c": "snapshot"}
    run.hears("c", synced=pb.Synced(step=5, method="snapshot"))
    syncs = sent(run.statuses(5, b=pb.Status()), "sync")
    assert {node: m.sync.method for node, m in syncs.items()} == {"b": "interpolate"}


def test_if_all_body_stages_are_lost_the_run_waits_for_the_only_save_of_one() -> None:
    rules = replace(LOOSE, stages=2)
    save = registry.AwaitedSave(stage=2, step=5, node="former", seconds=60.0)
    three = {"a": 0, "b": 1, "c": 2}
    run = asked(rules, three, committed=5, awaited=[save])
    assert sent(run.statuses(5, b=pb.Status(), c=pb.Status()), "halt") == {}
    assert "waits for former" in run.driver.explain()
    run.views({"a": 0, "b": 1, "former": 2}, committed=5)
    syncs = sent(run.statuses(5, b=pb.Status(), former=saves(2, 5)), "sync")
    assert {node: m.sync.method for node, m in syncs.items()} == {"former": "save"}
    run.hears("former", synced=pb.Synced(step=5, method="save"))
    syncs = sent(run.statuses(5, b=pb.Status()), "sync")
    assert {node: m.sync.method for node, m in syncs.items()} == {"b": "interpolate"}


def checkpoints(committed: int, *steps: int, stage: int, lineage: int = 0) -> pb.Status:
    held = [pb.Holding(kind="checkpoint", stage=stage, step=step) for step in steps]
    return at(committed, holdings=held, lineage=lineage)


def test_a_roll_back_takes_everybody_to_the_newest_common_checkpoint():
    rules = replace(RULES, policy=POLICIES["checkpoint"])
    run = asked(rules, committed=5)
    effects = run.statuses(
        **{n: checkpoints(0 if n == "c" else 5, 2, 4, stage=s) for n, s in SWARM.items()}
    )
    syncs = sent(effects, "sync")
    assert syncs.keys() == SWARM.keys()
    assert {(m.sync.step, m.sync.lineage) for m in syncs.values()} == {(4, 1)}
    (event,) = events(effects, RolledBack)
    assert (event.lost, event.step) == (5, 4)
    run.hears_all(synced=pb.Synced(step=4, method="checkpoint"))
    back = {n: checkpoints(4, 2, 4, stage=s, lineage=1) for n, s in SWARM.items()}
    assert sent(run.statuses(**back), "step")["c"].step.begin.step == 5


def test_after_a_roll_back_whoever_missed_it_is_behind_however_far_it_was():
    run = asked(LOOSE, SWARM | {"f": 3})
    effects = run.statuses(**dict.fromkeys(SWARM, at(4, lineage=1)), f=pb.Status(committed=9))
    sync = sent(effects, "sync")["f"].sync
    assert (sync.method, sync.step, sync.lineage) == ("replica", 4, 1)


def saves(stage: int, *steps: int) -> pb.Status:
    return pb.Status(holdings=[pb.Holding(kind="save", stage=stage, step=s) for s in steps])


def test_a_swarm_that_comes_back_goes_on_from_its_saves_although_more_was_committed():
    run = asked(committed=47)
    effects = run.statuses(**{n: saves(s, 30, 40) for n, s in SWARM.items()})
    syncs = sent(effects, "sync")
    assert {(n, m.sync.step, m.sync.method) for n, m in syncs.items()} == {
        (node, 40, "save") for node in SWARM
    }
    assert syncs["b"].sync.sources[0].node == "b"
    run.hears_all(synced=pb.Synced(step=40, method="save"))
    run.now += 1
    run.driver.rules = replace(RULES, steps=60)
    back = dict.fromkeys(SWARM, at(40, lineage=1))
    assert sent(run.statuses(**back), "step")["b"].step.begin.step == 41


def test_under_the_checkpoint_policy_everything_may_be_lost_before_the_first_one():
    run = asked(replace(RULES, policy=POLICIES["checkpoint"]), committed=5)
    effects = run.statuses()
    assert {n: m.sync.step for n, m in sent(effects, "sync").items()} == dict.fromkeys(SWARM, 0)
    run.hears_all(synced=pb.Synced(method="checkpoint"))
    assert sent(run.statuses(**dict.fromkeys(SWARM, pb.Status(lineage=1))), "step")


# --- an attempt that goes on without lost nodes

PAIRS = {**SWARM, "z": 0, "f": 1, "g": 2, "h": 3, "i": 4}
FOUR = replace(RULES, microbatches=4)


def on_the_way(rules: TransactionRules = FOUR, members: dict[str, int] = PAIRS) -> DrivenRun:
    return begun(rules, members)


def goes_on(run: DrivenRun, effects: Sequence[Effect]) -> pb.Begin:
    """Checks that each node left is told its part of the new plan; returns the whole plan."""
    whole, parts = run.attempt.begin, sent(effects, "step")
    assert parts.keys() == {place.node for place in whole.members}
    for node, message in parts.items():
        begin = message.step.begin
        own = {m for m, route in routes(whole).items() if node in route.nodes}
        assert own <= {microbatch.id for microbatch in begin.plan}
        assert len(begin.plan) + begin.untold == len(whole.plan)
        assert begin.since == whole.since
    return whole


def server(begin: pb.Begin, microbatch: int, stage: int) -> str:
    if stage == 0:
        return begin.plan[microbatch].source
    return begin.members[begin.plan[microbatch].places[stage - 1]].node


def test_a_plan_has_a_node_for_each_visit_and_shares_them_out_by_speed():
    run = asked(replace(RULES, microbatches=6), PAIRS)
    fast = pb.Status(seconds_per_microbatch=1.0)
    run.statuses(c=fast, g=pb.Status(seconds_per_microbatch=2.0))
    begin = run.attempt.begin
    assert [server(begin, i, 2) for i in range(6)].count("c") == 4
    assert [server(begin, i, 1) for i in range(6)].count("b") == 3


def test_who_had_no_microbatch_is_tried_again_and_gets_no_more_than_the_fastest():
    run = asked(replace(FOUR, steps=100), PAIRS)
    slow, fast = (pb.Status(seconds_per_microbatch=seconds) for seconds in (10.0, 1.0))
    run.statuses(c=fast, g=slow)
    counts = []
    for _ in range(20):
        begin = run.attempt.begin
        counts.append([server(begin, microbatch, 2) for microbatch in range(4)].count("g"))
        run.comes_home()
        run.votes(c={"seconds_per_microbatch": 1.0})
    assert counts[0] == 0 and sorted(counts) == counts and counts[-1] == 2


def test_the_loss_of_a_replica_does_not_end_the_attempt():
    run = on_the_way()
    before, first = run.driver.ballot, run.attempt.begin
    effects = run.driver.link_lost("g", "reset", run.now)
    begin = goes_on(run, effects)
    assert (Ballot.of(begin.since), begin.step) == (before, 1)
    assert run.driver.ballot > before
    assert not events(effects, Aborted)
    assert events(effects, AttemptMasked)[0].microbatches == 2
    for microbatch in range(4):
        assert server(begin, microbatch, 2) == "c"
        for stage in (0, 1, 3, 4):
            assert server(begin, microbatch, stage) == server(first, microbatch, stage)


def test_what_a_lost_node_had_is_shared_out_among_nodes_not_seats():
    seats = {"a/0": 0, "a/1": 1, "b/1": 1, "c/1": 1, "a/2": 2, "b/2": 2, "d/2": 2}
    run = on_the_way(replace(RULES, stages=2, microbatches=8), seats)
    first = run.attempt.begin
    left = {seat: stage for seat, stage in seats.items() if not seat.startswith("b/")}
    begin = goes_on(run, run.views(left))
    gained = Counter(
        server(begin, microbatch, stage)
        for stage in range(3)
        for microbatch in range(8)
        if server(begin, microbatch, stage) != server(first, microbatch, stage)
    )
    assert gained == {"c/1": 3, "d/2": 3}, "a is busy at stage 0"


def test_it_is_committed_once_the_registry_has_dropped_the_node_and_not_before():
    run = on_the_way()
    run.driver.link_lost("g", "reset", run.now)
    assert not run.commits()
    run.views(without(PAIRS, "g"))
    steps = sent(run.waits(0.1), "step")
    assert steps.keys() == run.members.keys()
    commit = steps["a"].step.commit
    assert (commit.step, len(run.driver.standing.last.microbatches)) == (1, 4)
    assert run.driver.phase is DriverPhase.GATHERING  # to take up the view without g


def test_a_node_that_is_no_member_any_more_need_not_have_lost_its_link():
    run = on_the_way()
    assert goes_on(run, run.views(without(PAIRS, "g"))).since == pb.Ballot(view=1, attempt=2)
    assert run.driver.link_lost("g", "no member any more", run.now) == []
    assert sent(run.waits(0.0), "query") == {}
    assert run.commits()["b"].step.commit.step == 1


def test_a_node_that_is_not_lost_after_all_costs_the_attempt():
    run = on_the_way()
    run.driver.link_lost("g", "dialled anew", run.now)
    assert not run.commits()
    assert run.waits(EVICTED - 0.1) == []
    effects = run.waits(0.2)
    assert "isn't lost after all" in events(effects, Aborted)[0].reason
    assert sent(effects, "query").keys() == PAIRS.keys()


def test_a_node_whose_link_is_up_again_was_not_lost():
    run = on_the_way()
    run.driver.link_lost("g", "dialled anew", run.now)
    assert run.driver.link_up("b", run.now) == []
    effects = run.driver.link_up("g", run.now)
    assert "its link is up again" in events(effects, Aborted)[0].reason
    assert sent(effects, "query").keys() == PAIRS.keys()


def test_what_a_lost_source_has_brought_home_is_to_come_home_again():
    run = on_the_way()
    run.comes_home()
    assert run.driver.phase is DriverPhase.REDUCING
    effects = run.driver.link_lost("z", "reset", run.now)
    begin = goes_on(run, effects)
    assert {m.source for m in begin.plan} == {"a"}
    assert run.driver.phase is DriverPhase.RUNNING
    assert not sent(effects, "reduce")
    run.hears("z", home=pb.Home(microbatch=1, loss=9.0, tokens=2))
    assert 1 not in run.attempt.homes
    run.hears("a", home=pb.Home(microbatch=1, loss=4.0, tokens=2))
    assert sent(run.hears("a", home=pb.Home(microbatch=3, loss=4.0, tokens=2)), "reduce")


def test_when_all_is_home_it_is_reduced_anew_and_votes_from_before_do_not_count():
    run = on_the_way()
    run.comes_home()
    before = run.driver.ballot
    run.votes(but="g")
    reduces = sent(run.driver.link_lost("g", "reset", run.now), "reduce")
    assert reduces.keys() == PAIRS.keys() - {"g"}
    run.hears("b", ballot=before, ready=pb.Ready(step=1, squared_norm=9.0, finite=True))
    assert run.attempt.vote is not None
    assert run.attempt.vote.ready == {}


def test_homes_that_were_sent_before_the_new_plan_was_heard_of_count():
    run = on_the_way()
    before = run.driver.ballot
    run.driver.link_lost("g", "reset", run.now)
    run.hears("a", ballot=before, home=pb.Home(microbatch=0, loss=4.0, tokens=2))
    assert run.attempt.homes.keys() == {0}


@pytest.mark.parametrize(
    ("rules", "lost"),
    [
        (replace(FOUR, masking=False), ["g"]),
        (FOUR, ["c", "g"]),  # stage 2 is lost
    ],
)
def test_where_nobody_can_take_over_or_nobody_is_to_the_attempt_ends(
    rules: TransactionRules, lost: list[str]
):
    run = on_the_way(rules)
    effects = [run.driver.link_lost(node, "reset", run.now) for node in lost][-1]
    assert events(effects, Aborted)
    assert sent(effects, "query")


def test_an_evaluation_begins_again():
    run = on_the_way(replace(FOUR, steps=1, validation_microbatches=2))
    run.commits()
    assert run.attempt.begin.kind == pb.Begin.EVALUATE
    assert sent(run.driver.link_lost("g", "reset", run.now), "query")


def test_who_can_not_be_reached_by_another_is_given_time_to_turn_out_lost():
    run = on_the_way()
    effects = run.hears("b", cut=pb.Cut(node="g", reason="reset"))
    assert suspected(effects) == ["g"]
    assert run.driver.phase is DriverPhase.RUNNING
    assert run.waits(UNREACHED / 2) == []
    assert goes_on(run, run.driver.link_lost("g", "reset", run.now))
    assert run.waits(UNREACHED) == []
    run.hears("b", cut=pb.Cut(node="g", reason="reset"))
    assert run.waits(UNREACHED) == []


def test_who_stays_out_of_reach_for_some_costs_the_attempt_but_who_is_no_member_nothing():
    run = on_the_way()
    assert run.hears("b", cut=pb.Cut(node="gone", reason="reset")) == []
    assert run.waits(UNREACHED) == []
    run.hears("b", cut=pb.Cut(node="g", reason="reset"))
    effects = run.waits(UNREACHED)
    assert "b can't reach g: reset" in events(effects, Aborted)[0].reason


def meet(begin: pb.Begin, node: str, other: str) -> bool:
    """Whether the route of any microbatch has both nodes."""
    return any({node, other} <= set(route.nodes) for route in routes(begin).values())


def test_the_next_attempt_goes_by_others_than_two_that_did_not_reach_each_other():
    run = on_the_way()
    assert meet(run.attempt.begin, "b", "c")
    run.hears("b", cut=pb.Cut(node="c", reason="reset"))
    run.waits(UNREACHED)
    run.statuses(0)
    assert not meet(run.attempt.begin, "b", "c")
    run.views({**PAIRS, "new": 2})
    run.hears("new", status=pb.Status())
    run.commits()
    run.statuses(1)
    assert not meet(run.attempt.begin, "b", "c"), "they are members still"


def test_routes_go_by_others_than_two_for_whom_somebody_carries():
    run = asked(FOUR, PAIRS, relays=[registry.Relay(a="b", b="c", via="a")])
    run.statuses()
    assert not meet(run.attempt.begin, "b", "c")
    run.views()
    run.commits()
    run.statuses(1)
    assert meet(run.attempt.begin, "b", "c")


THREE = {**PAIRS, "b3": 1, "c3": 2}


@pytest.mark.parametrize("lost", ["f", "g"])
def test_who_is_lost_leaves_nothing_to_two_that_are_cut_off_from_each_other(lost):
    for cut_off in ("b", "c"), ("b3", "c3"):
        run = DrivenRun(replace(RULES, microbatches=12), THREE)
        run.views(relays=[registry.Relay(a=cut_off[0], b=cut_off[1], via="a")])
        run.statuses()
        assert not meet(run.attempt.begin, *cut_off)
        begin = goes_on(run, run.driver.link_lost(lost, "reset", run.now))
        assert not meet(begin, *cut_off)


def test_what_was_lost_goes_by_others_than_two_that_the_newest_view_has_a_relay_for():
    run = begun(replace(RULES, microbatches=12), THREE)
    before = run.attempt.begin
    lost = [number for number in range(12) if server(before, number, 1) == "b"]
    assert {server(before, number, 2) for number in lost} == {"c"}
    run.views({**THREE, "new": 3}, relays=[registry.Relay(a="f", b="c", via="a")])
    begin = goes_on(run, run.driver.link_lost("b", "reset", run.now))
    assert {server(begin, number, 1) for number in lost} == {"b3"}


def test_what_is_said_of_links_costs_nothing_while_microbatches_come_home():
    run = begun()
    assert suspected(run.hears("b", cut=pb.Cut(node="c", reason="reset"))) == ["c"]
    for number in range(RULES.microbatches):
        home = pb.Home(microbatch=number, loss=4.0, tokens=2)
        run.hears(run.attempt.begin.plan[number].source, home=home)
        run.waits(UNREACHED / 2)
    assert run.driver.phase is DriverPhase.REDUCING
    assert events(run.waits(UNREACHED), Aborted)


def says_again(run: DrivenRun, peer: str, node: str) -> list[Effect]:
    """`peer` says that it can't reach `node`, which is there; the attempt fails and is repeated."""
    run.hears(peer, cut=pb.Cut(node=node, reason="reset"))
    effects = run.waits(UNREACHED)
    tries_again(run)
    return effects


def closes_its_link(run: DrivenRun, *nodes: str) -> list[Effect]:
    """Each of these nodes closes its link to the driver once, and dials it again."""
    effects: list[Effect] = []
    for node in nodes:
        effects += run.driver.link_lost(node, f"{node} closed the link", run.now)
        effects += run.driver.link_up(node, run.now)
    return effects


@pytest.mark.parametrize(("nodes", "times"), [("b", HELD_UP), ("bc", HELD_UP_BY_SEVERAL)])
def test_because_of_whose_links_nothing_is_ever_committed_is_wrong(nodes: str, times: int):
    """Links lost in an attempt count, and so do links lost while the driver gathers."""
    run = begun()
    for _ in range(times - 1):
        assert charges(closes_its_link(run, *nodes)) == []
    assert charges(closes_its_link(run, *nodes)) == [(node, NUMBERS) for node in nodes]


def test_who_never_votes_goes_after_the_second_time():
    run = begun()
    for times in (1, 2):
        run.comes_home()
        run.votes(but="c")
        effects = run.waits(RULES.progress + COMPLAINED)
        assert charges(effects)[0] == ("c", SILENT)
        assert (("c", NUMBERS) in charges(effects)) == (times == 2)
        tries_again(run)


@pytest.mark.parametrize("others", [{"a2": 0}, {}])
@pytest.mark.parametrize("seat", ["a", "a/1"])
def test_a_driver_leaves_if_a_seat_of_its_node_fails_to_vote_twice_and_another_node_can_drive(
    seat: str, others: dict[str, int]
):
    run = begun(members=SWARM | {"a/1": 1} | others)
    for times in (1, 2):
        run.comes_home()
        run.votes(but=seat)
        effects = run.waits(RULES.progress + COMPLAINED)
        assert charges(effects) == []
        leaves = [effect.reason for effect in effects if isinstance(effect, Rejoin)]
        assert all(reason.endswith(f"waiting for {seat}; a2 can drive") for reason in leaves)
        assert len(leaves) == (times == 2 and bool(others))
        tries_again(run)


def passed_on(run: DrivenRun, source: str, *nodes: str) -> list[Effect]:
    """Each of these nodes reports its forward pass of microbatch 0; then nothing progresses."""
    run.hears(source, account=pb.Account(done=[pb.Pass(microbatch=0, position=0)]))
    for position, node in enumerate(nodes, start=1):
        done = [pb.Pass(microbatch=0, position=position)]
        run.hears(node, account=pb.Account(done=done))
    effects = run.waits(RULES.progress)
    tries_again(run)
    return effects


def test_of_two_between_whom_something_gets_lost_one_rests():
    run = begun(members=PAIRS)
    route = routes(run.attempt.begin)[0].nodes
    assert charges(passed_on(run, route[0], route[1])) == []
    again = routes(run.attempt.begin)[0].nodes
    assert {route[1], route[2]} - set(again), "one of them rests"


def test_who_loses_things_to_one_after_the_other_is_the_one():
    failures = FailedAttempts()
    ab, bc, cd = map(frozenset, ("ab", "bc", "cd"))
    assert failures.common_loser([ab]) == ""
    assert failures.common_loser([ab]) == "", "it is one of two"
    assert failures.common_loser([]) == ""
    assert failures.common_loser([bc]) == "b"
    assert failures.common_loser([cd]) == "", "so it is something else"
    assert FailedAttempts().common_loser([ab, bc]) == "", "once is no proof"


def test_by_one_members_word_no_driver_goes():
    """A node that suspects itself ends, so the driver must not suspect itself on one report."""
    run = begun()
    assert charges(run.hears("b", cut=pb.Cut(node="a", reason="so I say"))) == []
    failed = pb.Failed(reason="so I say", accused=["a"])
    assert charges(run.hears("b", failed=failed)) == []


def test_by_whose_word_alone_nothing_is_ever_committed_is_wrong_whatever_others_had_said():
    run = begun()
    for _ in range(HELD_UP):
        says_again(run, "b", "c")
    run.views({"a": 0, "new": 1, "c": 2, "d": 3, "e": 4})
    run.statuses()
    for _ in range(HELD_UP - 1):
        assert charges(says_again(run, "new", "c")) == []
    effects = says_again(run, "new", "c")
    assert charges(effects) == [("new", NUMBERS)]
    assert [event.by for event in events(effects, Accused)] == ["a"]


def test_of_two_that_say_so_of_each_other_nobody_is_wrong():
    run = begun()
    for _ in range(HELD_UP):
        assert charges(says_again(run, "b", "c") + says_again(run, "c", "b")) == []


# --- data that a member can't use


def replicated() -> DrivenRun:
    """A run with two nodes a stage, whose first step has begun."""
    return begun(replace(RULES, stages=2), {"a": 0, "b": 1, "c": 2, "a2": 0, "b2": 1, "c2": 2})


def charges(effects: Sequence[Effect]) -> list[tuple[str, Cause]]:
    return [(effect.node, effect.cause) for effect in effects if isinstance(effect, Suspect)]


def refuses(run: DrivenRun, peer: str, node: str, cause: Cause = SHAPE) -> list[Effect]:
    return run.hears(peer, cut=pb.Cut(node=node, reason=f"{node} sent it", cause=cause))


def served_by(run: DrivenRun) -> set[str]:
    """The nodes that have microbatches."""
    begin = run.attempt.begin
    nodes = {begin.members[place].node for microbatch in begin.plan for place in microbatch.places}
    return nodes | {microbatch.source for microbatch in begin.plan}


def two_refuse(run: DrivenRun, node: str) -> list[Effect]:
    """`b` refuses data of `node`; so does `b2` a step later, when `node` serves others again."""
    refuses(run, "b", node)
    run.statuses()
    run.commits()
    return refuses(run, "b2", node)


def test_whom_two_say_they_cannot_use_is_accused_and_the_attempt_goes_on_without_it():
    run = replicated()
    effects = two_refuse(run, "c")
    assert charges(effects) == [("c", SHAPE)]
    assert [event.nodes for event in events(effects, AttemptMasked)] == [("c",)]
    assert "c" not in served_by(run)
    assert refuses(run, "b2", "c") == [], "that is known"
    run.comes_home()
    run.votes(but="c")
    assert sent(run.waits(EVICTED + 0.1), "query").keys() == run.members.keys()
    run.statuses(0)
    assert "c" not in served_by(run), "while the registry keeps it"
    assert run.commits().keys() == run.members.keys()
    assert "c" not in served_by(run)


def test_another_seat_of_the_drivers_node_has_no_work_but_stays_a_member() -> None:
    seats = {"a": 0, "b": 1, "a/2": 2, "a2": 0, "b2": 1, "c2": 2}
    run = begun(replace(RULES, stages=2), seats)
    effects = two_refuse(run, "a/2")
    assert charges(effects) == [] and not events(effects, AttemptMasked)
    tries_again(run)
    assert "a/2" not in served_by(run)
    assert run.commits().keys() == run.members.keys(), "nobody waits until it is gone"


def test_the_attempt_goes_on_without_a_seat_that_the_drivers_node_gives_back() -> None:
    seats = {"a": 0, "b": 1, "a/2": 2, "c2": 2}
    run = begun(replace(RULES, stages=2), seats)
    (masked,) = events(run.views(without(seats, "a/2")), AttemptMasked)
    assert masked.nodes == ("a/2",)


def test_one_word_takes_a_replica_its_work_for_a_step_and_twice_as_many_the_next_time():
    run = replicated()
    for steps in (1, 2, 4):
        effects = refuses(run, "b", "c")
        assert charges(effects) == []
        assert [(event.node, event.by) for event in events(effects, Accused)] == [("c", "b")]
        run.statuses(run.driver.standing.committed)
        for _ in range(steps):
            assert "c" not in served_by(run)
            run.commits()
        assert "c" in served_by(run), "others find out"


def test_whom_a_replica_of_its_stage_accuses_follows_until_others_are_to_find_out():
    """A plan can't prevent that two replicas of one stage average with each other."""
    run = replicated()
    run.commits()
    effects = refuses(run, "c2", "c")
    assert charges(effects) == []
    sync = sent(run.statuses(1), "sync")["c"].sync
    assert (sync.method, sync.follow) == ("replica", True)
    follows = pb.Status(committed=0, following=1, heard=1)
    run.statuses(1, c=follows)
    assert {place.node for place in run.attempt.begin.members} == run.members.keys() - {"c"}
    run.hears("c", synced=pb.Synced(step=1, method="replica"))
    assert "c" not in sent(run.comes_home(), "reduce")
    run.votes(but="c")
    assert run.driver.standing.committed == 2, "it isn't waited for"
    assert "c" in sent(run.comes_home(), "reduce"), "it may enter"


def test_who_works_for_others_again_has_nothing_to_do_with_who_has_accused_it():
    run = replicated()
    refuses(run, "b", "c")
    run.statuses()
    run.commits()
    begin = run.attempt.begin
    ways = [{begin.members[place].node for place in microbatch.places} for microbatch in begin.plan]
    assert {"c", "b2"} in ways
    assert {"c", "b"} not in ways


def test_who_cannot_use_what_two_replicas_send_is_wrong_itself():
    run = replicated()
    refuses(run, "b", "c")
    run.statuses()
    effects = refuses(run, "b", "c2")
    assert charges(effects) == [("b", SHAPE)]
    assert [event.nodes for event in events(effects, AttemptMasked)] == [("b",)]


def test_nobodys_word_alone_takes_a_second_replica_its_work():
    run = replicated()
    run.hears("b", failed=pb.Failed(reason="c sent it", accused=["c"], cause=CHECKSUM))
    run.statuses()
    run.commits()
    assert charges(refuses(run, "b", "c2", CHECKSUM)) == []
    run.statuses(1)
    assert "c2" in served_by(run)
    assert charges(refuses(run, "b2", "c2", CHECKSUM)) == [("c2", CHECKSUM)]


def test_the_last_node_of_a_stage_goes_when_two_say_so_and_so_does_the_next_one():
    run = begun()
    effects = refuses(run, "b", "c")
    assert charges(effects) == []
    assert "c sent it" in events(effects, Aborted)[0].reason
    assert sent(run.statuses(), "step")["c"].step.begin.step == 1
    assert "c" in served_by(run), "there is nobody else"
    assert charges(refuses(run, "d", "c")) == [("c", SHAPE)]
    run.views({"a": 0, "b": 1, "again": 2, "d": 3, "e": 4})
    tries_again(run)
    assert charges(refuses(run, "b", "again")) == [], "not its own"
    tries_again(run)
    assert charges(refuses(run, "d", "again")) == [("again", SHAPE)]


def test_who_accuses_the_last_node_of_a_stage_in_vain_is_wrong_itself():
    run = begun()
    for _ in range(VAIN - 1):
        failed = pb.Failed(reason="c sent it", accused=["c"], cause=SHAPE)
        assert charges(run.hears("b", failed=failed)) == []
        tries_again(run)
    assert charges(refuses(run, "b", "c")) == [("b", NUMBERS)]


def test_a_joiner_that_gets_what_it_cannot_use_names_who_sent_it():
    run = Joined()
    failed = pb.Failed(reason="c sent it", accused=["c", "stranger"], cause=SHAPE)
    assert charges(run.hears("new", failed=failed, ballot=Ballot(2, 1))) == []
    assert charges(refuses(run, "b", "c")) == [("c", SHAPE)], "there are two who say so"


def test_who_sends_a_state_that_cannot_be_used_is_accused_and_no_attempt_ends():
    run = replicated()
    word = pb.Cut(node="c", reason="its manifest is another stage's", cause=SHAPE)
    effects = run.hears("b", NEVER, cut=word)
    assert charges(effects) == []
    (accused,) = events(effects, Accused)
    assert (accused.node, accused.stage, accused.by) == ("c", 2, "b")
    assert len(effects) == 1
    assert run.hears("b", NEVER, cut=word) == [], "that is known"
    assert charges(run.hears("a2", NEVER, cut=word)) == [], "no attempt has failed by it"
    assert run.hears("b2", NEVER, cut=pb.Cut(node="stranger", cause=SHAPE)) == []
    assert run.commits(), "all the same"


def test_whose_figures_cannot_be_is_accused_by_the_driver():
    run = replicated()
    effects = run.hears("c", ready=pb.Ready(squared_norm=1e300, finite=True))
    assert charges(effects) == [("c", NUMBERS)]
    assert [(event.node, event.by) for event in events(effects, Accused)] == [("c", "a")]


def test_a_driver_that_sends_what_cannot_be_used_again_makes_room_for_another():
    run = replicated()
    effects = refuses(run, "b", "a")
    assert suspected(effects) == [], "the registry does not hear who accuses itself"
    assert [(event.node, event.by) for event in events(effects, Accused)] == [("a", "b")]
    run.statuses()
    assert "a" not in served_by(run)
    (rejoin,) = refuses(run, "a2", "a")
    assert isinstance(rejoin, Rejoin)
    assert rejoin.reason == "a2 also says: a sent it; a2 can drive"


# --- replicas that differ

BY_TWO = {"a": 0, "b": 1, "c": 2, "a2": 0, "b2": 1, "c2": 2}


class Differing(DrivenRun):
    """A run that has committed `steps` steps and is in the next one."""

    def __init__(self, members: dict[str, int] = BY_TWO, steps: int = 1) -> None:
        super().__init__(replace(RULES, stages=max(members.values())), members)
        self.begins()
        for _ in range(steps):
            self.commits()

    def differs(self, node: str = "c") -> list[Effect]:
        """All vote, `node` with weights changed since its update; returns the last effects."""
        self.comes_home()
        self.votes(but=node)
        return self.ready(node, digest=b"flipped")


def test_replicas_that_differ_do_not_commit_and_the_wrong_one_copies_anew_while_others_train():
    run = Differing()
    effects = run.differs()
    (diverged,) = events(effects, Diverged)
    assert (diverged.stage, diverged.nodes) == (2, ("c2", "c"))
    assert "c: its weights or moments have changed since its last update" in diverged.reason
    assert run.driver.standing.committed == 1
    assert "c differs" in events(effects, Aborted)[0].reason
    effects = run.statuses()
    syncs = sent(effects, "sync")
    assert syncs.keys() == {"c"}
    assert ([s.node for s in syncs["c"].sync.sources], syncs["c"].sync.follow) == (["c2"], True)
    assert sent(effects, "query"), "it has to know before anything is committed without it"
    follows = pb.Status(following=1, heard=1)
    begins = sent(run.statuses(c=follows), "step")
    assert members(run.whole(begins["a"])) == run.members.keys() - {"c"}
    assert joining(begins["c2"]) == ["c"]


def test_who_has_copied_anew_is_trusted_again_and_who_differs_three_times_has_to_go():
    run = Differing()
    for number in range(1, 4):
        effects = run.differs()
        assert charges(effects) == [("c", DIVERGENCE)] * (number == 3)
        run.statuses()
        run.statuses(c=pb.Status(following=number, heard=number))
        run.hears("c", synced=pb.Synced(step=number, method="replica"))
        run.commits()
        run.waits(1)
        assert "c" in {place.node for place in run.attempt.begin.members}


def test_replicas_that_differ_before_the_first_step_are_made_equal():
    run = Differing({"a": 0, "b": 1, "b2": 1}, steps=0)
    run.differs("b2")
    sync = sent(run.statuses(), "sync")["b2"].sync
    assert (sync.method, sync.follow, [s.node for s in sync.sources]) == ("replica", False, ["b"])
    run.hears("b2", synced=pb.Synced(step=0, method="replica"))
    assert members(run.whole(sent(run.statuses(), "step")["a"])) == {"a", "b", "b2"}


def test_who_differed_and_is_the_last_of_its_stage_is_better_than_a_guess():
    run = Differing()
    run.differs("c")
    run.views({"a": 0, "b": 1, "c": 2})
    assert members(run.whole(sent(run.statuses(), "step")["a"])) == {"a", "b", "c"}


# --- weights that no replica can confirm

ALONE = {"a": 0, "b": 1, "c": 2}


class Alone(Differing):
    def __init__(self, members: dict[str, int] = ALONE, policy: str = "checkfree") -> None:
        super().__init__(members)
        self.driver.rules = replace(self.driver.rules, policy=POLICIES[policy])

    def ready_with(self, **digests: tuple[bytes, bytes]) -> list[Effect]:
        """All members vote; `digests` has a node's digests after the update and now."""
        self.comes_home()
        pairs = digests.items()
        return self.votes(**{n: {"applied": then, "digest": now} for n, (then, now) in pairs})

    def keeps(self, kind: str, stage: int, **more: Any) -> pb.Status:
        made = self.driver.standing.last.ballot
        held = {"kind": kind, "stage": stage, "step": 1, "made": made, **more}
        return self.has(holdings=[pb.Holding(**held)])


def test_weights_that_change_at_the_only_node_of_a_stage_are_told_once_and_it_goes_on():
    run = Alone()
    effects = run.ready_with(c=(b"same", b"flipped"))
    assert run.driver.standing.committed == 1, "nothing is committed on them"
    assert "whether stage 2 is right at c" in events(effects, Aborted)[0].reason
    effects = run.statuses()
    (changed,) = events(effects, WeightsChanged)
    assert (changed.node, changed.stage, changed.step, changed.restored) == ("c", 2, 1, False)
    assert suspected(effects) == []
    assert members(run.whole(sent(effects, "step")["a"])) == run.members.keys()
    warning = "weights or moments of c of stage 2 have changed by themselves after step 1"
    assert warning in run.driver.explain()
    run.hears("b", failed=pb.Failed(reason="it is out of memory"))
    run.statuses()
    effects = run.ready_with(c=(b"same", b"flipped"))
    assert events(effects, WeightsChanged) == [], "that is known"
    assert run.driver.standing.committed == 2
    run.ready_with(c=(b"next", b"next"))
    assert run.driver.standing.committed == 3
    assert warning in run.driver.explain()


@pytest.mark.parametrize(
    ("kind", "by", "policy"), [("save", "c", "checkfree"), ("redundant", "b", "redundant")]
)
def test_it_takes_its_weights_back_from_who_has_them_as_they_were(kind, by, policy):
    run = Alone(policy=policy)
    run.ready_with(c=(b"same", b"flipped"))
    effects = run.statuses(**{by: run.keeps(kind, 2)})
    (changed,) = events(effects, WeightsChanged)
    assert changed.restored
    ((lone, sync),) = sent(effects, "sync").items()
    assert (lone, sync.sync.method, sync.sync.follow) == ("c", kind, False)
    assert [source.node for source in sync.sync.sources] == [by]
    run.hears("c", synced=pb.Synced(step=1, method=kind))
    run.driver.rules = replace(run.driver.rules, policy=POLICIES["checkfree"])  # without twins
    run.statuses()
    assert "by themselves" not in run.driver.explain()
    run.ready_with()
    assert run.driver.standing.committed == 2


@pytest.mark.parametrize("other", [{"step": 0}, {"made": Ballot(7, 7).message()}])
def test_a_save_of_another_step_is_no_help(other):
    run = Alone()
    run.ready_with(c=(b"same", b"flipped"))
    effects = run.statuses(c=run.keeps("save", 2, **other))
    assert [event.restored for event in events(effects, WeightsChanged)] == [False]
    assert members(run.whole(sent(effects, "step")["a"])) == run.members.keys()


def test_a_save_that_turns_out_to_be_damaged_is_no_help_either():
    run = Alone()
    run.ready_with(c=(b"same", b"flipped"))
    run.statuses(c=run.keeps("save", 2))
    run.hears("c", failed=pb.Failed(reason="its save is damaged"))
    effects = run.statuses()
    assert [event.restored for event in events(effects, WeightsChanged)] == [False]
    assert members(run.whole(sent(effects, "step")["a"])) == ALONE.keys()


def test_two_replicas_whose_updates_came_out_differently_are_both_named_and_a_guess_is_called_so():
    run = Alone(BY_TWO)
    run.ready_with(c2=(b"one", b"one"))
    assert run.driver.standing.committed == 1
    effects = run.statuses()
    (diverged,) = events(effects, Diverged)
    assert (diverged.stage, diverged.nodes) == (2, ("c", "c2"))
    assert "no majority, and c is believed, a guess" in diverged.reason
    assert sent(effects, "sync").keys() == {"c2"}


def test_two_replicas_of_which_neither_is_as_it_was_go_back_to_what_others_keep():
    run = Alone(BY_TWO)
    run.ready_with(c=(b"same", b"one"), c2=(b"same", b"two"))
    effects = run.statuses(c2=run.keeps("save", 2))
    (diverged,) = events(effects, Diverged)
    assert diverged.nodes == ("c", "c2")
    assert "but a save of this step" in diverged.reason
    assert {to: sync.sync.method for to, sync in sent(effects, "sync").items()} == {"c2": "save"}
    run.hears("c2", synced=pb.Synced(step=1, method="save"))
    effects = run.statuses()
    assert events(effects, Diverged) == [], "that is known"
    (sync,) = [sent(effects, "sync")["c"].sync]
    assert (sync.method, [s.node for s in sync.sources]) == ("replica", ["c2"])


# --- values that are not finite


def spoils(run: DrivenRun, node: str) -> list[Effect]:
    """A neighbour of `node` reports values from it that are not finite."""
    cut = pb.Cut(node=node, reason="microbatch 0 is not finite", cause=NONFINITE)
    return run.hears("a" if node != "a" else "b", cut=cut)


def test_who_makes_what_is_not_finite_is_named_and_the_step_is_tried_again_without_it():
    run = Differing()
    effects = spoils(run, "c")
    assert [event.node for event in events(effects, NonFinite)] == ["c"]
    assert suspected(effects) == [], "it may be the model's doing"
    begin = run.whole(sent(run.statuses(), "step")["a"])
    assert not begin.non_finite
    assert "c" in members(begin)
    assert "c" not in served_by(run)
    assert run.commits()
    assert "c" in served_by(run), "it gets another chance"


def test_who_alone_makes_what_is_not_finite_in_three_steps_has_to_go():
    run = Differing()
    for number in range(1, 4):
        spoils(run, "c")
        run.statuses()
        run.comes_home()
        effects = run.votes()
        assert charges(effects) == [("c", NONFINITE)] * (number == 3)


def test_who_makes_what_is_not_finite_of_nothing_has_to_go_when_two_say_so():
    run = Differing()
    spoils(run, "c")
    run.statuses()
    cut = pb.Cut(node="c", reason="a bad gradient: it is not finite", cause=NONFINITE)
    assert charges(run.hears("b2", cut=cut)) == []
    run.statuses()
    run.waits(LONGEST_PAUSE)
    effects = run.hears("b", cut=cut)
    assert charges(effects) == [("c", NONFINITE)]
    assert [event.nodes for event in events(effects, AttemptMasked)] == [("c",)]
    assert not run.attempt.begin.non_finite


def test_who_had_to_compute_for_want_of_others_may_make_such_a_thing_again():
    run = Differing()
    refuses(run, "b", "c2")
    spoils(run, "c")
    run.statuses()
    assert "c" in served_by(run), "the other one has to go"
    assert ("c", NONFINITE) not in charges(spoils(run, "c"))


def test_what_all_of_a_stage_make_is_let_through_and_nobodys_fault():
    run = Differing()
    spoils(run, "c")
    run.statuses()
    spoils(run, "c2")
    assert sent(run.statuses(), "step")["a"].step.begin.non_finite
    run.comes_home()
    effects = run.votes(**{node: {"squared_norm": math.nan} for node in run.members})
    step = sent(effects, "step")["a"].step
    assert step.commit.skipped
    assert not step.begin.non_finite
    assert run.driver.faults.spoiling.steps.total() == 0


def test_a_gradient_that_is_not_finite_is_committed_as_skipped_and_names_its_stage():
    run = Alone()
    run.comes_home()
    effects = run.votes(b={"squared_norm": math.nan})
    step = sent(effects, "step")["a"].step
    assert step.commit.skipped
    assert list(step.commit.clip_scale) == [0.0]
    assert step.begin.step == 3, "a skipped step is a committed one"
    (event,) = events(effects, StepSkipped)
    assert (event.step, event.reason) == (2, "the gradient of stage 1 was not finite")


def test_a_loss_that_is_not_finite_is_its_sources():
    run = Differing()
    source = run.attempt.begin.plan[0].source
    effects = run.hears(source, home=pb.Home(microbatch=0, loss=math.nan, tokens=2))
    assert [event.node for event in events(effects, NonFinite)] == [source]


def test_after_three_skipped_steps_in_a_row_the_run_pauses_and_says_why():
    run = Differing()
    for number in (1, 2, 0, 1, 2, 3):
        run.comes_home()
        norm = {"squared_norm": math.inf if number else 1.0}
        effects = run.votes(c=norm, c2=norm)
        assert sent(effects, "step")["b"].step.commit.skips == number
        halts = sent(effects, "halt")
        assert halts.keys() == (run.members.keys() if number == 3 else set())
    halt = halts["a"].halt
    assert "3 steps in a row were skipped, since the gradient of stage 2" in halt.reason
    assert not halt.finished
    run.views()  # as when a member announces that it will leave soon
    again = sent(run.statuses(), "halt")
    assert [message.halt for message in again.values()] == [halt] * len(run.members)
    fewer = without(run.members, "b")
    run.views(fewer)
    assert sent(run.statuses(), "halt").keys() == fewer.keys(), "who is left learns nothing"
    run.views({**fewer, "new": 1})
    run.statuses(new=pb.Status())
    assert run.driver.phase is not DriverPhase.HALTED


# --- lies


@pytest.mark.parametrize("attempt", [1 << 40, 2**64 - 1])
def test_nobody_has_promised_itself_to_an_attempt_that_was_not_made_here(attempt: int) -> None:
    run = begun()
    made = run.driver.ballot
    assert run.hears("d", Ballot(made.view, made.attempt - 1), stale=pb.Stale()) == []
    assert run.hears("d", Ballot(made.view + 1, 1), stale=pb.Stale()) == []
    effects = run.hears("d", Ballot(made.view, attempt), stale=pb.Stale())
    assert suspected(effects) == ["d"]
    assert run.driver.ballot.attempt < made.attempt + 3


def test_the_ordinary_status_that_a_lie_is_beside_is_gone_on_from() -> None:
    run = asked(members={**SWARM, "z": 4}, committed=4)
    true = at(4, trained=True)
    effects = run.statuses(**dict.fromkeys("abcde", true), z=at(9))
    (suspect,) = [e for e in effects if isinstance(e, Suspect)]
    assert (suspect.node, suspect.cause) == ("z", NUMBERS)
    assert "it claims step 9" in suspect.why
    assert sent(effects, "sync").keys() <= {"z"}, "nobody's state is touched but its own"
    run.statuses(**dict.fromkeys("abcde", true), z=pb.Status(following=4, heard=4))
    assert run.attempt.begin.step == 5


def test_two_commits_that_a_driver_has_signed_stop_the_run() -> None:
    run, faulty = DrivenRun(), Identity.generate()
    run.views(driver="c")
    run.driver.drivers[1].key = faulty.public
    run.views()
    commits = [pb.Commit(step=1, ballot=pb.Ballot(view=1), loss=loss) for loss in (2.0, 3.0)]
    for commit in commits:
        seal(commit, faulty, "")
    first, other = (pb.Status(committed=1, last=commit, trained=True) for commit in commits)
    effects = run.statuses(a=first, b=other, c=first, d=first, e=other)
    halts = {message.halt.reason for message in sent(effects, "halt").values()}
    assert len(halts) == 1
    assert all(hash_of(commit).hex()[:16] in halts.copy().pop() for commit in commits)
    assert suspected(effects) == []
    run.views({node: stage for node, stage in run.members.items() if node not in "be"})


# --- audits

AUDITED = replace(RULES, audits=True, exclude=True)
THREES = {**SWARM, "b2": 1, "b3": 1, "c2": 2, "z": 0, "y": 0}


def audits(run: DrivenRun) -> tuple[list[AuditSum], pb.Commit]:
    """Commits the attempt; returns the audits that follow from the commit, and the commit."""
    run.comes_home()
    effects = run.votes()
    commit = sent(effects, "step")["a"].step.commit
    return [effect for effect in effects if isinstance(effect, AuditSum)], commit


def test_a_step_with_a_gradient_far_too_long_is_skipped_and_audited_by_the_next_driver_too() -> (
    None
):
    run = begun(AUDITED, THREES)
    audits(run)
    run.driver.audit_over(AuditResult(1, {}, {}))
    heir = DrivenRun(AUDITED, THREES)
    heir.views()
    last = run.driver.standing.last
    heir.statuses(1, **dict.fromkeys(THREES, pb.Status(committed=1, last=last)))
    for driver in (run, heir):
        driver.comes_home()
        norm = {"squared_norm": 1e6}
        effects = driver.votes(b=norm, b2=norm, b3=norm)
        commit = sent(effects, "step")["a"].step.commit
        assert commit.skipped and len(commit.audited) == 4 and math.isfinite(commit.gradient_norm)
        (event,) = events(effects, StepSkipped)
        assert event.reason == "the gradient of stage 1 was 1000 times as long as usual"


def test_a_commit_names_blocks_of_stages_with_three_replicas_for_one_audit_at_a_time() -> None:
    run = begun(AUDITED, THREES)
    (audit,), commit = audits(run)
    assert len(commit.audited) == 4 and audit.numbers == [*commit.audited]
    assert (audit.ballot, audit.step) == (Ballot.of(commit.ballot), 1)
    assert audit.stages.keys() == {1}, "the owners' is not audited"
    assert audit.stages[1].keys() == {"b", "b2", "b3"}
    assert sum(audit.stages[1].values()) == 2 * 2  # each microbatch visits one of them
    assert audits(run)[0] == []
    run.driver.audit_over(AuditResult(1, {}, {}))
    (audit,), _ = audits(run)
    assert audit.step == 3


@pytest.mark.parametrize(
    ("rules", "members"), [(RULES, THREES), (AUDITED, {**SWARM, "b2": 1}), (AUDITED, SWARM)]
)
def test_without_three_replicas_or_if_it_is_off_nothing_is_audited(
    rules: TransactionRules, members: dict[str, int]
) -> None:
    run = begun(rules, members)
    audit_sums, commit = audits(run)
    assert (audit_sums, [*commit.audited]) == ([], [])


@pytest.mark.parametrize("exclude", [True, False])
def test_who_fails_an_audit_is_named_once_and_removed_if_the_rules_say_so(exclude: bool) -> None:
    run = begun(replace(AUDITED, exclude=exclude), THREES)
    audits(run)
    result = AuditResult(1, {"b2": "its sum is wrong", "stranger": "it is gone"}, {})
    effects = run.driver.audit_over(result)
    (event,) = events(effects, GradientStandsOut)
    assert (event.node, event.stage, event.reason) == ("b2", 1, "its sum is wrong")
    assert suspected(effects) == (["b2"] if exclude else [])
    assert events(run.driver.audit_over(result), GradientStandsOut) == []


def test_scores_are_in_the_commits_and_the_next_driver_goes_on_with_them() -> None:
    run, members = DrivenRun(AUDITED, THREES), THREES
    run.begins()
    outcomes = {node: {"contributor against": node == "b3"} for node in ("b", "b2", "b3")}
    while run.driver.standing.committed < 5:
        audits(run)
        assert run.driver.audit_over(AuditResult(1, {}, outcomes)) == []
    _, last = audits(run)
    assert [score.node for score in last.suspicions] == ["b3"]
    heir = DrivenRun(AUDITED, members)
    heir.views()
    heir.statuses(6, **dict.fromkeys(members, pb.Status(committed=6, last=last)))

    def audits_until_named(driver: Driver) -> int:
        result = AuditResult(7, {}, outcomes)
        return next(count for count in range(1, 60) if driver.audit_over(result))

    fresh = DrivenRun(AUDITED, members)
    fresh.begins()
    assert audits_until_named(heir.driver) == audits_until_named(fresh.driver) - 5
