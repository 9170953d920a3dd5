"""Limits on the connections that gRPC accepts, by the descriptors that this process may open.

gRPC does the work. A connection that has not completed its handshakes (TLS, and HTTP/2's settings)
is closed after `HANDSHAKE`, and one beyond the maximum at once. So strangers can hold no place for
longer than that, and the process keeps descriptors for its own use. Limits by address are a
firewall's: examples/firewall has some.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

OWN: Final = 100
"""Descriptors reserved for other uses: files, the page's, and connections that this process opens
while few nodes are there."""
EACH: Final = 2
"""Descriptors per accepted connection: its own, and one that this process opens."""
VISITORS: Final = 10
"""Connections for commands and newcomers, in addition to the nodes'."""
MOST: Final = 40_000
"""Maximum number of connections."""
HANDSHAKE: Final = 3.0
"""Seconds for the handshakes of a connection."""


def open_descriptors() -> int:
    """Raises this process's descriptor limit as far as allowed or useful, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    useful = OWN + EACH * MOST
    wanted = useful if hard == resource.RLIM_INFINITY else min(hard, useful)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return useful if soft == resource.RLIM_INFINITY else soft


def connections_within(descriptors: int) -> int:
    """The connections that a process with this many descriptors accepts."""
    return min(MOST, max(2, (descriptors - OWN) // EACH))


def server_options(descriptors: int) -> list[tuple[str, int]]:
    """The limits on accepted connections, as options of a gRPC server."""
    return [
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
        ("grpc.max_allowed_incoming_connections", connections_within(descriptors)),
    ]


def limit_message(nodes: int, descriptors: int) -> tuple[int, str]:
    """A log level and a message about the descriptor limit of a registry of `nodes` nodes."""
    message = (
        f"this process may open {descriptors} files (ulimit -n): room for "
        f"{connections_within(descriptors)} connections"
    )
    needed = OWN + EACH * (nodes + VISITORS)
    if descriptors >= needed:
        return logging.INFO, message
    return logging.WARNING, (
        f"{message}, and others are closed. A run of {nodes} nodes needs {needed}: raise the hard "
        f"limit (ulimit -n {needed}, LimitNOFILE={needed} of systemd, --ulimit nofile={needed} of "
        "Docker), and start the registry again"
    )
