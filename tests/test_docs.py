"""The site links to existing pages, and these quote messages that the code has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from planaria.node.run_file import loads

ROOT = Path(__file__).parent.parent
QUOTED = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
SHOWN = re.findall(r"^- \*\*`(.*?)`\*\*", (ROOT / "docs/tutorial.md").read_text(), re.M)


@cache
def everything_said() -> str:
    """All string constants of the packages, a line each, with `…` for inserted values."""
    files = [path for top in ("bootstrap", "node") for path in (ROOT / top).rglob("*.py")]
    texts = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(re.sub(r"%(?:\.\d+)?[sdgf]|\{\w+\}", "…", text))
                case ast.JoinedStr(values=parts):
                    texts.append(
                        "".join(
                            str(getattr(part, "value", "…"))
                            if isinstance(part, ast.Constant)
                            else "…"
                            for part in parts
                        )
                    )
    return "\n".join(text.replace("\n", " ") for text in texts)


@pytest.mark.parametrize("message", QUOTED + SHOWN)
def test_a_message_that_is_explained_is_one(message: str) -> None:
    assert message in everything_said()


def test_the_site_leads_to_what_there_is() -> None:
    """`make docs` checks that it leads to every page."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    led_to = re.findall(r": (\S+\.md)$", nav, re.M)
    assert led_to and [page for page in led_to if not (ROOT / page).is_file()] == []


def test_each_promise_threat_and_remaining_risk_has_a_test() -> None:
    text = (ROOT / "docs/security.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []
    tables = re.findall(
        r"(?m)^\| [^|\n]+(?: \| [^|\n]+)* \| test \|\n\|[ -|]+\|\n((?:\|.*\n)+)", text
    )
    assert tables
    rows = [row for table in tables for row in table.splitlines()]
    assert [
        row for row in rows if not re.search(r"`((lab/)?tests/|python -m planaria_lab)", row)
    ] == []


def test_the_friends_run_file_is_that_of_three_machines() -> None:
    text = (ROOT / "docs/friends.md").read_text()
    (run_file,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    run = loads(run_file)
    assert (run.model.body_stages, run.training.lora and run.training.lora.base) == (2, "nf4")
