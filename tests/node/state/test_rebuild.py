"""Rebuilding of a node's state by each kind of method. The test provides what is fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.model.shape import model_config
from planaria.node.ports import Learned
from planaria.node.report.events import Event, Fetching
from planaria.node.run_file import loads, override
from planaria.node.state.boundary import FetchedTensors, WantedTensors
from planaria.node.state.rebuild import Rebuilding, Rebuilt
from planaria.node.state.relearn import RelearningBlock, RelearningTerms
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import Delivery, Manifest, WantedState
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.recovery.facts import ANEW, INEXACT, PRETRAINED
from tests.harness.network import Nodes

STAGE, STEP = 2, 7
BALLOT = Ballot(3, 5)
VIEW = registry.View(
    number=BALLOT.view,
    driver="driver",
    members=[registry.Member(node=node) for node in ("driver", "me")],
)
LAST = pb.Commit(step=STEP, ballot=Ballot(3, 4).message())
RUN = loads(
    """
[model]
dim = 8
heads = 2
hidden = 8
context = 4
stages = 4
layers = 4
[training]
batch = 6
microbatch = 2
"""
)


def state(stage: int, step: int = STEP, lineage: int = 0, boosted_at: int = 0) -> StageState:
    made = StateId.after(LAST, stage, lineage, step)
    return StageState(made, {"weights": torch.ones(3)}, 1.0, boosted_at, LAST, step)


class World:
    """Stand-in for all that a `Rebuilding` uses. `asked` lists its requests."""

    def __init__(self) -> None:
        self.nodes, self.asked = Nodes(), list[Any]()
        self.member, self.events = MemberSide("me", STAGE), list[Event]()
        self.member.viewed(VIEW)
        self.given: dict[int, StageState] = {}  # by stage: the state that is fetched
        self.own = state(STAGE)
        self.arrived: StageState | None = None
        self.twin: Any = None
        self.tensors = {"weights": torch.zeros(3)}
        self.enough = math.nan  # as relearning was told
        self.accounts: list[int] = []  # bytes fetched, as the driver was told
        self.pauses = [0.0]  # seconds between two signs of a fetch's progress
        config = model_config(RUN.model, vocabulary=16)
        everything: Any = self
        seat: Any = SimpleNamespace(
            exchanges=self.nodes.new(),
            run=RUN,
            config=config,
            member=self.member,
            record=SimpleNamespace(tell=self.events.append),
            crossings=Boundary(self.asked),
            **dict.fromkeys(("arithmetic", "holdings", "states", "relearning"), everything),
            committed_state=lambda: self.own,
            account=lambda: self.accounts.append(self.rebuilding.fetched),
        )
        self.rebuilding = Rebuilding(seat)

    def rebuilds(self, sync: pb.Sync) -> Rebuilt | None:
        self.member.received("driver", pb.Message(ballot=BALLOT.message(), sync=sync))
        exchanges = self.rebuilding.exchanges
        return self.nodes.run(exchanges, self.rebuilding.rebuild(BALLOT, sync))

    # --- what it asks of peers and files

    async def fetch(
        self,
        wanted: WantedState,
        sources: Sequence[str],
        deadline: float,
        on_progress: Callable[[int], None],
    ) -> Delivery:
        stage = wanted.stage
        self.asked.append((stage, wanted.age, sources, wanted.optimizer, wanted.kind))
        assert (deadline, wanted.ballot) == (RUN.swarm.progress, BALLOT)
        size = self.lacking or (3 if self.twin is None else 5)
        assert wanted.due == {"weights": size}, "what the stage has, no more"
        for count, pause in enumerate(self.pauses):
            await self.rebuilding.exchanges.sleep(pause)
            on_progress(count)
        if stage not in self.given:
            raise ComplaintError(f"stage {stage}: nobody has it", sources)
        return Delivery(self.given[stage], bytes=10 + stage)

    async def load(self, source: pb.Source, method: str) -> StageState:
        self.asked.append((source.node, method))
        return self.given[source.stage]

    async def run(
        self, block: RelearningBlock, lesson: str, fetched: FetchedTensors, terms: RelearningTerms
    ) -> pb.Relearned:
        assert self.member.void, "what isn't fit to train yet is offered to others"
        self.asked.append(("relearn", block.joiners, lesson, terms.passes > 0))
        self.enough = terms.enough
        return pb.Relearned(passes=2, updates=6, left=18 if terms.enough else 0)

    def weights(self, stage: int) -> StageState | None:
        assert stage == STAGE
        return self.arrived

    # --- the stage's arithmetic

    lacking = 0

    def take_frozen_weights(self, weights: torch.Tensor, giver: str) -> None:
        self.asked.append(("take in", weights.tolist()))
        self.lacking = 0

    def put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> Learned:
        self.asked.append(("put", [state.id.stage for state in states]))
        return Learned(b"placed", 2.0, 4)

    is_readable = True

    def initial_state(self, stage: int, lineage: int) -> StageState:
        if not self.is_readable:
            raise ComplaintError("the checkpoint can't be read")
        return state(stage, 0, lineage)

    def checkpoint_state(self, stage: int) -> StageState:
        return state(stage, 0)

    def digest(self) -> bytes:
        return b"now"

    def lesson(self, fetched: FetchedTensors, lost: frozenset[int]) -> str:
        return f"of {sorted(lost)}"


class Boundary:
    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    async def fetch(
        self, ballot: Ballot, wanted: WantedTensors, neighbours: list[str], patience: float
    ) -> FetchedTensors:
        self.asked.append(("boundary", sorted(wanted.lost), neighbours))
        return FetchedTensors(wanted.shape)


def sync(method: str, *sources: tuple[str, int], **more: Any) -> pb.Sync:
    named = [pb.Source(node=node, stage=stage, step=STEP) for node, stage in sources]
    return pb.Sync(step=STEP, method=method, sources=named, **more)


def done(result: Rebuilt | None) -> tuple[pb.Synced, StageState]:
    assert result is not None
    return result.synced, result.state


def test_a_replicas_state_is_taken_as_it_is() -> None:
    world = World()
    world.given[STAGE] = state(STAGE, boosted_at=3)
    wanted = sync("replica", ("a", STAGE), ("b", STAGE))
    synced, rebuilt = done(world.rebuilds(wanted))
    age = Age(0, STEP)
    assert world.asked == [(STAGE, age, ["a", "b"], True, ""), ("put", [STAGE])]
    assert (synced.step, synced.method, synced.digest) == (STEP, "replica", b"placed")
    assert synced.fetched_bytes == 10 + STAGE
    assert list(synced.sources) == list(wanted.sources)
    assert rebuilt.id == StateId(STAGE, 0, STEP, Ballot.of(LAST.ballot))
    assert (rebuilt.boosted_at, rebuilt.omega, rebuilt.optimizer_step) == (3, 2.0, 4)
    assert rebuilt.tensors is world.tensors


@pytest.mark.parametrize("method", sorted({*INEXACT} - {ANEW, PRETRAINED}))
def test_a_guess_takes_weights_alone_and_its_learning_rate_is_boosted(method: str) -> None:
    world = World()
    world.given = {1: state(1), 3: state(3)}
    synced, rebuilt = done(world.rebuilds(sync(method, ("c", 3), ("a", 1), ("d", 3), last=LAST)))
    assert world.asked == [
        (1, Age(0, STEP), ["a"], False, ""),
        (3, Age(0, STEP), ["c", "d"], False, ""),
        ("put", [1, 3]),
    ]
    assert synced.fetched_bytes == 11 + 13
    assert rebuilt.boosted_at == STEP


def test_what_a_stage_was_in_the_checkpoint_comes_from_who_has_it() -> None:
    world = World()
    world.given = {STAGE: state(STAGE, step=0)}
    synced, rebuilt = done(world.rebuilds(sync(PRETRAINED, ("g", STAGE), last=LAST)))
    assert world.asked == [(STAGE, Age(0, STEP), ["g"], False, "origin"), ("put", [STAGE])]
    assert (synced.fetched_bytes, rebuilt.boosted_at) == (10 + STAGE, STEP)
    world.asked.clear()
    world.member.origin = True
    synced, _ = done(world.rebuilds(sync(PRETRAINED, ("g", STAGE), last=LAST)))
    assert world.asked == [("put", [STAGE])], "it is here, too"
    assert synced.fetched_bytes == 0


def test_a_checkpoint_that_can_not_be_read_any_more_comes_from_another_node() -> None:
    world = World()
    world.given, world.member.origin = {STAGE: state(STAGE, step=0)}, True
    world.is_readable = False
    wanted = sync(PRETRAINED, ("g", STAGE), last=LAST)
    with pytest.raises(ComplaintError, match="the checkpoint can't be read"):
        world.rebuilds(wanted)
    world.rebuilds(wanted)
    assert world.asked == [(STAGE, Age(0, STEP), ["g"], False, "origin"), ("put", [STAGE])]


def test_adapters_begin_anew_beside_weights_of_the_checkpoint() -> None:
    world = World()
    world.given, world.lacking = {STAGE: state(STAGE)}, 7
    wanted = sync(ANEW, last=LAST, giver="g")
    synced, rebuilt = done(world.rebuilds(wanted))
    assert world.asked == [
        (STAGE, Age(0, 0), ["g"], False, "origin"),
        ("take in", world.given[STAGE].tensors["weights"].tolist()),
        ("put", [STAGE]),
    ]
    assert (synced.fetched_bytes, rebuilt.boosted_at) == (10 + STAGE, STEP)
    assert rebuilt.id == StateId(STAGE, 0, STEP, Ballot.of(LAST.ballot))
    world.asked.clear()
    done(world.rebuilds(wanted))
    assert world.asked == [("put", [STAGE])], "what is there isn't fetched again"


@pytest.mark.parametrize("kind", ["snapshot", "redundant"])
def test_what_a_holder_keeps_is_asked_for_by_its_kind(kind: str) -> None:
    world = World()
    world.given[STAGE] = state(STAGE)
    world.rebuilds(sync(kind, ("h", STAGE)))
    assert world.asked[0] == (STAGE, Age(0, STEP), ["h"], True, kind)


def test_an_older_state_counts_as_of_the_step_that_the_driver_names() -> None:
    world = World()
    world.given[STAGE] = state(STAGE, step=4)
    _, rebuilt = done(world.rebuilds(sync("snapshot", ("h", STAGE), last=LAST, lineage=2)))
    assert rebuilt.id == StateId(STAGE, 2, STEP, Ballot.of(LAST.ballot))


@pytest.mark.parametrize("method", ["save", "checkpoint"])
def test_a_file_is_loaded_and_no_peer_asked(method: str) -> None:
    world = World()
    world.given[STAGE] = state(STAGE)
    synced, _ = done(world.rebuilds(sync(method, ("other", 1), ("me", STAGE))))
    assert world.asked == [("me", method), ("put", [STAGE])]
    assert synced.fetched_bytes == world.given[STAGE].bytes


def test_what_is_there_already_counts_in_the_lineage_that_the_run_goes_back_to() -> None:
    world = World()
    synced, rebuilt = done(
        world.rebuilds(sync("memory", ("other", STAGE), ("me", STAGE), lineage=3))
    )
    assert world.asked == [("put", [STAGE])]
    assert (synced.fetched_bytes, rebuilt.id.age, rebuilt.last) == (0, (3, STEP), LAST)
    world.own = state(STAGE, STEP + 1)  # it has applied a commit since it was queried
    with pytest.raises(ComplaintError, match="step 7 is requested, but step 8 is in memory"):
        world.rebuilds(sync("memory", ("me", STAGE), lineage=4))


@pytest.mark.parametrize("of_the_run", [{"last": LAST}, {}])
def test_in_a_save_of_an_undone_step_nothing_is_later_than_the_step_that_it_counts_as_of(
    of_the_run: dict[str, pb.Commit],
) -> None:
    """Else who copies it from this node takes that for a lie, and accuses it."""
    world = World()
    world.put_in_place = lambda _, states: Learned(b"", 2.0, states[0].optimizer_step)
    undone = state(STAGE, STEP + 2, boosted_at=STEP + 1)
    world.given[STAGE] = replace(undone, last=pb.Commit(step=STEP + 2))
    _, rebuilt = done(world.rebuilds(sync("save", ("me", STAGE), lineage=1, **of_the_run)))
    manifest = pb.StateManifest(
        step=STEP,
        tensors=msgpack.packb([["weights", "float32", [3]]]),
        size=12,
        boosted_at=rebuilt.boosted_at,
        optimizer_step=rebuilt.optimizer_step,
        last=rebuilt.last,
    )
    assert Manifest.parse(manifest, STEP, [{"weights": 3}]).optimizer_step == STEP


@pytest.mark.parametrize("method", ["weights", "joiner"])
def test_what_had_come_counts_as_of_the_newest_step(method: str) -> None:
    world = World()
    world.arrived = world.own = state(STAGE, STEP - 2)
    wanted = pb.Sync(step=STEP, method=method, last=LAST)
    wanted.sources.add(node="me", stage=STAGE, step=STEP - 2)
    synced, rebuilt = done(world.rebuilds(wanted))
    assert world.asked == [("put", [STAGE])]
    assert synced.fetched_bytes == (world.arrived.bytes if method == "weights" else 0)
    assert rebuilt.id == StateId(STAGE, 0, STEP, Ballot.of(LAST.ballot))
    assert rebuilt.boosted_at == 0, "nothing was guessed"


@pytest.mark.parametrize("step", [None, STEP - 1])
def test_weights_that_are_not_here_any_more_are_a_complaint(step: int | None) -> None:
    world = World()
    world.arrived = None if step is None else state(STAGE, step)
    with pytest.raises(ComplaintError, match="weights of step 7 are requested, but "):
        world.rebuilds(sync("weights", ("me", STAGE)))


def test_step_0_is_in_no_file() -> None:
    world = World()
    start = pb.Sync(step=0, method="checkpoint", sources=[pb.Source(node="me", stage=STAGE)])
    synced, rebuilt = done(world.rebuilds(start))
    assert world.asked == [("put", [STAGE])]
    assert (synced.fetched_bytes, rebuilt.id.step) == (0, 0)


def test_a_lost_stage_is_relearned_before_it_is_fit_for_anything() -> None:
    world = World()
    world.given = {1: state(1), 4: state(4)}
    lost = [pb.Place(node="me", stage=STAGE), pb.Place(node="you", stage=3)]
    neighbours = [pb.Place(node="a", stage=1), pb.Place(node="d", stage=4)]
    wanted = sync("interpolate", ("a", 1), ("d", 4), lost=lost, neighbours=neighbours)
    synced, _ = done(world.rebuilds(wanted))
    assert world.asked[2:] == [
        ("put", [1, 4]),
        ("boundary", [STAGE, 3], ["a", "d"]),
        ("relearn", {STAGE: "me", 3: "you"}, f"of [{STAGE}, 3]", True),
    ]
    assert synced.digest == b"now", "the digest is of what was guessed, before it was relearned"
    assert synced.relearned.passes == 2


@pytest.mark.parametrize(
    ("goes_on", "lost", "enough"),
    [(True, [STAGE], 0.1), (False, [STAGE], 0.0), (True, [STAGE, 3], 0.0)],
)
def test_training_goes_on_before_it_has_relearned_all_where_the_driver_says_so(
    goes_on: bool, lost: list[int], enough: float
) -> None:
    world = World()
    world.rebuilding.run = override(RUN, recovery__relearn__enough=0.1)
    world.given = {1: state(1), 3: state(3), 4: state(4)}
    places = [pb.Place(node=f"at {stage}", stage=stage) for stage in lost]
    wanted = sync("checkfree", ("a", 1), ("d", 4), lost=places, goes_on=goes_on)
    rebuilt = world.rebuilds(wanted)
    assert rebuilt is not None
    assert world.enough == enough
    assert (rebuilt.relearning_task is None) == (enough == 0.0)


def test_what_is_no_longer_wanted_changes_nothing() -> None:
    world = World()
    world.given[STAGE] = state(STAGE)
    world.pauses = [1.0]
    newer = pb.Message(ballot=BALLOT.next().message(), query=pb.Query())
    world.nodes.after(0.5, lambda: world.member.received("driver", newer) and None)
    assert world.rebuilds(sync("replica", ("a", STAGE))) is None
    assert not any(asked[0] == "put" for asked in world.asked)


def test_a_complaint_goes_to_whoever_asked() -> None:
    world = World()
    with pytest.raises(ComplaintError, match="stage 2: nobody has it") as raised:
        world.rebuilds(sync("replica", ("a", STAGE)))
    assert raised.value.accused == ["a"]


def test_progress_is_told_now_and_then() -> None:
    world = World()
    world.given[STAGE] = state(STAGE)
    world.pauses = [0.0, 0.05, 0.05, 0.2, 0.05]
    world.rebuilds(sync("replica", ("a", STAGE)))
    progress = [event.bytes for event in world.events if isinstance(event, Fetching)]
    assert progress == [0, 3]
    assert world.accounts == progress


def test_a_long_transfer_is_logged_after_ever_more_seconds(caplog) -> None:
    world = World()
    world.given[STAGE] = state(STAGE)
    world.pauses = [3.0] * 9
    with caplog.at_level("INFO", "planaria"):
        world.rebuilds(sync("replica", ("a", STAGE)))
    seconds = [float(line.split(" in ")[1].split(" s,")[0]) for line in caplog.messages]
    assert seconds == [6.0, 12.0, 24.0]
    assert caplog.messages[0] == "stage 2 fetches from a: 1 byte in 6.0 s, 0 bytes/s"


def test_a_twin_is_fetched_as_the_next_stages_state() -> None:
    world = World()
    world.given[3] = state(3)
    loaded: list[StageState] = []
    held = replace(state(3), tensors={"weights": torch.zeros(5)})
    world.twin = type("Twin", (), {"load": staticmethod(loaded.append), "state": held})
    wanted = sync("twin", ("c", 3))
    world.member.received("driver", pb.Message(ballot=BALLOT.message(), sync=wanted))
    exchanges = world.rebuilding.exchanges
    synced = world.nodes.run(exchanges, world.rebuilding.rebuild_twin(BALLOT, wanted))
    assert synced is not None
    assert loaded == [world.given[3]]
    assert (synced.method, synced.digest) == ("twin", b"now")
