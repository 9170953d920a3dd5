"""A model that a run begins from: a folder in Hugging Face's format, read tensor by tensor."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_128

from planaria.node.hugging_face.config import (
    NO_SENSE,
    UnsupportedModelError,
    check_not_adapters,
    read_config,
)
from planaria.node.hugging_face.layout import weights
from planaria.node.stage.shape import ModelConfig, named_shapes

if TYPE_CHECKING:  # loaded where tensors are: a registry has no numpy
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("planaria")

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
HEADER_LIMIT: Final = 64 << 20
"""Bytes of a file's header."""
CHUNK: Final = 16 << 20
"""Values read at a time."""
SIZES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value, by what safetensors calls its kind."""
TIED: Final = "lm_head.weight"
"""Which a checkpoint with tied embeddings may have once more."""


class Place(NamedTuple):
    """Where a tensor is."""

    file: Path
    kind: str  # a key of SIZES
    shape: tuple[int, ...]
    first: int  # byte in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by name; they stay on disk until they are read."""

    folder: Path
    config: ModelConfig  # with one body stage
    places: Mapping[str, Place]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises UnsupportedModelError when a model of its config isn't all that is in it, or not
        whole."""
        check_not_adapters(folder)
        try:
            config = read_config(folder)
            found = {name: place for file in _files(folder) for name, place in _header(file)}
        except (OSError, *NO_SENSE) as error:
            raise UnsupportedModelError(
                f"{folder} holds no model that can be read: {error}. Name a folder as "
                "`save_pretrained` of transformers and `planaria export` write them"
            ) from error
        if config.tied:
            found.pop(TIED, None)
        places = {n: p for n, p in found.items() if not n.endswith("rotary_emb.inv_freq")}
        checkpoint = cls(folder, config, places)
        checkpoint._check()
        return checkpoint

    def _check(self) -> None:
        """Raises UnsupportedModelError."""
        wanted = {weight.name: weight.shape for weight in weights(self.config)}
        if missing := sorted(wanted.keys() - self.places):
            raise UnsupportedModelError(
                f"{self.folder} holds no whole model: it lacks {_some(missing)}"
            )
        if more := sorted(self.places.keys() - wanted):
            raise UnsupportedModelError(
                f"{self.folder}: not supported here: it has {_some(more)}, which models of its "
                f"config.json have no use for here"
            )
        for name, shape in wanted.items():
            if (place := self.places[name]).shape != shape:
                raise UnsupportedModelError(
                    f"{self.folder}: {name} has shape {list(place.shape)} instead of {list(shape)}"
                )
            if place.kind not in SIZES:
                raise UnsupportedModelError(
                    f"{self.folder}: {name} is of {place.kind}; {', '.join(SIZES)} can be read"
                )

    def of_stage(self, config: ModelConfig, stage: int) -> list[str]:
        """The names of its tensors, in the order in which they lie in the stage's flat weights;
        `config`: this model's, in any number of stages."""
        return list(named_shapes(config, stage))

    def read(self, name: str) -> NDArray[np.float32]:
        """All values of the tensor, float32, in row-major order. Raises OSError."""
        import numpy as np

        values = np.empty(self.places[name].size, np.float32)
        at = 0
        for piece in self._pieces(self.places[name]):
            values[at : at + len(piece)] = piece
            at += len(piece)
        return values

    def digest(self, config: ModelConfig, stage: int) -> str:
        """Stands for the stage's flat weights (`digest`). Raises OSError."""
        names = self.of_stage(config, stage)
        return digest(piece for name in names for piece in self._pieces(self.places[name]))

    def _pieces(self, place: Place) -> Iterator[NDArray[np.float32]]:
        """Its values, end to end. Raises OSError."""
        import numpy as np

        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[place.kind]
        with place.file.open("rb") as file:
            file.seek(place.first)
            left = place.size
            while left:
                piece = np.fromfile(file, kind, min(left, CHUNK))
                if not len(piece):
                    raise OSError(f"{place.file} ends before its tensors do")
                left -= len(piece)
                if place.kind == "BF16":  # the upper half of a float32
                    yield (piece.astype(np.uint32) << 16).view(np.float32)
                else:
                    yield piece.astype(np.float32, copy=False)


def digest(pieces: Iterable[NDArray[np.float32]]) -> str:
    """Stands for these values, end to end."""
    found = xxh3_128()
    for piece in pieces:
        found.update(piece.astype("<f4", copy=False).data)
    return found.hexdigest()


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _files(folder: Path) -> list[Path]:
    """Raises OSError, ValueError, KeyError."""
    if (folder / INDEX).exists():
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / Path(name).name for name in sorted(set(where.values()))]
    if not (folder / ONE_FILE).exists() and any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            "its weights are pickled, which nothing here reads: load it with transformers, and "
            "save it with save_pretrained"
        )
    return [folder / ONE_FILE]


def _header(path: Path) -> Iterator[tuple[str, Place]]:
    """The tensors in a file. Raises OSError, ValueError, KeyError, TypeError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise ValueError(f"{path} is no file of safetensors")
        header = json.loads(file.read(length))
        end = path.stat().st_size
    for name, said in header.items():
        if name == "__metadata__":
            continue
        first, last = (8 + length + int(offset) for offset in said["data_offsets"])
        place = Place(path, str(said["dtype"]), tuple(map(int, said["shape"])), first)
        size = SIZES.get(place.kind)
        if not 0 <= first <= last <= end or (size and last - first != size * place.size):
            raise ValueError(f"{path} is damaged: {name} doesn't lie where its header says")
        yield name, place
