"""The registry's parameters, and checks of restored views and ordered changes against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import Change, View
from planaria.bootstrap.step_time import Load
from planaria.recovery.policy import POLICIES, Policy

PROTOCOL = 1


@dataclass(frozen=True)
class MembershipRules:
    """The registry's parameters, of a valid run file (node/launch/resolve.py). Times in seconds."""

    run: str
    stages: int  # body stages, L; stages are numbered 0..L
    replicas: int = 1  # nodes per stage to wait for before the first driver is named
    max_replicas: int = 64  # useful nodes per stage; more become standbys
    start_grace: float = 20.0  # maximum wait for `replicas`, once each stage has a node
    lease: float = 5.0
    probe_timeout: float = 3.0
    reconnect: float = 0.4  # for a node that lost its stream and refuses connections to return
    dial_timeout: float = 4.0  # for a silent member to answer a dial
    corroboration_time: float = 1.0  # for corroboration of the driver's accusation
    restart_grace: float | None = None  # lease + 1
    steps: int = 0  # of the run; 0: unknown
    data: str = ""  # content hash that stage-0 nodes must have; empty: not checked
    policy: Policy = POLICIES["checkfree"]
    load: Load | None = None  # None: not known, so placements are not compared
    # For lost stages' last holders that have saved them, where several stages would be guessed. A
    # killed process or restarted machine is back by then, and such guesses cost most.
    wait_for_saves: float = 60.0
    joins_per_second: float = 200.0
    max_nodes: int = 10_000
    max_per_block: int = 0  # nodes per address block; 0: unlimited
    allowed: frozenset[str] | None = None  # instances that may be members; None: all

    @property
    def grace(self) -> float:
        """Seconds without new views after a restart: a dead member's fresh lease expires within."""
        return self.lease + 1.0 if self.restart_grace is None else self.restart_grace

    def allows(self, instance: str) -> bool:
        """Whether the instance may be a member."""
        return self.allowed is None or instance in self.allowed

    def serves_stage_0(self, owner: bool, data: str) -> bool:
        """Whether a node may serve stage 0. `owner`: the run's owner started it; `data`: content
        hash of its data."""
        return owner and (not self.data or data == self.data)


class Resettled(NamedTuple):
    """A run after changes of its settings."""

    run_file: str
    rules: MembershipRules
    number: int  # of the newest change
    described: Sequence[str]  # what the changes change, in sentences


Resettle = Callable[[str, Sequence[Change]], Resettled]
"""Applies to a run file those changes that it lacks and that aren't pending. Raises ValueError if
they can't be."""


def numbered(change: Change, run_file: str, resettle: Resettle | None, committed: int) -> list[str]:
    """Numbers an ordered change of settings; returns what it changes. `committed`: the run's step,
    after which a change holds that names none. Raises Refused."""
    if resettle is None:
        raise Refused("FAILED_PRECONDITION", "this registry can't change a run's settings")
    change.number = resettle(run_file, ()).number + 1
    step = change.step or committed
    try:
        held = Change(number=change.number, settings=change.settings, step=step)
        _, rules, _, described = resettle(run_file, [held])
    except ValueError as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from error
    if rules.steps and rules.steps <= step:
        reason = f"steps = {rules.steps}: this is to hold after step {step}; choose more"
        raise Refused("INVALID_ARGUMENT", reason)
    if change.undone:
        described = [f"  back to step {step}", *described]
    elif not described:
        raise Refused("INVALID_ARGUMENT", "the run has these settings already")
    begins = f"once step {step} is committed, and each stage has saved it:"
    saves = "once each stage has saved its step:"
    return [begins if change.step and not change.undone else saves, *described]


def problem_with(view: View, rules: MembershipRules) -> str:
    """Why a view that the run's key has signed can't be one of these rules; empty: it can."""
    if view.run != rules.run:
        return f"it is of run {view.run}, not {rules.run}"
    if any(stage > rules.stages for member in view.members for stage in stages_of(member)):
        return f"it has stages above {rules.stages}"
    return ""
