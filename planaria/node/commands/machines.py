"""Commands that make this machine part of a run, or see whether it could be: bootstrap, node,
doctor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from planaria.node.commands.options import (
    FILES,
    LOG,
    LOOPBACK,
    MACHINE,
    NETWORK,
    SECURITY,
    AllowModule,
    DataPlaces,
    Http,
    Insecure,
    InsecureHttp,
    Join,
    Log,
    OneDevice,
    Price,
    Seats,
    Security,
    Tracked,
    check_tracker,
    flattened,
    parse_devices,
    parse_name,
)
from planaria.node.commands.registry import addresses_of, check_there, credentials_for, run_on_loop
from planaria.node.commands.terminal import console, errors, refuse, refusing, warn

BEGAN = time.monotonic()
ENDING = "When it ends"


@flattened
def node_command(
    *,
    join: Join,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Default: where a node is needed most.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="127.0.0.1:0; where the registry of an invite is elsewhere, 0.0.0.0:0",
            help="Where peers dial in; port 0: any.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|none",
            help="What to tell peers, if not --listen; none: this node only dials out.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            parser=parse_devices,
            metavar="auto|cpu|cuda:N[,cuda:M]",
            help="What to compute with; of several, a node on each: the next one has the next "
            "port, and a folder of its own in --save-dir.",
            rich_help_panel=MACHINE,
        ),
    ] = "auto",
    seats: Seats = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait until a stage has nobody, then take it.")
    ] = False,
    data: DataPlaces = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint that the run begins from.",
            rich_help_panel=FILES,
        ),
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where checkpoints are, which all nodes share, if the run's policy writes some.",
            rich_help_panel=FILES,
        ),
    ] = None,
    allow_module: AllowModule = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for event log and ledger. Default: out/RUN, RUN as in status.",
            rich_help_panel=FILES,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That PyTorch computes with on CPUs. Default: its.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    save_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|none",
            help="Folder for saves of this node's stages; it goes on from what is there. Default: "
            "one of its own in out/RUN/saves; with --out DIR, in DIR/RUN/saves.",
            rich_help_panel=FILES,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after SIGTERM in which to save, hand over and leave.",
            rich_help_panel=ENDING,
        ),
    ] = 25.0,
    cloud: Annotated[
        Literal["auto", "aws", "gcp", "azure", "none"],
        typer.Option(
            help="Whose notices that this machine will be taken to listen to; auto: find out. What "
            "they leave of time goes before --grace.",
            rich_help_panel=ENDING,
        ),
    ] = "auto",
    restart: Annotated[
        Literal["no", "always"],
        typer.Option(
            help="What to do when this node crashes; always: start another, after a pause.",
            rich_help_panel=ENDING,
        ),
    ] = "always",
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|none",
            help="Where Prometheus finds this node's figures; port 0: any.",
            rich_help_panel=NETWORK,
        ),
    ] = "none",
    name: Annotated[
        str | None,
        typer.Option(
            parser=parse_name,
            metavar="NAME",
            help="With which all begins by which logs, status and page call this node. Default: "
            "its host's.",
        ),
    ] = None,
    log: Log,
    track: Tracked = None,
    share_log: Annotated[
        bool,
        typer.Option(
            "--share-log/--no-share-log",
            help="Whether those of the run may read this node's log by `planaria logs`.",
            rich_help_panel=LOG,
        ),
    ] = True,
    insecure: Insecure = False,
    security: Security,
) -> None:
    """Join a run, and serve a stage of its model."""
    import asyncio
    import socket

    from planaria.bootstrap.address import Address
    from planaria.bootstrap.knock import Answer
    from planaria.node.begin import NodeError, check_reachable
    from planaria.node.enrolled import invitation_of
    from planaria.node.naming import name_of_host
    from planaria.node.supervisor import TRY_AGAIN, is_watched, one_each, supervise

    called = name or name_of_host(socket.gethostname())
    check_tracker(track)
    lines = log.begin(called)
    dials_only = advertise == "none"
    with refusing(NodeError, ValueError):
        invitation, addresses = invitation_of(join), addresses_of(join)
        listens = Address.parse(listen or (anywhere(addresses) if invitation else LOOPBACK))
        told = None if advertise is None or dials_only else Address.to_dial(advertise)
        folder = None if save_dir == Path("none") else save_dir
        shown = None if metrics == "none" else Address.parse(metrics)
        nodes = one_each(device.split(","), listens, told, folder, shown)
    watched = is_watched()
    if not watched:
        check_there(addresses, [Answer.UNKNOWN], TRY_AGAIN)
    with refusing(NodeError, ValueError):
        check_reachable(addresses, listens, told, dials_only)
    if not watched and (restart == "always" or len(nodes) > 1):
        raise typer.Exit(asyncio.run(supervise(nodes, grace, restart == "always")))

    from planaria.bootstrap.client import JoinRefused
    from planaria.bootstrap.credentials import CredentialsError
    from planaria.bootstrap.invites import NotAdmitted
    from planaria.node.begin import Options, begin
    from planaria.node.data.corpus import CorpusError
    from planaria.node.report.ledger import LedgerError
    from planaria.node.run_file import RunFileError
    from planaria.node.state.stage_state import SaveError

    kinds = (JoinRefused, NotAdmitted, NodeError, CorpusError, LedgerError, RunFileError)
    refused = (*kinds, CredentialsError, SaveError, OSError, ValueError)
    with ending_whatever_hangs(), saying_whether_another_would_do(), refusing(*refused):
        options = Options(
            join=addresses,
            stage=stage,
            seats=seats,
            standby=standby,
            listen=listens,
            advertise=told,
            dials_only=dials_only,
            device=device,
            data=tuple(data or ()),
            model=model,
            checkpoint_dir=checkpoint_dir,
            allow_module=allow_module,
            out=out,
            threads=threads,
            save_dir=folder,
            saving=save_dir != Path("none"),
            grace=grace,
            cloud=cloud,
            credentials=security.credentials(),
            insecure=insecure,
            metrics=security.place(metrics, insecure, "--metrics"),
            name=called,
            log=lines if share_log else None,
            track=track,
            invitation=invitation,
        )
        status = run_on_loop(begin(options))
    raise typer.Exit(status)


def anywhere(registries: Sequence[str]) -> str:
    """Where a node listens by default that has TLS: where others than this machine are to reach it,
    to all of its addresses."""
    from planaria.bootstrap.address import Address

    here = all(Address.to_dial(one).is_loopback for one in registries)
    return LOOPBACK if here else "0.0.0.0:0"


@contextmanager
def ending_whatever_hangs() -> Iterator[None]:
    """The process ends even if its compute thread doesn't: what that waits for (a device, for
    one) may hold up the interpreter's own end, too."""
    import logging
    import os
    import sys
    import threading

    status = 1
    try:
        yield
        status = 0
    except typer.Exit as end:
        status = end.exit_code
        raise
    finally:
        if any(thread.name.startswith("compute-") for thread in threading.enumerate()):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


@contextmanager
def saying_whether_another_would_do() -> Iterator[None]:
    """A node's end that another process might not come to has an exit status of its own."""
    import logging

    from planaria.bootstrap.client import RegistryUnreachable
    from planaria.bootstrap.enrolling import EnrolmentUnreachable
    from planaria.node.begin import NodeCrashed
    from planaria.node.supervisor import CRASHED, TRY_AGAIN

    try:
        yield
    except (typer.Exit, ModuleNotFoundError):
        raise
    except (EnrolmentUnreachable, RegistryUnreachable) as error:
        refuse(str(error))
        raise typer.Exit(TRY_AGAIN) from error
    except NodeCrashed as crash:
        logging.error("the node has crashed: %s", crash, exc_info=crash.__cause__)
        raise typer.Exit(CRASHED) from crash
    except Exception as error:
        logging.exception("the node has crashed")
        raise typer.Exit(CRASHED) from error


@flattened
def bootstrap_command(
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0: any.")],
    run_file: Annotated[
        Path,
        typer.Option("--run", envvar="PLANARIA_BOOTSTRAP_RUN", metavar="RUN.toml", help="The run."),
    ],
    journal: Annotated[
        Path | None,
        typer.Option(
            help="File that lets a restarted registry go on.",
            rich_help_panel=FILES,
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(
            metavar="JOURNAL",
            help="Of the run that this one goes on from, in other numbers: views go on counting.",
            rich_help_panel=FILES,
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(
            help="File that gets HOST:PORT once the registry listens.",
            rich_help_panel=FILES,
        ),
    ] = None,
    most_per_block: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Nodes that may be members from one block of addresses (/24, of IPv6 /64), this "
            "machine's own aside. 0: any number.",
            rich_help_panel=SECURITY,
        ),
    ] = 0,
    allow: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instances that alone may join, one a line. Default: all.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the run's certificate authority, for which invites are, and by whose "
            "key views are signed; with it, TLS on loopback, too. Default: JOURNAL.authority; "
            "without a journal, in memory.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    enrol: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="the port below --listen",
            help="Where who has an invite gets a certificate.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="What invites say of where the registry is, if not --listen.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            envvar="PLANARIA_STORE",
            metavar="etcds://HOST:PORT,...",
            help="etcd, in which the run's registries have their views, instead of a journal; one "
            "of them leads. ?ca=FILE&cert=FILE&key=FILE: what it is spoken to with.",
            rich_help_panel=FILES,
        ),
    ] = "",
    others: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...",
            help="The run's other registries, which invites name, too.",
            rich_help_panel=NETWORK,
        ),
    ] = "",
    http: Http = LOOPBACK,
    insecure_http: InsecureHttp = False,
    price: Price = None,
    log: Log,
    insecure: Insecure = False,
    security: Security,
) -> None:
    """Run the registry: who serves what, and the page on which one watches."""
    from planaria.bootstrap.address import Address
    from planaria.bootstrap.admission import AdmissionError
    from planaria.bootstrap.allowed import read_allowed
    from planaria.bootstrap.credentials import CredentialsError
    from planaria.bootstrap.etcd import EtcdRefused
    from planaria.bootstrap.journal import JournalError
    from planaria.bootstrap.store import StoreError
    from planaria.node.commands.bootstrapping import Bootstrapping
    from planaria.node.data.corpus import CorpusError
    from planaria.node.resolve import registry_rules, resolve
    from planaria.node.run_file import RunFileError, dumps, load
    from planaria.node.stage.learning_rate import too_long

    log.begin("registry")
    kinds = (AdmissionError, CorpusError, CredentialsError, JournalError, RunFileError)
    with refusing(*kinds, EtcdRefused, StoreError, OSError, ValueError):
        if store and not (journal is None is after):
            raise ValueError("--store is instead of --journal and --after; leave those out")
        place = Address.parse(listen)  # said at once, before a model is looked at
        page = security.place(http, insecure or insecure_http)
        run = resolve(load(run_file))
        if problem := too_long(run):
            warn(problem)
        begun = Bootstrapping(
            listen=place,
            rules=replace(
                registry_rules(run),
                max_per_block=most_per_block,
                allowed=None if allow is None else read_allowed(allow),
            ),
            run_file=dumps(run),
            credentials=security.credentials(),
            authority=authority,
            enrol=None if enrol is None else Address.parse(enrol),
            advertise=advertise,
            others=[Address.to_dial(other) for other in others.split(",") if other],
            page=page,
            price=price,
            insecure=insecure,
            address_file=address_file,
        )
        if store:
            begun.among(store)
        else:
            begun.alone(journal, after)


@flattened
def doctor_command(
    *,
    join: Join,
    stage: Annotated[
        int | None, typer.Option(min=0, help="That a node here would serve. Default: any.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="as of planaria node",
            help="Where a node here would listen.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|none",
            help="What it would tell peers; none: it would only dial out.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    device: OneDevice = "auto",
    data: DataPlaces = None,
    allow_module: AllowModule = None,
    save_dir: Annotated[
        Path, typer.Option(help="Where it would save.", rich_help_panel=FILES)
    ] = Path("out"),
    insecure: Insecure = False,
    security: Security,
) -> None:
    """See, in 15 seconds, whether a node with these options could join from this machine; the exit
    status is 0 if all is well, 1 after a warning, 2 after a problem."""
    from planaria.bootstrap.address import Address
    from planaria.bootstrap.credentials import CredentialsError
    from planaria.node.advertised import forwarded
    from planaria.node.diagnosis import Verdict, findings, lines, worst
    from planaria.node.doctor import Asked, examine
    from planaria.node.enrolled import invitation_of

    dials_only = advertise == "none"
    with refusing(CredentialsError, ValueError):
        invited = invitation_of(join) is not None
        listens = Address.parse(listen or (anywhere(addresses_of(join)) if invited else LOOPBACK))
        rented = forwarded(listens, os.environ) if advertise is None else None
        told = None if advertise is None or dials_only else Address.to_dial(advertise)
        asked = Asked(
            join=addresses_of(join),
            stage=stage,
            listen=listens,
            advertise=rented.address if rented else told,
            dials_only=dials_only,
            device=device,
            data=tuple(data or ()),
            saves=save_dir,
            credentials=credentials_for(join, security),
            insecure=insecure,
            allow_module=allow_module,
        )
        with errors.status("looking, for 15 seconds at most"):
            found = findings(
                run_on_loop(examine(asked, version("planaria"), time.monotonic() - BEGAN))
            )
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for about, verdict, said in lines(found):
        text = f"[{colours[verdict]}]{verdict:<8}[/] [bold]{about:<10}[/] {escape(said)}"
        console.print(text, soft_wrap=True, highlight=False, emoji=False)
    if (status := worst(found)) is not Verdict.OK:
        raise typer.Exit(int(status))
