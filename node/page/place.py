"""Where something is served over HTTP, and to whom: what a command line says of it, before what
serves it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from planaria.bootstrap.address import Address
from planaria.bootstrap.credentials import CredentialsError


class Keys(NamedTuple):
    """PEM files of a server's TLS."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Place:
    """Where a page is served, and to whom."""

    listen: Address
    token: str = ""
    keys: Keys | None = None  # None: in plain text
    insecure: bool = False
    option: str = "--http"  # by which it was named

    def check(self) -> None:
        """Raises CredentialsError for a page that anybody could read, unless `insecure`."""
        if self.listen.is_loopback or self.insecure or (self.token and self.keys):
            return
        raise CredentialsError(
            f"{self.option} {self.listen} can be reached from other machines: give --token and "
            "TLS, serve it on 127.0.0.1, or accept that others may read it with --insecure"
        )

    @property
    def asked_for(self) -> str:
        """The token that a browser has to show; empty: none."""
        return "" if self.listen.is_loopback else self.token
