from __future__ import annotations

import pytest

from planaria.bootstrap.escaping import misspelt
from planaria.node.wire.seat_names import name_of_host, new_identity, node_of, seat_id


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-3.example.org", "gpu-3"),
        ("planaria-stage-0-1", "planaria-stage-0-1"),
        ("böse \x1b[2J", "b-se-2J"),
        ("-x" * 40, "x" + "-x" * 19 + "-"),
        ("...", ""),
        ("", ""),
    ],
)
def test_a_host_gives_its_name_as_far_as_it_is_one(host: str, name: str) -> None:
    assert name_of_host(host) == name
    assert not name or not misspelt("name", name)


def test_nodes_of_one_name_are_told_apart_by_what_follows_it() -> None:
    first, second = new_identity("node-2.0"), new_identity("node-2.0")
    assert first != second
    assert first.startswith("node-2.0-") and len(first) == len("node-2.0-") + 6
    assert node_of(seat_id(first, "2")) == first
    assert len(new_identity("")) == 12


def test_the_id_of_a_node_with_the_longest_name_is_valid() -> None:
    name = "n" * 128
    assert not misspelt("name", name)
    assert not misspelt("node id", new_identity(name))
