"""The model as stages: LLaMA, its relatives, which differ in biases, norms and RoPE, and own
architectures of runs (architecture.py).

Stage 0 holds both ends of the model: token embedding, final norm and LM head, which shares the
embedding's weights where they are tied. Body stages 1..L hold the transformer blocks. LLaMA's
weights map one to one to those of Hugging Face's `LlamaForCausalLM` and its kin
(node/model/layout.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planaria.node.model.architecture import Architecture
from planaria.node.model.quantized import quantize
from planaria.node.model.random_state import kept_random_state
from planaria.node.model.shape import ModelConfig, RopeScaling
from planaria.node.model.subspace import subspace_of


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """RoPE's cosines and sines for a sequence of `length` tokens, float32 [length, head_dim] on the
    CPU; feature i is paired with i + head_dim / 2."""
    with torch.device("cpu"):
        speeds, scale = rope_speeds(config, length)
        angles = torch.outer(torch.arange(length).float(), speeds).repeat(1, 2)
        return scale * angles.cos(), scale * angles.sin()


def rope_speeds(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    """RoPE's radians per position of a pair of features, float32 [head_dim / 2], and its factor
    of cosines and sines, for a sequence of that length.

    The types of `config.rope_scaling` are those of transformers (modeling_rope_utils, 5.23):
    "linear" and "dynamic" (NTK, which depends on the length) as discussed by their users. "yarn" is
    of arXiv 2309.00071, "llama3" of LLaMA 3.1. The latter two slow down by `factor` the
    low-frequency pairs, and keep the high-frequency ones.
    """
    dim, theta, rope = config.head_dim, config.rope_theta, config.rope_scaling
    halves = torch.arange(0, dim, 2).float() / dim
    speeds = theta**-halves
    if rope is None:
        return speeds, 1.0
    positions = config.positions or config.context
    if rope.rope_type == "linear":
        return speeds / rope.factor, 1.0
    if rope.rope_type == "dynamic":
        stretch = max(1.0, rope.factor * length / positions - (rope.factor - 1))
        return (theta * stretch ** (dim / (dim - 2))) ** -halves, 1.0
    positions = rope.original_max_position_embeddings or positions
    if rope.rope_type == "llama3":
        low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
        kept = ((positions * speeds / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return speeds * (kept + (1 - kept) / rope.factor), 1.0

    def pair(turns: float) -> float:  # the pair that turns this often in the trained positions
        return dim * math.log(positions / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    slowed = (torch.arange(dim // 2) - first) / ((last - first) or 0.001)
    slowed = slowed.clamp(0, 1)
    return speeds * (1 - slowed + slowed / rope.factor), _yarn_scale(rope)


def _yarn_scale(rope: RopeScaling) -> float:
    """YaRN's factor of cosines and sines (arXiv 2309.00071, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(rope.factor, 1.0)) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE (arXiv 2104.09864) to x [B, heads, T, head_dim] by tables [T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map float [.., in] to [.., out] in the dtype of x or of autocast, whatever the weights'."""
    if not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.grouped = config.head_dim, config.kv_heads < config.heads
        q_dim, kv_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, q_dim, bias=config.qkv_biases)
        self.k_proj = Linear(config.dim, kv_dim, bias=config.qkv_biases)
        self.v_proj = Linear(config.dim, kv_dim, bias=config.qkv_biases)
        self.o_proj = Linear(q_dim, config.written, bias=config.attention_bias)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if config.qk_norms:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend. `mask`: bool [B, 1, T, T], what each token attends to; None: causal."""

        def heads(projected: Tensor) -> Tensor:  # [B, T, n * head_dim] -> [B, n, T, head_dim]
            return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.hidden, bias=config.mlp_bias)
        self.up_proj = Linear(config.dim, config.hidden, bias=config.mlp_bias)
        self.down_proj = Linear(config.hidden, config.written, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SubspaceBlock(Block):
    """A transformer block whose residual stream lies in a subspace."""

    def forward(  # type: ignore[override]
        self,
        figures: Tensor,
        cos: Tensor,
        sin: Tensor,
        stream: Callable[[Tensor], Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Map figures [B, T, rank]; `stream` makes them the features of tokens."""
        normed = self.input_layernorm(stream(figures))
        figures = figures + self.self_attn(normed, cos, sin, mask)
        normed = self.post_attention_layernorm(stream(figures))
        out: Tensor = figures + self.mlp(normed)
        return out


def within_documents(begins: Tensor) -> Tensor:
    """Causal attention mask within documents, bool [B, 1, T, T]. `begins` [B, T] isn't 0 where a
    document begins.

    Positions needn't restart: RoPE depends on the distance of tokens only.
    """
    document = (begins != 0).cumsum(dim=1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


class BodyStage(nn.Module):
    """The blocks of one body stage."""

    draws = True
    """Whether blocks may draw random numbers (dropout), which recomputation must draw again."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers: Iterable[nn.Module] = nn.ModuleList(blocks)
        self.recompute = False  # recompute the blocks' activations in backward

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, T, crossing] by all blocks, T at most the context. Raises ValueError."""
        return self._through_blocks(x)

    def _through_blocks(self, x: Tensor, *beside: Any) -> Tensor:
        for block in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, *beside, use_reentrant=False, preserve_rng_state=self.draws
                )
            else:
                x = block(x, *beside)
        return x.float()  # an own block may return fewer bits under autocast


class LlamaBody(BodyStage):
    draws = False

    def __init__(self, config: ModelConfig, stage: int) -> None:
        kind = Block if config.subspace is None else SubspaceBlock
        super().__init__(kind(config) for _ in config.layers_of(stage))
        self.block_causal = config.block_causal
        self.set_constants(config)

    def set_constants(self, config: ModelConfig) -> None:
        """Set what isn't trained, RoPE and subspace, as the configuration says."""
        self.config = config
        cos, sin = rope_tables(config, config.context)
        self.cos = nn.Buffer(cos, persistent=False)
        self.sin = nn.Buffer(sin, persistent=False)
        self.subspace = subspace_of(config)

    def forward(self, x: Tensor) -> Tensor:
        beside: list[Any] = [*self._rope(x.shape[1])]
        if not self.block_causal and self.subspace is None:
            return self._through_blocks(x, *beside)
        x, begins = (x[..., :-1], x[..., -1:]) if self.block_causal else (x, x[..., :0])
        digits = x[..., :0]
        if self.subspace is not None:
            x, fixed, digits = self.subspace.split(x)
            beside.append(partial(self.subspace.stream, fixed=fixed))
        if self.block_causal:
            beside.append(within_documents(begins[..., 0]))
        y = self._through_blocks(x, *beside)
        return torch.cat((y, digits.to(y.dtype), begins.to(y.dtype)), dim=-1)

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        """RoPE's tables for `length` tokens. Raises ValueError."""
        if length > len(self.cos):
            raise ValueError(f"{length} tokens don't fit in the context of {len(self.cos)}")
        rope = self.config.rope_scaling
        if length < len(self.cos) and rope is not None and rope.rope_type == "dynamic":
            cos, sin = rope_tables(self.config, length)
            return cos.to(self.cos.device), sin.to(self.sin.device)
        return self.cos[:length], self.sin[:length]


class EmbeddingStage(nn.Module):
    """Stage 0: the first and the last of the model's computations, with the loss."""

    def embed(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        """Embed int64 [B, T] as float [B, T, crossing]. `begins`, bool [B, T]: where documents
        begin; None: each row is one document."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of float [B, T, crossing]."""
        raise NotImplementedError

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the tokens' losses in nats, float32 scalar; x [B, T, crossing], targets int64 [B,
        T], -100 where none is scored.

        A sum, so that microbatches of any size add up to the window's.
        """
        logits = self.logits(x).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


class LlamaEnds(EmbeddingStage):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.block_causal = config.block_causal
        weights = torch.empty(config.vocabulary, config.written)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.written, _weight=weights)
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head: nn.Linear | None = None
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.set_constants(config)

    def set_constants(self, config: ModelConfig) -> None:
        """Set what isn't trained, the subspace, as the configuration says."""
        self.subspace = subspace_of(config)

    def embed(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        x = F.embedding(tokens, self.embed_tokens.weight).float()
        if self.subspace is not None:
            x = self.subspace.with_digits(tokens, x)
        if not self.block_causal:
            return x
        begins = torch.zeros_like(tokens) if begins is None else begins
        return torch.cat((x, begins[..., None].to(x.dtype)), dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        if self.block_causal:
            x = x[..., :-1]
        if self.subspace is not None:
            figures, fixed, _ = self.subspace.split(x)
            x = self.subspace.stream(figures, fixed)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(self.norm(x), head.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        scored = targets >= 0
        return super().loss(x[scored][None], targets[scored][None])  # no logits of other tokens


class OwnEnds(EmbeddingStage):
    """Stage 0 of an own architecture."""

    def __init__(self, ends: nn.Module) -> None:
        super().__init__()
        self.ends = ends

    def embed(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        x: Tensor = self.ends.embed(tokens)  # type: ignore[operator]
        return x.float()

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.ends.logits(x)  # type: ignore[operator]
        return logits

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        own = getattr(self.ends, "loss", None)
        return super().loss(x, targets) if own is None else own(x, targets)


Stage = EmbeddingStage | BodyStage


def _new_stage(config: ModelConfig, stage: int, own: Architecture | None) -> Stage:
    """Build a stage with uninitialized weights. Raises ValueError."""
    if not 0 <= stage <= config.stages:
        raise ValueError(f"no stage {stage}: the model has stages 0 to {config.stages}")
    if config.own is None:
        return LlamaEnds(config) if stage == 0 else LlamaBody(config, stage)
    if own is None:
        raise ValueError(f"the code of the model, {config.own.module}, isn't loaded here")
    layers = config.layers_of(stage)
    if config.own.decoder:
        base = config.base_of(stage)
        built: Stage = own.stage(layers, config.block_causal, base)  # type: ignore[attr-defined]
        return built
    return BodyStage(map(own.block, layers)) if stage else OwnEnds(own.ends())


def empty_stage(config: ModelConfig, stage: int, own: Architecture | None = None) -> Stage:
    """A stage on the CPU in float32, with all weights 0, but for the undefined matrices of a packed
    base; `own`: the loaded own architecture of the run. Raises ValueError for an unknown stage."""
    if own is None:
        with torch.device("meta"):
            module = _new_stage(config, stage, None)
        if (base := config.base_of(stage)) is not None:
            quantize(module, base)
        module.to_empty(device="cpu")
        assert isinstance(module, LlamaBody | LlamaEnds)
        module.set_constants(config)
    else:
        with kept_random_state():  # constructors of layers draw initial weights
            module = _new_stage(config, stage, own)
    for parameter in module.parameters():
        parameter.data.zero_()
    return module


def build_stage(
    config: ModelConfig, stage: int, seed: int, own: Architecture | None = None
) -> Stage:
    """Build a stage on the CPU in float32; its initial weights follow from (seed, stage, layer).

    They are normal, with the deviations of LLaMA or of the `own` architecture; 0 keeps the
    constructor's values. Every replica makes the same ones; the global random state is neither used
    nor changed. Raises ValueError for an unknown stage.
    """
    with kept_random_state(_layer_seed(seed, stage, config.layers)):
        module = _new_stage(config, stage, own)
    deviation = partial(_llama_deviation, config) if own is None else own.deviation
    parts = module.layers if isinstance(module, BodyStage) else [module]
    for layer, part in enumerate(parts):
        generator = torch.Generator().manual_seed(_layer_seed(seed, stage, layer))
        for name, parameter in part.named_parameters():
            std = deviation(name.removeprefix("ends."), tuple(parameter.shape))
            if std == 0:
                continue
            # float32 normals differ between instruction sets; rounded float64 ones agree, but for
            # rare last bits
            drawn = torch.empty(parameter.shape, dtype=torch.float64)
            parameter.data.copy_(drawn.normal_(0, std, generator=generator))
    return module


def _layer_seed(seed: int, stage: int, layer: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, stage, layer))


def _llama_deviation(config: ModelConfig, name: str, shape: tuple[int, ...]) -> float:
    """LLaMA's deviation of initial weights: 0.02; of the two projections into the residual stream
    less by 1/sqrt(2 layers) (GPT-2, section 2.3). Norms start at 1, biases at 0. Writes into a
    subspace of the stream are scaled up, so that their contribution to a feature is as large."""
    if len(shape) == 1:
        return 0.0
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    writes = residual or name.endswith("embed_tokens.weight")
    deviation = 0.02 * (config.dim / config.written) ** 0.5 if writes else 0.02
    return deviation / (2 * config.layers) ** 0.5 if residual else deviation


def copy_with(module: Stage, weights: Tensor) -> Stage:
    """A copy of a stage whose trained parameters are views of flat `weights`, float32 [n]; the rest
    is shared."""
    same = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parts = torch.split(weights, [parameter.numel() for parameter in trained])
    for parameter, part in zip(trained, parts, strict=True):
        same[id(parameter)] = nn.Parameter(part.view_as(parameter))
    return deepcopy(module, same)
