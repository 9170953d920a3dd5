"""Number of microbatches that a stage keeps at a time, adapted to the device's memory.

A microbatch is kept from its forward to its backward pass. The device's capacity isn't known in
advance: other processes use it, too, and free memory is fragmented. So the node measures it. A
forward pass that runs out of memory has no effect, and is repeated after a backward pass. A
backward pass can't be repeated, so the attempt fails, and the next one keeps fewer.

Main memory raises no error when it is exhausted: Linux overcommits, and then kills a process. So
the node checks its free memory first.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch

from planaria.node.machine.device import available_memory
from planaria.node.transaction.attempt import NoRoomError

log = logging.getLogger(__name__)

SMALL: Final = 16 << 20
"""Bytes of a pass below which free memory isn't checked."""


class DeviceRoom:
    """Limiter of a device's memory, for all seats of a node. Used in the compute thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most = math.inf  # microbatches that a seat keeps
        self._highest = 0  # maximum kept so far

    def check(self, kept: int, needs: int) -> None:
        """Check the memory for a forward pass of `needs` bytes, while `kept` microbatches wait for
        their backward pass. Raises NoRoomError."""
        if kept >= self.most:
            raise NoRoomError(
                f"the device has room for only {self.most} microbatches at a time", waits=True
            )
        if not kept or needs < SMALL or self._device.type != "cpu":
            return
        if (available := available_memory()) < needs:
            reason = f"a microbatch takes {needs:,} bytes, and {available:,.0f} are free"
            raise NoRoomError(reason, waits=True)

    @contextmanager
    def guarding(self, kept: int, waits: bool) -> Iterator[None]:
        """Guard a pass, beside `kept` others; `waits`: it has no effect before its end. Raises
        NoRoomError where the device is out of memory."""
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            self._highest = max(self._highest, kept + waits)
            return
        # Not earlier: the traceback keeps the failed pass's memory.
        with suppress(AttributeError):  # the CPU has no cache, for example
            torch.get_device_module(self._device).empty_cache()
        raise self._no_room(kept, waits, reason)

    def _no_room(self, kept: int, waits: bool, reason: str) -> NoRoomError:
        waits = waits and kept > 0
        highest = min(self.most, self._highest)
        self.most = kept if waits else max(1, highest // 2)
        if not waits and highest <= 1:
            return NoRoomError(
                f"{self._device} has no room for one microbatch: {reason}. Set training.microbatch "
                "lower or training.recompute = true in the run file, or serve this stage on a "
                "device with more memory",
                ends=True,
            )
        log.warning(
            "%s keeps %d microbatches at a time from now on: %s", self._device, self.most, reason
        )
        return NoRoomError(f"{self._device} is out of memory: {reason}", waits=waits)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device is out of memory: for the CPU and MPS, PyTorch's messages alone say so."""
    match = re.search("DefaultCPUAllocator|MPS backend out of memory", str(error))
    return isinstance(error, torch.OutOfMemoryError) or match is not None
