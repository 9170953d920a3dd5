"""The registry as a service: feeds the membership machine and carries out its effects."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.address import PORTS, Address, Reach, not_to_dial
from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import Role
from planaria.bootstrap.authorization import (
    OPERATOR_CALLS,
    REGISTRY_CALLS,
    Gate,
    check_join,
    check_signed,
    host_of,
)
from planaria.bootstrap.broadcast import Broadcast, Waker
from planaria.bootstrap.connection_limits import limit_message, open_descriptors
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.effects import Dial, Effect, Evict, Issue, Probe, Refused, not_served
from planaria.bootstrap.enrolment import OperatorServer
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.failure_domains import block_of
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.identity import instance_of
from planaria.bootstrap.joining import JoinAttempt
from planaria.bootstrap.journal import Journal, JournalError
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.operator_orders import BACK, CHANGE, changes_in_force
from planaria.bootstrap.reply_budget import ReplyBudget
from planaria.bootstrap.rules import PROTOCOL, MembershipRules, Resettle, numbered
from planaria.bootstrap.stop_signals import stop_signals
from planaria.bootstrap.store import NotLeading, Store
from planaria.bootstrap.transport import AcceptedStream, Broken, Transport

log = logging.getLogger(__name__)

SERVICE = REGISTRY_CALLS.full_name
TICK = 0.05  # seconds
GARBAGE = 100_000, 20, 10  # collection thresholds; a collection walks the state of every open call
PAUSED_ABOVE = 1.0  # seconds between two ticks above which the registry counts as paused
JOURNAL_RETRY = 2.0  # seconds before a failed journal write is retried
FAREWELL = 1.0  # seconds granted to open calls when the registry stops
WAIT_FRACTION = 0.9  # of a joiner's deadline, after which the registry asks it to join again
LONGEST_WAIT = 60.0  # seconds, for a joiner without a deadline
LONGEST_REPLY = 20.0  # seconds; a slower reply no longer occupies the reply budget
FIRST_RENEWAL = 30.0  # seconds allowed for a stream's first renewal; all may come at once

MESSAGE_BYTES = 16 * 2**20  # a view of 10,000 nodes with long names is smaller
BETWEEN_MEASUREMENTS = 10.0  # seconds; each measurement loads every link
RENEWAL_BYTES = 16 * 2**10  # limit of a renewal after the first of a stream
NAME_BYTES = 256  # ids, addresses, hashes, names for people
WHY_BYTES = 2048
LOAD_BYTES = 4 * 2**20  # limit of a measurement payload, in either direction
DIAL_BACK = 5.0  # seconds in which an examined caller must answer a dial-back


@dataclass(frozen=True)
class Limits:
    """Limits on concurrent calls and buffers."""

    streams: int = 20_000  # KeepAlive
    watchers: int = 20_000
    joins: int = 1_000  # waiting for a view
    answers: int = 128 * 2**20  # bytes of join replies in flight
    examinations: int = 16


ViewStore = Journal | Store  # durable storage of views before they are published


class RegistryServer:
    """One run's registry. Call `start`, then `wait` until it fails or `stop` is called."""

    def __init__(
        self,
        rules: MembershipRules,
        run_file: str,
        journal: ViewStore | None = None,
        limits: Limits = Limits(),
        admission: Admission | None = None,
        resettle: Resettle | None = None,
    ) -> None:
        """`run_file`: the run's TOML, sent to joining nodes. `admission` None: key and bans stay in
        memory, and invites are disabled. `resettle` None: settings can't be changed. The caller
        closes the journal after `stop`. Raises ValueError if the journal's view does not belong to
        this run."""
        self._admission, self._resettle = admission or Admission(None, certifies=False), resettle
        self.machine = Membership(rules, self._admission.key)
        self.run_file = self._first_file = run_file
        self._journal, self._limits = journal, limits
        self._broadcast = Broadcast(run_file)
        self._joining: list[tuple[JoinAttempt, asyncio.Future[pb.JoinReply | Refused]]] = []
        self._answers = ReplyBudget[asyncio.Future[None]](limits.answers)
        """Each call by its turn, which is done when it may be answered."""
        self._streams: dict[str, _MemberStream] = {}  # newest stream of each node
        self._held: Counter[str] = Counter()  # places of open calls, by kind
        self._logged = 0
        self._measurements, self._measured_at = 0, 0.0
        self._dialling: dict[asyncio.Task[None], None] = {}
        self._unwritten, self._retry_at = "", 0.0  # why the journal lacks the newest view
        self.port = 0  # the listening port, once open
        self.page = ""  # URL of the run's web page
        self.on_happened: Callable[[str, Sequence[str]], None] = lambda node, lines: None
        self.on_show: Callable[[bool], bytes] | None = None  # the page's state, or its metrics

    async def start(
        self,
        listen: str,
        credentials: Credentials = PLAIN,
        insecure: bool = False,
        transport: Transport | None = None,
    ) -> int:
        """Serves on HOST:PORT (port 0: any) and returns the port. `transport`: gRPC, with these
        credentials, unless given. Raises AddressError, CredentialsError, OSError
        (credentials.add_port) and ValueError (Membership.restore)."""
        loop = self._loop = asyncio.get_running_loop()
        self._started, self._listen = loop.time(), Address.parse(listen)
        self._failed: asyncio.Future[None] = loop.create_future()
        self._stopping = False
        if self._journal is not None and self._journal.view is not None:
            self._settle(self._journal.view, loop.time())
        self._waker = Waker(loop)
        self._broadcast.publish(self.machine.view)
        self.machine.bar(self._admission.invites.banned)
        self._credentials = credentials
        descriptors, rules = open_descriptors(), self.machine.rules
        log.log(*limit_message((rules.stages + 1) * rules.replicas, descriptors))
        banned = self._admission.invites.banned.__contains__
        self._gate = Gate(credentials, banned)
        self._transport = transport or over_grpc(credentials, insecure)
        handlers = self._gate.handlers(REGISTRY_CALLS, self)
        handlers |= self._gate.handlers(OPERATOR_CALLS, OperatorServer(self._admission, self))
        self.port = await self._transport.serve(listen, handlers, ("", SERVICE))
        self._ticking = loop.create_task(self._tick())
        self._ticking.add_done_callback(self._tick_ended)
        self._log_decisions()
        return self.port

    async def wait(self) -> None:
        """Returns after `stop`. Raises the error that ended the registry."""
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Closes all streams and the port; nodes continue training without a registry."""
        self._stopping = True
        for task in (self._ticking, *self._dialling):
            task.cancel()
        self._waker.wake_watchers()
        for stream in self._streams.values():
            stream.close()
        await self._transport.stop(FAREWELL)
        if not self._failed.done():
            self._failed.set_result(None)

    def describe(self) -> pb.Description:
        """The full state of the run, for people."""
        description = self.machine.describe(self._loop.time())
        description.run_file = self.run_file
        description.uptime = self._loop.time() - self._started
        description.trouble = self._unwritten
        description.page = self.page
        return description

    # -- operators' commands ---------------------------------------------------------------------

    def instance_of(self, node: str) -> str | None:
        """The instance of a member; None: `node` is not a member."""
        record = self.machine.members.by_name.get(node)
        return None if record is None else instance_of(record.member.key)

    def evict(self, node: str, why: str) -> None:
        """Evicts a node. The node is notified at once, the other members by the next view."""
        self._carry_out(self.machine.evict(node, why, self._loop.time()))

    def command(self, word: str, why: str, settings: Sequence[str] = (), step: int = 0) -> str:
        """Gives an order to the run, as `Membership.command` does; or changes `settings` after
        `step`, 0: the newest; or goes back to it. Returns what that changes. Raises Refused."""
        now, described = self._loop.time(), list[str]()
        if word in (CHANGE, BACK):
            undone = self.machine.view.number if word == BACK else 0
            change = pb.Change(settings=settings, pending=True, step=step, undone=undone)
            described = numbered(change, self.run_file, self._resettle, self.machine.committed)
            effects = self.machine.change(change, now)
        else:
            changed, effects = self.machine.command(word, why, now)
            described = [changed] if changed else []
        self._carry_out(effects)
        return "\n".join(described)

    def cut(self, instance: str, why: str) -> None:
        """Evicts every member of the instance and ends its calls."""
        for member in list(self.machine.view.members):
            if instance_of(member.key) == instance:
                self.evict(member.node, why)
        self._loop.call_later(FAREWELL, self._gate.cut, instance)

    # -- calls -----------------------------------------------------------------------------------

    async def Join(self, request: pb.JoinRequest, stream: AcceptedStream) -> bytes:
        for name in ("node", "address", "data", "host", "device", "run"):
            _check_length(name, getattr(request, name), NAME_BYTES)
        caller = stream.peer
        reach = Reach.of([host_of(caller)])
        if request.address and (problem := not_to_dial(request.address, reach)):
            raise Refused("INVALID_ARGUMENT", problem)
        if request.protocol == PROTOCOL:  # the machine refuses other protocol versions
            check_join(request, self.machine.rules.run, caller)
        if len(self._joining) >= self._limits.joins:
            raise Refused("RESOURCE_EXHAUSTED", "too many nodes wait to join; join again")
        plain = self._credentials.channel is None  # without certificates all are the owner's
        owner = plain or stream.caller.role is Role.OWNER
        attempt = JoinAttempt(request, block_of(host_of(caller)), self._loop.time(), owner)
        machine, reply = self.machine, await self._await_decision(attempt)
        if isinstance(reply, pb.JoinReply) and reply.HasField("view"):
            await self._await_turn(request.node, stream)
            reply = self.machine.reply_to(request.node)  # uses the newest view
            if isinstance(reply, Refused) and self.machine is not machine:
                self.machine.history.former.pop(request.node, None)  # it was never told
                reply = Refused("UNAVAILABLE", "the run's settings have changed: join again")
        if isinstance(reply, Refused):
            who = readable(request.node)
            log.info("%s at %s is refused: %s", who, caller, readable(reply.reason))
            raise reply
        self._check_leads()
        rest = self._broadcast.welcome() if reply.HasField("view") else b""
        return reply.SerializeToString() + rest  # concatenated protobuf messages merge

    async def _await_turn(self, node: str, stream: AcceptedStream) -> None:
        """Waits until the reply budget admits a node's join reply. Raises Refused."""
        turn = self._loop.create_future()
        self._answers.ask(turn, node)
        stream.when_over(partial(self._answered, turn))
        self._answer_next()
        try:
            async with asyncio.timeout(WAIT_FRACTION * (stream.seconds_left or LONGEST_WAIT)):
                await turn
        except TimeoutError:
            reason = f"{self._answers.before(node)}: join again"
            raise Refused("RESOURCE_EXHAUSTED", reason) from None
        self._loop.call_later(LONGEST_REPLY, self._answered, turn)

    def _answered(self, turn: asyncio.Future[None]) -> None:
        """Frees the reply budget of a call that is complete or abandoned."""
        self._answers.end(turn)
        self._answer_next()

    def _answer_next(self) -> None:
        """Lets calls go on whose join replies the budget admits now."""
        waiting = self._answers.waiting
        for turn in self._answers.go(len(self._broadcast.welcome())) if waiting else ():
            if not turn.done():
                turn.set_result(None)

    async def _await_decision(self, attempt: JoinAttempt) -> pb.JoinReply | Refused:
        """Returns the join decision, made at once or for a batch of joins."""
        decided = self._loop.create_future()
        self._joining.append((attempt, decided))
        if len(self._joining) == 1:
            now = self._loop.time()
            due = self.machine.joins_due(now)
            if due > now:
                self._loop.call_at(due, self._let_in)
            else:
                self._let_in()
        return cast("pb.JoinReply | Refused", await decided)

    def _let_in(self) -> None:
        """Has the machine decide all waiting joins, and wakes their calls."""
        if self._waker.busy:  # watchers of the last view are still being woken
            self._loop.call_later(TICK, self._let_in)
            return
        joining, self._joining = self._joining, []
        waiting = [join for join in joining if not join[1].done()]  # skips cancelled calls
        futures = [decided for _, decided in waiting]
        try:
            answers, effects = self.machine.join([join[0] for join in waiting], self._loop.time())
            self._carry_out(effects)
        except Exception as error:  # noqa: BLE001  every call of the batch raises it
            for decided in futures:
                decided.set_exception(error)
            return
        self._waker.wake(futures, answers)

    async def KeepAlive(
        self, requests: AsyncIterator[pb.Renewal], stream: AcceptedStream
    ) -> AsyncIterator[pb.Notice]:
        member = _MemberStream()
        with self._hold_place("streams", self._limits.streams):
            hearing = asyncio.create_task(self._hear(requests, member, stream))
            try:
                while (notice := await member.notices.get()) is not None:
                    yield notice
                    if notice.evicted:
                        return
                if hearing.done() and (refused := hearing.result()) is not None:
                    raise refused
            finally:
                hearing.cancel()
                self._lose(member)

    async def Watch(self, request: pb.WatchRequest, stream: AcceptedStream) -> AsyncIterator[bytes]:
        run = self.machine.rules.run
        _check_length("run", request.run, NAME_BYTES)
        if request.run and request.run != run:
            raise not_served(run, request.run)
        with self._hold_place("watchers", self._limits.watchers):
            sent = request.known if self._broadcast.has(request.known) else b""
            while not (self._stopping or self._failed.done()):
                newest = self._broadcast.newest.signature
                if newest != sent:  # a slow watcher skips to the newest view
                    yield self._broadcast.news(sent)
                    sent = newest
                else:
                    await self._waker.next_view()

    async def Suspect(self, request: pb.Suspicion, stream: AcceptedStream) -> pb.Heard:
        _check_length("why", request.why, WHY_BYTES)
        for name in ("accuser", "accused"):
            _check_length(name, getattr(request, name), NAME_BYTES)
        self._check_signed(request, request.accuser, stream)
        self._carry_out(self.machine.suspect(request, self._loop.time()))
        return pb.Heard()

    async def Leave(self, request: pb.LeaveRequest, stream: AcceptedStream) -> pb.LeaveReply:
        _check_length("why", request.why, WHY_BYTES)
        _check_length("node", request.node, NAME_BYTES)
        self._check_signed(request, request.node, stream)
        self._carry_out(self.machine.leave(request.node, request.why, self._loop.time()))
        self._check_leads()
        return pb.LeaveReply(view=self.machine.view.number)

    async def Measure(self, request: pb.MeasureRequest, stream: AcceptedStream) -> pb.MeasureReply:
        now = self._loop.time()
        if self._measurements and now - self._measured_at < BETWEEN_MEASUREMENTS:
            seconds = BETWEEN_MEASUREMENTS - (now - self._measured_at)
            reason = f"a measurement is in progress; try again in {seconds:.0f} s"
            raise Refused("FAILED_PRECONDITION", reason)
        # By the clock, so that nodes that measured for a former registry measure again.
        self._measurements = max(self._measurements + 1, time.time_ns())
        self._measured_at = now
        for node in self._streams:
            self._notify(node, measure=self._measurements)
        return pb.MeasureReply(number=self._measurements, nodes=len(self._streams))

    async def Describe(self, request: pb.DescribeRequest, stream: AcceptedStream) -> pb.Description:
        self._check_leads()
        run = self.machine.rules.run
        _check_length("run", request.run, NAME_BYTES)
        if request.run and request.run != run:
            raise not_served(run, request.run)
        return self.describe()

    async def Show(self, request: pb.ShowRequest, stream: AcceptedStream) -> pb.Shown:
        self._check_leads()
        if self.on_show is None:
            reason = "this registry has no page (--http none)"
            raise Refused("FAILED_PRECONDITION", reason)
        return pb.Shown(content=self.on_show(request.figures))

    async def Examine(self, request: pb.ExamineRequest, stream: AcceptedStream) -> pb.ExamineReply:
        _check_length("name", request.name, NAME_BYTES)
        if request.port > PORTS or max(len(request.load), request.wanted) > LOAD_BYTES:
            reason = f"a port is at most {PORTS}, a load at most {LOAD_BYTES} bytes"
            raise Refused("INVALID_ARGUMENT", reason)
        reply = pb.ExamineReply(time=time.time(), host=host_of(stream.peer))
        with self._hold_place("examinations", self._limits.examinations):
            if request.port and reply.host:
                address = str(Address(reply.host, request.port))
                holder = stream.caller.instance
                alive = await self._transport.is_alive(
                    request.name, address, DIAL_BACK, holder=holder
                )
                if alive is not None:
                    reply.there = alive
        reply.load = bytes(request.wanted)
        return reply

    @contextmanager
    def _hold_place(self, kind: str, limit: int) -> Iterator[None]:
        """Holds one of `limit` places for a call of this kind. Raises Refused."""
        if self._held[kind] >= limit:
            reason = f"the registry has its maximum of {kind}; try again"
            raise Refused("RESOURCE_EXHAUSTED", reason)
        self._held[kind] += 1
        try:
            yield
        finally:
            self._held[kind] -= 1

    # -- events and effects ----------------------------------------------------------------------

    def _check_signed(
        self,
        message: pb.Renewal | pb.Suspicion | pb.LeaveRequest,
        node: str,
        stream: AcceptedStream,
    ) -> None:
        """Checks that the key of `node` has signed a message. Raises Refused. A message of a
        non-member passes, since it has no effect."""
        record = self.machine.members.by_name.get(node)
        key = None if record is None else record.member.key
        if key is None and isinstance(message, pb.Renewal):  # a renewal may carry the node's view
            key = next((m.key for m in message.view.members if m.node == node), None)
        if key is not None:
            check_signed(message, node, key, self.machine.rules.run, stream.peer)

    async def _hear(
        self, requests: AsyncIterator[pb.Renewal], member: _MemberStream, stream: AcceptedStream
    ) -> Refused | None:
        """Feeds a node's renewals to the machine until the stream ends or a renewal is invalid."""
        renewals = cast("AsyncGenerator[pb.Renewal]", aiter(requests))
        try:
            async with asyncio.timeout(FIRST_RENEWAL):
                first = await anext(renewals, None)
            if first is None:
                return None
            _check_length("node", first.node, NAME_BYTES)
            if (size := first.report.ByteSize()) > RENEWAL_BYTES:
                reason = f"the report has {size} bytes; the maximum is {RENEWAL_BYTES}"
                raise Refused("INVALID_ARGUMENT", reason)
            self._check_signed(first, first.node, stream)
            self._carry_out(self.machine.learn(first, self._loop.time()))  # may replace the machine
            effects = self.machine.stream_opened(first, self._loop.time())
            if (former := self._streams.get(first.node)) is not None:
                former.close()
            member.node, self._streams[first.node] = first.node, member
            self._carry_out(effects)
            self._notify(first.node)
            async for renewal in renewals:
                if renewal.node != member.node:
                    reason = f"a renewal of {renewal.node!r} on the stream of {member.node!r}"
                    raise Refused("INVALID_ARGUMENT", reason)
                if (size := renewal.ByteSize()) > RENEWAL_BYTES:
                    most = f"after a stream's first, {RENEWAL_BYTES} is allowed"
                    raise Refused("INVALID_ARGUMENT", f"a renewal of {size} bytes; {most}")
                effects = self.machine.lease_renewed(renewal, self._loop.time())
                if effects:
                    self._carry_out(effects)
                if renewal.happened:
                    self.on_happened(member.node, renewal.happened)
        except TimeoutError:
            reason = f"no renewal came within {FIRST_RENEWAL:g} s of opening the stream"
            return Refused("DEADLINE_EXCEEDED", reason)
        except Refused as refused:
            if refused.code != "PERMISSION_DENIED":  # logged where signatures are checked
                log.warning("refused a stream of %s: %s", stream.peer, readable(refused.reason))
            return Refused(refused.code, refused.reason)  # without its traceback and the renewal
        except Broken:
            return None
        finally:
            member.close()
            await renewals.aclose()
        return None

    def _lose(self, stream: _MemberStream) -> None:
        if self._streams.get(stream.node) is stream:
            del self._streams[stream.node]
            self._carry_out(self.machine.stream_lost(stream.node, self._loop.time()))

    async def _tick(self) -> None:
        last = self._loop.time()
        while True:
            await asyncio.sleep(TICK)
            now = self._loop.time()
            if now - last > PAUSED_ABOVE:
                self.machine.paused(now - last, now)
            last = now
            if self._unwritten and now >= self._retry_at:
                self._write(self.machine.view)
            self.machine.wait(self._answers.waiting, now)
            self._carry_out(self.machine.tick(now))

    def _tick_ended(self, ticking: asyncio.Task[None]) -> None:
        if not ticking.cancelled() and (error := ticking.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends this registry, which sends no further messages; `wait` raises the error."""
        if not self._failed.done():
            level = logging.WARNING if isinstance(error, NotLeading) else logging.CRITICAL
            log.log(level, "the registry ends: %s", error)
            self._failed.set_exception(error)
            self._waker.wake_watchers()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self._failed.done():  # another leader may contradict further effects
                return
            match effect:
                case Issue(view):
                    self._publish(view)
                case Probe(node, number):
                    self._notify(node, probe=number)
                case Evict(node, reason):
                    self._notify(node, evicted=reason)
                case Dial():
                    dialling = self._loop.create_task(self._dial(effect))
                    self._dialling[dialling] = None
                    dialling.add_done_callback(self._dialling.pop)
        self._log_decisions()

    async def _dial(self, dial: Dial) -> None:
        # Allows addresses of this machine. Names are excluded, since their resolution may change.
        hosts = (self._listen.host, Address.parse(dial.address).host)
        reach, holder = Reach.of(hosts), self.instance_of(dial.node) or ""
        alive = await self._transport.is_alive(dial.node, dial.address, dial.seconds, reach, holder)
        self.machine.dialled(dial.question, dial.node, alive)

    def _publish(self, view: pb.View) -> None:
        try:
            self._write(view)
        except NotLeading as error:
            self.fail(error)
            return
        if changes_in_force(view) != changes_in_force(self._broadcast.newest):
            self._settle(view, self._loop.time())
        self._broadcast.publish(view)
        self._waker.wake_watchers()

    def _settle(self, view: pb.View, now: float) -> None:
        """Goes on from a view, under the settings that hold in it."""
        if self._resettle is not None and view.changes:
            self.run_file, rules, *_ = self._resettle(self._first_file, view.changes)
            self.machine = Membership(rules, self._admission.key, self.machine.history)
            self.machine.bar(self._admission.invites.banned)
            self._broadcast = Broadcast(self.run_file)
        self.machine.restore(view, now)

    def _write(self, view: pb.View) -> None:
        """Appends a view to the journal. If that fails, the run continues: after a restart the
        registry learns the missing views from the nodes."""
        if self._journal is None:
            return
        before, self._unwritten = self._unwritten, ""
        try:
            self._journal.append(view)
        except JournalError as error:
            self._unwritten = f"{error}. Until then the registry continues from memory"
            self._retry_at = self._loop.time() + JOURNAL_RETRY
        if self._unwritten and not before:
            log.error("%s", self._unwritten)
        elif before and not self._unwritten:
            log.info("the journal can be written again; it has view %d", view.number)

    def _check_leads(self) -> None:
        if self._failed.done() and not self._stopping:
            reason = "this registry does not lead any more; try another one"
            raise Refused("UNAVAILABLE", reason)

    def _notify(self, node: str, **notice: Any) -> None:
        if (stream := self._streams.get(node)) is not None:
            stream.notices.put_nowait(pb.Notice(**notice, view=self.machine.view.number))

    def _log_decisions(self) -> None:
        history = self.machine.history
        new, self._logged = history.decided - self._logged, history.decided
        for decision in list(history.decisions)[-new:] if new else ():
            log.info("%s", decision)


class _MemberStream:
    """A node's open KeepAlive stream, and the notices to send by it; None ends it."""

    def __init__(self) -> None:
        self.node = ""
        self.notices: asyncio.Queue[pb.Notice | None] = asyncio.Queue()

    def close(self) -> None:
        self.notices.put_nowait(None)


def over_grpc(credentials: Credentials, insecure: bool) -> GrpcTransport:
    reflected = (SERVICE,)
    return GrpcTransport(credentials, serving=_OPTIONS, insecure=insecure, reflected=reflected)


_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),  # a node starved of CPU sends pings in bursts
    ("grpc.http2.bdp_probe", 0),  # otherwise each renewal is answered with a ping
)


Part = Callable[[RegistryServer], AbstractAsyncContextManager[None]]
"""A context that is held while the registry serves."""


def _check_length(name: str, value: str, limit: int) -> None:
    if (size := len(value.encode())) > limit:
        reason = f"{name} has {size} bytes, more than the {limit} allowed: {value[:40]!r}..."
        raise Refused("INVALID_ARGUMENT", reason)


async def serve(
    registry: RegistryServer,
    listen: str,
    credentials: Credentials = PLAIN,
    insecure: bool = False,
    address_file: Path | None = None,
    parts: Sequence[Part] = (),
    stop: asyncio.Future[int] | None = None,
) -> None:
    """Runs a registry until `stop` is done, by default by a signal. Writes HOST:PORT to
    `address_file` atomically once it listens. Raises the errors of `start`, `wait` and `parts`, and
    OSError."""
    gc.set_threshold(*GARBAGE)
    stop = stop or stop_signals()
    port = await registry.start(listen, credentials, insecure)
    address = Address.parse(listen)._replace(port=port)
    log.info("the registry listens on %s", address)
    if address_file is not None:
        replace_file(address_file, f"{address}\n".encode())
    waiting = asyncio.ensure_future(registry.wait())
    try:
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part(registry))
            ends: list[asyncio.Future[Any]] = [stop, waiting]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await registry.stop()
    with suppress(asyncio.CancelledError):
        await waiting
