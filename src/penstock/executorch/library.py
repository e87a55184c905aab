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
BUILD_COMMAND = "python -m penstock.executorch.build"
# As ExecuTorch's own Python runtime has them: kernels for what delegates leave to it and for the writing back of state,
# and the delegate for CPUs.
_OF_EXECUTORCH = ("libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so")
# Another build of the delegate.
_ENVIRONMENT = "PENSTOCK_EXECUTORCH_LIBRARY"


def executorch_folder() -> Path:
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise PenstockError("executorch is not installed: pip install 'penstock[executorch]'")
    return Path(next(iter(spec.submodule_search_locations)))


def package_folder() -> Path:
    return Path(__file__).resolve().parent


def cache_folder() -> Path:
    """For installations that cannot be written to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def library_path() -> Path:
    named = os.environ.get(_ENVIRONMENT)
    places = [Path(named)] if named else [folder / LIBRARY for folder in (package_folder(), cache_folder())]
    for place in places:
        if place.exists():
            return place
    raise PenstockError(
        f"the delegate library is missing ({' and '.join(map(str, places))}); build it with `{BUILD_COMMAND}`"
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """Registers the backend with ExecuTorch's runtime, for the life of the process.

    torch first, whose libraries the delegate stands on; then the core, globally, because compiled programs find its
    fetch function in the global scope.
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
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PenstockError(
            f"{path} cannot be loaded: {error}; build the delegate library for this executorch and torch with "
            f"`{BUILD_COMMAND}`"
        ) from error
