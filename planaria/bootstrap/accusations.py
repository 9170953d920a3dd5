"""What members say of each other for cause, and when it is believed.

Nobody's word alone evicts a node that answers. It takes what the accused has signed itself; or two,
of whom one may be the accused, or the driver where nobody else could drive. Where the driver alone
says so, somebody else drives and sees for itself: so an accusation that nobody shares costs a
driver its place, and no one else anything. Pure, as membership.py is: `now` is passed in, and what
is decided is returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from planaria.bootstrap.failure_domains import FailureDomain
from planaria.bootstrap.identity import is_message_signed
from planaria.bootstrap.registry_pb2 import HANG, SILENT, Cause, Proof, Suspicion
from planaria.bootstrap.spelling import readable
from planaria.bootstrap.votes import is_without_vote

WHY_LENGTH = 300  # characters of what a node says of another one
STANDS = 1800.0  # seconds that a word counts, as long as no other one of its speaker follows
KEPT = 100  # against one node


class AccusationContext(Protocol):
    """What believing takes to be known of the members."""

    @property
    def driver(self) -> str: ...

    def serving(self) -> Collection[str]:
        """Those with seats, in the order of joining."""
        ...

    def place(self, node: str) -> FailureDomain: ...

    def keys(self) -> Mapping[str, bytes]:
        """By which they sign."""
        ...

    def hangs(self, node: str) -> bool:
        """Whether it says so itself."""
        ...

    def may_drive(self, node: str) -> bool:
        """Whether it has a seat at stage 0, is heard, and stays."""
        ...


@dataclass(frozen=True)
class Convicted:
    """A member has to go, and why."""

    node: str
    cause: Cause
    why: str


@dataclass(frozen=True)
class Uncorroborated:
    """Only the driver says so of a member that stays; in words. `heir` is to drive, and see for
    itself; empty: nobody else could, and it can do without the member."""

    what: str
    heir: str


@dataclass(eq=False)
class _Accused:
    said: dict[str, tuple[float, Suspicion]] = field(default_factory=dict)  # when, by whom
    unsure: float = math.inf  # until when a second voice is awaited, beside the driver's


class Accusations:
    def __init__(self, run: str, second_voice: float) -> None:
        """`second_voice`: seconds for somebody else to say what the driver says."""
        self.run, self.second_voice = run, second_voice
        self._accused: dict[str, _Accused] = {}
        self._newest: dict[str, str] = {}  # whom each has accused last
        self._alone: Counter[str] = Counter()  # how often who drove has lost the drive by its word

    # -- events ----------------------------------------------------------------------------------

    def heard(self, suspicion: Suspicion, known: AccusationContext, now: float) -> Convicted | None:
        """For cause. The accuser's word counts against one member at a time, that which it has
        named last."""
        accuser, name = suspicion.accuser, suspicion.accused
        self._withdraw(accuser)
        self._newest[accuser] = name
        accused = self._accused.setdefault(name, _Accused())
        accused.said[accuser] = now, suspicion
        if len(accused.said) > KEPT:
            del accused.said[min(accused.said, key=lambda one: accused.said[one][0])]
        if why := self._convicted(name, known, now):
            return Convicted(name, suspicion.cause, why)
        suspicion.ClearField("proof")  # it is none, and may be large
        if accuser == known.driver and accused.unsure == math.inf:
            accused.unsure = now + self.second_voice
        return None

    def review(self, known: AccusationContext, now: float) -> Iterator[Convicted | Uncorroborated]:
        """Of those that wait for a second voice."""
        found = False
        for name in sorted(name for name, one in self._accused.items() if one.unsure <= now):
            accused = self._accused[name]
            accused.unsure = math.inf
            if found or (told := accused.said.get(known.driver)) is None:
                continue
            charge = told[1]
            if why := self._convicted(name, known, now):  # nobody else could drive by now
                yield Convicted(name, charge.cause, why)
                continue
            what = f"{name} stays, as nobody but {known.driver} says of it: {evidence(charge)}"
            heirs = [heir for heir in self._heirs(name, known) if heir != name]
            heir = min(heirs, key=self.lost_alone, default="")
            yield Uncorroborated(what, heir)
            if heir:
                self._alone[known.driver] += 1
                found = True

    def gone(self, name: str) -> None:
        """It is a member no longer, and its word is none."""
        self._withdraw(name)
        self._accused.pop(name, None)
        self._alone.pop(name, None)

    def paused(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for accused in self._accused.values():
            accused.unsure += seconds

    # -- answers ---------------------------------------------------------------------------------

    def lost_alone(self, name: str) -> int:
        """How often it has lost the drive by its word."""
        return self._alone[name]

    # --------------------------------------------------------------------------------------------

    def _withdraw(self, accuser: str) -> None:
        if accused := self._accused.get(self._newest.pop(accuser, "")):
            accused.said.pop(accuser, None)

    def _convicted(self, name: str, known: AccusationContext, now: float) -> str:
        """Why the node goes, though it may live; empty: too few say so. Who shows what it has
        signed need not be believed. Against the driver it takes more than half of those who serve
        beside it: where two contradict each other nobody knows who is wrong."""
        said = self._accused[name].said
        for accuser, (_, charge) in said.items():
            if charge.HasField("proof") and self._is_proved(charge.proof, name, known.keys()):
                return f"{evidence(charge)}, shows {accuser}"
        serving = {node for node in known.serving() if node != name}
        charges = {
            accuser: charge
            for accuser, (told, charge) in said.items()
            if accuser in serving and now - told < STANDS
        }
        by_driver = charges.get(known.driver)
        several = self._voices(name, charges, known) > 1
        if name == known.driver:
            several = several and 2 * len(charges) > len(serving)
        if several:
            first = by_driver or next(iter(charges.values()))
            return f"{evidence(first)}, say {', '.join(charges)}"
        if by_driver is None:
            return ""
        says = f"{evidence(by_driver)}, says {known.driver}, which drives"
        if by_driver.cause == HANG and known.hangs(name):
            return f"{says}, and so does {name} itself"
        return "" if self._heirs(name, known) else f"{says}, and nobody else could"

    def _voices(self, accused: str, accusers: Iterable[str], known: AccusationContext) -> int:
        """How many these are. All nodes of one place are one against who is elsewhere: what is
        wrong may be that place."""
        own = known.place(accused)
        places = {name: known.place(name) for name in accusers}
        return len({name if place == own else place for name, place in places.items()})

    def _heirs(self, accused: str, known: AccusationContext) -> list[str]:
        """Who could drive in the driver's place, and whose word would be a second one."""
        driver = known.driver
        return [
            node
            for node in known.serving()
            if node != driver
            and known.may_drive(node)
            and self._voices(accused, (driver, node), known) > 1
        ]

    def _is_proved(self, proof: Proof, accused: str, keys: Mapping[str, bytes]) -> bool:
        """Whether the accused has signed two decisions of one attempt, or one without the votes
        that it takes."""
        if len(proof.decisions) != 2:
            return is_without_vote(proof, keys[accused], keys, self.run)
        one, other = proof.decisions
        twice = (one.step, one.view, one.attempt) == (other.step, other.view, other.attempt)
        signed = (is_message_signed(keys[accused], told, self.run) for told in proof.decisions)
        return twice and one.hash != other.hash and all(signed)


def evidence(suspicion: Suspicion) -> str:
    """In words, cause and reason."""
    why = readable(suspicion.why[:WHY_LENGTH]) or "no reason given"
    if suspicion.cause == SILENT:
        return why
    known = suspicion.cause in Cause.values()
    return f"{Cause.Name(suspicion.cause).lower() if known else 'cause unknown'}: {why}"
