"""Nodes whose passes sleep, for swarms that only have to train during a test: they leave the cores
to the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from planaria.node.machine.processes import Processes, run_planaria

PASS = 0.05  # seconds


def run_paced(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...` with paced passes, as `work` of `Processes`."""
    pace()
    run_planaria(arguments)


def pace_up() -> None:
    """Let `planaria up` in this process start paced nodes from here on."""
    from planaria.node.local import swarm

    swarm.Processes = lambda *given: Processes(*given[:3], work=run_paced)  # type: ignore[assignment, misc]


def pace() -> None:
    """Pace all nodes in this process from here on."""
    from planaria.node.stage.work import TorchWork

    TorchWork.forward = _paced(TorchWork.forward)  # type: ignore[method-assign]


def _paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def paced(*arguments: Any) -> Any:
        time.sleep(PASS)
        return forward(*arguments)

    return paced
