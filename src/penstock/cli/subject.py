"""A program as `inspect`, `plan` and `verify` see it: .pt2 and .pte answer the same questions. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from penstock.errors import PackageError, PenstockError, ScheduleError, WeightsFileError
from penstock.executorch.lowered_file import read_lowered
from penstock.plan.floor import Floor, floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.plan.packed import Begins
from penstock.plan.pages import page_bytes_on
from penstock.plan.planner import Planner
from penstock.program import Program, read_program
from penstock.regular_file import open_regular
from penstock.runtime.packed_weights import read_packed_weights
from penstock.runtime.weights_fit import check_weights
from penstock.schedule import Schedule
from penstock.weight import Weight
from penstock.weights import read_index
from penstock.weights.packing import lowered_entries


@dataclass(frozen=True)
class Subject:
    path: Path
    program: Program
    page_bytes: int
    # Of a .pte: device bytes of the plans that were made at export for all delegates together, smallest first.
    plan_bytes: tuple[int, ...] = ()
    # Where blocks begin, for each weight that is packed in the file that plans are for.
    begins: Begins = field(default_factory=dict)
    # Which file that is, and what was found in it.
    weights_file: str = "none was looked for"

    @property
    def schedules(self) -> list[Schedule]:
        return [method.schedule for method in self.program.methods]

    @cached_property
    def weights(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.program.weights}

    def planner(self, placement: str, page_bytes: int | None = None) -> Planner:
        return Planner(
            self.schedules,
            self.weights,
            page_bytes=page_bytes or self.page_bytes,
            placement=placement,
            begins=self.begins,
        )

    def link_bytes(self, name: str) -> int:
        """Bytes of the whole weight, as it crosses the link."""
        begins = self.begins.get(name)
        return self.weights[name].nbytes if begins is None else begins[-1] - begins[0]

    def floor(self) -> Floor:
        """The floor by the formula, in exact bytes, before pages, and what sets it."""
        return floor_bytes(*stand_ins(self.schedules, self.weights, read_directly_by_default))


@contextmanager
def recorded_in(path: Path) -> Iterator[None]:
    """At export, a schedule that contradicts itself is the compiler's fault. Here it means that the file is damaged."""
    try:
        yield
    except ScheduleError as error:
        raise PackageError(f"{path}: the recorded schedule is damaged: {error}") from error


def read_subject(path: Path, weights: Path | None = None) -> Subject:
    """`weights` is the file that the program will run with, by default the one beside it. If that one is missing or
    cannot be used, the weights are assumed not to be packed, and `weights_file` says so."""
    subject = _of_pte(path) if path.suffix == ".pte" else _of_pt2(path)
    with recorded_in(path):
        subject.floor()  # looks at the whole schedule, so that a damaged one is found here
    if weights is not None:
        return _with_weights(subject, weights)
    beside = path.with_suffix(".ptd")
    if not beside.exists():
        return replace(subject, weights_file=f"{beside.name} is not there")
    try:
        return _with_weights(subject, beside)
    except PenstockError as error:
        return replace(subject, weights_file=f"{beside.name} cannot be used: {error}")


def _with_weights(subject: Subject, weights: Path) -> Subject:
    open_regular(weights, WeightsFileError).close()
    try:
        index = read_index(weights)
        if subject.path.suffix == ".pte":
            entries = lowered_entries(subject.path, read_lowered(subject.path), index)
        else:
            entries = check_weights(subject.program, index)
        begins = read_packed_weights(subject.program, index, entries).begins
    except OSError as error:
        raise WeightsFileError(f"the weights file {weights} cannot be read: {error}") from error
    found = f"{weights.name}, {len(begins)} of {len(subject.weights)} weights packed" if begins else weights.name
    return replace(subject, begins=begins, weights_file=found)


def _of_pt2(path: Path) -> Subject:
    open_regular(path, PackageError).close()
    program = read_program(path)
    return Subject(path, program, page_bytes_on(program.device, program.weight_bytes))


def _of_pte(path: Path) -> Subject:
    lowered = read_lowered(path)
    return Subject(path, lowered.program, lowered.page_bytes, lowered.plan_bytes)
