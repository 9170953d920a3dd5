"""Tests of nodes whose devices lack memory for microbatches that are sent to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planaria.node.data.corpus import Corpus
from planaria.node.launch.errors import NodeError
from planaria.node.report.ledger import audit
from planaria.node.stage.work import TorchWork
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.small import small

RUN = small(steps=12, training__batch=12, training__validation_microbatches=0)


def shrink(node: OneSeat, room: int) -> TorchWork:
    """Limit the memory of the node's device to so many microbatches from now on."""
    assert node.seat is not None
    work = node.seat.arithmetic.work
    assert isinstance(work, TorchWork)
    blocks = work._blocks

    def blocks_if_there_is_room(x: torch.Tensor) -> torch.Tensor:
        if len(work._attempt.saved) >= room:
            torch.empty(1 << 48)  # more than the address space
        return blocks(x)

    work._blocks = blocks_if_there_is_room
    return work


async def test_a_node_with_room_for_one_microbatch_costs_no_attempt_and_nobody_is_accused(
    corpus: Corpus, tmp_path: Path
) -> None:
    async with LocalSwarm(RUN, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        work = shrink(swarm.nodes[1, 0][0], room=1)
        await swarm.until(swarm.finished)
    assert work._room.most == 1
    assert not swarm.lines.events("aborted")
    assert not swarm.lines.events("accused")
    assert audit(tmp_path).exact


async def test_a_node_without_room_for_one_ends_and_says_what_to_set(
    corpus: Corpus, tmp_path: Path
) -> None:
    async with LocalSwarm(RUN, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        node = swarm.nodes[1, 0][0]
        shrink(node, room=0)
        with pytest.raises(NodeError, match=r"cpu has no room for one microbatch: .*recompute"):
            await swarm.until(swarm.finished)
    assert not swarm.lines.events("accused")
