"""Tests of registry and client over gRPC, in one event loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import virtual_time
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from planaria.bootstrap import broadcast, service
from planaria.bootstrap import client as client_module
from planaria.bootstrap.authority import Authority
from planaria.bootstrap.authorization import host_of
from planaria.bootstrap.client import (
    InQuarantine,
    JoinRefused,
    RegistryClient,
    RegistryUnreachable,
    _Membership,
)
from planaria.bootstrap.credentials import Credentials, CredentialsError
from planaria.bootstrap.effects import Effect, Evict
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.registry_pb2 import (
    NONFINITE,
    Change,
    Complaint,
    Difference,
    ExamineRequest,
    JoinReply,
    LeaveRequest,
    LinkReport,
    Member,
    NewView,
    Renewal,
    Report,
    Seat,
    SeatReport,
    Splice,
    Suspicion,
    View,
    WatchRequest,
)
from planaria.bootstrap.rules import PROTOCOL, MembershipRules, Resettled
from planaria.bootstrap.service import (
    LOAD_BYTES,
    NAME_BYTES,
    RENEWAL_BYTES,
    SERVICE,
    Limits,
    RegistryServer,
)
from planaria.bootstrap.transport import Broken
from planaria.bootstrap.views import difference, is_genuine, sign, unpack, unpacked, view_in
from tests.bootstrap.conftest import KEY, RULES, full_disk, identity, joining, signed, until

Serve = Callable[..., AbstractAsyncContextManager[Any]]
TIMEOUT = 120.0  # seconds; reached only by a hang


def names(view: View) -> set[str]:
    return {m.node for m in view.members}


async def until_described(place: Any, condition: Callable[[Any], bool]) -> Any:
    """Request descriptions until one fulfils the condition, and return it."""
    client = place.client()
    async with asyncio.timeout(TIMEOUT):
        while not condition(description := await client.describe()):
            pass
    return description


async def test_what_happens_to_a_node_is_told_with_its_renewals(place: Any) -> None:
    heard: list[tuple[str, str]] = []
    place.registry.on_happened = lambda node, lines: heard.extend((node, line) for line in lines)
    node = await place.node("a", stage=1)
    lines = [f"{n}" * 500 for n in range(60)]  # more than a renewal has room for
    for line in (*lines, "x" * RENEWAL_BYTES, "the last"):
        node.client.tell(line)
    async with asyncio.timeout(TIMEOUT):
        while len(heard) < 61:
            node.client._due.set()  # as events do
            await asyncio.sleep(0.01)
    assert heard == [("a", line) for line in (*lines, "the last")]
    assert not node.evicted.done()


async def test_the_block_of_addresses_is_that_which_the_registry_sees(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await place.node("a", stage=1)
    monkeypatch.setattr(service, "host_of", lambda peer: "203.0.113.7")
    second = await place.node("b", stage=1)
    assert [m.block for m in here.reply.view.members] == [""]
    assert [m.block for m in second.reply.view.members] == ["", "203.0.113.0/24"]


async def test_the_evicted_are_told_why_and_get_the_view_without_them(place: Any) -> None:
    a = await place.node("a")
    other = place.client()
    await other.join(joining("new", "a:1"), identity("a"))
    assert "restarted: new joined from a:1" in await asyncio.wait_for(a.evicted, TIMEOUT)
    assert names(a.view) == {"new"}, "which says whether the run's settings have changed"
    await asyncio.wait_for(a.keeping, TIMEOUT)


async def test_reasons_of_any_length_are_heard(place: Any) -> None:
    a, b, _ = [await place.node(name, stage=stage) for stage, name in enumerate("abc")]
    why = "\u26a0 a long traceback" * 1000
    await a.client.leave("a", why)
    assert names(place.registry.describe().view) == {"b", "c"}
    b.client.suspect("c", why)
    decisions = place.registry.machine.history.decisions
    await until(lambda: any("c is suspected by b: \u26a0 a long" in text for text in decisions))


async def test_whom_the_driver_accuses_for_cause_hears_how_long_it_has_to_wait(place: Any) -> None:
    nodes = [await place.node(name, stage=stage) for stage, name in enumerate("abc")]
    client = place.client()
    request = joining("d", "d:1", stage=1)
    await client.join(request, identity("d"))
    await nodes[0].sees(lambda view: "d" in names(view))
    nodes[0].client.suspect("d", "NaN in microbatch 3", NONFINITE)
    view = await nodes[0].sees(lambda view: "d" not in names(view))
    assert "nonfinite: NaN in microbatch 3, according to the driver a" in view.reason
    request.node = "e"
    with pytest.raises(InQuarantine, match="evicted for cause as d") as caught:
        await client.join(request, identity("d"))
    assert 0 < caught.value.seconds <= 30
    description = await client.describe()
    assert [each.instance for each in description.quarantined] == [identity("d").instance]
    assert [each.member.node for each in description.evictions] == ["d"]


async def test_who_is_no_member_any_more_suspects_nobody_and_says_nothing_of_it(
    place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await place.node("a")
    leaver, evicted = await place.node("b"), await place.node("c")
    stub = place.stub()
    await leaver.client.leave("b", "its owner stops it")
    leaver.client.suspect("a", "it closed the link")
    assert not leaver.client._tasks
    await stub.Leave(signed(LeaveRequest(node="c"), "c"))  # without c's own client
    evicted.client.suspect("a", "it closed the link")
    (suspecting,) = evicted.client._tasks
    await suspecting
    assert "suspected a" not in caplog.text


async def test_who_has_a_view_is_told_in_what_the_next_one_differs(place: Any) -> None:
    a = await place.node("a")
    held = a.reply.view
    stub = place.stub()
    shown, strange = (stub.Watch(WatchRequest(known=known)) for known in (held.signature, b"?"))
    assert await strange.read() == NewView(whole=held)
    with pytest.raises(grpc.aio.AioRpcError, match="serves run r, not other"):
        await stub.Watch(WatchRequest(run="other")).read()
    first = asyncio.ensure_future(shown.read())
    await place.node("b")
    for reply in (await first, await strange.read()):
        assert reply.difference.former == held.number
        assert [member.node for member in reply.difference.view.members] == ["b"]
        assert view_in(reply, held) == place.registry.machine.view
    for name in "cdefghijklmnopqrs":  # more than the registry remembers
        await place.node(name)
    newest = place.registry.machine.view
    late = stub.Watch(WatchRequest(known=held.signature))
    assert unpacked(await late.read()) == NewView(whole=newest)


async def test_a_registry_that_is_back_tells_who_has_its_view_nothing_but_the_next(
    tmp_path: Path, serve: Serve
) -> None:
    async with serve(journal=tmp_path / "journal") as before:
        client = before.client()
        held = (await client.join(joining("a", "a:1"), identity("a"))).view
    async with serve(journal=tmp_path / "journal") as again:
        stub = again.stub()
        call = stub.Watch(WatchRequest(known=held.signature))
        reading = asyncio.ensure_future(call.read())
        await again.node("b")  # a is gone
        first = await asyncio.wait_for(reading, TIMEOUT)
        assert first.difference.former == held.number
        key = again.registry.machine.key.public
        assert is_genuine(view_in(first, held), key, RULES.run)


async def test_a_difference_that_does_not_fit_is_refused_and_the_whole_view_asked_for(
    place: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, spoilt_in = list[bytes](), ["banned"]

    def spoilt(former: View, view: View) -> Difference:
        changed = difference(former, view)
        getattr(changed, spoilt_in[0]).append(Splice(gone=1))
        changed.view.committed += 1
        return changed

    a, news = await place.node("a"), place.registry._broadcast.news
    monkeypatch.setattr(broadcast, "difference", spoilt)
    monkeypatch.setattr(
        place.registry._broadcast, "news", lambda known: asked.append(known) or news(known)
    )
    for name, spoilt_in[0] in (("b", "banned"), ("c", "members")):
        await place.node(name)
        view = await a.sees(lambda view, name=name: name in names(view))
        assert not a.evicted.done()
        assert is_genuine(view, place.registry.machine.key.public, RULES.run)
    assert b"" in asked, "the whole one was asked for"
    assert "requesting the whole view" in caplog.text
    monkeypatch.undo()
    await place.node("d")
    await a.sees(lambda view: "d" in names(view))
    assert not a.evicted.done()


async def test_joins_that_come_together_wait_for_one_view(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await place.node("a")
    registry, never = place.registry, asyncio.get_running_loop().time() + 3600
    monkeypatch.setattr(registry.machine, "joins_due", lambda now: never)
    stub = place.stub()
    calls = [stub.Join(joining(name, f"{name}:1")) for name in "bcde"]
    gone = stub.Join(joining("f", "f:1"))
    calls.append(stub.Join(joining("g", "g:1", stage=9)))
    await until(lambda: len(registry._joining) == 6)
    gone.cancel()
    await until(lambda: any(decided.done() for _, decided in registry._joining))
    registry._let_in()
    replies = await asyncio.wait_for(asyncio.gather(*calls[:4]), TIMEOUT)
    assert {reply.view.number for reply in replies} == {a.reply.view.number + 1}
    assert names(View.FromString(unpack(replies[0].packed))) == set("abcde")
    with pytest.raises(grpc.aio.AioRpcError, match="stage 9 does not exist"):
        await calls[4]
    await a.sees(lambda view: names(view) == set("abcde"))


async def test_of_answers_there_are_only_so_many_bytes_on_their_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = MembershipRules(run="r", stages=2, lease=1000)
    async with serve(rules, limits=Limits(answers=1)) as place:  # one at a time
        registry = place.registry
        held = asyncio.Future[None]()  # an answer that takes long
        registry._answers.ask(held, "x")
        assert registry._answers.go(1) == [held]
        stub = place.stub()
        gone = stub.Join(joining("a", "a:1"))
        await until(lambda: "a" in registry._answers.waiting)
        gone.cancel()
        await until(lambda: not registry._answers.waiting)
        second = asyncio.ensure_future(stub.Join(joining("b", "b:1")))
        await until(lambda: "b" in registry._answers.waiting)
        with monkeypatch.context() as soon:  # long before the caller's deadline
            soon.setattr(service, "WAIT_FRACTION", 0.01)
            with pytest.raises(grpc.aio.AioRpcError, match=r"the first to x, with 1 before a:"):
                await stub.Join(joining("a", "a:1"), timeout=TIMEOUT)
        first = asyncio.ensure_future(stub.Join(joining("a", "a:1")))
        await until(lambda: list(registry._answers.waiting) == ["b", "a"])
        registry.evict("b", "a test")
        registry._answered(held)
        view = View.FromString(unpack((await asyncio.wait_for(first, TIMEOUT)).packed))
        assert names(view) == {"a"}, "the newest view when its turn had come"
        with pytest.raises(grpc.aio.AioRpcError, match="b is no longer a member"):
            await asyncio.wait_for(second, TIMEOUT)


async def test_no_more_joins_wait_than_there_is_room_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(limits=Limits(joins=1)) as place:
        never = asyncio.get_running_loop().time() + 3600
        monkeypatch.setattr(place.registry.machine, "joins_due", lambda now: never)
        stub = place.stub()
        waiting = stub.Join(joining("a", "a:1"))
        await until(lambda: bool(place.registry._joining))
        with pytest.raises(grpc.aio.AioRpcError, match="too many nodes wait to join; join again"):
            await stub.Join(joining("b", "b:1"))
        waiting.cancel()


async def test_describe_has_reports_and_decisions(serve: Serve) -> None:
    async with serve(MembershipRules(run="r", stages=2, lease=5000)) as place:
        a = await place.node("a")
        seat = SeatReport(committed=3, phase="forward", message="all is well")
        a.client.report(Report(seats=[seat]))
        described = await until_described(place, lambda d: bool(d.members[0].report.seats))
    assert list(described.members[0].report.seats) == [seat]
    assert described.run_file == 'name = "r"\n'
    assert described.protocol == PROTOCOL
    assert "a joined" in described.decisions[-1]


@pytest.mark.parametrize("lease", [5.0, 0.8])
def test_a_lease_is_renewed_five_times_before_it_is_over(lease: float) -> None:
    times: list[float] = []

    async def write(data: bytes) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) > 10:
            raise Broken("UNAVAILABLE", "enough")

    async def renew() -> None:
        client = RegistryClient(["127.0.0.1:1"])
        reply = JoinReply(lease=lease)
        membership = _Membership(client, "a", reply, lambda view: None, lambda n: None)
        await membership._renew(SimpleNamespace(write=write))  # type: ignore[arg-type]

    virtual_time.run(renew())
    assert times == [pytest.approx(number * lease / 5) for number in range(11)]


async def test_health_and_reflection(place: Any) -> None:
    health = health_pb2_grpc.HealthStub(place.channel())
    for name in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(place.channel())
    answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
    services = {s.name for s in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= services


async def test_input_without_measure_is_refused(place: Any) -> None:
    stub = place.stub()
    await stub.Join(joining("a", "a:1"))
    with pytest.raises(grpc.aio.AioRpcError, match=f"host has {NAME_BYTES + 1} bytes"):
        await stub.Join(joining("x", host="h" * (NAME_BYTES + 1)))
    with pytest.raises(grpc.aio.AioRpcError, match="run has 1000000 bytes"):
        await stub.Watch(WatchRequest(run="r" * 10**6)).read()
    with pytest.raises(grpc.aio.AioRpcError, match="accused has 1000000 bytes"):
        await stub.Suspect(Suspicion(accuser="a", accused="b" * 10**6))
    with pytest.raises(grpc.aio.AioRpcError, match="node has 1000000 bytes"):
        await stub.Leave(LeaveRequest(node="a" * 10**6))
    for bad, message in (
        (Renewal(node="a", report=Report(trouble="m" * RENEWAL_BYTES)), "a renewal of"),
        (Renewal(node="b"), "a renewal of 'b' on the stream of 'a'"),
    ):
        call = stub.KeepAlive()
        await call.write(signed(Renewal(node="a", run="r"), "a"))
        await call.read()
        await call.write(bad)
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await call.read()


async def test_nothing_that_was_refused_is_kept_until_garbage_is_collected(place: Any) -> None:
    """Until then, strangers could send more than there is memory."""
    much, channel = "x" * (2 << 20), place.channel()
    messages = {
        ("KeepAlive", True): Renewal(node="x", report=Report(trouble=much)),
        ("Join", False): joining("x", host=much),
        ("Watch", False): WatchRequest(run=much),
        ("Suspect", False): Suspicion(accuser="x", accused=much),
        ("Examine", False): ExamineRequest(name=much),
    }
    contents = {how: message.SerializeToString() for how, message in messages.items()}
    kinds = {type(message) for message in messages.values()}
    messages.clear()
    gc.collect()
    gc.disable()
    try:
        for (method, streams), content in contents.items():
            path = f"/{SERVICE}/{method}"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                if streams:
                    await channel.stream_stream(path)(iter([content])).read()
                else:
                    await channel.unary_stream(path)(content).read()
            assert error.value.code() is StatusCode.INVALID_ARGUMENT, method
            async with asyncio.timeout(TIMEOUT):
                while any(  # noqa: ASYNC110  the server sets no event
                    type(o) in kinds and o.ByteSize() > 10**6 for o in gc.get_objects()
                ):
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_node_with_too_much_to_say_says_what_there_is_room_for(place: Any) -> None:
    a = await place.node("a")
    seats = [SeatReport(stage=0, committed=3, message="x" * 3000) for _ in range(9)]
    lacking = [Complaint(peer=f"{number:012}") for number in range(900)]
    a.client.report(Report(seats=seats, complaints=lacking, trouble="y" * 9000))
    described = await until_described(place, lambda d: bool(d.members[0].report.seats))
    report = described.members[0].report
    assert report.ByteSize() < RENEWAL_BYTES
    assert [seat.committed for seat in report.seats] == [3] * 9
    assert report.trouble.endswith("yyy...")
    assert 0 < len(report.complaints) == 900 - report.unlisted
    assert not a.evicted.done()


async def test_a_join_that_is_not_signed_by_the_key_that_it_shows_is_refused(place: Any) -> None:
    stub = place.stub()
    unsigned, of_another, changed = joining("x"), joining("x"), joining("x")
    unsigned.ClearField("signature")
    of_another.key = identity("y").public
    changed.address = "y:1"
    for request in (unsigned, of_another, changed):
        with pytest.raises(grpc.aio.AioRpcError, match="join of x is not signed with the key"):
            await stub.Join(request)
    with pytest.raises(grpc.aio.AioRpcError, match="serves run r, not another"):
        await stub.Join(signed(joining("x", run="another"), "x"))
    assert len(place.registry.machine.members) == 0


async def test_nobody_speaks_for_another(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    a, b = await place.node("a"), await place.node("b")
    stub = place.stub()
    of_another_run = LeaveRequest(node="a")
    identity("a").sign_message(of_another_run, "another run")
    as_another_message = signed(LeaveRequest(node="a", why="b"), "a").signature
    for call in (
        lambda: stub.Leave(LeaveRequest(node="a", why="gone")),
        lambda: stub.Leave(signed(LeaveRequest(node="a", why="gone"), "b")),
        lambda: stub.Leave(of_another_run),
        lambda: stub.Suspect(signed(Suspicion(accuser="a", accused="b", why="mad"), "b")),
        lambda: stub.Suspect(Suspicion(accuser="a", accused="b", signature=as_another_message)),
        lambda: stub.KeepAlive(iter([signed(Renewal(node="a", run="r"), "b")])).read(),
        lambda: stub.KeepAlive(iter([Renewal(node="a", run="r", report=Report())])).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"ipv4.* in the name of a, not sig") as e:
            await call()
        assert e.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(JoinRefused, match="node a is already a member"):
        await b.client.join(joining("a", "a:1"), identity("b"))
    description = await until_described(place, lambda d: True)
    assert names(description.view) == {"a", "b"}
    assert not [decision for decision in description.decisions if "suspected" in decision]
    assert not a.evicted.done()
    warnings = [r.getMessage() for r in caplog.records if "in the name of a" in r.getMessage()]
    assert len(warnings) == 7


async def test_streams_and_watchers_are_limited(serve: Serve) -> None:
    async with serve(limits=Limits(streams=1, watchers=1)) as place:
        stub = place.stub()
        await stub.Join(joining("a", "a:1"))
        watch, keep_alive = stub.Watch(WatchRequest()), stub.KeepAlive()
        await watch.read()
        await keep_alive.write(signed(Renewal(node="a", run="r"), "a"))
        await keep_alive.read()
        with pytest.raises(grpc.aio.AioRpcError, match="maximum of watchers"):
            await stub.Watch(WatchRequest()).read()
        with pytest.raises(grpc.aio.AioRpcError, match="maximum of streams"):
            await stub.KeepAlive().read()


async def test_a_view_is_shown_to_a_registry_that_has_none_as_new_and_to_no_other(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    opened = Membership.stream_opened

    def noted(machine: Membership, renewal: Renewal, now: float) -> list[Effect]:
        shown.append(renewal.view.number)
        return opened(machine, renewal, now)

    monkeypatch.setattr(Membership, "stream_opened", noted)
    async with serve(journal=tmp_path / "journal") as place:
        a = await place.node("a")
        await until_described(place, lambda _: len(shown) > 0)
        nodes, port, place.nodes = place.nodes, place.port, []
    async with serve(port=port, journal=tmp_path / "journal") as place:
        before = len(shown)
        await until_described(place, lambda _: len(shown) > before)
        assert not any(shown)
    async with serve(port=port) as place:
        place.nodes = nodes
        await until_described(place, lambda d: names(d.view) == {"a"})
    assert {*shown} == {0, a.view.number}


async def test_a_registry_without_its_journal_goes_on_under_the_settings_of_a_nodes_view(
    serve: Serve,
) -> None:
    def resettle(run_file: str, changes: Iterable[Change]) -> Resettled:
        return Resettled(run_file, replace(rules, steps=20), 1, [])

    rules = replace(RULES, steps=10)
    seat, change = Seat(stage=0), Change(number=1, settings=["steps=20"], step=10)
    member = Member(node="a", key=identity("a").public, seats=[seat], joined=1)
    view = View(run="r", number=9, members=[member], committed=12, changes=[change])
    sign(view, KEY, View())
    renewal = Renewal(node="a", run="r", shown=9, view=view)
    renewal.report.seats.add(stage=0, committed=12)
    async with serve(rules, resettle=resettle) as place:
        stream = place.stub().KeepAlive()
        await stream.write(signed(renewal, "a"))
        await stream.read()
        (described,) = place.registry.describe().members
        assert described.report == renewal.report
        assert place.registry.machine.members.by_name["a"].streaming


async def test_who_waits_for_its_reply_while_settings_change_joins_under_the_new_ones(
    serve: Serve,
) -> None:
    def resettle(run_file: str, changes: Iterable[Change]) -> Resettled:
        return Resettled(run_file, RULES, 0, ["  steps = 20"])

    def told(stage: int) -> SeatReport:
        return SeatReport(stage=stage, committed=5, saved=5, finished=True)

    async with serve(resettle=resettle) as place:
        a, registry = await place.node("a"), place.registry
        a.client.report(Report(seats=map(told, range(RULES.stages + 1))))
        await until_described(place, lambda d: any(m.report.seats for m in d.members))
        other = asyncio.Future[None]()
        registry._answers.ask(other, "other")
        registry._answers.go(2**40)
        joining_late = asyncio.create_task(place.client().join(joining("b", "b:1"), identity("b")))
        await until_described(place, lambda d: "b" in names(d.view))
        registry.command("change", "", ["steps=20"])
        registry._answered(other)
        reply = await joining_late
        assert [change.settings for change in reply.view.changes] == [["steps=20"]]


async def test_nodes_train_on_while_their_registry_is_back_without_its_key(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planaria.bootstrap")
    async with serve() as place:
        a = await place.node("a")
        nodes, port, place.nodes = place.nodes, place.port, []
    async with serve(port=port, authority=Authority.make(0)) as place:
        async with asyncio.timeout(TIMEOUT):
            warning = "a shows view 1, which this registry's key has not signed"
            while warning not in caplog.text:  # noqa: ASYNC110  no event is set
                await asyncio.sleep(0.01)
        stranger = place.client()
        await stranger.join(joining("b", "b:1"), identity("b"))
        with pytest.raises(JoinRefused, match="isn't the run's, or has lost its key: view 2 isn't"):
            await a.client.join(joining("c", "c:1"), identity("c"))
    assert [view.number for view in a.views] == [1]
    async with serve(port=port) as place:
        place.nodes = nodes
        await until_described(place, lambda d: names(d.view) == {"a"})
        assert not a.evicted.done()


def newest_in(path: Path) -> int:
    """Return the number of a journal's newest view."""
    with Journal(path, "r", KEY) as journal:
        assert journal.view is not None
        return int(journal.view.number)


async def test_a_journal_with_an_older_view_gets_the_newer_one_from_the_nodes(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    async with serve(journal=path) as place:
        a = await place.node("a")
        short = path.read_bytes()
        await place.node("b")
        before = (await a.sees(lambda view: "b" in names(view))).number
        nodes, port, place.nodes = place.nodes, place.port, []
    path.write_bytes(short)
    assert newest_in(path) < before
    async with serve(port=port, journal=path) as place:
        place.nodes = nodes
        await until_described(place, lambda d: d.view.number >= before)
        c = await place.node("c")
        assert c.reply.view.number > before
        await a.sees(lambda view: names(view) == {"a", "b", "c"})
        assert not any(node.evicted.done() for node in nodes)
    assert newest_in(path) > before


async def test_an_unwritable_journal_is_said_and_written_later(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    async with serve(journal=path) as place:
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full_disk)
            disk.setattr("planaria.bootstrap.service.JOURNAL_RETRY", 0.0)
            a = await place.node("a")
            description = await until_described(place, lambda d: d.trouble)
            assert "can't write view 1 to the journal" in description.trouble
            assert "No space left on device" in description.trouble
            b = await place.node("b")
            await a.sees(lambda view: names(view) == {"a", "b"})
        await until_described(place, lambda d: not d.trouble)
        assert not b.evicted.done()
        number = b.view.number
    assert newest_in(path) >= number


async def test_address_in_use_and_unencrypted_addresses_are_refused(place: Any) -> None:
    other = RegistryServer(MembershipRules(run="r", stages=2), "")
    with pytest.raises(OSError, match="address is in use"):
        await other.start(place.address)
    with pytest.raises(CredentialsError, match=r"there is no TLS.*--insecure"):
        await other.start("0.0.0.0:0")


async def test_insecure_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    registry = RegistryServer(MembershipRules(run="r", stages=2), "")
    await registry.start("0.0.0.0:0", insecure=True)
    await registry.stop()
    assert any("INSECURE" in r.getMessage() for r in caplog.records)


async def test_join_token(serve: Serve) -> None:
    async with serve(credentials=Credentials(token="secret")) as place:
        await place.node("a")
        for token, message in (("", "requires a join token"), ("wrong", "is not this run's")):
            client = RegistryClient([place.address], Credentials(token=token))
            with pytest.raises(JoinRefused, match=message):
                await client.join(joining("b", "b:1"), identity("b"))
            await client.close()
        health = health_pb2_grpc.HealthStub(place.channel())
        await health.Check(health_pb2.HealthCheckRequest())


async def test_unreachable_registry_is_named_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One attempt is made, with the time that it needs."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 60.0)
    client = RegistryClient(["127.0.0.1:1"])
    with pytest.raises(RegistryUnreachable, match=r"127\.0\.0\.1:1.*UNAVAILABLE.*Check that"):
        await client.join(joining("a"), identity("a"), deadline=60.0)
    await client.close()


async def test_any_of_the_addresses_will_do(place: Any) -> None:
    client = RegistryClient(["127.0.0.1:1", place.address])
    reply = await client.join(joining("a", "a:1"), identity("a"))
    assert names(reply.view) == {"a"}
    await client.close()


async def test_another_service_is_no_registry() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = RegistryClient([f"127.0.0.1:{port}"])
    with pytest.raises(JoinRefused, match="no planaria registry"):
        await client.describe()
    await client.close()
    await server.stop(None)


@pytest.mark.parametrize("addresses", [["nonsense"], ["host:port"]])
def test_addresses_are_checked(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        RegistryClient(addresses)


async def test_every_node_is_asked_to_measure_and_what_it_found_is_described(place: Any) -> None:
    a, b = await place.node("a"), await place.node("b")
    client = place.client()
    reply = await client.measure()
    assert reply.nodes == 2
    async with asyncio.timeout(TIMEOUT):
        assert await a.measurements.get() == await b.measurements.get() == reply.number
    a.client.report(Report(measured=reply.number, links=[LinkReport(peer="b", mbps=90.0)]))
    description = await until_described(
        place, lambda d: any(m.report.measured == reply.number for m in d.members)
    )
    by_node = {m.member.node: m.report for m in description.members}
    assert by_node["a"].links[0].mbps == 90.0
    with pytest.raises(JoinRefused, match="a measurement is in progress; try again in"):
        await client.measure()


async def test_what_a_node_measured_for_a_former_registry_does_not_count_as_new(
    serve: Serve,
) -> None:
    async with serve() as place:
        a = await place.node("a")
        former = await a.client.measure()
        nodes, port, place.nodes = place.nodes, place.port, []
    a.client.report(Report(measured=former.number, links=[LinkReport(peer="b", mbps=90.0)]))
    async with serve(port=port) as place:
        place.nodes = nodes
        await until_described(place, lambda d: any(m.report.measured for m in d.members))
        assert (await a.client.measure()).number > former.number


async def test_who_is_examined_is_dialled_at_its_own_address_only(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[tuple[str, str]] = []

    async def is_there(
        _: object, node: str, address: str, *_rest: object, **_named: object
    ) -> bool | None:
        dialled.append((node, address))
        return {"7401": True, "7402": False}.get(address.rpartition(":")[2])

    monkeypatch.setattr(GrpcTransport, "is_alive", is_there)
    client = place.client()
    for port, answers in ((7401, True), (7402, False), (7403, None)):
        request = ExamineRequest(name="10.0.0.1:22", port=port)
        reply = await client.examine(request, TIMEOUT)
        assert reply.host == "127.0.0.1"
        assert (reply.there if reply.HasField("there") else None) is answers
    assert dialled == [("10.0.0.1:22", f"127.0.0.1:{port}") for port in (7401, 7402, 7403)]
    reply = await client.examine(ExamineRequest(wanted=1000), TIMEOUT)
    assert (len(reply.load), len(dialled)) == (1000, 3), "without a port nobody is dialled"


async def test_an_examination_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def is_there(*_: object, **_named: object) -> bool:
        asked.set()
        await answer.wait()
        return True

    monkeypatch.setattr(GrpcTransport, "is_alive", is_there)
    async with serve(limits=Limits(examinations=1)) as place:
        client = place.client()
        for request in (
            ExamineRequest(port=65536),
            ExamineRequest(wanted=LOAD_BYTES + 1),
            ExamineRequest(load=bytes(LOAD_BYTES + 1)),
            ExamineRequest(name="n" * (NAME_BYTES + 1)),
        ):
            with pytest.raises(RegistryUnreachable, match="INVALID_ARGUMENT"):
                await client.examine(request, TIMEOUT)
        first = asyncio.create_task(client.examine(ExamineRequest(port=1), TIMEOUT))
        await asyncio.wait_for(asked.wait(), TIMEOUT)
        with pytest.raises(RegistryUnreachable, match="RESOURCE_EXHAUSTED"):
            await client.examine(ExamineRequest(), TIMEOUT)
        answer.set()
        assert (await first).there
        await client.examine(ExamineRequest(), TIMEOUT)


async def test_registries_of_two_runs_are_not_one(serve: Serve) -> None:
    other = MembershipRules(run="other", stages=2)
    async with serve() as first, serve() as same, serve(rules=other) as another:
        client = RegistryClient([first.address, same.address])
        await client.check_one_run(TIMEOUT)
        await client.close()
        client = RegistryClient([first.address, another.address])
        with pytest.raises(JoinRefused, match=r"serves r, .* serves other. Name those of one run"):
            await client.check_one_run(TIMEOUT)
        await client.close()


async def test_who_keeps_to_a_run_passes_over_other_registries_and_reports_them(
    serve: Serve,
) -> None:
    async with serve() as own, serve(MembershipRules("other", stages=1)) as another:
        client = RegistryClient([another.address, own.address], run="r")
        await client.check_one_run(TIMEOUT)
        assert (await client.describe()).run == "r"
        client.report(report := Report(trouble="its disk is full"))
        assert report.trouble == (
            f"its disk is full; {another.address}: this registry serves run other, not r; "
            "check the address"
        )
        await client.close()


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.1.2.3:5555", "10.1.2.3"),
        ("ipv6:%5B2001:db8::1%5D:5555", "2001:db8::1"),
        ("ipv6:[::1]:5555", "::1"),
        ("unix:/run/registry.sock", ""),
        ("", ""),
    ],
)
def test_the_host_of_a_peer_is_read(peer: str, host: str) -> None:
    assert host_of(peer) == host


async def test_who_isnt_on_the_registrys_machine_names_no_address_there(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = await place.node("near", address="127.0.0.1:9")
    monkeypatch.setattr(service, "host_of", lambda peer: "192.0.2.7")
    for address in ("127.0.0.1:10", "localhost:10", "169.254.1.2:10", "unix:/var/run/docker.sock"):
        with pytest.raises(JoinRefused, match=f"the address '{address}'"):
            await place.node("far", address=address)
    await place.node("far", address="192.0.2.7:10")
    assert names(near.view) <= {"near", "far"}


@pytest.mark.parametrize(
    ("liar", "why"),
    [
        (Member(node="../../etc/passwd"), "node id '../../etc/passwd' is not a valid name"),
        (Member(node="n", address="unix:/var/run/docker.sock"), "the address"),
        (Member(node="n", host="\x1b[2J"), "the host"),
    ],
)
async def test_a_registry_that_names_what_cannot_be_is_not_believed(
    place: Any, liar: Member, why: str
) -> None:
    client = place.client()
    reply = await client.join(joining("honest", "h:1"), identity("honest"))
    lie = View(run="r", number=reply.view.number + 1, members=[*reply.view.members, liar])
    sign(lie, KEY, reply.view)
    views: list[View] = []
    membership = _Membership(client, "honest", reply, views.append, lambda number: None)
    place.registry._broadcast.publish(lie)
    reason = await asyncio.wait_for(membership._watch(client._channel(client._address)), TIMEOUT)
    assert reason.startswith("it sent an invalid view: ") and why in reason
    assert not views
    place.registry._broadcast.publish(reply.view)


async def test_a_view_of_another_history_or_of_another_key_is_not_taken(place: Any) -> None:
    client = place.client()
    reply = await client.join(joining("honest", "h:1"), identity("honest"))
    own, views = reply.view, list[View]()
    membership = _Membership(client, "honest", reply, views.append, lambda number: None)

    async def watched(view: View) -> str:
        place.registry._broadcast.publish(view)
        return await asyncio.wait_for(membership._watch(client._channel(client._address)), TIMEOUT)

    def next_of(former: View, key: Identity, number: int) -> View:
        view = View(run="r", number=number, members=own.members)
        sign(view, key, former)
        return view

    forged = next_of(own, identity("honest"), own.number + 1)
    assert "view 2 isn't signed by the run's key: start the registry with" in await watched(forged)
    unknown = next_of(View(), KEY, own.number)
    for view in (unknown, next_of(unknown, KEY, own.number + 1)):
        membership.evicted = ""
        await watched(view)
        assert f"view {view.number} of the registry doesn't follow view 1" in membership.evicted
    assert not views
    place.registry._broadcast.publish(own)


@pytest.mark.parametrize(
    ("then", "error", "why"),
    [
        ("DEADLINE_EXCEEDED", JoinRefused, "a has the same key"),
        ("UNAVAILABLE", RegistryUnreachable, "can't be reached"),
    ],
)
def test_who_was_told_to_wait_hears_why_though_a_last_try_had_no_time_for_it(
    then: str, error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = itertools.chain(
        [("ABORTED", "a has the same key")], itertools.repeat((then, "no answer"))
    )

    async def call(*_: object) -> None:
        raise Broken(*next(answers))

    async def ask() -> None:
        client = RegistryClient(["127.0.0.1:1"])
        monkeypatch.setattr(client, "_call", call)
        with pytest.raises(error, match=why):
            await client.describe(deadline=1.0)
        await client.close()

    virtual_time.run(ask())


async def test_members_outlive_another_runs_registry_at_the_address(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planaria.bootstrap.client")
    async with serve(journal=tmp_path / "journal") as place:
        a = await place.node("a")
        port, place.nodes = place.port, []
    async with serve(MembershipRules("other", stages=1), port):
        await until(lambda: "this registry serves run other, not r" in caplog.text)
    assert f"the registry at 127.0.0.1:{port} is away (" in caplog.text
    async with serve(port=port, journal=tmp_path / "journal") as place:
        place.nodes = [a]
        await place.node("b")
        await a.sees(lambda view: names(view) == {"a", "b"})
        await until(lambda: "the registry is back" in caplog.text)
        assert not a.evicted.done()


async def test_an_eviction_without_a_signed_view_is_not_believed(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.bootstrap.client.CONFIRMED", 0.01)
    async with serve() as place:
        a = await place.node("a")
        place.registry._carry_out([Evict("a", "because I say so")])
        await until(lambda: "evicts this node without a signed view: because I say" in caplog.text)
        await place.node("b")
        await a.sees(lambda view: names(view) == {"a", "b"})
        assert not a.evicted.done()


async def test_a_former_member_waits_for_its_run_to_join_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as place:
        client = RegistryClient([place.address])
        await client.join(joining("a", "a:1"), identity("a"))
        port = place.port
    async with serve(MembershipRules("other", stages=1), port):
        with pytest.raises(RegistryUnreachable, match="serves run other, not r"):
            await client.join(joining("a2", "a:1"), identity("a"), deadline=2.0)
    await client.close()
