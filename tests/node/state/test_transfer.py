from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import CHECKSUM, NUMBERS, SHAPE, Cause
from planaria.node.ports import Compute, Priority
from planaria.node.state import transfer
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import (
    SHARD,
    Delivery,
    Manifest,
    ShardPlan,
    StateClient,
    StateServer,
    StateShard,
    WantedState,
    cut_into_shards,
    pack_tensors,
)
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange
from planaria.node.wire.frame_format import Frame, WireError
from planaria.node.wire.tensors import decode, encode
from tests.harness import network
from tests.harness.network import AtOnce, Item, Nodes, Thread, damaged

SOURCES = ["a", "b", "c"]
STAGE, STEP = 4, 7
AGE = Age(1, STEP)
SHARD_SIZE = 64
LENGTH = 401  # values a tensor: no multiple of a shard
GONE = "(lost: connection reset|there is no link to it)"
"""The complaint about a lost source, which depends on when the source is asked."""


def state(seed: int = 0, step: int = STEP, length: int = LENGTH) -> StageState:
    generator = torch.Generator().manual_seed(seed)
    names = ["weights", "first_moment", "second_moment"]
    last = pb.Commit(step=step, ballot=pb.Ballot(view=2, attempt=9), loss=1.5, tokens=64)
    return StageState(
        id=StateId.after(last, STAGE, AGE.lineage, step),
        tensors={name: torch.randn(length, generator=generator) for name in names},
        omega=2.5,
        boosted_at=3,
        last=last,
        optimizer_step=6,
    )


class Network(network.Network):
    """A network of a joiner and sources. What sources send arrives in any order."""

    def __init__(self, seed: int = 0, sources: list[str] = SOURCES) -> None:
        super().__init__(seed, latency=0.0)
        self.accused: list[tuple[str, Cause]] = []
        self.due = dict.fromkeys(state().tensors, LENGTH)
        self.states: dict[str, StageState | None] = {source: state() for source in sources}
        self.nodes |= {source: self._server(source) for source in sources}
        self.client = self.joiner(AtOnce())

    def joiner(self, compute: Compute) -> StateClient:
        options = {"shard_size": SHARD_SIZE, "silence": 10.0}
        send = partial(self.send, "joiner")
        client = StateClient(self.new(compute), tensors, send, self._accuse, **options)
        self.nodes["joiner"] = client
        return client

    def _accuse(self, source: str, why: str, cause: Cause) -> None:
        assert source in why
        self.accused.append((source, cause))

    def _server(self, source: str) -> StateServer:
        send = partial(self.send, source)
        return StateServer(self.new(), tensors, send, lambda *_: self.states[source])

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Source and offset of each shard requested so far."""
        messages = [sent for sent in self.sent if isinstance(sent.item, pb.Message)]
        return [
            (sent.target, sent.item.shard_request.offset)
            for sent in messages
            if sent.item.HasField("shard_request")
        ]

    @property
    def sources(self) -> list[str]:
        return [name for name in self.nodes if name != "joiner"]

    def start(
        self,
        sources: list[str] = SOURCES,
        optimizer: bool = True,
        deadline: float = 60.0,
        on_progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Exchange[Delivery]:
        wanted = WantedState(STAGE, AGE, self.due, optimizer, **options)
        return self.client.exchanges.start(
            self.client.fetch(wanted, sources, deadline, on_progress)
        )

    def fetch(self, *arguments: Any, **options: Any) -> Delivery:
        """Start a transfer, run it to its end and return what it delivers."""
        delivery = self.outcome(self.start(*arguments, **options))
        self.settle()
        return delivery


def assert_equal(delivery: Delivery, expected: StageState, optimizer: bool = True) -> None:
    names = list(expected.tensors)[: 3 if optimizer else 1]
    assert list(delivery.state.tensors) == names
    for name in names:
        assert torch.equal(delivery.state.tensors[name], expected.tensors[name])
    assert delivery.bytes == delivery.state.bytes == sum(delivery.served.values())
    assert delivery.bytes == 4 * LENGTH * len(names)
    assert replace(delivery.state, tensors={}) == replace(expected, tensors={})


def shards_of(state: StageState) -> list[StateShard]:
    return cut_into_shards([tensor.nbytes for tensor in state.tensors.values()], SHARD_SIZE)


# Whole transfers


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_state_comes_bit_equal_from_all_sources(count: int, optimizer: bool) -> None:
    network = Network(seed=count)
    progress: list[int] = []
    delivery = network.fetch(SOURCES[:count], optimizer, on_progress=progress.append)
    assert_equal(delivery, state(), optimizer)
    assert sum(size > 0 for size in delivery.served.values()) == count
    assert progress == sorted(set(progress))
    assert progress[-1] == delivery.bytes
    offsets = [offset for _, offset in network.asked]
    assert offsets == [shard.offset for shard in shards_of(delivery.state)], "weights come first"


def test_of_many_sources_a_few_are_asked_and_others_in_the_place_of_those_that_fail() -> None:
    """Sources with a link are asked first."""
    names = [f"s{number:02}" for number in range(30)]
    network = Network(sources=names)
    network.client.linked = lambda source: source >= "s25"
    assert_equal(network.fetch(names), state())
    asked = {source for source, _ in network.asked}
    assert asked <= {*names[:3], *names[25:]} and len(asked) == 8
    network.sent.clear()
    for name in names[2:]:
        network.states[name] = None
    assert_equal(network.fetch(names), state())
    assert {source for source, _ in network.asked} == {"s00", "s01"}


def unread(whole: StageState, read: Callable[[int, int], torch.Tensor]) -> StageState:
    """Return a state whose weights are not in memory: `read` reads them."""
    weights = whole.tensors["weights"].to("meta")
    return replace(whole, tensors={"weights": weights}, read=read)


def test_weights_that_are_not_in_memory_are_read_a_shard_at_a_time() -> None:
    network, whole, read = Network(), state(), []

    def part(start: int, stop: int) -> torch.Tensor:
        read.append((start, stop))
        return whole.tensors["weights"][start:stop]

    network.states["a"] = unread(whole, part)
    delivery = network.fetch(["a"], optimizer=False)
    assert torch.equal(delivery.state.tensors["weights"], whole.tensors["weights"])
    shards = cut_into_shards([4 * LENGTH], SHARD_SIZE)
    assert sorted(read) == [(s.offset // 4, (s.offset + s.size) // 4) for s in shards]


def test_weights_that_cannot_be_read_are_refused_and_others_serve() -> None:
    def part(start: int, stop: int) -> torch.Tensor:
        raise ValueError("model.safetensors ends before its tensors do")

    network = Network()
    network.states["a"] = unread(state(), part)
    with pytest.raises(ComplaintError, match="safetensors ends before"):
        network.fetch(["a"], optimizer=False)
    assert_equal(network.fetch(["a", "b"], optimizer=False), state(), optimizer=False)
    assert not network.accused


def test_special_values_keep_their_bits() -> None:
    network = Network()
    bits = torch.tensor([0x7FC00001, 0x7F800000, -(2**31), 1], dtype=torch.int32)
    served = state()
    odd = {"weights": bits.view(torch.float32)}
    network.due = {"weights": 4}
    network.states = dict.fromkeys(SOURCES, replace(served, tensors=odd))
    delivery = network.fetch(optimizer=False)
    assert torch.equal(delivery.state.tensors["weights"].view(torch.int32), bits)


def test_an_empty_state_takes_no_shards() -> None:
    network = Network()
    network.states = dict.fromkeys(SOURCES, state(length=0))
    network.due = dict.fromkeys(network.due, 0)
    delivery = network.fetch()
    assert delivery.bytes == 0
    assert delivery.state.tensors["weights"].shape == (0,)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (7, 100), (16, 32), (100, LENGTH - 100)])
def test_a_part_of_the_weights_is_had_by_itself(first: int, count: int) -> None:
    network = Network()
    delivery = network.fetch(optimizer=False, part=(first, count))
    wanted = state().tensors["weights"][first : first + count]
    assert torch.equal(delivery.state.tensors["weights"], wanted)
    assert delivery.bytes == delivery.state.bytes == sum(delivery.served.values()) == 4 * count
    offsets = [offset for _, offset in network.asked]
    assert sorted(offsets) == list(range(4 * first, 4 * (first + count), SHARD_SIZE))


def test_two_transfers_at_a_time() -> None:
    network = Network(sources=["a", "b", "c", "d"])
    network.states["c"] = network.states["d"] = state(seed=1)

    before, after = network.start(["a", "b"]), network.start(["c", "d"])
    assert_equal(network.outcome(before), state())
    assert_equal(network.outcome(after), state(seed=1))


# Faults


def frames_from(number: int, fault: Callable[[Frame], Item | None]) -> Callable[[Item], Any]:
    """Return a change of answers that applies `fault` to frames after the first `number`."""
    seen = 0

    def change(answer: Item) -> Item | None:
        nonlocal seen
        if not isinstance(answer, Frame):
            return answer
        seen += 1
        return fault(answer) if seen > number else answer

    return change


def too_short(frame: Frame) -> Frame:
    descriptors, payload = encode([torch.zeros(3)], "none")
    return Frame(frame.kind, frame.ballot, frame.fields, descriptors, payload)


def lossy(frame: Frame) -> Frame:
    descriptors, payload = encode([torch.zeros(frame.fields["size"] // 4)], "bf16")
    return Frame(frame.kind, frame.ballot, frame.fields, descriptors, payload)


def refuse(frame: Frame) -> pb.Message:
    refusal = pb.ShardRefusal(
        transfer=frame.fields["transfer"], offset=frame.fields["offset"], reason="not now " * 100
    )
    return pb.Message(shard_refusal=refusal)


FAULTS: dict[str, Callable[[Frame], Item | None]] = {
    "arrived damaged": damaged,
    "its shard has 12 bytes": too_short,
    "exact float32": lossy,
    "not now": refuse,
    "silent for 10 s": lambda frame: None,
}


WRONG = {"arrived damaged": CHECKSUM, "its shard has 12 bytes": SHAPE, "exact float32": SHAPE}
"""Cause that a source is accused of, by fault."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_source_fails_others_serve_and_it_is_accused(
    fault: str, after: int, seed: int
) -> None:
    network = Network(seed)
    network.faults["b"] = frames_from(after, FAULTS[fault])
    assert_equal(network.fetch(), state())
    assert sum(source == "b" for source, _ in network.asked) <= after + 4  # two at a time
    assert network.accused == ([("b", WRONG[fault])] if fault in WRONG else [])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_nothing_but_a_request(fault: str) -> None:
    network = Network(sources=["a"])
    left = [FAULTS[fault]]
    network.faults["a"] = frames_from(3, lambda frame: left.pop()(frame) if left else frame)
    assert_equal(network.fetch(["a"]), state())


@pytest.mark.parametrize("fault", FAULTS)
def test_when_all_fail_the_error_says_what_each_of_them_said(fault: str) -> None:
    network = Network()
    network.faults = {source: frames_from(2, FAULTS[fault]) for source in SOURCES}
    with pytest.raises(ComplaintError) as caught:
        network.fetch()
    for source in SOURCES:
        assert f"{source}: " in str(caught.value)
    assert str(caught.value).count(fault) >= 3
    assert len(str(caught.value)) < 3000
    accused = SOURCES if fault in WRONG else []
    assert sorted(network.accused) == [(source, WRONG[fault]) for source in accused]


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_a_source_that_dies_half_way(after: int) -> None:
    network = Network(seed=after)
    network.faults["b"] = frames_from(after, lambda frame: network.lose("b"))  # type: ignore[func-returns-value]
    delivery = network.fetch()
    assert_equal(delivery, state())
    assert delivery.served["b"] <= after * SHARD_SIZE


def test_sources_that_cannot_be_reached_or_have_another_step() -> None:
    network = Network()
    network.states |= {"b": state(step=8), "c": None}
    assert network.fetch(["nowhere", *SOURCES]).served.keys() == {"nowhere", *SOURCES}
    with pytest.raises(ComplaintError) as caught:
        network.fetch(["nowhere", "b", "c"])
    for reason in (
        "the state of step 7 can't be fetched: ",
        "nowhere: there is no link to it",
        "b: step 7 is requested, but step 8 is committed here",
        "c: this node has no state",
    ):
        assert reason in str(caught.value)
    with pytest.raises(ComplaintError, match="no source is named"):
        network.fetch([])


def test_a_source_that_commits_meanwhile_refuses() -> None:
    network = Network()

    def commit(frame: Frame) -> Frame:
        network.states["b"] = state(seed=5, step=8)
        return frame

    network.faults["b"] = frames_from(2, commit)
    assert_equal(network.fetch(), state())


@pytest.mark.parametrize("agrees", [True, False])
def test_a_late_manifest_has_to_agree_with_the_first(agrees: bool) -> None:
    network = Network()
    network.states["b"] = state() if agrees else replace(state(), optimizer_step=5)
    held: list[Item] = []
    network.faults["b"] = held.append  # type: ignore[assignment]

    def release(_: int) -> None:
        if held:
            del network.faults["b"]
            network.arrive("b", "joiner", held.pop())

    delivery = network.fetch(on_progress=release)
    assert_equal(delivery, state())
    assert (delivery.served["b"] > 0) == agrees
    assert network.accused == [], "nobody knows which of them is wrong"


def test_a_silent_source_does_not_hold_up_the_others() -> None:
    network = Network()
    network.faults["b"] = lambda answer: None
    delivery = network.outcome(network.start())
    assert_equal(delivery, state())
    assert delivery.served["b"] == 0
    assert network.now == 0.0


def test_a_busy_joiner_does_not_take_its_sources_for_silent() -> None:
    network = Network()

    class Busy(AtOnce):
        def post(self, work: Any, then: Any, priority: Priority) -> None:
            post = partial(super().post, work, then, priority)
            network.after(20.0, post)

    network.client = network.joiner(Busy())
    delivery = network.fetch(deadline=1e6)
    assert_equal(delivery, state())
    assert len(network.asked) == len(shards_of(delivery.state))


@pytest.mark.parametrize("seconds", [25.0, 35.0])
def test_the_only_source_may_have_a_task_that_takes_as_long_as_three_silences(
    seconds: float,
) -> None:
    network = Network(sources=["a"])

    class Busy(AtOnce):
        def post(self, work: Any, then: Any, priority: Priority) -> None:
            network.after(
                max(0.0, seconds - network.now), partial(super().post, work, then, priority)
            )

    send = partial(network.send, "a")
    network.nodes["a"] = StateServer(network.new(Busy()), tensors, send, lambda *_: state())
    if seconds < 30.0:
        assert_equal(network.fetch(["a"]), state())
    else:
        with pytest.raises(ComplaintError, match="a: no manifest in 30 s"):
            network.fetch(["a"])


def test_silence_or_the_deadline_names_who_was_waited_for() -> None:
    network = Network()
    network.faults = dict.fromkeys(SOURCES, lambda answer: None)
    with pytest.raises(ComplaintError, match=r"a: no manifest in 10 s.*c: no manifest in 30 s"):
        network.fetch()
    with pytest.raises(
        ComplaintError, match="has come for 4 s: every manifest missing, waiting for a, b, c"
    ):
        network.fetch(deadline=4.0)
    network.faults = {"a": frames_from(5, lambda frame: None)}
    network.states["b"] = None
    with pytest.raises(
        ComplaintError, match=r"has come for 4 s: \d+ shards missing, waiting for a; b: this node"
    ):
        network.fetch(["a", "b"], deadline=4.0)


def test_a_shard_that_was_not_asked_for_has_no_effect() -> None:
    network = Network()
    sent: list[Frame] = []
    network.faults["b"] = frames_from(0, lambda frame: sent.append(frame) or frame)  # type: ignore[func-returns-value]

    def repeat(_: int) -> None:
        for frame in sent:
            network.arrive("a", "joiner", damaged(frame))
            network.arrive("stranger", "joiner", damaged(frame))
        network.client.on_peer_lost("stranger", "gone")

    delivery = network.fetch(on_progress=repeat)
    assert_equal(delivery, state())
    network.arrive("b", "joiner", sent[0])  # long after the transfer


def test_a_transfer_that_is_given_up_leaves_nothing_behind() -> None:
    network = Network()
    progress: list[int] = []
    exchange = network.start(on_progress=progress.append)
    while not progress:
        assert network.step()
    exchange.cancel()
    before = list(progress)
    assert_equal(network.fetch(), state())
    assert progress == before


# What has come when the last source is lost

DIGEST = b"of both"


def told_of(**changes: Any) -> StageState:
    """Return a state whose source tells its digest."""
    return replace(state(), digest=DIGEST, **changes)


def broken_off(come: int) -> Network:
    """Return a network whose sources were all lost after `come` shards, and are back."""
    network = Network()
    network.states = dict.fromkeys(SOURCES, told_of())
    nodes = dict(network.nodes)

    def count(size: int) -> None:
        if size >= SHARD_SIZE * come - 60:
            for source in network.sources:
                network.lose(source)

    with pytest.raises(ComplaintError, match=GONE):
        network.fetch(on_progress=count)
    network.nodes = nodes
    return network


WEIGHTS = len(cut_into_shards([4 * LENGTH], SHARD_SIZE))
"""Number of shards of the weights."""


def test_weights_that_are_whole_stay_when_their_moments_are_lost() -> None:
    network = Network()
    network.states = dict.fromkeys(SOURCES, told_of())
    sizes: list[int] = []

    def look(size: int) -> None:
        if network.client.weights(STAGE) is not None and network.sources:
            sizes.append(size)
            for source in network.sources:
                network.lose(source)

    with pytest.raises(ComplaintError, match=GONE):
        network.fetch(on_progress=look)
    assert 4 * LENGTH <= sizes[0] < 3 * 4 * LENGTH
    kept = network.client.weights(STAGE)
    assert kept is not None
    assert kept.tensors.keys() == {"weights"}
    assert torch.equal(kept.tensors["weights"], state().tensors["weights"])
    assert (kept.id, kept.omega, kept.last) == (state().id, state().omega, state().last)
    assert kept.optimizer_step == 0, "Adam starts afresh"
    network.client.forget()
    assert network.client.weights(STAGE) is None


@pytest.mark.parametrize("come", [1, WEIGHTS - 2])
def test_weights_that_are_not_whole_are_none(come: int) -> None:
    assert broken_off(come).client.weights(STAGE) is None


@pytest.mark.parametrize("come", [1, WEIGHTS, 2 * WEIGHTS])
def test_nothing_is_fetched_twice_of_the_very_same_state(come: int) -> None:
    network = broken_off(come)
    before, progress = len(network.asked), list[int]()
    delivery = network.fetch(on_progress=progress.append)
    assert_equal(
        replace(delivery, bytes=delivery.state.bytes, served={"": delivery.state.bytes}), told_of()
    )
    again = len(network.asked) - before
    assert again <= len(shards_of(told_of())) - come
    assert delivery.bytes == sum(delivery.served.values()) < delivery.state.bytes
    assert progress[0] > SHARD_SIZE * (come - 1), "what is here counts"


@pytest.mark.parametrize(
    "other",
    [
        replace(state(seed=5), digest=b"another"),
        replace(state(seed=5), digest=b""),
        replace(state(seed=5), digest=DIGEST, optimizer_step=5),
    ],
)
def test_of_another_state_all_is_fetched_anew(other: StageState) -> None:
    network = broken_off(WEIGHTS)
    before = len(network.asked)
    network.states = dict.fromkeys(SOURCES, other)
    delivery = network.fetch()
    assert_equal(delivery, other)
    assert len(network.asked) - before == len(shards_of(other))


def test_what_nobody_tells_the_digest_of_is_not_kept() -> None:
    network = Network()
    network.faults["a"] = frames_from(WEIGHTS + 9, lambda _: network.lose("a"))  # type: ignore[func-returns-value]
    with pytest.raises(ComplaintError):
        network.fetch(["a"])
    assert network.client.weights(STAGE) is None


def test_who_is_given_up_has_its_weights_looked_at_while_they_come() -> None:
    """The driver may ask before the link is known to be lost."""
    network = Network()
    network.states = dict.fromkeys(SOURCES, told_of())
    exchange = network.start()
    while network.client.weights(STAGE) is None:
        assert network.step()
    assert not exchange.done
    exchange.cancel()
    assert network.client.weights(STAGE) is not None


# What comes from outside


def changed_shape(**lengths: int) -> StageState:
    served = state()
    changed = {name: torch.zeros(length) for name, length in lengths.items()}
    return replace(served, tensors={**served.tensors, **changed})


OTHER_STATES = {
    "another stage's": state(length=LENGTH + 1),
    "much larger": changed_shape(weights=LENGTH << 10),
    "short of a moment": changed_shape(second_moment=LENGTH - 1),
    "one tensor more": changed_shape(third_moment=LENGTH),
    "without its optimizer": replace(state(), tensors={"weights": torch.zeros(LENGTH)}),
    "of later figures": replace(state(), optimizer_step=STEP + 1),
}


@pytest.mark.parametrize("kind", ["", "redundant"])
@pytest.mark.parametrize("other", OTHER_STATES.values(), ids=list(OTHER_STATES))
def test_who_offers_another_state_than_the_stages_is_accused_and_others_serve(
    other: StageState, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    empty = tensors.empty
    monkeypatch.setattr(tensors, "empty", lambda values: made.append(values) or empty(values))  # type: ignore[func-returns-value]
    network = Network()
    network.states["a"] = other
    delivery = network.fetch(kind=kind)
    assert_equal(delivery, state())
    assert network.accused == [("a", NUMBERS if other.optimizer_step > STEP else SHAPE)]
    assert max(made) == 3 * LENGTH, "memory is taken for what is due, and for nothing else"
    network.states = dict.fromkeys(SOURCES, other)
    with pytest.raises(ComplaintError, match="a: its manifest"):
        network.fetch(kind=kind)
    assert {source for source, _ in network.accused} == set(SOURCES)


def test_a_snapshot_may_be_of_the_weights_alone_and_starts_adam_afresh() -> None:
    network = Network()
    alone = replace(state(), tensors={"weights": state().tensors["weights"]})
    network.states = dict.fromkeys(SOURCES, alone)
    delivery = network.fetch(kind="snapshot")
    assert (list(delivery.state.tensors), delivery.state.optimizer_step) == (["weights"], 0)
    assert network.accused == []


def test_who_floods_a_transfer_is_accused() -> None:
    network = Network()
    network.client._inboxes._open_limit = 4096

    def flood(frame: Frame) -> Frame:
        for _ in range(60):
            network.arrive("b", "joiner", frame)
        return frame

    network.faults["b"] = frames_from(1, flood)
    assert_equal(network.fetch(), state())
    assert network.accused == [("b", NUMBERS)]


LISTED = pack_tensors({"weights": 8})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"error": "x" * 10_000}, r"^x{200}\.\.\.$"),
        ({"step": 6}, "of step 6, not 7"),
        ({"size": 33}, "33 bytes, but its tensors have 32"),
        ({"tensors": b"\x92"}, "lists b'.x92' instead of weights float32 .8. in codec none"),
        ({"tensors": bytes(1 << 15)}, r"lists .{200}\.\.\. instead of"),
        ({"tensors": LISTED + LISTED}, "instead of weights"),
        ({"tensors": LISTED.replace(b"float32", b"float64")}, "float64"),
        ({"tensors": pack_tensors({"biases": 8})}, "biases.* instead of weights float32 .8."),
        ({"tensors": pack_tensors({"weights": 8, "moment": 8})}, "moment.* instead of weights"),
        ({"tensors": pack_tensors({"weights": 2**40}), "size": 2**42}, "instead of weights"),
        ({"optimizer_step": 8}, "a step later than 7: 8"),
        ({"boosted_at": 2**60}, "a step later than 7"),
        ({"last": pb.Commit(step=9)}, "a step later than 7: 9"),
        ({"omega": float("nan")}, "nan"),
        ({"omega": -1.0}, "-1.0"),
    ],
)
def test_a_manifest_that_cannot_be_right(changes: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {"step": STEP, "tensors": LISTED, "size": 32, "omega": 1.0}
    due = [{"weights": 8}]
    assert Manifest.parse(pb.StateManifest(**fields), STEP, due).tensors == {"weights": 8}
    with pytest.raises(ValueError, match=complaint) as caught:
        Manifest.parse(pb.StateManifest(**fields | changes), STEP, due)
    assert isinstance(caught.value, WireError) == ("error" not in changes), "who refuses is honest"


def test_the_list_of_tensors_stays_as_other_versions_read_it() -> None:
    listed = [["weights", "float32", [8]], ["first_moment", "float32", [8]]]
    assert msgpack.unpackb(pack_tensors({"weights": 8, "first_moment": 8})) == listed


def ask_server(
    *requests: pb.Message,
    served: Callable[[], StageState | None] = state,
    compute: Compute | Thread | None = None,
) -> list[Item]:
    """Return a server's answers to requests that arrive at once."""
    answers: list[Item] = []
    nodes = Nodes()

    def answer(peer: str, message: Item) -> bool:
        answers.append(message)
        return True

    server = StateServer(nodes.new(compute), tensors, answer, lambda *_: served())
    for request in requests:
        server.on_message("joiner", request)
    while nodes.step():
        pass
    return answers


def shard_request(offset: int, size: int, step: int = STEP) -> pb.Message:
    request = pb.ShardRequest(transfer=1, step=step, optimizer=True, offset=offset, size=size)
    return pb.Message(shard_request=request)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (shard_request(0, 0), "not a shard of 4812 bytes"),
        (shard_request(4812, 4), "not a shard of 4812 bytes"),
        (shard_request(4800, 16), "not a shard of 4812 bytes"),
        (shard_request(2**64 - 4, 8), "not a shard of 4812 bytes"),
        (shard_request(0, 2**63), "not a shard of 4812 bytes"),
        (shard_request(2, 4), "not a multiple of 4"),
        (shard_request(0, 6), "not a multiple of 4"),
        (shard_request(0, 4, step=9), "step 9 is requested, but step 7 is committed here"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(request_: pb.Message, complaint: str) -> None:
    (answer,) = ask_server(request_)
    assert isinstance(answer, pb.Message)
    assert complaint in answer.shard_refusal.reason
    assert answer.shard_refusal.offset == request_.shard_request.offset


def test_a_joiner_cannot_have_a_source_work_on_any_number_of_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "REQUESTS", 2)

    stuck = Thread(Nodes())
    stuck.held = True
    assert ask_server(*[shard_request(0, 4)] * 5, compute=stuck) == []
    assert caplog.text.count("dropped a request for state from joiner") == 3


def test_what_waits_to_be_sent_does_not_change_with_the_weights() -> None:
    served = state()
    (frame,) = ask_server(shard_request(0, 16), served=lambda: served)
    assert isinstance(frame, Frame)
    weights = served.tensors["weights"]
    before = weights[:4].clone()
    weights.zero_()
    assert isinstance(frame.payload, tuple)
    (values,) = decode(frame.descriptors, bytearray().join(frame.payload))
    assert torch.equal(values, before)


def test_a_manifest_is_of_one_step_even_when_a_commit_comes_in_between() -> None:
    committed = [state()]

    class Applying(AtOnce):
        def post(self, work: Any, then: Any, priority: Priority) -> None:
            committed.append(state(step=STEP + 1))
            super().post(work, then, priority)

    request = pb.Message(state_request=pb.StateRequest(transfer=1, step=STEP))
    (answer,) = ask_server(request, served=lambda: committed[-1], compute=Applying())
    assert isinstance(answer, pb.Message)
    assert answer.state_manifest.error == "step 7 is requested, but step 8 is committed here"


# The plan


@given(st.integers(0, 400), st.integers(1, 5), st.data())
@settings(max_examples=200, deadline=None)
def test_the_plan_has_each_shard_once_or_runs_out_of_sources(
    size: int, count: int, data: st.DataObject
) -> None:
    plan = ShardPlan(cut_into_shards([size], 16), silence=5.0)
    names = [f"s{i}" for i in range(count)]
    late = data.draw(st.integers(0, count))
    for name in names[late:]:
        plan.add(name)
    now, events = 0.0, 0
    had: list[StateShard] = []
    failures = dict.fromkeys(names, 0)
    owed: list[tuple[str, StateShard]] = []
    while not plan.done and (plan.sources or late):
        live = set(plan.sources)
        for source, shard in plan.ask(now):
            assert source in live
            owed.append((source, shard))
        assert len({shard for _, shard in owed}) == len(owed)  # each shard by one source
        assert all(sum(s == source for s, _ in owed) <= 2 for source in live)
        assert owed or not live, "nothing to wait for"
        events += 1
        assert events <= size // 16 + 1 + 5 * count
        event = data.draw(st.sampled_from(["have", "fail", "drop", "silence", "join"]))
        if (event == "join" or not live) and late:
            late -= 1
            plan.add(names[late])
            continue
        source, shard = data.draw(st.sampled_from(owed))
        assert plan.outstanding(source, shard.offset) == shard
        if event == "fail":
            plan.failed(source, shard.offset, "damaged", now)
            failures[source] += 1
        elif event == "drop":
            plan.drop(source, "lost")
        elif event == "silence":
            assert plan.wake <= now + 5.1
            now = plan.wake
            plan.expire(now)
            for s, silent in owed:
                if plan.outstanding(s, silent.offset) is None:
                    failures[s] += 1
        else:
            plan.received(source, shard.offset, now)
            had.append(shard)
        owed = [(s, shard) for s, shard in owed if plan.outstanding(s, shard.offset)]
        assert all(failures[s] < 3 for s in plan.sources)
    assert len(had) + plan.missing == len(range(0, size, 16))
    if plan.done:
        covered = [byte for shard in had for byte in range(shard.offset, sum(shard))]
        assert sorted(covered) == list(range(size))
    else:
        assert set(plan.dropped) == set(names)


def test_a_fast_source_serves_more() -> None:
    plan = ShardPlan(cut_into_shards([40 * 16], 16), silence=100.0)
    plan.add("fast")
    plan.add("slow")
    served = {"fast": 0, "slow": 0}
    owed: list[tuple[str, StateShard]] = []
    for now in range(1000):
        owed += plan.ask(now)
        for source, every in (("fast", 1), ("slow", 4)):
            mine = [shard for s, shard in owed if s == source]
            if mine and now % every == 0:
                plan.received(source, mine[0].offset, now)
                owed.remove((source, mine[0]))
                served[source] += 1
    assert plan.done
    assert served == {"fast": 31, "slow": 9}


@pytest.mark.parametrize("refused", [False, True])
def test_a_source_heard_of_now_and_then_is_not_silent(refused: bool) -> None:
    plan = ShardPlan(cut_into_shards([64], 16), silence=5.0)
    plan.add("a")
    assert plan.wake == float("inf")
    first, second = (shard for _, shard in plan.ask(1.0))
    assert plan.wake == pytest.approx(6.0, abs=0.01)
    if refused:
        plan.failed("a", first.offset, "not now", 4.0)
    else:
        plan.received("a", first.offset, 4.0)
    assert plan.wake == pytest.approx(9.0, abs=0.01)
    plan.expire(8.9)
    assert plan.outstanding("a", second.offset)
    plan.expire(9.1)
    assert not plan.outstanding("a", second.offset)


def test_asking_for_more_does_not_excuse_silence() -> None:
    plan = ShardPlan(cut_into_shards([32], 16), silence=5.0)
    for source in ("a", "b"):
        plan.add(source)
    (_, first), _ = plan.ask(0.0)
    plan.drop("b", "lost")
    assert plan.ask(4.0) == [("a", StateShard(16, 16))]
    plan.expire(5.1)
    assert not plan.outstanding("a", first.offset)


def test_a_source_has_time_for_what_it_owes() -> None:
    """Two shards that share a link of 100 kB/s both arrive after some 80 s, and none earlier."""
    plan = ShardPlan(cut_into_shards([3 * SHARD], SHARD), silence=5.0)
    plan.add("a")
    (_, first), (_, second) = plan.ask(0.0)
    assert plan.wake == pytest.approx(5 + 2 * SHARD / 100e3)
    plan.expire(80.0)
    assert plan.outstanding("a", first.offset) and plan.outstanding("a", second.offset)
    plan.received("a", first.offset, 80.0)
    assert plan.wake == pytest.approx(80 + 5 + SHARD / 100e3)


def test_a_dropped_source_stays_dropped() -> None:
    plan = ShardPlan(cut_into_shards([64], 16), silence=5.0)
    plan.add("a")
    plan.drop("a", "lost")
    plan.add("a")
    assert plan.ask(0.0) == []
    assert plan.dropped == {"a": "lost"}


@given(st.lists(st.integers(0, 100).map(lambda n: 4 * n)), st.integers(0, 9), st.integers(1, 9))
def test_no_shard_has_parts_of_two_tensors(sizes: list[int], first: int, shard_size: int) -> None:
    shards = cut_into_shards(sizes, 4 * shard_size, 4 * first)
    ends = [4 * first, *(sum(shard) for shard in shards)]
    assert [shard.offset for shard in shards] == ends[:-1], "one behind the other"
    assert all(0 < shard.size <= 4 * shard_size for shard in shards)
    assert set(accumulate(sizes, initial=4 * first)) <= set(ends)


def test_what_comes_back_is_asked_for_before_what_lies_behind_it() -> None:
    plan = ShardPlan(cut_into_shards([32, 64], 16), silence=5.0)
    for source in ("a", "b"):
        plan.add(source)
    assert [shard.offset for _, shard in plan.ask(0.0)] == [0, 16, 32, 48]
    (lost,) = [s for s in ("a", "b") if plan.outstanding(s, 16)]
    plan.drop(lost, "lost")
    (other,) = plan.sources
    for offset in (0, 32):
        if plan.outstanding(other, offset):
            plan.received(other, offset, 1.0)
    assert plan.ask(1.0)[0][1].offset < 32
