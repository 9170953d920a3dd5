"""The command `planaria lab saves`. It imports modules late, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planaria.node.commands.terminal import console, errors

app = typer.Typer(help="Measure what blocking and overlapped saves cost a real swarm.")


@app.callback(invoke_without_command=True)
def saves(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    blocks: Annotated[
        int, typer.Option(min=0, help="Number of swarms of each kind; 0: only make the table.")
    ] = 3,
) -> None:
    """Measure what blocking and overlapped saves cost a real swarm, with and without a failure of
    all its processes. It can be stopped and started again."""
    from planaria.node.run_file import loads
    from planaria_lab.emulation.live_study import with_data
    from planaria_lab.saves.study import RUN, measure_all, write_results

    def say(sentence: str) -> None:
        errors.print(sentence, markup=False, highlight=False, soft_wrap=True)

    rows = measure_all(with_data(loads(RUN)), blocks, out, say)
    console.print(write_results(rows, out), markup=False, highlight=False, soft_wrap=True)
