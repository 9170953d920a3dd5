"""What a swarm's run comes to, in closed form: seconds of a step, and what losses cost.

Not a simulation: greedy schedules have anomalies, in which a faster link makes a step longer. Here
each term falls with bandwidth and rises with delay and with the rate of losses. docs/planning.md
has the model, its assumptions, and how far it is from the simulator.
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
from planaria.recovery.relearning import time_for
from planaria.recovery.snapshot import holder_count, steps_between
from planaria_lab.emulation.links import Link, Network
from planaria_lab.planning.handover import Handover
from planaria_lab.simulator import reaction
from planaria_lab.simulator.churn import HOUR
from planaria_lab.simulator.clock import ON_WIRE, chunk_in_simulation
from planaria_lab.simulator.step import averaging_pieces, averaging_seconds
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
"""Replicas of a stage that may be missing at once, at most, of which a step's time is looked at."""
COPIED: Final = 1e10
"""Bytes a second from a device to its machine's memory; a checkpoint holds up training for it."""
BITS: Final = 8e-6
"""Megabits in a byte."""


class Learning(NamedTuple):
    """The cost in learning of a stage's loss, by our lab's runs."""

    behind: float  # committed steps for each loss
    most: float  # share of all steps, however many losses there are
    source: str


LEARNING: Final[Mapping[str, Learning]] = {
    "checkfree": Learning(
        23, 0.31, "failure-rates: 162 of 600 behind after 7 losses, 187 after 25"
    ),
    "relearned": Learning(4.5, 0.15, "failure-rates: 30, 72, 92 of 600 behind after 7, 13, 25"),
    "snapshot": Learning(2.5, 0.9, "failure-rates: 17, 33, 64 of 600 behind after 7, 13, 25"),
    "exact": Learning(0, 0.0, "redundant computation and checkpoints lose nothing"),
}
"""All of one model of 0.4 M parameters with 1,024 tokens a step, two or three seeds, losses up to
a hundred times as frequent as real ones. They rank policies; for another model they may be several
times off."""
SWAPPED: Final = 127.0
"""Steps of 600 by which a run with swapped orders is behind with nothing lost (swapped-order). What
it is in a longer run isn't known."""


@dataclass(frozen=True)
class Losing:
    """The rates at which nodes are lost and replaced."""

    hourly: float  # probability that a node is lost within an hour
    replacement: float  # seconds until a machine is there in a lost one's place
    start: float  # and until the node on it asks to join

    @property
    def rate(self) -> float:
        """Losses of a node a second."""
        return -math.log1p(-self.hourly) / HOUR


@dataclass(frozen=True)
class Estimate:
    """The times of a plan, in seconds."""

    step: float  # with all nodes
    usual: float  # on average over how many nodes are there
    spent: Mapping[str, float]  # what the run is made of, by what it is for; inf: it never ends
    lost_nodes: float  # on the way
    lost_stages: float

    @property
    def seconds(self) -> float:
        return math.fsum(self.spent.values())


@dataclass(frozen=True)
class Reach:
    """The worst links from the nodes of one stage to those of another, or of the same: the longest
    delay, the least rate, which is an uplink's where that is less. And the worst between each stage
    and any, in either direction."""

    between: tuple[tuple[Link, ...], ...]
    farthest: tuple[Link, ...]

    @classmethod
    def of(cls, network: Network, sites: Sequence[Iterable[str]]) -> Reach:
        """`sites`: of each stage's nodes."""
        places = [frozenset(sites_of_stage) for sites_of_stage in sites]
        pairs = set(product(places, places))
        worst = {(a, b): _worst(_alone_on(network, x, y) for x in a for y in b) for a, b in pairs}
        between = tuple(tuple(worst[a, b] for b in places) for a in places)
        both = zip(between, zip(*between, strict=True), strict=True)
        return cls(between, tuple(_worst((*to, *fro)) for to, fro in both))


def _alone_on(network: Network, a: str, b: str) -> Link:
    """The link from site `a` to site `b` for a frame that has the uplink to itself."""
    link = network.between(a, b)
    if a == b:
        return link
    return link._replace(mbps=min(link.mbps, network.uplinks.get(a, math.inf)))


def _worst(links: Iterable[Link]) -> Link:
    listed = list(links)
    return Link("", "", max(link.delay_ms for link in listed), min(link.mbps for link in listed))


# --- a step


def _slowest(swarm: Swarm, stage: int) -> Seconds:
    seconds_of_groups = (
        group.seconds for group in swarm.groups if group.stage == stage and group.count
    )
    return max(seconds_of_groups, key=lambda seconds: seconds.microbatch)


def step_seconds(swarm: Swarm, reach: Reach) -> float:
    """Seconds from decision to decision: the commit arrives and is applied; a microbatch alone, and
    then what takes longest of: computing at the busiest stage, frames on the fullest
    link, rounds of the window, with those of the last one that come behind its first. Each stage
    averages and votes once the last gradient has left it."""
    stages = range(swarm.config.stages + 1)
    replicas = [swarm.replicas(stage) for stage in stages]
    seconds = [_slowest(swarm, stage) for stage in stages]
    alone, frames, behind = _alone(swarm, reach, seconds)
    count = swarm.run.training.microbatches
    own = math.ceil(count / replicas[0])  # of a source
    rounds, after = divmod(own - 1, swarm.in_flight)
    computing = max((math.ceil(count / replicas[s]) - 1) * seconds[s].microbatch for s in stages)
    sending = max(
        (math.ceil(count / max(replicas[a], replicas[b])) - 1) * each
        for (a, b), each in frames.items()
    )
    leaving = max(_uplinks(swarm, count), default=0.0)
    talking = max(
        (math.ceil(count / replica_count) - 1) * 4 * swarm.transport.frame
        for replica_count in replicas
    )
    slot = max(computing / (own - 1), sending / (own - 1), leaving / own) if rounds else 0.0
    windows = rounds * alone + after * slot
    pipeline = alone + max(computing, sending, talking, windows, leaving - alone)
    away = reach.between[0][0].delay_ms / 1e3 if replicas[0] > 1 else 0.0
    apply = max(group.apply for group in seconds) + _twins_apply(swarm, seconds)
    voting = [away, *(reach.between[stage][0].delay_ms / 1e3 for stage in stages[1:])]
    if swarm.run.policy.twins:
        voting = [_twins_gradient(swarm, reach, stage) + voting[stage - 1] for stage in stages]
    reduce = max(
        averaging_seconds(swarm, stage, reach.between[stage][stage])
        + seconds[stage].norm
        + voting[stage]
        - behind[stage]
        for stage in stages
    )
    sums = max(_uplinks_averaging(swarm, reach, voting, behind), default=0.0)
    return apply + away + pipeline + max(reduce, sums)


def _alone(
    swarm: Swarm, reach: Reach, seconds: Sequence[Seconds]
) -> tuple[float, dict[tuple[int, int], float], list[float]]:
    """A microbatch's way there and back without any other; the seconds that it occupies a link of
    two stages, on average over the orders; and how long it is on its way home from each stage, at
    least."""
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    orders = all_orders(swarm.config.stages, swarm.swapped)
    occupied: dict[tuple[int, int], float] = {}
    behind = [0.0, *([math.inf] * swarm.config.stages)]
    longest = 0.0
    for visits in orders:
        route = (0, *visits, 0)
        total = sum(group.microbatch for group in seconds)
        back = 0.0
        for a, b in pairwise(route):
            for pair, size in zip(((a, b), (b, a)), sizes, strict=True):
                link = reach.between[pair[0]][pair[1]]
                each = size * ON_WIRE * BITS / link.mbps
                hop = link.delay_ms / 1e3 + each + 2 * swarm.transport.frame
                total += hop
                occupied[pair] = occupied.get(pair, 0.0) + each / len(orders)
            back += hop + seconds[a].backward
            behind[b] = min(behind[b], back)
        longest = max(longest, total)
    return longest, occupied, behind


def _uplinks(swarm: Swarm, count: int) -> Iterator[float]:
    """Seconds for which a site's uplink is occupied by a step's frames, in the natural order, and
    by the copies that leave between them."""
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    ring = swarm.config.stages + 1
    for site, mbps in swarm.uplinks.items():
        size = 0.0
        for stage in range(ring):
            onward = (stage + 1) % ring
            own_share, onward_share = (
                _share_at(swarm, at_stage, site) for at_stage in (stage, onward)
            )
            size += sizes[0] * own_share * (1 - onward_share)
            size += sizes[1] * onward_share * (1 - own_share)
        chunk = chunk_in_simulation(mbps / BITS, 0.0)
        copies = min(_copied(swarm, site), count * size * chunk / sum(sizes))
        yield (count * size + copies) * ON_WIRE * BITS / mbps


def _copied(swarm: Swarm, site: str) -> float:
    """Bytes that the senders of copies at this site send in the background in each step, if there
    is time. At most a chunk of them leaves between two frames."""
    stages = range(swarm.config.stages + 1)
    return math.fsum(_copies(swarm, stage) for stage in stages if swarm.site_of(stage) == site)


def _copies(swarm: Swarm, stage: int) -> float:
    """Bytes of the stage's copies, on average over the steps; one of its nodes sends them."""
    config, snapshot = swarm.config, snapshot_section(swarm.run, swarm.config)
    if not swarm.run.policy.sends(stage, snapshot.first):
        return 0.0
    whole = holder_count(stage, config.stages) * snapshot_bytes(swarm.run, config, stage)
    return snapshot.fraction * whole / steps_between(snapshot.fraction, snapshot.period)


def sent_bytes(swarm: Swarm, stage: int) -> float:
    """The bytes that a node of the stage sends in a step, at most: an activation and a gradient
    for each microbatch of its share, parts of the gradient to its replicas, and copies."""
    replicas = swarm.replicas(stage)
    frames = sum(frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient"))
    share = math.ceil(swarm.run.training.microbatches / replicas)
    averaged = 0.0
    if replicas > 1:
        pieces, each = averaging_pieces(swarm, stage, replicas)
        averaged = 2 * (replicas - 1) / replicas * part_count(replicas) * pieces * each
    return share * frames + averaged + _copies(swarm, stage)


def _uplinks_averaging(
    swarm: Swarm, reach: Reach, voting: Sequence[float], behind: Sequence[float]
) -> Iterator[float]:
    """Seconds after the last microbatch is home until a site's uplink has carried what all stages'
    nodes there send their replicas at other sites, of the gradient as much as to those at their
    own, twice; and they have voted."""
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
    at = sum(g.count for g in swarm.groups if g.stage == stage and g.site == site)
    return at / swarm.replicas(stage)


def _twins_apply(swarm: Swarm, seconds: Sequence[Seconds]) -> float:
    return max(group.apply for group in seconds) if swarm.run.policy.twins else 0.0


def _twins_gradient(swarm: Swarm, reach: Reach, stage: int) -> float:
    """Each node of the stage before gets it from one of the stage's replicas."""
    before = (stage - 1) % (swarm.config.stages + 1)
    link = reach.between[stage][before]
    size = VALUE * parameters(swarm.config, stage) * ON_WIRE * BITS
    holders = math.ceil(swarm.replicas(before) / swarm.replicas(stage))
    return link.delay_ms / 1e3 + holders * size / link.mbps


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
    """What the run's steps come to. `away`: of each stage's nodes, the share of time for which one
    is missing; `step`, `usual`: seconds of a step with all nodes, and with as many as there are."""
    rate, counts = losing.rate, [swarm.replicas(stage) for stage in range(len(away))]
    single = [rate * count for count in counts]  # losses of nodes, a second of training
    whole = [
        probability * away[s] ** (counts[s] - 1) for s, probability in enumerate(single)
    ]  # of stages
    replica_cost = math.fsum(
        often * _replica_cost(swarm, reach, s, usual)
        for s, often in enumerate(single)
        if counts[s] > 1
    )
    lost = math.fsum(whole)
    relearning = _seconds_for_relearning(swarm, lost)
    stall = math.fsum(
        often * _stage_cost(swarm, reach, losing, s, usual, relearning)
        for s, often in enumerate(whole)
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
    """Seconds of a step with as many nodes missing as there are on average. How many a stage lacks
    is binomial. Stage 0, where the sources are, is looked at by itself, and of the others the one
    that lacks most, as if it were the one with fewest; the worse of the two says what it takes."""
    counts = [swarm.replicas(stage) for stage in range(len(away))]
    if not any(away) or max(counts) == 1:
        return step
    fewest = 1 + counts[1:].index(min(counts[1:]))
    ends = _levels(swarm, reach, 0, step), _chances(counts[:1], away[:1])
    body = _levels(swarm, reach, fewest, step), _chances(counts[1:], away[1:])
    both = product(zip(*ends, strict=False), zip(*body, strict=False))
    return 1 / math.fsum(p * q / max(a, b) for (a, p), (b, q) in both)


def _levels(swarm: Swarm, reach: Reach, stage: int, step: float) -> list[float]:
    """Seconds of a step when the stage lacks 0, 1, .. nodes; one node always stays."""
    seconds = [step]
    for lost in range(1, LEVELS + 1):
        if lost < swarm.replicas(stage):
            seconds.append(max(seconds[-1], step_seconds(_without(swarm, stage, lost), reach)))
        else:
            seconds.append(seconds[-1])
    return seconds


def _chances(counts: Sequence[int], away: Sequence[float]) -> list[float]:
    """Probabilities that the stage that lacks most lacks 0, 1, .. nodes, of `LEVELS` or more in
    one; no stage lacks all."""
    upto = [math.prod(map(_at_most, [lost] * len(counts), counts, away)) for lost in range(LEVELS)]
    return [upto[0], *(max(0.0, b - a) for a, b in pairwise([*upto, 1.0]))]


def _at_most(missing: int, count: int, away: float) -> float:
    """Probability that at most so many of a stage's nodes are missing, if one is present."""
    chances = [math.comb(count, k) * away**k * (1 - away) ** (count - k) for k in range(count)]
    whole_chance = math.fsum(chances)
    return min(1.0, math.fsum(chances[: missing + 1]) / whole_chance) if whole_chance else 0.0


def _without(swarm: Swarm, stage: int, lost: int) -> Swarm:
    """The swarm without so many nodes of a stage, the fastest first; one always stays."""
    remaining = min(lost, swarm.replicas(stage) - 1)
    counts = [group.count for group in swarm.groups]
    for i in sorted(range(len(counts)), key=lambda i: swarm.groups[i].seconds.microbatch):
        if swarm.groups[i].stage == stage:
            counts[i] -= (less := min(remaining, counts[i]))
            remaining -= less
    return swarm.with_counts(counts)


def transfer(size: float, link: Link) -> float:
    """On a new connection, on which TCP doubles what it sends each round: at most so many rounds as
    if all of it went like that, and its bytes at the link's rate."""
    round_trip = 2 * link.delay_ms / 1e3
    rounds = math.log2(size / reaction.INITIAL_WINDOW + 1)
    return round_trip * (1 + rounds) + size * ON_WIRE * BITS / link.mbps


def handovers(swarm: Swarm, step: float) -> list[Handover]:
    """The handover of each stage's last node, over its worst link to any other. `step`: seconds of
    a step."""
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
    """Seconds of one round of the driver: a question to all, and their answers."""
    return 2 * reach.farthest[0].delay_ms / 1e3


def missing(swarm: Swarm, reach: Reach, losing: Losing, stage: int) -> float:
    """Share of the time for which a node is missing, from its loss until a replacement trains."""
    joining = (reaction.JOINING + reaction.DIALLING) * 2 * reach.farthest[stage].delay_ms / 1e3
    size = fetched_bytes(swarm.run, swarm.config, stage, "replica")
    fetch = transfer(size, reach.between[stage][stage])
    lasting = losing.rate * (losing.replacement + losing.start + joining + fetch)
    return lasting / (1 + lasting)


def _replica_cost(swarm: Swarm, reach: Reach, stage: int, usual: float) -> float:
    """Seconds by which a replica's loss, and the joining of the next one, hold up the others: until
    the view without it, half of its share done again, and the rounds of going and coming. The
    driver's own loss costs half a step. With redundant computation all wait for the joiner."""
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
    """At most, of the mean time of training between two losses of stages, of which there are so
    many a second."""
    trained = 1 / lost if lost else math.inf
    return time_for(swarm.run.recovery.relearn.seconds, trained, 0.0)


def _stage_cost(
    swarm: Swarm, reach: Reach, losing: Losing, stage: int, usual: float, relearning: float
) -> float:
    """Seconds from the loss of a stage's last node until training goes on: a machine comes (the
    first of those on their way), its stage is rebuilt, and may relearn for `relearning`; and half a
    step is lost."""
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
    if run.policy.sends(stage, run.recovery.snapshot.first):
        return "snapshot"
    return run.recovery.policy


def _relearning(swarm: Swarm, stage: int, link: Link, at_most: float) -> float:
    recovery, training = swarm.run.recovery, swarm.run.training
    if _method(swarm.run, stage) not in ("checkfree", "checkfree+") or not recovery.relearn.passes:
        return 0.0
    kept_size = kept_bytes(swarm.config, training.batch * swarm.config.context, swarm.run.wire)
    pairs = transfer(recovery.relearn.steps * kept_size, link)
    return pairs + reaction.training_alone(swarm, stage, _slowest(swarm, stage), at_most)


def _learning(swarm: Swarm, reach: Reach, lost: float, usual: float) -> tuple[float, float]:
    """Steps to be committed for the tokens' worth of learning, and the share of steps that are
    rolled back and made again, with so many stages lost a second of training."""
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
        late = math.expm1(lost * writing)  # what was trained while a checkpoint was written
        return steps, (1 / share + late) * period / (recovery.checkpoint.every * usual) - 1
    cost = LEARNING[lesson(run)]
    each = cost.behind
    if run.policy.snapshots:
        each += _stale(swarm, reach, usual)
    if run.policy.swapped:
        steps += min(SWAPPED, run.steps)
    return steps / (1 - min(each * lost * usual, cost.most)), 0.0


def lesson(run: RunFile) -> str:
    """The key of `LEARNING` for this run."""
    if run.policy.snapshots:
        return "snapshot"
    if run.policy.twins or run.policy.checkpoints:
        return "exact"
    return "relearned" if run.recovery.relearn.passes else "checkfree"


def _stale(swarm: Swarm, reach: Reach, usual: float) -> float:
    """Steps in which all rows of a stage can be sent."""
    snapshot, stages = snapshot_section(swarm.run, swarm.config), range(swarm.config.stages + 1)
    size = max(snapshot_bytes(swarm.run, swarm.config, stage) for stage in stages)
    mbps = min(snapshot.mbps, *(link.mbps for link in reach.farthest))
    sending = size * ON_WIRE * BITS / mbps / usual
    return max(sending, 1 / snapshot.fraction) if swarm.run.policy.adapts else sending
