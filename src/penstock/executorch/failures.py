"""Turns what the delegate and ExecuTorch refuse into the exceptions that the .pt2 path raises."""

from __future__ import annotations

from penstock import errors
from penstock.runtime.failures import exception

# `enum class Kind` in csrc/load_error.h. _BELOW_FLOOR and _CORE carry a number besides.
_BELOW_FLOOR = 3
_CORE = 10
_CLASSES: dict[int, type[errors.PenstockError]] = {
    1: errors.PackageError,
    2: errors.BudgetError,
    4: errors.PenstockError,
    5: errors.MissingWeightError,
    6: errors.WeightMismatchError,
    7: errors.WeightsFileError,
    8: errors.BuildMismatchError,
    9: errors.InputError,
    11: errors.RuntimeFailure,
    12: errors.RuntimeFailure,
    13: errors.DeviceError,
    14: errors.StateInvalidError,
    15: errors.ConcurrentRunError,
    16: errors.ActivationMemoryError,
}
# ExecuTorch's own errors, by number: runtime/core/error.h. Others are no fault of the file or the caller.
_NAMES = {
    0x01: "Internal",
    0x02: "InvalidState",
    0x10: "NotSupported",
    0x11: "NotImplemented",
    0x12: "InvalidArgument",
    0x13: "InvalidType",
    0x14: "OperatorMissing",
    0x20: "NotFound",
    0x21: "MemoryAllocationFailed",
    0x22: "AccessFailed",
    0x23: "InvalidProgram",
    0x24: "InvalidExternalData",
    0x25: "OutOfResources",
    0x30: "DelegateInvalidCompatibility",
    0x31: "DelegateMemoryAllocationFailed",
    0x32: "DelegateInvalidHandle",
}
_OF_THE_FILE = (0x10, 0x11, 0x12, 0x13, 0x14, 0x20, 0x22, 0x23, 0x24)
# ExecuTorch returns NotSupported for an input of another size where the program has one size only.
_OF_THE_CALL = (0x10, 0x12, 0x13)


def failure(
    doing: str, status: int, kind: int, detail: int, text: str, *, is_call: bool = False
) -> errors.PenstockError:
    """`is_call`: a method was run, so a mismatch may be the caller's fault."""
    if kind == _BELOW_FLOOR:
        return errors.BelowFloorError(text, budget_bytes=-1, floor_bytes=detail)
    if kind == _CORE:
        return exception(detail, text)
    if kind in _CLASSES:
        return _CLASSES[kind](text)
    said = f"{doing}: ExecuTorch gives error {status:#x} ({_NAMES.get(status, 'unknown')}); its log says more"
    if is_call and status in _OF_THE_CALL:
        return errors.InputError(said)
    if status in _OF_THE_FILE:
        return errors.PackageError(said)
    return errors.RuntimeFailure(said)
