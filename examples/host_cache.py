"""Decoders whose KV cache lies partly in host memory: the cache of the other examples taken out, penstock.kv's put in.

Both take `tokens[1, S]` and `positions[S]`, as those with a plain cache do, and give the logits of the last token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.decoder import Decoder, freeze
from penstock.kv import HostKVCache

ATTENTION = "penstock_host_kv"


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


def host_cached_llama(config: Any, max_len: int, kv_device_bytes: int) -> nn.Module:
    """A Llama of transformers, on the default device. Names are those of the checkpoint."""
    # Here, because the decoder above needs no transformers.
    from transformers import AttentionInterface, LlamaForCausalLM

    class HostCachedLlama(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.cache = HostKVCache(
                layers=config.num_hidden_layers,
                batch=1,
                kv_heads=config.num_key_value_heads,
                head_dim=self.model.layers[0].self_attn.head_dim,
                max_length=max_len,
                device_cap_bytes=kv_device_bytes,
                dtype=self.dtype,
                device=self.device,
            )

        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            # What transformers does not know it hands on to the attention function. It keeps no cache of its own.
            more = {"kv_cache": self.cache, "kv_step": starts_and_counts(positions)}
            out = super().forward(input_ids=input_ids, position_ids=positions[None], use_cache=False, **more)
            return out.logits[:, -1]

    AttentionInterface.register(ATTENTION, _attend)
    dtype = config.dtype or torch.float32
    return freeze(HostCachedLlama._from_config(config, dtype=dtype, attn_implementation=ATTENTION))


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, kv_cache: HostKVCache, kv_step: Any, **_: Any
) -> tuple[Tensor, None]:
    """The scale is that of the cache, which is a Llama's; so is the mask."""
    return kv_cache(module.layer_idx, q, k, v, *kv_step).transpose(1, 2), None
