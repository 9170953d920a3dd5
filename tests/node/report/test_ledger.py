import json
import math
import re
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.batches import Batches
from planaria.node.data.mixture_cycle import Share
from planaria.node.data.windows import Windows, microbatch_ids, samples_hash
from planaria.node.report import ledger as module
from planaria.node.report.ledger import (
    Audit,
    Ledger,
    LedgerError,
    LedgerHeader,
    Line,
    audit,
    audit_merged,
    ledger_line,
    merge,
    windows_in,
)
from planaria.node.wire import stage_pb2
from planaria.node.wire.commit_chain import hash_of, hash_of_records

HEADER = LedgerHeader(
    ledger=1, run="demo", seed=3, samples=50, batch=12, microbatch=4, context=64, content="c0ffee"
)
WINDOWS = Windows(3, [Share(50, 1)], Batches(12, 4))


def commit(
    step: int, view: int = 1, attempt: int = 1, windows: Windows = WINDOWS
) -> stage_pb2.Commit:
    ids, size = windows.ids(step), windows.batches.at_step(step).microbatch
    parts = [(i, microbatch_ids(ids, i, size)) for i in (2, 0, 1)]  # they come home in any order
    return stage_pb2.Commit(
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


def committed(
    step: int, view: int = 1, attempt: int = 1, time: float = 5.0, windows: Windows = WINDOWS
) -> Line:
    """Return a line without the commit itself, which isn't signed."""
    return ledger_line(commit(step, view, attempt, windows), windows.epoch(step), time)


def chained(steps: int, lineage: int = 0, view: int = 1, after: int = 0) -> list[Line]:
    """Return lines of a lineage with signed commits, each of which names the one before."""
    lines, previous = [], b""
    for step in range(after + 1, after + steps + 1):
        made = commit(step, view)
        made.lineage, made.previous, made.signature = lineage, previous, b"signed"
        lines.append(ledger_line(made, WINDOWS.epoch(step), 5.0))
        previous = hash_of(made)
    return lines


def changed(original: Line, microbatches: list[tuple[int, int, str]]) -> Line:
    """Return a line with other microbatches, and with the sums that follow from them."""
    digests = b"".join(bytes.fromhex(digest) for _, _, digest in microbatches)
    fields: dict[str, Any] = dict(original)
    fields["microbatches"] = microbatches
    fields["samples"] = sum(count for _, count, _ in microbatches)
    fields["samples_hash"] = xxhash.xxh3_128_hexdigest(digests)
    return fields  # type: ignore[return-value]


def write(path: Path, *lines: Line, header: LedgerHeader = HEADER) -> Path:
    with closing(Ledger(path, header)) as ledger:
        for each in lines:
            ledger.append(each)
    return path


def test_a_line_holds_the_record_of_the_commit() -> None:
    result = committed(7, view=2, attempt=5)
    assert [number for number, _, _ in result["microbatches"]] == [0, 1, 2]
    assert (result["step"], result["view"], result["attempt"], result["epoch"]) == (7, 2, 5, 1)
    assert (result["samples"], result["tokens"], result["loss"]) == (12, 768, 3.5)


def test_ledgers_before_and_behind_a_change_of_the_batch_are_one(tmp_path: Path) -> None:
    """The run had committed step 4 when it ended, and its saves were of step 2."""
    header = HEADER | LedgerHeader(batch=24, microbatch=8, changes=1, earlier=[(2, 12, 4)])  # type: ignore[typeddict-item]
    changed = windows_in(header)
    behind = [committed(step, view=2, windows=changed) for step in (3, 4, 5)]
    paths = [
        write(tmp_path / "ledger-b.jsonl", *behind, header=header),
        write(tmp_path / "ledger-a.jsonl", *map(committed, (1, 2, 3, 4))),
    ]
    merged = merge(paths)
    assert (merged.header, len(merged.lines)) == (header, 5)
    result = Audit(2 * 12 + 3 * 24, 0, 0, 0, steps=5, superseded=2)
    assert audit_merged(merged) == result == audit(tmp_path)
    paths[1].unlink()
    assert audit(tmp_path).missing == 24
    write(tmp_path / "ledger-c.jsonl", committed(9), header=header | LedgerHeader(batch=12))  # type: ignore[typeddict-item]
    with pytest.raises(LedgerError, match=r"different runs \(batch: 24 and 12"):
        audit(tmp_path)


def test_what_json_can_not_say_is_null(tmp_path: Path) -> None:
    skipped = stage_pb2.Commit(step=1, skipped=True, loss=math.nan, gradient_norm=math.inf)
    path = write(tmp_path / "ledger.jsonl", ledger_line(skipped, 0, 1.0))
    result = json.loads(path.read_text().splitlines()[1])
    assert (result["loss"], result["gradient_norm"], result["skipped"]) == (None, None, True)
    assert merge([path]).lines == [ledger_line(skipped, 0, 1.0)]


def test_lines_are_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    with closing(Ledger(path, HEADER)) as ledger:
        assert merge([path]).header == HEADER
        ledger.append(committed(1))
        assert merge([path]).lines == [committed(1)]


def test_a_half_written_line_is_dropped(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", committed(1), committed(2)).read_bytes()
    path = tmp_path / "ledger-n.jsonl"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        Ledger(path, HEADER).close()
        result = path.read_bytes()
        assert whole.startswith(result)
        assert result.count(b"\n") == max(1, whole[:length].count(b"\n"))
    with closing(Ledger(path, HEADER)) as ledger:
        ledger.append(committed(2))
    assert path.read_bytes() == whole


def test_a_ledger_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", committed(1))
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"another run .seed: 3 and 4.: move it away"):
        Ledger(path, LedgerHeader(**{**HEADER, "seed": 4}))
    with pytest.raises(LedgerError, match="can't read the ledger"):
        Ledger(path.parent, HEADER)
    with closing(Ledger(path / "below", HEADER)) as ledger:
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
    c = write(tmp_path / "ledger-c.jsonl", *(committed(s, view=2, attempt=s + 1) for s in (3, 4)))
    for paths in ([a, b, c], [c, b, a]):
        header, lines, superseded = merge(paths)
        assert header == HEADER
        assert [(each["step"], each["view"]) for each in lines] == [(1, 1), (2, 1), (3, 2), (4, 2)]
        assert [each["time"] for each in lines[:2]] == [1, 2]
        assert superseded == 1
    assert audit(tmp_path) == Audit(48, 0, 0, 0, steps=4, superseded=1)


def test_a_run_that_goes_back_and_ends_before_it_has_come_as_far_again_ends_there(
    tmp_path: Path,
) -> None:
    first = write(tmp_path / "ledger-a.jsonl", *map(committed, (1, 2, 3, 4, 5)))
    again = write(tmp_path / "ledger-b.jsonl", *(committed(step, view=2) for step in (3, 4)))
    assert audit(tmp_path) == Audit(48, 0, 0, 0, steps=4, superseded=3)
    _, lines, superseded = merge([first, again])
    assert [(line["step"], line["view"]) for line in lines] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert superseded == 3


def test_a_merged_ledger_is_audited_alone(tmp_path: Path) -> None:
    write(tmp_path / "ledger-a.jsonl", committed(1))
    write(tmp_path / "ledger.jsonl", committed(1), committed(2))
    assert audit(tmp_path) == Audit(24, 0, 0, 0, steps=2, superseded=0)


def test_the_ledgers_of_a_run_that_has_not_ended_are_in_its_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "ledger-a.jsonl", committed(1), committed(2))
    (tmp_path / "logs" / "ledger-b.jsonl").touch()
    assert audit(tmp_path) == Audit(24, 0, 0, 0, steps=2, superseded=0)


def test_a_mixture_is_audited_by_its_shares(tmp_path: Path) -> None:
    mixture = [(20, 2), (30, 1)]
    header: LedgerHeader = {**HEADER, "mixture": mixture}
    windows = windows_in(header)
    lines = [committed(step, windows=windows) for step in range(1, 6)]
    path = write(tmp_path / "ledger-a.jsonl", *lines, header=header)
    assert audit(tmp_path).exact
    text = path.read_text().replace("[[20, 2], [30, 1]]", "[[20, 1], [30, 1]]")
    path.write_text(text)
    assert audit(tmp_path).missing
    path.write_text(text.replace("[[20, 1], [30, 1]]", "[[20, 1], [31, 1]]"))
    with pytest.raises(LedgerError, match="don't have 50 samples in total"):
        audit(tmp_path)


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
    result = audit(tmp_path)
    assert result == Audit(36, duplicates, missing, extra, steps=3, superseded=0)
    assert result.exact == (duplicates == missing == extra == 0)


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


# The chain of commits


def test_the_commits_of_a_ledger_are_a_chain_and_of_old_ones_nothing_is_known(
    tmp_path: Path,
) -> None:
    first, went_back = chained(4), chained(3, lineage=1, view=2, after=2)
    write(tmp_path / "ledger-a.jsonl", *map(committed, (1, 2)), *chained(2, after=2))
    assert (audit(tmp_path).chained, audit(tmp_path).exact) == (1, True)
    (tmp_path / "ledger-a.jsonl").unlink()
    write(tmp_path / "ledger-a.jsonl", *first)
    write(tmp_path / "ledger-b.jsonl", *first[:2], *went_back)
    result = audit(tmp_path)
    assert (result.steps, result.superseded, result.exact) == (5, 2, True)
    assert result.chained == 3, "of steps 2, 4 and 5: step 3 is the first after it went back"
    merged = merge(sorted(tmp_path.glob("*.jsonl")))
    assert audit_merged(merged).chained == 3


@pytest.mark.parametrize(
    ("find", "replace", "expected"),
    [
        ('"loss": 3.5', '"loss": 2.5', r"loss is 2\.5, and 3\.5 in the commit of step 1"),
        ('"tokens": 768', '"tokens": 1', "tokens is 1, and 768 in"),
        ('"lineage": 0, ', "", "lineage is nothing, and 0 in"),
        ('"previous": ""', f'"previous": "{"0" * 64}"', "previous is 000"),
        ('"step": 1,', '"step": 3,', "step is 3, and 1 in"),
    ],
)
def test_a_line_that_was_changed_is_named(
    tmp_path: Path, find: str, replace: str, expected: str
) -> None:
    path = write(tmp_path / "ledger.jsonl", *chained(2))
    rows = path.read_text().splitlines(keepends=True)
    assert find in rows[1]
    path.write_text(rows[0] + rows[1].replace(find, replace, 1) + rows[2])
    with pytest.raises(LedgerError, match=rf"ledger\.jsonl, line 2 was changed: {expected}"):
        audit(tmp_path)


def test_records_that_were_changed_in_line_and_commit_are_found_by_their_hash(
    tmp_path: Path,
) -> None:
    made = commit(1)
    made.records, made.signature = hash_of_records(made.microbatches), b"signed"
    path = write(tmp_path / "ledger.jsonl", ledger_line(made, 0, 5.0))
    assert audit(tmp_path).steps == 1
    path.unlink()
    made.microbatches[0].samples_hash = made.microbatches[1].samples_hash
    changed = ledger_line(made, 0, 5.0)
    assert changed["hash"] == hash_of(made).hex()
    write(path, changed)
    why = r"line 2 was changed: its microbatches aren't those of the commit of step 1"
    with pytest.raises(LedgerError, match=why):
        audit(tmp_path)


def test_a_commit_that_was_made_up_is_found_by_the_next_one(tmp_path: Path) -> None:
    lines, other = chained(3), commit(2)
    other.loss, other.signature = 9.0, b"signed"
    other.previous = bytes.fromhex(lines[0]["hash"])
    write(tmp_path / "ledger.jsonl", lines[0], ledger_line(other, 0, 5.0), lines[2])
    result = audit(tmp_path)
    assert (result.chained, result.exact) == (1, False)
    (sentence,) = result.unchained
    assert sentence.startswith("the commit of step 3 names another predecessor than")
    command = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert command.exit_code == 1 and sentence in command.output


def test_a_line_without_its_commit_among_others_is_found(tmp_path: Path) -> None:
    lines = chained(3)
    write(tmp_path / "ledger.jsonl", lines[0], committed(2), lines[2])
    assert not audit(tmp_path).exact


def test_a_commit_is_the_same_where_a_ledger_has_only_its_figures(tmp_path: Path) -> None:
    """A ledger has figures alone after saves were regrouped for other stages."""
    lines = chained(3)
    write(tmp_path / "ledger-a.jsonl", committed(2), *chained(1, lineage=1, view=2, after=2))
    write(tmp_path / "ledger-b.jsonl", *lines[:2])
    result = audit(tmp_path)
    assert (result.steps, result.superseded, result.chained, result.exact) == (3, 0, 1, True)
    assert merge(sorted(tmp_path.glob("*.jsonl"))).lines[1] == lines[1]


def test_two_commits_with_the_same_figures_are_two(tmp_path: Path) -> None:
    other = commit(1)
    other.clip_scale.append(0.5)
    other.signature = b"signed"
    write(tmp_path / "ledger-a.jsonl", *chained(1))
    write(tmp_path / "ledger-b.jsonl", ledger_line(other, 0, 5.0))
    with pytest.raises(LedgerError, match="another commit of step 1 in view 1, attempt 1"):
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


def test_a_ledger_that_was_cut_off_in_its_header_has_nothing_to_count(tmp_path: Path) -> None:
    whole, cut = write(tmp_path / "ledger-b.jsonl", committed(1)), tmp_path / "ledger-a.jsonl"
    cut.write_bytes(b"{")
    assert merge([cut, whole]) == merge([whole])
    assert (result := audit(tmp_path)).exact
    assert result.cut == (f"the last line of {cut} is cut off: it is not counted",)


def test_an_empty_ledger_of_a_node_whose_disk_was_full_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "ledger-a.jsonl").touch()
    with pytest.raises(LedgerError, match="no ledger in"):
        audit(tmp_path)
    write(tmp_path / "ledger-b.jsonl", committed(1))
    assert audit(tmp_path) == Audit(12, 0, 0, 0, steps=1, superseded=0)


# Ledgers of any contents


def test_the_end_that_is_cut_off_is_said(tmp_path: Path) -> None:
    header = LedgerHeader(**HEADER, steps=9)
    path = write(tmp_path / "ledger.jsonl", *map(committed, (1, 2, 3)), header=header)
    assert audit(tmp_path) == Audit(36, 0, 0, 0, steps=3, superseded=0, planned=9)
    (tmp_path / "summary.json").write_text('{"steps": 5}')
    result = audit(tmp_path)
    assert (result.expected, result.missing, result.exact) == (60, 24, False)
    command = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert command.exit_code == 1
    for name, count in (("expected", 60), ("missing", 24), ("extra", 0)):
        assert re.search(rf"{name} +│ +{count} │", command.output)
    assert result.cut == (
        "the ledger ends with step 3, and summary.json has 5 steps: its end is missing",
    )
    (tmp_path / "summary.json").write_text("[")
    path.write_bytes(path.read_bytes()[:-1])
    result = audit(tmp_path)
    assert (result.steps, result.exact) == (2, True)
    assert result.cut == (f"the last line of {path} is cut off: it is not counted",)
    command = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert command.exit_code == 0
    assert "2 committed steps of 9" in command.output
    assert "is cut off: it is not counted" in command.output
    assert "steps 3 to 9 are missing" in command.output


def test_ledgers_are_of_one_run_whether_or_not_they_say_how_many_steps(tmp_path: Path) -> None:
    write(tmp_path / "ledger-a.jsonl", committed(1))
    write(tmp_path / "ledger-b.jsonl", committed(2), header=LedgerHeader(**HEADER, steps=9))
    assert audit(tmp_path) == Audit(24, 0, 0, 0, steps=2, superseded=0, planned=9)


def test_cut_anywhere_it_is_half_a_line_or_no_ledger(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", committed(1), committed(2))
    content = path.read_bytes()
    ends = [at for at, byte in enumerate(content, 1) if byte == 10]
    for size in range(0, len(content), 3):
        path.write_bytes(content[:size])
        if size < ends[0]:
            with pytest.raises(LedgerError, match="has no header"):
                audit(tmp_path)
        else:
            result = audit(tmp_path)
            assert result.steps == sum(size >= end for end in ends[1:])
            assert bool(result.cut) == (size not in ends)


def test_gaps_and_replaced_steps_are_counted(tmp_path: Path) -> None:
    again = committed(7, view=2), committed(20, view=2)
    write(tmp_path / "ledger-a.jsonl", *map(committed, (1, 2, 3, 7, 20, 25)))
    write(tmp_path / "ledger-b.jsonl", *map(committed, (3, 20, 4)), *again)
    assert audit(tmp_path) == Audit(240, 0, 14 * 12, 0, steps=6, superseded=3)


def test_a_line_without_end_is_refused_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "ledger.jsonl", committed(1))
    with path.open("ab") as file:
        file.truncate(2**30)  # zeros that take no room
    tracemalloc.start()
    try:
        with pytest.raises(LedgerError, match=f"line 3 is damaged: .* {module.MOST_LINE} bytes"):
            audit(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 * module.MOST_LINE
    finally:
        tracemalloc.stop()


ROWS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda v: json.dumps(v).encode(), st.recursive(st.none() | st.integers(), st.lists)),
    st.builds(
        lambda step, key, value: json.dumps({**committed(step), key: value}).encode(),
        st.integers(1, 5),
        st.sampled_from(list(Line.__annotations__)),
        st.integers() | st.floats() | st.text() | st.none() | st.lists(st.integers()),
    ),
    st.just(b"[" * 10_000),
    st.just(b'{"step": ' + b"9" * 5000 + b"}"),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.just(json.dumps(HEADER).encode()) | ROWS, rows=st.lists(ROWS, max_size=5))
def test_whatever_is_in_it_is_audited_or_refused(
    tmp_path: Path, header: bytes, rows: list[bytes]
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join([header, *rows]))
    try:
        result = audit(tmp_path)
    except LedgerError as error:
        assert str(path) in str(error)
    else:
        assert result.steps <= len(rows)
