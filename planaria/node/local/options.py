"""The options of `planaria up`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planaria.node.launch.options import (
    FILES,
    LOOPBACK,
    MACHINE,
    Http,
    Log,
    OneDevice,
    Price,
    Seats,
    Tracked,
)

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile

LOSSES = "Losses"


@dataclass(frozen=True, kw_only=True)
class RunChanges:
    """What is another value than in the run file."""

    preset: Annotated[
        str | None, typer.Option(help="Size of the model, as `planaria presets` lists them.")
    ] = None
    layers: Annotated[int | None, typer.Option(help="Blocks in the model.")] = None
    stages: Annotated[
        int | None, typer.Option(help="Body stages; the model's layers are divided among them.")
    ] = None
    replicas: Annotated[int | None, typer.Option(help="Nodes a stage.")] = None
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help="What to do when a stage is lost: checkfree, checkfree+, snapshot, checkpoint or "
            "redundant."
        ),
    ] = None
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Stop where the policy can't serve, rather than guess."),
    ] = None
    masking: Annotated[
        str | None,
        typer.Option(
            help="When a node is lost in a step and its stage has others: reassign what was its "
            "to them, spare: let one of them do it ahead, or abort and try the step again."
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of weights and windows.")] = None

    def of(self, run: RunFile) -> RunFile:
        """Raises RunFileError."""
        from planaria.node.run_file import override

        return override(
            run,
            model__preset=self.preset,
            model__layers=self.layers,
            model__stages=self.stages,
            swarm__replicas=self.replicas,
            steps=self.steps,
            recovery__policy=self.policy,
            recovery__strict=self.strict,
            recovery__masking=self.masking,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Which nodes are killed, and whether others take their place."""

    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[.REPLICA]@STEP",
            help="SIGKILL every node of a stage, or one of them, while this step is under way; "
            "replacements are started at once. Repeatable.",
            rich_help_panel=LOSSES,
        ),
    ] = None
    replace: Annotated[
        bool,
        typer.Option(
            "--replace/--no-replace",
            help="Start another node for each that is gone, killed or ended by itself.",
            rich_help_panel=LOSSES,
        ),
    ] = True
    loss_rate: Annotated[
        str | None,
        typer.Option(
            metavar="10%/h",
            help="SIGKILL nodes at random: of a hundred so many are lost within an hour.",
            rich_help_panel=LOSSES,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Kill and start nodes as a spot trace has it (milliseconds, add or remove, node).",
            rich_help_panel=LOSSES,
        ),
    ] = None
    speedup: Annotated[
        float | None,
        typer.Option(
            help="Times as fast as --loss-rate or --trace says.",
            rich_help_panel=LOSSES,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """How the processes are run, whatever they train."""

    hold: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to keep the nodes at the end of the run while the model isn't saved.",
            rich_help_panel=FILES,
        ),
    ] = 3600.0
    seats: Seats = None
    http: Http = LOOPBACK
    price: Price = None
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Start more nodes than this machine has memory or cores for.",
            rich_help_panel=MACHINE,
        ),
    ] = False
    track: Tracked = None
    log: Log = field(default_factory=Log)


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options of `planaria up`."""

    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Without one: the defaults.")
    ] = None
    changes: RunChanges
    losses: LossOptions
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: out/NAME-DATE-TIME.",
            rich_help_panel=FILES,
        ),
    ] = None
    save_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the nodes' saves, for --resume. Default: saves, in --out.",
            rich_help_panel=FILES,
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on with a run that was stopped as a whole: the --out or --save-dir of it. "
            "--stages and --replicas may be others than before.",
            rich_help_panel=FILES,
        ),
    ] = None
    device: OneDevice = "auto"
    swarm: SwarmOptions
