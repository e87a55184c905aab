"""A weights file as a module opens it: its index, the first values of state, and what the core is told about it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import torch

from penstock.errors import WeightsChangedError, WeightsFileError
from penstock.regular_file import open_regular
from penstock.runtime.registration_probe import RegistrationProbe
from penstock.runtime.session import FileSource
from penstock.weights import Entry, WeightsIndex, read_index
from penstock.weights.packing import raw_content


def begin_probe(index: WeightsIndex, device: torch.device, *, cap_bytes: int | None) -> RegistrationProbe | None:
    """Begins a probe of registering the file, if it will be registered."""
    if device.type != "cuda" or cap_bytes is not None:
        return None
    return RegistrationProbe(index.path, device.index)


def file_source(
    index: WeightsIndex, weights: Iterable[Entry], *, cap_bytes: int | None, extra_bytes: int
) -> FileSource:
    """`weights`: those of the program, in its order, which is how plans number them."""
    extents = tuple((entry.offset_bytes, entry.length_bytes) for entry in weights)
    return FileSource(Path(index.path), extents, cap_bytes, extra_bytes)


def read_weights_index(path: Path) -> WeightsIndex:
    try:
        return read_index(path)
    except OSError as error:
        raise WeightsFileError(f"the weights file {path} cannot be read: {error}") from error


def stored_bytes(index: WeightsIndex, name: str) -> bytes:
    entry: Entry = index[name]
    if entry.packing is not None:  # as in ExecuTorch's files, which do not tell states from weights
        return bytes(raw_content(index, entry))
    with io.BufferedReader(open_regular(index.path, WeightsFileError)) as file:
        file.seek(entry.offset_bytes)
        content = file.read(entry.length_bytes)
    if len(content) != entry.length_bytes:
        raise WeightsChangedError(
            f"{index.path}: has {len(content)} bytes of {name!r}, needs {entry.length_bytes}: it was truncated"
        )
    return content
