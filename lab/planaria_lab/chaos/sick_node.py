"""`planaria node` on a machine whose faults can be set while it runs.

    python -m planaria_lab.chaos.sick_node --faults FILE node --join ...

does what `planaria node --join ...` does, by the very code that ships. A few of its functions are
wrapped, and obey FILE, which need not be there yet: `set_faults(FILE, {"crawl": {"factor": 10},
"nan": {"times": 1}})` from another process makes the node sick, `set_faults(FILE, {})` heals it. A
fault lasts until FILE is written without it; with `times` it ends after so many occurrences,
counted anew each time that FILE is written.

| kind | figures | what is wrong |
| --- | --- | --- |
| `hang` | | the compute thread does not come back; the event loop lives |
| `crawl` | `factor` (10) | each task of the compute thread takes so many times as long |
| `slow disk` | `seconds` (0.5) | each write to event log or ledger, and each fsync, takes so long |
| `stalled disk` | | each write to event log or ledger, and each fsync, waits until it is healed |
| `full disk` | | the kernel refuses each write to a file (EFBIG, by RLIMIT_FSIZE) |
| `nan` | `of`, `times` | a value of what goes to another stage is NaN |
| `wrong shape` | `of`, `times` | what goes to another stage lacks its last column |
| `wrong dtype` | `of`, `times` | what goes to another stage is in whole numbers |
| `wild norm` | `value` (1e300), `times` | the squared norm that is told of the stage's gradient |
| `flipped weight` | `times` (1) | a bit of any of the stage's weights flips |

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
"""With the figures that hold where none are given."""
LOOK: Final = 0.02
"""Seconds between two looks at the file by whoever waits for a change."""


def set_faults(file: Path, faults: Mapping[str, Figures]) -> None:
    """Gives the node that obeys `file` these faults and no others; {} heals it. Raises ValueError
    for an unknown fault."""
    for kind, figures in faults.items():
        allowed = {"of", "times", *KINDS.get(kind, ())}
        if kind not in KINDS or figures.keys() - allowed:
            raise ValueError(f"{kind!r} with {dict(figures)} is no fault: choose of {dict(KINDS)}")
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(json.dumps([secrets.token_hex(8), faults]), encoding="utf-8")
    unfinished.replace(file)


class Faults:
    """The faults of this process now, by the file. Any thread may ask."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._stamp = ""  # of the version of the file that was read last
        self._faults: dict[str, dict[str, Any]] = {}

    def active(self, kind: str) -> Figures | None:
        """The figures of a fault that is there now; None: it isn't."""
        with self._lock:
            self._look()
            return self._faults.get(kind)

    def take(self, kind: str, of: str = "") -> Figures | None:
        """The figures of a fault as `active` returns them; counts as one occurrence of it."""
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
        """For ever: the disk's limit is the process's, and no call asks for it."""
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
    """Makes the node's code in this process obey `faults` from here on."""
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

        sick.__name__ = kind_of(work)  # the node's watch tells tasks apart by it
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
    """`planaria ARGUMENTS...`; behind `--faults FILE`, with these. For `Processes`."""
    from planaria.node.machine.processes import run_planaria

    if arguments[0] == "--faults":
        faults = Faults(Path(arguments[1]))
        arm(faults)
        threading.Thread(target=faults.watch, name="faults", daemon=True).start()
        arguments = [*arguments[2:], "--restart", "no"]  # another process would not be armed
    run_planaria(arguments)


if __name__ == "__main__":
    run_sick(sys.argv[1:])
