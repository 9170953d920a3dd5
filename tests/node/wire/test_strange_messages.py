"""Input from a liar is taken or refused, and has no other effect."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from drawn_messages import BODIES, HUGE, Drawing

from planaria.node.transaction.bounds import fault_to_driver, fault_to_member
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame, WireError, seal, unseal
from tests.harness.rules import RULES


def test_figures_of_any_message_are_looked_at() -> None:
    drawing = Drawing(Random(0), ["n1", "n2"], [1, 2, 3])
    refused = 0
    for body in BODIES:
        for _ in range(40):
            message = drawing.envelope(body)
            assert message.WhichOneof("body") == body
            again = pb.Message.FromString(unseal(seal(message.SerializeToString())))
            refused += bool(fault_to_driver(again, RULES)) + bool(fault_to_member(again, 2))
    assert refused


def test_huge_words_and_lists_are_drawn_too() -> None:
    drawing = Drawing(Random(0), rarely=0.05)
    sizes = [drawing.envelope().ByteSize() for _ in range(100)]
    assert max(sizes) > HUGE
    assert sorted(sizes)[50] < 10_000


def test_heads_of_frames_are_read_or_refused() -> None:
    drawing = Drawing(Random(0))
    read = 0
    for _ in range(2000):
        frame = drawing.frame()
        assert str(Frame.parse(frame.head(), frame.payload)) == str(frame)  # as text: nan != nan
        for head in (drawing.head(), drawing.damaged(frame.head())):
            with suppress(WireError):
                Frame.parse(head, frame.payload)
                read += 1
    assert 0 < read < 4000
