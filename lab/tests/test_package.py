"""Tests of what planaria-lab installs, and of what it adds to the command `planaria`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

import planaria_lab
from planaria.node.cli import app
from tests.node.test_readme import PAGES, is_of_lab, shown
from tests.node.test_readme import test_a_command_that_a_page_shows_is_one as check_command
from tests.test_package import built, commands, python

LAB = Path(__file__).parents[1]
PACKAGE = LAB / "planaria_lab"
OWN_PAGES = [*(LAB / "docs").glob("*.md"), *(LAB / "results").glob("*/README.md")]
COMMANDS = sorted({*shown(OWN_PAGES), *filter(is_of_lab, shown(PAGES))})


def test_the_package_is_this_one() -> None:
    assert Path(planaria_lab.__file__).parent == PACKAGE


def test_no_command_writes_among_the_results_unless_asked() -> None:
    by_name = dict(commands(get_command(app)))
    assert {"planaria plan", "planaria lab simulate check"} <= by_name.keys()
    for name, command in by_name.items():
        for option in command.params:
            if isinstance(option.default, str | Path) and "/" in str(option.default):
                assert Path(option.default).parts[0] == "out", f"{name} {option.opts}"


@pytest.mark.parametrize("command", ["lab", "plan"])
def test_help_loads_no_heavy_module(command: str) -> None:
    code = (
        "import sys, planaria.node.cli\n"
        "planaria.node.cli.app([*sys.argv[1:], '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'grpc', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    assert python("-c", code, command).stdout.splitlines()[-1] == "[]"


def test_wheel_and_sdist_have_the_package(tmp_path: Path) -> None:
    files = {
        str(path.relative_to(LAB))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert built(LAB, tmp_path) == files


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_a_page_shows_is_one(line: str) -> None:
    check_command(line)
