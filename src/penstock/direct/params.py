"""The kernel's parameters, kernels/split_params.h, as ctypes structures. A test compares every offset."""

from __future__ import annotations

import ctypes
from dataclasses import asdict

from penstock.direct.launch_shape import LaunchShape

TENSOR_MAP_ALIGNMENT = 128


class TensorMap(ctypes.Structure):
    """128 bytes that only the driver understands."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class SplitSchedule(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("split_row", "rows", "cluster_rows", "token_blocks", "clusters", "host_clusters", "helped")
    ]


class SplitParams(ctypes.Structure):
    """Must be aligned while tensor maps are written into it: see `aligned_params`."""

    _fields_ = [
        *((name, TensorMap) for name in ("x", "prefix", "rest", "prefix_16", "rest_16")),
        *((f"{name}_address", ctypes.c_uint64) for name in ("y", "bias", "host_bytes", "fault")),
        ("schedule", SplitSchedule),
        *((name, ctypes.c_int) for name in ("tokens", "depth", "y_stride", "token_ctas", "row_ctas")),
        *((name, ctypes.c_int) for name in ("w_stages", "x_stages", "host_w_stages")),
    ]


# C++ rounds the size of the struct up to its alignment.
SPLIT_PARAMS_BYTES = -(-ctypes.sizeof(SplitParams) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT


def aligned_params() -> SplitParams:
    """Zeroed, at an address that the driver accepts for tensor maps, with room for what C++ adds to the size."""
    buffer = (ctypes.c_char * (SPLIT_PARAMS_BYTES + TENSOR_MAP_ALIGNMENT))()
    offset = -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    return SplitParams.from_buffer(buffer, offset)


def fill_shape(params: SplitParams, shape: LaunchShape) -> None:
    """Everything but addresses, strides and tensor maps."""
    params.schedule = SplitSchedule(**asdict(shape.schedule))
    params.tokens = shape.tokens
    params.depth = shape.depth
    params.token_ctas = shape.tile.token_ctas
    params.row_ctas = shape.tile.row_ctas
    params.w_stages = shape.tile.w_stages
    params.x_stages = shape.tile.x_stages
    params.host_w_stages = shape.host_w_stages
