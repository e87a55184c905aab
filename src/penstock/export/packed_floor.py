"""Checks a budget baked into a program with packed weights: whether it suffices is known only once they are packed."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.budget import format_bytes
from penstock.errors import BelowFloorError
from penstock.plan.planner import Planner
from penstock.program import Program
from penstock.weights import Entry, WeightsIndex
from penstock.weights.packing import read_blocks


def check_baked_budget(program: Program, index: WeightsIndex, entries: Mapping[str, Entry], page_bytes: int) -> None:
    """Refuse here what load would refuse: the user at load may be somebody else. `entries`: by weight."""
    if program.budget_bytes is None:
        return
    packed = {weight.name: entries[weight.name] for weight in program.weights if entries[weight.name].packing}
    begins = {name: read_blocks(index, entry).begins_bytes for name, entry in packed.items()}
    schedules, weights = [method.schedule for method in program.methods], {each.name: each for each in program.weights}
    floor_bytes = Planner(schedules, weights, page_bytes=page_bytes, placement="auto", begins=begins).floor_bytes
    if program.budget_bytes < floor_bytes:
        raise BelowFloorError(
            f"weight_offload_budget is {format_bytes(program.budget_bytes)}, below the floor of this program with its "
            f"weights packed: it needs at least {floor_bytes} bytes (pages of {page_bytes} bytes). Bake a larger one, "
            "or leave pack out",
            budget_bytes=program.budget_bytes,
            floor_bytes=floor_bytes,
        )
