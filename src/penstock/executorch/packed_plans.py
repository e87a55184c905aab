"""Plans for the packed weights of a .ptd, stored as an entry of that file for a process without Python.
csrc/payload.cpp reads the entry. No torch.

A plan for packed weights depends on the size of each of their blocks, so it can be made only when they are packed. It
names weights and accesses, so it is for one program. The entry is laid out like the payload of a .pte, without code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.executorch.description import PlanTable
from penstock.executorch.payload import record_seal, sealed_parts
from penstock.executorch.plan_table import make_plan_tables
from penstock.record import to_record
from penstock.runtime.records import packed_numbers
from penstock.schedule import Schedule
from penstock.schema import Signed
from penstock.weight import Weight
from penstock.weights.packed_reader import Blocks

PLANS_MAGIC = b"PNSTKPLN"


@dataclass(frozen=True)
class PackedPlans:
    program: str
    # Checksum of the packed weights as the core takes them: plans for other packed weights do not fit these.
    packed_seal: Signed
    plan_tables: tuple[PlanTable, ...]


def make_packed_plans(
    program: str,
    schedules: Sequence[Schedule],
    weights: Sequence[Weight],
    blocks: Mapping[str, Blocks],
    *,
    page_bytes: int,
    device: str,
) -> bytes:
    """`blocks`: those of the packed weights, with offsets counted from the beginning of each entry."""
    numbers = packed_numbers((number, 0, blocks[w.name]) for number, w in enumerate(weights) if w.name in blocks)
    begins = {name: one.begins_bytes for name, one in blocks.items()}
    tables = make_plan_tables(schedules, weights, page_bytes=page_bytes, device=device, begins=begins)
    record = PackedPlans(program, record_seal(bytes(numbers)), tuple(table.row for table in tables))
    plans = b"".join(plan.numbers for table in tables for plan in table.plans)
    return sealed_parts(PLANS_MAGIC, to_record(record), plans, b"")
