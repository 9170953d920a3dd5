"""Commands for what a run has left in folders: regroup, audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console, refusing
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
    from planaria.bootstrap.credentials import CredentialsError
    from planaria.node.report.log_stream import begin_log
    from planaria.node.run_file import RunFileError, loads
    from planaria.node.state.regroup import RegroupError, of_one_run, regroup
    from planaria.node.state.saves import Contents, Saves, find_saves
    from planaria.node.state.stage_state import SaveError

    async def write(client: RegistryClient) -> None:
        described = await client.describe()
        run = loads(described.run_file, "the registry's run file")
        found = of_one_run(find_saves(*folders), excluded=described.run)
        config = run.model.config

        def open_folder(stage: int) -> Saves:
            contents = Contents.of(config, stage)
            return Saves(out, described.run, stage, run.saves.keep, contents)

        at = regroup(found, config, open_folder, run.training.betas)
        console.print(
            f"step {at.step} of {found[0].run} is in {out} for {described.run}: stage-0 to "
            f"stage-{config.stages}, each for the --save-dir of a node of that stage",
            highlight=False,
            soft_wrap=True,
        )

    begin_log()
    with refusing(CredentialsError, RunFileError, RegroupError, SaveError, ValueError, OSError):
        ask_registry(join, credentials_for(join, security), write)


def audit_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a run wrote.")],
) -> None:
    """Compare what a run trained on with what it should have."""
    from planaria.node.report.ledger import LedgerError, audit

    with refusing(LedgerError):
        found = audit(directory)
    table = Table("samples", Column("number", justify="right"))
    for name in ("expected", "duplicates", "missing", "extra"):
        table.add_row(name, f"{getattr(found, name):,}")
    console.print(table)
    planned = f" of {found.planned}" if found.planned else ""
    console.print(f"{found.steps} committed steps{planned}, {found.superseded} superseded lines")
    if found.chained:
        console.print(f"{found.chained} commits follow the one before, whose hash they name")
    for sentence in (*found.cut, *found.unchained):
        console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if found.exact and found.steps < found.planned:
        console.print(
            f"steps {found.steps + 1} to {found.planned} are not there: the run is not finished, "
            "or the end of its ledger is cut off",
            highlight=False,
            soft_wrap=True,
        )
    if not found.exact:
        raise typer.Exit(1)
