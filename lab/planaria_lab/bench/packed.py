"""Errors, bytes, and time of a forward and a backward pass of frozen matrices of fewer bits.

`python -m planaria_lab.bench.packed`. Each variant's output is compared with the float32 product of
the matrix that it unpacks to. Its time is divided by that of a plain matrix in the same round.
Variants of torchao and bitsandbytes are left out where these aren't installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import Tensor, nn

from planaria.node.model import quantized
from planaria.node.model.quantized import QuantizedLinear, pack
from planaria.node.model.shape import Base
from planaria_lab.bench.rows import keep

SHAPES: Final = ((1536, 576), (5632, 2048))
TOKENS: Final = 512
ROUNDS: Final = 15


class Variant(NamedTuple):
    name: str
    call: Callable[[Tensor], Tensor]
    weight: Tensor  # the matrix that it unpacks to, float32 [out, in]
    bytes: float  # per value
    devices: tuple[str, ...] = quantized.BY_LIBRARY  # devices on which bitsandbytes unpacks


def variants(linear: nn.Linear) -> Iterator[Variant]:
    """Yield all variants of a matrix, that of float32 first."""
    weight = linear.weight.detach()
    yield Variant("float32", linear, weight, 4)
    for base in get_args(Base):
        layer = QuantizedLinear(linear, base)
        layer.put(pack([weight], weight.shape, base))
        size = (layer.codes.nbytes + layer.scales.nbytes) / weight.numel()
        variant = Variant(base, layer, layer.weight(torch.float32), size)
        yield variant
        if base == "nf4":
            yield variant._replace(name="nf4, plain torch", devices=())
    yield from _of_bitsandbytes(linear)
    yield from _of_torchao(weight)


def _of_bitsandbytes(linear: nn.Linear) -> Iterator[Variant]:
    try:
        import bitsandbytes
    except ImportError:
        return
    bnb: Any = bitsandbytes
    rows, columns = linear.weight.shape
    layer = bnb.nn.Linear4bit(
        columns, rows, bias=False, quant_type="nf4", compress_statistics=False
    )
    values = linear.weight.detach().clone()
    layer.weight = bnb.nn.Params4bit(
        values, requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    layer = layer.to("cpu")
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    yield Variant("bitsandbytes Linear4bit", layer, weight.float(), 0.5625)


def _of_torchao(weight: Tensor) -> Iterator[Variant]:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
    except ImportError:
        return
    packed = to_nf4(weight, 64, 256)
    yield Variant("torchao nf4", lambda x: linear_nf4(x, packed), packed.to(torch.float32), 0.516)
    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    layer[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig())
    yield Variant("torchao int8", layer, layer[0].weight.dequantize(), 1.0)


def passes(variant: Variant, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Run a forward and a backward pass; return output, gradient of the input, and seconds."""
    x = x.clone().requires_grad_()
    quantized.BY_LIBRARY = variant.devices
    started = time.perf_counter()
    y = variant.call(x)
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return y.detach(), x.grad, time.perf_counter() - started


def difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return ((result.float() - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    torch.manual_seed(0)
    print("| matrix | computes in | variant | bytes | weights | output | input's gradient | time |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for shape in SHAPES:
        linear = nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
        linear.weight.normal_(0, 0.02)
        all_variants = list(variants(linear))
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(TOKENS, shape[1]).to(dtype)
            if dtype == torch.bfloat16:
                half = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype).requires_grad_(False)
                half.weight.copy_(linear.weight)
                all_variants[0] = all_variants[0]._replace(name="bf16 matrix", call=half, bytes=2)
            seconds: dict[str, list[float]] = {variant.name: [] for variant in all_variants}
            for _ in range(ROUNDS):
                for variant in list(all_variants):
                    try:
                        seconds[variant.name].append(passes(variant, x)[2])
                    except (RuntimeError, NotImplementedError, AssertionError) as error:
                        print(f"{variant.name} can't do {dtype}: {str(error)[:100]}")
                        all_variants.remove(variant)
            reference = seconds[all_variants[0].name]
            for variant in all_variants:
                y, gradient, _ = passes(variant, x)
                plain = nn.functional.linear(x.float(), variant.weight)
                figures = {
                    "bytes": round(variant.bytes, 3),
                    "weights": difference(variant.weight, linear.weight),
                    "output": difference(y, plain),
                    "gradient": difference(gradient, torch.ones_like(plain) @ variant.weight),
                    "time": statistics.median(
                        own / other
                        for own, other in zip(seconds[variant.name], reference, strict=True)
                    ),
                }
                name = f"{shape[0]} x {shape[1]}"
                keep("packed", matrix=name, dtype=str(dtype), variant=variant.name, **figures)
                cells = " | ".join(f"{value:.2g}" for value in figures.values())
                print(f"| {name} | {str(dtype)[6:]} | {variant.name} | {cells} |")


if __name__ == "__main__":
    main()
