"""Emulates a network of machines on this one: real sockets behind links with delay, bandwidth,
jitter and loss.

Each machine is a network namespace; relay.py carries the packets between them. A process enters a
machine's namespace with `enter_network` of node/machine/processes.py. The network disappears as
soon as the process that made it ends, even by SIGKILL.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from planaria.bootstrap.errors import UserError
from planaria.node.local.plan import ProcessHome
from planaria.node.machine.processes import enter_network
from planaria_lab.emulation.links import Network
from planaria_lab.emulation.relay import NETWORK, RelayedTraffic, address

ANSWER: Final = 30.0
"""Seconds within which the relay must answer."""


class EmulationError(UserError):
    """Links can't be emulated here, or no longer. The message has the reason and the remedy."""


class Emulation:
    """A running emulated network. `homes`: node -> its address and namespace. `congestion`: name of
    TCP's congestion control in it."""

    def __init__(self, network: Network, relay: subprocess.Popen[str]) -> None:
        self.relay, self.nodes = relay, list(network.sites)
        answer = self._ask(NETWORK.dump_json(network).decode())
        namespaces, self.congestion = answer["namespaces"], str(answer["congestion"])
        self.homes = {
            node: ProcessHome(address(number), Path(f"/proc/{relay.pid}/fd/{namespaces[number]}"))
            for number, node in enumerate(self.nodes)
        }

    def traffic(self) -> dict[tuple[str, str], RelayedTraffic]:
        """(from, to) -> the traffic so far. Raises EmulationError if the relay has ended."""
        return {
            (self.nodes[a], self.nodes[b]): RelayedTraffic(*figures)
            for a, b, figures in self._ask("")
        }

    def change(self, network: Network) -> None:
        """Replaces the links by those of this network, which has the same nodes. Raises
        EmulationError if the relay has ended."""
        self._ask(NETWORK.dump_json(network).decode())

    @contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Moves the calling thread, and what it starts, to this machine until the block ends. Other
        running threads, such as gRPC's, stay where they are."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(self.homes[node].namespace)
            try:
                yield
            finally:
                enter_network(Path(f"/proc/self/fd/{own}"))
        finally:
            os.close(own)

    def _ask(self, line: str) -> Any:
        questions, answers = self.relay.stdin, self.relay.stdout
        assert questions is not None
        assert answers is not None
        with suppress(BrokenPipeError):  # its last answer may still be readable
            questions.write(line + "\n")
            questions.flush()
        if not select.select([answers], [], [], ANSWER)[0]:
            raise EmulationError(f"the relay of the links hasn't answered within {ANSWER:.0f} s")
        reply = answers.readline()
        if not reply:
            status = self.relay.wait()
            raise EmulationError(f"the relay of the links has ended with status {status}")
        answer = json.loads(reply)
        if isinstance(answer, dict) and "error" in answer:
            raise EmulationError(
                f"links can't be emulated: {answer['error']}. Emulation needs root with the "
                "capabilities NET_ADMIN and SYS_ADMIN, and the device /dev/net/tun. Start a "
                "container with --cap-add NET_ADMIN,SYS_ADMIN --device /dev/net/tun"
            )
        return answer


@contextmanager
def emulate(network: Network) -> Iterator[Emulation]:
    """Emulates a machine for each node of the network, and its links, until the block ends. Raises
    EmulationError."""
    check_possible()
    relay = subprocess.Popen(
        [sys.executable, "-m", "planaria_lab.emulation.relay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C doesn't reach the relay
    )
    try:
        yield Emulation(network, relay)
    finally:
        relay.kill()
        relay.communicate()


def check_possible() -> None:
    """Raises EmulationError if this machine surely can't emulate links."""
    if sys.platform != "linux":
        raise EmulationError("links are emulated with network namespaces, which only Linux has")
    if os.geteuid() != 0:
        raise EmulationError("emulating links needs root, for network namespaces: use sudo")
    if not Path("/dev/net/tun").exists():
        raise EmulationError("there is no /dev/net/tun: load the kernel module with `modprobe tun`")
    if shutil.which("ip") is None:
        raise EmulationError("the command `ip` is missing: install iproute2")
