"""Code of a run's own architecture: import, shapes, and comparison with the run file.

Only nodes whose command line names it load it, never on a registry's request. The process that
completes the run file of a new run loads it, too, never a registry: `python -m
planaria.node.stage.own_code < RUN.toml`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

from planaria.node.model.random_state import kept_random_state
from planaria.node.run_file import RunFile, RunFileError, dumps, loads, override

if TYPE_CHECKING:
    from planaria.node.model.architecture import Architecture
    from planaria.node.model.shape import ModelConfig, Shapes

TRIED = 2
"""Number of tokens of the trial pass."""


class OwnCodeError(ValueError):
    """Error of code that can't be loaded, or is no architecture; the message says what to do."""


def load(config: ModelConfig) -> tuple[Architecture, str]:
    """Import the code of `config.own` and build, with or without `model.parts` in the run file.
    Returns the architecture and the digest of the code. Raises OwnCodeError."""
    assert config.own is not None
    name = config.own.module
    module_name, _, build_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # not in the path of commands
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OwnCodeError(f"{name} can't be loaded: {error}: install that here") from error
        raise OwnCodeError(
            f"{name}: there is no module {error.name} on this machine: install it, or start this "
            f"in the folder that it is in (now {here}), or name that in PYTHONPATH"
        ) from error
    except Exception as error:
        raise OwnCodeError(f"{name} can't be loaded: {type(error).__name__}: {error}") from error
    build = getattr(module, build_name, None)
    if not callable(build):
        raise OwnCodeError(f"{name}: {module.__file__} has no function {build_name}")
    try:
        architecture: Architecture = build(config)
    except Exception as error:
        raise OwnCodeError(f"{name} fails: {type(error).__name__}: {error}") from error
    for method in ("ends", "block", "deviation"):
        if not callable(getattr(architecture, method, None)):
            raise OwnCodeError(
                f"what {name} returns, of type {type(architecture).__name__}, has no method "
                f"{method}: docs/own-architecture.md has all that it needs"
            )
    return architecture, digest(module)


def digest(module: ModuleType) -> str:
    """Digest of the module's file, or of all Python files of its package."""
    top = sys.modules[module.__name__.partition(".")[0]]
    files = [(Path(), Path(str(module.__file__)))]
    if top.__file__ is not None and hasattr(top, "__path__"):  # no namespace package
        folder = Path(top.__file__).parent
        files = sorted((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    found = xxhash.xxh3_128()
    for relative, path in files:
        found.update(f"{relative.as_posix()}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def shapes(architecture: Architecture, config: ModelConfig) -> tuple[Shapes, Shapes]:
    """Parameter shapes of the ends and of each block. A trial pass on the meta device, without
    computation, checks the shapes of outputs. Raises OwnCodeError."""
    assert config.own is not None
    name = config.own.module
    try:
        with kept_random_state(), torch.device("meta"), torch.no_grad():
            ends = architecture.ends()
            blocks = [architecture.block(layer) for layer in range(config.layers)]
            found = _parameters(f"the ends of {name}", ends)
            first, *others = (_parameters(f"block {n} of {name}", b) for n, b in enumerate(blocks))
            for method in ("embed", "logits"):
                if not callable(getattr(ends, method, None)):
                    raise OwnCodeError(f"the ends of {name} have no method {method}")
            for layer, other in enumerate(others, 1):
                if other != first:
                    what = next(_differences(first, other))
                    raise OwnCodeError(
                        f"{name}: {what} in block 0 and in block {layer}: all blocks must have the "
                        "same names and shapes in the same order, so that a lost stage can be made "
                        "of its neighbours'"
                    )
            _try(name, ends, blocks, config)
    except OwnCodeError:
        raise
    except Exception as error:
        raise OwnCodeError(
            f"{name} fails on torch's meta device, on which it is tried: {type(error).__name__}: "
            f"{error}"
        ) from error
    return found, first


def _parameters(what: str, module: object) -> Shapes:
    if not isinstance(module, nn.Module):
        raise OwnCodeError(f"{what}: {type(module).__name__} is no torch.nn.Module")
    named = list(module.named_parameters())
    if not named:
        raise OwnCodeError(f"{what} has no parameters, so there is nothing to train")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise OwnCodeError(f"{what}: {name} is {parameter.dtype}; torch.float32 is trained")
        if not parameter.requires_grad:
            raise OwnCodeError(f"{what}: {name} wants no gradient; make it a buffer")
    return tuple((name, tuple(parameter.shape)) for name, parameter in named)


def _differences(one: Shapes, other: Shapes) -> Iterator[str]:
    """The differences in words."""
    for (name, shape), (other_name, other_shape) in zip(one, other, strict=False):
        if (name, shape) != (other_name, other_shape):
            yield f"{name} {list(shape)} is not {other_name} {list(other_shape)}"
    yield f"{len(one)} parameters are not {len(other)}"


def _try(name: str, ends: nn.Module, blocks: list[nn.Module], config: ModelConfig) -> None:
    tokens = torch.zeros(1, min(TRIED, config.context), dtype=torch.int64)
    through = [1, tokens.shape[1], config.dim]
    x: Tensor = ends.embed(tokens)  # type: ignore[operator]
    _check(f"embed of {name}", x, through)
    for layer, block in enumerate(blocks):
        x = block(x)
        _check(f"block {layer} of {name}", x, through)
    logits = ends.logits(x)  # type: ignore[operator]
    _check(f"logits of {name}", logits, [*through[:2], config.vocabulary])


def _check(what: str, made: object, wanted: list[int]) -> None:
    got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if got != wanted:
        raise OwnCodeError(
            f"{what} makes {got} of {wanted[1]} tokens, and {wanted} is needed: [samples, tokens, "
            "dim], of logits the vocabulary"
        )


def load_as_said(run: RunFile, config: ModelConfig) -> Architecture:
    """The code on this machine, if it matches the run file. Raises OwnCodeError."""
    assert config.own is not None
    architecture, source = load(config)
    name, parts = config.own.module, run.model.parts
    if parts is None:
        raise OwnCodeError(f"the run file doesn't say model.parts of {name}; the registry adds it")
    where = sys.modules[name.partition(":")[0]].__file__
    if source != parts.source:
        raise OwnCodeError(
            f"{name} on this machine, {where}, is other code than the run's: its digest is {source}"
            f", and not {parts.source}: copy the code from the machine where the run was begun"
        )
    for said, found in zip(config.own[2:], shapes(architecture, config), strict=True):
        if said != found:
            what = next(_differences(said, found))
            raise OwnCodeError(f"{name} builds another model than the run file says: {what}")
    return architecture


def fill_in(run: RunFile) -> RunFile:
    """Add `model.parts` to a run file that has its vocabulary. Raises OwnCodeError."""
    config = run.model.config
    if config.own is None or run.model.vocabulary is None:
        raise OwnCodeError("the run file must say model.module and model.vocabulary")
    architecture, source = load(config)
    ends, block = shapes(architecture, config)
    return override(run, model__parts={"source": source, "ends": ends, "block": block})


def main() -> None:
    """Read a run file from stdin, and write it with `model.parts` to stdout."""
    try:
        sys.stdout.write(dumps(fill_in(loads(sys.stdin.read()))))
    except (OwnCodeError, RunFileError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
