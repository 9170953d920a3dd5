from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.recovery.policy import POLICIES, holder_stage
from planaria.recovery.snapshot import (
    NEVER,
    PIECE,
    Codec,
    HeldSnapshot,
    Layout,
    SentSnapshot,
    UpdateError,
    bytes_of_all,
    choose,
    decode,
    dequantize,
    dequantize_second_moment,
    encode,
    largest_update,
    quantize,
    quantize_second_moment,
    route,
    whole_update,
)

SHAPES = [(5, 3), (3,), (4, 7), (300,), (2, 2, 3), (6, 1), (1,)]
LAYOUT = Layout(SHAPES)
CODECS = st.sampled_from(["none", "int8"])


def drawn(seed: int, scale: float = 1.0) -> list[Tensor]:
    """Draw weights and both moments, whose elements differ widely in magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        spread = torch.randn(LAYOUT.values, generator=generator) * 4
        return torch.randn(LAYOUT.values, generator=generator) * spread.exp() * scale

    return [values(), values(), values().square()]


# Blocks


def test_blocks_are_the_rows_of_the_parameters() -> None:
    flat = torch.arange(LAYOUT.values)
    assert LAYOUT.values == sum(math.prod(shape) for shape in SHAPES)
    parameters = torch.split(flat, [math.prod(shape) for shape in SHAPES])
    expected = [
        row
        for shape, parameter in zip(SHAPES, parameters, strict=True)
        for row in parameter.view(shape[0] if len(shape) > 1 else 1, -1).tolist()
    ]
    assert [row for rows in LAYOUT.rows(flat) for row in rows.tolist()] == expected
    assert LAYOUT.blocks == len(expected) == 5 + 1 + 4 + 1 + 2 + 6 + 1


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, LAYOUT.blocks - 1)), st.integers(0, 9))
def test_what_is_gathered_is_scattered_to_its_place(chosen: set[int], seed: int) -> None:
    blocks = torch.tensor(sorted(chosen), dtype=torch.int64)
    source, target = drawn(seed)[0], drawn(seed + 10)[0]
    before = [row.clone() for rows in LAYOUT.rows(target) for row in rows]
    LAYOUT.scatter(target, blocks, LAYOUT.gather(source, blocks))
    after = [row for rows in LAYOUT.rows(target) for row in rows]
    new = [row for rows in LAYOUT.rows(source) for row in rows]
    for block in range(LAYOUT.blocks):
        assert torch.equal(after[block], (new if block in chosen else before)[block])


# The choice of blocks


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 30))
def test_a_choice_takes_so_many_blocks_and_those_never_sent_first(
    data: st.DataObject, blocks: int
) -> None:
    ranks = data.draw(st.lists(st.floats(0, 9), min_size=blocks, max_size=blocks))
    taken = data.draw(st.lists(st.integers(NEVER, 3), min_size=blocks, max_size=blocks))
    count = data.draw(st.integers(1, blocks))
    rank = torch.tensor(ranks, dtype=torch.float64)
    chosen = choose(rank, torch.tensor(taken), count).tolist()
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    rest = set(range(blocks)) - set(chosen)
    if any(taken[block] != NEVER for block in chosen):
        assert all(taken[block] != NEVER for block in rest)
        sent = [block for block in chosen if taken[block] != NEVER]
        assert max(ranks[b] for b in sent) <= min((ranks[b] for b in rest), default=9)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.03, 1))
def test_every_block_has_come_after_so_many_rounds(fraction: float) -> None:
    sent = SentSnapshot(LAYOUT, fraction, "none", True)
    assert sent.lacks_blocks
    for step in range(1, math.ceil(1 / fraction) + 1):
        update = sent.take(step, drawn(step))
        assert update.blocks == max(1, math.ceil(fraction * LAYOUT.blocks - 1e-9))
    assert not sent.lacks_blocks
    assert math.isfinite(update.perturbation)


# int8


FLOATS = st.floats(-(2.0**126), 2.0**126, width=32)
WIDTHS = st.sampled_from([1, 3, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])


def rows_of(values: list[float], width: int) -> Tensor:
    """Return two rows that repeat the values."""
    flat = torch.tensor(values, dtype=torch.float32)
    return flat.repeat(-(-2 * width // len(values)))[: 2 * width].view(2, width)


def scale_of_each(rows: Tensor, heads: Tensor) -> Tensor:
    return heads.repeat_interleave(min(PIECE, rows.shape[1]), dim=1)[:, : rows.shape[1]]


@settings(deadline=None, max_examples=40)
@given(st.lists(FLOATS, min_size=1, max_size=40), WIDTHS)
def test_int8_is_half_a_scale_off_at_most(values: list[float], width: int) -> None:
    rows = rows_of(values, width)
    scales, codes = quantize(rows)
    restored = dequantize(scales, codes)
    bound = 0.5 * scale_of_each(rows, scales).double()
    assert ((restored.double() - rows.double()).abs() <= bound * (1 + 1e-5)).all()
    assert (scales <= rows.abs().max() / 127 * (1 + 1e-6) + 1e-37).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(FLOATS, min_size=1, max_size=40), WIDTHS)
def test_first_moments_never_grow(values: list[float], width: int) -> None:
    rows = rows_of(values, width)
    scales, codes = quantize(rows, toward_zero=True)
    restored = dequantize(scales, codes)
    assert (restored.abs().double() <= rows.abs().double() * (1 + 1e-6)).all()
    assert (restored * rows.sign() >= 0).all()
    off = (rows.double() - restored.double()).abs()
    assert (off <= scale_of_each(rows, scales).double() * (1 + 1e-5)).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=40), WIDTHS)
def test_second_moments_never_shrink_and_hardly_grow(values: list[float], width: int) -> None:
    rows = rows_of(values, width)
    tops, codes = quantize_second_moment(rows)
    restored = dequantize_second_moment(tops, codes)
    assert restored.isfinite().all()
    assert torch.equal(restored == 0, rows == 0)
    roots, again = rows.sqrt().double(), restored.sqrt().double()
    assert (again >= roots).all()
    pieces = torch.split(roots, min(PIECE, width), dim=1)
    largest = torch.cat([p.amax(1, keepdim=True).expand_as(p) for p in pieces], dim=1)
    reached = torch.maximum(roots, largest / 50_000) * (1 + 1 / 16)
    assert (again[rows > 0] <= reached[rows > 0] * (1 + 1e-6)).all()


def test_the_largest_second_moments_stay_finite() -> None:
    rows = torch.full((1, 3), torch.finfo(torch.float32).max)
    assert torch.equal(dequantize_second_moment(*quantize_second_moment(rows)), rows)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 50))
def test_a_restored_adam_step_is_never_larger_than_the_exact_one(seed: int) -> None:
    _, m, v = drawn(seed, scale=1e-3)
    payload, _ = encode(LAYOUT, torch.arange(LAYOUT.blocks), drawn(seed, scale=1e-3), "int8")
    _, values = decode(LAYOUT, payload, LAYOUT.blocks, 3, "int8")
    held = HeldSnapshot(LAYOUT, 3)
    held.overlay(1, torch.arange(LAYOUT.blocks), values)
    _, restored_m, restored_v = held.tensors
    exact = m / (v.sqrt() + 1e-8)
    restored = restored_m / (restored_v.sqrt() + 1e-8)
    assert (restored.abs() <= exact.abs() * (1 + 1e-6)).all()
    assert (restored * exact >= 0).all()


@settings(deadline=None)
@given(CODECS, st.sampled_from([1, 3]), st.sampled_from([0.05, 0.25]))
def test_at_first_updates_are_larger_and_send_each_block_once(
    codec: Codec, tensors: int, fraction: float
) -> None:
    sent, flats = SentSnapshot(LAYOUT, fraction, codec, tensors > 1, at_first=0.5), drawn(3)
    updates = [sent.take(step, flats) for step in range(3)]
    whole = sum(update.payload.nbytes for update in updates[:2])
    sizes = [update.blocks for update in updates]
    assert sizes == [math.ceil(share * LAYOUT.blocks) for share in (0.5, 0.5, fraction)]
    assert whole == bytes_of_all(LAYOUT, tensors, codec)


# An update as bytes


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, LAYOUT.blocks - 1), min_size=1), CODECS, st.sampled_from([1, 3]))
def test_an_update_arrives_as_the_sender_thinks(
    chosen: set[int], codec: Codec, tensors: int
) -> None:
    blocks = torch.tensor(sorted(chosen))
    own = None if len(chosen) == LAYOUT.blocks else blocks
    sources = drawn(3)[:tensors]
    payload, restored = encode(LAYOUT, own, sources, codec)
    assert payload.nbytes <= largest_update(LAYOUT, tensors)
    indices, values = decode(LAYOUT, payload, len(chosen), tensors, codec)
    assert torch.equal(indices, blocks)
    assert len(values) == tensors
    assert all(torch.equal(x, y) for x, y in zip(values[0], restored, strict=True))
    if codec == "none":
        for source, parts in zip(sources, values, strict=True):
            exact = LAYOUT.gather(source, blocks)
            assert all(torch.equal(x, y) for x, y in zip(parts, exact, strict=True))


def update_of(blocks: list[int], codec: Codec = "none", tensors: int = 3) -> Tensor:
    return encode(LAYOUT, torch.tensor(blocks), drawn(1)[:tensors], codec)[0]


def poisoned(value: float, tensor: int) -> Tensor:
    sources = drawn(1)
    sources[tensor][0] = value
    return encode(LAYOUT, torch.tensor([0, 2]), sources, "none")[0]


def misplaced(block: int) -> Tensor:
    payload = update_of([3])
    payload[:4].view(torch.int32)[0] = block
    return payload


@pytest.mark.parametrize(
    ("payload", "count", "why"),
    [
        (update_of([0, 2]), 3, "growing numbers|too few"),
        (update_of([0, 2]), 0, "0 blocks"),
        (update_of([0, 2]), LAYOUT.blocks + 1, "blocks, where the stage has"),
        (update_of([0, 2]), LAYOUT.blocks, "too few"),
        (update_of([0, 2])[:-4], 2, "too few"),
        (update_of([0, 2])[:5], 2, "too few"),
        (torch.cat([update_of([0, 2]), torch.zeros(4, dtype=torch.uint8)]), 2, "are not"),
        (update_of([2, 0]), 2, "growing numbers"),
        (update_of([1, 1]), 2, "growing numbers"),
        (misplaced(-1), 1, "growing numbers below"),
        (misplaced(LAYOUT.blocks), 1, "growing numbers below"),
        (poisoned(math.nan, 0), 2, "finite"),
        (poisoned(math.inf, 1), 2, "finite"),
        (poisoned(-1.0, 2), 2, "second moment"),
    ],
)
def test_updates_that_cannot_be_are_refused(payload: Tensor, count: int, why: str) -> None:
    with pytest.raises(UpdateError, match=why):
        decode(LAYOUT, payload, count, 3, "none")


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 400), CODECS)
def test_no_bytes_do_harm(random: object, size: int, codec: Codec) -> None:
    payload = torch.frombuffer(bytearray(random.randbytes(size) + b"\0"), dtype=torch.uint8)[:size]  # type: ignore[attr-defined]
    blocks = torch.tensor([4, 9])
    if size > 8:
        payload[:8].view(torch.int32).copy_(blocks)
    try:
        _, values = decode(LAYOUT, payload, 2, 3, codec)
    except UpdateError:
        return
    assert all(part.isfinite().all() for parts in values for part in parts)


# Sender and holder


@settings(deadline=None, max_examples=40)
@given(st.data(), CODECS)
def test_a_holder_has_what_the_sender_thinks_whatever_is_lost(
    data: st.DataObject, codec: Codec
) -> None:
    moments = data.draw(st.booleans())
    fraction = data.draw(st.floats(0.1, 1))
    sent = SentSnapshot(LAYOUT, fraction, codec, moments)
    held = HeldSnapshot(LAYOUT, 3 if moments else 1)
    current = drawn(0)
    for step in range(1, data.draw(st.integers(1, 14)) + 1):
        moved = data.draw(st.sets(st.integers(0, LAYOUT.blocks - 1)))
        blocks = torch.tensor(sorted(moved), dtype=torch.int64)
        for flat, new in zip(current, drawn(step), strict=True):
            LAYOUT.scatter(flat, blocks, LAYOUT.gather(new, blocks))
        match data.draw(st.sampled_from(["arrives", "lost", "unanswered", "another sender"])):
            case "another sender":
                sent = SentSnapshot(LAYOUT, fraction, codec, moments)
                continue
            case fate:
                update = sent.take(step, current)
        if fate != "lost":
            args = update.payload, update.blocks, update.tensors, update.codec
            held.overlay(step, *decode(LAYOUT, *args))
        if fate != "arrives":
            sent.lost(step)
        taken = sent.taken != NEVER
        assert torch.equal(held.taken[taken], sent.taken[taken])
        at = taken.nonzero().flatten()
        for x, y in zip(
            LAYOUT.gather(held.tensors[0], at), LAYOUT.gather(sent.sent, at), strict=True
        ):
            assert torch.equal(x, y)
        if not math.isnan(update.perturbation) and fate == "arrives":
            distance = (current[0].double() - held.tensors[0].double()).norm().item()
            assert update.perturbation == pytest.approx(distance, rel=1e-6)
            assert held.missing == 0
        assert held.missing == int((held.taken == NEVER).sum())
        if held.missing == 0:
            staleness = held.staleness()
            assert 1 <= staleness.oldest <= staleness.mean <= staleness.newest <= step


def test_the_blocks_that_change_are_those_that_go() -> None:
    sent, weights = SentSnapshot(LAYOUT, 0.25, "none", False), torch.zeros(LAYOUT.values)
    for step in range(1, 20):
        LAYOUT.scatter(
            weights,
            torch.arange(3),
            [torch.full((3, 3), float(step))]
            + [torch.empty(0, width) for width in LAYOUT.widths[1:]],
        )
        update = sent.take(step, [weights])
    assert update.perturbation == 0


def test_a_whole_state_is_exact() -> None:
    tensors = drawn(1)
    update = whole_update(LAYOUT, tensors)
    exact = [flat.clone() for flat in tensors]
    for flat in tensors:
        flat.add_(1)
    held = HeldSnapshot.whole(LAYOUT, 1, update.payload)
    assert update.tensors == 3
    assert all(torch.equal(x, y) for x, y in zip(held.tensors, exact, strict=True))
    assert held.staleness() == (1, 1.0, 1)


# Holders


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 200))
def test_no_neighbour_holds_a_snapshot(stages: int) -> None:
    ring = stages + 1
    holders = [holder_stage(stage, stages) for stage in range(ring)]
    assert sorted(holders) == list(range(ring))
    for stage, holder in enumerate(holders):
        assert (holder - stage) % ring not in (0, 1, ring - 1)
        assert holders[(stage + 1) % ring] != stage or holder != (stage + 1) % ring


@pytest.mark.parametrize(("stages", "expected"), [(1, [1, 0]), (2, [1, 2, 0])])
def test_short_pipelines_take_another_stage(stages: int, expected: list[int]) -> None:
    assert [holder_stage(stage, stages) for stage in range(stages + 1)] == expected


@pytest.mark.parametrize(
    ("policy", "first", "expected"),
    [
        ("auto", 0, 4),
        ("snapshot", 0, 4),
        ("checkfree", 1, 2),
        ("checkfree+", 2, 3),
        ("checkfree", 0, 1),
        ("redundant", 1, 0),
        ("checkpoint", 1, 0),
    ],
)
def test_what_travels_is_what_a_guess_would_be_worst_for(
    policy: str, first: int, expected: int
) -> None:
    sends = [POLICIES[policy].sends(stage, first) for stage in range(4)]
    assert sends == [stage < expected for stage in range(4)]


def test_routes_go_from_first_replica_to_first_replica() -> None:
    members = [("d", 0), ("b", 0), ("f", 1), ("c", 1), ("e", 2), ("a", 3), ("g", 3)]
    assert route(0, members, 3) == ("b", ("e", "c"))
    assert route(1, members, 3) == ("c", ("a",))
    assert route(2, members[:4], 3) is None
    assert route(0, members[:4], 3) == ("b", ("c", "f"))
    assert route(0, members[:2], 3) == ("b", ())
    assert route(0, members[:4], 1) == ("b", ("c",))


def by_letter(seat: str) -> str:
    """Return the machine of a seat: a for the seat a2."""
    return seat[0]


def test_nothing_is_held_on_a_machine_that_would_be_lost_with_the_stage() -> None:
    seats = [("a0", 0), ("a1", 1), ("b2", 2), ("b3", 3), ("c4", 4)]
    held = [route(stage, seats, 4, by_letter) for stage in range(5)]
    assert held == [
        ("a0", ("b2", "c4")),
        ("a1", ("b3",)),
        ("b2", ("c4",)),
        ("b3", ("a0",)),
        ("c4", ("a1",)),
    ]
    seats = [("a0", 0), ("b1", 1), ("a2", 2), ("b3", 3)]
    held = [route(stage, seats, 3, by_letter) for stage in range(4)]
    assert held == [("a0", ("b1",)), ("b1", ("a2",)), ("a2", ("b3",)), ("b3", ("a0",))]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=2, max_size=7))
def test_whatever_is_held_is_elsewhere_if_it_can_be(seated: list[set[str]]) -> None:
    stages = len(seated) - 1
    members = [(f"{m}{stage}", stage) for stage, at in enumerate(seated) for m in at]
    for stage, at in enumerate(seated):
        way = route(stage, members, stages, by_letter)
        assert way is not None and way.sender == f"{min(at)}{stage}"
        elsewhere = {m for other in seated for m in other} - at
        machines = [holder[0] for holder in way.holders]
        most = 1 if stage else min(2, stages)
        assert set(machines) <= elsewhere
        assert len(machines) == len(set(machines)) == min(most, len(elsewhere))
