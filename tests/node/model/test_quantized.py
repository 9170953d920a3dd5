"""Frozen matrices in fewer bits: how they are packed, unpacked, multiplied and sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from planaria.node.model import quantized
from planaria.node.model.lora import Frozen, add_adapters, initial_adapters
from planaria.node.model.modules import build_stage, empty_stage
from planaria.node.model.quantized import (
    NF4,
    SMALLEST,
    Packed,
    QuantizedLinear,
    Words,
    pack,
    packing,
    put_values,
    size_of,
    slots,
    unpack,
    words_in,
    words_of,
)
from planaria.node.model.shape import BYTES_OF_BASE, PROJECTIONS, Base, Lora
from tests.node.stage.shapes import GROUPED

BASES = pytest.mark.parametrize("base", get_args(Base))
SHAPES = [(96, 64), (7, 9), (5, 64)]


def matrix(shape: tuple[int, int] = (96, 64)) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[0] = 0.0
    return weight


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_bitsandbytes", lambda: None)


@pytest.fixture
def eager() -> Iterator[None]:
    """Torch doesn't compile what bitsandbytes would have compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_is_that_of_bitsandbytes(shape, kind, without_library: None, eager: None) -> None:
    from bitsandbytes import functional

    weight = matrix(shape)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(NF4, state.code)
    packed = pack([weight], shape, "nf4")
    assert torch.equal(packed.scales, state.absmax.clamp(min=SMALLEST))
    whole = weight.numel() // 2
    assert torch.equal(packed.codes[:whole], codes.flatten()[:whole])
    state.dtype = kind
    plain = unpack(packed, weight.shape, "nf4", kind)
    assert torch.equal(plain, functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("shape", [*SHAPES, (64, 160), (5, 96)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_library_unpacks_what_plain_torch_does(shape, kind, monkeypatch) -> None:
    packed, size = pack([matrix(shape)], shape, "nf4"), torch.Size(shape)
    by_library = unpack(packed, size, "nf4", kind)
    monkeypatch.setattr(quantized, "_bitsandbytes", lambda: None)
    assert torch.equal(by_library, unpack(packed, size, "nf4", kind))


def packed_and_unpacked(weight: torch.Tensor, base: Base) -> tuple[torch.Tensor, torch.Tensor]:
    packed = pack([weight], weight.shape, base)
    viewed = Packed.of(packed.words, weight.shape, base)
    return packed.words, unpack(viewed, weight.shape, base, torch.float32)


@BASES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_matrix_is_close_and_packs_to_itself(base, shape) -> None:
    weight = matrix(shape)
    words, values = packed_and_unpacked(weight, base)
    error = {"bf16": 2**-8, "int8": 0.5 / 127, "nf4": 0.16}[base] * weight.abs().max()
    assert (values - weight).abs().max() <= error
    again, same = packed_and_unpacked(values, base)
    assert torch.equal(values, same)
    assert torch.equal(words.view(torch.int32), again.view(torch.int32))


def test_expected_bytes_of_a_row() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25, 0.0, -1.0]])
    (scale,) = (packed := pack([weight], (1, 5), "nf4")).scales.tolist()
    assert scale == 1.0
    assert packed.codes[:3].tolist() == [0xF2, 0xA7, 0x07]
    eighths = pack([weight * 127], (1, 5), "int8")
    assert eighths.scales.tolist() == [1.0]
    assert eighths.codes.view(torch.int8).tolist() == [127, -64, 32, 0, -127, 0, 0, 0]


def dequantized(module: nn.Module) -> nn.Module:
    """Return a copy of the stage with plain linear modules of the same values."""
    plain = deepcopy(module)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, QuantizedLinear):
            parent, _, local = name.rpartition(".")
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            linear.weight.data = layer.weight(torch.float32)
            if layer.bias is not None:
                linear.bias = layer.bias
            setattr(plain.get_submodule(parent), local, linear.requires_grad_(False))
    return plain


def adapted_stage(base: Base) -> nn.Module:
    config = replace(GROUPED, lora=Lora(3, 6.0, PROJECTIONS, base))
    module = empty_stage(config, 2)
    values = build_stage(GROUPED, 2, 5).parameters()
    for slot, parameter in zip(slots(module), values, strict=True):
        put_values(slot, [parameter.detach()])
    weights = initial_adapters(config, 2, 5)
    weights += 0.1 * torch.rand(weights.shape, generator=torch.Generator().manual_seed(2))
    return add_adapters(module, config, 2, weights)


@BASES
@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize(("bf16", "recompute"), [(False, False), (True, True)])
def test_a_stage_computes_what_its_dequantized_one_does(
    base, bf16, library, recompute, request
) -> None:
    if not library:
        request.getfixturevalue("without_library")
    module = adapted_stage(base)
    results = []
    for stage in (module, dequantized(module)):
        stage.recompute = recompute
        x = torch.randn(2, 9, GROUPED.dim, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = stage(x.requires_grad_())
        y.square().sum().backward()
        trained = [p.grad for p in stage.parameters() if p.requires_grad]
        results.append([y, x.grad, *trained])
    for mine, expected in zip(*results, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


@BASES
def test_a_base_travels_by_its_words_and_takes_the_bytes_that_are_said(base) -> None:
    giver, taker = adapted_stage(base), adapted_stage(base)
    frozen = [s for s in slots(taker) if not getattr(s, "requires_grad", False)]
    for slot in frozen:
        put_values(slot, [torch.zeros(slot.shape)])
    mine, theirs = Frozen(giver, False), Frozen(taker, False)
    assert mine.size == sum(map(size_of, frozen)) == mine.words().size
    theirs.put(mine.words().between(0, mine.size))
    x = torch.randn(2, 9, GROUPED.dim)
    assert torch.equal(giver(x), taker(x))
    for slot, other in zip(slots(giver), slots(taker), strict=True):
        assert torch.equal(words_of(slot).view(torch.int32), words_of(other).view(torch.int32))
    matrices = sum(p.numel() for p in build_stage(GROUPED, 2, 5).parameters() if p.dim() == 2)
    vectors = GROUPED.parameters[1] - matrices
    expected = BYTES_OF_BASE[base] * matrices + 4 * vectors
    assert expected <= 4 * mine.size <= 1.15 * expected  # rows of int8 are short here


def test_a_bias_is_added() -> None:
    linear = nn.Linear(6, 4)
    layer = QuantizedLinear(linear, "int8")
    layer.put(pack([linear.weight.detach()], (4, 6), "int8"))
    x = torch.randn(3, 6)
    expected = nn.functional.linear(x, layer.weight(torch.float32), linear.bias)
    assert torch.equal(layer(x), expected)


def test_no_code_is_loaded_from_a_hub() -> None:
    """bitsandbytes asks the package `kernels` for code when it is imported."""
    program = (
        "import sys, types; kernels = sys.modules['kernels'] = types.ModuleType('kernels');"
        "asked = []; kernels.get_kernel = lambda *a, **k: asked.append(a);"
        "from planaria.node.model import quantized;"
        "assert quantized._bitsandbytes() is not None and not asked;"
        "assert sys.modules['kernels'] is kernels"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("shard", [1, 3, 4, 50])
def test_words_are_read_a_slot_at_a_time_however_they_are_cut(shard: int) -> None:
    parts = [torch.arange(count) + 100.0 * count for count in (5, 1, 7, 2)]
    read: list[tuple[int, int]] = []

    def part(number: int, words: torch.Tensor) -> Iterator[int]:
        for count, value in enumerate(parts[number]):
            read.append((number, count))
            words[count] = value
            yield count + 1

    words = Words([len(part) for part in parts], part)
    pieces = [
        words.between(start, min(start + shard, words.size))
        for start in range(0, words.size, shard)
    ]
    assert torch.equal(torch.cat(pieces), torch.cat(parts))
    assert read == [(number, count) for number in range(4) for count in range(len(parts[number]))]


def test_words_are_read_no_further_than_asked_and_anew_after_an_error() -> None:
    errors = [OSError("the disk is away")]

    def halves(number: int, words: torch.Tensor) -> Iterator[int]:
        words[:2] = 1
        yield 2
        if errors:
            raise errors.pop()
        words[2:] = 2
        yield 4

    words = Words([4], halves)
    assert words.between(0, 2).tolist() == [1, 1] and errors
    with pytest.raises(OSError, match="the disk is away"):
        words.between(1, 3)
    assert words.between(1, 3).tolist() == [1, 2]


@BASES
@pytest.mark.parametrize("shape", [*SHAPES, (7, 3001)])
def test_the_words_that_packing_calls_final_are(base, shape) -> None:
    weight, words = matrix(shape), torch.zeros(words_in(shape, base))
    expected, final = pack([weight], shape, base).words, 0
    for count in packing(weight.split(3), shape, base, words):
        assert torch.equal(words[:count].view(torch.int32), expected[:count].view(torch.int32))
        assert count >= final
        final = count
    assert final == len(words)


def test_each_value_gets_the_code_of_the_nearest_quantile_of_nf4() -> None:
    middles = (NF4[1:] + NF4[:-1]) / 2
    steps = [torch.nextafter(middles, torch.tensor(way)) for way in (-2.0, 2.0)]
    values = torch.cat([middles, *steps, NF4, torch.linspace(-1, 1, 4096 - 3 * 15 - 16)])
    values = torch.cat([torch.ones(64, 1), values.view(64, 64)], dim=1)[:, :64]  # scales of 1
    codes = pack([values], values.shape, "nf4").codes
    nibbles = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
    assert torch.equal(nibbles.long(), (values.flatten()[:, None] > middles).sum(1))
