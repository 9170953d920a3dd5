"""The weights of a stage in the simulation: sixteen float32. Half are trained; half are the
*chain*, a fingerprint of all the commits in them. So equal chains mean equal histories, and a state
carries its history wherever it goes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from planaria.node.state.stage_state import StageState

TRAINED, CHAINED = slice(0, 8), slice(8, 16)
SHAPE = (4, 4)
LARGEST = 1 << 16  # limit of numbers in a gradient: sums of many are exact in float32


def fingerprint(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def numbers(*parts: Any) -> torch.Tensor:
    """float32 [8], whole numbers that follow from `parts`."""
    return torch.frombuffer(bytearray(fingerprint(*parts)), dtype=torch.uint16).float()


def write_chain(weights: torch.Tensor, chain: bytes) -> None:
    padded = bytearray(chain or bytes(16))
    weights[CHAINED] = torch.frombuffer(padded, dtype=torch.uint16).float()


def read_chain(weights: torch.Tensor) -> bytes:
    chain = weights.numpy()[CHAINED].astype("uint16").tobytes()
    return b"" if chain == bytes(16) else chain


def chain_of(state: StageState) -> bytes:
    return read_chain(state.tensors["weights"])
