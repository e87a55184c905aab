"""Reading a flatbuffer that may be damaged. The flatbuffers runtime for Python trusts every offset; this does not."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.errors import WeightsFileError

_WIDTHS: dict[str, int] = {code: struct.calcsize("<" + code) for code in "BbHIiQ"}


@dataclass(frozen=True)
class Buffer:
    """The bytes of one flatbuffer. Every read is checked against their end; a fault names the field it was for."""

    path: Path
    data: bytes

    def fail(self, where: str, fault: str) -> NoReturn:
        raise WeightsFileError(f"{self.path}: the index is damaged: {where} {fault}")

    def check(self, at_bytes: int, count_bytes: int, where: str) -> None:
        if at_bytes < 0 or at_bytes + count_bytes > len(self.data):
            self.fail(where, f"needs bytes {at_bytes} to {at_bytes + count_bytes}, the index has {len(self.data)}")

    def number(self, at_bytes: int, code: str, where: str) -> int:
        self.check(at_bytes, _WIDTHS[code], where)
        value: int = struct.unpack_from("<" + code, self.data, at_bytes)[0]
        return value

    def target(self, at_bytes: int, where: str) -> int:
        """Follows an offset, which in a flatbuffer always points forward."""
        offset_bytes = self.number(at_bytes, "I", where)
        if offset_bytes == 0:
            self.fail(where, "has offset 0, needs an offset that points forward")
        return at_bytes + offset_bytes

    def root(self) -> Table:
        return Table(self, self.target(0, "the root table"), "the root table")


class Table:
    """A table: fields by slot number, each of which may be absent."""

    def __init__(self, buffer: Buffer, at_bytes: int, where: str) -> None:
        self.where = where
        self._buffer = buffer
        self._at_bytes = at_bytes
        self._vtable_bytes = at_bytes - buffer.number(at_bytes, "i", where)
        self._vtable_size_bytes = buffer.number(self._vtable_bytes, "H", where)

    def _field(self, slot: int) -> int | None:
        # The vtable starts with its own size and the table's size; the slots follow.
        entry_bytes = 4 + 2 * slot
        if entry_bytes + 2 > self._vtable_size_bytes:
            return None
        offset_bytes = self._buffer.number(self._vtable_bytes + entry_bytes, "H", self.where)
        return self._at_bytes + offset_bytes if offset_bytes else None

    def _vector(self, slot: int, item_bytes: int, where: str) -> tuple[int, int] | None:
        """Where a vector's first item lies, and how many items it has."""
        field = self._field(slot)
        if field is None:
            return None
        start_bytes = self._buffer.target(field, where)
        count = self._buffer.number(start_bytes, "I", where)
        self._buffer.check(start_bytes + 4, count * item_bytes, where)
        return start_bytes + 4, count

    def number(self, slot: int, name: str, code: str) -> int:
        """A scalar; an absent one is zero, the default of every scalar in the schema."""
        field = self._field(slot)
        return 0 if field is None else self._buffer.number(field, code, f"{self.where}.{name}")

    def table(self, slot: int, name: str) -> Table | None:
        where = f"{self.where}.{name}"
        field = self._field(slot)
        return None if field is None else Table(self._buffer, self._buffer.target(field, where), where)

    def numbers(self, slot: int, name: str, code: str, limit: int) -> tuple[int, ...]:
        """A vector of scalars, which must be present. `limit` keeps shared vectors from multiplying the work."""
        where = f"{self.where}.{name}"
        vector = self._vector(slot, _WIDTHS[code], where)
        if vector is None:
            self._buffer.fail(where, "is absent, needs to be a vector")
        start_bytes, count = vector
        if count > limit:
            self._buffer.fail(where, f"has {count} items, needs at most {limit}")
        return struct.unpack_from(f"<{count}{code}", self._buffer.data, start_bytes)

    def tables(self, slot: int, name: str) -> Iterator[Table]:
        """A vector of tables, which must be present."""
        vector = self._vector(slot, 4, name)
        if vector is None:
            self._buffer.fail(name, "is absent, needs to be a vector")
        start_bytes, count = vector
        for index in range(count):
            where = f"{name}[{index}]"
            yield Table(self._buffer, self._buffer.target(start_bytes + 4 * index, where), where)

    def text(self, slot: int, name: str, limit_bytes: int) -> str:
        """A string, which must be present. Its length is checked before it is copied."""
        where = f"{self.where}.{name}"
        vector = self._vector(slot, 1, where)
        if vector is None:
            self._buffer.fail(where, "is absent, needs to be a string")
        start_bytes, count = vector
        if count > limit_bytes:
            self._buffer.fail(where, f"has {count} bytes, needs at most {limit_bytes}")
        try:
            return self._buffer.data[start_bytes : start_bytes + count].decode()
        except UnicodeDecodeError as error:
            self._buffer.fail(where, f"is not UTF-8 at byte {error.start} of {count}")
