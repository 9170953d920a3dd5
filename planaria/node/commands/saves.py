"""Commands for what a run has left in folders: saves, regroup, audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console, end, say, warn
from planaria.node.launch.options import Join, Security, flattened

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.node.state.saves import SaveFile


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
        say(
            f"step {regrouped.step} of {saves[0].run} is in {out} for {described.run}: stage-0 to "
            f"stage-{config.stages}, each for the --save-dir of a node of that stage"
        )

    begin_log()
    ask_registry(join, credentials_for(join, security), write)


def saves_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="What `planaria up` wrote, or nodes' --save-dir."),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read them all, to find damaged ones.")
    ] = False,
) -> None:
    """List a run's saves: which steps are whole, and how large."""
    from planaria.node.report.log_stream import begin_log
    from planaria.node.state.saves import find_saves
    from planaria.node.state.stage_state import SaveError

    begin_log()
    places = [place for folder in folders for place in (folder, *_below(folder))]
    steps: dict[tuple[str, int], dict[int, SaveFile]] = {}
    damaged = 0
    for save in find_saves(*places):
        if verify:
            try:
                save.check()
            except SaveError as error:
                warn(str(error))
                damaged += 1
                continue
        steps.setdefault((save.run, save.state.id.step), {})[save.state.id.stage] = save
    if not steps and not damaged:
        end(f"there are no saves in {', '.join(map(str, folders))}: name the folder of a run")
    table = Table("run", Column("step", justify="right"), "stages", Column("MB", justify="right"))
    for (run, step), by_stage in sorted(steps.items()):
        last = max(stage for (of, _), saved in steps.items() if of == run for stage in saved)
        lacking = [stage for stage in range(last + 1) if stage not in by_stage]
        state = f"lacks {', '.join(map(str, lacking))}" if lacking else "all"
        size = sum(save.path.stat().st_size for save in by_stage.values())
        table.add_row(run, str(step), state, f"{size / 1e6:,.1f}")
    console.print(table)
    if damaged:
        raise typer.Exit(1)


def _below(folder: Path) -> list[Path]:
    """Where saves are in the folder of a run, and of what it was before its settings changed."""
    return [folder / "saves", *folder.glob("checkpoints*"), *(folder / "saves").glob("*/")]


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
        say(sentence, "yellow")
    if report.exact and report.steps < report.planned:
        say(
            f"steps {report.steps + 1} to {report.planned} are missing: the run has not finished, "
            "or the end of its ledger is cut off"
        )
    if not report.exact:
        raise typer.Exit(1)
