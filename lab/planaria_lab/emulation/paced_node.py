"""Runs `planaria node` with an emulated processor: passes over a microbatch have a fixed duration.

Nodes that share this machine's cores slow each other down. Here, a pass over a microbatch, with
decoding and encoding, takes as long as on a processor of the node's own. The compute thread sleeps
for the rest of that time. This works if the cores are faster than all emulated processors together.
If a pass takes longer nevertheless, the `wall` events count it as computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from planaria.node.stage.work import TorchWork
    from planaria.node.transaction.attempt import PassResult


class Pace(NamedTuple):
    """Seconds of each pass over a microbatch. The embedding and tasks once a step aren't paced."""

    forward: float  # of a body stage
    backward: float  # of a body stage
    head: float  # forward and backward together

    def of(self, kind: str, position: int, at_head: bool) -> float:
        """Seconds of the pass that produces a frame of this kind at this visit."""
        if position == 0:
            return 0.0
        if at_head:
            return self.head
        return self.forward if kind == "activation" else self.backward


def arm(pace: Pace, wrap: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes this process compute at this pace from now on. `wrap` replaces a method of a class."""
    from planaria.node.stage.work import TorchWork

    decoded, onward, began = TorchWork._decode_valid, TorchWork._frame_onward, 0.0

    def timed_decode(work: TorchWork, *arguments: Any) -> torch.Tensor:
        nonlocal began
        began = time.perf_counter()
        return decoded(work, *arguments)

    def paced_frame(
        work: TorchWork, kind: str, visit: Any, tensor: torch.Tensor, started: float
    ) -> PassResult:
        done = onward(work, kind, visit, tensor, started)
        ready = time.perf_counter()
        due = began + pace.of(kind, visit.position, visit.at_head)
        time.sleep(max(0.0, due - ready))
        work._spend(visit, ready)
        return done

    wrap(TorchWork, "_decode_valid", timed_decode)
    wrap(TorchWork, "_frame_onward", paced_frame)


def run_paced(pace: Pace, arguments: list[str]) -> None:
    """Runs `planaria ARGUMENTS...` in this process, a node at this pace. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    if arguments[0] == "node":
        arm(pace)
        arguments = [*arguments, "--restart", "no"]  # a restarted process would have no pace
    run_planaria(arguments)
