"""One attempt at a step at one node: which microbatches arrive, wait, go on, and are sent again.

A microbatch visits its route forward (embed, blocks, head and loss), then the same nodes backward.
`StageWork` does the arithmetic in the compute thread. The attempt decides what is computed when,
and where the results go. It never looks at what that thread changes.

Where a stage has replicas, its neighbours keep what they have sent it until the step is committed.
When a replica is lost, the attempt goes on by a new plan (docs/masking.md). Neighbours send the
lost node's input again, to the nodes that have its microbatches now. Those redo what the lost node
had done, and only that. A neighbour that has their results already drops them. With redundant
computation, the same happens when another node takes the seat of a stage's last node, with the
state of its twin.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT, Cause
from planaria.node.ports import Compute, Priority
from planaria.node.transaction.double_visits import (
    DOUBLE,
    DoubledNeighbour,
    DoubledResult,
    SecondVisits,
)
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.transaction.routing import Route, routes, stages_in
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchanges, Outcome

if TYPE_CHECKING:
    from planaria.node.state.boundary import BoundaryKeeper, Side
    from planaria.node.wire.frame_format import Frame

log = logging.getLogger(__name__)

MEASURED: Final = 9
"""Number of microbatches whose median duration is a node's seconds per microbatch."""
BLAMELESS: Final = 10
"""Number of steps without blame after one with a peer blamed for an exception raised here."""


class NoRoomError(Exception):
    """Raised when a pass of a microbatch lacks memory."""

    def __init__(self, reason: str, waits: bool = False, ends: bool = False) -> None:
        """`waits`: nothing has changed, and a backward pass here will free memory. `ends`: no
        attempt will ever fit. Neither: another attempt takes less."""
        super().__init__(reason)
        self.waits, self.ends = waits, ends


class Pass(NamedTuple):
    """The key of a pass: a microbatch's visit, and whether it is of an activation or a gradient."""

    microbatch: int
    position: int
    kind: str


@dataclass(frozen=True)
class Visit:
    """A microbatch's place on its route."""

    microbatch: int
    position: int
    route: Route
    waits: bool = True
    """Whether its forward pass may wait until there is memory for it."""

    def after(self, kind: str) -> Visit:
        """The next visit of an activation or of a gradient."""
        by = 1 if kind == "activation" else -1
        return replace(self, position=self.position + by)

    def sender(self, kind: str) -> Visit:
        """The previous visit of an activation or of a gradient."""
        return replace(self, position=2 * self.position - self.after(kind).position)

    @property
    def key(self) -> tuple[int, int]:
        return self.microbatch, self.position

    @property
    def node(self) -> str:
        return self.route.nodes[self.position]

    @property
    def stage(self) -> int:
        return self.route.stages[self.position]

    @property
    def at_head(self) -> bool:
        return self.position == len(self.route.nodes) - 1

    def before(self, kind: str) -> Pass | None:
        """The earlier pass on which this visit's pass depends at its node; None: there is none."""
        if kind == "gradient":
            position = self.position or len(self.route.nodes) - 1
        elif self.at_head:
            position = 0
        else:
            return None
        return Pass(self.microbatch, position, "activation")


class PassResult(NamedTuple):
    """The result of a pass."""

    frame: Frame | None = None
    """The frame for the next visit, under the ballot with which the attempt began."""
    home: pb.Home | None = None
    """The result of a microbatch whose loss is known."""
    seconds: float | None = None
    """Seconds that this node spent on the microbatch, once its gradient is computed; else None."""


class StageWork(Protocol):
    """The arithmetic of one stage. All methods are called in the compute thread.

    A pass returns None if it is of an attempt other than the newest, or of a microbatch that was
    given up. `embed`, `forward` and `backward` raise NoRoomError.
    """

    def begin(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Begins an attempt: drops what is left of earlier ones, and zeroes the gradient."""

    def drop(self) -> None:
        """Drops the attempt: leaves everything as if it hadn't begun."""

    def give_up(self, ballot: Ballot, microbatches: Collection[int]) -> list[int]:
        """Gives up those of these microbatches that have no pass here yet; returns them."""

    def embed(self, ballot: Ballot, visit: Visit) -> PassResult | None:
        """Draws the microbatch's samples and returns them as an activation."""

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        """Turns the activation from `peer` into an activation. At the head it computes the loss,
        and returns a gradient unless it is an evaluation. Raises ComplaintError for a damaged frame
        or an unexpected form: then nothing has changed, and another node may send the same."""

    def backward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        """Turns the gradient from `peer` into a gradient, unless it is back at the source. Raises
        ComplaintError as `forward` does."""

    def keep_gradient(self) -> int:
        """Keeps a copy of the stage's gradient until `restore_gradient`; returns its bytes."""

    def restore_gradient(self) -> None:
        """Makes the kept copy, if there is one, the stage's gradient again."""

    def double(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        """Computes a visit that another node computes, too. Adds nothing to the gradient of the
        stage's weights. Raises ComplaintError as `forward` does."""

    def difference(self, first: Frame, second: Frame) -> float:
        """The norm of the difference of two nodes' results, divided by the larger norm. At most 2,
        which also stands for an unreadable result."""


class AttemptHost(Protocol):
    """What a node does for its attempt; all methods are called on the event loop."""

    def send(self, peer: str, item: Frame) -> bool: ...
    def tell_driver(self, ballot: Ballot, **body: Any) -> None: ...
    def cut_off(self, ballot: Ballot, node: str, reason: str, cause: Cause = SILENT) -> None: ...
    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None: ...
    def crashed(self, error: BaseException) -> None: ...


@dataclass
class Workplace:
    """What the attempts of a seat share: its parts, and statistics of finished attempts."""

    node: str
    masking: bool  # whether attempts go on without lost replicas
    filling: InFlightWindow  # limits this source's microbatches under way
    work: StageWork
    compute: Compute
    host: AttemptHost
    boundary: BoundaryKeeper | None = None
    redundant: bool = False  # whether a node of the stage before holds each node's twin
    computed: int = 0  # microbatches computed, forward and backward
    most_kept: int = 0  # by a finished attempt; bytes, as `Attempt.kept`
    blameless_until: int = -1  # step up to which no peer is blamed for exceptions raised here
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED))

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds that one microbatch takes here; 0: none was computed lately."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def count(self, seconds: float) -> None:
        """Counts one more computed microbatch."""
        self.computed += 1
        self._seconds.append(seconds)

    def forget_seconds(self) -> None:
        """Drops what was measured, since this node has no microbatch in an attempt."""
        self._seconds.clear()


class AttemptPlan:
    """One `Begin` as one node sees it: which node computes what. Raises ValueError for an invalid
    plan."""

    def __init__(
        self,
        ballot: Ballot,
        begin: pb.Begin,
        place: Workplace,
        before: Mapping[int, Route] = MappingProxyType({}),
    ) -> None:
        """`before`: routes of an earlier plan of the attempt, which this one may omit."""
        self.ballot, self.begin = ballot, begin
        planned, node = routes(begin), place.node
        self.routes = {**before, **planned}
        self.mine = frozenset(m for m, route in planned.items() if node in route.nodes)
        self.sourced = [m.id for m in begin.plan if m.source == node]
        self.microbatches = len(planned) + begin.untold  # of the whole attempt
        self.trains = begin.kind == pb.Begin.TRAIN
        self.stages = stages_in(begin)
        self.stage = self.stages.get(node, 0)
        replicas, masks = Counter(self.stages.values()), self.trains and place.masking
        self.maskable = frozenset(n for n, at in self.stages.items() if masks and replicas[at] > 1)
        """Nodes whose loss leaves their stage with another node."""
        twins = masks and place.redundant
        self.replaceable = self.maskable.union(n for n, at in self.stages.items() if twins and at)
        """Nodes whose microbatches may still move to other nodes."""

    def doubled_route(self, nodes: object) -> Route | None:
        """The route of a doubled visit's microbatch, as a neighbour sent it: this node's part of
        the plan lacks it. None: the route is invalid."""
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            return None
        stages = tuple(self.stages.get(node, -1) for node in nodes)
        if stages[:1] != (0,) or nodes[0] != nodes[-1] or -1 in stages:
            return None
        ordered = sorted(stages[1:-1]) == sorted({*self.stages.values()} - {0})
        return Route(tuple(nodes), stages) if ordered else None


class Attempt:
    """One attempt at a step at one node, from its `Begin` on. All methods belong to the event
    loop."""

    def __init__(self, place: Workplace, ballot: Ballot, begin: pb.Begin) -> None:
        """Raises ValueError for an invalid plan."""
        self.place, self.node = place, place.node
        self.began = ballot
        self._plan = AttemptPlan(ballot, begin, place)
        self._own = self._plan.mine  # before any node was lost
        self.applied: set[int] = set()  # ids whose gradient is in the stage's gradient
        self.over = False  # nothing of it has an effect any more
        self._waiting: deque[int] = deque()  # microbatches to be injected here
        self._out: set[int] = set()  # injected, and not home
        self._seen: set[Pass] = set()
        self._done: set[Pass] = set()
        # Frames that came early, by the pass that must be done before theirs.
        self._early: dict[Pass, dict[Pass, tuple[str, Frame]]] = {}
        self._held: deque[Callable[[], None]] = deque()  # passes that wait for memory
        self._sent: dict[Pass, Frame] = {}  # to replaceable nodes
        self._scored: dict[int, pb.Home] = {}  # microbatches with a known loss, until sent as home
        self._gradients_kept = 0  # bytes
        self._completed: Outcome[None] | None = None  # the exchange in `complete`
        self._until = math.inf  # deadline of `complete`
        self._given_up: set[int] = set()  # microbatches that other nodes may compute
        self._neighbour, self._second = DoubledNeighbour(begin.checks), SecondVisits()

    # --- its course

    @property
    def ballot(self) -> Ballot:
        """The ballot of the attempt's current plan."""
        return self._plan.ballot

    @property
    def begin(self) -> pb.Begin:
        return self._plan.begin

    @property
    def kept(self) -> int:
        """Bytes of what may have to be sent or averaged again."""
        return sum(frame.size for frame in self._sent.values()) + self._gradients_kept

    def start(self) -> None:
        if not self._plan.mine:
            self.place.forget_seconds()
        self._tell_work(partial(self.place.work.begin, self.began, self.begin))
        self._waiting.extend(self._plan.sourced)
        self.place.filling.begin()
        self._inject()

    def go_on(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Goes on by a new plan, with lost nodes' microbatches at others. Raises ValueError."""
        before = self._plan
        plan = AttemptPlan(ballot, begin, self.place, before.routes)
        if plan.microbatches != before.microbatches:
            raise ValueError("the new plan has other microbatches than the previous one")
        if taken := before.mine - plan.mine - self._given_up:
            raise ValueError(
                f"microbatches {sorted(taken)} go to other nodes, but were not given up"
            )
        if again := self._given_up & plan.mine - before.mine:
            raise ValueError(f"microbatches {sorted(again)} were given up here before")
        self._plan, self._until = plan, math.inf
        self._neighbour.forget(
            (m, at)
            for m, at in self._neighbour.visits()
            if plan.routes[m].nodes != before.routes[m].nodes
        )
        self._note_if_complete()
        self._gradients_kept = 0
        self._tell_work(self.place.work.restore_gradient)
        for sent, frame in list(self._sent.items()):
            node = plan.routes[sent.microbatch].nodes[sent.position]
            if node != before.routes[sent.microbatch].nodes[sent.position]:
                self._send(node, sent, frame)
        held, self._held = self._held, deque()
        for work in held:
            work()
        self._waiting.extend(m for m in plan.sourced if m not in before.sourced)
        self._inject()
        self._tell_if_scored()

    def passes_done(self) -> list[pb.Pass]:
        """The passes of the attempt that are done at this node."""
        return [
            pb.Pass(microbatch=microbatch, position=position, backward=kind == "gradient")
            for microbatch, position, kind in self._done
        ]

    def give_up(self, then: Callable[[list[int]], None]) -> None:
        """Gives up microbatches that this slow node hasn't begun. `then` gets those that will never
        be computed here, unless the attempt is over by then."""
        begun = {done.microbatch for done in self._done}
        candidates = self._plan.mine - begun - self._given_up

        def given(skipped: list[int] | Exception) -> None:
            if isinstance(skipped, list) and not self.over:
                self._given_up.update(skipped)
                self._out.difference_update(skipped)
                self._waiting = deque(m for m in self._waiting if m not in self._given_up)
                then(skipped)
            self._raise_error(skipped)

        work = partial(self.place.work.give_up, self.began, candidates)
        self.place.compute.post(work, given, Priority.CONTROL)

    def end(self) -> None:
        """Ends the attempt, since a newer one has begun."""
        self.over = True
        self.place.most_kept = max(self.place.most_kept, self.kept)

    def drop(self) -> None:
        """Ends the attempt, and drops its gradient."""
        self.end()
        self._tell_work(self.place.work.drop)

    async def complete(self, exchanges: Exchanges) -> None:
        """Waits until the gradient contains all of this node's microbatches; those that it does for
        a lost node may come home long before. Keeps a copy while another loss may void the
        reduction. Only one exchange at a time may wait. Raises ComplaintError at the time given to
        `hurry`."""
        while missing := self._plan.mine - self.applied:
            self._completed = Outcome(exchanges)
            try:
                await self._completed.within(self._until)
            except TimeoutError:
                reason = f"microbatches {sorted(missing)}, which are home, are not computed here"
                raise ComplaintError(reason) from None
        if self.node in self._plan.maskable:
            self._gradients_kept = await exchanges.compute(self.place.work.keep_gradient)

    def hurry(self, until: float) -> None:
        """Limits the wait of `complete` to this time: all microbatches are home."""
        self._until = until
        if self._completed is not None:
            self._completed.fulfil(None)

    @property
    def is_complete(self) -> bool:
        """Whether this node has applied all its own microbatches."""
        return self.applied >= self._plan.mine

    def _note_if_complete(self) -> None:
        if self._completed is not None and self.is_complete:
            self._completed.fulfil(None)

    # --- the source

    def _inject(self) -> None:
        while self._waiting and len(self._out) < self.place.filling.out:
            self._inject_now(self._waiting.popleft())

    def _inject_now(self, microbatch: int) -> None:
        self._out.add(microbatch)
        self._seen.add(Pass(microbatch, 0, "activation"))
        visit = Visit(microbatch, 0, self._plan.routes[microbatch])
        passed = partial(self._passed, visit, None)
        self._compute(Priority.FORWARD, visit, "activation", self.place.work.embed, passed)

    def _tell_if_scored(self) -> None:
        """Reports the losses of this source's microbatches, once all that aren't back have one."""
        sourced, scored = self._plan.sourced, self._scored
        out = [m for m in sourced if m not in self.applied]
        if out and all(m in scored for m in out):
            message = pb.Scored(microbatches=[scored[m] for m in out])
            self.place.host.tell_driver(self.ballot, scored=message)

    def _came_home(self, microbatch: int) -> None:
        if self._plan.trains:
            self.place.filling.home(microbatch, self.place.compute.now)
        self._out.remove(microbatch)
        self.place.host.tell_driver(self.ballot, home=self._scored.pop(microbatch))
        self._inject()

    # --- frames

    def take(self, peer: str, frame: Frame) -> None:
        """Handles a frame of this attempt from `peer`."""
        if self.over:
            return
        try:
            visit = self._visit(peer, frame)
            if visit is None:
                return
            if frame.fields.get(DOUBLE):
                self._take_double_frame(peer, frame, visit)
                return
            expected = self._is_expected(peer, frame, visit)
        except ComplaintError as complaint:
            self._complain(complaint)
            return
        this = Pass(visit.microbatch, visit.position, frame.kind)
        if not expected or this in self._seen:
            return
        before = visit.before(frame.kind)
        if before is not None and before not in self._done:  # an earlier visit is redone here
            self._early.setdefault(before, {})[this] = peer, frame
            if visit.microbatch in self._waiting:  # it began at a source that was lost
                self._waiting.remove(visit.microbatch)
                self._inject_now(visit.microbatch)
            return
        self._seen.add(this)
        if visit.sender(frame.kind).key in self._neighbour.visits():
            self._compare(visit.sender(frame.kind), peer, frame)
        forward = frame.kind == "activation"
        priority = Priority.FORWARD if forward and not visit.at_head else Priority.BACKWARD
        work = self.place.work.forward if forward else self.place.work.backward
        passed = partial(self._passed, visit, frame)
        self._compute(priority, visit, frame.kind, work, passed, (peer, frame))

    def _visit(self, peer: str, frame: Frame) -> Visit | None:
        """The frame's visit. None: `peer` follows an older plan with a visit unknown here. Raises
        ComplaintError if it follows this plan."""
        microbatch, position = frame.fields.get("microbatch"), frame.fields.get("position")
        if type(microbatch) is not int or type(position) is not int:
            raise _bad_frame(peer, "it lacks its microbatch or position")
        route = self._plan.routes.get(microbatch)
        if route is None and 0 <= microbatch < self._plan.microbatches:
            route = self._plan.doubled_route(frame.fields.get(DOUBLE))
        if route is None and frame.ballot != self.ballot:
            return None
        if route is None:
            raise _bad_frame(peer, f"there is no microbatch {microbatch} in this attempt")
        first, last = (1, 0) if frame.kind == "activation" else (0, 1)
        if not first <= position < len(route.nodes) - last:
            visits = f"a route of {len(route.nodes)} visits"
            raise _bad_frame(peer, f"{frame.kind} at position {position} of {visits}")
        return Visit(microbatch, position, route)

    def _is_expected(self, peer: str, frame: Frame, visit: Visit) -> bool:
        """Whether the plan has `peer` send this frame here. A peer with an older plan, from before
        a loss, gets False. Raises ComplaintError for one with this plan."""
        sender = visit.sender(frame.kind)
        if (visit.node, sender.node) == (self.node, peer):
            return True
        if frame.ballot == self.ballot:
            raise ComplaintError(
                f"{peer} sent the {frame.kind} of microbatch {visit.microbatch} for stage "
                f"{visit.stage}, which by the plan goes from {sender.node} to {visit.node}",
                [peer],
                NUMBERS,
            )
        return False

    def _passed(self, visit: Visit, received: Frame | None, done: PassResult) -> None:
        """Passes on a pass's result. `received`: its input; None: the microbatch began here."""
        made = done.frame
        if received is not None:
            self._keep("received", visit, received)
        if made is not None:
            self._keep("sent", visit, made)
        if done.seconds is not None:
            self._count(visit.microbatch, done.seconds)
        if received is None and self._plan.trains:
            self.place.filling.left(visit.microbatch, self.place.compute.now)
        if made is not None:
            onward = Pass(visit.microbatch, visit.after(made.kind).position, made.kind)
            # By the current plan, which may be newer than the computation.
            self._send(self._plan.routes[onward.microbatch].nodes[onward.position], onward, made)
        if done.home is not None:
            self._scored[visit.microbatch] = done.home
        if done.home is not None and self._plan.trains:
            self._tell_if_scored()
        elif done.home is not None or made is None:
            self._came_home(visit.microbatch)

    def _keep(self, side: Side, visit: Visit, frame: Frame) -> None:
        """Keeps a boundary's activation, from which a lost neighbour may relearn."""
        boundary = self.place.boundary
        if boundary is not None and frame.kind == "activation":
            boundary.keep(side, frame, self.began, visit.route.stages)

    def _send(self, node: str, made: Pass, frame: Frame) -> None:
        frame = replace(frame, ballot=self.ballot)
        if node in self._plan.replaceable:
            self._sent[made] = frame
        if not self.place.host.send(node, frame):
            reason = f"no link to {node} for microbatch {made.microbatch}"
            self.place.host.cut_off(self.ballot, node, reason)
        for double in self._neighbour.sends((made.microbatch, made.position), frame):
            self._send_to_double(double, frame, self._plan.routes[made.microbatch])

    # --- spot checks: visits that two nodes compute

    def check(self, check: pb.Check) -> None:
        """Gives another node a visit of this node's neighbour to compute, too."""
        for frame in self._neighbour.check(check):
            self._send_to_double(check.double, frame, self._plan.routes[check.microbatch])

    def _send_to_double(self, double: str, frame: Frame, route: Route) -> None:
        """Sends a frame to or from a double, with the route, which the double's part of the plan
        lacks. Without a link there is no check."""
        self.place.host.send(
            double, replace(frame, fields={**frame.fields, DOUBLE: [*route.nodes]})
        )

    def _take_double_frame(self, peer: str, frame: Frame, visit: Visit) -> None:
        """Handles a frame of a doubled visit, at the double or at a neighbour."""
        sender = visit.sender(frame.kind)
        if self._neighbour.knows(sender.key, peer) and visit.node == self.node:
            self._compare(sender, peer, frame)
            return
        is_double = visit.stage == self._plan.stage and visit.node != self.node
        if is_double and sender.node == peer and self._second.takes(visit.key, peer, frame):
            self._compute_again(visit, peer, frame)

    def _compute_again(self, visit: Visit, peer: str, frame: Frame) -> None:
        def then(done: PassResult | Exception | None) -> None:
            if isinstance(done, PassResult) and done.frame is not None and not self.over:
                onward = visit.after(frame.kind)
                made = replace(done.frame, ballot=self.ballot)
                self._send_to_double(onward.node, made, visit.route)
                if frame.kind == "activation" and (early := self._second.went_forward(visit.key)):
                    self._compute_again(visit, *early)
            elif isinstance(done, ComplaintError) and not self.over:
                self._complain(done)
            elif isinstance(done, Exception) and not self.over:
                log.error("can't compute a second visit beside %s", visit.node, exc_info=done)

        priority = Priority.FORWARD if frame.kind == "activation" else Priority.BACKWARD
        work = partial(self.place.work.double, self.began, visit, peer, frame)
        self.place.compute.post(work, then, priority)

    def _compare(self, made_at: Visit, node: str, frame: Frame) -> None:
        """Compares the result of `node` at that visit with those of other nodes."""
        for pair in self._neighbour.made(made_at.key, node, frame):
            work = partial(self.place.work.difference, *pair.made)
            self.place.compute.post(work, partial(self._compared, pair), Priority.BACKGROUND)

    def _compared(self, pair: DoubledResult, difference: float | Exception) -> None:
        """Reports how much two nodes' results of a visit differ."""
        if isinstance(difference, float) and not self.over:
            compared = pb.Compared(
                microbatch=pair.key[0],
                position=pair.key[1],
                backward=pair.backward,
                node=pair.node,
                other=pair.other,
                difference=difference,
            )
            self.place.host.tell_driver(self.ballot, compared=compared)
        self._raise_error(difference)

    # --- helpers

    def _count(self, microbatch: int, seconds: float) -> None:
        self.applied.add(microbatch)
        self.place.count(seconds)
        self._note_if_complete()

    def _complain(self, complaint: ComplaintError) -> None:
        """Reports that a peer's frame is unusable; its work may go to other nodes."""
        for node in complaint.accused:
            self.place.host.cut_off(self.ballot, node, str(complaint), complaint.cause)

    def _compute(
        self,
        priority: Priority,
        visit: Visit,
        kind: str,
        work: Callable[..., PassResult | None],
        passed: Callable[[PassResult], None],
        received: tuple[()] | tuple[str, Frame] = (),
    ) -> None:
        """Computes a pass in the compute thread, then handles the result if the attempt still needs
        it. `received`: sender and input frame."""
        this = Pass(visit.microbatch, visit.position, kind)
        peer = received[0] if received else ""
        again = partial(self._compute, priority, visit, kind, work, passed, received)

        def then(done: PassResult | Exception | None) -> None:
            match done:
                case ComplaintError() if not self.over:
                    self._seen.discard(this)
                    self._complain(done)
                case Exception() if peer and self.over:
                    pass  # the attempt is over, and nothing waits for its result
                case NoRoomError(waits=True) if self._may_wait(visit):
                    self._held.append(again)
                case NoRoomError(waits=True):
                    again()
                case NoRoomError(ends=False):
                    reason = f"no memory for the {this.kind} of microbatch {this.microbatch}"
                    self.place.host.attempt_failed(self.ballot, f"{reason}: {done}", [])
                case NoRoomError():
                    self.place.host.crashed(done)
                case Exception() if peer and self.begin.step > self.place.blameless_until:
                    self._blame(peer, this, done)
                case PassResult() if not self.over:
                    passed(done)
                    self._done.add(this)
                    for early, frame in self._early.pop(this, {}).values():
                        self.take(early, frame)
                    if self._held and (this.kind == "gradient" or done.frame is None):
                        self._held.popleft()()
                case _:
                    self._raise_error(done)

        visit = replace(visit, waits=self._may_wait(visit))
        self.place.compute.post(partial(work, self.began, visit, *received), then, priority)

    def _may_wait(self, visit: Visit) -> bool:
        """Whether the pass may wait for memory. A waiting pass must not hold what work here needs:
        input from a later stage, or results of later stages from before a loss. Nor may a source
        delay what comes to its head."""
        order = visit.route.stages[1:-1]
        in_order = visit.position <= 1 or list(order) == sorted(order)
        return in_order and visit.microbatch in self._own

    def _blame(self, peer: str, this: Pass, error: Exception) -> None:
        """Handles an exception that computing on a peer's valid frame raised. The first time the
        peer is blamed, in the steps after that this node."""
        failure = f"can't compute on the {this.kind} of microbatch {this.microbatch} from {peer}"
        log.error(failure, exc_info=error)
        self.place.blameless_until = self.begin.step + BLAMELESS
        reason = f"{failure}: {type(error).__name__}: {error}"
        self.place.host.attempt_failed(self.ballot, reason, [peer])

    def _tell_work(self, work: Callable[[], None]) -> None:
        self.place.compute.post(work, self._raise_error, Priority.CONTROL)

    def _raise_error(self, result: object) -> None:
        if isinstance(result, Exception) and not isinstance(result, ComplaintError):
            self.place.host.crashed(result)


def _bad_frame(peer: str, reason: str) -> ComplaintError:
    return ComplaintError(f"{peer} sent a bad frame: {reason}", [peer], NUMBERS)
