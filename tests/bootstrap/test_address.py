"""Addresses as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.address import Address, AddressError


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
        ("host:", "has '' for a port"),
        ("host:http", "has 'http' for a port"),
        ("host:-1", "has '-1' for a port"),
        ("host:7400/", "has '7400/' for a port"),
        ("127.0.0.1:99999", "has port 99999: a port is at most 65535"),
    ],
)
def test_what_is_no_address_is_said(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


def test_port_0_can_be_listened_on_and_not_dialled() -> None:
    assert Address.parse("h:0").port == 0
    with pytest.raises(AddressError, match="port 0, which nobody can dial"):
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
