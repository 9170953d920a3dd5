"""Simulation, event by event, of SPARe, replication and checkpoints under the same failures (§5).

A step computes its stacks and sums gradients. Groups fail at any time, except during a restart. A
failure is noticed when the next all-reduce fails. Then a *scheme* returns the stacks that survivors
must compute to end this step, or demands a restart from the last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from planaria_lab.spare.endurance import best_period, endured
from planaria_lab.spare.golomb import place
from planaria_lab.spare.masking import Stacks, WipedOut, reorder, stack

Events = Generator[simpy.Event, object, None]
DAY = 86_400.0


@dataclass(frozen=True)
class System:
    """Parameters of Table 1, with assumptions where its figures are lost (listed in
    lab/results/spare). Times are in seconds."""

    groups: int
    mtbf: float = 300.0  # between failures of any group, while all are running
    shape: float = 0.78  # of the Weibull distribution
    clocks: Literal["groups", "system"] = "groups"  # Weibull: groups' lives or the system's gaps
    restart: float = 3600.0
    save: float = 60.0
    compute: float = 64.0  # of a stack
    reduce_each: float = 0.006  # of an all-reduce (a ring), for each group
    failed_reduce: float = 0.5  # time of a failed all-reduce, as a share of an all-reduce
    control: float = 1.0  # of shrinking the communicator, and of reordering, each
    jitter: float = 0.05  # standard deviation of every time, as a share of its mean
    horizon: float = DAY  # length of the training with one stack and no failures

    @property
    def reduce(self) -> float:
        return self.reduce_each * self.groups

    @property
    def steps(self) -> int:
        return round(self.horizon / (self.compute + self.reduce))


class Scheme(Protocol):
    """A way to train through failures: the stacks that groups compute, and the effect of a loss."""

    endures: float  # mean number of failures until a restart; the period follows from it

    @property
    def stacks(self) -> float:
        """The number of stacks that a step computes."""

    def reset(self) -> None: ...

    def lose(self, groups: list[int]) -> float | None:
        """Lose these groups; return the stacks that survivors compute additionally in this step, or
        None: restart."""


class Replication:
    """A scheme in which every group computes all of its `redundancy` types. `hosts`: groups that
    host each type, (types, redundancy). Redundancy 1 is checkpoints alone."""

    def __init__(self, hosts: NDArray[np.int64], redundancy: int, endures: float) -> None:
        self.hosts, self.stacks, self.endures = hosts, float(redundancy), endures
        self.reset()

    def reset(self) -> None:
        self.alive = np.ones(int(self.hosts.max()) + 1, dtype=bool)

    def lose(self, groups: list[int]) -> float | None:
        self.alive[groups] = False
        return 0.0 if self.alive[self.hosts].any(axis=1).all() else None


class Spare:
    """SPARe: a step ends when all types are computed; groups reorder stacks after a loss."""

    def __init__(self, groups: int, redundancy: int, parts: int = 1) -> None:
        self.start: Stacks = stack(place(groups, redundancy), parts)
        self.parts, self.endures = parts, endured(groups, redundancy)
        self.reset()

    @property
    def stacks(self) -> float:
        return self.now.depth / self.parts

    def reset(self) -> None:
        self.now = self.start

    def lose(self, groups: list[int]) -> float | None:
        result = reorder(self.now, groups)
        if isinstance(result, WipedOut):
            return None
        self.now = result.stacks
        return result.patch_depth / self.parts


def replicate(groups: int, redundancy: int) -> Replication:
    """Return replication as the paper counts it: as many types as groups, hosted as in SPARe."""
    return Replication(place(groups, redundancy), redundancy, endured(groups, redundancy))


def replicate_in_sets(groups: int, redundancy: int) -> Replication:
    """Return replication as it is built: in sets of `redundancy` groups that compute the same.

    Each group that is left over joins one of the sets. Sets are fewer than types, so it endures
    r^(1/r) times as many failures.
    """
    sets = groups // redundancy
    member = np.arange(sets) + sets * np.arange(redundancy + 1)[:, None]
    hosts = np.where(member < groups, member, np.arange(sets)).T
    endures = endured(groups, redundancy) * redundancy ** (1 / redundancy)
    return Replication(hosts, redundancy, endures)


@dataclass
class WallTime:
    """Wall time of one training and its parts, in seconds, and counts of events."""

    steps: int = 0
    wall: float = 0.0
    kept: float = 0.0  # in steps that no restart has undone
    restarting: float = 0.0
    failures: int = 0
    restarts: int = 0
    stacks: list[float] = field(default_factory=list)  # of each step, patches included

    @property
    def availability(self) -> float:
        """The share of wall time that became progress."""
        return self.kept / self.wall

    @property
    def up(self) -> float:
        """The share of wall time outside restarts."""
        return 1 - self.restarting / self.wall


def train(system: System, scheme: Scheme, trail: int, limit: float = math.inf) -> WallTime:
    """Simulate one training until the horizon is done, or until `limit` (seconds). `trail` seeds
    failures and jitter separately, so that all schemes meet the same failures."""
    return _Training(system, scheme, trail).run(limit)


class _Training:
    def __init__(self, system: System, scheme: Scheme, trail: int) -> None:
        self.system, self.scheme = system, scheme
        self.environment = simpy.Environment()
        self.failing, self.shaking = (np.random.default_rng([trail, kind]) for kind in (0, 1))
        self.period = best_period(system.save, system.mtbf * scheme.endures)
        self.outcome = WallTime()
        self.begin()

    def begin(self) -> None:
        """Start with all groups running."""
        self.scheme.reset()
        self.running = list(range(self.system.groups))
        self.struck: list[int] = []
        self.failures = self.environment.process(self.fail())

    def run(self, limit: float) -> WallTime:
        training = self.environment.process(self.train())
        until: Iterable[simpy.Event] = [training]
        if limit < math.inf:
            until = [training, self.environment.timeout(limit)]
        self.environment.run(self.environment.any_of(until))
        self.outcome.wall = self.environment.now
        return self.outcome

    def takes(self, seconds: float) -> simpy.Event:
        factor = self.shaking.normal(1.0, self.system.jitter)
        return self.environment.timeout(max(0.0, seconds * factor))

    def fail(self) -> Events:
        try:
            for gap in self.gaps():
                yield self.environment.timeout(gap)
                victim = int(self.failing.integers(len(self.running)))
                self.struck.append(self.running.pop(victim))
                self.outcome.failures += 1
        except simpy.Interrupt:
            return  # a restart

    def gaps(self) -> Iterator[float]:
        """Yield the seconds between failures, until no group is left."""
        system, groups = self.system, self.system.groups
        life = system.mtbf * groups / math.gamma(1 + 1 / system.shape)
        if system.clocks == "groups":
            lives = np.sort(life * self.failing.weibull(system.shape, groups))
            return iter(np.diff(lives, prepend=0.0))
        return (
            life / groups_left * self.failing.weibull(system.shape)
            for groups_left in range(groups, 0, -1)
        )

    def train(self) -> Events:
        system, outcome = self.system, self.outcome
        saved, saved_kept, saved_at = 0, 0.0, 0.0
        while outcome.steps < system.steps:
            began, idle = self.environment.now, [0.0]
            stacks = self.scheme.stacks
            yield self.takes(stacks * system.compute)
            patched = yield from self.mend(idle)
            if patched is None:
                outcome.steps, outcome.kept = saved, saved_kept
                yield from self.restart()
                saved_at = self.environment.now
                continue
            yield self.takes(system.reduce)
            outcome.steps += 1
            outcome.kept += self.environment.now - began - idle[0]
            outcome.stacks.append(stacks + patched)
            if self.environment.now - saved_at >= self.period:
                yield self.takes(system.save)
                saved, saved_kept, saved_at = outcome.steps, outcome.kept, self.environment.now

    def mend(self, idle: list[float]) -> Generator[simpy.Event, object, float | None]:
        """Repair a step in which groups failed; more may fail meanwhile. Returns the additional
        stacks computed, or None: restart. Adds the seconds without computing to `idle`."""
        patched = 0.0
        while self.struck:
            noticed = self.environment.now
            yield self.takes(self.system.failed_reduce * self.system.reduce)
            lost, self.struck = self.struck, []
            patch = self.scheme.lose(lost)
            if patch is None:
                return None
            yield self.takes(2 * self.system.control)
            idle[0] += self.environment.now - noticed
            yield self.takes(patch * self.system.compute)
            patched += patch
        return patched

    def restart(self) -> Events:
        if self.failures.is_alive:
            self.failures.interrupt()
        began = self.environment.now
        yield self.takes(self.system.restart)
        self.outcome.restarting += self.environment.now - began
        self.outcome.restarts += 1
        self.begin()


MICROBATCHES = "SPARe+CKPT by microbatches"  # a shard is cut into four
SCHEMES: dict[str, Callable[[int, int], Scheme]] = {
    "SPARe+CKPT": Spare,
    "Rep+CKPT": replicate,
    "Rep+CKPT in sets": replicate_in_sets,
    MICROBATCHES: lambda groups, redundancy: Spare(groups, redundancy, parts=4),
}
