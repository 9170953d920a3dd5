"""Tests of the membership machine: the effects of each event. Time is a number."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from planaria.bootstrap.accusations import STANDS
from planaria.bootstrap.awaited_saves import CRASHED
from planaria.bootstrap.effects import (
    Dial,
    Effect,
    Evict,
    Issue,
    Probe,
    Refused,
)
from planaria.bootstrap.identity import instance_of
from planaria.bootstrap.isolation import MOST_DIALLED
from planaria.bootstrap.joining import JoinAttempt
from planaria.bootstrap.membership import LEAVES_COLLECTED, SECONDS_PER_MEMBER, Membership
from planaria.bootstrap.neighbours import stages_of, to_link
from planaria.bootstrap.registry_pb2 import (
    AUDIT,
    CHECKSUM,
    DIVERGENCE,
    HANG,
    NUMBERS,
    SHAPE,
    SILENT,
    Cause,
    Change,
    Complaint,
    JoinReply,
    JoinRequest,
    LinkReport,
    Member,
    Rebuild,
    Relay,
    Renewal,
    Report,
    Seat,
    SeatReport,
    Suspicion,
    View,
)
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from planaria.bootstrap.step_time import Load
from planaria.bootstrap.views import sign
from tests.bootstrap.conftest import identity
from tests.membership import join, validate_state

KEY = identity("registry")


def issued(**fields: Any) -> View:
    """Return a view with these fields, signed with the run's key."""
    view = View(run="r", **fields)
    sign(view, KEY, View())
    return view


class Swarm:
    """A membership machine with a clock, whose state is checked after each event."""

    def __init__(self, stages: int = 2, **rules: object) -> None:
        self.machine = Membership(MembershipRules(run="r", stages=stages, **rules), KEY)  # type: ignore[arg-type]
        self.now = 0.0
        self.effects: list[Effect] = []

    @property
    def view(self) -> View:
        return self.machine.view

    def after(self, effects: list[Effect]) -> list[Effect]:
        validate_state(self.machine)
        self.effects = effects
        return effects

    def join(
        self,
        node: str,
        stage: int | None = None,
        address: str | None = None,
        key: str = "",
        block: str = "",
        owner: bool = True,
        **fields: Any,
    ) -> JoinReply:
        """Join, and return the reply. `fields`: other fields of the request."""
        fields = {"protocol": PROTOCOL, "speed": 1.0, "room": 1, **fields}
        address = f"{node}:1" if address is None else address
        request = JoinRequest(node=node, stage=stage, address=address, **fields)
        request.key = (key or node).encode()
        reply, effects = join(self.machine, request, self.now, block, owner)
        self.after(effects)
        return reply

    def enter(self, node: str, stage: int | None = None, **fields: Any) -> None:
        """Let the node join and open its stream."""
        self.join(node, stage, **fields)
        self.open(node)

    def refuses(self, node: str, *args: Any, why: str, code: str = "", **fields: Any) -> None:
        with pytest.raises(Refused, match=why) as caught:
            self.join(node, *args, **fields)
        assert code in ("", caught.value.code)

    def seat(self, **stages: int) -> None:
        """Let these nodes join at these stages, one after the other."""
        for node, stage in stages.items():
            self.join(node, stage)

    def break_streams(self, *nodes: str) -> None:
        for node in nodes:
            self.after(self.machine.stream_lost(node, self.now))

    def leave(self, *nodes: str, why: str = "") -> None:
        for node in nodes:
            self.after(self.machine.leave(node, why, self.now))

    def open(self, *nodes: str) -> None:
        for node in nodes:
            self.after(self.machine.stream_opened(Renewal(node=node, run="r"), self.now))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.after(self.machine.tick(self.now))

    def renew(self, node: str, **fields: object) -> list[Effect]:
        renewal = Renewal(node=node, **fields)  # type: ignore[arg-type]
        return self.after(self.machine.lease_renewed(renewal, self.now))

    def tell(self, *nodes: str, **seat: object) -> None:
        """Let each of the nodes (none: all) renew with this report of its seat."""
        for node in nodes or self.nodes():
            self.renew(node, report=self.report(node, **seat))  # type: ignore[arg-type]

    def miss(self, node: str, *peers: str) -> list[Effect]:
        """Let the node renew and complain that it lacks links to these peers."""
        complaints = [Complaint(peer=peer) for peer in peers]
        return self.renew(node, report=self.report(node, complaints))

    def suspect(
        self,
        accuser: str,
        accused: str,
        cause: Cause = SILENT,
        why: str = "silent",
    ) -> list[Effect]:
        suspicion = Suspicion(accuser=accuser, accused=accused, why=why, cause=cause)
        return self.after(self.machine.suspect(suspicion, self.now))

    def accuse(self, accuser: str, accused: str, cause: Cause, why: str) -> None:
        """Let one node accuse another one, which answers the registry's probe."""
        self.suspect(accuser, accused, cause, why)
        self.answer()

    def lose(self, node: str, answers: bool | None = None) -> list[Effect]:
        """Break the node's stream. `answers`: the result of the registry's dial; None: none yet."""
        effects = self.after(self.machine.stream_lost(node, self.now))
        for dial in effects:
            assert isinstance(dial, Dial)
            if answers is not None:
                self.machine.dialled(dial.question, dial.node, answers)
        return effects

    def lost(self, node: str, answers: bool | None = None) -> int:
        """Break the node's stream as `lose` does, and return the number of the dial."""
        (dial,) = self.lose(node, answers)
        assert isinstance(dial, Dial)
        return dial.question

    def answer(self) -> list[Effect]:
        (probe,) = (e for e in self.effects if isinstance(e, Probe))
        return self.renew(probe.node, probe=probe.number)

    def ask(self, newcomer: str, answering: Sequence[str] = (), **join: object) -> JoinReply:
        """Let it join while no member is heard, and give the machine the results of its dials."""
        reply = self.join(newcomer, **join)  # type: ignore[arg-type]
        for dial in self.effects:
            assert isinstance(dial, Dial)
            self.machine.dialled(dial.question, dial.node, dial.node in answering)
        return reply

    def join_again(self, newcomer: str, asked: JoinReply, **join: object) -> JoinReply:
        """Let it join twice after it has dialled in vain: in between, the members are removed."""
        with pytest.raises(Refused, match="all members are gone; join again") as caught:
            self.join(newcomer, question=asked.question, **join)  # type: ignore[arg-type]
        assert caught.value.code == "UNAVAILABLE"
        self.wait(0.1)
        return self.join(newcomer, question=asked.question, **join)  # type: ignore[arg-type]

    def stage(self, node: str) -> int | None:
        member = next(m for m in self.view.members if m.node == node)
        return next(iter(stages_of(member)), None)

    def report(self, node: str, complaints: Sequence[Complaint] = (), **seat: object) -> Report:
        """Return the report of a node with one seat."""
        seat_report = SeatReport(stage=self.stage(node) or 0, **seat)  # type: ignore[arg-type]
        return Report(seats=[seat_report], complaints=complaints)

    def nodes(self) -> list[str]:
        return [m.node for m in self.view.members]


def restarted(before: Swarm, stages: int = 2, **rules: object) -> Swarm:
    """Return another registry, which goes on from the newest view of `before`."""
    swarm = Swarm(stages, **rules)
    swarm.machine.restore(before.view, 0.0)
    return swarm


def full(stages: int = 2, **rules: object) -> Swarm:
    """Return a swarm with one node per stage, n0 to nL, with open streams."""
    swarm = Swarm(stages, **rules)
    for stage in range(stages + 1):
        swarm.join(f"n{stage}", stage)
    swarm.open(*swarm.nodes())
    return swarm


def test_automatic_joins_fill_vacant_stages_then_the_weakest() -> None:
    swarm = Swarm()
    for node, speed in (("a", 1.0), ("b", 0.5), ("c", 2.0)):
        swarm.join(node, speed=speed)
    assert [swarm.stage(n) for n in "abc"] == [0, 1, 2]
    reply = swarm.join("d", speed=0.5)
    assert swarm.effects == [Issue(reply.view)]
    assert swarm.stage("d") == 1
    assert "least capacity" in reply.reason
    swarm.join("e")
    assert swarm.stage("e") == 0, "a tie goes to the lowest stage"


def test_explicit_stage_beyond_max_replicas_is_honoured_and_automatic_becomes_spare() -> None:
    swarm = Swarm(stages=1, max_replicas=1)
    swarm.seat(a=0, b=1, c=1)
    reply = swarm.join("d")
    assert swarm.stage("c") == 1
    assert swarm.stage("d") is None
    assert "every stage has 1 nodes or more" in reply.reason


def test_a_newcomer_relieves_a_node_of_several_stages_also_beyond_max_replicas() -> None:
    """`max_replicas` is 1 if a step has one microbatch, which is work for one node per stage."""
    swarm = Swarm(stages=2, max_replicas=1)
    swarm.join("a", 0, room=2)
    swarm.join("b", 1)
    swarm.join("c", 2)
    swarm.open("a", "b", "c")
    swarm.leave("c")
    assert stages_of(swarm.view.members[0]) == [0, 2]
    assert swarm.join("d").reason.startswith("stage 2 had the least capacity")
    assert "every stage has 1 nodes or more" in swarm.join("e").reason


@pytest.mark.parametrize(
    ("asked", "code", "why"),
    [
        ({"stage": 3}, "OUT_OF_RANGE", "stage 3 does not exist: this run has stages 0 to 2"),
        (
            {"protocol": PROTOCOL + 1},
            "FAILED_PRECONDITION",
            f"protocol {PROTOCOL + 1}, the registry {PROTOCOL}",
        ),
        ({"address": "a:99999"}, "INVALID_ARGUMENT", r"'a:99999' has port 99999"),
        *(({"speed": speed}, "INVALID_ARGUMENT", "speed") for speed in (-1.0, math.nan, math.inf)),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(asked: dict[str, Any], code: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        Swarm().join("a", **asked)
    assert caught.value.code == code


def test_who_has_saves_of_a_stage_gets_it_while_nobody_has_its_state() -> None:
    swarm = Swarm(stages=2, start_grace=1)
    swarm.join("a", saves=[2])
    swarm.join("b", saves=[2])
    assert (swarm.stage("a"), swarm.stage("b")) == (2, 2), "the run has not begun"
    swarm.seat(c=0, d=1)
    swarm.tell(*"abcd", committed=7)
    swarm.join("e", saves=[2])
    assert swarm.stage("e") == 0, "stage 2 has two already"
    swarm.leave("d")
    swarm.join("f", saves=[1])
    swarm.join("g", saves=[1])
    assert (swarm.stage("f"), swarm.stage("g")) == (1, 1), "nobody has its state yet"
    swarm.join("h", saves=[3])
    assert swarm.stage("h") in (0, 1, 2), "the saves are of a stage that this run has not"


def test_saves_that_only_one_node_has_come_before_the_stage_that_it_requests() -> None:
    swarm = Swarm(stages=2, start_grace=1)
    swarm.join("c", 2, saves=[0, 2], room=2)
    assert seats(swarm)["c"] == [2], "it has saves of the stage that it requests, too"
    swarm.join("b", 1, saves=[0])
    assert swarm.stage("b") == 0
    swarm.join("a", 1, saves=[0])
    assert swarm.stage("a") == 1, "b serves stage 0"
    swarm.open(*"abc")
    swarm.tell(*"abc", committed=7)
    swarm.join("d", 2, saves=[0])
    assert swarm.stage("d") == 2, "b has the state of stage 0"
    swarm.leave("b", "d", why="killed")
    reply = swarm.join("e", 2, saves=[0], room=1)
    assert swarm.stage("e") == 0
    assert "stage 0, for which it has saves" in reply.reason
    assert swarm.join("e", 2, saves=[0], room=1).reason == reply.reason, "it asks again"
    assert not any(seat.requested for seat in swarm.machine.members.by_name["e"].member.seats)


def test_a_standby_gets_the_stage_that_only_it_has_saved() -> None:
    swarm = Swarm(stages=2, start_grace=1)
    swarm.seat(a=0, b=1, c=2)
    swarm.open(*"abc")
    swarm.tell(*"abc", committed=7)
    swarm.join("d", standby=True, saves=[2])
    assert swarm.stage("d") is None, "c has the state of stage 2"
    swarm.leave("c", "d", why="killed")
    swarm.join("e", standby=True, saves=[2])
    assert swarm.stage("e") == 2


def test_a_machine_that_comes_back_gets_all_seats_of_its_saves() -> None:
    swarm = Swarm(stages=4, start_grace=1)
    swarm.join("b", 1, room=5)
    swarm.join("a", saves=[3, 0, 4, 2], room=5)
    assert seats(swarm) == {"a": [0, 2, 3, 4], "b": [1]}
    assert "stages 0, 2, 3, 4, for which it has saves" in swarm.view.reason
    swarm.open("a", "b")
    swarm.tell(*"ab", committed=7)
    swarm.leave("a", why="killed")
    assert seats(swarm) == {"b": [0, 1, 2, 3, 4]}
    swarm.join("c", saves=[3, 0, 4, 2, 1], room=3)
    assert seats(swarm)["c"] == [0, 3, 4], "as many as it has room for, the newest"


def test_saves_count_also_where_a_stage_has_all_the_nodes_that_have_work() -> None:
    """`max_replicas` is 1 if a step has one microbatch."""
    swarm = Swarm(stages=2, max_replicas=1, start_grace=1)
    swarm.seat(a=0, b=1, c=2)
    swarm.join("x", standby=True)
    swarm.open(*"abcx")
    swarm.tell(*"abc", committed=7)
    swarm.leave("b", why="killed")
    assert swarm.stage("x") == 1, "which has no state"
    swarm.join("d", saves=[1])
    assert swarm.stage("d") == 1


def test_a_node_that_only_dials_gets_the_seat_of_its_saves_though_a_relay_has_to_help() -> None:
    swarm = Swarm(stages=5, start_grace=1)
    swarm.join("n", 0, room=2)
    for stage, node in enumerate("abcde", 1):
        swarm.join(node, stage, address="" if node in "ab" else None)
    swarm.open(*"nabcde")
    swarm.tell(*"nabcde", committed=7)
    swarm.leave("a", why="killed")
    assert seats(swarm)["n"] == [0, 1], "which has no state of stage 1"
    swarm.join("f", address="", saves=[1])
    assert swarm.stage("f") == 1, "beside b at stage 2, which only dials, too"


def awaiting(owner: bool = True, **rules: float) -> Swarm:
    """Return a swarm that lost node a, with stages 0, 2, 3, 4 and saves of step 10; b has room."""
    swarm = Swarm(stages=4, start_grace=1, lease=30, **rules)
    swarm.join("b", 1, room=5, owner=owner)
    swarm.join("a", saves=[3, 0, 4, 2], room=5)
    swarm.open("a", "b")
    swarm.tell("b", committed=12, saves=[10])
    seats = [SeatReport(stage=s, committed=12, saves=[10, 5]) for s in (0, 2, 3, 4)]
    swarm.renew("a", report=Report(seats=seats))
    swarm.lose("a", answers=False)
    swarm.wait(1)
    assert swarm.nodes() == ["b"]
    return swarm


def test_saves_of_a_lost_node_are_awaited_until_it_is_back_or_for_some_time() -> None:
    swarm = awaiting(wait_for_saves=40)
    assert seats(swarm) == {"b": [0, 1, 2, 3, 4]}, "who takes the seats waits there"
    known = [(save.stage, save.step, save.node, save.seconds) for save in swarm.view.awaited]
    assert known == [(stage, 10, "a", 40) for stage in (0, 2, 3, 4)]
    later = restarted(swarm, stages=4, lease=30, wait_for_saves=40)
    for number in range(1, 5):
        swarm.now += 9
        swarm.tell("b", committed=12)
        swarm.join(f"c{number}", standby=True)
    assert {save.seconds for save in swarm.view.awaited} == {4}
    swarm.wait(5)
    assert not swarm.view.awaited
    assert "no save of stage 0, 2, 3, 4 is awaited any longer" in swarm.view.reason
    later.open("b")
    later.wait(20)
    later.renew("b")
    later.wait(15)
    assert later.view.awaited, "the registry was restarted"
    later.join("a2", key="a")
    assert not later.view.awaited, "it is back, and has lost its saves"


def test_saves_of_a_node_that_says_that_it_crashed_are_awaited() -> None:
    swarm = full(wait_for_saves=60)
    swarm.tell(committed=12, saves=[10])
    swarm.leave("n1", why=f"{CRASHED}out of memory")
    assert [(save.node, save.stage) for save in swarm.view.awaited] == [("n1", 1)]


def test_saves_are_awaited_longer_by_a_pause_in_which_nobody_could_join() -> None:
    swarm = awaiting(wait_for_saves=40)
    swarm.now += 100
    swarm.machine.paused(99, swarm.now)
    swarm.open("b")
    swarm.wait(19)
    swarm.renew("b")
    swarm.wait(18)
    assert swarm.view.awaited
    swarm.renew("b")
    swarm.wait(3)
    assert not swarm.view.awaited


def test_who_waits_for_stage_0_is_told_who_may_come_back_with_it() -> None:
    swarm = awaiting(owner=False)
    assert (seats(swarm), swarm.view.driver) == ({"b": [1, 2, 3, 4]}, "")
    waits = "waits for a, which has a save of stages 0, 2, 3, 4 of step 10, for 60 s"
    assert waits in swarm.view.reason
    swarm.join("a2", saves=[0, 2, 3, 4], room=5, key="a")
    assert (seats(swarm)["a2"], swarm.view.driver) == ([0, 2, 3, 4], "a2")
    assert waits not in swarm.view.reason


def beside(mbps: float, order: str = "go") -> Swarm:
    """Return a swarm in which node a trains all stages. Node b has joined at stage 1, has its
    state, and has measured so many Mbit/s on its link."""
    load = Load((1, 1, 1, 1), microbatches=8, activation=10**6, gradient=10**6)
    swarm = Swarm(stages=4, start_grace=1, load=load, lease=10)
    swarm.enter("a", room=5)
    swarm.wait(2)
    report_of(swarm, "a")
    swarm.enter("b", 1, room=5)
    swarm.after(swarm.machine.command(order, "", swarm.now)[1])
    report_of(swarm, "b", LinkReport(peer="a", rtt_ms=20, mbps=mbps))
    report_of(swarm, "a")
    swarm.wait(1)
    return swarm


def rest(swarm: Swarm) -> None:
    """Let enough time pass for seats to move again."""
    for _ in range(3):
        swarm.wait(8)
        for node in swarm.nodes():
            swarm.renew(node)
    swarm.wait(1)


def report_of(swarm: Swarm, node: str, *links: LinkReport, seconds: float = 0.1) -> None:
    (member,) = (member for member in swarm.view.members if member.node == node)
    stages = [seat.stage for seat in member.seats]
    reports = [SeatReport(stage=stage, committed=5, seconds=seconds) for stage in stages]
    swarm.renew(node, report=Report(seats=reports, seen=links))


def test_a_newcomer_gets_seat_after_seat_until_steps_become_no_shorter() -> None:
    swarm = beside(mbps=1000)
    assert seats(swarm) == {"a": [0, 2, 3, 4], "b": [1]}
    rest(swarm)
    assert seats(swarm) == {"a": [0, 2, 3, 4], "b": [1, 2]}
    assert "b takes stage 2: moves from a: a step is expected to take 2.7 s" in swarm.view.reason
    rest(swarm)
    assert seats(swarm)["a"] == [0, 2, 3, 4], "b has no state of stage 2 yet"
    report_of(swarm, "b")
    swarm.wait(1)
    assert seats(swarm) == {"a": [0, 3, 4], "b": [1, 2]}
    view = swarm.view
    rest(swarm)
    assert swarm.view is view


@pytest.mark.parametrize(
    ("stage", "seconds"), [(99, 0.1), (2, 0.1), (1, math.nan), (1, math.inf), (1, -1.0)]
)
def test_speeds_that_can_not_be_change_nothing(stage: int, seconds: float) -> None:
    swarm = beside(mbps=1000)
    seat = SeatReport(stage=stage, committed=5, seconds=seconds)
    links = [LinkReport(peer=f"x{n}", rtt_ms=1, mbps=1) for n in range(100)]
    links.append(LinkReport(peer="a", rtt_ms=math.inf, mbps=1))
    swarm.renew("b", report=Report(seats=[seat], seen=links))
    report_of(swarm, "b")
    rest(swarm)
    assert seats(swarm) == {"a": [0, 2, 3, 4], "b": [1, 2]}
    assert "a step is expected to take 2.7 s" in swarm.view.reason


def test_links_to_former_members_leave_room_for_those_to_newcomers() -> None:
    swarm = beside(mbps=1000)
    for number in range(20):
        swarm.join(name := f"x{number}", standby=True)
        report_of(swarm, "a", LinkReport(peer=name, rtt_ms=1, mbps=1))
        swarm.leave(name)
    report_of(swarm, "a", LinkReport(peer="b", rtt_ms=20, mbps=8))
    members = swarm.machine.members
    known = members.outlook(members.candidates(swarm.now), swarm.now)
    assert known is not None
    assert known.link("a", "b").rate == 10**6


def test_what_a_link_carries_now_counts_more_than_what_was_once_measured() -> None:
    swarm = beside(mbps=1000)
    measured = [LinkReport(peer="b", rtt_ms=20, mbps=800)]
    rates = []
    for mbps in (0, 8):
        seen = [LinkReport(peer="b", rtt_ms=20, mbps=mbps)]
        swarm.renew("a", report=Report(links=measured, seen=seen))
        rates.append(swarm.machine.members.by_name["a"].links["b"].rate)
    assert rates == [10**8, 10**6]


def test_seats_go_back_and_forth_less_and_less_whatever_is_measured() -> None:
    swarm, moved = beside(mbps=1000), []
    for number in range(400):
        before = seats(swarm)
        for node in "ab":  # the one with more seats seems slow
            report_of(swarm, node, seconds=2.0 if len(before[node]) > 2 else 0.1)
        rest(swarm)
        if seats(swarm) != before:
            moved.append(number)
    assert 5 < len(moved) < 40
    assert moved[-1] - moved[-5] > moved[4] - moved[0]


def test_nothing_moves_while_the_run_is_paused() -> None:
    swarm = beside(mbps=1000, order="pause")
    rest(swarm)
    assert seats(swarm) == {"a": [0, 2, 3, 4], "b": [1]}
    swarm.after(swarm.machine.command("go", "", swarm.now)[1])
    assert seats(swarm)["b"] == [1, 2]


def test_saves_are_not_awaited_of_who_has_left_or_was_evicted_for_cause() -> None:
    for end in ("left", "evicted", "accused", "off", "replica"):
        swarm = full(wait_for_saves=60.0 * (end != "off"))
        if end == "replica":
            swarm.enter("other", 1)
        swarm.tell(committed=12, saves=[10])
        if end == "left":
            swarm.leave("n1")
        elif end == "evicted":
            swarm.after(swarm.machine.evict("n1", "by its operator", swarm.now))
        elif end == "accused":
            swarm.suspect("n0", "n1", CHECKSUM)
            swarm.suspect("n2", "n1", CHECKSUM)
        else:
            swarm.lose("n1", answers=False)
            swarm.wait(1)
        assert "n1" not in swarm.nodes(), end
        assert not swarm.view.awaited, end


def test_stage_0_needs_the_data() -> None:
    swarm = Swarm(data="abc")
    swarm.refuses("a", 0, why=r"planaria data prepare.*--data DIR")
    swarm.refuses("a", 0, data="xyz", why="content hash abc, and the node has xyz")
    swarm.join("a")
    assert swarm.stage("a") == 1, "automatic assignment passes stage 0 over"
    swarm.join("b", data="abc")
    assert swarm.stage("b") == 0


def test_stage_0_is_served_by_the_owners_nodes_only() -> None:
    swarm = Swarm(stages=2, start_grace=1, lease=10)
    swarm.refuses("s", 0, owner=False, why=r"only nodes of the run's owner.*--role owner")
    for name, stage in (("b", 0), ("c", None), ("d", 0), ("e", None)):
        swarm.join(name, saves=[] if stage is None else [stage], room=3, owner=False)
    waiting = "stage 0 is vacant: waiting for a node of the run's owner (`planaria node --join @"
    assert (seats(swarm)["d"], waiting in swarm.view.reason) == ([1], True)
    swarm.join("a", room=3)
    assert (swarm.stage("a"), waiting in swarm.view.reason) == (0, False)
    swarm.open(*swarm.nodes())
    swarm.tell(phase="running", committed=7)
    before = seats(swarm)
    swarm.leave("a", why="killed")
    for _ in range(60):  # seconds
        swarm.wait(1)
        swarm.tell(phase="idle", committed=7)
    swarm.join("f", saves=[0], room=3, owner=False)
    assert seats(swarm) == {n: s for n, s in before.items() if n != "a"} | {"f": [1]}
    assert (swarm.view.driver, waiting in swarm.view.reason) == ("", True)
    swarm.join("a2", key="a")
    assert (swarm.stage("a2"), swarm.view.driver) == (0, "a2")
    assert waiting not in swarm.view.reason


def test_repeated_join_gets_the_same_answer_and_other_particulars_are_refused() -> None:
    swarm = Swarm()
    first = swarm.join("a", 1)
    assert swarm.join("a", 1) == first
    assert swarm.effects == []
    swarm.refuses("a", 1, address="elsewhere:1", why="with other properties")


def test_restart_at_the_same_address_evicts_the_old_identity_at_once() -> None:
    swarm = full()
    swarm.join("new", address="n1:1", key="n1")
    assert swarm.stage("new") == 1
    assert swarm.nodes() == ["n0", "n2", "new"]
    assert "restarted" in evictions(swarm.effects)["n1"]
    assert swarm.effects[1:] == [Issue(swarm.view)]


def test_an_identity_is_used_once() -> None:
    swarm = full()
    swarm.leave("n1", why="done")
    swarm.refuses("n1", 1, why=r"left: done.*new node id")


def test_joins_a_second_and_nodes_are_limited() -> None:
    swarm = Swarm(joins_per_second=2, max_nodes=3, lease=100)
    swarm.join("a")
    swarm.join("b")
    swarm.refuses("c", why=r"more than 2 joins per second; join again in 0\.5 s")
    swarm.now += 0.5
    swarm.join("c")
    swarm.now += 10
    swarm.refuses("d", why="3 nodes, its maximum")


def request(name: str, key: str = "", **fields: Any) -> JoinRequest:
    return JoinRequest(protocol=PROTOCOL, node=name, key=(key or name).encode(), **fields)


def test_of_those_who_join_together_as_many_may_as_when_they_came() -> None:
    swarm = Swarm(joins_per_second=5)
    asked = [JoinAttempt(request(f"n{i}"), "", swarm.now + i / 5, True) for i in range(40)]
    answers, effects = swarm.machine.join(asked, swarm.now + 8)
    assert all(isinstance(answer, JoinReply) for answer in answers)
    swarm.after(effects)
    more = [JoinAttempt(request(f"m{i}"), "", swarm.now + 8.1, True) for i in range(7)]
    answers, effects = swarm.machine.join(more, swarm.now + 9)
    swarm.after(effects)
    assert sum(isinstance(answer, Refused) for answer in answers) == 2


def test_who_waits_for_its_answer_is_no_silent_member() -> None:
    swarm = Swarm(lease=5, start_grace=0)
    for name in "ab":
        swarm.join(name)
    for now in range(1, 20):
        swarm.machine.wait(["a", "nobody"], swarm.now + now)
        swarm.after(swarm.machine.tick(swarm.now + now))
    described = swarm.machine.describe(swarm.now + 19).members
    assert [(m.since_renewal, m.reached_by) for m in described] == [(0, ""), (19, "a")]


def test_those_who_join_together_are_in_one_view() -> None:
    swarm = Swarm(joins_per_second=5)
    asked = [
        request("a", stage=0),
        request("b", stage=7),
        request("c"),
        request("c"),  # the same request again
        request("d", key="c"),
        request("e"),
        request("f"),
    ]
    answers, effects = swarm.machine.join(
        [JoinAttempt(newcomer, "", swarm.now, True) for newcomer in asked], swarm.now
    )
    swarm.after(effects)
    assert [effect.view for effect in effects if isinstance(effect, Issue)] == [swarm.view]
    assert (swarm.view.number, {m.node for m in swarm.view.members}) == (1, {"a", "d", "e"})
    assert [a.view for a in answers if isinstance(a, JoinReply)] == [View(number=1)] * 3
    refused = [a.reason for a in answers if isinstance(a, Refused)]
    assert "stage 7 does not exist" in refused[0]
    assert "more than 5 joins per second" in refused.pop()
    assert refused[1] == refused[2]
    assert "c is no longer a member (restarted: d" in refused[1]


def test_one_by_one_or_together_the_same_is_decided() -> None:
    alone, together = Swarm(stages=3), Swarm(stages=3)
    asked = [
        request(
            f"n{n}", speed=1 + n % 3, host=f"h{n % 4}", address=f"n{n}:1", room=2, standby=n > 8
        )
        for n in range(12)
    ]
    for newcomer in asked:
        alone.after(join(alone.machine, newcomer, 0.0, "192.0.2.0/24")[1])
    _, effects = together.machine.join(
        [JoinAttempt(newcomer, "192.0.2.0/24", 0.0, True) for newcomer in asked], 0.0
    )
    together.after(effects)
    assert list(together.view.members) == list(alone.view.members)
    assert (together.view.number, alone.view.number) == (1, 12)


def test_joins_wait_until_the_last_view_has_been_told_to_all_but_others_do_not() -> None:
    swarm = Swarm(joins_per_second=1000)
    assert swarm.machine.joins_due(swarm.now) == swarm.now
    for number in range(100):
        swarm.join(f"n{number}")
    due = swarm.machine.joins_due(swarm.now)
    assert due == pytest.approx(100 * SECONDS_PER_MEMBER)
    assert swarm.machine.joins_due(due + 1) == due + 1
    assert swarm.machine.rules.max_nodes * SECONDS_PER_MEMBER <= 2, "they have an answer in time"
    swarm.machine.leave("n3", "", swarm.now)
    assert "n3" not in {m.node for m in swarm.view.members}


def test_who_has_just_joined_need_not_show_its_view_but_to_a_registry_that_lacks_it() -> None:
    swarm = Swarm()
    swarm.join("a")
    swarm.join("b")
    renewal = Renewal(node="b", run="r", shown=2)
    swarm.after(swarm.machine.stream_opened(renewal, swarm.now))
    amnesiac = Swarm()
    with pytest.raises(Refused, match="b has view 2, and this registry none after view 0: call"):
        amnesiac.machine.stream_opened(renewal, amnesiac.now)
    renewal.view.CopyFrom(swarm.view)
    amnesiac.after(amnesiac.machine.stream_opened(renewal, amnesiac.now))
    assert amnesiac.view == swarm.view


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (0, 3), (4, 0)])
def test_two_neighbours_that_only_dial_out_need_somebody_who_carries(a: int, b: int) -> None:
    swarm = Swarm(stages=4)
    swarm.join("a", a, address="")
    link = rf"link to a \(stage {a}\).*give one of them `--advertise HOST:PORT`"
    with pytest.raises(Refused, match=link) as refused:
        swarm.join("b", b, address="")
    assert refused.value.code == "ABORTED", "it asks again"
    swarm.join("open", 2)
    assert swarm.join("b", b, address="").reason == f"stage {b}, as requested"


@pytest.mark.parametrize(
    ("name", "stage", "address", "swapped", "linked"),
    [
        ("new", 1, "new:1", False, "n0 n1 n2"),
        ("n1", 1, "n1:1", False, "n0 n2"),
        ("n0", 0, "n0:1", False, "n1 n2 n3 n4 n5"),
        ("n3", 3, "n3:1", False, "n0 n2 n4"),
        ("n3", 3, "n3:1", True, "n0 n1 n2 n4 n5"),
        ("n3", 3, "", False, "n0 n1 n2 n4 n5"),
        ("n3", None, "n3:1", False, ""),
    ],
)
def test_a_node_keeps_links_to_whom_it_needs_in_every_step(
    name: str, stage: int | None, address: str, swapped: bool, linked: str
) -> None:
    def member(name: str, stage: int | None, address: str) -> Member:
        seats = [] if stage is None else [Seat(stage=stage)]
        return Member(node=name, seats=seats, address=address)

    members = [member(f"n{stage}", stage, f"n{stage}:1") for stage in range(6)]
    view = View(number=1, members=[*members, member("idle", None, "idle:1")])
    own = member(name, stage, address)
    assert to_link(own, view, stages=5, swapped=swapped) == linked.split()


def test_automatic_assignment_keeps_nodes_that_only_dial_out_apart_as_long_as_it_can() -> None:
    swarm = Swarm(stages=4)
    swarm.join("open", 0)
    for node in "abcde":
        swarm.join(node, address="")
    assert [swarm.stage(node) for node in "abcde"] == [1, 3, 2, 4, 0]
    swarm = Swarm(stages=4)
    swarm.join("a", 0, address="")
    assert "only dials out" in swarm.join("b", address="").reason
    assert swarm.stage("b") is None, "nobody can carry: it stands by"


def test_a_spare_is_sent_to_a_stage_that_falls_vacant_the_oldest_that_fits() -> None:
    swarm = Swarm(stages=1, max_replicas=1, data="abc")
    swarm.join("a", 0, data="abc")
    swarm.join("b", 1)
    swarm.join("without")
    swarm.join("with", data="abc")
    swarm.leave("a")
    assert swarm.stage("with") == 0
    assert swarm.stage("without") is None
    assert swarm.view.driver == "with"
    swarm.leave("b")
    assert swarm.stage("without") == 1


def test_first_driver_waits_for_replicas_and_says_for_what() -> None:
    swarm = Swarm(stages=1, replicas=2)
    swarm.seat(a=0, b=0, c=1)
    assert swarm.view.driver == ""
    assert swarm.view.reason.endswith("waiting for 1 more node at stage 1 (1 of 2)")
    swarm.join("d", 1)
    assert swarm.view.driver == "a"


def seats(swarm: Swarm) -> dict[str, list[int]]:
    return {member.node: stages_of(member) for member in swarm.view.members}


def test_when_nobody_else_comes_those_with_room_take_what_is_vacant_and_begin() -> None:
    swarm = Swarm(stages=2, start_grace=3, lease=5)
    swarm.join("a", room=3)
    swarm.join("b")
    swarm.wait(2.9)
    assert (seats(swarm), swarm.view.driver) == ({"a": [0], "b": [1]}, "")
    swarm.wait(0.6)
    assert (seats(swarm), swarm.view.driver) == ({"a": [0, 2], "b": [1]}, "a")


def test_once_the_run_is_over_nobody_takes_the_seats_of_those_who_leave() -> None:
    swarm = Swarm(stages=1, start_grace=0, lease=100)
    swarm.join("a", 0, room=2)
    swarm.join("b", 1)
    swarm.tell("a", phase="halted", committed=7, finished=True)
    swarm.leave("b")
    assert seats(swarm) == {"a": [0]}


def test_a_seat_that_was_given_back_and_taken_again_is_another_one() -> None:
    swarm = Swarm(stages=1, start_grace=0, lease=100)
    swarm.join("a", 0, room=2)
    swarm.join("b", 1)
    swarm.leave("b")
    assert seats(swarm) == {"a": [0, 1]}
    first = swarm.view.members[0].seats[1].since
    assert swarm.machine.describe(swarm.now).members[0].why == [
        "stage 0, as requested",
        "has room for one more seat: stage 1 is vacant",
    ]
    swarm.join("c", 1)
    assert seats(swarm) == {"a": [0, 1], "c": [1]}, "c has no state yet"
    both = [SeatReport(stage=stage, phase="running", committed=7) for stage in (0, 1)]
    swarm.renew("a", report=Report(seats=both))
    swarm.tell("c", phase="running", committed=7)
    swarm.wait(20)
    assert seats(swarm) == {"a": [0], "c": [1]}
    swarm.leave("c")
    assert seats(swarm) == {"a": [0, 1]}
    assert swarm.view.members[0].seats[1].since > first
    assert swarm.machine.members.by_name["a"].holds == {0}, (
        "what it had told of the former one is no more"
    )


def test_who_joins_as_a_standby_waits_until_a_stage_has_nobody() -> None:
    swarm = Swarm(stages=1, start_grace=0, lease=100)
    swarm.seat(a=0, b=1)
    assert swarm.join("s", standby=True).reason == "standby, as requested"
    swarm.leave("b")
    assert seats(swarm) == {"a": [0], "s": [1]}


def test_first_driver_waits_no_longer_than_the_start_grace() -> None:
    swarm = Swarm(stages=1, replicas=2, start_grace=3, lease=100)
    swarm.wait(50)
    swarm.join("a", 0)
    assert swarm.wait(50) == [], "the grace starts when each stage has a node"
    swarm.join("b", 1)
    assert swarm.wait(2.9) == []
    (issue,) = swarm.wait(0.2)
    assert isinstance(issue, Issue)
    assert swarm.view.driver == "a"
    assert "start grace of 3 s is over" in swarm.view.reason


def test_a_pause_of_the_registry_ends_no_start_grace() -> None:
    swarm = Swarm(stages=1, replicas=2, start_grace=20, lease=200)
    swarm.seat(a=0, b=1)
    swarm.now += 60
    swarm.machine.paused(60, swarm.now)
    assert swarm.wait(19) == []
    swarm.wait(1.1)
    assert swarm.view.driver == "a"


def test_after_a_loss_of_everything_nodes_are_awaited_as_at_the_start() -> None:
    swarm = Swarm(stages=1, replicas=2, start_grace=3, lease=100)
    swarm.seat(a=0, b=0, c=1, d=1)
    swarm.tell(*"abcd", committed=7)
    swarm.leave(*"abcd")
    swarm.seat(e=0, f=1)
    assert swarm.view.driver == "", "who comes yet may have the newest save"
    swarm.seat(g=0, h=1)
    assert swarm.view.driver == "e"
    assert swarm.view.committed == 7


def test_a_driver_of_nodes_that_have_a_state_stays() -> None:
    swarm = Swarm(stages=1, replicas=2, start_grace=3, lease=100)
    for node, stage in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        swarm.join(node, stage)
        swarm.renew(node, report=swarm.report(node, lineage=1))
    swarm.leave("d")
    assert swarm.view.driver == "a", "a step 0 that the run has gone back to is a state too"


def test_driver_stays_and_the_oldest_stage_0_member_follows() -> None:
    swarm = full()
    swarm.seat(late=0, later=0)
    assert swarm.view.driver == "n0"
    swarm.leave("n0")
    assert swarm.view.driver == "late"
    swarm.leave("n1")
    assert swarm.view.driver == "late", "once started, a vacant stage leaves the driver in place"
    swarm.leave("late", "later")
    assert swarm.view.driver == ""
    swarm.join("new", 0)
    assert swarm.view.driver == "new"


def test_lease_runs_out_unless_renewed() -> None:
    swarm = full(lease=5)
    swarm.now = 3
    swarm.miss("n0", "n2")
    swarm.miss("n1", "n2")
    assert swarm.wait(1.9) == []
    assert swarm.wait(0.2) == [Evict("n2", "not renewed for 5 s"), Issue(swarm.view)]
    assert swarm.nodes() == ["n0", "n1"]
    assert swarm.wait(2.8) == [], "5.1 s after joining, 2.9 after renewing"


def test_broken_stream_of_one_that_is_gone_evicts_unless_it_comes_back() -> None:
    swarm = full(reconnect=0.4)
    assert swarm.lose("n1", answers=False) == [Dial(1, "n1", "n1:1", 5.0)]
    swarm.now += 0.3
    swarm.open("n1")
    assert swarm.wait(0.2) == []
    swarm.lose("n1", answers=False)
    assert "its stream broke" in evictions(swarm.wait(0.5))["n1"]


@pytest.mark.parametrize("answers", [True, None])
def test_who_is_there_though_its_stream_broke_has_its_lease_to_come_back(
    answers: bool | None,
) -> None:
    """`answers`: None if its network is away, so that the dial has no result yet."""
    swarm = full(reconnect=0.4, lease=5)
    swarm.now += 1
    for node in swarm.nodes():
        swarm.renew(node)
    swarm.lose("n1", answers)
    swarm.suspect("n0", "n1")
    assert swarm.wait(3.9) == []
    swarm.miss("n0", "n1")
    swarm.miss("n2", "n1")
    assert "not renewed for 5 s" in evictions(swarm.wait(1.2))["n1"]


@pytest.mark.parametrize("when", ["before the node is back", "too late"])
def test_an_answer_about_a_stream_before_the_last_one_does_not_count(when: str) -> None:
    swarm = full(reconnect=0.4)
    question = swarm.lost("n1", answers=None if when == "too late" else False)
    swarm.open("n1")
    swarm.lose("n1")
    if when == "too late":
        swarm.machine.dialled(question, "n1", False)
    assert swarm.wait(0.5) == []


def test_who_only_dials_out_has_its_lease_to_come_back() -> None:
    swarm = Swarm(reconnect=0.4, lease=5)
    for stage, address in enumerate(["n0:1", "", "n2:1"]):
        swarm.join(f"n{stage}", stage, address)
    swarm.open(*swarm.nodes())
    assert swarm.lose("n1") == []
    swarm.suspect("n0", "n1")
    assert swarm.wait(4.9) == []


def evictions(effects: list[Effect]) -> dict[str, str]:
    """Map evicted nodes to the reasons."""
    return {effect.node: effect.reason for effect in effects if isinstance(effect, Evict)}


def silent(swarm: Swarm, seconds: float, silent: str, **complaints: Sequence[str]) -> list[Effect]:
    """Let all nodes but `silent` renew twice a second, with these complaints (node -> peers)."""
    effects: list[Effect] = []
    for _ in range(round(2 * seconds)):
        for node in swarm.nodes():
            if node != silent:
                effects += swarm.miss(node, *complaints.get(node, ()))
        effects += swarm.wait(0.5)
    return effects


def test_a_last_holder_that_is_not_heard_stays_while_anybody_reaches_it() -> None:
    swarm = full(lease=5)
    assert silent(swarm, 60, "n1", n0=["n1"]) == []
    decided = " ".join(swarm.machine.history.decisions)
    assert decided.count("n1 (stage 1) is not heard, but n2 reaches it: it stays") == 1
    assert [m.reached_by for m in swarm.machine.describe(swarm.now).members] == ["", "n2", ""]
    effects = silent(swarm, 0.5, "n1", n0=["n1"], n2=["n1"])
    evict = Evict("n1", "not renewed for 5 s, and no member reaches it any more")
    assert [effect for effect in effects if isinstance(effect, Evict)] == [evict]


def test_that_one_is_not_among_some_complaints_of_many_says_nothing() -> None:
    """A node that can't list all its complaints may also lack a link to the silent node."""
    swarm = full(lease=5)
    effects: list[Effect] = []
    while swarm.now < 60 and not effects:
        for node in ("n0", "n2"):
            swarm.renew(node, report=Report(seats=swarm.report(node).seats, unlisted=1))
        effects = swarm.wait(0.5)
    assert Evict("n1", "not renewed for 5 s") in effects


def test_a_last_holder_that_is_heard_again_is_as_before() -> None:
    swarm = full(lease=5)
    silent(swarm, 8, "n1")
    swarm.renew("n1")
    assert swarm.machine.history.decisions[-1] == "n1 (stage 1) is heard again"
    assert silent(swarm, 4.5, "n1", n0=["n1"], n2=["n1"]) == []
    silent(swarm, 0.5, "n1", n0=["n1"], n2=["n1"])
    assert swarm.nodes() == ["n0", "n2"]


def test_whom_somebody_reaches_by_way_of_a_third_is_reached() -> None:
    swarm = full(lease=5)
    for _ in range(20):
        swarm.tell("n0", complaints=[Complaint(peer="n1", relayed=True)])
        swarm.miss("n2", "n1")
        assert swarm.wait(0.5) == []
    assert "n0 reaches it" in swarm.machine.history.decisions[-1]


@pytest.mark.parametrize(
    "report",
    [
        Report(seats=[SeatReport(stage=1, phase="running")], stalled_seconds=9),
        Report(seats=[SeatReport(stage=1, phase="syncing")]),
        None,  # the node has a replica
    ],
)
def test_who_is_not_needed_goes_though_others_reach_it(report: Report | None) -> None:
    swarm = full(lease=5)
    if report is None:
        swarm.enter("n1b", 1)
    else:
        swarm.renew("n1", report=report)
    silent(swarm, 6, "n1")
    assert [node for node in swarm.nodes() if node != "n1b"] == ["n0", "n2"]


@pytest.mark.parametrize("reported", ["a state at the start", "nothing of its seat yet"])
def test_a_last_holder_stays_though_others_have_told_of_later_steps(reported: str) -> None:
    swarm = full(lease=5)
    seats = [SeatReport(stage=1, phase="running")] if reported == "a state at the start" else []
    swarm.renew("n1", report=Report(seats=seats))
    for committed in range(20):
        swarm.tell("n0", "n2", phase="running", committed=committed)
        swarm.wait(0.5)
    assert swarm.nodes() == ["n0", "n1", "n2"]


def test_a_last_holder_whose_process_has_ended_goes_at_once() -> None:
    swarm = full(lease=5, reconnect=0.4)
    swarm.lose("n1", answers=False)
    assert swarm.wait(0.3) == []
    swarm.wait(0.2)
    assert swarm.nodes() == ["n0", "n2"]


def test_that_nobody_answers_who_dials_a_last_holder_does_not_say_that_it_is_gone() -> None:
    swarm = full(lease=5, reconnect=0.4)
    question = swarm.lost("n1")
    silent(swarm, 5, "n1")
    swarm.machine.dialled(question, "n1", None)
    assert silent(swarm, 5, "n1") == []
    swarm.machine.dialled(question, "n1", False)
    silent(swarm, 0.5, "n1")
    assert swarm.nodes() == ["n0", "n2"]


def test_a_last_holder_that_does_not_answer_a_probe_stays_while_anybody_reaches_it() -> None:
    swarm = full(lease=5, probe_timeout=3)
    swarm.suspect("n0", "n1")
    assert silent(swarm, 4.5, "n1", n0=["n1"]) == []
    assert "n2 reaches it" in swarm.machine.history.decisions[-1]
    assert silent(swarm, 5, "n1", n0=["n1"]) == []
    swarm.suspect("n0", "n1")
    assert silent(swarm, 5, "n1", n0=["n1"]) == []
    silent(swarm, 0.5, "n1", n0=["n1"], n2=["n1"])
    assert swarm.nodes() == ["n0", "n2"]


def test_who_reaches_a_last_holder_is_believed_though_its_own_stream_has_just_broken() -> None:
    swarm = full(lease=5)
    silent(swarm, 4.5, "n1", n0=["n1"])
    question = swarm.lost("n2")
    assert silent(swarm, 4, "n1", n0=["n1"]) == []
    swarm.machine.dialled(question, "n2", False)
    swarm.wait(0.5)
    assert swarm.nodes() == ["n0"], "n2 has gone, and n1, which nobody else reaches"


def test_one_that_only_just_needs_a_link_speaks_for_nobody() -> None:
    swarm = full(lease=5)
    silent(swarm, 3, "n1", n0=["n1"], n2=["n1"])
    complaints = {"n0": ["n1"], "n2": ["n1"]}
    for name in ("a", "b", "c"):
        swarm.join(name, 2)
        silent(swarm, 1, "n1", **complaints)
        complaints[name] = ["n1"]
    assert "n1" not in swarm.nodes()


def test_a_spare_that_is_sent_to_a_stage_only_just_needs_its_links() -> None:
    swarm = full(lease=5, max_replicas=1)
    swarm.enter("spare")
    silent(swarm, 4, "n1", n0=["n1"], n2=["n1"])
    swarm.leave("n2")
    assert swarm.stage("spare") == 2
    silent(swarm, 1, "n1", n0=["n1"])
    assert "n1" not in swarm.nodes()


def test_whom_the_driver_reaches_it_can_still_accuse() -> None:
    swarm = full(lease=5)
    silent(swarm, 10, "n1")
    swarm.suspect("n0", "n1", HANG, "no microbatch for 31 s")
    assert swarm.nodes() == ["n0", "n2"]


def test_a_new_registry_spares_a_last_holder_of_which_it_has_never_heard() -> None:
    before = full()
    swarm = restarted(before, stages=2, lease=5)
    swarm.open("n0", "n2")
    for _ in range(30):
        swarm.tell("n0", "n2", committed=9, phase="running")
        assert swarm.wait(0.5) == []
    assert swarm.nodes() == ["n0", "n1", "n2"]


def test_who_answers_stays_however_often_it_is_suspected() -> None:
    swarm = full(lease=100)
    for number in range(1, 20):
        probe = Probe("n1", number)
        assert swarm.suspect("n0", "n1") == [probe]
        assert swarm.suspect("n2", "n1") == [], "asked already"
        swarm.open("n1")
        assert swarm.effects == [probe], "a new stream is asked again"
        assert swarm.answer() == []
        assert swarm.machine.history.decisions[-1] == "n1 answers the registry"
        assert swarm.wait(2) == []


def test_an_ordinary_renewal_is_no_answer_to_a_probe() -> None:
    swarm = full(probe_timeout=1.5)
    swarm.suspect("n0", "n1")
    swarm.now += 1
    swarm.renew("n1")
    swarm.renew("n1", probe=77)
    why = evictions(swarm.wait(0.6))["n1"]
    assert "no answer to a probe for 1.5 s; suspected by n0: silent" in why
    assert swarm.effects[1:] == [Issue(swarm.view)]


def test_suspect_without_a_stream_has_the_time_to_reconnect() -> None:
    swarm = full(reconnect=0.4)
    swarm.lose("n1", answers=False)
    assert swarm.suspect("n0", "n1") == []
    swarm.open("n1")
    assert swarm.effects == []
    assert swarm.machine.history.decisions[-1] == "n1 answers the registry"
    swarm.lose("n1", answers=False)
    swarm.suspect("n0", "n1")
    assert "suspected by n0" in evictions(swarm.wait(0.5))["n1"]


def test_suspecting_a_stranger_or_by_a_stranger() -> None:
    swarm = full()
    assert swarm.suspect("n0", "nobody") == []
    with pytest.raises(Refused, match="accuser 'nobody' is no member"):
        swarm.suspect("nobody", "n0")
    with pytest.raises(Refused, match="accuses itself"):
        swarm.suspect("n0", "n0")


def test_where_nobody_else_could_drive_the_driver_is_believed() -> None:
    swarm = full()
    effects = swarm.suspect("n0", "n2", HANG, "no microbatch for 31 s")
    why = "hang: no microbatch for 31 s, according to the driver n0; no other node could confirm it"
    assert effects == [Evict("n2", why), Issue(swarm.view)]
    assert swarm.nodes() == ["n0", "n1"]


def two_at_the_end(stages: int = 2, **rules: object) -> Swarm:
    """Return a full swarm with a second node of stage 0, m0, which could drive."""
    swarm = full(stages, lease=1000, **rules)
    swarm.enter("m0", 0)
    return swarm


@pytest.mark.parametrize("pause", [0, 5])
def test_whom_the_driver_alone_accuses_stays_and_another_one_drives(pause: int) -> None:
    """A pause of the registry doesn't count as time for others to confirm the accusation."""
    swarm = two_at_the_end()
    swarm.accuse("n0", "n2", NUMBERS, "1e300")
    swarm.now += pause
    swarm.machine.paused(pause, swarm.now)
    assert swarm.wait(0.9) == []
    swarm.wait(0.2)
    assert swarm.view.driver == "m0"
    assert swarm.view.reason == (
        "n2 stays, since only n0 accuses it: numbers: 1e300; m0 drives instead, and observes for "
        "itself; m0 drives"
    )
    assert swarm.wait(100) == []
    assert swarm.nodes() == ["n0", "n1", "n2", "m0"]


def test_the_word_of_a_driver_that_goes_in_that_moment_is_none() -> None:
    swarm = two_at_the_end()
    swarm.accuse("n0", "n2", NUMBERS, "1e300")
    swarm.lose("n0", answers=False)
    swarm.now += swarm.machine.rules.corroboration_time
    swarm.after(swarm.machine.tick(swarm.now))
    assert swarm.nodes() == ["n1", "n2", "m0"]
    assert swarm.view.driver == "m0"


def test_whom_a_view_that_is_restored_does_not_have_nobody_accuses_any_more() -> None:
    later = two_at_the_end()
    later.after(later.machine.leave("n2", "", later.now))
    swarm = two_at_the_end(restart_grace=0.1)
    swarm.accuse("n0", "n2", NUMBERS, "1e300")
    swarm.machine.restore(later.view, swarm.now)
    swarm.wait(2)
    assert swarm.nodes() == ["n0", "n1", "m0"]


def test_who_drives_next_and_says_so_too_is_believed() -> None:
    swarm = two_at_the_end()
    swarm.accuse("n0", "n2", NUMBERS, "1e300")
    swarm.wait(2)
    swarm.suspect("m0", "n2", NUMBERS, "1e301")
    assert swarm.effects[0] == Evict("n2", "numbers: 1e301, according to n0, m0")
    assert swarm.view.driver == "m0"


@pytest.mark.parametrize(
    ("accusations", "evicted", "by"),
    [
        pytest.param("n0>n2 n1>n2", "n2", "n0, n1", id="the driver and a member are two"),
        pytest.param("n1>n2 n0>n2", "n2", "n1, n0", id="whoever says so first"),
        pytest.param("n2>n1 n3>n1 n2>n1 n3>n1", "", "", id="nobody goes without the driver"),
        pytest.param("n2>n1 n3>n1 n0>n1", "n1", "n2, n3, n0", id="all who said so are named"),
        pytest.param("n2>n1 n2>n3 n0>n1", "", "", id="an accuser has one accused at a time"),
        pytest.param("n2>n1 n2>n3 n0>n3", "n3", "n2, n0", id="its newest accused"),
        pytest.param("n1>n0 n2>n0", "", "", id="two of four don't evict the driver"),
        pytest.param("n1>n0 n2>n0 n3>n0", "n0", "n1, n2, n3", id="most of the others do"),
        pytest.param("n1>n0 n2>n0 later n3>n0", "", "", id="if their words fall together"),
    ],
)
def test_who_evicts_whom_for_cause(accusations: str, evicted: str, by: str) -> None:
    """The members are n0 to n3, and m0, which could also drive."""
    swarm = two_at_the_end(stages=3)
    for words in accusations.split():
        if words == "later":
            swarm.wait(STANDS)
            continue
        accuser, accused = words.split(">")
        swarm.suspect(accuser, accused, SHAPE, "so")
        if accused != evicted or not isinstance(swarm.effects[0], Evict):
            swarm.answer()
    if evicted:
        assert swarm.effects[0] == Evict(evicted, f"shape: so, according to {by}")
    assert {"n0", "n1", "n2", "n3", "m0"} - {*swarm.nodes()} == ({evicted} if evicted else set())


def test_a_driver_that_accuses_one_after_the_other_drives_last() -> None:
    swarm = two_at_the_end()
    for accused in ("n1", "n2"):
        swarm.accuse("n0", accused, NUMBERS, "so")
    swarm.wait(2)
    assert swarm.view.driver == "m0"
    assert swarm.nodes() == ["n0", "n1", "n2", "m0"]
    swarm.join("k0", 0)
    swarm.leave("m0")
    assert swarm.view.driver == "k0"


@pytest.mark.parametrize("first", [True, False])
def test_who_says_itself_that_it_hangs_is_the_second_that_does(first: bool) -> None:
    swarm = two_at_the_end()
    stalled = Report(stalled_seconds=7)
    if first:
        swarm.renew("n2", report=stalled)
    effects = swarm.suspect("n0", "n2", HANG, "no microbatch for 5 s")
    if not first:  # the report comes later
        swarm.answer()
        swarm.renew("n2", report=stalled)
        effects = swarm.wait(1)
    why = "hang: no microbatch for 5 s, according to the driver n0 and to n2 itself"
    assert effects[0] == Evict("n2", why)
    assert (swarm.nodes(), swarm.view.driver) == (["n0", "n1", "m0"], "n0")
    assert swarm.join("again", 2, key="n2").quarantine == 30, "by either path"


def test_where_nobody_else_could_drive_but_the_accused_nothing_changes() -> None:
    swarm = two_at_the_end()
    swarm.accuse("n0", "m0", DIVERGENCE, "other weights")
    assert swarm.wait(1) == []
    assert swarm.view.driver == "n0"
    assert swarm.nodes() == ["n0", "n1", "n2", "m0"]
    assert swarm.machine.history.decisions[-1] == (
        "m0 stays, since only n0 accuses it: divergence: other weights"
    )


def test_two_at_one_place_are_one_voice_against_who_is_elsewhere() -> None:
    swarm = Swarm(stages=1, lease=1000)
    for node, host in (("n0", "one"), ("m0", "one"), ("x0", "two"), ("n1", "three")):
        swarm.join(node, 1 if node == "n1" else 0, host=host, block="10.0.0.0/24")
    swarm.open("n0", "m0", "x0", "n1")
    swarm.accuse("m0", "n1", CHECKSUM, "damaged")
    swarm.accuse("n0", "n1", CHECKSUM, "damaged")
    swarm.wait(1)
    assert swarm.nodes() == ["n0", "m0", "x0", "n1"]
    assert swarm.view.driver == "x0", "m0 would be no other voice"
    swarm.accuse("m0", "x0", CHECKSUM, "damaged")
    swarm.suspect("x0", "n1", CHECKSUM, "damaged")
    assert swarm.nodes() == ["n0", "m0", "x0"]


def evicted_for(cause: Cause, why: str) -> Swarm:
    """Return a swarm that has evicted the node `bad`, whose key is i, for this cause."""
    swarm = full(lease=100)
    swarm.enter("bad", 1, key="i")
    swarm.suspect("n0", "bad", cause, why)
    return swarm


def test_who_was_evicted_for_cause_has_to_wait_and_a_new_registry_knows() -> None:
    swarm = evicted_for(HANG, "no microbatch for 31 s")
    reply = swarm.join("again", 1, key="i")
    assert (reply.quarantine, reply.HasField("view")) == (30, False)
    assert reply.reason == (
        "this node was evicted for cause as bad (hang: no microbatch for 31 s, according to "
        "the driver n0; no other node could confirm it); it may join again in 30 s"
    )
    assert swarm.join("other", 1, key="j").reason == "stage 1, as requested"
    late = Swarm(lease=100, restart_grace=0)
    late.machine.restore(swarm.view, 1000)
    late.now = 1010
    assert late.join("again", 1, key="i").quarantine == 20
    late.now = 1030
    assert late.join("again", 1, key="i").reason == "stage 1, as requested"
    (quarantined,) = late.machine.describe(late.now).quarantined
    assert (quarantined.node, quarantined.seconds, quarantined.times) == ("bad", 0, 1)
    swarm = evicted_for(AUDIT, "its sum is wrong")
    assert swarm.join("again", 1, key="i").quarantine == 3600


def test_who_has_diverged_three_times_is_not_taken_back() -> None:
    swarm = full(lease=1e6)
    for number, seconds in enumerate((30, 60, 0)):
        swarm.join(f"bad{number}", 1, key="i")
        swarm.suspect("n0", f"bad{number}", DIVERGENCE, "other weights than n1")
        swarm.now += seconds
    with pytest.raises(
        Refused, match=r"may not join again: .* 3 times, the last time as bad2"
    ) as e:
        swarm.join("again", 1, key="i")
    assert e.value.code == "PERMISSION_DENIED"


def test_who_leaves_or_dies_is_in_no_quarantine() -> None:
    swarm = full(lease=5)
    swarm.join("gone", 1, key="i")
    swarm.leave("gone")
    swarm.join("silent", 1, key="i")
    swarm.suspect("n1", "silent", HANG, "slow")
    swarm.now += 4
    for node in ("n0", "n1", "n2"):
        swarm.miss(node)
    swarm.wait(2)
    assert "silent" not in swarm.nodes()
    assert swarm.join("back", 1, key="i").reason == "stage 1, as requested"


def cut_off(swarm: Swarm, seconds: int, *pairs: tuple[str, str], relayed: bool = False) -> None:
    """Let both nodes of each pair complain of each other, for so many seconds."""
    for _ in range(seconds):
        for node in swarm.nodes():
            peers = [b for a, b in pairs if a == node] + [a for a, b in pairs if b == node]
            complaints = [Complaint(peer=peer, relayed=relayed) for peer in peers]
            swarm.tell(node, committed=7, phase="running", complaints=complaints)
        swarm.wait(1)


def test_two_that_cannot_reach_each_other_get_a_relay_which_outlives_the_registry() -> None:
    swarm = full(lease=5)
    number = swarm.view.number
    cut_off(swarm, 1, ("n1", "n2"))
    assert swarm.view.number == number, "one of them may be dead, for all that is known"
    cut_off(swarm, 1, ("n1", "n2"))
    assert swarm.view.number == number + 1
    cut_off(swarm, 42, ("n1", "n2"), relayed=True)
    assert list(swarm.view.relays) == [Relay(a="n1", b="n2", via="n0")]
    assert swarm.view.reason == "n1 and n2 can't reach each other: n0 relays for them"
    assert swarm.view.number == number + 1
    (cut,) = swarm.machine.describe(swarm.now).cuts
    assert (cut.a, cut.b, cut.via, cut.seconds) == ("n1", "n2", "n0", 44)
    assert cut.state == "n0 relays for them"
    late = restarted(swarm, lease=5)
    late.open("n0", "n1", "n2")
    cut_off(late, 20, ("n1", "n2"), relayed=True)
    assert late.view == swarm.view
    cut_off(late, 11)
    assert not late.view.relays
    assert late.view.reason == "n1 and n2 reach each other again"


def test_nobody_carries_to_one_that_was_not_heard_since_it_was_complained_of() -> None:
    swarm = full(lease=5)
    number = swarm.view.number
    for _ in range(4):
        swarm.miss("n0")
        swarm.miss("n1", "n2")
        swarm.wait(1)
    assert swarm.view.number == number
    swarm.renew("n2")
    swarm.wait(1)
    assert [relay.via for relay in swarm.view.relays] == ["n0"]


def test_however_many_are_mute_those_stay_that_the_driver_reaches() -> None:
    """The stage's last holder has left, and only the newest node of the stage is honest."""
    swarm = full(lease=5)
    mute = ["x0", "x1", "x2", "x3"]
    for node in [*mute, "new"]:
        swarm.join(node, 1)
        swarm.open(node)
    swarm.leave("n1")
    for second in range(30):
        for node in set(mute) & set(swarm.nodes()):
            swarm.renew(node, report=Report())
        for node, since, phase in (("new", 0, "syncing"), ("n0", 2, "halted"), ("n2", 2, "halted")):
            complaints = [Complaint(peer=peer) for peer in mute if second >= since]
            swarm.tell(node, complaints=complaints, committed=7, phase=phase)
        swarm.wait(1)
    assert swarm.nodes() == ["n0", "n2", "new"]


def test_of_two_for_whom_nobody_can_carry_the_one_with_a_replica_goes_once() -> None:
    swarm = full(stages=1, lease=5)
    cut_off(swarm, 100, ("n0", "n1"))
    assert swarm.nodes() == ["n0", "n1"], "both are last holders"
    (cut,) = swarm.machine.describe(swarm.now).cuts
    assert cut.state == "no member can relay for them, and neither can be spared"
    swarm = full(stages=1, lease=5)
    swarm.enter("twin", 1)
    cut_off(swarm, 60, ("n0", "n1"), ("n1", "twin"))
    assert swarm.nodes() == ["n0", "twin"]
    (gone,) = swarm.machine.describe(swarm.now).evictions
    assert (gone.member.node, gone.reason) == ("n1", "unreachable from n0 for 10 s, though alive")


def test_one_whom_nobody_but_the_registry_reaches_goes_though_it_is_the_last_holder() -> None:
    swarm = full(stages=3, lease=5)
    cut_off(swarm, 60, ("n2", "n0"), ("n2", "n1"), ("n2", "n3"))
    assert swarm.nodes() == ["n0", "n1", "n3"]


def test_in_the_grace_of_a_restart_nobody_goes_and_nothing_is_relayed() -> None:
    before = full(lease=5)
    swarm = restarted(before, lease=5, restart_grace=30)
    swarm.open("n0", "n1", "n2")
    cut_off(swarm, 29, ("n1", "n2"))
    assert swarm.view == before.view
    cut_off(swarm, 2, ("n1", "n2"))
    assert swarm.view.relays


def test_a_renewal_by_a_stranger_is_told_to_join_again() -> None:
    swarm = full()
    assert "join again" in evictions(swarm.renew("ghost"))["ghost"]


def test_another_run_is_told_so() -> None:
    swarm = full()
    with pytest.raises(Refused, match="this registry serves run r, not other"):
        swarm.machine.stream_opened(Renewal(node="n0", run="other"), swarm.now)


@pytest.mark.parametrize(
    ("reports", "age"),
    [
        ([("n0", 7, 0), ("n1", 5, 0)], (0, 7)),
        ([("n1", 99, 3), ("n0", 7, 0)], (0, 7)),  # n1 isn't the driver
        ([("n0", 37, 0), ("n0", 30, 1), ("n0", 38, 0)], (1, 30)),  # a later lineage is newer
    ],
)
def test_what_the_driver_has_committed_travels_with_views(
    reports: list[tuple[str, int, int]], age: tuple[int, int]
) -> None:
    swarm = full(steps=100)
    number = swarm.view.number
    for node, committed, lineage in reports:
        report = swarm.report(node, committed=committed, lineage=lineage)
        assert swarm.renew(node, report=report) == []
    assert swarm.view.number == number
    swarm.join("a")
    assert (swarm.view.lineage, swarm.view.committed) == age


def test_a_spare_takes_over_from_who_will_leave_soon_before_it_does() -> None:
    swarm = Swarm(stages=1, max_replicas=1)
    swarm.seat(a=0, b=1)
    swarm.join("standby")
    assert swarm.stage("standby") is None
    before = swarm.view
    swarm.renew("b", report=Report(leaving=True))
    assert "will leave soon" in swarm.view.reason
    assert [member.node for member in swarm.view.members if member.leaving] == ["b"]
    assert not any(member.leaving for member in before.members), "a view that was issued is changed"
    swarm.wait(LEAVES_COLLECTED)
    assert (swarm.stage("standby"), swarm.stage("b")) == (1, 1)
    number = swarm.view.number
    swarm.renew("b", report=Report(leaving=True))
    assert swarm.view.number == number


def test_of_those_who_leave_together_none_gets_a_seat() -> None:
    swarm = Swarm(stages=2)
    for stage, node in enumerate("abc"):
        swarm.join(node, stage, room=3)
    assert swarm.view.driver == "a"
    for node in "abc":
        swarm.renew(node, report=Report(leaving=True))
        swarm.wait(LEAVES_COLLECTED / 4)
    swarm.wait(LEAVES_COLLECTED)
    assert [stages_of(member) for member in swarm.view.members] == [[0], [1], [2]]
    swarm.join("d", room=3)
    assert swarm.stage("d") == 0, "only who leaves is there"
    swarm.renew("b", report=Report())
    assert [member.node for member in swarm.view.members if member.leaving] == ["a", "c"]
    assert "b (stage 1) stays after all" in swarm.view.reason


def test_who_leaves_does_not_drive_if_another_one_can() -> None:
    swarm = Swarm(stages=1)
    swarm.seat(a=0, b=0, c=0, d=1)
    swarm.renew("b", report=Report(leaving=True))
    assert swarm.view.driver == "a"
    swarm.leave("a")
    assert swarm.view.driver == "c"


def test_who_has_replicas_that_stay_needs_no_spare_when_it_leaves() -> None:
    swarm = Swarm(stages=1, max_replicas=2)
    swarm.seat(a=0, b=1, c=1, d=0)
    swarm.join("standby")
    swarm.renew("b", report=Report(leaving=True))
    swarm.wait(LEAVES_COLLECTED)
    assert swarm.stage("standby") is None


def test_a_journal_without_members_asks_for_no_grace() -> None:
    swarm = Swarm(stages=2)
    swarm.machine.restore(issued(number=9, committed=7, reason="all had ended"), swarm.now)
    assert swarm.machine.history.decisions[-1] == "restored view 9 with 0 nodes"
    swarm.join("a", 0)
    assert (swarm.view.number, swarm.view.committed) == (10, 7)


def test_an_order_before_nodes_report_to_a_restarted_registry_leaves_them_their_driver() -> None:
    before = Swarm(stages=1, replicas=2)
    before.seat(a=0, b=1, c=0, d=1)
    before.open(*"abcd")
    before.tell(*"abcd", committed=7)
    before.leave("d")
    assert (before.view.driver, before.view.committed) == ("a", 7)
    swarm = restarted(before, stages=1, replicas=2)
    swarm.after(swarm.machine.command("pause", "", swarm.now)[1])
    assert swarm.view.driver == "a"


def test_a_restarted_registry_goes_on_after_the_grace() -> None:
    before = full()
    swarm = Swarm(stages=2, lease=5)
    swarm.now = 1000
    swarm.machine.restore(before.view, swarm.now)
    assert swarm.view == before.view
    swarm.refuses("a", why=r"join again in 6\.0 s", code="UNAVAILABLE")
    assert swarm.join("n1", 1).view == before.view, "a lost reply is answered meanwhile"
    swarm.open("n0", "n1")
    swarm.leave("n1", why="ill")
    assert swarm.effects == []
    assert swarm.wait(5.5) == [], "leases are over, the grace isn't"
    swarm.miss("n0", "n2")
    swarm.wait(0.6)
    assert swarm.nodes() == ["n0"]
    assert swarm.view.number == before.view.number + 1
    assert swarm.view.driver == "n0"
    assert "left: ill" in swarm.view.reason


def test_nothing_is_restored_from_a_view_of_more_stages() -> None:
    view = issued(number=1, members=[Member(node="a", seats=[Seat(stage=9)], joined=1)])
    with pytest.raises(ValueError, match="stages above 2"):
        Swarm().machine.restore(view, 0.0)


def test_a_registry_without_its_journal_learns_from_its_members() -> None:
    view = full().view
    swarm = Swarm(stages=2)
    swarm.join("early")
    renewal = Renewal(node="n1", run="r", member=view.members[1], view=view)
    effects = swarm.after(swarm.machine.stream_opened(renewal, swarm.now))
    assert Issue(view) in effects, "it is journaled and shown to onlookers"
    assert any(isinstance(e, Evict) and e.node == "early" for e in effects)
    assert swarm.view == view
    swarm.wait(4)
    swarm.open("n0", "n1", "n2")
    assert swarm.wait(3) == []
    swarm.join("late")
    assert swarm.view.number == view.number + 1
    assert swarm.view.driver == view.driver


def test_a_registry_that_leads_its_run_believes_no_newer_view() -> None:
    swarm = full()
    newer = issued(number=99, members=[Member(node="x", seats=[Seat(stage=0)], joined=1)])
    renewal = Renewal(node="x", run="r", view=newer)
    (evict,) = swarm.after(swarm.machine.stream_opened(renewal, swarm.now))
    assert isinstance(evict, Evict)
    assert swarm.nodes() == ["n0", "n1", "n2"]


def test_a_registry_without_its_journal_believes_no_view_that_it_has_not_signed() -> None:
    view = full().view
    for forger in (None, identity("n0")):
        forged = View()
        forged.CopyFrom(view)
        forged.number, forged.driver = 99, "n0"
        forged.members[0].address = "elsewhere:1"
        if forger is not None:
            sign(forged, forger, view)
        swarm = Swarm()
        for node in ("n0", "stranger"):
            renewal = Renewal(node=node, run="r", member=forged.members[0], view=forged)
            with pytest.raises(Refused, match=f"{node} shows view 99, which this .* not signed"):
                swarm.machine.stream_opened(renewal, swarm.now)
        assert swarm.view.number == 0
        swarm.after(swarm.machine.stream_opened(Renewal(node="n1", run="r", view=view), swarm.now))
        assert swarm.view == view


def test_members_of_a_registry_with_another_key_are_not_sent_away_by_one_that_has_its_own() -> None:
    """If the registry has lost its key, the members' progress isn't lost with it."""
    other = Swarm()
    other.machine.key = identity("another registry")
    other.join("a")
    swarm = full()
    assert swarm.view.number > other.view.number
    with pytest.raises(Refused, match=r"the folder of that key .--authority DIR.; if"):
        swarm.machine.stream_opened(Renewal(node="a", run="r", view=other.view), swarm.now)


def test_time_in_which_the_registry_was_held_up_does_not_count() -> None:
    swarm = full(lease=5)
    swarm.now = 6
    swarm.machine.paused(2, swarm.now)
    assert swarm.wait(0.9) == []
    swarm.miss("n0", "n1", "n2")
    swarm.wait(0.2)
    assert swarm.nodes() == ["n0"]


def test_after_a_long_hold_up_nodes_have_the_grace_to_come_back() -> None:
    swarm = full(lease=5)
    swarm.now = 60
    swarm.machine.paused(59, swarm.now)
    swarm.break_streams(*swarm.nodes())
    assert swarm.wait(4) == []
    swarm.open("n0", "n1")
    swarm.miss("n0", "n2")
    swarm.miss("n1", "n2")
    swarm.wait(2.1)
    assert swarm.nodes() == ["n0", "n1"]


def test_a_registry_that_hears_nobody_takes_itself_for_cut_off() -> None:
    swarm = full(lease=5)
    swarm.open("n0", "n1", "n2")
    assert swarm.wait(60) == [], "the members go on training; whom would a view reach?"
    swarm.renew("n1")
    swarm.wait(0.1)
    assert swarm.wait(5.9) == [], "the others get time to come back"
    swarm.miss("n1", "n0")
    swarm.miss("n2", "n0")
    swarm.wait(0.2)
    assert swarm.nodes() == ["n1", "n2"]


def lone(stream: bool = False) -> Swarm:
    """Return a swarm of one node that isn't heard: its stream broke, or its lease is over."""
    swarm = Swarm(stages=1, lease=5, restart_grace=10)
    swarm.enter("old")
    if stream:
        swarm.break_streams("old")
    swarm.wait(0.1 if stream else 60)
    return swarm


@pytest.mark.parametrize("stream", [True, False])
def test_a_lone_node_that_neither_registry_nor_newcomer_can_dial_is_gone(stream: bool) -> None:
    swarm = lone(stream)
    reply = swarm.join("new")
    assert reply.question
    assert not reply.HasField("view")
    assert [member.address for member in reply.unheard] == ["old:1"]
    (dial,) = swarm.effects
    assert dial == Dial(reply.question, "old", "old:1", reply.dial_seconds)
    swarm.machine.dialled(reply.question, "old", False)
    assert swarm.join_again("new", reply).reason == "stage 0 was vacant"
    assert swarm.nodes() == ["new"]
    reason = "not heard, and no answer to dials by the registry and new"
    assert f"old (stage 0) is gone: {reason}" in list(swarm.machine.history.decisions)[-2]
    assert swarm.wait(0.1) == []
    swarm.join("newer")
    assert swarm.nodes() == ["new", "newer"], "nobody has to be waited for any more"


@pytest.mark.parametrize("by_registry", [True, False])
def test_a_lone_node_that_answers_either_is_not_gone(by_registry: bool) -> None:
    swarm = lone()
    reply = swarm.ask("new", answering=["old"] if by_registry else [])
    answered = [] if by_registry else ["old"]
    swarm.refuses(
        "new",
        question=reply.question,
        answered=answered,
        why=r"old \(stage 0, old:1\) answers a dial",
        code="ABORTED",
    )
    assert swarm.nodes() == ["old"]
    swarm.wait(reply.dial_seconds)
    again = swarm.ask("new", question=reply.question)
    assert again.question > reply.question, "it may be gone by now"
    assert swarm.join_again("new", again).reason == "stage 0 was vacant"


def test_a_member_is_heard_again_while_it_is_dialled() -> None:
    swarm = lone()
    reply = swarm.ask("new")
    swarm.renew("old")
    assert swarm.wait(0.1) == []
    swarm.refuses("new", question=reply.question, why="waits for its members")
    for _ in range(3):
        swarm.renew("old")
        swarm.wait(4)
    assert swarm.join("new", question=reply.question).reason == "stage 1 was vacant"
    assert swarm.nodes() == ["old", "new"]


def test_the_registry_has_to_have_dialled_too() -> None:
    swarm = lone()
    reply = swarm.join("new")
    swarm.refuses("new", question=reply.question, why="some are being dialled", code="UNAVAILABLE")
    swarm.machine.dialled(reply.question - 1, "old", False)
    swarm.refuses("new", question=reply.question, why="some are being dialled")
    swarm.machine.dialled(reply.question, "old", False)
    swarm.join_again("new", reply)
    assert swarm.nodes() == ["new"]


def test_a_newcomer_has_to_have_dialled_too() -> None:
    swarm = lone()
    reply = swarm.ask("new")
    assert swarm.join("new") == reply
    assert swarm.join("newer") == reply
    assert swarm.effects == [], "members are dialled once"
    swarm.join_again("newer", reply)
    assert swarm.nodes() == ["newer"]


@pytest.mark.parametrize(("pause", "wait"), [(0, 60), (1.5, 10)])
def test_what_a_question_has_come_to_counts_neither_for_ever_nor_after_a_pause(
    pause: float, wait: float
) -> None:
    swarm = lone()
    reply = swarm.ask("new")
    if pause:
        swarm.machine.paused(pause, swarm.now)
    swarm.wait(wait)
    assert swarm.ask("new", question=reply.question).question > reply.question


def test_a_lone_node_that_only_dials_out_has_the_grace_to_call() -> None:
    swarm = Swarm(stages=1, lease=5, restart_grace=10)
    swarm.join("old", address="")
    swarm.wait(60)
    reply = swarm.ask("new")
    assert not reply.unheard
    swarm.wait(9)
    swarm.refuses("new", question=reply.question, why=r"old can't be dialled; join again in 1\.0 s")
    swarm.wait(1)
    swarm.join_again("new", reply)
    assert swarm.nodes() == ["new"]
    assert "not heard, and not reconnected within 10 s" in swarm.machine.history.decisions[-2]


def test_all_vanish_at_once_and_come_back_one_by_one() -> None:
    swarm = full(lease=5, start_grace=0)
    swarm.tell(committed=7)
    swarm.break_streams(*swarm.nodes())
    swarm.wait(60)
    reply = swarm.ask("back1", address="n1:1", stage=1, key="n1")
    assert {member.node for member in reply.unheard} == {"n0", "n2"}, "n1 is known to be gone"
    swarm.join_again("back1", reply, address="n1:1", stage=1, key="n1")
    assert swarm.nodes() == ["back1"]
    swarm.open("back1")
    swarm.join("back0", address="n0:1", stage=0, key="n0")
    swarm.join("elsewhere")
    assert [swarm.stage(node) for node in swarm.nodes()] == [1, 0, 2]
    assert swarm.view.driver == "back0"
    assert swarm.view.committed == 7


def test_a_lone_node_that_is_started_again_at_its_address_needs_no_dialling() -> None:
    swarm = lone(stream=True)
    assert swarm.join("again", address="old:1", key="old").reason == "stage 0 was vacant"
    assert swarm.nodes() == ["again"]


def test_one_of_many_that_answers_speaks_for_all() -> None:
    swarm = full(lease=5)
    swarm.wait(60)
    reply = swarm.ask("new", answering=["n2"])
    swarm.refuses("new", question=reply.question, why="n2")
    assert swarm.nodes() == ["n0", "n1", "n2"], "they may train together"


def test_of_very_many_some_are_dialled() -> None:
    swarm = Swarm(joins_per_second=1000)
    for number in range(3 * MOST_DIALLED + 1):
        swarm.join(f"n{number}")
    swarm.wait(60)
    dialled = [member.node for member in swarm.ask("new").unheard]
    assert 0.7 * MOST_DIALLED < len(dialled) <= MOST_DIALLED
    assert dialled[:3] == ["n0", "n4", "n8"]


def test_a_newcomer_that_is_refused_leaves_the_gone_gone() -> None:
    swarm = Swarm(stages=1, lease=5, data="hash")
    swarm.join("old", data="hash")
    swarm.wait(60)
    reply = swarm.ask("new", stage=0)
    with pytest.raises(Refused, match="stage 0 needs the prepared data"):
        swarm.join_again("new", reply, stage=0)
    assert swarm.nodes() == []


def test_a_node_of_which_nothing_is_heard_but_its_goodbye_is_gone() -> None:
    swarm = lone()
    swarm.leave("old")
    swarm.wait(10)
    assert swarm.nodes() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"node": ""},
        {"node": "a\n2026-01-01 INFO all is well"},
        {"node": "a/1"},
        {"node": "x" * 129},
        {"node": "\N{CYRILLIC SMALL LETTER A}"},
        {"data": "no digest"},
        {"host": "h\rb"},
        {"device": "GPU\u202e"},
        {"address": "h\x1b2J:7400"},
    ],
)
def test_who_calls_itself_what_is_no_name_is_refused(fields: dict[str, str]) -> None:
    swarm = Swarm()
    problem = r"is not a valid name|isn't printable|is more than HOST:PORT"
    with pytest.raises(Refused, match=problem) as caught:
        join(swarm.machine, JoinRequest(**{"protocol": PROTOCOL, "node": "a", **fields}), swarm.now)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.reason.isprintable()
    assert swarm.nodes() == []


def test_what_nodes_say_is_told_in_words_that_a_terminal_shows_and_does_not_obey() -> None:
    swarm = full()
    evil = "bad\n2026-01-01 INFO all is well\x1b[2J"
    safe = "bad\\n2026-01-01 INFO all is well\\x1b[2J"
    seat = SeatReport(stage=0, message=evil, phase=evil)
    said = Report(seats=[seat], trouble=evil, seen=[LinkReport(peer=evil)])
    swarm.renew("n1", report=said)
    report = swarm.machine.describe(swarm.now).members[1].report
    assert (report.seats[0].message, report.seats[0].phase, report.trouble) == (safe, safe, safe)
    assert report.seen[0].peer == safe
    swarm.suspect("n0", "n2", NUMBERS, evil)
    swarm.leave("n1", why=evil)
    description = swarm.machine.describe(swarm.now)
    assert safe in description.view.reason
    assert safe in "".join(description.decisions)
    assert safe in description.evictions[-1].reason
    assert all(text.isprintable() for text in (description.view.reason, *description.decisions))


def test_describe_tells_everything() -> None:
    swarm = full()
    swarm.tell("n1", phase="forward")
    swarm.suspect("n0", "n2")
    description = swarm.machine.describe(swarm.now + 1.5)
    assert [m.suspected for m in description.members] == [False, False, True]
    assert description.members[1].report.seats[0].phase == "forward"
    assert description.members[0].since_renewal == 1.5
    assert description.view == swarm.view
    assert description.decisions[-1] == "n2 is suspected by n0: silent"


def test_rebuilds_are_remembered_when_who_ordered_them_is_gone() -> None:
    swarm = full(stages=1)
    swarm.enter("twin", 0)
    done = [Rebuild(stage=1, step=9, method="checkfree"), Rebuild(stage=1, step=4, method="twin")]
    for node in ("n0", "n0", "twin"):
        swarm.renew(node, report=Report(rebuilds=done))
    swarm.leave("n0", why="it has to go")
    assert list(swarm.machine.describe(swarm.now).rebuilds) == sorted(done, key=lambda r: r.step)
    for step in range(500):
        swarm.renew(
            "twin", report=Report(rebuilds=[Rebuild(stage=1, step=step, method="checkfree")])
        )
    kept = [rebuild.step for rebuild in swarm.machine.describe(swarm.now).rebuilds]
    assert kept == list(range(400, 500))


def stranger_is_refused(swarm: Swarm, why: str, code: str = "UNAVAILABLE") -> None:
    """Assert that a node that joins from n1's address with another key is refused."""
    swarm.refuses("x", 1, "n1:1", key="another", why=why, code=code)


def contest(swarm: Swarm, answers: bool | None) -> None:
    """Let a stranger join from n1's address. `answers`: the result of the registry's dial to n1."""
    reply = swarm.join("x", 1, "n1:1", key="another")
    assert reply.question
    assert swarm.effects == [Dial(reply.question, "n1", "n1:1", 4.0)]
    stranger_is_refused(swarm, r"address of n1 \(stage 1\), and the registry checks")
    swarm.machine.dialled(reply.question, "n1", answers)


def test_nobody_takes_the_address_of_a_member_that_answers() -> None:
    swarm = full(lease=100)
    contest(swarm, True)
    stranger_is_refused(swarm, "which has another key and answers; choose", "ALREADY_EXISTS")
    assert swarm.nodes() == ["n0", "n1", "n2"]


@pytest.mark.parametrize("answers", [False, None])
def test_nobody_takes_the_address_of_a_member_that_renews(answers: bool | None) -> None:
    swarm = full(lease=10)
    contest(swarm, answers)
    for _ in range(3):
        stranger_is_refused(swarm, "the registry checks whether it is alive")
        swarm.now += 1
    swarm.renew("n1")
    stranger_is_refused(swarm, "which has another key and renews its lease", "ABORTED")
    assert swarm.nodes() == ["n0", "n1", "n2"]


def test_the_address_of_who_is_gone_is_another_ones() -> None:
    swarm = full(lease=100)
    contest(swarm, False)
    swarm.break_streams("n1")
    swarm.join("x", 1, "n1:1", key="another")
    assert swarm.nodes() == ["n0", "n2", "x"]


def test_a_frozen_member_has_half_a_lease_to_keep_its_address() -> None:
    swarm = full(lease=10)
    contest(swarm, None)
    swarm.now += 5
    swarm.join("x", 1, "n1:1", key="another")
    assert swarm.nodes() == ["n0", "n2", "x"]


@pytest.mark.parametrize("liar", ["n0", "n1"])
def test_more_steps_than_the_run_has_are_refused_and_no_view_has_them(liar: str) -> None:
    swarm = full(steps=100)
    swarm.tell("n0", committed=7)
    why = "step 1000000000 can't be committed in a run of 100 steps"
    for _ in range(2):
        assert swarm.renew(liar, report=swarm.report(liar, committed=10**9)) == []
    swarm.join("x")
    assert (swarm.view.lineage, swarm.view.committed) == (0, 7)
    decisions = swarm.machine.history.decisions
    assert len([decision for decision in decisions if why in decision and liar in decision]) == 1
    described = swarm.machine.describe(swarm.now).members
    assert all(seat.committed <= 7 for member in described for seat in member.report.seats)


def test_a_view_with_more_steps_than_the_run_file_has_is_learned_from() -> None:
    change = Change(number=1, settings=["steps=200"], step=100)
    shown = issued(number=9, committed=101, members=full().view.members, changes=[change])
    swarm = Swarm(steps=100)
    swarm.after(swarm.machine.stream_opened(Renewal(node="n0", run="r", view=shown), swarm.now))
    assert swarm.nodes() == ["n0", "n1", "n2"]


HERE, THERE, ELSEWHERE = "203.0.113.0/24", "198.51.100.0/24", "2001:db8::/64"


def test_a_newcomer_goes_where_nobody_of_its_place_is_unless_that_has_much_more() -> None:
    swarm = full(stages=2)
    swarm.join("a", 1, host="a", block=HERE)
    swarm.join("b", 2, host="b", block=THERE)
    assert "the least capacity (0)" not in swarm.join("c", host="c", block=HERE).reason
    (c,) = (m for m in swarm.view.members if m.node == "c")
    assert stages_of(c) == [0], "where one is, as at the others, and none of these"
    swarm.join("d", 0, host="d", block=THERE)
    assert swarm.join("e", host="e", block=HERE).reason == "stage 2 had the least capacity (2)"


def test_nine_names_of_one_owner_are_not_the_whole_stage_while_somebody_else_comes() -> None:
    """Honest nodes that come while there is no room wait; after a loss one gets into the stage."""
    swarm = Swarm(stages=2, start_grace=0, max_replicas=9, lease=100)
    for stage in range(3):
        swarm.join(f"n{stage}", stage, host=f"n{stage}", block=THERE)
    for number in range(9):
        swarm.join(f"s{number}", 1, host=f"s{number}", block=HERE)
    for number in range(16):
        swarm.join(f"m{number}", number % 2 * 2, host=f"m{number}", block=f"10.0.{number}.0/24")
    reply = swarm.join("spare", host="spare", block=ELSEWHERE)
    assert reply.reason == "standby: every stage has 9 nodes or more"
    swarm.leave("n1")
    seats = {member.node: stages_of(member) for member in swarm.view.members}
    assert seats["spare"] == [1]
    assert (
        "spare takes stage 1: was a standby: all nodes of stage 1 are in one failure domain"
        in swarm.view.reason
    )
    assert all(seats[f"s{number}"] == [1] for number in range(9)), "nobody has lost a seat"


def test_who_comes_when_a_stage_is_all_of_one_owner_goes_there() -> None:
    swarm = Swarm(stages=2, start_grace=0)
    for node, stage in (("n0", 0), ("n2", 2)):
        swarm.join(node, stage, host=node, block=THERE)
    for number in range(9):
        swarm.join(f"s{number}", 1, host=f"s{number}", block=HERE)
    assert swarm.join("s9", host="s9", block=HERE).reason.startswith("stage 0 had the least")
    reply = swarm.join("honest", host="honest", block=ELSEWHERE)
    assert reply.reason == "stage 1 had all its nodes in one failure domain"


def test_who_wants_to_stand_by_does_so_also_where_a_stage_is_in_one_place() -> None:
    swarm = Swarm(stages=1, start_grace=0)
    for node, stage in (("a0", 0), ("a1", 1), ("b0", 0), ("b1", 1)):
        swarm.join(node, stage, host=node, block=HERE)
    swarm.join("c", standby=True, host="c", block=THERE)
    swarm.join("b2", 1, host="b2", block=HERE)
    (c,) = (m for m in swarm.view.members if m.node == "c")
    assert (stages_of(c), c.standby, c.block) == ([], True, THERE)


def test_so_many_join_from_a_block_of_addresses_as_the_operator_says() -> None:
    swarm = Swarm(stages=1, start_grace=0, max_per_block=2)
    for number in range(4):
        swarm.join(f"own{number}", host="here")
    swarm.join("a", block=HERE, key="a")
    swarm.join("b", block=HERE, key="b")
    swarm.refuses(
        "c",
        block=HERE,
        key="c",
        why=r"2 nodes have joined from 203\.0\.113\.0/24",
        code="RESOURCE_EXHAUSTED",
    )
    swarm.join("d", block=THERE, key="d")
    swarm.open("a")
    swarm.join("b-again", block=HERE, key="b")
    swarm.refuses("c", block=HERE, key="c", why="most-per-block")
    late = restarted(swarm, stages=1, start_grace=0, restart_grace=0, max_per_block=2)
    late.refuses("e", block=HERE, key="e", why="2 nodes have joined")


def test_a_key_is_one_members_at_a_time() -> None:
    swarm = Swarm(stages=1, start_grace=0)
    swarm.join("a", 0, key="a")
    swarm.join("b", 1, key="b")
    swarm.open("a", "b")
    for number in range(9):
        swarm.refuses(
            f"b{number}", key="b", why=r"^b \(stage 1, at b:1\) has the same key", code="ABORTED"
        )
    swarm.break_streams("b")
    for number in range(9):
        swarm.join(f"c{number}", key="b")
    assert swarm.nodes() == ["a", "c8"]


def test_only_those_join_that_are_allowed_and_others_go_when_the_registry_learns_it() -> None:
    swarm = Swarm(stages=1, start_grace=0, allowed=frozenset(map(instance_of, [b"a", b"b"])))
    swarm.join("one", key="a")
    swarm.join("two", key="b")
    swarm.refuses(
        "other", key="c", why=f"add the instance {instance_of(b'c')} to", code="PERMISSION_DENIED"
    )
    late = restarted(
        swarm, stages=1, start_grace=0, restart_grace=1, allowed=frozenset([instance_of(b"a")])
    )
    late.open("one", "two")
    effects = late.wait(1.5)
    assert Evict("two", "its instance is no longer on this run's allow list") in effects
    assert late.nodes() == ["one"]


def test_members_hear_who_is_banned_and_who_is_not_any_more() -> None:
    swarm, banned = Swarm(), ["b" * 32, "a" * 32]
    swarm.machine.bar(banned)
    swarm.join("a", stage=0)
    assert list(swarm.view.banned) == sorted(banned)
    number = swarm.view.number
    assert swarm.wait(0.1) == []
    swarm.machine.bar(banned[:1])
    assert [effect.view.number for effect in swarm.wait(0.1)] == [number + 1]
    assert list(swarm.view.banned) == banned[:1]
    late = restarted(swarm)
    late.open("a")
    while late.now < 2 * late.machine.rules.grace:
        late.renew("a")
        late.wait(1.0)
    assert not late.view.banned  # bans come from the operator, not from old views
