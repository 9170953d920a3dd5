"""Replicas that sum their gradients, over a network that delivers frames in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

import torch
from conversing import Nodes, Slow

from planaria.bootstrap.registry_pb2 import Member, View
from planaria.node.averaging.averaging import Averaging
from planaria.node.averaging.coding import Averaged, Coding, ReductionRound
from planaria.node.averaging.evidence import Signing
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import tensors
from planaria.node.wire.exchange import Exchange
from planaria.node.wire.frames import Frame
from tests.bootstrap.conftest import identity

BALLOT = Ballot(3, 1)
SHAPES = (3,), (30, 2), (1,), (40, 2)
"""Pieces of seven values have four rows of these matrices at most: six factors of rank one."""


def view_of(nodes: Sequence[str]) -> View:
    """A view with the keys of these nodes."""
    return View(run="run", members=[Member(node=n, key=identity(n).public) for n in nodes])


class Network:
    """Delivers frames in an order drawn from `seed`, as copies made when they are delivered.

    `passes` is asked for each frame; a frame that doesn't pass is gone.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        codec: Averaged = "none",
        seed: int = 0,
        after: int = 0,
        signed: bool = False,
    ) -> None:
        self.random, self.after, self.signed = random.Random(seed), after, signed
        self.time = Nodes()
        self.in_flight: list[tuple[str, str, Frame]] = []
        self.exchanges = {node: self.time.new(Slow(self.time, self.random)) for node in nodes}
        self.view = view_of(nodes)
        self.nodes = {node: self._node(node, codec) for node in nodes}
        self.passes: Callable[[str, str, Frame], bool] = lambda source, target, frame: True

    def signing(self, node: str) -> Signing:
        return Signing(identity(node), self.view)

    def _node(self, node: str, codec: Averaged) -> Averaging:
        def send(peer: str, frame: Frame) -> bool:
            if peer not in self.nodes:
                return False
            self.in_flight.append((node, peer, frame))
            self.time.after(self.random.random() / 1000, self._deliver)
            return True

        coding = Coding(tensors, codec, 0.25, self.after, shapes=SHAPES)
        signing = partial(self.signing, node) if self.signed else None
        return Averaging(self.exchanges[node], send, coding, signing=signing)

    def _deliver(self) -> None:
        index = self.random.randrange(len(self.in_flight))
        source, target, frame = self.in_flight.pop(index)
        if self.passes(source, target, frame):
            self.nodes[target].on_frame(source, copied(frame))

    def start(self, node: str, ballot: Ballot, *arguments: Any, **terms: Any) -> Exchange[None]:
        self.nodes[node].hurry(ballot)
        return self.exchanges[node].start(
            reduced(self.nodes[node], node, ballot, *arguments, **terms)
        )

    def reduce(self, node: str, *arguments: Any) -> None:
        self.time.outcome(self.start(node, *arguments))


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


def copied(frame: Frame) -> Frame:
    assert isinstance(frame.payload, tuple)
    return Frame.parse(frame.head(), bytearray().join(frame.payload))


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
    """Every node's outcome: None or what it raised."""
    exchanges = start_all(network, values, ids, non_finite=non_finite)
    return [network.time.error(one) for one in exchanges]


def first_failure(network: Network, exchanges: Sequence[Exchange[None]]) -> Exception | None:
    """The others, who would wait for the one that failed, are cancelled."""
    while network.time.step():
        for one in exchanges:
            if one.done and (error := network.time.error(one)) is not None:
                for other in exchanges:
                    other.cancel()
                return error
    return next(filter(None, map(network.time.error, exchanges)), None)
