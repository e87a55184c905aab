"""What transformers' generation takes for a KV cache: a count of the tokens that the program's state holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from penstock.errors import InputError, ModelError

if TYPE_CHECKING:
    from penstock.models.engine import Engine


class TokenCache(Cache):
    """Keys and values are state of the program, which has room for one cache at a time. A new cache takes it over."""

    def __init__(self, engine: Engine) -> None:
        # Without layers, or transformers would build masks for them.
        super().__init__(layers=[])
        self._engine = engine
        self.length = 0
        # The mask of the tokens so far, [rows, length]: 0 for padding. None: there is no padding.
        self.mask: Tensor | None = None
        self.rows: int | None = None
        engine.begin(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._engine.methods.cache_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    @property
    def is_croppable(self) -> bool:
        return not self._engine.is_recurrent

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    def activate_past_recording(self) -> None:
        """Nothing to do if the cache can be cropped: a crop needs nothing, as slots beyond the length are masked."""
        if not self.is_croppable:
            raise ModelError(
                f"{self._engine.name} has recurrent state, and what a token has done to it cannot be taken back: no "
                "prompt lookup, no assistant"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; their number is negative, as in transformers."""
        if not -self.length <= tokens_to_remove <= 0:
            raise InputError(f"crop takes from {-self.length} (all tokens) to 0, got {tokens_to_remove}")
        if tokens_to_remove and not self.is_croppable:
            raise ModelError(f"{self._engine.name} has recurrent state: its cache cannot be cropped")
        self.length += tokens_to_remove
        if self.mask is not None:
            self.mask = self.mask[:, : self.length]

    def reset(self) -> None:
        self.length, self.mask, self.rows = 0, None, None
        self._engine.begin(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._engine.reorder(self, beam_idx)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, beam_idx.to(self.mask.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ModelError("a cache cannot be repeated; give generate() its inputs repeated instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ModelError("rows of a cache cannot be left out")

    def __repr__(self) -> str:
        return f"TokenCache({self.length} of {self.get_max_length()} tokens)"

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCache:
        raise ModelError("a cache cannot be copied: its keys and values are the program's state, which is there once")

    def extended(self, attention_mask: Tensor | None, rows: int, count: int) -> Tensor | None:
        """The mask with `count` more tokens in `rows` rows, as transformers gives it, checked against what is known."""
        if self.rows is not None and rows != self.rows:
            raise InputError(f"{rows} rows of tokens for a cache of {self.rows}")
        wanted = self.length + count
        if attention_mask is None:
            if self.mask is None:
                return None
            return torch.cat([self.mask, self.mask.new_ones(rows, count)], 1)
        if attention_mask.dim() != 2 or attention_mask.shape[0] != rows:
            raise InputError(f"attention_mask is {list(attention_mask.shape)}, needs {rows} rows and two dimensions")
        if attention_mask.shape[1] == count and self.length:
            # The mask of the new tokens only.
            before = self.mask if self.mask is not None else attention_mask.new_ones(rows, self.length)
            attention_mask = torch.cat([before, attention_mask], 1)
        if attention_mask.shape[1] != wanted:
            raise InputError(f"attention_mask has {attention_mask.shape[1]} columns for {wanted} tokens")
        mask = (attention_mask != 0).to(device="cpu", dtype=torch.int64)
        known = self.mask if self.mask is not None else torch.ones(rows, self.length, dtype=torch.int64)
        if not torch.equal(mask[:, : self.length], known):
            raise InputError("attention_mask masks other tokens than it did when they were run")
        return None if bool(mask.all()) else mask
