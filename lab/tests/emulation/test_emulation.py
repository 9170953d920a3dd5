"""Tests of emulated links with real sockets in network namespaces; skipped if none can be made."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from planaria_lab.emulation import emulation
from planaria_lab.emulation.emulation import Emulation, EmulationError, check_possible, emulate
from planaria_lab.emulation.links import all_alike
from planaria_lab.emulation.relay import CONGESTION

DEADLINE = 60.0  # seconds; reached only by a hang
PORT = 7400
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@pytest.fixture
def links() -> Iterator[Emulation]:
    """Two machines, 5 ms and 100 Mbit/s apart."""
    try:
        with emulate(all_alike(["a", "b"], 5, 100)) as links:
            yield links
    except EmulationError as error:
        pytest.skip(str(error))


@contextmanager
def held(places: Iterable[Path]) -> Iterator[set[str]]:
    """Yield the names of network namespaces, held open so that no others get these names."""
    descriptors = [os.open(place, os.O_RDONLY | os.O_CLOEXEC) for place in places]
    try:
        yield {f"net:[{os.fstat(descriptor).st_ino}]" for descriptor in descriptors}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def processes_with(namespaces: set[str]) -> list[str]:
    """Return the links of all other processes that are in one of them, or hold one open."""
    names = []
    for process in {*Path("/proc").glob("[0-9]*")} - {Path(f"/proc/{os.getpid()}")}:
        for link in (process / "ns/net", *process.glob("fd/*")):
            try:
                if str(link.readlink()) in namespaces:
                    names.append(f"{process.name} {link}")
            except OSError:  # the process has ended meanwhile
                continue
    return names


def test_a_stream_arrives_whole_and_in_order(links):
    sent = os.urandom(1 << 20)
    assert carried(links, sent) == sent
    traffic = links.traffic()
    assert traffic["a", "b"].bytes > len(sent)
    assert 0 < traffic["b", "a"].bytes < len(sent)
    assert traffic["a", "b"].lost == 0


def test_a_stream_arrives_whole_where_packets_are_lost():
    """Lost packets are cut out of what the kernel sent at once, and the rest arrives."""
    sent = os.urandom(1 << 20)
    try:
        with emulate(all_alike(["a", "b"], 5, 100, loss=0.03, jitter_ms=2)) as links:
            assert carried(links, sent) == sent
            assert links.traffic()["a", "b"].lost > 0
            assert links.congestion == CONGESTION or CONGESTION not in AVAILABLE.read_text()
    except EmulationError as error:
        pytest.skip(str(error))


def carried(links: Emulation, sent: bytes) -> bytes:
    """Send the bytes from machine a to b, and return what b receives."""
    with links.inside("b"):
        server = socket.create_server((links.homes["b"].host, PORT))
    with links.inside("a"):
        client = socket.create_connection((links.homes["b"].host, PORT), DEADLINE)
    peer, (host, _) = server.accept()
    assert host == links.homes["a"].host

    def send() -> None:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)

    sending = threading.Thread(target=send)
    sending.start()
    received = b"".join(iter(lambda: peer.recv(1 << 16), b""))
    sending.join()
    for connection in (server, client, peer):
        connection.close()
    return received


def test_datagrams_keep_their_order(links):
    with links.inside("b"):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind((links.homes["b"].host, PORT))
    with links.inside("a"):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.settimeout(DEADLINE)
    for number in range(100):
        sender.sendto(str(number).encode(), (links.homes["b"].host, PORT))
    assert [int(receiver.recv(100)) for _ in range(100)] == list(range(100))
    assert links.traffic()["a", "b"][:3] == (100, 100 * 28 + 190, 0)
    receiver.close()
    sender.close()


def test_a_machine_sees_its_own_network_only(links):
    server = socket.create_server(("127.0.0.1", 0))
    own = socket.if_nameindex()
    with links.inside("a"):
        assert {name for _, name in socket.if_nameindex()} == {"lo", "wan0"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.getsockname(), DEADLINE)
    assert socket.if_nameindex() == own
    server.close()


def test_nothing_is_left_when_the_block_ends():
    with ExitStack() as holding:
        try:
            with emulate(all_alike(["a", "b"], 1, 100)) as links:
                places = [home.namespace for home in links.homes.values()]
                made = holding.enter_context(held(places))
                assert len(made) == 2
                assert processes_with(made)
        except EmulationError as error:
            pytest.skip(str(error))
        assert processes_with(made) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended_by(number, links):
    command = (
        "import json, signal\n"
        "from planaria_lab.emulation.emulation import emulate\n"
        "from planaria_lab.emulation.links import all_alike\n"
        "with emulate(all_alike(['a', 'b'], 1, 100)) as links:\n"
        "    places = [str(home.namespace) for home in links.homes.values()]\n"
        "    print(json.dumps([links.relay.pid, places]), flush=True)\n"
        "    signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    relay, places = json.loads(process.stdout.readline())
    with held(map(Path, places)) as made:
        handle = os.pidfd_open(relay)
        process.send_signal(number)
        process.communicate()
        gone, _, _ = select.select([handle], [], [], DEADLINE)
        os.close(handle)
        assert gone
        assert processes_with(made) == []


def test_a_relay_that_is_gone_is_named(links):
    links.relay.kill()
    links.relay.wait()
    with pytest.raises(EmulationError, match="relay of the links has ended with status -9"):
        links.traffic()


def test_emulation_needs_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EmulationError, match="needs root"):
        check_possible()


def test_emulation_needs_the_right_to_make_namespaces(monkeypatch):
    """A root user without the right to make namespaces: the relay reports it."""
    monkeypatch.setattr(emulation, "check_possible", lambda: None)
    powerless = 'import sys; print(\'{"error": "can\\\'t make a network namespace"}\')'
    program = [sys.executable, "-c", powerless]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(program, **options))
    with (
        pytest.raises(EmulationError, match=r"make a network namespace\. Emulation needs root"),
        emulate(all_alike(["a"], 1, 1)),
    ):
        pass
