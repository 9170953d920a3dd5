"""Options that several commands have, and what their values may be."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from planaria.node.page.place import Place

SECURITY = "Security"
Ca = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="PLANARIA_TLS_CA",
        help="CA of all certificates, PEM.",
        rich_help_panel=SECURITY,
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="PLANARIA_TLS_CERT",
        help="Own certificate, PEM.",
        rich_help_panel=SECURITY,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        envvar="PLANARIA_TLS_KEY",
        help="Own private key, PEM.",
        rich_help_panel=SECURITY,
    ),
]


def parse_token(text: str) -> str:
    """Itself, or what is in the file that it names as @FILE. Raises BadParameter."""
    if not text.startswith("@"):
        return text

    from planaria.bootstrap.invites import InviteError
    from planaria.node.enrolled import text_of

    try:
        return text_of(text, "--token", "the token")
    except InviteError as error:
        raise typer.BadParameter(str(error)) from error


Token = Annotated[
    str,
    typer.Option(
        parser=parse_token,
        metavar="SECRET|@FILE",
        envvar="PLANARIA_TOKEN",
        help="Join token that the run's machines share, or a file that has it.",
        rich_help_panel=SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="PLANARIA_INSECURE",
        help="Plain text beyond this machine, without proof of who.",
        rich_help_panel=SECURITY,
    ),
]


def parse_device(text: str) -> str:
    """Raises BadParameter."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text!r}: auto, cpu or cuda:N")
    return text


def parse_devices(text: str) -> str:
    """One, or several with commas between them. Raises BadParameter."""
    names = [parse_device(name) for name in text.split(",")]
    same = ["cuda:0" if name == "cuda" else name for name in names]
    if twice := sorted({name for name in same if same.count(name) > 1}):
        raise typer.BadParameter(f"{text!r}: {', '.join(twice)} twice; one node serves a device")
    if len(names) > 1 and "auto" in names:
        raise typer.BadParameter(f"{text!r}: auto is one device; name each of several")
    return text


def parse_name(text: str) -> str:
    """Raises BadParameter."""
    from planaria.bootstrap.spelling import misspelt

    if problem := misspelt("name", text):
        raise typer.BadParameter(problem)
    return text


MACHINE = "This machine"
OneDevice = Annotated[
    str,
    typer.Option(
        parser=parse_device,
        metavar="auto|cpu|cuda:N",
        help="What to compute with.",
        rich_help_panel=MACHINE,
    ),
]


def parse_seats(text: str) -> int | None:
    """None for auto. Raises BadParameter."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text}: a number from 1 on, or auto")
    return int(text)


Seats = Annotated[
    int | None,
    typer.Option(
        parser=parse_seats,
        metavar="N|auto",
        show_default="auto",
        help="Stages that a node serves at most, when others are missing; auto: as many as its "
        "memory has room for.",
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
        help="Where a browser shows the run; port 0: any.",
    ),
]
InsecureHttp = Annotated[
    bool,
    typer.Option(
        "--insecure-http", help="The page in plain text beyond this machine; nodes keep their TLS."
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0, metavar="AMOUNT", help="Of a node hour: the page says what it comes to."),
]


def parse_place(
    http: str,
    token: str,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
    option: str = "--http",
) -> Place | None:
    """Where `option` has something served; None: nowhere. Raises AddressError, CredentialsError,
    and OSError where that place isn't free."""
    from planaria.bootstrap.address import Address
    from planaria.node.page.place import Keys, Place

    if http == "none":
        return None
    keys = Keys(certificate, key) if certificate is not None and key is not None else None
    place = Place(Address.parse(http), token, keys, insecure, option)
    place.check()
    return place


Join = Annotated[
    str,
    typer.Option(
        metavar="INVITE|@FILE|HOST:PORT[,HOST:PORT]",
        envvar="PLANARIA_JOIN",
        help="An invite, or a file that has it; or where the registry listens, several addresses "
        "being of one.",
    ),
]


Living = Annotated[
    str | None,
    typer.Option(
        metavar="INVITE|@FILE|HOST:PORT[,HOST:PORT]",
        help="Instead of a folder: an invite to a living run, or where its registry listens.",
    ),
]


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


LOG = "Log"
Level = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        envvar="PLANARIA_LOG_LEVEL",
        help="What the log has: this, and what is graver.",
        rich_help_panel=LOG,
    ),
]
Format = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="PLANARIA_LOG_FORMAT",
        help="Lines for people, or JSON for what collects logs.",
        rich_help_panel=LOG,
    ),
]


class Tracker(enum.StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


Tracked = Annotated[
    Tracker | None,
    typer.Option(
        "--track",
        help="Keep the run there, too: losses, rates, recoveries, samples, the run file.",
    ),
]


def check_tracker(track: Tracker | None) -> None:
    """Raises ModuleNotFoundError, which says what is missing."""
    from planaria.node import extras

    if track is not None:
        extras.check(track.value)


FILES, NETWORK = "Files", "Network"
DataPlaces = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="DIR|URL",
        help="Prepared data; of several corpora once each, or a folder that has them all. Of a URL "
        "(s3://, https://, ...) is read what is needed.",
        rich_help_panel=FILES,
    ),
]
AllowModule = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:BUILD",
        help="Code that a node here may load if the run's model is an architecture of its own.",
        rich_help_panel=FILES,
    ),
]
