"""One step in simulated time, microbatch by microbatch, as node/transaction/attempt.py runs it.

The plan is the driver's, node/transaction/routing.py; each node has one compute thread that runs
backward work before forward work; frames cross links; the replicas of each stage average as in
node/averaging/ once all that is theirs has gone back; each node sends Ready once it
has the step's records, and the driver's commit begins the next step. What policies send
competes for links and threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Final, Literal

from planaria.bootstrap.neighbours import lengths
from planaria.node.averaging.coding import PIECE, gradient_bytes, part_count
from planaria.node.model.shape import VALUE, trained_shapes
from planaria.node.ports import Priority
from planaria.node.state.copies import FRAME, OUTSTANDING, snapshot_section
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.transaction.routing import Route, plan
from planaria.node.wire.chunk_flow import BACKGROUND
from planaria.node.wire.frame_format import KINDS
from planaria.recovery.orders import window_orders
from planaria.recovery.snapshot import route as route_of_copies
from planaria.recovery.snapshot import steps_between
from planaria_lab.emulation.links import Link
from planaria_lab.simulator.clock import ON_WIRE, Clock, Cores, Then, Uplink, Wire, Worker
from planaria_lab.simulator.swarm import (
    HEAD,
    Group,
    Seconds,
    Swarm,
    SwarmFiguresError,
    frame_bytes,
    parameters,
    snapshot_bytes,
)

URGENCY: Final = {kind: number for number, kind in enumerate(KINDS)}
MOST_PIECES: Final = 8
"""Of a replica's part of a gradient; those of a part of more than 64 MiB are larger here."""
TWIN_PIECE: Final = 4 << 20  # bytes
MOST_SETTLING: Final = 8
"""Steps after which sources' numbers of microbatches out at a time count as settled."""
POOLED: Final = 256
"""Nodes from which on one lane stands for all, where it may."""


@dataclass(frozen=True)
class Bottleneck:
    """The resource that was busy for the largest share of a step."""

    kind: Literal["compute", "link", "uplink"]
    where: str  # a node, FROM -> TO, or a site
    share: float  # of the step's seconds

    @property
    def waits(self) -> bool:
        """Nothing is busy for half of the time: delays, or the window, hold the step up."""
        return self.share < 0.5


@dataclass(frozen=True)
class MeanStep:
    """The mean of the steps simulated, without the first."""

    seconds: float  # from decision to decision
    pipeline: float  # of these, until all microbatches were home
    reduce: float  # and then until everyone was ready
    busy: Mapping[str, float]  # node -> seconds of its compute thread
    sent: Mapping[tuple[str, str], float]  # from, to -> bytes of frames
    bottleneck: Bottleneck
    pooled: bool  # one lane stands for all
    events: int  # simulated in all

    @property
    def bytes(self) -> float:
        """Bytes sent on all links."""
        return sum(self.sent.values())


def simulate_step(swarm: Swarm, steps: int = 3, pooled: bool | None = None) -> MeanStep:
    """Simulate `steps` steps in a row, none of which fails: the first finds empty links, the others
    what the one before has left on them. They begin when sources have found out how many
    microbatches to have out at a time.

    `pooled`: one lane stands for all sources, and a pool with the sum of their speeds for the
    replicas of each stage; see `lane`. Left out: from `POOLED` nodes on, where it may be. Raises
    SwarmFiguresError.
    """
    if steps < 2:
        raise SwarmFiguresError(f"steps = {steps}: the first doesn't count, so take 2 or more")
    if pooled is None:
        pooled = sum(swarm.counts) >= POOLED and _why_not_pooled(swarm) is None
    if pooled and (why := _why_not_pooled(swarm)):
        raise SwarmFiguresError(f"one lane can't stand for all: {why}")
    return _Training(lane(swarm) if pooled else _each(swarm), steps).run(pooled)


# --- the nodes that take part


@dataclass(frozen=True)
class Cast:
    """The nodes that are simulated, and for how many each of them stands."""

    swarm: Swarm
    nodes: Mapping[str, Group]
    microbatches: int
    occupied: Mapping[int, float]  # stage -> share of a task for which a node is occupied by it
    others: int  # nodes besides, with which the driver exchanges messages too
    away: float  # seconds one way from the driver to the other sources that its node stands for
    reduces: Mapping[int, float] | None  # stage -> seconds; None: simulated


def _each(swarm: Swarm) -> Cast:
    training = swarm.run.training
    alone = dict.fromkeys(range(swarm.config.stages + 1), 1.0)
    return Cast(swarm, swarm.nodes(), training.microbatches, alone, 0, 0.0, None)


def _why_not_pooled(swarm: Swarm) -> str | None:
    stages = [group.stage for group in swarm.groups if group.count]
    if len(set(stages)) < len(stages):
        return "nodes of a stage are not alike"
    if swarm.cores:
        return "nodes share the cores of a machine"
    policy = swarm.run.policy
    uneven = swarm.network.uplinks and not policy.checkpoints
    if policy.snapshots or policy.twins or uneven:
        return f"what {swarm.run.recovery.policy} sends besides does not come from all lanes alike"
    return None


def lane(swarm: Swarm) -> Cast:
    """One source with its share of the window, rounded up, and one node a stage in its route. A
    stage with R nodes for R_0 sources is occupied by a microbatch for R_0 / R of what it takes.

    Exact where each source has nodes of its own and the window divides; else as if work were spread
    evenly, without the queues that form when several sources choose the same node at once, and
    with R_0 / R as a fluid would have it. Averaging takes `averaging_seconds`.
    """
    stages = range(swarm.config.stages + 1)
    single = swarm.with_counts(min(1, count) for count in swarm.counts)
    nodes = single.nodes()  # raises when a stage has none
    sources = swarm.replicas(0)
    uplinks = {site: mbps / sources for site, mbps in swarm.network.uplinks.items()}
    single = replace(single, network=replace(swarm.network, uplinks=uplinks))
    return Cast(
        single,
        nodes,
        -(-swarm.run.training.microbatches // sources),
        {stage: sources / swarm.replicas(stage) for stage in stages},
        sum(swarm.counts) - len(stages),
        single.link(0, 0).delay_ms / 1e3 if sources > 1 else 0.0,
        {stage: averaging_seconds(swarm, stage) for stage in stages},
    )


def averaging_seconds(swarm: Swarm, stage: int, link: Link | None = None) -> float:
    """Of equal replicas in closed form, with this link between any two of them; left out: the one
    within the site of the first. If they aren't equal, as if all were like the slowest.

    Each sends (R-1)/R of the gradient twice, over R-1 links at once, and passes over it three
    times; the shorter of sending and passing over is hidden behind the longer but for a piece. In
    rows a link carries a part of its row's twice, and what crosses between rows meanwhile is less.
    """
    replicas = swarm.replicas(stage)
    if replicas == 1:
        return 0.0
    groups = [group for group in swarm.groups if group.stage == stage and group.count]
    link = link or swarm.network.between(groups[0].site, groups[0].site)
    pieces, size = averaging_pieces(swarm, stage, replicas)
    some = lengths(replicas)
    row, owners, column = max(some), min(some), len(some)
    once = pieces * size * ON_WIRE * 8 / (link.mbps * 1e6)
    sending = 2 * column * once
    passes = 2 * (owners - 1) + (row - 1) + (3 * column - 3) / column
    computing = max(group.seconds.add for group in groups) * passes / owners
    each_way = (owners - 1 + row - 1) * column + 2 * (column - 1)
    frames = 2 * each_way * pieces * swarm.transport.frame
    short, _, long = sorted((sending, computing, frames))
    return (2 if column == 1 else 4) * link.delay_ms / 1e3 + long + short / (column * pieces)


def averaging_pieces(swarm: Swarm, stage: int, replicas: int) -> tuple[int, int]:
    """For each part of the replicas: the number of its pieces, and the bytes of each on a link."""
    shapes, count = trained_shapes(swarm.config, stage).values(), part_count(replicas)
    values = -(-parameters(swarm.config, stage) // count)
    pieces = max(1, min(MOST_PIECES, -(-values // PIECE)))
    sent = gradient_bytes(swarm.run.wire, shapes, replicas)
    return pieces, HEAD + -(-sent // (count * pieces))


# --- a node's part


class _Node:
    def __init__(
        self, name: str, group: Group, thread: Worker, loop: Worker, filling: InFlightWindow
    ) -> None:
        self.name, self.stage, self.site = name, group.stage, group.site
        self.seconds: Seconds = group.seconds
        self.thread, self.loop = thread, loop
        self.step = 0  # that it has begun
        self.held: list[Then] = []  # frames of the next one
        self.visits = 0  # in a step
        self.left = 0  # of these, whose gradient has yet to go back
        self.waiting: deque[Route] = deque()  # microbatches to be injected here
        self.out = 0  # injected, and not home
        self.filling = filling  # how many may be
        self.twin_apply = 0.0
        self.unscored = 0  # of this source's microbatches
        self.lacking = 0  # of the twin's gradient, its own and the records, before it is ready


class _Average:
    """The reduction of one stage: counts what is where. A reduce-scatter, then an all-gather; in
    rows, and between the owners of a part, as if names had nothing to do with groups."""

    def __init__(self, training: _Training, nodes: list[_Node]) -> None:
        self.training, self.count = training, part_count(len(nodes))
        self.pieces, self.size = averaging_pieces(training.swarm, nodes[0].stage, len(nodes))
        some = lengths(len(nodes))
        drawn = iter(nodes if len(some) == 1 else Random(0).sample(nodes, len(nodes)))
        self.rows = [list(islice(drawn, length)) for length in some]
        self.owners = min(some)  # of a row
        numbers = range(len(some) * self.pieces)  # of pieces of an owner; by row who makes the sum
        self.contributions = {
            (owner.name, k): len(row) - 1
            for row in self.rows
            for owner in row[: self.owners]
            for k in numbers
        }
        self.row_sums = {(p, k): len(some) for p in range(self.owners) for k in numbers}
        self.sums = {n.name: self.count * self.pieces for n in nodes}  # that it lacks

    def _row(self, node: _Node) -> list[_Node]:
        """The names in a ring, from the node's successor on, without it."""
        row = next(row for row in self.rows if node in row)
        place = row.index(node)
        return row[place + 1 :] + row[:place]

    def _is_owner(self, node: _Node) -> bool:
        return any(node in row[: self.owners] for row in self.rows)

    def _pass(self, node: _Node, some: int) -> float:
        """Seconds to go over a piece of so many parts."""
        return node.seconds.add * some / (self.count * self.pieces)

    def start(self, node: _Node) -> None:
        owners = [other for other in self._row(node) if self._is_owner(other)]
        for number in range(len(self.rows) * self.pieces):
            then = partial(self._contribute, node, owners, number)
            node.thread.post(Priority.CONTROL, self._pass(node, len(owners)), then)

    def _send(self, node: _Node, others: Iterable[_Node], work: Callable[[_Node], None]) -> None:
        """Others go over it when it is there, and then do that."""

        def come(other: _Node) -> None:
            other.thread.post(Priority.CONTROL, self._pass(other, 1), partial(work, other))

        for other in others:
            self.training.frame("average", node, other, self.size, partial(come, other))

    def _contribute(self, node: _Node, owners: list[_Node], number: int) -> None:
        self._send(node, owners, lambda owner: self._added(owner, number))

    def _added(self, owner: _Node, number: int) -> None:
        self.contributions[owner.name, number] -= 1
        if self.contributions[owner.name, number]:
            return
        place = next(row.index(owner) for row in self.rows if owner in row)
        maker = self.rows[number // self.pieces][place]
        if maker is owner:
            self._row_added(place, number, owner)
            return
        then = partial(self._send, owner, [maker], partial(self._row_added, place, number))
        owner.thread.post(Priority.CONTROL, self._pass(owner, 1), then)

    def _row_added(self, place: int, number: int, maker: _Node) -> None:
        self.row_sums[place, number] -= 1
        if not self.row_sums[place, number]:
            self._send(maker, [row[place] for row in self.rows if maker not in row], self._pass_on)
            self._pass_on(maker)

    def _pass_on(self, owner: _Node) -> None:
        self._send(owner, self._row(owner), self._has)
        self._has(owner)

    def _has(self, node: _Node) -> None:
        self.sums[node.name] -= 1
        if not self.sums[node.name]:
            self.training.averaged(node)


class _Updates:
    """Copies or snapshots of a stage on their way to its holders: one at a time, each in frames of
    which a holder has two at most to answer, at no more than a rate."""

    def __init__(
        self,
        training: _Training,
        sender: _Node,
        holders: list[_Node],
        size: int,
        period: int,
        pace: float,
    ) -> None:
        self.training, self.sender, self.holders = training, sender, holders
        self.size, self.period = size, period
        self.pace = pace  # seconds a byte
        self.started = {holder.name: -period for holder in holders}  # in which step
        self.rest = 0
        self.outstanding = 0
        self.free = 0.0  # when the rate allows the next frame

    def committed(self) -> None:
        """The weights of the step that has begun are in place."""
        if self.rest or self.outstanding:
            return
        step = self.sender.step
        due = [h for h in self.holders if step - self.started[h.name] >= self.period]
        if due:
            holder = min(due, key=lambda h: (self.started[h.name], h.name))
            self.started[holder.name] = step
            self.rest = self.size
            self._send(holder)

    def _send(self, holder: _Node) -> None:
        clock = self.training.clock
        while self.rest and self.outstanding < OUTSTANDING:
            if self.free > clock.now:
                clock.at(self.free, partial(self._send, holder))
                return
            size = min(self.rest, FRAME)
            self.rest -= size
            self.outstanding += 1
            self.free = clock.now + size * self.pace
            self.training.frame("copy", self.sender, holder, size, partial(self._kept, holder))

    def _kept(self, holder: _Node) -> None:
        self.training.message(holder, self.sender, partial(self._answered, holder))

    def _answered(self, holder: _Node) -> None:
        self.outstanding -= 1
        if self.rest:
            self._send(holder)
        elif not self.outstanding:
            self.committed()


# --- all of it


class _Training:
    """Some steps in a row. Methods are events, in the order in which a microbatch meets them."""

    def __init__(self, cast: Cast, steps: int) -> None:
        swarm = cast.swarm
        self.cast, self.swarm, self.transport, self.steps = cast, swarm, swarm.transport, steps
        self.clock = Clock()
        cores = Cores(self.clock, swarm.cores)
        self.nodes = {
            name: _Node(
                name,
                group,
                Worker(self.clock, cores, cast.occupied[group.stage]),
                Worker(self.clock, cores),
                InFlightWindow(swarm.run.training.in_flight, swarm.config.stages),
            )
            for name, group in cast.nodes.items()
        }
        self.stages = range(swarm.config.stages + 1)
        self.by_stage: dict[int, list[_Node]] = {stage: [] for stage in self.stages}
        for node in self.nodes.values():
            self.by_stage[node.stage].append(node)
        self.driver = self.by_stage[0][0]
        replicas = [[node.name for node in self.by_stage[stage]] for stage in self.stages]
        speeds = {name: node.seconds.microbatch for name, node in self.nodes.items()}
        orders = window_orders(1, cast.microbatches, swarm.config.stages, swarm.swapped)
        self.plan = plan(orders, replicas, speeds)
        for route in self.plan:
            for name in {*route.nodes}:
                self.nodes[name].visits += 1
        self.sizes = {
            kind: frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")
        }
        self.uplinks = {site: Uplink(mbps) for site, mbps in swarm.uplinks.items()}
        self.wires: dict[tuple[str, str], Wire] = {}
        self.twins = swarm.run.policy.twins
        for node in self.nodes.values() if self.twins else ():
            next_seconds = self.by_stage[(node.stage + 1) % len(self.stages)][0].seconds
            node.twin_apply = next_seconds.apply
        self.updates = dict(self._updates())
        self.averages: dict[int, _Average] = {}
        self.scored = self.homes = self.ready = 0  # sources, microbatches, nodes
        self.settling = 0  # steps since which sources' numbers might have settled
        self.decided: list[float] = []
        self.all_home: list[float] = []

    def _updates(self) -> Iterator[tuple[str, _Updates]]:
        run, config = self.swarm.run, self.swarm.config
        members = [(node.name, node.stage) for node in self.nodes.values()]
        snapshot = snapshot_section(run, config)
        for stage in self.stages:
            route = route_of_copies(stage, members, config.stages)
            sends = run.policy.sends(stage, snapshot.first)
            if not sends or route is None or not route.holders:
                continue
            size = round(snapshot.fraction * snapshot_bytes(run, config, stage))
            period = steps_between(snapshot.fraction, snapshot.period)
            pace = 8 / (snapshot.mbps * 1e6)
            holders = [self.nodes[name] for name in route.holders]
            sender = self.nodes[route.sender]
            yield route.sender, _Updates(self, sender, holders, size, period, pace)

    def run(self, pooled: bool) -> MeanStep:
        self.begin()
        self.clock.run(lambda: len(self.decided) > self.steps)
        if len(self.decided) <= self.steps:
            raise AssertionError(f"nothing is due after {len(self.decided) - 1} steps")
        return self._measured(pooled)

    def _measured(self, pooled: bool) -> MeanStep:
        count, whole = self.steps - 1, self.decided[-1] - self.decided[0]
        seconds = (self.decided[-1] - self.decided[1]) / count
        pipeline = sum(
            home - begun for home, begun in zip(self.all_home[1:], self.decided[1:], strict=False)
        )
        busy = {name: node.thread.busy_seconds / self.steps for name, node in self.nodes.items()}
        candidates = [
            Bottleneck("compute", n, busy_share * self.steps / whole)
            for n, busy_share in busy.items()
        ]
        candidates += [
            Bottleneck("link", f"{a} -> {b}", wire.busy_seconds / whole)
            for (a, b), wire in self.wires.items()
        ]
        candidates += [
            Bottleneck("uplink", site, uplink.busy_seconds / whole)
            for site, uplink in self.uplinks.items()
        ]
        return MeanStep(
            seconds=seconds,
            pipeline=pipeline / count,
            reduce=seconds - pipeline / count,
            busy=busy,
            sent={pair: wire.sent / self.steps for pair, wire in self.wires.items()},
            bottleneck=max(candidates, key=lambda candidate: candidate.share),
            pooled=pooled,
            events=self.clock.events,
        )

    # --- what travels

    def frame(self, kind: str, a: _Node, b: _Node, size: int, then: Then) -> None:
        wire = self.wires.get((a.name, b.name))
        if wire is None:
            link = self.swarm.network.between(a.site, b.site)
            uplink = self.uplinks.get(a.site) if a.site != b.site else None
            wire = Wire(self.clock, link.delay_ms / 1e3, link.mbps, uplink)
            self.wires[a.name, b.name] = wire
        background = kind == BACKGROUND
        if not self.transport.frame:
            wire.send(URGENCY[kind], size, then, background)
            return
        received = partial(b.loop.post, 0, self.transport.frame, then)
        sent = partial(wire.send, URGENCY[kind], size, received, background)
        a.loop.post(0, self.transport.frame, sent)

    def message(self, a: _Node, b: _Node, then: Then) -> None:
        """Sends a message on a stream of its own, which no frame delays."""
        if a is b:
            self.clock.after(self.cast.away, then) if self.cast.away else then()
            return
        delay = self.swarm.network.between(a.site, b.site).delay_ms / 1e3
        received = partial(b.loop.post, 0, self.transport.message, then)
        sent = partial(self.clock.after, delay, received)
        a.loop.post(0, self.transport.message, sent)

    def speak_to_others(self, then: Then | None = None) -> None:
        """What a message to or from each node that isn't simulated takes the driver; as if those
        that are simulated were the last."""
        if self.cast.others:
            seconds = self.cast.others * self.transport.message
            self.driver.loop.post(0, seconds, then or _nothing)
        elif then is not None:
            then()

    # --- a step

    def begin(self) -> None:
        """The driver decides: commit, and begin the next step."""
        if self._fills_anew():
            self._count_from_here()
        self.decided.append(self.clock.now)
        if len(self.decided) > self.steps:
            return
        self.scored = self.homes = self.ready = 0
        self.averages = {
            stage: _Average(self, nodes) for stage, nodes in self.by_stage.items() if len(nodes) > 1
        }
        self.speak_to_others()
        for node in self.nodes.values():
            self.message(self.driver, node, partial(self.begun, node))

    def _fills_anew(self) -> bool:
        """A source has another number out than in the step before, and there may be such steps."""
        before = [source.filling.out for source in self.by_stage[0]]
        for source in self.by_stage[0]:
            source.filling.begin()
        self.settling += 1
        changed = before != [source.filling.out for source in self.by_stage[0]]
        return changed and self.settling <= MOST_SETTLING

    def _count_from_here(self) -> None:
        """What was until now doesn't count, but for what it has left on links and in threads."""
        self.decided, self.all_home = [], []
        for worker in (node.thread for node in self.nodes.values()):
            worker.busy_seconds = 0.0
        for wire in self.wires.values():
            wire.busy_seconds, wire.sent = 0.0, 0
        for uplink in self.uplinks.values():
            uplink.busy_seconds = 0.0

    def begun(self, node: _Node) -> None:
        """A node applies the commit, and begins."""
        node.step += 1
        node.left = node.visits
        node.lacking = 2 + self._twin_pieces((node.stage + 1) % len(self.stages))
        apply = node.seconds.apply + (node.twin_apply if self.twins else 0.0)
        updates = self.updates.get(node.name)
        node.thread.post(Priority.CONTROL, apply, updates.committed if updates else _nothing)
        if node.stage == 0:
            node.waiting.extend(route for route in self.plan if route.nodes[0] == node.name)
            node.unscored = len(node.waiting)
            self.inject(node)
        postponed, node.held = node.held, []
        for take in postponed:
            take()
        if not node.visits:
            self.reduce(node)

    def inject(self, source: _Node) -> None:
        while source.waiting and source.out < source.filling.out:
            source.out += 1
            then = partial(self.embedded, source, source.waiting.popleft())
            source.thread.post(Priority.FORWARD, source.seconds.forward, then)

    def embedded(self, source: _Node, route: Route) -> None:
        source.filling.left(id(route), self.clock.now)
        self.forward_done(source, route, 0)

    def forward_done(self, node: _Node, route: Route, position: int) -> None:
        self.pass_on("activation", node, route, position + 1)

    def backward_done(self, node: _Node, route: Route, position: int) -> None:
        if position == 0:
            self.home(node, route)
        else:
            self.pass_on("gradient", node, route, position - 1)
        node.left -= 1
        if not node.left:
            self.reduce(node)

    def head_done(self, source: _Node, route: Route) -> None:
        """The loss is known; a source tells of its microbatches' when it has all."""
        self.pass_on("gradient", source, route, len(route.nodes) - 2)
        source.unscored -= 1
        if not source.unscored:
            self.message(source, self.driver, self.heard_of_losses)

    def heard_of_losses(self) -> None:
        """When all sources have told theirs, who keeps records is told them; in a small swarm that
        is everybody."""
        self.scored += 1
        if self.scored == len({route.nodes[0] for route in self.plan}):
            for node in self.nodes.values():
                self.message(self.driver, node, partial(self.told_records, node, self.driver.step))

    def told_records(self, node: _Node, step: int) -> None:
        if node.step < step:
            node.held.append(partial(self.told_records, node, step))
            return
        self.one_less_lacking(node)

    def pass_on(self, kind: str, node: _Node, route: Route, position: int) -> None:
        """Sends a microbatch on to the node of that visit."""
        to = self.nodes[route.nodes[position]]
        take = partial(self.take, to, node.step, route, position, kind)
        self.frame(kind, node, to, self.sizes[kind], take)

    def take(self, node: _Node, step: int, route: Route, position: int, kind: str) -> None:
        """A frame has come."""
        if node.step < step:
            again = partial(self.take, node, step, route, position, kind)
            node.held.append(again)
            return
        seconds = node.seconds
        if kind == "gradient":
            done = partial(self.backward_done, node, route, position)
            node.thread.post(Priority.BACKWARD, seconds.backward, done)
        elif position == len(route.nodes) - 1:
            done = partial(self.head_done, node, route)
            node.thread.post(Priority.BACKWARD, seconds.head, done)
        else:
            done = partial(self.forward_done, node, route, position)
            node.thread.post(Priority.FORWARD, seconds.forward, done)

    def home(self, source: _Node, route: Route) -> None:
        source.out -= 1
        source.filling.home(id(route), self.clock.now)
        self.message(source, self.driver, self.heard_of_home)
        self.inject(source)

    def heard_of_home(self) -> None:
        self.homes += 1
        if self.homes == self.cast.microbatches:
            self.all_home.append(self.clock.now)

    def reduce(self, node: _Node) -> None:
        if self.cast.reduces is not None:
            self.clock.after(self.cast.reduces[node.stage], partial(self.averaged, node))
        elif node.stage in self.averages:
            self.averages[node.stage].start(node)
        else:
            self.averaged(node)

    def averaged(self, node: _Node) -> None:
        then = partial(self.exchange if self.twins else self.one_less_lacking, node)
        node.thread.post(Priority.CONTROL, node.seconds.norm, then)

    def exchange(self, node: _Node) -> None:
        """Sends the reduced gradient to the holders of this stage's twin, with redundant
        computation (node/state/twin.py, `servers`)."""
        own = self.by_stage[node.stage]
        holders = self.by_stage[(node.stage - 1) % len(self.stages)]
        size = VALUE * parameters(self.swarm.config, node.stage)
        pieces = self._twin_pieces(node.stage)
        for holder in holders[own.index(node) :: len(own)]:
            for _ in range(pieces):
                come = partial(self.one_less_lacking, holder)
                self.frame("twin", node, holder, HEAD + size // pieces, come)
        self.one_less_lacking(node)

    def _twin_pieces(self, stage: int) -> int:
        if not self.twins:
            return 0
        return min(MOST_PIECES, -(-VALUE * parameters(self.swarm.config, stage) // TWIN_PIECE))

    def one_less_lacking(self, node: _Node) -> None:
        """A piece of its twin's gradient, its own stage's gradient, or the records are at the
        node."""
        node.lacking -= 1
        if not node.lacking:
            self.say_ready(node)

    def say_ready(self, node: _Node) -> None:
        self.message(node, self.driver, self.heard_of_ready)

    def heard_of_ready(self) -> None:
        self.ready += 1
        if self.ready == len(self.nodes):
            self.speak_to_others(self.begin)


def _nothing() -> None:
    pass
