"""A minimal etcd client for registries that share a run: JSON over HTTP (v3), at the client port.

Calls block, as journal writes do, and have a deadline. Each call opens a connection: calls are few,
and one that hangs does not delay the others.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from planaria.bootstrap.address import Address
from planaria.bootstrap.errors import UserError

ATTEMPT: Final = 1.0  # seconds until one etcd node times out
LONGEST_ANSWER: Final = 64 * 2**20  # bytes
_PASSING: Final = frozenset([1, 2, 4, 5, 8, 10, 13, 14])
"""gRPC codes of transient errors, or of errors of one node."""

Body = Mapping[str, Any]
"""A value that can be written as JSON."""


class EtcdAway(Exception):  # noqa: N818  what it says
    """No answer in time; the request may or may not have taken effect. The message names the nodes
    and their errors."""


class EtcdRefused(UserError):  # noqa: N818  an answer, not a fault
    """etcd refused the request, and a retry won't help; the message says why."""


class EtcdPlace(NamedTuple):
    """etcd's addresses, and the TLS files for them."""

    addresses: tuple[Address, ...]
    tls: bool
    ca: Path | None = None  # None: the system's authorities
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def parse(cls, text: str) -> EtcdPlace:
        """Parses --store: etcd://HOST:PORT[,HOST:PORT] on loopback, or
        etcds://HOST:PORT,...[?ca=FILE&cert=FILE&key=FILE]. Raises ValueError."""
        parts = urlsplit(text)
        options = {name: Path(values[-1]) for name, values in parse_qs(parts.query).items()}
        if parts.scheme not in ("etcd", "etcds") or parts.path not in ("", "/") or parts.fragment:
            raise ValueError(f"--store {text!r}: write etcds://HOST:PORT,HOST:PORT?ca=FILE")
        if "@" in parts.netloc:
            raise ValueError("--store: other users can read a password there; use key and cert")
        tls = parts.scheme == "etcds"
        if unknown := sorted(options.keys() - {"ca", "cert", "key"}):
            raise ValueError(f"--store: {unknown[0]!r} is unknown; known are ca, cert and key")
        if options and not tls:
            raise ValueError("--store: etcd:// is plain text and needs no files; write etcds://")
        if ("cert" in options) != ("key" in options):
            raise ValueError("--store: give both cert and key, or neither")
        addresses = tuple(Address.to_dial(address) for address in parts.netloc.split(","))
        unencrypted = [address for address in addresses if not (tls or address.is_loopback)]
        if unencrypted:
            raise ValueError(
                f"--store: {unencrypted[0]} is on another machine, and etcd:// is plain text: "
                "write etcds://, with ?ca=FILE if this machine doesn't trust its authority"
            )
        return cls(addresses, tls, options.get("ca"), options.get("cert"), options.get("key"))

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


class Etcd:
    def __init__(self, place: EtcdPlace) -> None:
        """Loads the TLS files. Raises ValueError, which names an unusable file."""
        self.place = place
        self._context = _context(place) if place.tls else None
        self._at = 0  # index of the address that answered last

    def ask(self, path: str, body: Body, seconds: float) -> dict[str, Any]:
        """Sends etcd's nodes a request in turn until one answers. A node that failed to answer may
        have executed the request too. Raises EtcdAway and EtcdRefused."""
        end, failures = time.monotonic() + seconds, []
        addresses, at = self.place.addresses, self._at
        for offset in range(len(addresses)):
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            address = addresses[(at + offset) % len(addresses)]
            try:
                answer = self._ask_at(address, path, body, min(remaining, ATTEMPT))
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{address}: {str(error) or type(error).__name__}")
            else:
                self._at = (at + offset) % len(addresses)
                return answer
        reasons = "; ".join(failures) or "no time was left for a request"
        raise EtcdAway(f"etcd at {self.place} doesn't answer ({reasons})")

    def _ask_at(self, address: Address, path: str, body: Body, seconds: float) -> dict[str, Any]:
        if self._context is None:
            link = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
        else:
            link = http.client.HTTPSConnection(
                address.host, address.port, timeout=seconds, context=self._context
            )
        try:
            content = json.dumps(body).encode()
            link.request("POST", f"/v3/{path}", content, {"Content-Type": "application/json"})
            response = link.getresponse()
            content_read = response.read(LONGEST_ANSWER)
        finally:
            link.close()
        answer = json.loads(content_read)
        if not isinstance(answer, dict):
            raise ValueError(f"its answer is no JSON object: {content_read[:40]!r}")
        if response.status != http.HTTPStatus.OK or "error" in answer:
            why = str(answer.get("message") or answer.get("error") or response.reason)[:200]
            if answer.get("code", 2) in _PASSING:
                raise ValueError(why)
            raise EtcdRefused(f"etcd at {address} refuses the request: {why}")
        return answer


def _context(place: EtcdPlace) -> ssl.SSLContext:
    """The TLS context for etcd's nodes, with the files that `place` names. Raises ValueError."""
    try:
        context = ssl.create_default_context(cafile=place.ca)
    except OSError as error:  # includes errors of ssl
        raise ValueError(f"--store: can't load ca={place.ca}: {error}") from error
    if place.certificate is not None:
        try:
            context.load_cert_chain(place.certificate, place.key)
        except OSError as error:
            files = f"cert={place.certificate} and key={place.key}"
            raise ValueError(f"--store: can't load {files}: {error}") from error
    return context


# -- requests in etcd's JSON format ----------------------------------------------------------------


def written(content: bytes | str) -> str:
    """A key or value as etcd's JSON has it: in base64."""
    return b64encode(content.encode() if isinstance(content, str) else content).decode()


def has_value(key: str, value: bytes) -> Body:
    """A transaction condition: the key has this value."""
    return {"key": written(key), "target": "VALUE", "result": "EQUAL", "value": written(value)}


def is_free(key: str) -> Body:
    """A transaction condition: the key does not exist."""
    return {"key": written(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def put(key: str, value: bytes, lease: str = "0") -> Body:
    return {"request_put": {"key": written(key), "value": written(value), "lease": lease}}


def get(key: str) -> Body:
    return {"request_range": {"key": written(key)}}


def all_below(prefix: str) -> Body:
    """A kv/range request: all keys with this prefix, in order."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return {
        "key": written(prefix),
        "range_end": written(end),
        "sort_target": "KEY",
        "sort_order": "ASCEND",
    }


def values(reply: Body) -> list[bytes]:
    """The values in etcd's reply to a kv/range request."""
    return [b64decode(item.get("value", "")) for item in reply.get("kvs", [])]
