"""The options of `planaria up`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from planaria.node.launch.options import (
    DEVICES,
    FILES,
    LOOPBACK,
    MACHINE,
    Http,
    Log,
    Price,
    Seats,
    Tracked,
    parse_device,
)
from planaria.recovery.policy import POLICIES

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile


@dataclass(frozen=True, kw_only=True)
class RunChanges:
    """The options that give a run other values than its run file, or than before --resume."""

    preset: Annotated[
        str | None, typer.Option(help="Size of the model, one of `planaria presets`.")
    ] = None
    layers: Annotated[int | None, typer.Option(help="Blocks in the model.")] = None
    stages: Annotated[
        int | None,
        typer.Option(help="Number of body stages; the model's layers are divided among them."),
    ] = None
    replicas: Annotated[int | None, typer.Option(help="Nodes for each stage.")] = None
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None
    policy: Annotated[
        str | None,
        typer.Option(help=f"What to do when a stage is lost: {', '.join(POLICIES)}."),
    ] = None
    strict: Annotated[
        bool | None,
        typer.Option(
            "--strict",
            help="Stop rather than estimate lost weights where the policy has no exact state.",
        ),
    ] = None
    masking: Annotated[
        str | None,
        typer.Option(
            help="When a node with replicas is lost during a step: reassign its microbatches to "
            "them, or abort and repeat the step."
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of initial weights and of the data's order.")
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Another value of a run file's key, as in training.lr=3e-4. Repeatable.",
        ),
    ] = None

    def applied_to(self, run: RunFile) -> RunFile:
        """The run file with the values of these options. Raises RunFileError."""
        from planaria.node.run_file import override, parse_settings

        options = {
            "model__preset": self.preset,
            "model__layers": self.layers,
            "model__stages": self.stages,
            "swarm__replicas": self.replicas,
            "steps": self.steps,
            "recovery__policy": self.policy,
            "recovery__strict": self.strict,
            "recovery__masking": self.masking,
            "seed": self.seed,
        }
        given = {key: value for key, value in options.items() if value is not None}
        return override(run, **parse_settings(self.set or ()) | given)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options for which nodes are killed, and whether others take their place."""

    PANELS: ClassVar = {"Losses": ()}

    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[.REPLICA]@STEP",
            help="SIGKILL every node of a stage, or one of them, during this step, and remove its "
            "saves; replacements start at once. Repeatable.",
        ),
    ] = None
    replace: Annotated[
        bool,
        typer.Option(
            "--replace/--no-replace",
            help="Start a replacement for each node that was killed or has ended.",
        ),
    ] = True
    loss_rate: Annotated[
        str | None,
        typer.Option(
            metavar="10%/h", help="SIGKILL nodes at random: percent of the nodes lost per hour."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Kill and start nodes by a spot trace (milliseconds, add or remove, node).",
        ),
    ] = None
    speedup: Annotated[
        float | None,
        typer.Option(help="Speed-up of --loss-rate or --trace."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """The options for how the processes are run, whatever they train."""

    PANELS: ClassVar = {FILES: ("hold",), MACHINE: ("oversubscribe",)}

    hold: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to keep the nodes after the run while the model isn't saved."
        ),
    ] = 3600.0
    seats: Seats = None
    http: Http = LOOPBACK
    price: Price = None
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe", help="Start more nodes than this machine has memory or cores for."
        ),
    ] = False
    track: Tracked = None
    log: Log = field(default_factory=Log)


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options of `planaria up`."""

    PANELS: ClassVar = {FILES: ("out", "save_dir", "resume", "data", "at")}

    run_file: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN.toml]", help="Run file. Default: the default settings."),
    ] = None
    changes: RunChanges
    losses: LossOptions
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: out/NAME-DATE-TIME. With --resume: a new folder, where "
            "a copy of the run goes on."
        ),
    ] = None
    save_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the nodes' saves, for --resume. Default: saves, in --out."),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Continue a stopped run, given its --out or --save-dir, moved or not. Its "
            "settings may be changed, its model and its data not.",
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|URL",
            help="With --resume: the run's prepared data, if it is no longer where it was. "
            "Repeatable.",
        ),
    ] = None
    at: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="With --resume: go back to the saves of this step. `planaria saves` lists them.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            parser=parse_device,
            metavar=DEVICES,
            show_default="auto; with --resume, as before",
            help="Device to compute on.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    swarm: SwarmOptions
