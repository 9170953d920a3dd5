"""The options of `planaria node` and `planaria doctor`, and the addresses that they come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import typer

from planaria.bootstrap.address import Address
from planaria.node.launch.options import (
    FILES,
    LOG,
    LOOPBACK,
    MACHINE,
    NETWORK,
    AllowModule,
    DataPlaces,
    Insecure,
    Join,
    Log,
    OneDevice,
    Seats,
    Security,
    Tracked,
    parse_devices,
    parse_name,
)

ENDING = "When it ends"

Stage = Annotated[
    int | None,
    typer.Option(min=0, help="The stage to serve. Default: where a node is needed most."),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default="127.0.0.1:0; where the registry of an invite is elsewhere, 0.0.0.0:0",
        help="Address to listen on for other nodes; port 0: any free one.",
        rich_help_panel=NETWORK,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|none",
        help="Address that other nodes dial, if not --listen; none: this node only dials out.",
        rich_help_panel=NETWORK,
    ),
]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of `planaria node`."""

    PANELS: ClassVar = {
        FILES: ("model", "checkpoint_dir", "out", "save_dir"),
        NETWORK: ("metrics",),
        MACHINE: ("device", "threads"),
        ENDING: ("grace", "cloud", "restart"),
        LOG: ("share_log",),
    }

    join: Join
    stage: Stage = None
    listen: Listen = None
    advertise: Advertise = None
    device: Annotated[
        str,
        typer.Option(
            parser=parse_devices,
            metavar="auto|cpu|cuda:N[,cuda:M]|mps|xpu:N",
            help="Device to compute on. With several devices one node runs on each: each has the "
            "next port, and a folder of its own in --save-dir.",
        ),
    ] = "auto"
    seats: Seats = None
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait without a stage until one has no node, then serve it."
        ),
    ] = False
    data: DataPlaces = None
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model that the run begins from.")
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of checkpoints, shared by all nodes, for the policy `checkpoint`.",
        ),
    ] = None
    allow_module: AllowModule = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for event log and ledger. Default: out/RUN, RUN as in status."),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of PyTorch. Default: as many as PyTorch chooses."),
    ] = None
    save_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|none",
            help="Folder for saves of this node's stages; the node continues from saves in it. "
            "Default: its own folder in out/RUN/saves, or with --out DIR in DIR/RUN/saves.",
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds after SIGTERM in which to save, hand over and leave."),
    ] = 25.0
    cloud: Annotated[
        Literal["auto", "aws", "gcp", "azure", "none"],
        typer.Option(
            help="Cloud whose notices of the machine's end the node follows; auto: detect it. The "
            "time that a notice leaves takes the place of --grace."
        ),
    ] = "auto"
    restart: Annotated[
        Literal["no", "always"],
        typer.Option(help="What to do after a crash; always: start the node again after a pause."),
    ] = "always"
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|none",
            help="Address of this node's metrics for Prometheus; port 0: any free one.",
        ),
    ] = "none"
    name: Annotated[
        str | None,
        typer.Option(
            parser=parse_name,
            metavar="NAME",
            help="Prefix of this node's name in logs, status and page. Default: its host's name.",
        ),
    ] = None
    log: Log = field(default_factory=Log)
    track: Tracked = None
    share_log: Annotated[
        bool,
        typer.Option(
            "--share-log/--no-share-log",
            help="Whether the run's members and readers may read this node's log.",
        ),
    ] = True
    insecure: Insecure = False
    security: Security = field(default_factory=Security)

    @property
    def saves(self) -> Path | None:
        """The folder for saves; None: none was named."""
        return None if self.save_dir == Path("none") else self.save_dir


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `planaria doctor`: some of `planaria node`."""

    join: Join
    stage: Stage = None
    listen: Listen = None
    advertise: Advertise = None
    device: OneDevice = "auto"
    data: DataPlaces = None
    allow_module: AllowModule = None
    save_dir: Annotated[
        Path, typer.Option(help="Folder that the node would save in.", rich_help_panel=FILES)
    ] = Path("out")
    insecure: Insecure = False
    security: Security = field(default_factory=Security)


class Addresses(NamedTuple):
    """Where a node finds its registry, and where peers find the node."""

    registries: tuple[str, ...]
    listen: Address
    advertise: Address | None  # None: whatever peers can be expected to dial
    dials_only: bool  # can't be dialled

    @classmethod
    def of(cls, options: NodeOptions | DoctorOptions) -> Addresses:
        """The addresses by a node's options; with an invite to another machine, it listens on all
        of its own. Raises AddressError, InviteError."""
        from planaria.node.launch.enrolled import addresses_of, invitation_of

        invited, registries = invitation_of(options.join) is not None, addresses_of(options.join)
        here = not invited or all(Address.to_dial(each).is_loopback for each in registries)
        listen = Address.parse(options.listen or (LOOPBACK if here else "0.0.0.0:0"))
        named = options.advertise
        advertise = None if named is None or named == "none" else Address.to_dial(named)
        return cls(registries, listen, advertise, named == "none")
