"""Times that stand for all machines where none were measured: a plan must do well on each of them."""

from __future__ import annotations

from penstock.plan.calibration import Calibration
from penstock.plan.demand import Demand
from penstock.plan.link import Link
from penstock.plan.tuning import NOMINAL_COPY_LATENCY_S, NOMINAL_LINK_BYTES_PER_S, NOMINAL_STEPS


def nominal(demand: Demand) -> list[Calibration]:
    """One for each kind of step; those that count more than once have so much slower a link and steps."""
    return [_calibration(demand, weight, part_of_link) for weight, part_of_link in NOMINAL_STEPS]


def _calibration(demand: Demand, weight: float, part_of_link: float) -> Calibration:
    link = Link(NOMINAL_LINK_BYTES_PER_S / weight, NOMINAL_COPY_LATENCY_S * weight)
    step_s = {
        schedule.method: tuple(
            sum(demand.nbytes.get(schedule.access_by_number[number].weight, 0) for number in step.accesses)
            * part_of_link
            / NOMINAL_LINK_BYTES_PER_S
            * weight
            for step in schedule.steps
        )
        for schedule in demand.schedules
    }
    return Calibration(link, step_s)
