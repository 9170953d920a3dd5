"""How many microbatches a stage keeps at a time, by what memory there turns out to be.

Each is there from its forward to its backward pass. How many a device has room for nobody can say
beforehand, for others use it, too, and what is free lies in pieces; so a node finds it out. A
forward pass that there is no room for has changed nothing, and is made when a backward pass has
left some. A backward pass can't be made again, so the attempt fails, and the next one keeps fewer.

A machine's own memory never says that it is used up: Linux promises more than there is, and ends a
process when all is gone. So there it is asked beforehand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from planaria.node.machine.device import available_memory
from planaria.node.transaction.attempt import NoRoomError

log = logging.getLogger(__name__)

SMALL: Final = 16 << 20
"""Bytes of a pass for which nobody looks whether they are there."""


class DeviceRoom:
    """Of a device, for all seats of a node. All methods are called in the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most = math.inf  # microbatches that a seat keeps
        self._highest = 0  # ... has kept so far

    def look(self, kept: int, needs: int) -> None:
        """Before a forward pass of so many bytes, where `kept` microbatches wait for their backward
        pass. Raises NoRoomError."""
        if kept >= self.most:
            raise NoRoomError(f"it has room for {self.most} microbatches at a time", waits=True)
        if not kept or needs < SMALL or self._device.type != "cpu":
            return
        if (there := available_memory()) < needs:
            reason = f"a microbatch takes {needs:,} bytes, and the machine has {there:,.0f}"
            raise NoRoomError(reason, waits=True)

    @contextmanager
    def taken(self, kept: int, waits: bool) -> Iterator[None]:
        """For a pass, beside `kept` others; `waits`: it changes nothing before it is over. Raises
        NoRoomError where the device is out of memory."""
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            why = str(error).partition("\n")[0]
        else:
            self._highest = max(self._highest, kept + waits)
            return
        # Not before here, since what has failed holds on to what it had.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise self._lacking(kept, waits, why)

    def _lacking(self, kept: int, waits: bool, why: str) -> NoRoomError:
        waits = waits and kept > 0
        before = min(self.most, self._highest)
        self.most = kept if waits else max(1, before // 2)
        if not waits and before <= 1:
            return NoRoomError(
                f"{self._device} has no room for one microbatch: {why}. Set training.microbatch "
                "lower or training.recompute = true in the run file, or serve this stage by a "
                "device with more memory",
                ends=True,
            )
        log.warning(
            "%s keeps %d microbatches at a time from now on: %s", self._device, self.most, why
        )
        return NoRoomError(f"{self._device} is out of memory: {why}", waits=waits)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """PyTorch says so of a GPU by a class of its own, of a CPU's allocator in words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
