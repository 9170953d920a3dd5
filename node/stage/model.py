"""LLaMA, cut into stages, and the models that are like it but for biases, norms and RoPE.

Stage 0 holds both ends of the model: token embedding, final norm and LM head, which is the
embedding once more where they are tied. Body stages 1..L hold the same number of transformer blocks
each, under the same names. Weights map one to one to those of Hugging Face's `LlamaForCausalLM` and
its kin (node/hugging_face/layout.py).
"""

from __future__ import annotations

import math
import struct

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planaria.node.stage.shape import ModelConfig, named_shapes


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [context, head_dim] on the CPU; feature i is paired with
    i + head_dim / 2."""
    with torch.device("cpu"):
        halves = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        positions = torch.arange(config.context).float()
        speeds = config.rope_theta**-halves  # radians a position
        if (scaling := config.rope_scaling) is not None:
            turns = scaling.positions * speeds / (2 * math.pi)
            kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
            speeds = speeds * (kept + (1 - kept) / scaling.factor)
        angles = torch.outer(positions, speeds).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864): x [B, heads, T, head_dim], tables [T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.grouped = config.head_dim, config.kv_heads < config.heads
        q_dim, kv_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, q_dim, bias=config.qkv_biases)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_biases)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_biases)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if config.qk_norms:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:  # [B, T, n * head_dim] -> [B, n, T, head_dim]
            return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BodyStage(nn.Module):
    """Blocks of one body stage. All body stages have the same names and shapes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers_per_stage))
        self.recompute = False  # drop the blocks' activations and compute them again in backward
        cos, sin = rope_tables(config)
        self.cos = nn.Buffer(cos, persistent=False)
        self.sin = nn.Buffer(sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Float [B, T, dim] to the same, T at most the context. Raises ValueError."""
        length = x.shape[1]
        if length > len(self.cos):
            raise ValueError(f"{length} tokens don't fit in the context of {len(self.cos)}")
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return x


class EmbeddingStage(nn.Module):
    """Stage 0: where a microbatch starts and where its loss is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        weights = torch.empty(config.vocabulary, config.dim)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim, _weight=weights)
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head: nn.Linear | None = None
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] to float [B, T, dim]."""
        return F.embedding(tokens, self.embed_tokens.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Float [B, T, dim] to [B, T, vocabulary]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(x), head.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the tokens' losses in nats, float32 scalar; x [B, T, dim], targets int64 [B, T].

        A sum, so that microbatches of any size add up to the window's.
        """
        logits = self.logits(x).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


Stage = EmbeddingStage | BodyStage


def parameter_shapes(config: ModelConfig, stage: int) -> list[torch.Size]:
    """The shapes of the stage's parameters, in their order; nothing is computed."""
    return [torch.Size(shape) for shape in named_shapes(config, stage).values()]


def _stage(config: ModelConfig, stage: int) -> Stage:
    """A stage whose weights are not initialised."""
    return EmbeddingStage(config) if stage == 0 else BodyStage(config)


def empty_stage(config: ModelConfig, stage: int) -> Stage:
    """A stage on the CPU in float32, all of whose weights are 0. Raises ValueError for a stage that
    isn't there."""
    if not 0 <= stage <= config.stages:
        raise ValueError(f"no stage {stage}: the model has stages 0 to {config.stages}")
    with torch.random.fork_rng(devices=[]):  # torch's own layers draw initial weights of theirs
        module = _stage(config, stage)
    for parameter in module.parameters():
        parameter.data.zero_()
    return module


def build_stage(config: ModelConfig, stage: int, seed: int) -> Stage:
    """A stage on the CPU in float32; its initial weights follow from (seed, stage, layer).

    Normal(0, 0.02), the two projections into the residual stream by 1/sqrt(2 layers) smaller
    (GPT-2, section 2.3); norms start at 1, biases at 0. Every replica makes the same ones; the
    global random state is neither used nor changed. Raises ValueError for a stage that isn't there.
    """
    if not 0 <= stage <= config.stages:
        raise ValueError(f"no stage {stage}: the model has stages 0 to {config.stages}")
    with torch.random.fork_rng(devices=[]):  # torch's own layers draw initial weights of theirs
        module = _stage(config, stage)
    parts = module.layers if isinstance(module, BodyStage) else [module]
    for layer, part in enumerate(parts):
        key = struct.pack("<QQQ", seed, stage, layer)
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key))
        for name, parameter in part.named_parameters():
            if parameter.dim() == 1:  # the weight of a norm, which starts at one, or a bias
                if name.endswith(".bias"):
                    parameter.data.zero_()
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
            # float32 normals differ from one instruction set to the next; float64 ones, rounded,
            # agree but for rare last bits
            drawn = torch.empty(parameter.shape, dtype=torch.float64)
            parameter.data.copy_(drawn.normal_(0, std, generator=generator))
    return module


def with_weights(config: ModelConfig, stage: int, weights: Tensor) -> Stage:
    """A stage whose parameters are views of `weights`, its flat ones, float32 [n]; for looking at
    what it makes of something, not for training."""
    with torch.device("meta"):
        module = _stage(config, stage)
    at = 0
    for name, parameter in list(module.named_parameters()):
        owner, _, local = name.rpartition(".")
        part = weights[at : at + parameter.numel()].view(parameter.shape)
        setattr(module.get_submodule(owner), local, nn.Parameter(part, requires_grad=False))
        at += parameter.numel()
    if isinstance(module, BodyStage):
        cos, sin = rope_tables(config)
        module.cos, module.sin = (
            nn.Buffer(cos.to(weights.device)),
            nn.Buffer(sin.to(weights.device)),
        )
    return module
