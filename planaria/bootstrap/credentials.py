"""Credentials of connections: mutual TLS, and a join token shared by the run."""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from planaria.bootstrap.address import Address
from planaria.bootstrap.authority import DOMAIN, CertifiedKey, Role
from planaria.bootstrap.errors import UserError

log = logging.getLogger(__name__)

TOKEN = "planaria-token"  # key of the metadata


class CredentialsError(UserError):
    """The credentials are unusable; the message names the file or address, and the remedy."""


class Certified:
    """This process's certificates from the run's authority, renewed before they expire: new
    connections use the newest one."""

    def __init__(
        self,
        pair: CertifiedKey,
        issue: Callable[[], CertifiedKey] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`issue`: returns the next certificate at half the lifetime. Without it, callers use
        `renew`; `keep_renewed`, if set, does so until cancelled."""
        self._issue, self._now = issue, clock
        self.keep_renewed: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.renew(pair)

    def renew(self, pair: CertifiedKey) -> None:
        self._pair = pair
        self._channel = grpc.ssl_channel_credentials(pair.authority, pair.key, pair.certificate)

    @property
    def pair(self) -> CertifiedKey:
        if self._issue is not None and self._pair.is_due(self._now()):
            self.renew(self._issue())
        return self._pair

    @property
    def channel(self) -> grpc.ChannelCredentials:
        _ = self.pair  # may renew
        return self._channel

    def server(self, mutual: bool = True) -> grpc.ServerCredentials:
        """Credentials of a server. `mutual`: whether clients must show a certificate, too."""
        shown = self.pair

        def newest() -> grpc.ServerCertificateConfiguration | None:
            """The new certificate, or None if unchanged. gRPC asks at each handshake, and may crash
            if the certificate changes while another handshake begins."""
            nonlocal shown
            pair = self.pair
            if pair is shown:
                return None
            shown = pair
            return _configuration(pair)

        return grpc.dynamic_ssl_server_credentials(_configuration(shown), newest, mutual)  # type: ignore[arg-type]


def _configuration(pair: CertifiedKey) -> grpc.ServerCertificateConfiguration:
    shown = [(pair.key, pair.certificate)]
    return grpc.ssl_server_certificate_configuration(shown, pair.authority)


@dataclass(frozen=True)
class Credentials:
    """What both ends of a connection show each other; by default nothing, in plain text."""

    server: grpc.ServerCredentials | None = None
    channel: grpc.ChannelCredentials | None = None
    token: str = ""
    certified: Certified | None = None  # None: no certificates, or those of another authority

    def __post_init__(self) -> None:
        if not (self.token.isascii() and self.token.isprintable()):
            raise CredentialsError("the join token may contain printable ASCII characters only")

    @classmethod
    def load(
        cls,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        token: str = "",
    ) -> Credentials:
        """Loads PEM files for mutual TLS, all three or none. Raises CredentialsError."""
        if ca is None and certificate is None and key is None:
            return cls(token=token)
        if ca is None or certificate is None or key is None:
            named = (("CA", ca), ("certificate", certificate), ("key", key))
            missing = ", ".join(name for name, path in named if path is None)
            raise CredentialsError(
                f"TLS needs three files, and the {missing} is missing; name CA, certificate and key"
            )
        authority, chain = _read("CA", ca), _read("certificate", certificate)
        private = _read("key", key)
        return cls(
            server=grpc.ssl_server_credentials([(private, chain)], authority, True),
            channel=grpc.ssl_channel_credentials(authority, private, chain),
            token=token,
        )

    @classmethod
    def of(cls, certified: Certified, token: str = "") -> Credentials:
        return cls(certified.server(), certified.channel, token, certified)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a client adds to each call."""
        return ((TOKEN, self.token),) if self.token else ()

    def check(self, metadata: Mapping[str, str]) -> str | None:
        """Why the caller is refused; None: it is accepted."""
        shown = metadata.get(TOKEN, "")
        if not self.token or hmac.compare_digest(shown.encode(), self.token.encode()):
            return None
        if not shown:
            return "this run requires a join token; give it with --token"
        return "the join token is not this run's; check --token on both sides"


PLAIN = Credentials()


def channel(
    address: str,
    credentials: Credentials,
    options: Sequence[tuple[str, str | int]] = (),
    holder: str = Role.NODE,
) -> grpc.aio.Channel:
    """Opens a gRPC channel to HOST:PORT, with TLS if the credentials have it. The dns scheme keeps
    gRPC from taking `unix:80` for a file. `holder`: the role or instance that the server's
    certificate must name; certificates of another authority must name the host instead."""
    target = f"dns:///{address}"
    if credentials.certified is not None:
        named = (*options, ("grpc.ssl_target_name_override", holder + DOMAIN))
        return grpc.aio.secure_channel(target, credentials.certified.channel, options=named)
    if credentials.channel is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials.channel, options=options)


def clock_hint(error: str) -> str:
    """A hint to append to a gRPC error about an expired or future certificate; else empty."""
    if "certificate has expired" not in error and "certificate is not yet valid" not in error:
        return ""
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f". This machine's clock says {now} UTC: set it if that is wrong"


def add_port(
    server: grpc.aio.Server, listen: str, credentials: Credentials, insecure: bool = False
) -> int:
    """Binds a gRPC server to HOST:PORT (port 0: any) and returns the port. Raises the errors of
    `check_port`."""
    address = Address.parse(listen)
    check_port(address, credentials, insecure)
    if credentials.server is None and not address.is_loopback:
        log.warning(
            "INSECURE: %s is open to other machines in plain text; anyone on the network path "
            "can read and change messages",
            listen,
        )
    shows = credentials.server
    if credentials.certified is not None:
        shows = credentials.certified.server()  # a separate one: it must request its first pair
    try:
        if shows is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, shows)
    except RuntimeError as error:
        raise OSError(why_not_free(address)) from error


def check_port(listen: Address, credentials: Credentials, insecure: bool = False) -> None:
    """Checks that this process may listen at an address. Raises CredentialsError for plain text
    beyond this machine without `insecure`, and OSError for an unavailable address."""
    if credentials.server is None and not (listen.is_loopback or insecure):
        raise CredentialsError(
            f"{listen} can be reached from other machines, and there is no TLS; join by an "
            "invite, give CA, certificate and key, listen on 127.0.0.1, or accept plain text with "
            "--insecure"
        )
    try:
        places = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(
            f"can't listen on {listen}: the host {listen.host!r} is unknown; 0.0.0.0:PORT listens "
            "on all of this machine's addresses"
        ) from error
    if not any(_is_free(family, place) for family, _, _, _, place in places):
        raise OSError(why_not_free(listen))


def _is_free(family: int, place: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError:
        return False
    return True


def why_not_free(listen: Address) -> str:
    return (
        f"can't listen on {listen}: the address is in use, or not this machine's; "
        "stop what listens there, or choose another with --listen HOST:PORT"
    )


def _read(kind: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"can't read the {kind} file {path}: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise CredentialsError(f"the {kind} file {path} is not in PEM format")
    return content
