"""Makes the run to plan from a run file, a preset, or a model's config.json.

No weights of the model are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.node.hugging_face.begin_from_model import check_targets, find_checkpoint, with_shape
from planaria.node.launch.resolve import check_lora
from planaria.node.model.config import (
    CONFIG,
    SUPPORTED,
    UnsupportedModelError,
    needs_transformers,
    read_config,
    read_json,
)
from planaria.node.model.shape import PRESETS
from planaria.node.run_file import RunFile, load, override
from planaria.recovery.policy import POLICIES
from planaria_lab.planning.planner import PlanError

if TYPE_CHECKING:
    from planaria_lab.planning.plan import PlanOptions

CODECS: Final = ("activations", "gradients", "averaging")
TOKENS_A_STEP: Final = 2**18
"""Approximate tokens a step with a preset, if --batch isn't given."""


class Asked(NamedTuple):
    """The run to plan."""

    run: RunFile
    tokens: float  # to train on
    free: set[str]  # codecs that the planner may choose, as the run file doesn't name them
    narrow: bool  # the model's weights are in bf16


def asked(options: PlanOptions) -> Asked:
    """The run to plan, from command line options. Raises RunFileError, PlanError, ValueError."""
    run, free = _of_source(options), {*CODECS}
    if options.run_file is not None:
        free -= run.wire.model_fields_set
    has_lora = options.lora is not None or run.training.lora is not None
    if options.base is not None and not has_lora:
        raise PlanError(
            f"--base {options.base} is the form of frozen weights, and without adapters no weights "
            "are frozen: give --lora RANK, too"
        )
    run = override(
        run,
        model__context=options.context,
        training__batch=options.batch,
        training__lora__rank=options.lora,
        training__lora__base=options.base,
    )
    check_lora(run)
    run, narrow = shaped(run)
    check_targets(run)
    if options.preset is not None and options.tokens is None:
        raise PlanError("a preset has no number of steps: give --tokens")
    context = run.config_for(run.model.vocabulary or options.vocabulary).context
    tokens = options.tokens or float(run.steps * run.training.batch * context)
    return Asked(run, tokens, free, narrow)


def _of_source(options: PlanOptions) -> RunFile:
    """The run of the run file, --preset or --from. Raises RunFileError, PlanError."""
    preset, origin = options.preset, options.origin
    if [options.run_file, preset, origin].count(None) != 2:
        raise PlanError("give exactly one of these: a run file, --preset, --from")
    if options.run_file is not None:
        return load(options.run_file)
    figures = {"training__microbatch": 1, "training__precision": "bf16"}
    if origin is not None:
        path = Path(origin)
        if path.is_file() and path.name != CONFIG:
            raise PlanError(f"--from {origin}: give a model's folder, or the {CONFIG} in it")
        return override(
            RunFile(), model__from=str(path.parent if path.is_file() else origin), **figures
        )
    assert preset is not None
    if preset not in PRESETS:
        raise PlanError(f"--preset {preset}: unknown; choose from {', '.join(sorted(PRESETS))}")
    size = max(1, TOKENS_A_STEP // (options.context or PRESETS[preset].context))
    return override(RunFile(), model__preset=preset, training__batch=size, **figures)


def shaped(run: RunFile) -> tuple[RunFile, bool]:
    """The run with the shape of the model in `model.from` or `model.config`; and whether the
    model's config.json says that its weights are in bf16. Raises RunFileError, PlanError."""
    model = run.model
    name, key = model.origin or model.blueprint, "from" if model.origin else "config"
    if name is None:
        return run, False
    try:
        folder = find_checkpoint(name, [CONFIG])
        if folder is None and model.vocabulary is not None and model.layers is not None:
            return run, False
        if folder is None:
            raise PlanError(f"model.{key} = {name}: there is no such folder")
        if needs_transformers(folder):
            kind = read_json(folder / CONFIG)["model_type"]
            raise PlanError(
                f"model.{key} = {name}: the time and memory of a stage aren't known for models of "
                f"transformers' own code (model_type = {kind}); {SUPPORTED}"
            )
        run = with_shape(run, read_config(folder), folder)
        content = read_json(folder / CONFIG)
    except (UnsupportedModelError, OSError) as error:
        raise PlanError(f"model.{key} = {name}: {error}") from error
    return run, "bfloat16" in (content.get("dtype"), content.get("torch_dtype"))


def policies(names: Sequence[str] | None, run: RunFile) -> tuple[str, ...]:
    """The policies to try: these, by default all. Raises PlanError, RunFileError."""
    if unknown := set(names or ()) - {*POLICIES}:
        raise PlanError(f"--policy {min(unknown)}: unknown; choose from {', '.join(POLICIES)}")
    for name in names or ():
        check_lora(override(run, recovery__policy=name))
    return tuple(names or POLICIES)
