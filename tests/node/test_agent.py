"""Behaviour of one agent whose neighbours the test plays. tests/simulation tests whole clusters of
agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from inspect import iscoroutinefunction
from operator import attrgetter
from random import Random
from typing import Any, NoReturn

import pytest
import torch
from conversing import validate

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.node.agent import Agent, crossing_bytes, frame_bytes, held_bytes
from planaria.node.data import tokenizer
from planaria.node.model.shape import model_config
from planaria.node.ports import Ports
from planaria.node.report.events import Event, RelearnedBeside
from planaria.node.run_file import loads
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.state.holdings import Holdings
from planaria.node.state.reducing import NOTING
from planaria.node.state.stage_state import Age
from planaria.node.transaction.effects import (
    NEVER,
    Adopt,
    AllHome,
    Apply,
    AuditSum,
    Ballot,
    DropAttempt,
    Fetch,
    GoOn,
    StartAttempt,
)
from planaria.node.transaction.member import MemberPhase
from planaria.node.wire import commit_chain, tensors
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link_speed import LARGEST
from planaria.recovery.snapshot import Layout
from tests.harness.network import AtOnce, Nodes, VirtualNet

RUN = loads(
    """
[model]
dim = 8
heads = 2
hidden = 8
context = 4
stages = 2
layers = 2
[training]
batch = 2
microbatch = 1
[wire]
activations = "none"
gradients = "none"
"""
)
NODES = {"a": 0, "b": 1, "c": 2}
VIEW = registry.View(
    number=1,
    driver="a",
    members=[
        registry.Member(node=node, seats=[registry.Seat(stage=stage)])
        for node, stage in NODES.items()
    ],
)
ATTEMPT, NEXT = Ballot(1, 2), Ballot(1, 3)
COPIED = pb.Sync(step=1, method="replica", sources=[pb.Source(node="c", stage=1, step=1)])


class Memory:
    """The port `Record`, which notes calls for the test."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.suspected: list[str] = []
        self.replaced: list[str] = []
        self.ended: list[str] = []
        self.halts: list[pb.Halt] = []
        self.notes = False

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def committed(self, commit: pb.Commit) -> None: ...
    def recording(self) -> pb.Recording:
        return pb.LEDGER_WRITING if self.notes else pb.NO_LEDGER

    def report_changed(self) -> None: ...
    def halted(self, halt: pb.Halt) -> None:
        self.halts.append(halt)

    def suspect(
        self,
        node: str,
        why: str,
        cause: registry.Cause,
    ) -> None:
        self.suspected.append(node)

    def request_heir(self, why: str) -> None:
        self.replaced.append(why)

    def rejoin(self, reason: str) -> None:
        self.ended.append(reason)


class Seat:
    """One agent with the model of its stage. The test plays all its neighbours."""

    def __init__(self, node: str, *onlookers: str, begun: pb.Step | None = None) -> None:
        """`begun`: the step whose attempt the agent is in."""
        self.nodes = Nodes()
        self.net, self.record = VirtualNet(set(NODES) - {node}), Memory()
        config = model_config(RUN.model, vocabulary=16)
        cpu, exchanges = torch.device("cpu"), self.nodes.new()
        stage = TorchStage(NODES[node], InitialStages(RUN, config), cpu)
        ports = Ports(
            self.net,
            exchanges,
            AtOnce(),
            tensors,
            stage,
            self.record,
            Random(0),
            Identity.generate(),
        )
        self.agent = Agent(node, NODES[node], RUN, config, ports, holdings)
        self.agent.viewed(VIEW, 0.0)
        self.net.up |= {*onlookers}
        self.run()
        if begun is not None:
            self.hears("a", ATTEMPT, step=begun)

    def answered(self, peer: str) -> Any:
        """Return the last item sent, which must be for the peer."""
        to, item = self.net.sent[-1]
        assert to == peer
        return item

    def hears(self, peer: str, ballot: Ballot, **body: object) -> None:
        message = pb.Message(ballot=ballot.message(), **body)  # type: ignore[arg-type]
        self.agent.on_message(peer, message)
        self.run()

    def run(self) -> None:
        """Run the agent until it waits, and check its state."""
        self.nodes.catch_up()
        assert not self.nodes.crashes
        validate(self.agent)

    def sent_to(self, peer: str) -> list[str]:
        """Return bodies of messages and kinds of frames sent to the peer."""
        return [
            item.kind if isinstance(item, Frame) else str(item.WhichOneof("body"))
            for to, item in self.net.sent
            if to == peer
        ]


def holdings(agent: Agent) -> Holdings:
    def no_disk(*_: object) -> NoReturn:
        raise AssertionError("nothing is saved")

    return Holdings(agent, None, lambda stage: Layout([(stage + 1,)]), no_disk, None, None)


def begin(microbatches: int = 1) -> pb.Step:
    """Return the message that begins step 1, with so many microbatches through all nodes."""
    members = [pb.Place(node=node, stage=stage) for node, stage in NODES.items()]
    plan = [
        pb.Microbatch(id=number, source="a", order=[1, 2], places=[1, 2])
        for number in range(microbatches)
    ]
    return pb.Step(begin=pb.Begin(step=1, plan=plan, members=members, lr_scale=[1.0] * 3))


def activation(ballot: Ballot) -> Frame:
    """Return an activation as the embedding sends it to stage 1."""
    x = torch.ones(1, RUN.model.context or 0, 8)
    fields = {"microbatch": 0, "position": 1}
    descriptors, buffers = tensors.encode([x], "none")
    return Frame("activation", ballot, fields, descriptors, b"".join(buffers))


@pytest.mark.parametrize(
    ("began", "comes", "sent"),
    [
        (ATTEMPT, "before", ["activation"]),
        (NEXT, "before", []),
        (NEXT, "after", []),
    ],
)
def test_what_comes_before_its_attempt_is_held_and_what_is_of_an_older_one_has_no_effect(
    began: Ballot, comes: str, sent: list[str]
) -> None:
    seat = Seat("b")
    if comes == "after":
        seat.hears("a", began, step=begin())
    seat.agent.on_frame("a", activation(ATTEMPT))
    seat.run()
    assert seat.sent_to("c") == []
    if comes == "before":
        seat.hears("a", began, step=begin())
    assert seat.sent_to("c") == sent
    assert seat.agent.held.frames == []


def last_cut(seat: Seat) -> tuple[pb.Cut, Ballot]:
    """Return the `Cut` that the seat has sent to its driver last, and its ballot."""
    message = seat.answered("a")
    return message.cut, Ballot.of(message.ballot)


def flood(ballot: Ballot, count: int) -> list[Frame]:
    """Return so many activations of 1 MiB each."""
    fields = {"microbatch": 0, "position": 1}
    return [Frame("activation", ballot, fields, [], bytes(1 << 20)) for _ in range(count)]


def test_who_floods_with_frames_of_a_coming_attempt_is_accused_and_fills_nothing() -> None:
    seat = Seat("b", begun=begin())
    seat.agent.on_frame("a", activation(NEXT))
    for frame in flood(NEXT, 64):
        seat.agent.on_frame("c", frame)
        assert seat.agent.held.used <= seat.agent.crossing < 20 << 20
    seat.run()
    (cut,) = [m.cut for to, m in seat.net.sent if isinstance(m, pb.Message) and m.HasField("cut")]
    assert (cut.node, cut.cause) == ("c", registry.NUMBERS)
    assert cut.reason.startswith("c has sent more than the ")
    assert [peer for peer, _ in seat.agent.held.frames] == ["a"], "the others' are safe"


def test_who_floods_a_node_that_is_in_no_attempt_is_accused_at_the_registry() -> None:
    seat = Seat("b")
    for frame in flood(ATTEMPT, 64):
        seat.agent.on_frame("c", frame)
    assert (seat.agent.held.frames, seat.record.suspected) == ([], ["c"])


def test_who_sends_more_than_a_microbatch_has_is_accused_before_it_is_computed_on() -> None:
    seat = Seat("b", begun=begin())
    (frame,) = flood(ATTEMPT, 1)
    seat.agent.on_frame("a", frame)
    cut, _ = last_cut(seat)
    assert (cut.node, cut.cause) == ("a", registry.SHAPE)
    assert cut.reason.startswith("a sent a microbatch of 1048576 bytes, not ")


def test_what_a_run_sends_bounds_what_waits_and_every_frame() -> None:
    config = model_config(RUN.model, vocabulary=16)
    gradient = 4 * max(config.parameters)
    assert gradient < crossing_bytes(RUN, config) < LARGEST == frame_bytes(RUN, config)
    assert held_bytes(RUN, config) == crossing_bytes(RUN, config) + (256 << 20)
    large = replace(config, dim=4096, hidden=11008, layers=8 * config.stages, heads=32, kv_heads=32)
    gradient = 4 * max(large.parameters)
    assert frame_bytes(RUN, large) == gradient > 4 << 30
    assert held_bytes(RUN, large) == crossing_bytes(RUN, large) + 8 * gradient


def test_what_is_held_of_attempts_that_never_came_makes_room_before_anybody_is_accused() -> None:
    seat = Seat("b")
    for number in range(2, 12):
        for frame in flood(Ballot(1, number), 4):
            seat.agent.on_frame("c", frame)
            assert seat.agent.held.used <= seat.agent.crossing
    assert seat.record.suspected == []
    assert seat.agent.held.frames[-1][1].ballot == Ballot(1, 11)
    seat.run()


def test_a_twins_gradient_that_was_lost_with_the_link_is_sent_again() -> None:
    seat = Seat("b", begun=begin())
    lost = [Frame("twin", ballot, {}, [], b"gradient") for ballot in (Ballot(1, 1), ATTEMPT)]
    seat.net.up.remove("c")
    seat.net.demanded.clear()
    seat.agent.on_link_lost("c", "reset", lost, 1.0)
    assert seat.net.demanded == ["c"]
    seat.net.up.add("c")
    seat.agent.on_link_up("c", 1.1)
    (again,) = [item for to, item in seat.net.sent if to == "c"]
    assert isinstance(again, Frame)
    assert (again.kind, again.ballot) == ("twin", ATTEMPT)


def test_an_activation_that_was_lost_with_the_link_is_the_drivers_affair() -> None:
    seat = Seat("b", begun=begin())
    seat.agent.on_link_lost("c", "reset", [activation(ATTEMPT)], 1.0)
    cut, ballot = last_cut(seat)
    assert (cut.node, ballot) == ("c", ATTEMPT)
    assert "broke before a frame was delivered: reset" in cut.reason


def test_who_sent_what_ended_a_link_is_accused_at_the_driver() -> None:
    seat = Seat("b", begun=begin())
    why = "c sent an invalid message: the checksum of a chunk of frame 3 is not that sent"
    seat.agent.on_link_lost("c", why, [], 1.0, registry.CHECKSUM)
    assert last_cut(seat)[0] == pb.Cut(node="c", reason=why, cause=registry.CHECKSUM)


def test_a_state_that_is_saved_when_it_leaves_is_the_one_saved_with_its_commit() -> None:
    """So it isn't written again."""
    seat, saved = Seat("b", begun=begin()), []
    agent, member = seat.agent, seat.agent.member
    agent.holdings.save = lambda state, *_, **__: saved.append(replace(state, tensors={}))
    commit = pb.Commit(step=1, ballot=ATTEMPT.message(), clip_scale=[1.0], lr_scale=[1.0])
    member.committed, member.last, member.changing = 1, commit, True
    agent.carry_out([Apply(commit)])
    seat.nodes.outcome(agent.exchanges.start(agent.own_saves.save_now()))
    assert [state.id.step for state in saved] == [1, 1]
    assert saved[0] == saved[1]


def test_what_a_leaving_driver_deposits_has_the_step_that_it_has_just_committed() -> None:
    seat, deposited = Seat("a"), []
    agent, member = seat.agent, seat.agent.member

    async def deposit(holders: Iterable[str]) -> str:
        deposited.append(member.committed)
        return "b"

    agent.holdings.deposit = deposit
    member.phase, member.attempt = MemberPhase.READY, ATTEMPT
    member.promised = agent.driver.ballot = NEXT
    commit = pb.Commit(step=1, ballot=ATTEMPT.message(), clip_scale=[1.0], lr_scale=[1.0])
    commit.previous = commit_chain.head(member.last, member.lineage)
    agent.carry_out([NEXT.send("a", step=pb.Step(commit=commit))])
    seat.nodes.outcome(agent.exchanges.start(agent.own_saves.deposit()))
    assert deposited == [1]


def test_a_save_leaves_it_known_that_checkpoints_fail() -> None:
    own = Seat("b").agent.own_saves
    own.failed("checkpoint", "the shared folder is full")
    own.failed("save", "the disk is full")
    own.saved("save", Age(0, 5))
    assert own.trouble == "the shared folder is full"
    own.saved("checkpoint", Age(0, 10))
    assert own.trouble == ""


def test_the_loss_of_a_link_to_no_member_changes_nothing() -> None:
    seat = Seat("b", begun=begin())
    before = len(seat.net.sent)
    seat.agent.on_link_lost("stranger", "reset", [activation(ATTEMPT)], 1.0)
    assert len(seat.net.sent) == before
    assert seat.agent.member.phase is MemberPhase.RUNNING


def test_what_an_agent_tells_itself_takes_no_link() -> None:
    seat = Seat("a")
    assert seat.agent.member.promised == Ballot(1, 1)  # it asked itself, too
    assert seat.sent_to("a") == []
    assert seat.sent_to("b") == seat.sent_to("c") == ["query"]
    seat.hears("b", Ballot(1, 1), status=pb.Status())
    assert seat.agent.driver.explain().endswith("waiting for the status of c")


def test_nobody_votes_for_a_step_before_the_last_one_is_in_its_ledger() -> None:
    seat = Seat("b")
    seat.record.notes = True
    seat.hears("a", ATTEMPT, step=begin(microbatches=0))
    seat.nodes.sleep(2.0)
    assert "ready" not in seat.sent_to("a")
    seat.record.notes = False
    seat.nodes.sleep(2 * NOTING)
    assert seat.sent_to("a")[-1] == "ready"


class Lesson:
    """Stand-in for background relearning: it offers 2 updates and has nothing to do."""

    over, left = False, 3
    updates, steps, seconds = 2, 1, 0.5

    def goes_on(self) -> None: ...

    def update(self) -> bool:
        return False

    update_if_due = update

    def offer(self) -> tuple[int, int]:
        return 2, self.left


def test_a_stage_that_relearns_votes_when_it_hears_that_all_is_home() -> None:
    seat: Any = Seat("b")
    seat.agent.gaps.task = Lesson()
    seat.hears("a", ATTEMPT, step=begin(microbatches=0))
    seat.nodes.sleep(2.0)
    assert "ready" not in seat.sent_to("a")
    seat.hears("a", ATTEMPT, reduce=pb.Reduce())
    seat.nodes.sleep(2.0)
    message = seat.answered("a")
    assert (message.ready.relearned, message.ready.relearning) == (2, 3)


@pytest.mark.parametrize("why", ["another state", "another replica", "not finite"])
def test_a_stage_whose_lesson_ends_early_relearns_no_more(why: str) -> None:
    seat: Any = Seat("b")
    lesson = seat.agent.gaps.task = Lesson()
    seat.agent.gaps.begin(lesson)
    assert seat.agent.member.relearning == 3
    step = begin(microbatches=0)
    if why == "another replica":
        step.begin.members.add(node="d", stage=1)
    if why == "another state":
        seat.hears("a", ATTEMPT, sync=COPIED)
    else:
        lesson.over = why == "not finite"
        seat.hears("a", ATTEMPT, step=step)
        seat.hears("a", ATTEMPT, reduce=pb.Reduce())
    assert (seat.agent.gaps.task, seat.agent.member.relearning) == (None, 0)
    (ended,) = [event for event in seat.record.events if isinstance(event, RelearnedBeside)]
    assert ended.reason


@pytest.mark.parametrize("skipped", [False, True])
def test_a_skipped_step_leaves_the_error_feedback_of_the_step_before(skipped: bool) -> None:
    """Feedback of a skipped step may not be finite: all later gradients would have its NaN."""
    seat = Seat("b")
    feedback, gradient = seat.agent.averaging.feedback, seat.agent.arithmetic.gradient
    feedback.row = torch.ones_like(gradient)
    seat.hears("a", ATTEMPT, step=begin(microbatches=0))
    feedback.begin(ATTEMPT, gradient).fill_(torch.nan)
    seat.hears("a", ATTEMPT, reduce=pb.Reduce())
    scales = [1.0] * 3
    commit = pb.Commit(
        step=1,
        ballot=ATTEMPT.message(),
        skipped=skipped,
        clip_scale=scales,
        lr_scale=scales,
        previous=commit_chain.head(pb.Commit(), 0),
    )
    seat.hears("a", NEXT, step=pb.Step(commit=commit))
    assert seat.agent.member.committed == 1
    assert bool(feedback.row.isfinite().all()) == skipped


FORGET = "reducing.forget holdings.forget"
EXCHANGES = "averaging auditor states crossings relearning holdings"


@pytest.mark.parametrize(
    ("happens", "parts"),
    [
        (
            StartAttempt(NEXT, begin().begin),
            f"{FORGET} holdings.attempt_begins gaps.attempt_begins",
        ),
        (
            GoOn(NEXT, begin().begin),
            f"{FORGET} holdings.choose_holders gaps.attempt_begins attempt.go_on",
        ),
        (DropAttempt(ATTEMPT), f"{FORGET} holdings.dropped attempt.drop"),
        (AllHome(ATTEMPT), "attempt.hurry reducing.hurry"),
        (
            Apply(pb.Commit(step=1)),
            "feed.gradients.forget reducing.answer_audit holdings.before_commit",
        ),
        (AuditSum(ATTEMPT, 1, (), {}), "reducing.audit"),
        (Adopt(ATTEMPT), "feed.adopt"),
        (Fetch(NEXT, COPIED), "feed.gradients.forget gaps.end fetching.cancel"),
        (
            lambda agent: agent.on_link_lost("c", "reset", [], 1.0),
            " ".join(f"{part}.on_peer_lost" for part in EXCHANGES.split())
            + " member.link_lost driver.link_lost",
        ),
        (lambda agent: agent.on_link_up("c", 1.0), "driver.link_up outbox.linked"),
        (
            lambda agent: agent.tick(1.0),
            "driver.tick observers.pins.expire serving.tick outbox.tick own_saves.tick",
        ),
        (lambda agent: agent.viewed(VIEW, 1.0), "member.viewed driver.viewed"),
    ],
)
def test_each_part_hears_of_what_concerns_it(
    happens: Any, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = Seat("b", begun=begin())
    seat.agent.fetching = seat.agent.exchanges.start(seat.agent.exchanges.sleep(60.0))
    heard: set[str] = set()

    async def nothing() -> None: ...

    for part in parts.split():
        owner, _, name = part.rpartition(".")
        is_work = iscoroutinefunction(attrgetter(part)(seat.agent))

        def hears(*_: object, part: str = part, is_work: bool = is_work) -> Any:
            heard.add(part)
            return nothing() if is_work else ()

        monkeypatch.setattr(attrgetter(owner)(seat.agent), name, hears)
    if callable(happens):
        happens(seat.agent)
    else:
        seat.agent.carry_out([happens])
    assert heard == {*parts.split()}


def test_who_lacks_what_is_home_says_so_when_its_time_is_up() -> None:
    seat = Seat("b", begun=begin())
    seat.hears("a", ATTEMPT, reduce=pb.Reduce())
    seat.nodes.sleep(RUN.swarm.progress + 1)
    assert seat.sent_to("a")[-1] == "failed"


def test_who_gets_another_state_drops_its_error_feedback() -> None:
    """The feedback is of gradients of the state before."""
    seat = Seat("b")
    seat.agent.averaging.feedback.row = torch.ones_like(seat.agent.arithmetic.gradient)
    seat.hears("a", ATTEMPT, sync=COPIED)
    assert seat.agent.averaging.feedback.row is None


def test_who_gets_another_state_accounts_for_no_pass_of_its_last_attempt() -> None:
    """The driver would take these passes for some of the attempt that runs meanwhile."""
    seat = Seat("b", begun=begin())
    seat.agent.on_frame("a", activation(ATTEMPT))
    seat.hears("a", ATTEMPT, inquiry=pb.Inquiry())
    assert len(seat.answered("a").account.done) == 1
    seat.agent.reducing.forget(NEXT)  # it has voted, and applied the commit
    seat.agent.member.phase = MemberPhase.IDLE
    followed = pb.Sync()
    followed.CopyFrom(COPIED)
    followed.follow = True
    seat.hears("a", NEXT, sync=followed)
    seat.hears("a", NEXT, inquiry=pb.Inquiry())
    assert not seat.answered("a").account.done


def asked(seat: Seat) -> pb.StateManifest:
    """Return the manifest that the seat sends a joiner which wants its state."""
    seat.hears("c", ATTEMPT, state_request=pb.StateRequest(transfer=1, optimizer=True, stage=1))
    manifest: pb.StateManifest = seat.answered("c").state_manifest
    return manifest


def test_what_a_node_that_hangs_has_is_copied_if_it_is_what_it_has_told_of_it() -> None:
    seat = Seat("b")
    seat.hears("a", Ballot(1, 1), query=pb.Query())
    seat.agent.compute_hangs("forward takes 9 s")
    assert asked(seat).size > 0
    seat.hears("a", Ballot(1, 1), inquiry=pb.Inquiry(replace="it hangs"))
    assert (seat.record.replaced, seat.record.ended) == (["it hangs"], [])


@pytest.mark.parametrize("asking", ["joiner", "driver"])
@pytest.mark.parametrize("how", ["damaged", "out of reach"])
def test_a_node_that_hangs_and_has_nothing_fit_to_be_copied_goes_at_once(
    asking: str, how: str
) -> None:
    seat = Seat("b")
    seat.hears("a", Ballot(1, 1), query=pb.Query())
    if how == "damaged":
        seat.agent.arithmetic.tensors["weights"].view(torch.int32)[3] ^= 1 << 20
    else:
        seat.agent.member.changing = True
    seat.agent.compute_hangs("forward takes 9 s")
    if asking == "joiner":
        assert asked(seat).error
    else:
        seat.hears("a", Ballot(1, 1), inquiry=pb.Inquiry(replace="it hangs"))
    assert seat.record.replaced == []
    assert f"its state is {how}, so the node leaves" in seat.record.ended[0]
    seat.agent.compute_hangs("")
    seat.agent.member.changing = False
    assert asked(seat).size > 0, "it goes on"


def test_that_a_run_is_finished_is_told_once() -> None:
    """A driver gathers and halts again whenever a member leaves."""
    seat = Seat("b")
    stopped, finished = pb.Halt(step=3, reason="too few"), pb.Halt(step=4, finished=True)
    for round, halt in enumerate([stopped, stopped, finished, finished]):
        ballot = Ballot(1, 2 + round)
        seat.hears("a", ballot, query=pb.Query())
        seat.hears("a", ballot, halt=halt)
    assert seat.record.halts == [stopped, stopped, finished]


def test_a_run_that_can_not_go_on_is_saved_when_it_halts() -> None:
    """Its operator may stop it or change its settings then, which waits for saves."""
    seat, saved = Seat("b"), list[int]()
    seat.agent.holdings.save = lambda state, *_, **__: saved.append(state.id.step)
    seat.agent.member.committed = 3
    seat.hears("a", Ballot(1, 2), query=pb.Query())
    seat.hears("a", Ballot(1, 2), halt=pb.Halt(step=3, reason="paused: 3 steps were skipped"))
    assert saved == [3]


def looked_at(seat: Seat, x: torch.Tensor, head: bool = False, step: int = 0) -> Frame:
    """Return the seat's answer to an observer that sends `x` to be evaluated."""
    descriptors, payload = tensors.encode([x], "none")
    fields = {"transfer": 7, "head": head, "step": step}
    return answered(seat, Frame("state", NEVER, fields, descriptors, payload))


def answered(seat: Seat, frame: Frame) -> Frame:
    seat.agent.observers.compute("b/?1", frame)
    seat.run()
    answer = seat.answered("b/?1")
    assert isinstance(answer, Frame)
    assert answer.fields["transfer"] == 7
    return answer


def test_an_onlooker_sees_what_a_stage_makes_of_something_and_changes_nothing() -> None:
    for node, shown, head, shape in (
        ("a", torch.tensor([[1, 2, 3]]), False, (1, 3, 8)),
        ("b", torch.ones(1, 3, 8), False, (1, 3, 8)),
        ("a", torch.ones(1, 3, 8), True, (1, 1, 16)),
    ):
        seat = Seat(node, "b/?1")
        before = seat.agent.arithmetic.digest()
        (seen,) = looked_at(seat, shown, head).descriptors
        assert (seen.dtype, seen.shape) == ("float32", shape)
        assert seat.agent.arithmetic.digest() == before
        assert float(seat.agent.arithmetic.gradient.abs().sum()) == 0.0


def test_an_onlooker_gets_files_of_the_tokenizer_part_by_part(monkeypatch, tmp_path) -> None:
    seat = Seat("a", "b/?1")
    text = b"{}" * (tokenizer.PART // 2 + 1)
    (tmp_path / "tokenizer.json").write_bytes(text)
    monkeypatch.setattr(seat.agent.arithmetic, "_folders", [tmp_path / "nothing", tmp_path])

    def given(file: object, first: object) -> Frame:
        fields = {"transfer": 7, "file": file, "first": first}
        return answered(seat, Frame("state", NEVER, fields, [], ()))

    parts = [given("tokenizer.json", first) for first in (0, tokenizer.PART, len(text))]
    assert b"".join(bytes(part) for frame in parts for part in frame.payload) == text
    assert not any(map(bytes, given("chat_template.jinja", 0).payload)), "there is none"
    for file, first in (("../x", 0), ("train-00000.bin", 0), ("tokenizer.json", -1), (["a"], 0)):
        assert "is no part of a file" in given(file, first).fields["error"]


def test_what_is_asked_of_a_step_is_computed_with_the_weights_that_it_had() -> None:
    seat = Seat("b", "b/?1")
    agent, shown = seat.agent, torch.ones(1, 3, 8)
    agent.member.committed = 5
    weights = agent.arithmetic.tensors["weights"]
    then = looked_at(seat, shown, step=5)
    assert "isn't available" in looked_at(seat, shown, step=6).fields["error"]
    agent.observers.pins.want("b/?1", 5, 1.0)
    agent.observers.pins.keep(agent.own_state(), 6, 1.0)()
    weights.mul_(2.0)
    agent.member.committed = 6
    assert looked_at(seat, shown).payload != then.payload
    again = looked_at(seat, shown, step=5)
    assert [bytes(part) for part in again.payload] == [bytes(part) for part in then.payload]
    assert again.fields["made"] == then.fields["made"]
    agent.observers.pins.forget("b/?1")
    agent.tick(2.0)
    assert agent.arithmetic._other is None, "it is kept for nobody"


@pytest.mark.parametrize(
    ("node", "shown", "why"),
    [
        ("a", torch.tensor([[1, 16]]), "outside the vocabulary of 16"),
        ("a", torch.ones(1, 3, 8), "can't evaluate"),
        ("b", torch.ones(1, 3, 7), "can't evaluate"),
        ("b", torch.ones(99, 3, 8), "99 rows, not 1 to"),
        ("b", torch.ones(1, 99, 8), "99 tokens, not 1 to"),
    ],
)
def test_an_onlooker_is_told_what_a_stage_can_not_look_at(node, shown, why) -> None:
    seat = Seat(node, "b/?1")
    assert why in looked_at(seat, shown).fields["error"]
    assert not seat.agent.observers.computing_for


def test_a_step_that_will_not_be_kept_is_not_said_to_be() -> None:
    """The refused step is the newest one, whose weights are there for now."""
    seat = Seat("b")
    seat.agent.member.committed = 5

    def pinned(observer: str, step: int) -> pb.Pinned:
        seat.net.up.add(observer)
        seat.hears(observer, NEVER, pin_request=pb.PinRequest(step=step))
        pinned: pb.Pinned = seat.answered(observer).pinned
        return pinned

    assert not pinned("c/?1", 6).error
    assert not pinned("c/?2", 7).error
    refused = pinned("c/?3", 5)
    assert "try again" in refused.error
    assert not refused.kept
    seat.agent.observers.pins.forget("c/?1")
    assert pinned("c/?3", 5).kept


def test_a_run_that_has_committed_nothing_has_nothing_to_be_taken_home() -> None:
    seat = Seat("b", "c/?1")
    for step in (0, 1):
        seat.hears("c/?1", NEVER, pin_request=pb.PinRequest(transfer=3, step=step))
        assert seat.answered("c/?1").pinned == pb.Pinned(transfer=3, step=step)


def test_a_state_that_can_not_be_is_noticed() -> None:
    seat = Seat("b", begun=begin())
    validate(seat.agent)
    seat.agent.member.attempt = NEXT
    with pytest.raises(AssertionError, match=r"at .*2.*, not .*3"):
        validate(seat.agent)
    seat.agent.attempt = None
    with pytest.raises(AssertionError, match="but no attempt"):
        validate(seat.agent)
