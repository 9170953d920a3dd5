import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=None, help="scenarios to simulate")
    group.addoption("--seed", type=int, default=None, help="simulate this scenario only")
