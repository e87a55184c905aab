"""Times that stand for all machines where none were measured: a plan must do well on each of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.plan.calibration import Calibration, Link
from penstock.plan.menu import Menu
from penstock.plan.tuning import NOMINAL_COPY_LATENCY_S, NOMINAL_LINK_BYTES_PER_S, NOMINAL_STEPS
from penstock.schedule import Access


def nominal(menu: Menu) -> list[Calibration]:
    """One for each kind of step; those that count more than once have so much slower a link and steps."""
    return [_calibration(menu, weight, part_of_link) for weight, part_of_link in NOMINAL_STEPS]


def _calibration(menu: Menu, weight: float, part_of_link: float) -> Calibration:
    link = Link(NOMINAL_LINK_BYTES_PER_S / weight, NOMINAL_COPY_LATENCY_S * weight)

    def is_read(access: Access) -> bool:
        """What only gathers in host memory reads next to nothing."""
        return not (access.gathered and menu.in_place(access))

    def is_in_place(access: Access) -> bool:
        return menu.split(access) or (menu.in_place(access) and not access.gathered)

    def by_step(counts: Callable[[Access], bool], least_s: float, s_per_byte: float) -> dict[str, tuple[float, ...]]:
        found: dict[str, tuple[float, ...]] = {}
        for schedule in menu.schedules:
            accesses = ([schedule.access_by_number[number] for number in step.accesses] for step in schedule.steps)
            read_bytes = (sum(menu.weights[one.weight].nbytes for one in read if counts(one)) for read in accesses)
            found[schedule.method] = tuple(least_s + nbytes * s_per_byte for nbytes in read_bytes)
        return found

    direct_step_s: dict[str, tuple[float, ...]] = {}
    if any(is_in_place(access) for schedule in menu.schedules for access in schedule.accesses):
        # Our own kernel reads each row once, and waits for the first of them as a copy does. How often any other reads
        # one nobody knows: once, at the best.
        direct_step_s = by_step(is_read, link.copy_latency_s, 1 / link.bytes_per_s)
    # Where steps take nothing decoding does not either: what goes over the link counts there, and nothing else.
    decoded_bytes_per_s = None if part_of_link else math.inf
    step_s = by_step(is_read, 0.0, part_of_link / link.bytes_per_s)
    return Calibration(link, step_s, direct_step_s, decoded_bytes_per_s, steps_alone=bool(menu.begins))
