"""Commands that look at a run: status, logs, probe, page."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.commands.terminal import console, errors, fail, say
from planaria.node.launch.options import (
    LOOPBACK,
    Http,
    Insecure,
    Join,
    Living,
    Price,
    Security,
    flattened,
)

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.bootstrap.credentials import Credentials
    from planaria.node.page.http_address import PageAddress
    from planaria.node.wire.observer_client import Converse


@flattened
def status_command(
    join: Join,
    security: Security,
    watch: Annotated[bool, typer.Option("--watch", help="Update until Ctrl-C.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", envvar="PLANARIA_STATUS_JSON", help="The registry's answer as JSON."
        ),
    ] = False,
) -> None:
    """Show a run: its members, its steps, and the registry's reasons for its decisions."""
    from planaria.node.page.status_page import status

    credentials = credentials_for(join, security)
    with suppress(KeyboardInterrupt) if watch else nullcontext():
        ask_registry(join, credentials, lambda client: status(client, console, watch, as_json))


@flattened
def logs_command(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE",
            help="The node's name in status, or only its first or last part: node-2.0-7f3a1c.",
        ),
    ],
    join: Join,
    security: Security,
    lines: Annotated[int, typer.Option(min=1, help="Number of last lines.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also show new lines, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the last lines of a node's log."""
    from planaria.node.report.logs import print_logs
    from planaria.node.wire.observer_client import over_streams

    credentials = credentials_for(join, security)

    async def show(client: RegistryClient) -> None:
        reach = await client.reach()

        def converse(run: str) -> Converse:
            return over_streams(run, credentials, reach)

        say = partial(console.out, highlight=False)
        await print_logs(client, converse, node, lines, follow, say)

    with suppress(KeyboardInterrupt) if follow else nullcontext():
        ask_registry(join, credentials, show)


@flattened
def probe_command(
    join: Join,
    security: Security,
    out: Annotated[
        Path | None, typer.Option(help="File to write, for planaria plan --probe.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the measurements.")] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="PLANARIA_PROBE_JSON", help="Print it as JSON.")
    ] = False,
) -> None:
    """Measure the nodes of a swarm and the links between them, while it trains or waits."""
    from planaria.node.report.probe import probe, probe_tables

    async def measure(client: RegistryClient) -> None:
        measurements = await probe(client, wait, lambda text: console.print(text, style="dim"))
        if out is not None:
            out.write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
        if as_json:
            console.print_json(data=measurements)
        else:
            for part in probe_tables(measurements):
                console.print(part)

    ask_registry(join, credentials_for(join, security), measure)


@flattened
def page_command(
    *,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="The --out of `planaria up`, or out/RUN of nodes; without --join."
        ),
    ] = None,
    join: Living = None,
    http: Http = LOOPBACK,
    price: Price = None,
    insecure: Insecure = False,
    security: Security,
) -> None:
    """Show a run in the browser: a recorded run at any moment, or, with an invite, a running one
    and its metrics for Prometheus."""

    if (folder is None) == (join is None):
        fail("name one run: a folder that it wrote, or --join INVITE of a running one")
    place = security.page_address(http, insecure)
    if place is None:
        raise ValueError("--http none: the page needs an address, --http HOST:PORT")
    if join is None:
        assert folder is not None
        _replay(folder, place, price)
    elif price is not None:
        raise ValueError(f"--price {price:g}: for a running run, give it to `planaria bootstrap`")
    else:
        _follow(join, place, credentials_for(join, security))


def _replay(folder: Path, place: PageAddress, price: float | None) -> None:
    from planaria.node.page.replay import replay_of
    from planaria.node.page.serving import serve_replay

    with suppress(KeyboardInterrupt):
        with errors.status("reading"):
            replay = replay_of(folder, price)
        say_address = partial(_print_address, str(folder))
        asyncio.run(serve_replay(replay, place, say_address, asyncio.Event().wait()))


def _follow(join: str, place: PageAddress, credentials: Credentials) -> None:
    from planaria.node.page.serving import serve_remote

    async def follow(client: RegistryClient) -> None:
        await serve_remote(client, place, partial(_print_address, "the run"))

    with suppress(KeyboardInterrupt):
        ask_registry(join, credentials, follow)


def _print_address(subject: str, url: str) -> None:
    say(f"{subject} is shown at {url}")
