"""docs/limits.md states the limits that the code has."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|.*\| ([\d,]+) ?(\w*) \| `(planaria\.[\w.]+)` \|.*\|$", PAGE, re.MULTILINE)
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "ms": 1}


def test_every_row_has_a_limit_and_its_constant() -> None:
    tables = re.findall(r"(?m)^\|[ -]+\|[ :|-]+\n((?:\|.*\n)+)", PAGE)
    assert len(ROWS) == sum(table.count("\n") for table in tables) > 0


@pytest.mark.parametrize(("count", "unit", "name"), ROWS)
def test_a_limit_is_that_of_the_code(count: str, unit: str, name: str) -> None:
    match = re.fullmatch(r"([a-z_.]+)\.([A-Z].*)", name)
    assert match
    value = attrgetter(match[2])(importlib.import_module(match[1]))
    assert value == int(count.replace(",", "")) * UNITS[unit]
