"""Tests of the supervisor, with real processes and signals. The node here is a few lines of Python;
tests/swarm/test_supervised.py has real nodes."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.bootstrap.address import Address, AddressError
from planaria.node.launch.supervisor import (
    CRASHED,
    FINAL,
    TRY_AGAIN,
    Pauses,
    device_commands,
    own_command,
)

ROOT = Path(__file__).parents[2]
NODE = """
import asyncio, os, signal, sys
from pathlib import Path
from planaria.node.launch.supervisor import is_watched

told = []

async def live():
    stop = asyncio.Event()
    def asked(number):
        told.append(number)
        stop.set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, asked, number)
    assert is_watched()
    (lives / str(os.getpid())).touch()
    {does}
    await stop.wait()
    (lives / "told").write_text(" ".join(map(str, told)))

lives = Path({lives!r})
asyncio.run(live())
"""


class Supervised:
    """A supervisor as a process that leads its own process group, as when started by a shell."""

    def __init__(
        self,
        folder: Path,
        does: str = "pass",
        grace: float = 60.0,
        names: tuple[str, ...] = ("the node",),
        again: bool = True,
    ) -> None:
        self.lives, self.log = folder / "lives", folder / "log"
        self.lives.mkdir()
        node = NODE.format(lives=str(self.lives), does=does)
        text = (
            "import asyncio, logging, sys; from planaria.node.launch import supervisor;"
            "logging.basicConfig(level=logging.INFO); supervisor.SLOW = 0.0;"
            f"nodes = {{name: [sys.executable, '-c', {node!r}, name] for name in {names!r}}};"
            f"sys.exit(asyncio.run(supervisor.supervise(nodes, {grace}, {again})))"
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", text], stderr=log, cwd=ROOT, process_group=0
            )

    def pids(self) -> list[int]:
        """Return the process ids of the nodes so far, in order."""
        paths = [path for path in self.lives.iterdir() if path.name.isdigit()]
        return [int(path.name) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]

    def signals(self) -> list[int]:
        """Return the signals that the node got before it ended."""
        return [int(word) for word in (self.lives / "told").read_text().split()]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(**how: Any) -> Supervised:
        started.append(Supervised(tmp_path, **how))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.process.kill()
        supervisor.process.wait()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60  # reached only by a hang
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def wait_for_end(handle: int) -> None:
    """Wait until the process of this pidfd has ended."""
    ended, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ended


def test_pauses_grow_until_a_node_lasts() -> None:
    pauses = Pauses(1.0, 10.0)
    assert [pauses.after(2.0) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [pauses.after(lasted) for lasted in (60.0, 0.0, 0.0)] == [1, 2, 4]
    assert sorted(FINAL) == [0, 1, 2], "so not of what crashed, or is to try again"


def test_a_node_that_is_told_to_end_while_it_is_still_starting_ends_well(supervised) -> None:
    supervisor = supervised(does="signal.signal(signal.SIGTERM, signal.SIG_DFL)")
    until(supervisor.pids)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.process.wait(60) == 0


def test_a_node_that_is_killed_is_started_anew_and_again(supervised) -> None:
    supervisor = supervised()
    (first,) = until(supervisor.pids)
    os.kill(first, signal.SIGKILL)
    _, second = until(lambda: supervisor.pids()[1:] and supervisor.pids())
    os.kill(second, signal.SIGKILL)
    until(lambda: len(supervisor.pids()) == 3)
    log = supervisor.log.read_text()
    assert re.findall(r"ended by SIGKILL after \d+ s; it is restarted in (\d) s", log) == [
        "1",
        "2",
    ]
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == 0
    assert supervisor.signals() == [signal.SIGTERM]


def test_a_node_that_would_end_alike_again_is_not_started_again(supervised) -> None:
    supervisor = supervised(does="sys.exit(2)")
    assert supervisor.process.wait(60) == 2
    assert len(supervisor.pids()) == 1


def test_a_node_that_might_end_otherwise_is(supervised) -> None:
    supervisor = supervised(does=f"len(list(lives.iterdir())) == 1 and sys.exit({TRY_AGAIN})")
    until(lambda: len(supervisor.pids()) == 2)
    assert f"the node ended with status {TRY_AGAIN}" in supervisor.log.read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name
)
def test_what_a_terminal_sends_to_all_its_processes_reaches_the_node_once(
    supervised, number
) -> None:
    supervisor = supervised()
    (pid,) = until(supervisor.pids)
    assert os.getpgid(pid) != supervisor.process.pid
    os.killpg(supervisor.process.pid, number)
    assert supervisor.process.wait(60) == 0
    assert supervisor.signals() == [signal.SIGTERM]


def test_a_node_that_does_not_end_within_its_grace_is_killed(supervised) -> None:
    supervisor = supervised(does="os.kill(os.getpid(), signal.SIGSTOP)", grace=0.1)
    until(supervisor.pids)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == 128 + signal.SIGKILL
    assert "has not ended 0 s after SIGTERM" in supervisor.log.read_text()


def test_told_to_end_between_two_nodes_the_supervisor_ends(supervised) -> None:
    supervisor = supervised(does=f"sys.exit({CRASHED})")
    until(lambda: "it is restarted in 1 s" in supervisor.log.read_text())
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == CRASHED


TWO = ("the node on cpu", "the node on cuda:0")


def test_of_two_nodes_one_is_started_anew_while_the_other_stays_and_both_are_told(
    supervised,
) -> None:
    supervisor = supervised(names=TWO)
    first, second = until(lambda: supervisor.pids()[1:] and supervisor.pids())
    os.kill(second, signal.SIGKILL)
    *_, third = until(lambda: supervisor.pids()[2:] and supervisor.pids())
    assert re.search(r"the node on \S+ was ended by SIGKILL", supervisor.log.read_text())
    living = [os.pidfd_open(pid) for pid in (first, third)]
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == 0
    for handle in living:
        wait_for_end(handle)


@pytest.mark.parametrize(("status", "again"), [(1, True), (CRASHED, False)])
def test_a_node_that_is_gone_for_good_leaves_the_other_and_its_status(
    supervised, status, again
) -> None:
    supervisor = supervised(
        names=TWO, again=again, does=f"sys.argv[1] == {TWO[1]!r} and sys.exit({status})"
    )
    until(lambda: f"{TWO[1]} ended with status {status} and is not" in supervisor.log.read_text())
    assert supervisor.process.poll() is None
    until(lambda: len(supervisor.pids()) == 2)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == status


def test_nodes_on_several_devices_share_no_port_and_no_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["planaria", "node", "--join", "a:1"])
    listen, advertised = Address.parse("[::]:7401"), Address.parse("my.host:9001")
    assert device_commands(["cuda:1"], listen, advertised, Path("saves")) == {
        "the node": own_command()
    }

    commands = device_commands(["cuda:0", "cuda:1"], listen, advertised, Path("saves"))
    for place, (name, words) in enumerate(commands.items()):
        assert name == f"the node on cuda:{place}"
        assert words[: len(own_command())] == own_command()
        assert " ".join(words[len(own_command()) :]) == (
            f"--device cuda:{place} --listen [::]:{7401 + place} "
            f"--advertise my.host:{9001 + place} --save-dir saves/cuda-{place}"
        )
    anywhere = device_commands(["cpu", "cuda:0"], Address.parse("127.0.0.1:0"), None, None)
    assert anywhere["the node on cuda:0"] == [*own_command(), "--device", "cuda:0"]
    with pytest.raises(AddressError, match="has port 65536"):
        device_commands(["cpu", "cuda:0"], Address.parse("0.0.0.0:65535"), None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is needed")
def test_a_supervisor_that_is_killed_takes_the_node_with_it(supervised) -> None:
    supervisor = supervised()
    (pid,) = until(supervisor.pids)
    handle = os.pidfd_open(pid)
    supervisor.process.kill()
    wait_for_end(handle)


def test_a_node_whose_supervisor_is_gone_when_it_begins_does_not_begin() -> None:
    begin = "from planaria.node.launch.supervisor import is_watched; is_watched()"
    orphan = os.environ | {"PLANARIA_SUPERVISOR": str(os.getpid() + 1)}
    done = subprocess.run(
        [sys.executable, "-c", begin], env=orphan, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"process {os.getpid() + 1}, which started this node, is gone" in done.stderr


def test_who_is_watched_tells_no_child_that_it_is() -> None:
    begin = (
        "import os; from planaria.node.launch.supervisor import is_watched;"
        "print(is_watched(), is_watched(), 'PLANARIA_SUPERVISOR' in os.environ)"
    )
    watched = os.environ | {"PLANARIA_SUPERVISOR": str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-c", begin], env=watched, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]
