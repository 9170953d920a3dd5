"""A console on which text moves no cursor: what others say of themselves gets to terminals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style

from planaria.bootstrap.spelling import readable_lines


class ReadableConsole(Console):
    """Colours and cursor are moved by what the program does, and by nothing that is in a text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else readable_lines(text), style, control)

    def out(
        self,
        *objects: Any,
        sep: str = " ",
        end: str = "\n",
        style: str | Style | None = None,
        highlight: bool | None = None,
    ) -> None:
        plain = readable_lines(sep.join(map(str, objects)))
        super().out(plain, end=end, style=style, highlight=highlight)
