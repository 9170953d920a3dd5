"""Pairs of members that cannot reach each other, and the remedies: relays, finally eviction.

A node complains of a peer from the loss of a needed link until a direct link is up again. Each
report lists all open complaints, so a restarted registry learns them. The measure is how long a
pair lacks any link, not how often. Pure, as membership.py is: `now` is passed in, and decisions are
returned.

A pair gets a relay if both nodes were heard after the complaint, so that neither is dead. The relay
is a third member not known to be cut off from either. It stays until two leases have passed without
a complaint, so that an unstable link does not change the view each time. A relay that does not
carry within a lease is replaced. If no candidate is left, or several have failed, one node of the
pair is evicted, provided that this helps the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from planaria.bootstrap.member_table import Members
from planaria.bootstrap.registry_pb2 import Complaint, Cut, Relay

LOOKS = 10  # reviews per lease
PATIENCE = 0.2  # leases that a dialable pair has to restore its link
MOST_TRIED = 3  # relays that failed for a pair
TRIED_AGAIN = 12  # leases without a candidate after which failed relays are retried
MOST_COMPLAINTS = 64  # per node
MOST_PAIRS = 10_000


@dataclass
class _Pair:
    """Two members with a complaint between them, current or recent."""

    since: float
    unlinked: float = 0.0  # time since which no relay links them either
    complaints: dict[str, bool] = field(default_factory=dict)  # complainant -> whether relayed
    clear_since: float = math.inf  # time since which no complaint is open
    via: str = ""
    idle_since: float = math.inf  # time since which `via` has failed to carry
    failed: dict[str, set[str]] = field(default_factory=dict)  # by relay: peers it can't reach
    hopeless_since: float = math.inf  # time since which no candidate is left

    @property
    def carried(self) -> bool:
        return bool(self.complaints) and all(self.complaints.values())


@dataclass(frozen=True)
class ToEvict:
    """A member to evict since another one can't reach it, and the reason."""

    node: str
    why: str


class UnreachablePairs:
    def __init__(self, members: Members) -> None:
        self._members, self.lease = members, members.rules.lease
        self._reviewed_at = -math.inf
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._of: dict[str, set[tuple[str, str]]] = {}  # the pairs of each node
        self._more: set[str] = set()  # nodes with unlisted complaints

    # -- events ----------------------------------------------------------------------------------

    def set_complaints(
        self, node: str, complaints: Iterable[Complaint], now: float, unlisted: int = 0
    ) -> None:
        """Replaces what `node` complains of: peers that it needs a link to and has none.
        `unlisted`: the number of complaints beside those."""
        listed = list(itertools.islice(complaints, MOST_COMPLAINTS + 1))
        standing = {c.peer: c.relayed for c in listed[:MOST_COMPLAINTS] if c.peer != node}
        self._more.discard(node)
        if unlisted or len(listed) > MOST_COMPLAINTS:
            self._more.add(node)
        for key in self._of.get(node, ()):
            former = self._pairs[key]
            if node in former.complaints and _other(key, node) not in standing:
                del former.complaints[node]
                if not former.complaints:
                    former.clear_since = now
        for peer, relayed in standing.items():
            key = _key(node, peer)
            pair = self._pair_of(key, now)
            if pair is None:
                continue
            if not pair.complaints:
                pair.since, pair.clear_since = now, math.inf
                pair.unlinked = now
            pair.complaints[node] = relayed
            if pair.carried:
                pair.unlinked = now

    def gone(self, node: str) -> None:
        """Removes a former member, its pairs, and its relays."""
        self._more.discard(node)
        for key in self._of.pop(node, set()):
            del self._pairs[key]
            self._of[_other(key, node)].discard(key)
        for pair in self._pairs.values():
            pair.failed.pop(node, None)
            if pair.via == node:
                pair.via, pair.idle_since = "", math.inf

    def restore(self, relays: Iterable[Relay], now: float) -> None:
        """Restores the relays of a view; complainants repeat their complaints."""
        self._pairs, self._of, self._more = {}, {}, set()
        for relay in relays:
            pair = self._pair_of((relay.a, relay.b), now)
            if pair is not None:
                pair.via, pair.clear_since = relay.via, now

    def paused(self, seconds: float, now: float) -> None:
        """Shifts deadlines by a pause of the registry, in which no complaint could be withdrawn."""
        for pair in self._pairs.values():
            pair.since = min(now, pair.since + seconds)
            pair.unlinked = min(now, pair.unlinked + seconds)
            if pair.clear_since < math.inf:
                pair.clear_since = min(now, pair.clear_since + seconds)
            if pair.idle_since < math.inf:
                pair.idle_since = min(now, pair.idle_since + seconds)

    def review(self, now: float) -> list[str | ToEvict]:
        """What is due now: descriptions of relays that began, ended or changed, and members to
        evict. After an eviction, which ends the list, call again."""
        done: list[str | ToEvict] = []
        if now < self._reviewed_at + self.lease / LOOKS:
            return done
        for key, pair in list(self._pairs.items()):
            if not pair.complaints:
                if now - pair.clear_since >= 2 * self.lease or not pair.via:
                    done += self._drop(key, pair)
            elif all(self._members.heard(n, now) for n in key) and self._is_due(key, pair, now):
                done += self._remedy(key, pair, now)
            if done and isinstance(done[-1], ToEvict):
                return done
        self._reviewed_at = now
        return done

    # -- answers ---------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any complaint or relay exists."""
        return bool(self._pairs or self._more)

    def relays(self) -> list[Relay]:
        return [Relay(a=a, b=b, via=p.via) for (a, b), p in sorted(self._pairs.items()) if p.via]

    def listed(self, now: float) -> list[Cut]:
        """The pairs that can't reach each other, as `planaria status` lists them."""
        return [
            Cut(
                a=a,
                b=b,
                seconds=now - pair.since,
                via=pair.via,
                carried=bool(pair.via) and pair.carried,
                state=self._state(a, b, now),
            )
            for (a, b), pair in sorted(self._pairs.items())
            if pair.complaints
        ]

    def reached_by(self, node: str, now: float) -> str:
        """A member that reports a link with `node`; empty: none."""
        others = (other for other in self._members.by_name if other != node)
        return next((other for other in others if self._says_linked(other, node, now)), "")

    # -- inside ----------------------------------------------------------------------------------

    def _pair_of(self, key: tuple[str, str], now: float) -> _Pair | None:
        """The pair's record, created if needed; None: MOST_PAIRS is reached."""
        if key in self._pairs or len(self._pairs) >= MOST_PAIRS:
            return self._pairs.get(key)
        pair = self._pairs[key] = _Pair(now)
        for node in key:
            self._of.setdefault(node, set()).add(key)
        return pair

    def _drop(self, key: tuple[str, str], pair: _Pair) -> list[str | ToEvict]:
        del self._pairs[key]
        for node in key:
            self._of[node].discard(key)
            if not self._of[node]:
                del self._of[node]
        a, b = key
        return [f"{a} and {b} reach each other again"] if pair.via else []

    def _is_due(self, key: tuple[str, str], pair: _Pair, now: float) -> bool:
        """Whether a pair's nodes are alive, as far as known, and no direct link may come soon."""
        waited = now - pair.since >= PATIENCE * self.lease
        both = all(self._members.by_name[node].renewed > pair.since for node in key)
        return (waited and both) or not self._members.linkable(*key)

    def _remedy(self, key: tuple[str, str], pair: _Pair, now: float) -> list[str | ToEvict]:
        """Chooses a relay or an eviction for a pair whose cut is due."""
        a, b = key
        former = pair.via
        if former and self._relay_goes_on(key, pair, now):
            return []
        pair.via = self._choose_relay(key, pair, now)
        pair.idle_since = now if pair.via else math.inf
        seconds = now - pair.unlinked
        exhausted = len(pair.failed) >= MOST_TRIED or not pair.via
        if exhausted and seconds >= 2 * self.lease and (evicted := self._whom_to_evict(a, b, now)):
            partner = _other(key, evicted)
            return [
                ToEvict(evicted, f"unreachable from {partner} for {seconds:.0f} s, though alive")
            ]
        if pair.via:
            pair.hopeless_since = math.inf
            return [f"{a} and {b} can't reach each other: {pair.via} relays for them"]
        pair.hopeless_since = min(pair.hopeless_since, now)
        if now - pair.hopeless_since >= TRIED_AGAIN * self.lease:
            pair.failed.clear()
        return [f"no member relays for {a} and {b} any more"] if former else []

    def _relay_goes_on(self, key: tuple[str, str], pair: _Pair, now: float) -> bool:
        """Whether the pair's relay carries, or has time left to begin."""
        cut_off = {node for node in key if self._complains(pair.via, node)}
        if pair.carried:
            pair.idle_since = math.inf
        elif pair.idle_since == math.inf:
            pair.idle_since = now
        if cut_off or now - pair.idle_since >= self.lease:
            pair.failed[pair.via] = cut_off
            return False
        return self._reaches(pair.via, key, now)

    def _choose_relay(self, key: tuple[str, str], pair: _Pair, now: float) -> str:
        """The relay for a pair: by preference a node that has links to both already, then one that
        carries for the fewest pairs, then the oldest; empty: none."""
        carried = Counter(other.via for other in self._pairs.values())
        candidates = [
            node
            for node in self._members.by_name
            if node not in key and node not in pair.failed and self._reaches(node, key, now)
        ]

        def cost(node: str) -> tuple[bool, int]:
            linked = all(self._members.are_neighbours(node, end) for end in key)
            return not linked, carried[node]

        return min(candidates, key=cost, default="")

    def _reaches(self, node: str, others: Iterable[str], now: float) -> bool:
        """Whether `node` can link to all `others`, as far as the reports say."""
        return self._members.heard(node, now) and all(
            self._members.linkable(node, other) and not self._cut_off(node, other)
            for other in others
        )

    def _complains(self, a: str, b: str) -> bool:
        """Whether one of two nodes complains of the other now."""
        pair = self._pairs.get(_key(a, b))
        return pair is not None and bool(pair.complaints)

    def _cut_off(self, a: str, b: str) -> bool:
        """Whether two nodes are cut off, or were when one had to carry for the other."""
        keys = self._of.get(a, set()) | self._of.get(b, set())
        return self._complains(a, b) or any(
            b in self._pairs[key].failed.get(a, ()) or a in self._pairs[key].failed.get(b, ())
            for key in keys
        )

    def _reached(self, node: str, but: str, now: float) -> bool:
        """Whether a node other than `but` can reach `node`."""
        others = (other for other in self._members.by_name if other not in (node, but))
        return any(
            self._reaches(other, [node], now)
            or self._says_linked(node, other, now)
            or self._says_linked(other, node, now)
            for other in others
        )

    def _says_linked(self, node: str, other: str, now: float) -> bool:
        """Whether `node` needs a link with `other` and has no complaint except a relayed one."""
        if not self._members.silence_counts(node, now):
            return False
        pair = self._pairs.get(_key(node, other))
        if pair is not None and node in pair.complaints:
            return pair.complaints[node]
        return self._members.are_neighbours(node, other) and node not in self._more

    def _whom_to_evict(self, a: str, b: str, now: float) -> str:
        """Of two members that have no link, the one to evict; empty: neither.

        A candidate's partner must be able to work without it and be reachable by another node. A
        last holder that makes progress is a candidate only if no node can reach it. Of two
        candidates, evict the one that the driver cannot reach, whatever the silence of others
        suggests; else the one cut off from more members; else the one whose stage has more nodes;
        else the newer one.
        """
        members, driver = self._members, self._members.driver
        reached = {a: self._reached(a, b, now), b: self._reached(b, a, now)}
        order = {name: number for number, name in enumerate(members.by_name)}
        free = [
            node
            for node, other in ((a, b), (b, a))
            if reached[other] and (not members.last_working(node, now) or not reached[node])
        ]

        def cost(node: str) -> tuple[bool, bool, int, int, int]:
            undriven = driver not in (a, b) and self._complains(node, driver)
            spared = members.last_working(node, now)
            cut_off = sum(bool(self._pairs[key].complaints) for key in self._of.get(node, ()))
            return not spared, undriven, cut_off, members.replicas(node, now), order[node]

        return max(free, key=cost, default="")

    def _state(self, a: str, b: str, now: float) -> str:
        """What is done about a pair, for people."""
        pair = self._pairs[a, b]
        if pair.via:
            return f"{pair.via} {'relays' if pair.carried else 'is to relay'} for them"
        if self._choose_relay((a, b), pair, now) or self._whom_to_evict(a, b, now):
            return "they wait for a link or a relay"
        return "no member can relay for them, and neither can be spared"


def _key(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


def _other(key: tuple[str, str], node: str) -> str:
    return key[1] if key[0] == node else key[0]
