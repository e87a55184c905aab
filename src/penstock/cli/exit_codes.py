"""Exit codes of commands: one for each family of errors. docs/cli.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass

import click

from penstock import errors

OK = 0
FAILED = 1
USAGE = 2
# As in sysexits.h.
INTERNAL = 70
# As a shell shows them: 128 plus the number of the signal, SIGINT or SIGPIPE.
INTERRUPTED = 130
NOBODY_READS = 141


@dataclass(frozen=True)
class Family:
    code: int
    classes: tuple[type[errors.PenstockError], ...]
    meaning: str


# An error gets the code of the first family that it belongs to, so base classes come after their subclasses.
FAMILIES: tuple[Family, ...] = (
    Family(3, (errors.ProgramError, errors.ModelError), "the model or its exported program cannot be offloaded"),
    Family(4, (errors.CompileError,), "compiling failed, the C++ compiler included"),
    Family(5, (errors.DeviceError,), "there is no such device, or it cannot be compiled for here"),
    Family(6, (errors.CheckpointError,), "a checkpoint does not fit the program, or cannot be read"),
    Family(7, (errors.WeightsFileError,), "a weights file is damaged, incomplete, or of another program"),
    Family(8, (errors.PackageError,), "the file is not a Penstock program, or it is damaged"),
    Family(
        9,
        (errors.OutputExistsError, errors.OutputPathError, errors.DiskFullError),
        "what was to be written exists already, or cannot be written",
    ),
    Family(10, (errors.BudgetError,), "a budget is malformed, or below the floor"),
    Family(11, (errors.RuntimeFailure,), "loading or running failed"),
    Family(12, (errors.InputError,), "the inputs do not fit the program"),
    Family(FAILED, (errors.PenstockError,), "a check failed, the program failed, or anything that has no code below"),
)

MEANINGS: dict[int, str] = {
    OK: "everything asked for was done, and every check passed",
    FAILED: FAMILIES[-1].meaning,
    USAGE: "the command line was not understood",
    **{family.code: family.meaning for family in FAMILIES[:-1]},
    INTERNAL: "an internal error, which is a fault of Penstock",
    INTERRUPTED: "interrupted (Ctrl-C); nothing is left behind",
    NOBODY_READS: "nobody reads the output: a pipe was closed, or stdout was",
}


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return USAGE
    # All plans are made here, so a plan that its check refuses is a fault of the planner.
    if isinstance(error, errors.PlanError):
        return INTERNAL
    for family in FAMILIES:
        if isinstance(error, family.classes):
            return family.code
    # The machine refused something, at a place where no code expects it.
    return FAILED if isinstance(error, (OSError, MemoryError)) else INTERNAL
