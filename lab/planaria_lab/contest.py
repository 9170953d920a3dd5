"""Seconds a step, and of a whole run, by the meter of a published contest.

    python -m planaria_lab.contest       # in the repository's top folder; 15 s of a core

It writes `contest.jsonl` to lab/results/protocol-nanogpt, and prints the tables of that page.

Protocol NanoGPT (github.com/PluralisResearch/ProtocolNanoGPT at 0551bc3: README.md, train_gpt.py,
records/) trains 203,828,352 parameters in eight stages to a validation loss of 3.276. Its score T
is steps times seconds a step. The seconds are measured in windows of ten steps that begin and end
with empty links.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple, get_args

from planaria.node.model.shape import model_config
from planaria.node.run_file import RunFile, load, override
from planaria.node.wire.frame_format import Codec
from planaria_lab.convergence.compare import curve_of, loss_at, reached
from planaria_lab.convergence.times import Runs, read_runs
from planaria_lab.origin import ROOT, origin
from planaria_lab.simulator.swarm import frame_bytes

RESULTS: Final = ROOT / "lab/results"
FOLDER: Final = RESULTS / "protocol-nanogpt"

STAGES: Final = 8
SEQUENCES: Final = 512
"""Samples of a step."""
CONTEXT: Final = 1024
"""Tokens of a sample."""
WINDOW: Final = 10
"""Steps of a window, which is timed as a whole."""
BANDWIDTH: Final = 200e6
"""Of a link, in bits a second."""
DELAY: Final = 0.05
"""Of a message on a link, in seconds."""
HOPS: Final = 1, -1
"""Difference of stage numbers from sender to receiver: forward, backward."""
COUNT: Final = 8
"""Bytes that the meter adds to each message, for the payload's size."""

Meter = Literal["contest", "duplex"]
"""contest: messages to a stage from both sides share one wire, one after the other; each occupies
the wire during its delay, too. duplex: each side has its own wire, and delays occupy none."""
Schedule = Literal["flush", "late"]
"""flush: each step ends before the next begins. late: a step's gradient is applied one step later
(PipeDream-2BW, arXiv 2006.09503), so that no stage waits for the end of a step."""


class Published(NamedTuple):
    """A baseline in the contest's records."""

    bytes_a_token: int  # in each direction
    microbatches: int
    local_seconds: float  # of a step without the simulated links
    seconds: float  # of a step
    steps: int  # to the target loss


PUBLISHED: Final = {
    "dense": Published(2048, 64, 0.539, 100.475, 2925),
    "subspace": Published(322, 32, 0.655, 19.889, 9125),
}
"""From records/20260917_vanilla_baseline and 20260918_reparamssn_baseline; local_seconds from the
logs of their runs without the simulated links."""


def window_seconds(
    sizes: tuple[float, float],
    microbatches: int,
    passes: float,
    *,
    meter: Meter = "contest",
    schedule: Schedule = "flush",
    depth: int = 1,
) -> float:
    """Simulate a window that begins and ends with empty links; return its mean seconds a step.

    `sizes`: bytes of a message of activations, and of a message of gradients. `passes`: seconds of
    a microbatch's forward and backward pass in a stage; the backward pass takes two thirds of them.
    Each stage runs its passes in 1F1B order, with `depth` times as many microbatches in flight.
    Raises ValueError.

    A transfer begins when the message has been sent and the wire is free. A stage receives messages
    in the order of its passes, not in sending order (the contest's SimPipelineStage.add_delay).
    """
    if microbatches < 1 or depth < 1:
        raise ValueError(f"microbatches = {microbatches}, depth = {depth}: both must be 1 or more")
    if schedule == "late" and depth * STAGES > microbatches:
        raise ValueError(
            f"microbatches = {microbatches}: with {depth * STAGES} in flight a gradient is more "
            f"than one step late; take {depth * STAGES} microbatches or more"
        )
    durations = passes / 3, 2 * passes / 3
    on_wire = [8 * size / BANDWIDTH for size in sizes]
    held, after = (DELAY, 0.0) if meter == "contest" else (0.0, DELAY)
    orders = [_order(stage, microbatches, schedule, depth) for stage in range(STAGES)]
    upcoming = [next(order, None) for order in orders]
    clocks = [0.0] * STAGES
    free = [[0.0, 0.0] for _ in range(STAGES)]  # when each stage's wires are free
    sent: dict[tuple[int, int, int], float] = {}  # receiver, direction, microbatch -> when sent
    stage = 0
    while any(upcoming):
        while (task := upcoming[stage]) is not None:
            direction, number = task
            if 0 <= stage - HOPS[direction] < STAGES:
                when = sent.pop((stage, *task), None)
                if when is None:
                    break
                wire = direction if meter == "duplex" else 0
                free[stage][wire] = max(free[stage][wire], when) + on_wire[direction] + held
                clocks[stage] = max(clocks[stage], free[stage][wire] + after)
            clocks[stage] += durations[direction]
            sent[stage + HOPS[direction], direction, number] = clocks[stage]
            upcoming[stage] = next(orders[stage], None)
        stage = (stage + 1) % STAGES
    return max(clocks) / WINDOW


def _order(
    stage: int, microbatches: int, schedule: Schedule, depth: int
) -> Iterator[tuple[int, int]]:
    """Yield a stage's passes in a window: 0 (forward) or 1 (backward), and the microbatch."""
    together = WINDOW * microbatches if schedule == "late" else microbatches
    ahead = min(together, depth * (STAGES - stage))
    for first in range(0, WINDOW * microbatches, together):
        for number in range(first, first + ahead):
            yield 0, number
        for number in range(first, first + together):
            yield 1, number
            if number + ahead < first + together:
                yield 0, number + ahead


def passes_of(kind: str, microbatches: int) -> float:
    """Return the seconds of a microbatch's two passes in a stage, in proportion to its samples.

    The step of a baseline without links counts as M + 7 such pairs of passes: M microbatches in a
    pipeline of eight equal stages. So the seconds include shares of the head and the update.
    """
    known = PUBLISHED[kind]
    each = known.local_seconds / (known.microbatches + STAGES - 1)
    return each * known.microbatches / microbatches


def as_published(kind: str) -> float:
    """Simulate a published baseline; return its seconds a step."""
    known = PUBLISHED[kind]
    size = known.bytes_a_token * CONTEXT * SEQUENCES / known.microbatches + COUNT
    return window_seconds((size, size), known.microbatches, passes_of(kind, known.microbatches))


# --- methods


class Method(NamedTuple):
    """The form in which tensors cross a boundary between stages."""

    rank: int | None  # of the subspace; None: the full width
    activations: Codec
    gradients: Codec

    def __str__(self) -> str:
        codecs: str = self.activations
        if self.gradients != codecs:
            codecs += f", gradients {self.gradients}"
        return codecs if self.rank is None else f"rank {self.rank}, {codecs}"


CODECS: Final[Sequence[tuple[Codec, Codec]]] = [
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int4", "int4"),
]
RANKS: Final = None, 320, 256, 160, 128, 64
METHODS: Final = [Method(rank, *codecs) for rank in RANKS for codecs in CODECS]
METERS: Final[Sequence[Meter]] = get_args(Meter)
SCHEDULES: Final[Sequence[Schedule]] = get_args(Schedule)
MICROBATCHES: Final = 8, 16, 32, 64, 128, 256
DEPTHS: Final = 1, 2, 3


@dataclass(frozen=True)
class ContestRow:
    """The fastest step of a method, by one meter and schedule."""

    method: str
    meter: Meter
    schedule: Schedule
    activations: float  # bytes a token, frame headers included
    gradients: float
    seconds: float  # of a step
    microbatches: int
    in_flight: int  # microbatches at the first stage
    ratio: float | None  # steps to a loss for each step of bf16; None: there are no runs
    total: float | None  # seconds to the target loss, by `ratio`
    total_published: float | None  # ... by the steps of the contest's subspace baseline


def contest_rows(methods: Sequence[Method] = METHODS) -> Iterator[ContestRow]:
    """Yield the rows of all methods, by both meters and both schedules. Raises StudyError,
    RunFileError."""
    narrow, wide = ratio_runs()
    base = load(FOLDER / "run.toml")
    for method in methods:
        ratio = ratio_of(method, base.model.dim or 0, narrow, wide)
        for meter in METERS:
            for schedule in SCHEDULES:
                yield _fastest(method, base, meter, schedule, ratio)


def ratio_runs() -> tuple[Runs, Runs]:
    """Return the runs of the studies of narrow boundaries, of width 128 and of 512. Raises
    StudyError."""
    narrow = read_runs(RESULTS / "bandwidth/runs.jsonl")
    return narrow, read_runs(RESULTS / "bandwidth-512/runs.jsonl")


def _fastest(
    method: Method, base: RunFile, meter: Meter, schedule: Schedule, ratio: float | None
) -> ContestRow:
    kind = "dense" if method.rank is None else "subspace"
    best: tuple[float, int, int] = (math.inf, 0, 0)
    for microbatches in MICROBATCHES:
        sizes = message_bytes(method, base, microbatches)
        passes = passes_of(kind, microbatches)
        candidates = []
        for depth in DEPTHS:
            if schedule == "flush" or depth * STAGES <= microbatches:
                seconds = window_seconds(
                    sizes, microbatches, passes, meter=meter, schedule=schedule, depth=depth
                )
                in_flight = min(microbatches, depth * STAGES)
                candidates.append((round(seconds, 3), in_flight, microbatches))
        best = min(best, *candidates)
        if min(candidates)[0] > 1.2 * best[0]:  # more microbatches only add delays
            break
    seconds, in_flight, microbatches = best
    tokens = CONTEXT * SEQUENCES / microbatches
    activations, gradients = message_bytes(method, base, microbatches)
    steps, of_subspace = PUBLISHED["dense"].steps, PUBLISHED["subspace"].steps
    return ContestRow(
        method=str(method),
        meter=meter,
        schedule=schedule,
        activations=round(activations / tokens, 2),
        gradients=round(gradients / tokens, 2),
        seconds=seconds,
        microbatches=microbatches,
        in_flight=in_flight,
        ratio=None if ratio is None else round(ratio, 3),
        total=None if ratio is None else round(seconds * steps * ratio),
        total_published=None if method.rank is None else round(seconds * of_subspace),
    )


def message_bytes(method: Method, base: RunFile, microbatches: int) -> tuple[int, int]:
    """Return the bytes of the messages of a microbatch's activations and of its gradients.

    A message is a frame of planaria's nodes and `COUNT`. `base`: the run file that the method
    changes. Raises RunFileError.
    """
    run = override(
        base,
        training__microbatch=SEQUENCES // microbatches,
        wire__activations=method.activations,
        wire__gradients=method.gradients,
    )
    model = run.model.model_copy(update={"subspace": method.rank})
    config = model_config(model, 0)
    activations, gradients = (
        COUNT + frame_bytes(run, config, kind) for kind in ("activation", "gradient")
    )
    return activations, gradients


# --- steps to a loss

AT: Final = 200
"""The loss to reach is that of bf16 after this number of the studies' 300 steps."""
SHARES: Final = {1 / 16: "rank 32", 1 / 8: "rank 64", 1 / 4: "rank 128"}
"""Rank as a share of the width -> variant of the study with width 512, with activations in int8
and gradients in int4."""


def ratio_of(method: Method, width: int, narrow: Runs, wide: Runs) -> float | None:
    """Return a method's steps to a loss for each step of bf16; None if there are no runs.

    `narrow` and `wide`: runs of the studies with width 128 and 512. A subspace gets the ratio of
    the largest measured rank, as a share of the width, that isn't above its own. Codecs of a
    subspace are ignored: the studies found that only activations in int4 matter.
    """
    if method.rank is None:
        return step_ratio(narrow, str(method))
    if method.activations == "int4":
        return None
    shares = [share for share in SHARES if share * width <= method.rank]
    return step_ratio(wide, f"{SHARES[max(shares)]}, int8, gradients int4") if shares else None


def step_ratio(runs: Runs, variant: str) -> float | None:
    """Return the steps of a variant to the loss of bf16 after `AT` steps, over `AT`: the mean over
    seeds. None if the variant has no runs, or a run doesn't reach that loss."""
    ratios = [
        reached(curve_of(run), loss_at(curve_of(runs["bf16", seed]), AT)) / AT
        for (name, seed), run in runs.items()
        if name == variant
    ]
    return fmean(ratios) if ratios and max(ratios) < math.inf else None


# --- the page


def baselines_table() -> str:
    """Return a Markdown table of the published seconds a step beside the simulated ones."""
    lines = [
        "| baseline | bytes a token, each way | microbatches | published, s a step | simulated | "
        "| steps | T |",
        f"| --- |{' ---: |' * 7}",
    ]
    for kind, known in PUBLISHED.items():
        simulated = as_published(kind)
        cells = [kind, f"{known.bytes_a_token:,}", str(known.microbatches), f"{known.seconds:.3f}"]
        cells += [f"{simulated:.3f}", f"{simulated / known.seconds - 1:+.1%}", f"{known.steps:,}"]
        cells.append(f"{known.seconds * known.steps:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios_table(narrow: Runs, wide: Runs) -> str:
    """Return a Markdown table of the step ratios in the studies with width 128 and 512."""
    lines = ["| variant | width | seeds | step ratio |", f"| --- |{' ---: |' * 3}"]
    for runs, width in ((wide, 512), (narrow, 128)):
        for variant in dict.fromkeys(name for name, _ in runs):
            ratio = step_ratio(runs, variant)
            if ratio is not None and not variant.endswith("losses"):
                seeds = sum(name == variant for name, _ in runs)
                lines.append(f"| {variant} | {width} | {seeds} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table for each meter, with a line for each method of `rows`."""
    by_method = {(row["method"], row["meter"], row["schedule"]): row for row in rows}
    texts = []
    for meter, title in (("contest", "By the contest's meter"), ("duplex", "By links as they are")):
        lines = [
            f"**{title}**:",
            "",
            "| | bytes | flush: s | microbatches | T | T, 3.12 "
            "| late: s | microbatches | T | T, 3.12 | step ratio |",
            f"| --- |{' ---: |' * 10}",
        ]
        for method in dict.fromkeys(row["method"] for row in rows):
            flush, late = (by_method[method, meter, schedule] for schedule in SCHEDULES)
            mean = (flush["activations"] + flush["gradients"]) / 2
            ratio = "-" if flush["ratio"] is None else f"{flush['ratio']:.2f}"
            cells = [method, f"{mean:,.0f}", *_cells(flush), *_cells(late), ratio]
            lines.append(f"| {' | '.join(cells)} |")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    totals = [row["total"], row["total_published"]]
    return [
        f"{row['seconds']:.2f}",
        f"{row['microbatches']}, {row['in_flight']}",
        *("-" if total is None else f"{total:,}" for total in totals),
    ]


def main() -> None:
    made = origin()
    rows = [{**asdict(row), **made} for row in contest_rows()]
    lines = [json.dumps(row) + "\n" for row in rows]
    (FOLDER / "contest.jsonl").write_text("".join(lines), encoding="utf-8")
    print(baselines_table(), tables(rows), ratios_table(*ratio_runs()), sep="\n")


if __name__ == "__main__":
    main()
