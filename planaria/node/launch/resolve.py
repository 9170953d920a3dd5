"""Resolution of a run file: adds what follows from the preset and the data."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.step_time import Load
from planaria.node.data.corpus import CorpusError, read_index
from planaria.node.data.mixture import index_of
from planaria.node.hugging_face.begin_from_model import (
    check_targets,
    check_tokenizer,
    completed_by,
    with_model,
)
from planaria.node.model.checkpoint import first_few
from planaria.node.model.layout import counterparts
from planaria.node.model.learning_rate import peak_of, warmup_of
from planaria.node.run_file import DATA, RunFile, RunFileError, override
from planaria.node.wire.frame_format import crossing_bytes
from planaria.recovery.orders import partner

log = logging.getLogger("planaria")

SHIPPED = Path(__file__).resolve().parents[2] / "corpus" / "austen"
"""Prose in the package."""
BUILD_SECONDS = 300.0
"""Seconds for an own architecture's code to be loaded and tried."""


def text_to_prepare(run: RunFile) -> Path | None:
    """The shipped prose, if the run has the default data path and nothing is there yet."""
    is_default = run.data.path == DATA and not run.data.content
    return SHIPPED if is_default and not Path(run.data.path).exists() and SHIPPED.is_dir() else None


def resolve(run: RunFile) -> RunFile:
    """Fill in a run file's `data.content`, `model.vocabulary`, `model.stages`, `model.layers`,
    `training.lr`, `training.optimizer`, `training.warmup`, and the shape of the model that
    `model.from` names or `model.module` builds. Make the data's paths absolute, so that the file is
    complete for any node.

    The data may be missing on this machine if the run file has `model.vocabulary`. Raises
    RunFileError and CorpusError.
    """
    check_lora(run)
    run = with_model(run)
    vocabulary, data = run.model.vocabulary, run.data.moved(lambda name: Path(name).absolute())
    if vocabulary is None or all(path.exists() for path in data.folders):
        index = index_of(data)
        check_tokenizer(run)
        if problem := index.misfit(data.folders[0], data.content, vocabulary):
            raise CorpusError(f"{data.where} {problem}")
        corpora = [
            corpus.model_copy(update={"content": read_index(path).content})
            for corpus, path in zip(data.corpora, data.folders, strict=False)
        ]
        data = data.model_copy(update={"content": index.content, "corpora": tuple(corpora)})
        vocabulary = vocabulary or index.vocabulary
    run = override(run, data=data.model_dump(), model__vocabulary=vocabulary)
    if run.model.module is not None and run.model.parts is None:
        run = _with_parts(run)
    config = run.model.config
    figures = {"model__stages": run.model.stages or config.stages, "model__layers": config.layers}
    rates = {"training__lr": peak_of(run), "training__warmup": warmup_of(run)}
    run = override(run, **figures, **rates, training__optimizer=run.optimizer)
    check_policy(run)
    check_targets(run)
    return run


def _with_parts(run: RunFile) -> RunFile:
    """Add `model.parts`, found by another process that builds `model.module`: this one needs
    neither torch nor that code. Raises RunFileError."""
    try:
        return completed_by("planaria.node.stage.own_code", run, BUILD_SECONDS)
    except TimeoutError as error:
        raise RunFileError(
            f"model.module = {run.model.module}: its model was not built within "
            f"{BUILD_SECONDS:.0f} s; build it faster, or give model.parts "
            "(docs/own-architecture.md)"
        ) from error
    except RunFileError as error:
        raise RunFileError(
            f"model.module: {error}. A run file in which model.parts says what the code builds "
            "needs none here: docs/own-architecture.md says how to make one"
        ) from error


def check_policy(run: RunFile) -> None:
    """Check that the run can have its recovery policy. Raises RunFileError."""
    name, policy, config = run.recovery.policy, run.policy, run.config
    stages, cut = config.stages, config.cut
    if policy.swapped and stages < 4:
        raise RunFileError(
            f"recovery.policy = {name} swaps the first two and the last two body stages, so it "
            f"needs 4 of them, and model.stages = {stages}: use checkfree, or more stages"
        )
    if policy.swapped and (cut[0], cut[-1]) != (cut[1], cut[-2]):
        raise RunFileError(
            f"recovery.policy = {name} swaps the first two and the last two body stages, and "
            f"model.stages = {list(cut)} gives these different numbers of layers: use checkfree, "
            "or give each two the same"
        )
    guesses = policy.guesses and not policy.snapshots
    if guesses and run.model.origin is None and not config.alike:
        _check_alike(run)
    if policy.checkpoints and not run.recovery.checkpoint.dir:
        raise RunFileError(
            f"recovery.policy = {name} needs recovery.checkpoint.dir, a folder that all nodes share"
        )


def _check_alike(run: RunFile) -> None:
    """Say what a guess of each stage lacks where layers differ along the depth. Raises RunFileError
    for a stage of which nothing can be guessed."""
    name, config = run.recovery.policy, run.config
    for stage in range(1, config.stages + 1):
        others = [of for of in (stage - 1, stage + 1) if 0 < of <= config.stages]
        other = partner(stage, config.stages) if run.policy.swapped else None
        if other is not None:  # which computes in its place
            others = [other]
        rows = list(zip(*(counterparts(config, stage, of) for of in others), strict=True))
        lacking = [row[0][0] for row in rows if any(weight is None for _, weight in row)]
        if rows and (len(lacking) == len(rows) or (lacking and other is not None)):
            raise RunFileError(
                f"recovery.policy = {name}: stage {stage} would be estimated from stage "
                f"{' and '.join(map(str, others))}, whose layers have other shapes: use auto, "
                "or other model.stages"
            )
        if lacking:
            size = sum(weight.size for weight in lacking)
            log.warning(
                "recovery.policy = %s can estimate %s of the %s values of stage %d: layers of its "
                "neighbours differ, and the rest would begin anew (%s). With auto all are kept",
                *(name, f"{config.trained_in(stage) - size:,}", f"{config.trained_in(stage):,}"),
                *(stage, first_few([weight.name for weight in lacking])),
            )


def check_lora(run: RunFile) -> None:
    """Check a run's adapters, but for what depends on the model, which may take minutes to read."""
    if run.training.lora is None:
        return
    if run.model.origin is None:
        raise RunFileError(
            "training.lora trains adapters of a trained model: name its folder by model.from, or "
            "leave training.lora out to train a new model"
        )
    if run.optimizer == "muon":
        raise RunFileError(
            "training.optimizer = muon is for all weights, and adapters (training.lora) have "
            "AdamW: leave out one of them"
        )
    if run.policy.swapped:
        raise RunFileError(
            f"recovery.policy = {run.recovery.policy} swaps stages, but with training.lora each "
            "stage keeps its part of the base model: use auto or snapshot"
        )


def run_id(run: RunFile) -> str:
    """Name of the run and a hash of its file's content; fit for a folder's name.

    A newer planaria, which has keys that the file lacks, keeps the name.
    """
    content = json.dumps(run.identifying_fields(), sort_keys=True)
    return f"{run.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def registry_rules(run: RunFile) -> MembershipRules:
    """The registry's rules for a resolved run; the same run has the same rules after a restart."""
    if run.model.stages is None:
        raise RunFileError("the run file doesn't say model.stages: resolve it first")
    config, training, wait = run.config, run.training, run.recovery.wait_for_saves
    sizes = crossing_bytes(config, training.microbatch * config.context, run.wire)
    return MembershipRules(
        run=run_id(run),
        stages=run.model.body_stages,
        replicas=run.swarm.replicas,
        # With more nodes than microbatches, some would have no work.
        max_replicas=max(run.swarm.replicas, training.microbatches),
        start_grace=run.swarm.start_grace,
        lease=run.swarm.lease,
        # Nodes that resolve a restarted registry's name took up to 4.3 s to reconnect.
        restart_grace=run.swarm.lease + 5.0,
        steps=run.steps,
        data=run.data.content,
        policy=run.policy,
        load=Load(config.cut, training.microbatches, *sizes),
        wait_for_saves=MembershipRules.wait_for_saves if wait is None else wait,
    )
