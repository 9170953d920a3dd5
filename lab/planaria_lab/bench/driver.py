"""Processor time and bytes of control messages that a step costs its driver, by number of nodes.

The driver is the state machine as it ships, without sockets and tensors. Each message that it sends
is serialised and sealed, and each that it receives is unsealed and parsed, as on a link. Members
answer as honest ones do; their own time is not counted. The reference is the smallest swarm. The
ratio of the costs per node stays 1 if costs grow with the number of nodes, and grows if they grow
with its square. The clock is read a few times per step only, since reading it for each message
would add its own time.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import chain, islice
from random import Random
from typing import Final

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import INSTANCE_LETTERS, Identity
from planaria.node.agent import transaction_rules
from planaria.node.driver.attempting import Attempting
from planaria.node.driver.driver import Driver
from planaria.node.model.shape import model_config
from planaria.node.run_file import loads
from planaria.node.serve import collect_often
from planaria.node.transaction.effects import Effect, Send
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import seal, unseal
from planaria_lab.bench.rows import keep

STAGES: Final = 10  # with stage 0
SIZES: Final = (100, 300, 1_000, 3_000, 10_000)
A_NODE: Final = 0.4  # microbatches per node
STEPS: Final = 5
LOT: Final = 2_000  # answers that are processed at a time
GOALS: Final = {1_000: (0.05, 1.0), 10_000: (0.6, 12.0)}
"""Nodes -> goals for a step: at most so many seconds of processor time, and MB sent."""
DIGEST: Final = b"\x5a" * 32


@dataclass(frozen=True)
class Step:
    """The cost of one step at the driver."""

    seconds: float  # of processor time
    sent: int  # bytes
    received: int


@dataclass
class Drive:
    """A driver, and members that answer at once. `seats`: the seats of each stage."""

    driver: Driver
    seats: Sequence[Sequence[str]]
    spent: float = 0.0
    sent: int = 0
    received: int = 0
    waiting: list[Send] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = frozenset(self.seats[0])

    def begin(self) -> None:
        """Give the driver a view with all seats, and the answers to its queries, so that the first
        step begins."""
        members = [
            registry.Member(node=seat, seats=[registry.Seat(stage=stage)])
            for stage, seats in enumerate(self.seats)
            for seat in seats
        ]
        view = registry.View(number=1, members=members, driver=self.driver.node, reason="all")
        self._note(self.driver.viewed(view, 0.0))
        self._exchange()

    def steps(self) -> Iterator[Step]:
        """Yield the cost of each step, from its begin to the begin of the next."""
        while True:
            self.spent, self.sent, self.received = 0.0, 0, 0
            committed = self.driver.standing.committed
            while self.driver.standing.committed == committed:
                assert self.waiting, self.driver.explain()
                self._exchange()
            yield Step(self.spent, self.sent, self.received)

    def _exchange(self) -> None:
        """Deliver the driver's messages to the members, and their answers to the driver."""
        with self._counted():
            wired = [(send.to, _wired(send.message)) for send in self.waiting]
        self.sent += sum(len(data) for to, data in wired if to != self.driver.node)
        self.waiting = []
        arrived = [(node, pb.Message.FromString(unseal(data))) for node, data in wired]
        bodies = {message.WhichOneof("body") for _, message in arrived}
        answers = chain(
            self._scored() if "step" in bodies else (),
            (
                (node, answer)
                for node, message in arrived
                for answer in self._answers(node, message)
            ),
            self._homeward() if "records" in bodies else (),
        )
        while lot := list(islice(answers, LOT)):
            replies = [(node, _wired(answer)) for node, answer in lot]
            self.received += sum(len(data) for _, data in replies)
            effects: list[Effect] = []
            with self._counted():
                for node, data in replies:
                    message = pb.Message.FromString(unseal(data))
                    effects += self.driver.received(node, message, 0.0)
            self._note(effects)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.spent += time.thread_time() - began

    def _note(self, effects: Iterable[Effect]) -> None:
        self.waiting += [effect for effect in effects if isinstance(effect, Send)]

    def _answers(self, node: str, message: pb.Message) -> Iterator[pb.Message]:
        """Yield a member's answers to a message. A member that is no source votes as soon as it has
        the step, or the records if it keeps them."""
        match message.WhichOneof("body"):
            case "query":
                status = pb.Status(digest=DIGEST, seconds_per_microbatch=0.1, trained=True)
                yield pb.Message(ballot=message.ballot, status=status)
            case "step" if node not in self.ends and not message.step.begin.keeps:
                yield self._vote()
            case "records" if node not in self.ends:
                yield self._vote()

    def _scored(self) -> Iterator[tuple[str, pb.Message]]:
        """Yield the messages in which sources report their losses."""
        ballot = self.driver.ballot.message()
        for node, homes in self._homes().items():
            yield node, pb.Message(ballot=ballot, scored=pb.Scored(microbatches=homes))

    def _homeward(self) -> Iterator[tuple[str, pb.Message]]:
        """Yield the sources' messages that the last gradients are back, and their votes."""
        homes, ballot = self._homes(), self.driver.ballot.message()
        for node in self.seats[0]:
            yield from ((node, pb.Message(ballot=ballot, home=home)) for home in homes[node])
            yield node, self._vote()

    def _homes(self) -> Mapping[str, Sequence[pb.Home]]:
        """Map each source to its finished microbatches, which are all of its microbatches, since
        all are in flight at a time."""
        assert isinstance(self.driver.current, Attempting)
        homes = defaultdict[str, list[pb.Home]](list)
        for microbatch in self.driver.current.state.begin.plan:
            homes[microbatch.source].append(_home(microbatch.id, self.driver.rules.tokens))
        return homes

    def _vote(self) -> pb.Message:
        return pb.Message(ballot=self.driver.ballot.message(), ready=self._ready())

    def _ready(self) -> pb.Ready:
        return pb.Ready(
            step=self.driver.standing.committed + 1,
            squared_norm=1.0,
            finite=True,
            digest=DIGEST,
            applied=DIGEST,
            seconds_per_microbatch=0.1,
            recording=pb.LEDGER_WRITTEN,
        )


def _wired(message: pb.Message) -> bytes:
    return seal(message.SerializeToString())


def _home(microbatch: int, tokens: int) -> pb.Home:
    return pb.Home(
        microbatch=microbatch, loss=5000.0, tokens=tokens, samples=1, samples_hash=DIGEST[:16]
    )


def measure(nodes: int) -> list[Step]:
    """Return the costs of `STEPS` steps of a swarm with so many nodes."""
    run = loads(f"""
steps = 1000000
[model]
stages = {STAGES - 1}
layers = {STAGES - 1}
[training]
optimizer = "adamw"
batch = {int(nodes * A_NODE)}
microbatch = 1
validation_microbatches = 0
""")
    names = [hashlib.sha256(b"%d" % node).hexdigest()[:INSTANCE_LETTERS] for node in range(nodes)]
    seats = [[f"{name}/{stage}" for name in names[stage::STAGES]] for stage in range(STAGES)]
    driver = Driver(seats[0][0], transaction_rules(run, model_config(run.model, 512)), Random(0))
    driver.identity = Identity.generate()
    drive = Drive(driver, seats)
    drive.begin()
    return list(islice(drive.steps(), STEPS))


def main() -> None:
    collect_often()  # as a node does at its start
    heads = f"{'nodes':>6} {'s':>8} {'MB sent':>8} {'MB got':>7}"
    print(f"{heads}   a node, over the smallest")
    first: list[float] = []
    for nodes in SIZES:
        steps = map(astuple, measure(nodes))
        seconds, sent, received = map(statistics.median, zip(*steps, strict=True))
        a_node = [figure / nodes for figure in (seconds, sent, received)]
        first = first or a_node
        grows = [f"{figure / smallest:.2f}" for figure, smallest in zip(a_node, first, strict=True)]
        goal = "" if nodes not in GOALS else "   goal {} s, {:g} MB sent".format(*GOALS[nodes])
        row = f"{nodes:>6} {seconds:>8.4f}"
        row += f" {sent / 1e6:>8.3f} {received / 1e6:>7.3f}"
        print(f"{row}   {' '.join(grows)}{goal}", flush=True)
        figures = {"seconds": seconds, "sent": sent, "received": received}
        keep("driver", nodes=nodes, **figures)


if __name__ == "__main__":
    main()
