"""The ledger: a line for every committed step, and the audit against the planned windows.

A ledger is a JSONL file: a `LedgerHeader`, then a `Line` for each committed step. Every stage-0
node writes its own, of the steps whose records it receives (with record replication not of all);
their union (`merge`) is authoritative.

A line also has the commit, if it is as signed: saves converted to other stages have another one.
The line's other fields must follow from the commit, and each commit names its predecessor. So a
forger must change all later lines, and other nodes' ledgers, too.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    TypeVar,
)

import xxhash
from google.protobuf.message import DecodeError
from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from planaria.node.data.batches import Batch, Batches
from planaria.node.data.mixture_cycle import Share
from planaria.node.report.line_file import LineFile
from planaria.node.run_file import RunFile
from planaria.node.wire import stage_pb2
from planaria.node.wire.commit_chain import hash_of, hash_of_records

if TYPE_CHECKING:
    from planaria.node.data.windows import Windows

MERGED = "ledger.jsonl"
MOST_LINE = 32 * 2**20
"""Limit of a line in bytes: a step with the maximum number of microbatches is shorter."""
MOST_STEPS = 10**9
"""The run file's limit."""
MOST_SHOWN = 80
"""Limit of a value in a message, in characters."""
ELSEWHERE = "don't trust this ledger, get one from another node of stage 0"
MOST_BROKEN = 16
"""Limit of broken links in a report."""
Count = Annotated[int, Field(ge=0)]
Hash = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # xxh3_128
Link = Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")]  # SHA-256, or nothing


class LedgerError(ValueError):
    """Error of an unreadable ledger; the message names file, line and remedy."""


@with_config(ConfigDict(strict=True, extra="forbid"))
class LedgerHeader(TypedDict):
    """Parameters of a run's windows. `batch` and `microbatch` count samples. Where settings were
    changed, each number of changes has its ledgers."""

    ledger: Literal[1]
    run: str
    seed: int
    samples: Annotated[int, Field(le=2**62)]
    batch: Annotated[int, Field(le=2**24)]
    microbatch: Annotated[int, Field(ge=1)]
    context: int
    content: str
    steps: NotRequired[Count]  # of the whole run
    changes: NotRequired[Count]  # of settings, before this ledger
    earlier: NotRequired[list[tuple[Count, Count, Annotated[int, Field(ge=1)]]]]
    """Last step, batch and microbatch of each batch before."""
    mixture: NotRequired[list[tuple[Count, Count]]]
    """Samples and turns of each corpus, if there are several."""


@with_config(ConfigDict(strict=True, extra="forbid"))
class Line(TypedDict):
    """A ledger's line: a committed step. A microbatch is (id, number of samples, hash of the
    samples)."""

    step: Annotated[int, Field(ge=1, le=MOST_STEPS)]
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
    doubted: NotRequired[list[tuple[str, Count, Count]]]
    """Nodes with a wrong result: node, stage, and the last step in which a check found it correct.
    Its later results are doubtful."""
    lineage: NotRequired[Count]  # rollbacks to files before this commit
    hash: NotRequired[Link]  # of the commit
    previous: NotRequired[Link]  # of its predecessor; empty: first of its lineage
    commit: NotRequired[str]  # base64


OF_COMMIT = ("lineage", "hash", "previous", "commit")
"""Fields of a line with a signed commit."""
_HEADER: TypeAdapter[LedgerHeader] = TypeAdapter(LedgerHeader)
_LINE: TypeAdapter[Line] = TypeAdapter(Line)
Fields = TypeVar("Fields")
Kept = TypeVar("Kept")


def ledger_line(commit: stage_pb2.Commit, epoch: int, time: float) -> Line:
    """The ledger's line for a commit; `time` in Unix seconds."""
    homes = sorted(commit.microbatches, key=lambda home: home.microbatch)
    microbatches = [(home.microbatch, home.samples, home.samples_hash.hex()) for home in homes]
    written = Line(
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
    if commit.doubted:
        written["doubted"] = [(node.node, node.stage, node.since) for node in commit.doubted]
    if commit.signature:
        written["lineage"] = commit.lineage
        written["hash"], written["previous"] = hash_of(commit).hex(), commit.previous.hex()
        whole = commit.SerializeToString(deterministic=True)
        written["commit"] = base64.b64encode(whole).decode()
    return written


def recording(file: LineFile, lacks_last: bool) -> stage_pb2.Recording:
    """State of the ledger in `file`, for reports."""
    if file.trouble:
        return stage_pb2.LEDGER_FAILING
    if lacks_last:
        return stage_pb2.LEDGER_SPARE
    return stage_pb2.LEDGER_WRITING if file.writing else stage_pb2.LEDGER_WRITTEN


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _joint_hash(microbatches: Sequence[tuple[int, int, str]]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(h) for _, _, h in microbatches))


class Ledger:
    """A ledger open for writing. An incomplete last line, left by a crash, is dropped. `file`, made
    by `open_file`, has the state of its writes.

    Raises LedgerError when the file belongs to another run, or can't be read.
    """

    def __init__(
        self,
        path: Path,
        header: LedgerHeader,
        open_file: Callable[[Path], LineFile] = LineFile,
    ) -> None:
        self.path = path
        try:
            written = path.read_bytes() if path.exists() else b""
            whole = written.rfind(b"\n") + 1
            if whole:
                existing = _parse(_HEADER, written[: written.index(b"\n")], path, 1)
                if differs := _difference(existing, header):
                    of_another = f"{path} is the ledger of another run ({differs})"
                    raise LedgerError(f"{of_another}: move it away")
            if whole < len(written):
                os.truncate(path, whole)
        except OSError as error:
            raise LedgerError(f"can't read the ledger {path}: {error.strerror}") from error
        self.file = open_file(path)
        if not whole:
            self.append(header)

    def append(self, line: LedgerHeader | Line) -> None:
        """Write a line to the operating system, or queue it in memory (`file.waiting`)."""
        self.file.append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self.file.close()


class Merged(NamedTuple):
    header: LedgerHeader
    lines: list[Line]  # one a step, by step
    superseded: int  # lines replaced by another one of the same step


def merge(paths: Iterable[Path]) -> Merged:
    """Join ledgers of the same run. The header is that of the newest settings.

    A step is in the ledgers of all stage-0 nodes: lines that differ only in `time` are one. Of
    different lines for a step the one with the highest (view, attempt) counts: a partitioned driver
    committed the other without effect. A step doesn't count if its commit is older than that of an
    earlier step: the run went back, and hasn't reached it again. An incomplete last line is
    ignored, even if it is the header. Raises LedgerError for damaged lines, and for headers that
    disagree. It also raises it for two commits of a step with the same (view, attempt), which the
    step transaction rules out.
    """
    paths = list(paths)
    header = _common_header(paths)
    choice = _choose(paths, lambda line: line)
    for chosen in choice.steps:
        chosen.kept["time"] = chosen.time
    return Merged(header, [chosen.kept for chosen in choice.steps], choice.superseded)


def _common_header(paths: Sequence[Path]) -> LedgerHeader:
    """The newest header of the ledgers, with the number of steps from those that have it. Only that
    of a node that crashed as it began may lack one."""
    headers = {path: header for path in paths if (header := _read_header(path)) is not None}
    if not headers:
        raise LedgerError(
            f"{' and '.join(map(str, paths))} has no header: it is no ledger, move it away"
        )
    first, newest = max(
        headers.items(), key=lambda of: (of[1].get("changes", 0), of[1].get("steps", 0))
    )
    for path, header in headers.items():
        if differs := _difference(newest, header):
            raise LedgerError(
                f"{first} and {path} are ledgers of different runs ({differs}): keep those of "
                "one run"
            )
    return newest


@dataclass
class _Chosen(Generic[Kept]):
    """The line of a step that counts, so far."""

    ballot: tuple[int, int]
    digest: bytes  # of all but its time and its commit
    hash: str  # of the commit; empty: the line has none
    time: float
    kept: Kept

    def is_of(self, digest: bytes, hash: str) -> bool:
        """Whether another line is of the same commit, which one of them may lack."""
        return self.digest == digest and (self.hash == hash or "" in (self.hash, hash))


@dataclass
class _Choice(Generic[Kept]):
    """The lines that count, from all ledgers."""

    steps: list[_Chosen[Kept]]
    superseded: int
    last: int  # step of any line


def _choose(paths: Iterable[Path], keep: Callable[[Line], Kept]) -> _Choice[Kept]:
    """Apply `keep` to the line of each step that counts. Raises LedgerError as `merge` does."""
    steps: dict[int, _Chosen[Kept]] = {}
    superseded = 0
    for path in paths:
        for line in _lines(path):
            step, ballot = line["step"], (line["view"], line["attempt"])
            digest, hash = _digest(line), line.get("hash", "")
            other = steps.get(step)
            if other is not None and other.is_of(digest, hash):
                other.time = min(other.time, line["time"])
                if hash and not other.hash:
                    other.kept, other.hash = keep(line), hash
                continue
            superseded += other is not None
            if other is not None and other.ballot == ballot:
                raise LedgerError(
                    f"{path} has another commit of step {step} in view {line['view']}, attempt "
                    f"{line['attempt']} than the ledgers before it: nodes disagreed about this "
                    "step, don't trust this run's weights"
                )
            if other is None or ballot > other.ballot:
                steps[step] = _Chosen(ballot, digest, hash, line["time"], keep(line))
    remaining: list[_Chosen[Kept]] = []  # by step: those that no rollback has removed
    for _, chosen in sorted(steps.items()):
        if not remaining or chosen.ballot >= remaining[-1].ballot:
            remaining.append(chosen)
    superseded += len(steps) - len(remaining)
    return _Choice(remaining, superseded, max(steps, default=0))


def _digest(line: Line) -> bytes:
    figures = {key: value for key, value in line.items() if key not in OF_COMMIT}
    return xxhash.xxh3_128_digest(json.dumps({**figures, "time": 0}, sort_keys=True).encode())


def _difference(first: LedgerHeader, second: LedgerHeader) -> str:
    """Differences of two runs' headers, but for what a change of settings may change."""
    ours: dict[str, object] = {**first}
    theirs: dict[str, object] = {**second}
    as_often = ours.get("changes") == theirs.get("changes")
    free = {"steps"} if as_often else {"steps", "changes", "batch", "microbatch", "earlier"}
    pairs = [(key, ours.get(key), theirs.get(key)) for key in ours | theirs if key not in free]
    return ", ".join(f"{key}: {our!r} and {their!r}" for key, our, their in pairs if our != their)


def _read_header(path: Path) -> LedgerHeader | None:
    """A ledger's header; None: it has no complete line."""
    for _, row in _rows(path):
        return _parse(_HEADER, row, path, 1)
    return None


def _lines(path: Path) -> Iterator[Line]:
    for number, row in _rows(path):
        if number > 1:
            line = _parse(_LINE, row, path, number)
            _check_sums(line, path, number)
            _check_commit(line, path, number)
            yield line


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """A ledger's complete lines, numbered, one at a time in memory; an incomplete last line is
    ignored. Raises LedgerError."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                row = file.readline(MOST_LINE)
                if len(row) == MOST_LINE and not row.endswith(b"\n"):
                    raise LedgerError(
                        f"{path}, line {number} is damaged: it is longer than {MOST_LINE} bytes"
                    )
                if not row.endswith(b"\n"):
                    return
                yield number, row
    except OSError as error:
        raise LedgerError(f"can't read the ledger {path}: {error.strerror}") from error


def _check_sums(line: Line, path: Path, number: int) -> None:
    samples = sum(count for _, count, _ in line["microbatches"])
    if (line["samples"], line["samples_hash"]) != (samples, _joint_hash(line["microbatches"])):
        raise LedgerError(
            f"{path}, line {number} is damaged: samples or samples_hash contradict microbatches"
        )


def _check_commit(written: Line, path: Path, number: int) -> None:
    """Check a line against its signed commit, if it has one."""
    if written.keys().isdisjoint(OF_COMMIT):
        return
    try:
        commit = stage_pb2.Commit.FromString(
            base64.b64decode(written.get("commit", ""), validate=True)
        )
    except (ValueError, DecodeError) as error:
        raise LedgerError(f"{path}, line {number} is damaged: commit: {error}") from error
    if commit.records and hash_of_records(commit.microbatches) != commit.records:
        raise LedgerError(
            f"{path}, line {number} was changed: its microbatches aren't those of the commit of "
            f"step {commit.step}; {ELSEWHERE}"
        )
    expected: dict[str, object] = {**ledger_line(commit, written["epoch"], written["time"])}
    actual: dict[str, object] = {**written}
    for key in expected | actual:
        if actual.get(key) != expected.get(key):
            raise LedgerError(
                f"{path}, line {number} was changed: {key} is {_shown(actual.get(key))}, and "
                f"{_shown(expected.get(key))} in the commit of step {commit.step}; {ELSEWHERE}"
            )


def _shown(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


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
    """Result of an audit, in samples, except `steps`, `superseded` lines and `planned` steps.

    `expected` samples are those of the windows of steps 1 to the last committed one.
    """

    expected: int
    duplicates: int
    missing: int
    extra: int
    steps: int
    superseded: int
    planned: int = 0  # of the whole run; 0: unknown
    cut: tuple[str, ...] = ()  # problems at the ledgers' ends, in sentences
    chained: int = 0  # steps whose commit names the preceding one
    unchained: tuple[str, ...] = ()  # commits that name another predecessor, in sentences

    @property
    def exact(self) -> bool:
        return self.duplicates == self.missing == self.extra == 0 and not self.unchained


def audit(directory: Path) -> Audit:
    """Compare the ledgers in `directory` with the windows by (seed, step).

    Reads `ledger.jsonl`, or else every `ledger-*.jsonl` there or, during a run, in `logs`; some 400
    bytes of each step are in memory. `summary.json` has the expected number of steps. Raises
    LedgerError.
    """
    paths = _ledgers_in(directory)
    if not paths:
        raise LedgerError(
            f"there is no ledger in {directory}, neither {MERGED} nor ledger-*.jsonl: "
            "name the folder that a run wrote with --out"
        )
    header = _common_header(paths)
    choice = _choose(paths, _examining(header))
    examined = [chosen.kept for chosen in choice.steps]
    last = examined[-1].step if examined else 0
    cut = [*filter(None, map(_half_line, paths))]
    if choice.last < (summarized := _summarized(directory)):
        last = summarized
        cut.append(
            f"the ledger ends with step {choice.last}, and summary.json has {last} steps: "
            "its end is missing"
        )
    return _audit(header, examined, choice.superseded, last, tuple(cut))


def _ledgers_in(directory: Path) -> list[Path]:
    """Ledgers in a run's folder, except empty ones of nodes that wrote nothing."""
    if (merged := directory / MERGED).is_file():
        return [merged]
    each = (sorted(place.glob("ledger-*.jsonl")) for place in (directory, directory / "logs"))
    return [path for path in next(filter(None, each), []) if path.stat().st_size]


def audit_merged(merged: Merged) -> Audit:
    """The audit of merged ledgers. Raises LedgerError for a header without windows."""
    examined = [*map(_examining(merged.header), merged.lines)]
    last = max((line["step"] for line in merged.lines), default=0)
    return _audit(merged.header, examined, merged.superseded, last, ())


def _audit(
    header: LedgerHeader,
    examined: Sequence[_ExaminedStep],
    superseded: int,
    last: int,
    cut: tuple[str, ...],
) -> Audit:
    chained, broken = _chain(examined)
    batches = _batches_in(header)
    committed = sum(batches.at_step(step.step).samples for step in examined)
    return Audit(
        expected=batches.samples_until(last),
        duplicates=sum(step.duplicates for step in examined),
        missing=sum(step.missing for step in examined) + batches.samples_until(last) - committed,
        extra=sum(step.extra for step in examined),
        steps=len(examined),
        superseded=superseded,
        planned=header.get("steps", 0),
        cut=cut,
        chained=chained,
        unchained=tuple(broken),
    )


def _summarized(directory: Path) -> int:
    """Number of steps in the run's summary; 0: unknown."""
    try:
        with (directory / "summary.json").open("rb") as file:
            summary = json.loads(file.read(MOST_LINE))
    except (OSError, ValueError, RecursionError):
        return 0
    steps = summary.get("steps") if isinstance(summary, dict) else 0
    return steps if isinstance(steps, int) and 0 < steps <= MOST_STEPS else 0


def _half_line(path: Path) -> str:
    """Warning of a ledger's incomplete last line; empty: it is complete."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return ""
        file.seek(-1, os.SEEK_END)
        whole = file.read(1) == b"\n"
    return "" if whole else f"the last line of {path} is cut off: it is not counted"


class _ExaminedStep(NamedTuple):
    """A step's numbers of duplicate, missing and unplanned samples, and its link of the chain."""

    duplicates: int
    missing: int
    extra: int
    step: int
    lineage: int
    hash: str  # of the commit; empty: the line has none
    previous: str


def _chain(examined: Iterable[_ExaminedStep]) -> tuple[int, list[str]]:
    """Number of commits that name the preceding one, and sentences on those that name another. A
    lineage's first commit has no predecessor; gaps are not checked."""
    chained = 0
    broken: list[str] = []
    for last, link in itertools.pairwise(examined):
        if not last.hash or last.step + 1 != link.step:
            continue
        if link.hash and link.lineage != last.lineage:
            continue
        if link.previous == last.hash:
            chained += 1
        elif len(broken) < MOST_BROKEN:
            broken.append(
                f"the commit of step {link.step} names another predecessor than the ledger's "
                f"step {last.step}: the ledger was changed, compare it with other nodes' ledgers"
            )
    return chained, broken


def _examining(header: LedgerHeader) -> Callable[[Line], _ExaminedStep]:
    """Function that examines a line. Raises LedgerError for a header without windows."""
    from planaria.node.data.windows import microbatch_ids, samples_hash  # with numpy

    windows = windows_in(header)

    def examine(line: Line) -> _ExaminedStep:
        step = line["step"]
        ids, size = windows.ids(step), windows.batches.at_step(step).microbatch
        parts = [microbatch_ids(ids, number, size) for number in range(-(-len(ids) // size))]
        return _compare(line, [(len(part), samples_hash(part).hex()) for part in parts])

    return examine


def header_of(run: RunFile, context: int, content: str, shares: Sequence[Share]) -> LedgerHeader:
    """The header of a run's ledgers; `shares`: of its corpora."""
    training = run.training
    header: LedgerHeader = {
        "ledger": 1,
        "run": run.name,
        "seed": run.seed,
        "samples": sum(share.samples for share in shares),
        "batch": training.batch,
        "microbatch": training.microbatch,
        "context": context,
        "content": content,
        "steps": run.steps,
    }
    if run.changes:
        header["changes"], header["earlier"] = len(run.changes), [*run.batches.earlier]
    if len(shares) > 1:
        header["mixture"] = [(share.samples, share.turns) for share in shares]
    return header


def _batches_in(header: LedgerHeader) -> Batches:
    earlier = itertools.starmap(Batch, header.get("earlier", ()))
    return Batches(header["batch"], header["microbatch"], tuple(earlier))


def windows_in(header: LedgerHeader) -> Windows:
    """The windows of a ledger's run. Raises LedgerError for a header that has none."""
    from planaria.node.data.windows import Windows  # with numpy

    shares = [Share(*share) for share in header.get("mixture", [(header["samples"], 1)])]
    try:
        if sum(share.samples for share in shares) != header["samples"]:
            raise ValueError(f"its corpora don't have {header['samples']} samples in total")
        return Windows(header["seed"], shares, _batches_in(header))
    except ValueError as error:
        raise LedgerError(f"the ledger's header is damaged: {error}") from error


def _compare(line: Line, planned: Sequence[tuple[int, str]]) -> _ExaminedStep:
    """Compares a committed step with its planned microbatches: (samples, hash)."""
    expected = dict(enumerate(planned))
    seen: set[int] = set()
    duplicates = extra = 0
    for number, count, digest in line["microbatches"]:
        if expected.get(number) != (count, digest):
            extra += count
        elif number in seen:
            duplicates += count
        else:
            seen.add(number)
    missing = sum(count for number, (count, _) in expected.items() if number not in seen)
    step, lineage = line["step"], line.get("lineage", 0)
    hash, previous = line.get("hash", ""), line.get("previous", "")
    return _ExaminedStep(duplicates, missing, extra, step, lineage, hash, previous)
