"""A program as `inspect`, `plan` and `verify` look at it: the same questions of a .pt2 and of a .pte. No torch."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.errors import PackageError, ScheduleError
from penstock.executorch.payload import PAYLOAD_MAGIC, read_description
from penstock.plan.direct import read_directly_by_default, stand_ins
from penstock.plan.floor import Floor, floor_bytes
from penstock.plan.pages import page_bytes_on
from penstock.plan.planner import Planner
from penstock.program import Program, program_from_archive, read_program
from penstock.regular_file import open_regular
from penstock.schedule import Schedule
from penstock.weight import Weight

_MOST_PAGE_BYTES = 1 << 30

# What reading a description, its records and an archive raises where they are damaged.
_DAMAGE = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    *(struct.error, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
)

_HEAD_AND_LENGTHS = struct.Struct("<8sQQQQQ")
_RUNG = struct.Struct("<QQ")


@dataclass(frozen=True)
class Subject:
    path: Path
    program: Program
    page_bytes: int
    # Of a .pte: device bytes of the plans that were made at export for all delegates together, smallest first.
    rung_bytes: tuple[int, ...] = ()

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
    """The delegates as methods: what the .pt2 inside the .pte says of itself."""
    payload = _payload(path)
    try:
        description = read_description(payload)
        _, _, _, text_bytes, table_bytes, _ = _HEAD_AND_LENGTHS.unpack_from(payload)
        table = _HEAD_AND_LENGTHS.size + text_bytes
        program = program_from_archive(io.BytesIO(payload[table + table_bytes :]), "its code")
        rungs = _rungs(payload, table, description["ladders"][0]["rungs"])
        page_bytes = description["page_bytes"]
        if type(page_bytes) is not int or not 0 < page_bytes <= _MOST_PAGE_BYTES:
            raise PackageError(f"its pages have {page_bytes!r:.80} bytes; needs 1 to {_MOST_PAGE_BYTES}")
        return Subject(path, program, page_bytes, rungs)
    except PackageError as error:
        raise PackageError(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise PackageError(f"{path}: what its delegates share is damaged: {error!r}") from error


def _payload(path: Path) -> bytes:
    """What all delegates share. It is found by its magic; that it is the right one is shown by its seal."""
    try:
        with open_regular(path, PackageError) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            at = mapped.find(PAYLOAD_MAGIC)
            if at < 0 or at + _HEAD_AND_LENGTHS.size > len(mapped):
                raise PackageError(f"{path} has no delegate of ours: there is no {PAYLOAD_MAGIC.decode()} in it")
            _, _, _, *lengths = _HEAD_AND_LENGTHS.unpack_from(mapped, at)
            return mapped[at : at + _HEAD_AND_LENGTHS.size + sum(lengths)]
    except (OSError, ValueError) as error:  # an empty file, for one
        raise PackageError(f"{path} cannot be read: {error}") from error


def _rungs(payload: bytes, at: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    for _ in range(count):
        device_bytes, numbers = _RUNG.unpack_from(payload, at)
        found.append(device_bytes)
        at += _RUNG.size + 8 * numbers
    return tuple(found)
