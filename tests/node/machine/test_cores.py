"""How many processors a process may use, in a container too."""

import os
from pathlib import Path

import pytest

from planaria.node.machine.cores import available_cores


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
