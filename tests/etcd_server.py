"""A real etcd of one node on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planaria.bootstrap.etcd import Etcd, EtcdAway, EtcdPlace, get, values, written

DEADLINE = 60.0  # seconds; only a hanging test gets there
TLS = Path(__file__).parent / "bootstrap" / "tls"


class EtcdServer:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url
        self.etcd = Etcd(EtcdPlace.parse(url))

    @property
    def port(self) -> int:
        return self.etcd.place.addresses[0].port

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def history(self, key: str) -> list[bytes]:
        """All values that the key has had."""
        values_seen: list[bytes] = []
        body: dict[str, Any] = {"key": written(key)}
        newest = int(self.etcd.ask("kv/range", body, DEADLINE)["header"]["revision"])
        for revision in range(1, newest + 1):
            at = self.etcd.ask("kv/range", body | {"revision": str(revision)}, DEADLINE)
            if (now := values(at)) and now[0:1] != values_seen[-1:]:
                values_seen += now
        return values_seen


@contextmanager
def etcd_server(folder: Path, tls: bool = False) -> Iterator[EtcdServer]:
    """Runs an etcd. Skips the test if etcd is not installed."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("there is no etcd; Debian's package is etcd-server")
    with _port() as port, _port() as peers:
        scheme, query, files = "http", "", []
        if tls:
            scheme, query = "https", f"?ca={TLS}/ca.pem&cert={TLS}/node.pem&key={TLS}/node.key"
            files = ["--cert-file", f"{TLS}/node.pem", "--key-file", f"{TLS}/node.key"]
            files += ["--trusted-ca-file", f"{TLS}/ca.pem", "--client-cert-auth"]
        client_url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
        process = subprocess.Popen(
            [
                *(program, "--data-dir", str(folder / "etcd"), "--log-outputs", "stderr"),
                *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", f"default={peer_url}", *files),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"etcd{'s' if tls else ''}://127.0.0.1:{port}{query}"
            server = EtcdServer(process, url)
            _until_it_answers(server)
            yield server
        finally:
            process.kill()
            process.wait()


def _until_it_answers(server: EtcdServer) -> None:
    end = time.monotonic() + DEADLINE
    while True:
        try:
            server.etcd.ask("kv/txn", {"success": [get("any")]}, DEADLINE)
            return
        except EtcdAway:
            assert server.process.poll() is None, "etcd has ended"
            assert time.monotonic() < end, "etcd doesn't answer"
            time.sleep(0.05)


@contextmanager
def _port() -> Iterator[int]:
    """A free port that no other process is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
