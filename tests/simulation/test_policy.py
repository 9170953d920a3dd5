"""The policy that CONTRIBUTING.md adds as an example."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

from planaria.recovery import policy
from planaria.recovery.decide import decide
from planaria.recovery.facts import Left, Rebuild
from simulation.scenario import run

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_a_policy_is_added_as_the_page_says() -> None:
    (code,) = re.findall(r"```python\n(def .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with patch.dict(policy.POLICIES):
        exec(code, {**vars(policy)})
        decision = decide(3, Left(4, 9, {2: ["b"], 4: ["d"]}), policy.POLICIES["copy-before"])
        assert isinstance(decision, Rebuild)
        assert (decision.sources[0].node, decision.fallback) == ("b", False)
        assert any(run(seed, policy="copy-before").counts["interpolate"] for seed in (15, 17))
