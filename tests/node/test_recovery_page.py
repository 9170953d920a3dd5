"""docs/recovery.md names every policy, and every option of recovery and saves with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli_w

from planaria.node.run_file import RecoverySection, SavesSection, Section
from planaria.recovery.decide import FRESH, RECENT
from planaria.recovery.policy import POLICIES

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text(encoding="utf-8")


def options(section: str) -> dict[str, str]:
    """Return defaults by key, as the table under `[section]` has them."""
    _, _, rest = PAGE.partition(f"Under `[{section}]`")
    table = rest.strip().partition("\n\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


RECOVERY = RecoverySection()


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("recovery", RECOVERY),
        ("recovery.relearn", RECOVERY.relearn),
        ("recovery.snapshot", RECOVERY.snapshot),
        ("recovery.checkpoint", RECOVERY.checkpoint),
        ("saves", SavesSection()),
    ],
)
def test_the_page_has_every_option_with_its_default(name: str, section: Section) -> None:
    listed = options(name)
    defaults = {k: v for k, v in section.model_dump().items() if not isinstance(v, dict)}
    assert list(listed) == list(defaults)
    for key, value in defaults.items():
        if value is not None:  # else the page says in words what the default depends on
            assert listed[key].strip("`") == tomli_w.dumps({"v": value})[4:].strip(), key


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_has_every_policy(policy: str) -> None:
    assert f"\n| `{policy}` | " in PAGE
    assert f"\n- **`{policy}`** " in PAGE


def test_the_page_says_how_old_a_kept_state_may_be() -> None:
    sentence = f"of at most {RECENT} steps ago, of a snapshot {FRESH} if a guess relearns"
    assert sentence in " ".join(PAGE.split())
