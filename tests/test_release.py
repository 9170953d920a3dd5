"""Workflows run commands that exist, and the changelog has an entry for the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def workflow(file: Path) -> dict[Any, Any]:
    """The workflow in a file. YAML reads its key `on` as `True`."""
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_what_there_is(file: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    flow = workflow(file)
    assert flow[True] and flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= (180 if file.stem == "nightly" else 60)
        several = job.get("strategy", {}).get("matrix", {}).get("run", [])
        for script in (*several, *(step.get("run", "") for step in job["steps"])):
            for target in re.findall(r"\bmake (\w+)", script):
                assert re.search(rf"^{target}:", makefile, re.M), target
            for named in re.findall(r"[\w./]+\.(?:toml|txt|md)\b|^\.\w+/\w+", script):
                assert (ROOT / named).exists(), named


def test_a_release_is_made_of_a_tag_and_published_without_a_secret() -> None:
    flow = workflow(ROOT / ".github/workflows/release.yml")
    assert flow[True] == {"push": {"tags": ["v*"]}}
    publish = flow["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_all_supported_versions_of_python_are_tested_and_classified() -> None:
    tested = workflow(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    classified = [name.split(" :: ")[-1] for name in PROJECT["classifiers"] if prefix in name]
    assert tested["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^]]+)\]", text, re.M)
    assert versions[0] == "Unreleased"
    assert VERSION in versions
