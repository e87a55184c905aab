"""Whether a program can run here, and whether a weights file is the program's."""

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
    IdentityError,
    MissingWeightError,
    PackageError,
    WeightMismatchError,
)
from penstock.native import core
from penstock.program import Program, read_program
from penstock.runtime.failures import last_exception
from penstock.weight import State, Weight
from penstock.weights import Entry, WeightsIndex


def read_offloaded(path: str | Path, *, budget: int | str | None) -> Program:
    """The offload metadata; a budget for a program without any is an error of its own, as it could not be held."""
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
        raise DeviceError(f"{device!r} is no device: {error}") from error
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


def check_weights(program: Program, index: WeightsIndex) -> dict[str, Entry]:
    """The entry of each weight, and of each state whose first value is stored, by name."""
    items: list[Weight | State] = [*program.weights, *program.states]
    needed = [item.name for item in items if isinstance(item, Weight) or item.init == "stored"]
    found = {item.name: index[item.name] for item in items if item.name in index}
    missing = [name for name in needed if name not in found]
    if needed and not found:
        raise IdentityError(
            f"{index.path} holds none of the {len(needed)} weights of the program, such as {needed[0]!r}: it has "
            f"identity {index.identity}, the program needs {program.identity}"
        )
    if missing:
        raise MissingWeightError(
            f"{index.path} lacks {len(missing)} of the {len(needed)} weights of the program: "
            + ", ".join(map(repr, missing))
        )
    mismatches = [
        f"{item.name!r} is {_entry_text(entry)}, needs {_layout_text(item.dtype, item.shape, item.dim_order)}"
        for item in items
        if (entry := found.get(item.name)) is not None and not _fits(item, entry)
    ]
    if mismatches:
        raise WeightMismatchError(f"{index.path} does not fit the program: {'; '.join(mismatches)}")
    # A file that ExecuTorch wrote has no identity: that every weight fits is then all there is to check.
    if index.identity is not None and index.identity != program.identity:
        raise IdentityError(
            f"{index.path} was written for another program: every weight is there and fits, but it has identity "
            f"{index.identity}, the program needs {program.identity} (other weights, states or ties)"
        )
    return found


def _fits(item: Weight | State, entry: Entry) -> bool:
    if (entry.dtype, entry.shape) != (item.dtype, item.shape):
        return False
    return _memory_order(item.shape, item.dim_order) == _memory_order(entry.shape, entry.dim_order)


def _memory_order(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> list[int]:
    """The part of a dim order that the bytes depend on: a dimension of size 1 may stand anywhere."""
    return [] if 0 in shape else [d for d in dim_order if shape[d] != 1]


def _entry_text(entry: Entry) -> str:
    if entry.kind == "blob":
        return f"{entry.length_bytes} bytes without a dtype and a shape"
    return _layout_text(entry.dtype, entry.shape, entry.dim_order)


def _layout_text(dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...]) -> str:
    plain = dim_order == tuple(range(len(shape)))
    return f"{dtype}{list(shape)}" + ("" if plain else f" with dim order {list(dim_order)}")


def _built_with(program: Program, key: str) -> str:
    if key not in program.built_with:
        raise PackageError(f"the program does not say with which {key} it was compiled; it says {program.built_with}")
    return program.built_with[key]
