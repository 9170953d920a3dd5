"""Initial model of a run: a folder in Hugging Face's format, read tensor by tensor."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from xxhash import xxh3_128

from planaria.node.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from planaria.node.data.tokenizer import SPECIAL, TEMPLATE
from planaria.node.model.config import (
    CONFIG,
    GENERATION_CONFIG,
    NO_SENSE,
    UnsupportedModelError,
    check_not_adapters,
    is_quantized,
    needs_transformers,
    read_config,
    read_json,
)
from planaria.node.model.layout import model_weights
from planaria.node.model.shape import ModelConfig, named_shapes, packed_as

if TYPE_CHECKING:  # only nodes load it: a registry has no numpy
    import numpy as np
    from numpy.typing import NDArray

    from planaria.node.model.dequantized import FourBit, Scaled

log = logging.getLogger("planaria")

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
OF_ORIGIN: Final = (
    *(TOKENIZER_CONFIG, SPECIAL, "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", TEMPLATE, GENERATION_CONFIG),
)
"""Files that an export copies from the original checkpoint, besides its tokenizer."""
HEADER_LIMIT: Final = 16 << 20
"""Size limit of a file's header in bytes."""
POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""Beginning of a pointer file, in a clone without Git LFS."""
CHUNK: Final = 1 << 16
"""Number of values read at a time, which take ten bytes each meanwhile."""
SIZES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value, by safetensors' dtype."""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
COMPILED: Final = "_orig_mod."
"""Prefix that `torch.compile` adds to names."""


class TensorPlace(NamedTuple):
    """Where a tensor is in a safetensors file."""

    file: Path
    kind: str  # of safetensors; a key of SIZES where the tensor isn't quantized
    shape: tuple[int, ...]
    first: int  # byte offset in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """The tensor's values as float32, CHUNK at a time. Raises OSError."""
        import numpy as np

        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.kind]
        with self.file.open("rb") as file:
            file.seek(self.first)
            remaining = self.size
            while remaining:
                size = min(remaining, CHUNK)
                piece = np.fromfile(file, kind, size)
                if len(piece) < size:
                    raise OSError(f"{self.file} ends before its tensors do")
                remaining -= size
                if self.kind == "BF16":  # the upper half of a float32
                    yield (piece.astype(np.uint32) << 16).view(np.float32)
                else:
                    yield piece.astype(np.float32, copy=False)


Place: TypeAlias = "TensorPlace | FourBit | Scaled"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model's folder, by name; they stay on disk until they are read."""

    folder: Path
    config: ModelConfig  # with one body stage
    places: Mapping[str, Place]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open a model's folder. Raises UnsupportedModelError unless it has exactly the tensors of
        its config's model. Quantized matrices are read as the values that they stand for."""
        check_not_adapters(folder)
        if needs_transformers(folder):
            from planaria.node.model.decoder import DecoderCheckpoint  # loads torch

            return DecoderCheckpoint.of(folder)
        try:
            config = read_config(folder)
            places = tensors_in(folder)
        except (OSError, *NO_SENSE) as error:
            raise UnsupportedModelError(
                f"{folder} has no readable model: {error}. Name a folder written by "
                "`save_pretrained` of transformers or by `planaria export`"
            ) from error
        checkpoint = cls(folder, _as_tied(config, places, folder), places)
        checkpoint._check()
        return checkpoint

    def _check(self) -> None:
        """Compare the tensors with the config's model. Raises UnsupportedModelError."""
        if self.config.layers > len(self.places):  # before they are listed
            raise UnsupportedModelError(
                f"{self.folder} has only part of a model: its config.json says "
                f"{self.config.layers:,} layers, and it has {len(self.places)} tensors"
            )
        wanted = {weight.name: weight.shape for weight in model_weights(self.config)}
        if missing := sorted(wanted.keys() - self.places):
            raise UnsupportedModelError(
                f"{self.folder} has only part of a model: it lacks {first_few(missing)}"
            )
        if unexpected := sorted(self.places.keys() - wanted):
            raise UnsupportedModelError(
                f"{self.folder}: not supported here: it has {first_few(unexpected)}, which the "
                "model of its config.json doesn't have"
            )
        for name, shape in wanted.items():
            if (place := self.places[name]).shape != shape:
                raise UnsupportedModelError(
                    f"{self.folder}: {name} has shape {list(place.shape)} instead of {list(shape)}"
                )
            if place.kind not in SIZES:
                raise UnsupportedModelError(
                    f"{self.folder}: {name} is {place.kind}; supported are {', '.join(SIZES)}"
                )

    @property
    def names(self) -> set[str]:
        """Names of all tensors of the checkpoint."""
        return set(self.places)

    def read(self, name: str) -> NDArray[np.float32]:
        """A checkpoint's tensor, float32, flat in row-major order. Raises OSError."""
        return values_of(self.places[name])

    def digest(self, config: ModelConfig, stage: int) -> str:
        """Digest of a stage's flat weights, or of its base's words. Raises OSError, and
        UnsupportedModelError for values that aren't finite."""
        names = list(named_shapes(config, stage))
        if config.base_of(stage) is not None:
            return digest_of(self.words(config, stage, name) for name in names)
        pieces = ((name, piece) for name in names for piece in self.pieces(name))
        return digest_of(check_finite(piece, self.folder, name) for name, piece in pieces)

    def words(self, config: ModelConfig, stage: int, name: str) -> NDArray[np.float32]:
        """The words of a tensor in its stage's frozen base (quantized.py), flat; its values where
        it isn't packed. Raises OSError, UnsupportedModelError."""
        import numpy as np

        from planaria.node.model.quantized import words_in

        shape = named_shapes(config, stage)[name]
        words = np.zeros(words_in(shape, packed_as(config, stage, name)), np.float32)
        for _ in self.reading(config, stage, name, words):
            pass
        return words

    def reading(
        self, config: ModelConfig, stage: int, name: str, words: NDArray[np.float32]
    ) -> Iterator[int]:
        """Read a tensor's `words`, which are zeros, step by step. Yields after each how many of the
        first are final. Raises as `words`."""
        base = packed_as(config, stage, name)
        pieces = (check_finite(piece, self.folder, name) for piece in self.pieces(name))
        if base is None:
            yield from filling(pieces, words)
            return
        import torch

        from planaria.node.model.quantized import packing

        shape = named_shapes(config, stage)[name]
        yield from packing(map(torch.from_numpy, pieces), shape, base, torch.from_numpy(words))

    def base_words(
        self, config: ModelConfig, stage: int, name: str
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The words of a tensor, and the values that these stand for, flat. Raises as `words`."""
        words, base = self.words(config, stage, name), packed_as(config, stage, name)
        if base is None:
            return words, words
        import torch

        from planaria.node.model.quantized import Packed, unpack

        shape = torch.Size(named_shapes(config, stage)[name])
        packed = Packed.of(torch.from_numpy(words), shape, base)
        return words, unpack(packed, shape, base, torch.float32).flatten().numpy()

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The values of a checkpoint's tensor, float32, in pieces. Raises OSError."""
        return self.places[name].pieces()


def tensors_in(folder: Path) -> dict[str, Place]:
    """The tensors in a model's folder, by name. Raises UnsupportedModelError, OSError, NO_SENSE."""
    places = {
        name.replace(COMPILED, ""): place
        for file in _weight_files(folder)
        for name, place in _tensors_of(file)
        if not name.endswith("rotary_emb.inv_freq")
    }
    if not is_quantized(folder):
        return {**places}
    from planaria.node.model.dequantized import dequantized  # loads torch

    return dequantized(places, read_json(folder / CONFIG)["quantization_config"])


def values_of(place: Place) -> NDArray[np.float32]:
    """All values of a tensor, float32, in row-major order. Raises OSError."""
    import numpy as np

    values = np.empty(place.size, np.float32)
    for _ in filling(place.pieces(), values):
        pass
    return values


def filling(pieces: Iterable[NDArray[np.float32]], values: NDArray[np.float32]) -> Iterator[int]:
    """Put a tensor's pieces into `values`, and yield after each how many are there."""
    done = 0
    for piece in pieces:
        values[done : done + len(piece)] = piece
        done += len(piece)
        yield done


def _as_tied(config: ModelConfig, places: dict[str, Place], folder: Path) -> ModelConfig:
    """The model's config, tied if the files are, whatever config.json says, as in transformers 5.
    Of two equal tensors `places` keeps the embedding. Raises OSError."""
    if not config.tied or HEAD not in places:
        return config
    if EMBEDDING not in places:
        places[EMBEDDING] = places.pop(HEAD)
        return config
    if _equal(places[EMBEDDING], places[HEAD]):
        del places[HEAD]
        return config
    log.warning(
        "%s: config.json says tie_word_embeddings, but %s differs from the embedding: both are "
        "kept, untied, as transformers does",
        *(folder, HEAD),
    )
    return replace(config, tied=False)


def _equal(first: Place, second: Place) -> bool:
    """Whether two tensors of a checkpoint are equal. Raises OSError."""
    import numpy as np

    if first.shape != second.shape or not {first.kind, second.kind} <= SIZES.keys():
        return False
    pairs = zip(first.pieces(), second.pieces(), strict=True)
    return all(np.array_equal(values, others) for values, others in pairs)


def check_finite(piece: NDArray[np.float32], file: Path, name: str) -> NDArray[np.float32]:
    """A tensor's values. Raises UnsupportedModelError if some aren't finite."""
    import numpy as np

    if not np.isfinite(piece).all():
        raise UnsupportedModelError(
            f"{file}: {name} has values that aren't finite (NaN or "
            "infinity): nothing can be trained from it; take an earlier checkpoint"
        )
    return piece


def digest_of(pieces: Iterable[NDArray[np.float32]]) -> str:
    """Digest of weights: xxh3_128 of the concatenated values, in hexadecimal."""
    hasher = xxh3_128()
    for piece in pieces:
        hasher.update(piece.astype("<f4", copy=False).data)
    return hasher.hexdigest()


def first_few(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _weight_files(folder: Path) -> list[Path]:
    """Files with a model's weights, by transformers' precedence. Raises OSError, NO_SENSE."""
    single, index = (folder / ONE_FILE).exists(), (folder / INDEX).exists()
    if single and index:
        log.warning("%s has %s and %s: %s is read", folder, ONE_FILE, INDEX, ONE_FILE)
    if index and not single:
        return [folder / name for name in shard_names(folder)]
    if not single and any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            "its weights are pickled, which is not supported: load the model with transformers, "
            "and save it with save_pretrained"
        )
    return [folder / ONE_FILE]


def shard_names(folder: Path) -> list[str]:
    """Files of weights that a model's index names. Raises OSError, NO_SENSE."""
    file_names = read_json(folder / INDEX)["weight_map"]
    return sorted({Path(name).name for name in file_names.values()})


def _tensors_of(path: Path) -> Iterator[tuple[str, TensorPlace]]:
    """A safetensors file's tensors. Raises UnsupportedModelError, OSError, and NO_SENSE."""
    remedy = (
        f"`git lfs pull` in a clone, or `hf download ORG/NAME --local-dir {path.parent}` fetches it"
    )
    if not path.is_file():
        problem = "is no regular file" if path.exists() else "is missing"
        raise UnsupportedModelError(f"{path} {problem}: {remedy}")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(POINTER))
        if start == POINTER:
            raise UnsupportedModelError(f"{path} is a Git LFS pointer, not the weights: {remedy}")
        if not start:
            raise UnsupportedModelError(f"{path} is empty: {remedy}")
        length = int.from_bytes(start[:8], "little")
        if length > HEADER_LIMIT:
            raise UnsupportedModelError(f"{path} is not a safetensors file: {remedy}")
        file.seek(8)
        header = json.loads(file.read(length)) if 8 + length <= size else {}
    tensors: dict[str, Any] = {n: entry for n, entry in header.items() if n != "__metadata__"}
    ends = (int(entry["data_offsets"][1]) for entry in tensors.values())
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        raise UnsupportedModelError(
            f"{path} is cut off after {size:,} of {whole:,} bytes: {remedy}"
        )
    if damage := _header_error(path):
        raise UnsupportedModelError(f"{path} is damaged: {damage}: {remedy}")
    for name, entry in tensors.items():
        first = 8 + length + int(entry["data_offsets"][0])
        yield name, TensorPlace(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), first)


def _header_error(path: Path) -> str:
    """The safetensors library's error for a file of overlapping or lost tensors, else empty."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:  # a registry's image lacks it; nodes check again
        return ""
    try:
        with safe_open(path, framework="np"):
            return ""
    except SafetensorError as error:
        return str(error)
