"""Accusations between members, with causes, and the rule by which the registry accepts them.

An accusation counts only if the driver makes it, too: it does when the accused's part in an
attempt or a rebuild has failed. A single accusation never evicts a node that answers. It takes two
accusers, one possibly the accused; or the driver, if no other node could drive. If only the driver
accuses, another node becomes driver and observes for itself: an uncorroborated accusation costs a
driver its role, and costs other nodes nothing. Pure, as membership.py is: `now` is passed in, and
decisions are returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from planaria.bootstrap.escaping import readable
from planaria.bootstrap.member_table import Members
from planaria.bootstrap.registry_pb2 import HANG, SILENT, Cause, Suspicion

WHY_LENGTH = 300  # characters of an accusation's reason
STANDS = 1800.0  # seconds that an accusation counts unless its accuser sends another one
KEPT = 100  # accusations stored against one node


@dataclass(frozen=True)
class Convicted:
    """A member to evict since it is accused, and the reason."""

    node: str
    cause: Cause
    why: str


@dataclass(frozen=True)
class Uncorroborated:
    """An accusation by the driver alone; the accused stays. `heir`: the next driver, which observes
    for itself; empty: no other node could drive, and the accused is dispensable."""

    finding: str
    heir: str


@dataclass(eq=False)
class _Accused:
    charges: dict[str, tuple[float, Suspicion]] = field(default_factory=dict)  # time, accusation
    corroborate_by: float = math.inf  # deadline for corroboration of the driver's accusation


class Accusations:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._accused: dict[str, _Accused] = {}
        self._newest: dict[str, str] = {}  # accuser -> its latest accused
        self._alone: Counter[str] = Counter()  # drives lost by uncorroborated accusations

    def heard(self, suspicion: Suspicion, now: float) -> Convicted | None:
        """Records an accusation with a cause; returns the accused if it is to be evicted. It
        replaces the accuser's former one: an accuser has one accused at a time."""
        accuser, name = suspicion.accuser, suspicion.accused
        self._withdraw(accuser)
        self._newest[accuser] = name
        accused = self._accused.setdefault(name, _Accused())
        accused.charges[accuser] = now, suspicion
        if len(accused.charges) > KEPT:
            oldest = min(accused.charges, key=lambda accuser: accused.charges[accuser][0])
            del accused.charges[oldest]
        if why := self._convicted(name, now):
            return Convicted(name, suspicion.cause, why)
        if accuser == self._members.driver and accused.corroborate_by == math.inf:
            accused.corroborate_by = now + self._members.rules.corroboration_time
        return None

    def review(self, now: float) -> Iterator[Convicted | Uncorroborated]:
        """Decides the accusations whose corroboration deadline has passed."""
        handed_over, driver = False, self._members.driver
        for name in sorted(
            name for name, accused in self._accused.items() if accused.corroborate_by <= now
        ):
            accused = self._accused[name]
            accused.corroborate_by = math.inf
            if handed_over or (entry := accused.charges.get(driver)) is None:
                continue
            charge = entry[1]
            if why := self._convicted(name, now):  # no other node could drive by now
                yield Convicted(name, charge.cause, why)
                continue
            finding = f"{name} stays, since only {driver} accuses it: {evidence(charge)}"
            heirs = [heir for heir in self._heirs(name, now) if heir != name]
            heir = min(heirs, key=self.lost_alone, default="")
            yield Uncorroborated(finding, heir)
            if heir:
                self._alone[driver] += 1
                handed_over = True

    def gone(self, name: str) -> None:
        """Removes a former member, its accusation, and those against it."""
        self._withdraw(name)
        self._accused.pop(name, None)
        self._alone.pop(name, None)

    def paused(self, seconds: float) -> None:
        """Extends the corroboration deadlines by a pause of the registry."""
        for accused in self._accused.values():
            accused.corroborate_by += seconds

    def lost_alone(self, name: str) -> int:
        """How often the node lost the drive by an uncorroborated accusation."""
        return self._alone[name]

    def _withdraw(self, accuser: str) -> None:
        if accused := self._accused.get(self._newest.pop(accuser, "")):
            accused.charges.pop(accuser, None)

    def _convicted(self, name: str, now: float) -> str:
        """Why the accused node is to be evicted, though it may be alive; empty: there is not enough
        evidence. The driver must be among the accusers. A driver as accused requires more than half
        of the other serving nodes, since a contradiction between two nodes has no known culprit."""
        driver, serving = self._members.driver, {*self._members.serving()} - {name}
        charges = {
            accuser: charge
            for accuser, (time, charge) in self._accused[name].charges.items()
            if accuser in serving and now - time < STANDS
        }
        several, accusers = self._voices(name, charges) > 1, ", ".join(charges)
        if name == driver:
            if not several or 2 * len(charges) <= len(serving):
                return ""
            return f"{evidence(next(iter(charges.values())))}, according to {accusers}"
        if (by_driver := charges.get(driver)) is None:
            return ""
        if several:
            return f"{evidence(by_driver)}, according to {accusers}"
        reason = f"{evidence(by_driver)}, according to the driver {driver}"
        if by_driver.cause == HANG and self._members.hangs(name):
            return f"{reason} and to {name} itself"
        return "" if self._heirs(name, now) else f"{reason}; no other node could confirm it"

    def _voices(self, accused: str, accusers: Iterable[str]) -> int:
        """The number of independent accusers. Nodes of one failure domain count as one against an
        accused elsewhere, since the fault may be their domain's."""
        own = self._members.by_name[accused].place
        places = {name: self._members.by_name[name].place for name in accusers}
        return len({name if place == own else place for name, place in places.items()})

    def _heirs(self, accused: str, now: float) -> list[str]:
        """The nodes that could replace the driver, and would then count as a second accuser."""
        driver = self._members.driver
        return [
            node
            for node in self._members.serving()
            if node != driver
            and self._members.may_drive(node, now)
            and self._voices(accused, (driver, node)) > 1
        ]


def evidence(suspicion: Suspicion) -> str:
    """An accusation's cause and reason, as text."""
    why = readable(suspicion.why[:WHY_LENGTH]) or "no reason given"
    if suspicion.cause == SILENT:
        return why
    is_named = suspicion.cause in Cause.values()
    return f"{Cause.Name(suspicion.cause).lower() if is_named else 'cause unknown'}: {why}"
