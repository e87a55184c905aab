"""What a .pte with our delegates says about itself, read from its bytes. Nothing of it is loaded or run. No torch."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PackageError
from penstock.executorch.payload import HEADER_BYTES, PAYLOAD_MAGIC, payload_bytes, read_payload
from penstock.program import Program, program_from_archive
from penstock.regular_file import open_regular

# What reading a damaged archive raises.
_DAMAGE = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    *(struct.error, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
)


@dataclass(frozen=True)
class LoweredFile:
    # A hash of its code, which tells it from other programs.
    name: str
    # The delegates as methods: what the .pt2 inside the .pte says about itself.
    program: Program
    page_bytes: int
    # Device bytes of the plans that were made at export for all delegates together, smallest first.
    plan_bytes: tuple[int, ...]
    # All names of each weight; the program uses the first.
    weight_names: tuple[tuple[str, ...], ...]


def read_lowered(path: Path) -> LoweredFile:
    open_regular(path, PackageError).close()
    try:
        payload = read_payload(_payload(path))
        program = program_from_archive(io.BytesIO(payload.code), "its code")
    except PackageError as error:
        raise PackageError(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise PackageError(f"{path}: what its delegates share is damaged: {error!r}") from error
    description = payload.description
    plan_bytes = tuple(plan.device_bytes for plan in description.plan_tables[0].plans)
    names = tuple(weight.names for weight in description.weights)
    return LoweredFile(description.program, program, description.page_bytes, plan_bytes, names)


def _payload(path: Path) -> bytes:
    """What all delegates share. It is found by its magic; its seal shows that it is the right one."""
    try:
        with open_regular(path, PackageError) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            at = mapped.find(PAYLOAD_MAGIC)
            if at < 0 or at + HEADER_BYTES > len(mapped):
                raise PackageError(f"it has no Penstock delegate: there is no {PAYLOAD_MAGIC.decode()} in it")
            return mapped[at : at + payload_bytes(mapped[at : at + HEADER_BYTES])]
    except (OSError, ValueError) as error:  # an empty file, for one
        raise PackageError(f"it cannot be read: {error}") from error
