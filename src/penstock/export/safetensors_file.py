"""Reads safetensors checkpoints: a file, a folder of them, or shards with an index. The table first, data in pieces."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.export.values import PIECE_BYTES, tensor_pieces
from penstock.layout import contiguous_strides
from penstock.weight import ITEM_BYTES

# The dtype names of the safetensors format.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, contiguous, in row-major order."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


def stored_pieces(stored: StoredTensor, dim_order: Sequence[int]) -> Iterator[memoryview]:
    try:
        with stored.path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < stored.offset_bytes + stored.length_bytes:
                raise _changed(stored)
            if tuple(dim_order) == tuple(range(len(dim_order))):
                yield from _file_pieces(stored, file.fileno())
            else:
                yield from _permuted_pieces(stored, dim_order, file.fileno())
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {stored.name!r} cannot be read: {error}") from error


def _changed(stored: StoredTensor) -> CheckpointError:
    return CheckpointError(f"{stored.path}: {stored.name!r} ends early; the file changed while it was read")


def _file_pieces(stored: StoredTensor, fd: int) -> Iterator[memoryview]:
    # Reads, not a mapping: mapped pages would count as this process's memory until the kernel drops them.
    buffer = bytearray(min(PIECE_BYTES, stored.length_bytes))
    done = 0
    while done < stored.length_bytes:
        view = memoryview(buffer)[: min(PIECE_BYTES, stored.length_bytes - done)]
        count = os.preadv(fd, [view], stored.offset_bytes + done)
        if count == 0:
            raise _changed(stored)
        yield view[:count]
        done += count


def _permuted_pieces(stored: StoredTensor, dim_order: Sequence[int], fd: int) -> Iterator[memoryview]:
    if stored.length_bytes:
        yield from tensor_pieces(_mapped(stored, fd), dim_order)


def stored_tensor(stored: StoredTensor) -> torch.Tensor:
    """The whole tensor, mapped: its bytes are read when they are used."""
    try:
        with stored.path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < stored.offset_bytes + stored.length_bytes:
                raise _changed(stored)
            if not stored.length_bytes:
                return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")
            return _mapped(stored, file.fileno())
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {stored.name!r} cannot be read: {error}") from error


def _mapped(stored: StoredTensor, fd: int) -> torch.Tensor:
    start = stored.offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    shift = stored.offset_bytes - start
    # A private copy-on-write mapping, only because torch wants writable memory; nothing writes.
    mapped = mmap.mmap(fd, shift + stored.length_bytes, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=shift, count=stored.length_bytes)
    if stored.offset_bytes % ITEM_BYTES[stored.dtype]:
        flat = flat.clone()  # the file does not align the tensor for its own dtype
    # Name the CPU: the caller may have another default device, such as meta, on which such models are built.
    return torch.empty(0, dtype=getattr(torch, stored.dtype), device="cpu").set_(
        flat.untyped_storage(),
        flat.storage_offset() // ITEM_BYTES[stored.dtype],
        stored.shape,
        contiguous_strides(stored.shape),
    )


def read_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """A .safetensors file, or a folder with an index.json or with one or more .safetensors files."""
    try:
        return _read_checkpoint(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def _read_checkpoint(path: Path) -> dict[str, StoredTensor]:
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if path.is_file():
        return _read_index(path) if path.name.endswith(".index.json") else _read_header(path)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"checkpoint {path} has {len(indices)} index files; name the one to use")
    if indices:
        return _read_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"checkpoint {path} has no .safetensors file (other formats are not read)")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"checkpoint {path}: {name!r} is in {tensors[name].path.name} and in {file.name}")
            tensors[name] = stored
    return tensors


def _read_index(path: Path) -> dict[str, StoredTensor]:
    placed = _read_json(path, path.read_bytes(), "a checkpoint index").get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{path} is not a checkpoint index: it needs a weight_map of names and files")
    files = {file: path.parent / file for file in placed.values()}
    missing = sorted(name for name, file in files.items() if not file.is_file())
    if missing:
        raise CheckpointError(f"{path} names files that are not there: {', '.join(missing)}")
    headers = {name: _read_header(file) for name, file in files.items()}
    absent = sorted(f"{name!r} in {file}" for name, file in placed.items() if name not in headers[file])
    if absent:
        raise CheckpointError(f"{path} names tensors that are not there: {', '.join(absent)}")
    return {name: headers[file][name] for name, file in placed.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The table of a safetensors file: 8 bytes of length, JSON, data. The library gives no offsets, hence by hand."""
    with path.open("rb") as file:
        total_bytes = os.fstat(file.fileno()).st_size
        length_bytes = int.from_bytes(file.read(8), "little")
        if total_bytes < 8 or length_bytes > min(total_bytes - 8, 100_000_000):
            raise CheckpointError(f"{path} is not a safetensors file: its header would have {length_bytes} bytes")
        header = _read_json(path, file.read(length_bytes), "a safetensors file")
    header.pop("__metadata__", None)
    base_bytes = 8 + length_bytes
    tensors = {name: _stored_tensor(path, name, entry, base_bytes) for name, entry in header.items()}
    # The format stores one tensor after the other, without gaps. Anything else is a header of some other data.
    end_bytes = base_bytes
    for stored in sorted(tensors.values(), key=lambda stored: (stored.offset_bytes, stored.length_bytes)):
        if stored.offset_bytes != end_bytes:
            raise CheckpointError(
                f"{path}: {stored.name!r} starts at byte {stored.offset_bytes}, where the tensor before it ends at "
                f"{end_bytes}: the file is damaged"
            )
        end_bytes += stored.length_bytes
        if end_bytes > total_bytes:
            raise CheckpointError(
                f"{path}: {stored.name!r} ends at byte {end_bytes}, the file has {total_bytes}: it is truncated"
            )
    if end_bytes != total_bytes:
        raise CheckpointError(
            f"{path}: the last tensor ends at byte {end_bytes}, the file has {total_bytes}: it is damaged"
        )
    return tensors


def _read_json(path: Path, raw: bytes, kind: str) -> dict[str, Any]:
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not {kind}: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not {kind}: its JSON is not a table")
    return table


def _stored_tensor(path: Path, name: str, entry: Any, base_bytes: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    offsets, shape = _whole_numbers(fields.get("data_offsets")), _whole_numbers(fields.get("shape"))
    given = fields.get("dtype")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _malformed(path, name, fields, "data_offsets", "where it begins and ends")
    if shape is None:
        raise _malformed(path, name, fields, "shape", "a list of whole numbers")
    if not isinstance(given, str):
        raise _malformed(path, name, fields, "dtype", "a string")
    begin, end = offsets
    dtype = DTYPES.get(given, given)
    if dtype in ITEM_BYTES:
        needed = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != needed:
            raise CheckpointError(f"{path}: {name!r} has {end - begin} bytes where its shape needs {needed}")
    return StoredTensor(name, path, dtype, shape, base_bytes + begin, end - begin)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    # Not isinstance: True is no number here.
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _malformed(path: Path, name: str, fields: dict[str, Any], field: str, needs: str) -> CheckpointError:
    value = fields.get(field)
    # A table, or a list in a list, may be nested too deeply to be printed.
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value))
    shown = type(value).__name__ if nested else f"{value!r:.80}"
    return CheckpointError(f"{path} is not a safetensors file: {name!r} has {field} {shown}, needs {needs}")
