"""`planaria node`, on a machine whose processor is emulated, as its links are.

Nodes that share this machine's cores slow each other down. Here a pass over a microbatch, decoding
and encoding included, takes as long as on a processor of so many FLOP/s that the node has for
itself: what is left of that time the compute thread waits. That holds as long as the cores are
quicker than all these processors together; what took longer nevertheless is in the `wall` events,
as computing.
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
    """Seconds of a microbatch's passes: through a body stage, and at the head, both ways at once.
    Embedding is not waited for, nor what a step has to do once."""

    forward: float
    backward: float
    head: float

    def of(self, kind: str, position: int, at_head: bool) -> float:
        """Seconds of the pass that makes this kind of frame at that visit."""
        if position == 0:
            return 0.0
        if at_head:
            return self.head
        return self.forward if kind == "activation" else self.backward


def arm(pace: Pace, wrap: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes this process compute at this pace from here on."""
    from planaria.node.stage.work import TorchWork

    decoded, onward, began = TorchWork._decode_valid, TorchWork._frame_onward, 0.0

    def beginning(work: TorchWork, *arguments: Any) -> torch.Tensor:
        nonlocal began
        began = time.perf_counter()
        return decoded(work, *arguments)

    def paced(
        work: TorchWork, kind: str, visit: Any, tensor: torch.Tensor, started: float
    ) -> PassResult:
        done = onward(work, kind, visit, tensor, started)
        ready = time.perf_counter()
        due = began + pace.of(kind, visit.position, visit.at_head)
        time.sleep(max(0.0, due - ready))
        work._spend(visit, ready)
        return done

    wrap(TorchWork, "_decode_valid", beginning)
    wrap(TorchWork, "_frame_onward", paced)


def run_paced(pace: Pace, arguments: list[str]) -> None:
    """`planaria ARGUMENTS...`, and if that is a node, at this pace. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    if arguments[0] == "node":
        arm(pace)
        arguments = [*arguments, "--restart", "no"]  # another process would not be armed
    run_planaria(arguments)
