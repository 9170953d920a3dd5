"""The client of enrolment: gets a certificate by an invite, and renews it in time.

A file keeps the key, its certificate and the authority's, in PEM. A renewal does not need the
invite's secret.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from planaria.bootstrap.authority import (
    DOMAIN,
    LIFETIME,
    CertifiedKey,
    Request,
    Role,
    is_issued_by,
    to_pem,
)
from planaria.bootstrap.authorization import ENROL
from planaria.bootstrap.credentials import Certified, Credentials, clock_hint
from planaria.bootstrap.enrolment_pb2 import EnrolReply, EnrolRequest, Invitation
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import write_secret
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import NotAdmitted
from planaria.bootstrap.transport import Broken, parse

log = logging.getLogger(__name__)

ATTEMPT: Final = 5.0  # seconds per address
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds between two attempts
LATER: Final = 600.0  # seconds until a failed renewal is retried, and between two looks
SOONEST: Final = 1.0  # minimum seconds between two renewals

_MARK: Final = b"-----BEGIN "


class EnrolmentUnreachable(UserError):  # noqa: N818  what it says
    """No enrolment service has answered in time; the message names address, error and remedy."""


class Enrolment:
    """Enrolment of one identity in one run. The constructor raises nothing."""

    def __init__(
        self,
        invitation: Invitation,
        identity: Identity,
        file: Path | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._invitation, self._identity = invitation, identity
        self._file, self._now = file, clock
        self._authority = to_pem(invitation.authority)

    async def come(self, deadline: float = 30.0) -> Certified:
        """Gets this node a certificate: the kept one if it fits run, role, stage and identity, else
        one by the invite. Raises NotAdmitted, EnrolmentUnreachable after `deadline` seconds, and
        OSError."""
        stored = self._read()
        if stored is not None and not stored.is_due(self._now()):
            return Certified(stored)
        if stored is not None:
            try:
                return Certified(await self._ask(b"", deadline))
            except (NotAdmitted, EnrolmentUnreachable) as error:
                if not stored.is_over(self._now()):
                    log.warning("the certificate is not renewed yet: %s", error)
                    return Certified(stored)
                if isinstance(error, EnrolmentUnreachable):
                    raise
        return Certified(await self._ask(self._invitation.secret, deadline))

    async def keep_renewed(self, certified: Certified) -> None:
        """Keeps renewing this node's certificate until cancelled."""
        while True:
            wait = certified.pair.ends - LIFETIME / 2 - self._now()
            # The loop's clock stands still while the machine sleeps.
            await asyncio.sleep(min(max(SOONEST, wait), LATER))
            if not certified.pair.is_due(self._now()):
                continue
            try:
                certified.renew(await self._ask(b"", ATTEMPT * 2))
                log.info("the certificate is renewed, for %g hours", LIFETIME / 3600)
            except (NotAdmitted, EnrolmentUnreachable, OSError) as error:
                log.warning("the certificate is not renewed: %s", error)
                await asyncio.sleep(LATER)

    # -- inside ----------------------------------------------------------------------------------

    def _read(self) -> CertifiedKey | None:
        """The kept key and certificate; None: absent or unusable."""
        try:
            content = b"" if self._file is None else self._file.read_bytes()
        except OSError:
            return None
        parts = [_MARK + part for part in content.split(_MARK)[1:]]
        if len(parts) != 3:
            return None
        pair = CertifiedKey(*parts)
        try:
            who = pair.who
            is_issued = is_issued_by(pair.certificate, self._authority)
        except ValueError:
            return None
        invited = self._invitation
        stage = invited.stage if invited.HasField("stage") else None
        mine = who == (invited.role, self._identity.instance, stage)
        return pair if is_issued and mine and pair.authority == self._authority else None

    async def _ask(self, secret: bytes, deadline: float) -> CertifiedKey:
        """Requests a certificate, address by address, until one answers or refuses. Raises
        NotAdmitted, EnrolmentUnreachable, OSError."""
        pending = Request.of(self._identity)
        request = EnrolRequest(
            secret=secret,
            public_key=self._identity.public,
            request=pending.request,
            signature=pending.signature,
        )
        clock, pause = asyncio.get_running_loop().time, FIRST_PAUSE
        end, why = clock() + deadline, ""
        while True:
            for address in self._invitation.enrolments:
                try:
                    reply = await self._ask_at(address, request, min(ATTEMPT, deadline))
                except Broken as broken:
                    why = f"{address} said: {broken.details or broken.code}"
                    if broken.code == "PERMISSION_DENIED":
                        raise NotAdmitted(broken.details or "refused") from broken
                else:
                    return self._take(CertifiedKey(pending.key, reply.certificate, self._authority))
            if pause == FIRST_PAUSE:
                log.warning("no certificate yet, trying for %.0f s: %s", end - clock(), why)
            if clock() + pause >= end:
                places = " or ".join(self._invitation.enrolments)
                raise EnrolmentUnreachable(
                    f"no registry at {places} accepts invites, tried for {deadline:g} s; {why}"
                    f"{clock_hint(why)}. Check "
                    "that the registry runs (`planaria bootstrap`), and that a firewall lets this "
                    "port through, too"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _ask_at(self, address: str, request: EnrolRequest, seconds: float) -> EnrolReply:
        trusted = Credentials(channel=grpc.ssl_channel_credentials(self._authority))
        options = (
            ("grpc.ssl_target_name_override", Role.REGISTRY + DOMAIN),
            ("grpc.use_local_subchannel_pool", 1),
        )
        channel = GrpcTransport(trusted, options).channel(address)
        try:
            answer = await channel.call(ENROL, request.SerializeToString(), seconds)
        finally:
            await channel.close()
        return parse(answer, EnrolReply)

    def _take(self, pair: CertifiedKey) -> CertifiedKey:
        """Verifies and stores a certificate. Raises NotAdmitted for a wrong one, and OSError."""
        try:
            mine = pair.who.instance == self._identity.instance
            if not (mine and is_issued_by(pair.certificate, self._authority)):
                raise ValueError("it belongs to another node or authority")
        except ValueError as error:
            raise NotAdmitted(f"the registry sent an unusable certificate: {error}") from error
        if self._file is not None:
            write_secret(self._file, b"".join(pair))
        return pair
