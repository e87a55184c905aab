"""Flat records: 64-bit little-endian numbers, the version first. What C++ must know of a program is written this way.

include/penstock_records.h reads them, in the core and in the ExecuTorch delegate: a reader that checks every count
against the numbers that are left needs no grammar, and allocates nothing for what it refuses. Dataclasses are written
field by field: a number as it is; text as its length in bytes, then the bytes, padded with zeros to whole numbers; a
tuple, or a value that may be None, as its length and its items; a dict as its length, with each key before its value.
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from penstock.schema import SchemaError, Signed

T = TypeVar("T")

# The first number of every record. The same in include/penstock_records.h.
VERSION = 10

_WORD_BYTES = 8


def to_record(value: Any) -> bytes:
    """A dataclass of numbers, text, tuples, dicts of text and dataclasses."""
    return b"".join([_number(VERSION), *_written(type(value), value)])


def from_record(kind: type[T], data: bytes) -> T:
    """Raises SchemaError unless the bytes are exactly one record of this kind."""
    reader = _Reader(data)
    version = reader.number()
    if version != VERSION:
        raise SchemaError(f"it has records of version {version}, needs version {VERSION}")
    found: T = reader.value(kind, "")
    reader.finish()
    return found


def _number(value: int) -> bytes:
    return value.to_bytes(_WORD_BYTES, "little", signed=True)


def _written(kind: Any, value: Any) -> Iterator[bytes]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        for name, hint in _hints(kind).items():
            yield from _written(hint, getattr(value, name))
    elif kind is str:
        raw = value.encode()
        yield _number(len(raw)) + raw + bytes(-len(raw) % _WORD_BYTES)
    elif origin in (tuple, dict, types.UnionType):
        items = (() if value is None else (value,)) if origin is types.UnionType else value
        yield _number(len(items))
        for item in items:
            yield from _written(parts[0], item)
            if origin is dict:
                yield from _written(parts[1], value[item])
    else:
        yield _number(value)


def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


class _Reader:
    def __init__(self, data: bytes) -> None:
        if len(data) % _WORD_BYTES:
            raise SchemaError(f"its record has {len(data)} bytes, no whole numbers of {_WORD_BYTES}")
        self._data = data
        self._at = 0

    def number(self) -> int:
        if self._at >= len(self._data):
            raise SchemaError(f"its record ends after {len(self._data) // _WORD_BYTES} numbers")
        (found,) = struct.unpack_from("<q", self._data, self._at)
        self._at += _WORD_BYTES
        return int(found)

    def value(self, kind: Any, where: str) -> Any:
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return kind(**{n: self.value(hint, f"{where}.{n}" if where else n) for n, hint in _hints(kind).items()})
        if kind is str:
            return self._text(where)
        if origin is tuple:
            return tuple(self.value(parts[0], f"{where}[{index}]") for index in range(self._count(where, self._left)))
        if origin is dict:
            pairs = [(self._text(where), self._text(where)) for _ in range(self._count(where, self._left // 2))]
            if len(dict(pairs)) != len(pairs):
                raise SchemaError(f"{where} has a key twice")
            return dict(pairs)
        if origin is types.UnionType:
            return self.value(parts[0], where) if self._count(where, 1) else None
        found = self.number()
        if kind != Signed and found < 0:
            raise SchemaError(f"{where} is {found}, needs a whole number of 0 or more")
        return found

    def finish(self) -> None:
        if self._left:
            raise SchemaError(f"its record has {self._left} numbers too many")

    @property
    def _left(self) -> int:
        return (len(self._data) - self._at) // _WORD_BYTES

    def _count(self, where: str, most: int) -> int:
        found = self.number()
        # Each item takes at least one number, and the count itself took one.
        if not 0 <= found <= min(most, self._left):
            raise SchemaError(f"{where} has {found} items, at most {min(most, self._left)} can follow")
        return found

    def _text(self, where: str) -> str:
        count = self.number()
        if not 0 <= count <= self._left * _WORD_BYTES:
            raise SchemaError(f"{where} has {count} bytes, at most {self._left * _WORD_BYTES} can follow")
        raw = self._data[self._at : self._at + count]
        end = self._at + count + -count % _WORD_BYTES
        if any(self._data[self._at + count : end]):
            raise SchemaError(f"{where} is not filled up with zeros")
        self._at = end
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise SchemaError(f"{where} is not text: {error}") from error
