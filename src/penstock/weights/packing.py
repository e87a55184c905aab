"""Packed weights, for all code outside this room: what is packed, where its blocks lie, and packing itself."""

from __future__ import annotations

from penstock.weights.packed_for import PackedFor, lowered_entries
from penstock.weights.packed_format import Packing
from penstock.weights.packed_reader import Blocks, read_blocks, require_raw
from penstock.weights.packer import pack, pack_entries, unpack
from penstock.weights.raw_chunks import raw_chunks, raw_content

__all__ = [
    "Blocks",
    "PackedFor",
    "Packing",
    "lowered_entries",
    "pack",
    "pack_entries",
    "raw_chunks",
    "raw_content",
    "read_blocks",
    "require_raw",
    "unpack",
]
