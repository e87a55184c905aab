"""A program as `inspect`, `plan` and `verify` look at it: the same questions of a .pt2 and of a .pte. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.errors import PackageError, ScheduleError
from penstock.executorch.lowered_file import read_lowered
from penstock.plan.floor import Floor, floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.plan.pages import page_bytes_on
from penstock.plan.planner import Planner
from penstock.program import Program, read_program
from penstock.regular_file import open_regular
from penstock.schedule import Schedule
from penstock.weight import Weight


@dataclass(frozen=True)
class Subject:
    path: Path
    program: Program
    page_bytes: int
    # Of a .pte: device bytes of the plans that were made at export for all delegates together, smallest first.
    plan_bytes: tuple[int, ...] = ()

    @property
    def schedules(self) -> list[Schedule]:
        return [method.schedule for method in self.program.methods]

    @cached_property
    def weights(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.program.weights}

    def planner(self, placement: str, page_bytes: int | None = None) -> Planner:
        return Planner(self.schedules, self.weights, page_bytes=page_bytes or self.page_bytes, placement=placement)

    def floor(self) -> Floor:
        """By the formula, in exact bytes, before pages: what sets it."""
        return floor_bytes(*stand_ins(self.schedules, self.weights, read_directly_by_default))


@contextmanager
def recorded_in(path: Path) -> Iterator[None]:
    """A schedule that contradicts itself is the compiler's fault at export; here it stands in a damaged file."""
    try:
        yield
    except ScheduleError as error:
        raise PackageError(f"{path}: the recorded schedule is damaged: {error}") from error


def read_subject(path: Path) -> Subject:
    subject = _of_pte(path) if path.suffix == ".pte" else _of_pt2(path)
    with recorded_in(path):
        subject.floor()  # which looks at the whole schedule, so that nobody else meets one that is damaged
    return subject


def _of_pt2(path: Path) -> Subject:
    open_regular(path, PackageError).close()
    program = read_program(path)
    return Subject(path, program, page_bytes_on(program.device, program.weight_bytes))


def _of_pte(path: Path) -> Subject:
    lowered = read_lowered(path)
    return Subject(path, lowered.program, lowered.page_bytes, lowered.plan_bytes)
