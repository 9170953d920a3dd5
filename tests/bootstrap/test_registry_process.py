"""Tests of a registry as a process."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.run_file import loads
from tests.bootstrap.conftest import identity, joining, registry_process


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_registry_heeds_ctrl_c_and_hangup_unless_it_was_started_to_ignore_them(
    ignored: bool,
) -> None:
    """nohup ignores SIGHUP, and a script ignores SIGINT for processes in the background."""
    loop, inherited = asyncio.get_running_loop(), signal.SIG_IGN if ignored else signal.SIG_DFL
    before = {n: signal.signal(n, inherited) for n in (signal.SIGINT, signal.SIGHUP)}
    try:
        stop_signals()
        heeded = [number for number in before if signal.getsignal(number) != inherited]
    finally:
        for number in (*before, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heeded == ([] if ignored else [*before])


BARE = """
import sys

absent = ("torch", "datasets", "grpc_reflection", "matplotlib", "pyarrow", "planaria_lab")
sys.modules.update(dict.fromkeys(absent))
from planaria.node.cli import main

main()
"""


async def test_the_command_serves_without_torch_and_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # has no prepared data
    run_file = tmp_path / "run.toml"
    run_file.write_text("[model]\npreset = 'medium'\nvocabulary = 512\n")
    options = ("--listen", "127.0.0.1:0", "--run", str(run_file))
    async with registry_process("-c", BARE, "bootstrap", *options) as port:
        client = RegistryClient([f"127.0.0.1:{port}"])
        run = (await client.describe()).run
        reply = await client.join(joining("a", run=run), identity("a"))
        assert loads(reply.run_file).model.stages == 6
        await client.close()
