"""An enrolment's files on this machine: an instance's key and certificate."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from planaria.bootstrap.credentials import Certified
from planaria.bootstrap.enrolment_client import Enrolment
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.files import read_small
from planaria.bootstrap.invites import MARK, InviteError, decode, is_invite
from planaria.node.launch.instance import Instance, find_instance, release_key

log = logging.getLogger("planaria")

LONGEST_NAME: Final = 255
"""Length limit of a file's name in bytes."""


def invitation_of(join: str) -> Invitation | None:
    """The invite that --join is, or names as @FILE; None: it has addresses. Raises InviteError."""
    text = text_or_file(join)
    if is_invite(text):
        return decode(text)
    if ":" in text:
        return None
    if join.startswith("@"):
        raise InviteError(
            f"--join {join}: the file has no invite, which begins with {MARK}, and no HOST:PORT"
        )
    if len(join) <= LONGEST_NAME and Path(join).is_file():
        raise InviteError(f"--join {join}: this is a file; --join @{join} reads what is in it")
    return None


def addresses_of(join: str) -> tuple[str, ...]:
    """The registry addresses in --join, an invite or @FILE. Raises InviteError."""
    if (invitation := invitation_of(join)) is not None:
        return tuple(invitation.registries)
    return tuple(address.strip() for address in text_or_file(join).split(","))


def text_or_file(value: str, option: str = "--join", content: str = "the invite") -> str:
    """An option's text itself, or the content of its @FILE. Raises InviteError."""
    if not value.startswith("@"):
        return value
    try:
        text = read_small(Path(value[1:])).decode("utf-8-sig").strip()
    except (OSError, UnicodeError) as error:
        raise InviteError(f"{option} {value}: the file can't be read: {error}") from error
    if not text:
        raise InviteError(f"{option} {value}: the file is empty; it should have {content}")
    return text


def check_role(invitation: Invitation, *needed: str) -> None:
    """Check an invite's role before it is used up. Raises InviteError."""
    if invitation.role not in needed:
        raise InviteError(
            f"the invite of --join is for the role {invitation.role}, and this needs "
            f"{' or '.join(needed)}: the run's operator makes one with `planaria invite --role "
            f"{needed[0]}`"
        )


def enrolment_folder(invitation: Invitation) -> Path | None:
    """Folder of the enrolments of this user's commands; None: there is none."""
    run = hashlib.sha256(invitation.authority).hexdigest()[:16]
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a container's --user without a line in /etc/passwd
        log.warning(
            "this user has no home folder, so each command uses the invite once more: set HOME or "
            "XDG_STATE_HOME to a folder that keeps the certificate"
        )
        return None
    return Path(home) / "planaria" / run / invitation.role


@asynccontextmanager
async def enrolled(
    invitation: Invitation, folder: Path | None
) -> AsyncIterator[tuple[Instance, Certified]]:
    """The instance and certificate in a folder, renewed in this block, and later by its
    `keep_renewed`. Raises NotAdmitted, EnrolmentUnreachable, OSError."""
    instance = find_instance(folder)
    try:
        is_kept = folder is not None and instance.number is not None
        file = folder / f"certificate-{instance.number}.pem" if folder and is_kept else None
        enrolment = Enrolment(invitation, instance.identity, file)
        certified = await enrolment.come()
        certified.keep_renewed = partial(enrolment.keep_renewed, certified)
        async with renewed(certified):
            yield instance, certified
    finally:
        release_key(instance)


@asynccontextmanager
async def renewed(certified: Certified | None) -> AsyncIterator[None]:
    """Renew a command's certificate in this block, if it can be renewed."""
    if certified is None or certified.keep_renewed is None:
        yield
        return
    renewing = asyncio.create_task(certified.keep_renewed())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
