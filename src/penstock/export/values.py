"""Where the bytes of a weight come from: the program's own tensors, or safetensors checkpoints. Always in pieces."""

from __future__ import annotations

import ctypes
import json
import math
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
        rows = max(1, PIECE_BYTES // row_bytes)
        for start in range(0, tensor.shape[0], rows):
            yield tensor[start : start + rows]


def has_value(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor"


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every byte is zero: what a fresh allocation can stand in for. (A float -0.0 is not.)"""
    zeros = bytes(PIECE_BYTES)
    # As bytes: memoryviews are compared element by element, at a hundredth of the speed.
    return all(bytes(piece) == zeros[: piece.nbytes] for piece in tensor_pieces(tensor, range(tensor.dim())))


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, whatever their strides."""
    order = range(a.dim())
    return _equal_pieces(tensor_pieces(a, order), tensor_pieces(b, order))


def _equal_pieces(a: Iterator[memoryview], b: Iterator[memoryview]) -> bool:
    """Whether two sequences hold the same bytes, wherever they are cut. Pieces are never empty."""
    nothing = memoryview(b"")
    left = right = nothing
    while True:
        left, right = left or next(a, nothing), right or next(b, nothing)
        count = min(left.nbytes, right.nbytes)
        if not count:
            return not left and not right
        if bytes(left[:count]) != bytes(right[:count]):
            return False
        left, right = left[count:], right[count:]


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
        self._tensors: dict[str, StoredTensor | torch.Tensor] = {}
        # Name -> number of the source that it comes from.
        self._source_of: dict[str, int] = {}
        listed = sources if isinstance(sources, (list, tuple)) else [sources]
        if not listed:
            raise CheckpointError("weights: the list of sources is empty")
        for number, source in enumerate(listed):
            found = _source_tensors(source)
            self._tensors.update(found)
            self._source_of.update(dict.fromkeys(found, number))
        self.description = ", ".join(str(s) if not isinstance(s, Mapping) else "given tensors" for s in listed)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def find(self, names: Sequence[str]) -> str | None:
        """Of a tied weight's names the one that the latest source has; the first of them where it has several."""
        present = [name for name in names if name in self]
        return max(present, key=self._source_of.__getitem__, default=None)

    def rivals(self, found: str, names: Sequence[str]) -> list[str]:
        """Further names of a tied weight under which the same source holds something else."""
        order = range(len(self.layout(found)[1]))
        return [
            name
            for name in names
            if name != found
            and self._source_of.get(name) == self._source_of[found]
            and not (
                self.layout(name) == self.layout(found)
                and _equal_pieces(self.pieces(name, order), self.pieces(found, order))
            )
        ]

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self._tensors[name]
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    def pieces(self, name: str, dim_order: Sequence[int]) -> Iterator[memoryview]:
        tensor = self._tensors[name]
        if isinstance(tensor, torch.Tensor):
            return tensor_pieces(tensor, dim_order)
        return _stored_pieces(tensor, dim_order)


def _source_tensors(source: Any) -> Mapping[str, StoredTensor | torch.Tensor]:
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            _check_given(name, tensor)
        return source
    if isinstance(source, (str, os.PathLike)):
        return read_checkpoint(Path(source))
    raise CheckpointError(
        f"weights: expected a safetensors file, a folder of them, a mapping of tensors, or a list of those; "
        f"got {type(source).__name__}"
    )


def _check_given(name: Any, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"weights: {name!r} must be a tensor with values, got {type(tensor).__name__}")
    if not has_value(tensor):
        raise CheckpointError(f"weights: {name!r} must be a tensor with values, got one on meta")
    # The bytes of a subclass or of another layout are not those that its shape and dtype tell of.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(f"weights: {name!r} must be a plain tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"weights: {name!r} must be a strided tensor, got {tensor.layout}")


def _stored_pieces(stored: StoredTensor, dim_order: Sequence[int]) -> Iterator[memoryview]:
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
    if not stored.length_bytes:
        return
    start = stored.offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    shift = stored.offset_bytes - start
    # A private copy-on-write mapping, only because torch wants writable memory; nothing writes.
    mapped = mmap.mmap(fd, shift + stored.length_bytes, access=mmap.ACCESS_COPY, offset=start)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=shift, count=stored.length_bytes)
    if stored.offset_bytes % ITEM_BYTES[stored.dtype]:
        flat = flat.clone()  # the file does not align the tensor for its own dtype
    # On the CPU by name: the caller may have another default, such as meta, on which such models are built.
    tensor = torch.empty(0, dtype=getattr(torch, stored.dtype), device="cpu").set_(
        flat.untyped_storage(),
        flat.storage_offset() // ITEM_BYTES[stored.dtype],
        stored.shape,
        contiguous_strides(stored.shape),
    )
    yield from tensor_pieces(tensor, dim_order)


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
    # As the format has it: one tensor after the other, without gaps. Anything else is a header of some other data.
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
        raise CheckpointError(f"{path} is not {kind}: its JSON is no table")
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
    dtype = _SAFETENSORS_DTYPES.get(given, given)
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
        if (dtype, shape) == (item.dtype, item.shape):
            rivals = checkpoint.rivals(found, names)
            problems.extend(f"{name}: differs from {found}, to which the program ties it" for name in rivals)
    return problems
