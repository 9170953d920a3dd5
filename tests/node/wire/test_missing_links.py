"""Which missing links a node complains of, by its own clock."""

from collections.abc import Callable

from planaria.bootstrap.registry_pb2 import Complaint
from planaria.bootstrap.unreachable_pairs import MOST_COMPLAINTS
from planaria.node.wire.missing_links import PATIENCE, MissingLinks


def nobody(peer: str) -> str | None:
    return None


def directly(up: set[str]) -> Callable[[str], str | None]:
    return lambda peer: "" if peer in up else None


def test_a_link_that_is_needed_and_lacking_is_complained_of_until_it_is_up() -> None:
    missing, up = MissingLinks(), {"a"}
    needed = ["a", "b", "c"]
    assert not missing.look(needed, directly(up), 0.0)
    up.add("c")
    assert not missing.look(needed, directly(up), PATIENCE / 2)
    up.remove("c")
    assert missing.look(needed, directly(up), PATIENCE)
    complaints = missing.complaints()
    assert complaints == [Complaint(peer="b", relayed=False)], "c was up a moment ago"
    assert not missing.look(needed, directly(up), PATIENCE)
    up.add("b")
    assert missing.look(needed, directly(up), PATIENCE + 0.1)
    assert missing.complaints() == []


def test_it_is_news_that_another_carries_for_the_two() -> None:
    """Otherwise the registry would take a relay that works for one that doesn't."""
    missing = MissingLinks()
    missing.look(["a"], nobody, 0.0)
    assert missing.look(["a"], nobody, PATIENCE)
    assert missing.look(["a"], lambda peer: "b", PATIENCE + 1)
    assert missing.complaints() == [Complaint(peer="a", relayed=True)]
    assert not missing.look(["a"], lambda peer: "b", PATIENCE + 2)
    assert missing.look(["a"], nobody, PATIENCE + 3)
    assert missing.complaints() == [Complaint(peer="a")]


def test_who_is_needed_no_more_is_complained_of_no_more() -> None:
    missing = MissingLinks()
    missing.look(["a"], nobody, 0.0)
    assert missing.look(["a"], nobody, PATIENCE)
    assert missing.look([], nobody, PATIENCE + 1)
    assert not missing.look(["a"], nobody, PATIENCE + 2)


def test_of_many_those_are_listed_that_have_stood_for_longest_and_the_rest_is_counted() -> None:
    missing, many = MissingLinks(), [f"n{number:03}" for number in range(900)]
    missing.look(many[500:], nobody, 0.0)
    missing.look(many, nobody, 0.5)
    assert missing.look(many, nobody, PATIENCE + 0.5)
    complaints = missing.complaints()
    assert [complaint.peer for complaint in complaints] == many[500 : 500 + MOST_COMPLAINTS]
    assert missing.unlisted == 900 - MOST_COMPLAINTS
    missing.look(many[:3], nobody, PATIENCE + 1)
    assert missing.unlisted == 0
