"""One exception class per failure; each message names the thing, what it has and what it needs."""

from __future__ import annotations

from functools import partial


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class ProgramError(PenstockError):
    """The object handed in is not a program that can be offloaded."""


class NotAProgramError(ProgramError, TypeError):
    """Something other than a torch.export.ExportedProgram was given."""


class NoWeightsError(ProgramError):
    """The program has no weight: there is nothing to offload."""


class AlreadyOffloadedError(ProgramError):
    """apply_weight_offload was applied a second time."""


class NotOffloadedError(ProgramError):
    """compile was given a program that did not go through apply_weight_offload."""


class TrainingGraphError(ProgramError):
    """The program computes gradients, or was exported in training mode."""


class UnsupportedProgramError(ProgramError):
    """The program holds something that cannot be offloaded safely; it is named."""


class MethodConflictError(ProgramError):
    """Two methods disagree about one weight or one state."""


class CompileError(PenstockError):
    """The compiler refused the program."""


class ToolchainError(CompileError):
    """The C++ compiler is missing, or what it builds cannot be loaded."""


class UntestedTorchError(CompileError):
    """This torch is not a version that Penstock was tested with."""


class DeviceError(PenstockError):
    """The target device is unknown, or cannot be compiled for on this machine."""


class ScheduleError(CompileError):
    """The emitted program does not follow the recorded schedule."""


class WeightWrittenError(ScheduleError):
    """The compiled program would write into a lent weight."""


class WeightEscapesError(ScheduleError):
    """An output of the compiled program would alias a lent weight."""


class CheckpointError(PenstockError):
    """A checkpoint does not fit the program; every mismatch is listed."""


class WeightsFileError(PenstockError):
    """A .ptd file is truncated, inconsistent or of another kind."""


class ChecksumError(WeightsFileError):
    """Bytes in a .ptd file are not those that were written."""


class IdentityError(WeightsFileError):
    """The weights file belongs to another program."""


class PackageError(PenstockError):
    """A .pt2 file is not a weightless program of a known format."""


class OutputExistsError(PenstockError, FileExistsError):
    """A file that would be written exists, and overwrite=True was not given."""


class DiskFullError(PenstockError, OSError):
    """There is no room on the disk for what must be written."""


class BudgetError(PenstockError, ValueError):
    """A budget is malformed, negative, or below the floor."""


class PeakMemoryError(PenstockError):
    """A measured peak exceeds its limit."""


class OutputPathError(PenstockError, OSError):
    """The place to write to is unusable."""


class BelowFloorError(BudgetError):
    """The budget is smaller than the floor; the exact minimum is an attribute."""

    def __init__(self, message: str, *, budget_bytes: int, floor_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # For pickling between processes.
        return partial(type(self), budget_bytes=self.budget_bytes, floor_bytes=self.floor_bytes), self.args


class PlanError(PenstockError):
    """A plan breaks one of the rules for plans. It is not installed: this would be a bug in the planner."""


class RuntimeFailure(PenstockError):
    """Base of what can go wrong between loading a program and closing it."""


class DeviceMemoryError(RuntimeFailure):
    """The device refused memory for the weights: a pool or a page could not be created."""


class ActivationMemoryError(RuntimeFailure):
    """The compiled program ran out of device memory for its own buffers."""


class DriverCallError(RuntimeFailure):
    """A call of the device driver failed."""


class StickyDeviceError(DriverCallError):
    """The device context is lost: this process can no longer use the device."""


class MissingWeightError(WeightsFileError):
    """The weights file lacks weights that the program fetches; they are named."""


class WeightMismatchError(WeightsFileError):
    """A weight's shape or dtype in the weights file is not what the program needs."""


class WeightsChangedError(WeightsFileError):
    """The weights file changed, or became shorter, after it was loaded."""


class HostMemoryError(RuntimeFailure):
    """The host memory that is needed exceeds what this process may use."""


class RegistrationError(RuntimeFailure):
    """Host memory could not be registered with the device."""


class ScheduleDivergedError(RuntimeFailure):
    """The compiled code made another access than the recorded one."""


class ConcurrentRunError(RuntimeFailure):
    """A second thread entered a module that is running."""


class CaptureError(RuntimeFailure):
    """A pass cannot be captured into a CUDA graph, or a module was called while the caller captures one."""


class BuildMismatchError(RuntimeFailure):
    """The program was compiled for another torch, machine or device."""


class ClosedError(RuntimeFailure):
    """A module was used after close()."""


class ForkedError(RuntimeFailure):
    """A module was used in a child of the process that loaded it."""


class StateInvalidError(RuntimeFailure):
    """A run failed and may have left state half written; reset_state() makes it usable again."""


class NotCopyableError(RuntimeFailure, TypeError):
    """A module was copied or pickled; what it holds cannot be in two places."""


class InputError(PenstockError, TypeError):
    """An input does not fit the method's signature, which the message shows."""


class ModelError(PenstockError):
    """A transformers model that Penstock cannot run, or not in the way that was asked for."""
