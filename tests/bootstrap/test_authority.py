"""Tests of certificates, and of whether the TLS library of the links accepts them."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.authority import (
    LIFETIME,
    Authority,
    CertifiedKey,
    Request,
    Role,
    Who,
    is_issued_by,
    to_der,
    to_pem,
    who_in,
)
from planaria.bootstrap.identity import Identity, is_signed

NOW = 1_800_000_000.0
AUTHORITY = Authority.make(NOW)
IDENTITY = Identity.generate()
REQUEST = Request.of(IDENTITY)


def pair_of(who: Who, now: float = NOW, authority: Authority = AUTHORITY) -> CertifiedKey:
    certificate = authority.issue(REQUEST.request, who, now)
    return CertifiedKey(REQUEST.key, certificate, authority.certificate)


@given(
    role=st.sampled_from(Role),
    instance=st.text("0123456789abcdef", min_size=32, max_size=32),
    stage=st.none() | st.integers(0, 999_999),
    now=st.integers(0, 4 * 10**9),
)
def test_a_certificate_says_who_and_for_how_long(role, instance, stage, now):
    pair = pair_of(Who(role, instance, stage), now)
    assert pair.who == Who(role, instance, stage)
    assert not pair.is_over(now)
    assert not pair.is_due(now + LIFETIME / 2 - 2)
    assert pair.is_due(now + LIFETIME / 2)
    assert pair.is_over(now + LIFETIME)
    assert is_issued_by(pair.certificate, AUTHORITY.certificate)


def test_names_of_others_say_nothing():
    instance = IDENTITY.instance
    assert Who.of(["example.org", "node.example.org", "localhost"]) == Who()
    assert Who.of([f"{instance}.planaria.org", "x.node.planaria"]) == Who()
    both = Who.of(["node.planaria", "operator.planaria", f"{instance}.planaria"])
    assert both == Who(None, instance)
    owners = ["node.planaria", "owner.planaria"]
    assert Who.of(owners) == Who.of(owners[1:]) == Who(Role.OWNER)
    assert {*Who(Role.OWNER).names} == {*owners}
    assert who_in(AUTHORITY.certificate) == Who()


def test_what_a_request_says_of_names_does_not_count():
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName("operator.planaria")])
    asked = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    asked = asked.add_extension(names, critical=False)
    request = asked.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    who = Who(Role.NODE, IDENTITY.instance)
    assert who_in(AUTHORITY.issue(request, who, NOW)) == who


def test_requests_that_are_not_granted():
    who = Who(Role.NODE, IDENTITY.instance)
    large = ec.generate_private_key(ec.SECP384R1())
    plain = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    other = plain.sign(large, hashes.SHA256()).public_bytes(Encoding.DER)
    changed = REQUEST.request[:-1] + bytes([REQUEST.request[-1] ^ 1])
    for request in (b"", b"\0" * 5000, other, changed, REQUEST.request + b"\0"):
        with pytest.raises(ValueError, match=r"\w"):
            AUTHORITY.issue(request, who, NOW)


def test_an_authority_goes_on_from_its_file():
    again = Authority.from_pem(AUTHORITY.to_pem())
    assert again.certificate == AUTHORITY.certificate
    pair = pair_of(Who(Role.NODE, IDENTITY.instance), authority=again)
    assert is_issued_by(pair.certificate, AUTHORITY.certificate)
    assert to_pem(to_der(AUTHORITY.certificate)) == AUTHORITY.certificate
    other = Authority.make(NOW)
    assert not is_issued_by(pair.certificate, other.certificate)
    with pytest.raises(ValueError, match="to another key"):
        Authority.from_pem(other.identity.to_pem() + AUTHORITY.certificate)


def test_keys_are_not_shown():
    pair = pair_of(Who(Role.NODE))
    assert "PRIVATE" not in repr(pair)
    assert is_signed(IDENTITY.public, REQUEST.signature, "enrol", REQUEST.request)


async def test_a_handshake_by_what_was_issued(tmp_path: Path):
    """Python's TLS accepts a P-256 certificate of an Ed25519 authority; test_enrolment.py uses that
    of gRPC."""
    now = time.time()
    authority = Authority.make(now)
    pair = authority.own_pair(now)
    (tmp_path / "both.pem").write_bytes(pair.key + pair.certificate)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(tmp_path / "both.pem")
    dialling = ssl.create_default_context(cadata=pair.authority.decode())
    server = await asyncio.start_server(lambda _, w: w.close(), "127.0.0.1", 0, ssl=serving)
    port = server.sockets[0].getsockname()[1]
    async with server:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=dialling, server_hostname="registry.planaria"
        )
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(
                "127.0.0.1", port, ssl=dialling, server_hostname="node.planaria"
            )
