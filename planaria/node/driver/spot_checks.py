"""Spot checks: a few visits are computed twice, and again if the results differ. Pure.

The driver draws them unpredictably and sends them to both neighbours of each visit. These send the
double what they send to the visit's node, and compare the results. So that node never knows that it
is checked. Of three results, two that agree are right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from planaria.bootstrap.registry_pb2 import NUMBERS
from planaria.node.transaction.routing import Route, nodes_by_stage, route, stages_in
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of

WRONG: Final = 2
"""Checks in which a node is wrong before it is accused."""
UNDECIDED: Final = 3
"""Checks in a row in which a stage's only two nodes differ before it is reported; no third node can
tell which one is wrong."""


class WrongResult(NamedTuple):
    """A visit that a node computed differently from two others."""

    node: str
    by: str  # the comparing neighbour
    step: int
    difference: float
    times: int  # so far


class UndecidedCheck(NamedTuple):
    """Two nodes of a stage differ, and there is no third."""

    nodes: tuple[str, str]
    step: int
    difference: float


@dataclass
class CheckedVisit:
    """A visit that several nodes compute, so that their results can be compared."""

    microbatch: int
    position: int
    before: str
    node: str
    behind: str
    doubles: list[str]
    replicas: Sequence[str]  # of that stage
    forward: dict[frozenset[str], float] = field(default_factory=dict)
    """Differences of the outputs, by pair."""
    backward: dict[frozenset[str], float] = field(default_factory=dict)
    """Differences of the gradients of its input, by pair."""

    def message(self) -> pb.Check:
        """The message by which a neighbour gives the newest double the visit."""
        return pb.Check(microbatch=self.microbatch, position=self.position, double=self.doubles[-1])


class SpotChecks:
    """The spot checks of a driver's steps."""

    def __init__(self, share: float, tolerance: float, chance: Random) -> None:
        """`share`: of the visits at stages with replicas; `tolerance`: the largest difference
        between correct nodes."""
        self.share, self.tolerance, self._chance = share, tolerance, chance
        self.step = 0
        self.checked: dict[tuple[int, int], CheckedVisit] = {}
        self.right: dict[str, int] = {}  # by node, step of the last check in which it was right
        self.wrong: defaultdict[str, dict[tuple[int, int, int], set[str]]]
        """Step, microbatch and position of each node's wrong visits, and their finders, by node."""
        self.wrong = defaultdict(lambda: defaultdict(set))
        self._charged: dict[str, frozenset[str]] = {}  # by node, machines that have accused it
        self.apart: defaultdict[frozenset[str], int] = defaultdict(int)  # undecided, in a row
        self.doubted: list[pb.Doubted] = []  # for the next commit

    def draw(self, begin: pb.Begin) -> dict[str, list[pb.Check]]:
        """Draws the checks of an attempt: by node, those that it gets. None in an evaluation."""
        self.step, self.checked = begin.step, {}
        checks_of: defaultdict[str, list[pb.Check]] = defaultdict(list)
        if not self.share or begin.kind != pb.Begin.TRAIN:
            return checks_of
        replicas = nodes_by_stage(stages_in(begin))
        may = {stage for stage, alike in replicas.items() if len(alike) > 1}
        share, chance = self.share, self._chance.random
        for microbatch in begin.plan:
            for position, stage in enumerate(microbatch.order, 1):
                if stage in may and chance() < share:
                    path = route(begin, microbatch)
                    self._draw_double(microbatch.id, position, replicas[stage], path, checks_of)
        return checks_of

    def _draw_double(
        self,
        microbatch: int,
        position: int,
        replicas: Sequence[str],
        path: Route,
        checks_of: Mapping[str, list[pb.Check]],
    ) -> None:
        """Draws the second node for a checked visit."""
        before, node, behind = path.nodes[position - 1 : position + 2]
        index = self._chance.randrange(len(replicas) - 1)  # of the others
        double = replicas[index + (index >= replicas.index(node))]
        checked = CheckedVisit(microbatch, position, before, node, behind, [double], replicas)
        self.checked[microbatch, position] = checked
        for neighbour in {before, behind}:
            checks_of[neighbour].append(checked.message())

    def over(self) -> None:
        """Drops pending checks: the attempt is over or replanned."""
        self.checked = {}

    def keep(self, members: Mapping[str, int]) -> None:
        """Drops nodes that are no longer members."""
        self.right = {node: step for node, step in self.right.items() if node in members}
        for node in self.wrong.keys() - members.keys():
            del self.wrong[node]
            self._charged.pop(node, None)
        for pair in [pair for pair in self.apart if not pair <= members.keys()]:
            del self.apart[pair]

    def compared(
        self, peer: str, comparison: pb.Compared
    ) -> WrongResult | UndecidedCheck | CheckedVisit | None:
        """Takes in a neighbour's comparison. Returns a wrong node, a check by a third node (both
        neighbours get its `message`), an undecided check, or none."""
        checked = self.checked.get((comparison.microbatch, comparison.position))
        if checked is None:
            return None  # of an attempt that is over
        if peer != (checked.before if comparison.backward else checked.behind):
            return None
        pair = frozenset((comparison.node, comparison.other))
        if len(pair) < 2 or not pair <= {checked.node, *checked.doubles}:
            return None
        differences = checked.backward if comparison.backward else checked.forward
        differences[pair] = comparison.difference
        if len(checked.doubles) == 1:
            return self._of_two(checked, pair, comparison)
        if len(differences) == 3:
            return self._of_three(checked, peer, differences)
        return None

    def _of_two(
        self, checked: CheckedVisit, pair: frozenset[str], comparison: pb.Compared
    ) -> CheckedVisit | UndecidedCheck | None:
        if comparison.difference <= self.tolerance:
            self.right |= dict.fromkeys(pair, self.step)
            self.apart.pop(pair, None)
            return None
        if left := [node for node in checked.replicas if node not in pair]:
            checked.doubles.append(self._chance.choice(left))
            return checked
        self.apart[pair] += 1
        if self.apart[pair] % UNDECIDED:
            return None
        first, other = sorted(pair)
        return UndecidedCheck((first, other), self.step, comparison.difference)

    def _of_three(
        self, checked: CheckedVisit, by: str, differences: Mapping[frozenset[str], float]
    ) -> WrongResult | None:
        """The node that is far from both others, when those are near each other."""
        near = [pair for pair, difference in differences.items() if difference <= self.tolerance]
        if len(near) != 1:
            return None
        (alone,) = {checked.node, *checked.doubles} - near[0]
        self.right |= dict.fromkeys(near[0], self.step)
        self.wrong[alone][self.step, checked.microbatch, checked.position].add(by)
        far = max(difference for pair, difference in differences.items() if alone in pair)
        return WrongResult(alone, by, self.step, far, len(self.wrong[alone]))

    def take_doubted(self) -> list[pb.Doubted]:
        """Removes and returns the nodes doubted since the last commit, for the next one."""
        doubted, self.doubted = self.doubted, []
        return doubted

    def is_known(self, node: str) -> bool:
        """Whether the machines that have found the node wrong have accused it already. A machine
        that finds it wrong again is no more evidence; from now on they have accused it."""
        machines = frozenset(map(node_of, set().union(*self.wrong[node].values())))
        known = self._charged.get(node) == machines
        self._charged[node] = machines
        return known

    def charge(self, node: str, stage: int, off: float) -> tuple[str, pb.Failed]:
        """The accusation of a node that was wrong, and the member that makes it; empty: several
        machines do. `off`: the difference."""
        self.doubted.append(pb.Doubted(node=node, stage=stage, since=self.right.get(node, 0)))
        reason = f"its results differ from those of two others of its stage by {off:.2g}"
        failed = pb.Failed(reason=reason, accused=[node], cause=NUMBERS)
        accusers = {node_of(by): by for by in sorted(set().union(*self.wrong[node].values()))}
        return "" if len(accusers) > 1 else min(accusers.values()), failed
