"""A registry names folders of a node's machine, which the node neither reads nor writes."""

from __future__ import annotations

from pathlib import Path

from tests.swarm.machines import machines


async def test_a_registry_has_a_node_write_nowhere_but_where_its_owner_says(
    data: Path, tmp_path: Path
) -> None:
    named, mine = tmp_path / "named", tmp_path / "mine"
    changes = {"policy": "checkpoint", "checkpoint": {"dir": str(named), "every": 1}}
    with machines(tmp_path, data, 1, secured=False, recovery=changes) as here:
        address, here.folders = await here.registry_with_journal(), []
        here.start_node("told-nothing", address)
        assert await here.ends("told-nothing") == 1
        log = here.logs()
        assert "this node has no prepared data (--data DIR)" in log
        assert f"recovery.checkpoint.dir = '{named}'" in log and "--checkpoint-dir DIR" in log
        here.folders = ["--data", str(data), "--checkpoint-dir", str(mine)]
        for name in ("a", "b"):
            here.start_node(name, address)
        assert await here.committed(beyond=2) > 2
    assert {folder.name for folder in mine.iterdir()} == {"stage-0", "stage-1"}
    assert any(mine.glob("stage-0/step-*")) and not named.exists()
