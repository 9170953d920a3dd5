"""Stages whose code is transformers' own, for decoders that planaria has no modules for.

The whole class is built on the meta device, and a stage keeps its layers, each with its number. In
place of the others are modules that do nothing, so that whatever the class looks up by a layer's
number is right. Stage 0 has embedding, norm and head, and no layer. The class's own `forward`
computes masks, positions, multipliers and logits. `decoder_trial.py` tries whether such a cut
computes what the whole model does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planaria.node.model.checkpoint import Checkpoint, first_few, tensors_in, values_of
from planaria.node.model.config import (
    CONFIG,
    NO_SENSE,
    UnsupportedModelError,
    is_quantized,
    read_json,
    unread_quantization,
)
from planaria.node.model.modules import BodyStage, EmbeddingStage
from planaria.node.model.quantized import quantize
from planaria.node.model.shape import Base, ModelConfig, Own, named_shapes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PreTrainedModel: TypeAlias = Any
PreTrainedConfig: TypeAlias = Any
"""transformers' own types don't describe its calls."""

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers would load code from its hub

INSTALL: Final = "pip install 'planaria[transformers]' installs it"
NEVER: Final = {
    "auto_map": "it needs code of its own, which is not loaded: write it as an architecture "
    "(docs/own-architecture.md)",
    "text_config": "it is a model of several modalities: save its text model alone",
    "is_encoder_decoder": "it has an encoder",
    "output_router_logits": "the router's auxiliary loss needs all layers at once, and stages do "
    "not compute it: set it to false in config.json",
}
"""Keys of config.json whose models are refused, and why."""
OF_SOFTWARE: Final = (
    *("torch_dtype", "dtype", "transformers_version", "use_cache", "architectures"),
    "quantization_config",
)
"""Keys that say nothing of the model's shape."""


class DecoderError(UnsupportedModelError):
    """Error of a model that transformers' code can't compute in stages; the message says why."""


class Decoder:
    """An `Architecture` whose code is a class of transformers, by its config.json. Its parameters
    have the names of transformers' modules."""

    def __init__(self, text: str) -> None:
        """Find transformers' class for `text`, the content of config.json. Raises DecoderError."""
        try:
            from transformers import AutoConfig, AutoModelForCausalLM, __version__
            from transformers.utils import logging
        except ImportError as error:
            raise DecoderError(f"its stages need the package transformers: {INSTALL}") from error
        quieten: Any = logging
        quieten.set_verbosity_error()
        quieten.disable_progress_bar()
        self.source = f"transformers {__version__}"
        content = json.loads(text)
        for key, reason in NEVER.items():
            if content.get(key):
                raise DecoderError(f"{key} = {json.dumps(content[key])[:80]}: {reason}")
        kind = content.get("model_type")
        try:
            known = {key: value for key, value in content.items() if not key.startswith("_")}
            self.config: PreTrainedConfig = AutoConfig.for_model(**known)
            classes: Any = AutoModelForCausalLM._model_mapping
            self.kind: type[PreTrainedModel] = classes[type(self.config)]
        except Exception as error:
            raise DecoderError(
                f"model_type = {json.dumps(kind)}: {self.source} has no such decoder, or not with "
                f"this config.json: {type(error).__name__}: {error}"
            ) from error

    @property
    def name(self) -> str:
        return f"{self.kind.__name__} of {self.source}"

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def _skeleton(self) -> PreTrainedModel:
        """The whole model, without values, on the meta device. Raises DecoderError."""
        try:
            with torch.device("meta"):
                return self.kind(self.config)
        except Exception as error:
            raise DecoderError(f"{self.name}: {type(error).__name__}: {error}") from error

    @cached_property
    def list_name(self) -> str:
        """Name of the model's list of layers, as `model.layers`. Raises DecoderError."""
        for name, module in self._skeleton.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.layers:
                return str(name)
        raise DecoderError(f"{self.name} has no list of its {self.layers} layers")

    def own(self) -> Own:
        """Names and shapes of the model's parameters, for `ModelConfig.own`."""
        kinds: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        numbers, not_linear = [], set()
        for layer in self._skeleton.get_submodule(self.list_name).children():
            shapes = tuple((name, tuple(part.shape)) for name, part in layer.named_parameters())
            numbers.append(kinds.setdefault(shapes, len(kinds)))
            for name, module in layer.named_modules():
                weight = None if isinstance(module, nn.Linear) else getattr(module, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 2:
                    not_linear.add(name)
        ends = tuple(
            (name, tuple(part.shape))
            for name, part in self._skeleton.named_parameters()
            if not name.startswith(f"{self.list_name}.")
        )
        first, *others = kinds
        known = {"model_type": self.config.model_type, "architectures": [self.kind.__name__]}
        text = json.dumps(self.config.to_diff_dict() | known)
        alike = () if not others else tuple(numbers)
        return Own(
            *(self.name, self.source, ends, first, text, self.list_name, tuple(others), alike),
            not_linear=tuple(sorted(not_linear)),
        )

    def check_trained(self) -> None:
        """Check that all parameters get gradients, as the flat weights of a stage that is trained
        whole are all its parameters. Raises DecoderError."""
        named = self._skeleton.named_parameters()
        if frozen := [name for name, part in named if not part.requires_grad]:
            raise DecoderError(
                f"{self.name}: {first_few(frozen)} get no gradient, and only all weights can be "
                "trained, or adapters: set training.lora"
            )

    def class_of(self, layers: range) -> type[PreTrainedModel]:
        """The model's class with these layers only; without any, with all but its layers."""
        list_name, kind = self.list_name, self.kind

        def build(model: PreTrainedModel, config: PreTrainedConfig) -> None:
            kind.__init__(model, config)
            _keep_layers(model, list_name, layers)

        return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})

    def build(self, layers: range, base: Base | None = None) -> PreTrainedModel:
        """Build these layers, or all but the layers, in float32 on the CPU, with the initial
        weights that transformers draws from torch's random state. The matrices of a packed base are
        undefined."""
        with torch.device("meta"):
            model = self.class_of(layers)(self.config)
        if base is not None:
            quantize(model.get_submodule(self.list_name), base)
        model = model.float().to_empty(device="cpu")
        model.init_weights()
        return model.eval()  # without dropout, all replicas compute the same

    def stage(
        self, layers: range, block_causal: bool, base: Base | None = None
    ) -> EmbeddingStage | BodyStage:
        """Build stage 0 if there are no layers, else a body stage."""
        if not layers:
            return DecoderEnds(self, block_causal)
        return DecoderBody(self, layers, block_causal, base)

    @cached_property
    def returns_tuples(self) -> bool:
        """Whether a layer returns a tuple with its output, not the output. Raises DecoderError."""
        from planaria.node.model.decoder_trial import SHOWN, small_model

        results: list[object] = []
        model = small_model(self)
        layer = next(model.get_submodule(self.list_name).children())
        layer.register_forward_hook(lambda module, inputs, output: results.append(output))
        with torch.no_grad():
            model(input_ids=SHOWN[:, :2], use_cache=False)
        return isinstance(results[0], tuple)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """The class's deviation for matrices; vectors keep what transformers gives them."""
        return float(getattr(self.config, "initializer_range", 0.02)) if len(shape) > 1 else 0.0

    def read(self, folder: Path, layers: range) -> dict[str, Tensor]:
        """The tensors of these layers, or of all but the layers, float32, by their names; no others
        are read. Raises DecoderError, OSError."""
        try:
            tensors = self._dequantized(folder, layers) if is_quantized(folder) else None
            model, report = self.class_of(layers).from_pretrained(
                folder if tensors is None else None,
                state_dict=tensors,
                config=self.config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (RuntimeError, *NO_SENSE) as error:
            raise DecoderError(f"{folder} can't be read by {self.name}: {error}") from error
        if missing := sorted(report["missing_keys"]):
            raise DecoderError(f"{folder} has only part of a model: it lacks {first_few(missing)}")
        self._check_buffers(folder, model, layers)
        return {name: part.detach() for name, part in model.named_parameters()}

    def _check_buffers(self, folder: Path, model: PreTrainedModel, layers: range) -> None:
        """Check that a folder's model has no buffers with values of its own, as a router's bias:
        stages, and what is exported, have parameters alone. Raises DecoderError."""
        stored = model.state_dict().keys()
        buffers = {name: part for name, part in model.named_buffers() if name in stored}
        built = dict(self.build(layers).named_buffers()) if buffers else {}
        if lost := [name for name in buffers if not torch.equal(buffers[name], built[name])]:
            raise DecoderError(
                f"{folder}: {first_few(lost)} have values of their own but are no parameters, and "
                "stages have only these. Train it with a tool that keeps the whole model in one "
                "process"
            )

    def _dequantized(self, folder: Path, layers: range) -> dict[str, Tensor]:
        """A quantized folder's tensors of these layers. Raises UnsupportedModelError, NO_SENSE."""
        number, tensors = rf"(?:^|\.){self.list_name.rpartition('.')[2]}\.(\d+)\.", {}
        for name, place in tensors_in(folder).items():
            match = re.search(number, name)
            if int(match[1]) in layers if match else not layers:
                tensors[name] = torch.from_numpy(values_of(place)).view(place.shape)
        return tensors

    def ends(self) -> nn.Module:
        return self.stage(range(0), False)

    def block(self, layer: int) -> nn.Module:
        return self.stage(range(layer, layer + 1), False)


@dataclass(frozen=True)
class DecoderCheckpoint(Checkpoint):
    """A folder of a model whose stages are transformers' code, read by it a layer at a time."""

    decoder: Decoder

    @classmethod
    def of(cls, folder: Path) -> DecoderCheckpoint:
        """Open a model's folder. Raises DecoderError."""
        decoder = decoder_of(folder)
        return cls(folder, config_of(decoder), {}, decoder)

    def read(self, name: str) -> NDArray[np.float32]:
        rest = name.removeprefix(f"{self.decoder.list_name}.")
        number = int(rest.partition(".")[0]) if rest != name else None
        layers = range(0) if number is None else range(number, number + 1)
        if self.newest_read.get("layers") != layers:
            self.newest_read.update(layers=layers, tensors=self.decoder.read(self.folder, layers))
        values: NDArray[np.float32] = self.newest_read["tensors"][name].numpy().ravel()
        return values

    @property
    def names(self) -> set[str]:
        return {*named_shapes(self.config, 0), *named_shapes(self.config, 1)}

    @cached_property
    def newest_read(self) -> dict[str, Any]:
        """The layers that were read last, and their tensors."""
        return {}

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        yield self.read(name)


def decoder_of(folder: Path) -> Decoder:
    """The decoder for a folder's config.json. Raises DecoderError."""
    try:
        content = read_json(folder / CONFIG)
        if why := unread_quantization(content):
            raise DecoderError(why)
        return Decoder(json.dumps({k: v for k, v in content.items() if k not in OF_SOFTWARE}))
    except DecoderError as error:
        raise DecoderError(f"{folder / CONFIG}: {error}") from error
    except (OSError, *NO_SENSE) as error:
        raise DecoderError(f"{folder} has no readable {CONFIG}: {error}") from error


def config_of(decoder: Decoder) -> ModelConfig:
    """The model's shape, with one body stage and its maximum context. Raises DecoderError."""
    config, own = decoder.config, decoder.own()
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    positions = int(getattr(config, "max_position_embeddings", 0) or 0) or None
    return ModelConfig(
        vocabulary=int(config.vocab_size),
        dim=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", 0) or heads),
        layers=decoder.layers,
        stages=1,
        context=positions or 2048,
        hidden=int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size),
        rope_theta=10_000.0,
        norm_eps=1e-5,
        learning_rate=1.0,
        positions=positions,
        own=own,
        attn_mask_type=getattr(config, "attn_mask_type", "causal"),
    )


class _Skipped(nn.Module):
    """Module in place of a layer of another stage; it has what the class may look up in a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = {"training", *vars(self)}
        vars(self).update({name: value for name, value in vars(layer).items() if name not in own})

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return x


class _Unused(nn.Module):
    """Module in place of one of stage 0, in a body stage, whose class may still call it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.embeds = isinstance(module, nn.Embedding)

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return torch.zeros((), device=x.device) if self.embeds else x


def _keep_layers(model: PreTrainedModel, list_name: str, layers: range) -> None:
    """Remove a model's parameters but those of these layers; of none, those of all layers."""
    items = model.get_submodule(list_name)
    assert isinstance(items, nn.ModuleList)
    for number, layer in enumerate(items):
        if number not in layers:
            items[number] = _Skipped(layer)
    if not layers:
        return
    for name, module in list(model.named_modules()):
        if list_name.startswith(name) or name.startswith(f"{list_name}."):
            continue  # of the layers, or around them
        parent, _, local = name.rpartition(".")
        if next(module.parameters(), None) is not None and _has_module(model, name):
            setattr(model.get_submodule(parent), local, _Unused(module))
    model.all_tied_weights_keys = {}


def _has_module(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:  # its parent was removed
        return False
    return True


class _LayerCalls:
    """Calls a model of transformers of which some layers are left: a tensor enters at the first of
    these, and leaves behind the last. Without layers both are where the first one was."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder, layers: range) -> None:
        self.kept, self.tuples = layers, decoder.returns_tuples
        self.first, self.last = (layers[0], layers[-1]) if layers else (0, 0)
        self.recompute = False
        self._entering: Tensor | None = None
        self._leaving: Tensor | None = None
        for number, layer in enumerate(model.get_submodule(decoder.list_name).children()):
            layer.forward = partial(self._call_layer, number, layer.forward)

    def call(self, model: nn.Module, entering: Tensor | None, **inputs: Any) -> tuple[Any, Tensor]:
        """Call `model`. Returns its output, and what left its layers."""
        self._entering = entering
        try:
            output = model(**inputs, use_cache=False)
            assert self._leaving is not None
            return output, self._leaving
        finally:
            self._entering = self._leaving = None

    def _call_layer(self, number: int, layer: Any, x: Tensor, *rest: Any, **named: Any) -> Any:
        if number == self.first and self._entering is not None:
            x = self._entering
        if number not in self.kept:
            output: Any = (x,) if self.tuples else x
        elif self.recompute and torch.is_grad_enabled():
            output = checkpoint(layer, x, *rest, use_reentrant=False, **named)
        else:
            output = layer(x, *rest, **named)
        if number == self.last:
            self._leaving = output[0] if isinstance(output, tuple) else output
        return output


class DecoderBody(BodyStage):
    """A body stage: layers of transformers."""

    def __init__(
        self, decoder: Decoder, layers: range, block_causal: bool, base: Base | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.model: PreTrainedModel = decoder.build(layers, base)
        self.block_causal = block_causal
        items = list(self.model.get_submodule(decoder.list_name).children())
        self.layers = [items[number] for number in layers]
        self._cut, self.recompute = _LayerCalls(self.model, decoder, layers), False

    def forward(self, x: Tensor) -> Tensor:
        places = {}
        begins = x[..., -1:]
        if self.block_causal:
            x, places = x[..., :-1], {"position_ids": document_positions(begins[..., 0])}
        self._cut.recompute = self.recompute
        shown = x.detach()  # transformers needs only its shape and dtype
        _, y = self._cut.call(self.model.base_model, x, inputs_embeds=shown, **places)
        y = y.float()
        return torch.cat((y, begins.to(y.dtype)), dim=-1) if self.block_causal else y


class DecoderEnds(EmbeddingStage):
    """Stage 0: embedding, norm and head of transformers, with all that the class does to them."""

    def __init__(self, decoder: Decoder, block_causal: bool) -> None:
        super().__init__()
        self.model: PreTrainedModel = decoder.build(range(0))
        self.block_causal = block_causal
        self._cut = _LayerCalls(self.model, decoder, range(0))

    def embed(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        begins = torch.zeros_like(tokens) if begins is None else begins
        places = {"position_ids": document_positions(begins)} if self.block_causal else {}
        _, x = self._cut.call(self.model.base_model, None, input_ids=tokens, **places)
        x = x.float()
        return torch.cat((x, begins[..., None].to(x.dtype)), dim=-1) if self.block_causal else x

    def logits(self, x: Tensor) -> Tensor:
        x = x[..., :-1] if self.block_causal else x
        output, _ = self._cut.call(self.model, x, inputs_embeds=x.detach())
        logits: Tensor = output.logits
        return logits


def document_positions(begins: Tensor) -> Tensor:
    """Positions that begin anew in each document, int64 [B, T], by which transformers keeps
    documents apart. `begins` [B, T] isn't 0 where one begins."""
    places = torch.arange(begins.shape[1], device=begins.device).expand(begins.shape)
    return places - torch.where(begins != 0, places, 0).cummax(dim=1).values
