"""The command `planaria lab chaos`. Functions import modules themselves, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planaria.node.commands.terminal import console, errors
from planaria.node.launch.options import flattened

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile
    from planaria_lab.chaos.schedule import Shape

app = typer.Typer(help="Inject faults into a live swarm, and measure what they cost.")
PLACE = Path("out/chaos")


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The options of `planaria lab chaos`."""

    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of training under faults.")] = 2.0
    seed: Annotated[int, typer.Option(help="Seed of the schedule and of the run.")] = 0
    pieces: Annotated[
        int,
        typer.Option(min=1, help="Number of runs, one after the other, with seeds from --seed on."),
    ] = 1
    out: Annotated[Path, typer.Option(help="Folder to write a JSON file to for each run.")] = PLACE
    logs: Annotated[
        Path, typer.Option(help="Folder to write a folder of logs to for each run.")
    ] = PLACE
    stages: Annotated[
        int, typer.Option(min=1, help="Number of body stages; one layer each without --run.")
    ] = 2
    replicas: Annotated[int, typer.Option(min=1, help="Nodes per stage.")] = 2
    seats: Annotated[
        str, typer.Option(help="The option --seats of each `planaria node`: a number, or auto.")
    ] = "auto"
    policy: Annotated[
        str | None, typer.Option(help="recovery.policy, in place of the run file's.")
    ] = None
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of fault to inject; repeatable. Default: all.")
    ] = None
    rate: Annotated[float, typer.Option(min=0, help="Faults per minute; 0: none.")] = 6.0
    run_file: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="Run file. Default: a small model."),
    ] = None


@app.callback(invoke_without_command=True)
@flattened
def chaos(context: typer.Context, options: ChaosOptions) -> None:
    """Train with a swarm on this machine under a random schedule of faults, each of which ends
    after a while. Nodes are killed, stopped, cut off, hung, slowed, or compute wrong results.
    Print a table, and exit with 1 if a promise was broken. Skip runs with a result in --out."""
    from planaria_lab.chaos.schedule import Shape, schedule

    if context.invoked_subcommand is not None:
        return
    kinds = {"kinds": tuple(options.kind)} if options.kind else {}
    shape = Shape(options.stages, options.replicas, **kinds, rate=options.rate, seats=options.seats)
    run = _small_run(options.run_file, shape, options.out, options.policy)
    minutes = options.minutes
    failed = False
    for piece in range(options.seed, options.seed + options.pieces):
        schedule(piece, minutes, shape)  # raises for an unknown kind before this run begins
        failed |= not _run_one(run, shape, minutes, piece, options.out, options.logs)
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the results: --out.")],
) -> None:
    """Write table.md, a table of all runs in a folder, into that folder, and print it."""
    from planaria_lab.chaos.report import TABLE, read_outcomes, table

    text = table(read_outcomes(folder))
    (folder / TABLE).write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


RUN = """
name = "chaos"
steps = 100000
[model]
preset = "tiny"
dim = 32
context = 32
[training]
batch = 8
microbatch = 1
warmup = 5
validation_microbatches = 0
[recovery]
checkpoint.dir = "checkpoints"
relearn.seconds = 5.0
[swarm]
progress = 20.0
"""


def _small_run(
    run_file: Path | None, shape: Shape, out: Path, policy: str | None = None
) -> RunFile:
    """Return the run file, or the small default, resolved and with the shape's stages and replicas.
    If there is nothing at the default data path, prepare the shipped prose in `out`. Raises
    RunFileError, CorpusError."""
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe
    from planaria.node.launch.resolve import resolve, text_to_prepare
    from planaria.node.run_file import load, loads, override

    run = override(
        load(run_file) if run_file else loads(RUN),
        model__stages=shape.stages,
        model__layers=None if run_file else shape.stages,
        swarm__replicas=shape.replicas,
        recovery__policy=policy,
    )
    text = text_to_prepare(run)
    if text is not None:
        run = override(run, data__path=str(out / run.data.path))
        prepare(Recipe([str(text)]), Path(run.data.path))
    return resolve(run)


def _run_one(run: RunFile, shape: Shape, minutes: float, seed: int, out: Path, logs: Path) -> bool:
    """Train one swarm, write its outcome, and return whether all promises were kept. If the outcome
    is in `out` already, only read it."""
    import asyncio
    import json
    from dataclasses import asdict

    from planaria.node.run_file import override
    from planaria_lab.chaos.outcome import judge
    from planaria_lab.chaos.report import table
    from planaria_lab.chaos.schedule import schedule
    from planaria_lab.chaos.swarm import SickSwarm
    from planaria_lab.origin import origin

    policy = run.recovery.policy
    setting: dict[str, Any] = {"seed": seed, "minutes": minutes, "policy": policy}
    setting |= asdict(shape) | origin()
    name = f"{shape.stages}x{shape.replicas}-{policy}-seed-{seed}"
    result = out / f"{name}.json"
    if result.exists():
        console.print(f"{result} exists already: this run is skipped", soft_wrap=True)
        return not json.loads(result.read_text(encoding="utf-8"))["broken"]
    faults = schedule(seed, minutes, shape)
    folder = logs / name

    def say(sentence: str) -> None:
        errors.print(sentence, markup=False, highlight=False, soft_wrap=True, style="dim")

    async def train() -> str:
        swarm = SickSwarm(override(run, seed=seed), shape, faults, minutes, folder, say)
        async with swarm:
            return await swarm.train()

    outcome = judge(folder, setting, asyncio.run(train()))
    out.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items())
    result.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    console.print(table([outcome]), markup=False, highlight=False, soft_wrap=True)
    for sentence in outcome["broken"]:
        errors.print(f"broken: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if outcome["broken"]:
        again = f"give the same options with --seed {seed} --pieces 1, and another --out"
        errors.print(f"to repeat this run, {again}", highlight=False, soft_wrap=True)
    return not outcome["broken"]
