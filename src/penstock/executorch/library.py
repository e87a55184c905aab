"""The delegate library: where it is, and how it is loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path

from penstock.errors import PenstockError
from penstock.native import core

LIBRARY = "libpenstock_executorch.so"
# The libraries that ExecuTorch's own Python runtime loads: kernels for what delegates leave to it and for writing back
# state, and its delegate for CPUs.
_OF_EXECUTORCH = ("libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so")
# Names another build of the delegate.
ENVIRONMENT = "PENSTOCK_EXECUTORCH_LIBRARY"


def executorch_folder() -> Path:
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise PenstockError("executorch is not installed: pip install 'penstock[executorch]'")
    return Path(next(iter(spec.submodule_search_locations)))


def library_path() -> Path:
    """The delegate library for the installed executorch and torch, built on first use."""
    named = os.environ.get(ENVIRONMENT)
    if not named:
        from penstock.executorch.build import build  # which imports this module

        return build()
    if not Path(named).exists():
        raise PenstockError(f"${ENVIRONMENT} names {named}, which does not exist")
    return Path(named)


@functools.cache
def load_library() -> ctypes.CDLL:
    """Registers the backend with ExecuTorch's runtime, for the life of the process.

    Loads torch first, because the delegate depends on its libraries; then the core, globally, because compiled programs
    find its fetch function in the global scope. ExecuTorch's libraries are loaded locally: one of them holds functions
    with the names of BLAS, and libraries loaded later would bind to those.
    """
    import torch  # noqa: F401

    core()
    for name in _OF_EXECUTORCH:
        _load(executorch_folder() / "lib" / name)
    library = _load(library_path())
    status = library.penstock_executorch_registered()
    if status:
        raise PenstockError(f"ExecuTorch's runtime refused the backend with error {status:#x}")
    return library


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise PenstockError(f"{path} cannot be loaded beside this executorch and torch: {error}") from error
