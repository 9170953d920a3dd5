"""A run on several machines is paused and stopped by its operator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planaria.bootstrap.invites import encode
from planaria.node.state.saves import find_saves
from tests.swarm.machines import machines


async def test_a_run_is_paused_and_goes_on_and_is_stopped_for_good(
    data: Path, tmp_path: Path
) -> None:
    with machines(tmp_path, data, 1) as here:
        here.start_registry("127.0.0.1:0")
        owner, node = encode(await here.invite("owner")), encode(await here.invite("node"))
        operator = await here.invite("operator")
        for name, invite in (("a", owner), ("b", node)):
            here.start_node(name, invite, None, "--save-dir", str(tmp_path / name / "saves"))
        await here.committed(beyond=2)

        said = await here.command("pause", "--why", "over night", join=operator)
        assert said.strip() == "the operator pauses the run: over night"
        status = ""
        while not re.search(r"news +paused by the run's operator: over night", status):
            status = await here.command("status", join=operator)
        held = await here.committed(beyond=2)
        await here.command("status", join=operator)
        newest = await here.committed(beyond=2)
        assert newest <= held + 1, "whose line may not have been on disk yet"
        await here.command("go", join=operator)
        await here.committed(beyond=newest + 2)

        with pytest.raises(AssertionError, match="operator"):
            await here.command("stop", join=await here.invite("node"))
        await here.command("stop", join=operator)
        for name in "ab":
            assert await here.ends(name) == 0
        saved = {name: find_saves(tmp_path / name / "saves") for name in "ab"}
        last = {max(save.state.id.step for save in saves) for saves in saved.values()}
        assert len(last) == 1
        here.start_node("c", node)
        assert await here.ends("c") == 0, "so that a container isn't started again"
        assert f"was stopped by its operator at step {max(last)}" in here.logs()

        await here.command("go", join=operator)
        for name, invite in (("a", owner), ("b", node)):
            here.start_node(name, invite, None, "--save-dir", str(tmp_path / name / "saves"))
        await here.committed(beyond=max(last) + 1)
