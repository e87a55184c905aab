"""Who multiplies where a program has linears of ours: the library, or the kernel that reads a weight in two places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from penstock.direct.architecture import OLDEST_CAPABILITY, capability_text
from penstock.direct.failures import KernelCompileError, KernelDeviceError
from penstock.direct.launch_shape import Limits
from penstock.direct.self_check import TRIED_CAPABILITIES, open_kernel
from penstock.errors import DeviceError, PenstockError
from penstock.program import Program

LINEARS = ("library", "split")


@dataclass(frozen=True)
class LinearChoice:
    # Whether a plan may put a weight into two places.
    can_split: bool
    # All linears by one way of summing, so that results have the same bits at every budget.
    always_kernel: bool
    # On a GPU: whether the core gets recipes for the kernel. On the CPU it has a way of its own.
    offers_kernel: bool
    # Why the GPU cannot, where the program could.
    obstacle: str | None

    def summary(self) -> list[str]:
        parts = ["every linear as those of split weights"] if self.always_kernel else []
        return [*parts, *([f"no weight is split: {self.obstacle}"] if self.obstacle else [])]


def choose_linear(
    program: Program,
    device: torch.device,
    *,
    linear: str,
    mode: str,
    policy: str,
    host_memory: str,
    limits: Limits | Literal["measured"] | None,
) -> LinearChoice:
    """Refuses what is asked for and cannot be had."""
    if linear not in LINEARS:
        raise PenstockError(f"linear is {linear!r}; it must be one of {', '.join(map(repr, LINEARS))}")
    asked = [f'{name}="split"' for name, value in (("linear", linear), ("mode", mode)) if value == "split"]
    has_linears = any(access.linear for method in program.methods for access in method.schedule.accesses)
    # In every mode: what lies on the host as a whole is the kernel's too, and calibrate_direct() puts everything there.
    wanted = has_linears and policy == "planned" and (host_memory == "registered" or linear == "split")
    obstacle = _obstacle(device) if wanted else None
    if asked and not has_linears:
        raise PenstockError(
            f"{asked[0]} needs linears that can read a weight in two places, and the program has none: compile it with "
            "split_linear=True; bfloat16 and float16 weights that only linears read then have them"
        )
    if asked and obstacle:
        raise DeviceError(f"{asked[0]} cannot be had on {device}: {obstacle}")
    if linear == "split" and policy == "lru":
        raise PenstockError('linear="split" is for the weights of a plan, and policy="lru" makes none')
    usable = wanted and obstacle is None
    can_split = usable and host_memory == "registered"
    offers_kernel = device.type == "cuda" and (can_split or (usable and linear == "split"))
    if limits is not None and not offers_kernel:
        raise PenstockError(
            f"split_limits are for the kernel that reads weights in two places, and on {device} with policy={policy!r} "
            f"and host_memory={host_memory!r} this program has no use for it"
        )
    return LinearChoice(can_split, linear == "split", offers_kernel, obstacle)


def _obstacle(device: torch.device) -> str | None:
    """Where nobody asked for the kernel by name, a GPU that cannot have it still runs the program."""
    if device.type != "cuda":
        return None
    capability = _capability(device)
    if capability < OLDEST_CAPABILITY:
        has, needs = capability_text(capability), capability_text(OLDEST_CAPABILITY)
        kernel = f"the kernel that reads a weight in two places needs {needs} or newer"
        return f"this GPU has compute capability {has}, and {kernel}"
    if capability in TRIED_CAPABILITIES:
        return None
    try:
        open_kernel(device).close()
    except (KernelCompileError, KernelDeviceError) as error:
        return str(error)
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
