"""Tests of live nodes that send wrong values: such a node is named, no other node ends, and the
swarm trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from planaria.node.averaging.reduction import OutgoingFrames, Reduction
from planaria.node.transaction.attempt import Attempt
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import decode, encode
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.small import small

PAIRS = small(replicas=2, steps=1000, training__batch=4)


def falls_sick(node: OneSeat, alter: Callable[[Frame], Frame]) -> None:
    """Pass all frames that the node sends to others through `alter` from now on."""
    seat = node.seat
    send = seat.outbox.send

    def altered(peer: str, item: pb.Message | Frame, *more: object) -> bool:
        return send(peer, alter(item) if isinstance(item, Frame) else item, *more)

    seat.outbox.send = altered


async def is_taken_out(
    swarm: LocalSwarm, slot: tuple[int, int], alter: Callable[[Frame], Frame]
) -> OneSeat:
    """Let the slot's node fall sick; check that it alone leaves and that steps follow."""
    await swarm.until(lambda: swarm.committed() >= 2)
    sick = swarm.nodes[slot][0]
    falls_sick(sick, alter)
    await swarm.until(sick.over.done)
    at = swarm.committed()
    await swarm.until(lambda: swarm.committed() >= at + 3)
    assert not any(node.over.done() for node, _ in swarm.nodes.values() if node is not sick)
    return sick


def with_tensor(kind: str, tensor: torch.Tensor) -> Callable[[Frame], Frame]:
    def alter(frame: Frame) -> Frame:
        if frame.kind != kind:
            return frame
        descriptors, payload = encode([tensor], "none")
        return replace(frame, descriptors=descriptors, payload=payload)

    return alter


def damaged(frame: Frame) -> Frame:
    if frame.kind != "gradient":
        return frame
    wrong = [d._replace(checksum=d.checksum ^ 1) for d in frame.descriptors]
    return replace(frame, descriptors=wrong)


@pytest.mark.parametrize(
    ("slot", "cause", "alter"),
    [
        ((1, 1), "shape", with_tensor("activation", torch.ones(1, 16, 32))),
        ((1, 0), "checksum", damaged),
    ],
    ids=["shape", "checksum"],
)
async def test_who_sends_what_cannot_be_used_is_taken_out_and_nobody_else_is(
    corpus, tmp_path, slot, cause, alter
):
    async with LocalSwarm(PAIRS, corpus, tmp_path) as swarm:
        sick = await is_taken_out(swarm, slot, alter)
        assert f"{cause}: " in sick.over.result()
        assert swarm.committed() < 60


def flips_a_bit(node: OneSeat) -> None:
    """Flip a bit once, before the next digest is taken, not between digest and update."""
    arithmetic = node.seat.arithmetic
    reduced = arithmetic.reduced

    def flip() -> float:
        due = arithmetic.tensors["second_moment"][arithmetic.optimizer.in_turn()]
        due.view(torch.int32)[7] ^= 1 << 20
        arithmetic.reduced = reduced
        return reduced()

    arithmetic.reduced = flip


async def test_a_replica_in_whose_state_a_bit_flips_copies_it_anew(corpus, tmp_path):
    async with LocalSwarm(PAIRS, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        sick, other = swarm.nodes[1, 1][0], swarm.nodes[1, 0][0]
        flips_a_bit(sick)
        await swarm.until(lambda: swarm.lines.events("diverged"))
        (diverged,) = swarm.lines.events("diverged")
        assert diverged["nodes"] == [f"{other.node}/1", f"{sick.node}/1"]
        assert diverged["reason"].startswith(
            f"{sick.node}/1: its weights or moments have changed since"
        )
        await swarm.until(lambda: sick.member.following, pause=0)
        await swarm.until(lambda: sick.member.phase.value == "running")
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert len(swarm.lines.events("diverged")) == 1
        assert not any(node.over.done() for node, _ in swarm.nodes.values())


def not_finite(frame: Frame) -> Frame:
    if frame.kind != "activation":
        return frame
    return with_tensor("activation", torch.full((1, 32, 32), torch.nan))(frame)


async def test_who_makes_nan_is_named_and_no_step_is_skipped(corpus, tmp_path):
    async with LocalSwarm(PAIRS, corpus, tmp_path) as swarm:
        sick = await is_taken_out(swarm, (1, 1), not_finite)
        assert "nonfinite: " in sick.over.result()
        assert {event["node"] for event in swarm.lines.events("not finite")} == {f"{sick.node}/1"}
        assert swarm.nodes[1, 0][0].member.last.skips == 0


def scaled(frame: Frame) -> Frame:
    """Return the frame of a node whose output is a tenth larger."""
    if frame.kind != "activation":
        return frame
    (x,) = decode(frame.descriptors, frame.payload, torch.device("cpu"))
    return with_tensor("activation", 1.1 * x)(frame)


async def test_who_computes_wrongly_is_found_by_spot_checks_and_the_ledger_names_its_work(
    corpus, tmp_path, monkeypatch
):
    threes = small(replicas=3, steps=1000, training__batch=4, trust__spot_check=0.5)
    async with LocalSwarm(threes, corpus, tmp_path) as swarm:
        sick = await is_taken_out(swarm, (1, 1), scaled)
        assert "its results differ from those of two others" in sick.over.result()
        events = swarm.lines.events("computed wrong")
        assert {event["node"] for event in events} == {f"{sick.node}/1"}
        doubted = [line["doubted"] for line in swarm.lines.of("ledger-*") if "doubted" in line]
        assert {tuple(event[:2]) for event, *_ in doubted} == {(f"{sick.node}/1", 1)}


def contributes(node: OneSeat, factor: float) -> None:
    """Let the node send and add `factor` times its gradient."""
    complete = Attempt.complete

    async def wrong(self: Attempt, exchanges: Exchanges) -> None:
        await complete(self, exchanges)
        if self.place is node.seat.workplace:
            gradient = node.seat.arithmetic.gradient
            await exchanges.compute(lambda: gradient.mul_(factor))

    Attempt.complete = wrong


def adds_up(node: OneSeat, factor: float) -> None:
    """Let the node multiply its sums by `factor`, and claim a contribution that fits them."""
    tell = Reduction._send_sum

    def wrong(self: Reduction, number: int, total: torch.Tensor) -> OutgoingFrames:
        if self.node == node.seat.node and self.evidence is not None:
            piece = self.own[number]
            self.evidence.keep_contribution(piece, self._own_values(piece) + (factor - 1) * total)
            total = factor * total
        return tell(self, number, total)

    Reduction._send_sum = wrong


@pytest.mark.parametrize(("lie", "factor"), [(contributes, -2.0), (adds_up, -1e3)])
async def test_who_lies_about_gradients_is_named_and_taken_out_if_the_run_says_so(
    corpus, tmp_path, monkeypatch, lie, factor
):
    monkeypatch.setattr(Attempt, "complete", Attempt.complete)
    monkeypatch.setattr(Reduction, "_send_sum", Reduction._send_sum)
    slow = {"batch": 96, "microbatch": 16, "lr": 1e-5}  # so that right gradients agree
    training = {f"training__{key}": value for key, value in slow.items()}
    threes = small(1, replicas=3, steps=10_000, trust__gradients="exclude", **training)
    async with LocalSwarm(threes, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        sick, since = swarm.nodes[1, 1][0], swarm.committed()
        lie(sick, factor)
        await swarm.until(sick.over.done)
        assert swarm.committed() - since < 200
        events = swarm.lines.events("gradient stands out")
        assert {event["node"] for event in events} == {f"{sick.node}/1"}
        assert not any(node.over.done() for node, _ in swarm.nodes.values() if node is not sick)
        assert bool(swarm.lines.events("step skipped")) == (factor == -1e3)
