"""Joins of single nodes, for tests of the membership machine."""

from planaria.bootstrap.effects import Effect, Refused
from planaria.bootstrap.joining import JoinAttempt
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest


def join(
    machine: Membership, request: JoinRequest, now: float, block: str = "", owner: bool = True
) -> tuple[JoinReply, list[Effect]]:
    """The reply with its view, and effects. Raises Refused."""
    (answer,), effects = machine.join([JoinAttempt(request, block, now, owner)], now)
    if isinstance(answer, Refused):
        raise answer
    if answer.HasField("view"):
        answer.view.CopyFrom(machine.view)
    return answer, effects
