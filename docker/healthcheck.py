#!/usr/bin/env python3
"""Asks this container's registry or node how it is, over the standard gRPC health service.

Exit status 0 if it serves, 1 otherwise; reads the variables that entrypoint.sh reads.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE = 3.0  # seconds
TLS = ("PLANARIA_TLS_CA", "PLANARIA_TLS_KEY", "PLANARIA_TLS_CERT")


def main() -> str | None:
    """What is wrong; None: nothing."""
    advertised = os.environ.get("PLANARIA_ADVERTISE", "")
    if advertised == "none":
        return None  # this node only dials out: nobody listens, and its process is alive
    listen = os.environ["PLANARIA_LISTEN"]
    if not (os.environ.get("PLANARIA_TLS_CA") or os.environ.get("PLANARIA_INSECURE")):
        return unconnected(int(listen.rpartition(":")[2]))
    with open_channel(f"localhost:{listen.rpartition(':')[2]}", advertised) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return f"{listen} doesn't answer: {error.code().name}: {error.details()}"
    if answer.status != HealthCheckResponse.SERVING:
        return f"{listen} says {HealthCheckResponse.ServingStatus.Name(answer.status)}"
    return None


def unconnected(port: int) -> str | None:
    """Who certificates are issued to by the run's registry answers nobody without one: that it
    takes connections has to do."""
    try:
        socket.create_connection(("localhost", port), DEADLINE).close()
    except OSError as error:
        return f"port {port} takes no connection: {error}"
    return None


def open_channel(address: str, advertised: str) -> grpc.Channel:
    """With TLS as the container has it; its certificate names what peers dial, not localhost."""
    if not os.environ.get("PLANARIA_TLS_CA"):
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(*(Path(os.environ[k]).read_bytes() for k in TLS))
    host = advertised.rpartition(":")[0].strip("[]") or os.environ.get("HOSTNAME", "localhost")
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", host)])


sys.exit(main())
