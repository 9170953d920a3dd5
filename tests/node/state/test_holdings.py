"""What a node says that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from conversing import Nodes

from planaria.node.run_file import loads, override
from planaria.node.stage.compute import Priority
from planaria.node.stage.shape import model_config
from planaria.node.state.holdings import Holdings
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb

T = TypeVar("T")
STAGE = 1
RUN = loads(
    """
[model]
preset = "tiny"
dim = 8
heads = 2
hidden = 8
context = 8
stages = 3
[saves]
every = 2
"""
)


class Host:
    """A node of which nothing is sent."""

    node = "1.0"

    def __init__(self) -> None:
        self.compute: Any = self
        self.exchanges = Nodes().new()
        self.saves: list[tuple[str, int]] = []

    def run(self, work: Callable[[], T], priority: Priority = Priority.CONTROL) -> T:
        return work()

    def send_message(self, *_: object) -> bool:
        return False

    send_frame = spawn = send_message

    def saved(self, kind: str, save: Any) -> None:
        self.saves.append((kind, save.step))


def holdings(folder: Path, policy: str = "checkfree") -> Holdings:
    run = override(RUN, recovery__policy=policy, recovery__checkpoint_dir=str(folder / "shared"))
    run = override(run, recovery__checkpoint_every=2)

    def at_once(work: Callable[..., object], *arguments: Any) -> object:
        return work(*arguments)

    config, host = model_config(run.model, vocabulary=16), Host()
    device, disk = torch.device("cpu"), folder / "own"
    return Holdings(host, STAGE, "run", run, config, device, disk, at_once)  # type: ignore[arg-type]


def commit_of(step: int, ballot: Ballot) -> pb.Commit:
    ones = [1.0] * 4
    return pb.Commit(step=step, ballot=ballot.message(), clip_scale=ones, lr_scale=ones)


def state(step: int, last: pb.Commit, lineage: int = 0) -> StageState:
    which = StateId.after(last, STAGE, lineage, step)
    return StageState(which, {"weights": torch.ones(3)}, 0.0, 0, last, 0)


def save(keeps: Holdings, *states: StageState) -> None:
    for each in states:
        keeps.save(each, first=True)
    keeps.finish_saves()


def made(keeps: Holdings) -> list[tuple[str, int, int, int, Ballot]]:
    return [
        (one.kind, one.stage, one.lineage, one.step, Ballot.of(one.made)) for one in keeps.listed()
    ]


@pytest.mark.parametrize(
    ("policy", "kinds"), [("checkfree", ["save"]), ("checkpoint", ["save", "checkpoint"])]
)
def test_a_file_says_by_which_commit_its_step_was_made(
    tmp_path: Path, policy: str, kinds: list[str]
) -> None:
    keeps = holdings(tmp_path, policy)
    two, four = commit_of(2, Ballot(3, 5)), commit_of(4, Ballot(3, 8))
    save(keeps, state(2, two, lineage=1), state(4, four, lineage=1))
    assert made(keeps) == [
        (kind, STAGE, 1, step, ballot)
        for kind in kinds
        for step, ballot in ((4, Ballot(3, 8)), (2, Ballot(3, 5)))
    ]


def test_a_step_that_was_made_again_is_another(tmp_path: Path) -> None:
    keeps = holdings(tmp_path)
    orphan, again = commit_of(2, Ballot(3, 5)), commit_of(2, Ballot(4, 1))
    save(keeps, state(2, orphan), state(2, again))
    assert made(keeps) == [("save", STAGE, 0, 2, Ballot(4, 1))]


def test_a_state_of_an_older_commit_than_it_counts_as_of_was_made_by_none(tmp_path: Path) -> None:
    keeps = holdings(tmp_path)
    save(keeps, state(4, commit_of(2, Ballot(3, 5))))
    (holding,) = keeps.listed()
    assert holding.step == 4
    assert not holding.HasField("made")


def test_a_file_that_is_damaged_while_the_node_lives_is_not_offered(tmp_path: Path) -> None:
    keeps = holdings(tmp_path)
    save(keeps, state(2, commit_of(2, Ballot(3, 5))), state(4, commit_of(4, Ballot(3, 8))))
    newest = tmp_path / "own/stage-1/step-00000004-0.safetensors"
    newest.write_bytes(b"\0" + newest.read_bytes()[1:])
    assert [one.step for one in keeps.listed()] == [2]


def test_a_twin_says_by_which_commit_its_step_was_made(tmp_path: Path) -> None:
    keeps = holdings(tmp_path, "redundant")
    assert keeps.twin is not None
    (holding,) = keeps.listed()
    assert (holding.kind, holding.stage, holding.step) == ("redundant", 2, 0)
    assert not holding.HasField("made")
    keeps.twin._reduced = (Ballot(3, 5), 1.0)
    keeps.apply(commit_of(1, Ballot(3, 5)), 0.1)
    assert made(keeps) == [("redundant", 2, 0, 1, Ballot(3, 5))]
