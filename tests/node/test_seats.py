"""The seats of a node: their names, and which of them receives what."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.ports import Priority
from planaria.node.seats import (
    MOST_EARLY,
    VIEW_TO_COME,
    SeatCompute,
    SeatNet,
    Seats,
    SenselessError,
)
from planaria.node.transaction.plan_encoding import active
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.seat_names import node_of, seat_id, seated
from tests.harness.network import AtOnce, Nodes, VirtualNet


def view(number: int, **seats: list[tuple[int, int]]) -> registry.View:
    """Return a view. `seats` has the (stage, view since which) of each seat, by node."""
    members = [
        registry.Member(
            node=node, seats=[registry.Seat(stage=stage, since=since) for stage, since in held]
        )
        for node, held in seats.items()
    ]
    return registry.View(number=number, members=members, driver=members[0].node)


@dataclass
class Listener:
    """Stand-in for an agent that notes what it hears."""

    exchanges: Exchanges
    heard: list[tuple[Any, ...]] = field(default_factory=list)

    def viewed(self, view: registry.View, now: float) -> None:
        self.heard.append(("view", view.number))

    def tick(self, now: float) -> None:
        pass

    def on_message(self, peer: str, message: pb.Message) -> None:
        self.heard.append((peer, message.WhichOneof("body")))

    def on_frame(self, peer: str, frame: Frame) -> None:
        self.heard.append((peer, frame.kind, bytes(frame.payload[0])))

    @property
    def observers(self) -> Any:
        return SimpleNamespace(compute=self.compute, pins=SimpleNamespace(forget=self.forget))

    def compute(self, peer: str, frame: Frame) -> None:
        self.heard.append((peer, "looks at", bytes(frame.payload[0])))

    def forget(self, peer: str) -> None:
        self.heard.append((peer, "is gone"))

    def on_link_up(self, peer: str, now: float) -> None:
        self.heard.append(("up", peer))

    def on_link_lost(self, peer: str, reason: str, lost: list[Frame], *_: Any) -> None:
        self.heard.append(("lost", peer, [frame.kind for frame in lost]))


class Machine:
    """Node a with seats at stages 0 and 1, and with a link to node b at stages 2 and 3."""

    def __init__(self, *built: str) -> None:
        self.nodes, self.links = Nodes(), VirtualNet({"b"})
        self.shown: list[tuple[str, str, str]] = []  # to observers: (observer, seat, kind)
        self.seats: Seats[Any] = Seats("a", self.links, self.tell, self.log)
        self.view = view(1, a=[(0, 0), (1, 0)], b=[(2, 0), (3, 0)])
        new, _ = self.seats.viewed(self.view, 0.0)
        assert list(new) == ["0", "1"]
        self.agents = {name: Listener(self.nodes.new()) for name in new}
        self.build(*built)

    def tell(self, observer: str, item: pb.Message | Frame) -> None:
        kind = item.kind if isinstance(item, Frame) else str(item.WhichOneof("body"))
        self.shown.append((observer, item.sender, kind))

    def log(self, request: pb.LogRequest) -> pb.LogLines:
        return pb.LogLines(lines=["what a did"][: request.lines])

    def asked(self, seat: str, **body: Any) -> None:
        self.seats.on_observer_message("?1", pb.Message(seat=seat, **body), 0.0)

    def build(self, *names: str) -> None:
        for name in names:
            assert self.seats.built(name, self.agents[name], 0.0)

    def run(self) -> None:
        while self.nodes.step():
            pass

    def heard(self, name: str) -> list[tuple[Any, ...]]:
        return [item for item in self.agents[name].heard if item[0] != "view"]


def frame(kind: str = "activation", payload: bytes | bytearray = b"12345678", **of: str) -> Frame:
    return Frame(kind, (1, 1), {}, [], payload, **of)


def test_for_the_step_transaction_each_seat_is_a_member() -> None:
    given = view(7, a=[(0, 0), (2, 1)], b=[(1, 0)], c=[])
    given.relays.add(a="a", b="b", via="c")
    by_seat = seated(given)
    assert active(by_seat) == {"a/0": 0, "a/2.1": 2, "b/1": 1}
    assert [m.node for m in by_seat.members if not m.seats] == ["c"]
    assert (by_seat.number, by_seat.driver) == (7, "a/0")
    apart = [(relay.a, relay.b, relay.via) for relay in by_seat.relays]
    assert apart == [("a/0", "b/1", "c"), ("a/2.1", "b/1", "c")]
    assert {node_of(seat_id("a", "2.1")), node_of("a")} == {"a"}


def test_over_a_link_a_message_says_which_seat_it_is_for_and_by_whom() -> None:
    machine = Machine("0", "1")
    net = SeatNet(machine.seats, "1")
    assert net.send("b/3", pb.Message(query=pb.Query()))
    passed = frame()
    assert net.send("b/2", passed)
    assert [(to, item.sender, item.seat) for to, item in machine.links.sent] == [
        ("b", "1", "3"),
        ("b", "1", "2"),
    ]
    assert passed.seat == "", "it may go to others, too"
    machine.seats.on_message("b", pb.Message(seat="0", sender="3", query=pb.Query()), 0.0)
    machine.seats.on_message("b", pb.Message(seat="9", sender="3", query=pb.Query()), 0.0)
    assert (machine.heard("0"), machine.heard("1")) == ([("b/3", "query")], [])


def test_two_seats_of_one_node_hear_each_other_without_a_link_what_was_said_then() -> None:
    machine = Machine("0", "1")
    net, payload = SeatNet(machine.seats, "0"), bytearray(b"12345678")
    assert net.linked("a/1")
    assert net.send("a/1", frame(payload=payload))
    assert net.send("a/1", pb.Message(query=pb.Query()))
    payload[:] = b"changed!"
    assert machine.heard("1") == [], "not inside of the call that says it"
    machine.run()
    assert machine.heard("1") == [("a/0", "activation", b"12345678"), ("a/0", "query")]
    assert machine.links.sent == []
    assert not net.send("a/9", frame())


def test_messages_wait_for_a_seat_that_is_being_built_and_frames_do_not() -> None:
    machine = Machine("0")
    machine.seats.on_message("b", pb.Message(seat="1", sender="2", query=pb.Query()), 0.0)
    machine.seats.on_frame("b", frame(seat="1", sender="2"), 0.0)
    SeatNet(machine.seats, "0").send("a/1", pb.Message(reduce=pb.Reduce()))
    ((to, not_yet),) = machine.links.sent
    assert (to, not_yet.sender, not_yet.seat, not_yet.account.computing) == ("b", "1", "2", True)
    machine.build("1")
    assert machine.heard("1") == [("b/2", "query"), ("a/0", "reduce")]


def test_a_driver_hears_that_a_seat_of_its_own_node_is_being_built() -> None:
    machine = Machine("0")
    for _ in range(2):
        SeatNet(machine.seats, "0").send("a/1", pb.Message(query=pb.Query()))
    machine.run()
    assert machine.heard("0") == [("a/1", "account")] * 2
    machine.seats.tick(VIEW_TO_COME)
    machine.run()
    assert len(machine.heard("0")) == 2, "once for each query"


def test_no_more_waits_for_a_seat_that_is_being_built_than_there_is_room_for() -> None:
    machine = Machine("0")
    large = pb.Message(seat="1", sender="2", halt=pb.Halt(reason="x" * (MOST_EARLY // 8)))
    for _ in range(9):
        machine.seats.on_message("b", large, 0.0)
    machine.build("1")
    assert 0 < len(machine.heard("1")) < 9


def test_messages_of_a_view_to_come_wait_for_the_seat_that_the_node_has_in_it() -> None:
    machine = Machine("0", "1")

    def query(seat: str, number: int) -> pb.Message:
        return pb.Message(ballot=pb.Ballot(view=number), seat=seat, sender="2", query=pb.Query())

    for seat, number in (("2.2", 2), ("3.2", 2), ("2.2", 1)):
        machine.seats.on_message("b", query(seat, number), 0.0)
    new, _ = machine.seats.viewed(view(2, a=[(0, 0), (1, 0), (2, 2)], b=[(2, 0), (3, 0)]), 0.0)
    assert list(new) == ["2.2"]
    machine.agents["2.2"] = Listener(machine.nodes.new())
    machine.build("2.2")
    assert machine.heard("2.2") == [("b/2", "query")]
    machine.seats.on_message("b", query("3.2", 2), 0.0)  # view 2 has no such seat
    assert not machine.seats.has("3.2")
    assert machine.seats._early_bytes.used == 0


def test_what_a_driver_says_waits_for_its_view_and_not_for_ever() -> None:
    machine = Machine("0", "1")

    def of_view(number: int) -> pb.Message:
        query = pb.Query()
        return pb.Message(ballot=pb.Ballot(view=number), seat="1", sender="2", query=query)

    for number, now in ((2, 0.0), (3, 0.0), (2, VIEW_TO_COME), (1 << 40, VIEW_TO_COME)):
        machine.seats.on_message("b", of_view(number), now)
    assert machine.heard("1") == []
    machine.seats.viewed(view(2, a=[(0, 0), (1, 0)], b=[(2, 0)]), VIEW_TO_COME)
    of_this_view, too_late = [("b/2", "query")] * 2, [("b/2", "query")]
    assert machine.heard("1") == [*of_this_view, *too_late], "in bounds of bytes it is there"
    assert [early.message.ballot.view for early in machine.seats._early] == [1 << 40]
    machine.seats.tick(1.9 * VIEW_TO_COME)
    assert len(machine.heard("1")) == 3
    machine.seats.tick(2 * VIEW_TO_COME)
    assert len(machine.heard("1")) == 4, "which refuses it by name"
    assert machine.seats._early_bytes.used == 0


class Fragile(Listener):
    """A listener that fails at each message and frame."""

    def on_message(self, peer: str, message: pb.Message) -> None:
        raise KeyError("of what nobody has foreseen")

    def on_frame(self, peer: str, frame: Frame) -> None:
        raise ZeroDivisionError

    def accuse(self, node: str, reason: str, cause: registry.Cause) -> None:
        self.heard.append((node, "accused", registry.Cause.Name(cause)))

    def crashed(self, error: BaseException) -> None:
        self.heard.append(("crashed", str(error)))


def test_a_message_that_cannot_be_dealt_with_is_its_senders_failure() -> None:
    machine = Machine("0", "1")
    fragile = machine.seats.agents["1"] = Fragile(machine.nodes.new())
    query = pb.Message(seat="1", sender="2", query=pb.Query())
    with pytest.raises(SenselessError, match="query that can't be handled: KeyError"):
        machine.seats.on_message("b", query, 0.0)
    with pytest.raises(SenselessError, match="frame of kind 'twin'"):
        machine.seats.on_frame("b", frame("twin", seat="1", sender="2"), 0.0)
    query.ballot.view = 2
    machine.seats.on_message("b", query, 0.0)
    machine.seats.viewed(view(2, a=[(0, 0), (1, 0)], b=[(2, 0)]), 0.0)
    assert ("b/2", "accused", "NUMBERS") in fragile.heard


def test_a_node_that_cannot_handle_a_message_of_its_driver_crashes_and_accuses_nobody() -> None:
    machine = Machine("1")
    machine.seats.viewed(view(2, b=[(0, 0)], a=[(1, 0)]), 0.0)
    fragile = machine.seats.agents["1"] = Fragile(machine.nodes.new())
    query = pb.Message(seat="1", sender="0", query=pb.Query())
    machine.seats.on_message("b", query, 0.0)
    ((kind, why),) = fragile.heard
    assert kind == "crashed" and "query that can't be handled: KeyError" in why
    query.ready.step = 1
    with pytest.raises(SenselessError):
        machine.seats.on_message("b", query, 0.0)


def test_a_link_is_up_or_lost_for_each_seat_of_the_peer_and_who_sent_what_is_told_so() -> None:
    machine = Machine("0", "1")
    machine.seats.on_link_up("b", 0.0)
    lost = [frame("gradient", seat="3", sender="0"), frame("twin", seat="2", sender="1")]
    machine.seats.on_link_lost("b", "reset", lost, 0.0)
    up = [("up", "b/2"), ("up", "b/3")]
    assert machine.heard("0") == [*up, ("lost", "b/2", []), ("lost", "b/3", ["gradient"])]
    assert machine.heard("1") == [*up, ("lost", "b/2", ["twin"]), ("lost", "b/3", [])]


def test_a_seat_that_was_given_back_neither_says_nor_hears_anything() -> None:
    machine = Machine("0", "1")
    net, compute = SeatNet(machine.seats, "1"), SeatCompute(machine.seats, "1", AtOnce())
    new, closed = machine.seats.viewed(view(2, a=[(0, 0)], b=[(1, 0)]), 1.0)
    assert (new, closed) == ({}, {"1": machine.agents["1"]})
    heard = list(machine.agents["1"].heard)
    machine.seats.on_message("b", pb.Message(seat="1", sender="1", query=pb.Query()), 1.0)
    assert not net.send("b/1", frame())
    compute.post(lambda: 1, lambda _: machine.agents["1"].heard.append(("computed",)), Priority(0))
    assert machine.agents["1"].heard == heard
    again, _ = machine.seats.viewed(view(3, a=[(0, 0), (1, 1)], b=[]), 2.0)
    assert list(again) == ["1.1"], "and what it gets anew is another one"


def test_a_seat_that_is_given_back_while_it_is_built_is_not_taken() -> None:
    machine = Machine()
    machine.seats.viewed(view(2, a=[(0, 0)], b=[(1, 0)]), 1.0)
    assert not machine.seats.built("1", machine.agents["1"], 1.0)
    machine.build("0")
    assert machine.agents["0"].heard == [("view", 2)]


def test_an_onlooker_and_a_seat_of_the_node_that_it_asks_hear_each_other() -> None:
    machine = Machine("0", "1")
    machine.asked("a/1", pin_request=pb.PinRequest(step=3))
    machine.asked("a/1", state_request=pb.StateRequest(kind="pin"))
    assert machine.heard("1") == [("a/?1", "pin_request"), ("a/?1", "state_request")]
    net = SeatNet(machine.seats, "1")
    assert net.send("a/?1", pb.Message(pinned=pb.Pinned()))
    assert net.send("a/?1", frame("state"))
    assert machine.shown == [("?1", "a/1", "pinned"), ("?1", "a/1", "state")]


def test_what_an_onlooker_asks_another_node_for_goes_over_the_link_and_the_answer_back() -> None:
    machine = Machine("0", "1")
    machine.asked("b/2", pin_request=pb.PinRequest(step=3))
    ((to, message),) = machine.links.sent
    assert (to, message.seat, message.sender) == ("b", "2", "?1")
    machine.seats.on_message("b", pb.Message(seat="?1", sender="2", pinned=pb.Pinned()), 0.0)
    machine.seats.on_frame("b", frame("state", seat="?1", sender="2"), 0.0)
    assert machine.shown == [("?1", "b/2", "pinned"), ("?1", "b/2", "state")]


@pytest.mark.parametrize("seat", ["a/7", "c/7", "", "/", "a"])
def test_an_onlooker_is_told_when_there_is_no_way_to_a_seat(seat: str) -> None:
    machine = Machine("0", "1")
    machine.asked(seat, pin_request=pb.PinRequest(step=3))
    assert machine.shown == [("?1", seat, "pinned")]


def test_a_node_shows_its_log_to_onlookers_of_its_own_and_of_others_and_to_nobody_else() -> None:
    machine = Machine()  # it needs no seat
    wanted = pb.LogRequest(lines=5)
    machine.asked("a/", log_request=wanted)
    assert machine.shown == [("?1", "a/", "log_lines")]
    machine.asked("b/", log_request=wanted)
    machine.seats.on_message("b", pb.Message(seat="", sender="?4", log_request=wanted), 0.0)
    machine.seats.on_message("b", pb.Message(seat="", sender="2", log_request=wanted), 0.0)
    (_, passed), (to, answer) = machine.links.sent
    assert (passed.seat, passed.sender) == ("", "?1")
    assert (to, answer.seat, answer.log_lines.lines) == ("b", "?4", ["what a did"])
    machine.seats.on_message("b", pb.Message(seat="?1", log_lines=pb.LogLines()), 0.0)
    machine.asked("c/", log_request=wanted)
    assert machine.shown[1:] == [("?1", "b/", "log_lines"), ("?1", "c/", "log_lines")]


def test_an_onlooker_can_ask_but_for_what_is_kept_for_it_and_say_nothing() -> None:
    machine = Machine("0", "1")
    for seat in ("a/1", "b/2"):
        machine.asked(seat, query=pb.Query())
        machine.asked(seat, halt=pb.Halt(finished=True))
        machine.asked(seat, state_request=pb.StateRequest(optimizer=True))
        machine.asked(seat, shard_request=pb.ShardRequest(kind="snapshot"))
        machine.asked(seat)
    assert (machine.heard("1"), machine.links.sent, machine.shown) == ([], [], [])


def test_what_an_onlooker_shows_is_no_frame_of_a_member() -> None:
    machine = Machine("0", "1")
    shown = frame("state", payload=(memoryview(b"tokens"),))
    machine.seats.on_observer_frame("?1", replace(shown, seat="a/1", sender="b/2"), 0.0)
    machine.seats.on_observer_frame("?1", replace(shown, seat="b/2"), 0.0)
    machine.seats.on_observer_frame("?1", replace(shown, seat="b/2", kind="gradient"), 0.0)
    machine.seats.on_observer_frame("?1", replace(shown, seat="a/7"), 0.0)
    machine.seats.on_frame("b", replace(shown, seat="0", sender="?4"), 0.0)
    assert machine.heard("1") == [("a/?1", "looks at", b"tokens")]
    assert machine.heard("0") == [("b/?4", "looks at", b"tokens")]
    ((to, passed),) = machine.links.sent
    assert (to, passed.seat, passed.sender, passed.kind) == ("b", "2", "?1", "state")


def test_all_seats_of_a_node_hear_that_an_onlooker_is_gone() -> None:
    machine = Machine("0", "1")
    machine.seats.on_observer_gone("?1")
    assert machine.heard("0") == machine.heard("1") == [("a/?1", "is gone")]
