"""Decisions about lost stages: pure functions of what is left, with reasons as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from planaria.recovery.facts import (
    ANEW,
    INEXACT,
    ORIGIN,
    PRETRAINED,
    SEEDED,
    UNKNOWN,
    Decision,
    Held,
    Kind,
    Left,
    Rebuild,
    RollBack,
    Source,
    Stop,
    age_in_words,
    by_version,
    giver,
    newest_common,
    newest_saves,
)
from planaria.recovery.policy import Policy, begin_anew, checkfree, pretrained

RECENT: Final = 50
"""Steps: a kept state that is at most so old comes before a guess.

A state lacks no more than its age, and a guess costs up to 50 steps: CheckFree's average 22 a loss
(lab/results/relearning), and more where stage 1 or neighbours are lost. In
lab/results/scar-language-model whole stages of 45 and 59 steps ago cost as much as an average.
"""
FRESH: Final = 24
"""Steps: the same for a snapshot, by the mean of its rows, where a guess relearns.

In lab/results/auto a lost stage costs as much with rows of 5 or 17 steps ago as with a relearned
guess, and four times as much with rows of 29 steps ago.
"""
KEPT: Final[Mapping[Kind, tuple[str, str]]] = {
    "memory": ("joiner", "a new node had received its state"),
    "save": ("save", "its last save"),
    "weights": ("weights", "a new node had received its weights, without its moments"),
    "snapshot": ("snapshot", "its running snapshot from a peer"),
}
"""What is kept of a stage: by kind, the method that uses it, and a description."""
INITIAL: Final = (ANEW, PRETRAINED)


def decide(
    stage: int, left: Left, policy: Policy, strict: bool = False, relearns: bool = False
) -> Decision:
    """Chooses how a node of `stage` gets its state after a loss.

    In order of preference: an exact state; the freshest that is kept, of at most `RECENT` steps
    ago; the policy's guess; older ones; the best other guess. Exact are a replica; before the first
    step, the checkpoint from which the run begins; this very step where its last node left it, in
    memory from before the run went back, or in a save; and what the policy itself makes exact. With
    `strict` the run stops where the policy has neither a guess nor a snapshot. `relearns`: whether
    a guess does; then a snapshot has to be newer (`FRESH`).
    """
    if replicas := left.nodes(stage):
        reason = f"stage {stage} is copied from its replicas: {_nodes_have(len(replicas))} it"
        if all(source.node in left.leaving for source in replicas):
            reason = f"all nodes with stage {stage} will leave soon: its state is handed over"
            return Rebuild(stage, "handover", replicas, exact=True, reason=reason)
        return Rebuild(stage, "replica", replicas, exact=True, reason=reason)
    if (left.lineage, left.step) == (0, 0) and left.origin:
        source = Source(giver(stage, left.origin), stage, 0)
        reason = f"stage {stage} begins from the checkpoint, which {_nodes_have(len(left.origin))}"
        return Rebuild(stage, ORIGIN, (source,), exact=True, reason=reason)
    if left.adapters and stage == 0:
        reason = "stage 0 is not trained: it equals the checkpoint"
        return Rebuild(stage, ORIGIN, (), exact=True, reason=reason)
    if deposits := _of_this_step("deposit", stage, left):
        reason = f"stage {stage} has no replica left: its last node left the exact state at a peer"
        return Rebuild(stage, "deposit", deposits[:1], exact=True, reason=reason)
    if in_memory := _of_this_step("memory", stage, left):
        reason = f"stage {stage} has this step in memory, from before the run went back"
        return Rebuild(stage, "memory", in_memory, exact=True, reason=reason)
    if saves := _of_this_step("save", stage, left):
        reason = f"stage {stage} has no replica left, but a save of this step"
        return Rebuild(stage, "save", saves, exact=True, reason=reason)
    guess, lacking = policy.rebuild(stage, left)
    if isinstance(guess, RollBack) or (guess is not None and guess.exact):
        return guess
    kept = _freshest(stage, left, lacking, strict)
    if kept is not None:
        state, late = kept
        recent = FRESH if relearns and state.method == "snapshot" else RECENT
        # What a stage began with is older than all that is kept.
        if abs(late) <= recent or guess is None or guess.method in INITIAL:
            return state
    if guess is not None:
        return guess
    if strict:
        return Stop(f"stage {stage} is lost: {lacking}; --strict allows no other method")
    return _fall_back(stage, left, f"stage {stage} is lost and {lacking}")


def await_saves(
    decisions: Iterable[Decision], saved: Mapping[int, int], step: int, single: bool
) -> list[int]:
    """The lost stages that nobody guesses yet, since their last nodes may come back with saves.

    `saved`: by stage, the step of a save that such a node has. It must be one that `decide` would
    prefer to the guess. Unless `single`, a body stage that is guessed alone doesn't wait.
    """
    methods = *INEXACT, SEEDED
    guessed = [d.stage for d in decisions if isinstance(d, Rebuild) and d.method in methods]
    waiting = [of for of in guessed if of in saved and step - saved[of] <= RECENT]
    return waiting if single or len(guessed) > 1 or 0 in waiting else []


def _freshest(stage: int, left: Left, lacking: str, strict: bool) -> tuple[Rebuild, float] | None:
    """The rebuild of a lost stage from the newest state that is kept of it, and how many steps ago
    that was made. `lacking`: why the policy has no guess."""
    snapshots = sorted(left.holdings("snapshot", stage), key=lambda held: held.source.node)
    newest = max(snapshots, key=lambda held: held.as_of, default=None)
    kept: dict[Kind, tuple[Source, ...]] = {
        "memory": left.newest("memory", stage),
        "save": newest_saves(stage, left),
        "weights": left.newest("weights", stage),
        "snapshot": () if newest is None else (newest.source,),
    }
    as_of = {kind: float(sources[0].step) for kind, sources in kept.items() if sources}
    if newest is not None:
        as_of["snapshot"] = newest.as_of
    if kept["snapshot"]:
        lacking = ""  # the policy has sent it
    if not as_of or (strict and lacking):
        return None

    def newness(kind: Kind) -> tuple[bool, int, float]:
        recent = abs(left.step - as_of[kind]) <= RECENT
        return recent, kept[kind][0].lineage, as_of[kind]

    # Of equally new ones the first: it has moments, or all of its rows are of that step.
    kind = max(as_of, key=newness)
    method, content = KEPT[kind]
    late = left.step - as_of[kind]
    why_not = f", and {lacking}" if lacking else ""
    age = ", made by another commit" if kind == "save" and late <= 0 else age_in_words(round(late))
    reason = f"stage {stage} has no replica left{why_not}: {content}{age}"
    fresh = not late and kind not in ("save", "snapshot")
    rebuild = Rebuild(stage, method, kept[kind], False, reason, fallback=bool(lacking), fresh=fresh)
    return rebuild, late


def _fall_back(stage: int, left: Left, loss: str) -> Rebuild | Stop:
    """The best guess that isn't the policy's: the weights of the run's initial checkpoint, else the
    neighbours' average, else an interpolation of the nearest stages. Other stages' adapters contain
    no information about the lost ones, so these begin anew. So does stage 0 in the first steps,
    after which a peer has its first snapshot."""
    if left.adapters:
        return begin_anew(stage, loss, fallback=True)
    if left.origin:
        return pretrained(stage, left, loss, fallback=True)
    if stage == 0:
        if left.step > FRESH:
            return Stop(f"{loss}; nothing else determines embedding and head")
        reason = f"{loss}: its initial weights{age_in_words(left.step)}"
        return Rebuild(0, SEEDED, (), exact=False, reason=reason, fallback=True)
    averaged, _ = checkfree(stage, left)
    if isinstance(averaged, Rebuild):
        reason = f"{loss}: {averaged.reason}"
        return Rebuild(stage, "checkfree", averaged.sources, False, reason, fallback=True)
    between = nearest(stage, left)
    if not between:
        return Stop(f"{loss}; no body stage is left to guess it from")
    names = " and ".join(map(str, between))
    how = "interpolated between stages" if len(between) == 2 else "copied from the nearest, stage"
    sources = tuple(source for of in between for source in left.nodes(of))
    reason = f"{loss}: {how} {names}"
    return Rebuild(stage, "interpolate", sources, exact=False, reason=reason, fallback=True)


def _of_this_step(kind: Kind, stage: int, left: Left) -> tuple[Source, ...]:
    """The nodes that keep the stage's state of this very step and commit, in memory or a file."""
    return tuple(
        holding.source
        for (_, step, made), holdings in by_version(left.held, kind).get(stage, {}).items()
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


def _nodes_have(count: int) -> str:
    return "1 node has" if count == 1 else f"{count} nodes have"


# The start of a swarm from files, and a return to them


@dataclass(frozen=True)
class Resume:
    """The step from which a run continues; stages not in `held` have no usable state."""

    step: int
    lineage: int
    held: Mapping[int, tuple[Held, ...]]
    exact: bool
    reason: str


def resume(held: Iterable[Held], stages: int) -> Resume | None:
    """The point where a run with these files and memory continues; None without any.

    The newest step that every stage has, if necessary for some without moments. Without a
    common step, the newest of each stage (SCAR's partial recovery), at the newest step of all: no
    sample is repeated.
    """
    held = list(held)
    files = by_version(held, "memory", "save", "checkpoint")
    common = newest_common(files, stages)
    if common is not None:
        chosen = {of: tuple(versions[common]) for of, versions in files.items()}
        lineage, step, _ = common
        in_files = all(h.kind != "memory" for holdings in chosen.values() for h in holdings)
        state = f"a save of step {step}" if in_files else f"step {step}"
        reason = f"every stage has {state}: the run continues from there"
        return Resume(step, lineage, chosen, exact=True, reason=reason)
    with_bare = by_version(held, "memory", "save", "checkpoint", "weights")
    common = newest_common(with_bare, stages)
    if common is not None:
        chosen = {of: _with_moments(versions[common]) for of, versions in with_bare.items()}
        lineage, step, _ = common
        bare = [of for of, versions in sorted(chosen.items()) if versions[0].kind == "weights"]
        reason = (
            f"every stage has step {step}, without its moments stage "
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


def _with_moments(held: Sequence[Held]) -> tuple[Held, ...]:
    """Of a version's holdings, those with moments; all, if none has moments."""
    whole = tuple(holding for holding in held if holding.kind != "weights")
    return whole or tuple(held)
