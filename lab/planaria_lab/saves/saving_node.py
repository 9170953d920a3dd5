"""`planaria node`, whose saves are timed, and can be made worse.

    python -m planaria_lab.saves.saving_node [--timed DIR] [--blocking] [--storage RATE] node ...

does what `planaria node ...` does, by the very code that ships, of which a few functions are
wrapped: `--timed` writes a line of JSON for each save to a file in DIR, `--blocking` has training
wait until a save is on disk (as ECRL's blocking strategy: capture, write, go on), `--storage` takes
RATE MB of saves a second at most, as a shared folder does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MB = 1e6


def arm(
    timed: Path, blocking: bool, rate: float, wrap: Callable[[Any, str, Any], None] = setattr
) -> None:
    """From here on this process saves like that. `rate`: MB/s; 0: what the disk can.

    A line has `stage` and `step`, and either `critical`, seconds in which the compute thread did
    nothing else, and `waited`, those of them that passed without copying (for a write before, or
    with `blocking` for the write itself); or `write`, seconds until a save was on disk.
    """
    from planaria.node.machine.compute import waiting_for_disk
    from planaria.node.state import saves
    from planaria.node.state.stage_state import StageState

    hand_over, put, write = saves.Writer._hand_over, saves.Saves._put, saves.Saves.write
    waited = 0.0  # there is one compute thread, and no other waits
    file = (timed / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def log(state: StageState, **seconds: float) -> None:
        line = {"stage": state.id.stage, "step": state.id.step, **seconds}
        file.write(json.dumps(line) + "\n")
        file.flush()

    @contextmanager
    def waiting() -> Iterator[None]:
        nonlocal waited
        began = time.perf_counter()
        with waiting_for_disk():
            yield
        waited += time.perf_counter() - began

    def handed_over(writer: saves.Writer, pending: saves.PendingSave, state: StageState) -> bool:
        nonlocal waited
        began, waited = time.perf_counter(), 0.0
        if blocking:
            with waiting():
                writer._finish(pending, writer._write(state))
            handed = True
        else:
            handed = hand_over(writer, pending, state)
        log(state, critical=time.perf_counter() - began, waited=waited)
        return handed

    def slowly(parts: Iterable[saves.Bytes]) -> Iterator[saves.Bytes]:
        for part in parts:
            yield part
            time.sleep(part.nbytes / (rate * MB))

    def put_slowly(of: saves.Saves, name: str, parts: Iterable[saves.Bytes]) -> None:
        put(of, name, slowly(parts))

    def written(of: saves.Saves, state: StageState) -> None:
        began = time.perf_counter()
        write(of, state)
        log(state, write=time.perf_counter() - began)

    wrap(saves, "waiting_for_disk", waiting)
    wrap(saves.Writer, "_hand_over", handed_over)
    wrap(saves.Saves, "write", written)
    if rate:
        wrap(saves.Saves, "_put", put_slowly)


def run_saving(arguments: list[str]) -> None:
    """`planaria ARGUMENTS...`; behind `--timed DIR`, with these. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--timed", type=Path)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--storage", type=float, default=0.0)
    own, rest = parser.parse_known_args(arguments)
    if own.timed is not None:
        arm(own.timed, own.blocking, own.storage)
        rest = [*rest, "--restart", "no"]  # another process would not be armed
    run_planaria(rest)


if __name__ == "__main__":
    run_saving(sys.argv[1:])
