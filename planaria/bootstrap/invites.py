"""Invites: their text form, and the rules by which they admit instances.

The registry stores only hashes of secrets. `Invites` is a state machine over records: a decision
returns a record and takes effect when the record is applied, so that the caller can persist it
before it replies. Pure but for `read_allowed`: `now` is passed in, seconds since 1970.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from google.protobuf.message import DecodeError

from planaria.bootstrap.address import Address
from planaria.bootstrap.authority import Role, Who, to_der, to_pem
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.escaping import misspelt
from planaria.bootstrap.identity import INSTANCE_LETTERS

MARK: Final = "planaria1."
LONGEST: Final = 16_384
"""Maximum number of characters of an invite."""
SECRET_BYTES: Final = 20
MOST: Final = 10_000
"""Maximum number of open invites of a registry."""
MOST_ENROLLED: Final = 100_000
MOST_STAGES: Final = 10_000
INVITED: Final = (Role.OWNER, Role.NODE, Role.READER, Role.OPERATOR)
_BEGIN: Final = re.compile(r"\s*".join(map(re.escape, MARK)) + r"(?!\S*:\d)")


class InviteError(ValueError):
    """A text is no invite, or an invite is unavailable; the message says why and what to do."""


class AllowedError(ValueError):
    """The allow list is unusable; the message names the line and the reason."""


class NotAdmitted(UserError):  # noqa: N818  an answer, not a fault
    """The caller gets no certificate; the message says why and what to do."""


def is_invite(text: str) -> bool:
    """Whether the text contains an invite, complete or not. A host may be named planaria1, too."""
    return _BEGIN.search(text) is not None


def encode(invitation: Invitation) -> str:
    content = invitation.SerializeToString(deterministic=True)
    whole = content + crc32(content).to_bytes(4, "little")
    return MARK + _written(whole)


def _written(whole: bytes) -> str:
    return urlsafe_b64encode(whole).decode().rstrip("=")


def decode(text: str) -> Invitation:
    """The invite in `text`; ignores white space, a command before it, and options after it. Raises
    InviteError, whose message does not quote the text."""
    _, *bodies = _BEGIN.split(text)
    if not bodies:
        raise InviteError(f"the text contains no invite: an invite begins with {MARK}")
    if len(bodies) > 1:
        raise InviteError(f"the text contains {len(bodies)} invites: keep one of them")
    # A wrapped line may begin with a dash, as options do: the checksum decides.
    parts = re.split(r"\s(?=-)", bodies[0])
    for end in range(len(parts), 0, -1):
        body = re.sub(r"[\s\"']", "", "".join(parts[:end]))
        if (invitation := _decoded(body)) is not None:
            _check(invitation)
            return invitation
    raise InviteError("the invite is incomplete, or was changed: copy all of it")


def _decoded(body: str) -> Invitation | None:
    """The invite in an encoded body; None: it is incomplete or changed. Raises InviteError."""
    if len(body) > LONGEST:
        raise InviteError(f"the invite has {len(body)} characters; the maximum is {LONGEST}")
    try:
        whole = urlsafe_b64decode(body + "=" * (-len(body) % 4))
        content, checksum = whole[:-4], whole[-4:]
        if _written(whole) != body or crc32(content).to_bytes(4, "little") != checksum:
            return None
        return Invitation.FromString(content)
    except (binascii.Error, DecodeError, ValueError):
        return None


def _check(invitation: Invitation) -> None:
    """Checks an invite's content. Raises InviteError for content that planaria never writes."""
    try:
        role = Role(invitation.role)
        if problem := misspelt("run", invitation.run):  # the run name becomes a folder name
            raise ValueError(problem)
        to_pem(invitation.authority)
        for address in (*invitation.registries, *invitation.enrolments):
            Address.to_dial(address)
    except ValueError as error:
        raise InviteError(f"the invite has invalid content: {error}") from error
    if role not in INVITED or not (invitation.registries and invitation.enrolments):
        raise InviteError("the invite lacks an address, or has a role without invites")


def hashed(secret: bytes) -> str:
    """The stored hash of a secret; 20 random bytes need no slow hash."""
    return hashlib.sha256(b"planaria invite" + secret).hexdigest()


@dataclass(frozen=True)
class Invite:
    """An invite as the registry stores it."""

    id: str
    hash: str
    role: Role
    uses: int  # 0: any number
    ends: float  # seconds since 1970; 0: never
    stage: int | None

    def for_others(
        self, run: str, registries: list[str], enrolments: list[str], pem: bytes, secret: bytes
    ) -> str:
        """The invite's text, for the invited person."""
        return encode(
            Invitation(
                run=run,
                registries=registries,
                enrolments=enrolments,
                authority=to_der(pem),
                secret=secret,
                role=self.role,
                stage=self.stage,
            )
        )


@dataclass(frozen=True)
class Enrolled:
    """An instance whose certificate may be renewed."""

    who: Who
    invite: str  # id of the invite that it used


Record = Mapping[str, Any]
"""A decision that can be written as JSON."""


class Invites:
    def __init__(self) -> None:
        self.invites: dict[str, Invite] = {}  # by id
        self.used: Counter[str] = Counter()  # uses, by invite id
        self.revoked: set[str] = set()  # ids
        self.enrolled: dict[str, Enrolled] = {}  # by instance
        self.banned: set[str] = set()  # instances
        self._by_hash: dict[str, Invite] = {}

    # Decisions, which take effect when applied

    def make(
        self, role: Role, uses: int, seconds: float, stage: int | None, now: float
    ) -> tuple[Record, bytes]:
        """The record of a new invite, to apply, and its secret. Raises InviteError."""
        if role not in INVITED:
            raise InviteError(f"role {role} has no invites: choose {', '.join(INVITED)}")
        lowest = {Role.OWNER: 0, Role.NODE: 1}.get(role, MOST_STAGES)
        if stage is not None and not lowest <= stage < MOST_STAGES:
            raise InviteError(
                f"stage {stage}, role {role}: only a node's invite may name a stage, below "
                f"{MOST_STAGES}, and only one of role owner stage 0"
            )
        if not (uses >= 0 and seconds >= 0 and now + seconds < float("inf")):
            raise InviteError(f"{uses} uses, {seconds:g} s: an invite needs numbers of at least 0")
        open_ones = [invite for invite in self.invites.values() if not self._over(invite, now)]
        if len(open_ones) >= MOST:
            raise InviteError(f"there are {MOST} open invites, the maximum; revoke some")
        secret = secrets.token_bytes(SECRET_BYTES)
        record = {
            "invite": secrets.token_hex(4),
            "hash": hashed(secret),
            "role": str(role),
            "uses": uses,
            "ends": now + seconds if seconds else 0,
            "stage": stage,
        }
        return record, secret

    def admit(self, secret: bytes, instance: str, now: float) -> tuple[Who, Record | None]:
        """Decides whether an instance is enrolled: the identity granted to it, and a record to
        apply before the reply. An enrolled instance needs no secret. Raises NotAdmitted."""
        if instance in self.banned:
            raise NotAdmitted("the run's operator has banned this node; ask them to allow it again")
        former = self.enrolled.get(instance)
        if not secret:
            if former is None:
                raise NotAdmitted("this registry doesn't know this node; join by an invite")
            return former.who, None
        invite = self._by_hash.get(hashed(secret))
        if invite is None:
            raise NotAdmitted(
                "this invite is not one of this run's; ask the run's operator for another"
            )
        who = Who(invite.role, instance, invite.stage)
        if former is not None and former == Enrolled(who, invite.id):
            return who, None
        if why := self._over(invite, now):
            raise NotAdmitted(f"this invite {why}; ask the run's operator for another")
        if len(self.enrolled) >= MOST_ENROLLED:
            raise NotAdmitted(
                f"the run has {MOST_ENROLLED} enrolled nodes, the maximum; use the folder of one"
            )
        return who, {"enrolled": instance, "invite": invite.id}

    def is_open(self, secret: bytes, now: float) -> bool:
        """Whether the secret's invite can still be used."""
        invite = self._by_hash.get(hashed(secret))
        return invite is not None and not self._over(invite, now)

    def revoke(self, invite: str) -> Record:
        """The record that revokes an invite. Raises InviteError."""
        if invite not in self.invites:
            raise InviteError(
                f"there is no invite {invite[:40]!r}; `planaria invite --list` lists all"
            )
        return {"revoked": invite}

    def ban(self, instance: str) -> Record:
        """The record that bans an instance. Raises InviteError."""
        if not is_instance(instance):
            raise InviteError(
                f"{instance[:40]!r} is neither a member nor an instance, which is "
                f"{INSTANCE_LETTERS} hexadecimal digits: `planaria members` lists them"
            )
        return {"banned": instance}

    def allow(self, instance: str) -> Record:
        """The record that lifts a ban. Raises InviteError."""
        if instance not in self.banned:
            raise InviteError(
                f"{instance[:40]!r} is not banned; `planaria members` lists banned ones"
            )
        return {"allowed": instance}

    # Application of decisions

    def apply(self, record: Record) -> None:
        """Applies a decision's record. Raises KeyError, TypeError, ValueError for a bad one."""
        if "hash" in record:
            stage = record["stage"]
            invite = Invite(
                id=str(record["invite"]),
                hash=str(record["hash"]),
                role=Role(record["role"]),
                uses=int(record["uses"]),
                ends=float(record["ends"]),
                stage=None if stage is None else int(stage),
            )
            self.invites[invite.id] = self._by_hash[invite.hash] = invite
        elif "enrolled" in record:
            invite = self.invites[record["invite"]]
            instance = str(record["enrolled"])
            self.used[invite.id] += 1
            self.enrolled[instance] = Enrolled(Who(invite.role, instance, invite.stage), invite.id)
        elif "revoked" in record:
            self.revoked.add(str(record["revoked"]))
        elif "banned" in record:
            self.banned.add(str(record["banned"]))
        else:
            self.banned.discard(str(record["allowed"]))

    def _over(self, invite: Invite, now: float) -> str:
        """Why the invite can no longer be used; empty: it can."""
        if invite.id in self.revoked:
            return "was revoked"
        if invite.ends and now >= invite.ends:
            return "has expired"
        if invite.uses and self.used[invite.id] >= invite.uses:
            return "is used up"
        return ""


def is_instance(text: str) -> bool:
    return len(text) == INSTANCE_LETTERS and set(text) <= set("0123456789abcdef")


def read_allowed(path: Path) -> frozenset[str]:
    """Reads an allow list: an instance a line; # begins a comment. Raises AllowedError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AllowedError(f"can't read the allow list {path}: {error}") from error
    instances = set()
    for number, line in enumerate(text.splitlines(), 1):
        instance = line.partition("#")[0].strip()
        if instance and not is_instance(instance):
            raise AllowedError(
                f"line {number} of {path} has {instance[:40]!r}, which is no instance: give "
                f"{INSTANCE_LETTERS} lower-case hexadecimal digits"
            )
        instances.add(instance)
    instances.discard("")
    if not instances:
        raise AllowedError(f"{path} names no instance, so no node could join: write one per line")
    return frozenset(instances)


class Attempts:
    """Limits failed enrolment requests, per address and minute. `now`: any monotonic clock."""

    WINDOW: Final = 60.0  # seconds
    EACH: Final = 10
    MOST_PLACES: Final = 10_000
    """Number of addresses counted separately; further ones share one count."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._began = 0.0

    def are_too_many(self, host: str, now: float) -> bool:
        if now >= self._began + self.WINDOW:
            self._failed.clear()
            self._began = now
        return self._failed[self._place(host)] >= self.EACH

    def failed(self, host: str) -> None:
        self._failed[self._place(host)] += 1

    def _place(self, host: str) -> str:
        """The rate-limit key of a host: its address, or the /64 network of an IPv6 address."""
        with suppress(ValueError):
            address = ip_address(host)
            if address.version == 6:
                host = str(ip_network((address, 64), strict=False))
        return host if host in self._failed or len(self._failed) < self.MOST_PLACES else ""
