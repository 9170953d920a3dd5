"""Logs that nobody reads, or whose target can't be written."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from planaria.node.report.log_stream import LONGEST, JsonLines, LastLines

COUNT = 20_000
LOGS = f"""
import logging
from planaria.node.report.log_stream import begin_log

begin_log()
for number in range({COUNT}):
    logging.info("line %d of which nobody reads any %s", number, "x" * 80)
print("done", flush=True)
input()
logging.info("the last line")
logging.shutdown()
"""
LINE = re.compile(r"INFO line (\d+) of which")
LOST = re.compile(r"WARNING (\d+) lines of this log are lost")


def logging_to(stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOGS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_who_logs_to_a_pipe_that_nobody_reads_goes_on_and_the_log_says_what_is_lost() -> None:
    with logging_to(subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n", "nobody has read a line of the log"
        _, output = process.communicate("\n")
    numbers, lost = [int(number) for number in LINE.findall(output)], LOST.findall(output)
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, COUNT - 1)
    assert len(lost) == 1
    assert len(numbers) + int(lost[0]) == COUNT
    assert output.endswith("INFO the last line\n")
    assert all(re.match(r"\d{4}-", line) for line in output.splitlines())


@pytest.mark.parametrize("full", [False, True], ids=["nobody reads", "full disk"])
def test_who_can_not_log_ends_all_the_same(full: bool) -> None:
    reader, writer = os.pipe()
    stderr = os.open("/dev/full", os.O_WRONLY) if full else writer
    try:
        with logging_to(stderr) as process:
            output, _ = process.communicate("\n")
        assert (output, process.returncode) == ("done\n", 0)
    finally:
        for file in {reader, writer, stderr}:
            os.close(file)


def test_a_line_for_what_collects_logs_is_one_object() -> None:
    try:
        raise ValueError("of\ntwo lines")
    except ValueError:
        error_info = sys.exc_info()
    record = logging.LogRecord(
        "planaria", logging.ERROR, "", 0, "it has %s\n", ("failed",), error_info
    )
    record.created = 1767225600.25
    (line,) = JsonLines("node-2.0").format(record).splitlines()
    fields = json.loads(line)
    assert fields.pop("traceback").endswith("ValueError: of\ntwo lines")
    assert fields == {
        "time": "2026-01-01T00:00:00.250+00:00",
        "level": "error",
        "name": "node-2.0",
        "message": "it has failed\n",
    }


def said_at(level: str) -> list[str]:
    says = (
        "import logging; from planaria.node.report.log_stream import begin_log; "
        f"begin_log('{level}'); own = logging.getLogger('planaria.node'); "
        "logging.getLogger('a_library').debug('its'); own.debug('one'); own.info('two'); "
        "own.warning('three'); logging.shutdown()"
    )
    ran = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in ran.stderr.splitlines()]


def test_the_log_has_what_is_as_grave_as_asked_for() -> None:
    assert said_at("debug") == ["one", "two", "three"]
    assert said_at("warning") == ["three"]


def test_the_last_lines_are_kept_up_to_a_size_and_told_from_a_number_on() -> None:
    last = LastLines(most=40)
    assert last.after(0, 10) == ([], 0)
    last.add("one\ntwo")
    assert last.after(0, 10) == (["one", "two"], 2)
    assert last.after(1, 10) == (["two"], 2)
    assert last.after(2, 10) == last.after(7, 10) == ([], 2)
    for number in range(3, 100):
        last.add(f"line {number}")
    assert last.after(0, 100) == ([f"line {number}" for number in range(95, 100)], 99)
    assert last.after(0, 2) == (["line 98", "line 99"], 99)
    for _ in range(100):
        last.add("")
    kept, _ = last.after(0, 1000)
    assert len(kept) == 40
    large = LastLines()
    large.add("x" * 10 * LONGEST)
    assert large.after(0, 1) == (["x" * LONGEST], 1)
