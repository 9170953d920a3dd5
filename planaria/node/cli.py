"""The command `planaria`: its commands, whose modules are imported inside them, so that --help is
quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from planaria import __version__
from planaria.node.commands import looking, machines, models, operating, saves
from planaria.node.commands.data import data_app
from planaria.node.commands.terminal import fail, print_error, reporting_errors, warn
from planaria.node.commands.up import up_command
from planaria.node.launch.secret_words import secret_warnings
from planaria.node.machine.extras import remedy
from planaria.node.machine.imports import leave_out_current_folder

ADDED = "planaria.commands"
"""The group of entry points through which other packages add commands."""
IN_LAB = ("lab", "plan")
"""Commands that the package planaria-lab adds."""
BY_USE: dict[str, Callable[..., None] | typer.Typer] = {
    "up": up_command,
    "node": machines.node_command,
    "bootstrap": machines.bootstrap_command,
    "status": looking.status_command,
    "logs": looking.logs_command,
    "page": looking.page_command,
    "doctor": machines.doctor_command,
    "probe": looking.probe_command,
    "invite": operating.invite_command,
    "members": operating.members_command,
    "evict": operating.evict_command,
    "ban": operating.ban_command,
    "allow": operating.allow_command,
    "pause": operating.pause_command,
    "go": operating.go_command,
    "change": operating.change_command,
    "back": operating.back_command,
    "stop": operating.stop_command,
    "audit": saves.audit_command,
    "data": data_app,
    "presets": models.presets_command,
    "export": models.export_command,
    "generate": models.generate_command,
    "evaluate": models.evaluate_command,
    "saves": saves.saves_command,
    "regroup": saves.regroup_command,
}
"""The commands, as --help lists them; those that are added come last."""


class _Commands(TyperGroup):
    """The commands above, and those added to them, which are loaded when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*BY_USE, *sorted(entry_points(group=ADDED).names, reverse=True)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        for added in entry_points(group=ADDED, name=cmd_name):
            command = get_command(added.load())
            command.name = cmd_name
            return command
        if cmd_name in IN_LAB:
            fail(f"planaria {cmd_name} is in another package: pip install planaria-lab")
        return None

    def invoke(self, ctx: Any) -> Any:
        with reporting_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PLANARIA"},
    help="Train large language models on machines that come and go.",
    epilog="Each option has an environment variable: PLANARIA_NODE_SAVE_DIR is --save-dir of "
    "planaria node. PLANARIA_JOIN, PLANARIA_TOKEN, PLANARIA_TLS_CA, PLANARIA_TLS_CERT, "
    "PLANARIA_TLS_KEY, PLANARIA_INSECURE, PLANARIA_LOG_LEVEL and PLANARIA_LOG_FORMAT are for all "
    "commands that have these options.",
)
for name, command in BY_USE.items():
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"planaria {__version__}")
        raise typer.Exit


@app.callback()
def planaria(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,  # PLANARIA_VERSION may well be an image's
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    import logging

    leave_out_current_folder()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal can't show is escaped
            stream.reconfigure(errors="backslashreplace")
    # gRPC warns of every fork; ours only go on to exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    for seen in secret_warnings(sys.argv[1:]):
        warn(seen)
    try:
        app()
    except ModuleNotFoundError as error:
        print_error(remedy(error))
        raise SystemExit(1) from error
    finally:
        logging.shutdown()
