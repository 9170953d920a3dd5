"""One thread for torch, here and in child processes: the models are tiny and the cores are few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

settings.register_profile("untimed", deadline=None)  # no test asserts how long something takes
settings.load_profile("untimed")

CORPUS = Path(__file__).parent.parent / "corpus" / "austen"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped prose, prepared once for all the tests."""
    from node.prepare import Recipe, prepare

    path = tmp_path_factory.mktemp("data") / "prose"
    prepare(Recipe([str(CORPUS)], vocabulary=512), path)
    return path
