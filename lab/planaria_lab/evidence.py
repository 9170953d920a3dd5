"""Check that rows of results support the pages, and that rows name their origin.

    python -m planaria_lab.evidence      # in the repository's top folder

A test runs it, too. It prints a line for each of these:

- a file with rows that lack a part of their origin;
- a variant of a study with unpaired rows;
- a table that differs from what its rows make;
- a page that links to results without rows, or names a measurement without kept rows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from planaria_lab.convergence import report
from planaria_lab.convergence.study import RESULTS, load, read_results
from planaria_lab.origin import lacking

FOLDER: Final = Path("lab/results")
PAGES: Final = "README.md", "docs/*.md", "lab/docs/*.md", "lab/results/*/README.md"
RECORDS: Final = ".jsonl", ".json", ".txt"


def complaints(top: Path) -> Iterator[str]:
    """Yield a line for each thing that is missing in the repository at `top`."""
    results = top / FOLDER
    for path in sorted(results.rglob("*.jsonl")):
        yield from of_rows(path)
    for path in sorted(results.rglob("study.toml")):
        yield from of_study(path, path.relative_to(top))
    for page in sorted(page for pattern in PAGES for page in top.glob(pattern)):
        yield from of_page(page, results)


def of_rows(path: Path) -> Iterator[str]:
    """Yield one line if rows of this file lack a part of their origin."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lacked = [(number, lacking(row)) for number, row in enumerate(rows, 1) if lacking(row)]
    if lacked:
        number, keys = lacked[0]
        yield f"{path}: {len(lacked)} rows lack their origin; line {number} lacks {', '.join(keys)}"


def of_study(path: Path, name: Path) -> Iterator[str]:
    """Yield lines about a study's unpaired rows and its table; none for a study without runs.
    `name`: path of the study's file, as its table has it."""
    study, lines = load(path), read_results(path.with_name(RESULTS)).values()
    if not lines:
        return
    by_run = {(line["variant"], line["seed"]): line for line in lines}
    rows = report.rows(study, by_run)
    for row in rows:
        if row.unpaired:
            yield f"{path}: {row.unpaired} rows of {row.name!r} are unpaired: run the baseline"
    if report.table(study, rows, name) != path.with_name("table.md").read_text(encoding="utf-8"):
        yield f"{path}: table.md isn't what its rows make: use `planaria lab report {name}`"


def of_page(page: Path, results: Path) -> Iterator[str]:
    """Yield lines about results and measurements that a page names and that have no rows."""
    text, top = page.read_text(encoding="utf-8"), results.resolve()
    links = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)", text)]
    for name in sorted({link.relative_to(top).parts[0] for link in links if top in link.parents}):
        if not any(path.suffix in RECORDS for path in (results / name).rglob("*")):
            yield f"{page} links to {results / name}, which has no rows"
    for bench in sorted(set(re.findall(r"planaria_lab\.bench\.(\w+)", text))):
        if not list(results.glob(f"*/{bench}.jsonl")):
            yield f"{page} names the measurement {bench}, of which no results are kept"


def main() -> None:
    lines = list(complaints(Path()))
    for line in lines:
        print(line)
    sys.exit(f"{len(lines)} complaints" if lines else None)


if __name__ == "__main__":
    main()
