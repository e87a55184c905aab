"""What can keep a direct-access kernel from being built or launched."""

from __future__ import annotations

from penstock.errors import CompileError, DeviceError, InputError


class KernelInputError(InputError, ValueError):
    """A tensor or a size that the kernel cannot take; the message says what it has and what it needs."""


class KernelDeviceError(DeviceError):
    """The GPU lacks the instructions of the kernel, or gets wrong results with them."""


class KernelCompileError(CompileError):
    """NVRTC is missing, or refused the kernel's source."""
