"""HOST:PORT, as people write it and processes tell each other."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

PORTS = 65535  # the highest


class AddressError(ValueError):
    """The text is no address; the message says what is wrong with it, and how to write it."""


class Address(NamedTuple):
    """Where a process listens. `str` has an IPv6 host in brackets; `host` never has them."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises AddressError."""
        scheme, separator, _ = text.partition("://")
        if separator:
            raise _wrong(text, f"begins with {scheme}://: leave that out, give it as HOST:PORT")
        host, colon, port = text.rpartition(":")
        if not colon or host.startswith("[") > host.endswith("]"):
            raise _wrong(text, "has no port: give it as HOST:PORT")
        if not host:
            raise _wrong(text, "has no host: give it as HOST:PORT (0.0.0.0:PORT listens to all)")
        if {"[", "]"} & set(host):
            if not (host[0] + host[-1] == "[]" and _is_ipv6(host[1:-1])):
                raise _wrong(text, "has no IPv6 address in its brackets")
        elif "/" in host or not host.isprintable() or any(c.isspace() for c in host):
            raise _wrong(text, "is more than HOST:PORT: leave out what is before or after it")
        elif ":" in host:
            raise _wrong(text, "has colons in its host: give an IPv6 address as [ADDRESS]:PORT")
        if not (port.isascii() and port.isdecimal()):
            raise _wrong(text, f"has {port!r} for a port: give a number from 0 to {PORTS}")
        if int(port) > PORTS:
            raise _wrong(text, f"has port {port}: a port is at most {PORTS}")
        return cls(host.strip("[]"), int(port))

    @classmethod
    def to_dial(cls, text: str) -> Address:
        """Parses as `parse` does, and refuses port 0, which can't be dialled."""
        address = cls.parse(text)
        if address.port == 0:
            raise _wrong(text, "has port 0, which nobody can dial: give the one listened on")
        return address

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it can be reached from its own machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_any(self) -> bool:
        """Whether it stands for all addresses of its machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _wrong(text: str, what: str) -> AddressError:
    return AddressError(f"the address {text!r} {what}")
