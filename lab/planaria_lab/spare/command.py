"""The command `planaria lab spare`. It imports modules late, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, help="Simulate SPARe: how many losses masking endures, and what it costs."
)

Groups = Annotated[list[int], typer.Option(help="Number of data-parallel groups; repeatable.")]
Trials = Annotated[
    int, typer.Option(min=1, help="Number of random orders in which all groups are lost.")
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Out = Annotated[Path, typer.Option(help="Folder for tables and plots.")]
SIZES = [200, 600, 1000]
PLACE = Path("out/spare")


@app.command("tables")
def spare_tables(
    groups: Groups = SIZES,
    trials: Trials = 20,
    patched: Annotated[
        int, typer.Option(min=1, help="Number of trials that also run the controller.")
    ] = 1,
    seed: Seed = 0,
    out: Out = PLACE,
) -> None:
    """Write failures and stacks by redundancy, beside the paper's tables 4 to 6; a file for each
    number of groups."""
    from planaria_lab.spare.tables import tables

    tables(groups, trials, patched, seed, out)


@app.command("granularity")
def spare_granularity(
    groups: Groups = SIZES,
    redundancy: Annotated[
        list[int], typer.Option(help="Number of hosts of each type; repeatable.")
    ] = [3, 6, 9],  # noqa: B006
    parts: Annotated[list[int], typer.Option(help="Microbatches in a shard.")] = [1, 2, 4, 8, 16],  # noqa: B006
    trials: Trials = 3,
    seed: Seed = 0,
    out: Out = PLACE,
) -> None:
    """Write computation by the number of microbatches in a shard, at the same failures."""
    from planaria_lab.spare.tables import granularity

    granularity(groups, redundancy, parts, trials, seed, out)


@app.command("compare")
def spare_compare(
    groups: Groups = SIZES,
    trails: Annotated[int, typer.Option(min=1, help="Number of event trails of each scheme.")] = 3,
    deepest: Annotated[int, typer.Option(min=3, help="Largest redundancy to try.")] = 12,
    seed: Seed = 0,
    out: Out = PLACE,
) -> None:
    """Write time-to-train and availability of SPARe, replication and checkpoints alone, beside the
    paper's table 2; and how much the assumptions matter."""
    from planaria_lab.spare.tables import compare

    compare(groups, trails, deepest, seed, out)


@app.command("figures")
def spare_figures(
    groups: Groups = SIZES,
    trials: Trials = 20,
    trails: Annotated[int, typer.Option(min=1, help="Number of event trails of each scheme.")] = 3,
    deepest: Annotated[int, typer.Option(min=3, help="Largest redundancy to try.")] = 12,
    seed: Seed = 0,
    out: Out = PLACE,
) -> None:
    """Draw the paper's figures 4, 5, 7, 8: failures endured, stacks, availability by redundancy."""
    from planaria_lab.spare.figures import figures

    figures(groups, trials, trails, deepest, seed, out)
