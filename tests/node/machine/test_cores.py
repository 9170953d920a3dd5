"""How many processors and how much memory a process may use, in a container too."""

import os
from pathlib import Path

import pytest

from planaria.node.machine.cores import available_cores, total_memory


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("6400000 100000", 8),
        ("no figures", 8),
    ],
)
def test_a_containers_quota_counts(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if quota is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("limit", "memory"), [(None, 2**33), ("max", 2**33), ("1048576", 2**20), (f"{2**40}", 2**33)]
)
def test_a_containers_memory_counts(
    limit: str | None, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}
    monkeypatch.setattr(os, "sysconf", figures.__getitem__)
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit + "\n")
    assert total_memory(tmp_path) == memory
