"""Tests of the invites that a registry makes when it begins."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from planaria.bootstrap import registry_enrolment
from planaria.bootstrap.address import Address, AddressError
from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import Role
from planaria.bootstrap.credentials import Certified
from planaria.bootstrap.invites import decode
from planaria.bootstrap.registry_enrolment import advertised, beside, enrolling

HERE = Address("127.0.0.1", 7400)


async def begin(folder: Path | None, registry: Address = HERE) -> dict[Role, str]:
    """Return the invites that a registry shows when it begins; enrolment listens on any port."""
    admission, shown = Admission(folder), dict[Role, str]()
    certified = Certified(admission.own_pair(), admission.own_pair)
    places = lambda port: (registry, Address("127.0.0.1", 7399))  # noqa: E731
    at = Address("127.0.0.1", 0)
    async with enrolling(admission, certified, "r", at, places, shown.update):
        pass
    return shown


async def test_the_first_invites_stay_until_they_are_no_good(tmp_path: Path) -> None:
    first = await begin(tmp_path)
    assert first.keys() == {Role.OPERATOR, Role.OWNER, Role.NODE}
    assert [*decode(first[Role.NODE]).enrolments] == ["127.0.0.1:7399"]
    for role, text in first.items():
        file = tmp_path / f"{role}.invite"
        assert (file.read_text(), file.stat().st_mode & 0o777) == (f"{text}\n", 0o600)
    assert await begin(tmp_path) == first

    admission = Admission(tmp_path)
    [revoked] = [each.id for each in admission.invites.invites.values() if each.role is Role.NODE]
    admission.decide(admission.invites.revoke(revoked))
    second = await begin(tmp_path)
    assert second[Role.OPERATOR] == first[Role.OPERATOR]
    assert second[Role.NODE] != first[Role.NODE]
    moved = await begin(tmp_path, Address("127.0.0.2", 7400))
    assert [*decode(moved[Role.OPERATOR]).registries] == ["127.0.0.2:7400"]


async def test_without_a_folder_they_are_shown_only() -> None:
    assert await begin(None) != await begin(None)


def test_enrolment_is_at_the_port_below() -> None:
    assert beside(Address("0.0.0.0", 7400)) == ("0.0.0.0", 7399)
    assert beside(Address("::", 0)) == ("::", 0)


def test_what_invites_say_of_where_the_registry_is(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = Address("0.0.0.0", 0)
    monkeypatch.setattr(registry_enrolment, "outward", lambda host, port: "192.0.2.7")
    assert advertised(anywhere, 7400, None) == ("192.0.2.7", 7400)
    assert advertised(Address("10.0.0.1", 0), 7400, None) == ("10.0.0.1", 7400)
    assert advertised(anywhere, 7400, Address("r.example.org", 80)) == ("r.example.org", 80)
    parse = partial(Address.parse_host, port=7400)
    assert parse("r.example.org") == ("r.example.org", 7400)
    assert parse("r.example.org:80") == ("r.example.org", 80)
    assert parse("[2001:db8::1]") == ("2001:db8::1", 7400)
    assert parse("[2001:db8::1]:80") == ("2001:db8::1", 80)
    with pytest.raises(AddressError):
        parse("http://r.example.org")
