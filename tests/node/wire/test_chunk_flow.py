from __future__ import annotations

import random
from collections import deque
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.background import Background
from planaria.node.wire.budget import ITEM
from planaria.node.wire.chunk_flow import HEAD as BESIDE
from planaria.node.wire.chunk_flow import HEADS, PIECES, ChunkInbox, ChunkOrder, ChunkOutbox
from planaria.node.wire.frame_format import (
    KINDS,
    PAYLOAD_LIMIT,
    Chunk,
    Frame,
    WireError,
    buffers_of,
    parse_chunk,
)
from planaria.node.wire.tensors import encode
from tests.harness.at_rest import check_at_rest


def frame(size: int, kind: str = "activation", number: int = 0) -> Frame:
    content = random.Random(number).randbytes(size)
    cut = size // 3
    return Frame(kind, (1, 1), {"number": number}, [], (content[:cut], b"", content[cut:]))


def chunk_of(outbox: ChunkOutbox) -> Chunk:
    message = outbox.next(0.0)
    assert message is not None
    return parse_chunk(message)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100)), max_size=12),
    st.integers(1, 20),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_every_frame_arrives_whole_whatever_the_timing(
    sizes: list[tuple[str, int]], chunk: int, window: int, timing: random.Random
) -> None:
    outbox, inbox = ChunkOutbox(chunk, window * chunk), ChunkInbox(PAYLOAD_LIMIT, 16 << 20)
    frames = [frame(size, kind, number) for number, (kind, size) in enumerate(sizes)]
    to_push, arrived = deque(frames), []
    forth: deque[bytes] = deque()  # to the inbox; `back` has acknowledgements
    back: deque[tuple[int, int]] = deque()
    while True:
        moves = []
        if to_push:
            moves.append("push")
        back.extend(inbox.acknowledged().items())
        if forth:
            moves.append("deliver")
        if back:
            moves.append("acknowledge")
        if (message := outbox.next(0.0)) is not None:
            forth.append(message)
            continue
        if not moves:
            break
        match timing.choice(moves):
            case "push":
                outbox.push(to_push.popleft())
            case "deliver":
                if (received := inbox.receive(parse_chunk(forth.popleft()))) is not None:
                    arrived.append(received)
            case "acknowledge":
                outbox.acknowledge(*back.popleft(), 0.0)
    check_at_rest(outbox, inbox)
    assert outbox.unfinished() == []
    assert len(arrived) == len(frames)
    for received in arrived:
        sent = frames[received.fields["number"]]
        assert received.kind == sent.kind
        assert b"".join(buffers_of(received.payload)) == b"".join(buffers_of(sent.payload))
    for kind in KINDS:
        numbers = [received.fields["number"] for received in arrived if received.kind == kind]
        assert numbers == sorted(numbers)


def test_urgent_kinds_go_first_and_overtake_between_chunks() -> None:
    outbox = ChunkOutbox(chunk=10, window=1000)
    outbox.push(frame(25, "state"))
    first = chunk_of(outbox)
    outbox.push(frame(5, "activation"))
    outbox.push(frame(15, "gradient"))
    outbox.push(frame(5, "gradient"))
    order = [
        (chunk.frame, len(chunk.data)) for chunk in [first, *(chunk_of(outbox) for _ in range(6))]
    ]
    assert order == [(1, 10), (2, 10), (2, 5), (3, 5), (4, 5), (1, 10), (1, 5)]
    assert outbox.next(0.0) is None


def test_no_more_than_the_window_is_under_way() -> None:
    outbox = ChunkOutbox(chunk=10, window=20)
    outbox.push(frame(45))
    assert [chunk_of(outbox).offset for _ in range(2)] == [0, 10]
    assert outbox.next(0.0) is None
    outbox.acknowledge(1, 10, 0.0)
    assert outbox.unacknowledged == 35
    assert chunk_of(outbox).offset == 20
    assert outbox.next(0.0) is None


def test_what_is_not_acknowledged_to_its_end_is_unfinished() -> None:
    outbox = ChunkOutbox(chunk=10, window=100)
    sent = [frame(20, "state", 0), frame(10, "average", 1), frame(0, "average", 2)]
    for item in sent:
        outbox.push(item)
    while outbox.next(0.0) is not None:
        pass
    late = frame(10, "gradient", 3)
    outbox.push(late)
    assert outbox.unfinished() == [sent[1], sent[2], sent[0], late]
    outbox.acknowledge(1, 10, 0.0)
    outbox.acknowledge(3, 10, 0.0)
    assert outbox.unfinished() == [sent[2], sent[0], late]
    outbox.acknowledge(2, 0, 0.0)
    outbox.acknowledge(3, 20, 0.0)
    assert outbox.unfinished() == [late]


@pytest.mark.parametrize(("number", "received"), [(2, 0), (0, 0), (1, 21), (1, 9), (1, -1)])
def test_acknowledgements_that_cannot_be_are_refused(number: int, received: int) -> None:
    outbox = ChunkOutbox(chunk=10, window=100)
    outbox.push(frame(30))
    chunk_of(outbox), chunk_of(outbox)
    outbox.acknowledge(1, 10, 0.0)
    with pytest.raises(WireError, match="which is impossible"):
        outbox.acknowledge(number, received, 0.0)


def test_a_frame_that_cannot_travel_is_not_queued() -> None:
    outbox = ChunkOutbox(chunk=10, window=100)
    with pytest.raises(WireError, match="at most 65536"):
        outbox.push(Frame("state", (1, 1), {"a": "a" * 70_000}, [], b"abc"))
    assert outbox.unacknowledged == 0
    assert outbox.next(0.0) is None


HEAD = frame(0).head()


def start(number: int = 1, size: int = 20, data: bytes = b"a" * 10, head: bytes = HEAD) -> Chunk:
    return Chunk(number, 0, size, head, memoryview(data), 0)


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (start(2)._replace(offset=10), "where 0 of 20 was next"),
        (start(3), "a new frame would be 2"),
        (start(1)._replace(offset=0), "where 10 of 20 was next"),
        (start(1)._replace(offset=10, size=30), "where 10 of 20 was next"),
        (start(1, data=b"a" * 11)._replace(offset=10), "a chunk of 11 bytes at 10 of 20"),
        (start(1, data=b"")._replace(offset=10), "a chunk of 0 bytes"),
        (start(2, size=101), "a payload of 101 bytes; at most 100"),
        (start(2, head=b""), "not msgpack"),
        (
            start(2, head=Frame("state", (1, 1), {}, encode([], "none")[0], b"").head() + b"\0"),
            "msgpack",
        ),
    ],
)
def test_chunks_that_cannot_be_are_refused(chunk: Chunk, why: str) -> None:
    inbox = ChunkInbox(payload_limit=100, window=100)
    assert inbox.receive(start()) is None
    with pytest.raises(WireError, match=why):
        inbox.receive(chunk)


def test_frames_under_way_are_limited() -> None:
    inbox = ChunkInbox(payload_limit=100, window=100)
    for number in range(1, len(KINDS) + 1):
        inbox.receive(start(number))
    with pytest.raises(WireError, match=f"more than {len(KINDS)} frames under way"):
        inbox.receive(start(len(KINDS) + 1))


def test_copies_leave_when_there_is_room_and_nothing_else_to_send() -> None:
    outbox = ChunkOutbox(chunk=10, window=1000, background=partial(Room, 30))
    outbox.push(frame(45, "copy"))
    outbox.push(frame(15, "gradient"))
    assert [chunk_of(outbox).frame for _ in range(3)] == [1, 1, 2]
    assert outbox.next(0.0) is None, "25 bytes are under way"
    outbox.acknowledge(1, 15, 0.0)
    assert [chunk_of(outbox).offset for _ in range(2)] == [10, 20]
    outbox.push(frame(15, "gradient"))
    assert [chunk_of(outbox).frame for _ in range(2)] == [3, 3]
    outbox.acknowledge(2, 10, 0.0)
    assert outbox.next(0.0) is None
    outbox.acknowledge(3, 15, 0.0)
    assert chunk_of(outbox).offset == 30


def test_a_frame_that_goes_by_several_streams_has_chunks_for_each() -> None:
    least, most = PIECES
    for size, streams, expected in (
        (9 * most, 2, [most] * 9),
        (most, 4, [most // 8] * 8),
        (least + 1, 4, [least, 1]),
        (most, 1, [most]),
    ):
        outbox = ChunkOutbox(chunk=2 << 20, window=16 << 20)
        outbox.push(frame(size))
        sent = []
        while (message := outbox.next(0.0, streams)) is not None:
            sent.append(parse_chunk(message))
        assert [len(chunk.data) for chunk in sent] == expected
        assert [chunk.order for chunk in sent] == list(range(1, len(sent) + 1))


def test_a_copy_goes_by_the_streams_that_make_it_faster() -> None:
    outbox = ChunkOutbox(chunk=10, window=1000, background=partial(Room, 30))
    outbox.push(frame(45, "copy"))
    assert outbox.next(0.0, 4, 1) is None
    assert outbox.next(0.0, 4, 0) is not None
    outbox._streams.steady = 2
    assert outbox.next(0.0, 4, 2) is None
    assert outbox.next(0.0, 4, 1) is not None
    outbox.push(frame(15, "gradient"))
    assert outbox.next(0.0, 4, 3) is not None


@pytest.mark.parametrize(("kind", "streams"), [("state", 2), ("copy", 1)])
def test_a_backlog_of_anything_but_copies_asks_for_streams(kind: str, streams: int) -> None:
    outbox, inbox, now = ChunkOutbox(1 << 20, 16 << 20), ChunkInbox(PAYLOAD_LIMIT, 16 << 20), 0.0
    while now < 6.0:
        if not outbox.frames:
            outbox.push(frame(1 << 20, kind))
        while (message := outbox.next(now)) is not None:
            inbox.receive(parse_chunk(message))
        now += 0.1
        for number, received in inbox.acknowledged().items():
            outbox.acknowledge(number, received, now)
    assert outbox.streams == streams


def test_so_many_frames_are_under_way_as_the_other_end_keeps_heads_of() -> None:
    outbox = ChunkOutbox(chunk=10, window=1000)
    for number in range(HEADS // BESIDE + 2):
        outbox.push(frame(0, number=number))
    count = 0
    while outbox.next(0.0) is not None:
        count += 1
    assert count * BESIDE <= HEADS < (count + 1) * (BESIDE + 100)
    outbox.acknowledge(1, 0, 0.0)
    assert outbox.next(0.0) is not None
    assert outbox.next(0.0) is None
    outbox.rewind(count, {})
    outbox.push(frame(0))
    assert outbox.next(0.0) is not None, "nothing is under way any more"


class Room(Background):
    """A window of `size` bytes that never changes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def room(self, flight: int, now: float) -> int:
        return 10 if flight + 10 <= self.size else 0


def test_each_chunk_of_a_copy_is_acknowledged_at_once() -> None:
    outbox, inbox = ChunkOutbox(chunk=10, window=1000), ChunkInbox(PAYLOAD_LIMIT, 16 << 20)
    for kind, size in (("state", 30), ("copy", 25)):
        outbox.push(frame(size, kind))
    assert inbox.receive(chunk_of(outbox)) is None
    assert inbox.acknowledged() == {}
    arrived = []
    while (message := outbox.next(0.0)) is not None:
        arrived.append(inbox.receive(parse_chunk(message)))
        for number, received in inbox.acknowledged().items():
            outbox.acknowledge(number, received, 0.0)
    assert [received.kind for received in arrived if received] == ["state", "copy"]
    assert outbox.unacknowledged == 0


# The order of chunks

WINDOW = 1 << 16


def chunk_at(order: int, size: int = 0) -> Chunk:
    return Chunk(1, 0, size, b"", memoryview(bytes(size)), 0, order=order)


@given(st.integers(0, 100), st.randoms(use_true_random=False))
def test_in_whatever_order_they_come_they_leave_in_theirs(
    count: int, timing: random.Random
) -> None:
    ordering, orders = ChunkOrder(WINDOW), list(range(1, count + 1))
    timing.shuffle(orders)
    came: set[int] = set()
    left: list[int] = []
    for order in orders:
        came.add(order)
        left += [chunk.order for chunk in ordering.take(chunk_at(order))]
        due = next(order for order in range(1, count + 2) if order not in came)
        assert left == list(range(1, due))


@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_what_comes_twice_is_refused(order: int) -> None:
    ordering = ChunkOrder(WINDOW)
    for came in (1, 2, 4):
        list(ordering.take(chunk_at(came)))
    with pytest.raises(WireError, match=f"in place {order}, which is taken; the next one is 3"):
        list(ordering.take(chunk_at(order)))


def test_no_more_waits_than_may_be_under_way() -> None:
    ordering, size = ChunkOrder(WINDOW), WINDOW // 4
    fit = 2 * (WINDOW + HEADS) // (size + ITEM)
    for order in range(2, 2 + fit):
        assert not list(ordering.take(chunk_at(order, size)))
    with pytest.raises(WireError, match="before the chunk in place 1; at most"):
        list(ordering.take(chunk_at(2 + fit, size)))
    assert len(list(ordering.take(chunk_at(1, size)))) == 2 + fit, "none is lost"


def test_a_new_connection_begins_with_the_first_place() -> None:
    ordering = ChunkOrder(WINDOW)
    for order in (1, 3):
        list(ordering.take(chunk_at(order)))
    ordering.begin_anew()
    assert [chunk.order for order in (2, 1) for chunk in ordering.take(chunk_at(order))] == [1, 2]
