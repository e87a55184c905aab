"""Where a plan has every weight, as `penstock plan` says it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.cli.subject import Subject
from penstock.plan.plan import Plan

# "in place": read where it lies in host memory, as a whole or only rows of it. "split": the same but for a head.
Placing = Literal["resident", "head+tail", "streamed", "in place", "split"]


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
    tails: dict[str, int] = {}
    held: set[str] = set()
    heads: dict[str, int] = {}
    for method in plan.methods:
        for placement in method.placements:
            if placement.head_bytes is not None:
                heads[placement.weight] = placement.head_bytes
            elif not placement.is_direct:
                held.add(placement.weight)
        for stay in method.stays:
            tails[stay.weight] = max(tails.get(stay.weight, 0), stay.nbytes)

    def row(name: str, nbytes: int) -> PlacementRow:
        head, tail = heads.get(name, 0), tails.get(name, 0)
        if name in held:
            placing: Placing = "resident" if tail == 0 else "streamed" if tail == nbytes else "head+tail"
            return PlacementRow(name, nbytes, placing, nbytes - tail, tail, 0)
        return PlacementRow(name, nbytes, "split" if head else "in place", head, 0, nbytes - head)

    return tuple(row(weight.name, weight.nbytes) for weight in subject.program.weights)
