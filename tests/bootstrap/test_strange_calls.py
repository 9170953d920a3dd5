"""Tests that a registry answers or refuses any request, and that honest members stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import pytest
from drawn_messages import Drawing

from planaria.bootstrap.effects import Dial, Effect, Probe, Refused
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.registry_pb2 import (
    DescribeRequest,
    ExamineRequest,
    JoinRequest,
    LeaveRequest,
    MeasureRequest,
    Renewal,
    Report,
    SeatReport,
    Suspicion,
    WatchRequest,
)
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from tests.bootstrap.conftest import RUN_FILE, identity, joining, signed, soon
from tests.membership import join, validate_state
from tests.stubs import RegistryStub

HONEST = ("a", "b", "c")
EACH = 20
"""Requests until the next liar: an evicted node comes back under another name."""
RULES = MembershipRules(run="r", stages=2, lease=10, probe_timeout=5, joins_per_second=1000)
NUMBERS = (0, 1, 2, 3, PROTOCOL)
DESCRIBED = 2 << 20  # bytes


class Lying(Drawing):
    """Random messages of one liar at a time, since two accusers could evict an honest member."""

    def __init__(self, seed: int) -> None:
        super().__init__(Random(seed), numbers=NUMBERS)
        self._said = 0

    def next_liar(self) -> str:
        self._said += 1
        liar = f"liar-{self._said // EACH}"
        self.names = (*HONEST, liar)
        return liar


def a_join(drawing: Drawing, liar: str) -> JoinRequest:
    """Draw a join request with a liar's key and any name. Half of the time all else is right."""
    request = drawing.message(JoinRequest)
    if drawing.random.random() < 0.5:
        request = joining(liar, "127.0.0.1:1", stage=drawing.whole(0, 4))
    request.protocol, request.run = PROTOCOL, RULES.run
    if drawing.random.random() < 0.3:
        request.node = liar
    request.key = identity(liar).public
    return signed(request, liar)


def a_renewal(drawing: Drawing, liar: str) -> Renewal:
    renewal = drawing.message(Renewal)
    renewal.node = liar
    if drawing.random.random() < 0.7:
        renewal.ClearField("view")
    return signed(renewal, liar)


def a_suspicion(drawing: Drawing, liar: str) -> Suspicion:
    suspicion = drawing.message(Suspicion)
    suspicion.accuser = liar
    return signed(suspicion, liar)


class Machine:
    """A membership machine whose honest members renew, and answer probes and dials."""

    def __init__(self) -> None:
        self.machine, self.now = Membership(RULES), 0.0
        for name in HONEST:
            self.do(join(self.machine, joining(name, f"{name}:1"), self.now)[1])
            self.do(self.machine.stream_opened(Renewal(node=name), self.now))

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Probe(name, number) if name in HONEST:
                    self.do(self.machine.lease_renewed(Renewal(node=name, probe=number), self.now))
                case Dial(question=question, node=name):
                    self.machine.dialled(question, name, name in HONEST)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for stage, name in enumerate(HONEST):
            seat = SeatReport(stage=stage, committed=1 + int(self.now), phase="running")
            renewal = Renewal(node=name, report=Report(seats=[seat]))
            self.do(self.machine.lease_renewed(renewal, self.now))
        self.do(self.machine.tick(self.now))

    def say(self, drawing: Lying) -> None:
        machine, liar = self.machine, drawing.next_liar()
        for member in machine.view.members:
            if member.node not in drawing.names:
                self.do(machine.leave(member.node, "its time is over", self.now))
        match drawing.random.randrange(6):
            case 0 | 1:
                self.do(join(machine, a_join(drawing, liar), self.now)[1])
            case 2:
                self.do(machine.stream_opened(a_renewal(drawing, liar), self.now))
            case 3:
                self.do(machine.lease_renewed(a_renewal(drawing, liar), self.now))
            case 4:
                self.do(machine.suspect(a_suspicion(drawing, liar), self.now))
            case _:
                name = drawing.random.choice((liar, drawing.word()))
                if name not in HONEST:
                    self.do(machine.leave(name, drawing.word(), self.now))


@pytest.mark.parametrize("seed", range(3))
def test_liars_make_no_machine_raise_and_evict_nobody(seed: int) -> None:
    drawing = Lying(seed)
    swarm = Machine()
    refused = 0
    for _ in range(600):
        try:
            swarm.say(drawing)
        except Refused:
            refused += 1
        validate_state(swarm.machine)
        swarm.pass_time(drawing.random.choice((0.0, 0.05, 0.5, 3.0)))
        assert set(HONEST) <= {member.node for member in swarm.machine.view.members}
    assert 0 < refused < 600
    assert swarm.machine.describe(swarm.now).ByteSize() < DESCRIBED


async def _streamed(stub: Any, drawing: Drawing, liar: str) -> None:
    renewals = [a_renewal(drawing, liar) for _ in range(drawing.random.randrange(4))]
    if drawing.random.random() < 0.2:
        renewals.append(drawing.message(Renewal))

    call = stub.KeepAlive(timeout=0.2)
    with suppress(asyncio.InvalidStateError, grpc.aio.BaseError):  # ended: reading says why
        for renewal in renewals:
            await call.write(renewal)
        await call.done_writing()  # given an iterator, gRPC would cancel the call if this failed
    while await call.read() is not grpc.aio.EOF:
        pass


async def _call(stub: Any, drawing: Lying) -> None:
    """Make a random call, with a request that sometimes is valid."""
    liar = drawing.next_liar()
    unary: list[tuple[Any, Any]] = [
        (stub.Join, a_join(drawing, liar)),
        (stub.Join, drawing.message(JoinRequest)),
        (stub.Suspect, a_suspicion(drawing, liar)),
        (stub.Suspect, drawing.message(Suspicion)),
        (stub.Leave, drawing.message(LeaveRequest)),
        (stub.Measure, drawing.message(MeasureRequest)),
        (stub.Describe, drawing.message(DescribeRequest)),
        (stub.Examine, drawing.message(ExamineRequest)),
    ]
    match drawing.random.randrange(12):
        case 0 | 1 | 2:
            await _streamed(stub, drawing, liar)
        case 3:
            async for _ in stub.Watch(drawing.message(WatchRequest), timeout=0.05):
                pass
        case _:
            method, request = drawing.random.choice(unary)
            await method(request, timeout=0.2)


async def test_no_call_makes_a_registry_fail(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [await place.node(name) for name in HONEST]
    drawing = Lying(0)
    codes = set()
    async with grpc.aio.insecure_channel(place.address) as channel:
        stub = RegistryStub(channel)
        for _ in range(300):
            try:
                await _call(stub, drawing)
                codes.add(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                assert "Unexpected" not in (error.details() or ""), error
                codes.add(error.code())
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} < codes
    assert grpc.StatusCode.UNKNOWN not in codes
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    client = place.client()
    described = await soon(client.describe())
    await client.close()
    assert described.ByteSize() < DESCRIBED
    assert described.run_file == RUN_FILE
    assert set(HONEST) <= {member.node for member in described.view.members}
    assert not any(node.evicted.done() for node in nodes)
    await asyncio.sleep(0)
    assert set(place.registry._streams) & set(HONEST) == set(HONEST)
