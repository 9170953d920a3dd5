"""Commands for data: prepare, inspect."""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from planaria.node.commands.terminal import console, interruptible, say, tracking
from planaria.node.data.options import PrepareOptions
from planaria.node.launch.options import flattened

if TYPE_CHECKING:
    from planaria.node.data.corpus import Corpus, CorpusSource

data_app = typer.Typer(no_args_is_help=True, help="Prepare data for training, and look at it.")

SHOWN = 3
"""Documents that `inspect` shows."""
SEARCHED = 1 << 16
"""Tokens in which `inspect` searches them."""


@data_app.command("prepare")
@flattened
def data_prepare(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    options: PrepareOptions,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Files to prepare at a time, each in a process. Default: one a processor."
        ),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Scheduler of a Dask cluster that prepares; its workers must see the same files.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace other prepared data.")] = False,
) -> None:
    """Turn text, or conversations, into tokens that training reads."""

    with interruptible("the same command continues from what is done"):
        from planaria.node.data.executors import spreading
        from planaria.node.data.prepare import prepare
        from planaria.node.data.recipe import Recipe
        from planaria.node.hugging_face.begin_from_model import find_tokenizer

        tokenizer = options.tokenizer
        file = None if tokenizer is None else find_tokenizer(str(tokenizer))
        recipe = Recipe(**vars(options) | {"tokenizer": file})
        with spreading(jobs, dask) as spread, tracking("") as track:
            corpus, written = prepare(recipe, out, spread=spread, force=force, track=track)
        if not written:
            say(f"{out} already has this data")
        _print_corpus(corpus)
    if options.tokenizer is None and corpus.vocabulary < options.vocabulary:
        say(
            f"--vocabulary {options.vocabulary}: this text has only enough for {corpus.vocabulary} "
            "tokens, which is the vocabulary of models that train on it",
            "yellow",
        )


@data_app.command("link")
def data_link(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="s3://, gs://, https://, ...: any that fsspec supports."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Make a folder that links to prepared data elsewhere; only what is needed is read."""
    from planaria.node.data.corpus import Corpus
    from planaria.node.data.remote_corpus import make_stand_in

    make_stand_in(url, out)
    _print_corpus(Corpus.open(out))


@data_app.command("inspect")
def data_inspect(
    path: Annotated[
        Path, typer.Argument(metavar="DIR|RUN.toml", help="Folder of prepared data, or a run file.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and check the checksums.")
    ] = False,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a document to show.")] = 128,
) -> None:
    """Show the contents and first documents of prepared data, or how a run uses its data."""
    from planaria.node.data.corpus import Corpus

    if path.is_file():
        _print_data_of_run(path)
        return
    corpus = Corpus.open(path, verify)
    _print_corpus(corpus)
    if verify:
        console.print("checksums: correct")
    marks = "\u27e6\u27e7" if console.encoding.startswith("utf") else ("[[", "]]")
    texts = _first_documents(corpus, context, *marks)
    say(
        f"\nfirst documents to train on, {context} tokens of each at most"
        + (f", what is scored in {''.join(marks)}:" if corpus.masked else ":")
    )
    for text in texts:
        say(f"{text}\n")


def _first_documents(corpus: Corpus, context: int, opening: str, closing: str) -> list[str]:
    """Texts of the first documents in prepared data. Raises CorpusError."""
    from planaria.node.data.corpus import TRAIN

    tokenizer = corpus.tokenizer()
    size = max(1, min(corpus.index.splits[TRAIN].tokens - 1, SEARCHED))
    tokens = corpus.sample(TRAIN, size, 0).tolist()
    scored = [False, *corpus.scored(TRAIN, size, 0).tolist()]
    begins = corpus.begins(TRAIN, size, 0).tolist()
    starts = [0, *(at for at, begin in enumerate(begins) if begin and at), len(tokens)]
    texts = []
    for start, end in list(pairwise(starts))[:SHOWN]:
        text = ""
        shown = slice(start, min(end, start + context))
        marked = zip(scored[shown], tokens[shown], strict=True)
        for is_scored, same in groupby(marked, itemgetter(0)):
            part = str(tokenizer.decode([token for _, token in same], skip_special_tokens=False))
            text += f"{opening}{part}{closing}" if is_scored and corpus.masked else part
        texts.append(text)
    return texts


def _print_data_of_run(file: Path) -> None:
    """Print how a run uses its data. Raises RunFileError, CorpusError."""
    from planaria.node.data.mixture import corpus_folders, open_data
    from planaria.node.launch.resolve import resolve
    from planaria.node.run_file import load

    run = resolve(load(file))
    data, config = open_data(run.data), run.model.config
    table = Table(
        Column("corpus", overflow="fold"),
        *(Column(name, justify="right") for name in ("share", "samples", "trained on", "epochs")),
    )
    shares = data.shares(config.context)
    turns = sum(share.turns for share in shares)
    for path, share in zip(corpus_folders(run.data), shares, strict=True):
        trained = run.batches.samples_until(run.steps) * share.turns / turns
        table.add_row(
            escape(str(path)),
            f"{share.turns / turns:.1%}",
            f"{share.samples:,}",
            f"{trained:,.0f}",
            f"{trained / share.samples:.2f}",
        )
    console.print(table)
    say(
        f"samples of {config.context} tokens, in {run.steps:,} steps of {run.training.batch}; the "
        f"shares are exact in any {turns:,} samples in a row"
    )
    say(f"content: {data.content}")


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
    if (source := corpus.index.source) is not None:
        say(_read_and_left_out(source))
        if corpus.masked:
            say(_longer(source))
    console.print(f"tokenizer: {corpus.vocabulary} tokens, hash {corpus.index.tokenizer}")
    tokenizer, index = corpus.tokenizer(), corpus.index
    begin = "".join(str(tokenizer.id_to_token(token)) for token in index.begin) or "nothing"
    end = tokenizer.id_to_token(index.end_of_document)
    say(f"texts begin with {begin}, documents end with {end}")
    say(f"content:   {corpus.content}")


def _read_and_left_out(source: CorpusSource) -> str:
    read = f"files read: {source.files:,}, rows: {source.rows:,}, bytes: {source.bytes:,}"
    left_out = ", ".join(
        f"{reason}: {number:,}" + (f" ({size:,} bytes)" if size else "")
        for reason, (number, size) in source.left_out.items()
    )
    return f"{read}; left out: {left_out or 'nothing'}"


def _longer(source: CorpusSource) -> str:
    if source.context is None:
        return (
            "the tokenizer's files don't give the model's context, so longer conversations aren't "
            "counted; give it by --context"
        )
    return f"{source.cut:,} conversations have more than {source.context:,} tokens, and are cut"
