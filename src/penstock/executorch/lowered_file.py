"""What a .pte with delegates of ours says of itself, read off its bytes: nothing of it is loaded or run. No torch."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PackageError
from penstock.executorch.payload import PAYLOAD_MAGIC, read_description
from penstock.program import Program, program_from_archive
from penstock.regular_file import open_regular

_MOST_PAGE_BYTES = 1 << 30

# What reading a description, its records and an archive raises where they are damaged.
_DAMAGE = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    *(struct.error, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
)

_HEAD_AND_LENGTHS = struct.Struct("<8sQQQQQ")
_PLAN = struct.Struct("<QQ")


@dataclass(frozen=True)
class LoweredFile:
    # The delegates as methods: what the .pt2 inside the .pte says of itself.
    program: Program
    page_bytes: int
    # Device bytes of the plans that were made at export for all delegates together, smallest first.
    plan_bytes: tuple[int, ...]
    # All names of each weight; the program has the first.
    weight_names: tuple[tuple[str, ...], ...]


def read_lowered(path: Path) -> LoweredFile:
    payload = _payload(path)
    try:
        description = read_description(payload)
        _, _, _, text_bytes, table_bytes, _ = _HEAD_AND_LENGTHS.unpack_from(payload)
        table = _HEAD_AND_LENGTHS.size + text_bytes
        program = program_from_archive(io.BytesIO(payload[table + table_bytes :]), "its code")
        plans = _plan_bytes(payload, table, description["plan_tables"][0]["plans"])
        page_bytes = description["page_bytes"]
        if type(page_bytes) is not int or not 0 < page_bytes <= _MOST_PAGE_BYTES:
            raise PackageError(f"its pages have {page_bytes!r:.80} bytes; needs 1 to {_MOST_PAGE_BYTES}")
        names = tuple(tuple(row["names"]) for row in description["weights"])
        return LoweredFile(program, page_bytes, plans, names)
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


def _plan_bytes(payload: bytes, at: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    for _ in range(count):
        device_bytes, numbers = _PLAN.unpack_from(payload, at)
        found.append(device_bytes)
        at += _PLAN.size + 8 * numbers
    return tuple(found)
