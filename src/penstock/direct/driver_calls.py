"""The few functions of libcuda.so.1 that load and launch a kernel, through ctypes, with the driver's own structures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.direct.params import TensorMap
from penstock.errors import DriverCallError

# CUtensorMapDataType
FLOAT16, BFLOAT16 = 6, 9
_SWIZZLE_128_BYTES = 3
# CUtensorMapL2promotion: read device memory in pairs of 128 bytes, and from the host exactly what is needed.
PROMOTE_NOTHING, PROMOTE_256_BYTES = 0, 3
_MAX_DYNAMIC_SHARED_BYTES, _NON_PORTABLE_CLUSTER = 8, 14
_CLUSTER_DIMENSION, _OVERLAPS_LAST_LAUNCH = 4, 6
_DEVICE_POINTER = 3
_ATTRIBUTES = {"major": 75, "minor": 76, "shared_limit_bytes": 97}


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; the union of its values takes 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class DeviceLimits:
    """Compute capability and shared memory of one GPU."""

    major: int
    minor: int
    shared_limit_bytes: int


def launch_config(
    blocks: int, threads: int, shared_bytes: int, cluster_ctas: int, stream: int, *, overlapped: bool = False
) -> LaunchConfig:
    """`overlapped`: it may begin before the previous launch has ended; the kernel itself must wait for that."""
    attributes = (LaunchAttribute * 2)()
    attributes[0].id = _CLUSTER_DIMENSION
    attributes[0].value[:3] = (cluster_ctas, 1, 1)
    attributes[1].id = _OVERLAPS_LAST_LAUNCH
    attributes[1].value[0] = 1
    config = LaunchConfig(shared_bytes=shared_bytes, stream=stream, attribute_count=2 if overlapped else 1)
    config.grid[:] = (blocks, 1, 1)
    config.block[:] = (threads, 1, 1)
    config.attributes = ctypes.cast(attributes, ctypes.POINTER(LaunchAttribute))
    return config


class DriverCalls:
    """Everything below `limits` works in the calling thread's current context: see `context`."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(library)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    @contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        """Makes the device's primary context, which is also torch's, current in the calling thread."""
        if ordinal not in self._contexts:
            retained = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(retained), self._device(ordinal))
            self._contexts[ordinal] = retained
        self._call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def limits(self, ordinal: int) -> DeviceLimits:
        device = self._device(ordinal)
        found: dict[str, int] = {}
        for name, attribute in _ATTRIBUTES.items():
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
            found[name] = value.value
        return DeviceLimits(**found)

    def load(self, cubin: bytes) -> int:
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module.value or 0

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", ctypes.c_void_p(module))

    def function(self, module: int, name: str, shared_bytes: int, cluster_ctas: int, portable_ctas: int) -> int:
        """The kernel, with its shared memory and cluster size allowed."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        wanted = [(_MAX_DYNAMIC_SHARED_BYTES, shared_bytes)]
        if cluster_ctas > portable_ctas:
            wanted.append((_NON_PORTABLE_CLUSTER, 1))
        for attribute, value in wanted:
            self._call("cuFuncSetAttribute", function, ctypes.c_int(attribute), ctypes.c_int(value))
        return function.value or 0

    def most_clusters(self, function: int, threads: int, shared_bytes: int, cluster_ctas: int) -> int:
        """How many clusters of this shape the GPU holds at once."""
        config = launch_config(cluster_ctas, threads, shared_bytes, cluster_ctas, 0)
        count = ctypes.c_int()
        self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config))
        return count.value

    def device_address(self, address: int) -> int:
        """The device's address for this address, which is in device memory or in registered host memory."""
        found = ctypes.c_uint64()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(found), ctypes.c_int(_DEVICE_POINTER), ctypes.c_uint64(address)
        )
        return found.value

    def encode_map(
        self,
        target: TensorMap,
        data_type: int,
        address: int,
        columns: int,
        rows: int,
        stride_bytes: int,
        box_rows: int,
        promotion: int,
    ) -> None:
        """A matrix with contiguous columns, copied in boxes of 64 columns (128 bytes, swizzled) and `box_rows` rows."""
        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(target),
            ctypes.c_int(data_type),
            ctypes.c_uint32(2),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(stride_bytes),
            (ctypes.c_uint32 * 2)(64, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            ctypes.c_int(0),  # not interleaved
            ctypes.c_int(_SWIZZLE_128_BYTES),
            ctypes.c_int(promotion),
            ctypes.c_int(0),  # zeros outside
        )

    def launch(self, function: int, config: LaunchConfig, params: ctypes.Structure) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._call("cuLaunchKernelEx", ctypes.byref(config), ctypes.c_void_p(function), pointers, None)

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise DriverCallError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})")
