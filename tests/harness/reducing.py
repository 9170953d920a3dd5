"""Replicas that sum their gradients, with items that arrive in any order."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Sequence
from functools import partial
from typing import Any

import torch

from planaria.bootstrap.registry_pb2 import Member, View
from planaria.node.averaging.averaging import Averaging
from planaria.node.averaging.coding import Averaged, Coding, ReductionRound
from planaria.node.averaging.evidence import Signing
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import tensors
from planaria.node.wire.exchange import Exchange, Exchanges
from tests.bootstrap.conftest import identity
from tests.harness import network

BALLOT = Ballot(3, 1)
SHAPES = (3,), (30, 2), (1,), (40, 2)
"""Shapes of parameters. A piece of seven values has at most four rows of a matrix, so six factors
of rank one."""


def view_of(nodes: Sequence[str]) -> View:
    """A view with the keys of these nodes."""
    return View(run="run", members=[Member(node=n, key=identity(n).public) for n in nodes])


class Network(network.Network):
    """Replicas of a stage. Their items arrive in any order."""

    def __init__(
        self,
        nodes: Sequence[str],
        codec: Averaged = "none",
        seed: int = 0,
        lossless: int = 0,
        signed: bool = False,
    ) -> None:
        """`lossless`: number of steps before the codec's first one."""
        super().__init__(seed)
        self.lossless, self.signed = lossless, signed
        self.exchanges: dict[str, Exchanges] = {}
        self.view = view_of(nodes)
        for node in nodes:
            self.add(node, codec)

    def signing(self, node: str) -> Signing:
        return Signing(identity(node), self.view)

    def add(self, node: str, codec: Averaged) -> None:
        exchanges = self.exchanges[node] = self.new(self.slow())
        coding = Coding(tensors, codec, self.lossless, shapes=SHAPES)
        signing = partial(self.signing, node) if self.signed else None
        self.nodes[node] = Averaging(exchanges, partial(self.send, node), coding, signing=signing)

    def start(self, node: str, ballot: Ballot, *arguments: Any, **terms: Any) -> Exchange[None]:
        self.nodes[node].hurry(ballot)
        return self.exchanges[node].start(
            reduced(self.nodes[node], node, ballot, *arguments, **terms)
        )

    def reduce(self, node: str, *arguments: Any) -> None:
        self.outcome(self.start(node, *arguments))


def reduced(
    averaging: Averaging,
    node: str,
    ballot: Ballot,
    replicas: Sequence[str],
    gradient: torch.Tensor,
    ids: Collection[int],
    window: int,
    patience: float,
    **terms: Any,
) -> Coroutine[Any, Any, Any]:
    return averaging.reduce(
        ReductionRound(node, ballot, replicas, window, **terms), gradient, ids, patience
    )


def nodes_of(count: int) -> list[str]:
    return [f"n{number:02}" for number in range(count)]


def gradients(nodes: Sequence[str], length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) * 10.0**i for i, _ in enumerate(nodes)]


def shares(nodes: Sequence[str], window: int) -> list[list[int]]:
    return [list(range(window))[i :: len(nodes)] for i, _ in enumerate(nodes)]


def start_all(
    network: Network,
    values: Sequence[torch.Tensor],
    ids: Sequence[Sequence[int]] | None = None,
    window: int = 6,
    non_finite: bool = False,
) -> list[Exchange[None]]:
    nodes = list(network.nodes)
    ids = shares(nodes, window) if ids is None else ids
    return [
        network.start(
            node, BALLOT, nodes[::-1], gradient, share, window, 60.0, non_finite=non_finite
        )
        for node, gradient, share in zip(nodes, values, ids, strict=True)
    ]


def reduce_all(
    network: Network,
    values: Sequence[torch.Tensor],
    ids: Sequence[Sequence[int]] | None = None,
    non_finite: bool = False,
) -> list[Exception | None]:
    """Runs a sum at all nodes; returns each node's error or None."""
    exchanges = start_all(network, values, ids, non_finite=non_finite)
    errors = [network.error(exchange) for exchange in exchanges]
    network.settle()
    return errors


def first_failure(network: Network, exchanges: Sequence[Exchange[None]]) -> Exception | None:
    """The first error, or None. Cancels the others, which would wait for the failed exchange."""
    while network.step():
        for exchange in exchanges:
            if exchange.done and (error := network.error(exchange)) is not None:
                for other in exchanges:
                    other.cancel()
                return error
    return next(filter(None, map(network.error, exchanges)), None)
