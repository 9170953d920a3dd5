"""Run files of runs that begin from a checkpoint, or from a config.json: their derived keys.

A model of transformers' code is tried in another process: `python -m
planaria.node.hugging_face.begin_from_model < RUN.toml`.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from planaria.node.data.corpus import CorpusError
from planaria.node.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from planaria.node.data.tokenizer import (
    LONGEST,
    SPECIAL,
    TEMPLATE,
    TEMPLATES,
    TOKENIZER,
    same_tokenizer,
)
from planaria.node.machine.imports import python_command
from planaria.node.machine.processes import describe_status
from planaria.node.model.checkpoint import INDEX, OF_ORIGIN, ONE_FILE, Checkpoint, shard_names
from planaria.node.model.config import (
    CONFIG,
    NO_SENSE,
    UnsupportedModelError,
    is_quantized,
    needs_transformers,
    read_config,
)
from planaria.node.model.shape import ModelConfig, matrix_names
from planaria.node.run_file import ModelSection, RunFile, RunFileError, dumps, loads, override

log = logging.getLogger("planaria")

HUB_NAME: Final = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
"""A repository on the hub, and its branch, tag or commit."""
PARTS: Final = [CONFIG, TOKENIZER, *OF_ORIGIN, TEMPLATES, ONE_FILE, INDEX]
"""Files of a hub repository to download, besides those that its index names."""
OF_TOKENIZER: Final = [TOKENIZER, TOKENIZER_CONFIG, SPECIAL, TEMPLATE, TEMPLATES, CONFIG]
"""Files among them that define the tokenizer."""
OWN: Final = {"origin", "blueprint", "content", "preset", "stages", "context", "attn_mask_type"}
"""Keys of [model] that may be set beside `model.from` or `model.config`."""
TRIAL_SECONDS: Final = 600.0
"""Seconds in which transformers is loaded and tried."""
READ: Final = 5e6
"""Bytes of a model that a slow machine reads and packs in a second."""
PACKED: Final = 0.9
"""Share of a stage's values that a packed base is expected to pack."""
STAGES: Final = 4
"""Default number of body stages, if there are as many layers."""


def with_model(run: RunFile) -> RunFile:
    """The run file with all that follows from `model.from` or `model.config`: the model's shape,
    and digests of its weights.

    The folder may be missing on this machine if the run file has all that. Raises RunFileError.
    """
    model = run.model
    name = model.origin or model.blueprint
    if name is None:
        return run
    key = "from" if model.origin else "config"
    try:
        folder = find_checkpoint(name)
        complete = model.vocabulary is not None and (
            not model.origin or len(model.content or ()) == model.body_stages + 1 > 1
        )
        if folder is None and not complete:
            raise RunFileError(f"model.{key} = {name}: there is no such folder")
        if folder is None or (complete and model.parts is not None):
            return run
        run = override(run, **{f"model__{key}": str(folder)})
        lora = run.training.lora
        own_modules, packed = not needs_transformers(folder), lora is not None and lora.base
        if own_modules and not packed and not is_quantized(folder):
            return with_model_here(run)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if size and not model.content:
            log.info("reading %s, from which the run begins (%.1f GB)", folder, size / 1e9)
        seconds = TRIAL_SECONDS + size / READ
        return completed_by("planaria.node.hugging_face.begin_from_model", run, seconds)
    except (UnsupportedModelError, OSError) as error:
        raise RunFileError(f"model.{key} = {name}: {error}") from error


def completed_by(module: str, run: RunFile, seconds: float) -> RunFile:
    """The run file as `main` of a module, which may load torch and more, completes it in another
    process. Raises RunFileError with the last line of its errors, TimeoutError."""
    command, text = python_command(module), dumps(run)
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not done within {seconds:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RunFileError((lines or [describe_status(done.returncode)])[-1])
    return loads(done.stdout)


def main() -> None:
    """Read a run file from stdin, and write it with the keys that follow from its model."""
    try:
        sys.stdout.write(dumps(with_model_here(loads(sys.stdin.read()))))
    except RunFileError as error:
        sys.exit(" ".join(str(error).split()))


def with_model_here(run: RunFile) -> RunFile:
    """`with_model` for an existing folder, in this process. Raises RunFileError."""
    origin = run.model.origin
    key = "config" if origin is None else "from"
    folder = Path(origin or run.model.blueprint or "")
    try:
        checkpoint = None if origin is None else Checkpoint.open(folder)
        config = _shape_in(folder) if checkpoint is None else checkpoint.config
        run = with_shape(run, config, folder)
        check_targets(run)
        if config.own is not None:
            _try_cut(run)
        if checkpoint is None or len(run.model.content or ()) == run.model.body_stages + 1:
            return run
        log.info("reading %s, from which the run begins", folder)
        content = stage_digests(checkpoint, run.config_for(config.vocabulary))
        return override(run, model__content=content)
    except (UnsupportedModelError, OSError) as error:
        raise RunFileError(f"model.{key} = {folder}: {error}") from error
    except ValueError as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"the run file can't be used: {error}") from error


def with_shape(run: RunFile, config: ModelConfig, folder: Path) -> RunFile:
    """The run file with the shape of the model in `folder`. Raises RunFileError."""
    stages, figures = run.model.stages or min(STAGES, config.layers), shape_keys(config)
    _check_figures(run.model, figures, folder)
    context = run.model.context or min(config.context, config.positions or LONGEST, LONGEST)
    fields = {"stages": stages, "context": context, **figures}
    return override(run, **{f"model__{name}": value for name, value in fields.items()})


def _shape_in(folder: Path) -> ModelConfig:
    """The model's shape by a folder's config.json. Raises UnsupportedModelError, OSError."""
    if not needs_transformers(folder):
        return read_config(folder)
    from planaria.node.model.decoder import config_of, decoder_of

    return config_of(decoder_of(folder))


def _try_cut(run: RunFile) -> None:
    """Try to cut transformers' model into stages. Raises RunFileError, UnsupportedModelError."""
    from planaria.node.model.decoder import Decoder
    from planaria.node.model.decoder_trial import try_cut

    config = run.config
    assert config.own is not None
    decoder = Decoder(config.own.decoder)
    if config.lora is None:
        decoder.check_trained()
    try_cut(decoder, config.cut, config.block_causal)


def check_targets(run: RunFile) -> None:
    """Check a run's adapter targets, for a model whose shape is known. Raises RunFileError."""
    if (lora := run.training.lora) is None:
        return
    config = run.config
    names = matrix_names(config)
    if unknown := [name for name in lora.targets if name not in names]:
        raise RunFileError(
            f"training.lora.targets: no linear module of a layer is called {', '.join(unknown)}; "
            f"this model has {', '.join(names) or 'none, so it can have no adapters'}"
        )
    left = {at: config.values_in(at) - config.packed_in(at) for at in range(1, config.stages + 1)}
    stage = max(left, key=left.__getitem__)
    if lora.base is not None and left[stage] > (1 - PACKED) * config.values_in(stage):
        log.warning(
            "training.lora.base = %s: %s of the %s values of stage %d stay as they are, since they "
            "are in no matrix of a linear module (as with experts in one tensor): %.2g GB in "
            "float32, half of it if training.precision is bf16 and the checkpoint is, too",
            *(lora.base, f"{left[stage]:,}", f"{config.values_in(stage):,}", stage),
            4e-9 * left[stage],
        )


def find_checkpoint(origin: str, parts: Sequence[str] = PARTS) -> Path | None:
    """The folder of a checkpoint; for a name on the hub, NAME or NAME@REVISION, `parts` are
    downloaded. None: no such folder. Raises OSError when the download fails."""
    path, named = Path(origin).absolute(), HUB_NAME.fullmatch(origin)
    if path.is_dir():
        return path
    if Path(origin).is_absolute() or path.exists() or not named:
        return None
    log.info("%s is no folder here: looking for it on the Hugging Face hub", origin)
    name, revision = named.groups()
    try:
        return _download(name, revision, parts).absolute()
    except (OSError, *NO_SENSE) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        at = f" --revision {revision}" if revision else ""
        raise OSError(
            f"there is no such folder, and it can't be loaded from the Hugging Face hub: {why} "
            f"With a network, run `hf download {name}{at} --local-dir FOLDER`, and name that folder"
        ) from error


def _download(name: str, revision: str | None, parts: Sequence[str]) -> Path:
    """Download parts of a repository, and what its index names. Raises OSError, NO_SENSE."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(parts)))
    if INDEX in parts and (folder / INDEX).exists() and not (folder / ONE_FILE).exists():
        commit, shards = folder.name, shard_names(folder)
        folder = Path(snapshot_download(name, revision=commit, allow_patterns=shards))
    return folder


def find_tokenizer(origin: str) -> Path:
    """The tokenizer.json that is a file, in a folder, or on the hub. Raises CorpusError."""
    if (file := Path(origin).expanduser()).is_file():
        return file
    try:
        folder = find_checkpoint(str(file), OF_TOKENIZER)
    except OSError as error:
        raise CorpusError(f"--tokenizer {origin}: {error}") from error
    if folder is None:
        raise CorpusError(f"--tokenizer {origin}: there is no such file or folder")
    return tokenizer_in(folder)


def tokenizer_in(folder: Path) -> Path:
    """The tokenizer.json in a model's folder. Raises CorpusError."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise CorpusError(
            f"{folder} has no {TOKENIZER}, which says what text its tokens stand for: "
            "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes "
            "one"
        )
    return tokenizer


def public_name(origin: str) -> str:
    """Public name of a checkpoint: its name on the hub if it is in the cache of Hugging Face's
    tools, else the folder's name without path."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", origin, re.ASCII)
    if cached is not None:
        return "/".join(cached.groups())
    named = HUB_NAME.fullmatch(origin)
    return named[1] if named else Path(origin).name


def shape_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of [model], with values, that define a model's shape."""
    if (own := config.own) is not None:
        names = ("vocabulary", "dim", "heads", "kv_heads", "layers", "hidden", "positions")
        parts = {name: value for name, value in own._asdict().items() if name != "module"}
        return {**{name: getattr(config, name) for name in names}, "parts": parts}
    figures = (
        *("vocabulary", "dim", "heads", "kv_heads", "layers", "hidden", "rope_theta", "family"),
        *("norm_eps", "tied", "positions", "window", "attention_bias", "mlp_bias"),
    )
    scaling = config.rope_scaling and config.rope_scaling._asdict()
    of_head = {"head_dim": config.width_of_head, "rope_scaling": scaling}
    return {**{name: getattr(config, name) for name in figures}, **of_head}


def _check_figures(section: ModelSection, figures: dict[str, Any], folder: Path) -> None:
    """Check that the run file's [model] agrees with the checkpoint. Raises RunFileError."""
    values = section.model_dump()
    for key in sorted(ModelSection.model_fields.keys() - OWN):
        if values[key] not in (ModelSection.model_fields[key].default, figures.get(key)):
            raise RunFileError(
                f"model.{key} = {values[key]}: the model in {folder}, from which the run begins, "
                f"has {figures.get(key)}; leave model.{key} out"
            )


def stage_digests(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """A digest of each stage's weights in a checkpoint, from stage 0 on. Raises OSError."""
    return tuple(checkpoint.digest(config, stage) for stage in range(config.stages + 1))


def check_tokenizer(run: RunFile) -> None:
    """Check that the data has the tokenizer of the run's checkpoint, if it is here. Raises
    CorpusError."""
    folder = Path(run.model.origin or "")
    if run.model.origin is None or not folder.is_dir():
        return
    tokenizer = tokenizer_in(folder)
    if not same_tokenizer(tokenizer, run.data.folders[0] / TOKENIZER):
        raise CorpusError(
            f"{run.data.where} was prepared with another tokenizer than that of {folder}, from "
            "which the run begins: prepare the text anew with `planaria data prepare TEXT --out "
            f"DIR --tokenizer {tokenizer}`"
        )


if __name__ == "__main__":
    main()
