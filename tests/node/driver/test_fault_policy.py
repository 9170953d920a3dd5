"""What the driver charges members with; test_driver.py has most of its verdicts."""

from pathlib import Path

from planaria.node.driver.fault_policy import CHARGES

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_the_page_has_the_charges_of_the_code() -> None:
    _, table = PROTOCOL.read_text().split("| charge | cost |\n| --- | --- |\n")
    rows = table.split("\n\n")[0].splitlines()
    assert rows == [f"| {charge} | {cost} |" for charge, cost in CHARGES.items()]
