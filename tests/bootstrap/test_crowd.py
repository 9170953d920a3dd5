"""Who stays at the front door: decisions alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.crowd import ConnectionLimits, Crowd, block_of

ROOM = ConnectionLimits(
    connections=8,
    strangers=4,
    first_word=10,
    idle=60,
    unproven=100,
    of_block=1000,
    of_strangers=1500,
)


def test_who_comes_from_elsewhere_takes_the_place_of_the_oldest_of_many() -> None:
    crowd = Crowd(ROOM)
    assert [crowd.come(number, "192.0.2.1", 0) for number in (1, 2, 3, 4)] == [[]] * 4
    assert crowd.come(5, "198.51.100.1", 1) == [1]
    assert crowd.come(6, "198.51.100.2", 1) == [2]
    assert crowd.come(7, "192.0.2.1", 1) == [3]  # it displaces its own
    assert crowd.turned_away == 3


def test_who_has_shown_that_it_means_it_goes_last() -> None:
    crowd = Crowd(ROOM)
    for number in (1, 2, 3, 4):
        crowd.come(number, "192.0.2.1", 0)
    crowd.prove(1)
    crowd.prove(2)
    crowd.read(1, 10, 5)
    assert [crowd.come(number, "192.0.2.1", 6) for number in (5, 6)] == [[3], [4]]
    for number in (5, 6):
        crowd.prove(number)
    assert crowd.come(7, "203.0.113.1", 7) == [2]  # heard longest ago


def test_members_have_a_room_that_strangers_do_not_get() -> None:
    crowd = Crowd(ROOM)
    for number in range(1, 5):
        crowd.come(number, "192.0.2.1", 0)
        crowd.belong(number, f"node-{number}", 0)
    assert len(crowd) == 4
    went = [crowd.come(number, "192.0.2.1", 1) for number in range(5, 50)]
    assert {number for numbers in went for number in numbers} == {*range(5, 46)}
    assert crowd.overdue(1e9) == [46, 47, 48, 49]
    assert len(crowd) == 4  # members may be silent: their leases see to them


def test_a_member_speaks_by_one_connection() -> None:
    crowd = Crowd(ROOM)
    for number in (1, 2):
        crowd.come(number, "192.0.2.1", 0)
        crowd.belong(number, "node", 5)
    assert crowd.overdue(70) == [1]  # a stranger again
    crowd.go(2)
    assert len(crowd) == 0


def test_who_says_nothing_of_use_in_time_goes_however_much_it_says() -> None:
    crowd = Crowd(ROOM)
    for number in (1, 2, 3):
        crowd.come(number, "192.0.2.1", 0)
    crowd.prove(3)
    for now in range(1, 10):
        assert crowd.read(2, 1, now) == []  # it trickles
        assert crowd.overdue(now) == []
    assert crowd.overdue(10) == [1, 2]
    assert crowd.overdue(59) == []
    assert crowd.overdue(60) == [3]


def test_what_is_said_before_a_call_is_let_in_has_a_bound() -> None:
    crowd = Crowd(ROOM)
    crowd.come(1, "192.0.2.1", 0)
    crowd.read(1, 99, 0)
    assert crowd.may_say_more(1)
    crowd.read(1, 1, 0)
    assert not crowd.may_say_more(1)
    crowd.prove(1)
    assert crowd.may_say_more(1)


def test_bytes_of_strangers_have_a_bound_for_each_block_and_in_all() -> None:
    crowd = Crowd(ROOM)
    for number, host in ((1, "192.0.2.1"), (2, "192.0.2.1"), (3, "192.0.2.2"), (4, "192.0.2.3")):
        crowd.come(number, host, 0)
    assert crowd.read(1, 600, 0) == crowd.read(2, 400, 0) == []
    assert crowd.read(2, 100, 0) == [1]
    assert crowd.read(3, 900, 0) == []
    assert crowd.read(4, 101, 0) == [3]
    crowd.belong(2, "node", 0)
    assert crowd.read(2, 10**9, 0) == []


def test_a_block_is_what_one_owner_has() -> None:
    assert block_of("192.0.2.1") == block_of("::ffff:192.0.2.1") != block_of("192.0.2.2")
    assert block_of("2001:db8::1") == block_of("2001:db8::ffff:1") != block_of("2001:db8:0:1::1")


DOINGS = st.tuples(
    st.sampled_from(["come", "read", "prove", "belong", "go", "overdue"]),
    st.integers(1, 12),
    st.integers(0, 5),
)


@given(st.lists(DOINGS, max_size=80))
def test_whatever_happens_the_room_is_kept_and_nothing_is_forgotten(
    doings: list[tuple[str, int, int]],
) -> None:
    crowd, there, now, came = Crowd(ROOM), set[int](), 0.0, 0
    for what, which, much in doings:
        now += much
        went: list[int] = []
        match what:
            case "come":
                came += 1
                there.add(came)
                went = crowd.come(came, f"192.0.2.{which % 4}", now)
            case "read":
                went = crowd.read(which, 300 * much, now)
            case "prove":
                crowd.prove(which)
            case "belong":
                crowd.belong(which, f"node-{which % 5}", now)
            case "go":
                crowd.go(which)
                there.discard(which)
            case "overdue":
                went = crowd.overdue(now)
        assert {*went} <= there
        there -= {*went}
        assert len(crowd) == len(there)
        assert len(crowd._strangers) <= ROOM.strangers
        assert len(crowd) <= ROOM.connections
        assert sum(map(len, crowd._blocks.values())) == len(crowd._strangers)
        assert crowd._all_read == sum(crowd._read.values()) <= ROOM.of_strangers
        assert crowd._all_read == sum(guest.read for guest in crowd._strangers.values())
