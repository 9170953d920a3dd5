"""Stages of a finished run that exist in memory only."""

from __future__ import annotations

from collections.abc import Iterable

from planaria.bootstrap.registry_pb2 import Description


def unsaved_stages(description: Description | None, stages: Iterable[int], step: int) -> list[int]:
    """The stages whose state of `step` no node reports as saved or exported; `description` None:
    all."""
    members = description.members if description is not None else ()
    seats = [seat for member in members for seat in member.report.seats]
    safe = {seat.stage for seat in seats if seat.saved >= step}
    return [stage for stage in stages if stage not in safe]


def stage_names(stages: Iterable[int]) -> str:
    """Names of stages: `stage 2`, `stages 0, 3 and 4`."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
