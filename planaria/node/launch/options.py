"""How a command gets its options, those that several have, and what their values may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from planaria.bootstrap.credentials import Credentials
    from planaria.node.page.http_address import PageAddress
    from planaria.node.report.log_stream import LastLines


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command with all its options as parameters, as typer expects them. A parameter, or field,
    whose type is a dataclass is a group: typer gets its fields, `command` an instance. A group's
    `PANELS` has the panels of its options in --help, and their names; none: all of the group."""

    @wraps(command)
    def run(**values: object) -> None:
        _call(command, values)

    run.__signature__ = Signature(list(_parameters(command)))  # type: ignore[attr-defined]
    return run


def _parameters(of: Callable[..., object]) -> Iterator[Parameter]:
    hints = get_type_hints(of, include_extras=True)
    parameters = signature(of).parameters
    for panel, names in getattr(of, "PANELS", {}).items():
        for name in names or parameters:
            hints[name].__metadata__[0].rich_help_panel = panel
    for name, parameter in parameters.items():
        if is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)


def _call(of: Callable[..., Any], values: Mapping[str, object]) -> Any:
    hints = get_type_hints(of)
    names = signature(of).parameters
    groups = {name: _call(hints[name], values) for name in names if is_dataclass(hints[name])}
    return of(**{name: values[name] for name in names if name not in groups}, **groups)


SECURITY = "Security"


def parse_token(text: str) -> str:
    """The token in --token itself, or in the file that it names as @FILE. Raises BadParameter."""
    if not text.startswith("@"):
        return text

    from planaria.bootstrap.invites import InviteError
    from planaria.node.launch.enrolled import text_or_file

    try:
        return text_or_file(text, "--token", "the token")
    except InviteError as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Security:
    """What a command proves to others, and what they have to prove."""

    PANELS: ClassVar = {SECURITY: ()}

    ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="PLANARIA_TLS_CA", help="CA of all certificates, PEM."),
    ] = None
    certificate: Annotated[
        Path | None,
        typer.Option("--tls-cert", envvar="PLANARIA_TLS_CERT", help="Own certificate, PEM."),
    ] = None
    key: Annotated[
        Path | None,
        typer.Option("--tls-key", envvar="PLANARIA_TLS_KEY", help="Own private key, PEM."),
    ] = None
    token: Annotated[
        str,
        typer.Option(
            parser=parse_token,
            metavar="SECRET|@FILE",
            envvar="PLANARIA_TOKEN",
            help="Join token that the run's machines share, or a file that has it.",
        ),
    ] = ""

    def credentials(self) -> Credentials:
        """The credentials in these options. Raises CredentialsError."""
        from planaria.bootstrap.credentials import Credentials

        return Credentials.load(self.ca, self.certificate, self.key, self.token)

    def page_address(self, http: str, insecure: bool, option: str = "--http") -> PageAddress | None:
        """Where HTTP is served that `option` asks for; None: nowhere. Raises AddressError,
        CredentialsError, and OSError where that address isn't free."""
        from planaria.bootstrap.address import Address
        from planaria.node.page.http_address import PageAddress, TlsFiles

        if http == "none":
            return None
        keys = TlsFiles(self.certificate, self.key) if self.certificate and self.key else None
        place = PageAddress(Address.parse(http), self.token, keys, insecure, option)
        place.check()
        return place


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="PLANARIA_INSECURE",
        help="Allow plain text beyond this machine: nobody's identity is checked.",
        rich_help_panel=SECURITY,
    ),
]


def parse_device(text: str) -> str:
    """Check the name in --device. Raises BadParameter."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", text):
        raise typer.BadParameter(f"{text!r}: use auto, cpu, cuda:N, mps or xpu:N")
    return text


def parse_devices(text: str) -> str:
    """Check the names in --device: one, or several with commas. Raises BadParameter."""
    names = [parse_device(name) for name in text.split(",")]
    devices = [f"{name}:0" if name in ("cuda", "xpu") else name for name in names]
    if repeated := sorted({name for name in devices if devices.count(name) > 1}):
        raise typer.BadParameter(
            f"{text!r} names {', '.join(repeated)} twice; one node runs on each device"
        )
    if len(names) > 1 and "auto" in names:
        raise typer.BadParameter(f"{text!r}: auto is one device; of several, name each")
    return text


def parse_name(text: str) -> str:
    """Check the name in --name. Raises BadParameter."""
    from planaria.bootstrap.escaping import misspelt

    if problem := misspelt("name", text):
        raise typer.BadParameter(problem)
    return text


MACHINE = "This machine"
DEVICES = "auto|cpu|cuda:N|mps|xpu:N"
OneDevice = Annotated[
    str,
    typer.Option(
        parser=parse_device,
        metavar=DEVICES,
        help="Device to compute on.",
        rich_help_panel=MACHINE,
    ),
]


def parse_seats(text: str) -> int | None:
    """The number in --seats; None for auto. Raises BadParameter."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r}: use a number from 1, or auto")
    return int(text)


Seats = Annotated[
    int | None,
    typer.Option(
        parser=parse_seats,
        metavar="N|auto",
        show_default="auto",
        help="Maximum number of stages that a node serves while others are missing; auto: as many "
        "as fit into its memory.",
        rich_help_panel=MACHINE,
    ),
]
LOOPBACK = "127.0.0.1:0"
"""Any port of this machine, for this machine: runs don't get into each other's way."""
Http = Annotated[
    str,
    typer.Option(
        "--http",
        metavar="HOST:PORT|none",
        help="Address of the run's web page; port 0: any free one.",
    ),
]
InsecureHttp = Annotated[
    bool,
    typer.Option(
        "--insecure-http", help="Serve the page in plain text beyond this machine; nodes keep TLS."
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="AMOUNT",
        help="Price of a node hour, from which the page computes the run's cost.",
    ),
]
Join = Annotated[
    str,
    typer.Option(
        metavar="INVITE|@FILE|HOST:PORT[,HOST:PORT]",
        envvar="PLANARIA_JOIN",
        help="An invite, or @FILE with one, or the registry's address; several addresses belong to "
        "one run.",
    ),
]
Living = Annotated[
    str | None,
    typer.Option(
        metavar="INVITE|@FILE|HOST:PORT[,HOST:PORT]",
        help="An invite to a running swarm, or its registry's address, instead of a folder.",
    ),
]

LOG = "Log"


@dataclass(frozen=True, kw_only=True)
class Log:
    """The options for what a process logs."""

    PANELS: ClassVar = {LOG: ()}

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(
            "--log-level", envvar="PLANARIA_LOG_LEVEL", help="Least severe level that is logged."
        ),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            "--log-format",
            envvar="PLANARIA_LOG_FORMAT",
            help="text: lines for people; json: for log collectors.",
        ),
    ] = "text"

    def begin(self, name: str) -> LastLines:
        """Begin the log of this process (see `begin_log`)."""
        from planaria.node.report.log_stream import begin_log

        return begin_log(self.log_level, self.log_format, name)


Tracked = Annotated[
    Literal["tensorboard", "wandb", "mlflow"] | None,
    typer.Option(
        "--track",
        help="Also record the run there: losses, rates, recoveries, samples, the run file.",
    ),
]


def check_tracker(track: str | None) -> None:
    """Check that --track's package is there. Raises ModuleNotFoundError with its name."""
    from planaria.node.machine import extras

    if track is not None:
        extras.require_extra(track)


FILES, NETWORK = "Files", "Network"
DataPlaces = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="DIR|URL",
        help="Folder of prepared data; for several corpora repeat it, or name a folder that has "
        "all. From a URL (s3://, https://, ...) only what is needed is read.",
        rich_help_panel=FILES,
    ),
]
AllowModule = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:BUILD",
        help="Code that this node may load if the run has its own architecture.",
        rich_help_panel=FILES,
    ),
]
