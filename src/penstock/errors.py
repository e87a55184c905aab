"""One exception class per failure; each message names the thing, what it has and what it needs."""

from __future__ import annotations


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
