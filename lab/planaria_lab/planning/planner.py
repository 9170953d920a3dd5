"""Makes candidates with stages, replicas, policy and settings, and chooses the best.

Candidates follow from the model, the batch and the nodes alone. The time of each is a closed form
(estimate.py), which falls with bandwidth, and rises with delay and with the rate of losses. So the
same is true of the minimum: more bandwidth is never slower, a higher rate never faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Final

from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import MOST_LAYERS, RunFile, override
from planaria.node.transaction.in_flight_window import MOST
from planaria.recovery.policy import POLICIES, Policy
from planaria_lab.emulation.links import Network
from planaria_lab.planning.estimate import (
    Estimate,
    Losing,
    Reach,
    estimated,
    missing,
    step_seconds,
    usual_seconds,
)
from planaria_lab.planning.memory import Bytes, at_a_loss, needed, whole
from planaria_lab.simulator.churn import HOUR
from planaria_lab.simulator.swarm import Group, Seconds, Swarm, Transport, seconds_at

RESERVE: Final = 0.1
"""Share of a device's memory for libraries, and for memory that their allocators can't use."""
MICROBATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tried numbers of samples in a microbatch."""
INTERVALS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Tried numbers of steps between checkpoints."""
ALIKE: Final = 0.005
"""Difference in time, as a share, below which two plans count as equally good."""
FRAME: Final = 1.5e-3
"""Seconds of a node's event loop for each frame that it sends or receives. 1.24 ms were measured on
an otherwise idle machine (lab/results/simulator)."""
NARROW: Final[Mapping[str, str]] = {"activations": "int8", "gradients": "int4", "averaging": "int8"}
"""Use -> a narrow codec that showed no cost in learning with three seeds (lab/results/bandwidth,
lab/results/averaging)."""
BOUNDARIES, AVERAGING = ("activations", "gradients"), ("averaging",)
"""Groups of uses of codecs. Either all codecs of a group become narrow, or none."""
BYTES: Final = ("none", "fp16", "bf16", "int8", "int4", "lowrank")
"""Codecs, from the most bytes sent to the fewest."""
ROWS: Final = 6
"""Maximum number of kinds of machines that are tried at stage 0."""
WORTH: Final = 0.05
"""Share of the time that narrower codecs must save to be chosen or mentioned."""


class PlanError(ValueError):
    """Nothing can be planned. The message names the reason and a remedy."""


@dataclass(frozen=True)
class Machine:
    """An available machine, for one node."""

    name: str
    site: str
    flops: float  # FLOP/s that it sustains in the model
    memory: float  # bytes of the device
    host: float = math.inf  # bytes of the host
    bandwidth: float = 5e11  # bytes/s that the device moves in its memory
    price: float = 0.0  # per hour
    shared: bool = False  # device and host share one memory, as on a CPU

    @property
    def figures(self) -> tuple[float, ...]:
        """The figures that define its kind: machines with equal ones are alike."""
        return self.flops, self.memory, self.host, self.bandwidth, self.shared

    def lacks(self, need: Bytes) -> str:
        """Which memory is too small for `need`, as text; empty: none."""
        room = (1 - RESERVE) * self.memory
        if self.shared:
            need = Bytes(need.both)
        if need.device > room:
            return f"needs {_gb(need.device)} of {_gb(room)} device memory"
        if need.host > self.host:
            return f"needs {_gb(need.host)} of {_gb(self.host)} host memory"
        return ""

    def layers(self, of_one: Bytes, of_two: Bytes) -> int:
        """The number of layers that fit into its memory. `of_one`, `of_two`: bytes that a node with
        one and with two layers needs."""
        if self.shared:
            of_one, of_two = Bytes(of_one.both), Bytes(of_two.both)
        pairs = (
            (of_one.device, of_two.device, (1 - RESERVE) * self.memory),
            (of_one.host, of_two.host, self.host),
        )
        rooms = ((room - first) / max(second - first, 1.0) for first, second, room in pairs)
        return 1 + math.floor(min(*rooms, MOST_LAYERS))


@dataclass(frozen=True)
class Question:
    """The run to plan, and the machines. Raises PlanError."""

    run: RunFile  # model, batch, and all settings that the planner doesn't choose
    vocabulary: int  # of the data
    machines: tuple[Machine, ...]  # those of a site follow each other
    network: Network = field(hash=False)  # of the sites
    tokens: float  # to train on
    hourly: float = 0.0  # probability that a node is lost within an hour
    replacement: float = 120.0  # seconds from a loss until there is a new machine
    start: float = 30.0  # seconds from then until the node on it asks to join
    storage_mbps: float = 1000.0  # between a node and the folder of checkpoints
    deadline: float = math.inf  # hours
    budget: float = math.inf  # in the unit of the prices
    policies: tuple[str, ...] = tuple(POLICIES)
    narrow: bool = False  # the model's weights before training are exact in bf16

    def __post_init__(self) -> None:
        if not self.machines:
            raise PlanError("there are no nodes: give --nodes or --probe")
        if not 0 <= self.hourly < 1:
            raise PlanError(
                f"hourly = {self.hourly:g} must be a probability from 0 to less than 1; 10 % is 0.1"
            )
        for name in ("tokens", "deadline", "budget", "storage_mbps"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} = {getattr(self, name):g} must be more than 0")
        if not (0 <= self.replacement < math.inf and 0 <= self.start < math.inf):
            raise PlanError(
                f"replacement = {self.replacement:g} s and start = {self.start:g} s must be 0 or "
                "more: a run whose lost machines are never replaced can't be planned"
            )

    @property
    def unlike(self) -> bool:
        """Whether there are machines of several kinds."""
        return len({machine.figures for machine in self.machines}) > 1

    @property
    def losing(self) -> Losing:
        """The rates at which nodes are lost and replaced."""
        return Losing(self.hourly, self.replacement, self.start)


@dataclass(frozen=True)
class Candidate:
    """A plan, with its estimated times."""

    run: RunFile
    swarm: Swarm
    nodes: tuple[tuple[Machine, ...], ...]  # by stage
    estimate: Estimate
    narrow: bool = False  # as in `Question`

    @property
    def seconds(self) -> float:
        """Seconds until all tokens are trained on; inf: losses come faster than it recovers."""
        return self.estimate.seconds

    @property
    def price(self) -> float:
        """The price of an hour of all its machines."""
        return math.fsum(machine.price for machine in chain.from_iterable(self.nodes))

    @property
    def money(self) -> float:
        """The price of the whole run."""
        return self.price * self.seconds / HOUR if self.price else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second while no node is missing."""
        return self.run.training.batch * self.swarm.config.context / self.estimate.step

    @property
    def policy(self) -> str:
        return self.run.recovery.policy

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of nodes of each stage."""
        return tuple(map(len, self.nodes))

    @property
    def shape(self) -> str:
        """Stages x replicas as text, such as "4 x 2-3"."""
        least, most = min(self.counts), max(self.counts)
        return f"{len(self.counts)} x {least}" + (f"-{most}" if most > least else "")

    def memory(self) -> list[Bytes]:
        """The memory that a node of each stage needs."""
        stages = range(len(self.counts))
        return [
            whole(needed(self.run, self.swarm.config, s, self.counts, narrow=self.narrow))
            for s in stages
        ]

    def more_memory(self) -> list[Bytes]:
        """The additional memory that a node of each stage needs temporarily after a loss."""
        each = [at_a_loss(self.run, self.swarm.config, s).values() for s in range(len(self.counts))]
        return [
            Bytes(max(need.device for need in more), max(need.host for need in more))
            for more in each
        ]


def placed(machines: Sequence[Machine], counts: Sequence[int]) -> tuple[tuple[Machine, ...], ...]:
    """The machines of each stage, cut from a row of machines. So most stages are at one site each,
    and neighbouring stages are near. The driver's plan doesn't consider sites."""
    remaining = iter(machines)
    return tuple(tuple(next(remaining) for _ in range(count)) for count in counts)


# --- candidates


def candidates(question: Question) -> Iterator[Candidate | str]:
    """All candidates; instead of those that don't fit, the reasons. They follow from the model, the
    batch and the nodes alone."""
    layers = question.run.config_for(question.vocabulary).layers
    for stages in stage_numbers(layers, len(question.machines) - 1, question.unlike):
        for counts in spreads(len(question.machines), stages + 1):
            for row in rows(question.machines, sum(counts)):
                yield from _Shape(question, stages, counts, row).plans()


def stage_numbers(layers: int, most: int, unlike: bool) -> list[int]:
    """Numbers of body stages to try, up to `most`. On alike machines, a number is left out if its
    largest stage is as large as with fewer stages, since it is no faster."""
    numbers = range(1, min(layers, most) + 1)
    if unlike:
        return list(numbers)
    fewest: dict[int, int] = {}
    for number in numbers:
        fewest.setdefault(-(-layers // number), number)
    return list(fewest.values())


def rows(machines: Sequence[Machine], count: int) -> Iterator[tuple[Machine, ...]]:
    """Rows of the `count` fastest machines, in their order, from which stages are cut. If machines
    are unlike, there is a row for each kind, in which a machine of that kind serves stage 0. The
    machines before it move to the end, so the ring of stages stays the same."""
    fastest = sorted(range(len(machines)), key=lambda place: -machines[place].flops)[:count]
    row = tuple(machines[place] for place in sorted(fastest))
    firsts = {machine.figures: place for place, machine in reversed([*enumerate(row)])}
    for first in sorted(firsts.values())[:ROWS]:
        yield row[first:] + row[:first]


def cut(layers: int, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """The number of layers of each body stage, in proportion to the stages' speeds, as far as whole
    layers allow. A stage gets at most `most` layers; the result is empty if that isn't enough."""
    if min(most) < 1 or sum(most) < layers:
        return ()
    sizes = [1] * len(speeds)
    for _ in range(layers - len(sizes)):
        open_stages = [place for place, size in enumerate(sizes) if size < most[place]]
        quickest = min(open_stages, key=lambda place: ((sizes[place] + 1) / speeds[place], -place))
        sizes[quickest] += 1
    return tuple(sizes)


def spreads(nodes: int, stages: int) -> list[tuple[int, ...]]:
    """Numbers of nodes of each stage to try. Either all stages have the same number, or all nodes
    are used. Then the remaining ones go to stages 0 (the head), 1, and so on."""
    most, rest = divmod(nodes, stages)
    equal = [r for r in range(1, most + 1) if r <= 4 or r % 4 == 0 or r == most]
    counts = [(replicas,) * stages for replicas in equal]
    if most and rest:
        counts.append(tuple(most + (stage < rest) for stage in range(stages)))
    return counts


class _Shape:
    """Numbers of stages and nodes for which settings are tried."""

    def __init__(
        self, question: Question, stages: int, counts: Sequence[int], row: Sequence[Machine]
    ) -> None:
        config = question.run.config_for(question.vocabulary)
        self.question, self.counts, self.layers = question, counts, config.layers
        steps = question.tokens / (question.run.training.batch * config.context)
        figures = {"swarm__replicas": min(counts), "steps": max(1, math.ceil(steps))}
        self.run = override(
            question.run, model__stages=stages, model__layers=config.layers, **figures
        )
        self.nodes = placed(row, counts)
        self.configs: dict[int | tuple[int, ...] | None, ModelConfig] = {}  # by model.stages
        self.speeds = [
            len(machines) * min(machine.flops for machine in machines)
            for machines in self.nodes[1:]
        ]
        if question.unlike:
            self.run = _with_sizes(
                self.run, cut(config.layers, self.speeds, [config.layers] * stages)
            )
        sites = [[machine.site for machine in machines] for machines in self.nodes]
        self.reach = Reach.of(question.network, sites)
        self.steps: dict[object, tuple[float, float]] = {}  # `step` and `usual` of `Estimate`
        self.tasks: dict[object, Seconds] = {}

    def plans(self) -> Iterator[Candidate | str]:
        """The candidates of this shape; for each policy without any, the reason."""
        batch = self.run.training.batch
        for policy in self.question.policies:
            if len(self.counts) - 1 < _least_stages(POLICIES[policy], self.run):
                continue
            if POLICIES[policy].swapped and self.run.training.lora is not None:
                continue  # launch/resolve.py refuses it
            problems, fits = [], False
            for size in MICROBATCHES:
                if batch % size == 0 and batch // size >= max(self.counts):
                    for window in self._windows():
                        run, problem = self._fitting(policy, size, window)
                        if problem:
                            problems.append(problem)
                            continue
                        sizes = self._config(run).cut
                        if run.policy.swapped and (sizes[0], sizes[-1]) != (sizes[1], sizes[-2]):
                            continue  # as launch/resolve.py
                        fits = True
                        yield from self._settings(run)
                        if not run.training.recompute:
                            break  # smaller windows are no faster
            if problems and not fits:
                yield f"{len(self.counts)} x {min(self.counts)} nodes, {policy}: {problems[0]}"

    def _windows(self) -> Iterator[int]:
        """Values of training.in_flight to try, those with the most memory first. With 0 a source
        chooses its window itself, up to `MOST` times the stages."""
        yield 0
        for times in range(MOST - 1, 0, -1):
            yield times * len(self.counts)

    def _fitting(self, policy: str, size: int, window: int) -> tuple[RunFile, str]:
        """The run without recomputation if it fits, since that is faster; else with it. The second
        result says why neither fits, and is empty if one does. On unlike machines, memory may limit
        the layers of some stages."""
        problem = ""
        for recompute in (False, True):
            run = _changed(self.run, policy, size, window, recompute)
            problem = self._lacking(run)
            unlike = problem and self.question.unlike
            if unlike and (sizes := cut(self.layers, self.speeds, self._most(run))):
                run = _with_sizes(run, sizes)
                problem = self._lacking(run)
            if not problem:
                break
        return run, problem

    def _config(self, run: RunFile) -> ModelConfig:
        stages = run.model.stages
        if stages not in self.configs:
            self.configs[stages] = run.config_for(self.question.vocabulary)
        return self.configs[stages]

    def _lacking(self, run: RunFile) -> str:
        """Why a stage doesn't fit on one of its machines, as text; empty: all fit."""
        for stage, machines in enumerate(self.nodes):
            needs = self._needs(run, self._config(run), stage)
            for machine, (when, need) in product(machines, needs.items()):
                if problem := machine.lacks(need):
                    during = f" (while there is {when})" if when else ""
                    return f"stage {stage} {problem}{during} at {machine.name}"
        return ""

    def _needs(self, run: RunFile, config: ModelConfig, stage: int) -> dict[str, Bytes]:
        """Occasion -> bytes that a node of the stage needs then; the empty key: always."""
        need = whole(needed(run, config, stage, self.counts, narrow=self.question.narrow))
        more = at_a_loss(run, config, stage)
        return {"": need} | {when: need + extra for when, extra in more.items()}

    def _most(self, run: RunFile) -> list[int]:
        """Approximate maximum number of layers for each body stage, by the memory of its machines.
        It is estimated as if all stages had equally many layers."""
        stages = len(self.speeds)
        if 2 * stages > self.layers:
            return [self.layers] * stages
        of_one, of_two = (
            [self._needs(run, config, stage).values() for stage in range(1, stages + 1)]
            for config in (self._config(_with_sizes(run, (size,) * stages)) for size in (1, 2))
        )
        return [
            min(machine.layers(*pair) for machine in machines for pair in zip(a, b, strict=True))
            for machines, a, b in zip(self.nodes[1:], of_one, of_two, strict=True)
        ]

    def _settings(self, run: RunFile) -> Iterator[Candidate]:
        """Candidates of the run with each setting of its policy that is tried."""
        recovery, training = run.recovery, run.training
        if run.policy.snapshots:  # snapshots get at most half of the slowest link
            mbps = min(recovery.snapshot.mbps, *(link.mbps / 2 for link in self.reach.farthest))
            snapshot = recovery.snapshot.model_copy(update={"mbps": mbps})
            run = _with_recovery(run, snapshot=snapshot)
        swarm, losing = self._swarm(run), self.question.losing
        away = [missing(swarm, self.reach, losing, stage) for stage in range(len(self.counts))]
        apart = self.question.network.uplinks or run.policy.twins or run.policy.swapped
        kind = recovery.policy if apart else "others"
        settings = training.microbatch, training.in_flight, training.recompute
        key = kind, run.model.stages, settings
        if key not in self.steps:
            step = step_seconds(swarm, self.reach)
            self.steps[key] = step, usual_seconds(swarm, self.reach, away, step)
        for every in INTERVALS if run.policy.checkpoints else (recovery.checkpoint.every,):
            checkpoint = recovery.checkpoint.model_copy(update={"every": every})
            varied = replace(swarm, run=_with_recovery(run, checkpoint=checkpoint))
            estimate = estimated(varied, self.reach, losing, away, *self.steps[key])
            yield Candidate(varied.run, varied, self.nodes, estimate, self.question.narrow)

    def _swarm(self, run: RunFile) -> Swarm:
        """The swarm of this shape for the simulator's functions."""
        groups: Counter[tuple[int, str, Seconds]] = Counter()
        for stage, machines in enumerate(self.nodes):
            for machine in machines:
                groups[stage, machine.site, self._tasks(run, stage, machine)] += 1
        return Swarm(
            run,
            self._config(run),
            tuple(Group(stage, count, site, s) for (stage, site, s), count in groups.items()),
            self.question.network,
            Transport(frame=FRAME),
            storage_mbps=self.question.storage_mbps,
        )

    def _tasks(self, run: RunFile, stage: int, machine: Machine) -> Seconds:
        """Seconds of a machine's tasks. They are computed once for all stages with equally many
        layers."""
        training, config = run.training, self._config(run)
        key = (
            *(len(config.layers_of(stage)), training.microbatch, training.recompute),
            *(machine.flops, machine.bandwidth),
        )
        if key not in self.tasks:
            self.tasks[key] = seconds_at(run, config, stage, machine.flops, machine.bandwidth)
        return self.tasks[key]


def _least_stages(policy: Policy, run: RunFile) -> int:
    """Minimum number of body stages with which a policy works as intended. With adapters, a policy
    that guesses needs only one, since they begin anew instead."""
    anew = policy.guesses and run.training.lora is not None
    return 4 if policy.swapped else 1 if policy.twins or policy.checkpoints or anew else 2


def _changed(run: RunFile, policy: str, size: int, window: int, recompute: bool) -> RunFile:
    """The run with these settings. It is faster than `override`: the values need no validation."""
    training = {"microbatch": size, "in_flight": window, "recompute": recompute}
    run = run.model_copy(update={"training": run.training.model_copy(update=training)})
    return _with_recovery(run, policy=policy)


def _with_sizes(run: RunFile, sizes: tuple[int, ...]) -> RunFile:
    """The run with body stages of these sizes in layers. The model's layers become their sum."""
    model = {"stages": sizes, "layers": sum(sizes)}
    return run.model_copy(update={"model": run.model.model_copy(update=model)})


def _with_recovery(run: RunFile, **changes: object) -> RunFile:
    return run.model_copy(update={"recovery": run.recovery.model_copy(update=changes)})


# --- the choice


@dataclass(frozen=True)
class Answer:
    """The best plan, and rejected ones."""

    best: Candidate
    others: tuple[tuple[Candidate, str], ...]  # rejected plans, each with the reason
    refused: tuple[str, ...]  # why other candidates don't fit


def answer(question: Question) -> Answer:
    """The fastest plan within the budget; with a deadline, the cheapest that meets it. The others
    are the best of each policy, and of other numbers of stages and replicas. Raises PlanError."""
    results = [*candidates(question)]
    plans = [plan for plan in results if isinstance(plan, Candidate)]
    refused = tuple(dict.fromkeys(result for result in results if isinstance(result, str)))
    if not plans:
        raise PlanError(_nothing_fits(question, refused))
    best = _best(question, plans)
    if best is None:
        nearest = min(plans, key=lambda plan: _worth(question, plan))
        raise PlanError(
            f"no plan meets the deadline and the budget: the nearest, "
            f"{described(nearest)}, {_why_not(question, nearest)}"
        )
    others = [plan for plan in _shown(question, plans, best) if plan is not best]
    explained = tuple((plan, _why_not(question, plan) or _why(plan, best)) for plan in others)
    return Answer(best, explained, refused)


def with_codecs(question: Question, free: Collection[str]) -> tuple[Question, Candidate | None]:
    """The question with as many codecs of `NARROW` as are worth it, and the best plan without them.

    Only codecs of [wire] in `free` may change. A narrow codec must save the share `WORTH` of the
    time; with a deadline, of the money. Among nearly equal choices, that with the fewest narrow
    codecs is taken. The second result is None if no codec changes, or if no plan works without the
    change.
    """
    codecs = _narrowed(question.run, free)
    tried: list[tuple[Question, Candidate]] = []
    own: Candidate | None = None
    for unchanged in ((*NARROW,), BOUNDARIES, AVERAGING, ()):
        changed = {use: codec for use, codec in codecs.items() if use not in unchanged}
        if changed or unchanged == (*NARROW,):
            wire = question.run.wire.model_copy(update=changed)
            varied = replace(question, run=question.run.model_copy(update={"wire": wire}))
            plans = (plan for plan in candidates(varied) if isinstance(plan, Candidate))
            if (best := _best(varied, plans)) is not None:
                tried.append((varied, best))
                own = own if changed else best
    if not tried:
        return question, None
    least = min(_worth(question, best)[0] for _, best in tried)
    varied, best = next(
        attempt for attempt in tried if (1 - WORTH) * _worth(question, attempt[1])[0] <= least
    )
    return (question, None) if best is own else (varied, own)


def _narrowed(run: RunFile, free: Collection[str]) -> dict[str, str]:
    """The codecs of `NARROW` for uses in `free` that send fewer bytes than the run's codecs."""
    return {
        use: codec
        for use, codec in NARROW.items()
        if use in free and BYTES.index(codec) > BYTES.index(getattr(run.wire, use))
    }


def narrower(question: Question, best: Candidate) -> Candidate | None:
    """The best plan of the same policy with the codecs of `NARROW`, where the run's send more
    bytes. None: it saves less than `WORTH` of the time."""
    wire = question.run.wire.model_copy(update=_narrowed(question.run, NARROW))
    run = question.run.model_copy(update={"wire": wire})
    results = candidates(replace(question, run=run, policies=(best.policy,)))
    plan = _best(question, (result for result in results if isinstance(result, Candidate)))
    return plan if plan and plan.seconds < (1 - WORTH) * best.seconds else None


def _best(question: Question, plans: Iterable[Candidate]) -> Candidate | None:
    """The best plan that meets the deadline and the budget; None: no plan does. Of nearly equal
    plans, one with the run file's policy is the best."""
    able = [(_worth(question, plan), plan) for plan in plans if not _why_not(question, plan)]
    most = (1 + ALIKE) * min((worth[0] for worth, _ in able), default=0.0)
    alike = [
        (plan.policy != question.run.recovery.policy, worth, number)
        for number, (worth, plan) in enumerate(able)
        if worth[0] <= most
    ]
    return able[min(alike)[2]][1] if alike else None


def _worth(question: Question, plan: Candidate) -> tuple[float, float]:
    """A sort key: money, then time, if there is a deadline; else time, then money. The lowest is
    best."""
    if question.deadline < math.inf:
        return plan.money, plan.seconds
    return plan.seconds, plan.money


def _why_not(question: Question, plan: Candidate) -> str:
    """Why the plan can't be used, as text; empty: it can."""
    hours = plan.seconds / HOUR
    if hours == math.inf:
        return "never ends: losses come faster than it recovers"
    if hours > question.deadline:
        return f"takes {hours:,.1f} h of {question.deadline:,.1f} h"
    if plan.money > question.budget:
        return f"costs {plan.money:,.2f} of {question.budget:,.2f}"
    has_no_folder = plan.run.policy.checkpoints and not plan.run.recovery.checkpoint.dir
    if has_no_folder and len(question.policies) > 1:
        return "needs a folder that all nodes share: name it in recovery.checkpoint.dir"
    return ""


def _shown(question: Question, plans: Sequence[Candidate], best: Candidate) -> list[Candidate]:
    """The best plan of each policy; and with the best plan's policy, the best plans of each number
    of stages and of nodes."""
    kinds: dict[tuple[object, ...], Candidate] = {}
    for plan in sorted(plans, key=lambda plan: _worth(question, plan)):
        kinds.setdefault(("policy", plan.policy), plan)
        if plan.policy == best.policy:
            kinds.setdefault(("stages", len(plan.counts)), plan)
            if len(plan.counts) == len(best.counts):
                kinds.setdefault(("nodes", plan.counts), plan)
    shown = {id(plan): plan for plan in kinds.values()}
    return sorted(shown.values(), key=lambda plan: _worth(question, plan))


def _why(plan: Candidate, best: Candidate) -> str:
    """The main reason why a plan is worse than the best one, as text."""
    if plan.seconds < best.seconds and plan.money > best.money:
        return f"costs more: {plan.money:,.2f} instead of {best.money:,.2f}"
    ours, its = best.estimate, plan.estimate
    spent = {name: seconds - ours.spent[name] for name, seconds in its.spent.items()}
    name = max(spent, key=lambda cause: spent[cause])
    more = plan.seconds / best.seconds - 1
    if more < ALIKE:
        return f"nearly as good: {round(more, 4) + 0.0:+.2%} of the time"
    if name == "training":
        return f"a step takes {its.step:.3g} s instead of {ours.step:.3g} s"
    reasons = {
        "replicas missing": "steps are slower while replicas are missing",
        "learning again": "lost progress must be relearned",
        "rolled back": "steps are rolled back and trained again",
        "replicas lost": "losses of replicas delay the run",
        "stages lost": "losses of stages delay the run",
    }
    return f"{reasons[name]}: {spent[name] / best.seconds:+.1%} of the time"


def _nothing_fits(question: Question, refused: Iterable[str]) -> str:
    """The message for a question without any candidate that fits."""
    reasons = list(refused)
    layers = question.run.config_for(question.vocabulary).layers
    if reasons:
        return (
            f"nothing fits on {len(question.machines)} nodes. {reasons[-1]}. Use nodes with more "
            "memory, more nodes (for more and smaller stages), or shorter samples"
        )
    return (
        f"{len(question.machines)} nodes, {layers} layers and a batch of "
        f"{question.run.training.batch} samples allow no plan: there must be two nodes or more, "
        f"and a microbatch for each node of a stage (policies: {', '.join(question.policies)})"
    )


def described(plan: Candidate) -> str:
    """The plan's shape and policy as text."""
    text = f"{plan.shape}, {plan.policy}"
    if plan.run.policy.checkpoints:
        text += f" every {plan.run.recovery.checkpoint.every}"
    return text


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
