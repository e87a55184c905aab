"""The fixed parts of a .ptd file (ExecuTorch's FlatTensor format): the header, the limits, the dtype numbers.

    0   u32  offset of the root table, from the start of the file
    4        'FT01'
    8        'FH01', u32 header length, u64 flatbuffer offset, flatbuffer size, segment base, segment data size
    56       the rest of the flatbuffer
    base     the segments; a segment's offset counts from here

The header is inserted into the flatbuffer right behind its first eight bytes. So the flatbuffer "offset" is the padded
header's length, 48, and not a place in the file: offset + size is where the flatbuffer ends.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import WeightsFileError
from penstock.printable import printable
from penstock.weight import ITEM_BYTES

FILE_MAGIC = b"FT01"
HEADER_MAGIC = b"FH01"
SCHEMA_VERSION = 0

# A page: what mmap, O_DIRECT and host registration ask for. Every segment of ours starts on one.
PAGE_BYTES = 4096

PREFIX_BYTES = 8
HEADER_BYTES = 40
# A multiple of 16, so that what lies behind the header keeps the alignment it had in the flatbuffer.
PADDED_HEADER_BYTES = 48
HEAD_BYTES = PREFIX_BYTES + HEADER_BYTES

# A damaged length must not make the reader allocate the whole file. A million weights stay below this.
INDEX_LIMIT_BYTES = 1 << 28

# Sizes are int32 in the schema, and a dim order holds uint8.
DIM_LIMIT = 2**31 - 1
RANK_LIMIT = 256

METADATA_KEY = "penstock.json"
# This and the name of a program make the key of the plans for its packed weights.
PLANS_PREFIX = "penstock.plans."

# ExecuTorch's ScalarType by torch's dtype names. float8_e8m0fnu has no number there, and the schema leaves the complex
# numbers out ("currently not implemented"): entries of these dtypes are written without a tensor layout.
SCALAR_TYPES: dict[str, int] = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
    "float8_e5m2fnuz": 25,
    "float8_e4m3fnuz": 26,
    "uint16": 27,
    "uint32": 28,
    "uint64": 29,
}

# ExecuTorch's own writers do write complex dtypes, by the numbers of torch's enum. So these are read.
DTYPES: dict[int, str] = {number: dtype for dtype, number in SCALAR_TYPES.items()} | {
    8: "complex32",
    9: "complex64",
    10: "complex128",
}

_HEADER = struct.Struct("<4sIQQQQ")


def aligned_bytes(count: int, alignment: int = PAGE_BYTES) -> int:
    return -(-count // alignment) * alignment


def layout_fault(dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...]) -> str | None:
    """What keeps a tensor out of a .ptd file, in words, or None. Writer and reader ask the same question."""
    if dtype not in ITEM_BYTES:
        return f"has dtype {printable(dtype)!r}, needs one of {', '.join(ITEM_BYTES)}"
    if len(shape) > RANK_LIMIT:
        return f"has {len(shape)} dimensions, needs at most {RANK_LIMIT}"
    for dim, size in enumerate(shape):
        if not 0 <= size <= DIM_LIMIT:
            return f"has size {size} in dimension {dim}, needs 0 to {DIM_LIMIT}"
    if sorted(dim_order) != list(range(len(shape))):
        return f"has dim order {list(dim_order)}, needs a permutation of the {len(shape)} dimensions"
    return None


@dataclass(frozen=True)
class Header:
    """The four numbers of the header, as they stand in the file."""

    flatbuffer_offset_bytes: int
    flatbuffer_size_bytes: int
    segment_base_bytes: int
    segment_data_bytes: int

    @property
    def flatbuffer_end_bytes(self) -> int:
        return self.flatbuffer_offset_bytes + self.flatbuffer_size_bytes

    @property
    def end_bytes(self) -> int:
        return self.segment_base_bytes + self.segment_data_bytes

    def pack(self) -> bytes:
        packed = _HEADER.pack(
            HEADER_MAGIC,
            HEADER_BYTES,
            self.flatbuffer_offset_bytes,
            self.flatbuffer_size_bytes,
            self.segment_base_bytes,
            self.segment_data_bytes,
        )
        return packed.ljust(PADDED_HEADER_BYTES, b"\0")


def parse_header(path: Path, head: bytes, file_bytes: int) -> Header:
    """Reads the header from the first HEAD_BYTES of a file, and checks it against the file's length."""
    if len(head) < HEAD_BYTES:
        raise WeightsFileError(f"{path}: not a .ptd file: has {file_bytes} bytes, needs at least {HEAD_BYTES}")
    if head[4:8] != FILE_MAGIC:
        raise WeightsFileError(f"{path}: not a .ptd file: has identifier {head[4:8]!r}, needs {FILE_MAGIC!r}")
    magic, header_bytes, *numbers = _HEADER.unpack_from(head, PREFIX_BYTES)
    if magic != HEADER_MAGIC:
        raise WeightsFileError(f"{path}: not a .ptd file: has header identifier {magic!r}, needs {HEADER_MAGIC!r}")
    # A longer header is a newer one: the format promises that the known fields stay where they are.
    if header_bytes < HEADER_BYTES:
        raise WeightsFileError(f"{path}: the header has {header_bytes} bytes, needs at least {HEADER_BYTES}")
    header = Header(*numbers)
    if header.flatbuffer_offset_bytes < header_bytes:
        raise WeightsFileError(
            f"{path}: the header puts the flatbuffer at {header.flatbuffer_offset_bytes},"
            f" which needs to be at or behind the header's own {header_bytes} bytes"
        )
    if header.flatbuffer_end_bytes > file_bytes:
        raise WeightsFileError(
            f"{path}: truncated or damaged: has {file_bytes} bytes, the index alone needs {header.flatbuffer_end_bytes}"
        )
    if header.end_bytes > file_bytes:
        raise WeightsFileError(
            f"{path}: truncated or damaged: has {file_bytes} bytes, the header needs {header.end_bytes}"
        )
    if header.flatbuffer_end_bytes > INDEX_LIMIT_BYTES:
        raise WeightsFileError(
            f"{path}: the index has {header.flatbuffer_end_bytes} bytes, needs to stay within {INDEX_LIMIT_BYTES}"
        )
    # ExecuTorch documents a base of zero for files without segments.
    if header.segment_data_bytes and header.segment_base_bytes < header.flatbuffer_end_bytes:
        raise WeightsFileError(
            f"{path}: the segments start at {header.segment_base_bytes},"
            f" inside the index, which needs {header.flatbuffer_end_bytes} bytes"
        )
    return header
