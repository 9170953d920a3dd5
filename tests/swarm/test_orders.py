"""Tests of a run on several machines whose operator pauses, changes, takes back and stops it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planaria.bootstrap.invites import encode
from planaria.node.report.ledger import audit
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

        reply = await here.command("pause", "--why", "over night", join=operator)
        assert reply.strip() == "the operator pauses the run: over night"
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


async def test_settings_of_a_living_run_are_changed_at_a_commit(data: Path, tmp_path: Path) -> None:
    with machines(tmp_path, data, 1, saves__every=2, saves__keep=99) as here:
        address = await here.registry_with_journal()
        owner, node = encode(await here.invite("owner")), encode(await here.invite("node"))
        operator = await here.invite("operator")
        for name, invite in (("a", owner), ("b", node)):
            here.start_node(name, invite, None, *here.saved(name))
        await here.committed(beyond=2)

        await here.command("pause", join=operator)  # the commands take longer than many steps
        for settings, why in (
            (["model.dim=64"], "model.dim = 64, and the run has"),
            (["steps=1"], r"steps = 1: this is to hold after step \d+; choose more"),
            (["steps=200000"], "the run has these settings already"),
            (["seed=9", "--at", "1"], "--at 1: the run is at step"),
            (["training.lr=9", "--at", "300000"], "steps = 200000: this is to hold after"),
        ):
            with pytest.raises(AssertionError, match=why):
                await here.command("change", *settings, join=operator)
        with pytest.raises(AssertionError, match="operator"):
            await here.command("change", "steps=9", join=await here.invite("node"))

        step = await here.committed(beyond=2) + 4
        reply = await here.command(
            *("change", "training.batch=6", "training.microbatch=3", "training.lr=0.25"),
            *("--at", str(step + 1)),
            join=operator,
        )
        assert re.search(rf"^once step {step} is .*:\n +training.batch = 6 \(was 4\)\n", reply)
        assert "training.lr = 0.25 (was " in reply
        assert re.search(r"the learning rate at step \d+ goes from .* to ", reply)
        await here.command("go", join=operator)
        await here.logged("a", "the run has other settings; joining again")
        newest = await here.committed(beyond=step + 1)
        log = here.processes.log("a").read_text()
        assert log.count("joined as a-") == 2, "once under each settings"
        headers = [json.loads(path.open().readline()) for path in tmp_path.glob("*/ledger-*")]
        after = max(headers, key=lambda header: header.get("changes", 0))
        (earlier,) = after["earlier"]
        assert (after["batch"], after["microbatch"], *earlier) == (6, 3, step, 4, 1)
        assert audit(tmp_path / "a").exact

        changing = await here.begin(
            *("change", "training.batch=8", "training.microbatch=4"), join=operator, home="other"
        )
        here.processes.kill("b")  # a stage is lost during the change
        here.start_node("again", node, None, *here.saved("b"))
        output, _ = await changing.communicate()
        assert re.search(r"^the run goes on from step \d+$", output.decode(), re.MULTILINE)
        newest = await here.committed(beyond=newest)
        newest = await here.committed(beyond=newest + 2)
        audited = audit(tmp_path / "a")
        assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)

        here.processes.kill("registry")
        await here.registry_with_journal(address)
        reply = await here.command("status", "--json", join=operator)
        status = json.loads(reply[reply.index("{") :])  # a warning may precede it
        assert "batch = 8" in status["run_file"]
        assert [change["number"] for change in status["view"]["changes"]] == [1, 2]
        newest = await here.committed(beyond=newest)
        await here.committed(beyond=newest + 2)

        saved = "not each stage has saved step 1; steps that each has: "
        with pytest.raises(AssertionError, match=saved) as refused:
            await here.command("back", "--to", "1", join=operator)
        steps = str(refused.value).split(saved)[1].split("\n")[0]
        to = int(steps.split(", ")[-2])
        with pytest.raises(AssertionError, match="operator"):
            await here.command("back", "--to", str(to), join=await here.invite("node"))
        reply = await here.command("back", "--to", str(to), join=operator)
        assert f"the run goes on from step {to + 1}" in reply
        again: list[dict[str, object]] = []
        while len(again) < 2:
            await here.committed(beyond=to)
            rows = [line for path in tmp_path.glob("*/ledger-*") for line in path.open()]
            lines = [json.loads(row) for row in rows if row.endswith("\n")]
            again = [line for line in lines if line.get("step") == to + 1]
        assert again[0]["loss"] == again[1]["loss"], "of the same weights and samples"
        assert again[0].get("lineage", 0) != again[1].get("lineage", 0)
        newest = await here.committed(beyond=newest)
        await here.committed(beyond=newest + 2)
        audited = audit(tmp_path / "a")
        assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)
        assert audited.superseded
