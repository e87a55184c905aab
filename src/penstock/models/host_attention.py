"""Attention over a KV cache on both sides of the link, as models of transformers ask for it.

transformers looks up attention and its masks by a name. Under our name, the mask is the slot of each row's first token,
and keys and values are the two sides of a layer's cache (state_cache.HostLayer). One op then attends to everything that
a row holds. Anything that would change what a token sees is refused by name: a window, chunks, padding, a bias, a cap
on scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import ModelError
from penstock.kv import ops
from penstock.kv.cache import HOST_PROGRAMS

NAME = "penstock_host_cache"
_LIMITS = "host_cache=True is for models in which every token attends to all tokens before it, and to nothing else"
# Arguments that models pass to every attention, and that change no number.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


def _first_slots(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The first slots. For another mask, which a model may make and never use, something that attention refuses."""
    is_causal = mask_function is causal_mask_function and attention_mask is None
    return q_offset if is_causal else q_offset[:, None]


def _attend(
    module: Any,
    query: Tensor,
    device_kv: Tensor,
    host_kv: Tensor,
    starts: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    beyond = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT)
    if beyond or starts is None or starts.dim() != 1:
        what = ", ".join(beyond) or "a mask of its own, such as a window"
        raise ModelError(f"its attention takes {what}; {_LIMITS}")
    batch, _, count, head_dim = query.shape
    counts = torch.full((batch,), count, dtype=torch.int64, device=query.device)
    scale = head_dim**-0.5 if scaling is None else scaling
    attended: Tensor = ops.ATTEND(query, device_kv, host_kv, starts, counts, scale, HOST_PROGRAMS)
    return attended.transpose(1, 2).contiguous(), None


# transformers asks for a mask only if its name is registered permanently.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _first_slots)
