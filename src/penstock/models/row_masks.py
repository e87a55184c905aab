"""transformers' attention masks for a batch whose rows are at different positions.

transformers builds a mask from a function of (row, head, query, key) and one offset for all rows. Inside `row_masks()`
the offset is a tensor with one number for each row. The functions work element by element, and are called with that
offset. Nothing else about masks changes: windows, chunks and padding stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    padding_mask_function,
)

from penstock.errors import ModelError


def _boolean_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Tensor:
    """True where a query may see a key: [batch, 1, queries, keys]."""
    if use_vmap:
        raise ModelError("its attention mask is computed in a way of its own, and rows may stand at different places")
    if attention_mask is not None:
        mask_function = and_masks(mask_function, padding_mask_function(attention_mask))
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.arange(1, device=device)[None, :, None, None]
    queries = (q_offset[:, None] + torch.arange(q_length, device=device))[:, None, :, None]
    keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    mask: Tensor = mask_function(rows, heads, queries, keys)
    return mask.expand(batch_size, -1, q_length, kv_length)


def _added_mask(*arguments: Any, dtype: torch.dtype = torch.float32, **keywords: Any) -> Tensor:
    """0 where a query may see a key, the smallest number elsewhere."""
    mask = _boolean_mask(*arguments, **keywords)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


@contextmanager
def row_masks() -> Iterator[None]:
    ways = {"sdpa": _boolean_mask, "eager": _added_mask}
    for name, way in ways.items():
        ALL_MASK_ATTENTION_FUNCTIONS[name] = way
    try:
        yield
    finally:
        for name in ways:
            del ALL_MASK_ATTENTION_FUNCTIONS[name]
