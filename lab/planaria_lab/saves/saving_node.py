"""`planaria node` with saves that are timed, and can be made blocking or slow.

    python -m planaria_lab.saves.saving_node [--timed DIR] [--blocking] [--storage RATE] node ...

runs `planaria node ...` itself, with a few functions wrapped. `--timed` writes a line of JSON for
each save to a file in DIR. `--blocking` makes training wait until a save is on disk, as ECRL's
blocking strategy does: capture, write, go on. `--storage` limits writing of saves to RATE MB/s, as
a shared folder does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MB = 1e6


def arm(
    timed: Path, blocking: bool, rate: float, wrap: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Wrap the functions that save in this process. `rate`: MB/s; 0: no limit but the disk.

    Each save writes two lines with `stage` and `step` to a file in `timed`. The first has
    `critical`, seconds of the compute thread, and `waited`, those of them spent waiting for the
    write (0 unless `blocking`). The second has `write`, seconds until the save was on disk. A save
    that is left out has no line.
    """
    from planaria.node.machine.compute import waiting_for_disk
    from planaria.node.state.save_file import Bytes
    from planaria.node.state.saves import Saves
    from planaria.node.state.saves_on_disk import SavesOnDisk
    from planaria.node.state.stage_state import StageState

    save, put, write = SavesOnDisk.write, Saves._put, Saves.write
    file = (timed / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def log(state: StageState, **seconds: float) -> None:
        line = {"stage": state.id.stage, "step": state.id.step, **seconds}
        file.write(json.dumps(line) + "\n")
        file.flush()

    def handed_over(writer: SavesOnDisk, state: StageState) -> None:
        before, began = writer._newest, time.perf_counter()
        save(writer, state)
        if writer._newest is before:
            return
        copied = time.perf_counter()
        if blocking:
            with waiting_for_disk(), writer._changed:
                writer._changed.wait_for(lambda: not writer._waiting)
        ended = time.perf_counter()
        log(state, critical=ended - began, waited=ended - copied)

    def slowly(parts: Iterable[Bytes]) -> Iterator[Bytes]:
        for part in parts:
            yield part
            time.sleep(part.nbytes / (rate * MB))

    def put_slowly(saves: Saves, name: str, parts: Iterable[Bytes]) -> None:
        put(saves, name, slowly(parts))

    def written(saves: Saves, state: StageState) -> None:
        began = time.perf_counter()
        write(saves, state)
        log(state, write=time.perf_counter() - began)

    wrap(SavesOnDisk, "write", handed_over)
    wrap(Saves, "write", written)
    if rate:
        wrap(Saves, "_put", put_slowly)


def run_saving(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`, with `--timed DIR` as described above. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--timed", type=Path)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--storage", type=float, default=0.0)
    own, rest = parser.parse_known_args(arguments)
    if own.timed is not None:
        arm(own.timed, own.blocking, own.storage)
        rest = [*rest, "--restart", "no"]  # a restarted process would not be wrapped
    run_planaria(rest)


if __name__ == "__main__":
    run_saving(sys.argv[1:])
