"""Which budget holds: the value given at load, then the one baked at export, then an automatic one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.budget import format_bytes, mb_to_bytes, parse_bytes
from penstock.errors import BelowFloorError, BudgetError

Source = Literal["load", "baked", "automatic"]

AUTOMATIC = "auto"
_MIB = 2**20
_ORIGINS: dict[Source, str] = {"load": "given at load", "baked": "baked at export", "automatic": "automatic"}


@dataclass(frozen=True)
class BudgetChoice:
    budget_bytes: int
    asked_bytes: int
    source: Source

    @property
    def clamped(self) -> bool:
        return self.budget_bytes < self.asked_bytes

    @property
    def origin(self) -> str:
        """Where the value came from, for people."""
        return _ORIGINS[self.source]

    @property
    def clamp_sentence(self) -> str | None:
        """What to tell the user when less is taken than was granted; None when it is not so."""
        if not self.clamped:
            return None
        return (
            f"the budget of {format_bytes(self.asked_bytes)} ({self.origin}) is more than all weights take: "
            f"{format_bytes(self.budget_bytes)} of it are used"
        )


def choose_budget(
    *,
    budget: int | str | None,
    weight_offload_budget_mb: int | None,
    baked_bytes: int | None,
    automatic: Callable[[], int],
    floor_bytes: int,
    full_bytes: int,
) -> BudgetChoice:
    """`full_bytes` is what all weights take when every one is resident.

    `automatic` is called only when its answer is needed; it raises its own error below the floor, with its terms.
    """
    if budget is not None and weight_offload_budget_mb is not None:
        raise BudgetError(
            f"budget={budget!r} and weight_offload_budget_mb={weight_offload_budget_mb!r} were both given; pass one"
        )
    asked_bytes, source = _asked(budget, weight_offload_budget_mb, baked_bytes, automatic)
    if asked_bytes < floor_bytes:
        raise BelowFloorError(
            f"the budget of {format_bytes(asked_bytes)} ({_ORIGINS[source]}) is below the floor of this program: it "
            f"needs at least {floor_bytes} bytes; {_remedy(source, floor_bytes)}",
            budget_bytes=asked_bytes,
            floor_bytes=floor_bytes,
        )
    # Pages are whole: the floor of a small program may exceed the bytes of its weights.
    return BudgetChoice(min(asked_bytes, max(full_bytes, floor_bytes)), asked_bytes, source)


def _asked(
    budget: int | str | None, mb: int | None, baked_bytes: int | None, automatic: Callable[[], int]
) -> tuple[int, Source]:
    if mb is not None:
        return mb_to_bytes(mb), "load"
    if budget is not None and budget != AUTOMATIC:
        return parse_bytes(budget), "load"
    if budget is None and baked_bytes is not None:
        return baked_bytes, "baked"
    return automatic(), "automatic"


def _remedy(source: Source, floor_bytes: int) -> str:
    if source == "automatic":
        return "free device memory"
    return f"pass budget={floor_bytes} or weight_offload_budget_mb={-(-floor_bytes // _MIB)}, or more"
