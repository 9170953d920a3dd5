"""Phases of a driver: an event goes in, with `now`; effects and the next phase come out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT
from planaria.node.report.events import NodeLost, RebuildFailed
from planaria.node.transaction.effects import NEVER, Ballot, Effect
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.driver.attempt_state import AttemptState
    from planaria.node.driver.driver import Driver


class DriverPhase(enum.Enum):
    INACTIVE = "not the driver"
    GATHERING = "gathering"
    SYNCING = "syncing"
    RUNNING = "running"
    REDUCING = "reducing"
    WAITING = "waiting"
    PAUSING = "pausing"
    HALTED = "halted"


class Turn(NamedTuple):
    """What an event at the driver leads to: effects to carry out, in order, and the next phase."""

    effects: list[Effect]
    phase: Phase

    def after(self, effects: Sequence[Effect]) -> Turn:
        """This turn, with `effects` before its own."""
        return Turn([*effects, *self.effects], self.phase)


class Phase:
    """One activity of a driver; this base class ignores whatever happens."""

    _kind = DriverPhase.INACTIVE
    state: AttemptState | None = None  # only while a step is attempted

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def kind(self) -> DriverPhase:
        return self._kind

    @property
    def masked(self) -> frozenset[str]:
        """Lost members without which an attempt goes on."""
        return self.state.masked if self.state is not None else frozenset()

    @property
    def lost(self) -> frozenset[str]:
        """The masked members, and the lost one whose seat is to be taken over."""
        return self.state.lost if self.state is not None else frozenset()

    @property
    def seat(self) -> str:
        """The seat that takes over from a lost one, while it has no part in the attempt."""
        takeover = self.state.takeover if self.state is not None else None
        return takeover.seat if takeover is not None else ""

    def stays(self, effects: Sequence[Effect] = ()) -> Turn:
        return Turn([*effects], self)

    def explain(self) -> str:
        return self.kind.value

    # --- events

    def received(self, peer: str, message: pb.Message, now: float) -> Turn:
        """Handles a valid message of a member."""
        driver, joiner = self.driver, self.driver.joining.joiners.get(peer)
        match message.WhichOneof("body"):
            case "synced" if joiner is not None:
                joiner.caught_up = message.synced
            case "failed" if joiner is not None:  # it may not have received this ballot yet
                effects = driver.accuse(peer, message.failed)
                return self.give_up_following(peer, message.failed.reason, now).after(effects)
            case "account":
                driver.account(peer, message.account, now)
            case "cut" if Ballot.of(message.ballot) == NEVER:
                return self.stays(self._accused_apart(peer, message.cut))
        return self.stays()

    def _accused_apart(self, peer: str, cut: pb.Cut) -> list[Effect]:
        """Accuses a node whose data, of no attempt, `peer` can't use and had from others."""
        driver = self.driver
        if cut.node not in driver.members or cut.cause == SILENT:
            return []
        failed = pb.Failed(reason=cut.reason, accused=[cut.node], cause=cut.cause)
        if driver.faults.is_known(peer, cut.node, driver.members):
            return []
        return driver.accuse(peer, failed, harmed=False)

    def invalid(self, peer: str, why: str, now: float) -> Turn:
        """Treats a member's invalid message as its failure, and accuses it. An invalid answer to a
        query counts as none."""
        failed = pb.Failed(reason=why, accused=[peer], cause=NUMBERS)
        if peer in self.driver.joining.joiners:
            effects = self.driver.accuse(peer, failed)
            return self.give_up_following(peer, why, now).after(effects)
        return self.accused_by(peer, failed, now)

    def accused_by(self, peer: str, failed: pb.Failed, now: float) -> Turn:
        """Handles the accusation of nodes by a member, `peer`."""
        return self.stays(self.driver.accuse(peer, failed))

    def viewed(self, view: registry.View, now: float) -> Turn | None:
        """Handles a newer view. None: the driver must adopt it now."""
        return None

    def link_lost(self, lost: NodeLost, why: str, now: float) -> Turn:
        """Handles the loss of the link to a member: messages may be lost with it."""
        wrong = self.driver.charge_holdup(lost.node, why)
        return self.gather(why, now).after([lost, *wrong])

    def tick(self, now: float) -> Turn:
        """Does what has become due in this phase."""
        return self.stays()

    # --- ends

    def gather(self, why: str, now: float) -> Turn:
        """Ends this phase: the driver queries all members anew."""
        return self.driver.gather(why, now)

    def give_up_following(self, peer: str, reason: str, now: float) -> Turn:
        """Gives up a joiner's try; it gets a new `Sync` at the next step boundary."""
        if not self.driver.joining.give_up(peer):
            return self.stays()
        why = f"{peer} can't follow: {reason}"
        return self.unfollowed(peer, why, now).after([RebuildFailed(node=peer, reason=why)])

    def unfollowed(self, peer: str, why: str, now: float) -> Turn:
        """What the phase does after a joiner's try to follow is given up."""
        return self.stays()


class Resting(Phase):
    """The phase of a driver that asks nothing of any member: it waits, pauses, or is inactive."""

    def __init__(
        self, driver: Driver, kind: DriverPhase, why: str = "", again: bool = False
    ) -> None:
        """`again`: whether all members are queried anew after a pause."""
        super().__init__(driver)
        self._kind, self.why, self._again = kind, why, again

    def explain(self) -> str:
        return self.why or self.kind.value

    def link_lost(self, lost: NodeLost, why: str, now: float) -> Turn:
        if self.kind is DriverPhase.PAUSING:
            return super().link_lost(lost, why, now)
        return self.gather(why, now).after([lost])  # nobody is held up

    def tick(self, now: float) -> Turn:
        driver = self.driver
        if self.kind is not DriverPhase.PAUSING or now < driver.pause_until:
            return self.stays()
        again = self.why if self._again or driver.hanging.why else driver.unrecorded
        return self.gather(again, now) if again else driver.begin_next(now)

    def unfollowed(self, peer: str, why: str, now: float) -> Turn:
        waits = self.kind in (DriverPhase.PAUSING, DriverPhase.WAITING)
        return self.gather(why, now) if waits else self.stays()
