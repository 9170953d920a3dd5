"""Draw a schedule of faults for a swarm from a seed: a pure function.

Faults are drawn one after the other. A swarm must be able to recover: if a fault would leave a
stage of several nodes without a healthy one, it gets another node, or is left out. The kinds in
`LOSSES` take all nodes of a stage; no other node may have a fault of its own then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from planaria.bootstrap.neighbours import related
from planaria_lab.chaos.sick_node import KINDS as SICK

REGISTRY: Final = "registry"
EVERYBODY: Final = "everybody"
STAGES: Final = "stages"
QUIET_AT_FIRST, QUIET_AT_LAST = 5.0, 20.0
"""Seconds at the start before the first fault, and at the end after the last fault has ended."""
RECOVERY: Final = 4.0
"""Seconds from the end of a node's fault until another node of its stage may get one."""
REGISTRY_RECOVERY: Final = 40.0
"""Seconds from the end of one kill of the registry until the next. A new registry admits nobody
until it knows its members, and nodes that wait to join give up after 30 s."""
LOSS_RECOVERY: Final = 15.0
"""Seconds from the start of new nodes in place of lost ones until another node may get a fault."""

Blame = Literal["guilty", "innocent"]


class FaultKind(NamedTuple):
    """A kind of fault. `seconds`: range of its duration."""

    blame: Blame  # innocent: the node makes progress and does nothing wrong
    seconds: tuple[float, float]
    where: Literal["node", "registry", "everybody", "stages"] = "node"
    needs_replica: bool = False  # a stage without another replica pauses the run, as it should
    weight: float = 1.0


BLINKS: Final = {f"blink {every} s": every for every in (1, 2, 4, 9)}
"""Kind of fault -> seconds between two resets."""
LOSSES: Final = {
    kind: FaultKind("guilty", (0.0, 2.0), STAGES)
    for kind in ("lost stage", "lost neighbours", "lost stage 0", "lost driver")
}
"""Kinds of fault that kill all nodes of a stage."""
KINDS: Final[Mapping[str, FaultKind]] = {
    "kill": FaultKind("guilty", (0.0, 2.0), weight=4.0),
    "stop": FaultKind("guilty", (1.0, 12.0)),
    "registry kill": FaultKind("innocent", (0.0, 2.0), "registry", weight=0.5),
    "reset": FaultKind("innocent", (0.0, 0.0)),
    **{kind: FaultKind("innocent", (10.0, 25.0), "everybody", weight=0.25) for kind in BLINKS},
    "one way": FaultKind("innocent", (1.0, 10.0)),
    "cut": FaultKind("innocent", (5.0, 30.0)),
    "hang": FaultKind("guilty", (5.0, 25.0)),
    "crawl": FaultKind("innocent", (5.0, 20.0)),
    "slow disk": FaultKind("innocent", (5.0, 20.0)),
    "stalled disk": FaultKind("innocent", (5.0, 20.0)),
    "full disk": FaultKind("innocent", (5.0, 20.0)),
    "nan": FaultKind("guilty", (0.0, 2.0), needs_replica=True),
    "wrong shape": FaultKind("guilty", (0.0, 2.0), needs_replica=True),
    "wrong dtype": FaultKind("guilty", (0.0, 2.0), needs_replica=True),
    "wild norm": FaultKind("guilty", (0.0, 2.0), needs_replica=True),
    "flipped weight": FaultKind("guilty", (0.0, 2.0), needs_replica=True),
    **LOSSES,
}
"""All kinds of fault.

- `kill`: SIGKILL; a new process takes its place when the fault ends. `registry kill`: the same.
- `stop`: SIGSTOP, and SIGCONT at the end.
- `reset`: RST for connections dialled to the node. `blink ...`: the same for all nodes, repeatedly.
- `one way`: connections dialled to the node pass bytes in one direction only.
- `cut`: the node and one that it exchanges messages with can't reach each other; all others can.
- `lost ...`: SIGKILL at once for all nodes of a body stage, of two neighbouring body stages, or of
  stage 0; `lost driver`: for the driver and all nodes of the stage after its own. New processes
  take their places.
- All others: sick_node.py.
"""


@dataclass(frozen=True)
class Shape:
    """The shape of a swarm, and the faults to draw for it. `rate`: faults per minute. `seats`: the
    option --seats of each node."""

    stages: int  # body stages
    replicas: int
    kinds: Sequence[str] = tuple(KINDS)
    rate: float = 6.0
    seats: str = "auto"

    @property
    def slots(self) -> list[str]:
        return [f"{s}.{r}" for r in range(self.replicas) for s in range(self.stages + 1)]


@dataclass(frozen=True)
class Fault:
    """A fault in the schedule.

    `at`: seconds from the first committed step; it ends `seconds` later. `slot`: STAGE.REPLICA,
    REGISTRY, EVERYBODY, or STAGES until the swarm knows which nodes serve these. `figures`: options
    of the fault in sick_node.py or the proxy; of a loss, the `first` and `last` stage, and whether
    `saves` of its nodes are "kept" or "gone". `others`: the slot that it is cut from, or the slots
    that are lost with it.
    """

    at: float
    kind: str
    slot: str
    seconds: float
    figures: Mapping[str, float | str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        return self.at + self.seconds

    @property
    def slots(self) -> set[str]:
        return {self.slot, *self.others}

    @property
    def stage(self) -> str:
        return self.slot.partition(".")[0]

    @property
    def blame(self) -> Blame:
        return KINDS[self.kind].blame


def schedule(seed: int, minutes: float, shape: Shape) -> list[Fault]:
    """Return faults in the order in which they begin, the same on any machine for the same
    arguments. Raises ValueError for an unknown kind."""
    if unknown := set(shape.kinds) - KINDS.keys():
        raise ValueError(f"{min(unknown)!r} is not a kind of fault: choose from {', '.join(KINDS)}")
    chance = random.Random(seed)
    kinds = [k for k in KINDS if k in shape.kinds]
    kinds = [k for k in kinds if shape.replicas > 1 or not KINDS[k].needs_replica]
    kinds = [k for k in kinds if shape.stages > 1 or k != "lost neighbours"]
    faults: list[Fault] = []
    at = QUIET_AT_FIRST
    last = 60 * minutes - QUIET_AT_LAST
    while kinds and shape.rate > 0 and at < last:
        at += chance.expovariate(shape.rate / 60)
        kind = chance.choices(kinds, [KINDS[k].weight for k in kinds])[0]
        seconds = chance.uniform(*KINDS[kind].seconds)
        figures = _figures(kind, chance, shape)
        others: tuple[str, ...] = ()
        slots = chance.sample(shape.slots, len(shape.slots))
        if at + seconds > last:
            continue
        if KINDS[kind].where != "node":
            slots = [KINDS[kind].where]
        for slot in slots:
            if kind == "cut":
                others = (next(other for other in slots if _needs(slot, other, shape)),)
            fault = Fault(round(at, 3), kind, slot, round(seconds, 3), figures, others)
            if _bearable(fault, faults, shape):
                faults.append(fault)
                break
    return faults


def _figures(kind: str, chance: random.Random, shape: Shape) -> dict[str, float | str]:
    times, kind_of_frame = chance.randint(1, 3), chance.choice(["activation", "gradient"])
    saves: dict[str, float | str] = {}
    if kind in LOSSES:
        saves["saves"] = chance.choice(["kept", "gone"])
    match kind:
        case "one way":
            return {"way": chance.choice(["in", "out"])}
        case "nan" | "wrong shape" | "wrong dtype":
            return {"times": times, "of": kind_of_frame}
        case "wild norm":
            return {"times": 1, "value": chance.choice([-1e30, 1e300])}
        case "lost stage" | "lost neighbours":
            more = kind == "lost neighbours"
            first = chance.randint(1, shape.stages - more)
            return {"first": first, "last": first + more, **saves}
        case "lost stage 0":
            return {"first": 0, "last": 0, **saves}
        case "lost driver":
            return saves
        case _:
            return dict(SICK.get(kind, {}))


def _needs(slot: str, other: str, shape: Shape) -> bool:
    """Return whether nodes of two different slots exchange messages in every step."""
    a, b = (int(name.partition(".")[0]) for name in (slot, other))
    return slot != other and related(a, b, shape.stages, swapped=False)


def _bearable(fault: Fault, others: Sequence[Fault], shape: Shape) -> bool:
    """Return whether the fault's slots have no other fault, and the fault leaves its stage a
    healthy node. With one replica, or near a loss, no other guilty fault is allowed anywhere."""
    recovery = REGISTRY_RECOVERY if fault.slot == REGISTRY else RECOVERY
    near = [
        other
        for other in others
        if other.end + (LOSS_RECOVERY if other.kind in LOSSES else recovery) > fault.at
    ]
    if any(not other.slots.isdisjoint(fault.slots) for other in near):
        return False
    if fault.blame == "innocent":
        return True
    guilty = [other for other in near if other.blame == "guilty"]
    if shape.replicas == 1 or any(other.kind in LOSSES for other in (fault, *guilty)):
        return not guilty
    ill = sum(other.stage == fault.stage for other in guilty)
    return ill < shape.replicas - 1
