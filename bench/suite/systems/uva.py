"""Weights read in place: ordinary kernels over registered host memory, which the device addresses directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.suite.model import DTYPE, ITEM_BYTES, on_meta, read_into, stored_tensors
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

_ALIGNMENT_BYTES = 512  # that of torch's own device allocations, which kernels are chosen by
_MAPPED = 2  # cudaHostRegisterMapped


class _HostBytes:
    """Host memory as something torch takes for device memory: registered memory has one address on both sides."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


@contextmanager
def _open(setting: Setting) -> Iterator[Opened]:
    places, total_bytes = {}, 0
    for name, shape, file_offset in stored_tensors(setting.weights_path):
        places[name] = (shape, file_offset, total_bytes)
        nbytes = torch.Size(shape).numel() * ITEM_BYTES
        total_bytes += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    host = torch.empty(total_bytes, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    device = torch.device(setting.device)
    with torch.cuda.device(device):
        _check(runtime.cudaHostRegister(host.data_ptr(), total_bytes, _MAPPED), "cudaHostRegister", total_bytes)
        try:
            model = on_meta(setting.shape)
            lent: dict[str, Tensor] = {}
            with setting.weights_path.open("rb", buffering=0) as file:
                for name, (shape, file_offset, offset) in places.items():
                    source = host[offset : offset + torch.Size(shape).numel() * ITEM_BYTES]
                    read_into(source, file.fileno(), file_offset)
                    view = torch.as_tensor(_HostBytes(source), device=torch.device("cuda", device.index or 0))
                    if view.data_ptr() != source.data_ptr():
                        raise RuntimeError(f"{name} was copied: torch did not take host memory as it is")
                    lent[name] = view.view(DTYPE).view(shape)
            model.load_state_dict(lent, assign=True)
            # At least: a kernel that reads a tile several times moves it several times.
            yield Opened(
                model.requires_grad_(False), lambda: Facts(Traffic(setting.weight_bytes, "by construction, at least"))
            )
        finally:
            torch.cuda.synchronize()
            _check(runtime.cudaHostUnregister(host.data_ptr()), "cudaHostUnregister", total_bytes)


def _check(code: Any, call: str, nbytes: int) -> None:
    if int(code) != 0:
        raise RuntimeError(f"{call} of {nbytes} bytes failed with CUDA error {int(code)}")


UVA = System(
    "uva",
    "UVA, weights read in place",
    _open,
    shares_process=True,
    needs_cuda="kernels read host memory over the link",
)
