"""planaria for programs and notebooks: `planaria.load`, `planaria.up` and their results.

An intermediate process runs the swarm. The caller may have a running event loop, threads, signal
handlers, and a script as `__main__`, none of which should affect registry and nodes. The process
has the caller's working directory and, without that folder, its import path. It ends with the
caller.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from rich.console import Console

from planaria.bootstrap.errors import UserError
from planaria.node.data.progress import untracked
from planaria.node.launch.errors import SwarmError
from planaria.node.local.loss_schedule import parse_kill
from planaria.node.local.options import SwarmOptions
from planaria.node.local.plan import plan_run, read_plan
from planaria.node.local.results import Ending
from planaria.node.local.swarm import up as up_here
from planaria.node.machine.imports import leave_out_current_folder, python_command
from planaria.node.machine.processes import describe_status, die_with_parent
from planaria.node.report.event_log import LineReader
from planaria.node.report.ledger import MERGED
from planaria.node.report.readable_console import ReadableConsole
from planaria.node.report.summary import read_summary, summary_sentences
from planaria.node.run_file import RunFile, RunFileError, override
from planaria.node.run_file import load as load_file

__all__ = ["Result", "RunFileError", "SwarmError", "load", "up"]


def load(path: str | Path | None = None, **changes: Any) -> RunFile:
    """A run file, or the defaults, with changes: `load("run.toml", steps=40, model__stages=2)`
    changes `steps` and, in `[model]`, `stages`. Raises RunFileError."""
    return override(RunFile() if path is None else load_file(Path(path)), **changes)


class Result:
    """The result of a run of `planaria up`, read from its folder."""

    def __init__(self, folder: str | Path) -> None:
        """Read the run's folder. Raises SwarmError when no run has ended in it."""
        self.folder = Path(folder)
        self.summary: dict[str, Any] = read_summary(self.folder)
        """Content of `summary.json`."""
        if not self.summary:
            raise SwarmError(
                f"no run has ended in {folder}: it has no summary.json that can be read; name the "
                "folder that planaria up wrote"
            )

    @cached_property
    def losses(self) -> list[float]:
        """Loss of each committed step, in order, in nats a token; nan: it was not finite."""
        ledger = self.folder / MERGED
        lines = LineReader(ledger).lines() if ledger.exists() else ()  # none: no step was committed
        losses = [line["loss"] for line in lines if "step" in line]
        return [math.nan if loss is None else float(loss) for loss in losses]

    @property
    def validation(self) -> float | None:
        """The last loss on held-out text, in nats a token."""
        loss: float | None = self.summary["loss"]["validation"]
        return loss

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The rebuilds of stages, each with `stage`, `method`, `step` and durations."""
        rebuilds: list[dict[str, Any]] = self.summary["rebuilds"]
        return rebuilds

    def export(
        self,
        out: str | Path,
        dtype: Literal["fp32", "bf16"] = "fp32",
        data: str | Path | None = None,
        merged: bool = False,
    ) -> Path:
        """Write the model to the folder `out`, and return that. See `planaria export` for `data`
        (prepared data) and `merged` (adapters). Raises ExportError, SwarmError, SaveError
        and CorpusError."""
        from planaria.node.hugging_face.from_saves import export_saves
        from planaria.node.hugging_face.options import ExportOptions

        plan = read_plan(self.folder)
        saves, folder = plan.kept.find(), None if data is None else Path(data)
        options = ExportOptions(out=Path(out), data=folder, dtype=dtype, merged=merged)
        export_saves(plan.run, saves, self.summary, options, untracked)
        return Path(out)

    def _lines(self) -> list[str]:
        files = ", ".join(sorted(path.name for path in self.folder.iterdir()))
        return [*summary_sentences(self.summary), f"{self.folder} has {files}"]

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """The result as HTML for notebooks."""
        text = "".join(f"<p>{escape(line)}</p>" for line in self._lines())
        picture = self.folder / "loss.png"
        if not picture.exists():
            return text
        image = base64.b64encode(picture.read_bytes()).decode()
        return f'{text}<img alt="loss by step" width="720" src="data:image/png;base64,{image}">'


class _Order(NamedTuple):
    """The caller's request to the intermediate process."""

    run: RunFile
    out: Path | None
    kill: Sequence[str]
    replace: bool
    device: str
    oversubscribe: bool

    async def carry_out(self, console: Console) -> tuple[Path, Ending]:
        """Run the swarm of the request. Returns the folder, and how the run ended."""
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        plan = plan_run(self.run, self.out, None, self.device, say, untracked)
        plan = plan._replace(options=SwarmOptions(oversubscribe=self.oversubscribe))
        kills = [parse_kill(text, plan.run) for text in self.kill]
        ending = await up_here(plan, kills, console, replacing=self.replace)
        return plan.out, ending


def up(
    run: RunFile,
    *,
    out: str | Path | None = None,
    kill: Sequence[str] = (),
    replace: bool = True,
    device: str = "auto",
    oversubscribe: bool = False,
) -> Result:
    """Train `run` with a swarm of processes on this machine, and print the progress. The options
    are those of `planaria up`; `kill=["2@15"]` is `--kill 2@15`.

    Raises RunFileError, CorpusError and SwarmError, with the command's messages. KeyboardInterrupt
    is raised when all processes have saved and ended; a second one doesn't wait.
    """
    folder = None if out is None else Path(out)
    order = _Order(run, folder, tuple(kill), replace, device, oversubscribe)
    with subprocess.Popen(
        python_command(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # an interrupt is for the caller
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with process.stdin as stdin:
                pickle.dump(order, stdin)
            interrupted = print_output(process, process.stderr)
            answer = process.stdout.read()
        finally:
            process.terminate()  # if still running
    if interrupted and not answer:
        raise KeyboardInterrupt
    if not answer:
        raise SwarmError(f"the process that runs the swarm {describe_status(process.returncode)}")
    outcome = pickle.loads(answer)
    if isinstance(outcome, Exception):
        raise outcome
    out_folder, ending = outcome
    if interrupted:
        raise KeyboardInterrupt(ending.reason)
    if ending.status:
        raise SwarmError(ending.reason)
    return Result(out_folder)


def print_output(process: subprocess.Popen[bytes], output: IO[bytes]) -> bool:
    """Print the intermediate process's output until it ends. Returns whether it was interrupted."""
    interrupted = False
    while True:
        try:
            for line in output:
                print(line.decode(errors="replace"), end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGKILL if interrupted else signal.SIGTERM)
            interrupted = True
        else:
            return interrupted


def main() -> None:
    """Run the intermediate process: request on stdin, answer on stdout, messages on stderr."""
    die_with_parent()
    leave_out_current_folder()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        order: _Order = pickle.load(sys.stdin.buffer)
        outcome: object
        try:
            # A notebook's environment claims colours, but it is no terminal.
            lines = ReadableConsole(file=sys.stderr, force_terminal=False)
            outcome = asyncio.run(order.carry_out(lines))
        except (UserError, ValueError) as error:
            outcome = error
        pickle.dump(outcome, answer)
