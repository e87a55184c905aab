"""Weights to write, the bytes they hold, and .ptd files put together piece by piece so that one piece can be wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.sealed_text import sealed
from penstock.weight import ITEM_BYTES, State, Weight
from penstock.weights import WeightsIndex, layout_identity, write_ptd
from penstock.weights.format import PADDED_HEADER_BYTES, Header, aligned_bytes
from penstock.weights.tables import Layout, NamedData, Segment, Tables, encode_tables, with_header

CHUNK_BYTES = 100

# Every dtype as a matrix in both orders, as a scalar, and with nothing in it.
EVERY_KIND: tuple[Weight, ...] = tuple(
    weight
    for dtype in ITEM_BYTES
    for weight in (
        Weight(f"{dtype}.rows", dtype, (3, 5), (0, 1)),
        Weight(f"{dtype}.columns", dtype, (3, 5), (1, 0)),
        Weight(f"{dtype}.channels_last", dtype, (2, 3, 4, 5), (0, 2, 3, 1)),
        Weight(f"{dtype}.scalar", dtype, (), ()),
        Weight(f"{dtype}.empty", dtype, (4, 0, 2), (2, 0, 1)),
    )
)
TIED = Weight("embed.weight", "bfloat16", (33, 70), (0, 1), ("lm_head.weight", "ünïcode.weight"))
STATES = (
    State("cache.positions", "int64", (6,), (0,), "stored"),
    State("cache.keys", "float16", (2, 8), (0, 1), "zeros"),
)


def payload(source: Weight | State) -> bytes:
    """Bytes that depend on the name alone, so that a mix-up of two weights shows."""
    return random.Random(source.name).randbytes(source.nbytes)


def chunks_of(source: Weight | State) -> Iterator[bytes]:
    data = payload(source)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def write(path: Path, weights: Sequence[Weight], states: Sequence[State] = ()) -> WeightsIndex:
    return write_ptd(path, weights, chunks_of, states=states, identity=layout_identity(weights, states))


@dataclass
class Crafted:
    """A file with two weights, the second under two names. Change any part, then write it down."""

    segments: list[Segment] = field(default_factory=lambda: [Segment(0, 24), Segment(4096, 8)])
    named_data: list[NamedData] = field(
        default_factory=lambda: [
            NamedData("first", 0, Layout(6, (2, 3), (1, 0))),
            NamedData("second", 1, Layout(4, (1,), (0,))),
            NamedData("again", 1, Layout(4, (1,), (0,))),
        ]
    )
    # None: a file without our metadata.
    metadata: Any = field(
        default_factory=lambda: {
            "format": 2,
            "identity": "some identity",
            "entries": [
                {
                    "name": "first",
                    "aliases": [],
                    "dtype": "float32",
                    "shape": [2, 3],
                    "dim_order": [1, 0],
                    "kind": "weight",
                    "xxh3_64": "00112233445566aa",
                },
                {
                    "name": "second",
                    "aliases": ["again"],
                    "dtype": "int64",
                    "shape": [1],
                    "dim_order": [0],
                    "kind": "state",
                    "xxh3_64": "ffeeddccbbaa9988",
                },
            ],
        }
    )
    # Stands for the metadata when it is not even JSON.
    metadata_bytes: bytes | None = None
    header: dict[str, int] = field(default_factory=dict)
    trailing: bytes = b""

    def entry(self, number: int) -> dict[str, Any]:
        entry: dict[str, Any] = self.metadata["entries"][number]
        return entry

    def write(self, path: Path) -> Path:
        segments, named_data = list(self.segments), list(self.named_data)
        # A segment that claims to lie far out is not given its bytes.
        ends_bytes = [segment.offset_bytes + segment.size_bytes for segment in segments]
        end_bytes = max((end for end in ends_bytes if end < 1 << 20), default=0)
        if self.metadata is not None:
            raw = sealed(json.dumps(self.metadata)) if self.metadata_bytes is None else self.metadata_bytes
            metadata_offset_bytes = aligned_bytes(end_bytes)
            named_data.append(NamedData("penstock.json", len(segments), None))
            segments.append(Segment(metadata_offset_bytes, len(raw)))
            end_bytes = metadata_offset_bytes + len(raw)
        else:
            raw, metadata_offset_bytes = b"", 0
        flatbuffer = encode_tables(Tables(tuple(segments), tuple(named_data)))
        base_bytes = aligned_bytes(PADDED_HEADER_BYTES + len(flatbuffer))
        header = replace(Header(PADDED_HEADER_BYTES, len(flatbuffer), base_bytes, end_bytes), **self.header)
        body = bytearray(base_bytes + end_bytes)
        head = with_header(flatbuffer, header)
        body[: len(head)] = head
        if self.metadata is not None and self.metadata_bytes is None:
            raw = sealed(json.dumps(self.metadata), head)
        body[base_bytes + metadata_offset_bytes : base_bytes + metadata_offset_bytes + len(raw)] = raw
        path.write_bytes(bytes(body) + self.trailing)
        return path
