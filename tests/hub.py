"""A server like Hugging Face's hub on this machine: repositories of files, one commit each."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Hub:
    url: str = ""
    token: str = "token"
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by repository
    private: dict[str, bool] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)  # files, and requested revisions

    @property
    def environment(self) -> dict[str, str]:
        off = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY")
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token, **dict.fromkeys(off, "1")}


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            name = (api or file or [None, ""])[1]
            if name not in hub.files:
                self.answer({"error": "no"}, 404, X_Error_Code="RepoNotFound")
            elif file:
                content = hub.files[name][file[3]]
                if self.command == "GET":
                    hub.fetched.append(file[3])
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.answer(content, ETag=etag, X_Repo_Commit=commit_of(name))
            elif api and api[2] == "tree":
                of = hub.files[name].items()
                self.answer(
                    [
                        {"type": "file", "path": path, "size": len(content), "oid": commit_of(path)}
                        for path, content in of
                    ]
                )
            elif api:
                if api[3]:
                    hub.fetched.append(api[3])
                siblings = [{"rfilename": path} for path in hub.files[name]]
                private = hub.private.get(name, False)
                about = {"id": name, "sha": commit_of(name), "private": private}
                self.answer(about | {"siblings": siblings})

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = "/".join(self.path.split("/")[3:5])
            if self.path == "/api/repos/create":
                fields = json.loads(body)
                name = f"{fields['organization']}/{fields['name']}"
                hub.files[name], hub.private[name] = {}, fields.get("visibility") == "private"
                self.answer({"url": f"{hub.url}/{name}"})
            elif "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                how = {"uploadMode": "regular", "shouldIgnore": False}
                self.answer({"files": [{"path": path, **how} for path in paths]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        hub.files[name][line["value"]["path"]] = content
                self.answer({"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1"})
            else:
                self.answer({})

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
