"""Estimates the seconds of a swarm's steps and of its run, with the cost of losses, in closed form.

This is no simulation. Greedy schedules have anomalies, in which a faster link makes a step longer.
Here each term falls with bandwidth, and rises with delay and with the rate of losses.
lab/docs/planning.md has the model, its assumptions, and a comparison with the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, NamedTuple

from planaria.bootstrap.neighbours import ALL
from planaria.bootstrap.rules import MembershipRules
from planaria.node.averaging.coding import part_count
from planaria.node.model.shape import VALUE
from planaria.node.run_file import RunFile
from planaria.node.state.copies import snapshot_section
from planaria.recovery.orders import all_orders
from planaria.recovery.policy import holder_count
from planaria.recovery.relearning import time_for
from planaria.recovery.snapshot import steps_between
from planaria_lab.emulation.links import Link, Network
from planaria_lab.planning.handover import Handover
from planaria_lab.simulator import reaction
from planaria_lab.simulator.churn import HOUR
from planaria_lab.simulator.clock import ON_WIRE, chunk_in_simulation
from planaria_lab.simulator.step import answer_bytes, averaging_pieces, averaging_seconds
from planaria_lab.simulator.swarm import (
    Seconds,
    Swarm,
    fetched_bytes,
    frame_bytes,
    kept_bytes,
    parameters,
    snapshot_bytes,
)
from planaria_lab.spare.endurance import availability

LEVELS: Final = 8
"""Maximum number of missing replicas of a stage for which a step's time is computed."""
COPIED: Final = 1e10
"""Bytes a second from a device to the host's memory. Training waits for this copy at a checkpoint.
"""
BITS: Final = 8e-6
"""Megabits in a byte."""


class Learning(NamedTuple):
    """The cost in learning of the loss of a stage, from the lab's runs."""

    behind: float  # committed steps per loss
    most: float  # maximum share of all steps, however many losses there are
    source: str  # the study


LEARNING: Final[Mapping[str, Learning]] = {
    "checkfree": Learning(
        23, 0.31, "failure-rates: 162 of 600 behind after 7 losses, 187 after 25"
    ),
    "relearned": Learning(4.5, 0.15, "failure-rates: 30, 72, 92 of 600 behind after 7, 13, 25"),
    "snapshot": Learning(2.5, 0.9, "failure-rates: 17, 33, 64 of 600 behind after 7, 13, 25"),
    "exact": Learning(0, 0.0, "redundant computation and checkpoints lose nothing"),
}
"""Cost in learning by kind of recovery. All figures are of one model of 0.4 M parameters, 1,024
tokens a step, and two or three seeds. Losses were up to a hundred times as frequent as real ones.
The figures rank policies; for another model they may be several times off."""
QUEUES: Final = 4
"""Exponent of the norm in `_together`, calibrated with homes 3 to 5 of lab/results/planned."""
SWAPPED: Final = 127.0
"""Steps, of 600, by which a run with swapped orders is behind without losses (study swapped-order).
The figure of a longer run isn't known."""


@dataclass(frozen=True)
class Losing:
    """The rates at which nodes are lost and replaced."""

    hourly: float  # probability that a node is lost within an hour
    replacement: float  # seconds from a loss until there is a new machine
    start: float  # seconds from then until the node on it asks to join

    @property
    def rate(self) -> float:
        """Losses per node and second."""
        return -math.log1p(-self.hourly) / HOUR


@dataclass(frozen=True)
class Estimate:
    """The times of a plan, in seconds."""

    step: float  # a step with all nodes
    usual: float  # a step with some nodes missing, on average
    spent: Mapping[str, float]  # purpose -> seconds of the run; inf: the run never ends
    lost_nodes: float  # expected number in the run
    lost_stages: float  # expected number in the run

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return math.fsum(self.spent.values())


@dataclass(frozen=True)
class Reach:
    """The worst links between stages: the longest delay with the lowest rate. An uplink's rate
    counts if it is lower."""

    between: tuple[tuple[Link, ...], ...]  # [from stage][to stage]
    farthest: tuple[Link, ...]  # by stage: the worst link to or from any stage

    @classmethod
    def of(cls, network: Network, sites: Sequence[Iterable[str]]) -> Reach:
        """The worst links in a network. `sites`: sites of each stage's nodes."""
        places = [frozenset(sites_of_stage) for sites_of_stage in sites]
        pairs = set(product(places, places))
        worst = {(a, b): _worst(_alone_on(network, x, y) for x in a for y in b) for a, b in pairs}
        between = tuple(tuple(worst[a, b] for b in places) for a in places)
        both = zip(between, zip(*between, strict=True), strict=True)
        return cls(between, tuple(_worst((*to, *fro)) for to, fro in both))


def _alone_on(network: Network, a: str, b: str) -> Link:
    """The link from site `a` to site `b`, for a frame that has the uplink to itself."""
    link = network.between(a, b)
    if a == b:
        return link
    return link._replace(mbps=min(link.mbps, network.uplinks.get(a, math.inf)))


def _worst(links: Iterable[Link]) -> Link:
    """A link with the longest delay and the lowest rate of these."""
    listed = list(links)
    return Link("", "", max(link.delay_ms for link in listed), min(link.mbps for link in listed))


# --- a step


def _slowest(swarm: Swarm, stage: int) -> Seconds:
    """Seconds of each task at the stage's slowest node."""
    seconds_of_groups = (
        group.seconds for group in swarm.groups if group.stage == stage and group.count
    )
    return max(seconds_of_groups, key=lambda seconds: seconds.microbatch)


def step_seconds(swarm: Swarm, reach: Reach) -> float:
    """Seconds of a step, from one commit to the next.

    The commit arrives, and is applied. Then follow the trip of one microbatch alone, and together:
    - computing at the busiest stage;
    - frames on the fullest link;
    - frames on the fullest uplink, from the first to the last;
    - frames in an event loop;
    - rounds of the in-flight window, with the rest of the last one.
    Each stage averages and votes once the last gradient has left it.
    """
    stages = range(swarm.config.stages + 1)
    replicas = [swarm.replicas(stage) for stage in stages]
    seconds = [_slowest(swarm, stage) for stage in stages]
    trip = _alone(swarm, reach, seconds)
    count = swarm.run.training.microbatches
    own = math.ceil(count / replicas[0])  # of a source
    rounds, after = divmod(own - 1, swarm.in_flight)
    computing = max((math.ceil(count / replicas[s]) - 1) * seconds[s].microbatch for s in stages)
    sending = max(
        (math.ceil(count / max(replicas[a], replicas[b])) - 1) * each
        for (a, b), each in trip.occupied.items()
    )
    uplinks = _uplinks(swarm, trip)
    leaving = max((use.occupied for use in uplinks), default=0.0)
    waiting = max((use.seconds - trip.seconds for use in uplinks), default=0.0)
    talking = max(
        (math.ceil(count / replica_count) - 1) * 4 * swarm.transport.frame
        for replica_count in replicas
    )
    slot = max(computing / (own - 1), sending / (own - 1), leaving / own) if rounds else 0.0
    windows = rounds * trip.seconds + after * slot
    busy = computing, sending, talking, windows, waiting
    pipeline = trip.seconds + (max(busy) if replicas[0] == 1 else _together(busy))
    away = reach.between[0][0].delay_ms / 1e3 if replicas[0] > 1 else 0.0
    apply = max(group.apply for group in seconds) + _twins_apply(swarm, seconds)
    voting = [away, *(reach.between[stage][0].delay_ms / 1e3 for stage in stages[1:])]
    if swarm.run.policy.twins:
        voting = [_twins_gradient(swarm, reach, stage) + voting[stage - 1] for stage in stages]
    reduce = max(
        averaging_seconds(swarm, stage, reach.between[stage][stage])
        + seconds[stage].norm
        + voting[stage]
        - trip.behind[stage]
        for stage in stages
    )
    sums = max(_uplinks_averaging(swarm, reach, voting, trip.behind), default=0.0)
    return apply + away + pipeline + max(reduce, sums)


def _together(busy: Iterable[float]) -> float:
    """Seconds for which resources delay a step that are busy for these seconds each. Microbatches
    of several sources get in each other's way at each resource, so this is more than the maximum.
    """
    return float(math.fsum(max(0.0, seconds) ** QUEUES for seconds in busy) ** (1 / QUEUES))


class Trip(NamedTuple):
    """A microbatch that is alone in the pipeline."""

    seconds: float  # of its way there and back, in the longest order
    occupied: Mapping[tuple[int, int], float]  # (from stage, to stage) -> mean seconds of the link
    before: Sequence[float]  # by stage, the minimum seconds of its way there
    behind: Sequence[float]  # by stage, the minimum seconds of its way back from there


def _alone(swarm: Swarm, reach: Reach, seconds: Sequence[Seconds]) -> Trip:
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    orders = all_orders(swarm.config.stages, swarm.swapped)
    occupied: dict[tuple[int, int], float] = {}
    before, behind = ([0.0, *([math.inf] * swarm.config.stages)] for _ in sizes)
    longest = 0.0
    for visits in orders:
        onward, back = 0.0, 0.0
        for a, b in pairwise((0, *visits, 0)):
            hops = []
            for pair, size in zip(((a, b), (b, a)), sizes, strict=True):
                link = reach.between[pair[0]][pair[1]]
                each = size * ON_WIRE * BITS / link.mbps
                hops.append(link.delay_ms / 1e3 + each + 2 * swarm.transport.frame)
                occupied[pair] = occupied.get(pair, 0.0) + each / len(orders)
            onward += seconds[a].forward + hops[0]
            back += hops[1] + seconds[a].backward
            before[b], behind[b] = min(before[b], onward), min(behind[b], back)
        longest = max(longest, onward + seconds[0].head + back)
    return Trip(longest, occupied, before, behind)


class UplinkUse(NamedTuple):
    """What a step asks of a site's uplink."""

    occupied: float  # seconds for which it sends
    seconds: float  # with the first microbatch's way there, and the last one's way back from there


def _uplinks(swarm: Swarm, trip: Trip) -> list[UplinkUse]:
    """By site, the use of its uplink by a step's frames, in the natural order, by answers to
    audits, and by copies between frames."""
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    count, ring, driver = swarm.run.training.microbatches, swarm.config.stages + 1, swarm.site_of(0)
    answered = [swarm.replicas(stage) * answer_bytes(swarm, stage) for stage in range(ring)]
    uses = []
    for site, mbps in swarm.uplinks.items():
        size, answers, before, behind = 0.0, 0.0, math.inf, math.inf
        for stage in range(ring):
            onward = (stage + 1) % ring
            own_share, onward_share = (
                _share_at(swarm, at_stage, site) for at_stage in (stage, onward)
            )
            size += sizes[0] * own_share * (1 - onward_share)
            size += sizes[1] * onward_share * (1 - own_share)
            if own_share:
                before, behind = min(before, trip.before[stage]), min(behind, trip.behind[stage])
            if site != driver:
                answers += own_share * answered[stage]
        chunk = chunk_in_simulation(mbps / BITS, 0.0)
        copies = min(_copied(swarm, site), count * size * chunk / sum(sizes))
        occupied = (count * size + answers + copies) * ON_WIRE * BITS / mbps
        if occupied:
            uses.append(UplinkUse(occupied, before + occupied + behind))
    return uses


def _copied(swarm: Swarm, site: str) -> float:
    """Bytes of copies that nodes at this site send in the background in each step, if the uplink
    has time."""
    stages = range(swarm.config.stages + 1)
    return math.fsum(_copies(swarm, stage) for stage in stages if swarm.site_of(stage) == site)


def _copies(swarm: Swarm, stage: int) -> float:
    """Mean bytes of the stage's copies in a step. One of its nodes sends them."""
    config, snapshot = swarm.config, snapshot_section(swarm.run, swarm.config)
    if not swarm.run.policy.sends(stage, snapshot.first):
        return 0.0
    whole = holder_count(stage, config.stages) * snapshot_bytes(swarm.run, config, stage)
    return snapshot.fraction * whole / steps_between(snapshot.fraction, snapshot.period)


def sent_bytes(swarm: Swarm, stage: int) -> float:
    """Maximum bytes that a node of the stage sends in a step. It sends an activation and a gradient
    for each microbatch of its share, parts of the gradient to its replicas, an answer to an audit,
    the gradient to its twins, and copies."""
    replicas = swarm.replicas(stage)
    frames = sum(frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient"))
    share = math.ceil(swarm.run.training.microbatches / replicas)
    averaged = 0.0
    if replicas > 1:
        pieces, each = averaging_pieces(swarm, stage, replicas)
        averaged = 2 * (replicas - 1) / replicas * part_count(replicas) * pieces * each
    twins = _twins_bytes(swarm, stage) if swarm.run.policy.twins else 0
    return share * frames + averaged + answer_bytes(swarm, stage) + twins + _copies(swarm, stage)


def _uplinks_averaging(
    swarm: Swarm, reach: Reach, voting: Sequence[float], behind: Sequence[float]
) -> Iterator[float]:
    """By site, seconds from the return of the last microbatch until the votes arrive that wait for
    the site's uplink.

    For averaging, the nodes of all stages at the site send parts of the gradient to their replicas
    at other sites, twice. A replica at another site gets as much as one at the same site.
    """
    for site, mbps in swarm.uplinks.items():
        size, delay, norm, vote, early = 0.0, 0.0, 0.0, 0.0, math.inf
        for stage in range(swarm.config.stages + 1):
            replicas = swarm.replicas(stage)
            present = round(_share_at(swarm, stage, site) * replicas)
            if 0 < present < replicas:
                pieces, each = averaging_pieces(swarm, stage, replicas)
                all_parts = part_count(replicas) / replicas * pieces * each
                size += present * (replicas - present) * 2 * all_parts
                hops = 2 if replicas <= ALL else 4
                delay = max(delay, hops * reach.between[stage][stage].delay_ms / 1e3)
                norm = max(norm, _slowest(swarm, stage).norm)
                vote, early = max(vote, voting[stage]), min(early, behind[stage])
        if size:
            yield delay + size * ON_WIRE * BITS / mbps + norm + vote - early


def _share_at(swarm: Swarm, stage: int, site: str) -> float:
    """The share of the stage's nodes that are at this site."""
    count = sum(g.count for g in swarm.groups if g.stage == stage and g.site == site)
    return count / swarm.replicas(stage)


def _twins_apply(swarm: Swarm, seconds: Sequence[Seconds]) -> float:
    """Seconds of the optimizer of a node's twin; 0 without twins."""
    return max(group.apply for group in seconds) if swarm.run.policy.twins else 0.0


def _twins_gradient(swarm: Swarm, reach: Reach, stage: int) -> float:
    """Seconds until the stage before has this stage's gradient for its twins."""
    link = reach.between[stage][(stage - 1) % (swarm.config.stages + 1)]
    size = _twins_bytes(swarm, stage) * ON_WIRE * BITS
    return link.delay_ms / 1e3 + size / link.mbps


def _twins_bytes(swarm: Swarm, stage: int) -> int:
    """Maximum bytes of the gradient that a node of the stage sends for its twins. Each node of the
    stage before gets it from one of the stage's replicas."""
    before = (stage - 1) % (swarm.config.stages + 1)
    holders = math.ceil(swarm.replicas(before) / swarm.replicas(stage))
    return holders * VALUE * parameters(swarm.config, stage)


# --- losses

_NOTICED: Final = MembershipRules("planned", stages=1).reconnect


def estimated(
    swarm: Swarm,
    reach: Reach,
    losing: Losing,
    away: Sequence[float],
    step: float,
    usual: float,
) -> Estimate:
    """The estimate for the whole run. `away`: by stage, the share of time for which a node is
    missing. `step`, `usual`: seconds of a step as in `Estimate`."""
    rate, counts = losing.rate, [swarm.replicas(stage) for stage in range(len(away))]
    single = [rate * count for count in counts]  # losses of nodes per second, by stage
    whole = [
        loss_rate * away[s] ** (counts[s] - 1) for s, loss_rate in enumerate(single)
    ]  # losses of whole stages per second
    replica_cost = math.fsum(
        loss_rate * _replica_cost(swarm, reach, s, usual)
        for s, loss_rate in enumerate(single)
        if counts[s] > 1
    )
    lost = math.fsum(whole)
    relearning = _seconds_for_relearning(swarm, lost)
    stall = math.fsum(
        loss_rate * _stage_cost(swarm, reach, losing, s, usual, relearning)
        for s, loss_rate in enumerate(whole)
    )
    steps, again = _learning(swarm, reach, lost, usual)
    training = steps * usual * (1 + again)
    spent = {
        "training": swarm.run.steps * step,
        "replicas missing": swarm.run.steps * (usual - step),
        "learning again": (steps - swarm.run.steps) * usual,
        "rolled back": steps * usual * again,
        "replicas lost": training * replica_cost,
        "stages lost": training * (1 + replica_cost) * math.expm1(min(700.0, stall)),
    }
    seconds = math.fsum(spent.values())
    lost_nodes = math.fsum(single) * seconds if rate else 0.0
    return Estimate(step, usual, spent, lost_nodes, lost * training if rate else 0.0)


def usual_seconds(swarm: Swarm, reach: Reach, away: Sequence[float], step: float) -> float:
    """Seconds of a step on average over the numbers of missing nodes; the mean is that of speeds.

    The number of missing nodes of a stage is binomial. Two cases are computed, and the slower one
    counts. The first is stage 0, which has the sources. The second is the body stage that lacks
    most nodes, as if it were the one with the fewest nodes.
    """
    counts = [swarm.replicas(stage) for stage in range(len(away))]
    if not any(away) or max(counts) == 1:
        return step
    fewest = 1 + counts[1:].index(min(counts[1:]))
    ends = _levels(swarm, reach, 0, step), _chances(counts[:1], away[:1])
    body = _levels(swarm, reach, fewest, step), _chances(counts[1:], away[1:])
    both = product(zip(*ends, strict=False), zip(*body, strict=False))
    return 1 / math.fsum(p * q / max(a, b) for (a, p), (b, q) in both)


def _levels(swarm: Swarm, reach: Reach, stage: int, step: float) -> list[float]:
    """Seconds of a step if the stage lacks 0, 1, .., LEVELS nodes; at least one node remains."""
    seconds = [step]
    for lost in range(1, LEVELS + 1):
        if lost < swarm.replicas(stage):
            seconds.append(max(seconds[-1], step_seconds(_without(swarm, stage, lost), reach)))
        else:
            seconds.append(seconds[-1])
    return seconds


def _chances(counts: Sequence[int], away: Sequence[float]) -> list[float]:
    """Probabilities that the stage with the most missing nodes lacks 0, 1, .. of them. The last one
    is of `LEVELS` or more. No stage lacks all its nodes."""
    upto = [math.prod(map(_at_most, [lost] * len(counts), counts, away)) for lost in range(LEVELS)]
    return [upto[0], *(max(0.0, b - a) for a, b in pairwise([*upto, 1.0]))]


def _at_most(missing: int, count: int, away: float) -> float:
    """Probability that at most `missing` of `count` nodes are missing, if at least one is present.
    `away`: probability that a node is missing."""
    chances = [math.comb(count, k) * away**k * (1 - away) ** (count - k) for k in range(count)]
    whole_chance = math.fsum(chances)
    return min(1.0, math.fsum(chances[: missing + 1]) / whole_chance) if whole_chance else 0.0


def _without(swarm: Swarm, stage: int, lost: int) -> Swarm:
    """The swarm without the `lost` fastest nodes of a stage; at least one node remains."""
    remaining = min(lost, swarm.replicas(stage) - 1)
    counts = [group.count for group in swarm.groups]
    for i in sorted(range(len(counts)), key=lambda i: swarm.groups[i].seconds.microbatch):
        if swarm.groups[i].stage == stage:
            counts[i] -= (less := min(remaining, counts[i]))
            remaining -= less
    return swarm.with_counts(counts)


def transfer(size: float, link: Link) -> float:
    """Upper bound of the seconds of sending `size` bytes on a new connection. TCP doubles the bytes
    of each round trip. As many round trips count as if it did so to the end, and in addition the
    bytes at the link's rate."""
    round_trip = 2 * link.delay_ms / 1e3
    rounds = math.log2(size / reaction.INITIAL_WINDOW + 1)
    return round_trip * (1 + rounds) + size * ON_WIRE * BITS / link.mbps


def handovers(swarm: Swarm, step: float) -> list[Handover]:
    """The handover of each stage's last node, over the stage's worst link to any stage. `step`:
    seconds of a step."""
    network = swarm.network
    sites = [
        {group.site for group in swarm.groups if group.stage == stage}
        for stage in range(swarm.config.stages + 1)
    ]
    stages = []
    for stage, link in enumerate(Reach.of(network, sites).farthest):
        count = parameters(swarm.config, stage)
        rtt, mbps = 2 * link.delay_ms / 1e3, link.mbps / ON_WIRE
        tensors = swarm.config.tensors_in(stage)
        stages.append(Handover(stage, count, step, rtt, mbps, tensors))
    return stages


def _rounds(reach: Reach) -> float:
    """Seconds of one round of the driver: a query to all nodes, and their answers."""
    return 2 * reach.farthest[0].delay_ms / 1e3


def missing(swarm: Swarm, reach: Reach, losing: Losing, stage: int) -> float:
    """Share of the time for which a node of the stage is missing: from its loss until its
    replacement trains."""
    joining = (reaction.JOINING + reaction.DIALLING) * 2 * reach.farthest[stage].delay_ms / 1e3
    size = fetched_bytes(swarm.run, swarm.config, stage, "replica")
    fetch = transfer(size, reach.between[stage][stage])
    lasting = losing.rate * (losing.replacement + losing.start + joining + fetch)
    return lasting / (1 + lasting)


def _replica_cost(swarm: Swarm, reach: Reach, stage: int, usual: float) -> float:
    """Seconds that a replica's loss, and the joining of its replacement, cost the others.

    They wait for the view without it, recompute half of its share, and exchange the messages of
    leaving and joining. The loss of the driver costs half a step. With `redundant`, all wait for
    the joiner's state and twin.
    """
    count = swarm.replicas(stage)
    delay = reach.farthest[stage].delay_ms / 1e3
    share = swarm.run.training.microbatches / count
    redo = 0.5 * share / (count - 1) * _slowest(swarm, stage).microbatch
    seconds = _NOTICED + 2 * delay + redo + 4 * _rounds(reach) + delay
    if swarm.run.recovery.masking == "abort":
        seconds += usual / 2
    elif stage == 0:
        seconds += usual / 2 / count
    if swarm.run.policy.twins:
        stages = (stage, (stage + 1) % (swarm.config.stages + 1))
        sizes = [fetched_bytes(swarm.run, swarm.config, number, "replica") for number in stages]
        seconds += transfer(sum(sizes), reach.farthest[stage])
    return seconds


def _seconds_for_relearning(swarm: Swarm, lost: float) -> float:
    """Maximum seconds of relearning, from the mean time of training between two losses of stages.
    `lost`: losses of stages per second."""
    trained = 1 / lost if lost else math.inf
    return time_for(swarm.run.recovery.relearn.seconds, trained, 0.0)


def _stage_cost(
    swarm: Swarm, reach: Reach, losing: Losing, stage: int, usual: float, relearning: float
) -> float:
    """Seconds that the loss of a stage's last node costs, until training continues.

    The others wait for the first of its replacement machines. The stage is rebuilt, and may relearn
    for at most `relearning` seconds. Half a step is lost.
    """
    run, config = swarm.run, swarm.config
    link, count = reach.farthest[stage], swarm.replicas(stage)
    waiting = (losing.replacement + losing.start) / count
    joining = (reaction.JOINING + reaction.DIALLING) * 2 * link.delay_ms / 1e3
    method = _method(run, stage)
    if method == "checkpoint":
        stages = range(config.stages + 1)
        most = max(fetched_bytes(run, config, number, method) for number in stages)
        fetch = most * BITS / swarm.storage_mbps
    else:
        fetch = transfer(fetched_bytes(run, config, stage, method), link)
    if run.policy.twins:
        next_stage_number = (stage + 1) % (config.stages + 1)
        fetch += transfer(fetched_bytes(run, config, next_stage_number, "redundant"), link)
    seconds = _NOTICED + 2 * link.delay_ms / 1e3 + waiting + joining + fetch
    return seconds + _relearning(swarm, stage, link, relearning) + 3 * _rounds(reach) + usual / 2


def _method(run: RunFile, stage: int) -> str:
    """The method by which a lost stage is rebuilt."""
    if run.policy.sends(stage, run.recovery.snapshot.first):
        return "snapshot"
    return run.recovery.policy


def _relearning(swarm: Swarm, stage: int, link: Link, at_most: float) -> float:
    """Seconds of relearning with the transfer of its data, if the stage was guessed; else 0."""
    recovery, training = swarm.run.recovery, swarm.run.training
    if _method(swarm.run, stage) not in ("checkfree", "checkfree+") or not recovery.relearn.passes:
        return 0.0
    kept_size = kept_bytes(swarm.config, training.batch * swarm.config.context, swarm.run.wire)
    pairs = transfer(recovery.relearn.steps * kept_size, link)
    return pairs + reaction.training_alone(swarm, stage, _slowest(swarm, stage), at_most)


def _learning(swarm: Swarm, reach: Reach, lost: float, usual: float) -> tuple[float, float]:
    """Two figures, if `lost` stages are lost per second of training. The first is the number of
    steps to commit, with those that make up for lost learning. The second is the additional time of
    roll backs and checkpoints, as a share of the steps' time."""
    run, recovery = swarm.run, swarm.run.recovery
    steps = float(run.steps)
    if run.policy.checkpoints:
        stages = range(swarm.config.stages + 1)
        most = max(fetched_bytes(run, swarm.config, number, "checkpoint") for number in stages)
        writing = most * BITS / swarm.storage_mbps
        period = max(recovery.checkpoint.every * usual + most / COPIED, writing)
        if not lost:
            return steps, period / (recovery.checkpoint.every * usual) - 1
        if (period + writing) * lost > 700:
            return steps, math.inf
        share = availability(period, 0.0, 1 / lost, 0.0)
        late = math.expm1(lost * writing)  # steps trained while a checkpoint was written
        return steps, (1 / share + late) * period / (recovery.checkpoint.every * usual) - 1
    cost = LEARNING[lesson(run)]
    each = behind_a_loss(swarm, reach, usual)
    if run.policy.swapped:
        steps += min(SWAPPED, run.steps)
    return steps / (1 - min(each * lost * usual, cost.most)), 0.0


def behind_a_loss(swarm: Swarm, reach: Reach, usual: float) -> float:
    """Steps that a lost stage costs in learning."""
    cost = LEARNING[lesson(swarm.run)].behind
    return cost + _stale(swarm, reach, usual) if swarm.run.policy.snapshots else cost


def lesson(run: RunFile) -> str:
    """The key of `LEARNING` for this run."""
    if run.policy.snapshots:
        return "snapshot"
    if run.policy.twins or run.policy.checkpoints:
        return "exact"
    return "relearned" if run.recovery.relearn.passes else "checkfree"


def _stale(swarm: Swarm, reach: Reach, usual: float) -> float:
    """Number of steps that it takes to send all rows of a stage's snapshot."""
    snapshot, stages = snapshot_section(swarm.run, swarm.config), range(swarm.config.stages + 1)
    size = max(snapshot_bytes(swarm.run, swarm.config, stage) for stage in stages)
    mbps = min(snapshot.mbps, *(link.mbps for link in reach.farthest))
    sending = size * ON_WIRE * BITS / mbps / usual
    return max(sending, 1 / snapshot.fraction) if swarm.run.policy.adapts else sending
