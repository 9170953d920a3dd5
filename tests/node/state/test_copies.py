from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import CHECKSUM, Cause
from planaria.node.run_file import SnapshotSection
from planaria.node.state import copies
from planaria.node.state.copies import Allowance, CopyHolder, CopySender, OutgoingCopies
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.recovery.decide import RECENT
from planaria.recovery.snapshot import Layout
from tests.harness.at_rest import check_at_rest
from tests.harness.network import Item, Network, Thread, damaged, with_fields

LAYOUT = Layout([(9, 40), (40,), (11, 17)])
NAMES = ("weights", "first_moment", "second_moment")
STAGE = 2


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "FRAME", 600)
    monkeypatch.setattr(copies, "LEAST_FRAME", 200)


@cache
def values_at(step: int, seed: int) -> list[torch.Tensor]:
    """Return weights and moments at a step. Each block differs from itself at other steps."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    weights, first, second = torch.randn(3, LAYOUT.values, generator=generator)
    return [weights, first, second.square()]


def commit_of(step: int, attempt: int = 0) -> pb.Commit:
    ballot = pb.Ballot(view=1, attempt=attempt or step)
    return pb.Commit(step=step, ballot=ballot, loss=0.5, microbatches=[pb.Home(microbatch=7)])


def having(step: int, attempt: int = 0, lineage: int = 0) -> StateId:
    """Return the id of the state that a holder, which serves stage 1, has after that commit."""
    return StateId.after(commit_of(step, attempt), 1, lineage, step)


class Training:
    """A node that applies commits and sends copies of its state."""

    def __init__(self, world: World, outgoing: OutgoingCopies, name: str, silence: float) -> None:
        self.name, self.world = name, world
        self.exchanges = world.new(Thread(world))
        self.step, self.last = 0, pb.Commit()
        self.flats = [torch.zeros(LAYOUT.values) for _ in NAMES]
        self.sender = CopySender(
            self.exchanges,
            outgoing,
            self.state,
            partial(world.send, name),
            silence,
            on_pace=lambda holder, pace: world.paces.append((holder, pace.kept, self.step)),
        )
        self.lineage = 0

    def state(self) -> StageState:
        stage = self.sender._outgoing.stage
        return StageState(
            id=StateId.after(self.last, stage, self.lineage, self.step),
            tensors=dict(zip(NAMES, self.flats, strict=True)),
            omega=self.step + 0.5,
            boosted_at=1,
            last=self.last,
            optimizer_step=self.step,
        )

    def commit(self, step: int, attempt: int = 0) -> None:
        self.step, self.last = step, commit_of(step, attempt)
        self.world.run(self.exchanges, self.exchanges.compute(partial(self.apply, step)))
        if self.step == step:
            self.sender.committed(self.state().id)

    def apply(self, step: int) -> None:
        for flat, new in zip(self.flats, values_at(step, self.lineage), strict=True):
            flat.copy_(new)

    def on_message(self, holder: str, message: pb.Message) -> None:
        self.world.unanswered[self.name, holder] -= message.kept.received
        self.sender.on_kept(holder, message.kept)


class World(Network):
    """A network of nodes that send copies, and of the holders `h` and `i`."""

    def __init__(
        self,
        silence: float = 10.0,
        holders: tuple[str, ...] = ("h",),
        paced: bool = False,
        **snapshot: Any,
    ) -> None:
        super().__init__(latency=0.0, ordered=True)
        section = SnapshotSection(**{"mbps": 1e6, "codec": "none", **snapshot})
        self.outgoing = OutgoingCopies.snapshots(STAGE, LAYOUT, section, RECENT if paced else None)
        self.silence = silence
        self.accused: list[tuple[str, Cause]] = []
        self.paces: list[tuple[str, bool, int]] = []  # holder, kept, step
        self.unanswered: Counter[tuple[str, str]] = Counter()  # frames
        self.trainings: dict[str, Training] = {}
        self.training = self.train("s")
        self.sender = self.training.sender
        self.computes = {name: Thread(self) for name in ("h", "i")}
        self.exchanges = {name: self.new(self.computes[name]) for name in ("h", "i")}
        self.holders = {
            name: CopyHolder(
                self.exchanges[name],
                {("snapshot", STAGE): LAYOUT},
                partial(self.send, name),
                lambda node, why, cause: self.accused.append((node, cause)),
            )
            for name in ("h", "i")
        }
        self.nodes |= self.holders
        self.holder = self.holders["h"]
        self.sender.set_holders(holders)

    def train(self, name: str) -> Training:
        training = Training(self, self.outgoing, name, self.silence)
        self.trainings[name] = self.nodes[name] = training
        return training

    # --- links

    def send(self, source: str, target: str, item: Item) -> bool:
        if (is_sent := super().send(source, target, item)) and isinstance(item, Frame):
            self.unanswered[source, target] += 1
            assert self.unanswered[source, target] <= copies.OUTSTANDING
        return is_sent

    @property
    def frames(self) -> list[Frame]:
        return [sent.item for sent in self.sent if isinstance(sent.item, Frame)]

    @property
    def kept(self) -> list[pb.Kept]:
        return [sent.item.kept for sent in self.sent if isinstance(sent.item, pb.Message)]

    def lose_link(self, a: str, b: str) -> None:
        """Break the link: what is in transit on it is lost, and both ends are told."""
        self.in_flight = [sent for sent in self.in_flight if {*sent[1:3]} != {a, b}]
        self.unanswered[a, b] = 0
        self.trainings[a].sender.on_peer_lost(b, "reset")
        self.holders[b].on_peer_lost(a)

    # --- time

    def settle(self) -> None:
        """Run until no node has anything to do. Raise the error of a task that failed."""
        super().settle()
        for error in self.crashes:
            raise error

    def moment(self) -> None:
        """Run all that happens within a second."""
        self.sleep(1.0)

    def commit(self, step: int, attempt: int = 0) -> None:
        """Commit the step at the sender and at all holders."""
        self.training.commit(step, attempt)
        for holder in self.holders.values():
            holder.committed(having(step, attempt))

    def commits(self, *steps: int) -> None:
        """Commit each step at all nodes, and run until none has anything to do."""
        for step in steps:
            self.commit(step)
            self.settle()

    def resume(self) -> None:
        """Deliver what was held back, and run until no node has anything to do."""
        self.release()
        self.settle()

    # --- what is held

    @property
    def state(self) -> StageState:
        """The state in the snapshot that `h` holds."""
        state = self.holder.state("snapshot", STAGE)
        assert state is not None
        return state

    def step_held(self, holder: str = "h") -> int | None:
        state = self.holders[holder].state("snapshot", STAGE)
        holdings = self.holders[holder].holdings()
        for holding in holdings:
            assert state is not None
            assert (holding.kind, holding.stage, holding.step) == ("snapshot", STAGE, state.id.step)
            assert holding.made == state.last.ballot
        assert len(holdings) == (state is not None)
        return state.id.step if state else None

    def assert_true(self, holder: str = "h", exact: bool = True) -> None:
        """Check that each block held is that of the step it claims, and that this is committed."""
        held = self.holders[holder]._held.get(("snapshot", STAGE))
        if held is None:
            return
        assert held.header.age <= self.holders[holder]._applied
        steps = held.state.taken
        assert int(steps.max()) <= held.header.step
        for step in set(steps.tolist()) - {-1} if exact else ():
            blocks = (steps == step).nonzero().flatten()
            true = values_at(step, held.header.lineage)
            for flat, own in zip(held.state.tensors, true, strict=False):
                for x, y in zip(
                    LAYOUT.gather(flat, blocks), LAYOUT.gather(own, blocks), strict=True
                ):
                    assert torch.equal(x, y)

    def assert_agreed(self, sender: CopySender, holder: str = "h") -> None:
        """Check that the holder has, bit for bit, what the sender believes it has."""
        held = self.holders[holder]._held["snapshot", STAGE].state
        sent: Any = sender._recipients[holder].sent
        taken = sent.taken >= 0
        assert torch.equal(held.taken[taken], sent.taken[taken])
        blocks = taken.nonzero().flatten()
        for x, y in zip(
            LAYOUT.gather(held.tensors[0], blocks), LAYOUT.gather(sent.sent, blocks), strict=True
        ):
            assert torch.equal(x, y)


# Slow links


@pytest.mark.parametrize("paced", [True, False])
def test_a_slow_link_gets_a_trial_in_fifty_steps_until_it_is_fast_again(paced: bool) -> None:
    world = World(paced=paced, fraction=0.125, period=1)

    def train(steps: int) -> None:
        for _ in range(steps):
            world.commits(world.training.step + 1)

    def slow(steps: int) -> None:
        """Hold an update back for so many steps."""
        world.held = True
        for _ in range(steps):
            world.commit(world.training.step + 1)
        world.moment()
        world.resume()

    train(10)
    assert world.paces == []
    for _ in range(3):
        slow(40)
    assert world.paces == [("h", False, 130)] * paced
    slow(40)  # the trial of step 141 is slow, too
    before = len(world.kept)
    train(100)
    updates = [kept.step for kept in world.kept[before:] if not kept.received]
    assert world.paces[1:] == [("h", True, 191)] * paced
    assert updates == [*range(191 if paced else 171, 271)]


def test_a_new_holders_first_updates_do_not_make_a_link_seem_slow() -> None:
    """They have three times as many rows as later ones."""
    world = World(paced=True, fraction=1 / 26, period=1, mbps=8e-6 * 500)
    steps = []
    for step in range(1, 61):
        world.commit(step)
        world.moment()
        steps.append(world.step_held())
    assert world.paces == []
    first = next(step for step in steps if step is not None)
    assert 5 < first < 50, "an eighth of the rows takes several steps"
    assert steps[-1] is not None and steps[-1] > 55


# Copies


def test_a_copy_comes_back_exactly_with_all_that_belongs_to_it() -> None:
    world = World(fraction=1.0, period=1)
    world.commits(1)
    state = world.state
    own = world.training.state()
    assert list(state.tensors) == list(NAMES)
    assert torch.equal(state.tensors["weights"], own.tensors["weights"])
    assert (state.id, state.omega, state.boosted_at) == (own.id, 1.5, 1)
    assert state.last == own.last
    assert state.optimizer_step == 1
    (held,) = world.holder.holdings()
    assert (held.oldest_step, held.mean_step, held.perturbation) == (1, 1.0, 0.0)
    size = 4 * LAYOUT.values
    assert world.sender.bytes_sent > size
    assert world.sender.memory_bytes >= size
    assert world.holder.memory_bytes >= size


def test_copies_go_to_one_holder_at_a_time() -> None:
    world = World(fraction=1.0, period=1, holders=("h", "i"))
    for step in (1, 2):
        world.commits(step)
        assert (world.step_held("h"), world.step_held("i")) == (step, step)
    runs = [
        to for to, _ in itertools.groupby(sent.target for sent in world.sent if sent.source == "s")
    ]
    assert runs == ["h", "i", "h", "i"]


def test_a_slow_transfer_is_followed_by_that_of_the_newest_step() -> None:
    world = World(fraction=1.0, period=1)
    world.held = True
    for step in range(1, 6):
        world.commit(step)
    world.moment()
    assert len(world.frames) == copies.OUTSTANDING
    world.resume()
    steps = [frame.fields["step"] for frame in world.frames]
    assert [step for step, _ in itertools.groupby(steps)] == [1, 5]
    assert world.step_held() == 5
    world.assert_true()


@pytest.mark.parametrize(("attempt", "held"), [(2, 2), (9, 1)])
def test_a_holder_has_the_copy_before_until_its_node_has_made_the_same_commit(
    attempt: int, held: int
) -> None:
    world = World(fraction=1.0, period=1)
    world.commits(1)
    world.training.commit(2)
    world.moment()
    assert world.step_held() == 1
    assert not [k for k in world.kept if k.step == 2 and not k.received]
    world.holder.committed(having(2, attempt))
    world.settle()
    assert world.step_held() == held
    assert ("made by another commit" in world.kept[-1].error) == (held == 1)
    world.assert_true()


def test_a_holder_that_went_past_a_step_does_not_trust_its_update() -> None:
    world = World(fraction=1.0, period=1)
    world.training.commit(2)
    world.moment()
    world.holder.committed(having(3))  # it has fetched this state, and missed the commit of step 2
    world.settle()
    assert world.step_held() is None
    world.training.commit(3)
    world.settle()
    assert world.step_held() == 3


def test_a_late_copy_of_the_same_commits_counts_at_once() -> None:
    world = World(fraction=1.0, period=1)
    for step in (1, 2, 3):
        world.holder.committed(having(step))
    world.training.commit(2)
    world.settle()
    assert world.step_held() == 2


def test_a_state_that_was_rebuilt_from_an_older_one_waits_for_its_next_commit() -> None:
    world = World(fraction=1.0, period=1)
    world.training.step, world.training.last = 2, commit_of(1)
    world.sender.committed(world.training.state().id)
    world.settle()
    assert world.sent == []
    world.commits(3)
    assert world.step_held() == 3


# Snapshots


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_snapshot_is_whole_at_first_and_then_renewed_by_parts(codec: str) -> None:
    world = World(fraction=0.25, period=8, codec=codec, moments=True)
    for step in range(1, 9):
        world.commits(step)
        assert world.step_held() == step - (step + 1) % 2
        world.assert_true(exact=codec == "none")
        world.assert_agreed(world.sender)
    (held,) = world.holder.holdings()
    assert held.oldest_step in (1, 3)  # blocks that changed most were sent first
    assert held.oldest_step < held.mean_step < held.step == 7
    state = world.state
    assert (state.optimizer_step, state.last) == (7, commit_of(7))
    distance = (values_at(7, 0)[0].double() - state.tensors["weights"].double()).norm().item()
    assert held.perturbation == pytest.approx(distance, rel=1e-6)


def test_a_lost_update_counts_as_never_sent_and_goes_first() -> None:
    world = World(fraction=0.25, period=4)
    world.commits(1)
    world.held = True
    idle = world.sender.memory_bytes
    world.commit(2)
    world.moment()
    assert world.sender.memory_bytes > idle
    world.release()
    for _ in range(5):
        world.sleep(0)
    before = world.holder.memory_bytes
    world.lose_link("s", "h")
    assert world.holder.memory_bytes < before, "what came by halves is forgotten"
    world.settle()
    sent: Any = world.sender._recipients["h"].sent
    lost = sent.taken == -1
    assert set(sent.taken[~lost].tolist()) == {1} and lost.sum() == -(-LAYOUT.blocks // 4)
    world.commits(3)
    world.assert_true()
    world.assert_agreed(world.sender)
    assert world.step_held() == 3
    assert set(sent.taken[lost].tolist()) == {3} and set(sent.taken[~lost].tolist()) == {1}


def test_a_new_holder_starts_with_nothing() -> None:
    world = World(fraction=0.5, period=2)
    world.commits(1, 2)
    assert world.step_held("h") == 2
    world.sender.set_holders(["i"])
    assert world.step_held("i") is None
    world.settle()
    assert world.step_held("i") == 2
    assert world.step_held("h") == 2
    world.assert_true("i")


def test_another_sender_overlays_what_the_first_had_sent() -> None:
    world = World(fraction=0.25, period=4)
    world.commits(*range(1, 5))
    assert world.step_held() == 4
    world.sender.set_holders([])
    second = world.train("t")
    second.sender.set_holders(["h"])
    second.commit(5)
    world.holder.committed(having(5))
    world.settle()
    assert world.step_held() == 5
    world.assert_true()
    world.assert_agreed(second.sender)
    (held,) = world.holder.holdings()
    assert (held.oldest_step, held.mean_step) == (5, 5.0)


def test_a_round_that_is_not_through_postpones_the_next() -> None:
    world = World(fraction=0.5, period=4)  # an update every 2 steps
    world.commits(1)
    world.held = True
    for step in range(2, 7):
        world.commit(step)
        world.moment()
    assert {frame.fields["step"] for frame in world.frames} == {1, 3}
    world.resume()
    assert {frame.fields["step"] for frame in world.frames} == {1, 3, 6}
    world.commits(7, 8)
    assert {frame.fields["step"] for frame in world.frames} == {1, 3, 6, 8}


def test_a_run_that_goes_back_to_its_saves_starts_its_snapshots_again() -> None:
    world = World(fraction=0.5, period=2)
    world.commits(1, 2, 3)
    assert world.step_held() == 3
    world.training.lineage = 1
    for step in (2, 3):
        world.training.commit(step, attempt=50 + step)
        world.holder.committed(having(step, 50 + step, lineage=1))
        assert world.step_held() == (None if step == 2 else 2)
        world.settle()
    (holding,) = world.holder.holdings()
    assert (holding.step, holding.lineage) == (3, 1)
    world.assert_true()


# What goes wrong


def test_a_silent_holder_is_named_and_queues_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(fraction=1.0, period=1)
    world.held = True
    world.commits(*range(1, 5))
    assert len(world.frames) == copies.OUTSTANDING
    world.release()
    world.commits(5)
    assert world.step_held() == 5

    messages = [record.getMessage() for record in caplog.records]
    assert any("did not reach h: no answer for 10 s" in text for text in messages)


def test_a_holder_whose_tasks_are_long_may_take_three_steps_to_confirm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(fraction=1.0, period=1)
    world.computes["h"].held = True
    world.commits(1, 2, 3)
    world.sleep(100.0)
    assert world.step_held() is None
    world.computes["h"].release()
    world.settle()
    assert world.step_held() == 3
    assert "did not reach" not in caplog.text

    world.computes["h"].held = True
    world.commits(4, 5, 6)
    assert "did not reach" not in caplog.text
    world.commits(7)
    assert "did not reach h: no answer for 10 s (the confirmation)" in caplog.text


def test_without_a_link_the_next_commit_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World(fraction=1.0, period=1)
    del world.nodes["h"]
    world.commits(1)
    assert world.sent == []
    world.nodes["h"] = world.holder
    world.commits(2)
    assert world.step_held() == 2

    assert "did not reach h: there is no link to it" in caplog.text


def test_a_holder_that_holds_no_longer_is_left_alone() -> None:
    world = World(fraction=1.0, period=1)
    world.held = True
    world.commit(1)
    world.moment()
    world.sender.set_holders([])
    world.resume()
    world.commits(2)
    assert {frame.fields["step"] for frame in world.frames} == {1}
    assert world.step_held() is None


def test_a_damaged_update_changes_nothing() -> None:
    world = World(fraction=1.0, period=1)
    world.commits(1)
    world.faults["s"] = lambda frame: damaged(frame) if frame.fields["offset"] == 600 else frame
    before = world.holder.memory_bytes
    world.commits(2)
    assert world.step_held() == 1
    assert world.holder.memory_bytes == before
    assert any("arrived damaged" in kept.error for kept in world.kept)
    assert world.accused == [("s", CHECKSUM)]
    world.assert_true()
    world.faults.clear()
    world.commits(3)
    assert world.step_held() == 3
    world.assert_true()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stage": 9}, "no snapshot of stage 9 is held here"),
        ({"kind": "deposit"}, "no deposit of stage 2"),
        ({"size": 1 << 40}, "bytes"),
        ({"size": 0}, "bytes"),
        ({"commit": 1 << 30}, "for its commit"),
        ({"commit": 0}, "its commit is of step 0"),
        ({"step": -1}, "its step is -1, not int"),
        ({"step": "1"}, "its step is '1', not int"),
        ({"step": 2}, "its commit is of step 1"),
        ({"lineage": True}, "its lineage is True"),
        ({"omega": math.nan}, "squared norm"),
        ({"omega": -1.0}, "squared norm"),
        ({"codec": "zip"}, "codec 'zip'"),
        ({"codec": "int8"}, "bytes are"),
        ({"tensors": 2}, "2 tensors"),
        ({"tensors": 1}, "bytes are not"),
        ({"blocks": 0}, "0 blocks"),
        ({"blocks": 1 << 40}, "blocks, where the stage has"),
        ({"transfer": None}, "its transfer is None"),
        ({"offset": 4}, "bytes at 4"),
        ({"offset": None}, "bytes at None"),
        ({"offset": True}, "bytes at True"),
    ],
)
def test_updates_that_cannot_be_are_refused(changes: dict[str, Any], why: str) -> None:
    world = World(fraction=1.0, period=1)
    world.faults["s"] = with_fields(**changes)
    world.commit(1)
    world.moment()
    assert any(why in kept.error for kept in world.kept), [k.error for k in world.kept]
    assert world.step_held() is None
    assert world.holder.memory_bytes < 10_000
    late = changes.keys() & {"offset", "stage", "kind"}
    assert {node for node, _ in world.accused} == (set() if late else {"s"})
    world.settle()
    world.faults.clear()
    world.commits(2, 3, 4)  # an answer that can't be attributed is waited for in vain
    assert world.step_held() == 4
    world.assert_true()


def test_values_that_are_not_finite_are_refused() -> None:
    world = World(fraction=1.0, period=1)
    world.commits(1)
    world.training.apply = lambda step: world.training.flats[0].fill_(math.inf)  # type: ignore[method-assign]
    world.commits(2)
    assert "aren't finite" in world.kept[-1].error
    assert world.accused == [], "its replicas have the same"
    assert world.step_held() == 1
    world.assert_true()


def test_a_stranger_cannot_spoil_an_update() -> None:
    world = World(fraction=1.0, period=1)
    world.train("x")

    def meddle(frame: Frame) -> Frame:
        if frame.fields["offset"]:
            world.after(0.0, partial(world.arrive, "x", "h", frame))
        return frame

    world.faults["s"] = meddle
    world.commits(1)
    assert world.step_held() == 1
    world.assert_true()
    errors = [kept.error for kept in world.kept if kept.error]
    assert len(errors) == len(world.frames) - 1
    assert all("an unknown update" in error for error in errors)
    assert world.accused == []


def test_an_update_that_is_late_does_not_put_blocks_back() -> None:
    world = World(fraction=1.0, period=1)
    world.held = True
    world.commit(1)
    world.moment()
    second = world.train("t")
    world.commit(2)
    world.held = False
    second.sender.set_holders(["h"])
    second.commit(2)
    world.moment()
    assert world.step_held() == 2
    for _ in range(copies.OUTSTANDING):
        world.deliver("s", "h")
    world.moment()
    assert "a newer one is held already" in {kept.error for kept in world.kept}
    assert world.step_held() == 2
    world.assert_true()
    world.settle()


def test_an_update_of_a_past_that_is_given_up_meanwhile_does_not_count() -> None:
    world = World(fraction=1.0, period=1)
    world.computes["h"].held = True
    world.commit(5)
    world.moment()
    assert world.computes["h"].posted
    world.holder.committed(having(3, 70, lineage=1))
    world.computes["h"].release()
    world.settle()
    assert world.kept[-1].error
    assert world.step_held() is None


# Whatever happens


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["none", "int8"]),
)
def test_what_is_held_is_true_whatever_happens(seed: int, codec: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "FRAME", 2000)
        live_through_it(seed, codec)


def live_through_it(seed: int, codec: str) -> None:
    timing = random.Random(seed)
    world = World(
        fraction=timing.choice([0.2, 0.5, 1.0]),
        period=timing.choice([1, 4]),
        codec=codec,
    )
    training, committed, step = world.training, {"h": 0, "i": 0}, 0
    for _ in range(60):
        match timing.randrange(8):
            case 0 | 1 if all(own >= step for own in committed.values()):
                step += 1
                training.commit(step)
            case 2 | 3:
                for holder in committed:
                    if committed[holder] < step and timing.random() < 0.7:
                        committed[holder] = step
                        world.holders[holder].committed(having(step))
            case 4:
                world.lose_link(training.name, timing.choice("hi"))
            case 5:
                training.sender.set_holders(timing.sample("hi", timing.randrange(3)))
            case 6 if timing.random() < 0.3:
                training.sender.set_holders([])
                training = world.train(f"s{len(world.trainings)}")
                training.sender.set_holders(["h"])
            case 7:
                world.held = not world.held
                if not world.held:
                    world.release()
        for _ in range(timing.randrange(20)):
            world.sleep(timing.choice([0, 0, 1e-9, 1e-6]))
        for holder in "hi":
            world.assert_true(holder, exact=codec == "none")
    world.release()
    for holder in committed:
        world.holders[holder].committed(having(step))
    training.sender.set_holders(["h", "i"])
    world.settle()
    for _ in range(12):
        step += 1
        training.commit(step)
        for holder in world.holders.values():
            holder.committed(having(step))
        world.settle()
    for holder in "hi":
        assert step - 4 <= (world.step_held(holder) or 0) <= step
        world.assert_true(holder, exact=codec == "none")
        check_at_rest(training.sender)
        world.assert_agreed(training.sender, holder)


def test_what_is_overlaid_counts_before_those_who_ask_then_can_look() -> None:
    world = World(fraction=1.0, period=1)
    world.commits(1)
    world.computes["h"].held = True
    world.commit(2)
    world.moment()
    (_,) = world.computes["h"].posted  # the check of the update
    world.computes["h"].work()
    world.moment()
    assert world.step_held() == 2
    state = world.state
    weights = state.tensors["weights"]
    assert torch.equal(weights, values_at(1, 0)[0])
    source = world.exchanges["h"]
    seen = source.start(source.compute(weights.clone))
    world.computes["h"].release()
    assert torch.equal(world.outcome(seen), values_at(2, 0)[0])
    world.settle()


# The budget


@settings(deadline=None)
@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), min_size=1, max_size=20),
)
def test_no_time_sees_more_than_its_share_and_one_item(
    rate: float, items: list[tuple[int, float]]
) -> None:
    budget, now, left = Allowance(rate), 0.0, []
    for size, pause in items:
        now += pause
        now += budget.wait(now)
        budget.spend(size, now)
        left.append((now, size))
    for first in range(len(left)):
        for last in range(first, len(left)):
            seconds = left[last][0] - left[first][0]
            total = sum(size for _, size in left[first:last])  # all but the last item
            assert total <= rate * seconds * (1 + 1e-6) + 1e-3


def test_a_budget_does_not_hold_back_more_than_it_must() -> None:
    budget, now = Allowance(100.0), 0.0
    for _ in range(10):
        now += budget.wait(now)
        budget.spend(50, now)
    assert now == pytest.approx(9 * 0.5)


def test_a_snapshot_leaves_no_faster_than_its_budget() -> None:
    world = World(fraction=1.0, period=1, mbps=0.008)  # 1 kB/s
    world.commits(1, 2, 3)
    times = [(sent.time, sent.item.size) for sent in world.sent if isinstance(sent.item, Frame)]
    assert all(size <= 200 for _, size in times)
    for first in range(len(times)):
        for last in range(first, len(times)):
            total = sum(size for _, size in times[first:last])
            assert total <= 1000 * (times[last][0] - times[first][0]) + 1e-6
    assert world.step_held() == 3
    seconds = times[-1][0]
    assert world.sender.bytes_sent <= 1000 * seconds + 800
    assert world.sender.bytes_sent >= 0.9 * 1000 * seconds
