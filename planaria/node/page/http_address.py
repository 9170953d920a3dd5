"""Address and access of an HTTP server, from the command line, before its modules are loaded."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from planaria.bootstrap.address import Address
from planaria.bootstrap.credentials import CredentialsError


class TlsFiles(NamedTuple):
    """PEM files of a server's TLS."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class PageAddress:
    """Address, access and TLS of a page."""

    listen: Address
    token: str = ""
    keys: TlsFiles | None = None  # None: in plain text
    insecure: bool = False
    option: str = "--http"  # its option, for errors
    port_file: Path | None = None  # stores the chosen port, where `listen` has port 0

    def check(self) -> None:
        """Checks the address. Raises CredentialsError for a page that anybody could read, unless
        `insecure`, and OSError as `listen_at` does."""
        if not (self.listen.is_loopback or self.insecure or (self.token and self.keys)):
            raise CredentialsError(
                f"{self.option} {self.listen} can be reached from other machines: give --token and "
                "TLS, serve it on 127.0.0.1, or accept that others may read it with --insecure "
                "(planaria bootstrap: --insecure-http, with which nodes keep TLS)"
            )
        self.bind().close()

    def bind(self) -> socket.socket:
        """The page's listening socket. For port 0 of `listen` it tries the kept port, then any.
        Raises OSError, which says what to do about it."""
        if self.port_file is None or self.listen.port:
            return listen_at(self.listen, self.option)
        try:
            previous = self.listen._replace(port=int(self.port_file.read_bytes()))
            return listen_at(previous, self.option)
        except (OSError, OverflowError, ValueError):  # missing, or in use
            bound = listen_at(self.listen, self.option)
        with suppress(OSError):
            self.port_file.write_text(f"{bound.getsockname()[1]}\n")
        return bound

    @property
    def required_token(self) -> str:
        """The token that a browser must send; empty: none."""
        return "" if self.listen.is_loopback else self.token


def listen_at(listen: Address, option: str) -> socket.socket:
    """A listening socket at that address (port 0: any); `option`: its option, for errors. Raises
    OSError, which says what to do about it."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise OSError(
            f"can't serve HTTP at {listen}: {error.strerror or error}; choose another address with "
            f"{option} HOST:PORT, or {option} none"
        ) from error
    return bound
