"""Links between sites: delay, bandwidth, jitter, loss, and when a packet that is sent now arrives.

Everything here is a pure function of the figures and of the time that is passed in; relay.py
carries real packets by it.
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
"""The table that comes with the project."""
COLUMNS: Final = ("site_a", "site_b", "one_way_delay_ms", "bandwidth_gib_per_s")
MAY_SAY: Final = ("loss", "jitter_ms")
"""Columns that may be missing, for links without."""
MBPS_PER_GIB: Final = 2**30 * 8 / 1e6
"""Mbit/s in a GiB/s."""
QUEUE_SECONDS, QUEUE_BYTES = 0.25, 256 * 1024
"""A queue drops what comes when this much time's worth of bytes, and these besides, wait in it."""


SWING: Final = 0.02
"""Seconds from one drawn delay of a link with jitter to the next, in between it is on the straight
line. Were it drawn for each packet, those of a stream that fills the link would all wait for the
slowest, and there would be no jitter."""


class LinkError(ValueError):
    """Figures that describe no network; the message names them and the remedy."""


class Link(NamedTuple):
    """Between two sites, alike in both directions."""

    site_a: str
    site_b: str
    delay_ms: float  # one way
    mbps: float  # Mbit/s, for each pair of nodes and each direction
    loss: float = 0.0  # share of the packets, each by itself
    jitter_ms: float = 0.0  # by so much the delay is more or less

    def check(self, where: str) -> Link:
        """Raises LinkError."""
        if not (0 <= self.delay_ms < math.inf and 0 < self.mbps < math.inf):
            raise LinkError(
                f"{where}a delay of {self.delay_ms:g} ms and {self.mbps:g} Mbit/s are impossible "
                "for a link"
            )
        if not 0 <= self.loss < 1:
            raise LinkError(f"{where}a loss of {self.loss:g}: it is a share, from 0 to less than 1")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise LinkError(
                f"{where}a jitter of {self.jitter_ms:g} ms with a delay of {self.delay_ms:g} ms: "
                "it must be from 0 to the delay, or packets would arrive before they are sent"
            )
        return self


WITHIN: Final = (1.0, 2 * MBPS_PER_GIB)
"""ms and Mbit/s between nodes of one site, where a table doesn't say (CheckFree)."""


def read_links(path: Path) -> list[Link]:
    """A site table: CSV with the columns `COLUMNS`, and any of `MAY_SAY` behind them; lines that
    begin with # are comments. A row whose sites are the same is the network within that site.
    Raises LinkError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LinkError(f"can't read the site table {path}: {error}") from error
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    named = tuple(rows.fieldnames or ())
    more = named[len(COLUMNS) :]
    if named[: len(COLUMNS)] != COLUMNS or {*more} - {*MAY_SAY} or len({*more}) < len(more):
        raise LinkError(
            f"{path} is no site table: its columns are {', '.join(named)}, not "
            f"{', '.join(COLUMNS)}, and maybe {' and '.join(MAY_SAY)}"
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
        """A pipe from each node to each other, with queues that are empty."""
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
    """Each node at a site of its own, and the same link between any two; each sends `uplink` Mbit/s
    at most to all the others together. Raises LinkError."""
    alike = Link("", "", delay_ms, mbps, loss, jitter_ms).check("")
    names = list(nodes)
    links = [alike._replace(site_a=a, site_b=b) for a, b in combinations(names, 2)]
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
    """One direction between two nodes: buckets, some of them shared with others, then a delay. What
    `jitter` makes of that is drawn by time, and nothing overtakes; what is lost is drawn for each
    segment, behind the buckets."""

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
        self._last = 0.0  # arrival
        self._until_loss = self._draw()  # segments

    def arrival(self, size: int, now: float) -> float | None:
        """When `size` bytes sent now arrive; None: they are dropped, since a queue is full."""
        if any(bucket.is_full(now) for bucket in self.buckets):
            return None
        through = now
        for bucket in self.buckets:
            through = bucket.passes(size, through)
        self._last = max(self._last, through + self.delay + self._swung(through))
        return self._last

    def lost(self, segments: int) -> list[int]:
        """The lost ones of the next `segments`, counted from 0."""
        losses = []
        while self.loss and self._until_loss < segments:
            losses.append(self._until_loss)
            self._until_loss += 1 + self._draw()
        self._until_loss -= segments
        return losses

    def _draw(self) -> int:
        """Segments that pass before the next that doesn't."""
        if not self.loss:
            return 0
        return int(math.log(1.0 - self._lots.random()) / math.log1p(-self.loss))

    def _swung(self, at: float) -> float:
        if not self.jitter:
            return 0.0
        number, share = divmod(at / SWING, 1.0)
        before, after = (
            random.Random(f"jitter {self._seed} {int(number) + ahead}").uniform(-1.0, 1.0)
            for ahead in (0, 1)
        )
        return self.jitter * (before + share * (after - before))
