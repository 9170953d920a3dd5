"""The example of docs/from-python.md works while an event loop runs, as in a notebook, and with a
run file that has its own architecture."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

from planaria import Result
from planaria.node.run_file import dumps
from tests.swarm.small import small

PAGE = Path(__file__).parents[2] / "docs" / "from-python.md"


async def test_the_example_of_the_page_trains_and_exports(data, tmp_path, monkeypatch, capsys):
    assert asyncio.get_running_loop().is_running()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook's kernel
    run = small(stages=4, data__path=str(data), model__module="examples.gpt2:build")
    Path("run.toml").write_text(dumps(run))
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, object] = {}
    exec(code, names)
    result = names["result"]
    assert isinstance(result, Result)
    assert len(result.losses) == 12
    assert result.losses[-1] < result.losses[0] < 1.1 * math.log(2048)
    assert result.recoveries[0]["stage"] == 1
    assert Path("my-model/config.json").exists()
    printed = capsys.readouterr().out
    assert f"{result.losses[-1]}" in printed
    assert "\x1b" not in printed
    assert "learning rate: 0.001 after 5 steps of warm-up, then cosine" in printed
    assert "node-1.0 killed during step 6; stage 1 is lost" in printed
    assert 'src="data:image/png' in result._repr_html_()
