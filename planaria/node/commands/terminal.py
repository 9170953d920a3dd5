"""Output of commands: results, progress, and errors as sentences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from planaria.bootstrap.errors import UserError
from planaria.node.report.readable_console import ReadableConsole

if TYPE_CHECKING:
    from planaria.node.data.progress import Track

T = TypeVar("T")

log = logging.getLogger(__name__)

console: Console = ReadableConsole()
errors: Console = ReadableConsole(stderr=True)


@contextmanager
def reporting_errors(statuses: Mapping[type[Exception], int] = {}) -> Iterator[None]:
    """Print errors that are sentences for users, and end with their exit status, by default 1."""
    try:
        yield
    except BrokenPipeError:  # the output's reader has gone; click ends silently
        raise
    except (UserError, OSError, ValueError) as error:
        log.debug("%s", error, exc_info=True)
        print_error(str(error))
        raise typer.Exit(statuses.get(type(error), 1)) from error


@contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """On Ctrl-C print what a command keeps, and end with exit status 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        warn(f"interrupted: {kept}")
        raise typer.Exit(130) from error


def say(text: str, style: str = "") -> None:
    """Print a line of a command's results as it is, in a style of rich."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fail(why: str) -> NoReturn:
    print_error(why)
    raise typer.Exit(1)


def warn(text: str) -> None:
    errors.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_error(why: str) -> None:
    text = f"[bold red]error:[/] {escape(why)}"
    errors.print(text, soft_wrap=True, highlight=False)


@contextmanager
def tracking(unit: str) -> Iterator[Track]:
    """Show the progress of a command's iterations; `unit`: of their numbers."""
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
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors) as progress:

        def track(items: Iterable[T], description: str, total: int | None) -> Iterable[T]:
            return progress.track(items, total, description=description)

        yield track
