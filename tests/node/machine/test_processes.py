"""Child processes in slots: real processes, and real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.node.machine.processes import PLANARIA, Processes, describe_status, last_lines

ROOT = Path(__file__).parents[3]
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"


def run_python(arguments: list[str]) -> None:
    exec(arguments[0], {})


@pytest.fixture
def processes(tmp_path):
    """Processes of one test. One process forks those of all tests here, so it loads what all
    need."""
    pool = Processes(tmp_path, {}, PLANARIA, run_python)
    yield pool
    pool.kill_all()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60  # only what hangs gets there
    while not (outcome := condition()):
        assert time.monotonic() < deadline
        os.sched_yield()
    return outcome


def has_said(log: Path, word: str) -> bool:
    return log.exists() and word in log.read_text()


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_each_process_in_a_slot_has_a_log_of_its_own(processes, tmp_path):
    processes.start("2.0", [FOREVER])
    assert processes.log("2.0") == tmp_path / "node-2.0.log"
    pid = processes.kill("2.0")
    assert_gone(pid)
    assert processes.running() == {}
    assert processes.ended() == []  # it did not end by itself
    processes.start("2.0", [FOREVER])
    assert processes.log("2.0") == tmp_path / "node-2.0-2.log"
    assert processes.kill("1.0") is None


def test_who_ends_by_itself_is_told_once_with_its_last_words(processes):
    pid = processes.start("1.0", ["import sys; print('hello'); sys.exit(3)"])
    assert until(processes.ended) == [("1.0", pid, 3)]
    assert processes.ended() == []
    assert last_lines(processes.log("1.0")) == "hello"


def test_a_network_that_cannot_be_entered_ends_the_process_with_its_name(processes, tmp_path):
    pid = processes.start("1.0", [FOREVER], tmp_path / "no-network")
    assert until(processes.ended) == [("1.0", pid, 1)]
    assert "no-network" in last_lines(processes.log("1.0"))


async def test_stop_ends_the_willing_and_the_stubborn(processes):
    pids = [
        processes.start("registry", [FOREVER]),
        processes.start("0.0", [FOREVER]),
        processes.start("1.0", [STUBBORN]),
    ]
    until(lambda: has_said(processes.log("1.0"), "up"))
    await processes.stop(grace=0.1)
    assert processes.running() == {}
    for pid in pids:
        assert_gone(pid)


def test_a_signal_to_the_process_group_is_not_for_who_forks(processes):
    """If the forking process ended, its children would be killed before they have saved."""
    asking = f"import os; print(os.getppid(), 'forked', flush=True); {FOREVER}"

    def forked(slot: str) -> int:
        processes.start(slot, [asking])
        until(lambda: has_said(processes.log(slot), "up"))
        return int(processes.log(slot).read_text().split()[0])

    forks = forked("1.0")
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(forks, number)
    assert forked("2.0") == forks
    assert processes.ended() == []


def test_children_end_by_a_signal_that_their_parent_was_started_to_ignore(tmp_path):
    parent = (
        "import os, signal; from pathlib import Path;"
        "from planaria.node.machine.processes import Processes;"
        "from tests.node.machine.test_processes import FOREVER, has_said, run_python, until;"
        f"processes = Processes(Path({str(tmp_path)!r}), {{}}, work=run_python);"
        "pid = processes.start('1.0', [FOREVER]);"
        "until(lambda: has_said(processes.log('1.0'), 'up'));"
        "os.kill(pid, signal.SIGINT);"
        "print(until(processes.ended)[0].status)"
    )
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", parent]
    status = subprocess.run(ignoring, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert int(status.stdout) == -signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is needed")
def test_children_die_with_their_parent_even_by_sigkill(tmp_path):
    parent = (
        "import signal; from pathlib import Path;"
        "from planaria.node.machine.processes import Processes;"
        "from tests.node.machine.test_processes import FOREVER, run_python;"
        f"processes = Processes(Path({str(tmp_path)!r}), {{}}, work=run_python);"
        "print(processes.start('1.0', [FOREVER]), flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    until(lambda: has_said(tmp_path / "node-1.0.log", "up"))
    handle = os.pidfd_open(pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert gone


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with status 0"), (-9, "was ended by SIGKILL"), (-77, "was ended by signal 77")],
)
def test_a_status_in_words(status, words):
    assert describe_status(status) == words


def test_the_tail_of_a_log_that_is_not_there(tmp_path):
    assert "can't read" in last_lines(tmp_path / "none.log")
