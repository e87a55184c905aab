"""Where weights lie, against what each access of a plan finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.planner import Planner
from penstock.report.places import places
from tests.plan.expert_programs import PAGE, ExpertProgram, expert_programs, schedule_of, stacked


@settings(max_examples=30)
@given(expert_programs(), st.floats(0, 1), st.sampled_from(["auto", "stream"]))
def test_every_byte_is_accounted_for(program: ExpertProgram, part: float, placement: str) -> None:
    planner = Planner(program.schedules, program.weights, page_bytes=PAGE, placement=placement)
    plan = planner.plan(planner.floor_bytes + int((planner.full_bytes - planner.floor_bytes) * part))
    methods = [method.method for method in plan.methods]
    read = [weight for weight in program.weights.values() if weight.name in program.names]
    rows = places(plan, read, methods)
    assert [(row.name, row.dtype, row.shape) for row in rows] == [(one.name, one.dtype, one.shape) for one in read]
    assert sum(row.resident_bytes for row in rows) <= plan.resident_bytes
    assert sum(row.streamed_bytes for row in rows) == sum(method.warm.bytes_streamed for method in plan.methods)
    for row in rows:
        found = [one for method in plan.methods for one in method.placements if one.weight == row.name]
        staying_bytes = max(
            (one.nbytes for each in plan.methods for one in each.stays if one.weight == row.name), default=0
        )
        assert row.resident_bytes + row.in_place_bytes + staying_bytes == row.nbytes
        if any(one.has_slots for one in found):
            assert row.kind == "slots" and 0 < row.resident_bytes < row.nbytes
        elif all(one.is_direct for one in found):
            assert (row.kind, row.in_place_bytes) == ("in place", row.nbytes)
        elif any(one.stay is not None for one in found):
            assert row.kind == ("prefix+suffix" if row.resident_bytes else "streamed")
        else:
            assert (row.kind, row.resident_bytes) == ("resident", row.nbytes)


def test_slots_are_resident_and_what_has_none_is_in_host_memory() -> None:
    experts = stacked("experts", 16, PAGE)
    planner = Planner(
        [schedule_of("forward", [("experts", 0)])], {"experts": experts}, page_bytes=PAGE, placement="auto"
    )
    plan = planner.plan(planner.full_bytes // 2)
    (bank,), (row,) = plan.banks, places(plan, [experts], ["forward"])
    assert 1 < bank.slots < 16
    assert (row.kind, row.resident_bytes, row.streamed_bytes) == ("slots", bank.slots * PAGE, 0)
    assert row.in_place_bytes == (16 - bank.slots) * PAGE
