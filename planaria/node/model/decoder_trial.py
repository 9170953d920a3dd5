"""Trial of a decoder of transformers: a small random one of its class computes the same whole and
in stages.

It has the model's flags and depth, and each layer keeps its number. So `layer_types` and all other
lists along the depth are the run's. Widths and attention windows are small, and the samples are
longer than a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planaria.node.model.decoder import (
    Decoder,
    DecoderBody,
    DecoderEnds,
    DecoderError,
    PreTrainedModel,
    document_positions,
)
from planaria.node.model.random_state import kept_random_state

TOLERANCE: Final = 1e-5
"""Largest difference of two float32 results, relative to the largest value."""
WIDTHS: Final[Mapping[str, int]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "block_ff_dim": 48,
}
"""Figures of the small model, where the model's are larger."""
LENGTH: Final = 24
SECOND: Final = 11
"""Number of tokens, and where the second document begins."""
SHOWN: Final = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Difference(NamedTuple):
    """Largest differences of the model whole and cut, relative to the largest value."""

    logits: float
    gradients: float
    where: str = ""  # parameter whose gradient differs most


def small_model(decoder: Decoder, widths: Mapping[str, int] = WIDTHS) -> PreTrainedModel:
    """The decoder's model with small widths and random weights, float32. Raises DecoderError."""
    config, names = decoder.config, decoder.config.attribute_map
    content = config.to_dict()
    figures = {names.get(name, name): width for name, width in widths.items()}
    changes: dict[str, Any] = {
        name: width
        for name, width in figures.items()
        if isinstance(content.get(name), int) and content[name] > width
    }
    heads, kv_heads = names.get("num_attention_heads", "num_attention_heads"), "num_key_value_heads"
    if (groups := content.get(kv_heads)) and groups > 1 and heads in changes:
        changes[kv_heads] = changes[heads] if groups == content[heads] else 2
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        changes[name] = 0 if content.get(name) is not None else content.get(name)
    try:
        with kept_random_state(0):
            model = decoder.kind(type(config).from_dict(content | changes)).float().eval()
            for parameter in model.parameters():
                parts = parameter.data
                if parts.dim() > 1:  # larger than initial ones, so that attention isn't uniform
                    parts.normal_(0, parts.shape[-1] ** -0.5)
                else:
                    parts.add_(torch.empty_like(parts).uniform_(-0.2, 0.2))
    except Exception as error:
        raise DecoderError(
            f"{decoder.name}: a small model for a trial can't be built: {type(error).__name__}: "
            f"{error}"
        ) from error
    return model


def try_cut(decoder: Decoder, cut: Sequence[int], block_causal: bool) -> None:
    """Check that a small model of the decoder computes the same whole and in body stages of so many
    layers each. No token may see a later one. Raises DecoderError."""
    try:
        difference = whole_and_cut(decoder, cut, block_causal)
        strange = sees_too_much(small_model(decoder), block_causal)
    except DecoderError:
        raise
    except Exception as error:
        raise DecoderError(
            f"{decoder.name}, cut into {len(cut)} stages, fails in a trial: "
            f"{type(error).__name__}: {error}. Train it with a tool that keeps the whole model in "
            "one process"
        ) from error
    how = ", with documents kept apart" if block_causal else ""
    if not difference.logits <= TOLERANCE:
        problem = f"logits that differ by {difference.logits:.1e} of the largest"
    elif not difference.gradients <= TOLERANCE:
        problem = f"gradients that differ by {difference.gradients:.1e}, most in {difference.where}"
    elif not strange <= TOLERANCE:
        problem = f"logits of a token that depend on tokens it must not see, by {strange:.1e}"
    else:
        return
    raise DecoderError(
        f"{decoder.name}, cut into {len(cut)} stages{how}, computes {problem}: at most "
        f"{TOLERANCE:g} is accepted. Train it with a tool that keeps the whole model in one process"
    )


def whole_and_cut(decoder: Decoder, cut: Sequence[int], block_causal: bool) -> Difference:
    """Compare what the small model computes whole, and in body stages of so many layers each.
    Raises DecoderError, and whatever the class raises."""
    whole = small_model(decoder)
    tiny = _Small(decoder, whole)
    ends = DecoderEnds(tiny, block_causal)
    bodies = [
        DecoderBody(tiny, range(end - size, end), block_causal)
        for size, end in zip(cut, accumulate(cut), strict=True)
    ]
    weights = dict(whole.named_parameters())
    modules: list[nn.Module] = [ends, *bodies]
    named = [pair for module in modules for pair in module.named_parameters()]
    parts = {name.removeprefix("model."): part for name, part in named}
    for name, part in parts.items():
        part.data.copy_(weights[name])
    x = ends.embed(SHOWN, _beginnings() if block_causal else None)
    for body in bodies:
        x = body(x)
    logits = ends.logits(x)
    expected: Tensor = whole(input_ids=SHOWN, use_cache=False, **_position_ids(block_causal)).logits
    for result in (logits, expected):
        loss = F.cross_entropy(result.float().flatten(0, 1), SHOWN.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    largest, most, where = 0.0, 0.0, ""
    for name, parameter in weights.items():
        mine, gradient = parts[name].grad if name in parts else None, parameter.grad
        if gradient is None:
            continue
        largest = max(largest, gradient.abs().max().item())
        difference = (gradient if mine is None else gradient - mine).abs().max().item()
        if not difference <= most:
            most, where = difference, name
    return Difference(_difference(logits, expected), most / (largest or 1.0), where)


class _Small(Decoder):
    """The decoder of a trial's small model."""

    def __init__(self, decoder: Decoder, model: PreTrainedModel) -> None:
        self.source, self.kind, self.config = decoder.source, decoder.kind, model.config
        self.list_name, self.returns_tuples = decoder.list_name, decoder.returns_tuples


@torch.no_grad()
def sees_too_much(model: PreTrainedModel, block_causal: bool) -> float:
    """Relative change of a document's logits by tokens that it must not see."""
    logits = model(input_ids=SHOWN, use_cache=False, **_position_ids(block_causal)).logits
    first = model(input_ids=SHOWN[:, :SECOND], use_cache=False).logits
    change = _difference(logits[:, :SECOND], first)
    if block_causal:
        second = model(input_ids=SHOWN[:, SECOND:], use_cache=False).logits
        change = max(change, _difference(logits[:, SECOND:], second))
    return change


def _beginnings() -> Tensor:
    begins = torch.zeros_like(SHOWN)
    begins[:, [0, SECOND]] = 1
    return begins


def _position_ids(block_causal: bool) -> dict[str, Any]:
    return {"position_ids": document_positions(_beginnings())} if block_causal else {}


def _difference(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).abs().max() / expected.abs().max()).item()
