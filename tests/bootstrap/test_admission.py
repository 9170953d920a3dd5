"""Tests of the registry's files about admission: authority, invites and bans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria.bootstrap.admission import AUTHORITY, INVITES, Admission, AdmissionError
from planaria.bootstrap.authority import Request, Role, is_issued_by, who_in
from planaria.bootstrap.enrolment_pb2 import EnrolRequest
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import NotAdmitted
from tests.bootstrap.conftest import full_disk


def request_of(identity: Identity, secret: bytes = b"") -> EnrolRequest:
    made = Request.of(identity)
    return EnrolRequest(
        secret=secret,
        public_key=identity.public,
        request=made.request,
        signature=made.signature,
    )


def test_a_registry_that_is_started_again_goes_on(tmp_path: Path) -> None:
    folder, node, other = tmp_path / "a", Identity.generate(), Identity.generate()
    first = Admission(folder)
    _, secret = first.invite(Role.NODE, uses=1)
    who, certificate = first.enrol(request_of(node, secret))
    assert who_in(certificate) == who == (Role.NODE, node.instance, None)

    second = Admission(folder)
    assert first.authority is not None
    assert is_issued_by(certificate, first.authority.certificate)
    assert second.authority is not None
    assert second.authority.certificate == first.authority.certificate
    with pytest.raises(NotAdmitted, match="used up"):
        second.enrol(request_of(other, secret))
    assert second.enrol(request_of(node))[0] == who
    second.decide(second.invites.ban(node.instance))
    with pytest.raises(NotAdmitted, match="banned"):
        Admission(folder).enrol(request_of(node))


def test_only_the_owner_may_read_it_and_no_secret_is_in_it(tmp_path: Path) -> None:
    admission = Admission(tmp_path / "a")
    _, secret = admission.invite(Role.OPERATOR)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    for name in (AUTHORITY, INVITES):
        path = tmp_path / "a" / name
        assert path.stat().st_mode & 0o777 == 0o600
        assert secret not in path.read_bytes()
        assert secret.hex() not in path.read_text()


def test_what_is_not_on_disk_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, node = Admission(tmp_path / "a"), Identity.generate()
    _, secret = admission.invite(Role.NODE, uses=1)
    with monkeypatch.context() as patched:
        patched.setattr("planaria.bootstrap.admission.os.fsync", full_disk)
        with pytest.raises(AdmissionError, match=r"can't be written: No space left"):
            admission.enrol(request_of(node, secret))
    assert not admission.invites.enrolled
    admission.enrol(request_of(node, secret))
    assert Admission(tmp_path / "a").invites.enrolled.keys() == {node.instance}


def test_a_line_that_was_cut_off_is_dropped_and_others_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    Admission(folder).invite(Role.NODE)
    whole = (folder / INVITES).read_bytes()
    with (folder / INVITES).open("ab") as file:
        file.write(b'{"invite": "12')
    again = Admission(folder)
    assert len(again.invites.invites) == 1
    again.invite(Role.READER)
    assert (folder / INVITES).read_bytes().startswith(whole)
    assert len(Admission(folder).invites.invites) == 2

    for line in (b"nothing\n", b"[]\n", json.dumps({"enrolled": "x", "invite": "y"}).encode()):
        (folder / INVITES).write_bytes(line.strip() + b"\n")
        with pytest.raises(AdmissionError, match="line 1 of"):
            Admission(folder)
    (folder / INVITES).unlink()
    (folder / AUTHORITY).write_text("hello")
    with pytest.raises(AdmissionError, match="not an authority's key"):
        Admission(folder)


@pytest.mark.parametrize("damage", [b"\r", b"\x0b", b"\x85", b"\x00"])
def test_a_byte_of_damage_drops_no_bans(tmp_path: Path, damage: bytes) -> None:
    """No damaged byte splits a line in two."""
    banned = Identity.generate()
    admission = Admission(tmp_path / "a", certifies=False)
    admission.invite(Role.READER)
    admission.decide(admission.invites.ban(banned.instance))
    path = tmp_path / "a" / INVITES
    content = path.read_bytes()
    path.write_bytes(content[:20] + damage + content[21:])
    with pytest.raises(AdmissionError, match="line 1 of"):
        Admission(tmp_path / "a", certifies=False)


def test_who_asks_has_to_hold_the_key_that_it_names() -> None:
    admission, node, liar = Admission(None), Identity.generate(), Identity.generate()
    _, secret = admission.invite(Role.NODE)
    stolen = request_of(liar, secret)
    stolen.public_key = node.public
    with pytest.raises(NotAdmitted, match="not signed by the key"):
        admission.enrol(stolen)
    changed = request_of(node, secret)
    changed.request = b"anything"
    changed.signature = node.sign("enrol", changed.request)
    with pytest.raises(NotAdmitted, match="certificate request is invalid"):
        admission.enrol(changed)
    assert not admission.invites.used
