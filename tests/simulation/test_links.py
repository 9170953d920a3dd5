"""The links of the simulation keep what those of the product promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame
from planaria.node.wire.link_table import NO_LINK_THERE
from planaria.node.wire.session import Refused
from simulation.links import Links
from simulation.network import SILENCE, Network
from simulation.world import Process, World


class End:
    """A node that notes what comes."""

    ended = False

    def __init__(self, network: Network, name: str) -> None:
        self.name, self.world, self.address = name, network.world, f"{name}:1"
        self.process = Process(network.world, name)
        self.cluster = SimpleNamespace(
            tampering={}, garbling={}, state_size=1.0, counts=Counter(), may_lie=lambda _: False
        )
        self.streams: dict[str, Any] = {}
        self.came: list[int] = []
        self.lost: list[str] = []
        self.ups = 0
        network.endpoints[name], network.homes[name] = self, name
        self.net = Links(self, network)  # type: ignore[arg-type]

    def admits(self, peer: str) -> bool:
        return True

    def on_link_up(self, peer: str) -> None:
        self.ups += 1

    def on_link_lost(self, peer: str, reason: str, *_: object) -> None:
        self.lost.append(reason)

    def on_message(self, peer: str, message: pb.Message) -> None:
        self.came.append(2 * message.ballot.attempt)

    def on_frame(self, peer: str, frame: Frame) -> None:
        self.came.append(2 * frame.fields["number"] + 1)


def two(seed: int) -> tuple[Network, list[End]]:
    """That are linked."""
    network = Network(World(seed))
    network.world.straggling = 0.0
    ends = [End(network, name) for name in ("a", "b")]
    view = registry.View(number=1)
    for end in ends:
        view.members.add(node=end.name, address=end.address)
    for end in ends:
        end.net.viewed(view, [other.name for other in ends if other is not end])
    ends[1].net.demand("a")  # dials cross
    pass_time(network, 1.0)
    assert [end.ups for end in ends] == [1, 1]
    return network, ends


def pass_time(network: Network, seconds: float) -> None:
    until = network.world.now + seconds
    while network.world.now < until:
        network.world.step()


def reset(network: Network) -> None:
    for connection in network.connections:
        connection.break_off(at_once=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_resets_and_blinks_all_comes_once_and_in_order(seed: int) -> None:
    network, ends = two(seed)
    chance, rounds = network.world.random, 40
    for number in range(rounds):
        for end, other in (ends, ends[::-1]):
            assert end.net.send(other.name, pb.Message(ballot=pb.Ballot(attempt=number)))
            payload = bytes(chance.randrange(500))
            assert end.net.send(other.name, Frame("probe", (0, 0), {"number": number}, [], payload))
        pass_time(network, chance.uniform(0.0, 0.02))
        if chance.random() < 0.2:
            if chance.random() < 0.5:
                reset(network)
            network.part(number, frozenset("a"), frozenset("b"), chance.random() < 0.5)
            pass_time(network, chance.uniform(0.0, 0.5))
            network.heal(number)
            pass_time(network, chance.uniform(0.0, 2.0))
        elif chance.random() < 0.2:
            reset(network)
    pass_time(network, 5.0)
    for end in ends:
        assert not end.lost
        assert [n // 2 for n in end.came if n % 2 == 0] == list(range(rounds)), "messages"
        assert [n // 2 for n in end.came if n % 2] == list(range(rounds)), "frames"


def test_a_link_that_loses_what_goes_one_way_is_lost_when_that_has_lasted() -> None:
    network, ends = two(0)
    network.part(0, frozenset("a"), frozenset("b"), both_ways=False)
    pass_time(network, SILENCE - 0.5)
    assert not ends[0].lost + ends[1].lost
    pass_time(network, 2.0)
    assert "silent" in ends[1].lost[0]
    assert "closed the link" in ends[0].lost[0]
    network.heal(0)
    pass_time(network, 3.0)
    assert [end.ups for end in ends] == [2, 2]


def test_who_goes_on_with_what_ends_here_as_it_dials_is_refused() -> None:
    """It has begun anew, and an old hello has told it of this session."""
    _, ends = two(0)
    session = ends[1].net.session("a")
    hello = ends[0].net.session("b").hello()
    with pytest.raises(Refused) as refused:
        ends[1].net.resume("a", replace(hello, session=hello.session + 1))
    assert refused.value.code in NO_LINK_THERE
    assert ends[1].lost == ["a has lost the link, and dialled anew"]
    assert ends[1].net.session("a").number > session.number


def test_two_that_cannot_reach_each_other_talk_through_a_third_and_then_directly_again() -> None:
    network, ends = two(0)
    network.part(0, frozenset("a"), frozenset("b"))
    third = End(network, "c")
    view = registry.View(number=2, relays=[registry.Relay(a="a", b="b", via="c")])
    for end in (*ends, third):
        view.members.add(node=end.name, address=end.address)
    for end in (*ends, third):
        others = [other.name for other in (*ends, third) if other is not end]
        end.net.viewed(view, others)
    pass_time(network, SILENCE + 4.0)
    assert [end.net.carrier(to) for end, to in ((ends[0], "b"), (ends[1], "a"))] == ["c", "c"]
    ends[0].net.send("b", pb.Message(ballot=pb.Ballot(attempt=7)))
    pass_time(network, 0.2)
    assert ends[1].came == [14]
    network.heal(0)
    pass_time(network, 12.0)
    assert [end.net.carrier(to) for end, to in ((ends[0], "b"), (ends[1], "a"))] == ["", ""]
    assert len(ends[0].lost) == 1
