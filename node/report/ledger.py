"""The ledger: a line for every committed step, and the audit that compares it with the plan.

A ledger is a JSONL file: a `LedgerHeader`, then a `Line` for each committed step. Every stage-0
node writes its own; what counts is their union (`merge`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from planaria.node.data.windows import Windows, microbatch_ids, samples_hash
from planaria.node.report.line_file import LineFile
from planaria.node.wire import stage_pb2

MERGED = "ledger.jsonl"
Count = Annotated[int, Field(ge=0)]
Hash = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # xxh3_128


class LedgerError(ValueError):
    """A ledger that can't be read; the message names file, line and remedy."""


@with_config(ConfigDict(strict=True, extra="forbid"))
class LedgerHeader(TypedDict):
    """What the windows of a run follow from. `batch` and `microbatch` count samples."""

    ledger: Literal[1]
    run: str
    seed: int
    samples: int
    batch: int
    microbatch: Annotated[int, Field(ge=1)]
    context: int
    content: str


@with_config(ConfigDict(strict=True, extra="forbid"))
class Line(TypedDict):
    """A committed step. A microbatch is (id, number of samples, hash of the samples)."""

    step: Annotated[int, Field(ge=1)]
    view: Count
    attempt: Count
    epoch: Count
    microbatches: list[tuple[Count, Count, Hash]]
    samples: Count
    samples_hash: Hash
    loss: float | None  # nats a token; None: not finite
    tokens: int
    gradient_norm: float | None
    skipped: bool
    seconds: float
    time: float  # Unix, when this node applied the step


_HEADER: TypeAdapter[LedgerHeader] = TypeAdapter(LedgerHeader)
_LINE: TypeAdapter[Line] = TypeAdapter(Line)
Fields = TypeVar("Fields")


def line(commit: stage_pb2.Commit, epoch: int, time: float) -> Line:
    """The ledger's line for a commit; `time` in Unix seconds."""
    homes = sorted(commit.microbatches, key=lambda home: home.microbatch)
    microbatches = [(home.microbatch, home.samples, home.samples_hash.hex()) for home in homes]
    return Line(
        step=commit.step,
        view=commit.ballot.view,
        attempt=commit.ballot.attempt,
        epoch=epoch,
        microbatches=microbatches,
        samples=sum(home.samples for home in homes),
        samples_hash=_joint_hash(microbatches),
        loss=_finite(commit.loss),
        tokens=commit.tokens,
        gradient_norm=_finite(commit.gradient_norm),
        skipped=commit.skipped,
        seconds=commit.seconds,
        time=time,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _joint_hash(microbatches: Sequence[tuple[int, int, str]]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(h) for _, _, h in microbatches))


class Ledger:
    """A ledger open for writing. A half-written last line, left by a crash, is dropped. `file` says
    whether its lines are on disk.

    Raises LedgerError when the file belongs to another run, or can't be read.
    """

    def __init__(self, path: Path, header: LedgerHeader) -> None:
        self.path = path
        try:
            written = path.read_bytes() if path.exists() else b""
            whole = written.rfind(b"\n") + 1
            if whole:
                _check_header(path, written, header)
            if whole < len(written):
                os.truncate(path, whole)
        except OSError as error:
            raise LedgerError(f"can't read the ledger {path}: {error.strerror}") from error
        self.file = LineFile(path)
        if not whole:
            self._write(header)

    def append(self, line: Line) -> None:
        """With the operating system when this returns, or waiting in memory (`file.trouble`)."""
        self._write(line)

    def _write(self, fields: LedgerHeader | Line) -> None:
        self.file.append(json.dumps(fields, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_header(path: Path, written: bytes, header: LedgerHeader) -> None:
    found = _parse(_HEADER, written[: written.index(b"\n")], path, 1)
    if found != header:
        raise LedgerError(
            f"{path} is the ledger of another run ({_difference(found, header)}): move it away"
        )


class Merged(NamedTuple):
    header: LedgerHeader
    lines: list[Line]  # one a step, by step
    superseded: int  # lines that another one of the same step outdid


def merge(paths: Iterable[Path]) -> Merged:
    """Join ledgers of the same run.

    A step stands in the ledgers of all stage-0 nodes: lines that differ in `time` at most are one.
    Of different lines for a step the one with the highest (view, attempt) counts: a driver that was
    cut off committed the other with nobody left to see its effect. A half-written last line is
    passed over. Raises LedgerError for damaged lines, headers that disagree, and two different
    commits of one step with the same (view, attempt), which the step transaction rules out.
    """
    first: tuple[Path, LedgerHeader] | None = None
    chosen: dict[int, Line] = {}
    superseded = 0
    for path in paths:
        header, lines = _read(path)
        if first is None:
            first = path, header
        elif header != first[1]:
            raise LedgerError(
                f"{first[0]} and {path} are ledgers of different runs "
                f"({_difference(first[1], header)}): keep those of one run"
            )
        for line in lines:
            other = chosen.setdefault(line["step"], line)
            if _commit(other) == _commit(line):
                other["time"] = min(other["time"], line["time"])
                continue
            superseded += 1
            if _ballot(other) == _ballot(line):
                raise LedgerError(
                    f"{path} has another commit of step {line['step']} in view {line['view']}, "
                    f"attempt {line['attempt']} than the ledgers before it: nodes disagreed about "
                    "this step, don't trust this run's weights"
                )
            chosen[line["step"]] = max(other, line, key=_ballot)
    if first is None:
        raise LedgerError("there are no ledgers to merge")
    return Merged(first[1], [chosen[step] for step in sorted(chosen)], superseded)


def _ballot(line: Line) -> tuple[int, int]:
    return line["view"], line["attempt"]


def _commit(line: Line) -> dict[str, object]:
    return {key: value for key, value in line.items() if key != "time"}


def _difference(one: LedgerHeader, other: LedgerHeader) -> str:
    theirs: dict[str, object] = dict(other)
    return ", ".join(f"{k}: {v!r} and {theirs[k]!r}" for k, v in one.items() if v != theirs[k])


def _read(path: Path) -> tuple[LedgerHeader, list[Line]]:
    try:
        rows = path.read_bytes().split(b"\n")[
            :-1
        ]  # behind the last newline: a half line or nothing
    except OSError as error:
        raise LedgerError(f"can't read the ledger {path}: {error.strerror}") from error
    if not rows:
        raise LedgerError(f"{path} has no header: it is no ledger, move it away")
    header = _parse(_HEADER, rows[0], path, 1)
    lines = []
    for number, row in enumerate(rows[1:], 2):
        line = _parse(_LINE, row, path, number)
        _check_sums(line, path, number)
        lines.append(line)
    return header, lines


def _check_sums(line: Line, path: Path, number: int) -> None:
    samples = sum(count for _, count, _ in line["microbatches"])
    if (line["samples"], line["samples_hash"]) != (samples, _joint_hash(line["microbatches"])):
        raise LedgerError(
            f"{path}, line {number} is damaged: samples or samples_hash don't fit its microbatches"
        )


def _parse(adapter: TypeAdapter[Fields], row: bytes, path: Path, number: int) -> Fields:
    try:
        return adapter.validate_json(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LedgerError(
            f"{path}, line {number} is damaged: {where + ': ' if where else ''}{first['msg']}"
        ) from error


@dataclass(frozen=True)
class Audit:
    """Figures in samples, but for `steps` and `superseded` lines.

    `expected` samples are those of the windows of steps 1 to the last committed one.
    """

    expected: int
    duplicates: int
    missing: int
    extra: int
    steps: int
    superseded: int

    @property
    def exact(self) -> bool:
        return self.duplicates == self.missing == self.extra == 0


def audit(directory: Path) -> Audit:
    """Compare the ledgers in `directory` with the windows that (seed, step) call for.

    Reads `ledger.jsonl` if it is there, else every `ledger-*.jsonl`. Raises LedgerError.
    """
    merged = directory / MERGED
    paths = [merged] if merged.is_file() else sorted(directory.glob("ledger-*.jsonl"))
    if not paths:
        raise LedgerError(
            f"there is no ledger in {directory}, neither {MERGED} nor ledger-*.jsonl: "
            "name the folder that a run wrote with --out"
        )
    return check(merge(paths))


def check(merged: Merged) -> Audit:
    """The audit of merged ledgers. Raises LedgerError for a header without windows."""
    header, lines, superseded = merged
    try:
        windows = Windows(header["seed"], header["samples"], header["batch"])
    except ValueError as error:
        raise LedgerError(f"the ledger's header is damaged: {error}") from error
    last = max((line["step"] for line in lines), default=0)
    duplicates = extra = 0
    missing = (last - len(lines)) * header["batch"]
    for line in lines:
        wrong = _compare(line, windows.ids(line["step"]), header["microbatch"])
        duplicates, missing, extra = (
            a + b for a, b in zip((duplicates, missing, extra), wrong, strict=True)
        )
    return Audit(
        expected=last * header["batch"],
        duplicates=duplicates,
        missing=missing,
        extra=extra,
        steps=len(lines),
        superseded=superseded,
    )


def _compare(line: Line, ids: NDArray[np.int64], size: int) -> tuple[int, int, int]:
    """Samples of one step that are there again, missing, and there without belonging."""
    planned = {number: microbatch_ids(ids, number, size) for number in range(-(-len(ids) // size))}
    expected = {number: (len(part), samples_hash(part).hex()) for number, part in planned.items()}
    found: set[int] = set()
    duplicates = extra = 0
    for number, count, digest in line["microbatches"]:
        if expected.get(number) != (count, digest):
            extra += count
        elif number in found:
            duplicates += count
        else:
            found.add(number)
    missing = sum(count for number, (count, _) in expected.items() if number not in found)
    return duplicates, missing, extra
