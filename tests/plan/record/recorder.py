"""Plans as figures: floors, bytes, copies, rings and simulated times over programs, pages, budgets and machines.

    python -m tests.plan.record.recorder          writes plans.json beside this file

plans.json was written by the planner before it was rebuilt around one menu of placements. A planner is judged by it, so
write it again only with a reason that the commit states. frozen_simulator.py is the simulator of that time: it judges
both. What is recorded of planning times depends on the machine and is compared with nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.plan.calibration import Calibration, Link
from penstock.plan.pages import CUDA_PAGE_BYTES, soft_page_bytes
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from tests.plan.record.frozen_simulator import simulate
from tests.plan.record.schedules import PROGRAMS, Program

PATH = Path(__file__).with_name("plans.json")
# Of the way from the floor to everything, in percent.
BUDGETS = (0, 2, 5, 10, 20, 30, 40, 50, 65, 80, 90, 100)
PAGES = ("cuda", "soft")
# What our users have: PCIe 3, 4 and 5 by 16, beside GPUs of 1 and 4 TB/s.
MACHINES = {f"{link}-{device}": (link * 1e9, device * 1e12) for link in (12, 25, 55) for device in (1, 4)}
COPY_LATENCY_S = 2.9e-6
# A kernel takes that long however little it reads.
LEAST_STEP_S = 5e-6


@dataclass(frozen=True)
class Row:
    program: str
    pages: str
    budget: int
    floor_bytes: int
    full_bytes: int
    budget_bytes: int
    # Of a plan that knows no times: one warm run of every method.
    bytes_streamed: int
    copies: int
    ring_bytes: int
    # By machine: that plan's time, and bytes and time of the plan made for the machine.
    usual_s: dict[str, float]
    calibrated_bytes: dict[str, int]
    calibrated_s: dict[str, float]
    planning_s: float
    calibrated_planning_s: float


def page_bytes(program: Program, pages: str) -> int:
    return CUDA_PAGE_BYTES if pages == "cuda" else soft_page_bytes(program.weight_bytes)


def step_s(program: Program, device_bytes_per_s: float) -> dict[str, tuple[float, ...]]:
    found = {}
    for schedule in program.schedules:
        gathered = {access.number for access in schedule.accesses if access.gathered}
        times = []
        for step in schedule.steps:
            names = {schedule.access_by_number[number].weight for number in step.accesses if number not in gathered}
            read_s = sum(program.weights[name].nbytes for name in names) / device_bytes_per_s
            times.append(max(LEAST_STEP_S, read_s * program.intensity[schedule.method]))
        found[schedule.method] = tuple(times)
    return found


def calibration(program: Program, machine: str) -> Calibration:
    link_bytes_per_s, device_bytes_per_s = MACHINES[machine]
    return Calibration(Link(link_bytes_per_s, COPY_LATENCY_S), step_s(program, device_bytes_per_s))


def simulated_s(plan: Plan, program: Program, known: Calibration) -> float:
    return sum(
        simulate(method, schedule, step_s=known.step_s[schedule.method], direct_step_s=known.step_s[schedule.method],
                 link=known.link).run_s
        for method, schedule in zip(plan.methods, program.schedules, strict=True)
    )  # fmt: skip


def streamed_bytes(plan: Plan) -> int:
    return sum(method.warm.bytes_streamed for method in plan.methods)


def planner(program: Program, pages: str) -> Planner:
    return Planner(
        program.schedules, program.weights, page_bytes=page_bytes(program, pages), placement="auto", can_split=False
    )


def budget_bytes(floor_bytes: int, full_bytes: int, budget: int) -> int:
    return floor_bytes + (full_bytes - floor_bytes) * budget // 100


def rows(
    name: str,
    pages: str,
    budgets: tuple[int, ...] = BUDGETS,
    machines: tuple[str, ...] = (*MACHINES,),
    recorded: Mapping[tuple[str, str, int], Row] | None = None,
) -> Iterator[Row]:
    """At the budgets of the record, where it is given: a lower floor must not move what is compared."""
    program = PROGRAMS[name]()
    known = {machine: calibration(program, machine) for machine in MACHINES}
    for budget in budgets:
        made = planner(program, pages)
        begun_s = time.perf_counter()
        floor_bytes, full_bytes = made.floor_bytes, made.full_bytes
        given = (
            budget_bytes(floor_bytes, full_bytes, budget)
            if recorded is None
            else recorded[name, pages, budget].budget_bytes
        )
        plan = made.plan(given)
        planned_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        timed = {machine: made.plan(given, known[machine]) for machine in machines}
        calibrated_s = (time.perf_counter() - begun_s) / max(1, len(machines))
        yield Row(
            name, pages, budget, floor_bytes, full_bytes, given,
            bytes_streamed=streamed_bytes(plan),
            copies=sum(method.warm.copies for method in plan.methods),
            ring_bytes=plan.ring_bytes,
            usual_s={machine: simulated_s(plan, program, known[machine]) for machine in MACHINES},
            calibrated_bytes={machine: streamed_bytes(one) for machine, one in timed.items()},
            calibrated_s={machine: simulated_s(one, program, known[machine]) for machine, one in timed.items()},
            planning_s=round(planned_s, 4),
            calibrated_planning_s=round(calibrated_s, 4),
        )  # fmt: skip


def read() -> dict[tuple[str, str, int], Row]:
    found = [Row(**fields) for fields in json.loads(PATH.read_text())]
    return {(row.program, row.pages, row.budget): row for row in found}


def _lines(job: tuple[str, str]) -> list[str]:
    return [json.dumps(asdict(row)) for row in rows(*job)]


def main() -> None:
    jobs = [(name, pages) for name in PROGRAMS for pages in PAGES]
    with ProcessPoolExecutor() as pool:
        lines = [line for found in pool.map(_lines, jobs) for line in found]
    PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
