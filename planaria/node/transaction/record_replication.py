"""Who is told what became of each microbatch of a step. Pure.

At stage 0 a few of those who keep a ledger are told, and note it there; of the other stages a few,
in whose memory it is until the next step, for the case that all those are lost. So what a step's
records take grows neither with the nodes nor with the stages. All others have the records' hash.

The votes for a step are told to fewer, since there is one of each node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from itertools import zip_longest
from typing import Final

from planaria.node.wire import stage_pb2 as pb

LEDGERS: Final = 8
"""Nodes of stage 0 that note a step, if it has as many."""
WITNESSES: Final = 3
"""Nodes of stage 0 that are told the votes, too, and keep them for a while."""
MEMORIES: Final = 8
"""Nodes of other stages that remember it, if there are as many."""
OF_A_STAGE: Final = 2
"""Of these, at most."""
RANK: Final = {
    pb.LEDGER_WRITTEN: 0,
    pb.LEDGER_WRITING: 0,
    pb.LEDGER_SPARE: 1,
    pb.NO_LEDGER: 2,
    pb.LEDGER_FAILING: 3,
}
"""Who has noted the steps before goes on with it."""


def _first(count: int, nodes: Iterable[str], ledgers: Mapping[str, pb.Recording]) -> list[str]:
    def rank(node: str) -> tuple[int, str]:
        return RANK.get(ledgers.get(node, pb.LEDGER_WRITTEN), len(RANK)), node

    return nsmallest(count, nodes, rank)


def record_holders(stages: Mapping[str, int], ledgers: Mapping[str, pb.Recording]) -> set[str]:
    """Of these nodes, at their stages, who is told; `ledgers`: what is known of them."""
    by_stage = defaultdict[int, list[str]](list)
    for node, stage in stages.items():
        by_stage[stage].append(node)
    ledgered = _first(LEDGERS, by_stage.pop(0, []), ledgers)
    others = [_first(OF_A_STAGE, by_stage[stage], ledgers) for stage in sorted(by_stage)]
    in_turn = [node for nodes in zip_longest(*others) for node in nodes if node is not None]
    return {*ledgered, *in_turn[:MEMORIES]}


def witnesses(stages: Mapping[str, int], ledgers: Mapping[str, pb.Recording]) -> frozenset[str]:
    """Of those who take part, who is told the votes."""
    ends = [node for node, stage in stages.items() if stage == 0]
    return frozenset(_first(WITNESSES, ends, ledgers))


def to_replicate(ledgers: Mapping[str, pb.Recording]) -> list[str]:
    """Of stage 0, who is to note the last step, because all ledgers with it are lost; empty: one
    has it, or nobody keeps one."""
    if {pb.LEDGER_WRITTEN, pb.LEDGER_WRITING} & set(ledgers.values()):
        return []
    return sorted(node for node, one in ledgers.items() if one == pb.LEDGER_SPARE)[:LEDGERS]
