"""A web server that serves byte ranges of a folder's files, as object stores do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Served:
    folder: Path
    url: str = ""
    ranges: bool = True
    failing: int = 0
    """Number of next requests that it answers with 503."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Names of requested files, and the number of bytes that were sent of each."""

    def sent(self, suffix: str) -> int:
        return sum(count for name, count in self.asked if name.endswith(suffix))


@contextmanager
def range_server(folder: Path) -> Iterator[Served]:
    served = Served(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            file = served.folder / self.path.lstrip("/")
            if served.failing:
                served.failing -= 1
                self.send_error(503)
                return
            if not file.is_file():
                self.send_error(404)
                return
            content, status = file.read_bytes(), 200
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted is not None and served.ranges:
                content, status = content[int(wanted[1]) : int(wanted[2]) + 1], 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                served.asked.append((file.name, len(content)))
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()
        thread.join()
