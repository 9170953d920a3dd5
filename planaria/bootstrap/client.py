"""The node's client of the registry: join, keep membership, watch views, suspect, leave."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.address import Address, Reach, reach_by
from planaria.bootstrap.authority import Role, key_in
from planaria.bootstrap.authorization import OPERATOR_CALLS, REGISTRY_CALLS
from planaria.bootstrap.credentials import PLAIN, Credentials, clock_hint
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.escaping import first_misspelt
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.transport import Broken, Channel, Stream, Transport, parse
from planaria.bootstrap.truncation import shorten, shorten_all, truncated_report
from planaria.bootstrap.views import follows, is_genuine, unpack, unpacked, view_in

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts
RENEWALS = 5  # renewals per lease, so that several may be late
ATTEMPT = 5.0  # seconds until one attempt times out
JOIN = 15.0  # seconds for a join attempt, since thousands may join at once
COMMAND = 60.0  # seconds for an operator's command
SUSPECT_DEADLINE = 2.0  # seconds
LEAVE_DEADLINE = 2.0  # seconds
CONFIRMED = 5.0  # seconds between an eviction's notice and its view, in either order
MESSAGE_BYTES = 16 * 2**20  # equal to the service's limit
REPORT_BYTES = 15 * 2**10  # share of the service's RENEWAL_BYTES
LONGEST_TEXT = 5_000  # characters per text field of a registry: terminals are slow
LONGEST_WHY = 500  # characters of a reason: the service takes 2 KiB
LINE_BYTES = 4  # maximum encoding overhead per event line
MOST_QUEUED = 1000  # events queued while the registry is unreachable

_RETRIED = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "ABORTED",  # the registry waits for other members
)
_ANOTHER_RUN = "NOT_FOUND"  # to a member this is an address without its registry
_LOGGED_BY_MEMBERSHIP = (
    "UNAVAILABLE",  # the registry is unreachable
    "DEADLINE_EXCEEDED",
    _ANOTHER_RUN,
    "FAILED_PRECONDITION",  # this node is no longer a member
)


class RegistryUnreachable(UserError):  # noqa: N818  what it says
    """The registry hasn't answered in time; the message names address, error and remedy."""


class JoinRefused(UserError):  # noqa: N818  an answer, not a fault
    """The registry refused the join, and a retry won't help; the message names the remedy."""


class InQuarantine(JoinRefused):
    """This instance was evicted for cause and may rejoin in `seconds`."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


class RegistryClient:
    """A client of one registry, at any of its addresses. Serves one node at a time, on one loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials = PLAIN,
        run: str = "",
        transport: Transport | None = None,
    ) -> None:
        """`addresses`: the registry's, HOST:PORT each, at least one. `run`: the only one whose
        registry counts; empty: any, until the first join. `transport`: gRPC, with these
        credentials, unless given. Raises AddressError."""
        self._addresses = [str(Address.to_dial(address)) for address in addresses]
        self._transport = transport or GrpcTransport(credentials, OPTIONS)
        self._at = 0  # index of the address in use
        self._heard = False  # whether the registry has ever answered
        self._channels: dict[str, Channel] = {}
        self._report = pb.Report()
        self._events: deque[str] = deque(maxlen=MOST_QUEUED)
        self._due = asyncio.Event()  # renew at once
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._node = self._left = ""  # nodes of the last join and the last leave
        self._run, self._identity = run, Identity.generate()  # of the last join
        self._misled: dict[str, str] = {}  # by address, the answer of another run's registry there
        certified = credentials.certified
        self._key = b"" if certified is None else key_in(certified.pair.authority)
        """The run's key, which signs views: from the authority's certificate or the first join."""

    async def join(
        self, request: pb.JoinRequest, identity: Identity, deadline: float = 30.0
    ) -> pb.JoinReply:
        """Joins the run with a signed request; later messages are signed with the same key. Dials
        silent members first if the registry requests it. Raises JoinRefused or its subclass
        InQuarantine, and RegistryUnreachable after `deadline` seconds."""
        clock = asyncio.get_running_loop().time
        end = clock() + deadline
        message = pb.JoinRequest()
        message.CopyFrom(request)
        message.key = identity.public
        while True:
            identity.sign_message(message, message.run)
            reply: pb.JoinReply = await self._retry("Join", message, end - clock(), JOIN)
            if reply.quarantine:
                raise InQuarantine(reply.reason, reply.quarantine)
            _unpack(reply)
            if problem := first_misspelt([*reply.view.members, *reply.unheard]):
                raise JoinRefused(f"the registry's reply is invalid: {problem}")
            if not reply.question:
                break
            log.info("%s", reply.reason)
            message.question = reply.question
            message.answered[:] = await self._dial(reply)
        key = self._key or reply.key  # the first join pins the run's key
        if not is_genuine(reply.view, key, reply.run):
            raise JoinRefused(
                f"the registry at {self._address} isn't the run's, or has lost its key: view "
                f"{reply.view.number} isn't signed by the run's key. Check the address; start the "
                "registry with the folder of its key (--authority DIR), or this node anew"
            )
        self._key = key
        self._node, self._run, self._identity = request.node, request.run, identity
        self._report = pb.Report()
        self._events.clear()
        return reply

    async def describe(self, deadline: float = 30.0) -> pb.Description:
        """The registry's description of the run. Raises JoinRefused (a wrong token, another
        service), and RegistryUnreachable."""
        request = pb.DescribeRequest(run=self._run)
        described: pb.Description = await self._retry("Describe", request, deadline)
        shorten_all(described, LONGEST_TEXT)
        return described

    async def show(self, figures: bool = False, deadline: float = 30.0) -> bytes:
        """The state of the registry's page as JSON, or its Prometheus metrics. Call `describe`
        first. Raises JoinRefused (also if there is no page) and RegistryUnreachable."""
        reply: pb.Shown = await self._retry("Show", pb.ShowRequest(figures=figures), deadline)
        return reply.content

    async def measure(self, deadline: float = 30.0) -> pb.MeasureReply:
        """Starts a link measurement on every node. Raises JoinRefused (also if the last one was
        too recent) and RegistryUnreachable."""
        reply: pb.MeasureReply = await self._retry("Measure", pb.MeasureRequest(), deadline)
        return reply

    async def examine(self, request: pb.ExamineRequest, seconds: float) -> pb.ExamineReply:
        """Has the registry dial this machine back, or time a transfer, in a single attempt. Raises
        RegistryUnreachable."""
        try:
            reply: pb.ExamineReply = await self._call("Examine", request, seconds)
        except Broken as broken:
            raise RegistryUnreachable(f"{self._address} said: {_in_words(broken)}") from broken
        return reply

    async def command(self, method: str, request: Message) -> Any:
        """Calls a method of the `Operator` service once, without retries, and returns its reply.
        Raises JoinRefused and RegistryUnreachable."""
        await self.describe()
        try:
            return await self._call(method, request, COMMAND, OPERATOR_CALLS)
        except Broken as broken:
            if broken.code in _RETRIED:
                raise RegistryUnreachable(f"{self._address} said: {_in_words(broken)}") from broken
            raise JoinRefused(_refusal(broken, self._address)) from broken

    async def keep_membership(
        self,
        node: str,
        reply: pb.JoinReply,
        on_view: Callable[[pb.View], None],
        on_evicted: Callable[[str], None],
        on_measure: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Keeps a node a member: renews its lease, delivers views and measurement numbers until
        eviction; returns after `on_evicted`. View numbers increase. Reconnects for as long as the
        registry is unreachable, or another run's registry answers. An eviction counts only with a
        view without this node, signed by the run's key. Raises the errors of the callbacks."""
        membership = _Membership(self, node, reply, on_view, on_measure)
        clock, pause = asyncio.get_running_loop().time, FIRST_PAUSE
        while True:
            began = clock()
            was_misled = membership.another_run
            why = await membership.connect()
            if membership.evicted:
                if self._left != node:
                    on_evicted(membership.evicted)
                return
            if membership.lost is None or membership.another_run > was_misled:
                log.warning(
                    "the registry at %s is away (%s); this node continues in view %d, and keeps "
                    "retrying",
                    self._address,
                    why,
                    membership.view.number,
                )
                membership.lost = membership.lost or clock()
                if clock() - began > LONGEST_PAUSE:  # the connection had worked: retry at once
                    pause = FIRST_PAUSE
                    continue
            await self._next_address()
            await asyncio.sleep(pause / len(self._addresses))
            pause = min(2 * pause, LONGEST_PAUSE)

    def report(self, report: pb.Report) -> None:
        """Sets the node's report for the next renewal, which is sent at once if the report is news.
        Adds the addresses at which another run's registry has answered."""
        misled = [f"{address}: {why}" for address, why in self._misled.items()]
        report.trouble = "; ".join(filter(None, [report.trouble, *misled]))
        former, self._report = self._report, truncated_report(report, REPORT_BYTES)
        if _urgent_parts(report) != _urgent_parts(former):
            self._due.set()

    def tell(self, line: str) -> None:
        """Queues an event log line for a later renewal. A full queue drops its oldest line."""
        self._events.append(line)

    def suspect(self, accused: str, why: str, cause: pb.Cause = pb.SILENT) -> None:
        """Reports a silent node for a liveness check, or accuses it of `cause` with evidence `why`.
        Returns at once; the outcome arrives as a view. A node that has left suspects nobody,
        because its peers close their links."""
        if self._node == self._left:
            return
        suspicion = pb.Suspicion(accuser=self._node, accused=accused, cause=cause)
        suspicion.why = shorten(why, LONGEST_WHY)
        self.sign(suspicion)
        task = asyncio.get_running_loop().create_task(self._suspect(suspicion))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def leave(self, node: str, why: str) -> None:
        """Announces the node's departure, after which `on_evicted` is not called. An unreachable
        registry detects the departure itself."""
        self._left = node
        goodbye = pb.LeaveRequest(node=node, why=shorten(why, LONGEST_WHY))
        self.sign(goodbye)
        try:
            await self._call("Leave", goodbye, LEAVE_DEADLINE)
        except Broken as broken:
            log.warning(
                "could not announce the departure to %s: %s", self._address, _in_words(broken)
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.warning("could not announce the departure to %s: it is unreachable", self._address)

    def sign(self, message: pb.Suspicion | pb.LeaveRequest | pb.Renewal) -> None:
        """Signs a message with the key of the node that joined last."""
        self._identity.sign_message(message, self._run)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for open_channel in self._channels.values():
            await open_channel.close()
        self._channels.clear()

    async def reach(self) -> Reach:
        """The address ranges in which nodes of this registry may be dialled."""
        return await reach_by(self._addresses)

    async def check_one_run(self, seconds: float = 3.0) -> None:
        """Queries the run of every address in parallel and ignores addresses without an answer.
        Raises JoinRefused when the runs differ, and no one counts alone."""
        if self._run or len(self._addresses) == 1:
            return
        runs = await asyncio.gather(
            *(self._run_at(address, seconds) for address in self._addresses)
        )
        answers = {address: run for address, run in zip(self._addresses, runs, strict=True) if run}
        if len(set(answers.values())) > 1:
            conflict = ", ".join(f"{address} serves {run}" for address, run in answers.items())
            raise JoinRefused(
                f"--join names registries of different runs: {conflict}. Name those of one run"
            )

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        return self._addresses[self._at]

    def _next_lines(self, room: int) -> list[str]:
        """Takes queued event lines up to `room` bytes; drops a line longer than half a report."""
        lines: list[str] = []
        while self._events:
            size = len(self._events[0].encode()) + LINE_BYTES
            fits = size <= REPORT_BYTES // 2
            if fits and size > room:
                break
            line = self._events.popleft()
            if fits:
                lines.append(line)
                room -= size
        return lines

    async def _dial(self, reply: pb.JoinReply) -> list[str]:
        """Dials the members that the registry doesn't hear; returns those that answer."""
        reach, seconds = await self.reach(), reply.dial_seconds
        answers = await asyncio.gather(
            *(
                self._transport.is_alive(member.node, member.address, seconds, reach)
                for member in reply.unheard
            )
        )
        return [member.node for member, alive in zip(reply.unheard, answers, strict=True) if alive]

    async def _run_at(self, address: str, seconds: float) -> str:
        """The run served at an address; empty: no answer."""
        try:
            described: pb.Description = await self._call(
                "Describe", pb.DescribeRequest(), seconds, address=address
            )
        except Broken:
            return ""  # the caller reports it
        return described.run

    def _channel(self, address: str) -> Channel:
        if address not in self._channels:
            self._channels[address] = self._transport.channel(address, Role.REGISTRY)
        return self._channels[address]

    async def _call(
        self,
        method: str,
        request: Message,
        seconds: float,
        service: ServiceDescriptor = REGISTRY_CALLS,
        address: str = "",
    ) -> Any:
        """Calls a method once, at an address; empty: the one in use. Raises Broken."""
        path, content = f"{service.full_name}/{method}", request.SerializeToString()
        answer = await self._channel(address or self._address).call(path, content, seconds)
        kind: type[Message] = GetMessageClass(service.methods_by_name[method].output_type)
        return parse(answer, kind)

    async def _next_address(self) -> None:
        """Goes on with the registry's next address. Closes the channel: a restarted container may
        have a new IP address under the same name, and an open channel resolves it late."""
        failed = self._channels.pop(self._address, None)
        if failed is not None:
            await failed.close()
        self._at = (self._at + 1) % len(self._addresses)

    async def _retry(
        self, method: str, request: Message, deadline: float, attempt: float = ATTEMPT
    ) -> Any:
        """Calls a method at the registry's addresses in turn until one answers or refuses."""
        clock = asyncio.get_running_loop().time
        end, pause, logged = clock() + deadline, FIRST_PAUSE, ""
        refusal: Broken | None = None  # the newest ABORTED reply, which asks to wait
        while True:
            try:
                seconds = min(attempt, max(0.1, end - clock()))
                answer = await self._call(method, request, seconds)
                self._heard = True
                return answer
            except Broken as broken:
                if broken.code not in _RETRIED and not (self._run and self._is_misled(broken)):
                    raise JoinRefused(_refusal(broken, self._address)) from broken
                if broken.code != "DEADLINE_EXCEEDED":
                    refusal = broken if broken.code == "ABORTED" else None
                if clock() + pause >= end:  # the last attempt may have been too short for an answer
                    self._give_up(refusal or broken, deadline)
                why = broken.details
                if broken.code == "ABORTED" and why != logged:
                    logged = why
                    log.info("waiting to join: %s", why)
                elif not logged and (deadline > ATTEMPT or not self._heard):
                    logged = why
                    log.warning(
                        "the registry at %s does not answer%s, trying for %.0f s: %s",
                        self._address,
                        " any more" if self._heard else " yet",
                        end - clock(),
                        _in_words(broken),
                    )
            await self._next_address()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_misled(self, broken: Broken) -> bool:
        """Whether another run's registry has answered at the address in use; remembers that."""
        if broken.code != _ANOTHER_RUN:
            return False
        self._misled[self._address] = broken.details
        return True

    def _give_up(self, broken: Broken, deadline: float) -> NoReturn:
        if broken.code == "ABORTED":
            raise JoinRefused(_refusal(broken, self._address)) from broken
        raise RegistryUnreachable(
            f"the registry at {' or '.join(self._addresses)} can't be reached, tried for "
            f"{deadline:g} s; {self._address} said: {_in_words(broken)}"
            f"{clock_hint(_in_words(broken))}. Check that it runs "
            "(`planaria bootstrap`), that host and port are right, that a firewall lets the port "
            "through, and that both sides use TLS or neither (one that began with an invite has "
            "TLS: --join INVITE)"
        ) from broken

    async def _suspect(self, suspicion: pb.Suspicion) -> None:
        accused, why = suspicion.accused, suspicion.why
        try:
            await self._call("Suspect", suspicion, SUSPECT_DEADLINE)
            log.info("suspected %s (%s)", accused, why)
        except Broken as broken:
            logged = broken.code in _LOGGED_BY_MEMBERSHIP
            level = logging.DEBUG if logged else logging.WARNING
            log.log(
                level,
                "suspected %s (%s), but the call to %s failed: %s",
                accused,
                why,
                self._address,
                _in_words(broken),
            )


_NOT_SIGNED = (
    "view {} isn't signed by the run's key: start the registry with the folder of its key "
    "(--authority DIR)"
)


class _Misfit(Exception):  # noqa: N818  what it says
    """A received difference between views does not apply to this node's view."""


class _Membership:
    """One node's membership across its connections to the registry."""

    def __init__(
        self,
        client: RegistryClient,
        node: str,
        reply: pb.JoinReply,
        on_view: Callable[[pb.View], None],
        on_measure: Callable[[int], None],
    ) -> None:
        self.client, self.node, self.view = client, node, reply.view
        self.pause = reply.lease / RENEWALS
        self.on_view, self.on_measure = on_view, on_measure
        self.evicted = ""  # the reason, once a view confirms it
        self.notice = ""  # the reason on this connection, which the registry doesn't sign
        self.lost: float | None = None  # time at which the registry was found unreachable
        self.another_run = False  # whether another run's registry has answered meanwhile
        self.shows = False  # whether the first renewal carries the view, on the registry's request
        self.probe = 0  # probe number for the next renewal

    async def connect(self) -> str:
        """Serves one connection until it breaks or the node is evicted; returns the reason."""
        channel = self.client._channel(self.client._address)
        self.notice = ""
        tasks = [
            asyncio.create_task(self._keep_alive(channel)),
            asyncio.create_task(self._watch(channel)),
        ]
        try:
            _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if others and (self.notice or self._is_absent()):
                await asyncio.wait(others, timeout=CONFIRMED)  # for the view, or for the reason
            done = [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._is_absent():
            self.evicted = self.notice or f"view {self.view.number} lacks this node"
        whys = []
        for task in done:
            try:
                whys.append(task.result())
            except Broken as broken:
                whys.append(_in_words(broken))
                self.another_run |= self.client._is_misled(broken)
        return "; ".join(whys)

    async def _keep_alive(self, channel: Channel) -> str:
        self.probe = 0
        stream = channel.stream(f"{REGISTRY_CALLS.full_name}/KeepAlive")
        renewing = asyncio.create_task(self._renew(stream))
        try:
            while (data := await stream.read()) is not None:
                notice = parse(data, pb.Notice)
                self._answered()
                if notice.evicted:
                    self.notice = notice.evicted
                    return f"it evicts this node without a signed view: {notice.evicted}"
                if notice.measure:
                    self.on_measure(notice.measure)
                if notice.probe:
                    self.probe = notice.probe
                    self.client._due.set()
        except Broken as broken:
            # Sends the view on request only: thousands reconnect after a restart, and the
            # registry has rarely lost its state.
            self.shows = broken.code == "OUT_OF_RANGE"
            raise
        finally:
            renewing.cancel()
            stream.cancel()
        return "it ended the stream"

    async def _renew(self, stream: Stream) -> None:
        with suppress(Broken):  # `_keep_alive` reports it
            first = pb.Renewal(
                node=self.node,
                report=self.client._report,
                run=self.view.run,
                member=next((m for m in self.view.members if m.node == self.node), None),
                view=self.view if self.shows else None,
                shown=self.view.number,
            )
            self.client.sign(first)
            await stream.write(first.SerializeToString())
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.client._due.wait(), self.pause)
                self.client._due.clear()
                probe, self.probe = self.probe, 0
                report = self.client._report
                happened = self.client._next_lines(REPORT_BYTES - report.ByteSize())
                renewal = pb.Renewal(node=self.node, report=report, probe=probe, happened=happened)
                await stream.write(renewal.SerializeToString())

    async def _watch(self, channel: Channel) -> str:
        """Receives views as differences from this node's view. If a result does not match the
        registry's signature, requests the whole view, once per connection."""
        try:
            return await self._hear(channel, self.view.signature)
        except _Misfit as misfit:
            log.warning("%s: requesting the whole view", misfit)
        try:
            return await self._hear(channel, b"")
        except _Misfit as misfit:
            return str(misfit)

    async def _hear(self, channel: Channel, signature: bytes) -> str:
        """Receives views until the stream ends; returns why. `signature`: of this node's view;
        empty requests a whole view. Raises _Misfit."""
        request = pb.WatchRequest(run=self.view.run, node=self.node, known=signature)
        stream = channel.stream(f"{REGISTRY_CALLS.full_name}/Watch")
        last = self.view  # base of the next difference
        try:
            await stream.write(request.SerializeToString())
            while (data := await stream.read()) is not None:
                try:
                    message = unpacked(parse(data, pb.NewView))
                    last = view = view_in(message, last)
                except ValueError as error:
                    raise _Misfit(f"invalid difference between views: {error}") from error
                if view.number < self.view.number or view == self.view:
                    continue
                addresses = {m.node: m.address for m in self.view.members}
                new = (m for m in view.members if addresses.get(m.node) != m.address)
                genuine = is_genuine(view, self.client._key, self.client._run)
                problem = "" if genuine else _NOT_SIGNED.format(view.number)
                if problem and message.HasField("difference"):
                    former = message.difference.former
                    raise _Misfit(f"by a difference from view {former}, {problem}")
                if problem := problem or first_misspelt(new):
                    return f"it sent an invalid view: {problem}"
                if not follows(view, self.view):
                    self.evicted = (
                        f"view {view.number} of the registry doesn't follow view "
                        f"{self.view.number} of this node: it continued from an older view, or two "
                        "registries issue views (they must share a journal or store)"
                    )
                    return "evicted"
                self.view = view
                self.on_view(view)
                if self._is_absent():
                    return "evicted"
        finally:
            stream.cancel()
        return "it ended the stream of views"

    def _is_absent(self) -> bool:
        """Whether the newest view lacks this node."""
        return all(member.node != self.node for member in self.view.members)

    def _answered(self) -> None:
        """Notes that the run's registry has answered at the address in use."""
        self.client._misled.pop(self.client._address, None)
        if self.lost is not None:
            away = asyncio.get_running_loop().time() - self.lost
            log.info("the registry is back after %.0f s, at %s", away, self.client._address)
            self.lost, self.another_run = None, False


OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_PAUSE)),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # also the connection timeout
    ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_PAUSE)),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # otherwise 60 s, whatever the keepalive timeout
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # otherwise each view is answered with a ping
)


def _unpack(reply: pb.JoinReply) -> None:
    """Decodes the packed view of a reply in place. Raises JoinRefused."""
    if not reply.packed:
        return
    try:
        reply.view.ParseFromString(unpack(reply.packed))
    except (ValueError, DecodeError) as error:
        raise JoinRefused(f"the registry's reply is invalid: {error}") from error
    reply.ClearField("packed")


def _urgent_parts(report: pb.Report) -> tuple[object, ...]:
    """The parts of a report whose change is sent at once."""
    seats = [
        (seat.message, seat.stopped, seat.finished, seat.finished and seat.saved)
        for seat in report.seats
    ]
    return seats, list(report.complaints), report.leaving, report.stalled_seconds > 0


def _in_words(broken: Broken) -> str:
    return f"{broken.code}: {broken.details or 'no details'}"


def _refusal(broken: Broken, address: str) -> str:
    if broken.code == "UNIMPLEMENTED":
        return f"the service at {address} is no planaria registry; check host and port"
    return broken.details or f"{address} refused the call: {broken.code}"
