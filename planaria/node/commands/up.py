"""The command that trains on this machine alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planaria.node.commands.options import (
    FILES,
    LOOPBACK,
    MACHINE,
    Http,
    Log,
    OneDevice,
    Price,
    Seats,
    Security,
    Tracked,
    check_tracker,
    flattened,
)
from planaria.node.commands.terminal import console, refusing, tracking

if TYPE_CHECKING:
    pass


LOSSES = "Losses"


@flattened
def up_command(
    *,
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Without one: the defaults.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Size of the model, as `planaria presets` lists them.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks in the model.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Body stages; the model's layers are divided among them.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Nodes a stage.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What to do when a stage is lost: checkfree, checkfree+, snapshot, checkpoint or "
            "redundant."
        ),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Stop where the policy can't serve, rather than guess."),
    ] = None,
    masking: Annotated[
        str | None,
        typer.Option(
            help="When a node is lost in a step and its stage has others: reassign what was its "
            "to them, spare: let one of them do it ahead, or abort and try the step again."
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[.REPLICA]@STEP",
            help="SIGKILL every node of a stage, or one of them, while this step is under way; "
            "replacements are started at once. Repeatable.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace/--no-replace",
            help="Start another node for each that is gone, killed or ended by itself.",
            rich_help_panel=LOSSES,
        ),
    ] = True,
    loss_rate: Annotated[
        str | None,
        typer.Option(
            metavar="10%/h",
            help="SIGKILL nodes at random: of a hundred so many are lost within an hour.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Kill and start nodes as a spot trace has it (milliseconds, add or remove, node).",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            help="Times as fast as --loss-rate or --trace says.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: out/NAME-DATE-TIME.",
            rich_help_panel=FILES,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and windows.")] = None,
    save_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the nodes' saves, for --resume. Default: saves, in --out.",
            rich_help_panel=FILES,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on with a run that was stopped as a whole: the --out or --save-dir of it. "
            "--stages and --replicas may be others than before.",
            rich_help_panel=FILES,
        ),
    ] = None,
    hold: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to keep the nodes at the end of the run while the model isn't saved.",
            rich_help_panel=FILES,
        ),
    ] = 3600.0,
    device: OneDevice = "auto",
    seats: Seats = None,
    http: Http = LOOPBACK,
    price: Price = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Start more nodes than this machine has memory or cores for.",
            rich_help_panel=MACHINE,
        ),
    ] = False,
    track: Tracked = None,
    log: Log,
) -> None:
    """Train with a whole swarm on this machine."""
    import asyncio

    from planaria.bootstrap.credentials import CredentialsError
    from planaria.node.data.corpus import CorpusError
    from planaria.node.data.progress import untracked
    from planaria.node.launch.resolve import text_to_prepare
    from planaria.node.local.resume import ResumeError, changed
    from planaria.node.local.swarm import (
        SwarmError,
        choose_losses,
        parse_kill,
        plan_run,
        read_plan,
        up,
    )
    from planaria.node.run_file import RunFile, RunFileError, load, override

    check_tracker(track)
    with refusing(CredentialsError, OSError, ValueError):
        Security().place(http, insecure=False)
    with refusing(RunFileError, CorpusError, SwarmError, ResumeError, ValueError):
        if resume is not None:
            trained = (run_file, preset, layers, steps, policy, strict, masking, seed)
            if any(option is not None for option in (*trained, out, save_dir)):
                raise SwarmError(
                    "--resume goes on with the run as it was started: of the other options only "
                    "--stages, --replicas and those about losses go with it"
                )
            resumed = read_plan(resume)
            plan = resumed._replace(run=changed(resumed.run, stages, replicas))
        else:
            resumed = None
            run = override(
                RunFile() if run_file is None else load(run_file),
                model__preset=preset,
                model__layers=layers,
                model__stages=stages,
                swarm__replicas=replicas,
                steps=steps,
                recovery__policy=policy,
                recovery__strict=strict,
                recovery__masking=masking,
                seed=seed,
            )
            shown = tracking("documents") if text_to_prepare(run) else nullcontext(untracked)
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            with shown as progress:
                plan = plan_run(run, out, save_dir, device, say, progress)
        plan = plan._replace(http=http, price=price, log=(log.log_level, log.log_format))
        plan = plan._replace(track=track, hold=hold)
        kills = [parse_kill(text, plan.run) for text in kill or []]
        losses = choose_losses(plan.run, loss_rate, trace, speedup)
        ending = asyncio.run(
            up(plan, kills, console, resumed, replace, losses, seats, oversubscribe)
        )
    raise typer.Exit(ending.status)
