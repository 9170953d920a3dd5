"""Record replication: which nodes store the result of each microbatch of a step. Pure.

At stage 0, a few nodes with a ledger write it there. A few nodes of other stages, each stage in
turn, keep it in memory until the next step, in case all of those are lost. So the cost of a step's
records grows neither with the nodes nor with the stages. All others have the records' hash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from itertools import zip_longest
from typing import Final

from planaria.node.transaction.routing import nodes_by_stage
from planaria.node.wire import stage_pb2 as pb

LEDGERS: Final = 8
"""Nodes of stage 0 that record a step, if it has as many."""
MEMORIES: Final = 8
"""Nodes of other stages that remember it, if there are as many."""
RANK: Final = {
    pb.LEDGER_WRITTEN: 0,
    pb.LEDGER_WRITING: 0,
    pb.LEDGER_SPARE: 1,
    pb.NO_LEDGER: 2,
    pb.LEDGER_FAILING: 3,
}
"""A node that recorded the previous steps goes on with it."""


def _best_recorders(
    count: int, nodes: Iterable[str], ledgers: Mapping[str, pb.Recording]
) -> list[str]:
    def rank(node: str) -> tuple[int, str]:
        return RANK.get(ledgers.get(node, pb.LEDGER_WRITTEN), len(RANK)), node

    return nsmallest(count, nodes, rank)


def record_holders(stages: Mapping[str, int], ledgers: Mapping[str, pb.Recording]) -> set[str]:
    """The nodes that keep a step's records. `ledgers`: the known states of ledgers."""
    by_stage = nodes_by_stage(stages)
    ledgered = _best_recorders(LEDGERS, by_stage.pop(0, []), ledgers)
    others = [_best_recorders(MEMORIES, by_stage[stage], ledgers) for stage in sorted(by_stage)]
    in_turn = [node for nodes in zip_longest(*others) for node in nodes if node is not None]
    return {*ledgered, *in_turn[:MEMORIES]}


def to_replicate(ledgers: Mapping[str, pb.Recording]) -> list[str]:
    """Nodes of stage 0 that record the last step because all ledgers with it are lost; empty: one
    has it, or no node keeps one."""
    if {pb.LEDGER_WRITTEN, pb.LEDGER_WRITING} & set(ledgers.values()):
        return []
    spare = [node for node, recording in ledgers.items() if recording == pb.LEDGER_SPARE]
    return sorted(spare)[:LEDGERS]


def unrecorded(ledgers: Iterable[pb.Recording]) -> str:
    """Why no step may begin, given the ledgers of stage 0; empty: one is written, or none is
    wanted."""
    states = set(ledgers)
    if pb.LEDGER_FAILING not in states or states & {pb.LEDGER_WRITTEN, pb.LEDGER_WRITING}:
        return ""
    return (
        "no node of stage 0 can write its ledger (--out): free space on its disk, or let another "
        "node join stage 0"
    )


def unwritten(ledgers: Collection[pb.Recording]) -> str:
    """Why the run isn't over yet, as far as ledgers go: the driver may fail at any moment, and its
    unwritten lines would be lost."""
    return "the last step is on its way to the ledger" if pb.LEDGER_WRITING in ledgers else ""
