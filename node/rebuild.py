"""How a node without its stage's state gets one, by the method that the driver has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal

from node import stage_pb2 as pb
from node.optimizer import StageOptimizer
from node.transfer import FetchedState, StateClient
from recovery import checkfree
from recovery.decide import INEXACT

HOLDINGS: Final = {"stage0-copy": "copy", "snapshot": "snapshot", "redundant": "redundant"}
"""Methods that fetch what a node holds of another stage: the kind of the holding."""


async def fetch_sources(
    client: StateClient,
    sync: pb.Sync,
    ballot: tuple[int, int],
    deadline: float,
    on_progress: Callable[[int], None],
) -> list[FetchedState]:
    """The state of each source stage, in their order; each from all its nodes at once. Methods
    that guess get weights only. `on_progress` gets the bytes that are there. Raises TransferError.
    """
    by_stage: dict[int, list[pb.Source]] = {}
    for source in sync.sources:
        by_stage.setdefault(source.stage, []).append(source)
    there = dict.fromkeys(by_stage, 0)

    def progress(stage: int) -> Callable[[int], None]:
        def told(size: int) -> None:
            there[stage] = size
            on_progress(sum(there.values()))

        return told

    return await asyncio.gather(
        *(
            client.fetch(
                sources[0].step,
                [source.node for source in sources],
                sync.method not in INEXACT,
                deadline,
                progress(stage),
                ballot,
                HOLDINGS.get(sync.method, ""),
                stage,
            )
            for stage, sources in sorted(by_stage.items())
        )
    )


def put_in_place(
    sync: pb.Sync,
    own: int,
    states: Sequence[FetchedState],
    optimizer: StageOptimizer,
    omega: Literal["squared", "norm", "uniform"],
) -> float:
    """Give stage `own` what was fetched; returns its ω. Runs in the compute thread. What guesses
    the weights starts the optimizer afresh, as published."""
    if sync.method not in INEXACT:
        (state,) = states
        optimizer.load(state.tensors.items(), state.optimizer_step)
        return state.omega
    if len(states) == 1:
        optimizer.load([("weights", states[0].tensors["weights"])], 0)
        return states[0].omega
    before, after = states
    first, second = (source for source in sorted({source.stage for source in sync.sources}))
    if sync.method == "checkfree":
        shares = checkfree.weights_of(before.omega, after.omega, omega)
    else:
        shares = float(second - own), float(own - first)
    average = checkfree.average(before.tensors["weights"], after.tensors["weights"], *shares)
    optimizer.load([("weights", average)], 0)
    return (before.omega + after.omega) / 2
