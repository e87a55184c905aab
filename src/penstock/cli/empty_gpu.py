"""What an automatic budget would be on a GPU with nothing else on it, which need not be in this machine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BelowFloorError


@dataclass(frozen=True)
class GpuRow:
    """What is left for weights after all else that a run needs, and whether that is enough."""

    memory_bytes: int
    activation_bytes: int
    # KV caches, for example.
    state_bytes: int
    reserve_bytes: int
    left_bytes: int
    enough: bool


def empty_gpu(
    memory_bytes: int, *, activation_bytes: int, state_bytes: int, needed_bytes: int
) -> tuple[GpuRow, BelowFloorError | None]:
    """The budget as loading computes it, and the error by which loading refuses a GPU that leaves too little."""
    import torch

    from penstock.runtime.automatic_budget import AutomaticTerms, reserve_bytes
    from penstock.runtime.budget_choice import automatic_budget

    kept_bytes = reserve_bytes(torch.device("cuda"), memory_bytes)
    refusal: BelowFloorError | None = None
    try:
        left_bytes = automatic_budget(
            AutomaticTerms(memory_bytes, 0, activation_bytes, state_bytes, kept_bytes), needed_bytes
        )
    except BelowFloorError as error:
        left_bytes, refusal = error.budget_bytes, error
    return GpuRow(memory_bytes, activation_bytes, state_bytes, kept_bytes, left_bytes, refusal is None), refusal
