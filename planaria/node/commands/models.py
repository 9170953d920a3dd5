"""Commands for models: presets lists sizes; export, generate and evaluate take one out of a run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.segment import Segment, Segments
from rich.table import Column, Table

from planaria.node.commands.registry import ask_registry, check_registry, credentials_for
from planaria.node.commands.terminal import console, fail, say, tracking
from planaria.node.hugging_face.options import EvaluateOptions, ExportOptions
from planaria.node.launch.options import Living, OneDevice, Security, flattened

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.bootstrap.credentials import Credentials
    from planaria.node.hugging_face.generate import Speaker

    Reply: TypeAlias = Callable[[Speaker], Iterable[str]]
    """A model's reply, in pieces."""


@flattened
def export_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...",
            help="The --out or --save-dir of `planaria up`, or out/RUN/saves of a machine's nodes; "
            "with --run, any folders for saves.",
        ),
    ] = None,
    *,
    options: ExportOptions,
    join: Living = None,
    run_file: Annotated[
        Path | None,
        typer.Option(
            "--run",
            envvar="PLANARIA_EXPORT_RUN",
            metavar="RUN.toml",
            help="The run file of these saves.",
        ),
    ] = None,
    security: Security,
) -> None:
    """Write a run's model as a folder for Hugging Face's transformers; LoRA adapters as one for
    peft."""
    if join is not None and folders:
        fail("--join exports the model of a running swarm: leave the folders out, or --join")
    if join is not None and run_file is not None:
        fail("--run is the run file of saves, and a running swarm has its own: leave --run out")
    if join is not None:
        check_registry(join)
    elif not folders:
        fail("nothing to export: name folders with saves, or give --join HOST:PORT")
    for folder in folders or []:
        if not folder.is_dir():
            fail(f"{folder} is not a folder: name one that `planaria up` wrote")
    if options.private and not options.push:
        fail("--private needs --push ORG/NAME: it is for a repository on the hub")

    from planaria.node.hugging_face.adapters import kind_of_result
    from planaria.node.hugging_face.export import ExportError
    from planaria.node.hugging_face.from_saves import export_saves
    from planaria.node.hugging_face.push import check_push, upload
    from planaria.node.launch.resolve import resolve
    from planaria.node.local.plan import PLAN, read_plan
    from planaria.node.report.summary import read_summary
    from planaria.node.run_file import load
    from planaria.node.state.saves import find_saves

    if options.push:
        check_push(options.push)
    if join is not None:
        _export_living(join, credentials_for(join, security), options)
        return
    assert folders
    beside = folders[0] / "run.toml"
    if run_file is None and len(folders) == 1 and not (folders[0] / PLAN).exists():
        run_file = beside if beside.exists() else None
    if run_file is not None:
        run, saves, summary = resolve(load(run_file)), find_saves(*folders), {}
    elif len(folders) == 1:
        plan = read_plan(folders[0])
        run, saves, summary = plan.run, plan.kept.find(), read_summary(plan.out)
    else:
        raise ExportError("several folders need --run RUN.toml, the run file of their saves")
    with tracking("tensors") as track:
        saved = export_saves(run, saves, summary, options, track)
    if saved.doubt:
        say(saved.doubt)
    say(f"{options.out} has the {kind_of_result(run, options.merged)} of step {saved.step}")
    if options.push:
        upload(options.out, options.push, options.private, say)


def _export_living(join: str, credentials: Credentials, options: ExportOptions) -> None:
    from planaria.node.hugging_face.from_swarm import export_swarm
    from planaria.node.hugging_face.push import upload

    async def export(client: RegistryClient) -> None:
        with tracking("tensors") as track:
            kind, step = await export_swarm(client, credentials, options, track)
        say(f"{options.out} has the {kind} of step {step}")
        if options.push:
            await asyncio.to_thread(upload, options.out, options.push, options.private, say)

    ask_registry(join, credentials, export)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `planaria generate`."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR [PROMPT]",
            help="Folder written by `planaria export`, and the beginning of the text. With --join, "
            "only the text.",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer the prompt by the model's chat template; without a prompt, hold a "
            "dialogue, one question a line, until Ctrl-D.",
        ),
    ] = False
    system: Annotated[str, typer.Option(help="With --chat: the system message.")] = ""
    join: Living = None
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: always the likeliest token.")
    ] = 0.8
    top_p: Annotated[
        float,
        typer.Option(
            help="Nucleus sampling: sample from the likeliest tokens of this total probability."
        ),
    ] = 0.95
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0
    device: OneDevice = "auto"
    data: Annotated[
        Path | None,
        typer.Option(help="With --join: prepared data with the tokenizer. Default: the run's."),
    ] = None
    security: Security


@flattened
def generate_command(options: GenerateOptions) -> None:
    """Continue a text, or answer questions (--chat), with an exported model or, on its nodes, that
    of a running swarm."""
    words, join = list(options.words or []), options.join
    folder = None if join is not None else Path(words.pop(0)) if words else None
    if len(words) > 1 or (join is None and folder is None):
        fail("usage: planaria generate DIR [PROMPT], or generate --join HOST:PORT [PROMPT]")
    if options.system and not options.chat:
        fail("--system is for conversations only: add --chat")
    if options.data is not None and join is None:
        fail("--data is for --join only: a folder has its model's tokenizer; leave --data out")
    if join is not None:
        check_registry(join)
    if folder is not None:
        _check_model(folder)

    from planaria.node.hugging_face.dialogue import Dialogue
    from planaria.node.hugging_face.generate import Sampling, Speaker, continuation
    from planaria.node.hugging_face.whole_model import WholeModel
    from planaria.node.serve import pick_device

    with TemporaryDirectory() as downloads:
        sampling = Sampling(options.temperature, options.top_p, options.seed)
        prompt, tokens = "".join(words), options.tokens
        if join is not None:
            credentials = credentials_for(join, options.security)
            tell = partial(_reply_living, join, credentials, options.data, Path(downloads))
        elif folder is not None:
            model = WholeModel.load(folder, pick_device(options.device))
            tell = partial(_reply_local, Speaker.of(model, folder))
        if options.chat:
            with Dialogue(options.system, tokens, sampling) as dialogue:
                if prompt:
                    tell(partial(dialogue.answer, question=prompt))
                else:
                    _converse(lambda question: tell(partial(dialogue.answer, question=question)))
        else:
            tell(lambda speaker: chain([prompt], continuation(speaker, prompt, tokens, sampling)))


def _reply_local(speaker: Speaker, reply: Reply) -> None:
    for text in reply(speaker):
        _show(text)
    console.print()


def _reply_living(
    join: str, credentials: Credentials, data: Path | None, downloads: Path, reply: Reply
) -> None:
    """Print the reply of a running swarm's model. `downloads`: folder that has its tokenizer after
    the first reply. Raises KeyboardInterrupt when the reply is interrupted."""
    from planaria.node.hugging_face.through_swarm import reply_living

    async def ask(client: RegistryClient) -> None:
        try:
            await reply_living(client, credentials, data, reply, _show, downloads)
        finally:
            console.print()

    ask_registry(join, credentials, ask)


def _converse(answer: Callable[[str], None]) -> None:
    """Print the model's answer to each line of stdin until its end or Ctrl-C."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 (`input` has its keys then)
    try:
        while True:
            if question := input("> " if terminal else "").strip():
                answer(question)
    except (EOFError, KeyboardInterrupt):
        if terminal:
            console.print()


def _check_model(folder: Path) -> None:
    """End before torch is loaded if the folder has no exported model."""
    from planaria.node.model.config import CONFIG, check_not_adapters

    check_not_adapters(folder)
    if not (folder / CONFIG).is_file():
        fail(f"{folder} holds no model: name a folder that `planaria export` has written")


def _show(text: str) -> None:
    console.print(Segments([Segment(text)]), end="", soft_wrap=True)  # a str would lose its tabs


@flattened
def evaluate_command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder written by `planaria export`.")
    ] = None,
    *,
    options: EvaluateOptions,
    join: Living = None,
    device: OneDevice = "auto",
    security: Security,
) -> None:
    """Compute loss and perplexity on prepared data, of an exported model or, on its nodes, of one
    step of a running swarm."""
    if (folder is None) == (join is None):
        fail("name one model: a folder that `planaria export` has written, or --join HOST:PORT")
    if folder is not None:
        _check_model(folder)
    if join is not None:
        check_registry(join)

    from planaria.node.data.corpus import read_index

    read_index(options.data)

    from planaria.node.hugging_face.evaluate import Evaluation, evaluate
    from planaria.node.hugging_face.through_swarm import evaluate_swarm
    from planaria.node.hugging_face.whole_model import WholeModel
    from planaria.node.serve import pick_device

    def show(evaluation: Evaluation) -> None:
        table = Table("", Column(options.split, justify="right"))
        for name, value in evaluation.rows().items():
            table.add_row(name, value)
        console.print(table)

    async def ask(client: RegistryClient) -> None:
        with tracking("batches") as track:
            step, evaluation = await evaluate_swarm(client, credentials, options, track)
        show(evaluation)
        console.print(f"of the model of step {step}")

    if join is not None:
        credentials = credentials_for(join, security)
        ask_registry(join, credentials, ask)
    elif folder is not None:
        model = WholeModel.load(folder, pick_device(device))
        with tracking("batches") as track:
            evaluation = evaluate(model, folder, options, track)
        show(evaluation)


def presets_command(
    vocabulary: Annotated[
        int, typer.Option(min=2, help="Vocabulary size; `data prepare` makes 2048 by default.")
    ] = 2048,
) -> None:
    """List the model sizes of model.preset."""
    from planaria.node.model.shape import PRESETS, divisors
    from planaria.node.run_file import ModelSection, RunFile

    table = Table(
        Column("preset", no_wrap=True),
        *(
            Column(name, justify="right", no_wrap=True)
            for name in ("parameters", "layers", "width", "heads", "context", "memory")
        ),
        "stages",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name, preset in PRESETS.items():
        config = RunFile(model=ModelSection(preset=name)).config_for(vocabulary)
        first, body = config.parameters
        others = [n for n in divisors(preset.layers) if n != preset.stages]
        table.add_row(
            name,
            _abbreviated(first + preset.stages * body),
            f"{preset.layers}",
            f"{preset.dim}",
            f"{preset.heads}",
            f"{preset.context}",
            f"{config.seat_bytes / 2**20:,.0f} MiB",
            f"{preset.stages}, or {', '.join(map(str, others))}",
        )
    console.print(table)
    say(
        f"Parameters are for a vocabulary of {vocabulary:,} tokens. Memory is that of a node with "
        "the largest stage, for the first number of stages: weights, gradient, moments, and half "
        "as much again."
    )


def _abbreviated(parameters: int) -> str:
    """A number of parameters in thousands, millions or billions, with three digits."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return f"{parameters / 1000:.3g}k"
