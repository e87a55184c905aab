"""The device that a program is compiled for."""

from __future__ import annotations

import torch

from penstock.errors import DeviceError


def target_device(device: str | torch.device | None) -> torch.device:
    try:
        target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{device!r} is not a device: {error}") from error
    if target.type not in ("cpu", "cuda"):
        raise DeviceError(f"cannot compile for {target.type!r}; valid targets are 'cpu' and 'cuda'")
    if target.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("cannot compile for CUDA here: torch sees no GPU (the compiler tunes kernels on it)")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no device cuda:{index}; torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)
