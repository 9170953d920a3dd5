"""A torch device, written in Python, that is neither CPU nor CUDA.

Its tensors are in main memory, and the CPU's kernels compute them. To torch they are on another
device, `other:0`: an operation that mixes them with CPU tensors fails, as with a GPU. Fused
attention and autocast are missing. Its memory is never freed. A process can't unregister it, and
ends without a message at an error in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

ATEN: Final = torch.ops.aten
CPU: Final = torch.device("cpu")
SETS_SIZES: Final = ATEN.set_.source_Storage_storage_offset
ROUGH: Final = ("aten::sqrt", "aten::div")
_kept: Final[list[object]] = []


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


def register(lacks: str) -> torch.device:
    """Registers the device. It `lacks` "float64", and QR, as MPS does; or exact "rounding" of roots
    and quotients; or "", nothing."""
    _setup_privateuseone_for_python_backend("other", _Module())
    library = torch.library.Library("_", "IMPL")
    _kept.append(library)

    @torch.inference_mode(False)  # in this mode, tensors lack what their views need
    def compute(op: Any, *args: Any, **named: Any) -> Any:
        dtypes = map(_dtype, _leaves((args, named)))
        if lacks == "float64" and (torch.float64 in dtypes or "linalg_qr" in op.name()):
            raise TypeError(f"{op}: this device can't")
        roughly = lacks == "rounding" and op.name().startswith(ROUGH)
        return _compute(op, args, named, roughly)

    library.fallback(compute, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    _kept.append(aten)
    # Otherwise torch composes it of other operations, with other bits.
    aten.impl("silu_backward", partial(compute, ATEN.silu_backward.default), "PrivateUse1")
    return torch.device("other", 0)


def _dtype(leaf: object) -> object:
    is_there = isinstance(leaf, Tensor) and leaf.device.type == "other"
    return leaf.dtype if is_there else leaf if isinstance(leaf, torch.dtype) else None


def _compute(op: Any, args: Any, named: Any, roughly: bool) -> Any:
    if op is SETS_SIZES:
        return _set(*args)
    if op is ATEN._fused_sdp_choice.default:
        raise NotImplementedError("no fused attention")
    # Torch passes a plain number where the kernel takes a tensor.
    args = [
        torch.tensor(of) if is_tensor and isinstance(of, int | float) else of
        for of, is_tensor in zip(args, _are_tensors(op), strict=False)
    ]
    given = [leaf for leaf in _leaves((args, named)) if isinstance(leaf, Tensor)]
    if op is ATEN._copy_from.default:
        _shadow(given[1]).copy_(_shadow(given[0]))
        return given[1]
    if any(of.device == CPU and of.dim() for of in given):
        raise RuntimeError(f"{op} of {[(str(of.device), list(of.shape)) for of in given]}")
    originals: dict[int, Tensor] = {}  # by the shadow's id

    def shadow(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return CPU
        if not isinstance(leaf, Tensor):
            return leaf
        made = _shadow(leaf)
        originals[id(made)] = leaf
        shadows.append(made)
        return made

    shadows: list[Tensor] = []  # kept alive, so that their ids stay unique
    results = op(*_changed(args, shadow), **_changed(named, shadow))
    by_memory = {_address(of): of.untyped_storage() for of in given if of.device != CPU}

    def lift(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if roughly:
            result.copy_(torch.nextafter(result, torch.full_like(result, torch.inf)))
        original = originals.get(id(result))
        if original is not None and original.shape == result.shape:
            return original
        return _lifted(result, by_memory, original)

    return _changed(results, lift)


@cache
def _are_tensors(op: Any) -> list[bool]:
    """For each argument of an operation: whether it is a tensor."""
    return [str(of.type) == "Tensor" for of in op._schema.arguments]


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested lists, tuples and dictionaries. Torch's function for all kinds of nests
    takes several times as long."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf changed."""
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    return change(value)


def _shadow(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same memory."""
    if tensor.device == CPU:
        return tensor
    whole = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    if not tensor.numel():
        return empty.new_empty(tensor.shape)
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), CPU, whole.nbytes())
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _lifted(tensor: Tensor, by_memory: dict[int, Any], into: Tensor | None = None) -> Tensor:
    """A tensor of the same memory on the other device: in an argument's storage, or in a new one.
    `into`: an empty tensor that has been resized."""
    whole = tensor.untyped_storage()
    storage = by_memory.get(whole.data_ptr())
    if storage is None:
        _kept.append(tensor)
        address, size = whole.data_ptr(), whole.nbytes()
        storage = torch._C._construct_storage_from_data_pointer(
            address, torch.device("other", 0), size
        )
    empty = torch._C._acc.create_empty_tensor([0], tensor.dtype) if into is None else into
    return _set(empty, storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _set(tensor: Tensor, *to: Any) -> Tensor:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # its kernel only sets sizes
    set_: Tensor = SETS_SIZES.redispatch(key, tensor, *to)
    return set_


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
