"""README.md and docs/ name every option of a run's commands, and show only commands that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.main import get_command

from planaria.node.cli import IN_LAB, app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
COMMANDS = [
    *(
        "up",
        "bootstrap",
        "node",
        "status",
        "logs",
        "probe",
        "audit",
        "data prepare",
        "data inspect",
    ),
    *("export", "generate", "evaluate"),
    *("invite", "members", "evict", "ban", "allow", "pause", "go", "stop", "saves"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_names_every_option(command: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {option for page in pages for option in re.findall(r"--[a-z][a-z-]+", page)}
    group = get_command(app)
    for name in command.split():
        group = group.commands[name]  # type: ignore[attr-defined]
    options = [option for option in group.params if option.opts[0][:2] == "--"]
    names = [{*option.opts, *option.secondary_opts} for option in options]
    assert [name for name in names if "--help" not in name and name.isdisjoint(named)] == []


def shown(pages: Iterable[Path]) -> list[str]:
    """Return the planaria commands in the pages' blocks of code, each once."""
    commands = set()
    for page in pages:
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text("utf-8"), re.M | re.S):
            for line in re.sub(r" *\\\n *", " ", block).splitlines():
                if match := re.match(r" *(?:\S*/)?planaria (.*)", line):
                    commands.add(match[1])
    return sorted(commands)


def is_of_lab(line: str) -> bool:
    return line.split()[0] in IN_LAB


@pytest.mark.parametrize("line", [line for line in shown(PAGES) if not is_of_lab(line)])
def test_a_command_that_a_page_shows_is_one(line: str) -> None:
    """The command exists, and so do its options."""
    command, words = get_command(app), shlex.split(line.replace("...", ""), comments=True)
    while hasattr(command, "get_command") and (subcommand := command.get_command(None, words[0])):
        command, words = subcommand, words[1:]
    assert not hasattr(command, "get_command") or words[0].startswith("-"), words[0]
    command.make_context("planaria", words)
