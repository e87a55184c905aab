"""What a lowered program carries, in two layers of plain bytes. csrc/payload.cpp reads the same.

The payload, once per program, lies in the .pte as named data: the description (JSON), plans, the compiled code.
The ticket, one per delegate, is the delegate's own blob: the name of the payload, and which of its methods it is.
Both begin with a header that holds lengths and a hash of everything after it, so damage is found before anything runs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PackageError
from penstock.executorch.description import check_description
from penstock.printable import printable
from penstock.schema import SchemaError, parse_json

PAYLOAD_MAGIC = b"PNSTKPRG"
TICKET_MAGIC = b"PNSTKDLG"
FORMAT_VERSION = 6

# Magic, version, hash of what follows; then the lengths of the parts.
_HEAD = struct.Struct("<8sQQ")
_LENGTHS = struct.Struct("<QQQ")
_PLAN = struct.Struct("<QQ")

_FNV_START = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = 2**64 - 1

# The number of a weight stands above these bits of a source offset, until the file is known.
WEIGHT_SHIFT = 40


@dataclass(frozen=True)
class StoredPlan:
    """A plan, made ahead: it fits every budget of `device_bytes` or more."""

    device_bytes: int
    # As penstock.runtime.records writes them, with source offsets of (number of the weight << WEIGHT_SHIFT) + offset.
    numbers: bytes

    def packed(self) -> bytes:
        return _PLAN.pack(self.device_bytes, len(self.numbers) // 8) + self.numbers

    @property
    def seal(self) -> int:
        """Of the plan as it stands in the file, its size included."""
        return fnv64(self.packed())


def pack_payload(description: Mapping[str, Any], plans: Sequence[StoredPlan], code: bytes) -> bytes:
    text = json.dumps(description).encode()
    table = b"".join(plan.packed() for plan in plans)
    return _sealed(PAYLOAD_MAGIC, _LENGTHS.pack(len(text), len(table), len(code)) + text + table + code)


def pack_ticket(ticket: Mapping[str, Any]) -> bytes:
    text = json.dumps(ticket).encode()
    return _sealed(TICKET_MAGIC, _LENGTHS.pack(len(text), 0, 0) + text)


def read_description(payload: bytes) -> dict[str, Any]:
    if len(payload) < _HEAD.size + _LENGTHS.size:
        raise PackageError(f"the payload has {len(payload)} bytes, its header needs {_HEAD.size + _LENGTHS.size}")
    magic, version, seal = _HEAD.unpack_from(payload)
    if magic != PAYLOAD_MAGIC or version != FORMAT_VERSION:
        raise PackageError(
            f"the payload begins with {magic!r} of version {version}, needs {PAYLOAD_MAGIC!r} of {FORMAT_VERSION}"
        )
    if seal != fnv64(payload[_HEAD.size :]):
        raise PackageError("the payload is damaged: its bytes do not have the hash that its header names")
    text_bytes = _LENGTHS.unpack_from(payload, _HEAD.size)[0]
    start = _HEAD.size + _LENGTHS.size
    try:
        found: dict[str, Any] = parse_json(payload[start : start + text_bytes].decode())
        check_description(found)
    except (SchemaError, UnicodeDecodeError) as error:
        raise PackageError(f"what the delegates share is damaged: {printable(str(error))}") from error
    return found


def _sealed(magic: bytes, body: bytes) -> bytes:
    return _HEAD.pack(magic, FORMAT_VERSION, fnv64(body)) + body


def fnv64(data: bytes) -> int:
    """FNV-1a over little-endian words of 8 bytes, and then over the bytes that are left."""
    value = _FNV_START
    words = len(data) // 8
    for (word,) in struct.iter_unpack("<Q", data[: words * 8]):
        value = ((value ^ word) * _FNV_PRIME) & _MASK
    for byte in data[words * 8 :]:
        value = ((value ^ byte) * _FNV_PRIME) & _MASK
    return value
