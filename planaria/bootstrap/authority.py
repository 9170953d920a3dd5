"""The run's certificate authority: contents, issue and lifetime of certificates.

An authority is an Ed25519 key with a self-signed certificate. It issues P-256 certificates, since
some TLS libraries accept no others. Their DNS names state the holder's role and identity:
`node.planaria`, `INSTANCE.planaria`, and `stage-K.planaria` if it may serve only that stage. A node
of the run's owner has both `owner.planaria` and `node.planaria`. Pure: `now` is passed in, seconds
since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from planaria.bootstrap.identity import INSTANCE_LETTERS, Identity

DOMAIN: Final = ".planaria"
LIFETIME: Final = 48 * 3600.0
"""Lifetime of a certificate in seconds; it is renewed at half of that."""
AUTHORITY_DAYS: Final = 3650
SLACK: Final = 3600.0
"""Seconds by which a clock may lag the authority's."""
REQUEST_BYTES: Final = 4096  # a P-256 request has about 200


class Role(StrEnum):
    """The permissions of a certificate's holder."""

    OWNER = "owner"  # serve any stage, stage 0 included: a node of the run's owner
    NODE = "node"  # serve a stage other than 0
    READER = "reader"  # read state
    OPERATOR = "operator"  # command the registry
    REGISTRY = "registry"


class Who(NamedTuple):
    """The identity in a certificate's names. `role` None: another authority's certificate."""

    role: Role | None = None
    instance: str = ""
    stage: int | None = None  # the stage that it must ask for

    @property
    def names(self) -> list[str]:
        roles = [Role.OWNER, Role.NODE] if self.role is Role.OWNER else [self.role]
        stage = None if self.stage is None else f"stage-{self.stage}"
        labels = [*roles, self.instance, stage]
        return [f"{label}{DOMAIN}" for label in labels if label]

    @classmethod
    def of(cls, names: Iterable[str]) -> Who:
        """The identity that a certificate's DNS names state; unknown ones are ignored."""
        labels = [name.removesuffix(DOMAIN) for name in names if name.endswith(DOMAIN)]
        roles = {Role(label) for label in labels if label in list(Role)}
        if Role.OWNER in roles:
            roles.discard(Role.NODE)
        instances = [
            label for label in labels if re.fullmatch(f"[0-9a-f]{{{INSTANCE_LETTERS}}}", label)
        ]
        stages = [re.fullmatch(r"stage-(\d{1,6})", label) for label in labels]
        return cls(
            roles.pop() if len(roles) == 1 else None,
            instances[0] if len(instances) == 1 else "",
            next((int(match[1]) for match in stages if match), None),
        )


class CertifiedKey(NamedTuple):
    """A private key and its certificates for TLS, in PEM. Its `repr` hides the key."""

    key: bytes
    certificate: bytes
    authority: bytes  # the certificate that the run's nodes trust

    def __repr__(self) -> str:
        return "CertifiedKey(...)"

    @property
    def who(self) -> Who:
        return who_in(self.certificate)

    @property
    def ends(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return _load(self.certificate).not_valid_after_utc.timestamp()

    def is_due(self, now: float) -> bool:
        """Whether to renew the certificate: half of its lifetime has passed."""
        return now >= self.ends - LIFETIME / 2

    def is_over(self, now: float) -> bool:
        return now >= self.ends


class Request(NamedTuple):
    """A certificate request, and its key, which stays with the requester."""

    key: bytes  # PEM
    request: bytes  # PKCS #10, DER
    signature: bytes  # of the requesting identity, over the request

    @classmethod
    def of(cls, identity: Identity) -> Request:
        key = ec.generate_private_key(ec.SECP256R1())
        named = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        request = named.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return cls(private, request, identity.sign("enrol", request))


@dataclass(frozen=True)
class Authority:
    identity: Identity
    certificate: bytes  # PEM

    @classmethod
    def make(cls, now: float) -> Authority:
        identity = Identity.generate()
        public = identity.key.public_key()
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "the registry of a planaria run")]
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_time(now - SLACK))
            .not_valid_after(_time(now) + timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(identity.key, None)
        )
        return cls(identity, certificate.public_bytes(Encoding.PEM))

    @classmethod
    def from_pem(cls, pem: bytes) -> Authority:
        """Reads an authority's key and certificate as `to_pem` writes them. Raises ValueError."""
        identity = Identity.from_pem(pem)
        certificate = _load(pem)
        if certificate.public_key() != identity.key.public_key():
            raise ValueError("the certificate belongs to another key")
        return cls(identity, certificate.public_bytes(Encoding.PEM))

    def to_pem(self) -> bytes:
        return self.identity.to_pem() + self.certificate

    def issue(self, request: bytes, who: Who, now: float) -> bytes:
        """Issues a certificate, in PEM; ignores the request's names. Raises ValueError."""
        public = _public_key_of(request)
        issuer = _load(self.certificate)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in who.names])
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.identity.key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(issuer.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_time(now - SLACK))
            .not_valid_after(_time(now + LIFETIME))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(names, critical=True)
            .add_extension(by, critical=False)
            .sign(self.identity.key, None)
        )
        return certificate.public_bytes(Encoding.PEM)

    def own_pair(self, now: float) -> CertifiedKey:
        """Issues a key and certificate for the registry itself."""
        request = Request.of(self.identity)
        who = Who(Role.REGISTRY, self.identity.instance)
        return CertifiedKey(request.key, self.issue(request.request, who, now), self.certificate)


def who_in(certificate: bytes) -> Who:
    """The identity that a certificate in PEM states. Raises ValueError."""
    with _as_value_error():
        try:
            extensions = _load(certificate).extensions
            extension = extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return Who()
        return Who.of(extension.value.get_values_for_type(x509.DNSName))


def key_in(certificate: bytes) -> bytes:
    """The public key in an authority's PEM certificate. Raises ValueError."""
    key = _load(certificate).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("the authority's key is not an Ed25519 key")
    return key.public_bytes_raw()


def to_der(certificate: bytes) -> bytes:
    """Converts a certificate from PEM to DER. Raises ValueError."""
    return _load(certificate).public_bytes(Encoding.DER)


def to_pem(certificate: bytes) -> bytes:
    """Converts a certificate from DER to PEM. Raises ValueError."""
    with _as_value_error():
        return x509.load_der_x509_certificate(certificate).public_bytes(Encoding.PEM)


def is_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Whether `authority` itself has signed `certificate`; both in PEM. Raises ValueError."""
    try:
        _load(certificate).verify_directly_issued_by(_load(authority))
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _public_key_of(request: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a certificate request. Raises ValueError for malformed or wrongly signed
    requests, and for keys other than P-256."""
    if len(request) > REQUEST_BYTES:
        raise ValueError(f"the request has {len(request)} bytes; the maximum is {REQUEST_BYTES}")
    with _as_value_error():
        csr = x509.load_der_x509_csr(request)
        public = csr.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
            raise ValueError("the request is not for a P-256 key")
        if not csr.is_signature_valid:
            raise ValueError("the request is not signed by the key that it is for")
        return public


def _load(pem: bytes) -> x509.Certificate:
    with _as_value_error():
        return x509.load_pem_x509_certificate(pem)


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Converts the library's errors for unsupported input to ValueError."""
    try:
        yield
    except (
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise ValueError(str(error)) from error


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
