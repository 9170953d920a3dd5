"""Fixtures of the tests of planaria; the import also applies their settings for all processes."""

from tests.conftest import conversations, data, shared

__all__ = ["conversations", "data", "shared"]
