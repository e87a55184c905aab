"""Values to pack: as weights have them, and as none has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from penstock.weight import ITEM_BYTES, State, Weight
from penstock.weights import WeightsIndex, layout_identity, write_ptd
from penstock.weights.packed_format import EARLIER_KINDS, KINDS

TIED = Weight("tied", "bfloat16", (300, 257), (0, 1), ("tied too", "tied again"))
COLUMNS = Weight("columns", "float32", (129, 160), (1, 0))
SMALL = Weight("small", "bfloat16", (16, 16), (0, 1))
EMPTY = Weight("empty", "bfloat16", (0, 4), (0, 1))
NOISE = Weight("noise", "bfloat16", (65536,), (0,))
HALVES = Weight("halves", "float16", (65536,), (0,))
EIGHTHS = Weight("eighths", "float8_e4m3fn", (512, 129), (0, 1))
INTEGERS = Weight("integers", "int16", (65536,), (0,))
STATE = State("state", "bfloat16", (65536,), (0,), "stored")
WEIGHTS = (TIED, SMALL, COLUMNS, EMPTY, NOISE, HALVES, EIGHTHS, INTEGERS)
# The others are too small, do not get smaller, are of another dtype, or are no weight.
PACKED = (TIED, COLUMNS, HALVES, EIGHTHS)


# Of every kind that is read: the dtype that has it.
DTYPES: dict[int, str] = {kind: dtype for kinds in (KINDS, EARLIER_KINDS) for dtype, kind in kinds.items()}


def earlier_code() -> AbstractContextManager[Any]:
    """Within it bfloat16 is packed as it was before there was a code of three levels."""
    return mock.patch.dict(KINDS, EARLIER_KINDS)


def gaussian(dtype: str, count: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * np.float32(0.02)
    return as_dtype(values, dtype)


def as_dtype(values: np.ndarray[tuple[int], np.dtype[np.float32]], dtype: str) -> bytes:
    import torch

    # An empty tensor has no view of another dtype.
    return bytes(torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint8).numpy()) if values.size else b""


def content(source: Weight | State) -> bytes:
    if source.name == "noise":
        return np.random.default_rng(1).bytes(source.nbytes)
    dtype = "bfloat16" if source.dtype == "int16" else source.dtype
    return gaussian(dtype, source.nbytes // ITEM_BYTES[dtype], seed=len(source.name))


def packable(path: Path) -> Path:
    """A file with every kind of entry that packing tells apart."""
    identity = layout_identity(WEIGHTS, [STATE])
    write_ptd(path, WEIGHTS, lambda item: [content(item)], states=[STATE], identity=identity)
    return path


def single(path: Path, dtype: str, raw: bytes) -> WeightsIndex:
    weight = Weight("w", dtype, (len(raw) // ITEM_BYTES[dtype],), (0,))
    return write_ptd(path, [weight], lambda _: [raw], identity=layout_identity([weight], ()))
