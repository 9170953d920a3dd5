"""Commands for what a run has left in folders: regroup, audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console
from planaria.node.launch.options import Join, Security, flattened

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient


@flattened
def regroup_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="The --save-dir of each of the run's nodes."),
    ],
    join: Join,
    security: Security,
    out: Annotated[Path, typer.Option(help="Folder to write: a --save-dir for the new nodes.")],
) -> None:
    """Write a run's saves anew for the run of a registry, which has the same model, but another
    run file: in more or fewer stages, for one."""
    from planaria.node.report.log_stream import begin_log
    from planaria.node.run_file import loads
    from planaria.node.state.regroup import of_one_run, regroup
    from planaria.node.state.saves import Contents, Saves, find_saves

    async def write(client: RegistryClient) -> None:
        described = await client.describe()
        run = loads(described.run_file, "the registry's run file")
        saves = of_one_run(find_saves(*folders), excluded=described.run)
        config = run.model.config

        def open_folder(stage: int) -> Saves:
            contents = Contents.of(config, stage)
            return Saves(out, described.run, stage, run.saves.keep, contents)

        regrouped = regroup(saves, config, open_folder, run.training.betas)
        console.print(
            f"step {regrouped.step} of {saves[0].run} is in {out} for {described.run}: stage-0 to "
            f"stage-{config.stages}, each for the --save-dir of a node of that stage",
            highlight=False,
            soft_wrap=True,
        )

    begin_log()
    ask_registry(join, credentials_for(join, security), write)


def audit_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a run wrote.")],
) -> None:
    """Compare what a run trained on with what it should have."""
    from planaria.node.report.ledger import audit

    report = audit(directory)
    table = Table("samples", Column("number", justify="right"))
    for name in ("expected", "duplicates", "missing", "extra"):
        table.add_row(name, f"{getattr(report, name):,}")
    console.print(table)
    planned = f" of {report.planned}" if report.planned else ""
    console.print(f"{report.steps} committed steps{planned}, {report.superseded} superseded lines")
    if report.chained:
        console.print(f"{report.chained} commits name the hash of the commit before")
    for sentence in (*report.cut, *report.unchained):
        console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if report.exact and report.steps < report.planned:
        console.print(
            f"steps {report.steps + 1} to {report.planned} are missing: the run has not finished, "
            "or the end of its ledger is cut off",
            highlight=False,
            soft_wrap=True,
        )
    if not report.exact:
        raise typer.Exit(1)
