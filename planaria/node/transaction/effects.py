"""What the machines of the step transaction ask the daemon to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from planaria.bootstrap.registry_pb2 import SILENT, Cause, Proof
from planaria.node.report.events import Event
from planaria.node.wire import stage_pb2 as pb


class Ballot(NamedTuple):
    """One try at one thing in one view. Ordered; older ones have no effect."""

    view: int
    attempt: int

    @staticmethod
    def of(message: pb.Ballot) -> Ballot:
        return Ballot(message.view, message.attempt)

    def message(self) -> pb.Ballot:
        return pb.Ballot(view=self.view, attempt=self.attempt)

    def next(self) -> Ballot:
        return Ballot(self.view, self.attempt + 1)

    def says(self, **body: Any) -> pb.Message:
        """A message under this ballot. `body`: one field of `Message`."""
        return pb.Message(ballot=self.message(), **body)

    def send(self, to: str, **body: Any) -> Send:
        return Send(to, self.says(**body))

    def send_all(self, to: Iterable[str], **body: Any) -> list[Send]:
        """The same to each of these."""
        said = self.says(**body)
        return [Send.copy(node, said) for node in to]


NEVER = Ballot(0, 0)


@dataclass(frozen=True)
class Send:
    """A control message on the link to `to`, which may be this node itself."""

    to: str
    message: pb.Message

    @classmethod
    def copy(cls, to: str, said: pb.Message) -> Send:
        """What others are told, too, in a message of its own: whom it is for will be in it."""
        message = pb.Message()
        message.CopyFrom(said)
        return cls(to, message)


@dataclass(frozen=True)
class StartAttempt:
    """Zero the gradient, forget older work, inject the microbatches that start here; once the
    gradient is of all that come here, average it with the stage's other replicas.
    `Member.reduced` gets the result."""

    ballot: Ballot
    begin: pb.Begin


@dataclass(frozen=True)
class GoOn:
    """The attempt goes on by a new plan, without nodes that were lost; what was averaged is so no
    more."""

    ballot: Ballot
    begin: pb.Begin


@dataclass(frozen=True)
class DropAttempt:
    """The attempt leaves no trace: zero the gradient, forget the work."""

    ballot: Ballot


@dataclass(frozen=True)
class AllHome:
    """All microbatches of the attempt are: who waits for a gradient does so no longer than it may
    take."""

    ballot: Ballot


@dataclass(frozen=True)
class Apply:
    """Apply the optimizer as the commit says; `Member.applied` gets the digest."""

    commit: pb.Commit


@dataclass(frozen=True)
class Note:
    """The commit is applied here, and now its records are known, too."""

    commit: pb.Commit


@dataclass(frozen=True)
class Adopt:
    """Take the gradient that a replica has sent of that attempt; `Member.reduced` gets the norm."""

    ballot: Ballot


@dataclass(frozen=True)
class Fetch:
    """Get the state from peers; then `Member.arrived`, or `Member.failed`, is told."""

    ballot: Ballot
    sync: pb.Sync


@dataclass(frozen=True)
class Suspect:
    """Tell the registry that this node was waited for in vain or, for any cause but SILENT, that it
    has done wrong and has to go, though it lives. `why` is the evidence, `proof` what it has signed
    and can't have, so that nobody has to believe the accuser."""

    node: str
    why: str
    cause: Cause = SILENT
    proof: Proof | None = None


@dataclass(frozen=True)
class Rejoin:
    """This node is a member no longer: it drops everything and joins again as a new one."""

    reason: str


@dataclass(frozen=True)
class Halted:
    """The run is over, or can't go on; the weights are kept."""

    halt: pb.Halt


Effect = (
    Send
    | StartAttempt
    | GoOn
    | DropAttempt
    | AllHome
    | Apply
    | Note
    | Adopt
    | Fetch
    | Suspect
    | Rejoin
    | Halted
    | Event  # to be written to the event log
)
