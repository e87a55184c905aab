"""The weights file: a .ptd in ExecuTorch's FlatTensor format, with every weight on a page of its own."""

from __future__ import annotations

from penstock.weights.checksum import verify_checksums
from penstock.weights.identity import layout_identity
from penstock.weights.index import Entry, WeightsIndex, read_index
from penstock.weights.writer import Chunk, write_ptd

__all__ = ["Chunk", "Entry", "WeightsIndex", "layout_identity", "read_index", "verify_checksums", "write_ptd"]
