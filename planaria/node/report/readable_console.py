"""A console that removes control characters from text: it may come from other machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style

from planaria.bootstrap.escaping import readable_lines


class ReadableConsole(Console):
    """A console whose colours and cursor only the program controls, not the text. Its text has no
    names of emoji: `2001:db8:a:b::5` would contain two."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

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
