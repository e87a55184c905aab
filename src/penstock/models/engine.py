"""Runs tokens through the methods of a language model's program, and knows what its state holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import InputError, ModelError, StateInvalidError
from penstock.models.methods import Methods, pieces
from penstock.models.token_cache import TokenCache
from penstock.runtime.module import Module
from penstock.store.store import Store


@dataclass(frozen=True)
class _Mask:
    """A mask as the program takes it, and what it was made from: all columns up to the last that has padding."""

    padding: Tensor | None
    input: Tensor

    def is_of(self, padding: Tensor | None) -> bool:
        if padding is None or self.padding is None:
            return padding is self.padding
        return torch.equal(padding, self.padding)


class Engine:
    def __init__(
        self, module: Module, methods: Methods, *, name: str, is_recurrent: bool, has_experts: bool, store: Store
    ) -> None:
        self.module = module
        self.methods = methods
        self.name = name
        self.is_recurrent = is_recurrent
        self.has_experts = has_experts
        # Kept open as long as its files are used.
        self._store = store
        self._holder: weakref.ref[TokenCache] | None = None
        self._mask: _Mask | None = None

    def close(self) -> None:
        self.module.close()
        self._store.close()

    def begin(self, cache: TokenCache) -> None:
        """Empties the state and hands it to this cache."""
        self.module.reset_state()
        self._holder = weakref.ref(cache)

    def require_room(self, cache: TokenCache | None, tokens: int) -> None:
        """Checked before anything runs, so that nothing is lost."""
        length = 0 if cache is None else cache.length
        if length + tokens > self.methods.cache_length:
            raise InputError(
                f"{length + tokens} tokens do not fit into the cache of {self.methods.cache_length} "
                f"({length} are in it, {tokens} more were given); load the model with a larger cache_length"
            )

    def run(
        self,
        cache: TokenCache,
        ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        wanted_logits: int,
    ) -> Tensor:
        """Runs ids [rows, count] after what the cache holds. Returns the logits of the last `wanted_logits` tokens."""
        self._require_holder(cache)
        rows, count = ids.shape
        if not 1 <= rows <= self.methods.batch:
            raise InputError(f"{rows} rows of tokens; the program was compiled for up to {self.methods.batch} (batch=)")
        if count < 1:
            raise InputError("there are no tokens to run")
        self.require_room(cache, count)
        mask = cache.extended(attention_mask, rows, count)
        if mask is not None and not self.methods.takes_padding:
            why = (
                "keeps its KV cache on both sides of the link (host_cache=True), where attention knows of no padding"
                if self.methods.host_cache
                else "has layers that run over padding (convolutions or recurrences)"
            )
            raise ModelError(f"{self.name} {why}: give rows of equal length")
        if position_ids is not None:
            _check_positions(position_ids, mask, cache.length, count)
        spread = self._spread(ids.to(torch.int64))
        more = [self._mask_input(mask, rows)] if self.methods.takes_padding else []
        found: list[Tensor] = []
        try:
            for piece in pieces(self.methods, count, wanted_logits):
                tokens = spread[:, piece.begin : piece.end]
                found.append(self._run_piece(tokens, cache.length + piece.begin, piece.method, more))
        except BaseException:
            # Attention writes the same keys again when it goes on. A recurrence may have advanced by an unknown number
            # of tokens.
            if self.is_recurrent:
                self._holder = None
            raise
        cache.length += count
        cache.mask, cache.rows = mask, rows
        return torch.cat(found, 1)[:rows, -wanted_logits:]

    def _run_piece(self, ids: Tensor, start: int, method: str, more: list[Tensor]) -> Tensor:
        count = ids.shape[1]
        starts = torch.full((self.methods.batch,), start, dtype=torch.int64, device=self.module.device)
        if method == "decode" and count < self.methods.decode_tokens:
            # Pad at the end: no token sees the padding, and the next tokens take its slots.
            ids = torch.cat([ids, ids[:, -1:].expand(-1, self.methods.decode_tokens - count)], 1)
        try:
            logits: Tensor = self.module.run_method(method, ids.contiguous(), starts, *more)
        except StateInvalidError as error:
            raise StateInvalidError(
                f"the KV cache may be half written; begin a new one with model.new_cache(): {error}"
            ) from error
        return logits[:, :count] if method == "decode" else logits

    def _spread(self, ids: Tensor) -> Tensor:
        """The ids on the device, with the batch's number of rows: missing rows repeat the first one."""
        ids = ids.to(self.module.device)
        missing = self.methods.batch - ids.shape[0]
        return torch.cat([ids, ids[:1].expand(missing, -1)]) if missing else ids

    def _mask_input(self, mask: Tensor | None, rows: int) -> Tensor:
        """The mask [batch, slots]. It is long and rarely changes: tokens that are no padding are already ones in it."""
        padding = None if mask is None else mask[:, : int((mask == 0).any(0).nonzero().max()) + 1]
        if self._mask is None or not self._mask.is_of(padding):
            whole = torch.ones(self.methods.batch, self.methods.slots, dtype=torch.int64)
            if padding is not None:
                whole[:rows, : padding.shape[1]] = padding
                whole[rows:, : padding.shape[1]] = padding[:1]
            self._mask = _Mask(padding, whole.to(self.module.device))
        return self._mask.input

    def reorder(self, cache: TokenCache, beams: Tensor) -> None:
        self._require_holder(cache)
        rows = torch.arange(self.methods.batch)
        rows[: beams.numel()] = beams.cpu()
        if not torch.equal(rows, torch.arange(self.methods.batch)):
            self.module.select_state_rows(rows)

    def _require_holder(self, cache: TokenCache) -> None:
        if self._holder is None or self._holder() is not cache:
            raise InputError(
                "this cache's tokens are gone: a newer cache of the same model took its place, or a run over recurrent "
                "state was given up; begin a new one with model.new_cache()"
            )


def _check_positions(position_ids: Tensor, mask: Tensor | None, before: int, count: int) -> None:
    """Positions follow from the mask. Others would be ignored, so they are refused."""
    known = torch.ones(1, before + count, dtype=torch.int64) if mask is None else mask
    wanted = (known.cumsum(1) - 1)[:, before:]
    given = position_ids.cpu()[..., -count:]
    if given.shape[-1] != count or bool(((given != wanted) & (known[:, before:] != 0)).any()):
        raise ModelError("position_ids do not match attention_mask, from which they follow; leave them out")
