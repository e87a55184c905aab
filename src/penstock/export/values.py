"""Where the bytes of a weight come from: the program's own tensors, or safetensors checkpoints. Always in pieces."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.layout import contiguous_strides
from penstock.weight import ITEM_BYTES, State, Weight

PIECE_BYTES = 16 << 20

# The dtype names of the safetensors format.
_SAFETENSORS_DTYPES = {
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
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def tensor_pieces(tensor: torch.Tensor, dim_order: Sequence[int]) -> Iterator[memoryview]:
    """The tensor's bytes in storage order, in pieces of at most PIECE_BYTES (or one element)."""
    for slab in _slabs(tensor.detach().permute(tuple(dim_order))):
        plain = slab.resolve_conj().resolve_neg().cpu().contiguous()
        count = plain.numel() * plain.element_size()
        if count:
            # The address stays valid as long as `plain` does, which is until the consumer asks for the next piece.
            whole = memoryview((ctypes.c_char * count).from_address(plain.data_ptr())).cast("B")
            for start in range(0, count, PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts that can be made contiguous one at a time without a large copy."""
    count = tensor.numel() * tensor.element_size()
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if plain or count <= PIECE_BYTES or tensor.dim() == 0:
        yield tensor
        return
    row_bytes = count // tensor.shape[0]
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from _slabs(row)
    else:
        yield from tensor.split(max(1, PIECE_BYTES // row_bytes))


def has_value(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor"


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every byte is zero: what a fresh allocation can stand in for. (A float -0.0 is not.)"""
    zeros = bytes(PIECE_BYTES)
    return all(piece == zeros[: piece.nbytes] for piece in tensor_pieces(tensor, range(tensor.dim())))


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, whatever their strides."""
    order = range(a.dim())
    pairs = zip(tensor_pieces(a.contiguous(), order), tensor_pieces(b.contiguous(), order), strict=True)
    return all(x == y for x, y in pairs)


# ------------------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, contiguous, in row-major order."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Checkpoint:
    """Named tensors from safetensors files and from tensors given directly; later sources win."""

    def __init__(self, sources: Any) -> None:
        self._stored: dict[str, StoredTensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        listed = sources if isinstance(sources, (list, tuple)) else [sources]
        for source in listed:
            if isinstance(source, Mapping):
                for name, tensor in source.items():
                    if not isinstance(tensor, torch.Tensor) or not has_value(tensor):
                        raise CheckpointError(f"weights: {name!r} must be a tensor with values, got {tensor!r:.80}")
                    self._given[name] = tensor
            elif isinstance(source, (str, os.PathLike)):
                stored = read_checkpoint(Path(source))
                for name in stored:
                    self._given.pop(name, None)
                self._stored.update(stored)
            else:
                raise CheckpointError(
                    f"weights: expected a safetensors file, a folder of them, a mapping of tensors, or a list of those; "
                    f"got {type(source).__name__}"
                )
        self.description = ", ".join(str(s) if not isinstance(s, Mapping) else "given tensors" for s in listed)

    def __contains__(self, name: str) -> bool:
        return name in self._given or name in self._stored

    def find(self, names: Sequence[str]) -> str | None:
        """The first of a tied weight's names that the checkpoint has."""
        return next((name for name in names if name in self), None)

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self._given:
            tensor = self._given[name]
            return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        return self._stored[name].dtype, self._stored[name].shape

    def pieces(self, name: str, dim_order: Sequence[int]) -> Iterator[memoryview]:
        if name in self._given:
            yield from tensor_pieces(self._given[name], dim_order)
        elif tuple(dim_order) == tuple(range(len(dim_order))):
            yield from _file_pieces(self._stored[name])
        else:
            yield from _permuted_pieces(self._stored[name], dim_order)


def _file_pieces(stored: StoredTensor) -> Iterator[memoryview]:
    # Reads, not a mapping: mapped pages would count as this process's memory until the kernel drops them.
    buffer = bytearray(min(PIECE_BYTES, stored.length_bytes))
    with stored.path.open("rb", buffering=0) as file:
        done = 0
        while done < stored.length_bytes:
            view = memoryview(buffer)[: min(PIECE_BYTES, stored.length_bytes - done)]
            count = os.preadv(file.fileno(), [view], stored.offset_bytes + done)
            if count == 0:
                raise CheckpointError(f"{stored.path}: {stored.name!r} ends early; the file changed while it was read")
            yield view[:count]
            done += count


def _permuted_pieces(stored: StoredTensor, dim_order: Sequence[int]) -> Iterator[memoryview]:
    if not stored.length_bytes:
        return
    start = stored.offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    shift = stored.offset_bytes - start
    with stored.path.open("rb") as file:
        # A private copy-on-write mapping, only because torch wants writable memory; nothing writes.
        mapped = mmap.mmap(file.fileno(), shift + stored.length_bytes, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=shift, count=stored.length_bytes)
    if stored.offset_bytes % ITEM_BYTES[stored.dtype]:
        flat = flat.clone()  # the file does not align the tensor for its own dtype
    tensor = torch.empty(0, dtype=getattr(torch, stored.dtype)).set_(
        flat.untyped_storage(),
        flat.storage_offset() // ITEM_BYTES[stored.dtype],
        stored.shape,
        contiguous_strides(stored.shape),
    )
    yield from tensor_pieces(tensor, dim_order)


def read_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """A .safetensors file, or a folder with an index.json or with one or more .safetensors files."""
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
    try:
        placed = json.loads(path.read_text())["weight_map"]
        files = {str(file): path.parent / str(file) for file in placed.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint index: {error!r}") from error
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
    total_bytes = path.stat().st_size
    with path.open("rb") as file:
        length_bytes = int.from_bytes(file.read(8), "little")
        if total_bytes < 8 or length_bytes > min(total_bytes - 8, 100_000_000):
            raise CheckpointError(f"{path} is not a safetensors file: its header would have {length_bytes} bytes")
        try:
            header = json.loads(file.read(length_bytes))
            if not isinstance(header, dict):
                raise ValueError("the header is not a table")
            header.pop("__metadata__", None)
            tensors = {name: _stored_tensor(path, name, entry, 8 + length_bytes) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    for stored in tensors.values():
        if stored.offset_bytes + stored.length_bytes > total_bytes:
            raise CheckpointError(
                f"{path}: {stored.name!r} ends at byte {stored.offset_bytes + stored.length_bytes}, the file has "
                f"{total_bytes}: it is truncated"
            )
    return tensors


def _stored_tensor(path: Path, name: str, entry: dict[str, Any], base_bytes: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"], str(entry["dtype"]))
    if dtype in ITEM_BYTES:
        needed = Weight(name, dtype, shape, tuple(range(len(shape)))).nbytes
        if end - begin != needed or begin < 0:
            raise ValueError(f"{name!r} has {end - begin} bytes where its shape needs {needed}")
    return StoredTensor(name, path, dtype, shape, base_bytes + int(begin), int(end - begin))


def mismatches(wanted: Sequence[Weight | State], optional: frozenset[str], checkpoint: Checkpoint) -> list[str]:
    """Everything in which the checkpoint does not fit, all at once."""
    problems: list[str] = []
    for item in wanted:
        names = item.names if isinstance(item, Weight) else (item.name,)
        found = checkpoint.find(names)
        if found is None:
            if item.name not in optional:
                problems.append(f"{' / '.join(names)}: missing")
            continue
        dtype, shape = checkpoint.layout(found)
        if shape != item.shape:
            problems.append(f"{found}: has shape {list(shape)}, needs {list(item.shape)}")
        if dtype != item.dtype:
            problems.append(f"{found}: has dtype {dtype}, needs {item.dtype}")
    return problems
