"""Which members hold up an attempt, by their own accounts, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.node.driver.hangs import (
    ASK,
    HEIR,
    LAPSE,
    SLOW,
    STILL,
    HangDetector,
    StragglerDetector,
    slow_and_alone,
)
from planaria.node.wire import stage_pb2 as pb

BEGIN = pb.Begin(
    step=1,
    members=[pb.Place(node=n, stage=s) for n, s in [("a", 0), ("b", 1), ("c", 1), ("d", 2)]],
    plan=[
        pb.Microbatch(id=0, source="a", order=[1, 2], places=[1, 3]),
        pb.Microbatch(id=1, source="a", order=[1, 2], places=[2, 3]),
        pb.Microbatch(id=2, source="a", order=[1, 2], places=[1, 3]),
    ],
)


def done(*passes: tuple[int, int, bool]) -> list[pb.Pass]:
    return [pb.Pass(microbatch=m, position=p, backward=b) for m, p, b in passes]


class Asked:
    """Members that answer inquiries regularly; `computed` counts their passes."""

    def __init__(self) -> None:
        self.inquest, self.now = StragglerDetector(), 100.0
        self.computed = dict.fromkeys("abcd", 0)

    def answers(self, seconds: float, busy: str, stuck: str = "") -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += ASK
            for node in self.computed:
                self.computed[node] += node in busy and node not in stuck
                account = pb.Account(computed=self.computed[node], computing=node in busy)
                self.inquest.heard(node, account, self.now)


def test_who_computes_nothing_though_it_has_something_to_stands_still() -> None:
    asked = Asked()
    asked.answers(3.0, busy="abc", stuck="c")
    still = asked.inquest.standing_still()
    assert still.keys() == {"a", "b", "c"}
    assert still["a"] == still["b"] == 0.0
    assert still["c"] >= 3.0 - ASK
    asked.answers(2 * ASK, busy="abc")
    assert asked.inquest.standing_still()["c"] == 0.0


@given(st.floats(LAPSE, 1e5))
def test_a_driver_that_was_held_up_itself_accuses_nobody_for_that_time(seconds: float) -> None:
    asked = Asked()
    asked.answers(1.0, busy="c", stuck="c")
    asked.now += seconds
    asked.answers(ASK, busy="c", stuck="c")
    assert asked.inquest.standing_still()["c"] == 0.0


def test_who_works_when_its_replicas_have_nothing_to_do_is_slow_and_told_once() -> None:
    asked = Asked()
    asked.answers(2.0, busy="bc")
    assert asked.inquest.slow(BEGIN) == []
    asked.answers(2.0, busy="abd")
    assert asked.inquest.slow(BEGIN) == ["b"], "a and d have no replicas"
    assert asked.inquest.slow(BEGIN) == []


def test_it_is_known_which_visit_of_which_microbatch_is_awaited() -> None:
    inquest = StragglerDetector()
    inquest.heard("a", pb.Account(done=done((0, 0, False), (1, 0, False))), 1.0)
    inquest.heard("c", pb.Account(done=done((1, 1, False))), 1.0)
    inquest.heard("d", pb.Account(done=done((1, 2, False))), 1.0)
    awaited = [str(visit) for visit in inquest.awaited(BEGIN, home=())]
    assert awaited == [
        "microbatch 0, forward at b of stage 1",
        "microbatch 1, forward at a of stage 0",
    ], "2 is held back by its source"
    inquest.heard("a", pb.Account(done=done((1, 3, False))), 2.0)
    assert str(inquest.awaited(BEGIN, home=(0,))[0]) == "microbatch 1, backward at d of stage 2"


def test_what_a_source_holds_back_is_awaited_when_nothing_else_is() -> None:
    (visit,) = StragglerDetector().awaited(BEGIN, home=(0, 1))
    assert (visit.microbatch, visit.node, visit.backward) == (2, "a", False)


def test_who_never_trained_has_more_time() -> None:
    hanging = HangDetector(progress=120.0)
    assert hanging.patience("a") == 60.0
    hanging.committed(0.2, ["a"])
    assert hanging.patience("a") == STILL
    assert hanging.patience("b") == 60.0
    hanging.committed(8.0, ["a"])
    hanging.committed(8.0, ["a"])
    assert hanging.patience("a") == 16.0


def test_a_replica_that_hangs_goes_at_once_the_last_of_its_stage_after_a_wait() -> None:
    hanging = HangDetector(progress=20.0)
    stages = {"a": 0, "b": 1, "c": 1, "d": 2}
    hanging.hear("b", "stuck", 100.0)
    assert hanging.to_replace(stages, "abcd", 100.0) == "b"
    assert hanging.to_replace(stages, "abd", 105.0) == "", "c has not its state yet"
    assert hanging.to_replace(stages, "abd", 110.0) == "b"
    assert hanging.heir_has_time("b", 110.0)
    assert not hanging.heir_has_time("b", 110.0 + HEIR)
    hanging.hear("b", "", 111.0)
    assert hanging.to_replace(stages, "abcd", 200.0) == ""


def test_a_node_that_hangs_is_needed_as_long_as_one_of_its_seats_is() -> None:
    hanging = HangDetector(progress=20.0)
    stages = {"a/0": 0, "b/1": 1, "b/2": 2, "c/1": 1, "d/2": 2}
    hanging.hear("b/1", "stuck", 100.0)
    hanging.hear("b/2", "stuck", 100.0)
    assert hanging.to_replace(stages, ["a/0", "b/1", "b/2", "c/1"], 100.0) == ""
    assert hanging.to_replace(stages, stages, 100.0) == "b/1"


def test_the_only_node_of_a_stage_is_named_when_it_is_slow() -> None:
    stages = {"a": 0, "b": 1, "c": 1, "d": 2}
    seconds = {"a": 0.1, "b": SLOW, "c": 0.1, "d": 0.1}
    assert slow_and_alone(stages, seconds) == [], "b has a replica"
    (warning,) = slow_and_alone(stages, seconds | {"b": 0.1, "d": SLOW})
    assert warning.startswith("d, alone at stage 2, is slow: 10 s a microbatch")
