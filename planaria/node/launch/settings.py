"""A run's settings: what of a run file may change while the run's weights and data stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from planaria.bootstrap.registry_pb2 import Change
from planaria.bootstrap.rules import MembershipRules, Resettled
from planaria.node.launch.resolve import check_policy
from planaria.node.model.learning_rate import rate_of
from planaria.node.run_file import (
    PRIVATE,
    ChangeSection,
    RunFile,
    RunFileError,
    flatten,
    format_setting,
    loads,
    override,
    parse_settings,
    without_private,
)

IDENTITY: Final = "name", "seed", "model.", "data.", "training.lora", "training.optimizer"
"""Beginnings of the keys of what makes a run's state and its data."""
STAGES: Final = "model.stages"
"""The key of the model that may change, as saves can be regrouped."""


def differences(run: RunFile, other: RunFile) -> dict[str, tuple[Any, Any]]:
    """The keys in which two run files differ, with both values; None: there is none."""
    ours, theirs = _flat_settings(run), _flat_settings(other)
    pairs = {key: (ours.get(key), theirs.get(key)) for key in sorted(ours | theirs)}
    differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if STAGES in differing:  # from which these digests follow
        differing.pop("model.content", None)
    return differing


def _flat_settings(run: RunFile) -> dict[str, Any]:
    return flatten(run.model_dump(mode="json", exclude_none=True, exclude={"changes", PRIVATE}))


def check_identity(values: Mapping[str, tuple[Any, Any]], free: Sequence[str] = ()) -> None:
    """Check that keys of model and data, but for `free`, keep their value. Raises RunFileError."""
    for key, (before, after) in values.items():
        if key == STAGES and key not in free and before != after:
            raise RunFileError(
                f"{STAGES} = {after}: a run gets another number of stages when it is resumed: "
                "planaria stop, then planaria up --resume DIR --stages N"
            )
        if key.startswith(IDENTITY) and key not in free and before != after:
            raise RunFileError(
                f"{key} = {_shown(after)}, and the run has {_shown(before)}: with that its state "
                "or its data would be others. A new run can begin from its model: export it, and "
                "name that folder by model.from"
            )


def _shown(value: Any) -> Any:
    """A setting's value in a message."""
    return "none" if value in (None, "") else value


def changed_run(
    before: RunFile, wanted: RunFile, step: int, anew: bool = False, undone: int = 0
) -> RunFile:
    """The run with the settings of `wanted`, which hold behind `step`. `anew`: the run's saves are
    written anew for that; `undone`: the newest view whose later steps don't count. Raises
    RunFileError."""
    rows = differences(before, wanted)
    check_identity(rows, [STAGES] if anew else [])
    check_policy(wanted)
    was = tuple(format_setting(key, old) for key, (old, _) in rows.items())
    change = ChangeSection(step=step, was=was, anew=anew, undone=undone)
    return wanted.model_copy(update={"changes": (*before.changes, change)})


def with_changes(run: RunFile, changes: Iterable[Change]) -> RunFile:
    """The run with those changes of a view that hold and that it lacks. Raises RunFileError."""
    for change in changes:
        if change.number > len(run.changes) and not change.pending:
            settings = parse_settings(change.settings)
            if any(key.partition("__")[0] == PRIVATE for key in settings):
                raise RunFileError(
                    f"{PRIVATE}: nobody can change that from elsewhere; write it into the "
                    "registry's run file, and restart the registry"
                )
            wanted = override(run, **settings)
            run = changed_run(run, wanted, change.step, undone=change.undone)
    return run


def resettled(
    rules_of: Callable[[RunFile], MembershipRules], run_file: str, changes: Iterable[Change]
) -> Resettled:
    """The registry's port `Resettle`: the changed run, and rules for it. Raises RunFileError."""
    before = loads(run_file)
    run = with_changes(before, changes)
    if _needs_folders(run) != _needs_folders(before):
        raise RunFileError(
            f"recovery.policy = {run.recovery.policy}, and the run has {before.recovery.policy}: "
            "of these, one needs folders that nodes are given when they start. planaria stop, then "
            "resume the run with it"
        )
    return Resettled(
        without_private(run), rules_of(run), len(run.changes), _change_sentences(before, run)
    )


def _needs_folders(run: RunFile) -> bool:
    """Whether nodes need a folder of checkpoints, or each the whole model to begin from."""
    return run.policy.checkpoints or (run.policy.twins and run.model.origin is not None)


def describe_change(before: RunFile, run: RunFile) -> list[str]:
    """What the newest change of a run's settings changes, in sentences."""
    step, rows = run.changed_at, _change_sentences(before, run)
    return [f"from step {step + 1} on:" if rows else f"going on from step {step}", *rows]


def _change_sentences(before: RunFile, run: RunFile) -> list[str]:
    """The changed settings of a run, and what becomes of its learning rate, in sentences."""
    step, rows = run.changed_at + 1, differences(before, run)
    sentences = [f"  {key} = {_shown(new)} (was {_shown(old)})" for key, (old, new) in rows.items()]
    was, rate = rate_of(step, before), rate_of(step, run)
    if abs(rate - was) > 1e-3 * was:
        gently = "; training.rewarm=50 makes that 50 steps long"
        how = gently if rate > was and not run.training.rewarm else ""
        sentences.append(f"the learning rate at step {step} goes from {was:.2g} to {rate:.2g}{how}")
    return sentences
