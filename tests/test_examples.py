"""Checks of examples/: manifests fit Kubernetes' schemas, and each command that starts planaria,
directly or by the images' entrypoint, has options that exist."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from planaria.node.cli import app
from planaria.node.run_file import loads

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MANIFESTS = list(yaml.safe_load_all((EXAMPLES / "kubernetes/planaria.yaml").read_text()))
IMAGE = re.compile(r"\S*planaria:(cpu|cuda|registry)")

Started = tuple[list[str], dict[str, str]]
"""Arguments of a container's entrypoint, and its variables."""


def stub(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def check(line: list[str], environment: Mapping[str, str]) -> Any:
    """Parses the words after `planaria` as it does. Returns the command's options."""
    command: Any = get_command(app)
    words = list(line)
    while hasattr(command, "get_command") and (subcommand := command.get_command(None, words[0])):
        command, words = subcommand, words[1:]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return command.make_context("planaria", words).params


def started_by_containers() -> Iterator[tuple[str, Started]]:
    for manifest in MANIFESTS:
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("initContainers", []) + pod.get("containers", []):
            variables = {
                each["name"]: each.get("value", "secret") for each in container.get("env", [])
            }
            yield (
                f"kubernetes {manifest['metadata']['name']} {container['name']}",
                (
                    container["args"],
                    variables,
                ),
            )
    vast = json.loads((EXAMPLES / "vast/template.json").read_text())
    words = shlex.split(vast["env"])
    yield "vast.ai", (vast["args_str"].split(), variables_of(words))
    pod = json.loads((EXAMPLES / "runpod/template.json").read_text())
    yield "RunPod", (pod["dockerStartCmd"], pod["env"])
    for page in (EXAMPLES / "README.md", ROOT / "README.md", ROOT / "docs/several-machines.md"):
        for line in commands(page):
            if line.startswith("docker run "):
                words = shlex.split(line)
                image = next(place for place, word in enumerate(words) if IMAGE.fullmatch(word))
                yield f"{page.parent.name} {line}", (words[image + 1 :], variables_of(words))


def variables_of(words: list[str]) -> dict[str, str]:
    """The variables that docker's `-e` sets."""
    return dict(value.split("=", 1) for option, value in pairwise(words) if option == "-e")


def commands(page: Path) -> list[str]:
    """The lines of a page's blocks of code."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text("utf-8"), re.M | re.S)
    return re.sub(r" *\\\n *", " ", "".join(blocks)).splitlines()


@pytest.mark.parametrize(("where", "started"), list(started_by_containers()))
def test_what_a_container_is_given_is_a_command(tmp_path: Path, where: str, started) -> None:
    words, variables = started
    stub(tmp_path, "planaria", 'printf "%s\\n" "$@"')
    shown = subprocess.run(
        ["sh", ROOT / "docker/entrypoint.sh", *words],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **IMAGES, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    secrets = {name: variables[name] for name in SECRETS if name in variables}
    options = check(shown.stdout.splitlines(), secrets)
    assert not [secret for secret in secrets.values() if secret in shown.stdout.splitlines()]
    read = (ROOT / "docker/entrypoint.sh").read_text()
    prefix = f"PLANARIA_{(words or ['node'])[0].upper()}_"
    own = {name for name in variables if name.startswith(prefix)}
    assert {name.removeprefix(prefix).lower() for name in own} <= options.keys()
    others = variables.keys() - secrets.keys() - own
    assert [name for name in others if f"${{{name}" not in read and f"${name}" not in read] == []


SECRETS = ("PLANARIA_JOIN", "PLANARIA_TOKEN")
"""Variables that planaria reads itself, so that no list of processes shows them."""
IMAGES = dict(re.findall(r"\b(PLANARIA_\w+)=(\S+)", (ROOT / "docker/Dockerfile").read_text()))
"""The variables that the images set."""


def services() -> list[Path]:
    return sorted((EXAMPLES / "systemd").glob("*.service"))


@pytest.mark.parametrize("file", services(), ids=lambda file: file.stem)
def test_a_service_starts_a_command_and_leaves_it_its_time(file: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file.read_text())
    service = unit["Service"]
    command, *words = shlex.split(service["ExecStart"])
    assert Path(command).name == "planaria"
    lines = (EXAMPLES / "systemd/planaria.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if line[0] != "#")
    options = check(words, variables)
    assert options["insecure"] is False
    if words[0] == "node":
        assert options["join"] == variables["PLANARIA_JOIN"]
        assert float(service["TimeoutStopSec"]) > options["grace"]


def test_kubernetes_leaves_each_node_its_time() -> None:
    pods = [
        manifest["spec"]["template"]["spec"]
        for manifest in MANIFESTS
        if "template" in manifest.get("spec", {})
    ]
    nodes = [pod for pod in pods if pod["containers"][0]["name"] == "node"]
    assert len(nodes) == 2
    for pod in nodes:
        words = [*pod["containers"][0]["args"], "--join", "planaria1.", "--listen", "0.0.0.0:1"]
        assert pod["terminationGracePeriodSeconds"] > check(words, {})["grace"]


def test_the_managed_job_starts_a_node() -> None:
    job = yaml.safe_load((EXAMPLES / "skypilot/node.yaml").read_text())
    [line] = job["run"].splitlines()
    command, *words = shlex.split(line)
    assert Path(command).name == "planaria"
    options = check(words, dict.fromkeys(job["secrets"], "planaria1."))
    assert options["join"] == "planaria1."
    assert options["listen"].endswith(f":{job['resources']['ports']}")


def test_so_many_managed_jobs_are_kept_alive(tmp_path: Path) -> None:
    """A script in place of `sky` prints the table of jobs, and loses a job after each look."""
    jobs = tmp_path / "jobs"
    jobs.write_text("")
    listed = f'echo "ID  TASK  NAME  STATUS"; cat {jobs}; sed -i 1d {jobs}'
    launched = f'echo "$6 RUNNING" >> {jobs}; echo "$@" >> {tmp_path}/launched'
    stub(tmp_path, "sky", f"case $2 in queue) {listed} ;; launch) {launched} ;; esac")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EVERY": "0"}
    keeping = subprocess.Popen(
        ["sh", EXAMPLES / "skypilot/keep.sh", "3"], env=path, stdout=subprocess.PIPE, text=True
    )
    assert keeping.stdout is not None
    looks = [keeping.stdout.readline().split(maxsplit=1)[1] for _ in range(3)]
    keeping.kill()
    keeping.wait()
    keeping.stdout.close()
    assert looks == ["0 of 3 nodes\n", "3 of 3 nodes\n", "2 of 3 nodes\n"]
    node = (tmp_path / "launched").read_text().splitlines()[0]
    assert node.endswith("examples/skypilot/node.yaml")


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_manifests_fit_the_schemas_of_kubernetes(manifest) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_manifests_fit_together() -> None:
    """Selectors find pods, volumes and ports exist, and the run file is valid."""
    kinds = {(each["kind"], each["metadata"]["name"]): each for each in MANIFESTS}
    pods = {
        name: each["spec"]["template"]
        for (kind, name), each in kinds.items()
        if kind in ("StatefulSet", "Deployment")
    }
    labels = [pod["metadata"]["labels"] for pod in pods.values()]
    for (kind, name), manifest in kinds.items():
        selector = manifest.get("spec", {}).get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            matching = [each for each in labels if wanted.items() <= each.items()]
            assert len(matching) == 1, (kind, name)
    for name, pod in pods.items():
        whole = kinds.get(("StatefulSet", name)) or kinds["Deployment", name]
        claims = [
            each["metadata"]["name"] for each in whole["spec"].get("volumeClaimTemplates", [])
        ]
        volumes = {*claims, *(each["name"] for each in pod["spec"].get("volumes", []))}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            [port] = container["ports"]
            assert port["containerPort"] == (7400 if name == "registry" else 7401)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["exec"]["command"] == ["healthcheck.py"]
                    assert container[probe]["timeoutSeconds"] > 3
        nodes = "node" in (container["name"] for container in pod["spec"]["containers"])
        assert not nodes or ("PodDisruptionBudget", name) in kinds

    run = loads(kinds["ConfigMap", "planaria"]["data"]["run.toml"])
    assert run.model.stages == kinds["Deployment", "body"]["spec"]["replicas"]
    [prepare] = pods["stage-0"]["spec"]["initContainers"]
    assert run.data.path == f"/planaria/{prepare['args'][-1]}"


def test_containers_have_time_to_leave() -> None:
    lines = [line for line in commands(EXAMPLES / "README.md") if line.startswith("docker run ")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert int(words[words.index("--stop-timeout") + 1]) >= 30
        assert {"--restart", "-v"} <= set(words)


def test_pages_link_to_what_there_is() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (EXAMPLES / "README.md").read_text())
    assert links and [link for link in links if not (EXAMPLES / link).exists()] == []


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_reads_the_services(tmp_path: Path) -> None:
    for file in services():
        text = file.read_text().replace("/opt/planaria/bin/planaria", "/bin/true")
        (tmp_path / file.name).write_text(text.replace("User=planaria", "User=root"))
        done = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / file.name],
            capture_output=True,
            text=True,
            check=False,
        )
        assert file.name not in done.stderr, done.stderr
