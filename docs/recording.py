"""Record what a command shows on a terminal: an asciinema cast, and a picture that moves (SVG).

    .venv-docs/bin/python docs/recording.py --from 'step 5[5-9] ' --until 'step 7. ' docs/heal.svg \
        .venv/bin/planaria up demo.toml --kill 2@60 --out out/recorded

The cast, which `asciinema play` plays, is written to `out/` under the picture's name. The picture
is cut to the part from the first screen that has the one pattern to the next that has the other.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyte

COLUMNS, ROWS = 108, 34
EVERY = 0.5
"""Seconds from one picture to the next at least."""
FASTER = 2.0
"""Times, as the picture is played."""
AT_THE_END = 4.0
"""Seconds that the last one stays."""
WIDTH, HEIGHT, MARGIN = 8.0, 17, 14
"""Of a character, in pixels; around them."""
PAPER, INK, FAINT = "#11191c", "#d7dfdf", "#7d8c8e"
COLOURS = {
    **{"black": "#3b4a4d", "red": "#f2777a", "green": "#6fc995", "brown": "#e6b455"},
    **{"blue": "#79b4e8", "magenta": "#c9a0dc", "cyan": "#5cc2c2", "white": INK},
}


class Frame(NamedTuple):
    at: float  # seconds
    rows: tuple[str, ...]  # as SVG
    text: str


def record(command: Sequence[str]) -> list[tuple[float, str]]:
    """What it writes to a terminal of its own, and when; without the folder where that is."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvp(command[0], list(command))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written, decoder = [], codecs.getincrementaldecoder("utf-8")()
    begun = time.monotonic()
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # nobody has the other end any more
            part = b""
        if not part:
            break
        text = decoder.decode(part).replace(f"{Path.cwd()}/", "")
        written.append((time.monotonic() - begun, text))
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return written


def cast(written: Iterable[tuple[float, str]], command: Sequence[str]) -> str:
    """asciinema's format, version 2."""
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "command": " ".join(command)}
    lines = [head, *([round(at, 3), "o", text] for at, text in written)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def frames(written: Iterable[tuple[float, str]]) -> Iterator[Frame]:
    """Each picture that differs from the one before."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    taken = -EVERY
    waiting: Frame | None = None
    for at, text in written:
        if waiting is not None and at - taken >= EVERY:
            yield waiting
            taken = waiting.at
        stream.feed(text)
        rows = tuple(drawn(screen.buffer[row]) for row in range(ROWS))
        waiting = Frame(at, rows, "\n".join(screen.display))
    if waiting is not None:
        yield waiting


def drawn(row: Any) -> str:
    """Text of a row, in spans of one look without gaps: as wide as its characters each, whatever
    font there is."""
    spans = []
    cells = [(column, row[column]) for column in range(COLUMNS)]
    for look, group in groupby(cells, lambda cell: look_of(cell[1])):
        part = list(group)
        text = "".join(character.data for _, character in part)
        for found in re.finditer(r"\S+(?: \S+)*", text):
            left, width = (part[0][0] + found.start()) * WIDTH, len(found[0]) * WIDTH
            spans.append(
                f'<tspan x="{left:g}" textLength="{width:g}" {look}>{escape(found[0])}</tspan>'
            )
    return "".join(spans)


def look_of(character: Any) -> str:
    ink = COLOURS.get(character.fg) or (f"#{character.fg}" if len(character.fg) == 6 else INK)
    bold = ' font-weight="bold"' if character.bold else ""
    return f'fill="{ink}"{bold}'


def cut(shown: Sequence[Frame], begin: str, end: str) -> list[Frame]:
    first = place_of(begin, shown)
    return list(shown[first : first + place_of(end, shown[first:]) + 1])


def place_of(pattern: str, shown: Sequence[Frame]) -> int:
    for place, one in enumerate(shown):
        if re.search(pattern, one.text):
            return place
    sys.exit(f"no screen has {pattern!r}")


def picture(shown: Sequence[Frame]) -> str:
    """One group a screen, each shown in its time, and the last where nothing moves; a row that
    comes again is there once."""
    begun = shown[0].at
    starts = [(one.at - begun) / FASTER for one in shown]
    length = starts[-1] + AT_THE_END
    names: dict[str, str] = {}
    for one in shown:
        for row in one.rows:
            if row:
                names.setdefault(row, f"r{len(names)}")
    kept = "".join(f'<text id="{name}">{row}</text>' for row, name in names.items())
    groups = []
    for start, stop, one in zip(starts, [*starts[1:], length], shown, strict=True):
        uses = "".join(
            f'<use href="#{names[row]}" y="{(place + 1) * HEIGHT}"/>'
            for place, row in enumerate(one.rows)
            if row
        )
        times = f"0;{start / length:.4f};{stop / length:.4f}"
        groups.append(
            f'<g visibility="{"visible" if one is shown[-1] else "hidden"}">{uses}'
            f'<animate attributeName="visibility" dur="{length:.2f}s" repeatCount="indefinite" '
            f'values="hidden;visible;hidden" keyTimes="{times}" calcMode="discrete"/></g>'
        )
    used = max(place for one in shown for place, row in enumerate(one.rows) if row) + 1
    width, height = COLUMNS * WIDTH + 2 * MARGIN, used * HEIGHT + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        'font-size="13">'
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/><defs>{kept}</defs>'
        f'<g transform="translate({MARGIN} {MARGIN - 4})">{"".join(groups)}</g></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="begin", required=True)
    parser.add_argument("--until", dest="end", required=True)
    parser.add_argument("--cast", type=Path, help="draw from this one instead of a new recording")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.cast is None:
        written = record(asked.command)
        kept = Path("out", asked.picture.name).with_suffix(".cast")
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(cast(written, asked.command), "utf-8")
    else:
        lines = asked.cast.read_text("utf-8").splitlines()[1:]
        written = [(at, text) for at, _, text in map(json.loads, lines)]
    asked.picture.write_text(picture(cut(list(frames(written)), asked.begin, asked.end)), "utf-8")


if __name__ == "__main__":
    main()
