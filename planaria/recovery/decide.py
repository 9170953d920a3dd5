"""What to do about a loss: pure functions of what is left, with their reasons in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planaria.recovery.orders import partner

Policy = Literal["checkfree", "checkfree+", "snapshot", "checkpoint", "redundant"]
"""What to do when a node is lost in the middle of a step and its stage lives on: try the step again
from the start; have the others do what was that node's; the same, and some of them have done a part
of it ahead."""
Kind = Literal["copy", "snapshot", "redundant", "checkpoint", "save", "memory", "weights"]
Made = tuple[int, int]
"""View and attempt of the commit that made a step. One that only those knew who are gone now never
happened, and the step was made again: of the same number, but not the same."""
UNKNOWN: Made = (0, 0)
ANEW = "adapters-anew"
"""The method by which a stage's adapters begin once more as they were before the first step."""
PRETRAINED = "pretrained"
"""The method by which a stage of a run that began from a checkpoint has once more the weights that
it has there."""
INEXACT = ("checkfree", "checkfree+", "interpolate", ANEW, PRETRAINED)
"""Methods that don't know what a stage had learned: they guess its weights from other stages', or
begin anew; what relearning helps."""
COPIED = ("replica", "handover")
"""Methods that copy a stage from nodes that train it: such as stay, or such as will leave soon."""
OWN = ("save", "memory")
"""Methods by which a node goes on from what it has itself, in a file or in memory."""
ARRIVED = ("joiner", "weights")
"""Methods by which it goes on from what had come to it when its last source was lost: a state that
had not caught up, or weights without Adam's moments."""
ORIGIN = "origin"
"""The method by which a stage gets the weights that it begins with: those of a checkpoint."""


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
    """What a node keeps of a stage besides training it.

    `copy`: stage 0's weights, `snapshot`: its running snapshot, `redundant`: its twin, each of
    another node's stage, in memory. `checkpoint`, `save`: of the node's own stage, in a file.
    `memory`: what it has itself, which counts when the run goes back to it, or nobody has more.
    `weights`: of its own stage, as they came from a node that was lost before its moments had come.
    """

    kind: Kind
    source: Source
    made: Made = UNKNOWN  # by which commit


def _newest(sources: Iterable[Source]) -> tuple[Source, ...]:
    found = sorted(sources, key=lambda source: source.node)
    newest = max((source.step for source in found), default=0)
    return tuple(source for source in found if source.step == newest)


@dataclass(frozen=True)
class Left:
    """What is left when everybody has answered."""

    stages: int  # body stages, L
    step: int  # the newest committed
    survivors: Mapping[int, Sequence[str]]  # stage -> its nodes that have that step
    lineage: int = 0
    held: Sequence[Held] = ()
    untrained: frozenset[int] = field(default_factory=frozenset)  # survivors guessed at this step
    made: Made = UNKNOWN  # the step
    origin: Sequence[str] = ()  # nodes that have the checkpoint which the run begins from
    adapters: bool = False  # are all that is trained, beside the weights of the checkpoint
    leaving: Collection[str] = ()  # nodes that were told to go

    def nodes(self, stage: int) -> tuple[Source, ...]:
        nodes = sorted(self.survivors.get(stage, ()))
        return tuple(Source(node, stage, self.step, self.lineage) for node in nodes)

    def freshest(self, kind: Kind, stage: int) -> tuple[Source, ...]:
        """The holdings of the newest step among those of this lineage and no later step: what is
        newer was never committed by those who are left."""
        return _newest(held.source for held in self._held(kind, stage))

    def here(self, kind: Kind, stage: int) -> tuple[Source, ...]:
        """As `freshest`, without what is of this very step and made by another commit."""
        held = self._held(kind, stage)
        return _newest(
            one.source
            for one in held
            if one.source.step < self.step or one.made in (self.made, UNKNOWN)
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
    """Give a node of `stage` the state of the step that the swarm stands at."""

    stage: int
    method: str
    sources: tuple[Source, ...]
    exact: bool  # weights and optimizer state are those that were lost
    reason: str
    fallback: bool = False  # not what the policy promises
    fresh: bool = False  # the weights are those that were lost, the optimizer starts anew

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
    """The run can't go on: nothing that is left tells what the stage's weights were."""

    stage: int
    reason: str


Decision = Rebuild | RollBack | Stop


def decide(stage: int, left: Left, policy: Policy, strict: bool = False) -> Decision:
    """How does a node of `stage` get its state?

    A replica is always the first choice, before the first step the checkpoint that the run begins
    from, then this very step from before the run went back, then a
    save of it, then what the policy holds ready, then, unless `strict`, the best guess that what is
    left allows. Of adapters no other stage's say anything, so nobody guesses: policies that would
    take the last save, or begin anew. What a node of the stage was getting from one that is lost
    now comes before all that is a guess, or older.
    """
    if replicas := left.nodes(stage):
        reason = f"stage {stage} lives on at {len(replicas)} of its nodes: copied from there"
        if all(source.node in left.leaving for source in replicas):
            reason = f"all that have stage {stage} will leave soon: its state is handed over"
            return Rebuild(stage, "handover", replicas, exact=True, reason=reason)
        return Rebuild(stage, "replica", replicas, exact=True, reason=reason)
    if (left.lineage, left.step) == (0, 0) and left.origin:
        source = Source(giver(stage, left.origin), stage, 0)
        reason = f"stage {stage} begins from the checkpoint, which {_nodes(len(left.origin))}"
        return Rebuild(stage, ORIGIN, (source,), exact=True, reason=reason)
    if left.adapters and stage == 0:
        reason = "nothing of stage 0 is trained: it is as in the checkpoint"
        return Rebuild(stage, ORIGIN, (), exact=True, reason=reason)
    if there := _of_this_step("memory", stage, left):
        reason = f"stage {stage} has this very step from before the run went back"
        return Rebuild(stage, "memory", there, exact=True, reason=reason)
    if saves := _of_this_step("save", stage, left):
        reason = f"stage {stage} has no replica left, but a save of this very step"
        return Rebuild(stage, "save", saves, exact=True, reason=reason)
    found, lacking = _BY_POLICY[policy](stage, left)
    if found is not None:
        return _arrived(stage, left, found) or found
    if strict:
        return Stop(stage, f"stage {stage} is lost: {lacking}; --strict allows no other way")
    guess = _fall_back(stage, left, lacking)
    return _arrived(stage, left, guess, lacking) or guess


def _arrived(stage: int, left: Left, other: Decision, lacking: str = "") -> Rebuild | None:
    """By what had come to a node of the stage when the last one that trained was lost, if that is
    no farther from what was lost than `other`. `lacking`: why the policy can't serve."""
    if isinstance(other, RollBack) or (isinstance(other, Rebuild) and other.exact):
        return None
    here = [(s, kind) for kind in ("memory", "weights") for s in left.here(kind, stage)]
    if not here:
        return None
    source, kind = max(here, key=lambda one: one[0].step)  # of the two of one step, with moments
    if isinstance(other, Rebuild) and other.method not in INEXACT:
        its = other.sources[0].lineage, other.sources[0].step, other.method == "save"
        if its > (source.lineage, source.step, kind == "memory"):
            return None
    late = left.step - source.step
    loss = f"stage {stage} is lost and {lacking}" if lacking else f"stage {stage} is lost"
    method = "joiner" if kind == "memory" else "weights"
    what = "state" if kind == "memory" else "weights, without Adam's moments,"
    reason = f"{loss}: its {what} had come to {source.node} by then{_stale(late)}"
    return Rebuild(stage, method, (source,), False, reason, fallback=bool(lacking), fresh=not late)


_Answer = tuple[Rebuild | RollBack | None, str]
"""What the policy can do, or why it can't."""


def _checkfree(stage: int, left: Left) -> _Answer:
    """CheckFree, Algorithm 1: for 1 < stage < L only, the others lack a second body neighbour.
    Stage 0 as CheckFree+ has it: its copies don't need swapped orders. Not so a stage of which
    there is a snapshot."""
    if stage and left.freshest("snapshot", stage):
        return _snapshot(stage, left)
    if left.adapters:
        return _begin_anew(stage, left, f"stage {stage} has no replica left"), ""
    if stage == 0:
        return _stage0_copy(left)
    if left.origin:
        return _pretrained(stage, left, f"stage {stage} has no replica left"), ""
    if not 1 < stage < left.stages:
        return None, "checkfree rebuilds only stages between two body stages, and this is an end"
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
    """What there is for adapters, whatever the policy."""
    if saves := _newest_saves(stage, left):
        reason = f"{loss}: its adapters' save of step {saves[0].step} is used"
        return Rebuild(stage, "save", saves, exact=False, reason=reason, fallback=fallback)
    reason = f"{loss}: its adapters begin anew, since those of other stages say nothing of them"
    return Rebuild(stage, ANEW, (), exact=False, reason=reason, fallback=fallback)


def _pretrained(stage: int, left: Left, loss: str, fallback: bool = False) -> Rebuild:
    """Of a trained model stages are no longer alike, and have not moved far since."""
    source = Source(giver(stage, left.origin), stage, 0)
    reason = f"{loss}: its weights of the checkpoint that the run began from"
    return Rebuild(stage, PRETRAINED, (source,), exact=False, reason=reason, fallback=fallback)


def _checkfree_plus(stage: int, left: Left) -> _Answer:
    """CheckFree+ (its section 4.3): an end stage is a copy of the one that took its place in
    swapped order."""
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
    copies = left.freshest("copy", 0)[:1]  # two of one step may differ: stage 0 was rebuilt
    if not copies:
        return None, "no copy of stage 0 had come to stages 1 and L, or it went with them"
    late = left.step - copies[0].step
    reason = "stage 0 has no replica left: its weights' copy from stages 1 and L" + _stale(late)
    return Rebuild(0, "stage0-copy", copies, False, reason, fresh=not late), ""


def _snapshot(stage: int, left: Left) -> _Answer:
    sources = left.freshest("snapshot", stage)[:1]  # two may have taken blocks at different steps
    if not sources:
        return None, "no peer holds a whole snapshot of it"
    late = left.step - sources[0].step
    reason = f"stage {stage} has no replica left: its running snapshot from a peer" + _stale(late)
    return Rebuild(stage, "snapshot", sources, exact=False, reason=reason), ""


def _redundant(stage: int, left: Left) -> _Answer:
    twins = [s for s in left.freshest("redundant", stage) if s.step == left.step]
    if not twins:
        return None, "the node before it, which holds its twin, is lost with it or new itself"
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
    """The best guess: its last save, else what it was in the checkpoint that the run began from,
    else the neighbours, else what lies between the nearest."""
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
        return Stop(0, f"{loss}; nothing else tells what embedding and head were")
    averaged, _ = _checkfree(stage, left)
    if isinstance(averaged, Rebuild):
        reason = f"{loss}: {averaged.reason}"
        return Rebuild(stage, "checkfree", averaged.sources, False, reason, fallback=True)
    between = nearest(stage, left)
    if not between:
        return Stop(stage, f"{loss}; no body stage is left to guess it from")
    what = " and ".join(map(str, between))
    how = "interpolated between stages" if len(between) == 2 else "copied from the nearest, stage"
    sources = tuple(source for of in between for source in left.nodes(of))
    reason = f"{loss}: {how} {what}"
    return Rebuild(stage, "interpolate", sources, exact=False, reason=reason, fallback=True)


def _newest_saves(stage: int, left: Left) -> tuple[Source, ...]:
    """Files count that are of older lineages, too: after a resume there is nothing else yet."""
    files = _files(left.held, "save").get(stage, {})
    usable = [version for version in files if version[:2] <= (left.lineage, left.step)]
    return tuple(held.source for held in files[max(usable)]) if usable else ()


def _of_this_step(kind: Kind, stage: int, left: Left) -> tuple[Source, ...]:
    """After the run went back, which only some have lived to see, everybody else still has it."""
    return tuple(
        one.source
        for (_, step, made), held in _files(left.held, kind).get(stage, {}).items()
        for one in held
        if (step, made) == (left.step, left.made) and made != UNKNOWN
    )


def nearest(stage: int, left: Left) -> list[int]:
    """The nearest body stages before and after `stage` that are left, at most one on each side.

    One that was itself guessed at this step counts only if there is no other at all.
    """
    alive = [of for of in range(1, left.stages + 1) if left.survivors.get(of)]
    usable = [of for of in alive if of not in left.untrained] or alive
    before = [of for of in usable if of < stage]
    after = [of for of in usable if of > stage]
    return before[-1:] + after[:1]


def giver(stage: int, nodes: Sequence[str]) -> str:
    """Of those that have the checkpoint, the one that gives this stage's weights: a single one, so
    that it is known who gave what isn't in the checkpoint."""
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


# When a swarm starts and there are files, or goes back


@dataclass(frozen=True)
class Resume:
    """Where a run goes on; a stage that is not in `held` has nothing that fits."""

    step: int
    lineage: int
    held: Mapping[int, tuple[Held, ...]]
    exact: bool
    reason: str


def resume(held: Iterable[Held], stages: int) -> Resume | None:
    """Where the run goes on that had all this, in files or memory; None if that is nothing.

    The newest step that every stage has, some without Adam's moments where it can't be otherwise.
    Where there is none, the newest of each (SCAR's partial recovery), and the step is the newest of
    all: no sample comes twice.
    """
    held = list(held)
    files = _files(held, "memory", "save", "checkpoint")
    common = _newest_common(files, stages)
    if common is not None:
        chosen = {of: tuple(found[common]) for of, found in files.items()}
        lineage, step, _ = common
        filed = all(one.kind != "memory" for found in chosen.values() for one in found)
        what = f"a save of step {step}" if filed else f"step {step}"
        reason = f"every stage has {what}: the run goes on from there"
        return Resume(step, lineage, chosen, exact=True, reason=reason)
    found = _files(held, "memory", "save", "checkpoint", "weights")
    common = _newest_common(found, stages)
    if common is not None:
        chosen = {of: _alike(each[common]) for of, each in found.items()}
        lineage, step, _ = common
        bare = [of for of, each in sorted(chosen.items()) if each[0].kind == "weights"]
        reason = (
            f"every stage has step {step}, without Adam's moments stage "
            f"{', '.join(map(str, bare))}: the run goes on from there"
        )
        return Resume(step, lineage, chosen, exact=False, reason=reason)
    if not files:
        return None
    newest = {of: max(found) for of, found in files.items()}
    lineage, step, _ = max(newest.values())
    chosen = {of: tuple(files[of][version]) for of, version in newest.items()}
    mix = ", ".join(f"stage {of} from step {at}" for of, (_, at, _) in sorted(newest.items()))
    none = sorted(set(range(stages + 1)) - set(files))
    reason = f"there is no step that every stage has: {mix}" + (
        f"; nothing of stage {', '.join(map(str, none))}" if none else ""
    )
    return Resume(step, lineage, chosen, exact=False, reason=reason)


_Version = tuple[int, int, Made]
"""Lineage, step, and by which commit; the greater is the newer."""
_Files = dict[int, dict[_Version, list[Held]]]
"""Stage -> version -> who has it, each once."""


def _files(held: Iterable[Held], *kinds: Kind) -> _Files:
    """The kinds in the order in which they are read: from memory before from a file."""
    files: _Files = {}
    wanted = [one for one in held if one.kind in kinds]
    for one in sorted(wanted, key=lambda h: (h.source.node, kinds.index(h.kind))):
        version = one.source.lineage, one.source.step, one.made
        there = files.setdefault(one.source.stage, {}).setdefault(version, [])
        if all(other.source.node != one.source.node for other in there):
            there.append(one)
    return files


def _alike(held: Sequence[Held]) -> tuple[Held, ...]:
    """Those with moments, or, where nobody has them, those without."""
    whole = tuple(one for one in held if one.kind != "weights")
    return whole or tuple(held)


def _newest_common(files: _Files, stages: int) -> _Version | None:
    common = set.intersection(*(set(files.get(of, ())) for of in range(stages + 1)))
    return max(common, default=None)


def holder_stage(stage: int, stages: int) -> int:
    """The stage whose nodes hold the running snapshot of `stage`, of the stages 0..`stages`.

    The farthest on the ring 0..L, on which stage 0 comes behind stage L too. With 3 body stages or
    more that is never a neighbour, so no two stages in a row hold each other's. No two stages have
    the same holder.
    """
    ring = stages + 1
    return (stage + ring // 2) % ring


def keeper_stage(policy: Policy, stage: int, stages: int) -> int:
    """The stage whose nodes keep what a rebuild of `stage` needs, or a part of that: a snapshot, a
    twin, or, where it is guessed, the weights of a neighbour."""
    return holder_stage(stage, stages) if policy == "snapshot" else (stage - 1) % (stages + 1)
