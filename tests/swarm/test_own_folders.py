"""A registry names folders of a node's machine, which the node neither reads nor writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.swarm.machines import DEADLINE, machines


async def test_a_registry_has_a_node_write_nowhere_but_where_its_owner_says(
    data: Path, tmp_path: Path
) -> None:
    named, mine = tmp_path / "named", tmp_path / "mine"
    changes = {"policy": "checkpoint", "checkpoint": {"dir": str(named), "every": 1}}
    with machines(tmp_path, data, 1, secured=False, recovery=changes) as here:
        file = tmp_path / "address"
        here.start_registry("127.0.0.1:0", None, "--address-file", str(file), "--http", "none")
        async with asyncio.timeout(DEADLINE):
            while not file.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            here.folders = []
            here.start_node("told-nothing", file.read_text().strip())
            while not (ended := here.processes.ended()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [(process.slot, process.status) for process in ended] == [("told-nothing", 1)]
        log = here.logs()
        assert "this node has no prepared data (--data DIR)" in log
        assert f"recovery.checkpoint.dir = '{named}'" in log and "--checkpoint-dir DIR" in log
        here.folders = ["--data", str(data), "--checkpoint-dir", str(mine)]
        for name in ("a", "b"):
            here.start_node(name, file.read_text().strip())
        assert await here.committed(beyond=2) > 2
    assert {folder.name for folder in mine.iterdir()} == {"stage-0", "stage-1"}
    assert any(mine.glob("stage-0/step-*")) and not named.exists()
