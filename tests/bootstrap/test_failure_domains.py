"""Tests of failure domains: which nodes are in one block or at one host."""

from __future__ import annotations

import pytest

from planaria.bootstrap.failure_domains import (
    NOWHERE,
    Census,
    FailureDomain,
    block_of,
)


@pytest.mark.parametrize(
    ("host", "block"),
    [
        ("203.0.113.7", "203.0.113.0/24"),
        ("::ffff:203.0.113.7", "203.0.113.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        *((host, "") for host in ("127.0.0.2", "::1", "::ffff:127.0.0.1", "a.example.org", "")),
    ],
)
def test_a_block_is_what_one_customer_has(host: str, block: str) -> None:
    assert block_of(host) == block


def test_the_block_counts_before_the_host_that_a_node_says_of_itself() -> None:
    census = Census(FailureDomain(block, host) for block, host in ("xa", "xb", "ya"))
    assert census.shared(FailureDomain("x", "a")) == (2, 2)
    assert census.shared(FailureDomain("y", "c")) < census.shared(FailureDomain("x", "c"))


def test_apart_is_who_is_in_another_block_or_at_another_host_than_the_one() -> None:
    names = [FailureDomain("x", f"{n}") for n in range(9)]
    assert Census(names).is_apart(FailureDomain("y", "0"))
    assert not Census(names).is_apart(FailureDomain("x", "else")), "in a block names cost nothing"
    assert Census(names[:1]).is_apart(FailureDomain("x", "else"))
    assert not Census([*names, FailureDomain("y")]).is_apart(FailureDomain("z")), (
        "they are in two places already"
    )
    assert not Census([NOWHERE, NOWHERE]).is_apart(NOWHERE)
    assert not Census([]).is_apart(NOWHERE)
