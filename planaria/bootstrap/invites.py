"""Invites: what one is, as text, and who may still come by which.

The registry keeps no secret, only what it is a hash of. `Invites` is a machine of records: what is
decided comes as a record, which counts once it is applied, so that the shell can have it on disk
before anybody hears of it. Pure: `now` is passed in, seconds since 1970.
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
from typing import Any, Final
from zlib import crc32

from google.protobuf.message import DecodeError

from planaria.bootstrap.address import Address
from planaria.bootstrap.authority import Role, Who, to_der, to_pem
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.identity import INSTANCE_LETTERS
from planaria.bootstrap.spelling import misspelt

MARK: Final = "planaria1."
LONGEST: Final = 16_384
"""Letters of an invite."""
SECRET_BYTES: Final = 20
MOST: Final = 10_000
"""Invites that can be had of a registry at a time."""
MOST_ENROLLED: Final = 100_000
MOST_STAGES: Final = 10_000
INVITED: Final = (Role.NODE, Role.READER, Role.OPERATOR)
_BEGIN: Final = re.compile(r"\s*".join(map(re.escape, MARK)) + r"(?!\S*:\d)")


class InviteError(ValueError):
    """A text is no invite, or an invite is not to be had; the message says why and what to do."""


class NotAdmitted(Exception):  # noqa: N818  an answer, not a fault
    """Who asks gets no certificate; the message says why and what to do."""


def is_invite(text: str) -> bool:
    """Whether there is one in it, whole or not. A host may be called planaria1, too."""
    return _BEGIN.search(text) is not None


def encode(invitation: Invitation) -> str:
    content = invitation.SerializeToString(deterministic=True)
    whole = content + crc32(content).to_bytes(4, "little")
    return MARK + _written(whole)


def _written(whole: bytes) -> str:
    return urlsafe_b64encode(whole).decode().rstrip("=")


def decode(text: str) -> Invitation:
    """The invite in `text`. White space in it doesn't matter, nor do the command before it and the
    options after it. Raises InviteError, which shows nothing of the text."""
    _, *bodies = _BEGIN.split(text)
    if not bodies:
        raise InviteError(f"there is no invite here: one begins with {MARK}")
    if len(bodies) > 1:
        raise InviteError(f"there are {len(bodies)} invites here: keep one of them")
    # A wrapped line of an invite may begin with a dash, as an option does: the checksum tells.
    parts = re.split(r"\s(?=-)", bodies[0])
    for end in range(len(parts), 0, -1):
        body = re.sub(r"[\s\"']", "", "".join(parts[:end]))
        if (invitation := _decoded(body)) is not None:
            _check(invitation)
            return invitation
    raise InviteError("the invite is cut off, or was changed: copy all of it")


def _decoded(body: str) -> Invitation | None:
    """None: it is cut off, or was changed. Raises InviteError."""
    if len(body) > LONGEST:
        raise InviteError(f"the invite has {len(body)} letters; {LONGEST} are the most it can have")
    try:
        whole = urlsafe_b64decode(body + "=" * (-len(body) % 4))
        content, checksum = whole[:-4], whole[-4:]
        if _written(whole) != body or crc32(content).to_bytes(4, "little") != checksum:
            return None
        return Invitation.FromString(content)
    except (binascii.Error, DecodeError, ValueError):
        return None


def _check(invitation: Invitation) -> None:
    """Raises InviteError for what no planaria has written."""
    try:
        role = Role(invitation.role)
        if problem := misspelt("run", invitation.run):  # it becomes a folder's name
            raise ValueError(problem)
        to_pem(invitation.authority)
        for address in (*invitation.registries, *invitation.enrolments):
            Address.to_dial(address)
    except ValueError as error:
        raise InviteError(f"the invite says what can't be: {error}") from error
    if role not in INVITED or not (invitation.registries and invitation.enrolments):
        raise InviteError("the invite lacks an address, or is for a role that nobody can have")


def hashed(secret: bytes) -> str:
    """What the registry keeps of a secret; no slow hash is needed for 20 random bytes."""
    return hashlib.sha256(b"planaria invite" + secret).hexdigest()


@dataclass(frozen=True)
class Invite:
    """What the registry knows of one."""

    id: str
    hash: str
    role: Role
    uses: int  # 0: any number
    ends: float  # seconds since 1970; 0: never
    stage: int | None

    def for_others(
        self, run: str, registries: list[str], enrolments: list[str], pem: bytes, secret: bytes
    ) -> str:
        """The text that somebody is given."""
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
    """Whose certificate is renewed."""

    who: Who
    invite: str  # the id of that by which it came


Record = Mapping[str, Any]
"""Fit for JSON."""


class Invites:
    def __init__(self) -> None:
        self.invites: dict[str, Invite] = {}  # by id
        self.used: Counter[str] = Counter()  # times, by id
        self.revoked: set[str] = set()  # ids
        self.enrolled: dict[str, Enrolled] = {}  # by instance
        self.banned: set[str] = set()  # instances
        self._by_hash: dict[str, Invite] = {}

    # Decisions: none counts before it is applied

    def make(
        self, role: Role, uses: int, seconds: float, stage: int | None, now: float
    ) -> tuple[Record, bytes]:
        """What to apply, and the secret. Raises InviteError."""
        if role not in INVITED:
            raise InviteError(f"nobody is invited as {role}: node, reader or operator")
        if stage is not None and (role is not Role.NODE or not 0 <= stage < MOST_STAGES):
            raise InviteError(f"stage {stage}: only a node is for a stage, from 0 on")
        if not (uses >= 0 and seconds >= 0 and now + seconds < float("inf")):
            raise InviteError("an invite can't be for less than no uses, or less than no time")
        open_ones = [one for one in self.invites.values() if not self._over(one, now)]
        if len(open_ones) >= MOST:
            raise InviteError(f"there are {MOST} invites; revoke some")
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
        """As who this instance may come, and what to apply before it hears of it. Whoever has
        enrolled needs no secret again. Raises NotAdmitted."""
        if instance in self.banned:
            raise NotAdmitted("the run's operator has banned this node; ask them to allow it again")
        former = self.enrolled.get(instance)
        if not secret:
            if former is None:
                raise NotAdmitted("this registry doesn't know this node; join by an invite")
            return former.who, None
        invite = self._by_hash.get(hashed(secret))
        if invite is None:
            raise NotAdmitted("this invite is none of this run's; ask its operator for one")
        who = Who(invite.role, instance, invite.stage)
        if former is not None and former == Enrolled(who, invite.id):
            return who, None
        if why := self._over(invite, now):
            raise NotAdmitted(f"this invite {why}; ask the run's operator for another")
        if len(self.enrolled) >= MOST_ENROLLED:
            raise NotAdmitted("the run has as many that were invited as it can have")
        return who, {"enrolled": instance, "invite": invite.id}

    def is_open(self, secret: bytes, now: float) -> bool:
        """Whether anybody may come by it."""
        invite = self._by_hash.get(hashed(secret))
        return invite is not None and not self._over(invite, now)

    def revoke(self, invite: str) -> Record:
        """Raises InviteError."""
        if invite not in self.invites:
            raise InviteError(f"there is no invite {invite[:40]!r}: `planaria invite --list`")
        return {"revoked": invite}

    def ban(self, instance: str) -> Record:
        """Raises InviteError."""
        if not is_instance(instance):
            raise InviteError(
                f"{instance[:40]!r} is neither a member nor an instance, which is "
                f"{INSTANCE_LETTERS} hexadecimal digits: `planaria members` lists them"
            )
        return {"banned": instance}

    def allow(self, instance: str) -> Record:
        """Raises InviteError."""
        if instance not in self.banned:
            raise InviteError(f"{instance[:40]!r} is not banned: `planaria members` lists who is")
        return {"allowed": instance}

    # What has been decided

    def apply(self, record: Record) -> None:
        """Raises KeyError, TypeError and ValueError for what is none of these."""
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
        """Why nobody comes by it any more; empty: one may."""
        if invite.id in self.revoked:
            return "was revoked"
        if invite.ends and now >= invite.ends:
            return "has expired"
        if invite.uses and self.used[invite.id] >= invite.uses:
            return "is used up"
        return ""


def is_instance(text: str) -> bool:
    return len(text) == INSTANCE_LETTERS and set(text) <= set("0123456789abcdef")


class Attempts:
    """How often somebody may ask with what is wrong: so many times a minute from one place. `now`
    is of any clock that doesn't go back."""

    WINDOW: Final = 60.0  # seconds
    EACH: Final = 10
    MOST_PLACES: Final = 10_000
    """That are told apart; those that come after them count as one."""

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
        """An address; of IPv6 the 64 bits that its owner can't choose."""
        with suppress(ValueError):
            address = ip_address(host)
            if address.version == 6:
                host = str(ip_network((address, 64), strict=False))
        return host if host in self._failed or len(self._failed) < self.MOST_PLACES else ""
