"""The command `planaria`. Modules are imported inside the commands, so that --help is quick."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from node.corpus import Corpus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train large language models on machines that come and go.",
)
data_app = typer.Typer(no_args_is_help=True, help="Prepare data for training, and look at it.")
app.add_typer(data_app, name="data")

console = Console()
errors = Console(stderr=True)


def main() -> None:
    app()


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors that are sentences for the user into a message and exit status 1."""
    try:
        yield
    except kinds as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error


@data_app.command("prepare")
def data_prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text, JSONL or Parquet files, folders of them, or hf:NAME[:CONFIG][@SPLIT].",
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
    force: Annotated[bool, typer.Option("--force", help="Replace other prepared data.")] = False,
) -> None:
    """Turn text into tokens that training reads."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from node.corpus import CorpusError
    from node.prepare import Recipe, prepare

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents"),
        TimeElapsedColumn(),
    )
    with refusing(CorpusError):
        recipe = Recipe(inputs, tokenizer, vocabulary, validation, text_field, document_separator)
        with Progress(*columns, console=errors) as progress:

            def track(items: Iterable[str], description: str, total: int | None) -> Iterable[str]:
                return progress.track(items, total, description=description)

            corpus, written = prepare(recipe, out, force=force, track=track)
        if not written:
            console.print(f"{out} holds this very data already")
        _print_corpus(corpus)


@data_app.command("inspect")
def data_inspect(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of prepared data.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all, check checksums.")] = False,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the sample to show.")] = 128,
) -> None:
    """Show what prepared data holds, and its first sample."""
    from node.corpus import TRAIN, Corpus, CorpusError

    with refusing(CorpusError):
        corpus = Corpus.open(path, verify)
        _print_corpus(corpus)
        if verify:
            console.print("checksums: all right")
        sample = corpus.sample(TRAIN, context, 0).tolist()
        text = corpus.tokenizer().decode(sample, skip_special_tokens=False)
    console.print(
        f"\nfirst of {corpus.count(TRAIN, context)} training samples of {context} tokens:"
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_corpus(corpus: Corpus) -> None:
    table = Table(
        "split",
        *(
            Column(name, justify="right")
            for name in ("documents", "tokens", "bytes/token", "shards")
        ),
    )
    for name, split in corpus.index.splits.items():
        table.add_row(
            name,
            f"{split.documents:,}",
            f"{split.tokens:,}",
            f"{split.text_bytes / split.tokens:.2f}",
            f"{len(split.shards)}",
        )
    console.print(table)
    console.print(f"tokenizer: {corpus.vocabulary} tokens, hash {corpus.index.tokenizer}")
    console.print(f"content:   {corpus.content}", highlight=False)


@app.command("audit")
def audit_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a run wrote.")],
) -> None:
    """Compare what a run trained on with what it should have."""
    from node.ledger import LedgerError, audit

    with refusing(LedgerError):
        found = audit(directory)
    table = Table("samples", Column("number", justify="right"))
    for name in ("expected", "duplicates", "missing", "extra"):
        table.add_row(name, f"{getattr(found, name):,}")
    console.print(table)
    console.print(f"{found.steps} committed steps, {found.superseded} superseded lines")
    if not found.exact:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
