"""Who may stay at a port where others take the connections."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from planaria.bootstrap.address import Address
from planaria.bootstrap.crowd import ConnectionLimits
from planaria.bootstrap.doorkeeper import DESCRIPTORS, Doorkeeper, connections, room_beside, shut

ROOM = ConnectionLimits(connections=8, strangers=3, first_word=10.0, idle=60.0, unproven=1000)


def at(*ports: int, host: str = "10.0.0.1") -> list[Address]:
    return [Address(host, port) for port in ports]


def test_strangers_beyond_their_share_go_and_members_stay() -> None:
    keeper = Doorkeeper(ROOM, 7400)
    keeper.belong("ipv4:10.0.0.1:1", "a Control", 0.0)
    keeper.belong("ipv6:%5B::ffff:10.0.0.1%5D:2", "a Bulk", 0.0)
    here = at(1, 2, 3, 4, 5, 6, 7)
    assert keeper.saw(dict.fromkeys(here, 0), 1.0) == set(at(3, 4))
    assert keeper.saw(dict.fromkeys(at(1, 2, 4, 5, 6, 7), 0), 2.0) == set(at(4)), "still there"
    assert keeper.saw(dict.fromkeys(at(1, 2, 5, 6, 7), 0), 3.0) == set()
    elsewhere = at(9, host="10.0.0.2")
    found = dict.fromkeys([*at(1, 2, 5, 6, 7), *elsewhere], 0)
    assert keeper.saw(found, 4.0) == set(at(5)), "of who has most of the room"
    assert keeper.saw(found, 12.0) == {*at(5, 6, 7)}, "nothing has come of them"
    assert keeper.saw(dict.fromkeys(at(1, 2), 0), 1000.0) == set()
    assert len(keeper.crowd) == 2


def test_who_was_let_in_stays_while_it_speaks() -> None:
    keeper = Doorkeeper(ROOM, 7400)
    keeper.prove("ipv4:10.0.0.1:1", 0.0)
    keeper.prove("unix:/nobody", 0.0)
    assert keeper.saw(dict.fromkeys(at(1), 100), 50.0) == set()
    assert keeper.saw(dict.fromkeys(at(1), 5000), 100.0) == set()
    assert keeper.saw(dict.fromkeys(at(1), 5000), 161.0) == set(at(1))


def test_who_says_too_much_before_it_is_let_in_goes() -> None:
    keeper = Doorkeeper(ROOM, 7400)
    assert keeper.saw(dict(zip(at(1, 2), (999, 1000), strict=True)), 1.0) == set(at(2))


def test_who_has_come_since_a_look_began_is_not_taken_for_gone() -> None:
    keeper = Doorkeeper(ROOM, 7400)
    keeper.belong("ipv4:10.0.0.1:1", "a Control", 5.0)
    assert keeper.saw({}, 4.0) == set()
    assert len(keeper.crowd) == 1
    assert keeper.saw({}, 6.0) == set()
    assert len(keeper.crowd) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_of_a_port_are_found_and_ended(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((host, 0), family=family))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        port = server.getsockname()[1]
        stack.enter_context(socket.create_server((host, 0), family=family))
        made = [stack.enter_context(socket.create_connection((host, port))) for _ in range(3)]
        taken = [stack.enter_context(server.accept()[0]) for _ in made]
        made[1].sendall(b"hello")
        assert taken[1].recv(5) == b"hello"
        places = [Address(host, one.getsockname()[1]) for one in made]
        found = connections(port)
        assert list(map(found.get, places)) in ([0, 5, 0], [0, 0, 0])  # the system may not say
        assert found.keys() == set(places)
        before = len(list(DESCRIPTORS.iterdir()))
        shut(port, {places[0]})
        assert made[0].recv(1) == b""
        made[1].sendall(b"again")
        assert taken[1].recv(5) == b"again"
        assert len(list(DESCRIPTORS.iterdir())) == before


def test_strangers_have_a_small_part_of_the_room() -> None:
    for descriptors, strangers in ((None, 256), (1024, 256), (300, 100), (50, 1)):
        assert room_beside(descriptors).strangers == strangers
