"""The run file as its registry hands it out: with what follows from the preset and the data."""

from __future__ import annotations

import hashlib
from pathlib import Path

from planaria.bootstrap.membership import MembershipRules
from planaria.node.data.corpus import CorpusError, read_index
from planaria.node.hugging_face.taking_in import check_tokenizer, take_in
from planaria.node.run_file import DataSection, RunFile, RunFileError, override

SHIPPED = Path(__file__).resolve().parents[1] / "corpus" / "austen"
"""Prose that comes with the package."""


def text_to_prepare(run: RunFile) -> Path | None:
    """The shipped prose, when the run leaves its data to the default and nothing is there yet."""
    wanted = run.data.path == DataSection().path and not run.data.content
    return SHIPPED if wanted and not Path(run.data.path).exists() and SHIPPED.is_dir() else None


def resolve(run: RunFile) -> RunFile:
    """Fills in `data.content`, `model.vocabulary`, `model.stages`, `model.layers`, and the shape of
    the model that `model.from` names; makes `data.path` absolute, so that any node finds
    everything in it.

    Data that is not on this machine is no error as long as the run file says `model.vocabulary`.
    Raises RunFileError and CorpusError.
    """
    run = take_in(run)
    path = Path(run.data.path).absolute()
    content, vocabulary = run.data.content, run.model.vocabulary
    if vocabulary is None or path.exists():
        index = read_index(path)
        check_tokenizer(run, index)
        if problem := index.misfit(content, vocabulary):
            raise CorpusError(f"{path} {problem}")
        content, vocabulary = index.content, vocabulary or index.vocabulary
    run = override(run, data__path=str(path), data__content=content, model__vocabulary=vocabulary)
    config = run.model.config
    run = override(run, model__stages=config.stages, model__layers=config.layers)
    _check_policy(run)
    return run


def _check_policy(run: RunFile) -> None:
    policy, stages = run.recovery.policy, run.model.stages or 0
    if policy == "checkfree+" and stages < 4:
        raise RunFileError(
            f"recovery.policy = checkfree+ swaps the first two and the last two body stages, so it "
            f"needs 4 of them, and model.stages = {stages}: use checkfree, or more stages"
        )
    if policy == "checkpoint" and not run.recovery.checkpoint.dir:
        raise RunFileError(
            "recovery.policy = checkpoint needs recovery.checkpoint.dir, a folder that all nodes "
            "share"
        )


def run_id(run: RunFile, text: str) -> str:
    """What the run is called, by itself and its file's text; fit for a folder's name."""
    return f"{run.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def registry_rules(run: RunFile, text: str) -> MembershipRules:
    """What the registry of a resolved run decides by; `text` is the run file it hands out. A
    registry that is started again with the same text serves the same run."""
    if run.model.stages is None:
        raise RunFileError("the run file doesn't say model.stages: resolve it first")
    return MembershipRules(
        run=run_id(run, text),
        stages=run.model.stages,
        replicas=run.swarm.replicas,
        # A node more than there are microbatches would have nothing to do.
        max_replicas=max(run.swarm.replicas, run.training.microbatches),
        start_grace=run.swarm.start_grace,
        lease=run.swarm.lease,
        # Nodes that look a restarted registry up by name took up to 4.3 s to find it again.
        restart_grace=run.swarm.lease + 5.0,
        data=run.data.content,
        swapped=run.recovery.policy == "checkfree+",
        policy=run.recovery.policy,
    )
