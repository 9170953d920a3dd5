"""A small swarm in the middle of a step: attempts and the frames between them, in any order."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planaria.bootstrap.registry_pb2 import CHECKSUM, SILENT, Cause
from planaria.node.driver.spot_checks import SpotChecks
from planaria.node.ports import Priority
from planaria.node.transaction.attempt import Attempt, PassResult, StageWork, Visit, Workplace
from planaria.node.transaction.bounds import UNLIKE
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.transaction.plan_encoding import PlanDecoder, PlanEncoder
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchange, Exchanges
from planaria.node.wire.frame_format import Frame, buffers_of
from tests.harness.network import Nodes

STAGES, MICROBATCHES = 2, 5
BEGAN = Ballot(1, 1)


def vector(*parts: object) -> np.ndarray[Any, Any]:
    """uint32 [4] that follows from `parts`."""
    return np.frombuffer(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), np.uint32)


class VirtualWork:
    """The arithmetic of a stage with fingerprints for tensors. A gradient is uint32 [4], added
    modulo 2^32, so every bit of a sum shows which gradients are in it, and how often."""

    def __init__(self, node: str, stage: int) -> None:
        self.node, self.stage = node, stage
        self.gradient = np.zeros(4, np.uint32)
        self.done: Counter[str] = Counter()
        self.drop()

    def begin(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.ballot, self.evaluating = ballot, begin.kind == pb.Begin.EVALUATE
        self.gradient[:] = 0
        self.saved: dict[tuple[int, int], bytes] = {}
        self.doubles: dict[tuple[int, int], bytes] = {}
        self.homes: dict[int, pb.Home] = {}
        self.own: np.ndarray[Any, Any] | None = None
        self.touched: set[int] = set()
        self.given_up: set[int] = set()

    def drop(self) -> None:
        self.begin(NEVER, pb.Begin())

    def give_up(self, ballot: Ballot, microbatches: Collection[int]) -> list[int]:
        given_up = sorted(set(microbatches) - self.touched) if ballot == self.ballot else []
        self.given_up.update(given_up)
        return given_up

    def _takes_up(self, ballot: Ballot, visit: Visit) -> bool:
        if ballot != self.ballot or visit.microbatch in self.given_up:
            return False
        self.touched.add(visit.microbatch)
        return True

    def embed(self, ballot: Ballot, visit: Visit) -> PassResult | None:
        if not self._takes_up(ballot, visit):
            return None
        self.homes[visit.microbatch] = pb.Home(
            microbatch=visit.microbatch, samples=1, samples_hash=bytes([visit.microbatch])
        )
        return self._onward("activation", visit, bytes(vector("embedded", visit.microbatch)))

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if not self._takes_up(ballot, visit):
            return None
        x = self._decoded(peer, frame)
        if not visit.at_head:
            return self._onward("activation", visit, x)
        home = self.homes.pop(visit.microbatch)
        home.loss, home.tokens = float(vector("loss", x)[0]), 1
        if self.evaluating:
            return PassResult(home=home)
        self._add(visit.microbatch, "head", x)
        return self._onward("gradient", visit, bytes(vector("loss's", x)))._replace(home=home)

    def backward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if not self._takes_up(ballot, visit):
            return None
        x = self.saved.pop((visit.microbatch, visit.position))
        gradient = self._decoded(peer, frame)
        self._add(visit.microbatch, x, gradient)
        if visit.position > 0:
            into = bytes(vector("backward", self.stage, x, gradient))
            return self._onward("gradient", visit, into)._replace(seconds=1.0)
        return PassResult(seconds=1.0)

    def double(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if ballot != self.ballot:
            return None
        x, own = self._decoded(peer, frame), self.saved.copy()
        if frame.kind == "activation":
            done = self._onward("activation", visit, x)
            self.doubles[visit.key] = self.saved[visit.key]
        else:
            into = vector("backward", self.stage, self.doubles.pop(visit.key), x)
            done = self._onward("gradient", visit, bytes(into))
        self.saved = own
        self.done[frame.kind] -= 1
        self.done["double"] += 1
        return done

    def difference(self, first: Frame, second: Frame) -> float:
        made, made_too = (b"".join(buffers_of(frame.payload)) for frame in (first, second))
        return 0.0 if made == made_too else UNLIKE

    def keep_gradient(self) -> int:
        self.own = self.gradient.copy()
        return self.own.nbytes

    def restore_gradient(self) -> None:
        if self.own is not None:
            self.gradient[:], self.own = self.own, None

    def _decoded(self, peer: str, frame: Frame) -> bytes:
        payload = b"".join(buffers_of(frame.payload))
        if len(payload) != 16:
            raise ComplaintError(f"{frame.kind} from {peer} is damaged", [peer], CHECKSUM)
        return payload

    def _add(self, microbatch: int, *parts: object) -> None:
        self.gradient += vector("gradient", self.stage, microbatch, *parts)

    def _onward(self, kind: str, visit: Visit, x: bytes) -> PassResult:
        self.done[kind] += 1
        if kind == "activation":
            self.saved[visit.microbatch, visit.position] = x
            x = bytes(vector("forward", self.stage, x))
        onward = visit.after(kind)
        fields = {"microbatch": onward.microbatch, "position": onward.position}
        return PassResult(Frame(kind, self.ballot, fields, [], x))


class Compute:
    """A compute thread that works, and reports results, only when it is told to."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Priority, int, Callable[[], Any], Callable[[Any], None]]] = []
        self._results: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._count = 0
        self.now = 0.0

    @property
    def moves(self) -> list[Callable[[], None]]:
        """The calls that are possible now."""
        return [self._work] * bool(self._tasks) + [self._hear] * bool(self._results)

    @property
    def posted(self) -> list[Priority]:
        return [priority for priority, *_ in sorted(self._tasks, key=lambda task: task[:2])]

    def post(self, work: Any, then: Any, priority: Priority) -> None:
        self._count += 1
        heapq.heappush(self._tasks, (priority, self._count, work, then))

    def _work(self) -> None:
        _, _, work, then = heapq.heappop(self._tasks)
        try:
            self._results.append((then, work()))
        except Exception as error:  # noqa: BLE001 (`then` handles any error)
            self._results.append((then, error))

    def _hear(self) -> None:
        then, result = self._results.popleft()
        then(result)


@dataclass
class Node:
    """A node, as far as an attempt uses it."""

    swarm: Swarm
    name: str
    stage: int
    scored: Sequence[pb.Home] = ()
    homes: dict[int, pb.Home] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute = Compute()
        self.loop = Nodes()
        loop: Any = self.loop
        self.exchanges = Exchanges(self.compute, loop, self.crashed)
        self.work = self.swarm.make_work(self.name, self.stage)
        self.workplace = Workplace(
            node=self.name,
            masking=self.swarm.masking,
            filling=InFlightWindow(2, STAGES),
            work=self.work,
            compute=self.compute,
            host=self,
        )
        self.attempt: Attempt
        self.reducing: Exchange[None]

    @property
    def gradient(self) -> Any:
        """The gradient of the stage, in numpy or torch."""
        work: Any = self.work
        return work.gradient if isinstance(work, VirtualWork) else work.optimizer.gradient

    def starts(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.attempt = Attempt(self.workplace, ballot, begin)
        self.attempt.start()
        self._completes()

    def goes_on(self, ballot: Ballot, begin: pb.Begin) -> None:
        replicas = [place for place in self.attempt.begin.members if place.stage == self.stage]
        if self.reducing.done and len(replicas) > 1:
            self.compute.post(self._spoil, lambda _: None, Priority.CONTROL)
        self.reducing.cancel()
        self.attempt.go_on(ballot, begin)
        self._completes()

    def run(self) -> None:
        self.loop.catch_up()

    def _completes(self) -> None:
        self.reducing = self.exchanges.start(self.attempt.complete(self.exchanges))

    def _spoil(self) -> None:
        """Overwrites the gradient, as a sum with other replicas' would."""
        self.gradient[:] = 3

    def send(self, peer: str, item: Frame) -> bool:
        payload = bytearray().join(buffers_of(item.payload))
        self.swarm.under_way.append((self.name, peer, replace(item, payload=payload)))
        return True

    def tell_driver(self, ballot: Ballot, **body: Any) -> None:
        match body:
            case {"scored": scored}:
                self.scored = scored.microbatches
                assert not {home.microbatch for home in self.scored} & self.homes.keys()
            case {"home": home}:
                assert home.microbatch not in self.homes
                self.homes[home.microbatch] = home
            case {"compared": compared}:
                self.swarm.compared.append((self.name, compared))

    def cut_off(self, ballot: Ballot, node: str, reason: str, cause: Cause = SILENT) -> None:
        raise AssertionError(reason, [node], cause)

    def attempt_failed(self, ballot: Ballot, reason: str, accused: Sequence[str]) -> None:
        raise AssertionError(reason, accused)

    def crashed(self, error: BaseException) -> None:
        raise error


class Swarm:
    """Attempts, their compute threads, and the frames in transit between them. `chance` picks what
    happens next, and when new plans arrive."""

    def __init__(
        self,
        replicas: int,
        chance: random.Random,
        masking: bool = True,
        make_work: Callable[[str, int], StageWork] = VirtualWork,
        swapped: bool = True,
    ) -> None:
        """`swapped`: every other microbatch visits the stages in reverse order."""
        self.chance, self.masking, self.make_work = chance, masking, make_work
        self.swapped = swapped
        self.under_way: list[tuple[str, str, Frame]] = []
        self.plans: list[tuple[str, Ballot, pb.Begin]] = []
        self.nodes = {
            f"{stage}.{replica}": Node(self, f"{stage}.{replica}", stage)
            for stage in range(STAGES + 1)
            for replica in range(replicas)
        }
        self.lost: set[str] = set()
        self.compared: list[tuple[str, pb.Compared]] = []
        self.given_up: set[tuple[int, str]] = set()  # microbatch, node
        self.telling, self.heard = PlanEncoder(), {name: PlanDecoder() for name in self.nodes}
        self.began, self.number = BEGAN, 1
        self.served = {
            (microbatch, stage): f"{stage}.{microbatch % replicas}"
            for microbatch in range(MICROBATCHES)
            for stage in range(STAGES + 1)
        }

    def left(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if name not in self.lost}

    def begin(self, kind: Any = pb.Begin.TRAIN) -> pb.Begin:
        members = [pb.Place(node=name, stage=node.stage) for name, node in self.left().items()]
        names = [member.node for member in members]
        begin = pb.Begin(step=1, kind=kind, members=members)
        for microbatch in range(MICROBATCHES):
            order = [2, 1] if self.swapped and microbatch % 2 else [1, 2]
            places = [names.index(self.served[microbatch, stage]) for stage in order]
            source = self.served[microbatch, 0]
            begin.plan.add(id=microbatch, source=source, order=order, places=places)
        return begin

    def starts(self, kind: Any = pb.Begin.TRAIN, checks: SpotChecks | None = None) -> None:
        private = {} if checks is None else checks.draw(self.begin(kind))
        for name, part in self._parts(BEGAN, self.begin(kind)).items():
            part.checks.extend(private.get(name, ()))
            self.nodes[name].starts(BEGAN, part)

    def _parts(self, ballot: Ballot, begin: pb.Begin) -> dict[str, pb.Begin]:
        """Each node's part of a plan, encoded and decoded."""
        stages = {name: node.stage for name, node in self.left().items()}
        parts = {name: pb.Begin() for name in stages}
        self.telling.tell(ballot, begin, parts, stages)
        return {name: self.heard[name].whole(ballot, part) for name, part in parts.items()}

    def loses(self, names: set[str], mute: bool) -> bool:
        """Loses these nodes, if the step can go on without them; returns whether it can. `mute`:
        what they have sent doesn't arrive either."""
        stages = {node.stage for name, node in self.left().items() if name not in names}
        if len(stages) <= STAGES:
            return False
        if any(
            not self._heirs(microbatch, stage, {*names, *self.lost})
            for (microbatch, stage), name in self.served.items()
            if name in names
        ):
            return False
        self.lost |= names
        self.number += 1
        for (microbatch, stage), name in self.served.items():
            if name in names:
                left = self._heirs(microbatch, stage, self.lost)
                self.served[microbatch, stage] = left[microbatch % len(left)]
        self._plans_anew()
        if mute:
            self.under_way = [item for item in self.under_way if item[0] not in names]
        return True

    def _heirs(self, microbatch: int, stage: int, lost: set[str]) -> list[str]:
        return [
            name
            for name, node in self.nodes.items()
            if node.stage == stage and name not in lost and (microbatch, name) not in self.given_up
        ]

    def _plans_anew(self) -> None:
        begin, ballot = self.begin(), Ballot(1, self.number)
        begin.since.CopyFrom(self.began.message())
        self.plans += [(name, ballot, part) for name, part in self._parts(ballot, begin).items()]

    def relieves(self, name: str) -> None:
        """Gives other nodes of the stage the microbatches that this node hasn't begun when it is
        asked. If the others are lost by then, all nodes begin anew."""
        stage, began = self.nodes[name].stage, self.began

        def given(microbatches: list[int]) -> None:
            assert began == self.began, "that attempt is over"
            self.given_up.update((microbatch, name) for microbatch in microbatches)
            self.number += 1
            for microbatch in microbatches:
                if not (others := self._heirs(microbatch, stage, self.lost)):
                    self._begins_anew()
                    return
                self.served[microbatch, stage] = others[microbatch % len(others)]
            self._plans_anew()

        if any(n.stage == stage for other, n in self.left().items() if other != name):
            self.nodes[name].attempt.give_up(given)

    def _begins_anew(self) -> None:
        self.began = Ballot(1, self.number)
        self.given_up.clear()
        self.plans.clear()
        self.under_way.clear()
        parts = self._parts(self.began, self.begin())
        for name, node in self.left().items():
            node.homes.clear()
            node.attempt.end()
            node.reducing.cancel()
            node.starts(self.began, parts[name])

    def goes_on(self, name: str) -> None:
        number = next(i for i, plan in enumerate(self.plans) if plan[0] == name)
        _, ballot, begin = self.plans.pop(number)
        if name not in self.lost:
            self.nodes[name].goes_on(ballot, begin)

    def moves(self) -> bool:
        """Makes one random move. False: nothing is in transit, and all posted work is done."""
        happens: list[Callable[[], None]] = [
            move for node in self.left().values() for move in node.compute.moves
        ]
        happens += [node.run for node in self.left().values() if node.loop.next <= 0.0]
        happens += [self._arrives] * (len(self.under_way) + len(self.plans))
        if not happens:
            return False
        self.chance.choice(happens)()
        return True

    def _arrives(self) -> None:
        number = self.chance.randrange(len(self.under_way) + len(self.plans))
        if number >= len(self.under_way):
            self.goes_on(self.plans[number - len(self.under_way)][0])
            return
        peer, to, frame = self.under_way.pop(number)
        while to not in self.lost and frame.ballot > self.nodes[to].attempt.ballot:
            self.goes_on(to)  # the member holds the frame until then
        if to not in self.lost:
            self.nodes[to].attempt.take(peer, frame)

    def ends(self) -> None:
        while self.moves():
            pass

    def gradients(self) -> list[Any]:
        """The gradient of each stage, summed over the nodes that are left."""
        return [
            sum(node.gradient for node in self.left().values() if node.stage == stage)
            for stage in range(STAGES + 1)
        ]

    def check_everything_is_there_once(self) -> None:
        for stage in range(STAGES + 1):
            applied = Counter(
                microbatch
                for node in self.left().values()
                if node.stage == stage
                for microbatch in node.attempt.applied
            )
            assert applied == Counter(range(MICROBATCHES)), f"stage {stage}"
        for node in self.left().values():
            assert node.reducing.done
            node.reducing.result()

    def check_homes_are_those_of(self, other: Swarm) -> None:
        for microbatch, home in other.nodes["0.0"].homes.items():
            assert self.nodes[self.served[microbatch, 0]].homes[microbatch] == home


@lru_cache(maxsize=4)
def undisturbed(
    make_work: Callable[[str, int], StageWork] = VirtualWork, swapped: bool = True
) -> Swarm:
    """A swarm of one node a stage that has computed the whole step. Callers must not change it."""
    swarm = Swarm(1, random.Random(0), make_work=make_work, swapped=swapped)
    swarm.starts()
    swarm.ends()
    swarm.check_everything_is_there_once()
    return swarm
