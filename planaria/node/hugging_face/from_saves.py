"""A run's model from the saves of its stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.node.data.corpus import CorpusError, file_checksum, load_tokenizer, read_index
from planaria.node.data.mixture import corpus_folders, index_of
from planaria.node.data.progress import Track
from planaria.node.data.tokenizer import TOKENIZER, text_bounds
from planaria.node.hugging_face.adapters import base_name, export_writer, with_origin
from planaria.node.hugging_face.card import model_card
from planaria.node.hugging_face.export import ExportError, ModelParts, Vocabulary
from planaria.node.hugging_face.options import ExportOptions
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile
from planaria.node.state.regrouped_saves import choose_saves, model_as_saved, saves_of_one_run
from planaria.node.state.save_file import SaveFile

log = logging.getLogger("planaria")


@dataclass(frozen=True)
class SavedModel:
    """The newest model that a run's verified saves have, by stage."""

    config: ModelConfig
    step: int
    doubt: str  # why it isn't the model as of that step, or empty
    files: dict[int, SaveFile]  # by stage

    def read(self, stage: int, first: int, count: int) -> Tensor:
        """A slice of a saved stage's flat weights, float32 [count]. Raises SaveError, OSError."""
        chunks = list(self.files[stage].values("weights", first, count))
        return torch.from_numpy(np.concatenate(chunks).view(np.float32))


def saved_model(run: RunFile, saves: Sequence[SaveFile]) -> SavedModel:
    """The model of a resolved run, in its saves' stages. Reads all files, for the checksums. Raises
    ExportError for a stage without saves, SaveError for saves of several runs."""
    saves = saves_of_one_run(saves)
    config = model_as_saved(saves, run.config_for(run.model.vocabulary or 0))
    stages = config.stages
    point, chosen = choose_saves(saves, stages)
    missing = [stage for stage in range(stages + 1) if stage not in chosen]
    if missing:
        names = ", ".join(map(str, missing))
        raise ExportError(
            f"there is no save of stage {names}, but a model needs its stages 0 to {stages}: name "
            "the folders of the nodes that served it"
        )
    return SavedModel(
        config,
        point.step,
        "" if point.exact else point.reason,
        {stage: files[0] for stage, files in chosen.items()},
    )


def export_saves(
    run: RunFile,
    saves: Sequence[SaveFile],
    summary: Mapping[str, Any],
    options: ExportOptions,
    track: Track,
) -> SavedModel:
    """Write a folder with the newest model in a run's saves. `summary`: the content of
    `summary.json`, or empty. Raises ExportError, CorpusError, SaveError."""
    base, run = base_name(run, options.base), with_origin(run, options.model)
    model = saved_model(run, saves)
    write = export_writer(run, model.config, options.merged, base)
    card = model_card(run, model.config, model.step, model.doubt, summary, options.merged, base)
    parts = ModelParts(model.config, model.read, vocabulary_of(run, options.data), card)
    write(options.out, parts, options.dtype, track)
    return model


def vocabulary_of(run: RunFile, data: Path | None) -> Vocabulary | None:
    """The run's tokenizer, if any, to export. Raises CorpusError if `data` is not the run's."""
    model = None if run.model.origin is None else Path(run.model.origin)
    if data is not None:
        return vocabulary_in_data(run, [data], model)
    try:
        return vocabulary_in_data(run, [], model)
    except CorpusError as error:
        if (vocabulary := vocabulary_in_model(model)) is None:
            log.warning("exported without a tokenizer: %s (name the data by --data DIR)", error)
        return vocabulary


def vocabulary_received(run: RunFile, folder: Path, model: Path | None) -> Vocabulary:
    """Tokenizer in files that stage 0 has sent (SHARED). Raises CorpusError if it isn't the
    run's."""
    index, corpora = read_index(folder), run.data.corpora
    content = corpora[0].content if corpora else run.data.content
    if content not in ("", index.content) or index.misfit(folder, "", run.model.vocabulary):
        raise CorpusError(f"its index is of other data than the run's, of content {index.content}")
    if file_checksum(folder / TOKENIZER) != index.tokenizer:
        raise CorpusError(f"its {TOKENIZER} isn't that of its index: the checksum is another one")
    return Vocabulary(folder / TOKENIZER, index.end_of_document, _with_tokenizer(model))


def vocabulary_in_data(run: RunFile, given: Sequence[Path], model: Path | None) -> Vocabulary:
    """Tokenizer of prepared data, from `given` or else the run file; `model`: that the run began
    from. Raises CorpusError when it isn't the run's."""
    path, index = corpus_folders(run.data, given)[0], index_of(run.data, given)
    if problem := index.misfit(path, run.data.content, run.model.vocabulary):
        raise CorpusError(f"{path} {problem}")
    return Vocabulary(path / TOKENIZER, index.end_of_document, _with_tokenizer(model))


def _with_tokenizer(model: Path | None) -> Path | None:
    return model if model is not None and (model / TOKENIZER).exists() else None


def vocabulary_in_model(model: Path | None) -> Vocabulary | None:
    """Tokenizer of the run's checkpoint; None: it has none, or no end token. Raises CorpusError."""
    if (folder := _with_tokenizer(model)) is None:
        return None
    end = text_bounds(load_tokenizer(folder / TOKENIZER), folder).end
    return None if end is None else Vocabulary(folder / TOKENIZER, end, folder)
