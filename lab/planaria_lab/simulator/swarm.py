"""The simulator's input: a run file, and the nodes, sites and links that train it.

All classes here are immutable values. Functions compute the seconds, bytes and FLOPs that follow
from the run file and the shape of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from planaria.node.model.shape import (
    BYTES_OF_BASE,
    VALUE,
    ModelConfig,
    trained_shapes,
)
from planaria.node.run_file import RunFile, WireSection
from planaria.node.transaction.in_flight_window import most_out
from planaria.node.wire.frame_format import crossing_bytes, encoded_size
from planaria.recovery.facts import ANEW, INEXACT, ORIGIN
from planaria.recovery.newton_schulz import orthogonalizing_flops
from planaria.recovery.relearning import samples_at_a_time
from planaria.recovery.snapshot import route
from planaria_lab.emulation.links import Link, Network

HEARTBEAT = 1_450
"""Bytes a second on the wire from a node to each other node: its heartbeats and pings, and
acknowledgements of the other's."""
HEAD = 400
"""Bytes of a frame's head, with a route of about seven visits."""


def kept_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> int:
    """Bytes of the activations of `tokens` tokens, as both sides of a boundary keep them for
    relearning (node/state/boundary.py). They are kept as sent, or in bf16 if that is smaller."""
    crossed, _ = crossing_bytes(config, tokens, wire)
    narrowed = encoded_size(tokens * config.written, "float32", "bf16") + tokens * config.beside
    return min(crossed, narrowed)


class SwarmFiguresError(ValueError):
    """Figures from which no swarm can be simulated; the message names them and the remedy."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of each task of a node, if the node is alone on its machine."""

    forward: float  # of a microbatch in a body stage's blocks; at stage 0 in the embedding
    backward: float  # of a microbatch in the same
    head: float = 0.0  # at stage 0: the loss of a microbatch, forward and backward
    norm: float = 0.0  # norm of the reduced gradient, once a step
    apply: float = 0.0  # optimizer and digest, once a step
    add: float = 0.0  # one pass over the whole gradient, to copy it for sending or to add another
    relearn: float = 0.0  # one relearning update, of `relearned_at_a_time` samples

    def __post_init__(self) -> None:
        if any(value < 0 for value in vars(self).values()):
            raise SwarmFiguresError(f"{self}: the seconds of each task must be 0 or more")

    @property
    def microbatch(self) -> float:
        """Seconds of a microbatch; routing compares nodes by them."""
        return self.forward + self.backward + self.head

    def faster(self, factor: float) -> Seconds:
        """Seconds of a node that is faster by this factor."""
        return Seconds(**{name: value / factor for name, value in vars(self).items()})


@dataclass(frozen=True)
class Group:
    """Nodes of one stage at one site that are equally fast."""

    stage: int
    count: int
    site: str
    seconds: Seconds


@dataclass(frozen=True)
class Transport:
    """Seconds that a node's event loop spends on traffic, at each end of a link. The event loop
    isn't the compute thread, but both share the machine's cores."""

    frame: float = 0.0  # for each frame that is sent or received
    message: float = 0.0  # for each control message that is sent or received

    def __post_init__(self) -> None:
        if min(self.frame, self.message) < 0:
            raise SwarmFiguresError(f"{self}: the seconds must be 0 or more")


@dataclass(frozen=True)
class Swarm:
    """A swarm to simulate: a run, its nodes, and the links between them.

    Raises SwarmFiguresError if the run can't train with these figures, and LinkError if two sites
    have no link.
    """

    run: RunFile
    config: ModelConfig
    groups: tuple[Group, ...]
    network: Network  # of the sites
    transport: Transport = field(default_factory=Transport)
    cores: int = 0  # of one machine that all nodes share; 0: each node has cores enough of its own
    storage_mbps: float = float("inf")  # between a node and the folder of checkpoints, Mbit/s
    blocking: bool = False  # all nodes wait while a checkpoint is written
    registry: str = ""  # site of the registry; empty: the site of the first nodes of stage 0

    def __post_init__(self) -> None:
        if self.config.stages < 4 and self.swapped:
            raise SwarmFiguresError(
                f"checkfree+ needs at least 4 body stages, not {self.config.stages}"
            )
        for group in self.groups:
            if not 0 <= group.stage <= self.config.stages or group.count < 0:
                raise SwarmFiguresError(
                    f"{group}: the stage must be 0 to {self.config.stages}, the count 0 or more"
                )
        if self.storage_mbps <= 0:
            raise SwarmFiguresError(f"storage_mbps = {self.storage_mbps:g} must be more than 0")
        sites = {group.site for group in self.groups} | {self.registry or self.site_of(0)}
        for a in sites:
            if a not in self.network.sites:
                raise SwarmFiguresError(
                    f"the network has no site {a}, where a group or the registry is placed"
                )
            for b in sites:
                self.network.between(a, b)

    @property
    def swapped(self) -> bool:
        """Whether the policy swaps the order of body stages for some microbatches."""
        return self.run.policy.swapped

    @property
    def in_flight(self) -> int:
        """Maximum number of microbatches that a source has in flight."""
        return most_out(self.run.training.in_flight, self.config.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of nodes in each group."""
        return tuple(group.count for group in self.groups)

    @property
    def uplinks(self) -> dict[str, float]:
        """Site -> Mbit/s of its uplink that heartbeats leave to other traffic; at least a tenth."""
        nodes = sum(self.counts)
        remaining = {}
        for site, mbps in self.network.uplinks.items():
            present = sum(group.count for group in self.groups if group.site == site)
            remaining[site] = max(mbps / 10, mbps - 8e-6 * HEARTBEAT * present * (nodes - present))
        return remaining

    def with_counts(self, counts: Iterable[int]) -> Swarm:
        """The same swarm with these numbers of nodes in its groups."""
        groups = zip(self.groups, counts, strict=True)
        return replace(self, groups=tuple(replace(group, count=n) for group, n in groups))

    def replicas(self, stage: int) -> int:
        """The number of nodes of the stage."""
        return sum(group.count for group in self.groups if group.stage == stage)

    def nodes(self) -> dict[str, Group]:
        """Node name -> its group. Names are STAGE.NUMBER, as the slots of `planaria up`, numbered
        in the order of the groups. Raises SwarmFiguresError if a stage has no node."""
        numbers = dict.fromkeys(range(self.config.stages + 1), 0)
        groups: dict[str, Group] = {}
        for group in self.groups:
            for _ in range(group.count):
                groups[f"{group.stage}.{numbers[group.stage]}"] = group
                numbers[group.stage] += 1
        if vacant := [stage for stage, count in numbers.items() if not count]:
            raise SwarmFiguresError(
                f"stage {', '.join(map(str, vacant))} has no node: each stage needs at least one"
            )
        return groups

    def site_of(self, stage: int) -> str:
        """The site of the stage's first group. Raises SwarmFiguresError if it has none."""
        for group in self.groups:
            if group.stage == stage:
                return group.site
        raise SwarmFiguresError(f"stage {stage} has no nodes: add a group of them")

    def link(self, stage: int, to: int) -> Link:
        """The link between the first nodes of two stages."""
        return self.network.between(self.site_of(stage), self.site_of(to))


def sites(
    links: Iterable[Link], uplinks: Mapping[str, float] | None = None, more: Iterable[str] = ()
) -> Network:
    """A network of the sites at the ends of these links, and of the sites `more`. Raises LinkError
    if two sites have no link."""
    links = list(links)
    names = sorted({*more, *(site for link in links for site in link[:2])})
    return Network({name: name for name in names}, links, uplinks or {})


def one_site(delay_ms: float, mbps: float, name: str = "anywhere") -> Network:
    """A network with the same link between any two nodes. Raises LinkError."""
    return sites([Link(name, name, delay_ms, mbps).check("")])


def uniform(
    run: RunFile,
    config: ModelConfig,
    network: Network,
    seconds: Mapping[int, Seconds],
    replicas: int | None = None,
    at: Iterable[str] | None = None,
) -> Swarm:
    """A swarm with the same number of nodes at each stage: `replicas`, by default the run file's.
    Stages are assigned to the sites `at` in turn; by default, all are at the network's first."""
    places = list(at or [next(iter(network.sites))])
    groups = [
        Group(stage, replicas or run.swarm.replicas, places[stage % len(places)], seconds[stage])
        for stage in range(config.stages + 1)
    ]
    return Swarm(run, config, tuple(groups), network)


# --- bytes and FLOPs


@cache
def parameters(config: ModelConfig, stage: int) -> int:
    """The number of trained parameters of the whole stage; with adapters, only the adapters'."""
    return config.trained_in(stage)


@cache
def base_bytes(config: ModelConfig, stage: int) -> int:
    """Bytes of the frozen weights beside adapters, as peers send them: matrices packed, all else
    in float32."""
    trained = config.state_bytes(stage) + VALUE * parameters(config, stage)
    return config.bytes_of(stage) - trained


def values_sent(run: RunFile, config: ModelConfig) -> int:
    """Number of values in the tensor of a microbatch that crosses a stage's boundary."""
    return run.training.microbatch * config.context * config.crossing


def frame_bytes(run: RunFile, config: ModelConfig, kind: str) -> int:
    """Bytes of a frame with the activation or gradient of a microbatch, head included. The residual
    stream is float32, also with autocast: codec none takes four bytes a value."""
    tokens = run.training.microbatch * config.context
    activation, gradient = crossing_bytes(config, tokens, run.wire)
    return HEAD + (activation if kind == "activation" else gradient)


def forward_flops(config: ModelConfig, stage: int, tokens: int) -> float:
    """FLOPs of one forward pass. Each token takes two for each weight of a matrix, adapters
    included. Attention has two products over the causal half of the context. At stage 0 only the
    head counts; the embedding is a look-up."""
    if stage == 0:
        return 2.0 * tokens * config.dim * config.vocabulary
    layers = len(config.layers_of(stage))
    matrices = _matrices(config, stage)
    matrices += parameters(config, stage) if config.lora is not None else 0
    attention = 2 * config.context * config.dim * layers
    return float(tokens * (2 * matrices + attention))


def _matrices(config: ModelConfig, stage: int) -> int:
    """The number of weights in a body stage's matrices, without adapters."""
    return _values(config, stage) - 2 * config.dim * len(config.layers_of(stage))


@cache
def _values(config: ModelConfig, stage: int) -> int:
    return config.values_in(stage)


def seconds_at(
    run: RunFile, config: ModelConfig, stage: int, flops: float, memory: float
) -> Seconds:
    """Seconds of each task of a node that sustains `flops` FLOP/s in the model and moves `memory`
    bytes a second.

    A backward pass costs two forward passes, or three with recomputation. It costs one less for
    frozen matrices, which have no gradient. A packed base is unpacked for each pass: its bytes are
    read, and those of the matrix written and read. The optimizer reads four tensors and writes
    three, and its gradient is cleared. The digest reads the weights and an eighth of the moments.
    Together these are 37 bytes a parameter. Muon also orthogonalizes. A relearning update has a
    forward and a backward pass, and orthogonalizes. Raises SwarmFiguresError.
    """
    if config.own is not None:
        raise SwarmFiguresError(
            f"the seconds of a stage of {config.own.module} aren't known, only those of LLaMA "
            "models: choose a preset of about its size"
        )
    if not (flops > 0 and memory > 0):
        raise SwarmFiguresError(
            f"{flops:g} FLOP/s and {memory:g} bytes/s: both must be more than 0"
        )
    forward = forward_flops(config, stage, run.training.microbatch * config.context) / flops
    gradient = VALUE * parameters(config, stage) / memory
    state = {"norm": gradient, "apply": 9.25 * gradient, "add": 2 * gradient}
    orthogonalizing = orthogonalizing_flops(trained_shapes(config, stage).values()) / flops
    embedding, frozen = 2 * VALUE * values_sent(run, config) / memory, config.lora is not None
    if stage == 0:
        back, head = (0.0, 2 * forward) if frozen else (embedding, 3 * forward)
        return Seconds(forward=embedding, backward=back, head=head, **state)
    backward = 2 * forward
    if frozen:
        tokens = run.training.microbatch * config.context
        backward -= 2 * tokens * _matrices(config, stage) / flops
    unpacking = _unpacked_bytes(run, config, stage) / memory
    forward, backward = forward + unpacking, backward + unpacking
    relearn = (forward + backward) * relearned_at_a_time(run, config) / run.training.microbatch
    relearn += orthogonalizing
    state["apply"] += orthogonalizing if config.muon else 0.0
    backward += forward if run.training.recompute else 0.0
    return Seconds(forward, backward, relearn=relearn, **state)


def _unpacked_bytes(run: RunFile, config: ModelConfig, stage: int) -> float:
    """Bytes moved in a pass to unpack a stage's matrices: the packed, and twice the unpacked."""
    width = torch.bfloat16.itemsize if run.training.precision == "bf16" else VALUE
    base, packed = config.base_of(stage), config.packed_in(stage)
    return packed * (BYTES_OF_BASE[base] + 2 * width) if packed else 0.0


def relearned_at_a_time(run: RunFile, config: ModelConfig) -> int:
    """Samples in a relearning update; all are of one microbatch."""
    return min(
        samples_at_a_time(run.recovery.relearn.tokens, config.context), run.training.microbatch
    )


@cache
def held_at(stage: int, stages: int) -> tuple[int, ...]:
    """The stages whose snapshots a node of `stage` holds, if each stage has a node on its own
    machine."""
    members = [(str(number), number) for number in range(stages + 1)]
    routes = {number: route(number, members, stages) for _, number in members}
    return tuple(number for number, way in routes.items() if way and str(stage) in way.holders)


def snapshot_bytes(run: RunFile, config: ModelConfig, stage: int) -> int:
    """Bytes of a whole running snapshot of a stage."""
    moments = run.recovery.snapshot.moments
    whole = config.state_bytes(stage) if moments else VALUE * parameters(config, stage)
    return whole if run.recovery.snapshot.codec == "none" else whole // 4


def fetched_bytes(run: RunFile, config: ModelConfig, stage: int, method: str) -> int:
    """The bytes that a newcomer fetches from each source stage to rebuild `stage` by this
    method. With adapters they include the frozen weights, as if the newcomer didn't have the
    model's folder."""
    base = base_bytes(config, stage)
    if method in (ANEW, ORIGIN):
        return base
    if method in INEXACT or (method == "snapshot" and not run.recovery.snapshot.moments):
        return base + VALUE * parameters(config, stage)
    return base + config.state_bytes(stage)  # replica, redundant, checkpoint, save
