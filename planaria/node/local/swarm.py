"""`planaria up`: a whole swarm on this machine, as processes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console

from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.journal import read_view
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import STOP, STOPPED, TRAIN, Description, View
from planaria.node.data.mixture import find_by_content, index_of
from planaria.node.data.progress import Track
from planaria.node.hugging_face.begin_from_model import with_model
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve, text_to_prepare
from planaria.node.launch.settings import describe_change, with_changes
from planaria.node.launch.supervisor import FINAL
from planaria.node.local.loss_schedule import (
    DrawnLosses,
    Losses,
    TracedLosses,
    TraceError,
    parse_rate,
    places,
    read_trace,
    stage_of,
)
from planaria.node.local.options import SwarmOptions
from planaria.node.local.resume import (
    RUN_FILE,
    KeptRun,
    SwarmError,
    place_saves,
    replace_run,
    resume_errors,
)
from planaria.node.machine.cores import available_cores
from planaria.node.machine.extras import remedy
from planaria.node.machine.processes import (
    GRACE,
    PLANARIA,
    EndedProcess,
    Processes,
    Work,
    describe_status,
    last_lines,
    run_planaria,
    stop_signals,
)
from planaria.node.model import learning_rate
from planaria.node.model.checkpoint import TOKENIZER
from planaria.node.model.shape import COMPUTED
from planaria.node.report.event_log import EventLog, LineReader
from planaria.node.report.events import (
    Exited,
    Killed,
    Sampled,
    Severity,
    Started,
    SwarmEnding,
    entries,
    parse,
)
from planaria.node.report.experiment import ExperimentPipe, Opening
from planaria.node.report.ledger import (
    MERGED,
    Audit,
    Ledger,
    LedgerError,
    Line,
    audit_merged,
    merge,
)
from planaria.node.report.live_view import LiveScreen, RunStory
from planaria.node.report.samples import SamplesFile
from planaria.node.report.summary import draw_loss, summarize, summary_sentences
from planaria.node.report.unsaved import stage_names, unsaved_stages
from planaria.node.run_file import (
    PRIVATE,
    RunFile,
    RunFileError,
    dumps,
    load,
    loads,
    override,
    without_private,
)

PLAN, ADDRESS = "up.json", "registry.address"
ROCM: Final = Path("/dev/kfd")  # there if AMD's driver is
SAVING_GRACE = 30.0
"""Seconds for nodes with saves to end after SIGTERM."""
POLL = 0.02
"""Seconds between two polls of event logs, ledgers and processes."""
DESCRIBE = 0.25
"""Seconds between two requests to the registry, for the page."""
REGISTRY_START = 60.0
"""Seconds for the registry to start listening."""
SLOW_SAVE = 5.0
"""Seconds after which unsaved stages are reported."""
LAST_NODES = 60.0
"""Seconds for nodes, replacements too, to get the last state once the run is finished."""
PATIENCE = 5
"""Multiple of `swarm.progress` without a committed step that ends the run."""
MOST_RESTARTS = 3
"""Number of times that a slot's process may end by itself."""
NODES_A_CORE = 16
"""Limit of nodes per core: with more, waiting for a core takes longer than a lease."""
NODE_BYTES = 120 * 2**20
"""Memory of a node without its stage: what it doesn't share with other nodes."""

NOTHING = Audit(expected=0, duplicates=0, missing=0, extra=0, steps=0, superseded=0)


@dataclass(frozen=True)
class Kill:
    """SIGKILL for every node of a stage, or for one replica of it, during `step`."""

    stage: int
    replica: int | None
    step: int

    def slots(self, replicas: int) -> list[str]:
        replica_numbers = range(replicas) if self.replica is None else [self.replica]
        return [f"{self.stage}.{replica}" for replica in replica_numbers]


def parse_kill(text: str, run: RunFile) -> Kill:
    """Parse --kill, STAGE@STEP or STAGE.REPLICA@STEP, for a resolved run. Raises SwarmError."""
    place, _, step = text.partition("@")
    stage, dot, replica = place.partition(".")
    figures = [stage, step, *([replica] if dot else [])]
    if not all(figure.isascii() and figure.isdigit() for figure in figures):
        raise SwarmError(
            f"--kill {text}: write STAGE@STEP or STAGE.REPLICA@STEP, as in --kill 2@15 or "
            "--kill 3.1@25"
        )
    kill = Kill(int(stage), int(replica) if dot else None, int(step))
    stages, replicas = run.model.body_stages, run.swarm.replicas
    _check_range(text, "stage", kill.stage, 0, stages)
    _check_range(text, "replica", kill.replica or 0, 0, replicas - 1)
    _check_range(text, "step", kill.step, 1, run.steps)
    return kill


def _check_range(kill: str, noun: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SwarmError(f"--kill {kill}: there is no {noun} {value}, choose {low} to {high}")


def choose_losses(
    run: RunFile, rate: str | None = None, trace: Path | None = None, speedup: float | None = None
) -> Losses:
    """Loss schedule of a resolved run: `speedup` times as fast as `rate` (10%/h) or the spot trace;
    with neither no losses. Raises SwarmError."""
    if rate is not None and trace is not None:
        raise SwarmError("--loss-rate and --trace are two sources of losses: choose one")
    if speedup is not None and ((rate is None and trace is None) or not 0 < speedup < math.inf):
        raise SwarmError(
            f"--speedup {speedup:g}: give a positive factor, as in --speedup 100, together with "
            "--loss-rate or --trace"
        )
    all_places, factor = places(run.model.body_stages, run.swarm.replicas), speedup or 1.0
    try:
        if trace is not None:
            return TracedLosses(all_places, read_trace(trace), factor)
        return DrawnLosses(all_places, parse_rate(rate) if rate else 0.0, factor, run.seed)
    except TraceError as error:
        raise SwarmError(f"--trace {trace}: {error}") from error
    except ValueError as error:
        raise SwarmError(f"--loss-rate {error}") from error


class Ending(NamedTuple):
    status: int  # exit status of `planaria up`
    reason: str  # empty: the run is finished


class ProcessHome(NamedTuple):
    """The network of a swarm's process, if it has its own."""

    host: str  # address in that network
    namespace: Path  # the network, as in /proc/PID/ns/net


class SwarmPlan(NamedTuple):
    """A run of `planaria up`: its run file, folders, devices and options."""

    run: RunFile  # resolved
    out: Path
    save_dir: Path | None  # for nodes' saves
    device: str
    homes: Mapping[str, ProcessHome] = {}  # slot -> home, of all; `up` must reach them
    work: Work = run_planaria  # main of its processes
    options: SwarmOptions = SwarmOptions(http="none")
    data: Sequence[str] = ()  # where the run's data is; none: where the run file says
    at: int | None = None  # step from which it is resumed; None: the newest

    @property
    def kept(self) -> KeptRun:
        return KeptRun(self.run, self.out, self.save_dir)


async def up(
    plan: SwarmPlan,
    kills: Sequence[Kill],
    console: Console,
    resumed: SwarmPlan | None = None,
    replacing: bool = True,
    losses: Losses | None = None,
) -> Ending:
    """Train a resolved run (see `resolve`) with a swarm of processes, and write the results to
    `out`. It continues the saved run of `resumed`, if given. Without `replacing`, lost nodes are
    not replaced; `losses` come besides `kills`. The status is 0 only if every step is committed,
    the audit is all zero and replicas are identical. Raises SwarmError when it can't be started."""
    run, out = plan.run, plan.out
    losses = losses or choose_losses(run)
    check_gpu(plan.device, gpus_of_this_machine)
    if not plan.options.oversubscribe:
        check_processes(plan, MachineSize.this())
    for sentence in forecast(plan, MachineSize.this(), speed_of_a_core):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    if resumed is not None:
        plan, sentences = resume_from(plan, resumed, losses.first())
        for sentence in sentences:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        (out / MERGED).unlink(missing_ok=True)  # until the run ends again
    else:
        create_folder(plan)
        write_plan(plan)
    stop = stop_signals()
    with LiveScreen(console, run.steps) as screen:
        swarm = _Swarm(plan, kills, screen, replacing, losses)
        try:
            ending = await swarm.train(stop)
        except SwarmError as error:
            ending = Ending(1, str(error))
        finally:
            await swarm.end()
    if resumed is None and stop.done() and swarm.client is None:  # no node was started
        shutil.rmtree(out / "logs")  # so that another run can use the folder
        _print_error(console, ending.reason)
        return ending
    return wrap_up(swarm.run, out, console, ending)


class MachineSize(NamedTuple):
    """This machine's resources that all processes of a swarm share."""

    memory: int  # bytes
    cores: int

    @classmethod
    def this(cls) -> MachineSize:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(memory, available_cores())


class SwarmNeeds(NamedTuple):
    """Minimum resources that a swarm takes of this machine."""

    nodes: int
    states: int  # bytes of weights, gradients and moments in main memory
    operations: float  # floating-point, per step, on processors; 0: on GPUs

    @classmethod
    def of(cls, plan: SwarmPlan) -> SwarmNeeds:
        """Minimum resources of a swarm. A step multiplies and adds each parameter once a token
        forward, and twice backward if it is trained; embeddings are lookups."""
        run, config = plan.run, plan.run.config
        nodes = (config.stages + 1) * run.swarm.replicas
        has_gpu = Path("/proc/driver/nvidia").exists() or ROCM.exists()
        if plan.device not in ("auto", "cpu") or (plan.device == "auto" and has_gpu):
            return cls(nodes, 0, 0.0)
        states = run.swarm.replicas * sum(map(config.bytes_of, range(config.stages + 1)))
        matrices = config.values - config.parameters[0] + config.vocabulary * config.dim
        passes = 3 if config.lora is None else 2
        return cls(nodes, states, 2.0 * passes * matrices * run.training.batch * config.context)

    @property
    def least_memory(self) -> int:
        """Minimum bytes of a swarm's processes, without computation."""
        return self.nodes * NODE_BYTES + self.states

    @property
    def memory(self) -> float:
        """Bytes of a swarm's processes, computation included."""
        return self.nodes * NODE_BYTES + COMPUTED * self.states


def check_processes(plan: SwarmPlan, machine: MachineSize) -> None:
    """Check that the machine has cores and memory for all nodes, with weights, gradients and
    moments where they compute on its processors. Raises SwarmError."""
    stages, replicas = plan.run.config.stages + 1, plan.run.swarm.replicas
    load = SwarmNeeds.of(plan)
    size = f"{stages} stages with swarm.replicas = {replicas} are {load.nodes} nodes"
    remedy = "choose fewer --stages or --replicas, or skip this check with --oversubscribe"
    if load.nodes > NODES_A_CORE * machine.cores:
        raise SwarmError(
            f"{size}, but {machine.cores} core{'s' * (machine.cores > 1)} can run only "
            f"{NODES_A_CORE * machine.cores} in time, {NODES_A_CORE} a core: {remedy}"
        )
    if load.least_memory > machine.memory:
        raise SwarmError(
            f"{size}, which need {_gib(load.least_memory)}, {_gib(load.states)} of it for weights, "
            f"gradients and moments, but this machine has {_gib(machine.memory)}: choose a smaller "
            f"model, or more machines; {remedy}"
        )


def forecast(plan: SwarmPlan, machine: MachineSize, speed: Callable[[], float]) -> Iterator[str]:
    """Messages about a swarm before its start: size, memory, minimum time of a step. `speed`:
    operations per second of a core, called where cores compute."""
    run, config, load = plan.run, plan.run.config, SwarmNeeds.of(plan)
    yield (
        f"{config.values:,} parameters at {load.nodes} nodes, which take about "
        f"{_gib(load.memory)} of this machine's {_gib(machine.memory)} of memory"
    )
    if load.memory > machine.memory:
        yield (
            "WARNING: that is more than this machine has, so nodes may be killed: choose a smaller "
            "--preset, or start nodes on several machines"
        )
    if load.operations:
        seconds = load.operations / (machine.cores * speed())
        least = f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:.2g} s"
        tokens = run.training.batch * config.context
        yield f"a step of {tokens:,} tokens takes at least {least} here; the run has {run.steps:,}"


def speed_of_a_core() -> float:
    """Floating-point operations per second of small matrix products in one thread. It is the
    maximum, since other processes may use the core meanwhile."""
    matrix, shortest, end = np.ones((64, 64), np.float32), math.inf, time.perf_counter() + 0.05
    while (began := time.perf_counter()) < end:
        np.matmul(matrix, matrix)
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * 64**3 / shortest


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_gpu(device: str, count: Callable[[], int]) -> None:
    """Check that --device exists, before PyTorch is loaded. Raises SwarmError."""
    if not device.startswith("cuda"):
        return
    number, gpus = int(device.partition(":")[2] or 0), count()
    if number >= gpus:
        numbers = "none" if not gpus else "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise SwarmError(
            f"--device {device}: this machine has {numbers}, as far as its driver says; "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )


def gpus_of_this_machine() -> int:
    """Number of visible NVIDIA GPUs, else of AMD's, at most; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return len([*Path("/dev/dri").glob("renderD*")]) if ROCM.exists() else 0
    count = ctypes.c_int(0)
    works = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


def create_folder(plan: SwarmPlan) -> None:
    """Create a run's folder. Raises SwarmError when it, or the one for saves, is in use."""
    out, save_dir = plan.out, plan.save_dir
    depths = "*/stage-*/step-*", "*/*/stage-*/step-*"
    if save_dir is not None and any(any(save_dir.glob(depth)) for depth in depths):
        raise SwarmError(
            f"{save_dir} already holds saves of a run: continue it with --resume {save_dir}, "
            "or choose another --save-dir"
        )
    for name in ("summary.json", MERGED, "logs"):
        if (out / name).exists():
            raise SwarmError(
                f"{out} already holds a run ({name}): continue it with --resume {out}, choose "
                "another folder with --out, or remove this one"
            )
    try:
        (out / "logs").mkdir(parents=True)
    except OSError as error:
        raise SwarmError(f"can't create the folder {out}: {error.strerror}") from error


def write_plan(plan: SwarmPlan) -> None:
    """Write what `--resume` needs to the run's folder and beside the saves. Raises SwarmError."""
    for folder in filter(None, [plan.out, plan.save_dir]):
        saves = None if plan.save_dir is None else os.path.relpath(plan.save_dir, folder)
        fields = {"out": os.path.relpath(plan.out, folder), "save_dir": saves}
        fields["device"] = plan.device
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder == plan.out:
                (folder / RUN_FILE).write_text(dumps(plan.run), encoding="utf-8")
            (folder / PLAN).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SwarmError(f"can't write in {folder}: {error.strerror}") from error


def plan_run(
    run: RunFile,
    out: Path | None,
    save_dir: Path | None,
    device: str,
    say: Callable[[str], object],
    track: Track,
) -> SwarmPlan:
    """Resolve a new run's file. Prepare the shipped prose for a run that names no data, and the
    model of a run that it begins from. Raises SwarmError, RunFileError, ExportError,
    CorpusError."""
    from planaria.node.local.from_run import begin_from_run  # which reads that run's plan

    run = begin_from_run(run, say, track)
    if run.model.origin is not None and not run.model.content:
        say(f"reading {run.model.origin}, from which the run begins")
    text, path = text_to_prepare(run), Path(run.data.path)
    if text is not None:
        from planaria.node.data.prepare import prepare
        from planaria.node.data.recipe import Recipe

        run = with_model(run)
        tokenizer = Path(run.model.origin) / TOKENIZER if run.model.origin else None
        say(f"there is no prepared data at {path}; preparing the prose in {text}")
        prepare(Recipe([str(text)], tokenizer), path, track=track)
    folder = out or Path("out") / f"{run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if run.policy.checkpoints and not run.recovery.checkpoint.dir:
        shared = str((folder / "checkpoints").absolute())
        run = override(run, recovery__checkpoint__dir=shared)
    run = resolve(run)
    index_of(run.data)  # stage 0's nodes need the data on this machine
    return SwarmPlan(run, folder, save_dir or folder / "saves", device)


def read_plan(folder: Path, data: Sequence[str] = ()) -> SwarmPlan:
    """The plan of the run that wrote `folder`, or whose saves are in it; the folder may have been
    moved. `data`: where the run's data is, if elsewhere. Raises SwarmError."""
    try:
        fields = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        out, device = Path(os.path.normpath(folder / fields["out"])), str(fields["device"])
        saves = fields["save_dir"] and Path(os.path.normpath(folder / fields["save_dir"]))
        run = load(out / RUN_FILE)
        if run.training.optimizer is None:  # of a version that had no other
            run = override(run, training__optimizer="adamw")
    except RunFileError as error:
        raise SwarmError(
            f"the run in {folder} can't be used: {error}\nA run continues only with the run file "
            "that it began with"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SwarmError(
            f"there is no run in {folder}: {PLAN}, or the run file that it names, can't be "
            f"read ({error}). Name the folder that `planaria up` wrote (--out), or its --save-dir"
        ) from error
    plan = SwarmPlan(run, out, saves, device, data=data)
    if (journal := plan.kept.journal).exists():  # the run's operator may have changed it
        plan = plan._replace(run=with_changes(run, read_view(journal).changes))
    if saves is None and not run.recovery.checkpoint.dir:
        raise SwarmError(
            f"the run in {folder} has no saves: it was started without a folder for them, and its "
            "policy writes no checkpoints; start a new run"
        )
    return plan


def resume_from(
    plan: SwarmPlan, before: SwarmPlan, slots: Sequence[str]
) -> tuple[SwarmPlan, list[str]]:
    """Put saves of `before` where the resumed processes in `slots` look for them. Returns the plan,
    with the step from which changed settings hold, and messages. Raises SwarmError."""
    missing = [name for name in plan.run.data.names if not Path(name).exists()]
    if missing and not plan.data:
        plan = plan._replace(data=find_by_content(plan.run.data))
    if missing and not plan.data:
        raise SwarmError(
            f"the run's prepared data is not in {missing[0]}: name the folder that has it, with "
            "the same content, by --data DIR"
        )
    sentences: list[str] = []
    if plan.out != before.out:
        before = copy_run(before, plan.out)
        plan = plan._replace(save_dir=before.save_dir)
        sentences.append(f"the run is copied to {plan.out}, and goes on there")
    if plan.run.notify != before.run.notify:  # which is no change of the run
        before = before._replace(run=before.run.model_copy(update={PRIVATE: plan.run.notify}))
        with resume_errors():
            replace_file(plan.out / RUN_FILE, dumps(before.run).encode())
    if plan.run != before.run or plan.at is not None:
        plan = plan._replace(run=replace_run(before.kept, plan.kept, slots, plan.at).run)
        sentences += describe_change(before.run, plan.run)
    if plan.kept.id == before.kept.id:
        sentences += place_saves(plan.kept, slots)
    else:
        sentences.append(f"the saves as they were stay in {before.kept.saves or 'their folder'}")
    empty_journal(plan)
    return plan, sentences


def copy_run(plan: SwarmPlan, out: Path) -> SwarmPlan:
    """Copy a run and its saves to `out`. Returns the copy's plan. Raises SwarmError."""
    if plan.run.policy.checkpoints:
        raise SwarmError(
            f"--out {out}: the run file names {plan.kept.checkpoints} for checkpoints, so the copy "
            "would write there, too; resume the run without --out"
        )
    folders, save_dir = {plan.out: out}, plan.save_dir
    if save_dir is not None:
        place = Path(os.path.relpath(save_dir, plan.out))
        if ".." in place.parts:
            place = Path("saves")
            folders[save_dir] = out / place
        save_dir = out / place
    inside = any(out.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if inside or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise SwarmError(
            f"--out {out} can't have a copy of the run: name a new or empty folder, outside of "
            f"{' and '.join(map(str, folders))}"
        )
    with resume_errors(), plan.kept.open_journal():  # exclusive use
        try:
            for folder, to in folders.items():
                shutil.copytree(folder, to, dirs_exist_ok=True)
        except shutil.Error as error:
            _, path, why = error.args[0][0]
            raise SwarmError(f"can't copy the run to {path}: {why}; remove {out}") from error
        plan = plan._replace(out=out, save_dir=save_dir)
        write_plan(plan)
    return plan


def empty_journal(plan: SwarmPlan) -> None:
    """Remove all members from a stopped run's journal. Raises SwarmError."""
    with resume_errors(), plan.kept.open_journal() as journal:
        journal.go_on_from(journal.view or View(), "the run is resumed")
        (plan.out / ADDRESS).unlink(missing_ok=True)


class _Swarm:
    """The processes of a swarm, what they report, and the remaining kills."""

    def __init__(
        self,
        plan: SwarmPlan,
        kills: Sequence[Kill],
        screen: LiveScreen,
        replacing: bool,
        losses: Losses,
    ) -> None:
        self.run, self.kills, self.screen = plan.run, list(kills), screen
        self.replacing = replacing  # lost nodes; a lost registry always is replaced
        self.losses, self.training, self.options = losses, False, plan.options
        self.device, self.save_dir, self.homes = plan.device, plan.kept.saves, plan.homes
        self.data, self.checkpoints = plan.data, plan.kept.checkpoints
        self.out, run = plan.out.absolute(), plan.run
        self.run_text = without_private(run)  # as the registry has it
        self.logs, self.journal = self.out / "logs", plan.kept.journal.absolute()
        self.stages, self.replicas = run.model.body_stages, run.swarm.replicas
        nodes = (self.stages + 1) * self.replicas
        self.threads = max(1, available_cores() // nodes)
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        self.processes = Processes(self.logs, environment, PLANARIA, plan.work)
        self.events = EventLog(self.logs, "up")
        self.samples = SamplesFile(self.out, run.name)
        self.experiment: ExperimentPipe | None = None
        if (track := plan.options.track) is not None:
            opening = Opening(track, run.name, plan.out.name, self.run_text, str(self.out))
            self.experiment = ExperimentPipe(opening)
        self.experiment_works = True  # its trouble isn't reported yet
        self.story = RunStory(run.steps)
        self.tails: dict[Path, LineReader] = {}
        for path in self.logs.glob("*.jsonl"):  # of the resumed run
            tail = self.tails[path] = LineReader(path)
            tail.skip()
        self.restarts: Counter[str] = Counter()
        self.at_large: set[str] = set()  # slots whose process the registry places
        self.address = ""  # of the registry
        log = plan.options.log
        self.log = "--log-level", log.log_level, "--log-format", log.log_format
        self.page = ""  # its URL
        self.description: Description | None = None
        self.describing: asyncio.Task[None] | None = None
        self.client: RegistryClient | None = None

    # --- the run

    async def train(self, stop: asyncio.Future[int]) -> Ending:
        """Run the swarm until the run is over. Raises SwarmError."""
        self.screen.say(f"starting; logs are in {self.logs}")
        self.screen.say(learning_rate.describe_rate(self.run))
        if problem := learning_rate.warmup_too_long(self.run):
            self.screen.say(problem, Severity.WARNING)
        self._start("registry")
        self.address = await self._registry_address(stop)
        if not stop.done():
            self._start_nodes()
        progressed, committed, announced = time.monotonic(), 0, False
        patience = PATIENCE * self.run.swarm.progress
        while not stop.done():
            self._read()
            self._apply_due_kills()
            self._apply_due_losses()
            order = self.description.view.order if self.description is not None else TRAIN
            if order == STOPPED:
                at = f"at step {self.story.committed}"
                return Ending(1, f"stopped by its operator {at}; {self._continues()}")
            if self.story.finished is not None and order != STOP:
                await self._wait_for_nodes(stop)
                return await self._wait_for_saves(stop)
            self._replace_ended()
            self.screen.show(self.story, self.description, self.stages)
            if self.story.committed > committed or order != TRAIN:
                progressed, committed = time.monotonic(), self.story.committed
            if self.story.stopped is not None:
                if not self.screen.interactive:
                    return Ending(1, self.story.stopped.reason)
                if not announced:
                    self.screen.say("the nodes keep their weights; Ctrl-C ends them")
                announced = True
            elif time.monotonic() - progressed > patience:
                raise SwarmError(
                    f"no step was committed for {patience:.0f} s (step {committed} was the last); "
                    f"{self._awaited()}. The logs are in {self.logs}"
                )
            await _pause(stop, POLL)
        if self.story.stopped is not None:
            return Ending(1, f"the run was stopped: {self.story.stopped.reason}")
        name = signal.Signals(stop.result()).name
        saving = self.save_dir is not None or self.run.policy.checkpoints
        saved = f"; {self._continues()}" if saving else ""
        reason = f"ended by {name} at step {self.story.committed}{saved}"
        return Ending(128 + stop.result(), reason)

    def _continues(self) -> str:
        return f"planaria up --resume {self.out} continues from there"

    async def end(self) -> None:
        """End every process of the swarm, and close all logs."""
        self.events.write(SwarmEnding())
        if self.describing is not None:
            self.describing.cancel()
        try:
            await self.processes.stop(GRACE if self.save_dir is None else SAVING_GRACE)
        finally:
            self.processes.kill_all()
        if self.client is not None:
            await self.client.close()
        self.events.close()
        self.samples.close()
        if self.experiment is not None:
            await asyncio.to_thread(self.experiment.close)

    async def _registry_address(self, stop: asyncio.Future[int]) -> str:
        """Wait until the registry's process has written its address."""
        file = self.out / ADDRESS
        deadline = time.monotonic() + REGISTRY_START
        while not file.exists() and not stop.done():
            for ended in self.processes.ended():
                raise SwarmError(self._failure(ended))
            if time.monotonic() > deadline:
                log = self.processes.log("registry")
                raise SwarmError(
                    f"the registry isn't listening after {REGISTRY_START:g} s; its log {log} ends:"
                    f"\n{last_lines(log)}"
                )
            await _pause(stop, POLL)
        return "" if stop.done() else file.read_text().strip()

    def _start_nodes(self) -> None:
        self.client = RegistryClient([self.address])
        self.describing = asyncio.get_running_loop().create_task(self._describe())
        for place in self.losses.first():
            self._start(place)

    async def _describe(self) -> None:
        assert self.client is not None
        while True:
            with suppress(RegistryUnreachable, JoinRefused):  # the page shows the last answer
                self.description = await self.client.describe(deadline=1.0)
                if (page := self.description.page) and page != self.page:
                    self.page = page
                    self.screen.say(f"watch it at {page}")
                if self.description.run_file not in ("", self.run_text):
                    self.run_text = self.description.run_file
                    self.run = loads(self.run_text)
                    self.story.steps = self.run.steps
            await asyncio.sleep(DESCRIBE)

    def _awaited(self) -> str:
        reports = [entry.report for entry in self.description.members] if self.description else []
        messages = {seat.message for report in reports for seat in report.seats if seat.message}
        return "; ".join(sorted(messages)) or "no node reports what it waits for"

    async def _wait_for_nodes(self, stop: asyncio.Future[int]) -> None:
        """Wait until every node that serves a stage, late replacements too, has the state of the
        last step."""
        deadline = time.monotonic() + LAST_NODES
        while not stop.done():
            self._read()
            self.screen.show(self.story, self.description, self.stages)
            for ended in self.processes.ended():
                self.screen.say(self._failure(ended))
            standbys = [node for node, stages in self._seats().items() if not stages]
            late = [
                slot
                for slot, pid in self.processes.running().items()
                if slot != "registry"
                and self.story.node_of(pid) not in standbys
                and self.story.held_by(pid) != {self.run.steps}
            ]
            if not late and not self._samples_due():
                return
            if time.monotonic() > deadline:
                names = ", ".join(f"node-{slot}" for slot in late) or "samples"
                purpose = "to get the last state" if late else "of the last step"
                self.screen.say(f"no longer waiting for {names} {purpose}")
                return
            await _pause(stop, POLL)

    async def _wait_for_saves(self, stop: asyncio.Future[int]) -> Ending:
        """Keep the nodes while the last step of any stage is in memory only."""
        began, reported = time.monotonic(), False
        while stages := self._unsaved():
            self._read()
            self.screen.show(self.story, self.description, self.stages)
            state, waited = f"the last step of {stage_names(stages)}", time.monotonic() - began
            if stop.done():
                name = signal.Signals(stop.result()).name
                return Ending(128 + stop.result(), f"ended by {name}; {state} was not saved")
            if waited > SLOW_SAVE + self.options.hold:
                return Ending(1, f"{state} was neither saved nor exported")
            if not reported and waited > SLOW_SAVE:
                reported = True
                self.screen.say(
                    f"{state} is in memory only. The nodes run for {self.options.hold:g} s more, "
                    f"and retry to save it: free space in {self.save_dir}, or export the model by "
                    f"planaria export --join {self.address} --out DIR. Ctrl-C discards it",
                    Severity.ERROR,
                )
            self._replace_ended()
            await _pause(stop, POLL)
        return Ending(0, "")

    def _unsaved(self) -> list[int]:
        stages = range(self.stages + 1) if self.save_dir is not None else ()
        return unsaved_stages(self.description, stages, self.run.steps)

    def _samples_due(self) -> bool:
        """Whether generated texts of the last step are outstanding."""
        training, made = self.run.training, self.story.samples
        if not training.sample_every or self.run.steps % training.sample_every:
            return False
        return {p for p in made if made[p].step == self.run.steps} != set(training.prompts)

    # --- events

    def _read(self) -> None:
        for path in self.logs.glob("*.jsonl"):
            if path not in self.tails:
                self.tails[path] = LineReader(path)
        lines = [line for tail in self.tails.values() for line in tail.lines() if "time" in line]
        for line in sorted(lines, key=lambda line: float(line["time"])):
            self._keep(line)
            if "kind" not in line:
                self.story.record(line)
            elif entry := parse(line):
                if isinstance(entry.event, Sampled):
                    self.samples.add(entry.event)
                if news := self.story.hear(entry):
                    self.screen.say(*news)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """Pass a line of a log on to the experiment tracker."""
        if self.experiment is not None:
            self.experiment.tell(line)
            if self.experiment_works and self.experiment.trouble:
                self.experiment_works = False
                self.screen.say(self.experiment.report(), Severity.ERROR)

    # --- processes

    def _start(self, slot: str) -> None:
        try:
            home = self.homes.get(slot)
            namespace = home.namespace if home else None
            pid = self.processes.start(slot, self._command(slot), namespace)
        except OSError as error:
            raise SwarmError(f"can't start a process for {slot}: {error}") from error
        self.events.write(Started(slot=slot, pid=pid))
        if slot != "registry":
            self.losses.started(slot, time.monotonic())

    def _command(self, slot: str) -> list[str]:
        home = self.homes.get(slot)
        host, plain = (home.host, ["--insecure"]) if home else ("127.0.0.1", [])
        if slot == "registry":
            return [
                *("bootstrap", "--run", str(self.out / RUN_FILE), *plain),
                *("--listen", self.address or f"{host}:0"),
                *("--address-file", str(self.out / ADDRESS)),
                *("--journal", str(self.journal)),
                *("--http", self.options.http, *self.log),
                *([] if self.options.price is None else ["--price", str(self.options.price)]),
            ]
        saves = "none" if self.save_dir is None else str(self.save_dir / slot)
        stage = [] if slot in self.at_large else ["--stage", slot.partition(".")[0]]
        module = self.run.model.module
        folders = folder_options(self.run, self.data, self.checkpoints)
        own_code = [] if module is None else ["--allow-module", module]
        return [
            *("node", "--join", self.address, "--name", f"node-{slot}", *stage),
            *("--listen", f"{host}:0", *plain, "--device", self.device, "--cloud", "none"),
            *("--out", str(self.logs), "--threads", str(self.threads), "--save-dir", saves),
            *("--seats", str(self.options.seats or "auto"), *self.log, *own_code, *folders),
        ]

    def _apply_due_kills(self) -> None:
        due = [kill for kill in self.kills if self._has_begun(kill.step)]
        for kill in due:
            self.kills.remove(kill)
            if self.story.finished is not None:
                self.screen.say(f"too late to kill at step {kill.step}: the run is over")
                continue
            self._kill_slots(kill)

    def _has_begun(self, step: int) -> bool:
        if step > 1:
            return self.story.committed >= step - 1
        # A driver begins as soon as it is named and all nodes have built their stages.
        running = [pid for slot, pid in self.processes.running().items() if slot != "registry"]
        return (
            self.description is not None
            and bool(self.description.view.driver)
            and all(self.story.serves(pid) for pid in running)
        )

    def _kill_slots(self, kill: Kill) -> None:
        slots = kill.slots(self.replicas)
        for slot in slots:
            if not self._kill(slot, kill.step):
                self.screen.say(f"node-{slot} has no process to kill at step {kill.step}")
        for slot in slots if self.replacing else ():
            self._start(slot)
        self._check_any_node_left()

    def _kill(self, slot: str, step: int) -> bool:
        """Kill the process in a slot, and remove its saves. Returns whether there was one."""
        now = time.time()
        pid = self.processes.kill(slot)
        if pid is not None:
            if self.save_dir is not None:
                for saves in (self.save_dir / slot).glob("stage-*"):
                    shutil.rmtree(saves, ignore_errors=True)
            victim = self._describe_victim(slot, pid)
            self.events.write(Killed(slot=slot, pid=pid, step=step, **victim), at=now)
        return pid is not None

    def _apply_due_losses(self) -> None:
        """Apply the schedule's losses and replacements."""
        if self.story.finished is not None:
            return
        if not self.training and (self.story.committed or self._has_begun(1)):
            self.training = True
            self.losses.begin(time.monotonic())
        changes = self.losses.due_changes(time.monotonic())
        for place, starts in changes:
            if starts and self.replacing:
                self.at_large |= {place} if self.losses.at_large else set()
                self._start(place)
            elif not starts:
                self._kill(place, self.story.committed + 1)
        if changes:
            self._check_any_node_left()

    def _check_any_node_left(self) -> None:
        """Check that a node is left, or will be started. Raises SwarmError."""
        more = self.replacing and self.losses.more_to_come()
        if not more and not any(slot != "registry" for slot in self.processes.running()):
            raise SwarmError("no node is left, and none will be started")

    def _seats(self) -> dict[str, Sequence[int]]:
        """The stages of each member, by the registry's last answer."""
        members = self.description.view.members if self.description is not None else ()
        return {member.node: stages_of(member) for member in members}

    def _describe_victim(self, slot: str, pid: int) -> dict[str, Any]:
        node, stage = self.story.node_of(pid), stage_of(slot)
        running = self.processes.running()
        left = sum(other.startswith(f"{stage}.") for other in running)
        if seats := self._seats():  # it may serve another stage
            others = map(self.story.node_of, running.values())
            served = Counter(of for other in others for of in seats.get(other or "", ()))
            stage = min(seats.get(node or "", ()), key=lambda of: served[of], default=stage)
            left = served[stage]
        return {"node": node, "stage": stage, "left": left}

    def _replace_ended(self) -> None:
        for ended in self.processes.ended():
            slot = ended.slot
            log = self.processes.log(slot)
            how = describe_status(ended.status)
            exited = Exited(slot=slot, pid=ended.pid, node=None, log=str(log), how=how)
            if slot != "registry":
                exited = replace(exited, **self._describe_victim(slot, ended.pid))
            self.events.write(exited)
            self._read()
            if slot != "registry" and not self.replacing:
                self.screen.say(f"the log {log} ends:\n{last_lines(log, 4)}")
                self._check_any_node_left()
                continue
            self.restarts[slot] += 1
            hopeless = not self.training and ended.status in FINAL - {0}  # another would fail, too
            if hopeless or self.restarts[slot] > MOST_RESTARTS:
                raise SwarmError(self._failure(ended))
            self.screen.say(f"the log {log} ends:\n{last_lines(log, 4)}")
            self._start(slot)

    def _failure(self, ended: EndedProcess) -> str:
        process = "the registry" if ended.slot == "registry" else f"node-{ended.slot}"
        log = self.processes.log(ended.slot)
        repeated = f", {self.restarts[ended.slot]} times" if self.restarts[ended.slot] else ""
        status = describe_status(ended.status) + repeated
        return f"{process} {status}; its log {log} ends:\n{last_lines(log)}"


async def _pause(stop: asyncio.Future[int], seconds: float) -> None:
    await asyncio.wait([stop], timeout=seconds)


# --- results


def wrap_up(run: RunFile, out: Path, console: Console, ending: Ending) -> Ending:
    """Write a run's results, and print the essence. Returns the ending, with all problems."""
    problems = [ending.reason] if ending.reason else []
    records = list(read_events(out / "logs"))
    _write(out / "events.jsonl", "".join(json.dumps(event) + "\n" for event in records), problems)
    events = entries(records)
    lines, audit = _merge_ledgers(out, problems)
    summary = summarize(run, lines, audit, events, ending.reason)
    _write(out / "summary.json", json.dumps(summary, indent=1) + "\n", problems)
    try:
        draw_loss(run, lines, events, out / "loss.png")
    except OSError as error:
        problems.append(f"can't write {out / 'loss.png'}: {error.strerror}")
    except ModuleNotFoundError as error:
        missing = f"no loss.png: {remedy(error)}"
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
    if not ending.reason:
        problems += shortcomings(run, summary)
    for sentence in summary_sentences(summary):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"{out} has {written}", markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        _print_error(console, problem)
    return Ending(ending.status or (1 if problems else 0), "\n".join(problems))


def _print_error(console: Console, problem: str) -> None:
    console.print("error:", style="bold red", end=" ")
    console.print(problem, markup=False, highlight=False, soft_wrap=True)


def _write(path: Path, text: str, problems: list[str]) -> None:
    """Write a result file atomically; append an error to the problems."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        problems.append(f"can't write {path}: {error.strerror}")


def read_events(logs: Path) -> Iterator[dict[str, Any]]:
    """All events in a folder of logs, sorted by time."""
    events = [event for path in logs.glob("events-*.jsonl") for event in LineReader(path).lines()]
    yield from sorted(events, key=lambda event: float(event["time"]))


def _merge_ledgers(out: Path, problems: list[str]) -> tuple[list[Line], Audit]:
    paths = sorted(path for path in (out / "logs").glob("ledger-*.jsonl") if path.stat().st_size)
    if not paths:
        return [], NOTHING
    try:
        merged = merge(paths)
        audit = audit_merged(merged)
    except LedgerError as error:
        problems.append(str(error))
        return [], NOTHING
    with closing(Ledger(out / MERGED, merged.header)) as ledger:
        for line in merged.lines:
            ledger.append(line)
    if ledger.file.trouble:
        problems.append(ledger.file.trouble)
    return merged.lines, audit


def shortcomings(run: RunFile, summary: dict[str, Any]) -> list[str]:
    """Failures of a finished run by its summary, in sentences."""
    problems = []
    if summary["steps"] != run.steps:
        problems.append(f"only {summary['steps']} of {run.steps} steps are in the ledger")
    audit = {k: v for k, v in summary["audit"].items() if k != "expected" and v}
    if audit:
        problems.append(f"the audit found wrong samples: {audit}")
    if not summary["replicas_identical"]:
        problems.append("the replicas of a stage are not identical; don't trust these weights")
    return problems
