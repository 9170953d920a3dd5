from hypothesis import given
from hypothesis import strategies as st

from recovery.decide import Rebuild, Stop, decide


def all_alive(stages: int, without: set[int] = frozenset()) -> dict[int, list[str]]:
    return {s: [f"n{s}"] for s in range(stages + 1) if s not in without}


def test_a_stage_that_lives_on_is_copied_from_all_its_nodes():
    decision = decide(2, {1: ["a"], 2: ["c", "b"], 3: ["d"]}, 4, "checkfree")
    assert isinstance(decision, Rebuild)
    assert (decision.method, decision.sources) == ("replica", (("b", 2), ("c", 2)))
    assert decision.exact


def test_an_interior_stage_is_averaged_from_its_neighbours():
    decision = decide(2, all_alive(4, {2}), 4, "checkfree")
    assert isinstance(decision, Rebuild)
    assert (decision.method, decision.sources) == ("checkfree", (("n1", 1), ("n3", 3)))
    assert not decision.exact


def test_stage_0_and_the_end_stages_stop_the_run():
    for stage in (0, 1, 4):
        decision = decide(stage, all_alive(4, {stage}), 4, "checkfree")
        assert isinstance(decision, Stop)
        assert f"stage {stage} is lost" in decision.reason


def test_two_in_a_row_stop_the_run_and_both_are_named():
    decision = decide(2, all_alive(4, {2, 3}), 4, "checkfree")
    assert isinstance(decision, Stop)
    assert "stages 2, 3" in decision.reason


@given(st.integers(1, 12), st.data())
def test_total_deterministic_and_never_a_source_that_is_gone(stages, data):
    lost = data.draw(st.sets(st.integers(0, stages)))
    survivors = all_alive(stages, lost)
    stage = data.draw(st.integers(0, stages))
    decision = decide(stage, survivors, stages, "checkfree")
    assert decision == decide(stage, survivors, stages, "checkfree")
    assert decision.reason
    if isinstance(decision, Rebuild):
        assert decision.sources
        assert all(node in survivors[of] for node, of in decision.sources)
    else:
        assert stage in lost
