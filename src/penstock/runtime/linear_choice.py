"""Who multiplies where a program has linears of ours: always the kernel that reads a weight in two places.

One way of summing at every budget, so that the bits never depend on where a weight lies. A GPU that cannot have the
kernel multiplies with the library, at every budget too, and splits nothing. On the CPU the core itself sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.direct.availability import kernel_obstacle
from penstock.program import Program


@dataclass(frozen=True)
class LinearChoice:
    has_linears: bool = False
    # Why the GPU cannot, where the program could.
    obstacle: str | None = None

    @property
    def uses_kernel(self) -> bool:
        """On the CPU the core has a way of its own."""
        return self.has_linears and self.obstacle is None

    def summary(self) -> list[str]:
        return [f"no weight is split: {self.obstacle}"] if self.obstacle else []


def choose_linear(program: Program, device: torch.device) -> LinearChoice:
    has_linears = any(access.linear for method in program.methods for access in method.schedule.accesses)
    return LinearChoice(has_linears, kernel_obstacle(device) if has_linears else None)
