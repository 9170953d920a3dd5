"""A whole swarm, with the disk's writers, ends by SIGKILL at random points, again and again."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Set
from pathlib import Path

import pytest
import uvloop

from planaria.node.data.corpus import Corpus
from planaria.node.machine.processes import PLANARIA, die_with_parent
from planaria.node.report.ledger import audit
from planaria.node.state.saves import Contents, Saves
from planaria.node.state.stage_state import Age
from tests.swarm.in_process import LocalSwarm
from tests.swarm.lines import Lines
from tests.swarm.small import small

CUTS = 30
STAGES = 2
RUN = small(
    STAGES,
    steps=1_000_000,
    model__context=16,
    training__batch=2,
    training__validation_microbatches=0,
    saves__every=3,
)
DEADLINE = 300.0  # seconds; only a hanging swarm gets there


def train(out: Path, data: Path, number: int) -> None:
    """All the nodes in this process, until it is killed."""
    die_with_parent()

    async def forever() -> None:
        corpus = Corpus.open(data)
        swarm = LocalSwarm(RUN, corpus, out / "logs", out / "saves", after_view=1000 * number)
        async with swarm:
            await swarm.until(swarm.finished, deadline=3600)

    uvloop.run(forever())


def steps_of(logs: Path, before: Set[Path]) -> list[int]:
    """Those of which the ledger that was not there before has whole lines."""
    ledgers = set(logs.glob("ledger-*.jsonl")) - before
    lines = [line for path in ledgers for line in path.read_bytes().splitlines(keepends=True)]
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [line["step"] for line in whole if "step" in line]


def all_saved(lines: Lines, seen: int, after: int) -> bool:
    """Whether every stage has told that a step behind `after` is on disk, behind the first `seen`
    events of that kind."""
    told = [event for event in lines.events("saved")[seen:] if event["step"] > after]
    nodes = Counter(step for step, _ in {(event["step"], event["node"]) for event in told})
    return max(nodes.values(), default=0) == STAGES + 1


def saved(out: Path) -> list[list[Age]]:
    """Of each stage, what is on disk; every file must be sound."""
    found = []
    for stage in range(STAGES + 1):
        contents = Contents.of(RUN.model.config, stage)
        saves = Saves(out / "saves" / f"{stage}.0", "run", stage, RUN.saves.keep, contents)
        assert saves.sound() == saves.listed()
        found.append(saves.listed())
    return found


@pytest.mark.filterwarnings("error")
def test_whatever_was_saved_survives_power_cuts(data, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["planaria.node.local.fork_server", *PLANARIA, "tests.swarm.in_process"]
    )
    chance = random.Random(0)
    logs = tmp_path / "logs"
    lines = Lines(logs)
    newest = (0, 0)  # lineage and step that every stage has on disk
    for number in range(1, CUTS + 1):
        before, seen = set(logs.glob("ledger-*.jsonl")), len(lines.events("saved"))
        swarm = context.Process(target=train, args=(tmp_path, data, number), daemon=True)
        swarm.start()

        # In every third turn. In others it goes on, perhaps from what it has gone on from again;
        # without a save of each stage it couldn't.
        worth = number % 3 == 1
        deadline = time.monotonic() + DEADLINE
        while max(steps_of(logs, before), default=0) <= newest[1] or (
            worth and not all_saved(lines, seen, newest[1])
        ):
            assert swarm.is_alive()
            assert time.monotonic() < deadline, "no step is committed"
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.3))
        swarm.kill()
        swarm.join()

        steps = steps_of(logs, before)
        assert steps == list(range(max(newest[1], 1), steps[-1] + 1)), "a step isn't in the ledger"
        if newest[1]:
            latest = max(lines.events("resuming"), key=lambda event: event["time"])
            assert (latest["step"], latest["exact"]) == (newest[1], True)
        common = set.intersection(*map(set, saved(tmp_path)))
        assert max(common, default=(0, 0)) >= newest, "what was on disk has gone"
        assert not worth or max(common) > newest, "what was told to be on disk isn't"
        newest = max(common, default=newest)
        assert newest[1] <= steps[-1] + 1, "only the newest step can be in a save and in no ledger"
        late = steps[-1] - newest[1]
        assert late <= RUN.saves.every * (RUN.saves.in_flight + 2), "saves lag behind"
    found = audit(logs)
    assert found.exact
    assert found.steps + 1 >= newest[1] >= RUN.saves.every * (CUTS // 3)
    assert found.superseded > 0, "no step was trained again: the cuts came too early"
