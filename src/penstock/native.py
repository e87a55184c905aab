"""The native core, loaded once, and its C functions with their types. No torch: the core finds it when it must."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from penstock.errors import PenstockError

# Another build of the core: one with a sanitizer in it, for instance.
_ENVIRONMENT = "PENSTOCK_CORE_LIBRARY"

_pointer = ctypes.c_void_p
_text = ctypes.c_char_p
_i32 = ctypes.c_int32
_i64 = ctypes.c_int64

# int32_t prepare(const LinearCase*, LinearRecipe*): 0 when the recipe was made
PREPARE_LINEAR = ctypes.CFUNCTYPE(_i32, _pointer, _pointer)
ON_BYTES = ctypes.CFUNCTYPE(_i32, _i64)

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "penstock_poison_create": (_pointer, [_i64, _pointer, _pointer, _pointer, _pointer, _i64, _i32]),
    "penstock_create_error": (_text, []),
    "penstock_poison_begin": (None, [_pointer]),
    "penstock_poison_end": (_i32, [_pointer]),
    "penstock_poison_error": (_text, [_pointer]),
    "penstock_poison_owns": (_i32, [_pointer, _pointer]),
    "penstock_poison_peak_bytes": (_i64, [_pointer]),
    "penstock_poison_destroy": (None, [_pointer]),
    "penstock_failure": (_i32, []),
    "penstock_failure_text": (_text, []),
    "penstock_checksum": (ctypes.c_uint64, [_text, _i64]),
    "penstock_load_torch": (_i32, []),
    "penstock_soft_create": (_pointer, [ctypes.c_size_t, ctypes.c_size_t, _i32]),
    "penstock_soft_error": (_text, []),
    "penstock_cuda_create": (_pointer, [_i32]),
    "penstock_driver_destroy": (None, [_pointer]),
    "penstock_driver_granularity": (_i32, [_pointer, _pointer]),
    "penstock_driver_pool_unit": (_i32, [_pointer, _pointer]),
    "penstock_driver_memory": (_i32, [_pointer, _pointer, _pointer]),
    "penstock_check_build": (_i32, [_pointer, _pointer]),
    "penstock_budget_origin": (_i64, [_i64, _i64, _i64]),
    "penstock_format_bytes": (_text, [_i64]),
    "penstock_parse_bytes": (_i32, [_text, _pointer]),
    "penstock_reserve_bytes": (_i64, [_i64, _i32]),
    "penstock_choose_budget": (_i32, [_pointer]),
    "penstock_clamp_sentence": (_text, [_pointer]),
    "penstock_probe_begin": (_pointer, [_text, _i32]),
    "penstock_probe_require": (_i32, [_pointer, ON_BYTES]),
    "penstock_probe_destroy": (None, [_pointer]),
    "penstock_open": (_pointer, [_pointer, _pointer]),
    "penstock_session_host_bytes": (_i64, [_pointer]),
    "penstock_host_limit": (_i32, [_text, _i64, _pointer]),
    "penstock_host_limit_text": (_text, []),
    "penstock_pinned_bytes": (_i64, []),
    "penstock_session_destroy": (None, [_pointer]),
    "penstock_session_install": (_i32, [_pointer, _pointer, _i64]),
    "penstock_session_offer_linear": (_i32, [_pointer, PREPARE_LINEAR]),
    "penstock_session_begin": (_i32, [_pointer, _i64, _pointer]),
    "penstock_session_end": (_i32, [_pointer]),
    "penstock_session_abort": (None, [_pointer]),
    "penstock_session_begin_capture": (_i32, [_pointer, _i64, _pointer]),
    "penstock_session_end_capture": (_i32, [_pointer, _pointer]),
    "penstock_session_drop_capture": (_i32, [_pointer, _i64]),
    "penstock_session_launch": (_i32, [_pointer]),
    "penstock_session_begin_replay": (_i32, [_pointer, _i64, _pointer]),
    "penstock_session_end_replay": (_i32, [_pointer]),
    "penstock_session_failure": (_i32, [_pointer]),
    "penstock_session_failure_text": (_text, [_pointer]),
    "penstock_session_expert_counts": (_i64, [_pointer, _pointer, _i64]),
    "penstock_session_expert_hits": (_i32, [_pointer, _i64, _pointer, _i64, _pointer]),
    "penstock_session_counters": (_i32, [_pointer, _pointer, _pointer]),
    "penstock_session_memory": (_i32, [_pointer, _pointer, _pointer]),
    "penstock_session_link": (_i64, [_pointer, _pointer, _i64]),
    "penstock_session_summary": (_text, [_pointer, _pointer]),
    "penstock_session_drain": (_i32, [_pointer]),
    "penstock_session_start_trace": (_i32, [_pointer]),
    "penstock_session_stop_trace": (_i32, [_pointer]),
    "penstock_session_spans": (_i64, [_pointer, _pointer, _i64]),
    "penstock_packed_most_bytes": (_i64, [_i32, _i64]),
    "penstock_pack_blocks": (_i64, [_i32, _pointer, _i64, _pointer, _i64, _pointer, _i32]),
    "penstock_unpack_blocks": (_i32, [_i32, _pointer, _i64, _pointer, _i64, _pointer, _i32]),
}


def library_path() -> Path:
    return Path(os.environ.get(_ENVIRONMENT) or Path(__file__).parent / "libpenstock.so")


@functools.cache
def core() -> ctypes.CDLL:
    """The core. RTLD_GLOBAL, because compiled programs find its fetch function in the global scope."""
    path = library_path()
    if not path.exists():
        raise PenstockError(
            f"the native core {path} is missing; build it with `python setup.py build_ext --inplace` or reinstall"
        )
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
