"""Options of `planaria export` and `planaria evaluate`, and of the functions behind them."""

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
        typer.Option(help="Prepared data with the tokenizer to export. Default: the run's."),
    ] = None
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32"
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="LoRA: write a whole model, with the adapters merged into its weights."
        ),
    ] = False
    model: Annotated[
        Path | None,
        typer.Option(
            help="With --merged: folder of the model that the run began from. With --join it is "
            "required. Default: that of the run file."
        ),
    ] = None
    base: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the model that the run began from, for the files of the adapters. "
            "Default: its name on the hub, or its folder.",
        ),
    ] = ""
    push: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="Upload it to the Hugging Face hub, too.")
    ] = ""
    private: Annotated[
        bool, typer.Option("--private", help="With --push: to a private repository.")
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
