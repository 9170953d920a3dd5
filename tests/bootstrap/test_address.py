"""Tests of addresses as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.address import (
    EVERYWHERE,
    Address,
    AddressError,
    Reach,
    not_to_dial,
    reach_by,
    resolved_not_to_dial,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        ("registry.example.org:1", "registry.example.org", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        ("localhost:0", "localhost", 0),
    ],
)
def test_host_and_port_are_read_and_written(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == (host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1", "has no port: give it as HOST:PORT"),
        ("", "has no port"),
        ("[::1]", "has no port"),
        (":7400", "has no host"),
        ("::1", r"\[ADDRESS\]:PORT"),
        ("fe80::1:7400", r"\[ADDRESS\]:PORT"),
        ("[]:1", "no IPv6 address in its brackets"),
        ("[host]:1", "no IPv6 address in its brackets"),
        ("host]:1", "no IPv6 address in its brackets"),
        ("http://host:7400", "begins with http://: leave that out"),
        (" host:7400", "is more than HOST:PORT"),
        ("host:", "has the port ''"),
        ("host:http", "has the port 'http'"),
        ("host:-1", "has the port '-1'"),
        ("host:7400/", "has the port '7400/'"),
        ("127.0.0.1:99999", "has port 99999: a port is at most 65535"),
    ],
)
def test_what_is_no_address_is_said(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


def test_port_0_can_be_listened_on_and_not_dialled() -> None:
    assert Address.parse("h:0").port == 0
    with pytest.raises(AddressError, match="port 0, which can't be dialled"):
        Address.to_dial("h:0")


@given(st.text(alphabet="ab1:[]%./ -"))
def test_whatever_is_read_is_written_so_that_it_is_read_again(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert 0 <= address.port <= 65535
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "loopback", "everywhere"),
    [
        ("127.0.0.1:1", True, False),
        ("[::1]:1", True, False),
        ("localhost:1", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("10.1.2.3:1", False, False),
        ("example.org:1", False, False),
    ],
)
def test_who_can_reach_it(text: str, loopback: bool, everywhere: bool) -> None:
    address = Address.parse(text)
    assert (address.is_loopback, address.is_any) == (loopback, everywhere)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "10.0.0.1:5",
            "[2001:db8::1]:5",
            "a:1",
            "n_1:2",
            "host.example:70",
            "xn--bcher-kva.org:4",
        ),
        "unix:80",  # `channel` dials a host of that name
    ],
)
def test_strangers_may_name_hosts_and_ports(text: str) -> None:
    assert not_to_dial(text, Reach()) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unix:/var/run/docker.sock", "has the port"),
        ("unix:///run/x:1", "leave that out"),
        ("file:///etc/passwd:1", "leave that out"),
        ("ipv4:1.2.3.4:5", "colons in its host"),
        ("a/b:5", "is more than HOST:PORT"),
        ("a%2fb:5", "has a zone"),
        ("[fe80::1%eth0]:5", "has a zone"),
        ("-x:4", "an invalid host name"),
        ("b\u00fccher.org:4", "an invalid host name"),
        ("x\x1b]0;h:5", "no IPv6 address in its brackets"),
        ("x\n:5", "is more than HOST:PORT"),
        ("a\u202eb:5", "is more than HOST:PORT"),
        ("a\0b:5", "is more than HOST:PORT"),
        (f"{'a' * 2**20}:5", "an invalid host name"),
        ("h:0", "port 0"),
        ("0.0.0.0:1", "all addresses of a machine"),
        ("0.1.2.3:1", "all addresses of a machine"),
        ("[::]:1", "all addresses of a machine"),
        ("224.0.0.1:5", "multicast or reserved"),
        ("[ff02::1]:5", "multicast or reserved"),
        ("255.255.255.255:5", "multicast or reserved"),
        ("169.254.169.254:80", "a cloud's metadata service"),
        ("[::ffff:169.254.169.254]:80", "a cloud's metadata service"),
        ("[fd00:ec2::254]:80", "a cloud's metadata service"),
        ("127.1:5", "a number for a host"),
        ("2130706433:5", "a number for a host"),
        ("0x7f.1:5", "a number for a host"),
        ("0177.0.0.1:5", "a number for a host"),
    ],
)
def test_what_nobody_dials_for_a_stranger(text: str, why: str) -> None:
    for reach in (Reach(), EVERYWHERE):
        reason = not_to_dial(text, reach)
        assert why in reason and len(reason) < 1500 and reason.isprintable()


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        *((text, Reach(loopback=True)) for text in ("127.0.0.1:5", "[::1]:5", "localhost:5")),
        *((text, Reach(loopback=True)) for text in ("127.9.9.9:5", "a.LocalHost.:5")),
        *((text, Reach(loopback=True)) for text in ("[::ffff:127.0.0.1]:5", "[64:ff9b::7f00:1]:5")),
        ("[2002:7f00:1::]:5", Reach(loopback=True)),
        ("169.254.1.1:5", Reach(link_local=True)),
        ("[fe80::1]:5", Reach(link_local=True)),
    ],
)
def test_what_is_near_only_those_who_are_near_may_name(text: str, allowed: Reach) -> None:
    assert not_to_dial(text, allowed) == ""
    assert not_to_dial(text, Reach()) != ""


@pytest.mark.parametrize(
    ("addresses", "reach"),
    [
        (["127.0.0.1:7070"], EVERYWHERE),
        (["localhost:7070"], EVERYWHERE),
        (["10.1.2.3:7070"], Reach()),
        (["[fe80::1%eth0]:7070"], Reach(link_local=True)),
        (["10.1.2.3:7070", "127.0.0.1:7070"], EVERYWHERE),
        (["no-such-host.invalid:7070"], Reach()),
    ],
)
async def test_who_is_near_is_known_by_the_way_to_the_registry(
    addresses: list[str], reach: Reach
) -> None:
    assert await reach_by(addresses) == reach


async def test_what_a_name_stands_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(address: Address) -> list[str]:
        return {"evil.example": ["10.0.0.1", "127.0.0.1"], "good.example": ["10.0.0.1"]}[
            address.host
        ]

    monkeypatch.setattr("planaria.bootstrap.address._resolved", look_up)
    why = await resolved_not_to_dial("evil.example:1", Reach())
    assert (
        "'evil.example:1' resolves to 127.0.0.1, which can be reached on its own machine only"
        in why
    )
    assert await resolved_not_to_dial("good.example:1", Reach()) == ""
    assert await resolved_not_to_dial("evil.example:1", EVERYWHERE) == ""
