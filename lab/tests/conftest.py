"""What the tests of planaria have: fixtures, and settings that hold for all processes."""

from tests.conftest import conversations, data, shared

__all__ = ["conversations", "data", "shared"]
