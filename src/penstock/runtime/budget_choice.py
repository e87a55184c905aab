"""Chooses the budget. At load: the given value or what a total leaves, else the budget baked in at export, else an
automatic one. Later: the value given to set_budget."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.budget import mb_to_bytes, parse_bytes
from penstock.errors import BelowFloorError, BudgetError
from penstock.native import core
from penstock.runtime.automatic_budget import AutomaticTerms
from penstock.runtime.failures import BELOW_FLOOR, last_exception

# In the order of PENSTOCK_BUDGET_... in include/penstock_core.h.
Source = Literal["load", "total", "change", "baked", "automatic"]
SOURCES: tuple[Source, ...] = get_args(Source)

AUTOMATIC = "auto"
# As in include/penstock_core.h.
_NONE, _AUTOMATIC = -1, -2
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True)
class BudgetChoice:
    budget_bytes: int
    asked_bytes: int
    source: Source

    @property
    def origin(self) -> int:
        """The core's number for `source`."""
        return SOURCES.index(self.source)

    @property
    def clamp_sentence(self) -> str:
        """What to tell the user if less is used than was granted; else empty."""
        made = _Budget(budget_bytes=self.budget_bytes, asked_bytes=self.asked_bytes, origin=self.origin)
        return str(core().penstock_clamp_sentence(ctypes.byref(made)).decode())


class _Budget(ctypes.Structure):
    """As in include/penstock_core.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "floor_bytes",
            "full_bytes",
            "given_bytes",
            "origin",
            "baked_bytes",
            "free_bytes",
            "held_bytes",
            "activation_bytes",
            "state_bytes",
            "reserve_bytes",
            "budget_bytes",
            "asked_bytes",
        )
    ]


def choose_budget(
    *,
    budget: int | str | None,
    weight_offload_budget_mb: int | None,
    granted: Callable[[], int] | None = None,
    baked_bytes: int | None,
    automatic: Callable[[], AutomaticTerms],
    floor_bytes: int,
    full_bytes: int,
) -> BudgetChoice:
    """At load. `full_bytes` is what all weights take when every one is resident.

    `granted` returns what `device_memory` leaves for weights, if that was given instead of a budget. Below the floor it
    raises its own error, with its terms. It and `automatic` are called only if their answer is needed.
    """
    if granted is not None:
        return _chosen(granted(), "total", None, automatic, floor_bytes, full_bytes)
    asked = asked_bytes(budget, weight_offload_budget_mb)
    return _chosen(asked, "load", baked_bytes, automatic, floor_bytes, full_bytes)


def choose_new_budget(
    budget: int | str, *, automatic: Callable[[], AutomaticTerms], floor_bytes: int, full_bytes: int
) -> BudgetChoice:
    """For set_budget, which has no default: None would mean one budget at load and another here."""
    if budget is None:
        raise BudgetError(
            f'set_budget(None) names no budget; pass a number of bytes, an amount such as "8GiB", or "{AUTOMATIC}" for '
            "what the device has free"
        )
    return _chosen(asked_bytes(budget), "change", None, automatic, floor_bytes, full_bytes)


def automatic_budget(terms: AutomaticTerms, floor_bytes: int) -> int:
    """What is left for weights; refused below the floor."""
    return _chosen(_AUTOMATIC, "load", None, lambda: terms, floor_bytes, _MOST_BYTES).asked_bytes


def asked_bytes(budget: int | str | None, weight_offload_budget_mb: int | None = None) -> int:
    """The budget as the core takes it, given in one of the two ways or not at all."""
    if weight_offload_budget_mb is not None:
        return mb_to_bytes(weight_offload_budget_mb)
    if budget is None:
        return _NONE
    return _AUTOMATIC if budget == AUTOMATIC else parse_bytes(budget)


def _chosen(
    given_bytes: int,
    source: Source,
    baked_bytes: int | None,
    automatic: Callable[[], AutomaticTerms],
    floor_bytes: int,
    full_bytes: int,
) -> BudgetChoice:
    """Asks the core, which chooses the budget for every kind of program."""
    asked = _Budget(
        floor_bytes=floor_bytes,
        full_bytes=full_bytes,
        given_bytes=min(given_bytes, _MOST_BYTES),
        origin=SOURCES.index(source),
        baked_bytes=_NONE if baked_bytes is None else baked_bytes,
    )
    origin = core().penstock_budget_origin(asked.given_bytes, asked.origin, asked.baked_bytes)
    if SOURCES[origin] == "automatic":
        terms = automatic()
        asked.free_bytes, asked.held_bytes = terms.free_bytes, terms.held_bytes
        asked.activation_bytes, asked.state_bytes = terms.activation_bytes, terms.state_bytes
        asked.reserve_bytes = terms.reserve_bytes
    if core().penstock_choose_budget(ctypes.byref(asked)):
        if core().penstock_failure() != BELOW_FLOOR:
            raise last_exception()
        text = core().penstock_failure_text().decode()
        raise BelowFloorError(text, budget_bytes=asked.asked_bytes, floor_bytes=floor_bytes)
    return BudgetChoice(asked.budget_bytes, asked.asked_bytes, SOURCES[asked.origin])
