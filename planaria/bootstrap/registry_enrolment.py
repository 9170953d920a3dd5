"""Enrolment beside a registry, and the registry's first invites."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from planaria.bootstrap.address import PORTS, Address
from planaria.bootstrap.address_probe import outward
from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import Role
from planaria.bootstrap.credentials import Certified
from planaria.bootstrap.enrolment import EnrolmentServer
from planaria.bootstrap.files import write_secret
from planaria.bootstrap.invites import InviteError, decode

log = logging.getLogger(__name__)

DAY: Final = 24 * 3600.0
FIRST: Final = ((Role.OPERATOR, 0.0), (Role.OWNER, 0.0), (Role.NODE, DAY))
"""Roles of the first invites, with their lifetime in seconds; 0: unlimited."""
SOMEWHERE: Final = "192.0.2.1"
"""A documentation address, used to find the outward interface."""


def beside(listen: Address) -> Address:
    """The default enrolment address of a registry: the port below its own."""
    return listen._replace(port=listen.port - 1 if listen.port > 1 else 0)


def advertised(listen: Address, port: int, advertise: Address | None) -> Address:
    """The address that invites name: the advertised one, the listening one, or, for a wildcard,
    this machine's outward address."""
    if advertise is not None:
        return advertise
    if not listen.is_any:
        return listen._replace(port=port)
    host = socket.gethostname()
    with suppress(OSError):
        host = outward(SOMEWHERE, PORTS)
    return Address(host, port)


@asynccontextmanager
async def enrolling(
    admission: Admission,
    certified: Certified,
    run: str,
    enrol: Address,
    addresses_for: Callable[[int], tuple[Address, Address]],
    on_invites: Callable[[dict[Role, str]], None],
    others: Sequence[Address] = (),
) -> AsyncIterator[None]:
    """Serves enrolment at `enrol` in this block. `addresses_for`: maps the enrolment port to the
    addresses of registry and enrolment that invites name. `on_invites` receives the texts of the
    first invites, by role. `others`: the run's other registries, with the default enrolment port.
    Raises the errors of `add_port`, AdmissionError and OSError."""
    server = EnrolmentServer(admission)
    port = await server.start(str(enrol), certified)
    try:
        registry, enrolment = addresses_for(port)
        log.info("enrolment listens on port %d; invites name %s and %s", port, registry, enrolment)
        registries = [str(address) for address in (registry, *others)]
        enrolments = [str(address) for address in (enrolment, *map(beside, others))]
        places = run, registries, enrolments
        on_invites({role: _invite(admission, role, each, *places) for role, each in FIRST})
        yield
    finally:
        await server.stop()


def _invite(
    admission: Admission,
    role: Role,
    seconds: float,
    run: str,
    registries: list[str],
    enrolments: list[str],
) -> str:
    """A role's invite as text: the one in the registry's folder if valid, else a new one."""
    folder, authority = admission.folder, admission.authority
    file = None if folder is None else folder / f"{role}.invite"
    if file is not None and _is_good(admission, file, [*registries, *enrolments]):
        return file.read_text(encoding="utf-8").strip()
    made, secret = admission.invite(role, seconds=seconds)
    text = made.for_others(run, registries, enrolments, authority.certificate, secret)
    if file is not None:
        write_secret(file, text.encode() + b"\n")
    return text


def _is_good(admission: Admission, file: Path, places: list[str]) -> bool:
    """Whether the invite in a file can still be used, and names these addresses."""
    try:
        invitation = decode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, InviteError):
        return False
    same = [*invitation.registries, *invitation.enrolments] == places
    return same and admission.invites.is_open(invitation.secret, time.time())
