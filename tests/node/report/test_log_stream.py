"""A log that nobody reads, or that goes where it can't be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

COUNT = 20_000
LOGS = f"""
import logging
from planaria.node.cli import _begin_service

_begin_service()
for number in range({COUNT}):
    logging.info("line %d of which nobody reads any %s", number, "x" * 80)
print("done", flush=True)
input()
logging.info("the last line")
logging.shutdown()
"""
LINE = re.compile(r"INFO line (\d+) of which")
LOST = re.compile(r"^(\d+) lines of this log are lost", re.MULTILINE)


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
        _, said = process.communicate("\n")
    found, lost = [int(number) for number in LINE.findall(said)], LOST.findall(said)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, COUNT - 1)
    assert len(lost) == 1
    assert len(found) + int(lost[0]) == COUNT
    assert said.endswith("INFO the last line\n")
    assert all(re.match(r"\d{4}-|\d+ lines of", line) for line in said.splitlines())


@pytest.mark.parametrize("full", [False, True], ids=["nobody reads", "full disk"])
def test_who_can_not_log_ends_all_the_same(full: bool) -> None:
    reader, writer = os.pipe()
    stderr = os.open("/dev/full", os.O_WRONLY) if full else writer
    try:
        with logging_to(stderr) as process:
            said, _ = process.communicate("\n")
        assert (said, process.returncode) == ("done\n", 0)
    finally:
        for file in {reader, writer, stderr}:
            os.close(file)
