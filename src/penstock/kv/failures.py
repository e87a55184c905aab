"""What a KV cache refuses."""

from __future__ import annotations

from penstock.errors import BudgetError, PenstockError, RuntimeFailure


class KVCacheCapError(BudgetError):
    """The cap for the device side of a KV cache is malformed."""


class KVCacheFullError(RuntimeFailure):
    """A sequence would grow beyond what the cache holds; nothing was appended."""

    def __init__(self, message: str, *, sequence: int, length: int, capacity: int) -> None:
        super().__init__(message)
        self.sequence = sequence
        self.length = length
        self.capacity = capacity


class KVCacheInputError(PenstockError, ValueError):
    """A tensor handed to the cache does not fit it."""
