"""Tests of the lab on a device that is neither CPU nor CUDA, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.stage.test_any_device import CUDA, run_on


@pytest.mark.parametrize("device", ["other", pytest.param("cuda:0", marks=CUDA)])
def test_a_swarm_in_one_process_computes_on_any_device(device: str, shared: Path) -> None:
    run_on(device, "", Path(__file__).with_name("on_other_device.py"), shared)
