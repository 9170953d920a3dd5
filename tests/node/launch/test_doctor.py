"""Tests of the doctor, with a registry in the test's event loop and made-up facts of PyTorch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planaria.bootstrap.address import Address
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.node.cli import app
from planaria.node.launch import doctor
from planaria.node.launch.diagnosis import (
    DialledBack,
    Grade,
    LinkFacts,
    UnknownFact,
    findings,
    worst_grade,
)
from planaria.node.launch.doctor import Examined, gather_facts
from planaria.node.launch.node_options import Addresses, DoctorOptions
from tests.bootstrap.conftest import serving
from tests.harness.ports import free_port

Serve = Callable[..., AbstractAsyncContextManager[Any]]
DEADLINE = 120.0  # seconds; reached only by a hang
TAKE_ANY_TIME = ("PROBE", "DESCRIBE", "DIAL", "MEASURE", "LOOK", "IN_ALL")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Emulate a machine with a GPU and its driver, and extend the doctor's short deadlines."""
    seen = '["cuda:0", 85000000000, "2.6", 1, "H100", "bf16"]'
    monkeypatch.setattr(doctor, "SEE_DEVICE", f"print('{seen}')")
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 550.54, 81559 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=":")
    for name in TAKE_ANY_TIME:
        monkeypatch.setattr(doctor, name, DEADLINE)


def asked(join: str, saves: Path, credentials: Credentials = PLAIN, **options: Any) -> Examined:
    given = {"listen": "127.0.0.1:0", "save_dir": saves / "deep" / "saves"} | options
    doctor = DoctorOptions(join=join, **given)
    return Examined(doctor, Addresses.of(doctor), credentials)


async def test_a_machine_that_could_join(tmp_path: Path) -> None:
    async with serving() as place:
        facts = await gather_facts(asked(place.address, tmp_path), "1")
    assert isinstance(facts.back, DialledBack)
    assert (facts.back.host, facts.back.reached) == ("127.0.0.1", True)
    assert isinstance(facts.link, LinkFacts) and facts.link.up > 0 and facts.link.down > 0
    assert not isinstance(facts.clock, UnknownFact) and abs(facts.clock.ahead) <= facts.clock.rtt
    assert not isinstance(facts.saves, UnknownFact) and facts.saves.free > 0
    assert not (tmp_path / "deep").exists(), "nothing is made"
    assert not isinstance(facts.device, UnknownFact)
    assert facts.device.driver == "NVIDIA H100, driver 550.54"
    grades = {finding.about: finding.verdict for finding in findings(facts)}
    assert grades.pop("data") is Grade.OK
    assert set(grades.values()) == {Grade.OK}


async def test_a_port_that_somebody_has_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = Address("127.0.0.1", server.getsockname()[1])
        async with serving() as place:
            facts = await gather_facts(asked(place.address, tmp_path, listen=str(taken)), "1")
    assert isinstance(facts.port, UnknownFact) and "the address is in use" in facts.port.why
    assert isinstance(facts.back, UnknownFact)
    assert worst_grade(findings(facts)) is Grade.PROBLEM


async def test_an_advertised_port_that_leads_elsewhere_is_a_problem(tmp_path: Path) -> None:
    nobody = free_port()
    async with serving() as place:
        elsewhere = asked(place.address, tmp_path, advertise=f"127.0.0.1:{nobody}")
        facts = await gather_facts(elsewhere, "1")
    assert facts.back == DialledBack("127.0.0.1", nobody, False)


async def test_who_only_dials_out_listens_nowhere(tmp_path: Path) -> None:
    async with serving() as place:
        facts = await gather_facts(asked(place.address, tmp_path, advertise="none"), "1")
    assert facts.port == ""
    assert {finding.verdict for finding in findings(facts) if finding.about == "reachable"} == {
        Grade.OK
    }


async def test_a_wrong_token_is_said(tmp_path: Path) -> None:
    async with serving(credentials=Credentials(token="right")) as place:
        wrong = asked(place.address, tmp_path, credentials=Credentials(token="wrong"))
        facts = await gather_facts(wrong, "1")
    assert isinstance(facts.registry_protocol, UnknownFact)
    assert "the join token is not this run's" in facts.registry_protocol.why


async def test_a_folder_that_the_system_refuses_is_a_problem(tmp_path: Path) -> None:
    refused = tmp_path / ("a" * 300)
    async with serving() as place:
        examined = asked(place.address, tmp_path, save_dir=refused, data=[str(refused)])
        all_findings = findings(await gather_facts(examined, "1"))
    refusals = [finding for finding in all_findings if finding.about in ("disk", "data")]
    assert [finding.verdict for finding in refusals] == [Grade.PROBLEM, Grade.PROBLEM]
    assert all("File name too long" in finding.description for finding in refusals)


async def test_what_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SEE_DEVICE", "import time; time.sleep(1e6)")
    monkeypatch.setattr(doctor, "IN_ALL", 0.05)
    async with serving() as place:
        facts = await asyncio.wait_for(gather_facts(asked(place.address, tmp_path), "1"), DEADLINE)
    assert facts.device == UnknownFact("PyTorch has not answered in 0.05 s")


def test_without_a_registry_there_is_still_something_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "proxies", lambda environment: "")
    result = CliRunner().invoke(app, ["doctor", "--join", f"127.0.0.1:{free_port()}"])
    assert result.exit_code == 2, result.output
    lines = result.output.splitlines()
    about = "registry clock TLS port reachable bandwidth disk data device memory"
    assert [line.split()[1] for line in lines if line[:2] in ("ok", "pr", "wa")] == about.split()
    assert "refuses connections" in result.output
