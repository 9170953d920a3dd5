"""Persistent admission state of a run: the authority's key, and decisions on invites and bans.

The registry's folder, readable by its owner only, holds `authority.pem` (key and certificate) and
`invites.jsonl`, one record per line, the newest last. A record is on disk before it is announced.
An incomplete last line, left by a crash, is dropped. Without a folder the state is in memory only.
The authority's key is the run's: it signs views, whether or not the registry issues certificates.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from planaria.bootstrap.authority import Authority, CertifiedKey, Role, Who
from planaria.bootstrap.enrolment_pb2 import EnrolRequest
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import SECRET, SECRET_FOLDER, write_secret
from planaria.bootstrap.identity import Identity, instance_of, is_signed
from planaria.bootstrap.invites import Invite, Invites, NotAdmitted, Record
from planaria.bootstrap.store import NotLeading, Store

log = logging.getLogger(__name__)

AUTHORITY: Final = "authority.pem"
INVITES: Final = "invites.jsonl"


def folder_beside(journal: Path) -> Path:
    """The default folder of the registry with this journal."""
    return journal.with_name(f"{journal.name}.authority")


def key_beside(journal: Path) -> Identity:
    """The key that signs the journal's views; created if absent. Raises AdmissionError."""
    return Admission(folder_beside(journal), certifies=False).key


class AdmissionError(UserError):
    """The folder is unusable; the message says why and what to do."""


class Admission:
    """The run's key, and its invites and bans; open for one registry at a time, as its journal."""

    def __init__(
        self,
        folder: Path | None,
        certifies: bool = True,
        clock: Callable[[], float] = time.time,
        decided: Store | None = None,
    ) -> None:
        """Opens the folder; creates the authority if absent. `certifies`: whether it issues
        certificates. `decided`: storage of decisions instead of the folder's file. Raises
        AdmissionError, and the errors of `Store.records`."""
        self.folder, self.certifies, self._now = folder, certifies, clock
        self._elsewhere = decided
        self.invites = Invites()
        self._size = 0  # bytes of complete lines in the file
        try:
            self._read()
            self.authority = self._authority()
        except OSError as error:
            raise AdmissionError(
                f"the folder {folder} can't be used: {error.strerror}; free space, let this user "
                "write there, or name another"
            ) from error

    @property
    def key(self) -> Identity:
        """The run's key."""
        return self.authority.identity

    def own_pair(self) -> CertifiedKey:
        """Issues a new key and certificate for the registry itself."""
        return self.authority.own_pair(self._now())

    def enrol(self, request: EnrolRequest) -> tuple[Who, bytes]:
        """Issues an invited node's certificate in PEM. Raises NotAdmitted, AdmissionError."""
        if not is_signed(request.public_key, request.signature, "enrol", request.request):
            raise NotAdmitted("the request is not signed by the key that it names")
        instance = instance_of(request.public_key)
        who, record = self.invites.admit(request.secret, instance, self._now())
        try:
            certificate = self.authority.issue(request.request, who, self._now())
        except ValueError as error:
            raise NotAdmitted(f"the certificate request is invalid: {error}") from error
        if record is not None:
            self.decide(record)
        return who, certificate

    def invite(
        self, role: Role, uses: int = 0, seconds: float = 0.0, stage: int | None = None
    ) -> tuple[Invite, bytes]:
        """Creates an invite; returns it and its secret. Raises InviteError, AdmissionError."""
        record, secret = self.invites.make(role, uses, seconds, stage, self._now())
        self.decide(record)
        return self.invites.invites[record["invite"]], secret

    def decide(self, record: Record) -> None:
        """Persists a record of `invites` to disk or the shared store, then applies it. Raises
        AdmissionError."""
        if self._elsewhere is not None:
            try:
                self._elsewhere.decide(record)
            except NotLeading as error:
                raise AdmissionError(f"this registry can't store decisions: {error}") from error
        elif self.folder is not None:
            try:
                self._append(json.dumps(record).encode() + b"\n")
            except OSError as error:
                raise AdmissionError(
                    f"{self.folder / INVITES} can't be written: {error.strerror}; free space, or "
                    "let this user write there"
                ) from error
        self.invites.apply(record)

    # -- inside ----------------------------------------------------------------------------------

    def _append(self, line: bytes) -> None:
        assert self.folder is not None
        self.folder.mkdir(mode=SECRET_FOLDER, parents=True, exist_ok=True)
        path = self.folder / INVITES
        if not path.exists():
            write_secret(path, b"")
        descriptor = os.open(path, os.O_RDWR, SECRET)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)

    def _read(self) -> None:
        for number, record in enumerate(self._elsewhere.records() if self._elsewhere else ()):
            try:
                self.invites.apply(record)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise AdmissionError(
                    f"decision {number} in etcd is invalid: restore it from a copy, or give "
                    "the run another name"
                ) from error
        if self.folder is None or self._elsewhere is not None:
            return
        path = self.folder / INVITES
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                self.invites.apply(json.loads(line))
            except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
                raise AdmissionError(
                    f"line {number} of {path} is invalid: restore the file from a copy. If you "
                    "remove it instead, all enrolled nodes need new invites"
                ) from error
            self._size += len(line) + 1
        if rest:
            log.warning("%s: the last line is incomplete, and is dropped", path)

    def _authority(self) -> Authority:
        if self.folder is None:
            return Authority.make(self._now())
        path = self.folder / AUTHORITY
        try:
            return Authority.from_pem(path.read_bytes())
        except FileNotFoundError:
            made = Authority.make(self._now())
            write_secret(path, made.to_pem())
            log.info("created the run's key in %s", path)
            return made
        except ValueError as error:
            raise AdmissionError(
                f"{path} is not an authority's key ({error}): restore it from a copy. If you "
                f"remove the folder {self.folder} instead, all nodes need new invites, and the "
                "journal's views become invalid"
            ) from error
