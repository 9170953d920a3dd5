"""Tests of requests to etcd, and of their errors while it is away."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from planaria.bootstrap.etcd import (
    Etcd,
    EtcdAway,
    EtcdPlace,
    EtcdRefused,
    all_below,
    get,
    has_value,
    is_free,
    put,
    values,
    written,
)
from planaria.bootstrap.store import NotLeading, Store
from tests.bootstrap.conftest import KEY
from tests.bootstrap.test_store import after
from tests.etcd_server import DEADLINE, TLS, EtcdServer, etcd_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd server that requires client certificates."""
    with etcd_server(tmp_path_factory.mktemp("etcd"), tls=True) as server:
        yield server


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a:1", "write etcds://HOST:PORT"),
        ("etcds://a:1/b", "write etcds://HOST:PORT"),
        ("etcds://root:secret@a:1", "other users can read a password there"),
        ("etcds://a:1?password=x", "'password' is unknown; known are ca, cert and key"),
        ("etcds://a:1?cert=x", "give both cert and key"),
        ("etcd://127.0.0.1:1?ca=x", "plain text and needs no files"),
        ("etcd://127.0.0.1:1,10.0.0.1:2", "10.0.0.1:2 is on another machine"),
        ("etcds://a", "a"),
    ],
)
def test_a_place_that_can_not_be_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EtcdPlace.parse(url)


def test_places_and_files() -> None:
    place = EtcdPlace.parse("etcds://a:1,b:2?ca=x.pem&cert=y.pem&key=z.pem")
    assert (str(place), place.tls, str(place.ca)) == ("a:1,b:2", True, "x.pem")
    with pytest.raises(ValueError, match=r"can't load ca=x\.pem"):
        Etcd(place)
    assert not EtcdPlace.parse("etcd://localhost:1").tls


def test_an_error_names_all_that_were_asked() -> None:
    with socket.socket() as mute, socket.socket() as nobody:
        for listener in (mute, nobody):
            listener.bind(("127.0.0.1", 0))
        mute.listen()
        ports = [listener.getsockname()[1] for listener in (nobody, mute)]
        etcd = Etcd(EtcdPlace.parse("etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports)))
        with pytest.raises(EtcdAway, match=rf"{ports[0]}: .*refused; .*{ports[1]}: timed out"):
            etcd.ask("kv/range", {}, 0.5)


def test_etcd_does_what_it_is_told_over_tls(server: EtcdServer) -> None:
    etcd = server.etcd
    body = {"compare": [is_free("a/1")], "success": [put("a/1", b"x")], "failure": [get("a/1")]}
    assert etcd.ask("kv/txn", body, DEADLINE)["succeeded"]
    again = etcd.ask("kv/txn", body, DEADLINE)
    assert not again.get("succeeded")
    assert values(again["responses"][0]["response_range"]) == [b"x"]
    body = {"compare": [has_value("a/1", b"x")], "success": [put("a/2", b"\xff"), put("b", b"z")]}
    assert etcd.ask("kv/txn", body, DEADLINE)["succeeded"]
    assert values(etcd.ask("kv/range", all_below("a/"), DEADLINE)) == [b"x", b"\xff"]
    with pytest.raises(EtcdRefused, match="key is not provided"):
        etcd.ask("kv/range", {"key": written("")}, DEADLINE)


def test_nobody_without_a_certificate_is_let_in(server: EtcdServer) -> None:
    for query in (f"?ca={TLS}/ca.pem", ""):
        etcd = Etcd(EtcdPlace.parse(f"etcds://127.0.0.1:{server.port}{query}"))
        with pytest.raises(EtcdAway, match=r"(?i)certificate|closed|reset|EOF"):
            etcd.ask("kv/range", {"key": written("a")}, DEADLINE)


def test_registries_take_turns(server: EtcdServer) -> None:
    first, second = (Store(server.etcd, "r", KEY, f"{name}:1") for name in "ab")
    assert first.campaign() and not second.campaign()
    assert second.leader() == "a:1"
    first.append(after(None))
    first.decide({"banned": "b" * 32})
    first.append(after(first.view))
    first.renew()
    assert first.leads
    first.resign()
    assert second.campaign()
    assert second.view == after(after(None))
    assert second.records() == [{"banned": "b" * 32}]
    second.append(after(second.view))
    assert server.history("planaria/r/number") == [b"1", b"2", b"3"]
    second.resign()


def test_a_view_that_etcd_has_no_room_for_is_said_to_be_that(server: EtcdServer) -> None:
    store = Store(server.etcd, "large", KEY, "a:1")
    assert store.campaign()
    with pytest.raises(NotLeading, match="request is too large"):
        store.append(after(None, "x" * 1_700_000))
    assert not store.leads
    assert store.leader() == "a:1", "until its lease is over"


def test_etcd_ends_no_lease_before_a_registry_does(server: EtcdServer) -> None:
    first, second = (Store(server.etcd, "s", KEY, f"{name}:1") for name in "ab")
    assert first.campaign()
    while second.leader():
        pass
    assert not first.leads and second.campaign()
    second.resign()
