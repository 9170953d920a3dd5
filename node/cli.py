"""The command `planaria`. Modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

import enum
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperGroup
from typer.main import get_command

from planaria.node.extras import installed, remedy

if TYPE_CHECKING:
    from planaria.bootstrap.client import RegistryClient
    from planaria.bootstrap.credentials import Credentials
    from planaria.bootstrap.knock import Answer
    from planaria.bootstrap.service import RegistryServer
    from planaria.node.data.corpus import Corpus
    from planaria.node.page.place import Place
    from planaria.node.report.progress import Track
    from planaria.node.run_file import RunFile
    from planaria.node.wire.asking import Converse

T = TypeVar("T")

ADDED = "planaria.commands"
"""The group of entry points through which other packages add commands, which need the extra `lab`.
"""
BY_USE = (
    "up",
    "node",
    "bootstrap",
    "status",
    "logs",
    "page",
    "doctor",
    "probe",
    "audit",
    "data",
    "presets",
    "export",
    "generate",
    "evaluate",
    "regroup",
)
"""The commands as --help lists them; others come after these, those that are added last."""


class _Commands(TyperGroup):
    """The commands of this file, and those added to it, which are loaded when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = list(self.commands)
        added = sorted(entry_points(group=ADDED).names, reverse=True)
        return [*sorted(own, key=[*BY_USE, *own].index), *added]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        for added in entry_points(group=ADDED, name=cmd_name):
            command = get_command(added.load())
            command.name = cmd_name
            command.hidden = not installed("lab")
            return command
        return None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PLANARIA"},
    help="Train large language models on machines that come and go.",
    epilog="Each option has an environment variable: PLANARIA_NODE_SAVE_DIR is --save-dir of "
    "planaria node. PLANARIA_JOIN, PLANARIA_TOKEN, PLANARIA_TLS_CA, PLANARIA_TLS_CERT, "
    "PLANARIA_TLS_KEY, PLANARIA_INSECURE, PLANARIA_LOG_LEVEL and PLANARIA_LOG_FORMAT are for all "
    "commands that have these options.",
)
data_app = typer.Typer(no_args_is_help=True, help="Prepare data for training, and look at it.")
app.add_typer(data_app, name="data")

BEGAN = time.monotonic()
LOOPBACK = "127.0.0.1:0"
"""Any port of this machine, for this machine: runs don't get into each other's way."""
KNOCK = 3.0
"""Seconds to wait for an address to take, or refuse, a connection."""

console = Console()
errors = Console(stderr=True)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"planaria {version('planaria')}")
        raise typer.Exit


@app.callback()
def planaria(
    told: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_tell_version,
            is_eager=True,
            allow_from_autoenv=False,  # PLANARIA_VERSION may well be an image's
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    import logging

    # gRPC warns of every fork; ours only go on to exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        app()
    except ModuleNotFoundError as error:
        _refuse(remedy(error))
        raise SystemExit(1) from error
    finally:
        logging.shutdown()


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors that are sentences for the user into a message and exit status 1."""
    try:
        yield
    except kinds as error:
        _refuse(str(error))
        raise typer.Exit(1) from error


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
    from planaria.node.begin import NodeCrashed
    from planaria.node.supervisor import CRASHED, TRY_AGAIN

    try:
        yield
    except (typer.Exit, ModuleNotFoundError):
        raise
    except RegistryUnreachable as error:
        _refuse(str(error))
        raise typer.Exit(TRY_AGAIN) from error
    except NodeCrashed as crash:
        logging.error("the node has crashed: %s", crash, exc_info=crash.__cause__)
        raise typer.Exit(CRASHED) from crash
    except Exception as error:
        logging.exception("the node has crashed")
        raise typer.Exit(CRASHED) from error


def _end(why: str) -> NoReturn:
    _refuse(why)
    raise typer.Exit(1)


def _warn(what: str) -> None:
    errors.print(what, style="yellow", markup=False, highlight=False, emoji=False, soft_wrap=True)


def _refuse(why: str) -> None:
    text = f"[bold red]error:[/] {escape(why)}"
    errors.print(text, soft_wrap=True, highlight=False, emoji=False)


@data_app.command("prepare")
def data_prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text, JSONL or Parquet files, folders of them, or hf:NAME[:CONFIG]\\[@SPLIT].",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; without one, a tokenizer is trained.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer to train.")] = 2048,
    validation: Annotated[float, typer.Option(help="Share of documents to hold out.")] = 0.05,
    text_field: Annotated[str, typer.Option(help="Field that holds a record's text.")] = "text",
    document_separator: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="In text files, a line that begins like this begins a document; the match is left "
            "out, a lookahead (?=...) keeps it. Default: chapter headings, else some 200 lines.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For records with messages: Jinja that makes them text; default: the tokenizer's.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace other prepared data.")] = False,
) -> None:
    """Turn text, or conversations, into tokens that training reads."""
    from planaria.node.data.corpus import CorpusError
    from planaria.node.data.prepare import Recipe, prepare

    with refusing(CorpusError):
        recipe = Recipe(
            *(inputs, tokenizer, vocabulary, validation, text_field, document_separator),
            chat_template,
        )
        with tracking("documents") as track:
            corpus, written = prepare(recipe, out, force=force, track=track)
        if not written:
            console.print(f"{out} holds this very data already")
        _print_corpus(corpus)
    if tokenizer is None and corpus.vocabulary < vocabulary:
        console.print(
            f"--vocabulary {vocabulary}: this text has only enough for {corpus.vocabulary} tokens; "
            "models that train on it have so many",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def tracking(what: str) -> Iterator[Track]:
    """Shows the progress of what goes through these."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors) as progress:

        def track(items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
            return progress.track(items, total, description=description)

        yield track


@data_app.command("inspect")
def data_inspect(
    path: Annotated[
        Path, typer.Argument(metavar="DIR|RUN.toml", help="Folder of prepared data, or a run file.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read all, check checksums.")] = False,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the sample to show.")] = 128,
) -> None:
    """Show what prepared data holds, and its first sample; or what a run makes of its data."""
    from planaria.node.data.corpus import TRAIN, Corpus, CorpusError
    from planaria.node.run_file import RunFileError

    with refusing(CorpusError, RunFileError):
        if path.is_file():
            _print_data_of_run(path)
            return
        corpus = Corpus.open(path, verify)
        _print_corpus(corpus)
        if verify:
            console.print("checksums: all right")
        text = _first_sample(corpus, context)
    console.print(
        f"\nfirst of {corpus.count(TRAIN, context)} training samples of {context} tokens"
        + (", what is scored in \u27e6\u27e7:" if corpus.masked else ":")
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _first_sample(corpus: Corpus, context: int) -> str:
    """As text. Raises CorpusError."""
    from itertools import groupby

    from planaria.node.data.corpus import TRAIN

    tokenizer, sample = corpus.tokenizer(), corpus.sample(TRAIN, context, 0).tolist()
    if not corpus.masked:
        return str(tokenizer.decode(sample, skip_special_tokens=False))
    scored = [False, *corpus.scored(TRAIN, context, 0).tolist()]
    text = ""
    for is_scored, run in groupby(zip(scored, sample, strict=True), lambda pair: pair[0]):
        part = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        text += f"\u27e6{part}\u27e7" if is_scored else part
    return text


def _print_data_of_run(file: Path) -> None:
    """Raises RunFileError, CorpusError."""
    from planaria.node.data.mixture import folders_of, open_data
    from planaria.node.resolve import resolve
    from planaria.node.run_file import load

    run = resolve(load(file))
    data, config = open_data(run.data), run.model.config
    table = Table(
        "corpus",
        *(Column(name, justify="right") for name in ("share", "samples", "trained on", "epochs")),
    )
    shares = data.shares(config.context)
    turns = sum(share.turns for share in shares)
    for path, share in zip(folders_of(run.data), shares, strict=True):
        trained = run.steps * run.training.batch * share.turns / turns
        table.add_row(
            str(path),
            f"{share.turns / turns:.1%}",
            f"{share.samples:,}",
            f"{trained:,.0f}",
            f"{trained / share.samples:.2f}",
        )
    console.print(table)
    console.print(
        f"samples of {config.context} tokens, in {run.steps:,} steps of {run.training.batch}; the "
        f"shares are exact in any {turns:,} samples in a row",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"content: {data.content}", highlight=False)


def _print_corpus(corpus: Corpus) -> None:
    scored = ["scored"] if corpus.masked else []
    table = Table(
        "split",
        *(
            Column(name, justify="right")
            for name in ("documents", "tokens", *scored, "bytes/token", "shards")
        ),
    )
    for name, split in corpus.index.splits.items():
        table.add_row(
            name,
            f"{split.documents:,}",
            f"{split.tokens:,}",
            *([f"{split.scored:,}"] if scored else []),
            f"{split.text_bytes / split.tokens:.2f}",
            f"{len(split.shards)}",
        )
    console.print(table)
    console.print(f"tokenizer: {corpus.vocabulary} tokens, hash {corpus.index.tokenizer}")
    console.print(f"content:   {corpus.content}", highlight=False)


@app.command("presets")
def presets_command(
    vocabulary: Annotated[
        int, typer.Option(min=2, help="Tokens of the tokenizer; 2048: what `data prepare` makes.")
    ] = 2048,
) -> None:
    """List the sizes of models that model.preset names."""
    from planaria.node.run_file import ModelSection
    from planaria.node.stage.shape import PRESETS, divisors, model_config

    table = Table(
        Column("preset", no_wrap=True),
        *(
            Column(name, justify="right", no_wrap=True)
            for name in ("parameters", "layers", "width", "heads", "context", "rate", "memory")
        ),
        "stages",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name, preset in PRESETS.items():
        config = model_config(ModelSection(preset=name), vocabulary)
        first, body = config.parameters
        others = [n for n in divisors(preset.layers) if n != preset.stages]
        table.add_row(
            name,
            _counted(first + preset.stages * body),
            f"{preset.layers}",
            f"{preset.dim}",
            f"{preset.heads}",
            f"{preset.context}",
            f"{preset.learning_rate:g}",
            f"{config.seat_bytes / 2**20:,.0f} MiB",
            f"{preset.stages}, or {', '.join(map(str, others))}",
        )
    console.print(table)
    console.print(
        f"Parameters are those with a vocabulary of {vocabulary:,} tokens. Memory is what a node "
        "takes that serves the largest stage, in the first number of stages: weights, gradient, "
        "Adam's moments and half as much again.",
        highlight=False,
        soft_wrap=True,
    )


def _counted(parameters: int) -> str:
    """In thousands, millions or billions, three figures."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return f"{parameters / 1000:.3g}k"


@app.command("audit")
def audit_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a run wrote.")],
) -> None:
    """Compare what a run trained on with what it should have."""
    from planaria.node.report.ledger import LedgerError, audit

    with refusing(LedgerError):
        found = audit(directory)
    table = Table("samples", Column("number", justify="right"))
    for name in ("expected", "duplicates", "missing", "extra"):
        table.add_row(name, f"{getattr(found, name):,}")
    console.print(table)
    planned = f" of {found.planned}" if found.planned else ""
    console.print(f"{found.steps} committed steps{planned}, {found.superseded} superseded lines")
    for sentence in found.cut:
        console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if found.exact and found.steps < found.planned:
        console.print(
            f"steps {found.steps + 1} to {found.planned} are not there: the run is not finished, "
            "or the end of its ledger is cut off",
            highlight=False,
            soft_wrap=True,
        )
    if not found.exact:
        raise typer.Exit(1)


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
Token = Annotated[
    str,
    typer.Option(
        envvar="PLANARIA_TOKEN",
        help="Join token that the run's machines share.",
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
Http = Annotated[
    str,
    typer.Option(
        "--http",
        metavar="HOST:PORT|none",
        help="Where a browser shows the run; port 0: any.",
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
    """Where `option` has something served; None: nowhere. Raises AddressError,
    CredentialsError."""
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
        metavar="HOST:PORT[,HOST:PORT]",
        envvar="PLANARIA_JOIN",
        help="Where the registry listens; several addresses are of one.",
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
LOSSES, FILES = "Losses", "Files"
AllowModule = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:BUILD",
        help="Code that a node here may load if the run's model is an architecture of its own.",
        rich_help_panel=FILES,
    ),
]


@app.command("up")
def up_command(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Without one: the defaults.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Size of the model, as `planaria presets` lists them.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks in the model.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Body stages; the model's layers are divided among them.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Nodes a stage.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What to do when a stage is lost: checkfree, checkfree+, snapshot, checkpoint or "
            "redundant."
        ),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Stop where the policy can't serve, rather than guess."),
    ] = None,
    masking: Annotated[
        str | None,
        typer.Option(
            help="When a node is lost in a step and its stage has others: reassign what was its "
            "to them, spare: let one of them do it ahead, or abort and try the step again."
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[.REPLICA]@STEP",
            help="SIGKILL every node of a stage, or one of them, while this step is under way; "
            "replacements are started at once. Repeatable.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace/--no-replace",
            help="Start another node for each that is gone, killed or ended by itself.",
            rich_help_panel=LOSSES,
        ),
    ] = True,
    loss_rate: Annotated[
        str | None,
        typer.Option(
            metavar="10%/h",
            help="SIGKILL nodes at random: of a hundred so many are lost within an hour.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Kill and start nodes as a spot trace has it (milliseconds, add or remove, node).",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            help="Times as fast as --loss-rate or --trace says.",
            rich_help_panel=LOSSES,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write. Default: out/NAME-DATE-TIME.",
            rich_help_panel=FILES,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and windows.")] = None,
    save_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the nodes' saves, for --resume. Default: saves, in --out.",
            rich_help_panel=FILES,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on with a run that was stopped as a whole: the --out or --save-dir of it. "
            "--stages and --replicas may be others than before.",
            rich_help_panel=FILES,
        ),
    ] = None,
    device: OneDevice = "auto",
    seats: Seats = None,
    http: Http = LOOPBACK,
    price: Price = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Start more nodes than this machine has memory or cores for.",
            rich_help_panel=MACHINE,
        ),
    ] = False,
    track: Tracked = None,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> None:
    """Train with a whole swarm on this machine."""
    import asyncio

    from planaria.bootstrap.credentials import CredentialsError
    from planaria.node.data.corpus import CorpusError
    from planaria.node.local.resume import ResumeError, changed
    from planaria.node.local.swarm import (
        SwarmError,
        choose_losses,
        parse_kill,
        plan_run,
        read_plan,
        up,
    )
    from planaria.node.report.progress import untracked
    from planaria.node.resolve import text_to_prepare
    from planaria.node.run_file import RunFile, RunFileError, load, override

    _check_tracker(track)
    with refusing(RunFileError, CorpusError, CredentialsError, SwarmError, ResumeError, ValueError):
        if resume is not None:
            trained = (run_file, preset, layers, steps, policy, strict, masking, seed)
            if any(option is not None for option in (*trained, out, save_dir)):
                raise SwarmError(
                    "--resume goes on with the run as it was started: of the other options only "
                    "--stages, --replicas and those about losses go with it"
                )
            resumed = read_plan(resume)
            plan = resumed._replace(run=changed(resumed.run, stages, replicas))
        else:
            resumed = None
            run = override(
                RunFile() if run_file is None else load(run_file),
                model__preset=preset,
                model__layers=layers,
                model__stages=stages,
                swarm__replicas=replicas,
                steps=steps,
                recovery__policy=policy,
                recovery__strict=strict,
                recovery__masking=masking,
                seed=seed,
            )
            shown = tracking("documents") if text_to_prepare(run) else nullcontext(untracked)
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            with shown as progress:
                plan = plan_run(run, out, save_dir, device, say, progress)
        parse_place(http, "", None, None, insecure=False)
        plan = plan._replace(http=http, price=price, log=(log_level.value, log_format.value))
        plan = plan._replace(track=track and track.value)
        kills = [parse_kill(text, plan.run) for text in kill or []]
        losses = choose_losses(plan.run, loss_rate, trace, speedup)
        ending = asyncio.run(
            up(plan, kills, console, resumed, replace, losses, seats, oversubscribe)
        )
    raise typer.Exit(ending.status)


def _check_tracker(track: Tracker | None) -> None:
    """Raises ModuleNotFoundError, which says what is missing."""
    from planaria.node import extras

    if track is not None:
        extras.check(track.value)


class ExportDtype(enum.StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


Living = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT[,HOST:PORT]",
        help="Instead of a folder: where the registry of a living run listens.",
    ),
]
Wait = Annotated[
    float,
    typer.Option(min=1, help="With --join: seconds for a step that all stages have committed."),
]


@app.command("export")
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    join: Living = None,
    run_file: Annotated[
        Path | None,
        typer.Option(
            "--run", envvar="PLANARIA_EXPORT_RUN", metavar="RUN.toml", help="Whose saves these are."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data, whose tokenizer goes along, if not the run's."),
    ] = None,
    dtype: Annotated[ExportDtype, typer.Option(help="Of the weights.")] = ExportDtype.FP32,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="LoRA: a model with the adapters in its weights, not these apart."
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="With --merged: the model that the run began from, if not there."),
    ] = None,
    wait: Wait = 120.0,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Write a run's model as a folder that Hugging Face's transformers reads; where adapters were
    trained (LoRA), these, as peft has them."""
    if join is not None and folders:
        _end("with --join the model is that of a living run, not of a folder")
    if join is not None:
        _check_registry(join)
    elif not folders:
        _end("say what to export: folders with saves, or --join HOST:PORT")
    for folder in folders or []:
        if not folder.is_dir():
            _end(f"there is no run in {folder}: it is no folder; name what `planaria up` wrote")

    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.data.corpus import CorpusError
    from planaria.node.hugging_face.adapters import begun_from, what
    from planaria.node.hugging_face.export import ExportError
    from planaria.node.hugging_face.from_saves import export_saves
    from planaria.node.local.resume import ResumeError
    from planaria.node.local.swarm import PLAN, SwarmError, read_plan
    from planaria.node.report.summary import read_summary
    from planaria.node.resolve import resolve
    from planaria.node.run_file import RunFileError, load
    from planaria.node.state.saves import find_saves
    from planaria.node.state.stage_state import SaveError

    kinds = (CorpusError, ExportError, ResumeError, RunFileError, SaveError, SwarmError)
    with refusing(*kinds, CredentialsError, ValueError):
        if join is not None:
            _export_living(
                *(join, Credentials.load(ca, certificate, key, token), out, data, dtype, wait),
                *(merged, model),
            )
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
            raise ExportError("with several folders, say by --run whose saves are in them")
        run = begun_from(run, model)
        with tracking("tensors") as track:
            saved = export_saves(run, saves, summary, out, data, dtype.value, track, merged)
    if saved.doubt:
        console.print(saved.doubt, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{out} has the {what(run, merged)} of step {saved.step}", soft_wrap=True)


def _export_living(
    join: str,
    credentials: Credentials,
    out: Path,
    data: Path | None,
    dtype: str,
    wait: float,
    merged: bool,
    model: Path | None,
) -> None:
    from planaria.node.hugging_face.from_swarm import export_swarm

    async def take(client: RegistryClient) -> None:
        with tracking("tensors") as track:
            what, step = await export_swarm(
                *(client, credentials, out, data, dtype, track, wait, merged, model)
            )
        console.print(f"{out} has the {what} of step {step}", soft_wrap=True)

    _ask(join, credentials, take)


@app.command("generate")
def generate_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR [PROMPT]",
            help="Folder that `planaria export` has written, and the beginning of the text. With "
            "--join, the latter alone.",
        ),
    ] = None,
    join: Living = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest that have this share together.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: OneDevice = "auto",
    data: Annotated[
        Path | None,
        typer.Option(help="With --join: prepared data, whose tokenizer it is, if not the run's."),
    ] = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Let an exported model go on with a text, or that of a living run where it is trained."""
    said = list(words or [])
    folder = None if join is not None else Path(said.pop(0)) if said else None
    if len(said) > 1 or (join is None and folder is None):
        _end("say planaria generate DIR [PROMPT], or --join HOST:PORT [PROMPT]")
    if join is not None:
        _check_registry(join)
    if folder is not None:
        _check_model(folder)

    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.begin import NodeError
    from planaria.node.data.corpus import CorpusError
    from planaria.node.hugging_face.config import UnsupportedModelError
    from planaria.node.hugging_face.export import ExportError
    from planaria.node.hugging_face.generate import Sampling, Speaker, texts
    from planaria.node.hugging_face.through_swarm import speak
    from planaria.node.hugging_face.whole_model import WholeModel
    from planaria.node.run_file import RunFileError
    from planaria.node.serve import pick_device

    kinds = (CorpusError, CredentialsError, ExportError, NodeError, RunFileError)
    with refusing(*kinds, UnsupportedModelError, ValueError):
        sampling = Sampling(temperature, top_p, seed)
        prompt = "".join(said)
        if join is not None:
            credentials = Credentials.load(ca, certificate, key, token)

            async def go_on(client: RegistryClient) -> None:
                _say(prompt)
                await speak(client, credentials, data, prompt, tokens, sampling, _say)

            _ask(join, credentials, go_on)
        elif folder is not None:
            speaker = Speaker.of(WholeModel.load(folder, pick_device(device)), folder)
            _say(prompt)
            for text in texts(speaker, prompt, tokens, sampling):
                _say(text)
        console.print()


def _check_model(folder: Path) -> None:
    """Ends at once, before torch is loaded, where no model was exported to."""
    from planaria.node.hugging_face.config import CONFIG, UnsupportedModelError, check_not_adapters

    with refusing(UnsupportedModelError):
        check_not_adapters(folder)
    if not (folder / CONFIG).is_file():
        _end(f"{folder} holds no model: name a folder that `planaria export` has written")


def _say(text: str) -> None:
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


@app.command("evaluate")
def evaluate_command(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder that `planaria export` has written."),
    ] = None,
    *,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Prepared data.")],
    join: Living = None,
    split: Annotated[str, typer.Option(help="train or validation.")] = "validation",
    samples: Annotated[int | None, typer.Option(min=1, help="Default: all.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 8,
    device: OneDevice = "auto",
    wait: Wait = 120.0,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Loss and perplexity, on prepared data, of an exported model, or of one step of a living run,
    computed where it is trained."""
    if (folder is None) == (join is None):
        _end("say which model: a folder that `planaria export` has written, or --join HOST:PORT")
    if folder is not None:
        _check_model(folder)
    if join is not None:
        _check_registry(join)

    from planaria.node.data.corpus import CorpusError, read_index

    with refusing(CorpusError):
        read_index(data)

    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.begin import NodeError
    from planaria.node.hugging_face.config import UnsupportedModelError
    from planaria.node.hugging_face.evaluate import Evaluation, evaluate
    from planaria.node.hugging_face.export import ExportError
    from planaria.node.hugging_face.through_swarm import evaluate_swarm
    from planaria.node.hugging_face.whole_model import WholeModel
    from planaria.node.run_file import RunFileError
    from planaria.node.serve import pick_device

    def show(found: Evaluation) -> None:
        table = Table("", Column(split, justify="right"))
        for name, value in found.rows().items():
            table.add_row(name, value)
        console.print(table)

    async def ask(client: RegistryClient) -> None:
        with tracking("batches") as track:
            step, found = await evaluate_swarm(
                client, credentials, data, split, samples, batch, track, wait
            )
        show(found)
        console.print(f"of the model of step {step}")

    kinds = (CorpusError, CredentialsError, ExportError, NodeError, RunFileError)
    with refusing(*kinds, UnsupportedModelError, ValueError):
        if join is not None:
            credentials = Credentials.load(ca, certificate, key, token)
            _ask(join, credentials, ask)
        elif folder is not None:
            model = WholeModel.load(folder, pick_device(device))
            with tracking("batches") as track:
                found = evaluate(model, folder, data, split, samples, batch, track)
            show(found)


@app.command("bootstrap")
def bootstrap_command(
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
    http: Http = LOOPBACK,
    price: Price = None,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Run the registry: who serves what, and the page on which one watches."""
    from planaria.bootstrap.address import Address
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.bootstrap.journal import Journal, JournalError, read_view
    from planaria.bootstrap.service import RegistryServer, serve
    from planaria.node.data.corpus import CorpusError
    from planaria.node.report.log_stream import begin_log
    from planaria.node.resolve import registry_rules, resolve
    from planaria.node.run_file import RunFileError, dumps, load, loads

    begin_log(log_level.value, log_format.value, "registry")
    with refusing(RunFileError, CorpusError, CredentialsError, JournalError, OSError, ValueError):
        address = str(Address.parse(listen))
        text = dumps(resolve(load(run_file)))
        rules = registry_rules(loads(text))
        credentials = Credentials.load(ca, certificate, key, token)
        page = parse_place(http, token, certificate, key, insecure)
        if after is not None and journal is None:
            raise ValueError(f"--after {after}: give this run a --journal of its own, too")
        log = Journal(journal, rules.run) if journal is not None else None
        try:
            if after is not None and log is not None and log.view is None:
                last, damage = read_view(after)
                log.go_on_from(last, damage, f"the run {last.run} goes on in other numbers")
            registry = RegistryServer(rules, text, log)
            beside = None if page is None else partial(_page_beside, page, loads(text), price)
            _run(serve(registry, address, credentials, insecure, address_file, beside))
        finally:
            if log is not None:
                log.close()


def _page_beside(
    place: Place, run: RunFile, price: float | None, registry: RegistryServer
) -> AbstractAsyncContextManager[None]:
    from planaria.node.page.serving import page_beside

    return page_beside(registry, run, place, price)


@app.command("page")
def page_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The --out of `planaria up`, or out/RUN of nodes."),
    ],
    http: Http = LOOPBACK,
    price: Price = None,
    insecure: Insecure = False,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Show a run that has left files in the browser, at any moment of it."""
    import asyncio

    from planaria.bootstrap.credentials import CredentialsError
    from planaria.node.page.replay import ReplayError, replay_of
    from planaria.node.page.serving import show
    from planaria.node.report.ledger import LedgerError
    from planaria.node.run_file import RunFileError

    kinds = (ReplayError, LedgerError, RunFileError, CredentialsError, OSError, ValueError)
    with refusing(*kinds), suppress(KeyboardInterrupt):
        place = parse_place(http, token, certificate, key, insecure)
        if place is None:
            raise ValueError("--http none: a page that is shown nowhere is none")
        with errors.status("reading"):
            replay = replay_of(folder, price)

        async def until_interrupted() -> None:
            say = partial(console.print, highlight=False, soft_wrap=True)
            await show(replay, place, lambda url: say(f"{folder} is shown at {url}"), _for_ever())

        asyncio.run(until_interrupted())


async def _for_ever() -> None:
    import asyncio

    await asyncio.get_running_loop().create_future()


class Restart(enum.StrEnum):
    NO = "no"
    ALWAYS = "always"


class CloudName(enum.StrEnum):
    AUTO = "auto"
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    NONE = "none"


NETWORK, ENDING = "Network", "When it ends"


@app.command("node")
def node_command(
    join: Join,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Default: where a node is needed most.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where peers dial in; port 0: any.",
            rich_help_panel=NETWORK,
        ),
    ] = "127.0.0.1:0",
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
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prepared data, if not the run's.",
            rich_help_panel=FILES,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint that the run begins from, if not where its run file says.",
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
        CloudName,
        typer.Option(
            help="Whose notices that this machine will be taken to listen to; auto: find out. What "
            "they leave of time goes before --grace.",
            rich_help_panel=ENDING,
        ),
    ] = CloudName.AUTO,
    restart: Annotated[
        Restart,
        typer.Option(
            help="What to do when this node crashes; always: start another, after a pause.",
            rich_help_panel=ENDING,
        ),
    ] = Restart.ALWAYS,
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
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
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
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Join a run, and serve a stage of its model."""
    import asyncio
    import socket

    from planaria.bootstrap.address import Address
    from planaria.bootstrap.knock import Answer
    from planaria.node.begin import NodeError, check_reachable
    from planaria.node.naming import name_of_host
    from planaria.node.report.log_stream import begin_log
    from planaria.node.supervisor import TRY_AGAIN, is_watched, one_each, supervise

    called = name or name_of_host(socket.gethostname())
    _check_tracker(track)
    lines = begin_log(log_level.value, log_format.value, called)
    addresses, dials_only = _split(join), advertise == "none"
    with refusing(NodeError, ValueError):
        listens = Address.parse(listen)
        told = None if advertise is None or dials_only else Address.to_dial(advertise)
        check_reachable(addresses, listens, told, dials_only)
        folder = None if save_dir == Path("none") else save_dir
        shown = None if metrics == "none" else Address.parse(metrics)
        nodes = one_each(device.split(","), listens, told, folder, shown)
    if not is_watched():
        _check_there(addresses, [Answer.UNKNOWN], TRY_AGAIN)
        if restart is Restart.ALWAYS or len(nodes) > 1:
            raise typer.Exit(asyncio.run(supervise(nodes, grace, restart is Restart.ALWAYS)))

    from planaria.bootstrap.client import JoinRefused
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.begin import Options, begin
    from planaria.node.data.corpus import CorpusError
    from planaria.node.report.ledger import LedgerError
    from planaria.node.run_file import RunFileError
    from planaria.node.state.stage_state import SaveError

    kinds = (JoinRefused, NodeError, CorpusError, LedgerError, RunFileError)
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
            data=data,
            model=model,
            allow_module=allow_module,
            out=out,
            threads=threads,
            save_dir=folder,
            saving=save_dir != Path("none"),
            grace=grace,
            cloud=cloud.value,
            credentials=Credentials.load(ca, certificate, key, token),
            insecure=insecure,
            metrics=parse_place(metrics, token, certificate, key, insecure, "--metrics"),
            name=called,
            log=lines if share_log else None,
            track=track and track.value,
        )
        status = _run(begin(options))
    raise typer.Exit(status)


def _split(join: str) -> tuple[str, ...]:
    """The addresses of --join."""
    return tuple(address.strip() for address in join.split(","))


def _check_registry(join: str) -> None:
    """Ends at once where there is no registry to ask."""
    from planaria.bootstrap.knock import Answer

    _check_there(_split(join), [Answer.UNKNOWN, Answer.REFUSED], 1)


def _check_there(addresses: Sequence[str], final: Sequence[Answer], status: int) -> None:
    """Ends with that status where all that the addresses say is final, else says what they do."""
    import asyncio

    from planaria.bootstrap.knock import Answer, dead_end, knock_at_all

    with refusing(ValueError):
        answers = asyncio.run(knock_at_all(addresses, KNOCK))
    if why := dead_end(answers, final):
        _refuse(why)
        raise typer.Exit(status)
    if why := dead_end(answers, [Answer.UNKNOWN, Answer.REFUSED, Answer.SILENT]):
        _warn(f"{why}. Trying on")


@app.command("regroup")
def regroup_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="What --save-dir was, of each of the run's nodes."),
    ],
    join: Join,
    out: Annotated[Path, typer.Option(help="Folder to write: a --save-dir for the new nodes.")],
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Write a run's saves anew for the run of a registry, which has the same model, but another
    run file: in more or fewer stages, for one."""
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.report.log_stream import begin_log
    from planaria.node.run_file import RunFileError, loads
    from planaria.node.state.regroup import RegroupError, of_one_run, regroup
    from planaria.node.state.saves import Contents, Saves, find_saves
    from planaria.node.state.stage_state import SaveError

    async def write(client: RegistryClient) -> None:
        described = await client.describe()
        run = loads(described.run_file, "the registry's run file")
        found = of_one_run(find_saves(*folders), but=described.run)
        config = run.model.config

        def open_folder(stage: int) -> Saves:
            contents = Contents.of(config, stage)
            return Saves(out, described.run, stage, run.saves.keep, contents)

        at = regroup(found, config, open_folder, run.training.betas)
        console.print(
            f"step {at.step} of {found[0].run} is in {out} for {described.run}: stage-0 to "
            f"stage-{config.stages}, each for the --save-dir of a node of that stage",
            highlight=False,
            soft_wrap=True,
        )

    begin_log()
    with refusing(CredentialsError, RunFileError, RegroupError, SaveError, ValueError, OSError):
        _ask(join, Credentials.load(ca, certificate, key, token), write)


@app.command("status")
def status_command(
    join: Join,
    watch: Annotated[bool, typer.Option("--watch", help="Until Ctrl-C.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", envvar="PLANARIA_STATUS_JSON", help="The registry's answer as JSON."
        ),
    ] = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Show a run: its members, its steps, and why the registry did what."""
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.report.status_page import status

    with refusing(CredentialsError, ValueError):
        credentials = Credentials.load(ca, certificate, key, token)
        _ask(join, credentials, lambda client: status(client, console, watch, as_json))


@app.command("logs")
def logs_command(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="As status calls it, or its name or ending alone: node-2.0-7f3a1c."
        ),
    ],
    join: Join,
    lines: Annotated[int, typer.Option(min=1, help="The last so many.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", help="And what comes next, until Ctrl-C.")
    ] = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Show the last lines of a node's log."""
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.report.logs import LogsError, logs
    from planaria.node.wire.asking import over_streams

    with refusing(CredentialsError, LogsError, ValueError):
        credentials = Credentials.load(ca, certificate, key, token)

        async def show(client: RegistryClient) -> None:
            def converse(run: str) -> Converse:
                return over_streams(run, credentials)

            say = partial(console.out, highlight=False)
            await logs(client, converse, node, lines, follow, say)

        _ask(join, credentials, show)


@app.command("doctor")
def doctor_command(
    join: Join,
    stage: Annotated[
        int | None, typer.Option(min=0, help="That a node here would serve. Default: any.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where a node here would listen.", rich_help_panel=NETWORK
        ),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|none",
            help="What it would tell peers; none: it would only dial out.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    device: OneDevice = "auto",
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data, if not the run's.", rich_help_panel=FILES),
    ] = None,
    allow_module: AllowModule = None,
    save_dir: Annotated[
        Path, typer.Option(help="Where it would save.", rich_help_panel=FILES)
    ] = Path("out"),
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """See, in 15 seconds, whether a node with these options could join from this machine; the exit
    status is 0 if all is well, 1 after a warning, 2 after a problem."""
    from planaria.bootstrap.address import Address
    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.advertised import forwarded
    from planaria.node.diagnosis import Verdict, findings, lines, worst
    from planaria.node.doctor import Asked, examine

    dials_only = advertise == "none"
    with refusing(CredentialsError, ValueError):
        listens = Address.parse(listen)
        rented = forwarded(listens, os.environ) if advertise is None else None
        told = None if advertise is None or dials_only else Address.to_dial(advertise)
        asked = Asked(
            join=_split(join),
            stage=stage,
            listen=listens,
            advertise=rented.address if rented else told,
            dials_only=dials_only,
            device=device,
            data=data,
            saves=save_dir,
            credentials=Credentials.load(ca, certificate, key, token),
            insecure=insecure,
            allow_module=allow_module,
        )
        with errors.status("looking, for 15 seconds at most"):
            found = findings(_run(examine(asked, version("planaria"), time.monotonic() - BEGAN)))
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for about, verdict, said in lines(found):
        text = f"[{colours[verdict]}]{verdict:<8}[/] [bold]{about:<10}[/] {escape(said)}"
        console.print(text, soft_wrap=True, highlight=False, emoji=False)
    if (status := worst(found)) is not Verdict.OK:
        raise typer.Exit(int(status))


@app.command("probe")
def probe_command(
    join: Join,
    out: Annotated[
        Path | None, typer.Option(help="File to write, for planaria plan --probe.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds that nodes have to measure.")] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="PLANARIA_PROBE_JSON", help="Print it as JSON.")
    ] = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = "",
) -> None:
    """Measure the nodes of a swarm and the links between them, while it trains or waits."""
    import json

    from planaria.bootstrap.credentials import Credentials, CredentialsError
    from planaria.node.report.probe import ProbeError, probe, table

    async def look(client: RegistryClient) -> None:
        found = await probe(client, wait, lambda text: console.print(text, style="dim"))
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if as_json:
            console.print_json(data=found)
        else:
            for part in table(found):
                console.print(part)

    with refusing(CredentialsError, ProbeError, ValueError, OSError):
        _ask(join, Credentials.load(ca, certificate, key, token), look)


def _ask(
    join: str,
    credentials: Credentials,
    question: Callable[[RegistryClient], Coroutine[object, object, None]],
) -> None:
    """Asks the registry, until it has answered or Ctrl-C."""
    from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable

    addresses = _split(join)
    _check_registry(join)

    async def ask() -> None:
        client = RegistryClient(addresses, credentials)
        try:
            await client.check_one_run()
            await question(client)
        finally:
            await client.close()

    with refusing(RegistryUnreachable, JoinRefused), suppress(KeyboardInterrupt):
        _run(ask())


def _run(work: Coroutine[object, object, T]) -> T:
    """Runs on the quicker loop, where there is one."""
    import asyncio
    import sys

    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)
