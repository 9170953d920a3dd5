"""A stand-in for the metadata services of three clouds. It answers and refuses requests as their
documentation says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "worker_3"
"""The machine's name in Azure."""


class MetadataService(ThreadingHTTPServer):
    """A server that answers with the values that a test has set."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud = cloud
        self.tokens: set[str] = set()
        self.action: dict[str, str] | None = None  # AWS
        self.public_ipv4: str | None = None  # AWS
        self.preempted = False  # GCP
        self.events: list[dict[str, Any]] = []  # Azure
        self.asked: list[str] = []
        self._counted = threading.Condition()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def count(self, request: str) -> None:
        with self._counted:
            self.asked.append(request)
            self._counted.notify_all()

    def wait_until_asked(self, more: int) -> None:
        """Waits for this many more requests."""
        with self._counted:
            enough = len(self.asked) + more
            assert self._counted.wait_for(lambda: len(self.asked) >= enough, 60)


@contextmanager
def metadata_service(cloud: str) -> Iterator[MetadataService]:
    service = MetadataService(cloud)
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        service.shutdown()
        thread.join()
        service.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        self.server.count(f"{self.command} {self.path}")
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.server.cloud != "aws" or self.path != "/latest/api/token":
            self._answer(405)
        elif not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
            self._answer(400)
        else:
            token = f"token-{len(self.server.asked)}=="
            self.server.tokens.add(token)
            self._answer(200, token)

    def do_GET(self) -> None:
        self.server.count(f"{self.command} {self.path}")
        getattr(self, self.server.cloud)()

    def aws(self) -> None:
        items = {
            "/latest/meta-data/spot/instance-action": self.server.action,
            "/latest/meta-data/public-ipv4": self.server.public_ipv4,
        }
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            self._answer(401)
        elif (item := items.get(self.path)) is None:
            self._answer(404)
        else:
            self._answer(200, item if isinstance(item, str) else json.dumps(item))

    def gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403)
        elif self.path != "/computeMetadata/v1/instance/preempted":
            self._answer(404)
        else:
            self._answer(200, "TRUE" if self.server.preempted else "FALSE")

    def azure(self) -> None:
        if self.headers.get("Metadata") != "true":
            self._answer(400)
        elif self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            self._answer(200, NAME)
        elif self.path == "/metadata/scheduledevents?api-version=2020-07-01":
            document = {"DocumentIncarnation": 1, "Events": self.server.events}
            self._answer(200, json.dumps(document))
        else:
            self._answer(404)

    def nobody(self) -> None:
        """Answers like an unrelated web server at the address."""
        self._answer(200, "<html>welcome</html>")

    def _answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        if self.server.cloud == "gcp":
            self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass
