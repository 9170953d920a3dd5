"""Options of the commands that take a model out of a run, as their work gets them, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

Wait = Annotated[
    float,
    typer.Option(min=1, help="With --join: seconds for a step that all stages have committed."),
]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `planaria export`: what is exported, and where to."""

    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")]
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data, whose tokenizer goes along, if not the run's."),
    ] = None
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32"
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="LoRA: a model with the adapters in its weights, not these apart."
        ),
    ] = False
    model: Annotated[
        Path | None,
        typer.Option(
            help="With --merged: the model that the run began from, if not there; with --join it "
            "is needed."
        ),
    ] = None
    base: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the model that the run began from is called in what is written; without "
            "it, as on the hub, or as its folder.",
        ),
    ] = ""
    push: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="Upload it to the Hugging Face hub, too.")
    ] = ""
    private: Annotated[
        bool, typer.Option("--private", help="With --push: for those only who may read it there.")
    ] = False
    wait: Wait = 120.0


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The options of `planaria evaluate`: what a model is measured on."""

    data: Annotated[Path, typer.Option(metavar="DIR", help="Prepared data.")]
    split: Annotated[str, typer.Option(help="train or validation.")] = "validation"
    samples: Annotated[int | None, typer.Option(min=1, help="Default: all.")] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 8
    wait: Wait = 120.0
