"""A save: a file with one stage's state.

First comes the header's length, 8 bytes; then the header, JSON; then the tensors, concatenated. The
fields of this format are in the header's "__metadata__", text by name.

The format is safetensors: any reader finds a stage's weights by the names and in the shapes of
Hugging Face, and the moments as `first_moment.NAME` and `second_moment.NAME`. The metadata says
what they are, and of which model. It is written and read here, since a node needs what the library
doesn't give: flushing before the rename, an errno for a full disk, temporary files distinguishable
from a live writer's, and safe reading. Reading must not hold the interpreter for seconds (as the
library's `pread` does) nor crash on a bad sector (as a mapped file does).
"""

from __future__ import annotations

import io
import json
import math
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_hexdigest

from planaria.node.model.config import to_config
from planaria.node.model.shape import ModelConfig, trained_shapes
from planaria.node.state.stage_state import SaveError, StageState, StateId
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.state.saves import Saves

FORMAT: Final = "planaria-save-1"
CHUNK: Final = 16 << 20  # bytes read at a time
METADATA: Final = "__metadata__"  # no tensor's name
HEADER_LIMIT: Final = 64 << 20  # bytes
VALUE: Final = torch.float32.itemsize  # bytes
_NO_SENSE: Final = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    DecodeError,
)
"""Exceptions from reading a header in another format."""
Fields: TypeAlias = dict[str, str]
Bytes: TypeAlias = NDArray[np.uint8]
Listed: TypeAlias = tuple[str, int, str]
"""A tensor in a header: name, number of values, checksum of the values."""


class Pieces(NamedTuple):
    """A tensor made piece by piece, each time that it is read."""

    length: int
    pieces: Callable[[], Iterable[Bytes]]  # float32, in order


class Contents(NamedTuple):
    """Description of a stage's flat tensors, for other readers."""

    parameters: Mapping[str, Sequence[int]]  # shapes by name, in order
    config: Mapping[str, Any]  # of the whole model

    @classmethod
    def of(cls, config: ModelConfig, stage: int) -> Contents:
        shapes = {name: list(shape) for name, shape in trained_shapes(config, stage).items()}
        cut = {"stages": config.stages, "sizes": config.cut}
        return cls(shapes, {**cut, **to_config(config, "float32", None)})


@dataclass(frozen=True)
class SaveFile:
    """A save in any place, by its header; its tensors stay on disk."""

    path: Path
    run: str
    state: StageState  # without its tensors
    tensors: Mapping[str, int]  # number of values by name, in the file's order
    begin: int  # offset of the first one in the file
    stages: int  # body stages of the model; 0: not known
    sizes: tuple[int, ...]  # layers of each; (): equal

    @classmethod
    def open(cls, path: Path) -> SaveFile:
        """Reads a save's header. Raises SaveError if it or the length is wrong."""
        with open_save(path) as (file, fields):
            sizes = {name: values for name, values, _ in _tensors_in(fields)}
            return cls(
                path,
                fields["run"],
                state_in(fields),
                sizes,
                file.tell(),
                *_stages_in(fields),
            )

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.begin + VALUE * sum(self.tensors.values())

    def check(self) -> None:
        """Reads the whole save for its checksums, at most a chunk in memory. Raises SaveError."""
        with open_save(self.path) as (file, fields):
            for _ in read_tensors(self.path, file, fields, keep=False):
                raise AssertionError

    def values(self, tensor: str, first: int, count: int) -> Iterator[Bytes]:
        """`count` values of the tensor, from the `first` one on, in chunks. Raises SaveError,
        OSError."""
        before = takewhile(lambda item: item[0] != tensor, self.tensors.items())
        offset = self.begin + VALUE * (first + sum(values for _, values in before))
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            for done in range(0, VALUE * count, CHUNK):
                chunk = np.empty(min(CHUNK, VALUE * count - done), np.uint8)
                _fill(self.path, file, chunk)
                yield chunk

    def copy(self, to: Saves) -> None:
        """Copy the save to another folder. Raises SaveError, OSError."""
        tensors = {
            n: Pieces(size, partial(self.values, n, 0, size)) for n, size in self.tensors.items()
        }
        to.write_pieces(self.state, tensors)


def header_fields(
    run: str, state: StageState, tensors: Sequence[Listed], contents: Contents
) -> Fields:
    for_others = {**contents._asdict(), "commit": state.id.made}
    return {
        "format": FORMAT,
        "run": run,
        **{field: repr(value) for field, value in _numbers(state).items()},
        "last": b64encode(state.last.SerializeToString()).decode(),
        "tensors": json.dumps(tensors),
        **{name: json.dumps(value) for name, value in for_others.items()},
    }


def digest_of(values: Pieces) -> str:
    digest = xxh3_64()
    for piece in values.pieces():
        digest.update(piece.data)
    return digest.hexdigest()


def _numbers(state: StageState) -> dict[str, int | float]:
    """A state's numbers in the header of its save, in order."""
    return {
        "stage": state.id.stage,
        "step": state.id.step,
        "lineage": state.id.lineage,
        "omega": state.omega,
        "boosted_at": state.boosted_at,
        "optimizer_step": state.optimizer_step,
    }


def invalid_number(state: StageState) -> str:
    """The first invalid number of a state, as text; "": none."""
    wrong = (f"{f} {v}" for f, v in _numbers(state).items() if not (math.isfinite(v) and v >= 0))
    return next(wrong, "")


def state_in(fields: Fields) -> StageState:
    """A save's state without its tensors."""
    last = pb.Commit.FromString(b64decode(fields["last"]))
    stage, lineage, step = (int(fields[name]) for name in ("stage", "lineage", "step"))
    return StageState(
        id=StateId.after(last, stage, lineage, step, xxh3_64_digest(fields["tensors"].encode())),
        tensors={},
        omega=float(fields["omega"]),
        boosted_at=int(fields["boosted_at"]),
        last=last,
        optimizer_step=int(fields["optimizer_step"]),
    )


def _stages_in(fields: Fields) -> tuple[int, tuple[int, ...]]:
    try:
        config = json.loads(fields["config"])
        return int(config["stages"]), tuple(map(int, config.get("sizes", ())))
    except _NO_SENSE:
        return 0, ()


def _tensors_in(fields: Fields) -> list[Listed]:
    """The tensors in a save's header. Raises one of `_NO_SENSE`."""
    listed: list[Listed] = json.loads(fields["tensors"])
    for name, values, checksum in listed:
        if not (isinstance(name, str) and isinstance(checksum, str)):
            raise ValueError(f"a tensor is named {name!r}, with the checksum {checksum!r}")
        if type(values) is not int or values < 0:
            raise ValueError(f"{name} has {values!r} values")
    return listed


def encode_header(fields: Fields) -> Bytes:
    header: dict[str, object] = {METADATA: {**fields, "xxh3": _checksum(fields)}}
    offset = 0
    for name, shape in _parameter_entries(fields):
        end = offset + VALUE * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return as_bytes(len(text).to_bytes(8, "little") + text)


def _parameter_entries(fields: Fields) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors for other readers, in order."""
    parameters = json.loads(fields["parameters"])
    for tensor, _, _ in _tensors_in(fields):
        for name, shape in parameters.items():
            yield (name if tensor == "weights" else f"{tensor}.{name}"), shape


def _checksum(fields: Fields) -> str:
    return xxh3_64_hexdigest(json.dumps(fields).encode())


@contextmanager
def open_save(path: Path) -> Iterator[tuple[io.FileIO, Fields]]:
    """A save, open at its tensors, and its header. Raises SaveError."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file, _read_header(path, file)
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}") from error


def _read_header(path: Path, file: io.FileIO) -> Fields:
    """Read and check the header, and the file's size. Raises SaveError, OSError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if 8 + length > size or length > HEADER_LIMIT:
        raise SaveError(f"{path} is damaged: it has {size} bytes, and its header needs {length}")
    text = np.empty(length, np.uint8)
    _fill(path, file, text)
    try:
        fields: Fields = json.loads(text.tobytes())[METADATA]
        checksum = fields.pop("xxh3")
    except _NO_SENSE as error:
        raise SaveError(f"{path} is damaged, or not a save: its header can't be read") from error
    if checksum != _checksum(fields):
        raise SaveError(f"{path} is damaged: its header's checksum is not {checksum}")
    if fields.get("format") != FORMAT:
        raise SaveError(
            f"{path} has the format {fields.get('format')}, and this version reads {FORMAT}: use "
            "the version that wrote it, or move it away"
        )
    try:
        whole = np.array_equal(encode_header(fields)[8:], text)
        if wrong := invalid_number(state_in(fields)):
            raise ValueError(wrong)
        expected = 8 + length + VALUE * sum(values for _, values, _ in _tensors_in(fields))
    except _NO_SENSE as error:
        raise SaveError(f"{path} is damaged: its header has invalid values ({error!r})") from error
    if not whole or not isinstance(fields.get("run"), str):
        raise SaveError(f"{path} is damaged: its header contradicts itself")
    if size != expected:
        raise SaveError(f"{path} is damaged: it has {size} bytes instead of {expected}")
    return fields


def read_tensors(
    path: Path, file: io.FileIO, fields: Fields, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """A save's tensors, with checked checksums; none if not `keep`. Raises SaveError, OSError."""
    scratch = np.empty(CHUNK, np.uint8)
    for name, values, checksum in _tensors_in(fields):
        size = VALUE * values
        tensor = torch.empty(values if keep else 0)
        digest = xxh3_64()
        for offset in range(0, size, CHUNK):
            chunk = bytes_of(tensor)[offset : offset + CHUNK] if keep else scratch[: size - offset]
            _fill(path, file, chunk)
            digest.update(chunk.data)
        if digest.hexdigest() != checksum:
            raise SaveError(
                f"{path} is damaged: the checksum of {name} is {digest.hexdigest()}, not {checksum}"
            )
        if keep:
            yield name, tensor


def _fill(path: Path, file: io.FileIO, chunk: Bytes) -> None:
    while chunk.size:
        read = file.readinto(chunk.data)
        if not read:
            raise SaveError(f"{path} is damaged: it ends {chunk.size} bytes too early")
        chunk = chunk[read:]


def bytes_of(tensor: Tensor) -> Bytes:
    """The tensor's bytes, as a view."""
    view: Bytes = tensor.numpy().view(np.uint8)
    return view


def as_bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)
