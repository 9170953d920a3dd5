"""The command `planaria lab simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planaria.node.commands.terminal import console
from planaria.node.launch.options import flattened

if TYPE_CHECKING:
    from planaria_lab.simulator.churn import LostPlace
    from planaria_lab.simulator.run import RunOutcome
    from planaria_lab.simulator.step import MeanStep
    from planaria_lab.simulator.swarm import Swarm

app = typer.Typer(
    no_args_is_help=True, help="Simulate a swarm: seconds a step, and what losses cost."
)
ENOUGH = 20  # iterations for each step for which losses at a rate are drawn

RunPath = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file to simulate.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Table = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="Table of links between sites. Default: twelve cloud sites."),
]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `planaria lab simulate run`."""

    run_file: RunPath
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes per stage. Default: the run file's replicas.")
    ] = None
    flops: Annotated[float, typer.Option(help="FLOP/s that a node sustains in the model.")] = 1e13
    memory: Annotated[float, typer.Option(help="Memory bandwidth of a node, bytes/s.")] = 5e11
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size if the run file names none.")] = (
        50_257
    )
    delay: Annotated[float, typer.Option(help="Delay of all links, ms one way.")] = 40.0
    mbps: Annotated[float, typer.Option(help="Bandwidth of all links, Mbit/s each way.")] = 100.0
    site: Annotated[
        list[str] | None,
        typer.Option(help="Site of nodes; repeatable. Stages are assigned to the sites in turn."),
    ] = None
    table: Table = None
    uplink: Annotated[
        float | None, typer.Option(help="Bandwidth of a site to all others together, Mbit/s.")
    ] = None
    storage: Annotated[
        float, typer.Option(help="Bandwidth to the folder of checkpoints, Mbit/s.")
    ] = 1000.0
    blocking: Annotated[
        bool, typer.Option(help="All nodes wait while a checkpoint is written.")
    ] = False
    hourly: Annotated[
        float, typer.Option(help="Probability that a node is lost within an hour.")
    ] = 0.0
    shape: Annotated[
        float, typer.Option(help="Shape of the Weibull distribution of lifetimes.")
    ] = 1.0
    whole: Annotated[bool, typer.Option(help="Apply --hourly to whole stages, not to nodes.")] = (
        False
    )
    per_step: Annotated[
        float, typer.Option(help="Probability that a body stage is lost in a step.")
    ] = 0.0
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE[.NODE]@STEP", help="Additional loss; repeatable."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Spot trace: milliseconds, add or remove, node."),
    ] = None
    replacement: Annotated[
        float, typer.Option(help="Seconds from a loss until a new machine is available.")
    ] = 30.0
    notice: Annotated[float, typer.Option(help="Seconds of notice before a node is lost.")] = 0.0
    silent: Annotated[
        bool, typer.Option(help="Lost nodes fall silent; by default, their connections are reset.")
    ] = False
    limit: Annotated[float, typer.Option(help="Maximum hours to simulate.")] = 24 * 365.0
    seed: Seed = 0


@app.command("run")
@flattened
def simulate(options: SimulateOptions) -> None:
    """Print the seconds of a step on these nodes and links, and the outcome of a run with these
    losses."""
    from dataclasses import replace

    from planaria.node.local.loss_schedule import read_trace
    from planaria.node.run_file import load
    from planaria_lab.emulation.links import WAN_LINKS, read_links
    from planaria_lab.planning.asked import shaped
    from planaria_lab.simulator.churn import HOUR, Churn
    from planaria_lab.simulator.run import simulate_run
    from planaria_lab.simulator.step import simulate_step
    from planaria_lab.simulator.swarm import one_site, seconds_at, sites, uniform

    run, _ = shaped(load(options.run_file))
    site, seed = options.site, options.seed
    config = run.config_for(run.model.vocabulary or options.vocabulary)
    if site:
        uplinks = {} if options.uplink is None else dict.fromkeys(site, options.uplink)
        network = sites(read_links(options.table or WAN_LINKS), uplinks, site)
    else:
        network = one_site(options.delay, options.mbps)
    seconds = {
        stage: seconds_at(run, config, stage, options.flops, options.memory)
        for stage in range(config.stages + 1)
    }
    swarm = uniform(run, config, network, seconds, options.nodes, site)
    swarm = replace(swarm, storage_mbps=options.storage, blocking=options.blocking)
    churn = Churn(
        hourly=options.hourly,
        shape=options.shape,
        of="stage" if options.whole else "node",
        at=_listed(options.kill or [], swarm, options.per_step, seed),
        trace=read_trace(options.trace) if options.trace else (),
        silent=options.silent,
        notice=options.notice,
        replacement=options.replacement,
    )
    _print_step(swarm, simulate_step(swarm))
    _print_run(simulate_run(swarm, churn, seed, options.limit * HOUR))


def _listed(
    texts: list[str], swarm: Swarm, rate: float, seed: int
) -> dict[int, tuple[LostPlace, ...]]:
    """Losses by iteration: those that `texts` lists, and those at a rate, which are drawn for many
    more iterations than steps. Raises SwarmFiguresError."""
    from planaria_lab.convergence.schedule import Losses
    from planaria_lab.simulator.churn import LostPlace, per_step
    from planaria_lab.simulator.swarm import SwarmFiguresError

    losses = Losses(rate=rate, apart=False)
    losses_at = per_step(losses, seed, ENOUGH * swarm.run.steps, swarm.config.stages)
    for text in texts:
        place, _, step = text.partition("@")
        stage, dot, number = place.partition(".")
        figures = [stage, step, *([number] if dot else [])]
        if not all(figure.isascii() and figure.isdigit() for figure in figures) or step == "0":
            raise SwarmFiguresError(
                f"--kill {text}: write STAGE@STEP or STAGE.NODE@STEP, as in 2@15"
            )
        if int(stage) > swarm.config.stages or int(number or 0) >= swarm.replicas(int(stage)):
            raise SwarmFiguresError(f"--kill {text}: the swarm has no such stage or node")
        lost = LostPlace(int(stage), int(number) if dot else None)
        losses_at[int(step)] = (*losses_at.get(int(step), ()), lost)
    return losses_at


def _print_step(swarm: Swarm, step: MeanStep) -> None:
    from rich.filesize import decimal
    from rich.table import Table as Sheet

    sheet = Sheet(title="A step", show_header=False)
    aggregated = "one lane stands for all" if step.pooled else "each node simulated"
    busiest = step.bottleneck
    sheet.add_row("nodes", f"{sum(swarm.counts):,} ({aggregated})")
    sheet.add_row("seconds", f"{step.seconds:.3f}")
    sheet.add_row("until all microbatches are home", f"{step.pipeline:.3f}")
    sheet.add_row("and until all are ready", f"{step.reduce:.3f}")
    rest = "; most of the time is delay" if busiest.waits else ""
    sheet.add_row("busiest", f"{busiest.kind} {busiest.where}, {busiest.share:.0%} of it{rest}")
    sheet.add_row("on all links", decimal(round(step.bytes)))
    tokens = swarm.run.training.batch * swarm.config.context
    sheet.add_row("tokens a second", f"{tokens / step.seconds:,.0f}")
    console.print(sheet)


def _print_run(outcome: RunOutcome) -> None:
    from collections import Counter
    from statistics import median

    from rich.table import Table as Sheet

    sheet = Sheet(title="The run", show_header=False)
    whole = outcome.seconds or 1.0
    sheet.add_row("steps committed", f"{outcome.steps:,}")
    sheet.add_row("seconds", f"{outcome.seconds:,.1f} ({outcome.seconds_per_step:.3f} a step)")
    parts = {
        "in steps that count": outcome.kept,
        "in steps rolled back": outcome.again,
        "in attempts aborted": outcome.aborted,
        "without training": outcome.stalled,
    }
    for name, seconds in parts.items():
        sheet.add_row(name, f"{seconds:,.1f} ({seconds / whole:.1%})")
    sheet.add_row("losses", f"{len(outcome.losses):,}, of {_nodes(outcome)} nodes")
    masked = sum(loss.masked for loss in outcome.losses)
    sheet.add_row("attempts that went on without them", f"{masked:,}")
    methods = Counter(rebuilt.method for loss in outcome.losses for rebuilt in loss.rebuilt)
    rebuilt = ", ".join(f"{count} by {method}" for method, count in methods.most_common())
    sheet.add_row("stages rebuilt", rebuilt or "none")
    if outcome.losses:
        stall = median(loss.stall for loss in outcome.losses)
        sheet.add_row("median stall, seconds", f"{stall:.1f}")
    sheet.add_row("joined while others trained", f"{outcome.joined:,}")
    sheet.add_row("node hours", f"{outcome.node_seconds / 3600:,.1f}")
    if outcome.stopped:
        sheet.add_row("stopped", outcome.stopped)
    console.print(sheet)


def _nodes(outcome: RunOutcome) -> int:
    return sum(loss.nodes for loss in outcome.losses)


@app.command()
def table2(
    out: Annotated[Path, typer.Option(help="Folder for the table and its rows.")],
) -> None:
    """Write CheckFree's Table 2: iteration and train times, four policies, three failure rates."""
    import json

    from planaria_lab.emulation.links import WAN_LINKS, read_links
    from planaria_lab.origin import origin
    from planaria_lab.simulator.table2 import rows, simulated, table

    cells = simulated(read_links(WAN_LINKS))
    text = table(cells)
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows(cells, origin())]
    (out / "table2.jsonl").write_text("".join(lines), encoding="utf-8")
    (out / "table2.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def check(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    blocks: Annotated[int, typer.Option(min=1, help="Number of swarms of each case.")] = 1,
    device: Annotated[str, typer.Option(help="Device of every node: auto, cpu or cuda:N.")] = "cpu",
) -> None:
    """Run live swarms behind emulated links and compare them with their simulation. This needs
    root. It can be stopped, and continues when started again."""
    from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from planaria_lab.emulation.live_study import with_data
    from planaria_lab.simulator import check as checking

    path = out / checking.SAMPLES
    samples = checking.read_samples(path)
    vocabulary = with_data(checking.PLAIN.run()).model.vocabulary
    assert vocabulary is not None
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for case in checking.missing(samples, blocks):
            task = progress.add_task(case.name, total=checking.STEPS)

            def on_step(step: int, task: TaskID = task) -> None:
                progress.update(task, completed=step)

            sample = checking.measure_case(case, device, on_step)
            checking.append(path, sample)
            samples.append(sample)
    text = checking.table(*checking.compare(samples, vocabulary))
    (out / checking.TABLE).write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
