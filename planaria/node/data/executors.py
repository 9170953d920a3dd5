"""Executors for work on many files: this process, local processes, a Dask cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any, Protocol, TypeVar

from planaria.node.data.corpus import CorpusError
from planaria.node.machine.cores import available_cores
from planaria.node.machine.extras import remedy
from planaria.node.machine.processes import die_with_parent

T = TypeVar("T")
WORKERS_COME = 30.0
"""Seconds to wait for a first worker of a Dask cluster."""


class Spread(Protocol):
    """Applies a function to many files, in this process or in others."""

    def __call__(self, do: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
        """Apply `do` like `map`: results in order. Raises CorpusError, and exceptions of `do`."""


@contextmanager
def spreading(jobs: int | None, dask: str | None) -> Iterator[Spread | None]:
    """Executor of work on files: on the Dask cluster with this scheduler address, or else on `jobs`
    processes (default: one per processor). None: this process. Raises CorpusError."""
    jobs = jobs or available_cores()
    if dask is not None:
        with over_dask(dask) as spread:
            yield spread
    elif jobs > 1:
        yield over_processes(jobs)
    else:
        yield None


def over_processes(jobs: int) -> Spread:
    """Executor of work on files on at most `jobs` local processes, which share the processors."""

    def spread(do: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
        workers = max(1, min(jobs, len(columns[0])))
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (jobs // workers,))
        try:
            with _interrupts_delayed():
                results = pool.map(do, *columns)  # starts the processes
            yield from results
        except BrokenProcessPool as error:
            raise CorpusError(
                f"one of {workers} processes was killed, perhaps for lack of memory: try --jobs "
                f"{max(1, workers // 2)}"
            ) from error
        except BaseException:  # no caller will read their results
            for process in active_children():
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    return spread


@contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C while worker processes start, until each has run `_begin_worker`; a process
    without its handler would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(threads: int) -> None:
    """Initialize a worker process: it ends silently on Ctrl-C and when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizer


@contextmanager
def over_dask(address: str, in_order: bool = True) -> Iterator[Spread]:
    """Executor of work on files on the Dask cluster with this scheduler address; without
    `in_order`, results come as they are ready. Raises CorpusError."""
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't use {address}: {remedy(error)}") from error
    try:
        client = distributed.Client(address, timeout=WORKERS_COME)
    except (OSError, ValueError, TimeoutError) as error:
        raise CorpusError(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_COME)
        except TimeoutError as error:
            raise CorpusError(
                f"the Dask cluster at {address} has had no worker for {WORKERS_COME:g} s: start "
                f"one with `dask worker {address}`"
            ) from error

        def spread(do: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
            futures = client.map(do, *columns, pure=False)
            try:
                for future in futures if in_order else distributed.as_completed(futures):
                    yield future.result()
            except (distributed.KilledWorker, distributed.CancelledError) as error:
                raise CorpusError(f"the Dask cluster at {address} gave up: {error}") from error
            except RuntimeError as error:  # of the scheduler, which reads what it is given
                if not isinstance(error.__cause__, ImportError):
                    raise
                raise CorpusError(
                    f"the Dask scheduler at {address} says {error.__cause__}: install the same "
                    "packages there and at the workers as here"
                ) from error
            finally:
                client.cancel(futures)

        yield spread
