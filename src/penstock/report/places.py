"""Where a plan puts every weight, for reports and for `penstock plan`. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.plan.plan import Plan
from penstock.report.data import PlacementKind, WeightResidency
from penstock.weight import Weight


def places(plan: Plan, weights: Iterable[Weight], methods: Iterable[str]) -> tuple[WeightResidency, ...]:
    """In the order of `weights`. Streamed bytes are those that one run of each of the methods copies."""
    resident = Counter[str]()
    for piece in plan.fills:
        resident[piece.weight] += piece.nbytes
    for bank in plan.banks:
        resident.update({member.weight: bank.slots * member.row_bytes for member in bank.members})
    copied = Counter[str]()
    for method in methods:
        for copy in plan.method(method).copies:
            copied[copy.piece.weight] += copy.piece.nbytes
    staying = {stay.weight for method in plan.methods for stay in method.stays}
    in_slots = {member.weight for bank in plan.banks for member in bank.members}
    split = frozenset(plan.split_weights)

    def place(weight: Weight) -> WeightResidency:
        name, resident_bytes = weight.name, resident[weight.name]
        kind: PlacementKind
        if name in staying:
            kind = "prefix+suffix" if resident_bytes else "streamed"
        elif name in in_slots:
            kind = "slots"
        elif name in split:
            kind = "split"
        else:
            # Neither filled nor copied, and yet it has bytes: kernels read them in host memory.
            kind = "resident" if resident_bytes or not weight.nbytes else "in place"
        in_place_bytes = weight.nbytes - resident_bytes if kind in ("in place", "split", "slots") else 0
        return WeightResidency.of(weight, kind, resident_bytes, copied[name], in_place_bytes)

    return tuple(map(place, weights))
