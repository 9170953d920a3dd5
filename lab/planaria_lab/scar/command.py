"""The commands `planaria lab scar run` and `report`. They import modules late: --help is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

RESULTS: Final = "convex.jsonl"
TABLES: Final = "convex.md"

app = typer.Typer(no_args_is_help=True, help="Repeat SCAR's experiments on convex problems.")
Out = Annotated[Path, typer.Option(help="Folder for the results.")]


@app.command()
def run(
    out: Out,
    trials: Annotated[
        int,
        typer.Option(
            help="Trials of logistic regression; each quadratic has ten times as many.", min=2
        ),
    ] = 100,
) -> None:
    """Run all experiments (three minutes on one core), store the results, and report."""
    from planaria_lab.origin import origin
    from planaria_lab.scar.results import records

    out.mkdir(parents=True, exist_ok=True)
    made = origin()
    unfinished = out / f"{RESULTS}.unfinished"
    with unfinished.open("w") as file:
        for record in records(trials):
            file.write(json.dumps(record | made) + "\n")
            typer.echo(" ".join(str(record[key]) for key in record["of"]))
    unfinished.replace(out / RESULTS)
    report(out)


@app.command()
def report(out: Out) -> None:
    """Write tables and plots of the stored results."""
    from planaria_lab.scar.results import plot, tables

    stored = out / RESULTS
    if not stored.exists():
        raise typer.BadParameter(f"{stored} doesn't exist: run `planaria lab scar run` first")
    results = [json.loads(line) for line in stored.read_text().splitlines()]
    (out / TABLES).write_text(tables(results))
    plot(results, out)
    typer.echo(f"{TABLES} and four plots are in {out}")
