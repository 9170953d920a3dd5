"""The invariants of an agent between any two events."""

from __future__ import annotations

from planaria.node.agent import Agent
from planaria.node.transaction.member import MemberPhase
from planaria.node.wire.budget import ITEM

VOTING = MemberPhase.RUNNING, MemberPhase.REDUCING


def validate(seat: Agent) -> None:
    """Checks the invariants of an agent between two events. Raises AssertionError."""
    member, attempt = seat.member, seat.attempt
    voting = member.phase in VOTING
    if voting and member.following is None:
        assert attempt is not None and not attempt.over, f"{member.phase}, but no attempt"
        assert attempt.began == member.began, f"{attempt.began} began, not {member.began}"
        assert attempt.ballot == member.attempt, f"at {attempt.ballot}, not {member.attempt}"
    if seat.reducing.runs:
        assert voting, f"reduces {seat.reducing.ballot} in {member.phase}"
    held = seat.held
    if held.used or held.frames:
        assert held.used == sum(frame.size + ITEM for _, frame in held.frames)
