"""The command `planaria plan`: which machines to rent for a run, and how to run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from planaria.node.commands.terminal import console, errors
from planaria.node.launch.options import flattened

if TYPE_CHECKING:
    from planaria.node.local.loss_schedule import TraceRow
    from planaria_lab.planning.planner import Answer, Candidate, Machine, Question
    from planaria_lab.simulator.run import RunOutcome

HOUR: Final = 3600.0
MOST_NAMED: Final = 4
"""Maximum number of a stage's nodes that are printed by name."""
RATES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.16, 0.25, 0.4)
"""Probabilities that a node is lost within an hour, for the picture."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `planaria plan`."""

    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Run file to plan for.")
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(help="Model size instead of a run file: tiny, .., small, medium, large."),
    ] = None
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            envvar="PLANARIA_PLAN_FROM",
            metavar="FOLDER|CONFIG.json",
            help="Model whose training continues, by its config.json; instead of a run file.",
        ),
    ] = None
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train only adapters, with this rank.")
    ] = None
    base: Annotated[
        str | None,
        typer.Option(metavar="nf4|int8|bf16", help="Form of the frozen matrices beside adapters."),
    ] = None
    context: Annotated[int | None, typer.Option(help="Tokens a sample.")] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step.")] = None
    tokens: Annotated[
        float | None, typer.Option(help="Tokens to train on. Default: the run file's steps.")
    ] = None
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size if the run file names none.")] = (
        50_257
    )
    nodes: Annotated[int | None, typer.Option(min=2, help="Nodes available.")] = None
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            "--kinds",
            metavar="KIND[:GB][ xN], ..",
            help="GPU models, as a100 or 'rtx3060:12 x2, m2:16'; a node sustains 40 % of its peak.",
        ),
    ] = None
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a node sustains in the model.")
    ] = None
    memory: Annotated[float | None, typer.Option(help="Device memory of a node, GB.")] = None
    host_memory: Annotated[
        float | None, typer.Option(help="Host memory of a node, GB. Default: enough.")
    ] = None
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth of a node's device, GB/s.")
    ] = None
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Nodes compute on CPUs: device and host memory are one.")
    ] = False
    price: Annotated[float, typer.Option(min=0, help="Price of a node for an hour.")] = 0.0
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:NODES]", help="Site of nodes; repeatable. --table has the links."
        ),
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Table of links between sites. Default: twelve cloud sites."
        ),
    ] = None
    delay: Annotated[float, typer.Option(help="Delay of all links without --site, ms one way.")] = (
        40.0
    )
    mbps: Annotated[float, typer.Option(help="Bandwidth of all links without --site, Mbit/s.")] = (
        100.0
    )
    uplink: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of a site to all others together, Mbit/s. Without --site, each node "
            "has its own site."
        ),
    ] = None
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON", help="Measured nodes and links, instead of the options above."
        ),
    ] = None
    hourly: Annotated[
        float, typer.Option(help="Probability that a node is lost within an hour: 0.1 is 10 %.")
    ] = 0.0
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Spot trace to replay (milliseconds, add or remove, node)."
        ),
    ] = None
    replacement: Annotated[
        float, typer.Option(help="Seconds from a loss until a new machine is available.")
    ] = 120.0
    start: Annotated[float, typer.Option(help="Seconds from then until its node asks to join.")] = (
        30.0
    )
    storage: Annotated[
        float, typer.Option(help="Bandwidth to the folder of checkpoints, Mbit/s.")
    ] = 1000.0
    deadline: Annotated[
        float | None, typer.Option(help="Maximum hours; chooses the cheapest plan within them.")
    ] = None
    budget: Annotated[
        float | None, typer.Option(help="Maximum money; chooses the fastest plan within it.")
    ] = None
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Recovery policy to consider; repeatable. Default: all."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="Run file to write with the plan.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG", help="Picture to write: time and cost by failure rate and policy."
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", envvar="PLANARIA_PLAN_JSON", help="Print JSON.")
    ] = False


@flattened
def plan(options: PlanOptions) -> None:
    """Choose stages, replicas and policy for these nodes; estimate time, memory and cost."""
    import math

    from planaria.node.local.loss_schedule import read_trace
    from planaria.node.run_file import dumps
    from planaria_lab.planning.asked import asked, policies
    from planaria_lab.planning.machines import Hardware, alike, parse_kinds, probed
    from planaria_lab.planning.planner import (
        Question,
        answer,
        narrower,
        with_codecs,
    )

    run, wanted, free, narrow_weights = asked(options)
    hourly, nodes = options.hourly, options.nodes
    rows = read_trace(options.trace) if options.trace else ()
    if rows:
        mean, rate = figures(rows)
        hourly, nodes = hourly or rate, nodes or max(2, round(mean))
    hardware = Hardware(
        nodes=nodes,
        kinds=() if options.kind is None else parse_kinds(options.kind),
        tflops=options.tflops,
        memory=options.memory,
        host=options.host_memory,
        bandwidth=options.bandwidth,
        price=options.price,
        cpu=options.cpu,
    )
    if options.probe is not None:
        machines, network = probed(options.probe, hardware)
    else:
        links = options.table, options.delay, options.mbps, options.uplink
        machines, network = alike(hardware, options.site or [], *links)
    deadline, budget = options.deadline, options.budget
    question = Question(
        run=run,
        vocabulary=run.model.vocabulary or options.vocabulary,
        machines=machines,
        network=network,
        tokens=wanted,
        hourly=hourly,
        replacement=options.replacement,
        start=options.start,
        storage_mbps=options.storage,
        deadline=math.inf if deadline is None else deadline,
        budget=math.inf if budget is None else budget,
        policies=policies(options.policy, run),
        narrow=narrow_weights,
    )
    question, wider = with_codecs(question, free)
    result = answer(question)
    narrow = narrower(question, result.best)
    replayed = replay(question, rows) if rows else {}
    out = options.out
    if options.plot is not None:
        draw(question, options.plot)
    if out is not None:
        out.write_text(dumps(result.best.run), encoding="utf-8")
    if options.as_json:
        console.print_json(data=as_data(result, wider, narrow, replayed))
        return
    _print_plan(question, result.best, wider, narrow)
    _print_stages(question, result.best)
    _print_others(result)
    if replayed:
        _print_replayed(replayed)
    if out is not None:
        hint = f"{out}: planaria up {out}, or planaria bootstrap --run {out} ..."
        console.print(hint, soft_wrap=True, markup=False)


# --- traces


def figures(rows: Iterable[TraceRow]) -> tuple[float, float]:
    """The mean number of nodes in a trace, and the probability that a node is lost in an hour."""
    import math

    nodes, seconds, lost, present, last = 0.0, 0.0, 0, 0, 0.0
    for row in rows:
        nodes += present * (row.time - last)
        seconds += row.time - last
        last = row.time
        present += 1 if row.added else -1
        lost += not row.added
    if not nodes:
        return float(present), 0.0
    return nodes / seconds, -math.expm1(-lost * HOUR / nodes)


def replay(
    question: Question, rows: tuple[TraceRow, ...]
) -> dict[str, tuple[Candidate, RunOutcome]]:
    """Simulates the best plan of each policy on the trace, from its first row to its last.

    Returns policy -> (plan, outcome). Policies without a plan are left out.
    """
    from dataclasses import replace

    from rich.progress import track

    from planaria.node.run_file import override
    from planaria_lab.planning.planner import PlanError, answer
    from planaria_lab.simulator.churn import Churn
    from planaria_lab.simulator.run import simulate_run

    replayed: dict[str, tuple[Candidate, RunOutcome]] = {}
    for policy in track(question.policies, "policies", console=errors, transient=True):
        try:
            best = answer(replace(question, policies=(policy,))).best
        except PlanError:
            continue  # `answer` for all policies has the reason
        run = override(best.run, steps=max(best.run.steps, 10**7))
        churn = Churn(trace=rows, start=question.start)
        swarm = replace(best.swarm, run=run)
        replayed[policy] = best, simulate_run(swarm, churn, limit=rows[-1].time - rows[0].time)
    return replayed


# --- output


def as_data(
    result: Answer,
    wider: Candidate | None,
    narrow: Candidate | None,
    replayed: Mapping[str, tuple[Candidate, RunOutcome]],
) -> dict[str, Any]:
    """The answer as JSON data, in seconds and bytes; null stands for infinite.

    `wider`: the plan with the run file's or default codecs, if the planner chose others. `narrow`:
    the plan with narrower codecs than the run file's.
    """
    data: dict[str, Any] = {
        "plan": {**plan_data(result.best), "handover": handover_data(result.best)},
        "wider": None if wider is None else plan_data(wider),
        "narrow": None if narrow is None else plan_data(narrow),
        "others": [{**plan_data(plan), "why": why} for plan, why in result.others],
        "refused": list(result.refused),
    }
    if replayed:
        data["trace"] = {name: replay_data(*replay) for name, replay in replayed.items()}
    return data


def plan_data(plan: Candidate) -> dict[str, Any]:
    """A plan as JSON data."""
    import math

    def figure(value: float) -> float | None:
        return value if math.isfinite(value) else None

    from planaria_lab.planning.asked import CODECS
    from planaria_lab.planning.estimate import sent_bytes

    training, recovery = plan.run.training, plan.run.recovery
    stages = range(len(plan.counts))
    return {
        "stages": len(plan.counts),
        "replicas": list(plan.counts),
        "policy": plan.policy,
        "checkpoint_every": recovery.checkpoint.every if plan.run.policy.checkpoints else None,
        "microbatch": training.microbatch,
        "microbatches": training.microbatches,
        "in_flight": plan.swarm.in_flight,
        "recompute": training.recompute,
        "wire": {name: getattr(plan.run.wire, name) for name in CODECS},
        "steps": plan.run.steps,
        "step_seconds": plan.estimate.step,
        "usual_step_seconds": plan.estimate.usual,
        "tokens_per_second": plan.tokens_per_second,
        "seconds": figure(plan.seconds),
        "money": figure(plan.money),
        "spent": {name: figure(seconds) for name, seconds in plan.estimate.spent.items()},
        "lost_nodes": figure(plan.estimate.lost_nodes),
        "lost_stages": figure(plan.estimate.lost_stages),
        "memory": [asdict(need) for need in plan.memory()],
        "more_memory": [asdict(more) for more in plan.more_memory()],
        "layers": list(plan.swarm.config.cut),
        "sent_bytes": [sent_bytes(plan.swarm, stage) for stage in stages],
        "nodes": [[machine.name for machine in machines] for machines in plan.nodes],
    }


def handover_data(plan: Candidate) -> list[dict[str, Any]]:
    """The handover of each stage as JSON data: bytes, and seconds from the notice until they are
    handed over. `possible` says what each notice suffices for."""
    from planaria_lab.planning.estimate import handovers
    from planaria_lab.planning.handover import NOTICES

    return [
        {
            "stage": stage.stage,
            "weights": {"bytes": stage.weights, "seconds": stage.seconds(stage.weights)},
            "state": {"bytes": stage.state, "seconds": stage.seconds(stage.state)},
            "possible": {f"{notice:.0f}": stage.possible(notice) for notice in NOTICES},
        }
        for stage in handovers(plan.swarm, plan.estimate.step)
    ]


def replay_data(plan: Candidate, outcome: RunOutcome) -> dict[str, Any]:
    """A simulated outcome on the trace as JSON data."""
    batch = plan.run.training.batch * plan.swarm.config.context
    return {
        "replicas": list(plan.counts),
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.steps * batch / outcome.seconds,
        "goodput": outcome.steps / outcome.seconds,
        "losses": len(outcome.losses),
        "masked": sum(loss.masked for loss in outcome.losses),
        "rebuilt": sum(len(loss.rebuilt) for loss in outcome.losses),
        "behind": behind(plan, outcome),
        "training": outcome.kept / outcome.seconds,
        "node_hours": outcome.node_seconds / HOUR,
        "money": outcome.node_seconds / HOUR * plan.nodes[0][0].price,
        "stopped": outcome.stopped,
    }


def behind(plan: Candidate, outcome: RunOutcome) -> float:
    """Steps that rebuilt stages cost in learning, by estimate.py."""
    from planaria_lab.planning.estimate import LEARNING, Reach, behind_a_loss, lesson

    sites = [[machine.site for machine in machines] for machines in plan.nodes]
    reach, usual = Reach.of(plan.swarm.network, sites), plan.estimate.usual
    guessed = sum(not rebuild.same_weights for loss in outcome.losses for rebuild in loss.rebuilt)
    most = LEARNING[lesson(plan.run)].most * outcome.steps
    return min(behind_a_loss(plan.swarm, reach, usual) * guessed, most)


def _print_plan(
    question: Question, plan: Candidate, wider: Candidate | None, narrow: Candidate | None
) -> None:
    from rich.table import Table

    from planaria_lab.planning.estimate import handovers
    from planaria_lab.planning.handover import NOTICES
    from planaria_lab.planning.handover import notice_summary as in_words
    from planaria_lab.planning.planner import described
    from planaria_lab.simulator.step import typical_seconds

    heirs = handovers(plan.swarm, plan.estimate.step)
    training = plan.run.training
    sheet = Table(title="The plan", show_header=False)
    sheet.add_row("stages x replicas", f"{described(plan)}: {sum(plan.counts)} nodes")
    sheet.add_row(
        "microbatches", f"{training.microbatches}, samples in each: {training.microbatch}"
    )
    most = "" if training.in_flight else "at most "
    sheet.add_row("in flight", f"{most}{plan.swarm.in_flight} a source")
    sheet.add_row("on the wire", _codecs_and_why(plan, wider))
    sheet.add_row("recomputation", "yes" if training.recompute else "no")
    simulated = typical_seconds(plan.swarm, steps=2)
    sheet.add_row("a step", f"{plan.estimate.step:.3g} s (simulated: {simulated:.3g} s)")
    sheet.add_row("tokens a second", f"{plan.tokens_per_second:,.0f}, while no node is missing")
    target = f"{question.tokens:,.0f} tokens, {plan.run.steps:,} steps"
    sheet.add_row("time", f"{_duration(plan.seconds)} to {target}")
    if plan.price:
        sheet.add_row("money", f"{plan.money:,.2f} at {plan.price:,.2f} an hour")
    for name, seconds in plan.estimate.spent.items():
        if seconds >= 0.0005 * plan.seconds:
            sheet.add_row(f"  {name}", f"{seconds / plan.seconds:.1%} of the time")
    sheet.add_row(
        "losses",
        f"{plan.estimate.lost_nodes:,.1f} nodes, {plan.estimate.lost_stages:,.2f} whole stages",
    )
    if narrow is not None:
        sheet.add_row("narrower links", _with_narrower_links(narrow))
    for notice in NOTICES:
        sheet.add_row(f"handover in {notice:.0f} s", in_words(heirs, notice))
    console.print(sheet)


def _print_stages(question: Question, plan: Candidate) -> None:
    """Prints each stage's layers, nodes, memory and sent bytes, then the nodes not needed."""
    from itertools import chain

    from rich.table import Table

    from planaria_lab.planning.estimate import sent_bytes
    from planaria_lab.planning.planner import RESERVE

    sheet = Table(title="Its stages: what each node holds, needs at most, and sends in a step")
    for column in ("stage", "layers", "nodes", "device", "beside it", "after a loss", "sends"):
        sheet.add_column(column, justify="left" if column == "nodes" else "right")
    sizes = ["ends", *map(str, plan.swarm.config.cut)]
    each = zip(sizes, plan.nodes, plan.memory(), plan.more_memory(), strict=True)
    for stage, (size, machines, need, more) in enumerate(each):
        room = (1 - RESERVE) * min(machine.memory for machine in machines) / 1e9
        device = need.both if machines[0].shared else need.device
        sheet.add_row(
            *(str(stage), size, _named(machines)),
            f"{device / 1e9:,.2f} of {room:,.2f} GB",
            "the same" if machines[0].shared else f"{need.host / 1e9:,.2f} GB",
            f"{more.device / 1e9:,.2f} + {more.host / 1e9:,.2f} GB",
            f"{sent_bytes(plan.swarm, stage) / 1e6:,.1f} MB",
        )
    console.print(sheet)
    used = {*chain.from_iterable(plan.nodes)}
    if unused := [machine for machine in question.machines if machine not in used]:
        text = f"not needed: {_named(unused)}"
        console.print(text, soft_wrap=True, markup=False)


def _named(machines: Sequence[Machine]) -> str:
    """The machines' names and sites as text; if there are many, their number and two names."""
    sites = ", ".join(dict.fromkeys(machine.site for machine in machines))
    names = ", ".join(machine.name for machine in machines)
    if len(machines) > MOST_NAMED:
        names = f"{len(machines)} nodes, {machines[0].name} to {machines[-1].name}"
    return names if sites in ("anywhere", names) else f"{names} at {sites}"


def _codecs_and_why(plan: Candidate, wider: Candidate | None) -> str:
    """The codecs of the plan as text. If the planner chose them, with the reason and the figures
    of the plan `wider`."""
    from planaria_lab.planning.planner import described

    codecs = _codecs(plan)
    if wider is None:
        return codecs
    return (
        f"{codecs}; that showed no cost in learning in our lab "
        f"(lab/results/bandwidth, lab/results/averaging). With {_codecs(wider)} a step "
        f"would take {wider.estimate.step:.3g} s, and the run {_duration(wider.seconds)}, "
        f"by {described(wider)}"
    )


def _with_narrower_links(plan: Candidate) -> str:
    """The figures of the plan with narrower codecs as text."""
    from rich.markup import escape

    from planaria_lab.planning.planner import described

    return (
        f"a step takes {plan.estimate.step:.3g} s, and the run {_duration(plan.seconds)}, by "
        f"{described(plan)}, if {escape('[wire]')} in the run file says {_codecs(plan)}"
    )


def _codecs(plan: Candidate) -> str:
    from planaria_lab.planning.asked import CODECS

    return ", ".join(f'{name} = "{getattr(plan.run.wire, name)}"' for name in CODECS)


def _print_others(result: Answer) -> None:
    from rich.table import Table

    from planaria_lab.planning.planner import described

    sheet = Table(title="Rejected plans")
    for column in ("plan", "a step", "time", "money", "why"):
        sheet.add_column(column, justify="left" if column in ("plan", "why") else "right")
    for plan, why in result.others:
        money = f"{plan.money:,.2f}" if plan.price else "-"
        sheet.add_row(
            described(plan), f"{plan.estimate.step:.3g} s", _duration(plan.seconds), money, why
        )
    console.print(sheet)
    for line in result.refused[:3]:
        console.print(f"doesn't fit: {line}", soft_wrap=True, markup=False)
    if len(result.refused) > 3:
        console.print(f"{len(result.refused) - 3} more don't fit")


def _print_replayed(replayed: Mapping[str, tuple[Candidate, RunOutcome]]) -> None:
    from rich.table import Table

    from planaria_lab.planning.planner import described
    from planaria_lab.simulator.run import TIME_OVER

    sheet = Table(title="On the trace, simulated")
    for column in ("plan", "steps", "tokens/s", "training", "losses", "stages", "behind", "money"):
        sheet.add_column(column, justify="left" if column == "plan" else "right")
    for plan, outcome in replayed.values():
        data = replay_data(plan, outcome)
        sheet.add_row(
            described(plan),
            f"{data['steps']:,}",
            f"{data['tokens_per_second']:,.0f}",
            f"{data['training']:.1%}",
            f"{data['losses']:,}",
            f"{data['rebuilt']:,}",
            f"{data['behind']:,.0f}",
            f"{data['money']:,.2f}",
        )
    console.print(sheet)
    for name, (_, outcome) in replayed.items():
        if outcome.steps == 0 or outcome.stopped != TIME_OVER:
            console.print(f"{name} stopped after {outcome.steps:,} steps: {outcome.stopped}")


def _duration(seconds: float) -> str:
    import math

    if seconds < HOUR:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / HOUR:,.1f} h" if math.isfinite(seconds) else "never"


def draw(question: Question, path: Path) -> None:
    """Draws the time of the fastest and the money of the cheapest plan of each policy, by failure
    rate, and writes the picture to `path`. Raises OSError."""
    import math

    from matplotlib.figure import Figure

    from planaria_lab.lines import distinct_style, name_at_the_ends

    drawn = curves(question)
    figure = Figure(figsize=(12, 4.6))
    sheets = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.9, top=0.82, bottom=0.13, wspace=0.42)
    for place, (policy, points) in enumerate(drawn.items()):
        rates = [100 * rate for rate, _, _ in points]
        for column, axes in enumerate(sheets, 1):
            values = [point[column] for point in points]
            finite = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(rates, finite, label=policy, **distinct_style(place, len(drawn), len(points)))
    titles = ("Hours until the fastest plan is done", "Money that the cheapest plan takes")
    for axes, title in zip(sheets, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("nodes lost within an hour, %")
        axes.set_xlim(0, 100 * max(RATES[-1], question.hourly))
        axes.set_ylim(bottom=0)
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
        name_at_the_ends(axes)
    figure.suptitle(
        f"{question.tokens:,.0f} tokens into the preset '{question.run.model.preset}', "
        f"with up to {len(question.machines)} nodes, by recovery policy",
        **{"x": 0.06, "ha": "left"},
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def curves(question: Question) -> dict[str, list[tuple[float, float, float]]]:
    """Policy -> points of its curves: (probability of a node's loss within an hour, hours of the
    fastest plan, money of the cheapest plan)."""
    from dataclasses import replace

    from rich.progress import track

    from planaria_lab.planning.planner import Candidate, candidates

    points: dict[str, list[tuple[float, float, float]]] = {}
    rates = sorted({*RATES, question.hourly})
    for rate in track(rates, "failure rates", console=errors, transient=True):
        plans = [p for p in candidates(replace(question, hourly=rate)) if isinstance(p, Candidate)]
        for policy in question.policies:
            of_policy = [plan for plan in plans if plan.policy == policy]
            if of_policy:
                fastest = min(plan.seconds for plan in of_policy) / HOUR
                cheapest = min(plan.money for plan in of_policy)
                points.setdefault(policy, []).append((rate, fastest, cheapest))
    return points
