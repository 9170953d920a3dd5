"""`--track`: a run in TensorBoard, Weights & Biases or MLflow.

These libraries may take seconds to load, wait for a network, or fail, so they have their own
process, `python -m planaria.node.report.experiment`. Its standard input has the lines of event logs
and ledgers; the first one is an `Opening`, and a `run_file` alone has changed settings.
`ExperimentPipe` writes them in a thread, and drops the oldest when the process doesn't read. The
process ends with its input.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from planaria.node.machine.extras import remedy
from planaria.node.model.learning_rate import rate_of
from planaria.node.report.events import Sampled, Validated, parse
from planaria.node.report.history import History
from planaria.node.report.ledger import Line
from planaria.node.report.line_file import BackgroundLineFile
from planaria.node.report.samples import sample_markdown
from planaria.node.run_file import RunFile, flatten, loads

log = logging.getLogger(__name__)

MOST_UNREAD: Final = 4 * 2**20
"""Limit of unread lines in bytes."""
LAST_WORDS: Final = 10.0
"""Seconds for the process to end after its last line."""
LONGEST_PARAMETER: Final = 500
"""Limit of a run-file value in characters."""


class Opening(NamedTuple):
    """The first line of an experiment process's input."""

    kind: str  # tensorboard, wandb or mlflow
    name: str  # of the sender: a node, or the run
    run: str  # run id, or the same
    run_file: str  # TOML
    folder: str  # for local files


# --- at the sender


class ExperimentPipe(BackgroundLineFile):
    """The pipe to an experiment's process. Only its thread waits for it, and no longer than
    LAST_WORDS at the end."""

    taker = "its process"

    def __init__(self, opening: Opening, command: Sequence[str] | None = None) -> None:
        folder = Path(opening.folder)
        self._log = folder / f"{opening.kind}-{opening.name}.log"
        self._command = command or [sys.executable, "-m", __name__]
        self._process: subprocess.Popen[bytes] | None = None
        super().__init__(folder / opening.kind, MOST_UNREAD)
        self.append(json.dumps(opening._asdict()).encode() + b"\n")

    def tell(self, line: Mapping[str, Any]) -> None:
        """Send a line of an event log or a ledger, or the run file with changed settings."""
        self.append(json.dumps(line).encode() + b"\n")

    def _open(self) -> int:
        """Start the process, once: it is not restarted."""
        if self._process is not None:
            raise self._ended()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is not for it: it ends with its input
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            return os.dup(pipe.fileno())

    def _write(self, file: int, piece: bytes) -> int:
        try:
            return super()._write(file, piece)
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> OSError:
        return OSError(errno.EPIPE, f"its process has ended, see {self._log}")

    def close(self) -> None:
        """Wait for the process, and kill it if it doesn't end."""
        super().close()
        if self._process is None:
            return
        try:
            self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            log.error(
                "the process of %s is killed: it runs %g s after its last input",
                self.path,
                LAST_WORDS,
            )
            self._process.kill()
            self._process.wait()


# --- in the process


class Experiment(Protocol):
    """A destination of a run's figures and texts. `time` in Unix seconds."""

    def figures(self, step: int, figures: Mapping[str, float], time: float) -> None: ...

    def text(self, about: str, step: int, text: str, time: float) -> None:
        """Add a Markdown text to the experiment."""

    def close(self) -> None: ...


class TrackedRun:
    """Converts lines to figures and texts of an experiment: pure, except for its calls."""

    def __init__(self, experiment: Experiment, run: RunFile) -> None:
        self._experiment, self._run = experiment, run
        self._history = History(run.steps)
        self._step = 0  # newest recorded step
        self._at: float | None = None  # its commit time
        self._rebuilds = 0

    def hear(self, line: Mapping[str, Any]) -> None:
        """Pass a line of an event log or ledger on to the experiment, or note a changed run."""
        if "run_file" in line:
            self._run = loads(line["run_file"])
        elif "kind" not in line:
            self._committed(Line(**line))  # type: ignore[typeddict-item]
        elif (entry := parse(line)) is not None:
            before = self._newest_mark()
            self._history.hear(entry)
            mark, over = self._newest_mark(), self._history.story.finished is not None
            if mark is not None and mark is not before and not over:
                self._marked(mark.kind, mark.sentence, entry.time)
            match entry.event:
                case Validated(step=step, loss=loss):
                    self._figures(step, {"loss/validation": loss}, entry.time)
                case Sampled(step=step, prompt=prompt) as sample:
                    about = f"samples/{self._number_of(prompt)}"
                    self._experiment.text(about, step, sample_markdown(sample), entry.time)

    def _newest_mark(self) -> Any:
        return self._history.marks[-1] if self._history.marks else None

    def _number_of(self, prompt: str) -> int:
        """Index of a prompt, as its name: not every backend accepts any characters in names."""
        prompts = [*self._run.training.prompts, prompt]
        return prompts.index(prompt)

    def _committed(self, line: Line) -> None:
        """Record a commit, unless another node of stage 0 has already reported it."""
        step, time = line["step"], line["time"]
        if step <= self._step:
            return
        lasted = line["seconds"] if self._at is None else time - self._at
        self._step, self._at = step, time
        self._history.record(line)
        figures = {
            "loss/training": _or_nan(line["loss"]),
            "gradient_norm": _or_nan(line["gradient_norm"]),
            "learning_rate": rate_of(step, self._run),
            "seconds_a_step": lasted,
            "tokens_per_second": line["tokens"] / lasted if lasted > 0 else math.nan,
        }
        self._figures(step, figures, time)

    def _marked(self, kind: str, sentence: str, time: float) -> None:
        """Record a loss, a recovery, or a rollback."""
        step = self._history.story.committed
        if kind == "back":
            self._step, self._at = step, None
        if kind == "rebuilt":
            self._rebuilds += 1
            self._figures(step, {"rebuilds": self._rebuilds}, time)
        self._experiment.text("recovery", step, sentence, time)

    def _figures(self, step: int, figures: Mapping[str, float], time: float) -> None:
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        self._experiment.figures(step, finite, time)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def parameters(run_file: str) -> dict[str, str | int | float | bool]:
    """The run file's keys, joined by dots, and their values."""
    return {
        key: value if isinstance(value, int | float) else str(value)[:LONGEST_PARAMETER]
        for key, value in flatten(tomllib.loads(run_file)).items()
    }


class TensorBoard:
    """Writes files for `tensorboard --logdir FOLDER/tensorboard`."""

    def __init__(self, opening: Opening) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        folder = Path(opening.folder) / "tensorboard" / opening.name
        self._writer = SummaryWriter(str(folder), flush_secs=5)
        keys = parameters(opening.run_file)
        for summary in hparams(keys, {"loss/training": math.nan, "loss/validation": math.nan}):
            self._writer.file_writer.add_summary(summary)
        self._writer.add_text("run", f"    {opening.run_file.strip()}".replace("\n", "\n    "))

    def figures(self, step: int, figures: Mapping[str, float], time: float) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def text(self, about: str, step: int, text: str, time: float) -> None:
        self._writer.add_text(about, text, step, walltime=time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `planaria`, or of the environment's, which also has the server."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "planaria"),
            name=opening.name,
            group=opening.run,
            config=parameters(opening.run_file),
            dir=opening.folder,
            settings=wandb.Settings(disable_git=True, save_code=False, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def figures(self, step: int, figures: Mapping[str, float], time: float) -> None:
        self._run.log({"step": step, "time": time, **figures})

    def text(self, about: str, step: int, text: str, time: float) -> None:
        """Log the text in an HTML page, escaped."""
        from html import escape

        self._run.log({"step": step, about: self._html(f"<pre>{escape(text)}</pre>")})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment `planaria`, or of the environment's, at MLFLOW_TRACKING_URI, or else
    in a database in the folder."""

    def __init__(self, opening: Opening) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        folder = Path(opening.folder).absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._metric = Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "planaria")
        existing = self._client.get_experiment_by_name(name)
        artifacts = None if uri else (folder / "mlflow").as_uri()
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment(name, artifact_location=artifacts)
        )
        tags = {"planaria.run": opening.run}
        run = self._client.create_run(experiment, run_name=opening.name, tags=tags)
        self._id = run.info.run_id
        keys = [Param(key, str(value)) for key, value in parameters(opening.run_file).items()]
        for first in range(0, len(keys), 100):  # limit of one call
            self._client.log_batch(self._id, params=keys[first : first + 100])
        self._texts: dict[str, str] = {}

    def figures(self, step: int, figures: Mapping[str, float], time: float) -> None:
        when = int(1000 * time)
        metrics = [self._metric(name, value, when, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, about: str, step: int, text: str, time: float) -> None:
        """Append to the texts with this key, in a file."""
        self._texts[about] = f"{self._texts.get(about, '')}step {step}: {text.strip()}\n\n"
        self._client.log_text(self._id, self._texts[about], f"{about}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)


KINDS: Final[Mapping[str, Callable[[Opening], Experiment]]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def track_lines(lines: Iterable[bytes]) -> None:
    """Pass lines on to the experiment until their end. Raises ModuleNotFoundError, and exceptions
    of the library."""
    inputs = iter(lines)
    opening = Opening(**json.loads(next(inputs)))
    experiment = KINDS[opening.kind](opening)
    tracked_run = TrackedRun(experiment, loads(opening.run_file))
    try:
        for line in inputs:
            tracked_run.hear(json.loads(line))
    finally:
        experiment.close()


if __name__ == "__main__":
    try:
        track_lines(sys.stdin.buffer)
    except ModuleNotFoundError as error:
        raise SystemExit(remedy(error)) from error
