"""Links between sites: delay, bandwidth, and when a packet that is sent now arrives.

Everything here is a pure function of the figures and of the time that is passed in; relay.py
carries real packets by it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations
from pathlib import Path
from typing import Final, NamedTuple

WAN_LINKS: Final = Path(__file__).parent / "wan-links.csv"
"""The table that comes with the project."""
COLUMNS: Final = ("site_a", "site_b", "one_way_delay_ms", "bandwidth_gib_per_s")
MBPS_PER_GIB: Final = 2**30 * 8 / 1e6
"""Mbit/s in a GiB/s."""
QUEUE_SECONDS, QUEUE_BYTES = 0.25, 256 * 1024
"""A queue drops what comes when this much time's worth of bytes, and these besides, wait in it."""


class LinkError(ValueError):
    """Figures that describe no network; the message names them and the remedy."""


class Link(NamedTuple):
    """Between two sites, alike in both directions."""

    site_a: str
    site_b: str
    delay_ms: float  # one way
    mbps: float  # Mbit/s, for each pair of nodes and each direction


WITHIN: Final = (1.0, 2 * MBPS_PER_GIB)
"""ms and Mbit/s between nodes of one site, where a table doesn't say (CheckFree)."""


def read_links(path: Path) -> list[Link]:
    """A site table: CSV with the columns `COLUMNS`; lines that begin with # are comments. A row
    whose sites are the same is the network within that site. Raises LinkError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LinkError(f"can't read the site table {path}: {error}") from error
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise LinkError(
            f"{path} is no site table: its columns are {', '.join(rows.fieldnames or ())}, not "
            f"{', '.join(COLUMNS)}"
        )
    return [_link(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _link(row: Mapping[str, str], where: str) -> Link:
    try:
        delay, bandwidth = (float(row[column]) for column in COLUMNS[2:])
    except (TypeError, ValueError) as error:
        raise LinkError(f"{where}: {COLUMNS[2]} and {COLUMNS[3]} are to be numbers") from error
    if not (0 <= delay < float("inf") and 0 < bandwidth < float("inf")):
        raise LinkError(
            f"{where}: a delay of {delay:g} ms and {bandwidth:g} GiB/s are no figures of a link"
        )
    return Link(row[COLUMNS[0]], row[COLUMNS[1]], delay, bandwidth * MBPS_PER_GIB)


@dataclass(frozen=True)
class Network:
    """Nodes at sites, and what lies between the sites. Raises LinkError if a link is missing."""

    sites: Mapping[str, str]  # node -> site
    links: Sequence[Link]
    uplinks: Mapping[str, float] = field(default_factory=dict)
    """Site -> Mbit/s that all its nodes together send to other sites; missing: no limit."""

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
        here, there = self.sites[a], self.sites[b]
        link = self._by_sites.get(frozenset((here, there)))
        if link is not None:
            return link
        if here == there:
            return Link(here, there, *WITHIN)
        known = sorted(set().union(*self._by_sites))
        raise LinkError(
            f"the site table has no link between {here} and {there}; it has links between "
            f"{', '.join(known)}"
        )

    def pipes(self) -> dict[tuple[str, str], Pipe]:
        """A pipe from each node to each other, with queues that are empty."""
        uplinks = {site: TokenBucket(mbps) for site, mbps in self.uplinks.items()}
        found = {}
        for a, b in permutations(self.sites, 2):
            here, link = self.sites[a], self.between(a, b)
            leaves = here in uplinks and here != self.sites[b]
            shared = [uplinks[here]] if leaves else []
            found[a, b] = Pipe([*shared, TokenBucket(link.mbps)], link.delay_ms / 1e3)
        return found


def all_alike(
    nodes: Iterable[str], delay_ms: float, mbps: float, uplink: float | None = None
) -> Network:
    """Each node at a site of its own, and the same link between any two; each sends `uplink` Mbit/s
    at most to all the others together. Raises LinkError."""
    if not (delay_ms >= 0 and mbps > 0):
        raise LinkError(f"a delay of {delay_ms:g} ms and {mbps:g} Mbit/s are no figures of a link")
    names = list(nodes)
    links = [Link(a, b, delay_ms, mbps) for a, b in combinations(names, 2)]
    uplinks = {} if uplink is None else dict.fromkeys(names, uplink)
    return Network({name: name for name in names}, links, uplinks)


class TokenBucket:
    """Lets `mbps` pass on average and `burst` bytes at once at most; with a burst of 0 it is a wire
    on which one byte goes after the other. Times in seconds, on any clock that doesn't go back."""

    def __init__(self, mbps: float, burst: int = 0) -> None:
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.burst = burst
        self._refilled = float("-inf")  # when the bucket will be full again

    def passes(self, size: int, now: float) -> float:
        """Send `size` bytes behind all that was sent before. Returns when the last of them is
        through."""
        self._refilled = max(self._refilled, now) + size * self.seconds_per_byte
        return max(now, self._refilled - self.burst * self.seconds_per_byte)

    def is_full(self, now: float) -> bool:
        """Whether what waits to pass is more than a queue holds."""
        waits = self._refilled - self.burst * self.seconds_per_byte - now
        return waits > QUEUE_SECONDS + QUEUE_BYTES * self.seconds_per_byte


class Pipe:
    """One direction between two nodes: buckets, some of them shared with others, then a delay."""

    def __init__(self, buckets: Sequence[TokenBucket], delay: float) -> None:
        self.buckets, self.delay = buckets, delay  # seconds

    def arrival(self, size: int, now: float) -> float | None:
        """When `size` bytes sent now arrive; None: they are dropped, a queue is full."""
        if any(bucket.is_full(now) for bucket in self.buckets):
            return None
        through = now
        for bucket in self.buckets:
            through = bucket.passes(size, through)
        return through + self.delay
