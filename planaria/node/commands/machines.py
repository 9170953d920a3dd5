"""Commands that make this machine part of a run, or see whether it could be: bootstrap, node,
doctor."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.markup import escape

import planaria
from planaria.bootstrap.address import Address
from planaria.bootstrap.address_probe import Reachability
from planaria.node.commands.registry import check_registries, credentials_for, run_on_loop
from planaria.node.commands.terminal import console, errors, reporting_errors, warn
from planaria.node.launch.errors import NodeCrashed
from planaria.node.launch.node_options import Addresses, DoctorOptions, NodeOptions
from planaria.node.launch.options import (
    FILES,
    LOOPBACK,
    NETWORK,
    SECURITY,
    Http,
    Insecure,
    InsecureHttp,
    Log,
    Price,
    Security,
    check_tracker,
    flattened,
)

BEGAN = time.monotonic()


@flattened
def node_command(options: NodeOptions) -> None:
    """Join a run, and serve a stage of its model."""
    from planaria.node.launch.begin import Setup, begin, check_reachable
    from planaria.node.launch.enrolled import invitation_of
    from planaria.node.launch.supervisor import TRY_AGAIN, device_commands, is_watched, supervise
    from planaria.node.wire.seat_names import name_of_host

    name = options.name or name_of_host(socket.gethostname())
    check_tracker(options.track)
    lines = options.log.begin(name)
    addresses = Addresses.of(options)
    metrics = None if options.metrics == "none" else Address.parse(options.metrics)
    listen, advertise = addresses.listen, addresses.advertise
    nodes = device_commands(options.device.split(","), listen, advertise, options.saves, metrics)
    watched = is_watched()
    if not watched:
        check_registries(addresses.registries, [Reachability.UNKNOWN], TRY_AGAIN)
    check_reachable(addresses)
    again = options.restart == "always"
    if not watched and (again or len(nodes) > 1):
        raise typer.Exit(asyncio.run(supervise(nodes, options.grace, again)))

    with ending_hanging_threads(), exit_status_by_error():
        security = options.security
        setup = Setup(
            options,
            addresses,
            security.credentials(),
            name=name,
            log=lines if options.share_log else None,
            metrics=security.page_address(options.metrics, options.insecure, "--metrics"),
            invitation=invitation_of(options.join),
        )
        status = run_on_loop(begin(setup, _serve))
    raise typer.Exit(status)


def _serve(*arguments: Any) -> Awaitable[int]:
    """Serve a node. This loads torch, so it is called after all other checks."""
    from planaria.node.serve import serve

    return serve(*arguments)


@contextmanager
def ending_hanging_threads() -> Iterator[None]:
    """End the node's process even if its compute thread hangs, in a device for example; that would
    also block the interpreter's normal exit."""
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
def exit_status_by_error() -> Iterator[None]:
    """Turn a node's errors into exit statuses: TRY_AGAIN and CRASHED if a restart may mend them."""
    from planaria.bootstrap.client import RegistryUnreachable
    from planaria.bootstrap.enrolment_client import EnrolmentUnreachable
    from planaria.node.launch.supervisor import CRASHED, TRY_AGAIN

    try:
        with reporting_errors({EnrolmentUnreachable: TRY_AGAIN, RegistryUnreachable: TRY_AGAIN}):
            yield
    except (typer.Exit, ModuleNotFoundError):
        raise
    except NodeCrashed as crash:
        logging.error("the node has crashed: %s", crash, exc_info=crash.__cause__)
        raise typer.Exit(CRASHED) from crash
    except Exception as error:
        logging.exception("the node has crashed")
        raise typer.Exit(CRASHED) from error


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """Options of `planaria bootstrap`."""

    PANELS: ClassVar = {
        FILES: ("journal", "after", "address_file", "store"),
        SECURITY: ("most_per_block", "allow", "authority", "enrol"),
        NETWORK: ("advertise", "others"),
    }

    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0: any free one.")
    ]
    run_file: Annotated[
        Path,
        typer.Option(
            "--run", envvar="PLANARIA_BOOTSTRAP_RUN", metavar="RUN.toml", help="The run file."
        ),
    ]
    journal: Annotated[
        Path | None, typer.Option(help="File from which a restarted registry continues.")
    ] = None
    after: Annotated[
        Path | None,
        typer.Option(
            metavar="JOURNAL",
            help="Journal of the run that this one continues with other settings.",
        ),
    ] = None
    address_file: Annotated[
        Path | None, typer.Option(help="File to write HOST:PORT to once the registry listens.")
    ] = None
    most_per_block: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Maximum number of members from one block of addresses (/24, IPv6: /64); this "
            "machine's don't count. 0: unlimited.",
        ),
    ] = 0
    allow: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the instances that may join, one a line. Default: all may.",
        ),
    ] = None
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the run's certificate authority, which issues invites and signs views; "
            "naming it turns on TLS on loopback, too. Default: JOURNAL.authority; without a "
            "journal, in memory.",
        ),
    ] = None
    enrol: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="the port below --listen",
            help="Address at which invites are exchanged for certificates.",
        ),
    ] = None
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="The registry's address in invites, if not --listen."
        ),
    ] = None
    store: Annotated[
        str,
        typer.Option(
            envvar="PLANARIA_STORE",
            metavar="etcds://HOST:PORT,...",
            help="etcd that the run's registries share instead of a journal; one of them leads. "
            "?ca=FILE&cert=FILE&key=FILE: TLS to etcd.",
        ),
    ] = ""
    others: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT,...", help="The run's other registries, also named in invites."
        ),
    ] = ""
    http: Http = LOOPBACK
    insecure_http: InsecureHttp = False
    price: Price = None
    log: Log
    insecure: Insecure = False
    security: Security


@flattened
def bootstrap_command(options: BootstrapOptions) -> None:
    """Run the registry, which tracks who serves which stage, and the run's web page."""
    from planaria.bootstrap.invites import read_allowed
    from planaria.node.commands.bootstrapping import Bootstrapping
    from planaria.node.launch.resolve import resolve
    from planaria.node.model.learning_rate import warmup_too_long
    from planaria.node.run_file import load

    options.log.begin("registry")
    if options.store and not (options.journal is None is options.after):
        raise ValueError("--store replaces --journal and --after; leave those out")
    listen = Address.parse(options.listen)  # checked first: resolving a model takes time
    insecure = options.insecure or options.insecure_http
    page = options.security.page_address(options.http, insecure)
    run = resolve(load(options.run_file))
    if problem := warmup_too_long(run):
        warn(problem)
    bootstrapping = Bootstrapping(
        options,
        listen,
        run=run,
        limits={
            "max_per_block": options.most_per_block,
            "allowed": None if options.allow is None else read_allowed(options.allow),
        },
        credentials=options.security.credentials(),
        enrol=None if options.enrol is None else Address.parse(options.enrol),
        others=[Address.to_dial(other) for other in options.others.split(",") if other],
        page=page,
    )
    if options.store:
        bootstrapping.serve_among_others()
    else:
        bootstrapping.serve_alone()


@flattened
def doctor_command(options: DoctorOptions) -> None:
    """Check, within 15 seconds, whether a node with these options could join from this machine. The
    exit status is 0 if all is well, 1 after a warning, 2 after a problem."""
    from planaria.node.launch.advertised import forwarded_address
    from planaria.node.launch.diagnosis import Grade, finding_lines, findings, worst_grade
    from planaria.node.launch.doctor import Examined, gather_facts

    addresses = Addresses.of(options)
    public = forwarded_address(addresses.listen, os.environ)
    if options.advertise is None and public:
        addresses = addresses._replace(advertise=public.address)
    examined = Examined(options, addresses, credentials_for(options.join, options.security))
    with errors.status("checking, for at most 15 seconds"):
        all_findings = findings(
            run_on_loop(gather_facts(examined, planaria.__version__, time.monotonic() - BEGAN))
        )
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for about, verdict, text in finding_lines(all_findings):
        line = f"[{colours[verdict]}]{verdict:<8}[/] [bold]{about:<10}[/] {escape(text)}"
        console.print(line, soft_wrap=True, highlight=False)
    if (status := worst_grade(all_findings)) is not Grade.OK:
        raise typer.Exit(int(status))
