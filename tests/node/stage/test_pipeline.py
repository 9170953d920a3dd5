"""What crosses between the nodes of a small swarm, with real tensors, in any order, and losses."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.node.data.corpus import Corpus
from planaria.node.ports import Priority
from planaria.node.run_file import ModelSection, RecoverySection, RunFile, TrainingSection
from planaria.node.stage.model import build_stage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.pipeline import Pipeline
from planaria.node.stage.shape import model_config
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.routing import stand_ins
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame

CPU = torch.device("cpu")
STAGES, MICROBATCHES = 2, 5
SECTION = ModelSection(dim=8, heads=2, stages=STAGES, layers=2, context=4, hidden=8)
RUN = RunFile(
    model=SECTION,
    training=TrainingSection(batch=2 * MICROBATCHES, microbatch=2, in_flight=2),
)


@pytest.fixture(scope="module")
def corpus(data) -> Corpus:
    return Corpus.open(data)


class Compute:
    """In place of the compute thread: at once, in order."""

    def run(self, task, priority=Priority.CONTROL):
        future = asyncio.get_running_loop().create_future()
        future.set_result(task())
        return future


@dataclass
class Node:
    """What the daemon is to a pipeline."""

    swarm: "Swarm"
    name: str
    stage: int
    homes: dict[int, pb.Home] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = build_stage(self.swarm.config, self.stage, 0)
        self.pipeline = Pipeline(
            *(self.name, self.stage, module, StageOptimizer(module, CPU), self.swarm.run),
            *(self.swarm.config, None if self.stage else self.swarm.corpus, CPU, Compute(), self),
        )

    def send_frame(self, peer: str, frame: Frame) -> bool:
        payload = b"".join(bytes(buffer) for buffer in frame.payload)
        frame = Frame(frame.kind, frame.ballot, frame.fields, frame.descriptors, bytearray(payload))
        self.swarm.under_way.append((self.name, peer, frame))
        return True

    def microbatch_home(self, ballot: Ballot, home: pb.Home) -> None:
        assert home.microbatch not in self.homes
        self.homes[home.microbatch] = home

    def cut_off(self, ballot: Ballot, node: str, reason: str) -> None:
        raise AssertionError(reason)

    def attempt_failed(self, ballot: Ballot, reason: str, accused) -> None:
        raise AssertionError(reason)

    def crashed(self, error: BaseException) -> None:
        raise error


class Swarm:
    """Pipelines, and what is under way between them; it arrives in the order that `chance` picks,
    and so do new plans."""

    def __init__(self, corpus: Corpus, replicas: int, chance: random.Random, run=RUN) -> None:
        self.run, self.corpus, self.chance = run, corpus, chance
        self.config = model_config(run.model, corpus.vocabulary)
        self.under_way: list[tuple[str, str, Frame]] = []
        self.plans: list[tuple[str, Ballot, pb.Begin]] = []
        self.nodes = {
            f"{stage}.{replica}": Node(self, f"{stage}.{replica}", stage)
            for stage in range(STAGES + 1)
            for replica in range(replicas)
        }
        self.lost: set[str] = set()
        self.number = 1
        self.served = {
            (microbatch, stage): f"{stage}.{microbatch % replicas}"
            for microbatch in range(MICROBATCHES)
            for stage in range(STAGES + 1)
        }

    def left(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if name not in self.lost}

    def begin(self) -> pb.Begin:
        members = [pb.Place(node=name, stage=node.stage) for name, node in self.left().items()]
        names = [member.node for member in members]
        begin = pb.Begin(step=1, members=members)
        for microbatch in range(MICROBATCHES):
            order = [1, 2] if microbatch % 2 == 0 else [2, 1]
            places = [names.index(self.served[microbatch, stage]) for stage in order]
            source = self.served[microbatch, 0]
            begin.plan.add(id=microbatch, source=source, order=order, places=places)
        return begin

    def starts(self) -> None:
        for node in self.nodes.values():
            node.pipeline.start(Ballot(1, 1), self.begin())

    def loses(self, names: set[str], mute: bool) -> bool:
        """Whether it can go on without them. `mute`: what they have sent doesn't arrive either."""
        stages = {node.stage for name, node in self.left().items() if name not in names}
        if len(stages) <= STAGES:
            return False
        before = [pb.Place(node=name, stage=node.stage) for name, node in self.left().items()]
        ahead = stand_ins(before) if self.run.recovery.masking == "spare" else {}
        self.lost |= names
        self.number += 1
        for (microbatch, stage), name in self.served.items():
            if name in names:
                left = [other for other, node in self.left().items() if node.stage == stage]
                heir = ahead.get(name)
                self.served[microbatch, stage] = (
                    heir if heir in left else left[microbatch % len(left)]
                )
        begin = self.begin()
        begin.since.CopyFrom(Ballot(1, 1).message())
        self.plans += [(name, Ballot(1, self.number), begin) for name in self.left()]
        if mute:
            self.under_way = [item for item in self.under_way if item[0] not in names]
        return True

    def _goes_on(self, name: str) -> None:
        number = next(i for i, plan in enumerate(self.plans) if plan[0] == name)
        _, ballot, begin = self.plans.pop(number)
        if name not in self.lost:
            self.nodes[name].pipeline.go_on(ballot, begin)

    async def moves(self) -> bool:
        """One thing arrives; False: nothing is under way."""
        for _ in range(3):  # what was computed is sent
            await asyncio.sleep(0)
        number = self.chance.randrange(max(1, len(self.under_way) + len(self.plans)))
        if number < len(self.under_way):
            peer, to, frame = self.under_way.pop(number)
            while frame.ballot > self.nodes[to].pipeline.ballot and to not in self.lost:
                self._goes_on(to)  # as the member holds it until then
            if to not in self.lost:
                self.nodes[to].pipeline.take(peer, frame)
        elif self.plans:
            self._goes_on(self.plans[number - len(self.under_way)][0])
        else:
            return False
        return True

    async def ends(self) -> None:
        while await self.moves():
            pass

    def gradients(self) -> list[torch.Tensor]:
        """Of each stage, summed over the nodes that are left."""
        return [
            sum(
                node.pipeline.optimizer.gradient.double()
                for node in self.left().values()
                if node.stage == stage
            )
            for stage in range(STAGES + 1)
        ]

    def check_everything_is_there_once(self) -> None:
        for stage in range(STAGES + 1):
            applied = Counter(
                microbatch
                for node in self.left().values()
                if node.stage == stage
                for microbatch in node.pipeline.applied
            )
            assert applied == Counter(range(MICROBATCHES)), f"stage {stage}"


async def undisturbed(corpus: Corpus) -> tuple[list[torch.Tensor], dict[int, pb.Home]]:
    swarm = Swarm(corpus, 1, random.Random(0))
    swarm.starts()
    await swarm.ends()
    swarm.check_everything_is_there_once()
    return swarm.gradients(), swarm.nodes["0.0"].homes


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(2, 3),
    masking=st.sampled_from(["reassign", "spare"]),
    losses=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 2), st.booleans()), max_size=3),
)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_whoever_is_lost_every_microbatch_is_in_each_gradient_once(
    corpus, seed, replicas, masking, losses
):
    async def run() -> None:
        chance = random.Random(seed)
        run = RUN.model_copy(update={"recovery": RecoverySection(masking=masking)})
        swarm = Swarm(corpus, replicas, chance, run)
        swarm.starts()
        for after, count, mute in losses:
            for _ in range(after):
                await swarm.moves()
            swarm.loses(set(chance.sample(sorted(swarm.left()), count)), mute)
        await swarm.ends()
        swarm.check_everything_is_there_once()
        expected, homes = await undisturbed(corpus)
        for found, wanted in zip(swarm.gradients(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
        for microbatch, home in homes.items():
            assert swarm.nodes[swarm.served[microbatch, 0]].homes[microbatch] == home
        await asyncio.gather(*(node.pipeline.complete(1.0) for node in swarm.left().values()))

    asyncio.run(run())


async def test_a_gradient_that_was_reduced_in_vain_is_the_nodes_own_again(corpus):
    swarm = Swarm(corpus, 2, random.Random(0))
    swarm.starts()
    await swarm.ends()
    left = swarm.nodes["1.0"].pipeline
    await left.complete(1.0)
    own = left.optimizer.gradient.clone()
    left.optimizer.gradient.fill_(3.0)  # half summed
    swarm.loses({"1.1"}, mute=True)
    await swarm.ends()
    expected, _ = await undisturbed(corpus)
    torch.testing.assert_close(swarm.gradients()[1], expected[1], rtol=1e-4, atol=1e-7)
    assert not torch.equal(left.optimizer.gradient, own)


async def test_what_was_done_ahead_is_not_done_again(corpus):
    run = RUN.model_copy(update={"recovery": RecoverySection(masking="spare")})
    swarm = Swarm(corpus, 2, random.Random(0), run)
    swarm.starts()
    await swarm.ends()
    stand_in = swarm.nodes["1.0"].pipeline
    assert stand_in.computed == MICROBATCHES  # its own, and the other's
    assert len(stand_in.applied) < MICROBATCHES
    computed = [node.pipeline.computed for node in swarm.nodes.values()]
    swarm.loses({"1.1"}, mute=True)
    await swarm.ends()
    assert [node.pipeline.computed for node in swarm.nodes.values()] == computed
    swarm.check_everything_is_there_once()
    expected, _ = await undisturbed(corpus)
    torch.testing.assert_close(swarm.gradients()[1], expected[1], rtol=1e-4, atol=1e-7)


async def test_only_what_may_have_to_be_sent_again_is_kept(corpus):
    crossings = 2 * (STAGES + 1) * MICROBATCHES
    for replicas, masking, kept in [
        (1, "reassign", 0),
        (2, "abort", 0),
        (2, "reassign", crossings),
    ]:
        run = RUN.model_copy(update={"recovery": RecoverySection(masking=masking)})
        swarm = Swarm(corpus, replicas, random.Random(0), run)
        swarm.starts()
        await swarm.ends()
        frames = sum(len(node.pipeline._sent) for node in swarm.nodes.values())
        assert frames == kept


async def test_what_a_slow_node_sends_after_others_have_its_work_changes_nothing(corpus):
    swarm = Swarm(corpus, 2, random.Random(0))
    swarm.starts()
    await swarm.moves()
    swarm.loses({"2.1"}, mute=False)
    while swarm.plans:
        swarm._goes_on(swarm.plans[0][0])
    before = swarm.gradients()
    late = Frame("gradient", Ballot(1, 1), {"microbatch": 1, "position": 0}, [], b"")
    swarm.nodes["0.1"].pipeline.take("2.1", late)
    assert all(map(torch.equal, swarm.gradients(), before))
    await swarm.ends()
    swarm.check_everything_is_there_once()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"position": 1}, "lacks or garbles 'microbatch'"),
        ({"microbatch": 99, "position": 1}, "no microbatch 99"),
        ({"microbatch": 0, "position": 7}, "position 7 of a route of 4 visits"),
        ({"microbatch": 0, "position": 0}, "position 0 of a route of 4 visits"),
        ({"microbatch": 1, "position": 1}, "by the plan goes from 0.1 to 2.1"),
    ],
)
async def test_a_bad_frame_fails_the_attempt_and_says_why(corpus, fields, reason):
    swarm = Swarm(corpus, 2, random.Random(0))
    swarm.starts()
    pipeline = swarm.nodes["1.0"].pipeline
    with pytest.raises(AssertionError, match=reason):
        pipeline.take("0.0", Frame("activation", pipeline.ballot, fields, [], b""))


async def test_who_lacks_a_microbatch_says_so_in_time(corpus):
    swarm = Swarm(corpus, 1, random.Random(0))
    swarm.starts()
    with pytest.raises(Exception, match=r"after 0.01 s microbatches \[0, 1, 2, 3, 4\] are not"):
        await swarm.nodes["1.0"].pipeline.complete(0.01)
