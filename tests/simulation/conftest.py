from collections.abc import Iterator

import pytest

from simulation.world import OPEN


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=None, help="scenarios to simulate")
    group.addoption("--seed", type=int, default=None, help="simulate this scenario only")


@pytest.fixture(autouse=True)
def worlds_end() -> Iterator[None]:
    yield
    for world in list(OPEN):
        world.close()
