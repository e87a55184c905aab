"""The part of the check that looks at experts in slots: their rooms, and who decides what lies there. No code of the
planner's.

After an access has chosen, every weight of the bank must be read, by the same index, before the next access chooses.
Then an expert that the table has in a slot is in the slots of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.errors import PlanError
from penstock.plan.check_memory import whole
from penstock.plan.plan import NO_SLOTS, Bank, MethodPlan, Placement, Plan
from penstock.schedule import Access, Schedule
from penstock.weight import MOST_EXPERTS, Weight, are_experts

_ALIGNMENT_BYTES = 256


def check_experts(
    plan: Plan, schedules: Sequence[Schedule], weights: Mapping[str, Weight], packed: Mapping[str, Sequence[int]]
) -> None:
    rooms = [room for index, bank in enumerate(plan.banks) for room in _rooms(plan, bank, weights, f"bank {index}")]
    for (one, _, end), (other, begin, _) in pairwise(sorted(rooms)):
        if one == other and end > begin:
            raise PlanError(f"two rooms of experts overlap in range {one}")
    _check_alone(plan, {range_index for range_index, _, _ in rooms})
    for schedule, method in zip(schedules, plan.methods, strict=True):
        for access, placed in zip(schedule.accesses, method.placements, strict=True):
            _check_placement(plan, access, placed, weights[placed.weight], f"method {method.method!r}")
            if placed.bank is not None and placed.weight in packed:
                raise PlanError(f"method {method.method!r} reads experts of {placed.weight!r}, which is packed")
        _check_choices(plan, schedule, method)


def _rooms(plan: Plan, bank: Bank, weights: Mapping[str, Weight], what: str) -> list[tuple[int, int, int]]:
    whole(bank.experts, 1, MOST_EXPERTS + 1, f"{what}: the number of experts")
    whole(bank.slots, 1, bank.experts + 1, f"{what}: the number of slots")
    if not bank.members or len({member.weight for member in bank.members}) != len(bank.members):
        raise PlanError(f"{what} has no weight, or one twice")
    # Counts, five numbers for each expert and one for each slot, and a bit of each expert for each of 256 calls.
    table_bytes = 64 + 16 + 4 * (5 * bank.experts + bank.slots) + 256 * 4 * ((bank.experts + 31) // 32)
    found = [_room(plan, bank.range_index, bank.range_offset_bytes, table_bytes, f"{what}: its table")]
    for member in bank.members:
        weight = weights.get(member.weight)
        if weight is None or not are_experts(weight) or weight.shape[0] != bank.experts:
            raise PlanError(f"{what}: {member.weight!r} is no weight of {bank.experts} experts")
        if member.row_bytes != weight.row_bytes:
            raise PlanError(
                f"{what}: an expert of {member.weight!r} has {weight.row_bytes} bytes, not {member.row_bytes!r}"
            )
        nbytes = bank.slots * member.row_bytes
        where = f"{what}: the slots of {member.weight!r}"
        found.append(_room(plan, member.range_index, member.range_offset_bytes, nbytes, where))
    return found


def _room(plan: Plan, range_index: int, offset_bytes: int, nbytes: int, what: str) -> tuple[int, int, int]:
    whole(range_index, 0, len(plan.ranges), f"{what}: the range")
    whole(offset_bytes, 0, plan.ranges[range_index].nbytes - nbytes + 1, f"{what}: the offset")
    if offset_bytes % _ALIGNMENT_BYTES:
        raise PlanError(f"{what} begin at byte {offset_bytes}; needs a multiple of {_ALIGNMENT_BYTES}")
    return range_index, offset_bytes, offset_bytes + nbytes


def _check_alone(plan: Plan, ranges: set[int]) -> None:
    """Nothing else has an address there: neither through another range, nor in these."""
    blocks = [block for index in ranges for block in plan.ranges[index].blocks]
    if any(plan.blocks[block].ring for block in blocks):
        raise PlanError("experts have slots in a block of the ring")
    others = {block for index, one in enumerate(plan.ranges) if index not in ranges for block in one.blocks}
    if len(set(blocks)) != len(blocks) or others & set(blocks):
        raise PlanError("a block of experts is mapped into two ranges")
    used = {piece.range_index for piece in plan.fills} | {store.piece.range_index for store in plan.stores}
    if plan.slots is not None:
        used.add(plan.slots.range_index)
    for method in plan.methods:
        used |= {copy.piece.range_index for copy in method.copies}
        used |= {placement.range_index for placement in method.placements if placement.nbytes}
    if ranges & used:
        raise PlanError(f"range {min(ranges & used)} is for experts, and others lie there")


def _check_placement(plan: Plan, access: Access, placed: Placement, weight: Weight, where: str) -> None:
    what = f"{where}, access {access.number} of {access.weight!r}"
    if type(placed.chooses) is not bool:
        raise PlanError(f"{what}: whether it chooses is {placed.chooses!r}")
    if placed.bank is None:
        if placed.chooses or (placed.is_direct and access.routing is not None):
            raise PlanError(f"{what} reads experts in host memory, and its placement does not say so")
        return
    if access.routing is None or not placed.is_direct or not are_experts(weight):
        raise PlanError(f"{what} has slots, and does not take experts in host memory by index")
    if placed.bank == NO_SLOTS:
        if placed.chooses:
            raise PlanError(f"{what} chooses for slots that there are none of")
        return
    whole(placed.bank, 0, len(plan.banks), f"{what}: its bank")
    if placed.weight not in {member.weight for member in plan.banks[placed.bank].members}:
        raise PlanError(f"{what} is given to bank {placed.bank}, which has other weights")


def _check_choices(plan: Plan, schedule: Schedule, method: MethodPlan) -> None:
    where = f"method {schedule.method!r}"
    # By bank: the index that chose, and the weights that must still be read by it.
    routing: dict[int, int | None] = {}
    due: dict[int, set[str]] = {}
    for access, placed in zip(schedule.accesses, method.placements, strict=True):
        if placed.bank is None or placed.bank == NO_SLOTS:
            continue
        what = f"{where}, access {access.number} of {access.weight!r}"
        if placed.chooses:
            if due.get(placed.bank):
                raise PlanError(f"{what} chooses before {min(due[placed.bank])!r} was read")
            routing[placed.bank] = access.routing
            due[placed.bank] = {member.weight for member in plan.banks[placed.bank].members}
        if access.weight not in due.get(placed.bank, set()) or routing[placed.bank] != access.routing:
            raise PlanError(f"{what} reads slots that were not chosen for it")
        due[placed.bank].remove(access.weight)
    for bank, names in due.items():
        if names:
            raise PlanError(f"{where}: bank {bank} was chosen for, and {min(names)!r} was not read")
