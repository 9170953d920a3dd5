"""`Holdings`: which states a node keeps and reports, and which files it writes and loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.agent import transaction_rules
from planaria.node.model.shape import Lora, Own, model_config
from planaria.node.ports import OpenDisk
from planaria.node.run_file import RunFile, loads, override
from planaria.node.stage.torch_stage import make_twin
from planaria.node.state import copies
from planaria.node.state.copies import layout_of
from planaria.node.state.holdings import Holdings
from planaria.node.state.saves_on_disk import saves_on_disk
from planaria.node.state.stage_state import TENSORS, Age, SaveError, StageState, StateId
from planaria.node.transaction.bounds import LISTED, fault_to_driver
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange
from planaria.recovery.snapshot import Layout
from tests.harness.network import Nodes, VirtualNet
from tests.node.state.small_saves import flat

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
layers = 3
[saves]
every = 2
"""
)


class Host:
    """Stand-in for a seat. It sends nothing, and notes what it is told of saves."""

    node = "1.0"
    stage = STAGE
    tensors = tensors
    net = VirtualNet(up=set())

    def __init__(self, run: RunFile) -> None:
        self.run, self.config = run, model_config(run.model, vocabulary=16)
        self.nodes = Nodes()
        self.exchanges = self.nodes.new()
        self.saves: list[tuple[str, int]] = []
        self.trouble: list[str] = []
        self.own_saves = self

    def send(self, *_: object) -> bool:
        return False

    def accuse(self, *_: object) -> None:
        raise AssertionError("nobody has sent anything")

    def own_state(self) -> None:
        return None

    def saved(self, kind: str, save: Any) -> None:
        self.saves.append((kind, save.step))

    def failed(self, kind: str, reason: str) -> None:
        self.trouble.append(reason)


def holdings(
    folder: Path,
    policy: str = "checkfree",
    open_disk: OpenDisk | None = None,
    **changes: Any,
) -> Holdings:
    run = override(RUN, recovery__policy=policy, recovery__checkpoint__every=2, **changes)

    disk = open_disk or saves_on_disk("run", STAGE, 2, at_once, flat(3))
    host = Host(run)
    twin = make_twin(host, torch.device("cpu")) if policy == "redundant" else None
    shared = folder / "shared" if policy == "checkpoint" else None
    return Holdings(host, twin, layout, disk, folder / "own", shared)


def at_once(work: Callable[..., object], *arguments: Any) -> object:
    return work(*arguments)


def layout(stage: int) -> Layout:
    return Layout([(stage + 1,)])


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


def load(keeps: Holdings, step: int, kind: str) -> Exchange[StageState]:
    return keeps.host.exchanges.start(keeps.load(pb.Source(stage=STAGE, step=step), kind))


def made(keeps: Holdings) -> list[tuple[str, int, int, int, Ballot]]:
    return [(h.kind, h.stage, h.lineage, h.step, Ballot.of(h.made)) for h in keeps.listed()]


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


def test_checkpoints_are_as_many_as_writes_in_flight_need(tmp_path: Path) -> None:
    disk = saves_on_disk("run", STAGE, 5, at_once, flat(3))
    keeps = holdings(tmp_path, "checkpoint", disk, saves__in_flight=5, saves__keep=7)
    assert [files.kind for files in keeps.files] == ["save", "checkpoint"]


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


def test_files_of_what_the_run_has_undone_are_removed(tmp_path: Path) -> None:
    def offered(**changes: Any) -> list[int]:
        return [save.step for save in holdings(tmp_path, **changes).listed()]

    back = [{"step": 2, "undone": 5}]
    for step, by in {2: Ballot(5, 1), 4: Ballot(5, 2), 6: Ballot(6, 1)}.items():
        save(holdings(tmp_path), state(step, commit_of(step, by)))
    assert offered() == [6, 4, 2]
    assert offered(changes=back) == [6, 2]
    assert offered() == [6, 2], "the other one is removed"
    save(holdings(tmp_path), state(8, commit_of(1, Ballot(6, 1))))
    assert offered(changes=back) == [6, 2], "since when that one was made is not known"
    keeps = holdings(tmp_path, changes=back)
    save(holdings(tmp_path), state(10, commit_of(10, Ballot(5, 3))))
    assert [save.step for save in keeps.listed()] == [6, 2], "the seat before was late"


def test_a_run_can_go_back_to_what_the_next_save_does_not_replace(tmp_path: Path) -> None:
    settings = {"saves__every": 2, "saves__keep": 4, "saves__milestones": 6}
    disk = saves_on_disk("run", STAGE, 2, at_once, flat(3), 6)
    for step in (2, 4, 6, 8, 10, 12, 14):
        save(holdings(tmp_path, open_disk=disk, **settings), state(step, commit_of(step, NEVER)))
    keeps = holdings(tmp_path, open_disk=disk, **settings)
    assert [save.step for save in keeps.listed()] == [14, 12, 10, 8, 6]
    assert keeps.saved_steps() == [14, 12, 10, 6]


def test_files_of_other_values_have_other_digests(tmp_path: Path) -> None:
    digests = set()
    for folder, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        keeps = holdings(tmp_path / folder)
        made = state(2, commit_of(2, Ballot(3, 5)))
        save(keeps, replace(made, tensors={"weights": torch.full((3,), value)}))
        (holding,) = keeps.listed()
        digests.add(holding.digest)
    assert len(digests) == 2


def test_a_file_that_is_damaged_while_the_node_lives_is_not_offered(tmp_path: Path) -> None:
    keeps = holdings(tmp_path)
    save(keeps, state(2, commit_of(2, Ballot(3, 5))), state(4, commit_of(4, Ballot(3, 8))))
    newest = tmp_path / "own/stage-1/step-00000004-0.safetensors"
    newest.write_bytes(b"\0" + newest.read_bytes()[1:])
    assert [save.step for save in keeps.listed()] == [2]


class Shelf:
    """A folder of saves in memory. `load` only notes a request, which the test answers."""

    critical_seconds, bytes_written = 0.0, 0

    def __init__(self, damaged: set[Age]) -> None:
        self.states: dict[Age, StageState] = {}
        self._damaged = damaged
        self.asked: list[tuple[Age, Callable[[StageState | Exception], None]]] = []
        self.finished = False

    def listed(self, refused: Collection[Age] = ()) -> list[StateId]:
        ages = sorted(self.states.keys() - set(refused), reverse=True)
        return [self.states[age].id for age in ages]

    def remove(self, saves: Collection[Age]) -> None:
        assert not saves

    def damaged(self) -> set[Age]:
        return self._damaged

    def write(self, state: StageState) -> None:
        self.states[state.id.age] = state

    def load(self, save: Age, then: Callable[[StageState | Exception], None]) -> None:
        self.asked.append((save, then))

    def finish(self, seconds: float) -> None:
        self.finished = True


class Shelves:
    """Stand-in for `OpenDisk`: a `Shelf` for each folder. Saves of `damaged` ages are damaged."""

    def __init__(self, damaged: set[Age] | None = None) -> None:
        self.damaged = damaged or set()
        self.by_folder: dict[str, Shelf] = {}

    def __call__(
        self,
        folder: Path,
        keep: int,
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> Shelf:
        return self.by_folder.setdefault(folder.name, Shelf(self.damaged))


def state_of(step: int) -> StageState:
    return state(step, commit_of(step, Ballot(1, step)))


def test_a_file_is_written_where_its_step_is_due(tmp_path: Path) -> None:
    shelves = Shelves()
    keeps = holdings(tmp_path, "checkpoint", shelves)
    for step in range(1, 6):
        keeps.save(state_of(step), first=step != 2)
    keeps.save(state_of(7), first=True, always=True)
    keeps.finish_saves()
    keeps.save(state_of(8), first=True)
    assert [age.step for age in shelves.by_folder["own"].states] == [2, 4, 7]
    assert [age.step for age in shelves.by_folder["shared"].states] == [4], "the first writes them"
    assert all(shelf.finished for shelf in shelves.by_folder.values())


def test_a_file_that_could_not_be_loaded_is_not_offered_again(tmp_path: Path) -> None:
    shelves = Shelves(damaged={Age(0, 6)})
    keeps = holdings(tmp_path, open_disk=shelves)
    for step in (2, 4, 6):
        keeps.save(state_of(step), first=True)
    assert [save.step for save in keeps.listed()] == [4, 2]
    loading = load(keeps, 4, "save")
    ((save, then),) = shelves.by_folder["own"].asked
    assert save == Age(0, 4)
    then(SaveError("step 4 is damaged"))
    keeps.host.nodes.catch_up()
    with pytest.raises(ComplaintError, match="step 4 is damaged"):
        loading.result()
    assert [save.step for save in keeps.listed()] == [2]


def test_a_driver_takes_the_status_of_a_node_with_thousands_of_milestones(tmp_path: Path) -> None:
    shelves = Shelves()
    keeps = holdings(tmp_path, open_disk=shelves)
    for step in range(2, 2 * LISTED + 4, 2):
        shelves.by_folder["own"].write(state_of(step))
    status = pb.Message(status=pb.Status(holdings=keeps.listed()))
    assert fault_to_driver(status, transaction_rules(keeps.run, keeps.config)) == ""
    assert status.status.holdings[0].step == 2 * LISTED + 2


def test_what_a_policy_loads_comes_from_its_own_folder(tmp_path: Path) -> None:
    shelves = Shelves()
    keeps = holdings(tmp_path, "checkpoint", shelves)
    loading = load(keeps, 4, "checkpoint")
    assert not shelves.by_folder["own"].asked
    ((_, then),) = shelves.by_folder["shared"].asked
    then(state_of(4))
    keeps.host.nodes.catch_up()
    assert loading.result().id.step == 4


def test_without_a_folder_there_is_nothing_to_load(tmp_path: Path) -> None:
    keeps = holdings(tmp_path, open_disk=Shelves())
    with pytest.raises(ComplaintError, match="this node has no folder for a checkpoint"):
        load(keeps, 4, "checkpoint").result()


def test_a_file_comes_back_as_an_exchange(tmp_path: Path) -> None:
    keeps = holdings(tmp_path)
    two = state(2, commit_of(2, Ballot(3, 5)))
    save(keeps, two)
    loading = load(keeps, 2, "save")
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join(60)
    keeps.host.nodes.catch_up()
    assert loading.result().id == two.id
    assert torch.equal(loading.result().tensors["weights"], two.tensors["weights"])


def test_a_twin_says_by_which_commit_its_step_was_made(tmp_path: Path) -> None:
    keeps = holdings(tmp_path, "redundant")
    assert keeps.twin is not None
    (holding,) = keeps.listed()
    assert (holding.kind, holding.stage, holding.step) == ("redundant", 2, 0)
    assert not holding.HasField("made")
    keeps.twin._reduced = (Ballot(3, 5), 1.0)
    keeps.apply(commit_of(1, Ballot(3, 5)), 0.1)
    assert made(keeps) == [("redundant", 2, 0, 1, Ballot(3, 5))]


def test_a_stage_whose_layers_have_no_adapters_needs_no_snapshot() -> None:
    """As with adapters of attention, where some layers have none."""
    attention, other = (("q_proj.weight", (8, 8)),), (("in_proj.weight", (8, 8)),)
    own = Own("test:build", block=attention, others=(other,), kinds=(0, 1, 0))
    host = Host(override(RUN, recovery__policy="snapshot"))
    host.config = replace(host.config, own=own, lora=Lora(2, 4.0, ("q_proj",)))
    assert [host.config.trained_in(stage) for stage in range(4)] == [0, 32, 0, 32]
    keeps = Holdings(host, None, partial(layout_of, host.config), Shelves(), None, None)
    assert keeps.sender is not None
    assert keeps.holder is not None


class Leaver(Host):
    """The last node of stage 0. Node `a` takes what it is sent, and confirms nothing."""

    stage = 0
    net = VirtualNet(up={"a", "b"})

    def own_state(self) -> StageState:
        values = {name: torch.ones(1) for name in TENSORS}
        last = commit_of(2, Ballot(3, 5))
        return StageState(StateId.after(last, 0, 0, 2), values, 0.0, 0, last, 2)

    def send(self, peer: str, frame: Any) -> bool:
        kept = partial(pb.Kept, kind="deposit", transfer=frame.fields["transfer"])
        for answer in [kept(received=frame.size), *([kept()] if peer == "b" else [])]:
            message = pb.Message(kept=answer)
            self.nodes.call_soon(lambda message=message: self.keeps.on_message(peer, message))
        return True


def test_stage_0_is_left_with_the_next_node_if_one_does_not_confirm_it() -> None:
    host = Leaver(RUN)
    host.keeps = Holdings(host, None, layout, Shelves(), None, None)
    host.keeps.in_place(host.own_state().id)
    leaving = host.exchanges.start(host.keeps.deposit(["a", "b"]))
    assert host.nodes.outcome(leaving) == "b"
    assert host.nodes.now >= copies.SILENCE
