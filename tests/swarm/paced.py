"""Nodes whose passes take a while, as those of a large model: where a swarm only has to train
beside what a test does, it leaves the cores to that."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from planaria.node.machine.processes import Processes, run_planaria

PASS = 0.05  # seconds


def run_paced(arguments: list[str]) -> None:
    """`planaria ARGUMENTS...`, for `Processes`."""
    pace()
    run_planaria(arguments)


def pace_up() -> None:
    """From here on, in this process, `planaria up` starts such nodes."""
    from planaria.node.local import swarm

    swarm.Processes = lambda *given: Processes(*given[:3], work=run_paced)  # type: ignore[assignment, misc]


def pace() -> None:
    """From here on, in this process."""
    from planaria.node.stage.work import TorchWork

    TorchWork.forward = _paced(TorchWork.forward)  # type: ignore[method-assign]


def _paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def paced(*arguments: Any) -> Any:
        time.sleep(PASS)
        return forward(*arguments)

    return paced
