"""Tests of runs that are killed and go on where they were."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria_lab.convergence import partial
from planaria_lab.convergence.partial import PartialRun, Progress
from planaria_lab.convergence.runner import resolved, run_one
from planaria_lab.convergence.study import Job, Study, StudyError, jobs
from planaria_lab.convergence.training import TrainingSwarm
from tests.forked import begin_fork_server

KILLED_AFTER = 14
BACKGROUND = {"recovery": {"relearn": {"enough": 0.5, "each_step": 3}}}
ALONE = {"recovery": {"relearn": {"passes": 0}}}
ROUNDS = {"replicas": 2, "meet_every": 5, "round_loss": "guess"}
PATIENCE = 600.0


def study(data: Path) -> Study:
    """Return a study that loses stages before and after the process is killed. The losses after it
    need kept tensors, copies and files of all policies."""
    return Study.model_validate(
        {
            "title": "Killed",
            "seeds": [0],
            "run": {
                "steps": 24,
                "data": {"path": str(data)},
                "model": {"preset": "tiny", "dim": 32, "context": 32, "stages": 5, "layers": 5},
                "training": {"batch": 4, "microbatch": 2, "warmup": 5, "validate_every": 6},
                "recovery": {"policy": "checkfree", "checkpoint": {"every": 6}},
            },
            "losses": {"at": ["3@8", "2@13", "2@15", "4@18"]},
            "baseline": "relearned",
            "target": 10,
            "variants": [
                {"name": "relearned"},
                {"name": "in the background", "run": BACKGROUND},
                {"name": "snapshot", "run": {"recovery": {"policy": "snapshot"}}},
                {"name": "checkpoint", "run": {"recovery": {"policy": "checkpoint"}}},
                {"name": "rounds", "run": ALONE, "ablation": ROUNDS},
            ],
        }
    )


class Killed:
    """Counts iterations, and kills its process at iteration `KILLED_AFTER`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in(path: Path, key: str, job: Job) -> int | None:
    """Return the exit status of a process that trains, and writes the file after each iteration."""
    begin_fork_server()
    process = get_context("forkserver").Process(
        target=run_one, args=(key, job, "cpu", PartialRun(path, every=0), Killed())
    )
    process.start()
    process.join(PATIENCE)
    return process.exitcode


VARIANTS = ["relearned", "in the background", "snapshot", "checkpoint", "rounds"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_is_killed_ends_as_if_it_had_not_been(data: Path, tmp_path: Path, variant: str) -> None:
    todo = {job.variant: (key, job) for key, job in resolved(jobs(study(data)))}
    key, job = todo[variant]
    path = tmp_path / "a.partial"
    assert killed_in(path, key, job) == -signal.SIGKILL
    trained: list[None] = []
    again = run_one(key, job, "cpu", PartialRun(path), lambda: trained.append(None))
    whole = run_one(key, job, "cpu")
    assert len(trained) == whole["validation"][-1][0] - KILLED_AFTER
    assert {**again, "seconds": 0, "at": 0} == {**whole, "seconds": 0, "at": 0}
    assert [line["iteration"] for line in whole["rebuilds"]] == [8, 13, 15, 18]


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_file_of_something_else_is_refused(
    data: Path, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "a.partial"
    key, job = resolved(jobs(study(data)))[0]
    if content is None:  # of another model
        other = job.run.model.model_copy(update={"layers": 10})
        run = job.run.model_copy(update={"model": other})
        bigger = Job(job.variant, job.seed, run, job.losses, job.ablation, job.texts)
        killed_in(path, key, bigger)
    else:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=r"a\.partial is no run .* delete it"):
        PartialRun(path).load(TrainingSwarm(job.run, Corpus.open(data)))


def test_what_another_commit_has_begun_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (_, job) = tmp_path / "a.partial", resolved(jobs(study(data)))[0]
    swarm = TrainingSwarm(job.run, Corpus.open(data))
    monkeypatch.setattr(partial, "origin", lambda: {"commit": "0123abcd"})
    PartialRun(path, every=0).keep(swarm, Progress())
    assert PartialRun(path).load(swarm) == Progress()
    monkeypatch.setattr(partial, "origin", lambda: {"commit": "4567cdef"})
    with pytest.raises(StudyError, match="begun at commit 0123abcd, and this is 4567cdef: go on"):
        PartialRun(path).load(swarm)
