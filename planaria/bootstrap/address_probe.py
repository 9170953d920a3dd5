"""Reachability of addresses below gRPC: name lookup, TCP connection, and local address."""

from __future__ import annotations

import asyncio
import enum
import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from planaria.bootstrap.address import Address

AGAIN = 0.5  # seconds until a failed name lookup is retried
_UNKNOWN = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Reachability(enum.Enum):
    OPEN = "accepts connections"
    REFUSED = "refuses connections: nothing listens there"
    UNKNOWN = "is unknown: there is no host of that name"
    UNRESOLVED = "can't be looked up: the name service (DNS) doesn't answer"
    SILENT = "doesn't answer"


NOBODY = tuple(answer for answer in Reachability if answer is not Reachability.OPEN)
"""Results after which no request can be made to an address, at least now."""


_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
NO_PROXY = (
    "planaria connects directly: open the registry's and the nodes' ports in the firewall, or put "
    "the machines in one VPN"
)


def proxies(environment: Mapping[str, str]) -> str:
    """Names the proxies that are set, not their values: these may hold passwords. Empty: none."""
    names = [name for name in environment if name.lower() in _PROXIES and environment[name]]
    if not names:
        return ""
    return f"a proxy is set ({', '.join(sorted(names))}), and gRPC connections don't use it"


class Endpoints(NamedTuple):
    """The IP addresses of both ends of a route."""

    local: str  # of this machine
    remote: str


async def probe(address: Address, seconds: float) -> Reachability:
    """Probes whether an address accepts connections, within `seconds`. A name with several
    addresses refuses if all of them do."""
    endpoints: list[tuple[str, int]] | None = None
    try:
        async with asyncio.timeout(seconds):
            endpoints = await _look_up(address)
            if not endpoints:
                return Reachability.UNKNOWN
            answers = await asyncio.gather(*(_connect(*endpoint) for endpoint in endpoints))
    except TimeoutError:
        return Reachability.UNRESOLVED if endpoints is None else Reachability.SILENT
    for answer in (Reachability.OPEN, Reachability.SILENT):
        if answer in answers:
            return answer
    return Reachability.REFUSED


async def probe_all(addresses: Sequence[str], seconds: float) -> dict[str, Reachability]:
    """Probes several addresses in parallel. Raises AddressError."""
    parsed = [Address.to_dial(address) for address in addresses]
    answers = await asyncio.gather(*(probe(address, seconds) for address in parsed))
    return dict(zip(addresses, answers, strict=True))


def why_unreachable(answers: Mapping[str, Reachability], final: Sequence[Reachability]) -> str:
    """Why no registry can be reached at these addresses, and the remedy; empty unless all results
    are among `final`."""
    if not all(answer in final for answer in answers.values()):
        return ""
    results = "; ".join(f"{address} {answer.value}" for address, answer in answers.items())
    remedies = []
    if Reachability.UNKNOWN in answers.values():
        remedies.append("Check the spelling of the name, or give an IP address")
    if Reachability.UNRESOLVED in answers.values():
        remedies.append("Check this machine's network and /etc/resolv.conf, or give an IP address")
    if Reachability.REFUSED in answers.values():
        remedies.append(
            "Check host and port, and that the registry runs there (`planaria bootstrap`) and "
            "listens to more than its own machine"
        )
    if Reachability.SILENT in answers.values():
        remedies.append("Check that a firewall lets the port through")
    return f"no registry can be reached: {results}. {'. '.join(remedies)}"


async def way_out(addresses: Sequence[str], seconds: float) -> Endpoints:
    """Finds the route from this machine to the first reachable one of these addresses. Repeats
    failed name lookups. Raises AddressError, and after `seconds` OSError, which names the
    addresses."""
    parsed = [Address.to_dial(address) for address in addresses]
    try:
        async with asyncio.timeout(seconds):
            while True:
                for address in parsed:
                    with suppress(TimeoutError):
                        for host, port in await _look_up(address):
                            with suppress(OSError):
                                return Endpoints(outward(host, port), host)
                await asyncio.sleep(AGAIN)
    except TimeoutError:
        raise OSError(
            f"this machine found no route to {', '.join(addresses)} in {seconds:g} s: check its "
            "network and name service, or give its address with --advertise HOST:PORT"
        ) from None


def outward(host: str, port: int) -> str:
    """This machine's address on the route to an IP address. Sends nothing. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


async def _look_up(address: Address) -> list[tuple[str, int]]:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _UNKNOWN:
            return []
        raise TimeoutError from error
    except UnicodeError:  # an invalid name
        return []
    return list(dict.fromkeys((str(sockaddr[0]), int(sockaddr[1])) for *_, sockaddr in infos))


async def _connect(host: str, port: int) -> Reachability:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return Reachability.REFUSED
    except OSError as error:
        # Without IPv6 there is no route to a name's IPv6 address, which then counts as absent.
        unusable = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        return Reachability.REFUSED if unusable else Reachability.SILENT
    writer.close()
    return Reachability.OPEN
