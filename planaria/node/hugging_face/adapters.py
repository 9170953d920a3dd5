"""Export of trained adapters: a folder for peft, or merged into the model's weights.

Hugging Face's peft has a file of tensors and one of figures. Tensor names are those of the modules
in transformers, with a prefix.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from xxhash import xxh3_128

from planaria.node.data.progress import Track
from planaria.node.hugging_face.begin_from_model import HUB_NAME, public_name
from planaria.node.hugging_face.export import (
    DTYPES,
    ExportError,
    ModelParts,
    complete_folder,
    export,
    write_json,
    write_tensors,
    write_vocabulary,
)
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import ADAPTER_CONFIG, UnsupportedModelError
from planaria.node.model.layout import lora_weights, model_weights
from planaria.node.model.lora import merged
from planaria.node.model.shape import PROJECTIONS, Lora, ModelConfig
from planaria.node.run_file import RunFile, override

log = logging.getLogger("planaria")

TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
REMEDY: Final = (
    "name the folder of the model that the run began from by --model, or leave --merged out to "
    "export the adapters alone"
)
ANOTHER: Final = f"holds another model than that; {REMEDY}"

Write: TypeAlias = Callable[[Path, ModelParts, str, Track], None]
"""Writes a folder of a run's model, with the arguments of `export`."""


def export_writer(run: RunFile, config: ModelConfig, into_weights: bool, base: str) -> Write:
    """Writer of an export: of a model, its adapters, or a model with merged adapters, which needs
    the base model on this machine. `base`: the base model's name. Raises ExportError."""
    if config.lora is None:
        if into_weights:
            raise ExportError("--merged: this run trains all weights, so leave it out")
        return export
    if not into_weights:
        if not HUB_NAME.fullmatch(base):
            log.warning(
                "the adapters name the folder %s as their base model: give its name on the hub "
                "by --base ORG/NAME",
                base,
            )
        if names := _taken_for_experts(config):
            log.warning(
                "of some models with experts, as GLM-4.5, peft takes adapters of %s for those of "
                "the experts, and leaves them out: use the model that --merged writes",
                ", ".join(names),
            )
        return partial(_write_adapters, base)
    of_run = run.config_for(config.vocabulary)
    return partial(_write_merged, _base_checkpoint(run, config), of_run, run.model.content or ())


def _taken_for_experts(config: ModelConfig) -> list[str]:
    """Targets of adapters, as in dense layers or shared experts, that peft (0.21) may take for
    those of the experts beside them, which transformers 5 has in one tensor."""
    kinds = () if config.own is None else (config.own.block, *config.own.others)
    fused = any(".experts." in name and len(shape) > 2 for kind in kinds for name, shape in kind)
    targets = () if config.lora is None or not fused else config.lora.targets
    return [name for name in targets if name in PROJECTIONS[4:]]


def kind_of_result(run: RunFile, into_weights: bool) -> str:
    """What an export writes: adapters, or a model."""
    return "adapters" if run.training.lora is not None and not into_weights else "model"


def base_name(run: RunFile, given: str) -> str:
    """Name of the model that a run began from, given or known; empty: none. Raises ExportError."""
    if given and run.model.origin is None:
        raise ExportError(f"--base {given}: this run began from no checkpoint; leave it out")
    return given or public_name(run.model.origin or "")


def with_origin(run: RunFile, folder: Path | None) -> RunFile:
    """The run with this folder as the checkpoint that it began from. Raises ExportError."""
    if folder is None:
        return run
    if run.model.origin is None:
        raise ExportError(f"--model {folder}: this run began from no checkpoint; leave it out")
    return override(run, model__from=str(folder.absolute()))


def _base_checkpoint(run: RunFile, config: ModelConfig) -> Checkpoint:
    """The checkpoint that a run with adapters began from. Raises ExportError."""
    folder = Path(run.model.origin or "")
    try:
        checkpoint = Checkpoint.open(folder)
    except (UnsupportedModelError, OSError) as error:
        raise ExportError(f"--merged: {error}; {REMEDY}") from error
    if {weight.name for weight in model_weights(config)} != checkpoint.names:
        raise ExportError(f"--merged: {folder} {ANOTHER}")
    return checkpoint


def _write_merged(
    checkpoint: Checkpoint,
    of_run: ModelConfig,
    content: Sequence[str],
    out: Path,
    model: ModelParts,
    dtype: str,
    track: Track,
) -> None:
    """Write the checkpoint's model with merged adapters. Meanwhile check the digests `content` of
    the stages that it has in `of_run`: adapters may be saved in others."""
    config, read, *_ = model
    lora = config.lora
    assert lora is not None
    at = {(weight.stage, weight.first): weight for weight in model_weights(config)}
    adapter_weights = {weight.name: weight for weight in lora_weights(config)}

    seen = [xxh3_128() for _ in content]  # of each stage, in the order of its tensors
    stage_of = {weight.name: weight.stage for weight in model_weights(of_run)}
    left = Counter(stage_of.values())

    def read_merged(stage: int, first: int, count: int) -> Tensor:
        weight = at[stage, first]
        words, kept = checkpoint.base_words(config, stage, weight.name)
        checked = stage_of[weight.name]
        seen[checked].update(words.astype("<f4", copy=False).data)
        left[checked] -= 1
        if not left[checked] and seen[checked].hexdigest() != content[checked]:
            raise ExportError(f"--merged: {checkpoint.folder} {ANOTHER}")
        values = torch.from_numpy(kept)
        module = weight.name.removesuffix(".weight")
        parts = [adapter_weights.get(f"{module}.lora_{which}.weight") for which in "AB"]
        a, b = (p and read(p.stage, p.first, p.size).view(p.shape) for p in parts)
        if a is None or b is None:
            return values
        return merged(values.view(weight.shape), a, b, lora.scale).flatten()

    export(out, model._replace(read=read_merged), dtype, track)


def _write_adapters(base: str, out: Path, model: ModelParts, dtype: str, track: Track) -> None:
    """Write a folder of adapters, for the model that `base` names."""
    config, read, vocabulary, card = model
    assert config.lora is not None
    adapter_weights = lora_weights(config)
    with complete_folder(out) as folder:
        write_json(folder / ADAPTER_CONFIG, adapter_config(config.lora, base))
        write_vocabulary(folder, vocabulary, config.context)
        (folder / "README.md").write_text(card, encoding="utf-8")
        tensors = {
            f"{PREFIX}{weight.name}": read(weight.stage, weight.first, weight.size)
            .to(DTYPES[dtype])
            .reshape(weight.shape)
            for weight in track(adapter_weights, "exporting", len(adapter_weights))
        }
        write_tensors(folder / TENSORS, tensors)


def adapter_config(lora: Lora, base: str) -> dict[str, Any]:
    """The content of `adapter_config.json` where it differs from peft's defaults."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
