"""What a lowered program carries, in two layers of plain bytes. csrc/payload.cpp reads the same, and refuses with
the same messages.

The payload, once per program, lies in the .pte as named data: the description, plans, the compiled code.
The delegate ref, one per delegate, is the delegate's own blob: the name of the payload, and which of its methods it is.
Both begin with a header that holds lengths and a checksum of everything after it, so damage is found before anything
runs. Description, delegate refs and plans are flat records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock.errors import PackageError
from penstock.executorch.description import DelegateRef, Description, PlanRow, read_description
from penstock.printable import printable
from penstock.record import VERSION, to_record
from penstock.schema import SchemaError

PAYLOAD_MAGIC = b"PNSTKPRG"
DELEGATE_REF_MAGIC = b"PNSTKDLG"

# Magic, version, checksum of what follows; then the lengths of the parts.
_HEAD = struct.Struct("<8sQQ")
_LENGTHS = struct.Struct("<QQQ")
HEADER_BYTES = _HEAD.size + _LENGTHS.size


@dataclass(frozen=True)
class StoredPlan:
    """A plan made ahead of time. It fits every budget of `device_bytes` or more."""

    device_bytes: int
    # As penstock.runtime.records writes them.
    numbers: bytes
    is_copying: bool = True

    def row(self) -> PlanRow:
        return PlanRow(self.device_bytes, int(self.is_copying), len(self.numbers) // 8, record_seal(self.numbers))


@dataclass(frozen=True)
class Payload:
    description: Description
    plans: bytes
    code: bytes


def checksum(data: bytes) -> int:
    """The checksum that weights files have and that penstock_checksum of the core computes."""
    return xxhash.xxh3_64_intdigest(data)


def record_seal(data: bytes) -> int:
    """The checksum as a record holds it: a signed number."""
    (seal,) = struct.unpack("<q", struct.pack("<Q", checksum(data)))
    return int(seal)


def pack_payload(description: Description, plans: Sequence[StoredPlan], code: bytes) -> bytes:
    """`plans`: those that the description lists, in its order."""
    return sealed_parts(PAYLOAD_MAGIC, to_record(description), b"".join(plan.numbers for plan in plans), code)


def pack_delegate_ref(ref: DelegateRef) -> bytes:
    return sealed_parts(DELEGATE_REF_MAGIC, to_record(ref), b"", b"")


def read_payload(data: bytes) -> Payload:
    if len(data) < HEADER_BYTES:
        raise PackageError(f"the program has {len(data)} bytes, its header needs {HEADER_BYTES}")
    magic, version, seal = _HEAD.unpack_from(data)
    if magic != PAYLOAD_MAGIC:
        raise PackageError("the program does not begin as one does: it was not written by Penstock")
    if version != VERSION:
        raise PackageError(
            f"the program has format version {version}, and this release reads version {VERSION}: lower it again, with "
            "penstock.executorch.export or with CudaPartitioner"
        )
    lengths = _LENGTHS.unpack_from(data, _HEAD.size)
    if sum(lengths) > len(data) - HEADER_BYTES:
        raise PackageError(f"the program is truncated: it has {len(data)} bytes")
    if sum(lengths) < len(data) - HEADER_BYTES:
        raise PackageError(f"the program has {len(data) - HEADER_BYTES - sum(lengths)} bytes too many")
    if seal != checksum(data[_HEAD.size :]):
        raise PackageError("the program is damaged: its bytes do not have the checksum that its header names")
    plans = HEADER_BYTES + lengths[0]
    code = plans + lengths[1]
    return Payload(checked_description(data[HEADER_BYTES:plans]), data[plans:code], data[code:])


def checked_description(record: bytes) -> Description:
    try:
        return read_description(record)
    except SchemaError as error:
        raise PackageError(f"what the delegates share is damaged: {printable(str(error))}") from error


def payload_bytes(header: bytes) -> int:
    """The size of a whole payload, by its header."""
    lengths: tuple[int, ...] = _LENGTHS.unpack_from(header, _HEAD.size)
    return HEADER_BYTES + sum(lengths)


def sealed_parts(magic: bytes, *parts: bytes) -> bytes:
    """Seals record, plans and code as they are given. An entry of packed plans has the same layout."""
    body = _LENGTHS.pack(*map(len, parts)) + b"".join(parts)
    return _HEAD.pack(magic, VERSION, checksum(body)) + body
