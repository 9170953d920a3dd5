"""Training of a whole swarm in one process, without a network, by the daemon's functions.

Model, windows and recovery are the daemon's. Each stage has one node. Stages are lost between two
steps. By then all background transfers are complete: a running snapshot has its last update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from planaria.node.data.corpus import TRAIN, UNSCORED, VALIDATION
from planaria.node.data.mixture import (
    Data,
    count_scored,
    inputs_and_targets,
    training_windows,
)
from planaria.node.data.windows import microbatch_ids
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.learning_rate import boost, rate_of, warmup_of
from planaria.node.model.lora import Frozen
from planaria.node.model.modules import BodyStage, EmbeddingStage, build_stage
from planaria.node.model.shape import ModelConfig, trained_shapes
from planaria.node.run_file import RunFile, Section, WireSection
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.own_code import load_checked
from planaria.node.stage.torch_stage import guess_stage
from planaria.node.stage.work import autocast_of, join_features, split_features, stage_passes
from planaria.node.state.copies import layout_of, snapshot_section
from planaria.node.state.stage_state import TENSORS
from planaria.node.wire.frame_format import Codec
from planaria.node.wire.tensors import decode, encode
from planaria.recovery import relearning
from planaria.recovery.checkfree import GuessSource
from planaria.recovery.decide import decide
from planaria.recovery.facts import INEXACT, Held, Kind, Left, Rebuild, RollBack, Source, Stop
from planaria.recovery.learner import Learner, Muon, UpdateRule
from planaria.recovery.newton_schulz import orthogonalizing_flops
from planaria.recovery.orders import blocks, order, runs
from planaria.recovery.relearning import PULL, sample_parts
from planaria.recovery.snapshot import (
    Group,
    HeldSnapshot,
    Layout,
    route,
    steps_between,
)
from planaria.recovery.snapshot import decode as decode_update
from planaria_lab.choices import Choice, ChosenSnapshot
from planaria_lab.convergence.averaging import Replicas, Rounds
from planaria_lab.convergence.lessons import BlockSamples, Lesson, LessonState

Omega = Literal["squared", "norm", "clipped", "uniform"]
"""Weight of a neighbour in CheckFree's average: the squared norm of its last gradient, as in nodes;
that norm; that norm, clipped, plus `ADDED`; or 1."""
ADDED: Final = 1e-4
"""Constant that CheckFree's published code adds to a clipped norm."""


class LostError(Exception):
    """The run can't continue; the message says why."""


def neighbour_weight(kind: Omega, source: GuessSource, clip: float) -> float:
    """Return a neighbour's weight in an average. `clip`: norm to which gradients are clipped."""
    norm = math.sqrt(source.omega)
    shares = {"squared": source.omega, "norm": norm, "uniform": 1.0}
    return min(norm, clip) + ADDED if kind == "clipped" else shares[kind]


class Ablation(Section):
    """Settings that the daemon doesn't have."""

    omega: Omega = "squared"
    clip_scope: Literal["global", "stage"] = "global"  # norm to clip by: the model's, each stage's
    swapped: tuple[tuple[int, int], ...] = ()
    """Pairs of stages that every second microbatch visits in swapped order, instead of the
    policy's."""
    copied: dict[int, int] = Field(default_factory=dict)
    """Lost stage -> the stage whose weights it gets. A stage mapped to itself gets its own weights
    of up to `kept_every` steps ago."""
    kept_every: int = Field(default=100, ge=1)
    snapshot_choice: Choice = "priority"  # of the next rows of a running snapshot
    start: Literal["policy", "copy", "random"] = "policy"
    """Weights of a guess: the policy's, those of the stage before (of stage 2 for stage 1), or new
    random ones."""
    anew_until: int = 0  # up to this step a guess is the stage's own initial weights
    second_moment: Literal["fresh", "averaged"] = "fresh"  # Adam's, after a guess
    relearn_share: float = 1.0  # share of the samples of each boundary tensor
    relearn_codec: Literal["none", "bf16", "int8"] = "bf16"  # of kept boundary tensors
    relearn_constant: bool = False  # the learning rate of relearning doesn't fall
    relearn_in_order: bool = False  # each pass takes its pieces in order of time, oldest first
    relearn_pull: Literal["first", "all", "none"] = "first"  # body stages pulled to the guess
    relearn_young: bool = True  # the rate of relearning is lower in the run's first steps
    relearn_adam: float = 0.0  # not 0: relearning uses Adam, at this rate
    relearn_first_steps: bool = False
    """To relearn the first body stage, use `relearning.FIRST` times as many steps of tensors,
    instead of that many times the passes."""
    neighbours_lr: float = 1.0  # factor on the learning rate of stages beside a guessed one
    neighbours_steps: int = 0  # steps with this factor
    relearn_moments: bool = False  # training continues with Adam's moments from relearning
    alone_steps: int = 0  # steps after a guess in which only the guessed stages train
    lost_share: float = 0.0
    """Not 0: instead of stages, this share of all rows or stages is lost, drawn anew each time.
    They are restored from running snapshots that outlive every node, as in SCAR's storage."""
    lost_by: Literal["row", "stage"] = "row"  # unit of `lost_share`
    late: bool = False
    """After warm-up each step applies the gradient of the step before, as PipeDream-2BW without a
    flush (arXiv 2006.09503, section 3.1). A lost stage's waiting gradient is lost."""
    replicas: int = 1  # of each stage, for averaging only
    averaging_feedback: bool = True  # the next step adds what the codec left out
    meet_every: int = Field(default=0, ge=0)
    """Not 0: replicas are pipelines that train apart for this number of steps, then average the
    changes of their weights (arXiv 2311.08105)."""
    outer_lr: float = 0.7  # of the outer optimizer, as published
    outer_momentum: float = 0.9
    round_loss: Literal["peer", "start", "guess", "pipeline"] = "peer"
    """Replacement of a stage that one pipeline loses: the state of another pipeline's stage, the
    same with the weights of the round's start, or a guess. `pipeline`: the whole pipeline is lost
    until the round ends, and the mean is over the others."""

    @model_validator(mode="after")
    def moments_are_adams(self) -> Ablation:
        if self.relearn_moments and not self.relearn_adam:
            raise ValueError("relearn_moments needs relearning by Adam: give relearn_adam its rate")
        return self

    @model_validator(mode="after")
    def several_meet(self) -> Ablation:
        if self.meet_every and (self.replicas < 2 or self.late or self.lost_share):
            raise ValueError(
                f"meet_every = {self.meet_every} is for two replicas or more, not for "
                f"{self.replicas}, and excludes late and lost_share"
            )
        return self


@dataclass
class Stage:
    """A stage with its optimizer and the rest of its state."""

    module: EmbeddingStage | BodyStage
    optimizer: StageOptimizer
    passes: Sequence[Callable[..., Any]]  # of the module, from `work.stage_passes`
    omega: float = 0.0  # squared norm of the last gradient
    boosted_at: int = 0
    waiting: tuple[Tensor, float] | None = None  # last step's gradient, its clip scale

    def delay(self, clip_scale: float) -> float | None:
        """Put the waiting gradient in place of this step's, which waits from now on. Return the
        clip scale of the former; None if none was waiting."""
        gradient = self.optimizer.gradient
        before, self.waiting = self.waiting, (gradient.clone(), clip_scale)
        if before is None:
            return None
        gradient.copy_(before[0])
        return before[1]


class State(NamedTuple):
    """A copy of a stage's whole state."""

    tensors: dict[str, Tensor]
    optimizer_step: int
    omega: float
    boosted_at: int

    @classmethod
    def of(cls, stage: Stage) -> State:
        optimizer = stage.optimizer
        tensors = {name: flat.clone() for name, flat in optimizer.state()}
        return cls(tensors, optimizer.steps, stage.omega, stage.boosted_at)

    def put(self, stage: Stage) -> None:
        stage.optimizer.load(self.tensors.items(), self.optimizer_step)
        stage.omega, stage.boosted_at = self.omega, self.boosted_at


@dataclass
class Adam:
    """Update rule of relearning by the stage's own optimizer, with gradients clipped to norm 1."""

    optimizer: StageOptimizer

    @property
    def tensors(self) -> list[Tensor]:
        return []  # its moments are the stage's

    def step(self, lr: float) -> None:
        norm = math.sqrt(self.optimizer.squared_norm())
        self.optimizer.step(lr, min(1.0, 1 / (norm + 1e-6)))


def update_tokens(config: ModelConfig, ablation: Ablation) -> float:
    """Return the cost of a relearning update beyond its forward and backward pass, in tokens.

    A token costs six operations for each weight in these passes.
    """
    shapes = list(trained_shapes(config, 1).values())
    matrices = () if ablation.relearn_adam else (shape for shape in shapes if len(shape) == 2)
    flops = orthogonalizing_flops(matrices)
    return flops / (6 * sum(map(math.prod, shapes)))


def updates_a_token(run: RunFile, config: ModelConfig, ablation: Ablation) -> float:
    """Return the number of relearning updates for each token of a boundary pair."""
    samples = learned_samples(run.training.microbatch, ablation)
    at_most = relearning.samples_at_a_time(run.recovery.relearn.tokens, config.context)
    return len(sample_parts(samples, at_most)) / (samples * config.context)


def learned_samples(samples: int, ablation: Ablation) -> int:
    """Return how many of the samples in a boundary tensor are learned."""
    return max(1, round(ablation.relearn_share * samples))


class Crossing(torch.autograd.Function):
    """A boundary between two stages: the wire's codecs encode and decode both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: WireSection, config: ModelConfig) -> Tensor:
        ctx.wire, ctx.config = wire, config
        return _as_received(x, "activation", wire.activations, config)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _as_received(gradient, "gradient", ctx.wire.gradients, ctx.config), None, None


def _as_received(x: Tensor, kind: str, codec: Codec, config: ModelConfig) -> Tensor:
    figures, *beside = split_features(x, config, kind)
    if codec != "none":  # encoded bytes needn't leave the device
        (figures,) = decode(*encode([figures], codec), figures.device)
    return join_features([figures, *beside], config)


class Crossings(NamedTuple):
    """Boundary tensors of a microbatch in a step: before its first visit, after it, and so on."""

    order: tuple[int, ...]
    tensors: list[Tensor]  # on the CPU


@dataclass
class Running:
    """A running snapshot of a stage in the memory of its holder."""

    layout: Layout
    sent: ChosenSnapshot
    held: HeldSnapshot
    taken_at: int = -1
    bytes: int = 0  # sent so far, to lost holders, too
    state: tuple[int, float, int] = (0, 0.0, 0)  # Adam's steps, ω, boosted_at


COUNTED: Final = (
    *("updates", "stage_tokens", "stage_updates"),
    *("background_stage_tokens", "background_stage_updates"),
)
"""Keys of a line that grow while relearning continues."""
STATE_CLASSES: Final[Sequence[Any]] = (
    *(frozenset, State, Crossings, Running, Layout, Group, ChosenSnapshot, HeldSnapshot),
    *(BlockSamples, LessonState),
)
"""Classes of all values in `TrainingSwarm.state`."""
KEPT: Final = (
    *("committed", "lineage", "alone", "beside", "since", "checkpoints", "snapshots"),
    "own_weights",
)
"""Attributes in a swarm's state, beside its stages and its boundary tensors."""


@dataclass
class TrainingSwarm:
    """A swarm that trains step by step; `lose` removes stages and rebuilds them."""

    run: RunFile  # resolved
    corpus: Data
    ablation: Ablation = field(default_factory=Ablation)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        run = self.run
        self.config: ModelConfig = run.config_for(self.corpus.vocabulary)
        self.policy = run.policy
        origin = run.model.origin
        checkpoint = None if origin is None else Checkpoint.open(Path(origin))
        own = None if self.config.own is None else load_checked(run, self.config)
        self.beginning = InitialStages(run, self.config, checkpoint, own)
        count, feedback = self.ablation.replicas, self.ablation.averaging_feedback
        self.pipelines = [
            [self._new(stage) for stage in range(self.config.stages + 1)]
            for _ in range(count if self.ablation.meet_every else 1)
        ]
        self.stages = self.pipelines[0]  # of the pipeline that computes or is examined
        self.replicas, self.rounds = None, None
        if count > 1:
            shapes = [
                trained_shapes(self.config, number).values() for number in range(len(self.stages))
            ]
            self.replicas = Replicas(count, run.wire, self.stages, shapes, feedback)
        if self.replicas is not None and self.ablation.meet_every:
            self._check_rounds()
            outer = self.ablation.outer_lr, self.ablation.outer_momentum
            self.rounds = Rounds(self.replicas, self.pipelines, *outer)
        self.windows = training_windows(self.corpus, run.seed, self.config.context, run.batches)
        self.committed = 0
        self.lineage = 0
        self.alone: tuple[int, frozenset[int]] = (0, frozenset())
        """The step up to which only some stages train, and these stages."""
        times = relearning.FIRST if self.ablation.relearn_first_steps else 1
        self.boundary: deque[tuple[int, list[Crossings]]] = deque(
            maxlen=times * run.recovery.relearn.steps
        )
        self.lessons: list[Lesson] = []  # in the background
        self.beside: dict[int, int] = {}  # neighbour of a guess -> last step of its changed rate
        if self.relearns and run.recovery.relearn.enough and self.ablation.relearn_adam:
            raise ValueError(
                "relearn.enough = "
                f"{run.recovery.relearn.enough:g} lets stages relearn in the background, which "
                "excludes relearn_adam, since Adam uses the stage's own moments: give it 0"
            )
        self.since = [0] * len(self.stages)  # the step after which each stage's node joined
        self.checkpoints: dict[tuple[int, int], list[State]] = {}
        self.own_weights: dict[int, Tensor] = {}  # of stages that are copied from themselves
        self._check_named_stages()
        first = run.recovery.snapshot.first
        learning = [
            number for number, stage in enumerate(self.stages) if len(stage.optimizer.weights)
        ]
        sent = [number for number in learning if self.policy.sends(number, first)]
        self.snapshots = {stage: self._new_snapshot(stage) for stage in sent}

    def _new(self, stage: int, seed: int | None = None) -> Stage:
        """Return a stage with the run's initial weights, or with random ones from another seed."""
        if seed is None:
            module = self.beginning.stage(stage)
        else:
            module = build_stage(self.config, stage, seed, self.beginning.own)
        if self.config.lora is not None:
            Frozen(module, self.run.training.precision == "bf16")
        optimizer = StageOptimizer.of_run(module, self.device, self.run)
        return Stage(module, optimizer, stage_passes(module, self.run))

    def _check_rounds(self) -> None:
        """Raise ValueError if the run's pipelines can't train apart."""
        microbatches, count = self.run.training.microbatches, self.ablation.replicas
        if microbatches % count:
            raise ValueError(
                f"a step has {microbatches} microbatches, which {count} pipelines can't share out: "
                "change training.batch or training.microbatch"
            )
        if self.policy.checkpoints or self.relearns:
            raise ValueError(
                "ablation.meet_every goes neither with checkpoints nor with relearning: choose "
                "another recovery.policy than "
                f"{self.run.recovery.policy!r}, and recovery.relearn.passes = 0"
            )

    def _check_named_stages(self) -> None:
        """Raise ValueError if the ablation names absent stages, or swaps one in two pairs."""
        swapped, copied = chain(*self.ablation.swapped), chain(*self.ablation.copied.items())
        for key, stages in {"swapped": [*swapped], "copied": [*copied]}.items():
            if absent := {*stages} - {*range(1, self.config.stages + 1)}:
                raise ValueError(
                    f"ablation.{key} names stage {min(absent)}: choose one of the body stages 1 to "
                    f"{self.config.stages}"
                )
            if key == "swapped" and len({*stages}) < len(stages):
                raise ValueError(
                    f"ablation.swapped = {self.ablation.swapped}: a stage can be in one pair only"
                )

    # --- state

    def state(self) -> dict[str, Any]:
        """Return the state, for `put`. Some parts are the swarm's objects, and change with it."""
        fields = {name: getattr(self, name) for name in KEPT}
        stages = [State.of(stage) for stage in chain(*self.pipelines)]
        lessons = [lesson.state() for lesson in self.lessons]
        replicas = None if self.replicas is None else self.replicas.state()
        rounds = None if self.rounds is None else self.rounds.state()
        tensors = {"stages": stages, "boundary": list(self.boundary), "replicas": replicas}
        return {**fields, **tensors, "rounds": rounds, "lessons": lessons}

    def put(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises KeyError or ValueError for the state of another run."""
        for stage, saved_stage in zip(chain(*self.pipelines), state["stages"], strict=True):
            saved_stage.put(stage)
        for name in KEPT:
            setattr(self, name, state[name])
        for running in self.snapshots.values():
            running.sent.sent = running.sent.sent.to(self.device)
        self.boundary.extend(state["boundary"])
        if self.replicas is not None:
            self.replicas.put(state["replicas"])
        if self.rounds is not None:
            self.rounds.put(state["rounds"])
        for lesson in state["lessons"]:
            self.lessons.append(self._lesson(lesson.block, lesson.pieces, lesson.passes, lesson.lr))
            self.lessons[-1].put(lesson)

    # --- training

    def step(self, loss_soon: bool = True) -> float:
        """Train the next step; return its mean loss, nats a token. Without `loss_soon` no boundary
        tensors are kept."""
        training, rounds = self.run.training, self.rounds
        step = self.committed + 1
        ids = self.windows.ids(step)
        ahead = self._ahead()
        keeps = self.relearns and loss_soon
        losses, crossed, scored = [], [], 0
        present = [0] if rounds is None else rounds.present
        for place, pipeline in enumerate(present):
            self.stages = self.pipelines[pipeline]
            share = range(place, training.microbatches, len(present))
            chosen = [microbatch_ids(ids, number, training.microbatch) for number in share]
            tokens = count_scored(self.corpus, self.config.context, np.concatenate(chosen))
            for number, samples in zip(share, chosen, strict=True):
                loss, crossings = self._compute(number, samples, max(1, tokens), keeps)
                losses.append(loss)
                crossed.append(crossings)
            if self.replicas is not None and rounds is None:
                self.replicas.average(step, training.microbatches)
            self._commit(step, ahead)
            if rounds is not None:
                rounds.trained(pipeline, sum(map(len, chosen)))
            scored += tokens
        self.committed = step
        if rounds is not None and (step % self.ablation.meet_every == 0 or step == self.run.steps):
            rounds.meet(step, training.microbatches)
        self.stages = self.pipelines[present[0]]
        if keeps:
            self.boundary.append((step, crossed))
        else:
            self.boundary.clear()
        self._keep_ready()
        return math.fsum(losses) / max(1, scored)

    def _compute(
        self, microbatch: int, samples: NDArray[np.int64], scored: int, keeps: bool
    ) -> tuple[float, Crossings]:
        """Add the gradient of a microbatch's losses / `scored`. Return the sum of its losses, and
        its boundary tensors, if it `keeps` them."""
        visits = self.order(self.committed * self.run.training.microbatches + microbatch)
        tensors: list[Tensor] | None = [] if keeps else None
        with autocast_of(self.run, self.device):
            loss = self._forward(visits, tensors, *self._samples(TRAIN, samples))
        replicas = self.replicas if self.rounds is None else None
        with nullcontext() if replicas is None else replicas.computing(microbatch):
            (loss / scored).backward()  # type: ignore[no-untyped-call]
        return loss.item(), Crossings(visits, tensors or [])

    def order(self, microbatch: int) -> tuple[int, ...]:
        """Return the order of a microbatch; microbatches of the run are counted from 0."""
        pairs = self.ablation.swapped
        if not pairs or microbatch % 2 == 0:
            return order(microbatch, self.config.stages, self.policy.swapped and not pairs)
        partners = dict([*pairs, *(pair[::-1] for pair in pairs)])
        return tuple(partners.get(stage, stage) for stage in range(1, self.config.stages + 1))

    @property
    def window_tokens(self) -> int:
        return self.run.training.batch * self.config.context

    @property
    def share_of_a_stage(self) -> float:
        """A body stage's share of a step's computing, by weights; the embedding costs nothing."""
        sizes = [len(stage.optimizer.weights) for stage in self.stages]
        head = sizes[0] - self.config.vocabulary * self.config.written
        return sizes[1] / (head + sum(sizes[1:]))

    @property
    def relearns(self) -> bool:
        return self.run.recovery.relearn.passes > 0

    @property
    def updates_beside(self) -> int:
        """Updates of a background lesson in each step. If the run file leaves the number to gaps:
        as many as cost the stage's own computing, as if its node were idle half of the time."""
        if each_step := self.run.recovery.relearn.each_step:
            return each_step
        tokens = 1 / updates_a_token(self.run, self.config, self.ablation)
        tokens += update_tokens(self.config, self.ablation)
        return max(1, round(self.window_tokens / tokens))

    def _samples(self, split: str, ids: NDArray[np.int64]) -> list[Tensor]:
        """Return inputs, targets and, if attention is block-causal, the beginnings of documents."""
        context, apart = self.config.context, self.config.block_causal
        arrays = inputs_and_targets(self.corpus, split, context, ids, apart)
        return [torch.from_numpy(each).to(self.device) for each in arrays]

    def _forward(
        self,
        visits: Sequence[int],
        crossed: list[Tensor] | None,
        inputs: Tensor,
        targets: Tensor,
        begins: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the tokens' losses. Append tensors that cross between stages to
        `crossed`, unless it is None."""
        embed, loss = self.stages[0].passes
        x = embed(inputs, begins)
        for stage in visits:
            (blocks,) = self.stages[stage].passes
            x = blocks(self._crosses(x, crossed))
        total: Tensor = loss(self._crosses(x, crossed), targets)
        return total

    def _crosses(self, x: Tensor, crossed: list[Tensor] | None) -> Tensor:
        received: Tensor = Crossing.apply(x, self.run.wire, self.config)  # type: ignore[no-untyped-call]
        if crossed is not None:
            crossed.append(self._packed(received.detach()))
        return received

    def _packed(self, x: Tensor) -> Tensor:
        if self.ablation.relearn_codec == "int8":
            return decode(*encode([x.float().cpu()], "int8"))[0].to(torch.bfloat16)
        exact = self.ablation.relearn_codec == "none"
        return x.to("cpu", torch.float32 if exact else torch.bfloat16, copy=True)

    def _commit(self, step: int, ahead: Mapping[int, Tensor]) -> None:
        training, recovery = self.run.training, self.run.recovery
        for stage in self.stages:
            stage.omega = stage.optimizer.squared_norm()
        whole = math.fsum(stage.omega for stage in self.stages)
        lr = rate_of(step, self.run)
        until, alone = self.alone
        for number, stage in enumerate(self.stages):
            norm = math.sqrt(whole if self.ablation.clip_scope == "global" else stage.omega)
            scale = boost(step, stage.boosted_at, recovery.lr_boost, recovery.lr_boost_steps)
            if step <= self.beside.get(number, 0):
                scale *= self.ablation.neighbours_lr
            clip_scale = min(1.0, training.clip / (norm + 1e-6))
            late = self.ablation.late and step > warmup_of(self.run)
            applied = stage.delay(clip_scale) if late else clip_scale
            if applied is not None and (step > until or number in alone):
                stage.optimizer.step(lr * scale, applied)
            stage.optimizer.zero_gradient()
            if number in ahead:
                stage.optimizer.weights.add_(ahead[number])

    @torch.no_grad()
    def validate(self, samples: Tensor | None = None) -> float:
        """Return the mean loss, nats a token, of `samples`, int64 [n, context + 1]. Default: the
        run's validation microbatches, as in the daemon."""
        if samples is None:
            training = self.run.training
            wanted = range(training.validation_microbatches * training.microbatch)
            held_out = self.corpus.validation_ids(self.config.context, wanted)
            tensors = self._samples(VALIDATION, held_out)
        else:
            tensors = [samples[:, :-1].to(self.device), samples[:, 1:].to(self.device)]
        natural = order(0, self.config.stages, swapped=False)
        parts = zip(*(torch.split(tensor, 64) for tensor in tensors), strict=True)
        losses = [self._forward(natural, None, *part).item() for part in parts]
        return math.fsum(losses) / max(1, int((tensors[1] != UNSCORED).sum()))

    # --- state kept for recovery

    def _keep_ready(self) -> None:
        recovery = self.run.recovery
        for number, source in self.ablation.copied.items():
            if number == source and (self.committed - 1) % self.ablation.kept_every == 0:
                self.own_weights[number] = self.stages[number].optimizer.weights.clone()
        if self.policy.checkpoints and self.committed % recovery.checkpoint.every == 0:
            state = [State.of(stage) for stage in self.stages]
            self.checkpoints = {(self.lineage, self.committed): state}
        snapshot = snapshot_section(self.run, self.config)
        period = steps_between(snapshot.fraction, snapshot.period)
        for number, running in self.snapshots.items():
            if running.taken_at < 0 or self.committed - running.taken_at >= period:
                self._send(number, running)

    def _new_snapshot(self, number: int) -> Running:
        """Return a snapshot that no holder has. Until it is whole, updates have the run file's
        fraction of the rows: what a step's links carry, of which the policy may need less."""
        snapshot = snapshot_section(self.run, self.config)
        layout = layout_of(self.config, number)
        sent = ChosenSnapshot(
            layout,
            self.ablation.snapshot_choice,
            snapshot.fraction,
            snapshot.codec,
            snapshot.moments,
            (self.run.seed, number),
            self.run.recovery.snapshot.fraction,
        )
        held = HeldSnapshot(layout, layout.tensors if snapshot.moments else 1)
        return Running(layout, sent, held)

    def _send(self, number: int, running: Running) -> None:
        stage = self.stages[number]
        tensors = [flat for _, flat in stage.optimizer.state()]
        update = running.sent.take(self.committed, tensors)
        payload = (update.payload, update.blocks, update.tensors, update.codec)
        running.held.overlay(self.committed, *decode_update(running.layout, *payload))
        running.taken_at = self.committed
        running.bytes += update.payload.nbytes
        running.state = stage.optimizer.steps, stage.omega, stage.boosted_at

    def _holders(self, stage: int) -> set[int]:
        """Return the stages whose nodes hold the snapshot of `stage`."""
        members = [(str(number), number) for number in range(self.config.stages + 1)]
        way = route(stage, members, self.config.stages)
        return set() if way is None else set(map(int, way.holders))

    def _held(self, lost: frozenset[int]) -> list[Held]:
        """Return the states that survivors hold. Each node is named by its stage. Files survive
        their node."""

        def held(
            kind: Kind, at: int, stage: int, step: int, lineage: int, mean: float = math.inf
        ) -> Held:
            return Held(kind, Source(str(at), stage, step, lineage), mean_step=mean)

        now = self.committed, self.lineage
        last, states = self.config.stages, []
        for stage in range(last + 1):
            if stage in lost and self.policy.twins and (stage - 1) % (last + 1) not in lost:
                states.append(held("redundant", (stage - 1) % (last + 1), stage, *now))
            running = self.snapshots.get(stage)
            if running is not None and not running.held.missing:
                age = running.held.staleness()
                for holder in self._holders(stage) - lost:
                    state = held("snapshot", holder, stage, age.newest, self.lineage, age.mean)
                    states.append(state)
            for lineage, step in self.checkpoints:
                states.append(held("checkpoint", stage, stage, step, lineage))
        return states

    # --- losses

    def lose(self, stages: Sequence[int]) -> list[dict[str, Any]]:
        """Lose all nodes of these stages at once, and recover. Return a line for each rebuild, of
        which `perturbation` is ||weights after it - weights before it||. Raises LostError."""
        if self.ablation.lost_share:
            return [self._lose_share(self.ablation.lost_share)]
        if self.rounds is not None:
            return self._lose_in_round(self.rounds, stages)
        return self._lose_stages(stages)

    def _lose_in_round(self, rounds: Rounds, stages: Sequence[int]) -> list[dict[str, Any]]:
        """Lose these stages, or all, of one pipeline; in each round it is another, in turn. A line
        has `samples`: those of this round, whose gradients for the stage are lost."""
        method, present = self.ablation.round_loss, rounds.present
        hit = present[(self.committed // self.ablation.meet_every) % len(present)]
        others = [pipeline for pipeline in present if pipeline != hit]
        if not others:
            raise LostError(
                f"only pipeline {hit} trains in this round: no other can replace what it loses"
            )
        lost = range(len(self.stages)) if method == "pipeline" else stages
        samples = {stage: rounds.take_lost(hit, stage) for stage in lost}
        beside: dict[str, Any] = {"pipeline": hit, "step": self.committed}
        if method == "pipeline":
            rounds.present = others
            return [{"stage": None, "method": method, "samples": max(samples.values()), **beside}]
        self.stages = self.pipelines[hit]
        before = {stage: self.stages[stage].optimizer.weights.clone() for stage in lost}
        if method == "guess":
            return [
                {**line, **beside, "samples": samples[line["stage"]]}
                for line in self._lose_stages(stages)
            ]
        lines = []
        for number in lost:
            stage = self.stages[number]
            State.of(self.pipelines[others[0]][number]).put(stage)
            if method == "start":
                stage.optimizer.weights.copy_(rounds.start[number])
            moved = torch.linalg.vector_norm(stage.optimizer.weights - before[number]).item()
            line = {"stage": number, "method": method, "samples": samples[number]}
            lines.append({**line, **beside, "perturbation": moved})
        return lines

    def _lose_stages(self, stages: Sequence[int]) -> list[dict[str, Any]]:
        lost = frozenset(stages)
        before = {stage: self.stages[stage].optimizer.weights.clone() for stage in lost}
        self.lessons = [lesson for lesson in self.lessons if not lost & lesson.learners.keys()]
        guessed = {number for number, s in enumerate(self.stages) if s.boosted_at == self.committed}
        survivors = {
            number: [str(number)] for number in range(len(self.stages)) if number not in lost
        }
        left = Left(
            self.config.stages,
            self.committed,
            survivors,
            self.lineage,
            self._held(lost),
            frozenset(guessed - lost) if self.committed else frozenset(),
            origin=[] if self.run.model.origin is None else ["checkpoint"],
            adapters=self.config.lora is not None,
        )
        decisions = {
            stage: decide(stage, left, self.policy, self.run.recovery.strict, self.relearns)
            for stage in sorted(lost)
        }
        for decision in decisions.values():
            if isinstance(decision, Stop):
                raise LostError(decision.reason)
            if isinstance(decision, RollBack):
                return [self._roll_back(sorted(lost), decision)]
        rebuilds = {number: d for number, d in decisions.items() if isinstance(d, Rebuild)}
        lines = {number: self._rebuild(decision) for number, decision in rebuilds.items()}
        self._forget(lost)
        for stage in lost:
            self.since[stage] = self.committed
            self.stages[stage].waiting = None
        inexact = [number for number, decision in rebuilds.items() if decision.method in INEXACT]
        if self.relearns:
            for block in blocks(map(self.order, range(2)), inexact):
                relearned = self._relearn(block)
                for stage in block:
                    lines[stage]["relearned"] = relearned
        for number in inexact:
            for side in {number - 1, number + 1} - lost - {0, self.config.stages + 1}:
                self.beside[side] = self.committed + self.ablation.neighbours_steps
        if self.ablation.alone_steps and inexact:
            self.alone = self.committed + self.ablation.alone_steps, frozenset(inexact)
        for stage, line in lines.items():
            moved = self.stages[stage].optimizer.weights - before[stage]
            line["perturbation"] = torch.linalg.vector_norm(moved).item()
        return list(lines.values())

    def _lose_share(self, share: float) -> dict[str, Any]:
        """Lose a share of all rows or stages and restore them from snapshots; return the line.

        This is SCAR's experiment (section 5): partial recovery, or full recovery if `share` is 1.
        """
        drawn = np.random.default_rng([self.run.seed, self.committed])
        squared, ages = 0.0, []
        whole = drawn.permutation(len(self.stages))[: round(share * len(self.stages))]
        for number, stage in enumerate(self.stages):
            if number not in self.snapshots:
                continue
            running, optimizer = self.snapshots[number], stage.optimizer
            layout, taken_at = running.layout, running.held.taken
            count = round(share * layout.blocks)
            if self.ablation.lost_by == "stage":
                count = layout.blocks if number in whole else 0
            lost = torch.from_numpy(np.sort(drawn.permutation(layout.blocks)[:count]))
            if (taken_at[lost] < 0).any():
                raise LostError(f"the snapshot of stage {number} is not whole yet")
            before = optimizer.weights.clone()
            tensors = [flat for _, flat in optimizer.state()]
            for flat, held_tensor in zip(tensors, running.held.tensors, strict=False):
                rows = layout.gather(held_tensor, lost)
                layout.scatter(flat, lost, [of_width.to(flat.device) for of_width in rows])
            moved = torch.linalg.vector_norm(optimizer.weights - before, dtype=torch.float64)
            squared += moved.item() ** 2
            ages += (self.committed - taken_at[lost]).tolist()
        return {
            "stage": None,
            "method": "snapshot",
            "step": self.committed,
            "share": share,
            "staleness": sum(ages) / max(1, len(ages)),
            "perturbation": math.sqrt(squared),
        }

    def _roll_back(self, lost: Sequence[int], to: RollBack) -> dict[str, Any]:
        before, self.committed = self.committed, to.step
        self.boundary.clear()
        self.lessons.clear()
        state = self.checkpoints.get((to.lineage, to.step))
        for number, stage in enumerate(self.stages):
            if state is not None:
                state[number].put(stage)
            else:
                self.stages[number] = self._new(number)
            if self.replicas is not None:
                self.replicas.forget(number)
        self.lineage += 1
        return {"stage": list(lost), "method": "checkpoint", "step": to.step, "from": before}

    def _rebuild(self, decision: Rebuild) -> dict[str, Any]:
        """Rebuild a stage from state that survivors had before this loss; return its line."""
        number = decision.stage
        stage = self.stages[number]
        line: dict[str, Any] = {
            "stage": number,
            "method": decision.method,
            "step": self.committed,
            "fallback": decision.fallback,
        }
        match decision.method:
            case "redundant" | "origin":
                pass  # a twin has equal state; beside adapters, nothing of stage 0 is trained
            case "pretrained":
                stage.optimizer.load([("weights", self._new(number).optimizer.weights)], 0)
                stage.omega, stage.boosted_at = 0.0, self.committed
            case "initial-weights":
                stage.optimizer.load([("weights", self._new(number).optimizer.weights)], 0)
                stage.omega = 0.0
            case "adapters-anew":
                stage.optimizer.load([("weights", self.beginning.adapters(number))], 0)
                stage.omega, stage.boosted_at = 0.0, self.committed
            case "snapshot":
                running = self.snapshots[number]
                line["staleness"] = self.committed - running.held.staleness().mean
                steps, stage.omega, stage.boosted_at = running.state
                tensors = list(zip(TENSORS, running.held.tensors, strict=False))
                stage.optimizer.load(tensors, steps if len(tensors) > 1 else 0)
            case _:
                self._guess(decision)
        return line

    def _guess(self, decision: Rebuild) -> None:
        number, ablation = decision.stage, self.ablation
        stage = self.stages[number]
        sources = [
            GuessSource(s.stage, self.stages[s.stage].optimizer.weights, self.stages[s.stage].omega)
            for s in decision.sources
        ]
        _, stage.omega = guess_stage(self.beginning, number, decision.method, sources)
        clip = self.run.training.clip
        sources = [s._replace(omega=neighbour_weight(ablation.omega, s, clip)) for s in sources]
        weights, _ = guess_stage(self.beginning, number, decision.method, sources)
        if (source := ablation.copied.get(number)) is not None:
            weights = self.stages[source].optimizer.weights
            if source == number:
                weights = self.own_weights[number]
        elif self.committed <= ablation.anew_until:
            weights = self._new(number).optimizer.weights
        elif ablation.start == "random":
            weights = self._new(number, self.run.seed + self.committed + 1).optimizer.weights
        elif ablation.start == "copy":
            weights = self.stages[number - 1 if number > 1 else 2].optimizer.weights
        optimizers = [self.stages[source.stage].optimizer for source in decision.sources]
        state, steps = [("weights", weights.clone())], 0
        if ablation.second_moment == "averaged":
            moment = torch.stack([optimizer.second_moment for optimizer in optimizers]).mean(dim=0)
            steps = min(optimizer.steps for optimizer in optimizers)
            state += [("first_moment", torch.zeros_like(moment)), ("second_moment", moment)]
        stage.optimizer.load(state, steps)
        stage.boosted_at = self.committed

    def _forget(self, lost: frozenset[int]) -> None:
        """Drop the error feedback and the snapshots that only lost nodes held. Snapshots of lost
        stages are sent anew."""
        if self.replicas is not None and self.rounds is None:
            for stage in lost:
                self.replicas.forget(stage)
        for number, running in self.snapshots.items():
            if self._holders(number) <= lost:
                new = self._new_snapshot(number)
                self.snapshots[number] = replace(new, bytes=running.bytes)
            elif number in lost:
                running.sent = self._new_snapshot(number).sent

    # --- relearning

    def _relearn(self, block: Sequence[int]) -> dict[str, Any]:
        """Relearn a block of guessed stages as the daemon does; return the lesson's line.

        Measure the residual, train on one piece at a time, then keep or undo the result. A single
        stage whose residual is low enough relearns the rest in the background.
        """
        recovery, ablation = self.run.recovery, self.ablation
        pieces = self._pieces(block)
        guessed = {number: State.of(self.stages[number]) for number in block}
        for number in block:
            self.stages[number].optimizer.load([("weights", guessed[number].tensors["weights"])], 0)
        lr = ablation.relearn_adam or recovery.relearn.lr
        if ablation.relearn_young:
            lr = relearning.peak_rate(lr, self.committed)
        lesson = self._lesson(block, pieces, self._passes(block), lr)
        before = after = lesson.residual()
        lesson.line |= {"before": before} | dict.fromkeys(COUNTED, 0)
        enough = recovery.relearn.enough if len(block) == 1 else 0.0
        while not lesson.over and not (enough and after <= enough):
            lesson.update()
            if enough and lesson.looks:
                after = lesson.look()
        if lesson.over:
            after = lesson.residual()
        undone = not (math.isfinite(after) and after <= before)
        lesson.line |= {"after": after, "undone": undone}
        for number in block:
            optimizer = self.stages[number].optimizer
            optimizer.zero_gradient()
            if not undone and not ablation.relearn_moments:
                guessed[number].tensors["weights"].copy_(optimizer.weights)
            if undone or not ablation.relearn_moments:
                guessed[number].put(self.stages[number])
        if not lesson.over:
            self.lessons.append(lesson)
        return lesson.line

    def _lesson(
        self, block: Sequence[int], pieces: Sequence[BlockSamples], passes: int, lr: float
    ) -> Lesson:
        ablation = self.ablation
        pull = {"first": relearning.pull(block), "all": PULL, "none": 0.0}[ablation.relearn_pull]
        bf16 = self.run.training.precision == "bf16"
        learners = {}
        for number in block:
            stage = self.stages[number]
            update: UpdateRule = Muon(stage.module, pull)
            if ablation.relearn_adam:
                update = Adam(stage.optimizer)
            learners[number] = Learner(stage.module, lr, bf16, update)
        ways = ablation.relearn_in_order, ablation.relearn_constant
        within = self.run.recovery.relearn.within
        return Lesson(learners, pieces, passes, lr, *ways, within, self.device)

    def _passes(self, block: Sequence[int]) -> int:
        wanted = self.run.recovery.relearn.passes
        return wanted if self.ablation.relearn_first_steps else relearning.pass_count(wanted, block)

    def _ahead(self) -> dict[int, Tensor]:
        """Relearn in the background of this step. Return the changes of weights by stage; the
        weights themselves are unchanged."""
        moved = {}
        for lesson in self.lessons:
            optimizers = {number: self.stages[number].optimizer for number in lesson.learners}
            before = {number: optimizer.weights.clone() for number, optimizer in optimizers.items()}
            lesson.in_background(self.updates_beside)
            for number, optimizer in optimizers.items():
                moved[number] = optimizer.weights - before[number]
                optimizer.weights.copy_(before[number])
                optimizer.zero_gradient()
        self.lessons = [lesson for lesson in self.lessons if not lesson.over]
        return moved

    def _pieces(self, block: Sequence[int]) -> list[BlockSamples]:
        """Return the pieces that the block learns from, the oldest step's first. The nodes before
        and behind a chain kept its inputs and outputs, unless they are lost, too, or joined
        later."""
        samples = []
        relearn = self.run.recovery.relearn
        at_most = relearning.samples_at_a_time(relearn.tokens, self.config.context)
        longer = self.ablation.relearn_first_steps and 1 in block
        oldest = self.committed - relearn.steps * (relearning.FIRST if longer else 1)
        for step, crossed in self.boundary:
            if step <= oldest:
                continue
            for visits, tensors in crossed:
                route = (0, *visits, 0)
                learned = learned_samples(len(tensors[0]), self.ablation)
                for run in runs(visits, block):
                    if step <= max(self.since[route[run.start]], self.since[route[run.end + 1]]):
                        continue
                    samples += [
                        BlockSamples(
                            step, run.stages, tensors[run.start][part], tensors[run.end][part]
                        )
                        for part in sample_parts(learned, at_most)
                    ]
        return samples


def train(run: RunFile, corpus: Data) -> Iterator[float]:
    """Train a run without failures; yield the loss of each step."""
    swarm = TrainingSwarm(run, corpus)
    for _ in range(run.steps):
        yield swarm.step()
