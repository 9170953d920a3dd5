"""Tests of runs in simulated time: sums, the costs of a loss, and determinism by the seed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.local.loss_schedule import TraceRow
from planaria.node.model.shape import model_config
from planaria.node.run_file import loads, override
from planaria.node.wire.frame_format import BLOCK
from planaria.recovery.relearning import time_for
from planaria.recovery.snapshot import route
from planaria_lab.convergence.schedule import Losses, schedule
from planaria_lab.simulator import reaction
from planaria_lab.simulator.churn import (
    HOUR,
    Churn,
    Lives,
    LostPlace,
    per_step,
)
from planaria_lab.simulator.run import TIME_OVER, Loss, RunOutcome, simulate_run
from planaria_lab.simulator.step import MeanStep, simulate_step
from planaria_lab.simulator.swarm import (
    Seconds,
    Swarm,
    SwarmFiguresError,
    held_at,
    one_site,
    uniform,
)

DELAY = 0.040
KNOWN: dict[str, dict[tuple[int, ...], MeanStep]] = {}
"""Simulated steps, which all tests share."""


def swarm(
    policy: str = "checkfree",
    replicas: int = 2,
    steps: int = 50,
    delay: float = 1e3 * DELAY,
    seconds: dict[int, Seconds] | None = None,
    **changes: Any,
) -> Swarm:
    run = override(
        loads("[training]\nmicrobatch = 1\nbatch = 8\n[recovery]\nrelearn.passes = 0"),
        recovery__policy=policy,
        steps=steps,
        **changes,
    )
    config = model_config(run.model, 512)
    body = Seconds(0.003, 0.006, norm=0.001, apply=0.004, add=0.002, relearn=0.01)
    known = dict.fromkeys(range(1, 5), body)
    known[0] = Seconds(0.001, 0.001, head=0.005, norm=0.001, apply=0.002, add=0.001)
    return uniform(run, config, one_site(delay, 100), known | (seconds or {}), replicas)


def run(simulated: Swarm, churn: Churn, **more: Any) -> RunOutcome:
    recovery = simulated.run.recovery
    known = KNOWN.setdefault(repr((recovery.policy, len(simulated.groups))), {})
    outcome = simulate_run(simulated, churn, known=known, **more)
    parts = (outcome.kept, outcome.again, outcome.aborted, outcome.stalled)
    assert sum(parts) == pytest.approx(outcome.seconds)
    assert min(parts) >= -1e-6
    assert outcome.iterations == outcome.steps + sum(loss.rolled_back for loss in outcome.losses)
    return outcome


def at(text: str) -> dict[int, tuple[LostPlace, ...]]:
    """Parse losses: STAGE or STAGE.NUMBER, then @ITERATION, separated by blanks."""
    losses: dict[int, tuple[LostPlace, ...]] = {}
    for entry in text.split():
        place, _, iteration = entry.partition("@")
        stage, _, number = place.partition(".")
        lost = LostPlace(int(stage), int(number) if number else None)
        losses[int(iteration)] = (*losses.get(int(iteration), ()), lost)
    return losses


@given(st.integers(1, 200), st.sampled_from([1, 2, 3]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_without_failures_a_run_is_its_steps(steps: int, replicas: int) -> None:
    simulated = swarm(replicas=replicas, steps=steps)
    outcome = run(simulated, Churn())
    assert outcome.seconds == pytest.approx(steps * simulate_step(simulated).seconds)
    assert (outcome.steps, outcome.iterations, outcome.losses) == (steps, steps, ())
    assert outcome.stalled == pytest.approx(0.0)
    assert outcome.node_seconds == pytest.approx(outcome.seconds * 5 * replicas)


@given(st.integers(0, 1000), st.sampled_from(["node", "stage"]), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_seed_determines_the_run(seed: int, of: Any, shape: float) -> None:
    churn = Churn(hourly=0.9, of=of, shape=shape, replacement=3.0, start=1.0)
    simulated = swarm(steps=80)
    outcome = run(simulated, churn, seed=seed)
    assert outcome == run(simulated, churn, seed=seed)
    assert outcome.stopped or outcome.steps == 80


FEWER = (2, 2, 1, 2, 2)
NOTICED = 0.4 + 2 * DELAY  # to the registry, and back


def test_an_aborted_attempt_costs_itself_and_the_notice() -> None:
    simulated = swarm(recovery__masking="abort")
    outcome = run(simulated, Churn(at=at("2.1@10"), replacement=math.inf))
    (loss,) = outcome.losses
    step, fewer = (simulate_step(simulated.with_counts(c)) for c in (simulated.counts, FEWER))
    assert loss.detected == pytest.approx(NOTICED)
    assert loss.stall == pytest.approx(NOTICED + 2 * DELAY + fewer.seconds)
    assert (loss.step, loss.nodes, loss.rebuilt, loss.rolled_back) == (10, 1, (), 0)
    assert not loss.masked
    assert outcome.aborted == pytest.approx(step.seconds / 2)
    assert outcome.attempts_aborted == 1
    assert outcome.kept == pytest.approx(9 * step.seconds + 41 * fewer.seconds)


def test_a_step_that_goes_on_waits_for_the_view_and_is_followed_by_a_gather() -> None:
    """The driver learns of the loss by the view; then the lost work is done again."""
    simulated = swarm()
    outcome = run(simulated, Churn(at=at("2.1@10"), phase=0.9, replacement=math.inf))
    (loss,) = outcome.losses
    step, fewer = (
        simulate_step(simulated.with_counts(c)).seconds for c in (simulated.counts, FEWER)
    )
    assert (loss.masked, loss.step, loss.nodes, loss.rolled_back) == (True, 10, 1, 0)
    assert outcome.attempts_aborted == outcome.aborted == 0
    assert NOTICED + DELAY < loss.stall < NOTICED + DELAY + step
    assert outcome.seconds == pytest.approx(9.9 * step + loss.stall + 2 * DELAY + 40 * fewer)


def test_a_step_that_goes_on_redoes_what_the_lost_node_had_done() -> None:
    """If a stage computes all the time, the other replica repeats the lost one's microbatches. At
    phase 0.9 these are nine tenths of its half; a tenth of the step was still to come."""
    body = Seconds(0.1, 0.2)
    simulated = swarm(delay=1.0, seconds=dict.fromkeys(range(1, 5), body), training__batch=32)
    churn = Churn(at=at("2.1@10"), phase=0.9, replacement=math.inf)
    (loss,) = simulate_run(simulated, churn).losses
    redone = 0.9 * 32 / 2 * 0.3 + 0.1 * 32 * 0.3
    assert loss.stall == pytest.approx(0.4 + redone, rel=0.05)  # the view takes 0.4 s
    early = simulate_run(simulated, Churn(at=at("2.1@10"), phase=0.1, replacement=math.inf)).losses[
        0
    ]
    assert early.stall == pytest.approx(
        simulate_step(simulated.with_counts(FEWER)).seconds, rel=0.1
    )


@given(
    st.floats(0, 0.99),
    st.integers(0, 4),
    st.integers(2, 4),
    st.sampled_from([1.0, 40.0]),
    st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_going_on_is_never_slower_than_trying_again(
    phase: float, stage: int, replicas: int, delay: float, silent: bool
) -> None:
    churn = Churn(at=at(f"{stage}.1@3"), phase=phase, silent=silent, replacement=math.inf)
    known: dict[tuple[int, ...], MeanStep] = {}
    again, on = (
        simulate_run(
            swarm(replicas=replicas, steps=5, delay=delay, recovery__masking=masking),
            churn,
            known=known,
        )
        for masking in ("abort", "reassign")
    )
    assert on.losses[0].masked
    assert on.seconds <= again.seconds + 1e-9
    assert on.losses[0].stall >= on.losses[0].detected - 1e-9


def test_the_drivers_loss_is_not_masked_and_its_successor_is_the_oldest() -> None:
    churn = Churn(at=at("0.0@10 0.0@20 0.1@30 0.2@40"), replacement=2.0, start=1.0)
    outcome = run(swarm(replicas=3), churn)
    assert [loss.masked for loss in outcome.losses] == [False, True, False, False]
    assert outcome.attempts_aborted == 3


@pytest.mark.parametrize(("fraction", "method"), [(0.125, "snapshot"), (0.015, "checkfree")])
def test_a_snapshot_of_old_rows_is_worse_than_a_guess(fraction: float, method: str) -> None:
    changes = {"recovery__relearn__passes": 4, "recovery__snapshot__fraction": fraction}
    lossy = swarm("auto", replicas=1, steps=100, **changes)
    (loss,) = simulate_run(lossy, Churn(at=at("2@90"), replacement=2.0)).losses
    assert [rebuilt.method for rebuilt in loss.rebuilt] == [method]


@pytest.mark.parametrize("stages", [1, 4])
def test_lost_adapters_begin_anew_and_stage_0_is_not_trained(stages: int) -> None:
    changes = {"training__lora__rank": 2, "recovery__snapshot__first": 0}
    adapters = swarm(replicas=1, model__stages=stages, **changes)
    adapters = replace(adapters, config=adapters.run.config_for(512))
    outcome = simulate_run(adapters, Churn(at=at("1@10 0@20"), replacement=2.0))
    assert not outcome.stopped
    rebuilt = [rebuilt for loss in outcome.losses for rebuilt in loss.rebuilt]
    methods = [(rebuild.stage, rebuild.method) for rebuild in rebuilt]
    assert methods == [(1, "adapters-anew"), (0, "origin")]


def test_a_second_loss_in_a_step_that_goes_on() -> None:
    """If another replica is lost, the step goes on once more; if the last, it is given up."""
    lost = [TraceRow(9.0, False, "m7"), TraceRow(9.1, False, "m2"), TraceRow(12.0, True, "later")]

    def loss(nodes: int) -> Loss:
        rows = [TraceRow(0.0, True, f"m{n}") for n in range(nodes)]  # to stages 0 to 4 in turn
        (first,) = run(swarm(), Churn(trace=(*rows, *lost), start=0.0)).losses
        assert (first.nodes, first.time) == (2, 9.0)
        return first

    three, two = loss(15), loss(10)
    assert three.masked
    assert three.stall >= 0.1 + NOTICED
    assert not two.masked
    assert [stage.stage for stage in two.rebuilt] == [2]


def test_silence_takes_longer_to_notice_and_notice_none() -> None:
    simulated = swarm()
    loud, silent, notified = (
        run(simulated, churn).losses[0].detected
        for churn in (
            Churn(at=at("2.1@10")),
            Churn(at=at("2.1@10"), silent=True),
            Churn(at=at("2.1@10"), notice=60.0),
        )
    )
    assert silent == pytest.approx(simulated.run.swarm.lease + 2 * DELAY)
    assert notified < loud < silent


def test_a_replacement_joins_without_holding_up_the_others_for_long() -> None:
    simulated = swarm(steps=100)
    with_one = run(simulated, Churn(at=at("2.1@10"), replacement=5.0, start=1.0))
    without = run(simulated, Churn(at=at("2.1@10"), replacement=math.inf))
    assert with_one.joined == 1
    extra = with_one.stalled - without.stalled
    assert extra == pytest.approx(
        reaction.entering(simulated) + reaction.settling(simulated, 2, "replica")
    )
    assert with_one.node_seconds > without.node_seconds


METHODS = {
    ("checkfree", 2): ("checkfree", False, False),
    ("checkfree", 4): ("interpolate", False, True),
    ("checkfree", 0): ("snapshot", False, False),
    ("checkfree+", 4): ("checkfree+", False, False),
    ("checkfree+", 0): ("snapshot", False, False),
    ("snapshot", 3): ("snapshot", False, False),
    ("auto", 3): ("snapshot", False, False),
    ("redundant", 3): ("redundant", True, False),
    ("checkpoint", 3): ("checkpoint", True, False),
}


@pytest.mark.parametrize(("policy", "stage"), METHODS)
def test_a_lost_stage_is_rebuilt_as_the_policy_has_it(policy: str, stage: int) -> None:
    simulated = swarm(policy)
    outcome = run(simulated, Churn(at=at(f"{stage}@25"), replacement=7.0, start=2.0))
    (loss,) = outcome.losses
    (rebuilt,) = loss.rebuilt
    assert (rebuilt.method, rebuilt.same_weights, rebuilt.fallback) == METHODS[policy, stage]
    assert loss.nodes == 2
    joined = 9.0 + reaction.joining(simulated, stage)
    assert loss.detected + loss.waited == pytest.approx(joined)
    assert loss.recovered > 2 * 2 * DELAY  # at least two gatherings
    assert loss.rolled_back == (4 if policy == "checkpoint" else 0)  # from 24 to 20
    assert outcome.steps == 50


def test_bytes_to_fetch_make_a_rebuild_longer() -> None:
    quick = run(swarm(), Churn(at=at("2@25"))).losses[0].recovered
    large = run(swarm(model__hidden=4096), Churn(at=at("2@25"))).losses[0].recovered
    assert large > quick


def test_what_a_stage_relearns_from_is_fetched_as_it_is_kept() -> None:
    """Tensors are fetched as they crossed; those that crossed in float32 are kept in bf16."""
    codecs = ("none", "bf16", "int8")
    changes = {"recovery__relearn__passes": 1, "recovery__relearn__steps": 100}
    wide, half, small = (
        reaction.relearning(swarm(wire__activations=codec, **changes), 2, "checkfree", 1e3)
        for codec in codecs
    )
    config = swarm().config
    figures = 100 * 8 * config.context * config.dim
    assert wide == pytest.approx(half)
    assert half - small == pytest.approx((2 - 1 - 4 / BLOCK) * figures * 8 / 100e6, rel=0.05)


def test_relearning_takes_as_long_as_the_driver_gives_it() -> None:
    """The time follows from the time trained since the run last lost a stage. Losses of nodes with
    replicas don't count."""
    listed = Churn(at=at("2@400 1.0@430 3@460 2@461"))
    quick, relearned = (
        run(swarm(steps=500, recovery__relearn__passes=of, recovery__relearn__enough=0.0), listed)
        for of in (0, 100)
    )
    relearned_stages = [
        (
            b.recovered - a.recovered,
            b.time + b.detected,
            b.time + b.detected + b.waited + b.recovered,
        )
        for a, b in zip(quick.losses, relearned.losses, strict=True)
    ]
    (first, noticed, on), (replica, *_), (third, again, _), (last, *_) = relearned_stages
    pairs = 0.6  # the most seconds that pairs take
    assert first == pytest.approx(time_for(20.0, noticed, 0.0), abs=pairs)
    assert replica == pytest.approx(0.0)
    assert third == pytest.approx(time_for(20.0, again - on, 0.0), abs=pairs)
    assert last == pytest.approx(time_for(20.0, 0.0, 0.0), abs=pairs)
    assert first > third + pairs > last + 2 * pairs


@pytest.mark.parametrize(
    ("stage", "enough", "waited"), [(2, 0.1, 0.25), (2, 2.0, 0.25), (3, 0.1, 0.25), (3, 2.0, 0.0)]
)
def test_others_wait_for_a_quarter_of_a_pass_or_not_at_all(
    stage: int, enough: float, waited: float
) -> None:
    """They don't wait if the guess itself is good enough; that of stage 2 is too far off."""
    changes = {"recovery__relearn__passes": 2, "recovery__relearn__steps": 10}
    lost = Churn(at=at(f"{stage}@400"))
    whole, some = (
        run(swarm(replicas=1, steps=500, recovery__relearn__enough=until, **changes), lost)
        for until in (0.0, enough)
    )
    a_pass = 80 * 0.01  # updates of one sample, times seconds
    saved = whole.losses[0].recovered - some.losses[0].recovered
    assert saved == pytest.approx((2 - waited) * a_pass, abs=0.05)


def test_relearning_that_begins_anew_has_what_is_left_of_its_time() -> None:
    """Stage 4 is lost 8 s after stage 2, and each has a newcomer at once."""
    waits = {"recovery__relearn__passes": 100, "recovery__relearn__enough": 0.0}
    simulated = swarm(replicas=1, steps=1500, **waits)
    rows = [TraceRow(0.0, True, f"n{stage}") for stage in range(5)]
    lost = [
        *(TraceRow(200.0, False, "n2"), TraceRow(200.0, True, "a")),
        *(TraceRow(208.0, False, "n4"), TraceRow(208.0, True, "b")),
    ]
    (both,) = run(simulated, Churn(trace=(*rows, *lost), start=0.0)).losses
    (alone,) = run(simulated, Churn(trace=(*rows, *lost[:2]), start=0.0)).losses
    assert (both.nodes, alone.nodes) == (2, 1)
    assert alone.recovered > 20.0
    assert both.recovered == pytest.approx(alone.recovered, abs=2.0)  # rounds and pairs, again


def test_checkpoints_roll_back_to_the_newest_that_is_written() -> None:
    simulated = swarm("checkpoint", recovery__checkpoint__every=7)
    outcome = run(simulated, Churn(at=at("2@30 3@40"), replacement=1.0))
    # After 29 steps the run goes back to 28. Iteration 40 is then step 39: back to 35.
    assert [loss.rolled_back for loss in outcome.losses] == [1, 3]
    assert outcome.iterations == 54
    assert outcome.again == pytest.approx(4 * simulate_step(simulated).seconds)
    early = run(simulated, Churn(at=at("2@5")))
    assert early.losses[0].rolled_back == 4  # to initial weights


def test_a_checkpoint_is_written_once_its_largest_stage_is() -> None:
    even, uneven = (
        reaction.writing(replace(swarm(model__stages=s, model__layers=9), storage_mbps=1.0))
        for s in ([3, 3, 3], [1, 2, 6])
    )
    assert uneven > 1.9 * even


def test_blocking_checkpoints_cost_their_writing() -> None:
    overlapped = replace(swarm("checkpoint"), storage_mbps=1.0)
    blocking = replace(overlapped, blocking=True)
    more = run(blocking, Churn()).seconds - run(overlapped, Churn()).seconds
    assert more == pytest.approx(50 / 10 * reaction.writing(blocking))


def test_two_stages_lost_together_are_decided_together() -> None:
    outcome = run(swarm("redundant"), Churn(at=at("2@25 3@25")))
    (loss,) = outcome.losses
    assert [stage.method for stage in loss.rebuilt] == ["redundant", "interpolate"]
    assert loss.rebuilt[1].fallback


def test_a_run_stops_where_nothing_is_left_to_go_on_from() -> None:
    everything = " ".join(f"{stage}@26" for stage in range(5))
    outcome = run(swarm(), Churn(at=at(everything)))
    assert outcome.steps == 25
    assert "nothing else determines embedding and head" in outcome.stopped
    waits = run(swarm(replicas=1), Churn(at=at("2@25"), replacement=math.inf))
    assert waits.stopped == "stage 2 has no node, and no replacement comes"
    strict = run(swarm(recovery__strict=True), Churn(at=at("4@25")))
    assert "--strict" in strict.stopped


def test_a_swarm_that_loses_nodes_faster_than_it_gets_over_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planaria_lab.simulator.run.IN_VAIN", 500)
    hopeless = Churn(hourly=1 - 1e-12, shape=0.2, replacement=0.1, start=0.1)
    outcome = run(swarm(replicas=4), hopeless)
    assert "losses in a row" in outcome.stopped


def test_a_limit_ends_a_run() -> None:
    outcome = run(swarm(steps=10_000), Churn(), limit=100.0)
    assert outcome.seconds == pytest.approx(100.0)
    assert outcome.steps == math.floor(100.0 / simulate_step(swarm()).seconds)
    assert outcome.stopped == TIME_OVER


def test_notice_lets_a_successor_take_over() -> None:
    """The only node of a stage hands its state over if a successor comes in time."""
    simulated = swarm(replicas=1, steps=400)
    churn = {"hourly": 0.999, "stages": (2,), "replacement": 5.0, "start": 1.0}
    without = run(simulated, Churn(**churn), seed=3)
    with_notice = run(simulated, Churn(**churn, notice=60.0), seed=3)
    assert any(loss.rebuilt for loss in without.losses)
    assert with_notice.joined
    assert not any(loss.rebuilt for loss in with_notice.losses)
    assert with_notice.stalled < without.stalled


def test_policies_meet_the_same_failures() -> None:
    churn = Churn(hourly=0.99, of="stage", stages=(1, 2, 3, 4), replacement=0.0)
    times = [
        run(swarm(policy, steps=2000), churn, seed=5).losses[0].time
        for policy in ("checkfree", "snapshot", "checkpoint")
    ]
    assert times[0] == pytest.approx(times[1])
    assert times[1] == pytest.approx(times[2])


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_lives_are_as_the_rate_says(shape: float) -> None:
    lives = Lives(Churn(hourly=0.2, shape=shape), seed=1)
    drawn = np.array([lives.life(LostPlace(1, n), 0) for n in range(20_000)])
    assert np.mean(drawn <= HOUR) == pytest.approx(0.2, abs=0.01)
    scale = HOUR / (-math.log(0.8)) ** (1 / shape)
    assert np.mean(drawn) == pytest.approx(scale * math.gamma(1 + 1 / shape), rel=0.05)
    assert lives.life(LostPlace(1, 70), 0) == Lives(Churn(hourly=0.2, shape=shape), 1).life(
        LostPlace(1, 70), 0
    )
    assert lives.life(LostPlace(1, 0), 1) != lives.life(LostPlace(1, 0), 0)


def test_a_trace_says_who_is_there() -> None:
    """Nodes go to the stage with the fewest nodes. Training begins once all stages have one."""
    rows = [TraceRow(float(n), True, f"m{n}") for n in range(6)]  # stages 0 to 4, then 0 again
    rows += [TraceRow(20.0, False, "m5"), TraceRow(25.0, False, "m2"), TraceRow(30.0, True, "m6")]
    outcome = run(swarm(replicas=1), Churn(trace=tuple(rows), start=1.0), limit=1000.0)
    assert outcome.steps == 50
    assert outcome.stalled > 4.0 + 1.0  # the fifth node starts only then
    assert [loss.time for loss in outcome.losses] == [20.0, 25.0]
    assert outcome.losses[1].rebuilt[0].method == "checkfree"
    assert outcome.losses[1].waited > 4.0


def test_a_trace_may_take_a_node_before_it_has_started() -> None:
    rows = [TraceRow(0.1 * n, True, f"m{n}") for n in range(7)]  # stages 0 to 4, then 0 and 1 again
    rows.append(TraceRow(0.7, False, "m6"))
    outcome = run(swarm(replicas=1), Churn(trace=tuple(rows), start=1.0))
    assert outcome.losses == ()
    assert outcome.node_seconds < 6 * outcome.seconds


def test_losses_per_step_are_those_of_the_lab() -> None:
    losses = Losses(rate=0.05)
    listed = per_step(losses, seed=3, iterations=100, stages=4)
    assert {i: [stage for stage, _ in lost] for i, lost in listed.items()} == {
        i: [*lost] for i, lost in schedule(losses, 3, 100, 4).items()
    }
    outcome = run(swarm(), Churn(at=listed))
    assert sum(len(loss.rebuilt) for loss in outcome.losses) == sum(
        len(lost) for i, lost in listed.items() if i <= 50
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hourly": 1.0}, "hourly = 1 must be 0 or more and less than 1"),
        ({"shape": 0.0}, "shape = 0"),
        ({"phase": 1.0}, "phase = 1"),
        ({"notice": -1.0}, "notice = -1.0 must be 0 s or more"),
        ({"at": {0: (LostPlace(1, None),)}}, "a loss in iteration 0"),
        ({"trace": (TraceRow(0.0, True, "a"),), "hourly": 0.1}, "a trace can't be combined"),
    ],
)
def test_what_can_not_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SwarmFiguresError, match=re.escape(message)):
        Churn(**fields)


def test_stages_that_are_not_there_can_not_be_lost() -> None:
    with pytest.raises(SwarmFiguresError, match="stage 9 can't be lost: the stages are 0 to 4"):
        simulate_run(swarm(), Churn(hourly=0.1, stages=(9,)))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20))
def test_what_is_routed_to_a_stage_is_held_there(stages: int) -> None:
    members = [(f"{stage:02}", stage) for stage in range(stages + 1)]
    routed = {
        (holder, stage)
        for stage in range(stages + 1)
        for holder in (route(stage, members, stages) or ("", ()))[1]
    }
    assert routed == {(node, stage) for node, of in members for stage in held_at(of, stages)}
