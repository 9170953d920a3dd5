"""HOST:PORT addresses: parsing, and restrictions on addresses named by other nodes."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

PORTS = 65535  # the highest port number
LONGEST = 300  # characters; longer than any host name
IP = ipaddress.IPv4Address | ipaddress.IPv6Address
METADATA: Final = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200"))
)
"""Cloud metadata services, which give a machine its own secrets."""
_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBER: Final = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
_THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class AddressError(ValueError):
    """The text is no address; the message says what is wrong with it, and how to write it."""


class Address(NamedTuple):
    """A listening address. `str` puts an IPv6 host in brackets; `host` is without them."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses the address HOST:PORT. Raises AddressError."""
        scheme, separator, _ = text.partition("://")
        if separator:
            raise _wrong(text, f"begins with {scheme}://: leave that out, give it as HOST:PORT")
        host, colon, port = text.rpartition(":")
        if not colon or host.startswith("[") > host.endswith("]"):
            raise _wrong(text, "has no port: give it as HOST:PORT")
        if not host:
            raise _wrong(text, "has no host: give it as HOST:PORT (0.0.0.0:PORT listens to all)")
        if {"[", "]"} & set(host):
            bracketed = host[0] + host[-1] == "[]" and ":" in host
            if not (bracketed and plain_ip(host[1:-1]) is not None):
                raise _wrong(text, "has no IPv6 address in its brackets")
        elif "/" in host or not host.isprintable() or any(c.isspace() for c in host):
            raise _wrong(text, "is more than HOST:PORT: leave out what is before or after it")
        elif ":" in host:
            raise _wrong(text, "has colons in its host: give an IPv6 address as [ADDRESS]:PORT")
        if not (port.isascii() and port.isdecimal()):
            raise _wrong(text, f"has the port {port!r}: give a number from 0 to {PORTS}")
        if len(port) > len(str(PORTS)) or int(port) > PORTS:
            raise _wrong(text, f"has port {port}: a port is at most {PORTS}")
        return cls(host.strip("[]"), int(port))

    @classmethod
    def to_dial(cls, text: str) -> Address:
        """Parses an address to dial, HOST:PORT; refuses port 0, too. Raises AddressError."""
        address = cls.parse(text)
        if address.port == 0:
            raise _wrong(text, "has port 0, which can't be dialled: give the port listened on")
        return address

    @classmethod
    def parse_host(cls, text: str, port: int) -> Address:
        """Parses HOST[:PORT] to dial; `port`: the default. Raises AddressError."""
        alone = text.count(":") != 1 and not text.rpartition("]")[2].startswith(":")
        return cls.to_dial(f"{text}:{port}" if alone else text)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_any(self) -> bool:
        """Whether this is the wildcard address, which stands for all of its machine's."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


class Reach(NamedTuple):
    """Address ranges, beyond public ones, that a stranger may name for others to dial. Loopback and
    link-local services are often private to the machine or link."""

    loopback: bool = False
    link_local: bool = False

    @classmethod
    def of(cls, hosts: Iterable[str]) -> Reach:
        """The address ranges that a peer at one of `hosts`, IP addresses or names, may name. A peer
        on this machine or link may name others there."""
        hosts = list(hosts)
        ips = [ip for host in hosts if (ip := plain_ip(host.partition("%")[0])) is not None]
        is_local = any(ip.is_loopback for ip in ips) or any(map(_is_local_name, hosts))
        return cls(is_local, is_local or any(ip.is_link_local for ip in ips))


EVERYWHERE: Final = Reach(loopback=True, link_local=True)


@lru_cache(maxsize=4096)  # each node checks all members of each view
def not_to_dial(text: str, reach: Reach) -> str:
    """Why an address named by another party must not be dialled; empty: it may be. Names are not
    resolved, see `resolved_not_to_dial`."""
    try:
        host, _ = Address.to_dial(text)
    except AddressError as error:
        return str(error)
    ip = plain_ip(host)
    if "%" in host:
        why = "has a zone, which is valid on one machine only: leave out % and the rest"
    elif ip is not None:
        why = _why_closed(ip, reach)
    elif _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        why = "has a number for a host: give an IP address in full, or a name"
    elif not _NAME.fullmatch(host):
        why = "has an invalid host name: use ASCII letters, digits, dots and dashes"
    else:
        why = "" if reach.loopback or not _is_local_name(host) else _OWN_MACHINE
    return str(_wrong(text, why)) if why else ""


async def resolved_not_to_dial(text: str, reach: Reach) -> str:
    """As `not_to_dial`, with the address's name resolved now. An unresolvable name passes."""
    if why := not_to_dial(text, reach):
        return why
    for host in await _resolved(Address.to_dial(text)):
        ip = plain_ip(host)
        if ip is not None and (why := _why_closed(ip, reach)):
            return f"the address {text!r} resolves to {host}, which {why}"
    return ""


async def reach_by(addresses: Iterable[str]) -> Reach:
    """The address ranges that a service at these addresses may name. Raises AddressError."""
    import asyncio  # deferred: agents parse addresses without an event loop

    parsed = [Address.parse(address) for address in addresses]
    resolved = await asyncio.gather(*map(_resolved, parsed))
    return Reach.of([host for hosts in resolved for host in hosts])


async def _resolved(address: Address) -> list[str]:
    """The IP addresses of a host; a name that can't be resolved is returned as it is."""
    import asyncio

    host, port = address
    if plain_ip(host) is not None:
        return [host]
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [host]
    return [str(sockaddr[0]).partition("%")[0] for *_, sockaddr in infos]


_OWN_MACHINE: Final = (
    "can be reached on its own machine only: give one that other machines can reach"
)


def _why_closed(ip: IP, reach: Reach) -> str:
    """Why an IP address named by another party must not be dialled; empty: it may be."""
    if ip in METADATA:
        return "is a cloud's metadata service, which has secrets: no node dials it for others"
    if ip.is_unspecified or ip in _THIS_NETWORK:
        return "stands for all addresses of a machine: give one that other machines can reach"
    if ip.is_loopback:
        return "" if reach.loopback else _OWN_MACHINE
    if ip.is_link_local:
        local = "is link-local: nodes dial it only if the registry has a link-local address, too"
        return "" if reach.link_local else local
    if ip.is_multicast or ip.is_reserved or ip == ipaddress.IPv4Address("255.255.255.255"):
        return "is a multicast or reserved address"
    return ""


def unmapped(host: str) -> str:
    """The IPv4 address in an IPv6 form of it; other hosts unchanged."""
    ip = plain_ip(host)
    return str(ip) if isinstance(ip, ipaddress.IPv4Address) else host


def plain_ip(host: str) -> IP | None:
    """The host's IP address, with embedded IPv4 extracted; None: a name."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return ipaddress.IPv4Address(ip.packed[-4:])
        return ip.ipv4_mapped or ip.sixtofour or ip
    return ip


def _is_local_name(host: str) -> bool:
    name = host.rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost")


def _wrong(text: str, problem: str) -> AddressError:
    return AddressError(f"the address {text[:LONGEST]!r} {problem}")
