"""Decisions about lost stages: pure functions of what is left, with reasons as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planaria.recovery.orders import partner

Policy = Literal["checkfree", "checkfree+", "snapshot", "checkpoint", "redundant"]
"""How a stage without a replica left gets its state."""
Kind = Literal["copy", "snapshot", "redundant", "checkpoint", "save", "memory", "weights"]
Made = tuple[int, int]
"""View and attempt of the commit that made a step. If only lost nodes knew a commit, the step is
made again: with the same number, but not the same state."""
UNKNOWN: Made = (0, 0)
ANEW = "adapters-anew"
"""The method that resets a stage's adapters to their state before the first step."""
PRETRAINED = "pretrained"
"""The method that resets a stage to the weights of the run's initial checkpoint."""
INEXACT = ("checkfree", "checkfree+", "interpolate", ANEW, PRETRAINED)
"""Methods that lack the stage's learned state: they guess from other stages' weights, or start
anew; relearning improves the result."""
COPIED = ("replica", "handover")
"""Methods that copy a stage from nodes that train it: from staying ones, or leaving ones."""
OWN = ("save", "memory")
"""Methods by which a node continues from its own state, in a file or in memory."""
ARRIVED = ("joiner", "weights")
"""Methods by which a node continues from what it had received when its last source was lost: a
state that had not caught up, or weights without Adam's moments."""
ORIGIN = "origin"
"""The method that gives a stage its initial weights: those of a checkpoint."""


@dataclass(frozen=True)
class Source:
    """A node that has the state of `stage` after `step`. `lineage`: how often the run had gone back
    to files when that step was made."""

    node: str
    stage: int
    step: int
    lineage: int = 0


@dataclass(frozen=True)
class Held:
    """State of a stage that a node keeps besides training it.

    `copy`: stage 0's weights, `snapshot`: a running snapshot, `redundant`: a twin, each of another
    node's stage, in memory. `checkpoint`, `save`: of the node's own stage, in a file. `memory`: its
    own state, which counts if the run goes back to it, or none is newer. `weights`: of its own
    stage, received from a node that was lost before it had sent the moments.
    """

    kind: Kind
    source: Source
    made: Made = UNKNOWN  # the commit


def _newest(sources: Iterable[Source]) -> tuple[Source, ...]:
    ordered = sorted(sources, key=lambda source: source.node)
    newest = max((source.step for source in ordered), default=0)
    return tuple(source for source in ordered if source.step == newest)


@dataclass(frozen=True)
class Left:
    """The surviving state, after all nodes have reported."""

    stages: int  # body stages, L
    step: int  # the newest committed step
    survivors: Mapping[int, Sequence[str]]  # stage -> nodes that have that step
    lineage: int = 0
    held: Sequence[Held] = ()
    untrained: frozenset[int] = field(default_factory=frozenset)  # survivors guessed at this step
    made: Made = UNKNOWN  # the commit of `step`
    origin: Sequence[str] = ()  # nodes with the checkpoint from which the run began
    adapters: bool = False  # whether only adapters are trained, beside the checkpoint's weights
    leaving: Collection[str] = ()  # nodes that were asked to leave

    def nodes(self, stage: int) -> tuple[Source, ...]:
        nodes = sorted(self.survivors.get(stage, ()))
        return tuple(Source(node, stage, self.step, self.lineage) for node in nodes)

    def freshest(self, kind: Kind, stage: int) -> tuple[Source, ...]:
        """The newest holdings of this lineage, up to `step`, the last that survivors committed."""
        return _newest(held.source for held in self._held(kind, stage))

    def here(self, kind: Kind, stage: int) -> tuple[Source, ...]:
        """As `freshest`, without holdings of `step` that another commit made."""
        holdings = self._held(kind, stage)
        return _newest(
            holding.source
            for holding in holdings
            if holding.source.step < self.step or holding.made in (self.made, UNKNOWN)
        )

    def _held(self, kind: Kind, stage: int) -> list[Held]:
        return [
            held
            for held in self.held
            if (held.kind, held.source.stage) == (kind, stage)
            and held.source.lineage == self.lineage
            and held.source.step <= self.step
        ]


@dataclass(frozen=True)
class Rebuild:
    """Give a node of `stage` the state of the swarm's current step."""

    stage: int
    method: str
    sources: tuple[Source, ...]
    exact: bool  # weights and optimizer state equal the lost ones
    reason: str
    fallback: bool = False  # a method other than the policy's
    fresh: bool = False  # the weights equal the lost ones, the optimizer starts anew

    @property
    def same_weights(self) -> bool:
        return self.exact or self.fresh


@dataclass(frozen=True)
class RollBack:
    """All stages go back to `step`, from their files of `lineage`; 0: to the initial weights."""

    step: int
    lineage: int
    reason: str


@dataclass(frozen=True)
class Stop:
    """The run can't continue: nothing left determines the stage's weights."""

    stage: int
    reason: str


Decision = Rebuild | RollBack | Stop


def decide(stage: int, left: Left, policy: Policy, strict: bool = False) -> Decision:
    """Chooses how a node of `stage` gets its state.

    In order of preference: a replica; before the first step, the checkpoint from which the run
    begins; this very step in memory, from before the run went back; a save of it; the policy's
    method; unless `strict`, the best guess. Other stages' adapters contain no information about the
    lost ones, so policies that would guess use the last save, or begin anew. State received from a
    node that is now lost precedes every guess and all older state.
    """
    if replicas := left.nodes(stage):
        reason = f"stage {stage} is copied from its replicas: {_nodes(len(replicas))} it"
        if all(source.node in left.leaving for source in replicas):
            reason = f"all nodes with stage {stage} will leave soon: its state is handed over"
            return Rebuild(stage, "handover", replicas, exact=True, reason=reason)
        return Rebuild(stage, "replica", replicas, exact=True, reason=reason)
    if (left.lineage, left.step) == (0, 0) and left.origin:
        source = Source(giver(stage, left.origin), stage, 0)
        reason = f"stage {stage} begins from the checkpoint, which {_nodes(len(left.origin))}"
        return Rebuild(stage, ORIGIN, (source,), exact=True, reason=reason)
    if left.adapters and stage == 0:
        reason = "stage 0 is not trained: it equals the checkpoint"
        return Rebuild(stage, ORIGIN, (), exact=True, reason=reason)
    if in_memory := _of_this_step("memory", stage, left):
        reason = f"stage {stage} has this step in memory, from before the run went back"
        return Rebuild(stage, "memory", in_memory, exact=True, reason=reason)
    if saves := _of_this_step("save", stage, left):
        reason = f"stage {stage} has no replica left, but a save of this step"
        return Rebuild(stage, "save", saves, exact=True, reason=reason)
    decision, lacking = _BY_POLICY[policy](stage, left)
    if decision is not None:
        return _arrived(stage, left, decision) or decision
    if strict:
        return Stop(stage, f"stage {stage} is lost: {lacking}; --strict allows no other method")
    guess = _fall_back(stage, left, lacking)
    return _arrived(stage, left, guess, lacking) or guess


def _arrived(stage: int, left: Left, other: Decision, lacking: str = "") -> Rebuild | None:
    """Uses the state received by a node of the stage before its last trained source was lost,
    unless `other` is closer to the lost state. `lacking`: why the policy fails."""
    if isinstance(other, RollBack) or (isinstance(other, Rebuild) and other.exact):
        return None
    received = [(s, kind) for kind in ("memory", "weights") for s in left.here(kind, stage)]
    if not received:
        return None
    source, kind = max(
        received, key=lambda pair: pair[0].step
    )  # of equal steps, the one with moments
    if isinstance(other, Rebuild) and other.method not in INEXACT:
        its_age = other.sources[0].lineage, other.sources[0].step, other.method == "save"
        if its_age > (source.lineage, source.step, kind == "memory"):
            return None
    late = left.step - source.step
    loss = f"stage {stage} is lost and {lacking}" if lacking else f"stage {stage} is lost"
    method = "joiner" if kind == "memory" else "weights"
    content = "state" if kind == "memory" else "weights, without Adam's moments,"
    reason = f"{loss}: {source.node} had received its {content}{_stale(late)}"
    return Rebuild(stage, method, (source,), False, reason, fallback=bool(lacking), fresh=not late)


_Answer = tuple[Rebuild | RollBack | None, str]
"""The policy's decision, or why it has none."""


def _checkfree(stage: int, left: Left) -> _Answer:
    """CheckFree, Algorithm 1: for 1 < stage < L only, since others lack a second body neighbour.
    Stage 0 as in CheckFree+: its copies don't need swapped orders. A stage with a snapshot uses
    that instead."""
    if stage and left.freshest("snapshot", stage):
        return _snapshot(stage, left)
    if left.adapters:
        return _begin_anew(stage, left, f"stage {stage} has no replica left"), ""
    if stage == 0:
        return _stage0_copy(left)
    if left.origin:
        return _pretrained(stage, left, f"stage {stage} has no replica left"), ""
    if not 1 < stage < left.stages:
        return (
            None,
            "checkfree rebuilds only stages between two body stages, and this is the first or last",
        )
    missing = [of for of in (stage - 1, stage + 1) if not _trained(of, left)]
    if missing:
        return None, f"checkfree needs both neighbours, and {_name(missing)} lost with it"
    reason = (
        f"stage {stage} has no replica left: average of stages {stage - 1} and {stage + 1}, "
        "weighted by their gradient norms"
    )
    sources = left.nodes(stage - 1) + left.nodes(stage + 1)
    return Rebuild(stage, "checkfree", sources, exact=False, reason=reason), ""


def _begin_anew(stage: int, left: Left, loss: str, fallback: bool = False) -> Rebuild:
    """The decision for adapters, whatever the policy."""
    if saves := _newest_saves(stage, left):
        reason = f"{loss}: its adapters' save of step {saves[0].step} is used"
        return Rebuild(stage, "save", saves, exact=False, reason=reason, fallback=fallback)
    reason = f"{loss}: its adapters begin anew, since other stages' adapters do not determine them"
    return Rebuild(stage, ANEW, (), exact=False, reason=reason, fallback=fallback)


def _pretrained(stage: int, left: Left, loss: str, fallback: bool = False) -> Rebuild:
    """Pretrained weights: stages of a trained model differ, and have moved little since."""
    source = Source(giver(stage, left.origin), stage, 0)
    reason = f"{loss}: its weights in the checkpoint from which the run began"
    return Rebuild(stage, PRETRAINED, (source,), exact=False, reason=reason, fallback=fallback)


def _checkfree_plus(stage: int, left: Left) -> _Answer:
    """CheckFree+ (section 4.3): an end stage is a copy of its partner in swapped order."""
    other = partner(stage, left.stages)
    if stage == 0 or other is None or left.origin or left.freshest("snapshot", stage):
        return _checkfree(stage, left)
    if not _trained(other, left):
        return None, f"its weights would come from stage {other}, and {_name([other])} lost with it"
    reason = (
        f"stage {stage} has no replica left: copy of stage {other}, which half of the microbatches "
        "have trained in its place"
    )
    return Rebuild(stage, "checkfree+", left.nodes(other), exact=False, reason=reason), ""


def _stage0_copy(left: Left) -> _Answer:
    copies = left.freshest("copy", 0)[:1]  # two copies of one step may differ: stage 0 was rebuilt
    if not copies:
        return None, "stages 1 and L have no copy of stage 0"
    late = left.step - copies[0].step
    reason = "stage 0 has no replica left: the copy of its weights at stages 1 and L" + _stale(late)
    return Rebuild(0, "stage0-copy", copies, False, reason, fresh=not late), ""


def _snapshot(stage: int, left: Left) -> _Answer:
    sources = left.freshest("snapshot", stage)[:1]  # two may have blocks of different steps
    if not sources:
        return None, "no peer holds a whole snapshot of it"
    late = left.step - sources[0].step
    reason = f"stage {stage} has no replica left: its running snapshot from a peer" + _stale(late)
    return Rebuild(stage, "snapshot", sources, exact=False, reason=reason), ""


def _redundant(stage: int, left: Left) -> _Answer:
    twins = [s for s in left.freshest("redundant", stage) if s.step == left.step]
    if not twins:
        return None, "the node of the stage before, which has its twin, is lost too, or new"
    reason = f"stage {stage} has no replica left: its twin at the stage before takes over"
    return Rebuild(stage, "redundant", tuple(twins), exact=True, reason=reason), ""


def _checkpoint(stage: int, left: Left) -> _Answer:
    common = _newest_common(_files(left.held, "checkpoint"), left.stages)
    lineage, step, _ = common or (0, 0, UNKNOWN)
    where = f"the checkpoint of step {step}" if step else "the initial weights: no checkpoint is"
    reason = f"stage {stage} has no replica left: all stages go back to {where}"
    return RollBack(step, lineage, reason if step else f"{reason} whole yet"), ""


_BY_POLICY = {
    "checkfree": _checkfree,
    "checkfree+": _checkfree_plus,
    "snapshot": _snapshot,
    "checkpoint": _checkpoint,
    "redundant": _redundant,
}


def _fall_back(stage: int, left: Left, lacking: str) -> Rebuild | Stop:
    """The best guess: the last save, else the weights of the run's initial checkpoint, else the
    neighbours' average, else an interpolation of the nearest stages."""
    loss = f"stage {stage} is lost and {lacking}"
    if left.adapters:
        return _begin_anew(stage, left, loss, fallback=True)
    saves = _newest_saves(stage, left)
    if saves:
        other = (saves[0].lineage, saves[0].step) == (left.lineage, left.step)
        how = ", made by another commit," if other else ""
        reason = f"{loss}: its save of step {saves[0].step}{how} is used"
        return Rebuild(stage, "save", saves, exact=False, reason=reason, fallback=True)
    if left.origin:
        return _pretrained(stage, left, loss, fallback=True)
    if stage == 0:
        return Stop(0, f"{loss}; nothing else determines embedding and head")
    averaged, _ = _checkfree(stage, left)
    if isinstance(averaged, Rebuild):
        reason = f"{loss}: {averaged.reason}"
        return Rebuild(stage, "checkfree", averaged.sources, False, reason, fallback=True)
    between = nearest(stage, left)
    if not between:
        return Stop(stage, f"{loss}; no body stage is left to guess it from")
    names = " and ".join(map(str, between))
    how = "interpolated between stages" if len(between) == 2 else "copied from the nearest, stage"
    sources = tuple(source for of in between for source in left.nodes(of))
    reason = f"{loss}: {how} {names}"
    return Rebuild(stage, "interpolate", sources, exact=False, reason=reason, fallback=True)


def _newest_saves(stage: int, left: Left) -> tuple[Source, ...]:
    """Saves of older lineages count too: after a resume there are no others yet."""
    files = _files(left.held, "save").get(stage, {})
    usable = [version for version in files if version[:2] <= (left.lineage, left.step)]
    return tuple(held.source for held in files[max(usable)]) if usable else ()


def _of_this_step(kind: Kind, stage: int, left: Left) -> tuple[Source, ...]:
    """Holdings of this step and commit; after a partial return, the other nodes still have it."""
    return tuple(
        holding.source
        for (_, step, made), holdings in _files(left.held, kind).get(stage, {}).items()
        for holding in holdings
        if (step, made) == (left.step, left.made) and made != UNKNOWN
    )


def nearest(stage: int, left: Left) -> list[int]:
    """The nearest body stages before and after `stage` that are left, at most one on each side.

    A stage guessed at this step counts only if there is no other.
    """
    alive = [other for other in range(1, left.stages + 1) if left.survivors.get(other)]
    usable = [other for other in alive if other not in left.untrained] or alive
    before = [other for other in usable if other < stage]
    after = [other for other in usable if other > stage]
    return before[-1:] + after[:1]


def giver(stage: int, nodes: Sequence[str]) -> str:
    """The node that gives this stage's weights from the checkpoint: a single one, so that the
    source of missing weights is known."""
    return sorted(nodes)[stage % len(nodes)]


def _nodes(count: int) -> str:
    return "1 node has" if count == 1 else f"{count} nodes have"


def _trained(stage: int, left: Left) -> bool:
    return bool(left.survivors.get(stage)) and stage not in left.untrained


def _name(stages: Sequence[int]) -> str:
    return (
        f"stage {stages[0]} is" if len(stages) == 1 else f"stages {stages[0]} and {stages[1]} are"
    )


def _stale(steps: int) -> str:
    return f", {steps} step{'s' if steps > 1 else ''} old" if steps else ""


# The start of a swarm from files, and a return to them


@dataclass(frozen=True)
class Resume:
    """The point where a run continues; stages not in `held` have no usable state."""

    step: int
    lineage: int
    held: Mapping[int, tuple[Held, ...]]
    exact: bool
    reason: str


def resume(held: Iterable[Held], stages: int) -> Resume | None:
    """The point where a run with these files and memory continues; None without any.

    The newest step that every stage has, if necessary for some without Adam's moments. Without a
    common step, the newest of each stage (SCAR's partial recovery), at the newest step of all: no
    sample is repeated.
    """
    held = list(held)
    files = _files(held, "memory", "save", "checkpoint")
    common = _newest_common(files, stages)
    if common is not None:
        chosen = {of: tuple(versions[common]) for of, versions in files.items()}
        lineage, step, _ = common
        in_files = all(h.kind != "memory" for holdings in chosen.values() for h in holdings)
        state = f"a save of step {step}" if in_files else f"step {step}"
        reason = f"every stage has {state}: the run continues from there"
        return Resume(step, lineage, chosen, exact=True, reason=reason)
    with_bare = _files(held, "memory", "save", "checkpoint", "weights")
    common = _newest_common(with_bare, stages)
    if common is not None:
        chosen = {of: _alike(versions[common]) for of, versions in with_bare.items()}
        lineage, step, _ = common
        bare = [of for of, versions in sorted(chosen.items()) if versions[0].kind == "weights"]
        reason = (
            f"every stage has step {step}, without Adam's moments stage "
            f"{', '.join(map(str, bare))}: the run continues from there"
        )
        return Resume(step, lineage, chosen, exact=False, reason=reason)
    if not files:
        return None
    newest = {of: max(versions) for of, versions in files.items()}
    lineage, step, _ = max(newest.values())
    chosen = {of: tuple(files[of][version]) for of, version in newest.items()}
    mix = ", ".join(f"stage {of} from step {at}" for of, (_, at, _) in sorted(newest.items()))
    none = sorted(set(range(stages + 1)) - set(files))
    reason = f"there is no step that every stage has: {mix}" + (
        f"; nothing of stage {', '.join(map(str, none))}" if none else ""
    )
    return Resume(step, lineage, chosen, exact=False, reason=reason)


_Version = tuple[int, int, Made]
"""Lineage, step and commit; the greater is the newer."""
_Files = dict[int, dict[_Version, list[Held]]]
"""Stage -> version -> holdings, at most one per node."""


def _files(held: Iterable[Held], *kinds: Kind) -> _Files:
    """Holdings by stage and version, in the order of `kinds`: memory is preferred to files."""
    files: _Files = {}
    wanted = [holding for holding in held if holding.kind in kinds]
    for holding in sorted(wanted, key=lambda h: (h.source.node, kinds.index(h.kind))):
        version = holding.source.lineage, holding.source.step, holding.made
        holdings = files.setdefault(holding.source.stage, {}).setdefault(version, [])
        if all(earlier.source.node != holding.source.node for earlier in holdings):
            holdings.append(holding)
    return files


def _alike(held: Sequence[Held]) -> tuple[Held, ...]:
    """The holdings with moments, or, if there are none, those without."""
    whole = tuple(holding for holding in held if holding.kind != "weights")
    return whole or tuple(held)


def _newest_common(files: _Files, stages: int) -> _Version | None:
    common = set.intersection(*(set(files.get(of, ())) for of in range(stages + 1)))
    return max(common, default=None)


def holder_stage(stage: int, stages: int) -> int:
    """The stage whose nodes hold the running snapshot of `stage`, of the stages 0..`stages`.

    The farthest on the ring 0..L, where stage 0 follows stage L. With 3 or more body stages it is
    never a neighbour, so no two consecutive stages hold each other's. Each stage has a
    different holder.
    """
    ring = stages + 1
    return (stage + ring // 2) % ring


def keeper_stage(policy: Policy, stage: int, stages: int) -> int:
    """The stage whose nodes keep data for a rebuild of `stage`: a snapshot, a twin, or, for a
    guess, a neighbour's weights."""
    return holder_stage(stage, stages) if policy == "snapshot" else (stage - 1) % (stages + 1)
