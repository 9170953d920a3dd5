"""Failure domains of nodes, so that a stage is not all in one.

Node names and hosts are self-declared; addresses cost money. So the block of the address from which
a node joined, as the registry sees it, counts first, and hosts only within a block. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, NamedTuple

BITS: Final = {4: 24, 6: 64}
"""Prefix bits per IP version of a block: about the least that one customer gets."""


class FailureDomain(NamedTuple):
    block: str = ""  # empty: the registry's own machine, or unknown
    host: str = ""


NOWHERE: Final = FailureDomain()


def block_of(host: str) -> str:
    """The block of an IP address; empty for a loopback address, and for other text."""
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
    """Whether `block_of` can return `text`."""
    return not text or block_of(text.partition("/")[0]) == text


def shared(place: FailureDomain, others: Collection[FailureDomain]) -> tuple[int, int]:
    """How many of `there` share the block, and how many the host; fewer is better."""
    blocks = sum(other.block == place.block for other in others)
    return blocks, sum(other.host == place.host for other in others)


def is_apart(place: FailureDomain, others: Collection[FailureDomain]) -> bool:
    """Whether `there` are in one block, or at one host of it, and `place` is not."""
    blocks, hosts = ({other[n] for other in others} for n in range(2))
    if len(blocks) != 1:
        return False
    return place.block not in blocks or (len(hosts) == 1 and place.host not in hosts)
