from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planaria.recovery import decide as deciding
from planaria.recovery.decide import FRESH, RECENT, Resume, await_saves, nearest, resume
from planaria.recovery.facts import INEXACT, Decision, Held, Left, Rebuild, RollBack, Source, Stop
from planaria.recovery.policy import POLICIES

STEP = 40


def without(
    *lost: int, stages: int = 5, held: tuple[Held, ...] = (), untrained=(), origin=()
) -> Left:
    survivors = {s: [f"n{s}"] for s in range(stages + 1) if s not in lost}
    return Left(stages, STEP, survivors, held=held, untrained=frozenset(untrained), origin=origin)


def holds(kind: str, stage: int, step: int = STEP, node: str = "holder", lineage: int = 0) -> Held:
    return Held(kind, Source(node, stage, step, lineage))


def decide(
    stage: int, left: Left, policy: str, strict: bool = False, relearns: bool = False
) -> Decision:
    return deciding.decide(stage, left, POLICIES[policy], strict, relearns)


def rebuild(stage: int, left: Left, policy: str, relearns: bool = False) -> Rebuild:
    decision = decide(stage, left, policy, relearns=relearns)
    assert isinstance(decision, Rebuild), decision
    return decision


def nodes(decision: Rebuild) -> list[str]:
    return [source.node for source in decision.sources]


def resumed(held: list[Held], stages: int) -> Resume:
    plan = resume(held, stages)
    assert plan is not None
    return plan


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stage_that_lives_on_is_copied_from_all_its_nodes(policy):
    decision = rebuild(2, Left(4, STEP, {1: ["a"], 2: ["c", "b"], 3: ["d"]}), policy)
    assert (decision.method, nodes(decision), decision.exact) == ("replica", ["b", "c"], True)


def test_those_that_were_told_to_go_hand_over_what_nobody_else_has():
    left = Left(4, STEP, {1: ["a"], 2: ["c", "b"]}, leaving={"a", "c"})
    alone, replicated = rebuild(1, left, "checkfree"), rebuild(2, left, "checkfree")
    assert (alone.method, nodes(alone), alone.exact) == ("handover", ["a"], True)
    assert (replicated.method, nodes(replicated)) == ("replica", ["b", "c"])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_last_node_of_stage_0_left_is_exact_while_the_run_has_not_gone_on(policy):
    left = Held("deposit", Source("b", 0, STEP), made=(3, 7))
    lost = replace(without(0, held=(left, holds("snapshot", 0))), made=(3, 7))
    decision = rebuild(0, lost, policy)
    assert (decision.method, nodes(decision), decision.exact) == ("deposit", ["b"], True)
    for later in (replace(lost, step=STEP + 1), replace(lost, made=(4, 0))):
        other = decide(0, later, policy)
        assert not isinstance(other, Rebuild) or other.method != "deposit"


def test_before_the_first_step_a_stage_is_that_of_the_checkpoint():
    lost = Left(3, 0, {0: ["a"], 1: ["b"], 3: ["d"]}, origin=["d", "a"])
    decision = rebuild(2, lost, "checkfree")
    assert (decision.method, nodes(decision), decision.exact) == ("origin", ["a"], True)
    assert nodes(rebuild(3, replace(lost, survivors={0: ["a"]}), "checkfree")) == ["d"]
    for later in (replace(lost, step=1), replace(lost, lineage=1)):
        assert not rebuild(2, later, "checkfree").exact


@pytest.mark.parametrize("policy", ["checkfree", "checkfree+"])
@pytest.mark.parametrize("stage", [1, 2, 5])
def test_later_it_is_guessed_to_be_as_it_was_in_the_checkpoint(stage, policy):
    for lost in ([stage], [stage, stage - 1 or 2]):
        for strict in (False, True):
            left = without(*lost, origin=["n4", "n3"])
            decision = decide(stage, left, policy, strict)
            assert isinstance(decision, Rebuild)
            (source,) = decision.sources
            assert (decision.method, source.stage, source.step) == ("pretrained", stage, 0)
            assert source.node in ("n3", "n4")
            assert not (decision.exact or decision.fallback)


def test_a_snapshot_of_stage_0_or_a_save_is_newer_than_the_checkpoint():
    held = (holds("snapshot", 0, 40, "a"),)
    assert rebuild(0, without(0, held=held, origin=["n3"]), "checkfree").method == "snapshot"
    decision = rebuild(0, without(0, origin=["n3"]), "checkfree")
    assert (decision.method, decision.fallback) == ("pretrained", True)
    saves = [Held("save", Source("x", 2, STEP - 30))]
    lacking = without(2, held=saves, origin=["n3"])
    assert rebuild(2, lacking, "snapshot").method == "save"
    decision = rebuild(2, without(2, origin=["n3"]), "snapshot")
    assert (decision.method, decision.fallback) == ("pretrained", True)


def of_adapters(*lost: int, **changes) -> Left:
    return replace(without(*lost, **changes), adapters=True)


@pytest.mark.parametrize("stage", [1, 2, 4])
def test_adapters_of_other_stages_say_nothing_so_a_stages_own_begin_anew(stage):
    for strict in (False, True):
        decision = decide(stage, of_adapters(stage), "checkfree", strict)
        assert isinstance(decision, Rebuild)
        assert (decision.method, decision.sources) == ("adapters-anew", ())
        assert not (decision.exact or decision.fallback)
        assert "begin anew" in decision.reason
    lacking = rebuild(stage, of_adapters(stage), "snapshot")
    assert (lacking.method, lacking.fallback) == ("adapters-anew", True)


def test_a_save_of_adapters_however_old_is_better_than_none():
    saves = [Held("save", Source("x", 2, STEP - 30))]
    decision = rebuild(2, of_adapters(2, held=saves), "checkfree")
    assert (decision.method, nodes(decision), decision.fallback) == ("save", ["x"], False)
    assert "its last save, 30 steps old" in decision.reason


@pytest.mark.parametrize("policy", ["checkfree", "checkfree+"])
def test_a_stage_that_would_be_guessed_comes_from_its_snapshot_where_there_is_one(policy):
    held = (holds("snapshot", 1, 39), holds("snapshot", 2, 40))
    for left in (without(1, held=held), without(0, 1, held=held), without(1, 2, held=held)):
        decision = rebuild(1, left, policy)
        assert [decision.method, *nodes(decision)] == ["snapshot", "holder"]
        assert not decision.fallback
        assert "1 step old" in decision.reason
    assert rebuild(1, without(1, held=held, origin=["n3"]), policy).method == "snapshot"
    of_now = replace(of_adapters(1), held=held)
    assert rebuild(1, of_now, "checkfree").method == "snapshot"
    gone = rebuild(1, without(1), "checkfree")
    assert (gone.method, gone.fallback) == ("interpolate", True)


@pytest.mark.parametrize(("relearns", "oldest"), [(False, RECENT), (True, FRESH)])
@pytest.mark.parametrize(("more", "method"), [(0.0, "snapshot"), (0.1, "checkfree")])
def test_a_snapshot_is_as_old_as_its_rows_are_on_average(
    relearns: bool, oldest: int, more: float, method: str
) -> None:
    newest = replace(holds("snapshot", 3, 200), mean_step=200 - oldest - more)
    left = replace(without(3, held=(newest,)), step=200)
    assert rebuild(3, left, "auto", relearns).method == method
    first = replace(newest, source=replace(newest.source, stage=1))
    assert rebuild(1, replace(without(1, held=(first,)), step=200), "auto", relearns).method == (
        "snapshot"
    ), "nothing better is known of the first stage"
    fresher = replace(holds("snapshot", 3, 197, "other"), mean_step=195.5)
    assert nodes(rebuild(3, replace(left, held=(newest, fresher)), "auto")) == ["other"]
    assert rebuild(3, replace(left, held=(newest,)), "snapshot").method == "snapshot"


@pytest.mark.parametrize("policy", ["checkfree", "snapshot", "checkpoint", "redundant"])
def test_beside_adapters_stage_0_is_always_that_of_the_checkpoint(policy):
    decision = rebuild(0, of_adapters(0), policy)
    assert (decision.method, decision.exact) == ("origin", True)


TWO = (holds("snapshot", 2, 33), holds("snapshot", 3, 38))


@pytest.mark.parametrize(
    ("policy", "lost", "held", "source", "why"),
    [
        ("checkfree", [2], (), "checkfree n1 n3", ""),
        ("checkfree+", [3], (), "checkfree n2 n4", ""),  # stage 3 is never swapped
        *(
            ("checkfree+", [stage], (), f"checkfree+ n{partner}", "")
            for stage, partner in ((1, 2), (2, 1), (4, 5), (5, 4))
        ),
        (
            *("checkfree+", [0], (holds("snapshot", 0, 39, "a"), holds("snapshot", 0, 38, "b"))),
            *("snapshot a", "1 step old"),
        ),
        ("snapshot", [2, 3], TWO, "snapshot holder", "7 steps old"),
        ("snapshot", [3, 2], TWO, "snapshot holder", "2 steps old"),
    ],
)
def test_what_a_policy_makes_a_lost_stage_of(policy, lost, held, source, why):
    decision = rebuild(lost[0], without(*lost, held=held), policy)
    assert [decision.method, *nodes(decision)] == source.split()
    assert not (decision.exact or decision.fallback or decision.same_weights)
    assert why in decision.reason


@pytest.mark.parametrize(
    ("policy", "lost", "held", "source", "why"),
    [
        ("checkfree", [2, 3], (), "interpolate n1 n4", "checkfree"),
        ("checkfree", [1], (), "interpolate n2", "checkfree"),
        ("checkfree", [3, 1, 2, 4], (), "interpolate n5", "checkfree"),
        ("redundant", [2], (holds("redundant", 2, 39),), "checkfree n1 n3", ""),
        ("checkfree", [1], (holds("save", 1, 30, "n9"),), "save n9", "its last save, 10 steps old"),
    ],
)
def test_what_the_policy_cannot_serve_comes_from_elsewhere_loudly(policy, lost, held, source, why):
    left = without(*lost, held=held)
    decision = rebuild(lost[0], left, policy)
    assert (decision.exact, decision.fallback) == (False, True)
    assert [decision.method, *nodes(decision)] == source.split()
    assert why in decision.reason


def test_a_twin_of_the_very_step_is_exact():
    assert rebuild(2, without(2, held=(holds("redundant", 2),)), "redundant").exact


def test_what_is_newer_than_the_newest_commit_or_of_another_lineage_is_no_source():
    for other in (holds("snapshot", 0, 41), holds("snapshot", 0, 40, lineage=1)):
        assert isinstance(decide(0, without(0, held=(other,)), "checkfree+"), Stop)


def test_checkpoints_roll_all_back_to_the_newest_step_that_every_stage_has():
    held = [holds("checkpoint", stage, 30) for stage in range(6)]
    held += [holds("checkpoint", stage, 40) for stage in range(5)]
    for kept, step in ((held, 30), (held[1:2], 0)):
        decision = decide(5, without(5, held=tuple(kept)), "checkpoint")
        assert isinstance(decision, RollBack)
        assert decision.step == step


def test_a_stage_guessed_just_now_is_no_source_while_there_is_another():
    assert nearest(3, without(3, untrained=[2])) == [1, 4]
    assert rebuild(3, without(3, untrained=[2]), "checkfree").method == "interpolate"
    assert nearest(3, without(1, 3, 4, 5, untrained=[2])) == [2]


def test_a_save_of_a_commit_that_never_happened_is_a_fallback_that_says_so():
    held = Held("save", Source("n9", 1, STEP), (7, 2))
    decision = rebuild(1, replace(without(1, held=(held,)), made=(7, 3)), "checkfree")
    assert (decision.method, decision.exact, decision.fallback) == ("save", False, True)
    assert "its last save, made by another commit" in decision.reason


def test_strict_stops_where_the_policy_cannot_serve():
    decision = decide(1, without(1), "checkfree", strict=True)
    assert isinstance(decision, Stop)
    assert "--strict" in decision.reason
    assert isinstance(decide(2, without(2), "checkfree", strict=True), Rebuild)


def test_in_the_first_steps_stage_0_begins_with_its_initial_weights():
    decision = rebuild(0, replace(without(0), step=24), "auto")
    assert (decision.method, nodes(decision)) == ("initial-weights", [])
    assert (decision.exact, decision.fallback) == (False, True)
    assert decision.reason.endswith("its initial weights, 24 steps old")
    assert isinstance(decide(0, replace(without(0), step=25), "auto"), Stop)
    assert isinstance(decide(0, replace(without(0), step=24), "auto", strict=True), Stop)


def test_stage_0_without_any_copy_waits_for_a_save():
    alone = [decide(0, replace(without(0), step=24), "auto")]
    assert await_saves(alone, {0: 20}, step=24, single=False) == [0]
    assert await_saves(alone, {}, step=24, single=False) == []


def test_stage_0_without_any_copy_stops_the_run():
    decision = decide(0, without(0), "checkfree")
    assert isinstance(decision, Stop)
    assert "stage 0 is lost" in decision.reason


def came(kind: str, stage: int, step: int = STEP, made: tuple[int, int] = (0, 0)) -> Held:
    """Return what reached a node of the stage before the last node that trained it was lost."""
    return Held(kind, Source("heir", stage, step), made)  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "old"), [(STEP, False), (STEP - 3, True)])
def test_weights_that_had_come_are_better_than_a_guess(step: int, old: bool) -> None:
    decision = rebuild(2, without(2, held=(came("weights", 2, step),)), "checkfree")
    assert (decision.method, nodes(decision), decision.fallback) == ("weights", ["heir"], False)
    assert not decision.exact, "Adam begins anew"
    assert decision.same_weights is not old
    assert ("3 steps old" in decision.reason) is old
    assert "without its moments" in decision.reason


def test_a_state_that_had_come_and_not_caught_up_is_better_than_a_guess() -> None:
    held = (came("memory", 2, STEP - 2), came("weights", 2, STEP - 2))
    decision = rebuild(2, without(2, held=held), "checkfree")
    assert (decision.method, decision.exact, decision.same_weights) == ("joiner", False, False)
    assert "2 steps old" in decision.reason
    newer = (came("memory", 2, STEP - 2), came("weights", 2, STEP - 1))
    assert rebuild(2, without(2, held=newer), "checkfree").method == "weights"


def test_a_stage_that_no_other_tells_of_goes_on_from_what_had_come() -> None:
    assert isinstance(decide(0, without(0), "checkfree"), Stop)
    decision = rebuild(0, without(0, held=(came("weights", 0, STEP - 1),)), "checkfree")
    assert (decision.method, decision.fallback) == ("weights", True)
    assert "no peer holds a whole snapshot" in decision.reason
    assert isinstance(decide(0, without(0, held=(came("weights", 0),)), "checkfree", True), Stop)


@pytest.mark.parametrize(
    ("policy", "kind", "step", "method"),
    [
        ("snapshot", "snapshot", STEP - 1, "snapshot"),
        ("snapshot", "snapshot", STEP - 2, "weights"),
        ("snapshot", "snapshot", STEP - 3, "weights"),
        ("redundant", "redundant", STEP, "redundant"),
        ("checkfree", "save", STEP - 1, "save"),
        ("snapshot", "save", STEP - 1, "save"),
        ("snapshot", "save", STEP - 2, "save"),
        ("snapshot", "save", STEP - 3, "weights"),
    ],
)
def test_what_had_come_is_taken_where_nothing_newer_is_kept(policy, kind, step, method):
    """A save of the same step is better, since it has moments, too."""
    held = (came("weights", 2, STEP - 2), holds(kind, 2, step))
    assert rebuild(2, without(2, held=held), policy).method == method


def test_a_policy_that_is_exact_takes_all_back_whatever_had_come() -> None:
    held = tuple(holds("checkpoint", stage, 30) for stage in range(6))
    assert isinstance(
        decide(2, without(2, held=(*held, came("weights", 2))), "checkpoint"), RollBack
    )


def test_weights_that_another_commit_made_or_of_before_the_run_went_back_are_none() -> None:
    left = replace(without(2, held=(came("weights", 2, made=(7, 2)),)), made=(7, 3))
    assert rebuild(2, left, "checkfree").method == "checkfree"
    assert rebuild(2, replace(left, made=(7, 2)), "checkfree").method == "weights"
    later = replace(left, lineage=1, made=(7, 2))
    assert rebuild(2, later, "checkfree").method == "checkfree"


def test_a_run_of_which_all_that_is_left_had_come_to_heirs_goes_on_from_that() -> None:
    weights = [came("weights", stage, 12, (2, 3)) for stage in range(3)]
    plan = resumed(weights, 2)
    assert (plan.step, plan.exact) == (12, False)
    assert "without its moments stage 0, 1, 2" in plan.reason
    whole = [*weights, came("memory", 1, 12, (2, 3))]
    plan = resumed(whole, 2)
    kinds = {of: [each.kind for each in held] for of, held in plan.held.items()}
    assert kinds == {0: ["weights"], 1: ["memory"], 2: ["weights"]}
    assert resume([], 2) is None
    assert resume(weights[:2], 2) is None, "of one stage there is nothing"
    exact = resumed([*whole, *saves({10}, {10}, {10})], 2)
    assert (exact.step, exact.exact) == (10, True)


@pytest.mark.parametrize(("late", "method"), [(RECENT, "save"), (RECENT + 1, "checkfree")])
def test_the_policys_guess_comes_before_a_save_of_long_ago(late: int, method: str) -> None:
    left = replace(without(2), step=100, held=[holds("save", 2, 100 - late)])
    assert rebuild(2, left, "checkfree").method == method
    alone = replace(left, survivors={0: ["n0"], 1: ["n1"]})
    assert rebuild(2, alone, "checkfree").method == "save", "the policy has no guess"
    for first in (replace(left, origin=["n1"]), replace(left, adapters=True)):
        assert rebuild(2, first, "checkfree").method == "save", "it began even longer ago"


kept = st.builds(
    holds,
    st.sampled_from(["snapshot", "save", "memory", "weights"]),
    st.integers(0, 5),
    st.integers(0, 200),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 1),
)


@given(
    st.sampled_from([*POLICIES]),
    st.sets(st.integers(0, 5), min_size=1),
    st.lists(kept, max_size=12),
    st.booleans(),
    st.booleans(),
)
@example("auto", {2}, [holds("snapshot", 2, 0, "a", 1), holds("save", 2, 150)], False, False)
def test_nothing_is_guessed_while_a_recent_state_is_kept_whoever_has_it(
    policy: str, lost: set[int], held: list[Held], adapters: bool, origin: bool
) -> None:
    """This holds for any stages lost together, also for stage 0 with the driver."""
    left = without(*lost, held=tuple(held), origin=["n"] if origin else ())
    left = replace(left, step=200, lineage=1, adapters=adapters)
    for stage in lost:
        decision = decide(stage, left, policy)
        ages = [
            200 - h.source.step
            for h in held
            if h.source.stage == stage and (h.source.lineage == 1 or h.kind == "save")
        ]
        if isinstance(decision, RollBack) or min(ages, default=RECENT + 1) > RECENT:
            continue
        assert isinstance(decision, Rebuild)
        assert decision.method not in INEXACT
        if not decision.exact:
            assert {source.stage for source in decision.sources} == {stage}


kinds = st.sampled_from(["snapshot", "redundant", "checkpoint", "save", "memory", "weights"])


@given(
    st.sampled_from([*POLICIES]),
    st.sets(st.integers(0, 5), min_size=1),
    st.lists(kept, max_size=12),
    st.dictionaries(st.integers(0, 5), st.integers(100, 200)),
    st.booleans(),
)
def test_a_stage_waits_for_a_save_only_instead_of_a_guess_and_alone_only_if_told(
    policy: str, lost: set[int], held: list[Held], saved: dict[int, int], single: bool
) -> None:
    left = replace(without(*lost, held=tuple(held)), step=200, lineage=1)
    decisions = [decide(stage, left, policy) for stage in range(6)]
    waiting = await_saves(decisions, saved, left.step, single)
    guessed = [d.stage for d in decisions if isinstance(d, Rebuild) and d.method in INEXACT]
    for stage in guessed:
        recent = 200 - saved.get(stage, 0) <= RECENT
        assert (stage in waiting) == (recent and (single or len(guessed) > 1))
        back = holds("save", stage, saved.get(stage, 0), lineage=1)
        better = decide(stage, replace(left, held=(*held, back)), policy)
        assert isinstance(better, Rebuild)
        assert better.method == "save" or not recent
    assert {*waiting} <= {*guessed}


@given(st.integers(4, 9), st.sampled_from([*POLICIES]), st.booleans(), st.data())
def test_total_deterministic_and_never_a_source_that_is_gone_or_staler_than_it_says(
    stages, policy, strict, data
):
    lost = data.draw(st.sets(st.integers(0, stages)))
    held = data.draw(
        st.lists(
            st.builds(holds, kinds, st.integers(0, stages), st.integers(0, 50), st.just("h")),
            max_size=8,
        )
    )
    untrained = data.draw(st.sets(st.integers(1, stages)))
    left = without(*lost, stages=stages, held=tuple(held), untrained=untrained - lost)
    stage = data.draw(st.integers(0, stages))
    decision = decide(stage, left, policy, strict)
    assert decision == decide(stage, left, policy, strict)
    assert decision.reason
    if stage not in lost:
        assert isinstance(decision, Rebuild)
        assert decision.method == "replica"
    if isinstance(decision, Rebuild):
        assert decision.sources
        assert not (strict and decision.fallback)
        for source in decision.sources:
            alive = source == Source(f"n{source.stage}", source.stage, STEP)
            assert (alive and source.stage not in lost) or source in [h.source for h in held]
            assert source.step <= STEP
        arrived = [h.source for h in held if h.kind in ("memory", "weights")]
        steps = [s.step for s in arrived if s.stage == stage and s.step <= STEP]
        if steps and stage in lost:
            (source,) = {(s.stage, s.step) for s in decision.sources}
            assert source >= (stage, max(steps)), "it had come"
        if decision.exact:
            assert all(source.step == STEP for source in decision.sources)
            assert all(source.stage == stage for source in decision.sources)
    else:
        assert stage in lost


def saves(*steps: set[int]) -> list[Held]:
    return [holds("save", stage, step) for stage, of in enumerate(steps) for step in of]


def test_a_run_goes_on_from_the_newest_step_that_every_stage_has_saved():
    plan = resumed(saves({10, 20}, {20, 30}, {10, 20, 30}), 2)
    assert (plan.step, plan.exact, set(plan.held)) == (20, True, {0, 1, 2})


def test_without_a_common_step_the_newest_mix_is_taken_loudly():
    plan = resumed(saves({10}, {20, 30}, set()), 2)
    assert (plan.step, plan.exact) == (30, False)
    assert {of: held[0].source.step for of, held in plan.held.items()} == {0: 10, 1: 30}
    assert "nothing of stage 2" in plan.reason


def test_a_later_lineage_wins_over_a_later_step():
    old, new = (
        [holds("save", s, step, lineage=n) for s in range(2)] for step, n in ((40, 0), (30, 1))
    )
    plan = resumed([*old, *new], 1)
    assert (plan.lineage, plan.step) == (1, 30)


def test_files_of_one_step_made_by_different_commits_are_no_common_step():
    def files(step: int, *made: tuple[int, int]) -> list[Held]:
        return [Held("save", Source(f"n{s}", s, step), by) for s, by in enumerate(made)]

    held = [*files(10, (1, 3), (1, 3)), *files(20, (2, 5), (3, 1))]
    plan = resumed(held, 1)
    assert (plan.step, plan.exact) == (10, True)
    plan = resumed([*held, *files(20, (3, 1), (3, 1))], 1)
    assert (plan.step, plan.exact) == (20, True)


def test_of_different_files_of_one_step_and_commit_those_count_that_most_have():
    def of_1(node: str, digest: bytes) -> Held:
        return Held("save", Source(node, 1, 10), (1, 3), digest)

    def sources_of_1(plan: Resume) -> list[str]:
        return [held.source.node for held in plan.held[1]]

    first = [Held("save", Source("a", 0, 10), (1, 3), b"0")]
    guessed = [of_1(node, b"guessed") for node in "bd"]
    assert sources_of_1(resumed([*first, of_1("c", b"true"), *guessed], 1)) == ["b", "d"]
    assert sources_of_1(resumed([*first, of_1("c", b"b"), of_1("b", b"c")], 1)) == ["c"]


def test_what_is_in_memory_counts_as_a_save_does_and_is_read_before_it():
    def at(kind: str, stage: int, step: int) -> Held:
        return Held(kind, Source(f"n{stage}", stage, step), (2, step))

    files = [at("save", stage, 20) for stage in range(3)]
    in_memory = [at("memory", stage, 23) for stage in range(3)]
    plan = resumed([*files, at("save", 0, 23), *in_memory], 2)
    assert (plan.step, plan.exact) == (23, True)
    assert [[each.kind for each in held] for held in plan.held.values()] == [["memory"]] * 3
    plan = resumed([*files, *in_memory[:2]], 2)
    assert (plan.step, plan.exact) == (20, True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "holders"), [("memory", ["a", "b"]), ("save", ["n"])])
def test_who_still_has_the_very_step_goes_on_exactly_even_under_a_strict_policy(
    policy, kind, holders
):
    held = [Held(kind, Source(node, 0, STEP, 0), (7, 2)) for node in holders]
    left = Left(4, STEP, {s: [f"n{s}"] for s in range(1, 5)}, 1, held, made=(7, 2))
    decision = decide(0, left, policy, strict=True)
    assert isinstance(decision, Rebuild)
    assert (decision.method, nodes(decision), decision.exact) == (kind, holders, True)
    other = decide(0, replace(left, made=(7, 3)), policy)
    assert not isinstance(other, Rebuild) or not other.exact
