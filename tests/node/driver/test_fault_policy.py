"""What the driver charges members with; test_driver.py has most of its verdicts."""

from pathlib import Path

from planaria.bootstrap.registry_pb2 import SHAPE
from planaria.node.driver.divergence import STRIKES
from planaria.node.driver.fault_policy import (
    HELD_UP,
    HELD_UP_BY_SEVERAL,
    SPOILT,
    UNEXPLAINED,
    UNVOTED,
    VAIN,
    FaultPolicy,
)
from planaria.node.driver.spot_checks import WRONG
from planaria.node.report.events import Accused
from planaria.node.transaction.effects import Rejoin
from planaria.node.wire import stage_pb2 as pb

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"
CHARGES = {
    "accused by one member": "rest",
    "accused by one replica": "rest, as a joiner",
    "accused by two nodes or the driver": "eviction",
    "accuses two replicas of a stage": "is accused itself",
    f"{VAIN} accusations that nobody else makes": "eviction",
    f"{HELD_UP} failed attempts or rebuilds, less those of others": "eviction",
    f"{HELD_UP_BY_SEVERAL} of these": "eviction",
    f"{UNVOTED} votes or states too late, alone": "eviction",
    f"{UNEXPLAINED} losses of messages, explained by it alone": "eviction",
    f"{SPOILT} steps with non-finite values, alone": "eviction",
    "differs from its replicas": "a new copy",
    f"differs {STRIKES} times": "eviction",
    f"computes otherwise than two others {WRONG} times": "eviction",
    "fails an audit of gradients": 'eviction, with `"exclude"`',
}
"""What each charge costs a node where its stage has others."""


def test_the_page_has_the_limits_of_the_code() -> None:
    _, table = PROTOCOL.read_text().split("| charge | cost |\n| --- | --- |\n")
    rows = table.split("\n\n")[0].splitlines()
    assert rows == [f"| {charge} | {cost} |" for charge, cost in CHARGES.items()]


SEATS = {"a/0": 0, "b/0": 0, "a/1": 1, "b/1": 1, "c/2": 2}


def test_another_seat_of_the_drivers_node_rests_where_others_are_removed() -> None:
    policy = FaultPolicy("a/0")
    failed = pb.Failed(reason="c/2 sent it", accused=["c/2"], cause=SHAPE)
    for _ in range(VAIN):
        (*accused, _) = policy.accuse("a/1", failed, SEATS)
        policy.failures.accused.clear()
    assert [event.node for event in accused if isinstance(event, Accused)] == ["a/1"]
    assert len(accused) == 1, "the registry isn't told: that would end the driver"
    assert "a/1" in policy.idle and not policy.idle.is_to_go("a/1")


def test_who_accuses_a_node_and_then_its_successor_is_not_at_fault() -> None:
    policy = FaultPolicy("a/0")
    for node in ("c/2", "d/2"):
        members = {"a/0": 0, "a/1": 1, node: 2}
        policy.keep(members)
        failed = pb.Failed(reason=f"{node} sent it", accused=[node], cause=SHAPE)
        assert policy.failures.guilty("a/1", failed, members) == [node]
    failed = pb.Failed(reason="e/2 sent it", accused=["e/2"], cause=SHAPE)
    assert policy.failures.guilty("a/1", failed, {**members, "e/2": 2}) == ["a/1"]


def test_the_drivers_node_joins_anew_for_what_another_seat_of_it_holds_up() -> None:
    policy = FaultPolicy("a/0")
    (rejoin,) = policy.charge_holdup("a/1", "no answer", SEATS, SEATS, HELD_UP)
    assert isinstance(rejoin, Rejoin) and rejoin.reason.endswith("b/0 can drive")
    alone = {seat: stage for seat, stage in SEATS.items() if seat != "b/0"}
    assert policy.charge_holdup("a/1", "no answer", alone, alone, HELD_UP) == []
    assert "a/1" not in policy.idle
