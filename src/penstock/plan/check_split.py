"""The part of the check that looks at split weights: their prefixes, and who may read them."""

from __future__ import annotations

from penstock.errors import PlanError
from penstock.plan.check_memory import Filled, Layout, resident_matches
from penstock.plan.plan import SPLIT_ROWS, Placement, Plan
from penstock.schedule import Access
from penstock.weight import Weight


def check_prefixes(plan: Plan) -> None:
    """All accesses of a weight have the same prefix: a second would take memory that another weight could have."""
    prefixes: dict[str, Placement] = {}
    for method in plan.methods:
        for placed in method.placements:
            if placed.is_split:
                first = prefixes.setdefault(placed.weight, placed)
                if (first.range_index, first.prefix_bytes) != (placed.range_index, placed.prefix_bytes):
                    raise PlanError(
                        f"method {method.method!r}, access {placed.number}: the prefix of {placed.weight!r} is "
                        f"{placed.prefix_bytes} bytes in range {placed.range_index}; another access has "
                        f"{first.prefix_bytes} bytes in range {first.range_index}"
                    )


def check_split(
    layout: Layout, access: Access, placed: Placement, prefix_bytes: int, weight: Weight, filled: Filled, where: str
) -> None:
    """The kernel reads the prefix on the device and goes on in host memory, at a row of its grain."""
    what = f"{where}, access {access.number}: {weight.name!r} is split, but"
    if not access.linear or access.pinned:
        raise PlanError(f"{what} {'pinned' if access.pinned else 'not read as a linear weight is'}")
    if len(weight.shape) != 2 or weight.dim_order != (0, 1):
        raise PlanError(f"{what} has shape {weight.shape} in the order {weight.dim_order}; needs rows, one by one")
    if (
        type(prefix_bytes) is not int
        or not 0 < prefix_bytes < weight.nbytes
        or prefix_bytes * weight.shape[0] % (weight.nbytes * SPLIT_ROWS)
    ):
        raise PlanError(
            f"{what} its prefix has {prefix_bytes} of {weight.nbytes} bytes; needs some of its {weight.shape[0]} rows, "
            f"in multiples of {SPLIT_ROWS}"
        )
    if placed.stay is not None or not 0 <= placed.range_index < layout.range_count or placed.range_offset_bytes:
        raise PlanError(f"{what} is placed as {placed}; needs a range that begins with its prefix, and no stay")
    pages, spans = layout.stretch(placed.range_index, 0, prefix_bytes)
    # Copies go only to ring blocks and fills do not overlap, which is checked for all of them. So what is filled in
    # another block stays.
    if pages:
        raise PlanError(f"{what} its prefix lies in ring block {pages[0][0]}")
    for block, offset, length, ahead in spans:
        if not resident_matches(filled, block, offset, length, weight.name, ahead):
            raise PlanError(f"{what} its prefix is not filled at byte {ahead}")
