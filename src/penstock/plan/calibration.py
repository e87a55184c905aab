"""What a planner may know of time: the link, and how long each step takes with its weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.plan.link import Link


@dataclass(frozen=True)
class Calibration:
    link: Link
    # By method, one number per step: from the end of the step before it to its own.
    step_s: Mapping[str, tuple[float, ...]]
    # The same where a step reads its weights in host memory. Empty: not measured, and not planned for.
    direct_step_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    # Of packed weights that stay in device memory, as weights have them. None: not measured.
    decoded_bytes_per_s: float | None = None
    # Whether steps take these times with nothing decoded beside them. Measured ones have had something beside them.
    steps_alone: bool = False

    def resident_s(self, method: str) -> float:
        """A run in which no step waits for a copy."""
        return sum(self.step_s[method])

    def __str__(self) -> str:
        steps = ", ".join(f"{self.resident_s(method) * 1e3:.2f} ms of {method}" for method in self.step_s)
        return f"a link of {self.link.bytes_per_s / 1e9:.1f} GB/s and {steps}"
