"""The weights of a run's model, out of the saves of its stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.node.data.corpus import CorpusError
from planaria.node.data.mixture import folders_of, index_of
from planaria.node.hugging_face.adapters import way_out
from planaria.node.hugging_face.card import model_card
from planaria.node.hugging_face.checkpoint import TOKENIZER
from planaria.node.hugging_face.config import read_end
from planaria.node.hugging_face.export import ExportError, Vocabulary
from planaria.node.report.progress import Track
from planaria.node.run_file import RunFile
from planaria.node.stage.shape import ModelConfig
from planaria.node.state.regroup import RegroupError, choose, of_one_run, stages_of
from planaria.node.state.saves import SaveFile

log = logging.getLogger("planaria")


@dataclass(frozen=True)
class SavedModel:
    """The newest model that there is, stage by stage, in files that were found whole."""

    config: ModelConfig
    step: int
    doubt: str  # why it isn't the model as it was at that step; empty when it is
    files: dict[int, SaveFile]  # by stage

    def read(self, stage: int, first: int, count: int) -> Tensor:
        """So many of the stage's flat weights, float32 [count]. Raises SaveError, OSError."""
        chunks = list(self.files[stage].values("weights", first, count))
        return torch.from_numpy(np.concatenate(chunks).view(np.float32))


def saved_model(run: RunFile, saves: Sequence[SaveFile]) -> SavedModel:
    """Of a resolved run, in as many stages as its saves are of. Reads all that it takes once, for
    the checksums. Raises ExportError when a stage has none, or saves are of several runs."""
    config = run.config_for(run.model.vocabulary or 0)
    try:
        saves = of_one_run(saves)
        stages = stages_of(saves, config)
        found, chosen = choose(saves, stages)
    except RegroupError as error:
        raise ExportError(str(error)) from error
    missing = [stage for stage in range(stages + 1) if stage not in chosen]
    if missing:
        names = ", ".join(map(str, missing))
        raise ExportError(
            f"there is no save of stage {names}, and a model is all of its stages 0 to {stages}: "
            "name the folders of the nodes that have had it"
        )
    return SavedModel(
        replace(config, stages=stages),
        found.step,
        "" if found.exact else found.reason,
        {stage: files[0] for stage, files in chosen.items()},
    )


def export_saves(
    run: RunFile,
    saves: Sequence[SaveFile],
    summary: Mapping[str, Any],
    out: Path,
    data: Path | None,
    dtype: str,
    track: Track,
    merged: bool = False,
) -> SavedModel:
    """Writes the folder `out`. `summary`: what `summary.json` says, empty where there is none;
    `data`: a prepared folder, with the tokenizer, if not where the run file says; `merged`: as in
    `way_out`. Raises ExportError, CorpusError, SaveError."""
    model = saved_model(run, saves)
    write = way_out(run, model.config, merged)
    card = model_card(run, model.config, model.step, model.doubt, summary, merged)
    write(out, model.config, model.read, vocabulary_of(run, data), card, dtype, track)
    return model


def vocabulary_of(run: RunFile, data: Path | None) -> Vocabulary | None:
    """Raises CorpusError when `data` is not what the run was trained on."""
    model = None if run.model.origin is None else Path(run.model.origin)
    if data is not None:
        return _of_data(run, [data], model)
    try:
        return _of_data(run, [], model)
    except CorpusError as error:
        return _of_model(model, str(error))


def vocabulary_given(run: RunFile, data: Path | None, model: Path | None) -> Vocabulary | None:
    """The same where a registry says what the run is: none of the folders that it names is opened.
    `model`: that the run began from. Raises CorpusError."""
    if data is not None:
        return _of_data(run, [data], model)
    return _of_model(model, "where the run's data is on this machine, nobody has said")


def _of_data(run: RunFile, given: Sequence[Path], model: Path | None) -> Vocabulary:
    path, index = folders_of(run.data, given)[0], index_of(run.data, given)
    if problem := index.misfit(path, run.data.content, run.model.vocabulary):
        raise CorpusError(f"{path} {problem}")
    there = model is not None and (model / TOKENIZER).exists()
    return Vocabulary(path / TOKENIZER, index.end_of_document, model if there else None)


def _of_model(model: Path | None, why_not_of_data: str) -> Vocabulary | None:
    if model is not None and (model / TOKENIZER).exists() and (end := read_end(model)) is not None:
        return Vocabulary(model / TOKENIZER, end, model)
    log.warning("without a tokenizer: %s (--data DIR says where the data is)", why_not_of_data)
    return None
