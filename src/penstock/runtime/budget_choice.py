"""Which budget holds. At load: the value given, or what a total leaves, then the one baked at export, then an automatic
one. Later: what is given to set_budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.budget import format_bytes, mb_to_bytes, parse_bytes
from penstock.errors import BelowFloorError, BudgetError

Source = Literal["load", "total", "change", "baked", "automatic"]

AUTOMATIC = "auto"
_MIB = 2**20
_ORIGINS: dict[Source, str] = {
    "load": "given at load",
    "total": "what device_memory leaves",
    "change": "given to set_budget",
    "baked": "baked at export",
    "automatic": "automatic",
}


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
    device_memory: int | str | None = None,
    granted: Callable[[], int] | None = None,
    baked_bytes: int | None,
    automatic: Callable[[], int],
    floor_bytes: int,
    full_bytes: int,
) -> BudgetChoice:
    """At load. `full_bytes` is what all weights take when every one is resident.

    `granted` is what `device_memory` leaves. It and `automatic` are called only when their answer is needed; they raise
    their own errors below the floor, with their terms.
    """
    given = [
        f"{name}={value!r}"
        for name, value in (
            ("budget", budget),
            ("weight_offload_budget_mb", weight_offload_budget_mb),
            ("device_memory", device_memory),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise BudgetError(f"{given[0]} and {given[1]} were both given; pass one")
    if device_memory is not None:
        assert granted is not None
        return _within(granted(), "total", floor_bytes, full_bytes)
    asked_bytes, source = _asked(budget, weight_offload_budget_mb, baked_bytes, automatic)
    return _within(asked_bytes, source, floor_bytes, full_bytes)


def choose_new_budget(
    budget: int | str, *, automatic: Callable[[], int], floor_bytes: int, full_bytes: int
) -> BudgetChoice:
    """For set_budget, where there is no default: None would mean one budget at load and another here."""
    if budget is None:
        raise BudgetError(
            f'set_budget(None) names no budget; pass a number of bytes, an amount such as "8GiB", or "{AUTOMATIC}" for '
            "what the device has free"
        )
    if budget == AUTOMATIC:
        return _within(automatic(), "automatic", floor_bytes, full_bytes)
    return _within(parse_bytes(budget), "change", floor_bytes, full_bytes)


def _within(asked_bytes: int, source: Source, floor_bytes: int, full_bytes: int) -> BudgetChoice:
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
    if source == "change":
        return f"pass {floor_bytes}, or more"
    return f"pass budget={floor_bytes} or weight_offload_budget_mb={-(-floor_bytes // _MIB)}, or more"
