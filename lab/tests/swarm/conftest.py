"""Fixtures of tests/swarm: real swarms, and the event loop of a daemon."""

from tests.swarm.conftest import corpus, fork_server, pytest_asyncio_loop_factories, up

__all__ = ["corpus", "fork_server", "pytest_asyncio_loop_factories", "up"]
