"""Models links between sites: delay, bandwidth, jitter and loss determine when a packet arrives.

All results follow from the figures and from times passed as arguments. relay.py carries real
packets by this model.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations
from pathlib import Path
from typing import Final, NamedTuple

WAN_LINKS: Final = Path(__file__).parent / "wan-links.csv"
"""The site table that comes with the project."""
COLUMNS: Final = ("site_a", "site_b", "one_way_delay_ms", "bandwidth_gib_per_s")
MAY_SAY: Final = ("loss", "jitter_ms")
"""Optional columns; a missing one counts as 0."""
MBPS_PER_GIB: Final = 2**30 * 8 / 1e6
"""Mbit/s in a GiB/s."""
QUEUE_SECONDS, QUEUE_BYTES = 0.25, 256 * 1024
"""Size of a queue: the bytes of QUEUE_SECONDS at the link's rate, and QUEUE_BYTES. A full queue
drops packets."""


SWING: Final = 0.02
"""Seconds between two random delays of a link with jitter. In between, the delay is interpolated
linearly. If each packet had a random delay, a stream that fills the link would always wait for its
slowest packet, without jitter."""


class LinkError(ValueError):
    """Figures that describe no network; the message names them and the remedy."""


class Link(NamedTuple):
    """A link between two sites, equal in both directions."""

    site_a: str
    site_b: str
    delay_ms: float  # one way
    mbps: float  # Mbit/s, for each pair of nodes and each direction
    loss: float = 0.0  # share of the packets, independently of each other
    jitter_ms: float = 0.0  # the delay varies by up to this much, up and down

    def check(self, where: str) -> Link:
        """Returns this link, or raises LinkError. `where`: prefix of the message."""
        if not (0 <= self.delay_ms < math.inf and 0 < self.mbps < math.inf):
            raise LinkError(
                f"{where}a delay of {self.delay_ms:g} ms and {self.mbps:g} Mbit/s are impossible "
                "for a link"
            )
        if not 0 <= self.loss < 1:
            raise LinkError(
                f"{where}a loss of {self.loss:g}: it must be a share, from 0 to less than 1"
            )
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise LinkError(
                f"{where}a jitter of {self.jitter_ms:g} ms with a delay of {self.delay_ms:g} ms: "
                "it must be from 0 to the delay, or packets would arrive before they are sent"
            )
        return self


WITHIN: Final = (1.0, 2 * MBPS_PER_GIB)
"""Delay in ms and Mbit/s between nodes of one site that has no row in the table (CheckFree)."""


def read_links(path: Path) -> list[Link]:
    """Reads a site table: CSV with the columns `COLUMNS`, followed by any of `MAY_SAY`.

    Lines that begin with # are comments. A row with the same site twice describes the network
    within that site. Raises LinkError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LinkError(f"can't read the site table {path}: {error}") from error
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    named = tuple(rows.fieldnames or ())
    more = named[len(COLUMNS) :]
    if named[: len(COLUMNS)] != COLUMNS or {*more} - {*MAY_SAY} or len({*more}) < len(more):
        raise LinkError(
            f"{path} is no site table: its columns are {', '.join(named)}; they must be "
            f"{', '.join(COLUMNS)}, and optionally {' and '.join(MAY_SAY)}"
        )
    return [_link(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _link(row: Mapping[str, str], where: str) -> Link:
    try:
        delay, bandwidth = (float(row[column]) for column in COLUMNS[2:])
        loss, jitter = (float(row.get(column, 0)) for column in MAY_SAY)
    except (TypeError, ValueError) as error:
        columns = [column for column in (*COLUMNS[2:], *MAY_SAY) if column in row]
        raise LinkError(
            f"{where}: {', '.join(columns[:-1])} and {columns[-1]} must be numbers"
        ) from error
    if not 0 < bandwidth < math.inf:
        raise LinkError(f"{where}: a bandwidth of {bandwidth:g} GiB/s is impossible for a link")
    link = Link(row[COLUMNS[0]], row[COLUMNS[1]], delay, bandwidth * MBPS_PER_GIB, loss, jitter)
    return link.check(f"{where}: ")


@dataclass(frozen=True)
class Network:
    """Nodes at sites, and the links between the sites. Raises LinkError if a link is missing."""

    sites: Mapping[str, str]  # node -> site
    links: Sequence[Link]
    uplinks: Mapping[str, float] = field(default_factory=dict)
    """Site -> maximum Mbit/s from all its nodes together to other sites; missing: no limit."""

    def __post_init__(self) -> None:
        for a, b in permutations(self.sites, 2):
            self.between(a, b)
        for site, mbps in self.uplinks.items():
            if mbps <= 0:
                raise LinkError(f"an uplink of {mbps:g} Mbit/s at {site}: it must be more than 0")

    @cached_property
    def _by_sites(self) -> dict[frozenset[str], Link]:
        return {frozenset(link[:2]): link for link in self.links}

    def between(self, a: str, b: str) -> Link:
        """The link from node `a` to node `b`."""
        own, other = self.sites[a], self.sites[b]
        link = self._by_sites.get(frozenset((own, other)))
        if link is not None:
            return link
        if own == other:
            return Link(own, other, *WITHIN)
        known = sorted(set().union(*self._by_sites))
        raise LinkError(
            f"the site table has no link between {own} and {other}; it has links between "
            f"{', '.join(known)}"
        )

    def pipes(self) -> dict[tuple[str, str], Pipe]:
        """(from, to) -> a pipe with empty queues, for each pair of nodes."""
        uplinks = {site: TokenBucket(mbps) for site, mbps in self.uplinks.items()}
        pipes = {}
        for a, b in permutations(self.sites, 2):
            site, link = self.sites[a], self.between(a, b)
            leaves = site in uplinks and site != self.sites[b]
            shared = [uplinks[site]] if leaves else []
            pipes[a, b] = Pipe(
                [*shared, TokenBucket(link.mbps)],
                link.delay_ms / 1e3,
                link.loss,
                link.jitter_ms / 1e3,
                seed=f"{a} to {b}",
            )
        return pipes


def all_alike(
    nodes: Iterable[str],
    delay_ms: float,
    mbps: float,
    uplink: float | None = None,
    *,
    loss: float = 0.0,
    jitter_ms: float = 0.0,
) -> Network:
    """A network in which each node has its own site, with the same link between any two. Each node
    sends at most `uplink` Mbit/s to all others together. Raises LinkError."""
    alike = Link("", "", delay_ms, mbps, loss, jitter_ms).check("")
    names = list(nodes)
    links = [alike._replace(site_a=a, site_b=b) for a, b in combinations(names, 2)]
    uplinks = {} if uplink is None else dict.fromkeys(names, uplink)
    return Network({name: name for name in names}, links, uplinks)


class TokenBucket:
    """A token bucket: passes `mbps` on average, and at most `burst` bytes at once. With a burst of
    0 it is a wire that sends one byte after the other. Times are in seconds, on any monotonic
    clock."""

    def __init__(self, mbps: float, burst: int = 0) -> None:
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.burst = burst
        self._refilled = float("-inf")  # when the bucket will be full again

    def passes(self, size: int, now: float) -> float:
        """Sends `size` bytes after all earlier ones. Returns the time when the last has passed."""
        self._refilled = max(self._refilled, now) + size * self.seconds_per_byte
        return max(now, self._refilled - self.burst * self.seconds_per_byte)

    def is_full(self, now: float) -> bool:
        """Whether more bytes wait to pass than a queue holds."""
        waits = self._refilled - self.burst * self.seconds_per_byte - now
        return waits > QUEUE_SECONDS + QUEUE_BYTES * self.seconds_per_byte


class Pipe:
    """One direction between two nodes: buckets, which may be shared with other pipes, then a delay.

    `jitter` changes the delay as a random function of time, and no packet overtakes another.
    Segments are lost at random after they have passed the buckets.
    """

    def __init__(
        self,
        buckets: Sequence[TokenBucket],
        delay: float,
        loss: float = 0.0,
        jitter: float = 0.0,
        seed: str = "",
    ) -> None:
        """`delay` and `jitter` in seconds, `loss` a share."""
        self.buckets, self.delay, self.loss, self.jitter = buckets, delay, loss, jitter
        self._seed, self._lots = seed, random.Random(f"loss {seed}")
        self._last = 0.0  # time of the last arrival
        self._until_loss = self._draw()  # number of segments before the next lost one

    def arrival(self, size: int, now: float) -> float | None:
        """The time when `size` bytes sent at `now` arrive. None: a full queue drops them."""
        if any(bucket.is_full(now) for bucket in self.buckets):
            return None
        through = now
        for bucket in self.buckets:
            through = bucket.passes(size, through)
        self._last = max(self._last, through + self.delay + self._swung(through))
        return self._last

    def lost(self, segments: int) -> list[int]:
        """Indices, from 0, of the lost ones among the next `segments` segments."""
        losses = []
        while self.loss and self._until_loss < segments:
            losses.append(self._until_loss)
            self._until_loss += 1 + self._draw()
        self._until_loss -= segments
        return losses

    def _draw(self) -> int:
        """A random number of segments that pass before the next lost one."""
        if not self.loss:
            return 0
        return int(math.log(1.0 - self._lots.random()) / math.log1p(-self.loss))

    def _swung(self, at: float) -> float:
        """The change of the delay by jitter, in seconds, at a time."""
        if not self.jitter:
            return 0.0
        number, share = divmod(at / SWING, 1.0)
        before, after = (
            random.Random(f"jitter {self._seed} {int(number) + ahead}").uniform(-1.0, 1.0)
            for ahead in (0, 1)
        )
        return self.jitter * (before + share * (after - before))
