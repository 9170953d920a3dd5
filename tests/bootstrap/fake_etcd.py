"""The part of etcd that store.py uses, in memory, with the test's clock and faults."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from planaria.bootstrap.etcd import EtcdAway, written
from planaria.bootstrap.store import LEASE


class Fate(Enum):
    """The fate of a request to etcd."""

    ANSWERED = "answered"
    LOST = "lost"
    UNANSWERED = "unanswered"  # done, but no answer arrives
    LATE = "late"  # done when `catch_up` is called


class FakeEtcd:
    def __init__(self) -> None:
        self.now = 0.0
        self.values: dict[str, bytes] = {}
        self.history: list[tuple[str, bytes]] = []  # all writes, in order
        self._leases: dict[str, float] = {}  # ids -> when they end
        self._bound: dict[str, str] = {}  # keys -> ids of leases
        self._granted = 0
        self._late: list[tuple[str, Mapping[str, Any]]] = []

    def link(self, fate: Callable[[], Fate] = lambda: Fate.ANSWERED) -> Link:
        return Link(self, fate)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        for lease, end in list(self._leases.items()):
            if self.now >= end:
                self._end(lease)

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for path, body in late:
            with suppress(EtcdAway):
                self.do(path, body)

    def do(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        match path:
            case "lease/grant":
                self._granted += 1
                self._leases[str(self._granted)] = self.now + int(body["TTL"])
                return {"ID": str(self._granted), "TTL": body["TTL"]}
            case "lease/keepalive":
                if body["ID"] not in self._leases:
                    return {"result": {"ID": body["ID"]}}
                self._leases[body["ID"]] = self.now + LEASE
                return {"result": {"ID": body["ID"], "TTL": str(LEASE)}}
            case "lease/revoke":
                self._end(body["ID"])
                return {}
            case "kv/range":
                return self._range(body)
            case "kv/txn":
                succeeded = all(map(self._holds, body.get("compare", ())))
                if succeeded and not set(map(_lease, body.get("success", ()))) <= {
                    "0",
                    *self._leases,
                }:
                    raise EtcdAway("requested lease not found")
                done = body.get("success" if succeeded else "failure", ())
                return {"succeeded": succeeded, "responses": [self._one(step) for step in done]}
        raise AssertionError(path)

    def _holds(self, compare: Mapping[str, Any]) -> bool:
        value = self.values.get(b64decode(compare["key"]).decode())
        if compare["target"] == "CREATE":
            return value is None
        return value == b64decode(compare["value"])

    def _one(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "request_range" in request:
            return {"response_range": self._range(request["request_range"])}
        body = request["request_put"]
        key, value = b64decode(body["key"]).decode(), b64decode(body["value"])
        self.values[key] = value
        self.history.append((key, value))
        if body["lease"] != "0":
            self._bound[key] = body["lease"]
        return {"response_put": {}}

    def _range(self, body: Mapping[str, Any]) -> dict[str, Any]:
        begin, end = b64decode(body["key"]), b64decode(body.get("range_end", ""))
        pairs = sorted(
            (key, value)
            for key, value in self.values.items()
            if (begin <= key.encode() < end if end else key.encode() == begin)
        )
        return {"kvs": [{"key": written(key), "value": written(value)} for key, value in pairs]}

    def _end(self, lease: str) -> None:
        self._leases.pop(lease, None)
        for key in [key for key, bound in self._bound.items() if bound == lease]:
            del self._bound[key], self.values[key]


def _lease(request: Mapping[str, Any]) -> str:
    return str(request.get("request_put", {}).get("lease", "0"))


class Link:
    """One registry's link to etcd."""

    def __init__(self, etcd: FakeEtcd, fate: Callable[[], Fate]) -> None:
        self._etcd, self.fate = etcd, fate

    def ask(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        fate = self.fate()
        if fate is Fate.LATE:
            self._etcd._late.append((path, body))
        answer = None
        if fate in (Fate.ANSWERED, Fate.UNANSWERED):
            answer = self._etcd.do(path, body)
        if answer is None or fate is not Fate.ANSWERED:
            raise EtcdAway("etcd doesn't answer")
        return answer
