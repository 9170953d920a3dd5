"""Real swarms that go on with whoever is left."""

from __future__ import annotations

import asyncio
from itertools import chain, islice
from typing import Any

import pytest
import torch

from planaria.bootstrap.neighbours import stages_of
from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit, merge
from planaria.node.stage import initial
from planaria.node.stage.arithmetic import TorchStage
from planaria.node.state.rebuild import Rebuilding
from planaria.node.state.stage_state import StageState
from planaria.node.state.transfer import StateServer
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.naming import node_of
from tests.reference import train
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.small import small

ENDLESS = 100_000
ROOMY = 3
"""As many seats as there are stages."""


def holds(node: OneSeat) -> list[int]:
    """Stages whose state it has, and of which it takes part in the step."""
    seats = node.seats.agents.values()
    return sorted(s.stage for s in seats if s.member.phase.value in ("running", "reducing"))


@pytest.mark.parametrize("policy", ["checkfree", "redundant"])
async def test_with_nobody_coming_those_who_are_left_go_on_and_give_back_what_they_took(
    corpus, tmp_path, policy
):
    run = small(stages=2, steps=ENDLESS, recovery__policy=policy)
    async with LocalSwarm(run, corpus, tmp_path, room=ROOMY) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        last = swarm.nodes[1, 0][0]
        for stage in (2, 0):
            await swarm.kill(stage, 0)
            left = [node for node, _ in swarm.nodes.values()]
            await swarm.until(lambda left=left: sorted(chain(*map(holds, left))) == [0, 1, 2])
            at = swarm.committed()
            await swarm.until(lambda at=at: swarm.committed() >= at + 3)
        for stage in (0, 2):
            swarm.start(stage, 0)
        await swarm.until(lambda: [stages_of(m) for m in last.view.members] == [[1], [0], [2]])
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
    assert audit(tmp_path).exact
    back = {(node_of(e["node"]), e["stage"]) for e in swarm.lines.events("given back")}
    assert back == {(last.node, 0), (last.node, 2)}


@pytest.mark.parametrize("policy", ["checkfree", "redundant", "checkpoint"])
async def test_a_node_that_must_go_hands_its_state_over_to_one_that_has_room(
    corpus, tmp_path, policy
):
    checkpoints = str(tmp_path / "checkpoints")
    run = small(
        stages=2,
        steps=ENDLESS,
        recovery__policy=policy,
        recovery__checkpoint__dir=checkpoints,
        recovery__checkpoint__every=2,
    )
    async with LocalSwarm(run, corpus, tmp_path, room=ROOMY) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        leaver, living = swarm.nodes.pop((2, 0))
        await leaver.retire(grace=60.0)
        leaver.stop("stopped by its owner")
        await living
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
    assert [e["stage"] for e in swarm.lines.events("handed over")] == [2]
    rebuilt = {(e["stage"], e["method"]) for e in swarm.lines.events("rebuilt")}
    assert rebuilt == {(2, "handover")}
    losses = [line["loss"] for line in merge(tmp_path.glob("ledger-*.jsonl")).lines]
    assert losses == pytest.approx(list(islice(train(run, corpus), len(losses))), rel=1e-5)
    assert audit(tmp_path).exact


async def test_an_heir_that_has_got_no_more_than_the_weights_goes_on_with_these(
    corpus, tmp_path, monkeypatch
):
    """The leaver's moments don't get through, and then its time is over."""
    run = small(stages=3, steps=ENDLESS)
    had: dict[int, torch.Tensor] = {}  # at the leaver, by step
    used: list[StageState] = []  # by the heir
    serve, take, apply = StateServer.on_message, Rebuilding._arrived_weights, TorchStage.apply

    def note_applied(stage: TorchStage, commit: pb.Commit, *how: Any) -> object:
        learned = apply(stage, commit, *how)
        if stage.stage == 2:
            had[commit.step] = stage.tensors["weights"].clone()
        return learned

    def note_used(rebuilding: Rebuilding, sync: pb.Sync) -> StageState:
        used.append(take(rebuilding, sync))
        return used[-1]

    def serve_weights(server: StateServer, peer: str, message: pb.Message) -> None:
        if message.shard_request.offset < had[1].nbytes:
            serve(server, peer, message)

    monkeypatch.setattr(TorchStage, "apply", note_applied)
    monkeypatch.setattr(Rebuilding, "_arrived_weights", note_used)
    async with LocalSwarm(run, corpus, tmp_path, room=ROOMY) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        monkeypatch.setattr(StateServer, "on_message", serve_weights)
        leaver, living = swarm.nodes.pop((2, 0))
        retiring = asyncio.create_task(leaver.retire(grace=3000.0))
        left = [node for node, _ in swarm.nodes.values()]
        seats = lambda: chain(*(node.seats.agents.values() for node in left))  # noqa: E731
        await swarm.until(lambda: any(seat.states.weights(2) for seat in seats()))
        retiring.cancel()
        leaver.client.die()
        leaver.stop("its time is over")
        await living
        monkeypatch.setattr(StateServer, "on_message", serve)
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
    [state] = used
    assert torch.equal(state.tensors["weights"], had[state.id.step])
    [ordered] = swarm.lines.events("rebuilding")[-1:]
    assert (ordered["method"], ordered["exact"], ordered["fallback"]) == ("weights", False, False)
    [rebuilt] = swarm.lines.events("rebuilt")
    assert (rebuilt["method"], rebuilt["oldest_step"]) == ("weights", state.id.step)
    assert rebuilt["step"] >= state.id.step
    assert audit(tmp_path).exact


async def test_a_standby_has_done_ahead_what_is_the_same_for_every_seat(
    corpus, tmp_path, monkeypatch, caplog
):
    """And who comes once the run has begun draws no weights that it won't need."""
    run, verified, drawn = small(stages=3, steps=ENDLESS), list[Corpus](), list[int]()
    verify = Corpus.verify_in_background
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        monkeypatch.setattr(
            Corpus, "verify_in_background", lambda data: (verified.append(data), verify(data))
        )
        monkeypatch.setattr(initial, "build_stage", lambda _, stage, *__: drawn.append(stage))
        with caplog.at_level("INFO", "planaria"):
            standby = swarm.start(None, 0)
            await swarm.until(lambda: standby.rehearsing and standby.rehearsing.done())
        assert "ready for a seat: rehearsed in" in caplog.text
        assert verified == [corpus]
        assert standby.seat is None
        await swarm.kill(2, 0)
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert standby.stage == 2
    assert not drawn
    assert audit(tmp_path).exact
