"""Settings of all tests and their child processes: one thread for torch, since models are tiny and
cores few; signals that work; no terminal size."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
for name in ("COLUMNS", "LINES"):  # pytest imports readline, which sets them for xdist's workers;
    os.environ.pop(name, None)  # Rich would keep to them, whatever a test asks for

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles planaria anew
sys.dont_write_bytecode = False

for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a script, or by nohup
        signal.signal(number, lambda *_: None)  # ignored here still, but not in child processes

settings.register_profile(
    "untimed", deadline=None, max_examples=50
)  # no test asserts how long something takes
settings.load_profile("untimed")

CORPUS = Path(__file__).parent.parent / "corpus" / "austen"
CONVERSATIONS = Path(__file__).parent / "conversations.jsonl"

WAITING, COMPUTING, SHORT = range(3)
"""Kinds of tests, for their order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first at each worker. Half of the workers begin with tests of several
    processes, which mostly wait; the other half with those that compute in one."""

    def kind(item: pytest.Item) -> int:
        folder = item.path.parent.name
        waits = not hasattr(item.module, "LocalSwarm") or item.path.name == "test_hangs.py"
        if folder == "emulation" or (folder == "swarm" and waits):
            return WAITING
        return COMPUTING if folder in ("swarm", "simulation") else SHORT

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    items.sort(key=lambda item: item.path.name != "test_readme_commands.py")  # the longest of all
    waiting, computing, short = ([item for item in items if kind(item) == of] for of in range(3))
    half = workers // 2
    begun = [waiting[first::half] for first in range(half)]
    begun += [computing[first :: workers - half] for first in range(workers - half)]
    items.clear()
    for worker, own in enumerate(begun):  # xdist gives each worker as many tests, in this order
        left = sum(map(len, begun[worker:])) + len(short)
        more = max(0, left // (workers - worker) - len(own))
        items += [*own, *short[:more]]
        del short[:more]
    items += short


def pytest_collection() -> None:
    """Collects no garbage while modules are loaded: hardly any of it is some."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempts all loaded objects, torch's above all, from garbage collection. Raises its threshold
    of 700 new objects, which a simulation makes in a millisecond."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `os.fsync` do nothing, where a test writes many files."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    """The shipped prose, prepared once for all the tests."""
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe

    path = shared / "prose"
    with (shared / "prose.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not path.exists():
            prepare(Recipe([str(CORPUS)], vocabulary=512), path)
    return path


@pytest.fixture(scope="session")
def conversations(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, prepared with the tokenizer of `data`; only the assistant's words are
    scored."""
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe

    path = tmp_path_factory.mktemp("conversations")
    template = path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}"
        "{% endif %}; {% endfor %}"
    )
    recipe = Recipe(
        [str(CONVERSATIONS)], data / "tokenizer.json", validation=0.3, chat_template=template
    )
    prepare(recipe, path / "data")
    return path / "data"
