"""A program as `inspect`, `plan` and `verify` look at it: the same questions of a .pt2 and of a .pte. No torch."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.errors import PackageError
from penstock.executorch.payload import PAYLOAD_MAGIC, read_description
from penstock.plan.direct import read_directly_by_default, stand_ins
from penstock.plan.floor import Floor, floor_bytes
from penstock.plan.modes import ModePlanner
from penstock.plan.pages import page_bytes_on
from penstock.program import METADATA_FILE, Program, program_from_json, read_program
from penstock.schedule import Schedule
from penstock.weight import Weight

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

    def planner(self, mode: str, page_bytes: int | None = None) -> ModePlanner:
        return ModePlanner(self.schedules, self.weights, page_bytes=page_bytes or self.page_bytes, mode=mode)

    def floor(self) -> Floor:
        """By the formula, in exact bytes, before pages: what sets it."""
        return floor_bytes(*stand_ins(self.schedules, self.weights, read_directly_by_default))


def read_subject(path: Path) -> Subject:
    if path.suffix == ".pte":
        return _of_pte(path)
    program = read_program(path)
    return Subject(path, program, page_bytes_on(program.device, program.weight_bytes))


def _of_pte(path: Path) -> Subject:
    """The delegates as methods: what the .pt2 inside the .pte says of itself."""
    payload = _payload(path)
    try:
        description = read_description(payload)
        _, _, _, text_bytes, table_bytes, _ = _HEAD_AND_LENGTHS.unpack_from(payload)
        table = _HEAD_AND_LENGTHS.size + text_bytes
        with zipfile.ZipFile(io.BytesIO(payload[table + table_bytes :])) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(f"/extra/{METADATA_FILE}")]
            program = program_from_json(archive.read(name).decode())
        rungs = _rungs(payload, table, description["ladders"][0]["rungs"])
        return Subject(path, program, description["page_bytes"], rungs)
    except PackageError as error:
        raise PackageError(f"{path}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, struct.error, zipfile.BadZipFile) as error:
        raise PackageError(f"{path}: what its delegates share is damaged: {error!r}") from error


def _payload(path: Path) -> bytes:
    """What all delegates share. It is found by its magic; that it is the right one is shown by its seal."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            at = mapped.find(PAYLOAD_MAGIC)
            if at < 0 or at + _HEAD_AND_LENGTHS.size > len(mapped):
                raise PackageError(f"{path} has no delegate of ours: there is no {PAYLOAD_MAGIC.decode()} in it")
            _, _, _, *lengths = _HEAD_AND_LENGTHS.unpack_from(mapped, at)
            return mapped[at : at + _HEAD_AND_LENGTHS.size + sum(lengths)]
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:  # a folder, a file without permission, an empty file
        raise PackageError(f"{path} cannot be read: {error}") from error


def _rungs(payload: bytes, at: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    for _ in range(count):
        device_bytes, numbers = _RUNG.unpack_from(payload, at)
        found.append(device_bytes)
        at += _RUNG.size + 8 * numbers
    return tuple(found)
