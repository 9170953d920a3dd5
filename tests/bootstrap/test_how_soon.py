"""Tests of promised times, on clocks that only the test advances."""

from __future__ import annotations

import pytest

from planaria.bootstrap.effects import Evict, Issue
from planaria.bootstrap.leader_election import LOOK
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.service import FAREWELL, TICK
from planaria.bootstrap.store import LEASE, RENEWALS, Store
from tests.bootstrap.conftest import KEY, RULES, identity, joining
from tests.bootstrap.fake_etcd import FakeEtcd
from tests.membership import join

PROMISED = 5.0
"""Seconds until a banned node is gone, and until another registry leads."""


def test_who_is_banned_is_no_member_from_that_moment_on() -> None:
    """The view without it is issued before any tick. Its open streams end after `FAREWELL`."""
    machine = Membership(RULES, KEY)
    for node in ("a", "b"):
        join(machine, joining(node, f"{node}:1"), 7.0)
    machine.bar([identity("b").instance])
    effects = machine.evict("b", "banned by the run's operator", 7.0)
    assert [effect.node for effect in effects if isinstance(effect, Evict)] == ["b"]
    [issued] = [effect.view for effect in effects if isinstance(effect, Issue)]
    assert [member.node for member in issued.members] == ["a"]
    assert list(issued.banned) == [identity("b").instance]
    assert FAREWELL + TICK < PROMISED


@pytest.mark.parametrize("out_of_step", [0.0, 0.1, 0.3, 0.49])
def test_another_registry_leads_soon_after_the_last_word_of_one_that_is_gone(
    out_of_step: float,
) -> None:
    etcd = FakeEtcd()
    first, second = (Store(etcd.link(), "r", KEY, at, lambda: etcd.now) for at in ("a:1", "b:1"))
    assert first.campaign()
    for _ in range(4):
        etcd.passes(LEASE / RENEWALS)
        first.renew()
    heard = etcd.now
    etcd.passes(out_of_step)
    while second.leader() or not second.campaign():
        etcd.passes(LOOK)
    assert second.leads and not first.leads
    assert LEASE <= etcd.now - heard <= LEASE + LOOK < PROMISED
