"""The options of `planaria data prepare` that decide what is prepared. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import typer

Bos: TypeAlias = Literal["auto", "yes", "no"]
Form: TypeAlias = Literal["text", "messages", "sharegpt", "alpaca", "completion"]
LONGEST: Final = 16 << 20
"""Limit of a record in bytes: its tokens and their offsets take some 25 times as much memory."""


@dataclass(frozen=True)
class PrepareOptions:
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text, JSON or Parquet files, folders of them, or hf:NAME[:CONFIG]\\[@SPLIT].",
        ),
    ]
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR|NAME",
            help="A tokenizer.json, a folder with one, or a NAME\\[@REVISION] on the Hugging Face "
            "hub; without one, a tokenizer is trained.",
        ),
    ] = None
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer to train.")] = 2048
    validation: Annotated[float, typer.Option(help="Share of documents to hold out.")] = 0.05
    text_field: Annotated[str, typer.Option(help="Field that holds a record's text.")] = "text"
    document_separator: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="In text files, a line that begins like this begins a document; the match is left "
            "out, a lookahead (?=...) keeps it. Default: chapter headings, else some 200 lines.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Chat template (Jinja) for records with messages. Default: the tokenizer's.",
        ),
    ] = None
    bos: Annotated[
        Bos, typer.Option(help="Begin each text with the bos token; auto: as the tokenizer does.")
    ] = "auto"
    end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Ends each document. Default: that of the tokenizer's files."
        ),
    ] = None
    skip_bad: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Of bad rows to leave out; ten are always left out."),
    ] = 0.01
    longest_record: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="Maximum; a longer one is a bad row.")
    ] = LONGEST
    format: Annotated[
        Form | None, typer.Option(help="Form of all records. Default: by their fields.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a sample, in which a conversation should fit. Default: as the "
            "tokenizer's folder says.",
        ),
    ] = None
    longer: Annotated[
        Literal["cut", "leave-out"],
        typer.Option(help="What to do with conversations that don't fit."),
    ] = "cut"
