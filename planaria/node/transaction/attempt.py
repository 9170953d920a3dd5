"""One attempt at a step at one node: which microbatches come, wait, go on, and are sent again.

A microbatch visits its route forward (embed, blocks, head and loss) and then the same nodes
backward. What is computed there, `StageWork` does in the compute thread. The attempt decides what
is computed when, and where what comes of it goes; it never looks at what that thread changes.

Where a stage has replicas, its neighbours also keep what they have sent it, until the step is
committed. When one of the replicas is lost, the attempt goes on by a new plan (docs/masking.md):
what the lost one was sent is sent again to those that do its microbatches in its place. They redo
what it had done, and only that; a neighbour that has their results already drops them. So it is,
with redundant computation, where the last node of a stage is lost and another one takes its seat
with the state of its twin. With
`masking = "spare"` a node's stand-in gets what the node gets from the start, and does it ahead when
it has nothing else to do: what it makes is withheld until the node is lost.
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
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

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
from planaria.node.transaction.routing import Route, routes
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchanges, Outcome
from planaria.recovery.masking import Masking, stand_ins

if TYPE_CHECKING:
    from planaria.node.state.boundary import BoundaryKeeper, Side
    from planaria.node.wire.frames import Frame

log = logging.getLogger(__name__)

MEASURED: Final = 9
"""Microbatches whose median duration is a node's seconds per microbatch."""
BLAMELESS: Final = 10
"""Steps after one in which a peer was blamed for what this node's arithmetic raised."""
FORGIVEN: Final = 0.8
"""Factor on a node's seconds per microbatch for each step in which it had none, so that who was
slow once is tried again."""


class NoRoomError(Exception):
    """There is no memory for a pass."""

    def __init__(self, reason: str, waits: bool = False, ends: bool = False) -> None:
        """`waits`: nothing has changed, and there is more once a backward pass is made here.
        `ends`: there never will be. Neither: another attempt takes less."""
        super().__init__(reason)
        self.waits, self.ends = waits, ends


class Pass(NamedTuple):
    """What a visit makes of an activation, or of a gradient."""

    microbatch: int
    position: int
    kind: str


@dataclass(frozen=True)
class Visit:
    """Where a microbatch is on its route."""

    microbatch: int
    position: int
    route: Route
    waits: bool = True
    """Whether its forward pass may be made later, when there is room for it."""

    def after(self, kind: str) -> Visit:
        """The next one of an activation, or of a gradient."""
        by = 1 if kind == "activation" else -1
        return replace(self, position=self.position + by)

    def sender(self, kind: str) -> Visit:
        """The one before, of an activation, or of a gradient."""
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
        """What is to be done at this node before this; None: nothing is."""
        if kind == "gradient":
            position = self.position or len(self.route.nodes) - 1
        elif self.at_head:
            position = 0
        else:
            return None
        return Pass(self.microbatch, position, "activation")


class Done(NamedTuple):
    """What has come of a pass."""

    frame: Frame | None = None
    """For the next visit, under the ballot that the attempt began under."""
    home: pb.Home | None = None
    """Of a microbatch whose loss is known."""
    seconds: float | None = None
    """Spent on the microbatch at this node in all, once its gradient is there; else None."""
    kept: int = 0
    """Bytes of all gradients that are kept now beside the stage's own."""


class StageWork(Protocol):
    """The arithmetic of one stage. All methods are called in the compute thread.

    A pass of another attempt than the one that began last is not done any more, nor one of a
    microbatch that was given up: None. A pass in another node's place adds to a gradient of its
    own, until that node's are inherited. `embed`, `forward` and `backward` raise NoRoomError.
    """

    def begin(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Nothing is left of what began before, and the gradient is zero."""
        ...

    def drop(self) -> None:
        """Leaves all as if no attempt had begun."""
        ...

    def give_up(self, ballot: Ballot, microbatches: Collection[int]) -> list[int]:
        """Those of which no pass was done here; from now on none is: they are others'."""
        ...

    def embed(self, ballot: Ballot, visit: Visit) -> Done | None:
        """The microbatch's samples are drawn and leave as an activation."""
        ...

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> Done | None:
        """The activation from `peer` leaves as an activation; at the head its loss is known, and it
        leaves as a gradient, but for an evaluation. Raises ComplaintError for a frame that is
        damaged or of another form than is due: then nothing has changed, and the same may come from
        another node."""
        ...

    def backward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> Done | None:
        """The gradient from `peer` leaves as a gradient, unless it is back at the source. Raises
        ComplaintError as `forward` does."""
        ...

    def keep_gradient(self) -> int:
        """A copy of the stage's gradient is kept until `inherit`; returns `Done.kept`."""
        ...

    def inherit(self, lost: frozenset[str]) -> int:
        """The gradient is of this node's own passes again, and what was or will be done in the
        place of the lost nodes belongs to it; returns `Done.kept`."""
        ...

    def double(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> Done | None:
        """A pass of a visit that another node does, too. It leaves no trace: no gradient of the
        stage's weights is made. Raises ComplaintError as `forward` does."""
        ...

    def difference(self, one: Frame, other: Frame) -> float:
        """Norm of the difference of what two nodes have made, by the norm of the larger one: 2 at
        most, which also says that it can't be read."""
        ...


class AttemptHost(Protocol):
    """What a node does for its attempt; all called on the event loop."""

    def send(self, peer: str, item: Frame) -> bool: ...
    def all_scored(self, ballot: Ballot, scored: pb.Scored) -> None: ...
    def microbatch_home(self, ballot: Ballot, home: pb.Home) -> None: ...
    def cut_off(self, ballot: Ballot, node: str, reason: str, cause: Cause = SILENT) -> None: ...
    def compared(self, ballot: Ballot, compared: pb.Compared) -> None: ...
    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None: ...
    def crashed(self, error: BaseException) -> None: ...


@dataclass
class Workplace:
    """What the attempts of a node have in common, and what is known of those that are over."""

    node: str
    masking: Masking
    filling: InFlightWindow  # how many microbatches of this source are under way at a time
    work: StageWork
    compute: Compute
    host: AttemptHost
    boundary: BoundaryKeeper | None = None
    redundant: bool = False  # a node of the stage before holds each one's twin
    computed: int = 0  # microbatches, forward and backward
    most_kept: int = 0  # by an attempt that is over; bytes, as `Attempt.kept`
    blameless_until: int = -1  # step up to which no peer is blamed for what is raised here
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED))

    @property
    def seconds_per_microbatch(self) -> float:
        """Time that computing one takes here; 0: there was none yet."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def count(self, seconds: float) -> None:
        """One more microbatch was computed."""
        self.computed += 1
        self._seconds.append(seconds)

    def forgive(self) -> None:
        """This node has no microbatch in a step."""
        self._seconds = deque((FORGIVEN * s for s in self._seconds), maxlen=MEASURED)


class AttemptPlan:
    """Who does what, by one `Begin`, as one node sees it. Raises ValueError for one that can't
    be."""

    def __init__(
        self,
        ballot: Ballot,
        begin: pb.Begin,
        node: str,
        masking: Masking,
        redundant: bool,
        before: Mapping[int, Route] = MappingProxyType({}),
    ) -> None:
        """`before`: routes by an earlier plan of the attempt, of which this one need not tell."""
        self.ballot, self.begin = ballot, begin
        told = routes(begin)
        self.routes = {**before, **told}
        self.mine = frozenset(m for m, route in told.items() if node in route.nodes)
        self.sourced = [m.id for m in begin.plan if m.source == node]
        self.microbatches = len(told) + begin.untold  # of the whole attempt
        training = self.trains = begin.kind == pb.Begin.TRAIN
        replicas = Counter(place.stage for place in begin.members)
        self.stages = {place.node: place.stage for place in begin.members}
        self.stage = self.stages.get(node, 0)
        self.maskable = frozenset(
            place.node
            for place in begin.members
            if training and masking != "abort" and replicas[place.stage] > 1
        )
        """Whose loss leaves their stage alive."""
        twins = training and masking != "abort" and redundant
        self.replaceable = self.maskable | frozenset(
            place.node for place in begin.members if twins and place.stage > 0
        )
        """Whose microbatches others may have yet."""
        self.stand_ins = stand_ins(begin.members) if training and masking == "spare" else {}

    def route_said(self, nodes: object) -> Route | None:
        """The way of a microbatch of which only its double is told, as one beside it says; None:
        there is no such way."""
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
        """Raises ValueError for a plan that can't be."""
        self.place, self.node = place, place.node
        self.began = ballot
        self._plan = self._plan_of(ballot, begin)
        self._own = self._plan.mine  # before anybody was lost
        self.applied: set[int] = set()  # ids whose gradient is in the stage's
        self.over = False  # nothing of it has an effect any more
        self._waiting: deque[int] = deque()  # to be injected here
        self._out: set[int] = set()  # injected, and not home
        self._seen: set[Pass] = set()
        self._done: set[Pass] = set()
        self._early: dict[Pass, dict[Pass, tuple[str, Frame]]] = {}  # by what comes before them
        self._held: deque[Callable[[], None]] = deque()  # passes that there is no room for yet
        self._sent: dict[Pass, Frame] = {}  # to replaceable nodes
        self._done_ahead: set[int] = set()  # microbatches that were others' when they were done
        self._withheld: dict[Pass, Frame] = {}  # made in another's place
        self._scored: dict[int, pb.Home] = {}  # whose loss is known, until they are sent as home
        self._homes: set[int] = set()  # of these, those that are back
        self._gradients_kept = 0  # bytes
        self._completed: Outcome[None] | None = None  # whoever waits for it
        self._until = math.inf  # how long
        self._given_up: set[int] = set()  # microbatches that others may have
        self._neighbour, self._second = DoubledNeighbour(begin.checks), SecondVisits()

    def _plan_of(
        self, ballot: Ballot, begin: pb.Begin, before: Mapping[int, Route] = MappingProxyType({})
    ) -> AttemptPlan:
        """Raises ValueError."""
        place = self.place
        return AttemptPlan(ballot, begin, place.node, place.masking, place.redundant, before)

    # --- its course

    @property
    def ballot(self) -> Ballot:
        """What it goes on under."""
        return self._plan.ballot

    @property
    def begin(self) -> pb.Begin:
        return self._plan.begin

    @property
    def kept(self) -> int:
        """Bytes of what may have to be sent or averaged again."""
        frames = (*self._sent.values(), *self._withheld.values())
        return sum(frame.size for frame in frames) + self._gradients_kept

    def start(self) -> None:
        if not self._plan.mine:
            self.place.forgive()
        self._tell_work(partial(self.place.work.begin, self.began, self.begin))
        self._waiting.extend(self._plan.sourced)
        self.place.filling.begin()
        self._inject()

    def go_on(self, ballot: Ballot, begin: pb.Begin) -> None:
        """By a new plan, in which others have the microbatches of who was lost. Raises
        ValueError."""
        before = self._plan
        plan = self._plan_of(ballot, begin, before.routes)
        lost = {place.node for place in before.begin.members}
        lost -= {place.node for place in begin.members}
        left = frozenset(node for node in lost if before.stand_ins.get(node) == self.node)
        if plan.microbatches != before.microbatches:
            raise ValueError("the new plan is of other microbatches than the one before it")
        if taken := before.mine - plan.mine - self._given_up:
            raise ValueError(f"microbatches {sorted(taken)} are others' now, and are not given up")
        for microbatch, route in before.routes.items():
            if left & set(route.nodes) and self.node not in plan.routes[microbatch].nodes:
                raise ValueError(f"microbatch {microbatch} is not given to the lost one's stand-in")
        if again := self._given_up & plan.mine - before.mine:
            raise ValueError(f"microbatches {sorted(again)} were given up here before")
        self._plan, self._until = plan, math.inf
        self._neighbour.forget(
            (m, at)
            for m, at in self._neighbour.visits()
            if plan.routes[m].nodes != before.routes[m].nodes
        )
        self._note_if_complete()
        self._tell_work(partial(self.place.work.inherit, left))
        for sent, frame in list(self._sent.items()):
            node = plan.routes[sent.microbatch].nodes[sent.position]
            if node != before.routes[sent.microbatch].nodes[sent.position]:
                self._send(node, sent, frame)
        self._release()
        held, self._held = self._held, deque()
        for work in held:
            work()
        self._waiting.extend(m for m in plan.sourced if m not in before.sourced)
        self._inject()
        self._tell_if_scored()

    def passes_done(self) -> list[pb.Pass]:
        """At this node."""
        return [
            pb.Pass(
                microbatch=one.microbatch,
                position=one.position,
                backward=one.kind == "gradient",
            )
            for one in self._done
        ]

    def give_up(self, then: Callable[[list[int]], None]) -> None:
        """This node is slow: what it hasn't begun, others may have. `then` gets the microbatches
        of which nothing will be done here any more, unless the attempt is over by then."""
        begun = {one.microbatch for one in self._done}
        candidates = self._plan.mine - begun - self._given_up

        def given(found: list[int] | Exception) -> None:
            if isinstance(found, list) and not self.over:
                self._given_up.update(found)
                self._out.difference_update(found)
                self._waiting = deque(m for m in self._waiting if m not in self._given_up)
                then(found)
            self._raise_error(found)

        work = partial(self.place.work.give_up, self.began, candidates)
        self.place.compute.post(work, given, Priority.CONTROL)

    def _release(self) -> None:
        """What was done in the place of nodes that are lost now is this node's own."""
        self.applied |= self._done_ahead & self._plan.mine
        self._note_if_complete()
        for made, frame in list(self._withheld.items()):
            del self._withheld[made]
            self._send_or_withhold(made, frame)
        self._send_homes()

    def end(self) -> None:
        """There is a newer one."""
        self.over = True
        self.place.most_kept = max(self.place.most_kept, self.kept)

    def drop(self) -> None:
        """It leaves no trace."""
        self.end()
        self._tell_work(self.place.work.drop)

    async def complete(self, exchanges: Exchanges) -> None:
        """The gradient is of all of this node's microbatches; those that it does in place of a lost
        node may come home long before. It may be reduced in vain, so a copy is kept while another
        loss may do that. One exchange at a time waits for it. Raises ComplaintError at the time
        that `hurry` has said."""
        while missing := self._plan.mine - self.applied:
            self._completed = Outcome(exchanges)
            try:
                await self._completed.within(self._until)
            except TimeoutError:
                what = f"microbatches {sorted(missing)} are not computed, and all are home"
                raise ComplaintError(what) from None
        if self.node in self._plan.maskable:
            self._gradients_kept = await exchanges.compute(self.place.work.keep_gradient)

    def hurry(self, until: float) -> None:
        """All microbatches are home: who waits for this node's gradient does so until then."""
        self._until = until
        if self._completed is not None:
            self._completed.fulfil(None)

    @property
    def is_complete(self) -> bool:
        """This node has done all of it that is its own."""
        return self.applied >= self._plan.mine

    def _note_if_complete(self) -> None:
        if self._completed is not None and self.is_complete:
            self._completed.fulfil(None)

    # --- the source

    def _inject(self) -> None:
        while self._waiting and len(self._out) < self.place.filling.out:
            microbatch = self._waiting.popleft()
            if microbatch not in self.applied:  # else it was done ahead, and is home already
                self._inject_now(microbatch)

    def _inject_now(self, microbatch: int) -> None:
        self._out.add(microbatch)
        self._embed_soon(microbatch, Priority.FORWARD)

    def _embed_soon(self, microbatch: int, priority: Priority) -> None:
        first = Pass(microbatch, 0, "activation")
        if first not in self._seen:  # else it was done ahead
            self._seen.add(first)
            visit = Visit(microbatch, 0, self._plan.routes[microbatch])
            passed = partial(self._passed, visit, None)
            self._compute(priority, visit, "activation", self.place.work.embed, passed)

    def _is_scored(self, home: pb.Home) -> None:
        self._scored[home.microbatch] = home
        if not self._plan.trains:
            self._came_home(home.microbatch)
        elif home.microbatch in self._plan.sourced:
            self._tell_if_scored()

    def _tell_if_scored(self) -> None:
        """That the losses of all that begins here are known, as long as some of it isn't back."""
        sourced, scored = self._plan.sourced, self._scored
        out = [m for m in sourced if m not in self.applied]
        if out and all(m in scored for m in out):
            told = pb.Scored(microbatches=[scored[m] for m in out])
            self.place.host.all_scored(self.ballot, told)

    def _came_home(self, microbatch: int) -> None:
        if self._is_timed(microbatch):
            self.place.filling.home(microbatch, self.place.compute.now)
        self._out.discard(microbatch)
        self._homes.add(microbatch)
        self._send_homes()
        self._inject()

    def _is_timed(self, microbatch: int) -> bool:
        """Not what is done ahead, nor what only goes forward."""
        return self._plan.trains and microbatch in self._out

    def _send_homes(self) -> None:
        """Those that are this node's to send."""
        for microbatch in [m for m in self._homes if self._plan.routes[m].nodes[0] == self.node]:
            self._homes.discard(microbatch)
            self.place.host.microbatch_home(self.ballot, self._scored.pop(microbatch))

    # --- frames

    def take(self, peer: str, frame: Frame) -> None:
        """A frame of this attempt has come from `peer`."""
        if self.over:
            return
        try:
            visit = self._visit(peer, frame)
            if visit is None:
                return
            if frame.fields.get(DOUBLE):
                self._take_of_double(peer, frame, visit)
                return
            expected = self._is_expected(peer, frame, visit)
        except ComplaintError as complaint:
            self._complain(complaint)
            return
        this = Pass(visit.microbatch, visit.position, frame.kind)
        if not expected or this in self._seen:
            return
        before = visit.before(frame.kind)
        ahead = visit.node != self.node
        if before is not None and before not in self._done:  # it is redone, or done ahead, here
            self._early.setdefault(before, {})[this] = peer, frame
            if ahead and before.position == 0:
                self._embed_soon(visit.microbatch, Priority.BACKGROUND)
            elif visit.microbatch in self._waiting:  # it began at a source that was lost
                self._waiting.remove(visit.microbatch)
                self._inject_now(visit.microbatch)
            return
        self._seen.add(this)
        self._compare(visit.sender(frame.kind), peer, frame)
        forward = frame.kind == "activation"
        priority = Priority.FORWARD if forward and not visit.at_head else Priority.BACKWARD
        priority = Priority.BACKGROUND if ahead else priority
        work = self.place.work.forward if forward else self.place.work.backward
        passed = partial(self._passed, visit, frame)
        self._compute(priority, visit, frame.kind, work, passed, (peer, frame))

    def _visit(self, peer: str, frame: Frame) -> Visit | None:
        """None: who follows an older plan may send what nobody here is told of by now. Raises
        ComplaintError at who follows this one."""
        microbatch, position = frame.fields.get("microbatch"), frame.fields.get("position")
        if type(microbatch) is not int or type(position) is not int:
            raise _bad_frame(peer, "it lacks its microbatch or position")
        route = self._plan.routes.get(microbatch)
        if route is None and 0 <= microbatch < self._plan.microbatches:
            route = self._plan.route_said(frame.fields.get(DOUBLE))
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
        """Who follows an older plan, from before a loss, may send what is another's by now. Raises
        ComplaintError at who follows this one."""
        sender = visit.sender(frame.kind)
        here = self.node in (visit.node, self._plan.stand_ins.get(visit.node))
        if here and sender.node == peer:
            return True
        if frame.ballot == self.ballot:
            raise ComplaintError(
                f"{peer} sent the {frame.kind} of microbatch {visit.microbatch} for stage "
                f"{visit.stage}, which by the plan goes from {sender.node} to {visit.node}",
                [peer],
                NUMBERS,
            )
        return False

    def _passed(self, visit: Visit, received: Frame | None, done: Done) -> None:
        """`received`: what the pass was of; None: it began the microbatch's way."""
        made = done.frame
        if received is not None:
            self._keep("received", visit, received)
        if made is not None:
            self._keep("sent", visit, made)
        self._gradients_kept = done.kept
        if done.seconds is not None:
            self._count(visit.microbatch, done.seconds)
        if received is None and self._is_timed(visit.microbatch):
            self.place.filling.left(visit.microbatch, self.place.compute.now)
        if made is not None:
            onward = visit.after(made.kind)
            self._send_or_withhold(Pass(onward.microbatch, onward.position, made.kind), made)
        if done.home is not None:
            self._is_scored(done.home)
        elif made is None:
            self._came_home(visit.microbatch)

    def _keep(self, side: Side, visit: Visit, frame: Frame) -> None:
        boundary = self.place.boundary
        if boundary is not None and frame.kind == "activation" and self.node in visit.route.nodes:
            boundary.keep(side, frame, self.began, visit.route.stages)

    def _send_or_withhold(self, made: Pass, frame: Frame) -> None:
        """By the plan as it is now: it may be another one than when this was computed."""
        nodes = self._plan.routes[made.microbatch].nodes
        made_at = made.position - (1 if made.kind == "activation" else -1)
        if nodes[made_at] == self.node:
            self._send(nodes[made.position], made, frame)
        else:
            self._withheld[made] = frame

    def _send(self, node: str, made: Pass, frame: Frame) -> None:
        frame = replace(frame, ballot=self.ballot)
        if node in self._plan.replaceable:
            self._sent[made] = frame
        for to in filter(None, (node, self._plan.stand_ins.get(node))):
            if not self.place.host.send(to, frame):
                reason = f"no link to {to} for microbatch {made.microbatch}"
                self.place.host.cut_off(self.ballot, to, reason)
        for double in self._neighbour.sends((made.microbatch, made.position), frame):
            self._send_to_double(double, frame, self._plan.routes[made.microbatch])

    # --- visits that two nodes do, to be compared

    def check(self, check: pb.Check) -> None:
        """One more node is to do a visit beside this one."""
        for frame in self._neighbour.check(check):
            self._send_to_double(check.double, frame, self._plan.routes[check.microbatch])

    def _send_to_double(self, double: str, frame: Frame, route: Route) -> None:
        """With the way, which the driver doesn't tell it. If there is none to it, there is no
        check."""
        self.place.host.send(
            double, replace(frame, fields={**frame.fields, DOUBLE: [*route.nodes]})
        )

    def _take_of_double(self, peer: str, frame: Frame, visit: Visit) -> None:
        """This node is the double, or beside the visit that another one has done, too."""
        sender = visit.sender(frame.kind)
        if self._neighbour.knows(sender.key, peer) and visit.node == self.node:
            self._compare(sender, peer, frame)
        elif sender.node == peer and visit.stage == self._plan.stage and visit.node != self.node:
            self._do_again(visit, peer, frame)

    def _do_again(self, visit: Visit, peer: str, frame: Frame) -> None:
        if self._second.takes(visit.key, peer, frame):
            self._compute_again(visit, peer, frame)

    def _compute_again(self, visit: Visit, peer: str, frame: Frame) -> None:
        def then(done: Done | Exception | None) -> None:
            if isinstance(done, Done) and done.frame is not None and not self.over:
                onward = visit.after(frame.kind)
                made = replace(done.frame, ballot=self.ballot)
                self._send_to_double(onward.node, made, visit.route)
                if frame.kind == "activation" and (early := self._second.went_forward(visit.key)):
                    self._compute_again(visit, *early)
            elif isinstance(done, ComplaintError) and not self.over:
                self._complain(done)
            elif isinstance(done, Exception) and not self.over:
                log.error("can't do what %s does, too", visit.node, exc_info=done)

        priority = Priority.FORWARD if frame.kind == "activation" else Priority.BACKWARD
        work = partial(self.place.work.double, self.began, visit, peer, frame)
        self.place.compute.post(work, then, priority)

    def _compare(self, made_at: Visit, node: str, frame: Frame) -> None:
        """What `node` has made at that visit, with what others have made there."""
        for pair in self._neighbour.made(made_at.key, node, frame):
            self._measure(pair)

    def _measure(self, pair: DoubledResult) -> None:
        def then(difference: float | Exception) -> None:
            if isinstance(difference, float) and not self.over:
                compared = pb.Compared(
                    microbatch=pair.key[0],
                    position=pair.key[1],
                    backward=pair.backward,
                    node=pair.node,
                    other=pair.other,
                    difference=difference,
                )
                self.place.host.compared(self.ballot, compared)
            self._raise_error(difference)

        work = partial(self.place.work.difference, *pair.made)
        self.place.compute.post(work, then, Priority.BACKGROUND)

    # --- small things

    def _count(self, microbatch: int, seconds: float) -> None:
        own = microbatch in self._plan.mine
        (self.applied if own else self._done_ahead).add(microbatch)
        self.place.count(seconds)
        self._note_if_complete()

    def _complain(self, complaint: ComplaintError) -> None:
        """What a peer has sent can't be used. What it was to do, others may."""
        for node in complaint.accused:
            self.place.host.cut_off(self.ballot, node, str(complaint), complaint.cause)

    def _compute(
        self,
        priority: Priority,
        visit: Visit,
        kind: str,
        work: Callable[..., Done | None],
        passed: Callable[[Done], None],
        received: tuple[()] | tuple[str, Frame] = (),
    ) -> None:
        """In the compute thread; then, if it is still wanted, go on with what has come of it.
        `received`: who has sent what it is of, and that."""
        this = Pass(visit.microbatch, visit.position, kind)
        peer = received[0] if received else ""
        again = partial(self._compute, priority, visit, kind, work, passed, received)

        def then(done: Done | Exception | None) -> None:
            match done:
                case ComplaintError() if not self.over:
                    self._seen.discard(this)
                    self._complain(done)
                case Exception() if peer and self.over:
                    pass  # whatever it was of, nobody waits for it
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
                case Done() if not self.over:
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
        """Who waits must hold nothing, at another stage, that what is done here needs: neither what
        comes here from a later stage, nor what was done at later ones before a loss; nor does a
        source keep what comes to its head waiting for its turn. And of two stand-ins each would
        wait for what the other does ahead."""
        order = visit.route.stages[1:-1]
        in_order = visit.position <= 1 or list(order) == sorted(order)
        return in_order and visit.microbatch in self._own and not self._plan.stand_ins

    def _blame(self, peer: str, this: Pass, error: Exception) -> None:
        """What has come from a peer is what was due, and still can't be computed on. That is its
        sender's failure once; in the steps after that it is this node's own."""
        what = f"can't compute on the {this.kind} of microbatch {this.microbatch} from {peer}"
        log.error(what, exc_info=error)
        self.place.blameless_until = self.begin.step + BLAMELESS
        reason = f"{what}: {type(error).__name__}: {error}"
        self.place.host.attempt_failed(self.ballot, reason, [peer])

    def _tell_work(
        self, work: Callable[[], int | None], priority: Priority = Priority.CONTROL
    ) -> None:
        def then(kept: int | Exception | None) -> None:
            if isinstance(kept, int):
                self._gradients_kept = kept
            self._raise_error(kept)

        self.place.compute.post(work, then, priority)

    def _raise_error(self, result: object) -> None:
        if isinstance(result, Exception) and not isinstance(result, ComplaintError):
            self.place.host.crashed(result)


def _bad_frame(peer: str, what: str) -> ComplaintError:
    return ComplaintError(f"{peer} sent a bad frame: {what}", [peer], NUMBERS)
