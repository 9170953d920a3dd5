"""Export of a run's weights as a folder for `transformers.AutoModelForCausalLM.from_pretrained`.

Weights are copied tensor by tensor, to one file after the other; at most one file is in memory. The
folder is written under another name and renamed: it is complete or missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import flush
from planaria.node.data.progress import Track, untracked
from planaria.node.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from planaria.node.data.tokenizer import read_object, write_tokenizer
from planaria.node.model.checkpoint import INDEX, OF_ORIGIN, ONE_FILE
from planaria.node.model.config import CONFIG, GENERATION_CONFIG, special_token_ids, to_config
from planaria.node.model.layout import Weight, model_weights
from planaria.node.model.shape import ModelConfig
from planaria.node.model.subspace import subspace_of

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORCED: Final = {"qwen2": "Qwen2Tokenizer", "qwen3_5_moe_text": "Qwen3_5Tokenizer"}
"""Classes that transformers takes for models of these types, with normalizer and pre-tokenizer of
their own, unless tokenizer_config.json names code."""
AS_IT_IS: Final = """\
from transformers import PreTrainedTokenizerFast


class AsItIs(PreTrainedTokenizerFast):
    pass
"""
"""Code of a tokenizer that is read as tokenizer.json has it, with or without trust in code."""
SHARD: Final = 256 << 20
"""Size limit of a file of weights in bytes, unless a single tensor is larger."""

Read: TypeAlias = Callable[[int, int, int], Tensor]
"""(stage, first, count) -> a slice of the stage's flat weights, float32 [count]."""


class ExportError(UserError):
    """Error of an export; the message says why and what to do."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer that an export writes."""

    file: Path  # tokenizer.json
    end_of_document: int
    origin: Path | None = None  # checkpoint that the run began from, with further files


class ModelParts(NamedTuple):
    """What an export writes into a model's folder."""

    config: ModelConfig
    read: Read
    vocabulary: Vocabulary | None = None
    card: str = ""  # the text of its README.md


def export(
    out: Path, model: ModelParts, dtype: str = "fp32", track: Track = untracked, most: int = SHARD
) -> None:
    """Write a model's folder `out`; `dtype`: a key of DTYPES.

    Raises ExportError when it exists or can't be written, CorpusError for a tokenizer that can't be
    used, and exceptions of `read`.
    """
    config, read, vocabulary, card = model
    with complete_folder(out) as folder:
        end = vocabulary.end_of_document if vocabulary else None
        origin = vocabulary.origin if vocabulary else None
        name = str(DTYPES[dtype]).removeprefix("torch.")
        fields = to_config(config, name, end) | (special_token_ids(origin) if origin else {})
        write_json(folder / CONFIG, fields | _end_tokens(fields, end))
        write_vocabulary(folder, vocabulary, config.context)
        forced = FORCED.get(str(fields.get("model_type")))
        tokenizer = read_object(folder / TOKENIZER_CONFIG)
        if forced and not str(tokenizer.get("tokenizer_class", forced)).startswith(forced):
            code = {"AutoTokenizer": [None, "tokenization.AsItIs"]}
            write_json(folder / TOKENIZER_CONFIG, tokenizer | {"auto_map": code})
            (folder / "tokenization.py").write_text(AS_IT_IS, encoding="utf-8")
        fields = read_object(folder / GENERATION_CONFIG) or {"do_sample": True}
        write_json(folder / GENERATION_CONFIG, fields | _end_tokens(fields, end))
        (folder / "README.md").write_text(card, encoding="utf-8")
        in_order = model_weights(replace(config, subspace=None))
        _write_weights(folder, in_order, _tensor_reader(config, read), dtype, track, most)


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """A temporary folder, renamed to `out` at the end: complete or missing. Raises ExportError."""
    if out.exists() and (not out.name or not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists already: choose another folder, or remove it")
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise ExportError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def weight_files(in_order: Sequence[Weight], size: int, most: int) -> list[list[Weight]]:
    """Divide weights, of `size` bytes a value, into files of at most `most` bytes, in order."""
    files: list[list[Weight]] = [[]]
    used = 0
    for weight in in_order:
        if files[-1] and used + size * weight.size > most:
            files.append([])
            used = 0
        files[-1].append(weight)
        used += size * weight.size
    return files


def _tensor_reader(config: ModelConfig, read: Read) -> Callable[[Weight], Tensor]:
    """Reader of the model's weights, float32, as transformers has them."""
    stored = {weight.name: weight for weight in model_weights(config)}
    subspace = subspace_of(config)

    def tensor(weight: Weight) -> Tensor:
        at = stored[weight.name]
        values = read(at.stage, at.first, at.size).reshape(at.shape)
        return values if subspace is None else subspace.folded(weight.name, values)

    return tensor


def _write_weights(
    folder: Path,
    those: Sequence[Weight],
    tensor: Callable[[Weight], Tensor],
    dtype: str,
    track: Track,
    most: int,
) -> None:
    kind = DTYPES[dtype]
    files = weight_files(those, kind.itemsize, most)
    of = {weight.name: number for number, file in enumerate(files) for weight in file}
    names = _file_names(len(files))
    waiting: dict[str, Tensor] = {}
    for weight in track(those, "exporting", len(those)):
        waiting[weight.name] = tensor(weight).to(kind)
        number = of[weight.name]
        if weight == files[number][-1]:
            write_tensors(folder / names[number], waiting)
            waiting.clear()
    if len(files) > 1:
        count = sum(weight.size for weight in those)
        total = {"total_parameters": count, "total_size": kind.itemsize * count}
        where = {name: names[number] for name, number in sorted(of.items())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": where})


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [ONE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_vocabulary(folder: Path, vocabulary: Vocabulary | None, context: int) -> None:
    """Write the tokenizer's files of an export: special tokens, chat template. Further files come
    from the origin. Raises CorpusError for a tokenizer that can't be used."""
    if vocabulary is None:
        return
    if vocabulary.origin is not None:
        _copy_files(vocabulary.origin, OF_ORIGIN, folder)
    _copy_files(vocabulary.file.parent, [GENERATION_CONFIG], folder)
    write_tokenizer(vocabulary.file, folder, vocabulary.end_of_document, model_max_length=context)


def _end_tokens(config: dict[str, Any], end: int | None) -> dict[str, Any]:
    """A config's key of the end tokens: the present ones and `end`."""
    ends = config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end is None or end in ids:
        return {"eos_token_id": ends}
    return {"eos_token_id": [end, *ids] if ids else end}


def _copy_files(origin: Path, names: Iterable[str], folder: Path) -> None:
    for name in names:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors to disk with README.md's permissions; the library's is private."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod((path.parent / "README.md").stat().st_mode)
    flush(path)
