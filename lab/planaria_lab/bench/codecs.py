"""Speed of each codec on a device: float32 bytes encoded and decoded a second, with checksums."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from planaria.node.wire.frame_format import CODECS
from planaria.node.wire.tensors import decode, encode
from planaria_lab.bench.stage import seconds

ROUNDS = 7
"""Repetitions of each measurement; the first two are not counted."""


def measure(
    device: torch.device, values: int
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Return, for each codec, the encoded bytes of a tensor with `values` values, and the GB/s of
    encoding and decoding it."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(values, generator=generator).to(device)
    sizes, speeds = {}, {}
    for codec in CODECS:
        descriptors, buffers = encode([tensor], codec)
        ways: dict[str, Callable[[], object]] = {
            "encode": partial(encode, [tensor], codec),
            "decode": partial(decode, descriptors, buffers, device),
        }
        took = {
            way: statistics.median([seconds(run, device) for _ in range(ROUNDS)][2:])
            for way, run in ways.items()
        }
        sizes[codec] = {"bytes": sum(buffer.nbytes for buffer in buffers)}
        speeds[codec] = {way: tensor.nbytes / each / 1e9 for way, each in took.items()}
    return sizes, speeds
