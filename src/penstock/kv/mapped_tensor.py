"""Registered host memory as a GPU tensor, at the address where the GPU finds it.

A compiled program expects all its inputs on one device; its kernels do not care where the bytes lie. The tensor is
handed to torch by DLPack, the only public way to make a tensor over an address that keeps the memory's owner alive.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.direct.driver_calls import DriverCalls

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _Device(ctypes.Structure):
    """DLDevice."""

    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    """DLDataType."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


# Keeps what torch's tensors lie on, by the address of their description, until the last view of one is gone.
_held: dict[int, tuple[Any, ...]] = {}


def _release(description: int) -> None:
    del _held[description]


_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def mapped_tensor(host: Tensor, device: torch.device) -> Tensor:
    """The memory of `host`, contiguous and registered with `device`, as a tensor there. It keeps `host` alive."""
    if not host.numel():
        return torch.empty(host.shape, dtype=host.dtype, device=device)
    found = bytes_at(_device_address(host, device), host.nbytes, device, host)
    return found.view(host.dtype).view(host.shape)


def bytes_at(address: int, nbytes: int, device: torch.device, owner: object) -> Tensor:
    """Bytes that `owner` holds, as a tensor that keeps `owner` alive."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _ManagedTensor(
        _Tensor(
            data=address,
            device=_Device(_DEVICE_TYPES[device.type], device.index or 0),
            dimensions=1,
            dtype=_DataType(_UNSIGNED, 8, 1),
            shape=shape,
        ),
        deleter=ctypes.cast(_RELEASE, ctypes.c_void_p),
    )
    description = ctypes.addressof(managed)
    _held[description] = (managed, shape, owner)
    tensor: Tensor = from_dlpack(_new_capsule(description, b"dltensor", None))
    return tensor


def _device_address(host: Tensor, device: torch.device) -> int:
    """Under unified addressing mostly the same as the host's, but the driver does not promise that."""
    driver = _driver()
    with driver.context(device.index or 0):
        return driver.device_address(host.data_ptr())


@cache
def _driver() -> DriverCalls:
    return DriverCalls()
