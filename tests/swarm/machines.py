"""A registry and nodes as processes, each with only the files of a machine of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.invites import decode, encode
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.run_file import dumps
from tests.forked import Forked
from tests.swarm.paced import run_paced
from tests.swarm.small import small

DEADLINE = 180.0  # seconds; reached only by a hang
TOKEN = "the-token-of-this-run"


class Machines:
    """A registry and nodes with parts of one folder; no node reads another one's part."""

    def __init__(
        self, folder: Path, data: Path, stages: int, secured: bool = True, **changes: Any
    ) -> None:
        """`secured`: the run uses TLS, invites and a token."""
        self.folder, self.authority, self.secured = folder, folder / "authority", secured
        changes = {"steps": 200_000, "swarm__lease": 3, **changes}
        run = small(stages, data__path=str(data), **changes)
        run = resolve(run)
        self.folders = folder_options(run)
        (folder / "run.toml").write_text(dumps(run))
        (folder / "logs").mkdir()
        (folder / "token").write_text(TOKEN)
        self.token = ["--token", f"@{folder / 'token'}"]
        self._statuses: dict[str, int] = {}
        self.processes = Processes(folder / "logs", {"OMP_NUM_THREADS": "1"}, PLANARIA, run_paced)

    def start_registry(self, listen: str, namespace: Path | None = None, *more: str) -> None:
        secured = ["--authority", str(self.authority), *self.token]
        self.processes.start(
            "registry",
            [
                *("bootstrap", "--run", str(self.folder / "run.toml"), "--listen", listen),
                *(secured if self.secured else []),
                *more,
            ],
            namespace,
        )

    async def registry_with_journal(self, listen: str = "127.0.0.1:0") -> str:
        """Start the registry with a journal, and return its address."""
        file = self.folder / "address"
        file.unlink(missing_ok=True)
        more = "--journal", str(self.folder / "journal"), "--address-file", str(file)
        self.start_registry(listen, None, *more)
        async with asyncio.timeout(DEADLINE):
            while not file.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return file.read_text().strip()

    def saved(self, name: str) -> list[str]:
        """Return the options of a node with saves."""
        return ["--save-dir", str(self.folder / name / "saves")]

    def start_node(self, name: str, join: str, namespace: Path | None = None, *more: str) -> None:
        """Start a node as on its own machine. `join`: the text of an invite, or an address."""
        (self.folder / f"{name}.invite").write_text(join)
        self.processes.start(
            name,
            [
                *("node", "--join", f"@{self.folder / name}.invite"),
                *("--out", str(self.folder / name), "--save-dir", "none", "--name", name),
                *("--threads", "1", "--restart", "no", "--cloud", "none"),
                *(self.token if self.secured else []),
                *(*self.folders, *more),
            ],
            namespace,
        )

    async def invite(self, role: str) -> Invitation:
        """Wait for the invite that the registry writes at its start, and return it."""
        path = self.authority / f"{role}.invite"
        async with asyncio.timeout(DEADLINE):
            while not path.exists():
                assert not self.processes.ended(), self.processes.log("registry").read_text()
                await asyncio.sleep(0.02)
        return decode(path.read_text())

    async def begin(self, *words: str, join: Invitation, home: str) -> asyncio.subprocess.Process:
        """Start a command with --join and an invite in a file. `home` keeps its certificate."""
        (self.folder / f"{home}.invite").write_text(encode(join))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planaria", *words),
            *("--join", f"@{self.folder / home}.invite", *self.token),
            env=os.environ | {"XDG_STATE_HOME": str(self.folder / home), "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def command(self, *words: str, join: Invitation) -> str:
        """Run a command, and return its output."""
        invite, output = self.folder / "home.invite", self.folder / "home.said"
        invite.write_text(encode(join))
        settings = {"XDG_STATE_HOME": str(self.folder / "home"), "COLUMNS": "200"}
        arguments = [*words, "--join", f"@{invite}", *self.token]
        process = Forked(output, *arguments, environment=settings)
        assert await asyncio.to_thread(process.wait, DEADLINE) == 0, output.read_text()
        return output.read_text()

    async def committed(self, beyond: int) -> int:
        """Return the newest step in ledgers of stage 0, once it is beyond the given one."""
        newest = 0
        async with asyncio.timeout(DEADLINE):
            while newest <= beyond:
                await asyncio.sleep(0.05)
                for ledger in self.folder.glob("*/ledger-*.jsonl"):
                    lines = ledger.read_text().splitlines()[1:-1]
                    steps = [json.loads(line).get("step", 0) for line in lines]
                    newest = max([newest, *steps])
        return newest

    async def logged(self, slot: str, text: str) -> None:
        """Wait until the newest process in the slot has logged the text."""
        async with asyncio.timeout(DEADLINE):
            while (  # noqa: ASYNC110
                not (log := self.processes.log(slot)).exists() or text not in log.read_text()
            ):
                await asyncio.sleep(0.02)

    async def ends(self, slot: str) -> int:
        """Wait until the slot's process ends by itself, and return its exit status."""
        async with asyncio.timeout(DEADLINE):
            while slot not in self._statuses:
                self._statuses |= {ended.slot: ended.status for ended in self.processes.ended()}
                await asyncio.sleep(0.02)
        return self._statuses.pop(slot)

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "logs").iterdir())


@contextmanager
def machines(folder: Path, data: Path, stages: int, **options: Any) -> Iterator[Machines]:
    """Yield `Machines` with these options, and kill their processes at the end."""
    machines = Machines(folder, data, stages, **options)
    try:
        yield machines
    finally:
        machines.processes.kill_all()
