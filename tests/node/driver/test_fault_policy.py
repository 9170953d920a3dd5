"""What the driver charges members with; test_driver.py has most of its verdicts."""

from pathlib import Path

from planaria.node.driver.divergence import STRIKES
from planaria.node.driver.fault_policy import (
    HELD_UP,
    HELD_UP_BY_SEVERAL,
    SPOILT,
    UNEXPLAINED,
    UNVOTED,
    VAIN,
)
from planaria.node.driver.spot_checks import WRONG

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"
CHARGES = {
    "accused by one member": "rest",
    "accused by one replica": "rest, as a joiner",
    "accused by two nodes or the driver": "eviction",
    "accuses two replicas of a stage": "is accused itself",
    f"{VAIN} accusations that nobody else makes": "eviction",
    f"{HELD_UP} failed attempts, less those of others": "eviction",
    f"{HELD_UP_BY_SEVERAL} failed attempts": "eviction",
    f"{UNVOTED} votes too late, alone": "eviction",
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
