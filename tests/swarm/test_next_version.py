"""A run that planaria 0.1.0 began goes on with this version.

`planaria data prepare` made `earlier/data` from 400 short sentences. `earlier/run` has the needed
files of a run of `planaria up`: six steps, then two more with another batch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit
from planaria.node.run_file import load, override
from tests.reference import Reference

EARLIER = Path(__file__).with_name("earlier")


def test_a_run_of_version_0_1_0_goes_on(up, tmp_path):
    kept = shutil.copytree(EARLIER, tmp_path / "kept")
    assert audit(kept / "run").exact
    swarm = up(kept / "run", "--data", str(kept / "data"), "--steps", "10")
    status, output = swarm.finish()
    assert status == 0, output
    assert {(went["step"], went["exact"]) for went in swarm.events("resuming")} == {(8, True)}
    summary = swarm.summary()
    assert summary["audit"] == {"expected": 48, "duplicates": 0, "missing": 0, "extra": 0}

    run = override(load(EARLIER / "run/run.toml"), training__optimizer="adamw")
    golden = Reference(run.original, Corpus.open(EARLIER / "data"))
    lines = [line for line in swarm.lines.of("ledger.jsonl") if "step" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        if line["step"] in (7, 9):  # first steps after changes of the batch, of `steps`
            golden.change(run if line["step"] == 7 else load(kept / "run/run.toml"))
        assert line["loss"] == pytest.approx(golden.step(), rel=1e-5), line["step"]
