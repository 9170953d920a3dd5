"""Shared storage in etcd for a run's registries, of which one leads.

Keys below `planaria/RUN/`: `leader`, which exists while the leader's lease lasts; `number` and
`view`, the newest one; `decided/N`, the records of invites.py. Only the leader writes, in
transactions conditional on its term and on no other write since: so no two views have the same
number. Nothing is announced before it is written, and a leader that can't write resigns. The
authority's key is never stored here, and invites' secrets only as hashes.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.etcd import (
    Body,
    Etcd,
    EtcdAway,
    EtcdRefused,
    all_below,
    get,
    has_value,
    is_free,
    put,
    values,
    written,
)
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import Record
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.views import is_genuine

log = logging.getLogger(__name__)

LEASE: Final = 3
"""Seconds that a registry leads after etcd last received a renewal."""
RENEWALS: Final = 3  # per lease
ASKED: Final = 2.0  # seconds for a request outside of a term
READ: Final = 30.0  # seconds to read all decisions; the lease is renewed meanwhile


class StoreError(UserError):
    """The data in etcd is unusable; the message says why and what to do."""


class NotLeading(Exception):  # noqa: N818  what it says
    """This registry does not lead; the message says why."""


@dataclass
class Term:
    """One registry's term. Its end is counted from when a renewal was sent; etcd received that
    later, so the term ends no sooner there than here."""

    lease: str
    value: bytes  # value of the key `leader`, unique to the term
    until: float

    def lasts(self, now: float) -> bool:
        return now < self.until


class Store:
    """One registry's store. `view`: the newest; None: none was issued. Call `campaign` first."""

    def __init__(
        self,
        etcd: Etcd,
        run: str,
        key: Identity,
        at: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: the run's. `at`: this registry's address, for its clients."""
        self._etcd, self._run, self._key, self._now = etcd, run, key, clock
        self._top = f"planaria/{run}/"
        self._me = {"at": at, "key": key.public.hex()}
        self._term: Term | None = None
        self._number = b""  # number of `view` in etcd; empty: none
        self._decided = 0
        self.view: View | None = None

    # -- leadership ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this registry's term lasts, as far as it can know."""
        term = self._term
        return term is not None and term.lasts(self._now())

    def leader(self) -> str:
        """The leader's address; empty: none. Raises EtcdAway, EtcdRefused, and StoreError if the
        leader has another run key."""
        leaders = values(self._etcd.ask("kv/range", {"key": written(self._top + "leader")}, ASKED))
        return self._address_in(leaders[0]) if leaders else ""

    def campaign(self) -> bool:
        """Tries to become leader, and reads the former leader's `view`. Raises
        EtcdAway, EtcdRefused, StoreError."""
        sent = self._now()
        lease = str(self._etcd.ask("lease/grant", {"TTL": str(LEASE)}, ASKED)["ID"])
        value = json.dumps(self._me | {"term": secrets.token_hex(8)}).encode()
        key = self._top + "leader"
        body = {"compare": [is_free(key)], "success": [put(key, value, lease)]}
        if not self._etcd.ask("kv/txn", body, ASKED).get("succeeded"):
            self._revoke(lease)
            return False
        self._term = Term(lease, value, sent + LEASE)
        try:
            self._read_view()
        except (EtcdAway, EtcdRefused, StoreError):
            self.resign()
            raise
        return True

    def renew(self) -> None:
        """Renews the lease; after a failure the term lasts until its present end."""
        term, sent = self._term, self._now()
        if term is None:
            return
        try:
            body = {"ID": term.lease}
            answer = self._etcd.ask("lease/keepalive", body, max(0.0, term.until - sent))
        except (EtcdAway, EtcdRefused) as error:
            log.warning(
                "no renewal; this registry leads for %.1f s more: %s",
                term.until - self._now(),
                error,
            )
            return
        if int(answer.get("result", {}).get("TTL", 0)):
            term.until = max(term.until, sent + LEASE)
        else:
            self._end_term(term)

    def resign(self) -> None:
        """Ends the term, and revokes the lease if etcd answers."""
        term, self._term = self._term, None
        if term is not None:
            self._revoke(term.lease)

    # -- data ------------------------------------------------------------------------------------

    def append(self, view: View) -> None:
        """Writes a view to etcd. Raises NotLeading: etcd may then have the view, unannounced."""
        key = self._top + "number"
        follows = has_value(key, self._number) if self._number else is_free(key)
        number, content = str(view.number).encode(), view.SerializeToString()
        if view.number <= int(self._number or b"0"):
            raise NotLeading(f"view {view.number} is not newer than view {self._number.decode()}")
        self._write(follows, [put(key, number)], self._top + "view", content)
        self.view, self._number = view, number

    def records(self) -> list[Record]:
        """Reads all decisions about invites. Raises EtcdAway, EtcdRefused, StoreError."""
        reply = self._etcd.ask("kv/range", all_below(self._top + "decided/"), READ)
        self._decided = len(reply.get("kvs", []))
        try:
            return [json.loads(value) for value in values(reply)]
        except (ValueError, RecursionError) as error:
            raise self._invalid_data("the list of decisions", error) from error

    def decide(self, record: Record) -> None:
        """Writes a decision about invites. Raises NotLeading."""
        key = f"{self._top}decided/{self._decided:010}"
        self._write(is_free(key), [], key, json.dumps(record).encode())
        self._decided += 1

    # -- inside ----------------------------------------------------------------------------------

    def _write(self, follows: Body, puts: list[Body], key: str, content: bytes) -> None:
        """Writes keys at once if this term lasts and `follows` holds. Raises NotLeading."""
        term, now = self._term, self._now()
        if term is None or not term.lasts(now):
            raise NotLeading("its lease has expired")
        body = {
            "compare": [has_value(self._top + "leader", term.value), follows],
            "success": [*puts, put(key, content)],
            "failure": [get(self._top + "leader"), get(key)],
        }
        try:
            answer = self._etcd.ask("kv/txn", body, term.until - now)
        except (EtcdAway, EtcdRefused) as error:
            self._end_term(term)
            raise NotLeading(f"its decision can't be written: {error}") from error
        if not answer.get("succeeded"):
            leader, current = (
                values(response["response_range"]) for response in answer["responses"]
            )
            if leader != [term.value]:
                self._end_term(term)
                raise NotLeading("another registry leads")
            if current != [content]:  # equal: an unanswered attempt took effect
                self._end_term(term)
                raise NotLeading("etcd has newer data than it has read")
        if not term.lasts(self._now()):
            raise NotLeading("its lease has expired")

    def _end_term(self, term: Term) -> None:
        if self._term is term:
            self._term = None

    def _revoke(self, lease: str) -> None:
        with suppress(EtcdAway, EtcdRefused):  # the lease expires anyway
            self._etcd.ask("lease/revoke", {"ID": lease}, ASKED)

    def _address_in(self, value: bytes) -> str:
        """The leader's address in a value of the key `leader`. Raises StoreError."""
        try:
            value_of = json.loads(value)
            address, key = str(value_of["at"]), str(value_of["key"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._invalid_data("the leader's entry", error) from error
        if key != self._me["key"]:
            raise StoreError(
                f"the leader at {readable(address)} has another key than this registry: give all "
                "registries of the run the same authority.pem, each in its folder (--authority DIR)"
            )
        return address

    def _read_view(self) -> None:
        """Reads the newest view from etcd. Raises EtcdAway, EtcdRefused, StoreError."""
        body = {"success": [get(self._top + "number"), get(self._top + "view")]}
        answer = self._etcd.ask("kv/txn", body, ASKED)
        number, content = (values(response["response_range"]) for response in answer["responses"])
        self._number, self.view = b"", None
        if not number and not content:
            return
        try:
            view = View.FromString(content[0])
            if int(number[0]) != view.number:
                raise ValueError(f"it is view {view.number}, not {number[0][:20]!r}")
        except (DecodeError, ValueError, IndexError) as error:
            raise self._invalid_data("the newest view", error) from error
        if not is_genuine(view, self._key.public, self._run):
            raise StoreError(
                f"view {view.number} in etcd is not signed by this registry's key: give all of a "
                "run's registries the same authority.pem, each in its folder (--authority DIR), or "
                "give the run another name"
            )
        self.view, self._number = view, number[0]

    def _invalid_data(self, subject: str, error: Exception) -> StoreError:
        return StoreError(
            f"{subject} in etcd, below {self._top}, is invalid ({error}): "
            "restore it from a copy, or give the run another name"
        )
