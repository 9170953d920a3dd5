"""Run `planaria node` with faults that can be set while it runs.

    python -m planaria_lab.chaos.sick_node --faults FILE node --join ...

runs the code of `planaria node --join ...` as it ships, with a few functions wrapped. These obey
FILE, which need not exist yet. From another process, `set_faults(FILE, {"crawl": {"factor": 10},
"nan": {"times": 1}})` sets faults, and `set_faults(FILE, {})` ends them. A fault lasts until FILE
is written without it. With `times` it ends after so many occurrences; each write of FILE starts the
count again.

| kind | figures | what is wrong |
| --- | --- | --- |
| `hang` | | the compute thread stops; the event loop goes on |
| `crawl` | `factor` (10) | each task of the compute thread takes `factor` times as long |
| `slow disk` | `seconds` (0.5) | each write to event log or ledger and each fsync waits that long |
| `stalled disk` | | each write to event log or ledger, and each fsync, waits for the fault's end |
| `full disk` | | the kernel refuses each write to a file (EFBIG, by RLIMIT_FSIZE) |
| `nan` | `of`, `times` | the first value of a tensor for another stage is NaN |
| `wrong shape` | `of`, `times` | a tensor for another stage lacks its last column |
| `wrong dtype` | `of`, `times` | a tensor for another stage is of int32 |
| `wild norm` | `value` (1e300), `times` | the node reports `value` as its gradient's squared norm |
| `flipped weight` | `times` (1) | one bit of a random weight of the stage flips |

`of`: "activation" or "gradient"; without it, both.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

Figures = Mapping[str, float | str]
KINDS: Final[Mapping[str, Figures]] = {
    "hang": {},
    "crawl": {"factor": 10.0},
    "slow disk": {"seconds": 0.5},
    "stalled disk": {},
    "full disk": {},
    "nan": {},
    "wrong shape": {},
    "wrong dtype": {},
    "wild norm": {"value": 1e300},
    "flipped weight": {"times": 1},
}
"""Kind of fault -> default figures."""
LOOK: Final = 0.02
"""Seconds between two reads of the file by threads that wait for a change."""


def set_faults(file: Path, faults: Mapping[str, Figures]) -> None:
    """Give these faults and no others to the node that obeys `file`; {} ends all. Raises ValueError
    for an unknown fault or figure."""
    for kind, figures in faults.items():
        allowed = {"of", "times", *KINDS.get(kind, ())}
        if kind not in KINDS or figures.keys() - allowed:
            raise ValueError(
                f"{kind!r} with {dict(figures)} is an unknown fault: choose from {dict(KINDS)}"
            )
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(json.dumps([secrets.token_hex(8), faults]), encoding="utf-8")
    unfinished.replace(file)


class Faults:
    """The faults that the file sets for this process now. All methods are thread-safe."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._stamp = ""  # stamp in the file when it was last read
        self._faults: dict[str, dict[str, Any]] = {}

    def active(self, kind: str) -> Figures | None:
        """Return the figures of a fault; None: it is not set now."""
        with self._lock:
            self._look()
            return self._faults.get(kind)

    def take(self, kind: str, of: str = "") -> Figures | None:
        """Return the figures of a fault as `active` does, and count one occurrence. `of`: the kind
        of frame, for faults that may be of one kind only."""
        with self._lock:
            self._look()
            figures = self._faults.get(kind)
            if figures is None or figures.get("of", of) != of:
                return None
            if "times" in figures:
                figures["times"] -= 1
                if figures["times"] <= 0:
                    del self._faults[kind]
            return figures

    def watch(self) -> None:
        """Read the file again and again, for ever. The process's limit of file sizes follows
        `full disk`, which no wrapped function asks for."""
        while True:
            self.active("full disk")
            time.sleep(LOOK)

    def _look(self) -> None:
        try:
            stamp, faults = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        if stamp == self._stamp:
            return
        was_full = "full disk" in self._faults
        self._stamp = stamp
        self._faults = {kind: {**KINDS[kind], **figures} for kind, figures in faults.items()}
        if ("full disk" in self._faults) != was_full:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard if was_full else 0, hard))


def arm(faults: Faults, wrap: Callable[[Any, str, Any], None] = setattr) -> None:
    """Wrap functions of the node's code in this process so that they obey `faults`."""
    import torch

    from planaria.node.machine.compute import ComputeThread, kind_of
    from planaria.node.report.line_file import LineFile
    from planaria.node.stage.torch_stage import TorchStage
    from planaria.node.stage.work import TorchWork

    stages: weakref.WeakSet[TorchStage] = weakref.WeakSet()
    make, post = TorchStage.__init__, ComputeThread.post
    reduced, onward = TorchStage.reduced, TorchWork._frame_onward

    def made(stage: TorchStage, *arguments: Any, **named: Any) -> None:
        make(stage, *arguments, **named)
        stages.add(stage)

    def posted(thread: Any, work: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
        def sick() -> Any:
            while faults.active("hang") is not None:
                time.sleep(LOOK)
            for stage in stages:
                if faults.take("flipped weight") is not None:
                    weights = stage.tensors["weights"].view(torch.int32)
                    weights[secrets.randbelow(len(weights))] ^= 1 << 20
            started = time.perf_counter()
            try:
                return work()
            finally:
                if crawl := faults.active("crawl"):
                    took = time.perf_counter() - started
                    time.sleep((float(crawl["factor"]) - 1) * took)

        sick.__name__ = kind_of(work)  # the node's watch tells tasks apart by name
        return post(thread, sick, *arguments, **named)

    def sent(work: Any, kind: str, visit: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
        tensor = tensor.detach()
        if faults.take("nan", kind) is not None:
            tensor = tensor.clone()
            tensor.view(-1)[0] = torch.nan
        if faults.take("wrong shape", kind) is not None:
            tensor = tensor[..., :-1].contiguous()
        if faults.take("wrong dtype", kind) is not None:
            tensor = tensor.to(torch.int32)
        return onward(work, kind, visit, tensor, *arguments)

    def wild(stage: TorchStage) -> float:
        norm = reduced(stage)
        wild = faults.take("wild norm")
        return norm if wild is None else float(wild["value"])

    def slowly(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any, **named: Any) -> Any:
            while faults.active("stalled disk") is not None:
                time.sleep(LOOK)
            if slow := faults.active("slow disk"):
                time.sleep(float(slow["seconds"]))
            return write(*arguments, **named)

        return written

    wrap(TorchStage, "__init__", made)
    wrap(ComputeThread, "post", posted)
    wrap(TorchWork, "_frame_onward", sent)
    wrap(TorchStage, "reduced", wild)
    wrap(LineFile, "_write", slowly(LineFile._write))
    wrap(os, "fsync", slowly(os.fsync))


def run_sick(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`, under the faults of FILE if the arguments begin with
    `--faults FILE`. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    if arguments[0] == "--faults":
        faults = Faults(Path(arguments[1]))
        arm(faults)
        threading.Thread(target=faults.watch, name="faults", daemon=True).start()
        arguments = [*arguments[2:], "--restart", "no"]  # a restarted process would have no faults
    run_planaria(arguments)


if __name__ == "__main__":
    run_sick(sys.argv[1:])
