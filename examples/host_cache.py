"""A decoder whose KV cache lies partly in host memory: the cache of the other examples taken out, penstock.kv's put in.

It takes `tokens[1, S]` and `positions[S]`, as the one with a plain cache does, and gives the logits of the last token.
"""

from __future__ import annotations

from torch import Tensor, nn

from examples.decoder import Decoder, freeze
from penstock.kv import HostKVCache


class HostCachedDecoder(nn.Module):
    def __init__(self, plain: Decoder, kv_device_bytes: int) -> None:
        super().__init__()
        cfg = plain.cfg
        self.embed, self.layers, self.norm, self.head = plain.embed, plain.layers, plain.norm, plain.head
        self.register_buffer("inv_freq", plain.inv_freq, persistent=False)
        self.cache = HostKVCache(
            layers=cfg.layers,
            batch=1,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            max_length=cfg.max_len,
            device_cap_bytes=kv_device_bytes,
            dtype=cfg.dtype,
            device=plain.inv_freq.device,
        )
        freeze(self)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        step = starts_and_counts(positions)
        angles = positions.float()[:, None] * self.inv_freq[None, :]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            y = self.cache(number, *layer.attn.project(layer.attn_norm(x), cos, sin), *step)
            x = x + layer.attn.o_proj(y.transpose(1, 2).reshape(x.shape))
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.head(self.norm(x)[:, -1])


def starts_and_counts(positions: Tensor) -> tuple[Tensor, Tensor]:
    """How many positions the one sequence holds before the call, and how many the call adds; nothing waits for them."""
    return positions[:1].int(), (positions[-1:] - positions[:1] + 1).int()
