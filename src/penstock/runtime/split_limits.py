"""How much of the GPU reads the host side of split weights: as asked for, remembered for this GPU, or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from penstock.budget import format_bytes
from penstock.direct.launch_shape import Limits
from penstock.direct.limits_search import DEVICE_BYTES, measure_limits
from penstock.direct.remembered_limits import known_limits, measured_limits


@dataclass(frozen=True)
class SplitLimits:
    # None: the kernel's own limits.
    limits: Limits | None
    summary: tuple[str, ...] = ()


def choose_split_limits(
    asked: Limits | Literal["measured"] | None, device: torch.device, budget_bytes: int
) -> SplitLimits:
    """Measures a GPU once, when a program first splits there, if the budget has room for it: its cap holds."""
    if isinstance(asked, Limits):
        return SplitLimits(asked)
    if asked == "measured":
        found: Limits | None = measured_limits(device, measure_limits)
    else:
        found = known_limits(device, measure_limits, may_measure=budget_bytes >= DEVICE_BYTES)
    if found is not None:
        return SplitLimits(found, (f"measured for split weights: {found}",))
    unmeasured = f"limits for split weights are those of an H200, because measuring takes {format_bytes(DEVICE_BYTES)}"
    return SplitLimits(None, (unmeasured,))
