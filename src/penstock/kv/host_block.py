# mypy: disable-error-code="no-untyped-call"
"""Host memory for the far side of a cache. For a GPU it is mapped and registered, so that kernels read it in place.

torch's own pinned memory is not used: its sizes are rounded up to powers of two.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import RegistrationError


class RegisteredMemory(mmap.mmap):
    """Anonymous memory that is registered with a device until the last tensor over it is gone.

    A finalizer would be too late: the mapping is given back before weak references are notified.
    """

    device: torch.device
    address: int = 0

    def register(self, device: torch.device, address: int) -> None:
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if code:
            raise RegistrationError(
                f"{len(self)} bytes of host memory for a KV cache could not be registered with {device}: "
                f"cudaHostRegister returned {code}"
            )
        self.device, self.address = device, address

    def __del__(self) -> None:
        # A process that ends takes its registrations with it, and the driver may be gone by then.
        if self.address and not sys.is_finalizing():
            # Kernels that were launched may still read it.
            torch.cuda.synchronize(self.device)
            code = int(torch.cuda.cudart().cudaHostUnregister(self.address))
            if code:
                raise RegistrationError(f"cudaHostUnregister of {len(self)} bytes of a KV cache returned {code}")


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory that kernels on `device` can read and write."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device="meta" if device.type == "meta" else "cpu")
    memory = RegisteredMemory(-1, nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    memory.register(device, tensor.data_ptr())
    return tensor
