"""Failure domains of nodes, so that a stage is not all in one.

Node names and hosts are self-declared; addresses cost money. So the block of the address from which
a node joined, as the registry sees it, counts first, and hosts only within a block. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_network
from typing import Final, NamedTuple

from planaria.bootstrap.address import plain_ip

BITS: Final = {4: 24, 6: 64}
"""Prefix bits per IP version of a block: about the least that one customer gets."""


class FailureDomain(NamedTuple):
    """Where a node is: nodes of one block, or at one host of it, may fail together."""

    block: str = ""  # empty: the registry's own machine, or unknown
    host: str = ""


NOWHERE: Final = FailureDomain()


def block_of(host: str) -> str:
    """The address block of an IP address; empty for a loopback address, and for other text."""
    ip = plain_ip(host.partition("%")[0])
    if ip is None or ip.is_loopback:
        return ""
    return str(ip_network((ip, BITS[ip.version]), strict=False))


class Census:
    """Counts nodes by failure domain."""

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __init__(self, places: Iterable[FailureDomain] = ()) -> None:
        self._blocks, self._hosts = Counter[str](), Counter[str]()
        for place in places:
            self.add(place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Census) and vars(self) == vars(other)

    def add(self, place: FailureDomain) -> None:
        self._blocks[place.block] += 1
        self._hosts[place.host] += 1

    def shared(self, place: FailureDomain) -> tuple[int, int]:
        """How many of the nodes share the block of `place`, and how many its host."""
        return self._blocks[place.block], self._hosts[place.host]

    def is_apart(self, place: FailureDomain) -> bool:
        """Whether the nodes are in one block, or at one host of it, and `place` is not."""
        if len(self._blocks) != 1:
            return False
        alone = len(self._hosts) == 1 and place.host not in self._hosts
        return place.block not in self._blocks or alone
