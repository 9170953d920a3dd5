"""Members that can't reach each other, and what is done about it: relays, and in the end eviction.

A node complains of a member from when a link that it needs is lost until a direct one is up again,
in each of its reports, so that a registry that was away learns what stands. What counts is how long
a pair has been without any link, not how often. Pure, as membership.py is: `now` is passed in, and
what is decided is returned.

A pair of which both have been heard since one complained, so that neither is dead, gets a relay: a
third member that is not known to be cut off from either. The relay stays until nobody has
complained for two leases, so that a link that comes and goes doesn't change the view each time. Who
is to carry for them and doesn't, within a lease, is replaced. If nobody is left, or several have
tried in vain, one of the two goes, if that does the others any good.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from planaria.bootstrap.registry_pb2 import Complaint, Cut, Relay

LOOKS = 10  # at what stands, in a lease
PATIENCE = 0.2  # leases in which a pair that one of them can dial may have a link again
MOST_TRIED = 3  # who were to carry for a pair, and couldn't
TRIED_AGAIN = 12  # leases after which those may try once more when nobody is left
MOST_COMPLAINTS = 64  # by one node
MOST_PAIRS = 10_000


class LinkContext(Protocol):
    """What the cuts need to know of the members."""

    def names(self) -> Iterable[str]:
        """Of all members, in the order of joining."""
        ...

    def heard(self, node: str) -> bool:
        """Whether it is a member that lives, as far as the registry can tell."""
        ...

    def heard_since(self, node: str, time: float) -> bool:
        """Whether a renewal of the member's has come after that."""
        ...

    def linkable(self, a: str, b: str) -> bool:
        """Whether one of them can be dialled."""
        ...

    def neighbours(self, a: str, b: str) -> bool:
        """Whether they need a link in every step, so that none of them complaining tells that there
        is one."""
        ...

    def believed(self, node: str) -> bool:
        """Whether it counts that it doesn't complain: its lease isn't over, though its stream may
        be broken, and it has been where it is for long enough to find out whom it reaches."""
        ...

    def spared(self, node: str) -> bool:
        """The last holder of a stage, which makes progress."""
        ...

    def drives(self, node: str) -> bool: ...

    def replicas(self, node: str) -> int:
        """Nodes that have the state of its stage, itself included."""
        ...


@dataclass
class _Pair:
    """Two members of which one complains of the other, or has lately."""

    since: float
    unlinked: float = 0.0  # since when they have no link by way of a third either
    complaints: dict[str, bool] = field(default_factory=dict)  # by whom -> whether it is relayed
    clear: float = math.inf  # since when nobody complains
    via: str = ""
    idle: float = math.inf  # since when `via` is to carry, and doesn't
    failed: dict[str, set[str]] = field(default_factory=dict)  # who couldn't carry -> to whom
    given_up: float = math.inf  # since when there is nobody to try

    @property
    def carried(self) -> bool:
        return bool(self.complaints) and all(self.complaints.values())


@dataclass(frozen=True)
class Relayed:
    """A relay has begun, ended or changed; in words."""

    what: str


@dataclass(frozen=True)
class Goes:
    """A member has to, and why."""

    node: str
    why: str


class Cuts:
    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._looked = -math.inf
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._of: dict[str, set[tuple[str, str]]] = {}  # the pairs of each node
        self._more: set[str] = set()  # who has more complaints than are known here

    # -- events ----------------------------------------------------------------------------------

    def told(
        self, node: str, complaints: Iterable[Complaint], now: float, unlisted: int = 0
    ) -> None:
        """By `node`: its complaints, but for so many. What is not among them is withdrawn."""
        told = list(itertools.islice(complaints, MOST_COMPLAINTS + 1))
        standing = {c.peer: c.relayed for c in told[:MOST_COMPLAINTS] if c.peer != node}
        self._more.discard(node)
        if unlisted or len(told) > MOST_COMPLAINTS:
            self._more.add(node)
        for key in self._of.get(node, ()):
            known = self._pairs[key]
            if node in known.complaints and _other(key, node) not in standing:
                del known.complaints[node]
                if not known.complaints:
                    known.clear = now
        for peer, relayed in standing.items():
            key = _key(node, peer)
            pair = self._begun(key, now)
            if pair is None:
                continue
            if not pair.complaints:
                pair.since, pair.clear = now, math.inf
                pair.unlinked = now
            pair.complaints[node] = relayed
            if pair.carried:
                pair.unlinked = now

    def gone(self, node: str) -> None:
        """It is a member no longer."""
        self._more.discard(node)
        for key in self._of.pop(node, set()):
            del self._pairs[key]
            self._of[_other(key, node)].discard(key)
        for pair in self._pairs.values():
            pair.failed.pop(node, None)
            if pair.via == node:
                pair.via, pair.idle = "", math.inf

    def restore(self, relays: Iterable[Relay], now: float) -> None:
        """Goes on from the relays of a view; who complains will say so again."""
        self._pairs, self._of, self._more = {}, {}, set()
        for relay in relays:
            pair = self._begun((relay.a, relay.b), now)
            if pair is not None:
                pair.via, pair.clear = relay.via, now

    def paused(self, seconds: float, now: float) -> None:
        """The registry did not run for so long: nobody could withdraw anything."""
        for pair in self._pairs.values():
            pair.since = min(now, pair.since + seconds)
            pair.unlinked = min(now, pair.unlinked + seconds)
            if pair.clear < math.inf:
                pair.clear = min(now, pair.clear + seconds)
            if pair.idle < math.inf:
                pair.idle = min(now, pair.idle + seconds)

    def review(self, known: LinkContext, now: float) -> list[Relayed | Goes]:
        """What is to be done now. At most one has to go, after which this is to be called again."""
        done: list[Relayed | Goes] = []
        if now < self._looked + self.lease / LOOKS:
            return done
        for key, pair in list(self._pairs.items()):
            if not pair.complaints:
                if now - pair.clear >= 2 * self.lease or not pair.via:
                    done += self._over(key, pair)
            elif all(map(known.heard, key)) and self._is_due(known, key, pair, now):
                done += self._see_to(known, key, pair, now)
            if done and isinstance(done[-1], Goes):
                return done
        self._looked = now
        return done

    # -- answers ---------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is anything to review, or to be withdrawn."""
        return bool(self._pairs or self._more)

    def relays(self) -> list[Relay]:
        return [Relay(a=a, b=b, via=p.via) for (a, b), p in sorted(self._pairs.items()) if p.via]

    def listed(self, known: LinkContext, now: float) -> list[Cut]:
        """The cuts, as `planaria status` tells them."""
        return [
            Cut(
                a=a,
                b=b,
                seconds=now - pair.since,
                via=pair.via,
                carried=bool(pair.via) and pair.carried,
                state=self._state(known, a, b),
            )
            for (a, b), pair in sorted(self._pairs.items())
            if pair.complaints
        ]

    def reached_by(self, known: LinkContext, node: str) -> str:
        """A member that says that it has a link with this one. Empty: there is none."""
        others = (other for other in known.names() if other != node)
        return next((other for other in others if self._says_linked(known, other, node)), "")

    def cut_off(self, node: str) -> int:
        """From how many members it is."""
        return sum(bool(self._pairs[key].complaints) for key in self._of.get(node, ()))

    def validate_state(self) -> None:
        """Asserts what must hold after each event; called by tests."""
        for key, pair in self._pairs.items():
            assert key == _key(*key)
            assert key in self._of[key[0]]
            assert key in self._of[key[1]]
            assert pair.complaints.keys() <= set(key)
            assert bool(pair.complaints) == (pair.clear == math.inf)
            assert pair.via not in key
        assert sum(map(len, self._of.values())) == 2 * len(self._pairs)

    # -- inside ----------------------------------------------------------------------------------

    def _begun(self, key: tuple[str, str], now: float) -> _Pair | None:
        """None: too many are cut off from each other for all to be looked after."""
        if key in self._pairs or len(self._pairs) >= MOST_PAIRS:
            return self._pairs.get(key)
        pair = self._pairs[key] = _Pair(now)
        for node in key:
            self._of.setdefault(node, set()).add(key)
        return pair

    def _over(self, key: tuple[str, str], pair: _Pair) -> list[Relayed | Goes]:
        del self._pairs[key]
        for node in key:
            self._of[node].discard(key)
            if not self._of[node]:
                del self._of[node]
        a, b = key
        return [Relayed(f"{a} and {b} reach each other again")] if pair.via else []

    def _is_due(self, known: LinkContext, key: tuple[str, str], pair: _Pair, now: float) -> bool:
        """Whether both live, as far as can be told, and won't have a link by themselves soon."""
        waited = now - pair.since >= PATIENCE * self.lease
        both = all(known.heard_since(node, pair.since) for node in key)
        return (waited and both) or not known.linkable(*key)

    def _see_to(
        self, known: LinkContext, key: tuple[str, str], pair: _Pair, now: float
    ) -> list[Relayed | Goes]:
        """They have been cut off from each other for long."""
        a, b = key
        former = pair.via
        if former and self._goes_on(known, key, pair, now):
            return []
        pair.via = self._third(known, key, pair)
        pair.idle = now if pair.via else math.inf
        seconds = now - pair.unlinked
        in_vain = len(pair.failed) >= MOST_TRIED or not pair.via
        if in_vain and seconds >= 2 * self.lease and (goes := self._goes(known, a, b)):
            stays = _other(key, goes)
            return [Goes(goes, f"unreachable from {stays} for {seconds:.0f} s, though alive")]
        if pair.via:
            pair.given_up = math.inf
            return [Relayed(f"{a} and {b} can't reach each other: {pair.via} carries for them")]
        pair.given_up = min(pair.given_up, now)
        if now - pair.given_up >= TRIED_AGAIN * self.lease:
            pair.failed.clear()
        return [Relayed(f"nobody carries for {a} and {b} any more")] if former else []

    def _goes_on(self, known: LinkContext, key: tuple[str, str], pair: _Pair, now: float) -> bool:
        """Whether their relay does its work, or may yet."""
        apart = {node for node in key if self._stands(pair.via, node)}
        if pair.carried:
            pair.idle = math.inf
        elif pair.idle == math.inf:
            pair.idle = now
        if apart or now - pair.idle >= self.lease:
            pair.failed[pair.via] = apart
            return False
        return self._reaches(known, pair.via, key)

    def _third(self, known: LinkContext, key: tuple[str, str], pair: _Pair) -> str:
        """Who is to carry for them: who has links to both for other reasons before who would have
        to dial, then who carries for the fewest, then the oldest. Empty: there is none."""
        carried = Counter(other.via for other in self._pairs.values())
        found = [
            node
            for node in known.names()
            if node not in key and node not in pair.failed and self._reaches(known, node, key)
        ]

        def cost(node: str) -> tuple[bool, int]:
            linked = all(known.neighbours(node, one) for one in key)
            return not linked, carried[node]

        return min(found, key=cost, default="")

    def _reaches(self, known: LinkContext, node: str, others: Iterable[str]) -> bool:
        """As far as anybody has said."""
        return known.heard(node) and all(
            known.linkable(node, other) and not self._apart(node, other) for other in others
        )

    def _stands(self, a: str, b: str) -> bool:
        pair = self._pairs.get(_key(a, b))
        return pair is not None and bool(pair.complaints)

    def _apart(self, a: str, b: str) -> bool:
        """Whether they are cut off from each other, or were when one was to carry for the other."""
        keys = self._of.get(a, set()) | self._of.get(b, set())
        return self._stands(a, b) or any(
            b in self._pairs[key].failed.get(a, ()) or a in self._pairs[key].failed.get(b, ())
            for key in keys
        )

    def _reached(self, known: LinkContext, node: str, but: str) -> bool:
        """Whether anybody but that one can reach it."""
        others = (other for other in known.names() if other not in (node, but))
        return any(
            self._reaches(known, other, [node])
            or self._says_linked(known, node, other)
            or self._says_linked(known, other, node)
            for other in others
        )

    def _says_linked(self, known: LinkContext, node: str, other: str) -> bool:
        """Whether a node needs a link with the other one and doesn't complain, or only since a
        third carries for them."""
        if not known.believed(node):
            return False
        pair = self._pairs.get(_key(node, other))
        if pair is not None and node in pair.complaints:
            return pair.complaints[node]
        return known.neighbours(node, other) and node not in self._more

    def _goes(self, known: LinkContext, a: str, b: str) -> str:
        """Which of the two. Empty: neither.

        Only one without whom the other can do its work, which somebody else has to reach. A last
        holder that makes progress never, unless nobody at all can reach it. Of two that could, the
        one goes that the driver can't reach, however many say by their silence that they can; else
        the one that is cut off from more members has the bad connection; where that says nothing,
        the one whose stage has more nodes; then the newcomer.
        """
        reached = {a: self._reached(known, a, b), b: self._reached(known, b, a)}
        order = {name: number for number, name in enumerate(known.names())}
        free = [
            node
            for node, other in ((a, b), (b, a))
            if reached[other] and (not known.spared(node) or not reached[node])
        ]
        driver = next((n for n in order if known.drives(n) and n not in (a, b)), "")

        def cost(node: str) -> tuple[bool, bool, int, int, int]:
            undriven = bool(driver) and self._stands(node, driver)
            spared = known.spared(node)
            return not spared, undriven, self.cut_off(node), known.replicas(node), order[node]

        return max(free, key=cost, default="")

    def _state(self, known: LinkContext, a: str, b: str) -> str:
        pair = self._pairs[a, b]
        if pair.via:
            return f"{pair.via} {'carries' if pair.carried else 'is to carry'} for them"
        if self._third(known, (a, b), pair) or self._goes(known, a, b):
            return "they may reach each other yet"
        return "nobody can carry for them, and neither can be spared"


def _key(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


def _other(key: tuple[str, str], node: str) -> str:
    return key[1] if key[0] == node else key[0]
