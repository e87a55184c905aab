"""The product of groups that the core asks torch for, on a GPU: by the same call on the CPU."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from torch._C import _aoti

from tests.native import library


def product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    handles = _aoti.unsafe_alloc_void_ptrs_from_tensors([rows, matrices, ends])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = ctypes.c_void_p()
    status = library.testing().penstock_test_multiply_groups(
        *(ctypes.c_void_p(pointer(handle, None)) for handle in handles), ctypes.byref(found)
    )
    torch_cpu = ctypes.CDLL("libtorch_cpu.so")
    for handle in handles:
        torch_cpu.aoti_torch_delete_tensor_object(ctypes.c_void_p(pointer(handle, None)))
    if status:
        raise RuntimeError(f"torch refused: {status}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return _aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(found, None, None))


def test_groups_are_multiplied_as_torch_does() -> None:
    rows = torch.randn(24, 32, dtype=torch.bfloat16)
    matrices = torch.randn(4, 16, 32, dtype=torch.bfloat16).transpose(-2, -1)
    ends = torch.tensor([5, 5, 20, 24], dtype=torch.int32)
    for _ in range(100):
        assert torch.equal(product(rows, matrices, ends), torch._grouped_mm(rows, matrices, ends))


def test_nothing_is_kept_of_what_was_given() -> None:
    rows = torch.randn(24, 32, dtype=torch.bfloat16)
    matrices = torch.randn(4, 32, 16, dtype=torch.bfloat16)
    ends = torch.tensor([5, 5, 20, 24], dtype=torch.int32)
    product(rows, matrices, ends)
    gc.collect()
    # A handle that is still held keeps the memory in use.
    assert [tensor._use_count() for tensor in (rows, matrices, ends)] == [1, 1, 1]


def test_a_refusal_of_torch_is_told() -> None:
    with pytest.raises(RuntimeError, match="torch refused: 1"):
        product(torch.randn(4, 8), torch.randn(2, 3, 5), torch.tensor([1, 2], dtype=torch.int32))
