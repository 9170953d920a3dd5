"""A node whose data is on a web server trains the same steps as a node with the data."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit
from tests.range_server import range_server
from tests.reference import train
from tests.swarm.lines import Lines
from tests.swarm.machines import DEADLINE, machines
from tests.swarm.small import small

STEPS = 6


async def test_it_makes_the_same_steps(data: Path, tmp_path: Path) -> None:
    with (
        machines(tmp_path, data, 1, secured=False, steps=STEPS) as here,
        range_server(data) as served,
    ):
        file = tmp_path / "run.toml"
        file.write_text(file.read_text().replace(str(data), str(tmp_path / "nowhere")))
        address, ledgers = await here.registry_with_journal(), Lines(tmp_path / "a")
        for name, folders in (("a", ["--data", served.url]), ("b", [])):
            here.folders = folders
            here.start_node(name, address)
        losses: list[float] = []
        async with asyncio.timeout(DEADLINE):
            while len(losses) < STEPS:
                await asyncio.sleep(0.05)
                lines = ledgers.of("ledger-*.jsonl")
                losses = [line["loss"] for line in lines if "step" in line]
        assert served.sent("train-00000.bin") > 0
    assert audit(tmp_path / "a").exact
    assert losses == pytest.approx(list(train(small(1, steps=STEPS), Corpus.open(data))), rel=1e-5)
