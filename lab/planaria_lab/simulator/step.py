"""Simulates steps event by event, each microbatch as node/transaction/attempt.py handles it.

The plan is the driver's (node/transaction/routing.py). Each node has one compute thread, which runs
backward work before forward work. Frames cross links. The replicas of a stage average as in
node/averaging/, each from the time when all its gradients have left. A node sends Ready once it has
the step's records, too. The driver's commit begins the next step. What a policy sends, such as
copies, competes for links and threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from statistics import mean
from typing import Final, Literal

from planaria.bootstrap.neighbours import lengths
from planaria.node.averaging.coding import PIECE, gradient_bytes, part_count
from planaria.node.averaging.evidence import DIGEST, block_length, is_audited
from planaria.node.driver.audits import BLOCKS
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
"""Maximum number of pieces of a replica's part of a gradient. So pieces of a part of more than
64 MiB are larger than the daemon's."""
TWIN_PIECE: Final = 4 << 20  # bytes
SIGNATURE: Final = 95
"""Bytes of the signature of a piece's digests, and of what else is signed with them."""
MOST_SETTLING: Final = 8
"""Steps after which the sources' in-flight windows count as settled."""
UNLIKE: Final = 8
"""Number of swarms of which `typical_seconds` is the mean."""
POOLED: Final = 256
"""Number of nodes from which on one lane stands for all, if it can."""


@dataclass(frozen=True)
class Bottleneck:
    """The resource that was busy for the largest share of a step."""

    kind: Literal["compute", "link", "uplink"]
    where: str  # a node; a link, as FROM -> TO; or a site
    share: float  # of the step's seconds

    @property
    def waits(self) -> bool:
        """Whether no resource is busy for half of the time. Then delays, or the in-flight window,
        determine the step's seconds."""
        return self.share < 0.5


@dataclass(frozen=True)
class MeanStep:
    """Means over the simulated steps, without the first one."""

    seconds: float  # from one commit to the next
    pipeline: float  # of these, until the driver hears that all microbatches are back
    reduce: float  # of these, from then until all nodes are ready
    busy: Mapping[str, float]  # node -> seconds of its compute thread
    sent: Mapping[tuple[str, str], float]  # (from, to) -> bytes of frames
    bottleneck: Bottleneck
    pooled: bool  # one lane stands for all
    events: int  # number of events simulated, in all steps

    @property
    def bytes(self) -> float:
        """Bytes sent on all links."""
        return sum(self.sent.values())


def simulate_step(swarm: Swarm, steps: int = 3, pooled: bool | None = None) -> MeanStep:
    """Simulates `steps` steps in a row without failures, and returns their means. Links may be
    occupied by the step before, so the first step doesn't count. The steps begin once the sources'
    in-flight windows have settled.

    `pooled`: one lane stands for all sources, and a pool with the sum of their speeds for the
    replicas of each stage (see `lane`). By default, this is done from `POOLED` nodes on, if it can
    be. Raises SwarmFiguresError.
    """
    if steps < 2:
        raise SwarmFiguresError(f"steps = {steps}: the first doesn't count, so take 2 or more")
    if pooled is None:
        pooled = sum(swarm.counts) >= POOLED and _why_not_pooled(swarm) is None
    if pooled and (why := _why_not_pooled(swarm)):
        raise SwarmFiguresError(f"one lane can't stand for all: {why}")
    return _Training(lane(swarm) if pooled else _each(swarm), steps).run(pooled)


def typical_seconds(swarm: Swarm, steps: int = 3) -> float:
    """Mean seconds of a step of `UNLIKE` swarms like this one, whose nodes differ at random by up
    to 2 % in speed. Raises SwarmFiguresError.

    The driver plans visits by measured speeds, which are never equal. Where nodes or their links
    are unlike, a step takes up to a tenth more or less, by which of them a microbatch visits.
    """
    drawn = Random(0)
    seconds = []
    for _ in range(UNLIKE):
        groups = tuple(
            replace(group, seconds=group.seconds.faster(drawn.uniform(0.99, 1.01)))
            for group in swarm.groups
        )
        seconds.append(simulate_step(replace(swarm, groups=groups), steps).seconds)
    return mean(seconds)


# --- the simulated nodes


@dataclass(frozen=True)
class Cast:
    """The simulated nodes, and how many nodes each of them stands for."""

    swarm: Swarm
    nodes: Mapping[str, Group]
    microbatches: int
    occupied: Mapping[int, float]  # stage -> share of a task's time in which its node is occupied
    others: int  # number of nodes that aren't simulated; the driver exchanges messages with them
    away: float  # one-way delay in seconds from the driver to the sources that its node stands for
    reduces: Mapping[int, float] | None  # stage -> seconds of averaging; None: it is simulated


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
        name = swarm.run.recovery.policy
        return f"under the policy {name}, lanes differ in what they send beside microbatches"
    return None


def lane(swarm: Swarm) -> Cast:
    """A cast that stands for all nodes: one source with its share of the window, rounded up, and
    one node for each other stage. A microbatch occupies a node for R_0 / R of its time, if there
    are R_0 sources and R nodes of the stage.

    This is exact if each source has its own nodes and the window is divisible by the sources.
    Otherwise work is spread evenly, as a fluid. Then queues are missing, which form when several
    sources choose the same node at once. Averaging takes `averaging_seconds`.
    """
    stages = range(swarm.config.stages + 1)
    single = swarm.with_counts(min(1, count) for count in swarm.counts)
    nodes = single.nodes()  # raises if a stage has none
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
    """Seconds in which R equal replicas average, in closed form.

    `link`: the link between any two of them; by default, that within the site of the first. If the
    replicas aren't equal, all count as the slowest.

    Each replica sends (R-1)/R of the gradient twice, over R-1 links at once, and passes over it
    three times. Sending, computing and the event loops overlap: the longest of them counts, and one
    piece of the second longest. In rows, a link carries a part of its row's twice; traffic between
    rows is less, and goes on meanwhile.
    """
    replicas = swarm.replicas(stage)
    if replicas == 1:
        return 0.0
    groups = [group for group in swarm.groups if group.stage == stage and group.count]
    link = link or swarm.network.between(groups[0].site, groups[0].site)
    pieces, size = averaging_pieces(swarm, stage, replicas)
    row_lengths = lengths(replicas)
    row, owners, column = max(row_lengths), min(row_lengths), len(row_lengths)
    once = pieces * size * ON_WIRE * 8 / (link.mbps * 1e6)
    sending = 2 * column * once
    passes = 2 * (owners - 1) + (row - 1) + (3 * column - 3) / column
    computing = max(group.seconds.add for group in groups) * passes / owners
    each_way = (owners - 1 + row - 1) * column + 2 * (column - 1)
    frames = 2 * each_way * pieces * swarm.transport.frame
    _, second, longest = sorted((sending, computing, frames))
    return (2 if column == 1 else 4) * link.delay_ms / 1e3 + longest + second / (column * pieces)


def averaging_pieces(swarm: Swarm, stage: int, replicas: int) -> tuple[int, int]:
    """The number of pieces of each part of a gradient, and the bytes of a piece on a link."""
    shapes, count = trained_shapes(swarm.config, stage).values(), part_count(replicas)
    values = -(-parameters(swarm.config, stage) // count)
    pieces = max(1, min(MOST_PIECES, -(-values // PIECE)))
    sent = gradient_bytes(swarm.run.wire, shapes, replicas)
    if _is_audited(swarm, stage, replicas):
        sent += count * pieces * sum(_signed_bytes(swarm, stage, count * pieces)) // 2
    return pieces, HEAD + -(-sent // (count * pieces))


def _is_audited(swarm: Swarm, stage: int, replicas: int) -> bool:
    """Whether sums of the stage's gradient are audited."""
    wire = swarm.run.wire
    return stage > 0 and swarm.run.trust.gradients != "off" and is_audited(wire.averaging, replicas)


def _signed_bytes(swarm: Swarm, stage: int, pieces: int) -> tuple[int, int]:
    """Bytes of the signed digests of a contribution, and of a sum, for one of `pieces` pieces of a
    gradient. A sum has the digests of its maker's own contribution, too."""
    size = parameters(swarm.config, stage)
    digests = DIGEST * -(-size // pieces // block_length(size))
    return SIGNATURE + digests, SIGNATURE + 2 * digests


def answer_bytes(swarm: Swarm, stage: int) -> int:
    """Mean bytes that a replica sends in a step to answer an audit (node/averaging/evidence.py).

    Of each drawn block, a replica shows its contribution. The one that adds up the piece shows it
    in float32, and the sum. It has the signed digests of all contributions; others have their own.
    """
    replicas = swarm.replicas(stage)
    if not _is_audited(swarm, stage, replicas):
        return 0
    size, shapes = parameters(swarm.config, stage), trained_shapes(swarm.config, stage).values()
    pieces = part_count(replicas) * averaging_pieces(swarm, stage, replicas)[0]
    contribution, total = _signed_bytes(swarm, stage, pieces)
    encoded = gradient_bytes(swarm.run.wire, shapes, replicas) / size
    block = block_length(size) * (VALUE / replicas + encoded)
    return round(BLOCKS * (block + 2 * (replicas - 1) / replicas * contribution + total))


# --- the state of nodes


class _Node:
    """A simulated node: its threads, and its progress in the current step."""

    def __init__(
        self, name: str, group: Group, thread: Worker, loop: Worker, filling: InFlightWindow
    ) -> None:
        self.name, self.stage, self.site = name, group.stage, group.site
        self.seconds: Seconds = group.seconds
        self.thread, self.loop = thread, loop
        self.step = 0  # the last step that it has begun
        self.held: list[Then] = []  # handlers of frames that arrived before their step began
        self.visits = 0  # of microbatches in a step
        self.left = 0  # visits whose gradient has yet to leave
        self.waiting: deque[Route] = deque()  # microbatches to inject
        self.out = 0  # microbatches in flight
        self.filling = filling  # its in-flight window
        self.twin_apply = 0.0  # seconds of the twin's optimizer
        self.unscored = 0  # microbatches without a loss
        self.lacking = 0  # of own gradient, records, and pieces of the twin's gradient, until Ready


class _Average:
    """The averaging of one stage's gradient: a reduce-scatter, then an all-gather. It counts the
    pieces that are missing at each node.

    If there are rows, both are done within rows, and between the owners of the same part. Nodes are
    assigned to rows at random, because names have nothing to do with groups.
    """

    def __init__(self, training: _Training, nodes: list[_Node]) -> None:
        self.training, self.count = training, part_count(len(nodes))
        self.pieces, self.size = averaging_pieces(training.swarm, nodes[0].stage, len(nodes))
        row_lengths = lengths(len(nodes))
        drawn = iter(nodes if len(row_lengths) == 1 else Random(0).sample(nodes, len(nodes)))
        self.rows = [list(islice(drawn, length)) for length in row_lengths]
        self.owners = min(row_lengths)  # owners of parts in each row
        # pieces of an owner's part; in the order of the rows that make their sums
        numbers = range(len(row_lengths) * self.pieces)
        self.contributions = {  # missing for the sum of a row
            (owner.name, k): len(row) - 1
            for row in self.rows
            for owner in row[: self.owners]
            for k in numbers
        }
        # row sums missing for the sum of all rows
        self.row_sums = {(p, k): len(row_lengths) for p in range(self.owners) for k in numbers}
        self.sums = {n.name: self.count * self.pieces for n in nodes}  # sums that a node lacks

    def _row(self, node: _Node) -> list[_Node]:
        """The other nodes of the node's row, as a ring from its successor on."""
        row = next(row for row in self.rows if node in row)
        place = row.index(node)
        return row[place + 1 :] + row[:place]

    def _is_owner(self, node: _Node) -> bool:
        return any(node in row[: self.owners] for row in self.rows)

    def _pass(self, node: _Node, parts: int) -> float:
        """Seconds of a pass over one piece of each of `parts` parts."""
        return node.seconds.add * parts / (self.count * self.pieces)

    def start(self, node: _Node) -> None:
        """The node's gradient is complete: it copies its contributions, and sends them."""
        owners = [other for other in self._row(node) if self._is_owner(other)]
        for number in range(len(self.rows) * self.pieces):
            then = partial(self._contribute, node, owners, number)
            node.thread.post(Priority.CONTROL, self._pass(node, len(owners)), then)

    def _send(self, node: _Node, others: Iterable[_Node], work: Callable[[_Node], None]) -> None:
        """Sends a piece to `others`. Each passes over it on arrival, and then does `work`."""

        def arrived(other: _Node) -> None:
            other.thread.post(Priority.CONTROL, self._pass(other, 1), partial(work, other))

        for other in others:
            self.training.frame("average", node, other, self.size, partial(arrived, other))

    def _contribute(self, node: _Node, owners: list[_Node], number: int) -> None:
        self._send(node, owners, lambda owner: self._added(owner, number))

    def _added(self, owner: _Node, number: int) -> None:
        """An owner has added a contribution. The last one completes its row's sum of a piece."""
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
        """The maker of a piece's sum has added a row's. The last one completes the sum."""
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
    """Sends copies or snapshots of a stage to its holders, one at a time. At most two frames are
    unanswered, and the rate is limited."""

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
        self.pace = pace  # seconds per byte
        # holder -> step of the last copy's start
        self.started = {holder.name: -period for holder in holders}
        self.rest = 0  # bytes of the copy that are still to be sent
        self.outstanding = 0  # frames that the holder hasn't answered
        self.free = 0.0  # time from which the rate allows the next frame

    def committed(self) -> None:
        """Begins a copy to the holder with the oldest one, if one is due and none is under way.
        Called when the optimizer has run."""
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


# --- the simulation


class _Training:
    """Simulates steps in a row. Its methods are events, in the order of a microbatch's way."""

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
        self.answers = [answer_bytes(swarm, stage) for stage in self.stages]  # to audits
        self.averages: dict[int, _Average] = {}
        # that the driver has heard of: sources' losses, microbatches back, nodes' Ready
        self.scored = self.homes = self.ready = 0
        self.settling = 0  # steps so far; the first MOST_SETTLING may restart the measurement
        self.decided: list[float] = []  # times of the commits
        self.all_home: list[float] = []  # times when all of a step's microbatches were back

    def _updates(self) -> Iterator[tuple[str, _Updates]]:
        """The senders of copies or snapshots, by the policy, and what they send."""
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
            raise AssertionError(f"no event is planned after {len(self.decided) - 1} steps")
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

    # --- frames and messages

    def frame(self, kind: str, a: _Node, b: _Node, size: int, then: Then) -> None:
        """Sends a frame of `size` bytes from a to b, which calls `then` on arrival."""
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
        """Sends a message from a to b, which calls `then` on arrival. No frame delays it, as it has
        a stream of its own."""
        if a is b:
            self.clock.after(self.cast.away, then) if self.cast.away else then()
            return
        delay = self.swarm.network.between(a.site, b.site).delay_ms / 1e3
        received = partial(b.loop.post, 0, self.transport.message, then)
        sent = partial(self.clock.after, delay, received)
        a.loop.post(0, self.transport.message, sent)

    def speak_to_others(self, then: Then | None = None) -> None:
        """Occupies the driver's event loop with a message to or from each node that isn't
        simulated. Simulated nodes come last."""
        if self.cast.others:
            seconds = self.cast.others * self.transport.message
            self.driver.loop.post(0, seconds, then or _nothing)
        elif then is not None:
            then()

    # --- a step

    def begin(self) -> None:
        """The driver commits, and begins the next step."""
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
        """Sets the window of each source for the next step. Returns whether a window has changed
        within the first `MOST_SETTLING` steps."""
        before = [source.filling.out for source in self.by_stage[0]]
        for source in self.by_stage[0]:
            source.filling.begin()
        self.settling += 1
        changed = before != [source.filling.out for source in self.by_stage[0]]
        return changed and self.settling <= MOST_SETTLING

    def _count_from_here(self) -> None:
        """Resets all measurements; the traffic on links and the tasks of threads stay."""
        self.decided, self.all_home = [], []
        for worker in (node.thread for node in self.nodes.values()):
            worker.busy_seconds = 0.0
        for wire in self.wires.values():
            wire.busy_seconds, wire.sent = 0.0, 0
        for uplink in self.uplinks.values():
            uplink.busy_seconds = 0.0

    def begun(self, node: _Node) -> None:
        """A node applies the commit, and begins the next step."""
        node.step += 1
        node.left = node.visits
        node.lacking = 2 + self._twin_pieces((node.stage + 1) % len(self.stages))
        apply = node.seconds.apply + (node.twin_apply if self.twins else 0.0)
        updates = self.updates.get(node.name)
        node.thread.post(Priority.CONTROL, apply, updates.committed if updates else _nothing)
        if answer := self.answers[node.stage]:
            self.frame("audit", node, self.driver, answer, _nothing)
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
        """Starts as many waiting microbatches as the source's window allows."""
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
        """A microbatch's loss is known. The source sends all its losses in one message."""
        self.pass_on("gradient", source, route, len(route.nodes) - 2)
        source.unscored -= 1
        if not source.unscored:
            self.message(source, self.driver, self.heard_of_losses)

    def heard_of_losses(self) -> None:
        """The driver hears of a source's losses. When it has all, it sends the step's records to
        the record holders: all nodes, as in a small swarm."""
        self.scored += 1
        if self.scored == len({route.nodes[0] for route in self.plan}):
            for node in self.nodes.values():
                self.message(self.driver, node, partial(self.got_records, node, self.driver.step))

    def got_records(self, node: _Node, step: int) -> None:
        if node.step < step:
            node.held.append(partial(self.got_records, node, step))
            return
        self.one_less_lacking(node)

    def pass_on(self, kind: str, node: _Node, route: Route, position: int) -> None:
        """Sends a microbatch's activation or gradient to the node of the visit `position`."""
        to = self.nodes[route.nodes[position]]
        take = partial(self.take, to, node.step, route, position, kind)
        self.frame(kind, node, to, self.sizes[kind], take)

    def take(self, node: _Node, step: int, route: Route, position: int, kind: str) -> None:
        """A node gets an activation or gradient, and posts its task."""
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
        """A microbatch's gradient is back at its source."""
        source.out -= 1
        source.filling.home(id(route), self.clock.now)
        self.message(source, self.driver, self.heard_of_home)
        self.inject(source)

    def heard_of_home(self) -> None:
        self.homes += 1
        if self.homes == self.cast.microbatches:
            self.all_home.append(self.clock.now)

    def reduce(self, node: _Node) -> None:
        """The node's gradient is complete: it averages, if its stage has replicas."""
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
        """Sends the averaged gradient to the holders of this stage's twin, under the policy
        `redundant` (node/state/twin.py, `servers`)."""
        own = self.by_stage[node.stage]
        holders = self.by_stage[(node.stage - 1) % len(self.stages)]
        size = VALUE * parameters(self.swarm.config, node.stage)
        pieces = self._twin_pieces(node.stage)
        for holder in holders[own.index(node) :: len(own)]:
            for _ in range(pieces):
                arrived = partial(self.one_less_lacking, holder)
                self.frame("twin", node, holder, HEAD + size // pieces, arrived)
        self.one_less_lacking(node)

    def _twin_pieces(self, stage: int) -> int:
        if not self.twins:
            return 0
        return min(MOST_PIECES, -(-VALUE * parameters(self.swarm.config, stage) // TWIN_PIECE))

    def one_less_lacking(self, node: _Node) -> None:
        """The node has one more of these: its stage's gradient, the records, pieces of its twin's
        gradient. It sends Ready when it has all."""
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
