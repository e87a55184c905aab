"""The example's decoder with its cache taken out and a split one put in: ragged batches, any chunk of tokens."""

from __future__ import annotations

import torch
from examples import decoder
from torch import Tensor, nn

from penstock.kv import HostKVCache


class SplitDecoder(nn.Module):
    """`forward(tokens[B, S], starts[B], counts[B]) -> logits[B, vocab]` of each sequence's last token."""

    def __init__(self, plain: decoder.Decoder, cache: HostKVCache) -> None:
        super().__init__()
        self.cfg = plain.cfg
        self.embed, self.layers, self.norm, self.head = plain.embed, plain.layers, plain.norm, plain.head
        self.register_buffer("inv_freq", plain.inv_freq, persistent=False)
        self.cache = cache

    def forward(self, tokens: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        batch, seq = tokens.shape
        positions = starts[:, None] + torch.arange(seq, device=tokens.device)
        angles = (positions.float()[..., None] * self.inv_freq)[:, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            attn, h = layer.attn, layer.attn_norm(x)
            q, k, v = (
                projection(h).view(batch, seq, heads, self.cfg.head_dim).transpose(1, 2)
                for projection, heads in (
                    (attn.q_proj, self.cfg.heads),
                    (attn.k_proj, self.cfg.kv_heads),
                    (attn.v_proj, self.cfg.kv_heads),
                )
            )
            y = self.cache(number, decoder.rotate(q, cos, sin), decoder.rotate(k, cos, sin), v, starts, counts)
            x = x + attn.o_proj(y.transpose(1, 2).reshape(batch, seq, self.cfg.hidden))
            x = x + layer.mlp(layer.mlp_norm(x))
        last = (counts.long() - 1).clamp(min=0)
        return self.head(self.norm(x)[torch.arange(batch, device=x.device), last])


def cache_of(cfg: decoder.DecoderConfig, batch: int, near: int, device: str = "cpu") -> HostKVCache:
    """A cache whose cap holds `near` positions of each sequence."""
    column = cfg.layers * batch * 2 * cfg.kv_heads * cfg.head_dim * cfg.dtype.itemsize
    return HostKVCache(
        layers=cfg.layers,
        batch=batch,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        max_length=cfg.max_len,
        device_cap_bytes=near * column,
        dtype=cfg.dtype,
        device=device,
    )


def generate(
    model: SplitDecoder, prompts: list[list[int]], amount: int, chunk: int, run: object = None
) -> list[list[int]]:
    """Greedy. Prompts are fed in chunks: sequences whose prompt is through wait, with no tokens, for the others."""
    forward = run or model
    cache, device = model.cache, model.cache.device
    cache.truncate([0] * len(prompts))
    done = [list[int]() for _ in prompts]
    while min(map(len, done)) < amount:
        held = cache.lengths
        parts = [prompt[at : at + chunk] for prompt, at in zip(prompts, held, strict=True)]
        if not any(parts):
            parts = [new[-1:] for new in done]
        step = cache.begin([len(part) for part in parts])
        tokens = torch.tensor([part + [0] * (max(map(len, parts)) - len(part)) for part in parts], device=device)
        with torch.no_grad():
            best = forward(tokens, step.starts, step.counts).argmax(-1).tolist()
        for b, part in enumerate(parts):
            if part and cache.lengths[b] >= len(prompts[b]):
                done[b].append(best[b])
    return done


def generate_plain(plain: decoder.CachedDecoder, prompt: list[int], amount: int) -> list[int]:
    plain.reset_cache()
    device = plain.embed.weight.device
    tokens, start, done = prompt, 0, list[int]()
    for _ in range(amount):
        positions = torch.arange(start, start + len(tokens), device=device)
        start += len(tokens)
        with torch.no_grad():
            tokens = plain(torch.tensor([tokens], device=device), positions).argmax(-1).tolist()
        done += tokens
    return done
