"""Whole clusters whose links are mostly dialled on demand, and rest soon after."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from planaria.bootstrap import neighbours
from planaria.bootstrap.registry_pb2 import Member, View
from planaria.node import node
from planaria.node.wire.connection import Link
from simulation import links
from simulation.scenario import run


def few(own: Member, view: View, stages: int, swapped: bool) -> list[str]:
    """All needed links of the driver, of nodes in relays and of nodes that only dial out; about
    half of the others."""
    needed = neighbours.to_link(own, view, stages, swapped)
    carrying = {node for relay in view.relays for node in (relay.a, relay.b, relay.via)}
    return [
        peer
        for peer in needed
        if view.driver in (own.node, peer)
        or not own.address
        or peer in carrying
        or Random(" ".join(sorted((own.node, peer)))).random() < 0.5
    ]


def test_invariants_hold_where_links_rest_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rested, rest = Counter[str](), Link._rest

    def count(link: Link, why: str) -> None:
        rested[link.peer] += 1
        rest(link, why)

    monkeypatch.setitem(links.CHANGED, "rest", 0.6)
    monkeypatch.setattr(node, "to_link", few)
    monkeypatch.setattr(Link, "_rest", count)
    for seed in range(4):
        run(seed)
    assert rested.total() > 100
