"""The faults that a swarm gets, and their times: a pure function of a seed.

Faults are drawn one after the other. One that would leave a stage of several nodes
without a healthy one is drawn for another node, or left out: a swarm must be able to recover. The
kinds in `LOSSES` leave none, and none of the others' nodes may be ill then.
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
"""Seconds in which no fault begins, and in which all are healed."""
RECOVERY: Final = 4.0
"""Seconds from when a node is well again to when its stage may do without another."""
REGISTRY_RECOVERY: Final = 40.0
"""Seconds between two kills of the registry: it lets nobody new join until it has found out who is
there, and who waits for it gives up after 30."""
LOSS_RECOVERY: Final = 15.0
"""Seconds from when others start in the place of lost nodes to when another node may be ill."""

Blame = Literal["guilty", "innocent"]


class FaultKind(NamedTuple):
    """A kind of fault. `seconds`: range of its duration."""

    blame: Blame  # innocent: the node makes progress and does nothing wrong
    seconds: tuple[float, float]
    where: Literal["node", "registry", "everybody", "stages"] = "node"
    needs_replica: bool = False  # without one, the run pauses, as it should
    weight: float = 1.0


BLINKS: Final = {f"blink {every} s": every for every in (1, 2, 4, 9)}
"""Kinds of fault: seconds between two resets."""
LOSSES: Final = {
    kind: FaultKind("guilty", (0.0, 2.0), STAGES)
    for kind in ("lost stage", "lost neighbours", "lost stage 0", "lost driver")
}
"""Kinds of fault that leave no node of a stage."""
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
"""`kill`: SIGKILL, and another process in its place once it is healed. `stop`: SIGSTOP to SIGCONT.
`reset`: RST for what was dialled to the node. `blink ...`: the same for all, again and again.
`one way`: what was dialled to the node passes in one direction only. `cut`: the node and one that
it needs can't reach each other, and everybody else can. `lost ...`: SIGKILL at once for all nodes
of a body stage, of two body stages in a row, of stage 0; or for the driver and all nodes of the
stage after its own. Others start in their places. The others: sick_node.py."""


@dataclass(frozen=True)
class Shape:
    """The shape of a swarm, and the faults that may happen to it. `rate`: faults a minute. `seats`:
    option of each node."""

    stages: int  # of the body
    replicas: int
    kinds: Sequence[str] = tuple(KINDS)
    rate: float = 6.0
    seats: str = "auto"

    @property
    def slots(self) -> list[str]:
        return [f"{s}.{r}" for r in range(self.replicas) for s in range(self.stages + 1)]


@dataclass(frozen=True)
class Fault:
    """`at`: seconds from the first committed step; healed `seconds` later. `slot`: STAGE.REPLICA,
    REGISTRY, EVERYBODY, or STAGES until the swarm knows who serves them. `figures`: as sick_node.py
    and the proxy have them; of a loss, the `first` and the `last` stage, and whether `saves` of its
    nodes are "kept" or "gone". `others`: the slot that it is cut from; the slots lost with it."""

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
    """Faults in the order in which they begin. The same for the same arguments, on any machine.
    Raises ValueError for an unknown kind."""
    if unknown := set(shape.kinds) - KINDS.keys():
        raise ValueError(f"{min(unknown)!r} is no kind of fault: choose of {', '.join(KINDS)}")
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
    """Whether two nodes exchange messages in every step."""
    a, b = (int(name.partition(".")[0]) for name in (slot, other))
    return slot != other and related(a, b, shape.stages, swapped=False)


def _bearable(fault: Fault, others: Sequence[Fault], shape: Shape) -> bool:
    """Whether there is nothing else wrong there, and every stage keeps a node that is well. Nothing
    else is wrong with nodes around a loss."""
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
