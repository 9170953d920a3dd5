"""Default of `--advertise`: the address that a node tells peers to dial.

A rented machine's own address may be known only to its neighbours. Its public one is in its
environment:

- vast.ai shares one address among containers and forwards each a few ports: `PUBLIC_IPADDR`, and
  for a container's port 7401 `VAST_TCP_PORT_7401`.
  docs.vast.ai/documentation/instances/connect/networking.
- RunPod does as well: `RUNPOD_PUBLIC_IP`, where the pod has one, and `RUNPOD_TCP_PORT_7401`.
  docs.runpod.io/pods/configuration/expose-ports and /pods/templates/environment-variables.
- AWS gives a machine its own public address, which its metadata service has (notices.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final, NamedTuple

from planaria.bootstrap.address import PORTS, Address, plain_ip
from planaria.bootstrap.address_probe import Endpoints


class Renter(NamedTuple):
    """A provider of rented containers, and the variables in their environment."""

    name: str
    host: str  # variable with the public address
    port: str  # prefix of the variable with the public port of a container's port
    remedy: str  # how to have a port forwarded; {0}: which


RENTERS: Final = (
    Renter("vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_", "`-p {0}:{0}` in its docker options"),
    Renter("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_", "{0} as a TCP port to expose"),
)


class Advertised(NamedTuple):
    address: Address
    why: str  # in words


def own_address(listen: Address, endpoints: Endpoints) -> Advertised:
    """This machine's own address: where it listens or, if that is everywhere, the local address of
    its connection to the registry."""
    if not listen.is_any:
        return Advertised(listen, "it listens there")
    address = listen._replace(host=endpoints.local)
    return Advertised(address, f"connections to the registry at {endpoints.remote} come from it")


def forwarded_address(listen: Address, environment: Mapping[str, str]) -> Advertised | None:
    """The public address of this port by a rented container's environment; None: none."""
    for renter in RENTERS:
        host, variable = environment.get(renter.host, ""), f"{renter.port}{listen.port}"
        port = environment.get(variable, "")
        if plain_ip(host) is not None and port.isdecimal() and 0 < int(port) <= PORTS:
            return Advertised(
                Address(host, int(port)), f"{renter.name} says so in {renter.host} and {variable}"
            )
    return None


def unforwarded_port(listen: Address, environment: Mapping[str, str]) -> str:
    """Warning that a rented container's port isn't forwarded; empty: no such container."""
    for renter in RENTERS:
        if any(name.startswith(renter.port) for name in environment):
            port = listen.port or 7401
            which = f"port {listen.port}" if listen.port else "whichever port is free"
            return (
                f"{renter.name} forwards nothing to {which} of this container, so other nodes "
                f"can't dial it: ask for {renter.remedy.format(port)}, and give --listen "
                f"0.0.0.0:{port}; or give --advertise none for a node that only dials out"
            )
    return ""


def is_known_otherwise(listen: Address, endpoints: Endpoints) -> bool:
    """Whether peers may know this machine by another address. False if it has a name or a global
    address, or if the registry is in a private network, as peers then are, too."""
    host = endpoints.local if listen.is_any else listen.host
    if listen.is_loopback or plain_ip(host) is None or _is_global(host):
        return False
    return _is_global(endpoints.remote) or ipaddress.ip_address(endpoints.remote).is_loopback


def _is_global(address: str) -> bool:
    return ipaddress.ip_address(address).is_global
