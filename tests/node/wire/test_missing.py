"""What a node complains of, by its own clock."""

from planaria.bootstrap.cuts import MOST_COMPLAINTS
from planaria.bootstrap.registry_pb2 import Complaint
from planaria.node.wire.missing import PATIENCE, Missing


def test_a_link_that_is_needed_and_lacking_is_complained_of_until_it_is_up() -> None:
    missing, up = Missing(), {"a"}
    needed = ["a", "b", "c"]
    assert not missing.look(needed, up.__contains__, 0.0)
    up.add("c")
    assert not missing.look(needed, up.__contains__, PATIENCE / 2)
    up.remove("c")
    assert missing.look(needed, up.__contains__, PATIENCE)
    told = missing.complaints(lambda peer: peer == "b")
    assert told == [Complaint(peer="b", relayed=True)], "c was up a moment ago"
    assert not missing.look(needed, up.__contains__, PATIENCE)
    up.add("b")
    assert missing.look(needed, up.__contains__, PATIENCE + 0.1)
    assert missing.complaints(lambda peer: False) == []


def test_who_is_needed_no_more_is_complained_of_no_more() -> None:
    missing = Missing()
    missing.look(["a"], lambda peer: False, 0.0)
    assert missing.look(["a"], lambda peer: False, PATIENCE)
    assert missing.look([], lambda peer: False, PATIENCE + 1)
    assert not missing.look(["a"], lambda peer: False, PATIENCE + 2)


def test_of_many_those_are_listed_that_have_stood_for_longest_and_the_rest_is_counted() -> None:
    missing, many = Missing(), [f"n{number:03}" for number in range(900)]
    missing.look(many[500:], lambda peer: False, 0.0)
    missing.look(many, lambda peer: False, 0.5)
    assert missing.look(many, lambda peer: False, PATIENCE + 0.5)
    told = missing.complaints(lambda peer: False)
    assert [complaint.peer for complaint in told] == many[500 : 500 + MOST_COMPLAINTS]
    assert missing.unlisted == 900 - MOST_COMPLAINTS
    missing.look(many[:3], lambda peer: False, PATIENCE + 1)
    assert missing.unlisted == 0
