"""Commands for what a run has left in folders: saves, regroup, audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console, fail, say, warn
from planaria.node.launch.options import Join, Security, flattened

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.node.state.save_file import SaveFile


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
    """Convert a run's saves for the run of a registry, which has the same model but another run
    file, for example with more or fewer stages."""
    from planaria.node.report.log_stream import begin_log
    from planaria.node.run_file import loads
    from planaria.node.state.regrouped_saves import (
        choose_saves,
        model_as_saved,
        rewrite_saves,
        saves_of_one_run,
    )
    from planaria.node.state.save_file import Contents
    from planaria.node.state.saves import Saves, find_saves

    async def write(client: RegistryClient) -> None:
        described = await client.describe()
        run = loads(described.run_file, "the registry's run file")
        saves = saves_of_one_run(find_saves(*folders), excluded=described.run)
        config = run.config

        def open_folder(stage: int) -> Saves:
            contents = Contents.of(config, stage)
            return Saves(out, described.run, stage, run.saves.keep, contents)

        chosen = choose_saves(saves, model_as_saved(saves, config).stages)
        rewrite_saves(chosen, config, open_folder, run.training.betas)
        say(
            f"step {chosen[0].step} of {saves[0].run} is in {out} for {described.run}: stage-0 to "
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
    prune: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="KEEP",
            help="Remove saves, milestones too, but the newest KEEP whole steps and newer ones.",
        ),
    ] = None,
) -> None:
    """List a run's saves: which steps are complete, and their sizes."""
    from planaria.node.state.saves import find_saves
    from planaria.node.state.stage_state import SaveError

    places = [place for folder in folders for place in (folder, *_save_places(folder))]
    steps: dict[str, dict[int, list[SaveFile]]] = {}
    damaged = set[Path]()

    def refuse(path: Path, why: str) -> None:
        if path.exists() and path.resolve() not in damaged:  # a run that goes on removes saves
            warn(why)
            damaged.add(path.resolve())

    found = {save.path.resolve(): save for save in find_saves(*places, refuse=refuse)}
    for save in found.values():
        if verify:
            try:
                save.check()
            except SaveError as error:
                refuse(save.path, str(error))
                continue
        steps.setdefault(save.run, {}).setdefault(save.state.id.step, []).append(save)
    if not steps and not damaged:
        fail(f"there are no saves in {', '.join(map(str, folders))}: name the folder of a run")
    if prune is not None:
        _prune(steps, prune)
    table = Table("run", Column("step", justify="right"), "stages", Column("MB", justify="right"))
    for run, by_step in sorted(steps.items()):
        for step, saves in sorted(by_step.items()):
            lacking = ", ".join(map(str, _lacking(by_step, step)))
            by_stage = {save.state.id.stage: save for save in saves}
            state = f"lacks {lacking}" if lacking else "all"
            table.add_row(run, str(step), state, _megabytes(by_stage.values()))
    console.print(table)
    if damaged:
        raise typer.Exit(1)


def _lacking(by_step: Mapping[int, Sequence[SaveFile]], step: int) -> list[int]:
    """The stages of which a step of a run has no save."""
    having = {save.state.id.stage for save in by_step[step]}
    return [stage for stage in range(_last_stage(by_step) + 1) if stage not in having]


def _last_stage(by_step: Mapping[int, Sequence[SaveFile]]) -> int:
    saves = chain.from_iterable(by_step.values())
    return max(max(save.state.id.stage, save.stages) for save in saves)


def _prune(steps: Mapping[str, dict[int, list[SaveFile]]], keep: int) -> None:
    """Remove older saves from the disk and from `steps`."""
    from planaria.node.state.regrouped_saves import whole_steps

    whole = {
        run: whole_steps(chain.from_iterable(of.values()), _last_stage(of))
        for run, of in steps.items()
    }
    if without := [run for run, last_steps in whole.items() if not last_steps]:
        fail(
            f"nothing is removed: {', '.join(without)} has no step that each stage has saved in "
            "these folders; name those of all stages"
        )
    for run, by_step in steps.items():
        kept = whole[run][-keep:]
        gone = [at for at in sorted(by_step) if at < kept[-1] and at not in kept]
        removed = [save for at in gone for save in by_step.pop(at)]
        size = _megabytes(removed)
        for save in removed:
            save.path.unlink(missing_ok=True)  # the run may go on, and remove it itself
        listed = f" of step {', '.join(map(str, gone))}" if gone else ""
        say(f"{run}: {len(removed)} saves{listed} are removed, {size} MB")


def _megabytes(saves: Iterable[SaveFile]) -> str:
    return f"{sum(save.size for save in saves) / 1e6:,.1f}"


def _save_places(folder: Path) -> list[Path]:
    """Where saves are in the folder of a run, and of what it was before its settings changed."""
    return [folder / "saves", *folder.glob("checkpoints*"), *(folder / "saves").glob("*/")]


def audit_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a run wrote.")],
) -> None:
    """Compare the samples that a run trained on with those that it should have used."""
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
