import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from planaria.node.data.windows import Windows, microbatch_ids, samples_hash
from planaria.node.report.ledger import (
    Audit,
    Ledger,
    LedgerError,
    LedgerHeader,
    Line,
    audit,
    line,
    merge,
)
from planaria.node.wire import stage_pb2

HEADER = LedgerHeader(
    ledger=1, run="demo", seed=3, samples=50, batch=12, microbatch=4, context=64, content="c0ffee"
)
WINDOWS = Windows(seed=3, samples=50, batch=12)


def committed(step: int, view: int = 1, attempt: int = 1, time: float = 5.0) -> Line:
    ids = WINDOWS.ids(step)
    parts = [(i, microbatch_ids(ids, i, 4)) for i in (2, 0, 1)]  # they come home in any order
    commit = stage_pb2.Commit(
        step=step,
        ballot=stage_pb2.Ballot(view=view, attempt=attempt),
        loss=3.5,
        tokens=12 * 64,
        gradient_norm=0.5,
        seconds=0.25,
        microbatches=[
            stage_pb2.Home(microbatch=i, samples=len(part), samples_hash=samples_hash(part))
            for i, part in parts
        ],
    )
    return line(commit, WINDOWS.epoch(step), time)


def changed(original: Line, microbatches: list[tuple[int, int, str]]) -> Line:
    """A line with other microbatches, whose own sums are right."""
    digests = b"".join(bytes.fromhex(digest) for _, _, digest in microbatches)
    fields: dict[str, Any] = dict(original)
    fields["microbatches"] = microbatches
    fields["samples"] = sum(count for _, count, _ in microbatches)
    fields["samples_hash"] = xxhash.xxh3_128_hexdigest(digests)
    return fields  # type: ignore[return-value]


def write(path: Path, *lines: Line, header: LedgerHeader = HEADER) -> Path:
    with Ledger(path, header) as ledger:
        for each in lines:
            ledger.append(each)
    return path


def test_a_line_holds_the_record_of_the_commit() -> None:
    found = committed(7, view=2, attempt=5)
    assert [number for number, _, _ in found["microbatches"]] == [0, 1, 2]
    assert (found["step"], found["view"], found["attempt"], found["epoch"]) == (7, 2, 5, 1)
    assert (found["samples"], found["tokens"], found["loss"]) == (12, 768, 3.5)


def test_what_json_can_not_say_is_null(tmp_path: Path) -> None:
    commit = stage_pb2.Commit(step=1, skipped=True, loss=math.nan, gradient_norm=math.inf)
    path = write(tmp_path / "ledger.jsonl", line(commit, 0, 1.0))
    found = json.loads(path.read_text().splitlines()[1])
    assert (found["loss"], found["gradient_norm"], found["skipped"]) == (None, None, True)
    assert merge([path]).lines == [line(commit, 0, 1.0)]


def test_lines_are_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    with Ledger(path, HEADER) as ledger:
        assert merge([path]).header == HEADER
        ledger.append(committed(1))
        assert merge([path]).lines == [committed(1)]


def test_a_half_written_line_is_dropped(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", committed(1), committed(2)).read_bytes()
    one = write(tmp_path / "one", committed(1)).read_bytes()
    path = tmp_path / "ledger-n.jsonl"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        if length > len(one):  # the crash of a writer does not stop the audit either
            assert audit(tmp_path).steps == 1
        Ledger(path, HEADER).close()
        found = path.read_bytes()
        assert whole.startswith(found)
        assert found.count(b"\n") == max(1, whole[:length].count(b"\n"))
    with Ledger(path, HEADER) as ledger:
        ledger.append(committed(2))
    assert path.read_bytes() == whole


def test_a_ledger_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", committed(1))
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"another run .seed: 3 and 4.: move it away"):
        Ledger(path, LedgerHeader(**{**HEADER, "seed": 4}))
    with pytest.raises(LedgerError, match="can't read the ledger"):
        Ledger(path.parent, HEADER)
    with Ledger(path / "below", HEADER) as ledger:
        assert "can't write" in ledger.file.trouble
    assert path.read_bytes() == before


def test_ledgers_of_several_nodes_are_joined(tmp_path: Path) -> None:
    # The driver a was cut off after committing step 3 and never seen again.
    a = write(tmp_path / "ledger-a.jsonl", *(committed(s, time=s) for s in (1, 2, 3)))
    b = write(
        tmp_path / "ledger-b.jsonl",
        *(committed(s, time=s + 0.5) for s in (1, 2)),
        committed(3, view=2, attempt=4),
    )
    c = write(tmp_path / "ledger-c.jsonl", committed(3, view=2, attempt=4), committed(4, view=2))
    for paths in ([a, b, c], [c, b, a]):
        header, lines, superseded = merge(paths)
        assert header == HEADER
        assert [(each["step"], each["view"]) for each in lines] == [(1, 1), (2, 1), (3, 2), (4, 2)]
        assert [each["time"] for each in lines[:2]] == [1, 2]
        assert superseded == 1
    assert audit(tmp_path) == Audit(48, 0, 0, 0, steps=4, superseded=1)


def test_a_merged_ledger_is_audited_alone(tmp_path: Path) -> None:
    write(tmp_path / "ledger-a.jsonl", committed(1))
    write(tmp_path / "ledger.jsonl", committed(1), committed(2))
    assert audit(tmp_path) == Audit(24, 0, 0, 0, steps=2, superseded=0)


def test_different_commits_of_one_attempt_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "ledger-a.jsonl", committed(1))
    other = committed(1)
    other["loss"] = 3.25
    write(tmp_path / "ledger-b.jsonl", other)
    with pytest.raises(LedgerError, match=r"b\.jsonl has another commit of step 1 in view 1, att"):
        audit(tmp_path)


Microbatches = list[tuple[int, int, str]]
FOREIGN = "0" * 32


@pytest.mark.parametrize(
    ("change", "duplicates", "missing", "extra"),
    [
        (lambda m: m, 0, 0, 0),
        (lambda m: m[:2], 0, 4, 0),
        (lambda m: [], 0, 12, 0),
        (lambda m: [*m, m[1]], 4, 0, 0),
        (lambda m: [m[0], m[1], m[1]], 4, 4, 0),
        (lambda m: [*m, (3, 2, FOREIGN)], 0, 0, 2),
        (lambda m: [m[0], m[1], (2, 4, FOREIGN)], 0, 4, 4),
        (lambda m: [m[0], m[1], (2, 3, m[2][2])], 0, 4, 3),
        (lambda m: [m[0], (1, 4, m[2][2]), (2, 4, m[1][2])], 0, 8, 8),
    ],
)
def test_what_is_wrong_with_a_step_is_counted_in_samples(
    tmp_path: Path,
    change: Callable[[Microbatches], Microbatches],
    duplicates: int,
    missing: int,
    extra: int,
) -> None:
    wrong = changed(committed(2), change(committed(2)["microbatches"]))
    write(tmp_path / "ledger.jsonl", committed(1), wrong, committed(3))
    found = audit(tmp_path)
    assert found == Audit(36, duplicates, missing, extra, steps=3, superseded=0)
    assert found.exact == (duplicates == missing == extra == 0)


def test_missing_steps_and_other_windows_are_found(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", committed(2), committed(5))
    assert audit(tmp_path) == Audit(60, 0, 36, 0, steps=2, superseded=0)
    repeated = changed(committed(4), committed(3)["microbatches"])
    (tmp_path / "ledger.jsonl").unlink()
    write(tmp_path / "ledger.jsonl", *(committed(s) for s in (1, 2, 3)), repeated)
    assert audit(tmp_path) == Audit(48, 0, 12, 12, steps=4, superseded=0)


def test_a_run_without_a_commit_has_nothing_wrong(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl")
    assert audit(tmp_path) == Audit(0, 0, 0, 0, steps=0, superseded=0)


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        ('"step": 2', '"step": "two"', r"ledger\.jsonl, line 3 is damaged: step: "),
        ('"step": 2', '"step": 0', r"line 3 is damaged: step: "),
        ('{"step": 2', '"step": 2', r"line 3 is damaged: Invalid JSON"),
        ('"tokens": ', '"other": ', r"line [23] is damaged: tokens: Field required"),
        ('"samples": 12', '"samples": 13', r"line 2 is damaged: samples or samples_hash"),
        ('"seed": 3', '"seed": null', r"line 1 is damaged: seed: "),
        ('"ledger": 1', '"ledger": 2', r"line 1 is damaged: ledger: "),
        ('"batch": 12', '"batch": 0', r"header is damaged: no windows for seed 3, 50 samples, ba"),
    ],
)
def test_damage_is_named_by_file_and_line(
    tmp_path: Path, find: str, replace: str, message: str
) -> None:
    path = write(tmp_path / "ledger.jsonl", committed(1), committed(2))
    text = path.read_text()
    assert find in text
    path.write_text(text.replace(find, replace))
    with pytest.raises(LedgerError, match=message):
        audit(tmp_path)


def test_there_must_be_ledgers_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger in .*neither ledger\.jsonl nor"):
        audit(tmp_path)
    with pytest.raises(LedgerError, match="no ledger in"):
        audit(tmp_path / "nowhere")
    write(tmp_path / "ledger-a.jsonl")
    write(tmp_path / "ledger-b.jsonl", header=LedgerHeader(**{**HEADER, "content": "bad"}))
    with pytest.raises(LedgerError, match=r"different runs .content: 'c0ffee' and 'bad'"):
        audit(tmp_path)
    (tmp_path / "ledger-a.jsonl").write_bytes(b"")
    with pytest.raises(LedgerError, match=r"ledger-a\.jsonl has no header"):
        audit(tmp_path)
