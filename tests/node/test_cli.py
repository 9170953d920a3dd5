"""The command line: checks of options before a command does anything or loads torch."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from planaria.bootstrap.enrolment_pb2 import EnrolledReply
from planaria.bootstrap.registry_pb2 import Description, Member, MemberDescription
from planaria.node import cli
from planaria.node.cli import BY_USE, app
from planaria.node.launch import supervisor
from planaria.node.launch.notices import ADDRESS_VARIABLE
from planaria.node.machine.processes import NO_OPTIONS
from tests.harness.ports import free_port

LOADED = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from planaria.node.cli import main

ended = []
for words in json.load(sys.stdin):
    sys.argv[1:] = words
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    loaded = sorted({"torch", "numpy"} & set(sys.modules))
    ended.append([status, " ".join(said.getvalue().replace("│", " ").split()), loaded])
print(json.dumps(ended))
"""


def without_torch(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run the commands in one process. Returns status and error of each; none may load torch."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
    )
    ended = json.loads(done.stdout)
    assert not any(loaded for _, _, loaded in ended), ended
    return [(status, error) for status, error, _ in ended]


def listed(*arguments: str, **environment: str) -> str:
    result = CliRunner(env=environment).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["node"], ["data", "prepare"]])
def test_help_has_two_names_everywhere(flag: str, command: list[str]) -> None:
    assert "Usage:" in listed(*command, flag)


def test_the_version_is_the_packages() -> None:
    assert listed("--version", PLANARIA_VERSION="1") == f"planaria {version('planaria')}\n"


def test_commands_are_listed_by_use() -> None:
    names = get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert names[: len(BY_USE)] == list(BY_USE)


@pytest.mark.parametrize("command", ["lab", "plan"])
def test_a_command_of_a_package_that_is_not_installed_names_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ADDED", "nobody adds any")
    assert f" {command} " not in listed("--help")
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 1
    assert "pip install planaria-lab" in result.output


def test_a_wrong_option_is_said_of_the_environments_too(tmp_path: Path) -> None:
    node = ["node", "--restart", "no"]
    result = CliRunner(env={"PLANARIA_JOIN": "nonsense"}).invoke(app, node)
    assert "the address 'nonsense' has no port" in result.output
    result = CliRunner(env={"PLANARIA_NODE_SEATS": "few"}).invoke(app, [*node, "--join", "a:1"])
    assert "'--seats': 'few'" in result.output
    bootstrap = {
        "PLANARIA_BOOTSTRAP_LISTEN": "127.0.0.1:0",
        "PLANARIA_BOOTSTRAP_RUN": str(tmp_path / "run.toml"),
    }
    result = CliRunner(env=bootstrap).invoke(app, ["bootstrap"])
    assert "can't read the run file" in result.output


def options(command: Any, name: str = "PLANARIA") -> Iterator[tuple[str, Any]]:
    """Yield all commands' options, each after the variable that it should have of its own."""
    if hasattr(command, "list_commands"):
        for each in command.list_commands(None):
            yield from options(command.get_command(None, each), f"{name}_{each.upper()}")
    elif command is not None:
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield f"{name}_{parameter.opts[0].strip('-').replace('-', '_').upper()}", parameter


def test_every_option_has_the_environment_variable_that_one_expects() -> None:
    shared = {"TOKEN", "INSECURE", "TLS_CA", "TLS_CERT", "TLS_KEY"}
    for variable, option in options(get_command(app)):
        made_by_typer = f"{variable[: -len(option.opts[0]) + 2]}{option.name.upper()}"
        everywhere = f"PLANARIA_{option.opts[0].strip('-').replace('-', '_').upper()}"
        needs_it = option.opts == ["--join"] and option.required
        same = needs_it or everywhere.removeprefix("PLANARIA_") in shared
        wanted = everywhere if same else variable
        assert wanted in (option.envvar, made_by_typer), option.opts


def test_the_environment_is_read() -> None:
    output = listed("data", "inspect", "-h", PLANARIA_DATA_INSPECT_CONTEXT="7")
    assert "PLANARIA_DATA_INSPECT_CONTEXT" in output
    port = free_port()
    at = {"PLANARIA_JOIN": f"127.0.0.1:{port}", "PLANARIA_STATUS_JSON": "1"}
    assert f"127.0.0.1:{port} refuses" in CliRunner(env=at).invoke(app, ["status"]).output


def test_nodes_of_a_local_swarm_take_no_options_from_the_environment() -> None:
    code = (
        "import json, os, runpy\n"
        "from planaria.node.machine.processes import run_planaria\n"
        "runpy.run_module = lambda *_, **__: print(json.dumps(dict(os.environ)))\n"
        "run_planaria(['node'])"
    )
    ours = {"PLANARIA_NODE_STAGE": "1", "PLANARIA_TOKEN": "t", **dict.fromkeys(NO_OPTIONS, "kept")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | ours,
        capture_output=True,
        text=True,
        check=True,
    )
    left = {name for name in json.loads(done.stdout) if name.startswith("PLANARIA")}
    assert left == set(NO_OPTIONS) and ADDRESS_VARIABLE in NO_OPTIONS


@pytest.mark.parametrize("command", ["status", "probe", "regroup saves --out anew"])
def test_a_registry_that_is_not_there_is_said_at_once(command: str) -> None:
    port = free_port()
    result = CliRunner().invoke(app, [*command.split(), "--join", f"127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert f"127.0.0.1:{port} refuses connections: nothing listens there" in result.output
    assert "`planaria bootstrap`" in result.output


NO_PROXIES = dict.fromkeys(
    spelling(f"{kind}_proxy")
    for kind in ("grpc", "http", "https", "all")
    for spelling in (str.lower, str.upper)
)


def test_who_finds_no_registry_where_a_proxy_is_set_hears_that_it_is_not_used() -> None:
    join = f"127.0.0.1:{free_port()}"
    for command in ("status", "doctor"):
        environment = {**NO_PROXIES, "https_proxy": "http://127.0.0.1:1"}
        result = CliRunner(env=environment).invoke(app, [command, "--join", join])
        assert "a proxy is set (https_proxy), and gRPC connections don't use it" in result.output


def test_a_node_says_at_once_that_it_has_to_try_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def supervise(nodes: dict[str, list[str]], grace: float, again: bool) -> int:
        return 3

    monkeypatch.setattr(supervisor, "supervise", supervise)
    join = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["node", "--join", join])
    assert result.exit_code == 3
    assert f"{join} refuses connections: nothing listens there" in result.output
    assert result.output.endswith("Trying again\n")


@pytest.mark.parametrize(
    "command, status", [("stop", 130), ("status", 130), ("status --watch", 0), ("page", 0)]
)
def test_only_what_goes_on_until_ctrl_c_succeeds_by_it(
    command: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planaria.bootstrap.client.RegistryClient.check_one_run", interrupted)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SystemExit) as end:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        app([*command.split(), "--join", place])
    assert end.value.code == status


@pytest.mark.parametrize("node", ["box", "a-host-with-a-long-name-7f3a1c"])
def test_members_have_whole_instances_and_addresses(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns: `planaria allow` needs the instance."""
    instance = "0123456789abcdef0123456789abcdef"
    monkeypatch.setenv("COLUMNS", "80")

    async def answered(client: object, *_: object) -> object:
        return EnrolledReply()

    async def described(client: object) -> Description:
        member = Member(node=node, address="[fd00::1]:7401")
        return Description(members=[MemberDescription(member=member, instance=instance)])

    async def one_run(client: object) -> None: ...

    registry = "planaria.bootstrap.client.RegistryClient"
    monkeypatch.setattr(f"{registry}.check_one_run", one_run)
    monkeypatch.setattr(f"{registry}.command", answered)
    monkeypatch.setattr(f"{registry}.describe", described)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        output = listed("members", "--join", place)
    assert instance in output and "[fd00::1]" in output


@pytest.mark.parametrize(
    "command", ["up --out {out}", "bootstrap --listen 127.0.0.1:0 --run {out}", "page {out}"]
)
def test_a_page_whose_port_is_taken_is_refused_before_anything_is_begun(
    command: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        arguments = [*command.format(out=tmp_path / "out").split(), "--http", taken]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"can't serve HTTP at {taken}" in result.output and "--http HOST:PORT" in result.output
    assert not list(tmp_path.iterdir())


def test_up_names_only_remedies_that_it_has_for_a_page_that_others_could_read() -> None:
    result = CliRunner().invoke(app, ["up", "--http", "0.0.0.0:0"])
    assert result.exit_code == 1
    assert "planaria up shows its page on this machine only" in result.output
    assert "--insecure" not in result.output and "--token" not in result.output


REFUSED = {
    "--join nonsense": "has no port",
    "--join http://a:1": "begins with http://: leave that out",
    "--join a:70000": "a port is at most 65535",
    "--join 127.0.0.1:1 --listen 0.0.0.0:0": "there is no TLS",
    "--join 127.0.0.1:1 --listen 127.0.0.1:{taken}": "the address is in use",
    "--join 127.0.0.1:1 --tls-ca ca.pem": "the certificate, key is missing",
    "--join 127.0.0.1:1 --device gpu": "'gpu': use auto, cpu, cuda:N, mps or xpu:N",
    "--join 127.0.0.1:1 --device cuda:1,cuda:1": "cuda:1 twice",
    "--join 127.0.0.1:1 --device cpu,auto": "auto is one device",
    "--join a..b:1": "there is no host of that name",
}


def test_nodes_are_refused_without_loading_torch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        given = [arguments.format(taken=taken).split() for arguments in REFUSED]
        ended = without_torch([["node", "--restart", "no", *arguments] for arguments in given])
    for (status, error), (arguments, says) in zip(ended, REFUSED.items(), strict=True):
        assert status != 0 and says in error, arguments


MISSED = {
    "generate {empty} Once": "{empty} holds no model",
    "generate --join 127.0.0.1:{port} Once": "nothing listens there",
    "evaluate {empty} --data {empty}": "{empty} holds no model",
    "evaluate {model} --data {empty}": "there is no prepared data at {empty}",
    "export {empty}/none --out {empty}/out": "{empty}/none is not a folder",
    "export --join 127.0.0.1:{port} --out {empty}/out": "nothing listens there",
}


def test_models_are_missed_without_loading_torch(tmp_path: Path) -> None:
    empty, model = tmp_path / "empty", tmp_path / "model"
    empty.mkdir()
    model.mkdir()
    (model / "config.json").touch()
    known = {"empty": empty, "model": model, "port": free_port()}
    ended = without_torch([command.format(**known).split() for command in MISSED])
    for (status, error), (command, says) in zip(ended, MISSED.items(), strict=True):
        assert status in (1, 2) and says.format(**known) in error, command


def test_a_vocabulary_that_the_text_has_not_enough_for_is_said(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"apples and {n} pears"}) for n in range(50)]
    text.write_text("\n".join(lines))
    prepare = ["data", "prepare", str(text), "--validation", "0.3", "--out"]
    output = listed(*prepare, str(tmp_path / "a"), "--vocabulary", "4000")
    assert "--vocabulary 4000: this text has only enough for" in output
    assert "has only enough" not in listed(*prepare, str(tmp_path / "b"), "--vocabulary", "257")


def test_presets_are_listed_with_the_stages_that_divide_them() -> None:
    shown = CliRunner().invoke(app, ["presets"], env={"COLUMNS": "120"}).output
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert rows["tiny"] == "tiny 525k 4 64 4 64 6 MiB 4, or 1, 2"
    assert rows["large"] == "large 1.62B 24 2048 16 4096 4,608 MiB 6, or 1, 2, 3, 4, 8, 12, 24"
    larger = CliRunner().invoke(app, ["presets", "--vocabulary", "50257"]).output
    assert "102M" in larger


def test_up_says_at_once_that_it_lacks_the_data(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[model]\nvocabulary = 300\n[data]\npath = "nowhere"\n')
    result = CliRunner().invoke(app, ["up", str(run), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "there is no prepared data at" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", ["export folder --out model", "generate folder", "generate a b"]
)
def test_a_folder_that_is_named_is_meant_though_the_environment_names_a_registry(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, command.split(), env={"PLANARIA_JOIN": "127.0.0.1:1"})
    assert result.exit_code == 1
    assert re.search("there is no run in folder|holds no model", " ".join(result.output.split()))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("export folder --out model --join 127.0.0.1:1", "leave the folders out"),
        ("export --out model --join 127.0.0.1:1 --run run.toml", "leave --run out"),
        ("export --out model", "nothing to export"),
        ("generate", "usage: planaria generate"),
        ("generate folder --data data", "leave --data out"),
    ],
)
def test_what_is_to_be_exported_or_to_speak_has_to_be_said_once(command: str, why: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 1
    assert why in " ".join(result.output.split())
