"""Which stages of a finished run are in memory only."""

from __future__ import annotations

from planaria.bootstrap.registry_pb2 import Description, MemberDescription, Report, SeatReport
from planaria.node.report.unsaved import stage_names, unsaved_stages


def described(*seats: tuple[int, int]) -> Description:
    """Describe a swarm with one node for each (stage, newest saved step)."""
    reports = [Report(seats=[SeatReport(stage=stage, saved=step)]) for stage, step in seats]
    return Description(members=[MemberDescription(report=report) for report in reports])


def test_one_node_of_a_stage_that_has_saved_its_last_step_is_enough():
    swarm = described((0, 8), (1, 4), (1, 8), (2, 4), (2, 0))
    assert unsaved_stages(swarm, range(4), 8) == [2, 3]
    assert unsaved_stages(swarm, [1], 8) == []


def test_what_nobody_has_told_of_is_not_taken_for_saved():
    assert unsaved_stages(None, range(2), 8) == [0, 1]


def test_stages_are_named_in_a_sentence():
    assert [stage_names([2]), stage_names([0, 2]), stage_names([0, 2, 3])] == [
        "stage 2",
        "stages 0 and 2",
        "stages 0, 2 and 3",
    ]
