"""Which stages, replicas, policy and settings: candidates, what each comes to, and the choice.

A candidate's time is a closed form, not a simulation: greedy schedules have anomalies, in which a
faster link makes a step longer. Here each term falls with bandwidth and rises with delay and with
the rate of losses, what is tried doesn't depend on either, and the least of such figures behaves
the same: more bandwidth is never slower, a higher rate never faster. docs/planning.md has the
model, its assumptions, and how far it is from the simulator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise, product
from typing import Final, NamedTuple

from bootstrap.membership import Rules
from lab.links import Link, Network
from lab.memory import Bytes, needed, whole
from lab.simulator import reaction
from lab.simulator.churn import HOUR
from lab.simulator.clock import ON_WIRE
from lab.simulator.step import averaging_seconds
from lab.simulator.swarm import (
    VALUE,
    Group,
    Seconds,
    Swarm,
    Transport,
    fetched_bytes,
    frame_bytes,
    parameters,
    relearned_at_a_time,
    seconds_at,
    snapshot_bytes,
)
from node.model import ModelConfig, model_config
from node.run_file import RunFile, override
from recovery.decide import Policy
from recovery.endurance import availability
from recovery.orders import all_orders

RESERVE: Final = 0.1
"""Share of a device's memory for the libraries, and for what their allocators can't use."""
MICROBATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Samples that are tried."""
INTERVALS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Steps between checkpoints that are tried."""
LEVELS: Final = 8
"""Replicas of a stage that may be missing at once, at most, of which a step's time is looked at."""
ALIKE: Final = 0.005
"""Share of the time by which plans differ that are as good as each other."""
FRAME: Final = 1.5e-3
"""Seconds of a node's event loop for each frame that it sends or takes (results/simulator)."""
COPIED: Final = 1e10
"""Bytes a second from a device to its machine's memory; a checkpoint holds up training for it."""
BITS: Final = 8e-6
"""Megabits in a byte."""
POLICIES: Final[tuple[Policy, ...]] = (
    "checkfree",
    "checkfree+",
    "snapshot",
    "redundant",
    "checkpoint",
)
LEAST_STAGES: Final[Mapping[Policy, int]] = {"checkfree": 2, "checkfree+": 4, "snapshot": 2}
"""Body stages from which on a policy can do what it is for."""


class Learning(NamedTuple):
    """What the loss of a stage costs in learning, by our lab's runs."""

    behind: float  # committed steps for each loss
    most: float  # share of all steps, however many losses there are
    source: str


LEARNING: Final[Mapping[str, Learning]] = {
    "checkfree": Learning(
        23, 0.31, "failure-rates: 162 of 600 behind after 7 losses, 187 after 25"
    ),
    "relearned": Learning(10, 0.31, "relearning-with-adam: 41 of 600 behind after 4 losses"),
    "snapshot": Learning(2.5, 0.9, "failure-rates: 17, 33, 64 of 600 behind after 7, 13, 25"),
    "exact": Learning(0, 0.0, "redundant computation and checkpoints lose nothing"),
}
"""All of one model of 0.4 M parameters with 1,024 tokens a step, two or three seeds, losses up to
a hundred times as frequent as real ones; `relearned` with Adam, which Muon beats in trials. They
rank policies; for another model they may be several times off."""
SWAPPED: Final = 130.0
"""Steps by which a run with swapped orders is behind with nothing lost (swapped-order: +0.129 nats
after 600 steps, where +0.161 are 162). What it is in a longer run isn't known."""


class PlanError(ValueError):
    """Nothing can be planned; the message names what stands against it, and a remedy."""


@dataclass(frozen=True)
class Machine:
    """A node that is to be had."""

    name: str
    site: str
    flops: float  # FLOP/s that it sustains in the model
    memory: float  # bytes, of the device
    host: float = math.inf  # bytes
    bandwidth: float = 5e11  # bytes/s that the device moves in its memory
    price: float = 0.0  # an hour
    shared: bool = False  # the device has no memory of its own: it computes on a CPU

    def lacks(self, need: Bytes) -> str:
        """What it has too little of; empty: nothing."""
        room = (1 - RESERVE) * self.memory
        if self.shared:
            need = Bytes(need.both)
        if need.device > room:
            return f"needs {_gb(need.device)} of {_gb(room)} device memory"
        if need.host > self.host:
            return f"needs {_gb(need.host)} of {_gb(self.host)} host memory"
        return ""


@dataclass(frozen=True)
class Question:
    """What is to be trained, and on what. Raises PlanError."""

    run: RunFile  # model and batch, and all that isn't chosen here
    vocabulary: int  # of the data
    machines: tuple[Machine, ...]  # nodes of a site in a row
    network: Network  # of the sites
    tokens: float
    hourly: float = 0.0  # probability that a node is lost within an hour
    replacement: float = 120.0  # seconds until a machine is there in a lost one's place
    start: float = 30.0  # and until the node on it asks to join
    storage_mbps: float = 1000.0  # between a node and the folder of checkpoints
    deadline: float = math.inf  # hours
    budget: float = math.inf  # in the unit of the prices
    policies: tuple[Policy, ...] = POLICIES

    def __post_init__(self) -> None:
        if not self.machines:
            raise PlanError("there are no nodes: say how many with --nodes, or give --probe")
        if not 0 <= self.hourly < 1:
            raise PlanError(
                f"hourly = {self.hourly:g} is no probability from 0 to below 1; 10 % are 0.1"
            )
        for name in ("tokens", "deadline", "budget", "storage_mbps"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} = {getattr(self, name):g} must be more than 0")
        if not (0 <= self.replacement < math.inf and 0 <= self.start < math.inf):
            raise PlanError(
                f"replacement = {self.replacement:g} s and start = {self.start:g} s must be 0 or "
                "more: a run that gets no machines in place of lost ones can't be planned"
            )

    @property
    def rate(self) -> float:
        """Losses of a node a second."""
        return -math.log1p(-self.hourly) / HOUR


@dataclass(frozen=True)
class Plan:
    """A candidate, and what it comes to. Seconds."""

    run: RunFile
    swarm: Swarm
    nodes: tuple[tuple[Machine, ...], ...]  # by stage
    step: float  # with all nodes
    usual: float  # on average over how many nodes are there
    steps: float  # to be committed for the tokens
    spent: Mapping[str, float] = field(default_factory=dict)
    """What the time to the tokens is made of, by what it is for."""
    lost_nodes: float = 0.0  # on the way
    lost_stages: float = 0.0

    @property
    def seconds(self) -> float:
        return math.fsum(self.spent.values())

    @property
    def price(self) -> float:
        """An hour."""
        return math.fsum(machine.price for machine in chain.from_iterable(self.nodes))

    @property
    def money(self) -> float:
        return self.price * self.seconds / HOUR if self.price else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.run.training.batch * self.swarm.config.context / self.step

    @property
    def policy(self) -> Policy:
        return self.run.recovery.policy

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.nodes))

    @property
    def shape(self) -> str:
        """Stages x replicas."""
        least, most = min(self.counts), max(self.counts)
        return f"{len(self.counts)} x {least}" + (f"-{most}" if most > least else "")

    def memory(self) -> list[Bytes]:
        """That a node of each stage needs."""
        stages = range(len(self.counts))
        return [whole(needed(self.run, self.swarm.config, s, self.counts)) for s in stages]


# --- where nodes are


@dataclass(frozen=True)
class Reach:
    """The worst links between the nodes of two stages, or of one: the longest delay, the least
    rate. And the worst of each stage's to any."""

    between: tuple[tuple[Link, ...], ...]
    farthest: tuple[Link, ...]

    @classmethod
    def of(cls, network: Network, sites: Sequence[Iterable[str]]) -> Reach:
        """`sites`: of each stage's nodes."""
        places = [frozenset(of) for of in sites]
        pairs = set(product(places, places))
        known = {(a, b): _worst(network.between(x, y) for x in a for y in b) for a, b in pairs}
        between = tuple(tuple(known[a, b] for b in places) for a in places)
        return cls(between, tuple(map(_worst, between)))


def _worst(links: Iterable[Link]) -> Link:
    given = list(links)
    return Link("", "", max(of.delay_ms for of in given), min(of.mbps for of in given))


def placed(machines: Sequence[Machine], counts: Sequence[int]) -> tuple[tuple[Machine, ...], ...]:
    """A stage's nodes in a row, so that most stages are at one site each, and neighbours near: the
    driver's plan doesn't look at sites."""
    left = iter(machines)
    return tuple(tuple(next(left) for _ in range(count)) for count in counts)


# --- candidates


def candidates(question: Question) -> Iterator[Plan | str]:
    """All that is tried, as plans, or, of what doesn't fit, the reason. What is tried follows from
    the model, the batch and the nodes alone."""
    layers = model_config(question.run.model, question.vocabulary).layers
    for stages in range(1, min(layers, len(question.machines) - 1) + 1):
        if layers % stages == 0:
            for counts in spreads(len(question.machines), stages + 1):
                yield from _Shape(question, stages, counts, layers).plans()


def spreads(nodes: int, stages: int) -> list[tuple[int, ...]]:
    """Nodes of each stage: as many at each, up to all that there are; and all of them, what is left
    over at stage 0 (the head) and then at the others in turn."""
    most, rest = divmod(nodes, stages)
    equal = [r for r in range(1, most + 1) if r <= 4 or r % 4 == 0 or r == most]
    found = [(replicas,) * stages for replicas in equal]
    if most and rest:
        found.append(tuple(most + (stage < rest) for stage in range(stages)))
    return found


class _Shape:
    """Stages and replicas."""

    def __init__(self, question: Question, stages: int, counts: Sequence[int], layers: int) -> None:
        run = override(question.run, model__stages=stages, model__layers=layers)
        self.question, self.counts = question, counts
        self.config = model_config(run.model, question.vocabulary)
        steps = question.tokens / (run.training.batch * self.config.context)
        self.run = override(run, swarm__replicas=min(counts), steps=max(1, math.ceil(steps)))
        self.nodes = placed(question.machines, counts)
        sites = [[machine.site for machine in of] for of in self.nodes]
        self.reach = Reach.of(question.network, sites)
        self.known: dict[object, tuple[float, float]] = {}  # seconds of steps

    def plans(self) -> Iterator[Plan | str]:
        batch = self.run.training.batch
        for policy in self.question.policies:
            if self.config.stages < LEAST_STAGES.get(policy, 1):
                continue
            for size in MICROBATCHES:
                if batch % size == 0 and batch // size >= max(self.counts):
                    yield from self._of_size(policy, size)

    def _of_size(self, policy: Policy, size: int) -> Iterator[Plan | str]:
        """With the default window, and a wider one; without recomputation where that fits, since it
        is quicker."""
        for window in (0, 2 * (self.config.stages + 1)):
            for recompute in (False, True):
                run = _changed(self.run, policy, size, window, recompute)
                problem = lacking(run, self.config, self.nodes)
                if not problem:
                    yield from self._settings(run)
                    break
            if problem:
                shape = f"{len(self.counts)} x {min(self.counts)}"
                yield f"{shape}, {policy}, microbatches of {size}, recomputed: {problem}"

    def _settings(self, run: RunFile) -> Iterator[Plan]:
        """The policy's own."""
        if run.recovery.policy == "snapshot":  # what training leaves free, at least
            mbps = min(run.recovery.snapshot_mbps, *(of.mbps / 2 for of in self.reach.farthest))
            changed = {"recovery": run.recovery.model_copy(update={"snapshot_mbps": mbps})}
            run = run.model_copy(update=changed)
        swarm = _swarm(run, self.config, self.nodes, self.question)
        recovery, training = run.recovery, run.training
        kind = recovery.policy if recovery.policy in ("redundant", "checkfree+") else "others"
        key = kind, training.microbatch, training.in_flight, training.recompute
        away = [missing(self.question, swarm, self.reach, s) for s in range(len(self.counts))]
        if key not in self.known:
            step = step_seconds(swarm, self.reach)
            self.known[key] = step, usual_seconds(swarm, self.reach, away, step)
        for every in INTERVALS if recovery.policy == "checkpoint" else (0,):
            if every:
                changed = {"recovery": recovery.model_copy(update={"checkpoint_every": every})}
                swarm = replace(swarm, run=run.model_copy(update=changed))
            seconds = self.known[key]
            yield judged(self.question, swarm, self.nodes, self.reach, away, *seconds)


def _changed(run: RunFile, policy: Policy, size: int, window: int, recompute: bool) -> RunFile:
    """As `override`, quicker: these values are known to be good."""
    training = {"microbatch": size, "in_flight": window, "recompute": recompute}
    recovery: dict[str, object] = {"policy": policy}
    if policy == "snapshot":  # in int8 they cost nothing that could be seen (cheapest-snapshot)
        recovery["snapshot_codec"] = "int8"
    return run.model_copy(
        update={
            "training": run.training.model_copy(update=training),
            "recovery": run.recovery.model_copy(update=recovery),
        }
    )


def lacking(run: RunFile, config: ModelConfig, nodes: Sequence[Sequence[Machine]]) -> str:
    """Which stage doesn't fit on one of its nodes; empty: all do."""
    counts = [len(of) for of in nodes]
    for stage, machines in enumerate(nodes):
        need = whole(needed(run, config, stage, counts))
        for machine in machines:
            if problem := machine.lacks(need):
                return f"stage {stage} {problem} at {machine.name}"
    return ""


@lru_cache(maxsize=4096)
def _seconds(
    training: tuple[int, bool, int],
    run: _Hashed,
    config: ModelConfig,
    stage: int,
    flops: float,
    bandwidth: float,
) -> Seconds:
    return seconds_at(run.run, config, min(stage, 1), flops, bandwidth)


@dataclass(frozen=True, eq=False)
class _Hashed:
    """A run file that doesn't count in the key of a cache; what does is beside it."""

    run: RunFile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed)

    def __hash__(self) -> int:
        return 0


def _swarm(
    run: RunFile,
    config: ModelConfig,
    nodes: Sequence[Sequence[Machine]],
    question: Question,
) -> Swarm:
    key = run.training.microbatch, run.training.recompute, relearned_at_a_time(run)
    groups: Counter[tuple[int, str, Seconds]] = Counter()
    for stage, machines in enumerate(nodes):
        for machine in machines:
            speed = machine.flops, machine.bandwidth
            seconds = _seconds(key, _Hashed(run), config, min(stage, 1), *speed)
            groups[stage, machine.site, seconds] += 1
    return Swarm(
        run,
        config,
        tuple(Group(stage, count, site, s) for (stage, site, s), count in groups.items()),
        question.network,
        Transport(frame=FRAME),
        storage_mbps=question.storage_mbps,
    )


# --- a step


def _slowest(swarm: Swarm, stage: int) -> Seconds:
    of = (group.seconds for group in swarm.groups if group.stage == stage and group.count)
    return max(of, key=lambda seconds: seconds.microbatch)


def step_seconds(swarm: Swarm, reach: Reach) -> float:
    """From decision to decision. A microbatch alone, and then what takes longest of: computing at
    the busiest stage, frames on the fullest link, rounds of the window; then averaging."""
    stages = range(swarm.config.stages + 1)
    replicas = [swarm.replicas(stage) for stage in stages]
    seconds = [_slowest(swarm, stage) for stage in stages]
    alone, frames = _alone(swarm, reach, seconds)
    count = swarm.run.training.microbatches
    rounds = math.ceil(math.ceil(count / replicas[0]) / swarm.in_flight)
    computing = max(
        (math.ceil(count / replicas[s]) - 1) * seconds[s].microbatch
        + math.ceil(count / replicas[s]) * _twins_forward(swarm, seconds, s)
        for s in stages
    )
    sending = max(
        (math.ceil(count / max(replicas[a], replicas[b])) - 1) * each
        for (a, b), each in frames.items()
    )
    leaving = max(_uplinks(swarm, count), default=0.0)
    talking = max((math.ceil(count / of) - 1) * 4 * swarm.transport.frame for of in replicas)
    pipeline = alone + max(computing, sending, talking, (rounds - 1) * alone, leaving - alone)
    far = reach.farthest[0].delay_ms / 1e3
    away = reach.between[0][0].delay_ms / 1e3 if replicas[0] > 1 else 0.0
    apply = max(of.apply for of in seconds) + _twins_apply(swarm, seconds)
    reduce = max(
        averaging_seconds(swarm, stage, reach.between[stage][stage]) + seconds[stage].norm
        for stage in stages
    )
    twins = _twins_gradient(swarm, reach, replicas)
    return apply + pipeline + 2 * away + 2 * far + reduce + twins


def _alone(
    swarm: Swarm, reach: Reach, seconds: Sequence[Seconds]
) -> tuple[float, dict[tuple[int, int], float]]:
    """A microbatch's way there and back without any other; and the seconds that it occupies a link
    of two stages, on average over the orders."""
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    orders = all_orders(swarm.config.stages, swarm.swapped)
    occupied: dict[tuple[int, int], float] = {}
    longest = 0.0
    for visits in orders:
        way = (0, *visits, 0)
        total = sum(of.microbatch for of in seconds)
        for a, b in pairwise(way):
            link = reach.between[a][b]
            for pair, size in zip(((a, b), (b, a)), sizes, strict=True):
                each = size * ON_WIRE * BITS / link.mbps
                total += link.delay_ms / 1e3 + each + 2 * swarm.transport.frame
                occupied[pair] = occupied.get(pair, 0.0) + each / len(orders)
        longest = max(longest, total)
    return longest, occupied


def _uplinks(swarm: Swarm, count: int) -> Iterator[float]:
    """Seconds for which a site's uplink is occupied by a step's frames, in the natural order."""
    sizes = [frame_bytes(swarm.run, swarm.config, kind) for kind in ("activation", "gradient")]
    ring = swarm.config.stages + 1
    for site, mbps in swarm.network.uplinks.items():
        size = 0.0
        for stage in range(ring):
            here, there = (_share_at(swarm, of % ring, site) for of in (stage, stage + 1))
            size += sizes[0] * here * (1 - there) + sizes[1] * there * (1 - here)
        yield count * size * ON_WIRE * BITS / mbps


def _share_at(swarm: Swarm, stage: int, site: str) -> float:
    at = sum(g.count for g in swarm.groups if g.stage == stage and g.site == site)
    return at / swarm.replicas(stage)


def _twins_forward(swarm: Swarm, seconds: Sequence[Seconds], stage: int) -> float:
    if swarm.run.recovery.policy != "redundant":
        return 0.0
    held = seconds[(stage + 1) % len(seconds)]
    return held.head / 3 if held.head else held.forward


def _twins_apply(swarm: Swarm, seconds: Sequence[Seconds]) -> float:
    return max(of.apply for of in seconds) if swarm.run.recovery.policy == "redundant" else 0.0


def _twins_gradient(swarm: Swarm, reach: Reach, replicas: Sequence[int]) -> float:
    """Each node of the stage before gets it from one of a stage's replicas."""
    if swarm.run.recovery.policy != "redundant":
        return 0.0
    longest = 0.0
    for stage, count in enumerate(replicas):
        before = (stage - 1) % len(replicas)
        link = reach.between[stage][before]
        size = VALUE * parameters(swarm.config, stage) * ON_WIRE * BITS
        each = math.ceil(replicas[before] / count) * size / link.mbps
        longest = max(longest, link.delay_ms / 1e3 + each)
    return longest


# --- losses

_NOTICED: Final = Rules("planned", stages=1).reconnect


def judged(
    question: Question,
    swarm: Swarm,
    nodes: tuple[tuple[Machine, ...], ...],
    reach: Reach,
    away: Sequence[float],
    step: float,
    usual: float,
) -> Plan:
    """What a candidate comes to; its seconds may be inf: losses come faster than it gets on.

    `away`: of each stage's nodes, the share of time for which one is missing; `step`, `usual`:
    seconds of a step with all nodes, and with as many as there usually are.
    """
    rate, stages = question.rate, range(len(nodes))
    single = [rate * len(of) for of in nodes]  # losses of nodes, a second of training
    stage_losses = [of * away[s] ** (len(nodes[s]) - 1) for s, of in enumerate(single)]
    replica_cost = math.fsum(
        single[s] * _replica_cost(swarm, reach, s, usual) for s in stages if len(nodes[s]) > 1
    )
    stall = math.fsum(
        often * _stage_cost(question, swarm, reach, s, usual)
        for s, often in enumerate(stage_losses)
    )
    lost = math.fsum(stage_losses)
    steps, again = _learning(swarm, reach, lost, usual)
    spent = {
        "training": swarm.run.steps * step,
        "replicas missing": swarm.run.steps * (usual - step),
        "learning again": (steps - swarm.run.steps) * usual,
    }
    training = steps * usual
    spent["rolled back"] = training * again
    training *= 1 + again
    spent["replicas lost"] = training * replica_cost
    spent["stages lost"] = training * (1 + replica_cost) * math.expm1(min(700.0, stall))
    seconds = math.fsum(spent.values())
    return Plan(
        swarm.run,
        swarm,
        nodes,
        step,
        usual,
        swarm.run.steps,
        spent,
        math.fsum(single) * seconds if rate else 0.0,
        lost * training if rate else 0.0,
    )


def usual_seconds(swarm: Swarm, reach: Reach, away: Sequence[float], step: float) -> float:
    """Of a step, with as many nodes missing as there are on average. How many a stage lacks is
    binomial. Stage 0, where the sources are, is looked at by itself, and of the others the one
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
    """Seconds of a step when the stage lacks 0, 1, .. nodes, but for one."""
    found = [step]
    for gone in range(1, LEVELS + 1):
        if gone < swarm.replicas(stage):
            found.append(max(found[-1], step_seconds(_without(swarm, stage, gone), reach)))
        else:
            found.append(found[-1])
    return found


def _chances(counts: Sequence[int], away: Sequence[float]) -> list[float]:
    """Probabilities that the stage that lacks most lacks 0, 1, .. nodes, of `LEVELS` or more in
    one; no stage lacks all."""
    upto = [math.prod(map(_at_most, [gone] * len(counts), counts, away)) for gone in range(LEVELS)]
    return [upto[0], *(max(0.0, b - a) for a, b in pairwise([*upto, 1.0]))]


def _at_most(missing: int, count: int, away: float) -> float:
    """Probability that at most so many of a stage's nodes are missing, one being there."""
    chances = [math.comb(count, k) * away**k * (1 - away) ** (count - k) for k in range(count)]
    whole_chance = math.fsum(chances)
    return min(1.0, math.fsum(chances[: missing + 1]) / whole_chance) if whole_chance else 0.0


def _without(swarm: Swarm, stage: int, gone: int) -> Swarm:
    """With so many nodes less at a stage, the fastest first, but for one."""
    left = min(gone, swarm.replicas(stage) - 1)
    counts = [group.count for group in swarm.groups]
    for i in sorted(range(len(counts)), key=lambda i: swarm.groups[i].seconds.microbatch):
        if swarm.groups[i].stage == stage:
            counts[i] -= (less := min(left, counts[i]))
            left -= less
    return swarm.with_counts(counts)


def transfer(size: float, link: Link) -> float:
    """On a new connection, on which TCP doubles what it sends each round: at most so many rounds as
    if all of it went like that, and its bytes at the link's rate."""
    round_trip = 2 * link.delay_ms / 1e3
    rounds = math.log2(size / reaction.INITIAL_WINDOW + 1)
    return round_trip * (1 + rounds) + size * ON_WIRE * BITS / link.mbps


def _rounds(reach: Reach) -> float:
    """Seconds of one of the driver's rounds: a question to all, and their answers."""
    return 2 * reach.farthest[0].delay_ms / 1e3


def missing(question: Question, swarm: Swarm, reach: Reach, stage: int) -> float:
    """Share of the time for which a node is, from its loss until one trains in its place."""
    joining = (reaction.JOINING + reaction.DIALLING) * 2 * reach.farthest[stage].delay_ms / 1e3
    size = fetched_bytes(swarm.run, swarm.config, stage, "replica")
    fetch = transfer(size, reach.between[stage][stage])
    lasting = question.rate * (question.replacement + question.start + joining + fetch)
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
    if stage == 0:
        seconds += usual / 2 / count
    if swarm.run.recovery.policy == "redundant":
        stages = (stage, (stage + 1) % (swarm.config.stages + 1))
        sizes = [fetched_bytes(swarm.run, swarm.config, of, "replica") for of in stages]
        seconds += transfer(sum(sizes), reach.farthest[stage])
    return seconds


def _stage_cost(question: Question, swarm: Swarm, reach: Reach, stage: int, usual: float) -> float:
    """Seconds from the loss of a stage's last node until training goes on: a machine comes (the
    first of those on their way), its stage is rebuilt; and half a step is lost."""
    run, config = swarm.run, swarm.config
    link, count = reach.farthest[stage], swarm.replicas(stage)
    waiting = (question.replacement + question.start) / count
    joining = (reaction.JOINING + reaction.DIALLING) * 2 * link.delay_ms / 1e3
    method = _method(run.recovery.policy, stage)
    if method == "checkpoint":
        stages = range(config.stages + 1)
        most = max(fetched_bytes(run, config, of, method) for of in stages)
        fetch = most * BITS / swarm.storage_mbps
    else:
        fetch = transfer(fetched_bytes(run, config, stage, method), link)
    if run.recovery.policy == "redundant":
        of = (stage + 1) % (config.stages + 1)
        fetch += transfer(fetched_bytes(run, config, of, "redundant"), link)
    seconds = _NOTICED + 2 * link.delay_ms / 1e3 + waiting + joining + fetch
    return seconds + _relearning(swarm, stage, link) + 3 * _rounds(reach) + usual / 2


def _method(policy: Policy, stage: int) -> str:
    if policy in ("checkfree", "checkfree+"):
        return policy if stage else "stage0-copy"
    return policy


def _relearning(swarm: Swarm, stage: int, link: Link) -> float:
    recovery, training = swarm.run.recovery, swarm.run.training
    if recovery.policy not in ("checkfree", "checkfree+") or not (
        stage and recovery.relearn_passes
    ):
        return 0.0
    values = training.batch * swarm.config.context * swarm.config.dim
    pairs = transfer(reaction.BOUNDARY * recovery.relearn_steps * values, link)
    updates = recovery.relearn_passes * recovery.relearn_steps * training.batch
    alone = updates / relearned_at_a_time(swarm.run) * _slowest(swarm, stage).relearn
    return pairs + min(recovery.relearn_seconds, alone)


def _learning(swarm: Swarm, reach: Reach, lost: float, usual: float) -> tuple[float, float]:
    """Steps to be committed for the tokens' worth of learning, and the share of steps that are
    rolled back and made again, with so many stages lost a second of training."""
    run, recovery = swarm.run, swarm.run.recovery
    steps = float(run.steps)
    if recovery.policy == "checkpoint":
        stages = range(swarm.config.stages + 1)
        most = max(fetched_bytes(run, swarm.config, of, "checkpoint") for of in stages)
        writing = most * BITS / swarm.storage_mbps
        period = max(recovery.checkpoint_every * usual + most / COPIED, writing)
        if not lost:
            return steps, period / (recovery.checkpoint_every * usual) - 1
        if (period + writing) * lost > 700:
            return steps, math.inf
        share = availability(period, 0.0, 1 / lost, 0.0)
        late = math.expm1(lost * writing)  # what was trained while a checkpoint was written
        return steps, (1 / share + late) * period / (recovery.checkpoint_every * usual) - 1
    cost = LEARNING[lesson(run)]
    each = cost.behind
    if recovery.policy == "snapshot":
        each += _stale(swarm, reach, usual)
    if recovery.policy == "checkfree+":
        steps += min(SWAPPED, run.steps)
    return steps / (1 - min(each * lost * usual, cost.most)), 0.0


def lesson(run: RunFile) -> str:
    """Which line of `LEARNING` it is."""
    if run.recovery.policy == "snapshot":
        return "snapshot"
    if run.recovery.policy in ("redundant", "checkpoint"):
        return "exact"
    return "relearned" if run.recovery.relearn_passes else "checkfree"


def _stale(swarm: Swarm, reach: Reach, usual: float) -> float:
    """Steps in which all rows of a stage can be sent."""
    recovery, stages = swarm.run.recovery, range(swarm.config.stages + 1)
    size = max(snapshot_bytes(swarm.run, swarm.config, stage) for stage in stages)
    mbps = min(recovery.snapshot_mbps, *(link.mbps for link in reach.farthest))
    return size * ON_WIRE * BITS / mbps / usual


# --- the choice


@dataclass(frozen=True)
class Answer:
    best: Plan
    others: tuple[tuple[Plan, str], ...]  # that lose, and why
    refused: tuple[str, ...]  # what doesn't fit


def answer(question: Question) -> Answer:
    """The fastest plan within the budget; with a deadline the cheapest that meets it. Beside it the
    best of each other policy, and of other numbers of stages and replicas. Raises PlanError."""
    found = [*candidates(question)]
    plans = [plan for plan in found if isinstance(plan, Plan)]
    refused = tuple(dict.fromkeys(one for one in found if isinstance(one, str)))
    if not plans:
        raise PlanError(_nothing_fits(question, refused))
    able = [plan for plan in plans if not _why_not(question, plan)]
    if not able:
        nearest = min(plans, key=lambda plan: _worth(question, plan))
        raise PlanError(
            f"no plan does it: the nearest, {described(nearest)}, {_why_not(question, nearest)}"
        )
    best = min(able, key=lambda plan: _worth(question, plan))
    others = [plan for plan in _shown(question, plans, best) if plan is not best]
    told = tuple((plan, _why_not(question, plan) or _why(plan, best)) for plan in others)
    return Answer(best, told, refused)


def _worth(question: Question, plan: Plan) -> tuple[float, float]:
    """The least is best."""
    if question.deadline < math.inf and question.machines[0].price:
        return plan.money, plan.seconds
    return plan.seconds, plan.money


def _why_not(question: Question, plan: Plan) -> str:
    hours = plan.seconds / HOUR
    if hours == math.inf:
        return "never gets there: losses come faster than it gets on"
    if hours > question.deadline:
        return f"takes {hours:,.1f} h of {question.deadline:,.1f} h"
    if plan.money > question.budget:
        return f"costs {plan.money:,.2f} of {question.budget:,.2f}"
    homeless = plan.policy == "checkpoint" and not plan.run.recovery.checkpoint_dir
    if homeless and question.policies != ("checkpoint",):
        return "takes a folder that all nodes share: name it in recovery.checkpoint_dir"
    return ""


def _shown(question: Question, plans: Sequence[Plan], best: Plan) -> list[Plan]:
    """The best of each policy, and, of the best's policy, of each number of stages and of nodes."""
    kinds: dict[tuple[object, ...], Plan] = {}
    for plan in sorted(plans, key=lambda plan: _worth(question, plan)):
        kinds.setdefault(("policy", plan.policy), plan)
        if plan.policy == best.policy:
            kinds.setdefault(("stages", len(plan.counts)), plan)
            if len(plan.counts) == len(best.counts):
                kinds.setdefault(("nodes", plan.counts), plan)
    shown = {id(plan): plan for plan in kinds.values()}
    return sorted(shown.values(), key=lambda plan: _worth(question, plan))


def _why(plan: Plan, best: Plan) -> str:
    """What most of the difference is."""
    if plan.seconds < best.seconds:
        return f"dearer: {plan.money:,.2f} instead of {best.money:,.2f}"
    spent = {name: of - best.spent[name] for name, of in plan.spent.items()}
    name = max(spent, key=lambda of: spent[of])
    more = plan.seconds / best.seconds - 1
    if more < ALIKE:
        return f"as good as that: {more:+.2%} of the time"
    if name == "training":
        return f"a step takes {plan.step:.3g} s instead of {best.step:.3g} s"
    reasons = {
        "replicas missing": "steps are slower while replicas are missing",
        "learning again": "what was lost is to be learned again",
        "rolled back": "steps are rolled back and made again",
        "replicas lost": "losses of replicas hold it up",
        "stages lost": "losses of stages hold it up",
    }
    return f"{reasons[name]}: {spent[name] / best.seconds:+.1%} of the time"


def _nothing_fits(question: Question, refused: Iterable[str]) -> str:
    reasons = list(refused)
    layers = model_config(question.run.model, question.vocabulary).layers
    if reasons:
        return (
            f"nothing fits on {len(question.machines)} nodes. {reasons[-1]}. Take nodes with more "
            "memory, more of them (more stages are smaller ones), or shorter samples"
        )
    return (
        f"{len(question.machines)} nodes, {layers} layers and a batch of "
        f"{question.run.training.batch} samples allow no plan: there must be two nodes or more, "
        f"and a microbatch for each node of a stage (policies: {', '.join(question.policies)})"
    )


def described(plan: Plan) -> str:
    text = f"{plan.shape} nodes with {plan.policy}"
    if plan.policy == "checkpoint":
        text += f" every {plan.run.recovery.checkpoint_every}"
    return text


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
