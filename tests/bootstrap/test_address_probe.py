"""Tests of probes of addresses, with real ports and a name service of the test."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from planaria.bootstrap.address import Address, AddressError
from planaria.bootstrap.address_probe import (
    NOBODY,
    Endpoints,
    Reachability,
    probe,
    probe_all,
    way_out,
    why_unreachable,
)
from tests.harness.ports import free_port

LONG = 60.0  # seconds; reached only by a hang


def names(monkeypatch: pytest.MonkeyPatch, addresses: Any) -> None:
    """Patch the name service to return these addresses for any name, or to raise this error."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        if isinstance(addresses, Exception):
            raise addresses
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_port_that_is_listened_on_is_open_and_another_refuses() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await probe(Address("127.0.0.1", port), LONG) is Reachability.OPEN
    assert await probe(Address("127.0.0.1", free_port()), LONG) is Reachability.REFUSED
    server.close()


@pytest.mark.parametrize(
    ("failure", "answer"),
    [
        (socket.gaierror(socket.EAI_NONAME, "no such name"), Reachability.UNKNOWN),
        (UnicodeError("label empty or too long"), Reachability.UNKNOWN),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), Reachability.UNRESOLVED),
    ],
)
async def test_only_a_name_that_there_is_none_of_is_unknown(
    failure: Exception, answer: Reachability, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, failure)
    assert await probe(Address("registry.example.org", 7400), LONG) is answer


async def test_a_name_of_several_addresses_refuses_when_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names(monkeypatch, ["127.0.0.2", "127.0.0.1"])
    assert await probe(Address("two.example.org", port), LONG) is Reachability.OPEN
    assert await probe(Address("two.example.org", free_port()), LONG) is Reachability.REFUSED
    server.close()


async def test_what_is_no_address_is_said_before_anything_is_dialled() -> None:
    with pytest.raises(AddressError, match="begins with http://: leave that out"):
        await probe_all(["127.0.0.1:1", "http://127.0.0.1:1"], LONG)


def test_it_is_a_dead_end_when_all_addresses_are_final() -> None:
    final = [Reachability.UNKNOWN, Reachability.REFUSED]
    both = {"a:1": Reachability.UNKNOWN, "b:1": Reachability.REFUSED}
    reason = why_unreachable(both, final)
    assert "a:1 is unknown" in reason
    assert "b:1 refuses connections" in reason
    assert "Check the spelling of the name" in reason
    assert "`planaria bootstrap`" in reason
    assert why_unreachable(both, [Reachability.UNKNOWN]) == ""
    silent = {**both, "c:1": Reachability.SILENT}
    assert why_unreachable(silent, final) == ""
    assert "firewall" in why_unreachable(silent, [*final, Reachability.SILENT])
    assert "spelling" not in why_unreachable({"b:1": Reachability.REFUSED}, final)
    unresolved = why_unreachable({"a:1": Reachability.UNRESOLVED}, NOBODY)
    assert "resolv.conf" in unresolved and "firewall" not in unresolved


async def test_a_name_service_that_fails_for_a_while_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "try again"))
    asked = asyncio.create_task(way_out(["registry:7400", "other:7400"], LONG))
    await asyncio.sleep(0)  # the first lookup fails
    names(monkeypatch, ["127.0.0.1"])
    assert await asked == Endpoints("127.0.0.1", "127.0.0.1")


async def test_who_finds_no_way_says_to_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "try again"))
    with pytest.raises(OSError, match=r"no route to registry:7400 in 0\.1 s: .* --advertise"):
        await way_out(["registry:7400"], 0.1)
