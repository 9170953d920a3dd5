"""Checks that `planaria node` and `planaria bootstrap` make before they do anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from planaria.bootstrap.client import JoinRefused, RegistryUnreachable
from planaria.bootstrap.credentials import PLAIN
from planaria.bootstrap.registry_pb2 import Description, View
from planaria.node import serve
from planaria.node.cli import app
from planaria.node.launch.advertised import Advertised
from planaria.node.launch.begin import Setup, check_reachable, check_writable
from planaria.node.launch.errors import NodeError
from planaria.node.launch.instance import Instance, find_instance, release_key
from planaria.node.launch.node_options import Addresses, NodeOptions
from planaria.node.model.shape import model_config
from planaria.node.node import NodePlace
from planaria.node.run_file import dumps, loads
from planaria.node.serve import (
    Departure,
    _live_until,
    check_precision,
    find_place,
    place_for_saves,
    seats_that_fit,
)
from planaria.node.state.stage_state import SaveError
from tests.bootstrap.conftest import full_disk

CPU = torch.device("cpu")


def setup(join: str = "127.0.0.1:7400", listen: str = "127.0.0.1:0", **others: Any) -> Setup:
    options = NodeOptions(join=join, listen=listen, **{"device": "cpu", "cloud": "none"} | others)
    return Setup(options, Addresses.of(options), PLAIN)


def test_a_node_has_room_for_what_fits_into_half_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, cpu = (
        model_config(loads("[model]\nstages = 3\nlayers = 3").model, 64),
        torch.device("cpu"),
    )
    seat = 1.5 * 16 * max(config.parameters)
    for memory, room in ((0.0, 1), (3.9, 1), (4.1, 2), (1e6, 4)):
        size = int(memory * seat)
        monkeypatch.setattr(serve, "memory_of", lambda _, size=size: size)
        assert seats_that_fit(cpu, config) == room


@pytest.mark.parametrize("join", ["registry.example.org:7400", "10.0.0.1:7400", "[2001:db8::1]:1"])
def test_a_node_on_loopback_is_none_for_a_registry_that_is_not(join: str) -> None:
    with pytest.raises(NodeError, match=r"from this machine only.*--listen 0\.0\.0\.0:PORT"):
        check_reachable(setup(join).addresses)
    check_reachable(setup(join, "0.0.0.0:7401").addresses)
    check_reachable(setup(join, advertise="tunnel.example.org:7401").addresses)
    check_reachable(setup(join, advertise="none").addresses)
    with pytest.raises(NodeError, match=r"--advertise 0\.0\.0\.0:7401 stands for all addresses"):
        check_reachable(setup(join, advertise="0.0.0.0:7401").addresses)


@pytest.mark.parametrize("join", ["127.0.0.1:7400", "localhost:7400", "[::1]:7400"])
def test_on_one_machine_loopback_will_do(join: str) -> None:
    check_reachable(setup(join).addresses)


async def test_peers_are_told_an_address_that_they_can_dial() -> None:
    assert (await find_place(setup(), CPU)).advertise == "127.0.0.1:0"
    everywhere, named = setup(listen="0.0.0.0:7401"), setup(advertise="my.host:7401")
    assert (await find_place(everywhere, CPU)).advertise == "127.0.0.1:7401"
    assert (await find_place(named, CPU)).advertise == "my.host:7401"
    hidden = await find_place(setup(advertise="none"), CPU)
    assert (hidden.listen, hidden.advertise) == (None, "")


@pytest.mark.parametrize(
    "arguments",
    [
        "node --restart no --join 127.0.0.1:7400 --listen {}",
        "node --restart no --join 127.0.0.1:7400 --advertise {}",
        "node --restart no --join 127.0.0.1:1,{}",
        "bootstrap --run {run} --listen {}",
        "status --join {}",
        "probe --join {}",
    ],
)
@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:99999", "port 99999"), ("127.0.0.1", "has no port: give it as HOST:PORT")],
)
def test_an_address_that_is_none_is_said_at_once(
    arguments: str, address: str, problem: str, tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    result = CliRunner().invoke(app, arguments.format(address, run=run).split())
    assert result.exit_code == 1
    assert f"error: the address '{address}'" in result.output
    assert problem in result.output


def test_nodes_that_share_a_folder_save_in_one_of_their_own_each(tmp_path: Path) -> None:
    first, second = find_instance(tmp_path), find_instance(tmp_path)
    folders = [place_for_saves(tmp_path / "saves", node, "seed = 1\n") for node in (first, second)]
    assert folders == [tmp_path / "saves" / "0", tmp_path / "saves" / "1"]
    assert (tmp_path / "saves" / "run.toml").read_text() == "seed = 1\n"
    assert len(list((tmp_path / "saves").iterdir())) == 3
    release_key(first)
    again = find_instance(tmp_path)
    assert place_for_saves(tmp_path / "saves", again, "seed = 1\n") == folders[0]
    release_key(second)
    release_key(again)


def test_without_a_place_that_nobody_else_has_a_node_does_not_save(tmp_path: Path) -> None:
    assert place_for_saves(tmp_path, Instance("0" * 32, None), "") is None


@pytest.mark.parametrize("option", ["--save-dir", "--out"])
def test_a_folder_that_cannot_be_written_is_said_before_joining(
    option: str, tmp_path: Path
) -> None:
    """The folder lies under a file, where root can't write, either. Nobody listens at the
    registry's address."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    node = ["node", "--join", "127.0.0.1:1", "--restart", "no"]
    result = CliRunner().invoke(app, [*node, option, str(folder)])
    assert result.exit_code == 1
    assert f"error: {option} {folder} can't be written: Not a directory" in result.output
    result = CliRunner().invoke(app, [*node, option, str(folder.parent)])
    assert f"error: {option} {folder.parent} can't be written: it is a file" in result.output


def test_a_full_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(NodeError, match=r"No space left on device.*free space"):
        check_writable("--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable("--save-dir", tmp_path / "deep" / "saves")
    assert list((tmp_path / "deep" / "saves").iterdir()) == []


def test_a_journal_that_cannot_be_written_is_said(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'[model]\nstages = 1\n[data]\npath = "{data}"\n')
    run.with_name("file").touch()
    journal = tmp_path / "file" / "journal"
    arguments = ["bootstrap", "--listen", "127.0.0.1:0", "--run", str(run)]
    result = CliRunner().invoke(app, [*arguments, "--journal", str(journal)])
    assert result.exit_code == 1
    assert f"error: the folder {journal}.authority can't be used: Not a dir" in result.output
    elsewhere = ["--authority", str(tmp_path / "authority")]
    result = CliRunner().invoke(app, [*arguments, "--journal", str(journal), *elsewhere])
    assert result.exit_code == 1
    assert f"error: can't use the journal {journal}: {journal.parent} is a file; " in result.output


class Crashing:
    """A node that has joined and then can't serve."""

    why = ""

    async def live(self) -> str:
        raise SaveError("saves of another run")

    async def leave(self, why: str) -> None:
        self.why = why


async def test_a_node_that_crashes_leaves() -> None:
    node = Crashing()
    with pytest.raises(SaveError):
        await _live_until(node, Departure())  # type: ignore[arg-type]
    assert node.why == "it crashed: saves of another run"


async def test_who_joins_again_asks_for_what_it_has_saved_since_from_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Sequence[int], str]] = []
    networks = iter(("10.0.0.5", "192.168.1.7"))

    async def find_address(addresses: Addresses, cloud: str) -> Advertised:
        return Advertised(addresses.listen._replace(host=next(networks)), "the test says so")

    class Rejoining:
        view, abandoned, is_outdated = View(), "", False

        def __init__(self, name: str, place: NodePlace, *_: object) -> None:
            asked.append((place.saves, place.advertise))

        async def live(self) -> str:
            if len(asked) > 1:
                raise JoinRefused("the test is over")
            save = tmp_path / "saves/stage-2/step-00000010-0.safetensors"
            save.parent.mkdir(parents=True)
            save.touch()
            return "rejoin: its lease has expired"

        async def leave(self, why: str) -> None: ...

    class Registry:
        async def describe(self, deadline: float) -> Description:
            raise JoinRefused("the test is over")

    run = loads("[model]\nvocabulary = 8")
    where = {"save_dir": tmp_path / "saves", "out": tmp_path / "out"}
    options = setup(listen="0.0.0.0:7401", **where)
    described = Description(run="run-1", run_file=dumps(run))
    monkeypatch.setattr(serve, "Node", Rejoining)
    monkeypatch.setattr(serve, "find_address", find_address)
    monkeypatch.setattr(serve, "Pauses", lambda *_: SimpleNamespace(after=lambda _: 0.0))
    with pytest.raises(RegistryUnreachable):
        await serve.serve(options, Registry(), described, run, None)  # type: ignore[arg-type]
    assert asked == [([], "10.0.0.5:7401"), ([2], "192.168.1.7:7401")]


@pytest.mark.parametrize("refused", [False, True])
def test_a_device_that_cannot_compute_in_bf16_is_named(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*_: object, **__: object) -> None:
        if refused:
            raise RuntimeError("no avx512")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    check_precision(loads(""), CPU)
    run = loads('[training]\nprecision = "bf16"')
    with (
        pytest.raises(NodeError, match=r"precision = bf16: .*\(no avx512\). Unset ATEN_CPU_CAP")
        if refused
        else nullcontext()
    ):
        check_precision(run, CPU)
