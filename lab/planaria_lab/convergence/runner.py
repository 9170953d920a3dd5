"""Executes the missing runs of a study: several at once, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from planaria.node.data.executors import over_dask
from planaria.node.data.mixture import open_data
from planaria.node.launch.resolve import resolve
from planaria.node.run_file import override
from planaria_lab.convergence.partial import PartialRun, Progress
from planaria_lab.convergence.schedule import schedule
from planaria_lab.convergence.study import Job, StudyError, append_result
from planaria_lab.convergence.training import LostError, TrainingSwarm, update_tokens
from planaria_lab.origin import origin

TICK = 0.5  # seconds
SAMPLES = 256  # most samples of another text


def resolved(jobs: Sequence[Job]) -> list[tuple[str, Job]]:
    """Return each job with its key and a resolved run. Raises RunFileError, CorpusError."""
    keyed = []
    for job in jobs:
        run = job.run
        if run.policy.checkpoints:  # the lab keeps them in memory
            run = override(run, recovery__checkpoint__dir="memory")
        run = resolve(run)
        whole = Job(job.variant, job.seed, run, job.losses, job.ablation, job.texts)
        keyed.append((whole.key(run.data.content), whole))
    return keyed


def run_all(
    todo: Sequence[tuple[str, Job]],
    results: Path,
    device: str,
    at_once: int,
    threads: int,
    tell: Callable[[int, int], None],
) -> None:
    """Execute runs, and append each result to the file `results`.

    `threads`: of each run; 0: an equal share of the cores. `tell(iterations, runs)` is called with
    the numbers done so far.

    Raises StudyError if a run fails; results of finished runs are kept.
    """
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    threads = threads or max(1, (os.cpu_count() or 1) // at_once)
    pool = ProcessPoolExecutor(at_once, context, _begin, (counter, threads))
    runs = 0
    futures = [
        pool.submit(run_one, key, job, device, PartialRun(partial(results, key)), _count)
        for key, job in todo
    ]
    try:
        pending = set(futures)
        while pending:
            try:
                for future in as_completed(pending, timeout=TICK):
                    pending.discard(future)
                    runs += 1
                    _keep(results, future.result())
                    tell(counter.value, runs)
            except TimeoutError:
                tell(counter.value, runs)
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


def run_all_over_dask(
    todo: Sequence[tuple[str, Job]],
    results: Path,
    device: str,
    address: str,
    tell: Callable[[int, int], None],
) -> None:
    """Execute runs as `run_all`, on the workers of the Dask cluster with this scheduler. `tell` is
    called after each run. Raises CorpusError, too, if the cluster or a worker's data is missing."""
    keys, jobs = zip(*todo, strict=True)
    partials = [PartialRun(partial(results, key)) for key in keys]
    steps = {key: job.run.steps for key, job in todo}
    done = 0
    with over_dask(address, in_order=False) as spread:
        of_all = spread(run_one, keys, jobs, [device] * len(todo), partials)
        for runs, result in enumerate(of_all, 1):
            _keep(results, result)
            done += steps[result["key"]]
            tell(done, runs)


def _keep(results: Path, result: Mapping[str, Any]) -> None:
    """Append the result of a finished run, and delete its partial file."""
    append_result(results, result)
    partial(results, result["key"]).unlink(missing_ok=True)


_counter: Synchronized[int] | None = None
"""In a worker's process: the number of iterations that all workers have done."""


def _begin(counter: Synchronized[int], threads: int) -> None:
    global _counter  # noqa: PLW0603  the pool has no other way to hand it over
    _counter = counter
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _count() -> None:
    assert _counter is not None
    with _counter.get_lock():
        _counter.value += 1


def _end_with_parent() -> None:
    """Exit when the parent ends; a worker of a killed parent would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def partial(results: Path, key: str) -> Path:
    """Return the path of an unfinished run's file, beside the file of results."""
    return results.with_name(f"{key}.partial")


def run_one(
    key: str,
    job: Job,
    device: str,
    kept: PartialRun | None = None,
    trained: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Execute a run, or continue it from `kept`; return its line of the results. `trained` is
    called after each iteration. Raises StudyError."""
    started, made = time.perf_counter(), origin(device)
    run = job.run
    corpus = open_data(run.data)
    swarm = TrainingSwarm(run, corpus, job.ablation, torch.device(device))
    saved = kept.load(swarm) if kept else None
    progress = saved or Progress([(0, 0, swarm.validate())])
    started -= progress.seconds
    curve, rebuilds = progress.curve, progress.rebuilds
    try:
        for iteration, lost, loss_soon in _iterations(job, swarm, progress.iteration):
            swarm.step(loss_soon)
            if lost:
                rebuilds += [{"iteration": iteration, **line} for line in swarm.lose(lost)]
            every = run.training.validate_every
            if (every and iteration % every == 0) or swarm.committed == run.steps:
                curve.append((iteration, swarm.committed, swarm.validate()))
            progress.iteration, progress.seconds = iteration, time.perf_counter() - started
            if kept:
                kept.keep(swarm, progress)
            trained()
    except (LostError, ValueError) as error:
        where = f"{job.variant}, seed {job.seed}, step {swarm.committed}"
        raise StudyError(f"{where}: {error}") from error
    return {
        "key": key,
        "variant": job.variant,
        "seed": job.seed,
        "validation": [(i, s, round(loss, 6)) for i, s, loss in curve],
        "rebuilds": rebuilds,
        "texts": {name: _other(swarm, Path(path)) for name, path in job.texts.items()},
        "bytes": sum(running.bytes for running in swarm.snapshots.values()),
        "averaged": swarm.replicas.sent if swarm.replicas is not None else 0,
        "window": swarm.window_tokens,
        "share": swarm.share_of_a_stage,
        "update_tokens": update_tokens(swarm.config, job.ablation),
        "seconds": round(time.perf_counter() - started, 1),
        **made,
    }


def _iterations(
    job: Job, swarm: TrainingSwarm, done: int
) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """Yield iterations, counted from 1, after the first `done`, until all steps are committed.

    With each come the stages lost after it, and whether a stage is lost while its boundary tensors
    are kept. A run ends at the latest after three times as many iterations as steps.
    """
    steps = job.run.steps
    planned = schedule(job.losses, job.seed, 3 * steps, swarm.config.stages)
    for iteration in range(done + 1, 3 * steps + 1):
        if swarm.committed >= steps:
            return
        last = swarm.committed + 1 >= steps
        useful = range(iteration, iteration + (swarm.boundary.maxlen or 0))
        yield iteration, () if last else planned.get(iteration, ()), any(map(planned.get, useful))


def _other(swarm: TrainingSwarm, folder: Path) -> float:
    """Return the mean loss, nats a token, on the text files of `folder`. Raises StudyError."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise StudyError(f"{folder} has no text files (*.txt)")
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = np.array(swarm.corpus.tokenizer().encode(text).ids, np.int64)
    context = swarm.config.context
    count = (len(ids) - 1) // context
    starts = np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64) * context
    samples = np.stack([ids[start : start + context + 1] for start in starts])
    return swarm.validate(torch.from_numpy(samples))
