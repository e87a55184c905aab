"""Whether a device can have the kernel that reads a weight in two places."""

from __future__ import annotations

import torch

from penstock.direct.architecture import OLDEST_CAPABILITY, capability_text
from penstock.direct.failures import KernelCompileError, KernelDeviceError
from penstock.direct.self_check import TRIED_CAPABILITIES, open_kernel


def kernel_obstacle(device: torch.device) -> str | None:
    """Why the device cannot run the kernel; None: it can. On the CPU the core has its own implementation."""
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
