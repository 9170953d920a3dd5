"""SPARe's controller, which reorders computation after a loss of groups (§3.2, algorithm 2).

Each group has a stack of types of work, and computes them in order of their places. Groups sum
gradients as soon as each type has been computed in some group: after `depth` places. The caller
decides what a type is: a whole shard of a data-parallel group, or one microbatch of such a shard.
It may also be one microbatch of a step; then the groups are the replicas of a stage.

All functions are pure functions of the stacks and the lost groups. scipy finds the flows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True, eq=False)
class Stacks:
    """The stacks of all groups. order[g, s] is the type that group g computes in place s: int64,
    (groups, height); a row has no type twice. alive: bool, (groups,). Gradients are summed after
    `depth` places."""

    types: int
    order: Ints
    alive: NDArray[np.bool_]
    depth: int

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= self.order.shape[1]:
            raise ValueError(f"depth {self.depth} of stacks of {self.order.shape[1]} places")

    def without(self, groups: Iterable[int]) -> Stacks:
        """Return the same stacks after a loss of these groups. Raises ValueError."""
        lost = list(groups)
        if unknown := [group for group in lost if not 0 <= group < len(self.alive)]:
            raise ValueError(f"groups {unknown} lost, of groups 0 to {len(self.alive) - 1}")
        alive = self.alive.copy()
        alive[lost] = False
        return replace(self, alive=alive)

    def covered(self) -> NDArray[np.bool_]:
        """Return whether a survivor computes each type within `depth`: bool, (types,)."""
        return self._in_places(self.depth)

    def hosted(self) -> NDArray[np.bool_]:
        """Return whether a survivor hosts each type at all: bool, (types,)."""
        return self._in_places(self.order.shape[1])

    def owners(self) -> Ints:
        """Return the group whose gradient of each type is summed, so that no type counts twice:
        the survivor that computes it first, NONE if none does within `depth`. int64, (types,)."""
        owners = np.full(self.types, NONE)
        survivors = np.flatnonzero(self.alive)[::-1]
        for place in reversed(range(self.depth)):
            owners[self.order[survivors, place]] = survivors
        return owners

    def _in_places(self, depth: int) -> NDArray[np.bool_]:
        within = np.zeros(self.types, dtype=bool)
        within[self.order[self.alive, :depth]] = True
        return within


@dataclass(frozen=True, eq=False)
class Masked:
    """The answer to a loss that training survives."""

    stacks: Stacks  # of the next steps
    patch: dict[int, int]  # missing type -> the survivor that computes it to end this step
    patch_depth: int  # most types of the patch that one survivor computes
    moves: int  # types that were moved from behind `depth` into it
    reason: str


@dataclass(frozen=True)
class WipedOut:
    """The answer to a loss that training doesn't survive: no survivor hosts these types."""

    types: tuple[int, ...]
    reason: str


def stack(hosts: Ints, parts: int = 1) -> Stacks:
    """Return the stacks at the start, with every type once in the first `parts` places.

    hosts: int64, (shards, redundancy), as `golomb.place` makes it: as many groups as shards, each
    once in every column. Each shard is cut into `parts` types (microbatches) with the same hosts:
    shard i into types i * parts to (i + 1) * parts - 1.
    """
    shards, redundancy = hosts.shape
    order = np.empty((shards, redundancy, parts), dtype=np.int64)
    units = np.arange(shards * parts).reshape(shards, parts)
    for column in range(redundancy):
        order[hosts[:, column], column] = units
    return Stacks(shards * parts, order.reshape(shards, -1), np.ones(shards, dtype=bool), parts)


def share(types: int, groups: int) -> Stacks:
    """Return stacks in which every group hosts every type. Type i comes first in group i modulo
    `groups`. Replicas of a stage are such groups: each can compute any microbatch of a step. No
    type is computed twice only if `groups` divides `types`."""
    own = [np.arange(group, types, groups) for group in range(groups)]
    rows = [np.concatenate([own[g], np.setdiff1d(np.arange(types), own[g])]) for g in range(groups)]
    return Stacks(types, np.array(rows), np.ones(groups, dtype=bool), -(-types // groups))


def reorder(stacks: Stacks, lost: Iterable[int]) -> Masked | WipedOut:
    """Return how to go on after a loss of these groups in a step computed by these stacks.

    Phase 0 checks whether every type is still computed within the present depth. The paper uses a
    matching; here the order is fixed, and every place has one type, so a look-up is enough. Phase 1
    finds the smallest depth, not below the present one, that is enough for reordered stacks. Phase
    2 finds the order of that depth with the fewest moves.
    """
    stacks = stacks.without(lost)
    unhosted = np.flatnonzero(~stacks.hosted())
    if len(unhosted):
        return WipedOut(
            tuple(unhosted.tolist()),
            f"wiped out: no survivor hosts {len(unhosted)} of {stacks.types} types, "
            f"first {unhosted[0]}",
        )
    missing = ~stacks.covered()
    if not missing.any():
        return Masked(stacks, {}, 0, 0, f"all types within {stacks.depth} places as they are")
    patch, patch_depth = assign(stacks, missing)
    reordered, moves = fewest_moves(replace(stacks, depth=shallowest(stacks)))
    return Masked(
        reordered,
        patch,
        patch_depth,
        moves,
        f"{len(patch)} types recomputed by {len(set(patch.values()))} survivors; "
        f"{moves} moves for all types within {reordered.depth} places",
    )


def shallowest(stacks: Stacks) -> int:
    """Return the smallest depth, not below the present one, in which survivors can compute every
    type if they reorder their stacks. Every type must have a surviving host."""
    types, groups, _ = _edges(stacks)
    height = int(stacks.order.shape[1])
    fewest = -(-stacks.types // int(stacks.alive.sum()))
    for depth in range(max(stacks.depth, fewest), height):
        if (_spread(stacks, types, groups, depth) != NONE).all():
            return depth
    return height


def assign(stacks: Stacks, missing: NDArray[np.bool_]) -> tuple[dict[int, int], int]:
    """Return the patch compute: missing type -> a surviving host, and the most types of one host.

    That number is as small as possible. `missing`: bool, (types,); each of these types must have a
    surviving host.
    """
    types, groups, _ = _edges(stacks)
    edges_wanted = missing[types]
    (wanted,) = np.nonzero(missing)
    depth = max(1, -(-len(wanted) // int(stacks.alive.sum())))
    while True:
        hosts = _spread(stacks, types[edges_wanted], groups[edges_wanted], depth)[wanted]
        if (hosts != NONE).all():
            return dict(zip(wanted.tolist(), hosts.tolist(), strict=True)), depth
        depth += 1


def fewest_moves(stacks: Stacks) -> tuple[Stacks, int]:
    """Reorder the stacks so that survivors compute every type within the present depth. Return the
    new stacks, and the number of types moved into that depth, which is the smallest possible.

    Raises ValueError if there is no such order.
    """
    types, groups, places = _edges(stacks)
    inside = places < stacks.depth
    # No order moves fewer types than are missing, and often one moves just these. Finding it needs
    # no costs: types inside stay where they are, and missing types go to any host.
    cheap = inside | ~stacks.covered()[types]
    hosts = _spread(stacks, types[cheap], groups[cheap], stacks.depth)
    if (hosts == NONE).any():
        hosts = _cheapest(stacks, types, groups, np.where(inside, 0.0, 1.0))
    order = stacks.order.copy()
    entering = np.flatnonzero((np.arange(stacks.types) != order[hosts, : stacks.depth].T).all(0))
    for entrant in entering:
        row = order[hosts[entrant]]
        (behind,) = np.flatnonzero(row == entrant)
        filled = next(p for p in range(stacks.depth) if hosts[row[p]] != hosts[entrant])
        row[[behind, filled]] = row[[filled, behind]]
    return replace(stacks, order=order), len(entering)


def _edges(stacks: Stacks) -> tuple[Ints, Ints, Ints]:
    """Return each type that a survivor hosts, the survivor and the place: types, groups, places."""
    groups, places = np.nonzero(np.broadcast_to(stacks.alive[:, None], stacks.order.shape))
    return stacks.order[groups, places], groups, places


def _spread(stacks: Stacks, types: Ints, groups: Ints, depth: int) -> Ints:
    """Assign as many types as possible to groups, along edges type-group, at most `depth` to each.
    Return the group of each type, or NONE: int64, (types,).

    The paper matches types with places by Hopcroft-Karp. Places of a group that may reorder them
    are interchangeable, so here they are one vertex of capacity `depth`. Dinic's algorithm finds
    the flow; with capacities of 1 it is the same algorithm.
    """
    left, right = np.arange(stacks.types), stacks.types + np.arange(len(stacks.order))
    source, sink = stacks.types + len(right), stacks.types + len(right) + 1
    tails = np.concatenate([np.full(len(left), source), types, right])
    heads = np.concatenate([left, stacks.types + groups, np.full(len(right), sink)])
    capacity = np.ones(len(tails), dtype=np.int32)
    capacity[-len(right) :] = depth
    network = csr_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(network, source, sink).flow.tocoo()
    used = (flow.data > 0) & (flow.row < stacks.types)
    hosts = np.full(stacks.types, NONE)
    hosts[flow.row[used]] = flow.col[used] - stacks.types
    return hosts


def _cheapest(stacks: Stacks, types: Ints, groups: Ints, costs: NDArray[np.float64]) -> Ints:
    """Return a group for each type, along edges type-group, with at most `stacks.depth` types for
    each group, at the lowest total cost: int64, (types,). Raises ValueError if there is none.

    This is min-cost flow, as a linear program whose vertices are integers.
    """
    edges, ones = np.arange(len(types)), np.ones(len(types))
    solution = linprog(
        costs,
        A_eq=csr_array((ones, (types, edges)), shape=(stacks.types, len(edges))),
        b_eq=np.ones(stacks.types),
        A_ub=csr_array((ones, (groups, edges)), shape=(len(stacks.order), len(edges))),
        b_ub=np.full(len(stacks.order), stacks.depth),
        method="highs-ds",
    )
    if solution.x is None:
        raise ValueError(f"no order has all types within {stacks.depth}: {solution.message}")
    chosen = solution.x > 0.5
    hosts = np.full(stacks.types, NONE)
    hosts[types[chosen]] = groups[chosen]
    return hosts
