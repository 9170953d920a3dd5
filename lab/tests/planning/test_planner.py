"""Tests of plans: properties of all plans, and figures that are close to the simulator's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.node.run_file import dumps, loads, override
from planaria.node.state.copies import snapshot_section
from planaria_lab.convergence.compare import cost
from planaria_lab.convergence.study import read_results
from planaria_lab.emulation.links import Link
from planaria_lab.planning import planner
from planaria_lab.planning.estimate import LEARNING, sent_bytes, transfer
from planaria_lab.planning.memory import needed, whole
from planaria_lab.planning.plan import behind as replay_behind
from planaria_lab.planning.planner import (
    ALIKE,
    RESERVE,
    Answer,
    Candidate,
    Machine,
    PlanError,
    Question,
    answer,
    cut,
    narrower,
    rows,
    spreads,
    stage_numbers,
    with_codecs,
)
from planaria_lab.simulator.churn import HOUR, Churn, LostPlace
from planaria_lab.simulator.clock import ON_WIRE
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.step import simulate_step
from planaria_lab.simulator.swarm import parameters, sites

RESULTS = Path(__file__).parents[2] / "results"
RUN = """
[model]
preset = "tiny"
[training]
batch = 16
microbatch = 1
[recovery]
checkpoint.dir = "/mnt/shared"
"""


def question(
    nodes: int = 6,
    delay: float = 40.0,
    mbps: float = 100.0,
    near: float = 1000.0,
    gigabytes: float = 1.0,
    flops: float = 5e10,
    tokens: float = 1e7,
    run: str = RUN,
    **more: Any,
) -> Question:
    """Return a question with half of the nodes at each of two sites."""
    links = [Link("a", "b", delay, mbps), Link("a", "a", 1.0, near), Link("b", "b", 1.0, near)]
    machines = tuple(
        Machine(f"n{i}", "ab"[2 * i >= nodes], flops, 1e9 * gigabytes, price=1.5)
        for i in range(nodes)
    )
    return Question(loads(run), 512, machines, sites(links), tokens, **more)


def plans(asked: Question) -> list[Candidate]:
    return [plan for plan in planner.candidates(asked) if isinstance(plan, Candidate)]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    return question(
        nodes=draw(st.integers(2, 7)),
        delay=draw(st.floats(0, 200)),
        mbps=draw(st.floats(1, 5000)),
        near=draw(st.floats(10, 20_000)),
        flops=draw(st.sampled_from([1e10, 1e12])),
        tokens=draw(st.floats(1e5, 1e9)),
        hourly=draw(st.sampled_from([0.0, 0.05, 0.3, 0.9])),
        replacement=draw(st.floats(0, 600)),
    )


# --- properties of all plans


def faster(asked: Question, factor: float) -> Question:
    links = [link._replace(mbps=factor * link.mbps) for link in asked.network.links]
    return replace(asked, network=sites(links))


@given(questions(), st.floats(1.0, 30.0))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_more_bandwidth_is_never_slower(asked: Question, factor: float) -> None:
    quick = faster(asked, factor)
    for before, after in zip(plans(asked), plans(quick), strict=True):
        assert after.seconds <= before.seconds * (1 + 1e-9)


@given(questions(), st.floats(0.0, 0.99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_a_higher_failure_rate_is_never_faster(asked: Question, hourly: float) -> None:
    assume(hourly >= asked.hourly)
    worse = replace(asked, hourly=hourly)
    for before, after in zip(plans(asked), plans(worse), strict=True):
        assert after.seconds >= before.seconds * (1 - 1e-9)


@given(questions(), st.floats(0, 1))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_less_delay_is_never_slower(asked: Question, factor: float) -> None:
    links = [link._replace(delay_ms=factor * link.delay_ms) for link in asked.network.links]
    nearer = replace(asked, network=sites(links))
    for before, after in zip(plans(asked), plans(nearer), strict=True):
        assert after.seconds <= before.seconds * (1 + 1e-9)


@given(questions(), st.floats(0.0005, 0.05))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_memory_is_never_over_the_nodes(asked: Question, gigabytes: float) -> None:
    small = replace(
        asked,
        machines=tuple(
            replace(m, memory=1e9 * gigabytes, host=2e9 * gigabytes) for m in asked.machines
        ),
    )
    able = plans(small)
    for plan in able:
        for stage in range(len(plan.counts)):
            need = whole(needed(plan.run, plan.swarm.config, stage, plan.counts))
            assert need.device <= (1 - RESERVE) * 1e9 * gigabytes
            assert need.host <= 2e9 * gigabytes
    shapes = {plan.counts for plan in plans(asked)}
    assert {plan.counts for plan in able} <= shapes


@given(questions())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_the_best_is_the_best_and_its_run_file_is_whole(asked: Question) -> None:
    result = whole_answer(asked)
    if result is None:
        assert all(math.isinf(plan.seconds) for plan in plans(asked))
        return
    best = result.best
    least = min(plan.seconds for plan in plans(asked))
    own = best.policy == asked.run.recovery.policy
    assert best.seconds == least or (own and best.seconds <= (1 + ALIKE) * least)
    assert loads(dumps(best.run)) == best.run
    assert best.run.steps * best.run.training.batch * 64 >= asked.tokens
    assert best.run.swarm.replicas == min(best.counts)
    assert best.run.model.stages == len(best.counts) - 1
    assert sum(best.counts) <= len(asked.machines)
    names = [machine.name for of in best.nodes for machine in of]
    assert len({*names}) == len(names)
    assert math.fsum(best.estimate.spent.values()) == pytest.approx(best.seconds)
    assert min(best.estimate.spent.values()) >= -1e-9 * best.seconds
    assert all(why for _, why in result.others)


def test_more_bandwidth_and_a_lower_rate_are_never_dearer_with_a_deadline() -> None:
    asked = question(nodes=8, hourly=0.3, deadline=24.0)
    money = answer(asked).best.money
    assert answer(faster(asked, 3.0)).best.money <= money
    assert answer(replace(asked, hourly=0.1)).best.money <= money


def whole_answer(asked: Question) -> Answer | None:
    try:
        return answer(asked)
    except PlanError:
        return None


def test_a_deadline_makes_it_cheap_and_a_budget_makes_it_quick() -> None:
    asked = question(nodes=11, flops=1e9)
    quick = answer(asked).best
    late = answer(replace(asked, deadline=10 * quick.seconds / HOUR)).best
    assert late.money < quick.money
    assert quick.seconds < late.seconds <= 10 * quick.seconds
    between = answer(replace(asked, budget=(late.money + quick.money) / 2)).best
    assert between.money <= (late.money + quick.money) / 2
    assert quick.seconds <= between.seconds <= late.seconds
    with pytest.raises(PlanError, match=r"no plan meets .*: the nearest, .* costs .* of 0\.0"):
        answer(replace(asked, budget=0.001))
    with pytest.raises(PlanError, match=r"takes [\d.]+ h of 0\.0 h"):
        answer(replace(asked, deadline=1e-4))


def with_narrower(asked: Question) -> tuple[Candidate, Candidate | None]:
    best = answer(asked).best
    return best, narrower(asked, best)


def test_narrower_links_are_proposed_where_they_save_time() -> None:
    few = {"nodes": 10, "policies": ("checkpoint",)}
    best, narrow = with_narrower(question(mbps=20.0, near=20.0, flops=1e12, **few))
    assert narrow is not None
    wire = narrow.run.wire
    assert (wire.activations, wire.gradients, wire.averaging) == ("int8", "int4", "int8")
    assert narrow.seconds < 0.7 * best.seconds
    simulated = simulate_step(narrow.swarm, steps=2).seconds
    assert 0.6 < narrow.estimate.step / simulated < 1.7
    assert with_narrower(question(delay=0.0, mbps=1e5, near=1e5, flops=1e9, **few))[1] is None


@pytest.mark.parametrize("averaging", ["int8", "lowrank"])
def test_no_codec_of_the_runs_own_is_replaced_by_a_wider_one(averaging: str) -> None:
    own = RUN + f'[wire]\nactivations = "int4"\naveraging = "{averaging}"\n'
    _, narrow = with_narrower(question(nodes=10, mbps=2.0, near=2.0, flops=1e12, run=own))
    assert narrow is not None
    wire = narrow.run.wire
    assert (wire.activations, wire.gradients, wire.averaging) == ("int4", "int4", averaging)


# --- codecs

FREE = ("activations", "gradients", "averaging")


def codecs(asked: Question) -> tuple[str, str, str]:
    wire = asked.run.wire
    return wire.activations, wire.gradients, wire.averaging


def test_codecs_are_chosen_where_they_save_time_and_cost_nothing() -> None:
    slow = homes()
    asked, wider = with_codecs(slow, FREE)
    assert codecs(asked) == ("int8", "int4", "int8")
    assert wider is not None
    assert codecs(slow) == tuple(getattr(wider.run.wire, name) for name in FREE)
    best = answer(asked).best
    assert best.seconds < 0.95 * wider.seconds
    assert wider.seconds == answer(slow).best.seconds
    quick = question(nodes=10, delay=0.0, mbps=1e5, near=1e5, flops=1e9)
    assert with_codecs(quick, FREE) == (quick, None)


def test_only_codecs_that_are_free_are_chosen_and_no_more_than_it_takes() -> None:
    slow = homes()
    assert with_codecs(slow, ()) == (slow, None)
    asked, _ = with_codecs(slow, ["averaging"])
    assert codecs(asked) == ("bf16", "bf16", "int8")
    asked, _ = with_codecs(question(nodes=2, mbps=2.0, near=2.0, flops=1e12), FREE)
    assert codecs(asked) == ("int8", "int4", "none")  # no stage has replicas


def test_what_is_proposed_for_a_subspace_is_a_run_file_too() -> None:
    run = RUN.replace("[training]", "subspace = 16\n[training]")
    slow = question(nodes=4, mbps=2.0, near=2.0, flops=1e12, run=run)
    asked, wider = with_codecs(slow, FREE)
    assert codecs(asked)[:2] == ("int8", "int4")
    assert wider is not None
    assert loads(dumps(asked.run)) == asked.run


def test_codecs_may_be_what_it_takes_to_meet_a_deadline() -> None:
    slow = question(nodes=10, mbps=20.0, near=20.0, flops=1e12, policies=("checkpoint",))
    asked, _ = with_codecs(slow, FREE)
    between = (answer(asked).best.seconds + answer(slow).best.seconds) / 2 / HOUR
    late = replace(slow, deadline=between)
    with pytest.raises(PlanError):
        answer(late)
    asked, wider = with_codecs(late, FREE)
    assert wider is None
    assert answer(asked).best.seconds <= between * HOUR


# --- home links


def homes(nodes: int = 12, slowest: float = 1.0, **more: Any) -> Question:
    """Return a question of nodes at home, each with an uplink of 1 to 3 times `slowest` Mbit/s."""
    away = {f"h{i}": 10.0 + 15.0 * (5 * i % nodes) / nodes for i in range(nodes)}
    uplinks = {name: slowest * (1 + 2 * (7 * i % nodes) / nodes) for i, name in enumerate(away)}
    links = [Link(a, b, away[a] + away[b], 16 * slowest) for a, b in combinations(away, 2)]
    machines = tuple(Machine(name, name, 2e9, 4e9, shared=True) for name in away)
    run = RUN.replace("batch = 16", "batch = 96")
    return Question(loads(run), 512, machines, sites(links, uplinks), 1e6, **more)


def test_more_of_an_uplink_is_never_slower() -> None:
    for before, after in zip(plans(homes()), plans(homes(slowest=1.7)), strict=True):
        assert after.seconds <= before.seconds * (1 + 1e-9)


def test_averaging_and_snapshots_share_the_uplink() -> None:
    """Averaging and snapshots of stage 0 take as long as the uplink needs, whatever the links
    behind it could carry."""
    whole = {"fraction": 1.0, "period": 1, "codec": "none"}
    step = {
        (plan.policy, plan.run.wire.averaging): plan.estimate.step
        for codec in ("none", "int8")
        for plan in plans(
            replace(
                homes(policies=("checkfree", "checkpoint")),
                run=override(homes().run, wire__averaging=codec, recovery__snapshot=whole),
            )
        )
        if plan.counts == (4, 4, 4) and plan.run.training.microbatch == 8
    }
    assert step["checkpoint", "int8"] < step["checkpoint", "none"]
    assert step["checkpoint", "int8"] < step["checkfree", "int8"]
    plan = next(p for p in plans(homes(policies=("checkpoint",))) if p.counts == (4, 4, 4))
    gradient = 2 * 3 / 4 * 4 * parameters(plan.swarm.config, 0)  # two phases, float32
    uplink = min(plan.swarm.network.uplinks[machine.site] for machine in plan.nodes[0])
    assert plan.estimate.step > gradient * 8e-6 / uplink


def test_steps_at_home_are_near_the_simulators() -> None:
    ratios = []
    for asked in (homes(), homes(slowest=5.0)):
        asked, _ = with_codecs(asked, FREE)
        for plan in some(asked, 11):
            simulated = simulate_step(plan.swarm, steps=3).seconds
            ratios.append(plan.estimate.step / simulated)
        best = answer(asked).best
        assert 0.85 < best.estimate.step / simulate_step(best.swarm, 4).seconds < 1.15
    assert len(ratios) > 20
    assert 0.6 < min(ratios) <= max(ratios) < 1.7
    assert 0.85 < statistics.median(ratios) < 1.15


def test_what_cannot_be_says_why() -> None:
    with pytest.raises(PlanError, match=r"nothing fits on 6 nodes.*stage \d needs .* at n"):
        answer(question(gigabytes=1e-4))
    with pytest.raises(PlanError, match="allow no plan"):
        answer(question(nodes=2, policies=("checkfree+",)))
    with pytest.raises(PlanError, match=r"hourly = 1 must be a probability"):
        question(hourly=1.0)
    with pytest.raises(PlanError, match="tokens = 0 must be more than 0"):
        question(tokens=0)
    with pytest.raises(PlanError, match="replacement = inf s"):
        question(replacement=math.inf)
    with pytest.raises(PlanError, match="there are no nodes"):
        question(nodes=0)


def test_checkpoints_take_a_folder() -> None:
    asked = question(run=RUN.replace("/mnt/shared", ""), hourly=0.3)
    result = answer(asked)
    assert result.best.policy != "checkpoint"
    reasons = {why for plan, why in result.others if plan.policy == "checkpoint"}
    assert reasons == {"needs a folder that all nodes share: name it in recovery.checkpoint.dir"}
    assert answer(replace(asked, policies=("checkpoint",))).best.policy == "checkpoint"


def test_who_computes_on_a_cpu_has_one_memory() -> None:
    asked = question(gigabytes=0.015)
    shared = replace(asked, machines=tuple(replace(m, shared=True) for m in asked.machines))
    assert len(plans(shared)) < len(plans(asked))


def test_nodes_of_each_stage() -> None:
    assert spreads(12, 5) == [(1,) * 5, (2,) * 5, (3, 3, 2, 2, 2)]
    assert spreads(10, 5) == [(1,) * 5, (2,) * 5]
    assert spreads(4, 5) == []
    assert {counts[0] for counts in spreads(60, 3)} == {1, 2, 3, 4, 8, 12, 16, 20}


# --- unlike machines


def test_stages_need_not_divide_the_layers() -> None:
    assert stage_numbers(24, 11, unlike=False) == [1, 2, 3, 4, 5, 6, 8]
    assert stage_numbers(30, 11, unlike=False) == [1, 2, 3, 4, 5, 6, 8, 10]
    assert stage_numbers(5, 11, unlike=True) == [1, 2, 3, 4, 5]
    run = override(loads(RUN), model__layers=5)
    made = plans(replace(question(nodes=4), run=run))
    assert {plan.swarm.config.cut for plan in made} == {(5,), (2, 3), (1, 2, 2)}
    assert all(isinstance(plan.run.model.stages, int) for plan in made)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(1, 30),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_layers_are_cut_by_speed_and_memory(stages: list[tuple[float, int]], layers: int) -> None:
    speeds, most = [speed for speed, _ in stages], [room for _, room in stages]
    assume(layers >= len(stages))
    sizes = cut(layers, speeds, most)
    if not sizes:
        assert sum(most) < layers or min(most) < 1
        return
    assert sum(sizes) == layers
    assert all(1 <= size <= room for size, room in zip(sizes, most, strict=True))
    pairs = zip(sizes, speeds, strict=True)
    slowest = max((size / speed for size, speed in pairs if size > 1), default=0.0)
    for size, speed, room in zip(sizes, speeds, most, strict=True):  # moving a layer doesn't help
        assert size == room or (size + 1) / speed >= slowest * (1 - 1e-9)


def test_alike_stages_are_cut_as_the_run_file_does() -> None:
    for stages in range(1, 8):
        config = replace(loads(RUN).config, layers=7, stages=stages)
        assert cut(7, [1.0] * stages, [7] * stages) == config.cut


FRIENDS = (
    Machine("slow", "anywhere", 1e10, 1e9),
    Machine("fast", "anywhere", 8e10, 1e9),
    Machine("old", "anywhere", 2e9, 1e9),
)


def test_rows_of_unlike_machines_are_one_ring_without_the_slowest() -> None:
    names = [[machine.name for machine in row] for row in rows(FRIENDS, 3)]
    assert names == [["slow", "fast", "old"], ["fast", "old", "slow"], ["old", "slow", "fast"]]
    assert [[m.name for m in row] for row in rows(FRIENDS, 2)] == [
        ["slow", "fast"],
        ["fast", "slow"],
    ]
    alike = tuple(replace(FRIENDS[0], name=name) for name in "abc")
    assert list(rows(alike, 2)) == [alike[:2]]


def friends() -> Question:
    run = override(loads(RUN), model__layers=12, model__dim=128)
    machines = (*FRIENDS, replace(FRIENDS[0], name="slow too"))
    network = sites([Link("anywhere", "anywhere", 1.0, 1e5)])
    return replace(question(), run=run, machines=machines, network=network)


def test_a_faster_machine_gets_more_layers() -> None:
    asked = friends()
    best = answer(asked).best
    speeds = [machines[0].flops for machines in best.nodes[1:]]
    assert best.run.model.stages == best.swarm.config.cut
    assert len({*best.swarm.config.cut}) > 1
    assert sorted(best.swarm.config.cut) == [
        size for _, size in sorted(zip(speeds, best.swarm.config.cut, strict=True))
    ]
    assert loads(dumps(best.run)) == best.run
    alike = [plan for plan in plans(asked) if len({*plan.swarm.config.cut}) == 1]
    assert all(best.seconds <= plan.seconds for plan in alike)


def test_a_machine_gets_no_more_layers_than_it_has_memory_for() -> None:
    roomy = replace(friends(), policies=("checkfree",))
    tight = replace(
        roomy,
        machines=tuple(replace(m, memory=1e9 if m.name != "fast" else 5e7) for m in roomy.machines),
    )
    for plan in plans(tight):
        for stage, machines in enumerate(plan.nodes):
            need = whole(needed(plan.run, plan.swarm.config, stage, plan.counts))
            assert need.device <= (1 - RESERVE) * min(machine.memory for machine in machines)
    layers = [
        max(
            (size for plan in plans(asked)
             for size, of in zip(plan.swarm.config.cut, plan.nodes[1:], strict=True)
             if of[0].name == "fast"),
            default=0,
        )
        for asked in (roomy, tight)
    ]  # fmt: skip
    assert 0 < layers[1] < layers[0]


# --- accuracy of estimates


def some(asked: Question, apart: int) -> Iterator[Candidate]:
    known = set()
    for plan in plans(asked)[::apart]:
        if (key := (plan.estimate.step, plan.counts)) not in known:
            known.add(key)
            yield plan


def test_steps_are_near_the_simulators() -> None:
    """The estimate may be above or below the simulated time: it is no bound."""
    ratios = []
    for asked in (
        question(nodes=10),
        question(nodes=11, mbps=10.0, flops=1e12),
        question(nodes=8, delay=5.0, mbps=1000.0, flops=2e9),
    ):
        for plan in some(asked, 17):
            simulated = simulate_step(plan.swarm, steps=2, pooled=False).seconds
            ratios.append(plan.estimate.step / simulated)
    assert len(ratios) > 20
    assert 0.7 < min(ratios) <= max(ratios) < 1.9
    assert 0.85 < statistics.median(ratios) < 1.15


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_time_that_losses_take_is_near_the_simulators(replicas: int) -> None:
    asked = question(nodes=5 * replicas, hourly=0.5, tokens=2e7, replacement=60.0, delay=5.0)
    asked = replace(asked, run=override(asked.run, recovery__relearn__passes=0))
    for policy in ("checkfree", "checkpoint"):
        plan = next(
            p
            for p in plans(replace(asked, policies=(policy,)))
            if p.counts == (replicas,) * 5
            and p.run.recovery.checkpoint.every == 10
            and p.run.training.microbatch == 1
        )
        churn = Churn(hourly=0.5, replacement=60.0, start=asked.start)
        known: dict[tuple[int, ...], Any] = {}
        seconds = [
            simulate_run(plan.swarm, churn, seed=seed, known=known).seconds for seed in range(20)
        ]
        lossless = plan.run.steps * simulate_step(plan.swarm).seconds
        learned = plan.seconds - plan.estimate.spent["learning again"]
        extra = statistics.mean(seconds) - lossless
        expected = learned - plan.estimate.spent["training"]
        assert extra > 0.01 * lossless
        assert 0.5 * extra < expected < 2.5 * extra


def test_what_losses_cost_in_learning_follows_from_the_labs_runs() -> None:
    def each(study: str, variants: list[str]) -> list[float]:
        lines = read_results(RESULTS / study / "runs.jsonl").values()
        by_run = {(line["variant"], line["seed"]): line for line in lines}
        costs = []
        for variant in variants:
            runs = [(line, by_run["none", seed]) for (v, seed), line in by_run.items()
                    if v == variant]  # fmt: skip
            behind = statistics.fmean(cost(run, none, 450).behind for run, none in runs)
            lost = statistics.fmean(len(run["rebuilds"]) for run, _ in runs)
            costs.append(behind / lost)
        return costs

    low, _, high = each(
        "failure-rates", [f"checkfree, {rate}" for rate in ("low", "middle", "high")]
    )
    assert LEARNING["checkfree"].behind == pytest.approx(low, rel=0.05)
    assert high < low / 2  # each costs less at a high rate: hence `most`
    for behind in each(
        "failure-rates", [f"snapshot, {rate}" for rate in ("low", "middle", "high")]
    ):
        assert LEARNING["snapshot"].behind == pytest.approx(behind, rel=0.1)
    relearned = each(
        "failure-rates", [f"checkfree, relearned, {rate}" for rate in ("low", "middle", "high")]
    )
    assert LEARNING["relearned"].behind == pytest.approx(statistics.fmean(relearned), rel=0.05)
    for behind in relearned:
        assert LEARNING["relearned"].behind == pytest.approx(behind, rel=0.25)


def test_of_nearly_equal_plans_one_keeps_the_policy_of_the_run_file() -> None:
    asked = question(nodes=12, tokens=1e6)
    for policy in ("auto", "snapshot", "checkfree"):
        wanted = replace(asked, run=override(asked.run, recovery__policy=policy))
        assert answer(wanted).best.policy == policy


def test_a_transfer_takes_its_bytes_and_some_rounds() -> None:
    link = Link("a", "b", 50.0, 100.0)
    assert 8.0 < transfer(1e8, link) < 8.0 * ON_WIRE + 0.1 * 15
    assert transfer(100, link) < 0.2


@pytest.mark.parametrize("policy", ["redundant", "checkpoint"])
def test_a_node_sends_in_a_step_what_it_sends_in_the_simulation(policy: str) -> None:
    for plan in plans(question(nodes=6, policies=(policy,))):
        if max(plan.counts) == 1 and plan.run.training.microbatch == 1:
            sent = simulate_step(plan.swarm).sent
            for stage in range(len(plan.counts)):
                simulated = sum(size for (node, _), size in sent.items() if node == f"{stage}.0")
                assert sent_bytes(plan.swarm, stage) == pytest.approx(simulated, rel=0.01)


def test_a_stage_from_a_snapshot_is_behind_by_the_age_of_its_rows_too() -> None:
    asked = question(nodes=6, policies=("auto",))
    plan = next(plan for plan in plans(asked) if plan.counts == (1,) * 5)
    swarm = replace(plan.swarm, run=override(plan.run, steps=200))
    churn = Churn(at={150: (LostPlace(2, None),)}, replacement=5.0)
    outcome = simulate_run(swarm, churn)
    assert [rebuilt.method for rebuilt in outcome.losses[0].rebuilt] == ["snapshot"]
    rows = 1 / snapshot_section(plan.run, swarm.config).fraction
    assert replay_behind(plan, outcome) >= LEARNING["snapshot"].behind + rows - 1e-9
