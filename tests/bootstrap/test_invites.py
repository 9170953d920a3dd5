"""Tests of invites as text, and of who is admitted by an invite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.authority import Authority, Role, Who, to_der
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.invites import (
    AllowedError,
    Attempts,
    InviteError,
    Invites,
    NotAdmitted,
    decode,
    encode,
    is_invite,
    read_allowed,
)

NOW = 1_800_000_000.0
AUTHORITY = to_der(Authority.make(NOW).certificate)
INVITATION = Invitation(
    run="r-12345678",
    registries=["registry.example.org:7400", "[::1]:7400"],
    enrolments=["registry.example.org:7399"],
    authority=AUTHORITY,
    secret=b"secret",
    role="node",
)


def instance(number: int) -> str:
    return f"{number:032x}"


@given(
    secret=st.binary(max_size=40),
    role=st.sampled_from(["node", "reader", "operator"]),
    stage=st.none() | st.integers(0, 100),
)
def test_an_invite_is_one_word(secret, role, stage):
    invitation = Invitation()
    invitation.CopyFrom(INVITATION)
    invitation.secret, invitation.role = secret, role
    if stage is not None:
        invitation.stage = stage
    text = encode(invitation)
    assert is_invite(text)
    assert set(text) <= set("planaria1.") | set("-_") | {c for c in text if c.isalnum()}
    assert decode(f" {text}\n") == invitation


@given(st.data())
def test_an_invite_that_was_changed_or_cut_off_is_told(data):
    text = encode(INVITATION)
    place = data.draw(st.integers(len("planaria1."), len(text) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_"))
    for changed in (text[:place], text[:place] + letter + text[place + 1 :], text + letter):
        if changed != text:
            with pytest.raises(InviteError) as caught:
                decode(changed)
            assert text[20:60] not in str(caught.value)


@given(
    st.integers(1, 40),
    st.sampled_from(
        ["", "planaria node --join ", 'planaria node --join "', "$ planaria doctor --join="]
    ),
    st.sampled_from(["", "\n", '"', " --listen 0.0.0.0:7401 --name a", "\n  --stage 2"]),
)
def test_neither_white_space_nor_the_command_around_an_invite_matters(width, before, after):
    text = encode(INVITATION)
    lines = [text[place : place + width] for place in range(0, len(text), width)]
    for pasted in (text, "\n".join(lines), " \r\n\t".join(lines)):
        assert is_invite(before + pasted + after)
        assert decode(before + pasted + after) == INVITATION


def test_a_host_called_planaria1_is_no_invite():
    assert not is_invite("planaria1.example.org:7400")
    assert not is_invite("planaria1:7400,planaria2:7400")


def test_texts_that_are_none():
    for text, why in (
        ("registry.example.org:7400", "begins with planaria1."),
        ("planaria2.AAAA", "begins with planaria1."),
        ("planaria1." + "A" * 20_000, "characters"),
        ("planaria1.é", "incomplete, or was changed"),
        ("planaria1.", "incomplete, or was changed"),
        ("planaria1.A\nplanaria1.B", "contains 2 invites"),
    ):
        with pytest.raises(InviteError, match=why):
            decode(text)
    for field, value in (
        ("role", "registry"),
        ("role", "king"),
        ("run", "../../etc"),
        ("enrolments", ["unix:/var/run/docker.sock"]),
        ("enrolments", []),
        ("registries", ["host:0"]),
        ("authority", b"none"),
    ):
        changed = Invitation()
        changed.CopyFrom(INVITATION)
        changed.ClearField(field)
        changed.MergeFrom(Invitation(**{field: value}))
        with pytest.raises(InviteError, match="the invite"):
            decode(encode(changed))


class Book:
    """Invites and a list of their records, as on disk."""

    def __init__(self) -> None:
        self.invites, self.kept = Invites(), list[str]()

    def invite(self, role=Role.NODE, uses=0, seconds=0.0, stage=None, now=NOW) -> bytes:
        record, secret = self.invites.make(role, uses, seconds, stage, now)
        self.apply(record)
        return secret

    def apply(self, record) -> None:
        self.kept.append(json.dumps(record))
        self.invites.apply(record)

    def come(self, secret: bytes, number: int, now=NOW) -> Who:
        who, record = self.invites.admit(secret, instance(number), now)
        if record is not None:
            self.apply(record)
        return who

    def again(self) -> Invites:
        """Return invites restored from the records, as after a restart."""
        invites = Invites()
        for line in self.kept:
            invites.apply(json.loads(line))
        return invites


def test_an_invite_is_for_so_many_and_for_so_long():
    book = Book()
    secret = book.invite(uses=2, seconds=3600)
    assert book.come(secret, 1) == Who(Role.NODE, instance(1))
    assert book.come(secret, 1) == Who(Role.NODE, instance(1))  # the same instance again
    assert book.come(secret, 2)
    with pytest.raises(NotAdmitted, match="used up"):
        book.come(secret, 3)
    assert book.come(b"", 1, NOW + 1e6) == Who(Role.NODE, instance(1))  # renewed
    with pytest.raises(NotAdmitted, match="doesn't know this node"):
        book.come(b"", 3)
    late = book.invite(seconds=3600)
    with pytest.raises(NotAdmitted, match="expired"):
        book.come(late, 4, NOW + 3600)


def test_an_invite_has_a_role_and_a_stage_and_may_be_revoked():
    book = Book()
    assert book.come(book.invite(Role.OPERATOR), 1).role is Role.OPERATOR
    bound = book.invite(stage=3)
    assert book.come(bound, 2).stage == 3
    [*_, last] = book.invites.invites
    book.apply(book.invites.revoke(last))
    with pytest.raises(NotAdmitted, match="revoked"):
        book.come(bound, 3)
    assert book.come(b"", 2).stage == 3  # admitted nodes stay
    with pytest.raises(InviteError, match="there is no invite"):
        book.invites.revoke("none")
    for wrong in (
        *((Role.REGISTRY, 0, 0, None), (Role.READER, 0, 0, 1)),
        *((Role.NODE, -1, 0, None), (Role.NODE, 0, 0, 0)),
    ):
        with pytest.raises(InviteError):
            book.invites.make(*wrong, NOW)


def test_who_is_banned_does_not_come_back_before_it_is_allowed():
    book = Book()
    secret = book.invite()
    book.come(secret, 1)
    book.apply(book.invites.ban(instance(1)))
    for shown in (secret, b""):
        with pytest.raises(NotAdmitted, match="banned"):
            book.come(shown, 1)
    book.apply(book.invites.allow(instance(1)))
    assert book.come(b"", 1)
    with pytest.raises(InviteError, match="is not banned"):
        book.invites.allow(instance(1))
    with pytest.raises(InviteError, match="neither a member nor an instance"):
        book.invites.ban("box-1")


def test_who_does_not_know_the_secret_learns_nothing_of_the_invite():
    book = Book()
    book.invite(uses=1, seconds=1)
    with pytest.raises(NotAdmitted, match="not one of this run's"):
        book.come(b"guess", 1, NOW + 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["invite", "come", "renew", "revoke", "ban", "allow", "wait"]),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_uses_are_never_exceeded_and_a_restart_forgets_nothing(happened):
    book, secrets, now = Book(), list[tuple[bytes, int]](), NOW
    for event, number, size in happened:
        try:
            if event == "invite":
                secrets.append((book.invite(uses=size, seconds=10.0 * number, now=now), size))
            elif event == "come" and secrets:
                book.come(secrets[size % len(secrets)][0], number, now)
            elif event == "renew":
                book.come(b"", number, now)
            elif event == "revoke" and secrets:
                ids = list(book.invites.invites)
                book.apply(book.invites.revoke(ids[size % len(ids)]))
            elif event == "ban":
                book.apply(book.invites.ban(instance(number)))
            elif event == "allow":
                book.apply(book.invites.allow(instance(number)))
            elif event == "wait":
                now += 7.0
        except (NotAdmitted, InviteError):
            continue
    again = book.again()
    assert vars(again) == vars(book.invites)
    for (secret, uses), invite in zip(secrets, book.invites.invites.values(), strict=True):
        assert not uses or book.invites.used[invite.id] <= uses
        assert secret.hex() not in "".join(book.kept)


def test_who_guesses_has_to_wait_and_others_have_not():
    attempts = Attempts()
    for _ in range(Attempts.EACH):
        assert not attempts.are_too_many("192.0.2.1", 100.0)
        attempts.failed("192.0.2.1")
        attempts.failed("2001:db8::1")
    assert attempts.are_too_many("192.0.2.1", 101.0)
    assert attempts.are_too_many("2001:db8::2", 101.0)
    assert not attempts.are_too_many("192.0.2.2", 101.0)
    assert not attempts.are_too_many("2001:db8:1::1", 101.0)
    assert not attempts.are_too_many("192.0.2.1", 200.0)


ONE, OTHER = "0123456789abcdef" * 2, "f" * 32


def test_allowed_instances_are_one_a_line_with_notes_for_people(tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"# of the lab\n\n{ONE}\n  {OTHER}  # the one below the desk\n")
    assert read_allowed(file) == {ONE, OTHER}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{ONE}\nbox-7f3a1c\n", "line 2 of .* has 'box-7f3a1c', which is no instance"),
        (ONE.upper(), "line 1 .* lower-case"),
        ("# nobody yet\n", "names no instance"),
        (None, "can't read"),
    ],
)
def test_what_is_no_allow_list_is_said(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    if text is not None:
        file.write_text(text)
    with pytest.raises(AllowedError, match=says):
        read_allowed(file)
