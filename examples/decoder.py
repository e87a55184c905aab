"""A Llama-style decoder in plain PyTorch, with its KV cache in mutated buffers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim


class Case(NamedTuple):
    """What `torch.export.export` needs; a plain tuple, so `module, args, dynamic_shapes = case` works."""

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    dynamic_shapes: Any = None


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode and no grad, so that no graph gets autograd-only nodes."""
    return module.eval().requires_grad_(False)


def export(case: Case) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(case.module, case.args, dynamic_shapes=case.dynamic_shapes)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    hidden: int = 64
    ff: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 256
    max_len: int = 32
    tied: bool = False
    dtype: torch.dtype = torch.float32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = DecoderConfig()
LLAMA3_8B = DecoderConfig(
    hidden=4096,
    ff=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    vocab=128256,
    max_len=8192,
    dtype=torch.bfloat16,
    rope_theta=500000.0,
)


class RMSNorm(nn.Module):
    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.eps = cfg.norm_eps
        self.weight = nn.Parameter(torch.ones(cfg.hidden, dtype=cfg.dtype))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg: DecoderConfig, cached: bool) -> None:
        super().__init__()
        self.cfg = cfg
        kv = cfg.kv_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden, cfg.hidden, bias=False, dtype=cfg.dtype)
        self.k_proj = nn.Linear(cfg.hidden, kv, bias=False, dtype=cfg.dtype)
        self.v_proj = nn.Linear(cfg.hidden, kv, bias=False, dtype=cfg.dtype)
        self.o_proj = nn.Linear(cfg.hidden, cfg.hidden, bias=False, dtype=cfg.dtype)
        self.cached = cached
        if cached:
            shape = (1, cfg.kv_heads, cfg.max_len, cfg.head_dim)
            # State, not weights: non-persistent keeps them out of state_dict and checkpoints.
            self.register_buffer("k_cache", torch.zeros(shape, dtype=cfg.dtype), persistent=False)
            self.register_buffer("v_cache", torch.zeros(shape, dtype=cfg.dtype), persistent=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = x.shape
        cfg = self.cfg
        q = self.q_proj(x).view(batch, seq, cfg.heads, cfg.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        cfg = self.cfg
        if self.cached:
            # In-place on the buffer, and the attention below reads the whole cache under a mask, so that the
            # graph has no shape that depends on how much of the cache is filled.
            self.k_cache.index_copy_(2, positions, k)
            self.v_cache.index_copy_(2, positions, v)
            k, v = self.k_cache, self.v_cache
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=cfg.heads != cfg.kv_heads
        )
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden, cfg.ff, bias=False, dtype=cfg.dtype)
        self.up_proj = nn.Linear(cfg.hidden, cfg.ff, bias=False, dtype=cfg.dtype)
        self.down_proj = nn.Linear(cfg.ff, cfg.hidden, bias=False, dtype=cfg.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg: DecoderConfig, cached: bool) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(cfg)
        self.attn = Attention(cfg, cached)
        self.mlp_norm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, positions, mask)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Cache-free: `forward(tokens[1, S]) -> logits[1, S, vocab]`."""

    cached = False

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.hidden, dtype=cfg.dtype)
        self.layers = nn.ModuleList([Block(cfg, self.cached) for _ in range(cfg.layers)])
        self.norm = RMSNorm(cfg)
        self.head = nn.Linear(cfg.hidden, cfg.vocab, bias=False, dtype=cfg.dtype)
        if cfg.tied:
            self.head.weight = self.embed.weight
        steps = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim
        self.register_buffer("inv_freq", cfg.rope_theta**-steps, persistent=False)

    def hidden_states(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        angles = positions.float()[:, None] * self.inv_freq[None, :]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, positions, mask)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.hidden_states(tokens, positions, mask=None))


class CachedDecoder(Decoder):
    """`forward(tokens[1, S], positions[S]) -> logits[1, vocab]` of the last token; S = 1 is a decode step."""

    cached = True

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        slots = torch.arange(self.cfg.max_len, device=tokens.device)
        mask = slots[None, :] <= positions[:, None]
        x = self.hidden_states(tokens, positions, mask)
        return self.head(x[:, -1])

    def reset_cache(self) -> None:
        for name, buffer in self.named_buffers():
            if name.endswith("_cache"):
                buffer.zero_()


def build(cfg: DecoderConfig = TINY, *, cached: bool, device: str = "cpu", seed: int = 0) -> Decoder:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        module = CachedDecoder(cfg) if cached else Decoder(cfg)
    if device != "meta":
        # nn.Embedding draws from N(0, 1); a smaller scale keeps tied logits in a range where tolerances mean something.
        module.embed.weight.data.mul_(0.1)
    return freeze(module)


def _tokens(cfg: DecoderConfig, seq: int, device: str) -> Tensor:
    # Fixed, not random: the same prompt in every process. Cloned, because export also makes a symbol for the base of
    # an argument that is a view, and that symbol then turns up in range_constraints.
    return (torch.arange(seq, device=device) * 7 % cfg.vocab)[None].clone()


def methods(
    cfg: DecoderConfig = TINY,
    *,
    device: str = "cpu",
    seed: int = 0,
    prompt: int = 8,
    module: nn.Module | None = None,
) -> dict[str, Case]:
    """Both methods are the same module, so parameters and cache buffers are shared under the same names.

    The module is a CachedDecoder unless another one with the same arguments is given.
    """
    module = build(cfg, cached=True, device=device, seed=seed) if module is None else module
    seq = Dim("seq", min=2, max=cfg.max_len)
    return {
        "prefill": Case(
            module, (_tokens(cfg, prompt, device), torch.arange(prompt, device=device)), ({1: seq}, {0: seq})
        ),
        "decode": Case(module, (_tokens(cfg, 1, device), torch.full((1,), prompt, device=device)), None),
    }


def cache_free(cfg: DecoderConfig = TINY, *, device: str = "cpu", seed: int = 0, prompt: int = 8) -> Case:
    seq = Dim("seq", min=2, max=cfg.max_len)
    return Case(build(cfg, cached=False, device=device, seed=seed), (_tokens(cfg, prompt, device),), ({1: seq},))
