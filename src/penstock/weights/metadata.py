"""What a .ptd of ours carries beyond the FlatTensor tables: identity, dtypes, kinds and checksums, as JSON, sealed.

The seal covers the whole index: the file from its first byte to the end of the flatbuffer, which maps names to
offsets, and the JSON itself. So two entries of one shape cannot trade places unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.schema import SchemaError, parse_json
from penstock.sealed_text import sealed, unsealed
from penstock.weights.format import METADATA_KEY, PLANS_PREFIX
from penstock.weights.packed_format import KINDS as PACKED_KINDS
from penstock.weights.packed_format import VERSIONS as PACKED_VERSIONS
from penstock.weights.packed_format import Packing, kind_of, versions_of

METADATA_FORMAT = 2
# For files with a packed entry. All others keep the number above, so readers that do not know packing can read them.
PACKED_METADATA_FORMAT = 3
# For packed files with plans for a program.
PLANS_METADATA_FORMAT = 4
KINDS = ("weight", "state", "plans")
_PACKED_FORMATS = sorted({*PACKED_VERSIONS.values()})

_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Record:
    """One set of bytes in the file, under all its names."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    kind: str
    # Of the tensor's bytes, packed or not.
    checksum: int
    packing: Packing | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Metadata:
    identity: str
    records: tuple[Record, ...]


def encode_metadata(identity: str, records: Sequence[Record], head: bytes) -> bytes:
    """`head` is the file up to the end of its flatbuffer. The length of the result depends neither on it nor on
    checksums, so room can be left before they are known."""
    entries = [
        {
            "name": record.name,
            "aliases": record.aliases,
            "dtype": record.dtype,
            "shape": record.shape,
            "dim_order": record.dim_order,
            "kind": record.kind,
            "xxh3_64": f"{record.checksum:016x}",
            **_packed(record.packing),
        }
        for record in records
    ]
    packed = any(record.packing is not None for record in records)
    version = PACKED_METADATA_FORMAT if packed else METADATA_FORMAT
    if any(record.kind == "plans" for record in records):
        version = PLANS_METADATA_FORMAT
    document = {"format": version, "identity": identity, "entries": entries}
    return sealed(json.dumps(document, separators=(",", ":")), head)


def _packed(packing: Packing | None) -> dict[str, Any]:
    if packing is None:
        return {}
    return {"packed": {"format": PACKED_VERSIONS[packing.kind], "xxh3_64": f"{packing.checksum:016x}"}}


def decode_metadata(path: Path, raw: bytes, head: bytes) -> Metadata:
    """Checks the seal, the types and the format's number. The index checks whether records fit the tables."""
    try:
        top = _Object(path, METADATA_KEY, parse_json(raw.decode()))
        version = top.typed("format", int)
        if version not in (METADATA_FORMAT, PACKED_METADATA_FORMAT, PLANS_METADATA_FORMAT):
            hint = "penstock.compile again" if version < METADATA_FORMAT else "a newer Penstock wrote it"
            raise WeightsFileError(
                f"{path}: {METADATA_KEY} has format {version}, needs {METADATA_FORMAT}, {PACKED_METADATA_FORMAT} or"
                f" {PLANS_METADATA_FORMAT}: {hint}"
            )
        unsealed(raw, head)
    except UnicodeDecodeError as error:
        raise WeightsFileError(f"{path}: {METADATA_KEY} is not JSON: {error}") from error
    except SchemaError as error:
        raise WeightsFileError(f"{path}: {METADATA_KEY} is damaged, or the index is: {error}") from error
    entries = top.typed("entries", list)
    return Metadata(
        identity=top.text("identity"),
        records=tuple(
            _record(_Object(path, f"{METADATA_KEY} entry {i}", entry), version) for i, entry in enumerate(entries)
        ),
    )


def _record(entry: _Object, version: int) -> Record:
    name = entry.text("name")
    entry = _Object(entry.path, f"{METADATA_KEY} entry {printable(name)!r}", entry.value)
    kind = entry.text("kind")
    known = KINDS if version == PLANS_METADATA_FORMAT else KINDS[:2]
    if kind not in known:
        entry.fail("kind", kind, " or ".join(known))
    if kind == "plans":
        _check_plans(entry, name)
    return Record(
        name=name,
        aliases=entry.items("aliases", str),
        dtype=entry.text("dtype"),
        shape=entry.items("shape", int),
        dim_order=entry.items("dim_order", int),
        kind=kind,
        checksum=_checksum(entry),
        packing=_packing(entry) if version >= PACKED_METADATA_FORMAT and "packed" in entry.value else None,
    )


def _check_plans(entry: _Object, name: str) -> None:
    """Plans are bytes for whoever runs the program of that name, not a tensor of it."""
    if not name.startswith(PLANS_PREFIX):
        entry.fail("name", name, f"{PLANS_PREFIX} and the name of a program, as it holds plans")
    shape = entry.items("shape", int)
    if entry.text("dtype") != "uint8" or len(shape) != 1:
        entry.fail(
            "dtype", f"{entry.text('dtype')} of shape {list(shape)}", "uint8 of one dimension, as it holds plans"
        )


def _packing(entry: _Object) -> Packing:
    packed = _Object(entry.path, f"{entry.where}: packed", entry.value["packed"])
    version = packed.typed("format", int)
    if version not in _PACKED_FORMATS:
        packed.fail("format", version, f"{' or '.join(map(str, _PACKED_FORMATS))}, which this Penstock reads")
    dtype, kind = entry.text("dtype"), entry.text("kind")
    if dtype not in PACKED_KINDS:
        entry.fail("dtype", dtype, f"{' or '.join(PACKED_KINDS)}, as it is packed")
    packed_kind = kind_of(dtype, version)
    if packed_kind is None:
        packed.fail("format", version, f"{' or '.join(map(str, versions_of(dtype)))}, as it is {dtype}")
    if kind != "weight":
        entry.fail("kind", kind, "weight, as it is packed")
    return Packing(packed_kind, _checksum(packed))


def _checksum(entry: _Object) -> int:
    checksum = entry.text("xxh3_64")
    if not _CHECKSUM.fullmatch(checksum):
        entry.fail("xxh3_64", checksum, "16 hexadecimal digits")
    return int(checksum, 16)


class _Object:
    """A JSON object whose values are all read by name and type."""

    def __init__(self, path: Path, where: str, value: Any) -> None:
        self.path = path
        self.where = where
        self.value = value
        if type(value) is not dict:
            raise WeightsFileError(f"{path}: {where} has type {type(value).__name__}, needs dict")

    def fail(self, name: str, has: object, needs: str) -> NoReturn:
        # A list or an object may be nested too deeply to be printed.
        shown = type(has).__name__ if isinstance(has, list | dict) else printable(f"{has!r:.200}")
        raise WeightsFileError(f"{self.path}: {self.where}: {name} has {shown}, needs {needs}")

    def typed(self, name: str, kind: type) -> Any:
        value = self.value.get(name)
        # Not isinstance: True is not a number here.
        if type(value) is not kind:
            self.fail(name, value, kind.__name__)
        return value

    def text(self, name: str) -> str:
        value: str = self.typed(name, str)
        # JSON can spell half a surrogate pair, which no terminal, file or flatbuffer can hold.
        if not value.isascii() and value != value.encode(errors="replace").decode():
            self.fail(name, value, "a string that UTF-8 can hold")
        return value

    def items(self, name: str, kind: type) -> tuple[Any, ...]:
        values = self.typed(name, list)
        for value in values:
            if type(value) is not kind:
                self.fail(name, value, f"a list of {kind.__name__}")
        return tuple(values)
