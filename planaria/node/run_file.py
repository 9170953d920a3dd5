"""The run file: one training job in TOML. `load` and `loads` say what is wrong with a bad one."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from planaria.bootstrap.escaping import shortened
from planaria.bootstrap.files import read_small
from planaria.node.data.batches import Batches
from planaria.node.data.mixture_cycle import turns_of
from planaria.node.model.learning_rate import WARMUP, Schedule, peak_of, warmup_of
from planaria.node.model.shape import (
    ADAM_BYTES,
    BETAS,
    PROJECTIONS,
    AttentionMask,
    Base,
    Family,
    ModelConfig,
    Own,
    RopeType,
    model_config,
)
from planaria.recovery.policy import POLICIES, Policy

Optimizer = Literal["adamw", "muon"]
Averaging = Literal["none", "bf16", "fp16", "int8", "lowrank"]
AUDITED: Final = "none", "bf16", "fp16", "int8"
"""Codecs whose sums owe at most one rounding, so that they can be audited."""
Narrow = Literal["none", "bf16", "fp16", "int8", "int4"]
Beta = Annotated[float, Field(ge=0, lt=1)]


HEARTBEAT = 0.5
"""Seconds between two heartbeats on a link (node/wire/link.py)."""


LEASE = 1.0
"""Seconds: a node that loads a library, or shares its processor, is silent for nearly that long."""


MOST_PARAMETERS = 2**36
"""Maximum in a stage: 1 TiB at ADAM_BYTES each. No machine that serves one stage has more."""
MOST_LAYERS = 2**14
MOST_PAYLOAD = 4 * 2**30
"""Maximum bytes in a frame (node/wire/frame_format.py)."""
MOST_NODES = 10_000
"""Maximum members of a run (bootstrap/membership.py)."""
MOST_VISITS = 2**19
"""Maximum visits of a step's microbatches to stages: the message that begins it names each."""

DATA = "data/prose"
PRIVATE: Final = "notify"
"""The section that stays on the registry's machine: a command may contain a secret."""
LOCAL = "local"
"""Key in the context of validation: the run file is on this machine, where `~` has a meaning."""


def _expand_home(value: Any, info: ValidationInfo) -> Any:
    expands = isinstance(value, str) and (info.context or {}).get(LOCAL)
    return os.path.expanduser(value) if expands else value  # noqa: PTH111 (which raises without HOME)


FolderName = Annotated[
    str, BeforeValidator(_expand_home), Field(max_length=4096, pattern=r"^[^\x00]*$")
]


class RunFileError(ValueError):
    """The run file can't be used; the message names file, key, value and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )


Figure = Annotated[float, Field(gt=0, le=1e6)]


class RopeScalingSection(Section):
    """How RoPE is stretched, under the names of Hugging Face's config.json (shape.RopeScaling)."""

    rope_type: RopeType = "llama3"
    factor: float = Field(ge=1, le=1e6)
    original_max_position_embeddings: int | None = Field(default=None, ge=2, le=2**30)
    low_freq_factor: Figure | None = None
    high_freq_factor: Figure | None = None
    beta_fast: Figure | None = None
    beta_slow: Figure | None = None
    attention_factor: Figure | None = None
    mscale: Figure | None = None
    mscale_all_dim: Figure | None = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def complete(self) -> RopeScalingSection:
        if self.rope_type != "llama3":
            return self
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is None or high is None or self.original_max_position_embeddings is None:
            raise ValueError(
                "rope_type = llama3 needs low_freq_factor, high_freq_factor and "
                "original_max_position_embeddings"
            )
        if low >= high:
            raise ValueError(
                f"low_freq_factor = {low:g} must be less than high_freq_factor = {high:g}"
            )
        return self


ParameterName = Annotated[str, Field(max_length=200, pattern=r"^[\w.]+$")]
Shape = Annotated[
    tuple[Annotated[int, Field(ge=1, le=2**32)], ...], Field(min_length=1, max_length=8)
]
NamedShapes = Annotated[
    tuple[tuple[ParameterName, Shape], ...], Field(min_length=1, max_length=1000)
]


class PartsSection(Section):
    """What the code of `model.module` builds: for those who don't load it, and for those who do to
    see whether theirs is the same."""

    source: str = Field(max_length=64, description="digest of the code")
    ends: NamedShapes = Field(description="parameters of stage 0")
    block: NamedShapes = Field(description="parameters of each layer")
    decoder: str = Field(
        default="", max_length=2**16, description="config.json of a model of transformers' code"
    )
    layers: str = Field(
        default="layers", max_length=200, pattern=r"^[\w.]+$", description="list of the layers"
    )
    others: tuple[NamedShapes, ...] = Field(
        default=(), max_length=16, description="parameters of layers unlike the block"
    )
    kinds: tuple[Annotated[int, Field(ge=0, le=16)], ...] = Field(
        default=(), max_length=2**14, description="0: like the block; N: like the Nth of the others"
    )
    not_linear: tuple[ParameterName, ...] = Field(
        default=(), max_length=1000, description="modules of a layer that adapters can't be for"
    )


def _known_stages(value: Any) -> Any:
    sizes = value if isinstance(value, list | tuple) else [value]
    valid = sizes and all(type(size) is int and size > 0 for size in sizes)
    if not valid or (len(sizes) if sizes is value else value) > 1024 or sum(sizes) > MOST_LAYERS:
        raise ValueError("must be a number of stages, at most 1024, or a list of each one's layers")
    return value


Stages = Annotated[int | tuple[int, ...], BeforeValidator(_known_stages)]


class ModelSection(Section):
    """A preset, with any of its figures overridden, the model of a checkpoint, or one that code
    builds."""

    module: str | None = Field(
        default=None,
        max_length=200,
        pattern=r"^[^\W\d][\w.]*:[^\W\d]\w*$",
        description="code of an architecture, package.module:build",
    )
    parts: PartsSection | None = Field(default=None, description="parameters that it builds")

    origin: FolderName | None = Field(
        default=None, alias="from", min_length=1, description="checkpoint that the run begins from"
    )
    blueprint: FolderName | None = Field(
        default=None,
        alias="config",
        min_length=1,
        description="folder with the config.json of a model whose weights are new",
    )
    content: tuple[Annotated[str, Field(max_length=64)], ...] | None = Field(
        default=None, max_length=1025, description="digests of the stages' weights in it"
    )
    preset: str = Field(default="tiny", max_length=64)
    stages: Stages | None = Field(default=None, description="body stages, L, or layers of each")
    dim: int | None = Field(default=None, ge=8, le=2**17)
    heads: int | None = Field(default=None, ge=1, le=2**12)
    kv_heads: int | None = Field(default=None, ge=1, le=2**12)
    layers: int | None = Field(default=None, ge=1, le=MOST_LAYERS, description="blocks")
    context: int | None = Field(default=None, ge=2, le=2**22, description="tokens a sample")
    hidden: int | None = Field(default=None, ge=8, le=2**20, description="width of the SwiGLU")
    rope_theta: float = Field(default=10_000.0, ge=1, le=1e12)
    rope_scaling: RopeScalingSection | None = None
    attention_bias: bool = Field(default=False, description="of q, k, v and o")
    mlp_bias: bool = Field(default=False, description="of gate, up and down")
    family: Family | None = Field(default=None, description="llama when left out")
    head_dim: int | None = Field(default=None, ge=2, le=2**12, description="else dim / heads")
    norm_eps: float | None = Field(default=None, ge=1e-12, le=1e-1, description="else 1e-5")
    tied: bool | None = Field(default=None, description="the head's weights are the embedding's")
    positions: int | None = Field(default=None, ge=2, le=2**30, description="else the context")
    window: int | None = Field(default=None, ge=2, le=2**30, description="of attention")
    attn_mask_type: AttentionMask = Field(
        default="causal", description="block_causal: only to tokens of the same document"
    )
    subspace: int | None = Field(
        default=None, ge=1, le=2**17, description="rank of tensors between stages"
    )
    vocabulary: int | None = Field(
        default=None, ge=2, le=2**24, description="from the data when left out"
    )

    @property
    def body_stages(self) -> int:
        """The number of body stages; 0: it is the preset's."""
        return len(self.stages) if isinstance(self.stages, tuple) else self.stages or 0

    @property
    def own(self) -> Own | None:
        """The run's own architecture, if it has one."""
        if self.parts is None:
            return Own(self.module) if self.module else None
        return Own(self.module or self.parts.source, **dict(self.parts))

    @model_validator(mode="after")
    def one_model(self) -> ModelSection:
        preset = None if self.preset == "tiny" else self.preset
        for key, model in (("preset", preset), ("module", self.module)):
            if model is not None and self.origin is not None:
                raise ValueError(
                    f"{key} = {model} and from = {self.origin} are two models: leave one out"
                )
        if self.subspace is not None and self.origin is not None:
            raise ValueError(
                f"subspace = {self.subspace}: the model in {self.origin} writes into all of its "
                "residual stream. Leave one of subspace and from out"
            )
        if self.blueprint is not None and (self.origin or self.module or preset):
            raise ValueError(
                f"config = {self.blueprint} and from, module or preset are two models: leave one "
                "out"
            )
        parts = self.parts
        if parts is not None and parts.kinds:
            known = len(parts.others)
            if len(parts.kinds) != self.layers or max(parts.kinds) > known:
                raise ValueError(
                    f"parts.kinds has {len(parts.kinds)} kinds, up to {max(parts.kinds)}, for "
                    f"layers = {self.layers} and {known} others: remove parts, and begin anew"
                )
        return self

    @property
    def config(self) -> ModelConfig:
        """The model's shape for data with the section's vocabulary, or next to none. Raises
        ValueError."""
        return model_config(self, self.vocabulary or 2)

    @model_validator(mode="after")
    def buildable(self) -> ModelSection:
        config = self.config
        for stage, parameters in zip(("stage 0", "a body stage"), config.parameters, strict=True):
            if parameters > MOST_PARAMETERS:
                raise ValueError(
                    f"{stage} has {parameters:.3g} parameters, which take "
                    f"{ADAM_BYTES * parameters / 2**40:.3g} TiB with gradient and Adam's moments; "
                    f"at most {MOST_PARAMETERS:.3g} fit: more stages, or a smaller dim, hidden, "
                    f"layers (now {config.dim}, {config.hidden}, {config.layers}) or vocabulary"
                )
        return self


class CorpusSection(Section):
    """One of several corpora."""

    path: FolderName
    share: float = Field(default=1.0, gt=0, le=10**6, description="of the samples, to the others'")
    content: str = Field(default="", max_length=64, description="content hash of the prepared data")


class DataSection(Section):
    """One corpus, or several."""

    path: FolderName = DATA
    content: str = Field(default="", max_length=64, description="content hash of the prepared data")
    corpora: tuple[CorpusSection, ...] = Field(default=(), max_length=256)

    @property
    def names(self) -> list[str]:
        return [corpus.path for corpus in self.corpora] or [self.path]

    @property
    def folders(self) -> list[Path]:
        return list(map(Path, self.names))

    @property
    def where(self) -> str:
        return " with ".join(map(str, self.folders))

    def moved(self, place: Callable[[str], str | Path]) -> DataSection:
        """The [data] section with other paths: `place` of each."""
        corpora = tuple(
            corpus.model_copy(update={"path": str(place(corpus.path))}) for corpus in self.corpora
        )
        path = self.path if corpora else str(place(self.path))
        return self.model_copy(update={"path": path, "corpora": corpora})

    @property
    def turns(self) -> list[int]:
        """Number of samples of each corpus in a cycle. Raises ValueError."""
        return turns_of([corpus.share for corpus in self.corpora] or [1.0])

    @model_validator(mode="before")
    @classmethod
    def one_or_several(cls, fields: Any) -> Any:
        """Empties `path` where there are several corpora."""
        if isinstance(fields, dict) and fields.get("corpora"):
            if fields.get("path"):
                raise ValueError("has a path, and corpora with paths of their own: choose one")
            return {**fields, "path": ""}
        return fields

    @model_validator(mode="after")
    def plannable(self) -> DataSection:
        if elsewhere := [name for name in self.names if "://" in name]:
            raise ValueError(
                f"{elsewhere[0]} is not a folder: create a link to it by `planaria data link "
                f"{elsewhere[0]} --out DIR`, and name that; nodes on other machines have --data"
            )
        if len(set(self.folders)) < len(self.corpora):
            raise ValueError(
                "two corpora have the same path: make them one, with the sum of their shares"
            )
        assert self.turns
        return self


class SamplingSection(Section):
    """How the text of samples is made, as by `planaria generate`."""

    tokens: int = Field(default=48, ge=1, le=10**4, description="a prompt, at most")
    temperature: float = Field(default=0.8, ge=0, le=100, description="0: always the likeliest")
    top_p: float = Field(default=0.95, gt=0, le=1, description="share of the likeliest")
    seed: int = Field(default=0, ge=0, lt=2**63)


Prompt = Annotated[str, Field(max_length=1000)]


TargetName = Annotated[str, Field(max_length=64, pattern=r"^\w+$")]


class LoraSection(Section):
    """Low-rank adapters are trained, and the weights of the checkpoint stay as they are."""

    rank: int = Field(default=16, ge=1, le=2**12)
    alpha: float = Field(
        default=32.0, gt=0, le=1e6, description="the product is scaled by alpha / rank"
    )
    targets: tuple[TargetName, ...] = Field(
        default=PROJECTIONS,
        min_length=1,
        max_length=64,
        description="names of the matrices that have one, in each layer",
    )
    base: Base | None = Field(
        default=None, description="form of the layers' frozen matrices; else as in the checkpoint"
    )


class TrainingSection(Section):
    batch: int = Field(default=16, ge=1, le=2**24, description="samples a step")
    microbatch: int = Field(default=2, ge=1, le=2**16, description="samples a microbatch")
    optimizer: Optimizer | None = Field(
        default=None, description="of the body stages; muon for a new model of a preset, else adamw"
    )
    lr: float | None = Field(
        default=None, gt=0, le=100, description="peak; else the model's default"
    )
    muon_lr: float = Field(default=0.01, gt=0, le=100, description="peak for matrices, by muon")
    warmup: int | None = Field(
        default=None, ge=0, le=10**9, description="steps; else 20, at most a tenth of the run"
    )
    schedule: Schedule = Field(default="cosine", description="of the rate, behind the warm-up")
    lr_floor: float = Field(default=0.1, ge=0, le=1, description="share of lr left at the end")
    decay_share: float = Field(
        default=0.2, gt=0, le=1, description="wsd: share of the steps in which lr falls"
    )
    betas: tuple[Beta, Beta] = Field(default=BETAS, description="decay rates of the moments")
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="not of norms and biases")
    clip: float = Field(default=1.0, ge=1e-6, le=1e6)
    rewarm: int = Field(
        default=0, ge=0, le=10**9, description="steps of warm-up behind a change of settings"
    )
    precision: Literal["float32", "bf16"] = "float32"
    recompute: bool = False
    compile: bool = False
    in_flight: int = Field(default=0, ge=0, le=2**14, description="microbatches; 0: by measurement")
    validate_every: int = Field(default=0, ge=0, le=10**9, description="steps; 0: only at the end")
    validation_microbatches: int = Field(default=8, ge=0, le=2**14)
    sample_every: int = Field(default=0, ge=0, le=10**9, description="steps; 0: never")
    prompts: tuple[Prompt, ...] = Field(
        default=("",), min_length=1, max_length=8, description="texts that samples continue"
    )
    sampling: SamplingSection = SamplingSection()
    lora: LoraSection | None = Field(default=None, description="all weights, when left out")

    @model_validator(mode="after")
    def divisible(self) -> TrainingSection:
        if self.batch % self.microbatch:
            raise ValueError(
                f"batch = {self.batch} is not a multiple of microbatch = {self.microbatch}"
            )
        return self

    @property
    def microbatches(self) -> int:
        return self.batch // self.microbatch


class RelearnSection(Section):
    """Training of an estimated stage alone, on its boundary tensors, under any policy."""

    steps: int = Field(default=10, ge=1, le=10**4, description="whose boundary tensors are kept")
    tokens: int = Field(default=256, ge=1, le=2**31, description="per update; at least one sample")
    passes: int = Field(default=4, ge=0, le=1000, description="0: as the papers have it")
    seconds: float = Field(default=20.0, ge=0, le=86_400, description="at most, in one stall")
    lr: float = Field(default=0.05, gt=0, le=100, description="initial rate of Muon; it falls to 0")
    enough: float = Field(
        default=2.0, ge=0, le=1e6, description="residual to train on with; 0: all wait"
    )
    each_step: int = Field(
        default=0, ge=0, le=10**6, description="background updates a step; 0: as many as fit"
    )
    within: int = Field(
        default=20, ge=1, le=10**6, description="steps until background relearning ends"
    )


class SnapshotSection(Section):
    """Settings of policy = "snapshot", and of first body stages under policies that estimate."""

    first: int = Field(default=1, ge=0, le=2**16, description="number of these first body stages")
    fraction: float = Field(default=0.125, ge=1e-4, le=1, description="r: blocks a time")
    period: int = Field(default=8, ge=1, le=10**6, description="steps in which all could be sent")
    codec: Literal["int8", "none"] = "int8"
    moments: bool = Field(default=True, description="with the moments")
    mbps: float = Field(default=200.0, ge=1e-3, le=1e7, description="Mbit/s a stage sends at most")


class CheckpointSection(Section):
    """Settings of policy = "checkpoint"."""

    dir: FolderName = Field(default="", description="folder that all nodes share")
    every: int = Field(default=10, ge=1, le=10**9, description="steps")


FORMER_POLICY: Final = "checkfree"
FORMER_TRAINING: Final = {"optimizer": "adamw", "muon_lr": 0.02, "warmup": WARMUP}
"""Defaults of earlier versions; the ids of their runs stay as they are."""


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"is no policy; there are {', '.join(POLICIES)}")
    return name


def _none_if_empty(value: Any) -> Any:
    """None for the value of `KEY=`, as a change of settings notes that there was none."""
    return None if value == "" else value


class RecoverySection(Section):
    """What to do when a whole stage is lost."""

    policy: Annotated[str, AfterValidator(_known_policy)] = "auto"
    strict: bool = Field(
        default=False, description="stop where the policy's own method is unavailable"
    )
    masking: Literal["reassign", "abort"] = Field(
        default="reassign", description="when a stage keeps a replica"
    )
    wait_for_saves: Annotated[float | None, BeforeValidator(_none_if_empty)] = Field(
        default=None,
        ge=0,
        le=86_400,
        description="seconds; else that of MembershipRules, and none for one stage",
    )
    lr_boost: float = Field(default=1.1, ge=1, le=100)
    lr_boost_steps: int = Field(
        default=100, ge=0, le=10**9, description="linear decay; 0: for ever"
    )
    relearn: RelearnSection = RelearnSection()
    snapshot: SnapshotSection = SnapshotSection()
    checkpoint: CheckpointSection = CheckpointSection()


class SavesSection(Section):
    """Nodes' own saves."""

    every: int = Field(default=10, ge=1, le=10**9, description="steps")
    in_flight: int = Field(default=2, ge=1, le=100, description="writes not yet on disk")
    keep: int = Field(default=4, ge=2, le=10**6, description="newest saves of a stage")
    milestones: int = Field(
        default=0, ge=0, le=10**9, description="steps between saves that stay; 0: none do"
    )

    @model_validator(mode="after")
    def milestones_are_saved(self) -> SavesSection:
        if self.milestones % self.every:
            raise ValueError(
                f"milestones = {self.milestones} is not a multiple of every = {self.every}, so "
                "not all of those steps are saved"
            )
        return self

    @model_validator(mode="after")
    def meetable(self) -> SavesSection:
        """Checks that stages, which save the same steps at different times, keep one in common."""
        needed = 2 + self.in_flight
        if self.keep < needed:
            raise ValueError(
                f"keep = {self.keep}: in_flight = {self.in_flight} needs keep = {needed} or more, "
                "for all stages to have a save of the same step"
            )
        return self


class SwarmSection(Section):
    replicas: int = Field(
        default=1, ge=1, le=5000, description="nodes a stage to wait for at the start"
    )
    start_grace: float = Field(
        default=20.0, ge=0, le=86_400, description="seconds to wait for them after the last join"
    )
    lease: float = Field(
        default=5.0,
        ge=LEASE,
        le=3600,
        description="seconds without a renewal until a node is evicted",
    )
    silence: float = Field(
        default=3.0, ge=2 * HEARTBEAT, le=3600, description="seconds until a node suspects a peer"
    )
    progress: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="seconds without progress until an attempt is aborted",
    )

    @model_validator(mode="after")
    def noticeable(self) -> SwarmSection:
        """Checks that an attempt that waits for a lost node lasts until the node is noticed."""
        noticed = max(self.lease, self.silence)
        if self.progress < 2 * noticed:
            raise ValueError(
                f"progress = {self.progress:g}: with lease = {self.lease:g} and silence = "
                f"{self.silence:g} it can take {noticed:g} s until a lost node is noticed; give "
                f"progress = {2 * noticed:g} or more, or a shorter lease and silence"
            )
        return self


class TrustSection(Section):
    """Measures against members with wrong results."""

    spot_check: float = Field(
        default=0.02, ge=0, le=1, description="share of visits that two replicas compute"
    )
    tolerance: float = Field(
        default=0.05, gt=0, le=2, description="relative difference allowed between correct nodes"
    )
    gradients: Literal["name", "exclude", "off"] = Field(
        default="name", description="treatment of replicas that fail audits of gradients"
    )


class WireSection(Section):
    activations: Narrow = "bf16"
    gradients: Narrow = "bf16"
    averaging: Averaging = "none"
    rank: int = Field(default=4, ge=1, le=256, description="of the factors sent for a matrix")
    rank_after: int = Field(default=200, ge=0, description="first steps, averaged in int8")

    @property
    def averaging_after(self) -> int:
        """Number of first steps that are averaged in int8."""
        return {"lowrank": self.rank_after}.get(self.averaging, 0)


class NotifySection(Section):
    """What the registry runs for events that somebody should hear of. Nodes don't get it."""

    command: str = Field(
        default="",
        max_length=4096,
        pattern=r"^[^\x00]*$",
        description="command line, which gets the event as JSON; empty: none",
    )


class ChangeSection(Section):
    """A change of settings, which planaria writes when it makes one."""

    step: int = Field(ge=0, le=10**9, description="last step under the settings before")
    was: tuple[str, ...] = Field(
        default=(), max_length=1000, description="settings before, KEY=VALUE each"
    )
    anew: bool = Field(default=False, description="whether saves were written anew for it")
    undone: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="newest view whose later steps don't count, as the run went back; 0: it didn't",
    )


class RunFile(Section):
    name: str = Field(default="run", max_length=64, pattern=r"^[\w.-]+$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(default=100, ge=1, le=10**9)
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    recovery: RecoverySection = RecoverySection()
    saves: SavesSection = SavesSection()
    swarm: SwarmSection = SwarmSection()
    wire: WireSection = WireSection()
    trust: TrustSection = TrustSection()
    notify: NotifySection = NotifySection()
    changes: tuple[ChangeSection, ...] = Field(default=(), max_length=1000)

    @property
    def changed_at(self) -> int:
        """Last step under other settings; 0: there is none."""
        return self.changes[-1].step if self.changes else 0

    def is_undone(self, step: int, view: int) -> bool:
        """Whether the run has gone back to before this step, which a commit of `view` made."""
        return any(step > change.step and view <= change.undone for change in self.changes)

    @property
    def original(self) -> RunFile:
        """The run with the settings with which it began, in its present number of stages."""
        settings: dict[str, Any] = {}
        for change in reversed(self.changes):
            settings |= parse_settings(change.was)
        settings.pop("model__stages", None)
        return override(self.model_copy(update={"changes": ()}), **settings)

    @property
    def batches(self) -> Batches:
        """The batch of each step, by [training] and the changes since."""
        sizes = [(self.training.batch, self.training.microbatch)]
        for change in reversed(self.changes):
            was, (batch, microbatch) = parse_settings(change.was), sizes[-1]
            before = was.get("training__batch", batch), was.get("training__microbatch", microbatch)
            sizes.append(before)
        batches = Batches(*sizes.pop())
        for change in self.changes:
            batches = batches.changed_after(change.step, *sizes.pop())
        return batches

    def identifying_fields(self, *left_out: str) -> dict[str, Any]:
        """The fields that distinguish this run from others, without the sections `left_out`.
        Default values are left out, so that a new key changes nothing, and so is PRIVATE. For
        `training`, `recovery.policy` and [wire] the former defaults count: adamw, 20 steps of
        warm-up, checkfree, codec none. Of changes, only those count for which saves were written
        anew."""
        if self.changes:
            anew = {"changes": [change.step for change in self.changes if change.anew]}
            return self.original.identifying_fields(*left_out) | (
                anew if any(anew.values()) else {}
            )
        excluded = {"wire", PRIVATE, *left_out}
        fields = self.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
        training = fields.pop("training", {})
        training |= {"optimizer": self.optimizer, "lr": peak_of(self)}
        if self.optimizer == "muon":
            training["muon_lr"] = self.training.muon_lr
        by_adamw = model_config(self.model, self.model.vocabulary or 2, self.training.lora)
        defaults = {"lr": by_adamw.learning_rate, **FORMER_TRAINING}
        training = {k: v for k, v in training.items() if v != defaults.get(k)}
        fields |= {"training": training} if training else {}
        recovery = fields.pop("recovery", {}) | {"policy": self.recovery.policy}
        if self.recovery.policy == FORMER_POLICY:
            del recovery["policy"]
        fields |= {"recovery": recovery} if recovery else {}
        wire = {key: value for key, value in self.wire.model_dump().items() if value != "none"}
        if self.wire.averaging != "lowrank":  # which have no effect then
            del wire["rank"], wire["rank_after"]
        return {**fields, "wire": wire} if wire else fields

    def config_for(self, vocabulary: int) -> ModelConfig:
        """The model's shape for data with so many token ids. Raises ValueError."""
        lora, muon = self.training.lora, self.optimizer == "muon"
        return model_config(self.model, vocabulary, lora, muon)

    @property
    def optimizer(self) -> Optimizer:
        """The body stages' optimizer: the run file's, or the default of what is trained."""
        model, training = self.model, self.training
        is_preset = not (model.origin or model.blueprint or model.module or training.lora)
        return training.optimizer or ("muon" if is_preset else "adamw")

    @property
    def policy(self) -> Policy:
        return POLICIES[self.recovery.policy]

    @property
    def config(self) -> ModelConfig:
        """The model's shape for data with `model.vocabulary`, or with next to none. Raises
        ValueError."""
        return self.config_for(self.model.vocabulary or 2)

    @model_validator(mode="after")
    def rated(self) -> RunFile:
        """Checks that the optimizer has the rate that is given."""
        rate, default = self.training.muon_lr, TrainingSection.model_fields["muon_lr"].default
        if self.optimizer != "muon" and rate != default:
            raise ValueError(
                f"training.muon_lr = {rate:g} is for training.optimizer = muon, and this run has "
                f"{self.optimizer}: set the optimizer, too, or leave muon_lr out"
            )
        return self

    @model_validator(mode="after")
    def patient(self) -> RunFile:
        """Checks the time of relearning, which counts as progress only when it is over."""
        relearn, progress = self.recovery.relearn.seconds, self.swarm.progress
        if self.recovery.relearn.passes and relearn > progress / 2:
            raise ValueError(
                f"recovery.relearn.seconds = {relearn:g} is more than half of swarm.progress = "
                f"{progress:g}, after which the driver considers a rebuild stuck"
            )
        return self

    @model_validator(mode="after")
    def audited(self) -> RunFile:
        """Checks that sums of gradients can be audited if who fails is to be excluded."""
        averaging = self.wire.averaging
        if self.trust.gradients == "exclude" and averaging not in AUDITED:
            raise ValueError(
                f'trust.gradients = "exclude": sums in wire.averaging = "{averaging}" can\'t be '
                f"audited, since they owe more than one rounding; choose {', '.join(AUDITED)}"
            )
        return self

    @model_validator(mode="after")
    def scheduled(self) -> RunFile:
        """Checks the learning rate, and its effect on the weights, over so many steps."""
        training, falls = self.training, self.training.decay_share * self.steps
        warmup = warmup_of(self)
        if training.schedule == "wsd" and warmup + falls > self.steps:
            raise ValueError(
                f"training.warmup = {warmup} steps and training.decay_share = "
                f"{training.decay_share:g} of steps = {self.steps} exceed the run: with "
                "schedule = wsd they follow each other"
            )
        peak = max(peak_of(self), training.muon_lr if self.optimizer == "muon" else 0.0)
        rate = peak * self.recovery.lr_boost
        if rate * training.weight_decay >= 1:
            raise ValueError(
                f"training.weight_decay = {training.weight_decay:g}: a step takes weight_decay x "
                f"lr of each weight, with recovery.lr_boost {rate * training.weight_decay:g} of "
                "it, and that must be less than 1"
            )
        return self

    @model_validator(mode="after")
    def carriable(self) -> RunFile:
        """Refuses a run whose step is too large for the registry, or for frames."""
        config, training, replicas = self.model.config, self.training, self.swarm.replicas
        boundary = 4 * training.microbatch * config.context * config.crossing
        if boundary > MOST_PAYLOAD:
            raise ValueError(
                f"training.microbatch = {training.microbatch}: with model.context = "
                f"{config.context} and model.dim = {config.dim} a microbatch is {boundary} bytes "
                f"between two stages, and {MOST_PAYLOAD} can be sent: choose a smaller microbatch"
            )
        nodes = (config.stages + 1) * replicas
        if nodes > MOST_NODES:
            raise ValueError(
                f"swarm.replicas = {replicas}: of {config.stages + 1} stages (model.stages + 1) "
                f"these are {nodes} nodes, and a registry has at most {MOST_NODES}"
            )
        visits = (config.stages + 2) * max(training.microbatches, training.validation_microbatches)
        if visits > MOST_VISITS:
            raise ValueError(
                f"training.batch = {training.batch}: in microbatches of {training.microbatch}, and "
                f"with model.stages = {config.stages}, a step is {visits} visits of microbatches "
                f"to stages, and at most {MOST_VISITS} can be planned: choose larger microbatches"
            )
        return self


def from_fields(fields: dict[str, Any], name: str = "the run", local: bool = False) -> RunFile:
    """Makes a run file. `local`: expand `~` in the names of folders. Raises RunFileError."""
    try:
        return RunFile.model_validate(fields, context={LOCAL: local})
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"])) or "file"
            message = problem["msg"].removeprefix("Value error, ").removeprefix(f"{key}: ")
            if problem["type"] == "extra_forbidden":
                message = _unknown_key_message(problem["loc"])
            lines.append(f"  {key}: {message} (value: {shortened(problem['input'])})")
        raise RunFileError(f"{name} is not a valid run file:\n" + "\n".join(lines)) from error


def _unknown_key_message(location: Sequence[str | int]) -> str:
    """The message about an unknown key of a run file."""
    *sections, key = map(str, location)
    keys = list(_all_keys(RunFile))
    siblings = [path[-1] for path in keys if list(path[:-1]) == sections]
    elsewhere = {path[-1] for path in keys}  # it may be in the wrong section
    matches = [] if key in elsewhere else get_close_matches(key, siblings, n=1)
    if not matches:
        close = get_close_matches(key, elsewhere, n=1)
        matches = [".".join(path) for path in keys if path[-1] in close]
    if matches:
        return f"is no key; did you mean {' or '.join(matches)}?"
    return f"is no key; {'.'.join(sections) or 'the file'} has {', '.join(siblings)}"


def _all_keys(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        yield (*path, field.alias or name)
        kind, *_ = (*get_args(field.annotation), field.annotation)  # of `X | None`, or `X`
        listed = get_origin(field.annotation) is tuple
        if isinstance(kind, type) and issubclass(kind, Section) and not listed:
            yield from _all_keys(kind, (*path, name))


def loads(text: str, name: str = "the run file", local: bool = False) -> RunFile:
    """Parses a run file. `local`: as in `from_fields`. Raises RunFileError."""
    try:
        fields = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunFileError(f"{name} is not valid TOML: {error}") from error
    return from_fields(fields, name, local)


def load(path: Path) -> RunFile:
    """Reads a run file. Raises RunFileError, also when the file can't be read."""
    try:
        text = read_small(path).decode("utf-8-sig")
    except OSError as error:
        raise RunFileError(f"can't read the run file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path} is not valid TOML: it is not text ({error})") from error
    return loads(text, str(path), local=True)


def override(run: RunFile, **changes: Any) -> RunFile:
    """Changes `section__key=value` or `key=value`; None changes nothing. Raises RunFileError."""
    fields = run.model_dump(exclude_none=True)
    for name, value in changes.items():
        if value is None:
            continue
        *sections, key = name.split("__")
        target = fields
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise RunFileError(f"{name.replace('__', '.')} is no key: {section} is no table")
        target[key] = value
    return from_fields(fields, "the run file with the command line's changes")


def parse_setting(text: str) -> tuple[str, Any]:
    """The key and the value of KEY=VALUE, for `override`. What is no value in TOML is text. Raises
    RunFileError."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise RunFileError(f"{text!r} is no setting: write KEY=VALUE, as in training.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = written
    return key.strip().replace(".", "__"), value


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Keys and values of several KEY=VALUE, for `override`. Raises RunFileError."""
    return dict(map(parse_setting, settings))


def format_setting(key: str, value: Any) -> str:
    """A setting as KEY=VALUE, as `parse_setting` reads it; `key` with dots. None is `KEY=`."""
    written = "" if value is None else tomli_w.dumps({"value": value}).partition("=")[2].strip()
    return f"{key}={written}"


def flatten(fields: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A run file's values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in fields.items():
        nested = isinstance(value, dict)
        values |= flatten(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return values


def dumps(run: RunFile) -> str:
    return tomli_w.dumps(run.model_dump(exclude_none=True))


def without_private(run: RunFile) -> str:
    """The run file in TOML as nodes and readers get it: without [notify]."""
    return tomli_w.dumps(run.model_dump(exclude_none=True, exclude={PRIVATE}))
