"""Whether the registry hears its members, and what follows if it hears none of them.

Its own network may be down, while the members train. So it issues no view then, and none within
the grace after it hears members again, or after a restart. If only a newcomer is heard, registry
and newcomer dial the members. If none answers, all are evicted; if one does, a second run must not
begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from planaria.bootstrap.effects import Dial, Refused
from planaria.bootstrap.history import ViewHistory
from planaria.bootstrap.leases import Leases
from planaria.bootstrap.member_table import Members, NodeRecord
from planaria.bootstrap.neighbours import place_of
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest, Member

MOST_DIALLED = 100  # silent members that are dialled; of more, every n-th


@dataclass(eq=False)
class _Question:
    """A check for any live member, made when only a newcomer is heard."""

    number: int
    asked: float
    dialled: list[Member]
    open: set[str]  # members that the registry still dials
    answered: dict[str, str] = field(default_factory=dict)  # member that answered -> its dialler


class Isolation:
    def __init__(
        self, members: Members, leases: Leases, history: ViewHistory, numbers: Iterator[int]
    ) -> None:
        """`numbers`: of dials."""
        self._members, self._leases, self._history = members, leases, history
        self._rules, self._numbers = members.rules, numbers
        self.quiet_until = -math.inf  # no new view before
        self.isolated = False  # whether no member can be heard
        self._question: _Question | None = None

    def allows_views(self, now: float) -> bool:
        """Whether views may be issued at `now`."""
        if now < self.quiet_until:
            return False
        if self._members.hears_nobody(now):
            self.isolated = True
            return False
        self._question = None
        if self.isolated:
            self.isolated = False
            self.quiet_until = now + self._rules.grace
            grace = f"{self._rules.grace:g} s"
            self._history.note(f"members are heard again; no new view for {grace}")
            return False
        return True

    def paused(self, seconds: float, now: float) -> None:
        """Processes a pause of the registry. A long one counts as a restart: nodes have
        disconnected, and need the grace to return."""
        self._question = None
        if seconds > self._rules.lease / 2:
            self.quiet_until = max(self.quiet_until, now + self._rules.grace)

    def dialled(self, question: int, name: str, alive: bool | None) -> None:
        if self._question is not None and self._question.number == question:
            self._question.open.discard(name)
            if alive:
                self._question.answered[name] = "the registry"

    def ask(
        self, request: JoinRequest, others: list[NodeRecord], now: float
    ) -> tuple[JoinReply, list[Dial]]:
        """What a newcomer has to dial before it may join, and what the registry dials. Raises
        Refused once the newcomer has dialled; if the members are gone, their eviction is due."""
        question, seconds = self._question, self._rules.dial_timeout
        grace = self._rules.grace if question and not question.answered else 0.0
        if question is None or now >= question.asked + seconds + grace:
            addressed = [node.member for node in others if node.member.address]
            dialled = addressed[:: math.ceil(len(addressed) / MOST_DIALLED) or 1]
            number, unanswered = next(self._numbers), {member.node for member in dialled}
            question = self._question = _Question(number, now, dialled, unanswered)
            self._history.note(
                f"{request.node} asks to join, and no member is heard: dialling {len(dialled)}"
            )
            return self._ask_to_dial(question), [
                Dial(number, member.node, member.address, seconds) for member in dialled
            ]
        if request.question != question.number:
            return self._ask_to_dial(question), []
        question.answered |= dict.fromkeys(request.answered, request.node)
        alive = [node.member for node in others if node.name in question.answered]
        if alive:
            names = ", ".join(f"{m.node} ({place_of(m)}, {m.address})" for m in alive)
            self._history.note(
                f"{request.node} has to wait: these nodes answer a dial, but are not heard: {names}"
            )
            raise Refused(
                "ABORTED",
                f"the run continues without this registry: {names} answers a dial, but is not "
                "connected to the registry. No node can join until it is; check that it can reach "
                "the registry's address, or end it",
            )
        hidden = [node.name for node in others if not node.member.address]
        wait = question.asked + self._rules.grace - now
        if hidden and wait > 0:
            raise Refused(
                "UNAVAILABLE",
                f"no member is heard, and {', '.join(hidden)} can't be dialled; "
                f"join again in {wait:.1f} s, when they have had time to reconnect",
            )
        if question.open:
            raise Refused("UNAVAILABLE", "no member is heard, and some are being dialled")
        self._give_up(request)
        raise Refused("UNAVAILABLE", "all members are gone; join again")

    def _ask_to_dial(self, question: _Question) -> JoinReply:
        """The reply that asks a newcomer to dial silent members, and to join again."""
        return JoinReply(
            run=self._rules.run,
            reason="no member is heard: dial them, and join again",
            question=question.number,
            unheard=question.dialled,
            dial_seconds=self._rules.dial_timeout,
        )

    def _give_up(self, request: JoinRequest) -> None:
        """Makes the eviction of all members due: nobody hears or reaches any of them."""
        for node in self._members:
            reason = f"not heard, and no answer to dials by the registry and {request.node}"
            if not node.member.address:
                reason = f"not heard, and not reconnected within {self._rules.grace:g} s"
            elif node.member.address == request.address:
                reason = f"restarted: {request.node} joined from {request.address}"
            self._leases.doom(node, reason)
        self._question, self.isolated = None, False
