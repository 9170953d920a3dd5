"""Tests of mutual TLS. The files in tls/ were made for them, guard nothing, and expire in 2124."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from planaria.bootstrap.authority import Authority, Role
from planaria.bootstrap.client import RegistryClient, RegistryUnreachable
from planaria.bootstrap.credentials import (
    PLAIN,
    Certified,
    Credentials,
    CredentialsError,
    add_port,
    channel,
)

TLS = Path(__file__).parent / "tls"
CA = TLS / "ca.pem"
TRUSTED = Credentials.load(CA, TLS / "node.pem", TLS / "node.key", token="secret")
STRANGER = Credentials.load(CA, TLS / "stranger.pem", TLS / "stranger.key", token="secret")


async def test_both_sides_show_a_certificate_of_the_ca(
    serve: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with serve(credentials=TRUSTED) as place:
        node = await place.node("a")
        assert [m.node for m in node.reply.view.members] == ["a"]
        for credentials in (STRANGER, PLAIN):
            client = RegistryClient([place.address], credentials)
            with pytest.raises(RegistryUnreachable, match="both sides use TLS or neither"):
                await client.describe(deadline=0.5)
            await client.close()


async def test_a_name_is_dialled_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members dial addresses that other members report of themselves."""
    monkeypatch.chdir(tmp_path)
    server = grpc.aio.server()
    server.add_insecure_port("unix:80")
    await server.start()
    async with channel("unix:80", PLAIN) as dialled:
        call = dialled.unary_unary("/any.Service/Any")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_all_three_files_or_none() -> None:
    assert Credentials.load() == PLAIN
    with pytest.raises(CredentialsError, match="the certificate, key is missing"):
        Credentials.load(ca=CA)


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"can't read the key file .*nowhere"):
        Credentials.load(CA, TLS / "node.pem", tmp_path / "nowhere")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CredentialsError, match="not in PEM format"):
        Credentials.load(CA, tmp_path / "text", TLS / "node.key")


def test_tokens() -> None:
    assert PLAIN.check({}) is None
    secret = Credentials(token="secret")
    assert secret.check(dict(Credentials(token="secret").metadata)) is None
    with pytest.raises(CredentialsError, match="printable ASCII"):
        Credentials(token="sécret")
    assert "requires a join token" in (secret.check({}) or "")
    assert "not this run's" in (secret.check({"planaria-token": "guess"}) or "")


async def test_servers_one_after_the_other_have_the_same_certificate() -> None:
    authority = Authority.make(time.time())
    credentials = Credentials.of(Certified(authority.own_pair(time.time())))
    for _ in range(2):
        server = grpc.aio.server()
        port = add_port(server, "127.0.0.1:0", credentials)
        await server.start()
        async with channel(f"127.0.0.1:{port}", credentials, holder=Role.REGISTRY) as dialled:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await dialled.unary_unary("/any.Service/Any")(b"")
        await server.stop(None)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_who_finds_a_certificate_of_another_time_is_told_what_its_own_clock_says() -> None:
    now = time.time()
    authority, days = Authority.make(now - 30 * 86400), 86400
    server = grpc.aio.server()
    over = Credentials.of(Certified(authority.own_pair(now - 10 * days)))
    port = add_port(server, "127.0.0.1:0", over)
    await server.start()
    own = Credentials.of(Certified(authority.own_pair(now)))
    client = RegistryClient([f"127.0.0.1:{port}"], own)
    today = time.strftime("%Y-%m-%d", time.gmtime(now))
    with pytest.raises(RegistryUnreachable, match=f"This machine's clock says {today}"):
        await client.describe(deadline=0.5)
    await client.close()
    await server.stop(None)


def test_a_server_has_a_new_certificate_only_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC asks at each handshake. A handshake that begins while another one sets a new certificate
    may use memory that was just freed."""
    asked: list[Callable[[], object]] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda first, newest, asks: asked.append(newest)
    )
    authority, now = Authority.make(time.time()), time.time()
    certified = Certified(authority.own_pair(now))
    certified.server()
    (newest,) = asked
    assert [newest(), newest()] == [None, None]
    certified.renew(authority.own_pair(now))
    assert newest() is not None
    assert newest() is None
