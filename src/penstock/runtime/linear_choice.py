"""What computes the linears of ours in a program: always the kernel that reads a weight in two places.

Sums are computed in one way at every budget, so the bits never depend on where a weight lies. A GPU that cannot run the
kernel multiplies with the library, also at every budget, and splits nothing. On the CPU the core itself sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.direct.availability import kernel_obstacle
from penstock.program import Program


@dataclass(frozen=True)
class LinearChoice:
    has_linears: bool = False
    # Why the GPU cannot run the kernel, if the program could use it.
    obstacle: str | None = None

    @property
    def uses_kernel(self) -> bool:
        """Also true on the CPU, where the core has an implementation of its own."""
        return self.has_linears and self.obstacle is None

    def summary(self) -> list[str]:
        return [f"no weight is split: {self.obstacle}"] if self.obstacle else []


def choose_linear(program: Program, device: torch.device) -> LinearChoice:
    has_linears = any(access.linear for method in program.methods for access in method.schedule.accesses)
    return LinearChoice(has_linears, kernel_obstacle(device) if has_linears else None)
