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


def load_architecture(config: ModelConfig) -> tuple[Architecture, str]:
    """Import the code of `config.own` and build, with or without `model.parts` in the run file.
    Returns the architecture and the digest of the code. Raises OwnCodeError."""
    assert config.own is not None
    name = config.own.module
    module_name, _, build_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # not in the path of commands
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OwnCodeError(f"{name} can't be loaded: {error}: install it here") from error
        raise OwnCodeError(
            f"{name}: there is no module {error.name} on this machine: install it, or start this "
            f"in its folder (now {folder}), or add that folder to PYTHONPATH"
        ) from error
    except Exception as error:
        raise OwnCodeError(f"{name} can't be loaded: {type(error).__name__}: {error}") from error
    build = getattr(module, build_name, None)
    if not callable(build):
        raise OwnCodeError(
            f"{name}: {module.__file__} has no function {build_name}: define it, or name another"
        )
    try:
        architecture: Architecture = build(config)
    except Exception as error:
        raise OwnCodeError(f"{name} fails: {type(error).__name__}: {error}") from error
    for method in ("ends", "block", "deviation"):
        if not callable(getattr(architecture, method, None)):
            raise OwnCodeError(
                f"{name} returns {type(architecture).__name__}, which has no method {method}: "
                "docs/own-architecture.md lists the methods"
            )
    return architecture, code_digest(module)


def code_digest(module: ModuleType) -> str:
    """Digest of the module's file, or of all Python files of its package."""
    top = sys.modules[module.__name__.partition(".")[0]]
    files = [(Path(), Path(str(module.__file__)))]
    if top.__file__ is not None and hasattr(top, "__path__"):  # no namespace package
        folder = Path(top.__file__).parent
        files = sorted((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    hasher = xxhash.xxh3_128()
    for relative, path in files:
        hasher.update(f"{relative.as_posix()}\n".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def trial_shapes(architecture: Architecture, config: ModelConfig) -> tuple[Shapes, Shapes]:
    """Parameter shapes of an own architecture's ends and of each block. A trial pass on the meta
    device, without computation, checks the shapes of outputs. Raises OwnCodeError."""
    assert config.own is not None
    name = config.own.module
    try:
        with kept_random_state(), torch.device("meta"), torch.no_grad():
            ends = architecture.ends()
            blocks = [architecture.block(layer) for layer in range(config.layers)]
            shapes_of_ends = _parameter_shapes(f"the ends of {name}", ends)
            first, *others = (
                _parameter_shapes(f"block {n} of {name}", b) for n, b in enumerate(blocks)
            )
            for method in ("embed", "logits"):
                if not callable(getattr(ends, method, None)):
                    raise OwnCodeError(f"the ends of {name} have no method {method}")
            for layer, other in enumerate(others, 1):
                if other != first:
                    difference = next(_differences(first, other))
                    raise OwnCodeError(
                        f"{name}: {difference} in block 0 and in block {layer}: give "
                        "all blocks parameters of the same names and shapes in the same order, "
                        "since a lost stage is estimated from its neighbours"
                    )
            _try_passes(name, ends, blocks, config)
    except OwnCodeError:
        raise
    except Exception as error:
        raise OwnCodeError(
            f"{name} fails in a trial on torch's meta device: {type(error).__name__}: {error}"
        ) from error
    return shapes_of_ends, first


def _parameter_shapes(part: str, module: object) -> Shapes:
    if not isinstance(module, nn.Module):
        raise OwnCodeError(f"{part}: {type(module).__name__} is not a torch.nn.Module")
    named = list(module.named_parameters())
    if not named:
        raise OwnCodeError(f"{part} has no parameters, so there is nothing to train")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise OwnCodeError(
                f"{part}: {name} is {parameter.dtype}; only torch.float32 is trained"
            )
        if not parameter.requires_grad:
            raise OwnCodeError(f"{part}: {name} requires no gradient; make it a buffer")
    return tuple((name, tuple(parameter.shape)) for name, parameter in named)


def _differences(first: Shapes, second: Shapes) -> Iterator[str]:
    """How two lists of parameter shapes differ, in words."""
    for (name, shape), (other_name, other_shape) in zip(first, second, strict=False):
        if (name, shape) != (other_name, other_shape):
            yield f"{name} {list(shape)} is not {other_name} {list(other_shape)}"
    yield f"{len(first)} parameters are not {len(second)}"


def _try_passes(name: str, ends: nn.Module, blocks: list[nn.Module], config: ModelConfig) -> None:
    tokens = torch.zeros(1, min(TRIED, config.context), dtype=torch.int64)
    through = [1, tokens.shape[1], config.dim]
    x: Tensor = ends.embed(tokens)  # type: ignore[operator]
    _check_output(f"embed of {name}", x, through)
    for layer, block in enumerate(blocks):
        x = block(x)
        _check_output(f"block {layer} of {name}", x, through)
    logits = ends.logits(x)  # type: ignore[operator]
    _check_output(f"logits of {name}", logits, [*through[:2], config.vocabulary])


def _check_output(part: str, output: object, wanted: list[int]) -> None:
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != wanted:
        raise OwnCodeError(
            f"{part} returns {shape} for {wanted[1]} tokens instead of {wanted}: the shape is "
            "[samples, tokens, dim], or of logits [samples, tokens, vocabulary]"
        )


def load_checked(run: RunFile, config: ModelConfig) -> Architecture:
    """Loads the run's own architecture, if it matches the run file. Raises OwnCodeError."""
    assert config.own is not None
    if config.own.decoder:
        return _load_checked_decoder(config)
    architecture, source = load_architecture(config)
    name, parts = config.own.module, run.model.parts
    if parts is None:
        raise OwnCodeError(
            f"the run file has no model.parts for {name}; start the run anew: the registry adds it"
        )
    path = sys.modules[name.partition(":")[0]].__file__
    if source != parts.source:
        raise OwnCodeError(
            f"{name} on this machine, {path}, differs from the run's code: its digest is {source}"
            f", not {parts.source}: copy the code from the machine where the run was begun"
        )
    for expected, built in zip(config.own[2:4], trial_shapes(architecture, config), strict=True):
        if expected != built:
            difference = next(_differences(expected, built))
            raise OwnCodeError(f"{name} builds another model than in the run file: {difference}")
    return architecture


def _load_checked_decoder(config: ModelConfig) -> Architecture:
    """The class of transformers, if it matches the run file and passes the trial here, too. Raises
    OwnCodeError."""
    from planaria.node.model.decoder import Decoder, DecoderError
    from planaria.node.model.decoder_trial import try_cut

    own = config.own
    assert own is not None
    try:
        decoder = Decoder(own.decoder)
        if decoder.source != own.source:
            raise OwnCodeError(
                f"this machine has {decoder.source}, and the run's model is computed by "
                f"{own.source}: install that version"
            )
        built = decoder.own()._replace(module=own.module, decoder=own.decoder)
        if built != own:
            raise OwnCodeError(f"{decoder.name} builds another model than in the run file")
        try_cut(decoder, config.cut, config.block_causal)
    except DecoderError as error:
        raise OwnCodeError(str(error)) from error
    return decoder


def add_parts(run: RunFile) -> RunFile:
    """Add `model.parts` to a run file that has its vocabulary. Raises OwnCodeError."""
    config = run.model.config
    if config.own is None or run.model.vocabulary is None:
        raise OwnCodeError("the run file must have model.module and model.vocabulary")
    architecture, source = load_architecture(config)
    ends, block = trial_shapes(architecture, config)
    return override(run, model__parts={"source": source, "ends": ends, "block": block})


def main() -> None:
    """Read a run file from stdin, and write it with `model.parts` to stdout."""
    try:
        sys.stdout.write(dumps(add_parts(loads(sys.stdin.read()))))
    except (OwnCodeError, RunFileError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
