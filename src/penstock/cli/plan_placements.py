"""Where a plan has every weight, as `penstock plan` says it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.cli.subject import Subject
from penstock.plan.plan import Plan

# "in place": read where it lies in host memory, as a whole or only rows of it. "split": the same but for a prefix.
Placing = Literal["resident", "prefix+suffix", "streamed", "in place", "split"]


@dataclass(frozen=True)
class PlacementRow:
    weight: str
    nbytes: int
    placing: Placing
    # Of the weight: what stays on the device, what comes anew, and what lies in host memory alone and is read there.
    resident_bytes: int
    streamed_bytes: int
    in_place_bytes: int


def placements(plan: Plan, subject: Subject) -> tuple[PlacementRow, ...]:
    """Of every weight that is read, in the order of the weights file."""
    suffixes: dict[str, int] = {}
    held: set[str] = set()
    prefixes: dict[str, int] = {}
    for method in plan.methods:
        for placement in method.placements:
            if placement.prefix_bytes is not None:
                prefixes[placement.weight] = placement.prefix_bytes
            elif not placement.is_direct:
                held.add(placement.weight)
        for stay in method.stays:
            suffixes[stay.weight] = max(suffixes.get(stay.weight, 0), stay.nbytes)

    def row(name: str, nbytes: int) -> PlacementRow:
        prefix, suffix = prefixes.get(name, 0), suffixes.get(name, 0)
        if name in held:
            placing: Placing = "resident" if suffix == 0 else "streamed" if suffix == nbytes else "prefix+suffix"
            return PlacementRow(name, nbytes, placing, nbytes - suffix, suffix, 0)
        return PlacementRow(name, nbytes, "split" if prefix else "in place", prefix, 0, nbytes - prefix)

    return tuple(row(weight.name, weight.nbytes) for weight in subject.program.weights)
