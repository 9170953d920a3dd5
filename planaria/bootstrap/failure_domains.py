"""Where a node is, as far as one can tell, so that a stage isn't all in one place.

A name costs nothing, and neither does a host, which a node says of itself; addresses do. So what
counts first is the block of addresses from which a node has joined, as the registry sees it, and
only among those of one block their hosts. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, NamedTuple

BITS: Final = {4: 24, 6: 64}
"""Of an address that all in its block share: what one customer may have is seldom less."""


class FailureDomain(NamedTuple):
    block: str = ""  # empty: of the registry's own machine, or not known
    host: str = ""


NOWHERE: Final = FailureDomain()


def block_of(host: str) -> str:
    """The block of an IP address; empty for a machine's own, and for what is none."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(ip_network((address, BITS[address.version]), strict=False))


def is_block(text: str) -> bool:
    """Whether it is what `block_of` says of some address."""
    return not text or block_of(text.partition("/")[0]) == text


def shared(place: FailureDomain, there: Collection[FailureDomain]) -> tuple[int, int]:
    """How many of these are in its block, and how many at its host: what is better comes first."""
    blocks = sum(other.block == place.block for other in there)
    return blocks, sum(other.host == place.host for other in there)


def is_apart(place: FailureDomain, there: Collection[FailureDomain]) -> bool:
    """Whether these are all in one place, and it isn't that: in one block, or at one host in it."""
    blocks, hosts = ({other[n] for other in there} for n in range(2))
    if len(blocks) != 1:
        return False
    return place.block not in blocks or (len(hosts) == 1 and place.host not in hosts)
