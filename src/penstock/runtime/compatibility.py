"""Whether a program can run here."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

from penstock.archive import NoMetadataError
from penstock.errors import (
    BudgetError,
    BuildMismatchError,
    DeviceError,
    PackageError,
)
from penstock.native import core
from penstock.program import Program, read_program
from penstock.runtime.failures import last_exception


def read_offloaded(path: str | Path, *, budget: int | str | None) -> Program:
    """Reads the offload metadata. A budget for a program without any is an error of its own: it could not be kept."""
    try:
        return read_program(path)
    except NoMetadataError as error:
        if budget is None:
            raise
        raise BudgetError(
            f"the budget {budget!r} was given for {path}, which has no offload metadata: its weights are in it; "
            "export the model with penstock.apply_weight_offload and penstock.compile"
        ) from error


def resolve_device(program: Program, device: str | torch.device | None) -> torch.device:
    """The device to run on: "cpu", or a GPU with its number. None is the current device of the program's kind."""
    try:
        wanted = torch.device(program.device if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{device!r} is not a device: {error}") from error
    if wanted.type != program.device:
        raise BuildMismatchError(f"the program was compiled for {program.device}, and cannot run on {wanted}")
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise PackageError(f"the program was compiled for {program.device!r}; this release runs 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise BuildMismatchError(
            f"the program was compiled for CUDA ({program.built_with.get('gpu', 'unknown GPU')}); torch "
            f"{torch.__version__} sees no GPU here"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no device cuda:{index}; torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)


class _Build(ctypes.Structure):
    """As in include/penstock_core.h."""

    _fields_ = [(name, ctypes.c_char_p) for name in ("torch", "machine", "cpu", "capability", "gpu", "device")]


def check_build(program: Program, device: torch.device) -> None:
    """Compiled code calls torch and the machine directly, so both must be those it was compiled for."""
    if device.type != program.device:
        raise BuildMismatchError(f"the program was compiled for {program.device}, and cannot run on {device}")
    keys = ["torch", "machine", "cpu"]
    here = [str(torch.__version__), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        keys += ["capability", "gpu"]
        here += [f"{major}.{minor}", torch.cuda.get_device_name(device)]
    built = _Build(**{key: _built_with(program, key).encode() for key in keys})
    found = _Build(device=str(device).encode(), **{key: text.encode() for key, text in zip(keys, here, strict=True)})
    if core().penstock_check_build(ctypes.byref(built), ctypes.byref(found)):
        raise last_exception()


def _built_with(program: Program, key: str) -> str:
    if key not in program.built_with:
        raise PackageError(f"the program does not say with which {key} it was compiled; it says {program.built_with}")
    return program.built_with[key]
