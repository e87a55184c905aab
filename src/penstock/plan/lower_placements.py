"""What a refusal below the floor of placement="auto" adds: the placements that take less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.plan.placements import PlacementPlanner
from penstock.schedule import Schedule
from penstock.weight import Weight


def lower_placements(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], *, page_bytes: int, can_split: bool
) -> dict[str, int]:
    """Floors of the placements that read weights in host memory, where they are below that of "auto"."""

    def floor_bytes(placement: str) -> int:
        return PlacementPlanner(
            schedules, weights, page_bytes=page_bytes, placement=placement, can_split=can_split
        ).floor_bytes

    splits = can_split and any(access.linear for schedule in schedules for access in schedule.accesses)
    found = {placement: floor_bytes(placement) for placement in (("in-place", "split") if splits else ("in-place",))}
    auto_bytes = floor_bytes("auto")
    return {placement: nbytes for placement, nbytes in found.items() if nbytes < auto_bytes}


def lower_placements_text(found: Mapping[str, int]) -> str:
    """A sentence to append to the refusal; nothing where no placement takes less."""
    if not found:
        return ""
    listed = " and ".join(f'placement="{placement}" needs {nbytes} bytes' for placement, nbytes in found.items())
    return f'. That is for placement="auto"; {listed}, because kernels then read weights over the link'
