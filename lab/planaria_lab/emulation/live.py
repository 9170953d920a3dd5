"""The command `planaria lab live`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from planaria.node.commands.terminal import console
from planaria.node.launch.options import flattened

app = typer.Typer(help="Measure what each policy costs a real swarm behind emulated links.")


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """The options of `planaria lab live`."""

    out: Annotated[Path, typer.Option(help="Folder for the results.")]
    run_file: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="Run file. Default: a small model."),
    ] = None
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to measure; repeatable. Default: all.")
    ] = None
    blocks: Annotated[int, typer.Option(min=1, help="Number of swarms of each policy.")] = 5
    delay: Annotated[float, typer.Option(help="Delay of all links, ms one way.")] = 40.0
    mbps: Annotated[float, typer.Option(help="Bandwidth of all links, Mbit/s each way.")] = 100.0
    jitter: Annotated[float, typer.Option(help="Variation of the delay of all links, ms.")] = 0.0
    loss: Annotated[float, typer.Option(help="Share of packets that all links lose.")] = 0.0
    site: Annotated[
        list[str] | None,
        typer.Option(help="Site of nodes; repeatable. Nodes are assigned to the sites in turn."),
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Table of links between sites. Default: twelve cloud sites."
        ),
    ] = None
    uplink: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of a site to all others together, Mbit/s. Without --site, each node "
            "has its own site."
        ),
    ] = None
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE@STEP", help="Loss to inject; repeatable. Default: stage 2 at step 25."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Device of every node: auto, cpu or cuda:N.")] = "cpu"


@app.callback(invoke_without_command=True)
@flattened
def live(options: LiveOptions) -> None:
    """Measure what each policy costs a real swarm behind emulated links: seconds per step, bytes,
    and the stall after a loss. This needs root. It can be stopped, and continues when started
    again."""
    from planaria.node.run_file import load, loads
    from planaria_lab.emulation.links import WAN_LINKS, all_alike, read_links
    from planaria_lab.emulation.live_study import (
        KILL,
        POLICIES,
        RUN,
        Setting,
        at_sites,
        measure_all,
        with_data,
        write_results,
    )
    from planaria_lab.emulation.live_swarm import machines

    site, uplink = options.site, options.uplink
    run = with_data(load(options.run_file) if options.run_file else loads(RUN))
    nodes = machines(run)
    if site:
        network = at_sites(nodes, site, read_links(options.table or WAN_LINKS), uplink)
    else:
        delay, mbps, jitter = options.delay, options.mbps, options.jitter
        network = all_alike(nodes, delay, mbps, uplink, loss=options.loss, jitter_ms=jitter)
    setting = Setting(run, network, tuple(options.kill or [KILL]))
    policies = options.policy or list(POLICIES)
    samples = measure_all(setting, policies, options.blocks, options.device, options.out)
    console.print(write_results(setting, samples, options.out), highlight=False, soft_wrap=True)
