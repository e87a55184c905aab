"""What the steps of a method read where it lies in host memory under a plan, and how long that takes them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.plan import MethodPlan
from penstock.schedule import Schedule


@dataclass
class InPlace:
    """What one step reads of its weights in host memory; what it gathers is not in it."""

    nbytes: int = 0
    # Of the weights that it reads there, or could.
    of_bytes: int = 0
    is_split: bool = False

    def step_s(self, usual_s: float, direct_s: float) -> float:
        if not self.nbytes:
            return usual_s
        # Both sides are read at once, and neither is read faster for it.
        return max(usual_s, self._read_s(direct_s)) if self.is_split else direct_s

    def link_s(self, usual_s: float, direct_s: float, link_bytes_per_s: float) -> float:
        """How long it keeps copies off the link. A step that waits for its reads has it to itself, though it reads
        slower than copies would: measured, both at once were no faster than one after the other."""
        if not self.nbytes:
            return 0.0
        read_s = self._read_s(direct_s)
        return read_s if read_s > usual_s else self.nbytes / link_bytes_per_s

    def _read_s(self, direct_s: float) -> float:
        return direct_s * self.nbytes / self.of_bytes


def in_place_by_step(method: MethodPlan, schedule: Schedule) -> list[InPlace]:
    found = [InPlace() for _ in schedule.steps]
    for access, placement in zip(schedule.accesses, method.placements, strict=True):
        if not access.gathered and (access.linear or placement.in_place_bytes):
            one = found[schedule.first_step[access.number]]
            one.nbytes += placement.in_place_bytes
            one.of_bytes += placement.nbytes
            one.is_split |= placement.is_split
    return found
