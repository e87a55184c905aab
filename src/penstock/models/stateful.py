"""A language model of transformers that owns its cache, as torch.export and Penstock want it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.exporters.utils import apply_patches

from penstock.errors import ModelError, PenstockError
from penstock.models.host_attention import NAME as HOST_ATTENTION
from penstock.models.row_masks import row_masks
from penstock.models.source_line import first_line, place
from penstock.models.state_cache import StateCache, empty_cache, layer_kinds
from penstock.models.transformers_private import has_experts

# Tokens of the forward in which the cache learns its shapes.
_FEW = 4


@contextmanager
def traceable() -> Iterator[None]:
    """Applies what transformers itself changes in models for an export, and masks by row."""
    with torch.no_grad(), apply_patches("dynamo"), row_masks():
        yield


def make_stateful(model: Any, *, slots: int, batch: int, host_cache: bool = False) -> StateCache:
    """Turns `model` into one whose forward takes (ids, start, mask), and whose cache is buffers of its own.

    ids is [batch, count]. start [batch] is the slot of each row's first token. mask [batch, slots] is 0 where a slot
    holds padding. There is no mask if padding would move a recurrent state, nor with `host_cache`: then keys and values
    lie on both sides of the link, and attention is ours. The class becomes a subclass of its own, so that parameters
    keep the checkpoint's names.
    """
    base = type(model)
    parameters = inspect.signature(base.forward).parameters
    cache_argument = next((name for name in ("past_key_values", "cache_params") if name in parameters), None)
    if cache_argument is None:
        raise ModelError(f"{base.__name__} takes no cache")
    takes_keep = "logits_to_keep" in parameters
    takes_positions = "position_ids" in parameters
    device = next(model.parameters()).device
    if has_experts(model):
        # The default looks at which experts were routed to, which tensors without values cannot tell.
        model.set_experts_implementation("batched_mm")

    def call(model: Any, ids: Tensor, start: Tensor, mask: Tensor | None, cache: Any, keep: int) -> Any:
        places = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        more: dict[str, Any] = {"attention_mask": mask, cache_argument: cache}
        if takes_positions:
            more["position_ids"] = places if mask is None else (mask.cumsum(-1) - 1).clamp(min=0).gather(1, places)
        if takes_keep:
            more["logits_to_keep"] = keep
        return base.forward(model, input_ids=ids, use_cache=True, **more)

    cache = empty_cache(model.config, slots, batch, device, host=host_cache)
    state = StateCache(cache)
    with traceable():
        if host_cache:
            model.set_attn_implementation(HOST_ATTENTION)
        ids = torch.ones(batch, _FEW, dtype=torch.int64, device=device)
        start = torch.zeros(batch, dtype=torch.int64, device=device)
        mask = (
            torch.ones(batch, slots, dtype=torch.int64, device=device)
            if not (layer_kinds(model.config).is_recurrent or host_cache)
            else None
        )
        try:
            call(model, ids, start, mask, cache, 1)
        except PenstockError:
            raise
        except Exception as error:
            raise ModelError(
                f"{base.__name__} does not run with a cache of fixed length: {place(error)}{first_line(error)}"
            ) from error
    if not state.parts:
        raise ModelError(f"{base.__name__} keeps its state elsewhere than in a cache, where Penstock cannot see it")
    for name, tensor in state.tensors().items():
        model.register_buffer(name, torch.zeros_like(tensor), persistent=False)

    class Stateful(base):  # type: ignore[misc, valid-type]
        # How many rows of logits are wanted, counted from the last; 0: all.
        kept_logits = 1

        def forward(self, input_ids: Tensor, start: Tensor, mask: Tensor | None = None) -> Tensor:
            buffers = [getattr(self, part.name) for part in state.parts]
            cache = state.filled(buffers, start)
            out = call(self, input_ids, start, mask, cache, self.kept_logits)
            for buffer, now in zip(buffers, state.read(cache), strict=True):
                if now is not buffer:
                    buffer.copy_(now)
            logits: Tensor = out.logits[:, -self.kept_logits :] if self.kept_logits else out.logits
            return logits

    Stateful.__name__, Stateful.__qualname__ = base.__name__, base.__qualname__
    model.__class__ = Stateful
    model.eval().requires_grad_(False)
    return state
