"""What a refusal below the floor of mode="auto" adds: the modes that take less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.plan.modes import ModePlanner
from penstock.schedule import Schedule
from penstock.weight import Weight


def lower_modes(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int, can_split: bool
) -> dict[str, int]:
    """Floors of the modes that read weights in host memory, where they are below that of "auto"."""

    def floor_bytes(mode: str) -> int:
        return ModePlanner(schedules, weights, page_bytes=page_bytes, mode=mode, can_split=can_split).floor_bytes

    splits = can_split and any(access.linear for schedule in schedules for access in schedule.accesses)
    found = {mode: floor_bytes(mode) for mode in (("direct", "split") if splits else ("direct",))}
    auto_bytes = floor_bytes("auto")
    return {mode: nbytes for mode, nbytes in found.items() if nbytes < auto_bytes}


def lower_modes_text(found: Mapping[str, int]) -> str:
    """A sentence to append to the refusal; nothing where no mode takes less."""
    if not found:
        return ""
    listed = " and ".join(f'mode="{mode}" needs {nbytes} bytes' for mode, nbytes in found.items())
    return f'. That is for mode="auto"; {listed}, because kernels then read weights over the link'
