#!/usr/bin/env python3
"""Asks this container's registry or node how it is, over the standard gRPC health service.

Exit status 0 if it serves, 1 otherwise; reads the variables that entrypoint.sh reads.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE = 3.0  # seconds
MARK = b"-----BEGIN "
TLS = ("PLANARIA_TLS_CA", "PLANARIA_TLS_KEY", "PLANARIA_TLS_CERT")


def main() -> str | None:
    """What is wrong; None: nothing."""
    advertised = os.environ.get("PLANARIA_ADVERTISE", "")
    if advertised == "none":
        return None  # this node only dials out: nobody listens, and its process is alive
    listen = os.environ["PLANARIA_LISTEN"]
    port, certified = listen.rpartition(":")[2], None
    if not (os.environ.get("PLANARIA_TLS_CA") or os.environ.get("PLANARIA_INSECURE")):
        certified = certificate()
        if certified is None:
            return unconnected(int(port))
    with open_channel(f"localhost:{port}", advertised, certified) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return f"{listen} doesn't answer: {error.code().name}: {error.details()}"
    if answer.status != HealthCheckResponse.SERVING:
        return f"{listen} says {HealthCheckResponse.ServingStatus.Name(answer.status)}"
    return None


def certificate() -> list[bytes] | None:
    """A node's by an invite: its key, its certificate and the authority's. None: a registry, or a
    node that has none yet."""
    folder = os.environ.get("PLANARIA_SAVE_DIR") or os.environ.get("PLANARIA_OUT") or "out"
    kept = sorted(Path(folder).rglob("certificate-*.pem"))
    parts = kept[0].read_bytes().split(MARK)[1:] if kept else []
    return [MARK + part for part in parts] if len(parts) == 3 else None


def unconnected(port: int) -> str | None:
    """Under certificates by invites nobody is answered without one: that it takes connections has
    to do."""
    try:
        socket.create_connection(("localhost", port), DEADLINE).close()
    except OSError as error:
        return f"port {port} takes no connection: {error}"
    return None


def open_channel(address: str, advertised: str, certified: list[bytes] | None) -> grpc.Channel:
    """With TLS as the container has it; its certificate names what peers dial, not localhost."""
    if certified is not None:
        key, own, authority = certified
        return secured(address, (authority, key, own), "node.planaria")
    if not os.environ.get("PLANARIA_TLS_CA"):
        return grpc.insecure_channel(address)
    host = advertised.rpartition(":")[0].strip("[]") or os.environ.get("HOSTNAME", "localhost")
    return secured(address, [Path(os.environ[k]).read_bytes() for k in TLS], host)


def secured(address: str, pem: Sequence[bytes], host: str) -> grpc.Channel:
    """`pem`: of the authority, and its own key and certificate."""
    credentials = grpc.ssl_channel_credentials(*pem)
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", host)])


sys.exit(main())
