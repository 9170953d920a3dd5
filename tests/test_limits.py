"""docs/limits.md says what the code does."""

import importlib
import re
from pathlib import Path

ROWS = re.findall(
    r"\| `([\w/]+)\.py`(?: `(\w+)` = (\d+))? \|$",
    (Path(__file__).parent.parent / "docs" / "limits.md").read_text(),
    re.MULTILINE,
)


def test_each_limit_in_the_table_is_that_of_the_code():
    assert len(ROWS) == 61
    for path, name, value in ROWS:
        module = importlib.import_module("planaria." + path.replace("/", "."))
        if name:
            assert getattr(module, name) == int(value), f"{path}.py {name}"
