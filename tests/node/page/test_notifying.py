"""The command of the section [notify], which runs beside a registry."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import RegistryServer
from planaria.node.page import notifying as module
from planaria.node.page.notifying import notifying, run_command
from planaria.node.page.serving import LocalPage
from planaria.node.report.notifications import Notification
from planaria.node.run_file import RunFile, override

RUN = override(RunFile(), model__stages=1, model__vocabulary=300, steps=50)
EVENT = Notification("prose-1", "paused", "error", "$(touch there); it's full", 7, 10.0)


async def test_it_gets_what_is_to_be_heard_of(tmp_path: Path) -> None:
    registry = RegistryServer(MembershipRules(run="prose-1", stages=1), "")
    await registry.start("127.0.0.1:0")
    output = tmp_path / "said"
    async with notifying(LocalPage(registry, RUN), f"cat >> {shlex.quote(str(output))}"):
        registry.command("pause", "lunch")
    await registry.stop()
    event = json.loads(output.read_text())
    assert (event["run"], event["kind"]) == ("prose-1", "paused")
    assert event["sentence"] == "the run is paused by the run's operator: lunch"


async def test_what_members_say_is_on_standard_input_only(tmp_path: Path) -> None:
    await run_command(f"cd {shlex.quote(str(tmp_path))} && cat > said", EVENT)
    assert [path.name for path in tmp_path.iterdir()] == ["said"]
    assert json.loads((tmp_path / "said").read_text()) == EVENT._asdict()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", ""),
        ("echo fine >&2", ""),
        ("echo first >&2; echo 'no\x1broute' >&2; exit 7", "ended with status 7: no\\x1broute"),
        ("planaria-has-no-such-command --token s3cret", "ended with status 127: "),
        ("kill -KILL $$", "was ended by SIGKILL"),
    ],
)
async def test_a_failure_is_one_warning_without_the_command(command: str, says: str, caplog):
    await run_command(command, EVENT)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(says)
    for warning in warnings:
        assert says in warning.replace(" (event: paused)", "") and "s3cret" not in warning


async def test_what_takes_too_long_is_killed_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(module, "LONGEST", 0.2)
    pipe = tmp_path / "never-opened"
    await run_command(
        f"mkfifo {shlex.quote(str(pipe))}; cat < {shlex.quote(str(pipe))} & wait", EVENT
    )
    [record] = caplog.records
    assert "was killed after 0.2 s" in record.getMessage()
