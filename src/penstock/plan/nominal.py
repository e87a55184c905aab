"""Times where none were measured: of machines that stand for all (a plan must do well on each), and of reads over the
link."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from penstock.plan.calibration import Calibration, Link
from penstock.plan.menu import Menu
from penstock.plan.tuning import FAR_READ_COST, NOMINAL_COPY_LATENCY_S, NOMINAL_LINK_BYTES_PER_S, NOMINAL_STEPS
from penstock.schedule import Access


def nominal(menu: Menu) -> list[Calibration]:
    """One calibration for each kind of step. Its weight scales the times of its link and steps."""
    return [_calibration(menu, weight, part_of_link) for weight, part_of_link in NOMINAL_STEPS]


def with_times_in_place(menu: Menu, known: Calibration) -> Calibration:
    """Adds times of reads in place where they were not measured. Our own kernel reads each row once, and waits for the
    first as a copy does; other kernels do so at best."""
    if known.direct_step_s or not menu.reads_in_place:
        return known
    s_per_byte = FAR_READ_COST / known.link.bytes_per_s
    return replace(known, direct_step_s=_by_step(menu, known.step_s, known.link.copy_latency_s, s_per_byte))


def _calibration(menu: Menu, weight: float, part_of_link: float) -> Calibration:
    link = Link(NOMINAL_LINK_BYTES_PER_S / weight, NOMINAL_COPY_LATENCY_S * weight)
    step_s = _by_step(menu, [schedule.method for schedule in menu.schedules], 0.0, part_of_link / link.bytes_per_s)
    # Where steps take no time, decoding takes none either: only what goes over the link counts there.
    decoded_bytes_per_s = None if part_of_link else math.inf
    known = Calibration(link, step_s, {}, decoded_bytes_per_s, steps_alone=bool(menu.begins))
    return with_times_in_place(menu, known)


def _by_step(menu: Menu, methods: Collection[str], least_s: float, s_per_byte: float) -> dict[str, tuple[float, ...]]:
    """Times by what each step reads. What it only gathers in host memory is next to nothing."""

    def read_bytes(access: Access) -> int:
        return 0 if access.gathered and menu.in_place(access) else menu.weights[access.weight].nbytes

    return {
        schedule.method: tuple(
            least_s + s_per_byte * sum(read_bytes(schedule.access_by_number[number]) for number in step.accesses)
            for step in schedule.steps
        )
        for schedule in menu.schedules
        if schedule.method in methods
    }
