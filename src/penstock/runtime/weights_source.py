"""How a weights file is made ready for copies to the device: registered as it is mapped, or staged through buffers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import HostMemoryError, WeightsChangedError, WeightsFileError
from penstock.regular_file import open_regular
from penstock.runtime.host_memory import (
    PinnedFile,
    bytes_to_pin,
    check_host_memory,
    chunk_ends,
    prefault_with_progress,
)
from penstock.runtime.registration_probe import RegistrationProbe
from penstock.runtime.session import HostSource
from penstock.weights import Entry, WeightsIndex, read_index
from penstock.weights.packing import raw_content

# Large enough for the full speed of a link, small enough that several fit a small cap.
_BUFFER_BYTES = 16 << 20
_LEAST_BUFFERS = 4
_LEAST_BUFFER_BYTES = 4096
# One reader copies out of the page cache at a few GB/s: it takes several to keep up with a link.
_READERS = 8


@dataclass(frozen=True)
class PreparedSource:
    source: HostSource
    # Released when the session is closed; None where nothing is pinned for good.
    pinned: PinnedFile | None
    host_bytes: int


def prepare_source(
    index: WeightsIndex,
    probe: RegistrationProbe | None,
    *,
    cap_bytes: int | None,
    extra_bytes: int,
) -> PreparedSource:
    """Everything that can be refused before memory is pinned is refused here.

    `probe`: of a file that is registered with a GPU.
    `cap_bytes`: of the pinned buffers that weights pass through; None: the file is registered as it is mapped.
    `extra_bytes` are what else is held there: of the soft driver, whose device memory is host memory too, and state.
    """
    return _registered(index, probe, extra_bytes) if cap_bytes is None else _staged(cap_bytes, extra_bytes)


def begin_probe(index: WeightsIndex, device: torch.device, *, cap_bytes: int | None) -> RegistrationProbe | None:
    """Of registering the file, where that is what will be done with it."""
    if device.type != "cuda" or cap_bytes is not None:
        return None
    return RegistrationProbe(index.path, device.index)


def _registered(index: WeightsIndex, probe: RegistrationProbe | None, extra_bytes: int) -> PreparedSource:
    path = Path(index.path)
    check_host_memory(bytes_to_pin(path) + extra_bytes, f"{path}, all of which is held in memory")
    if probe is not None:
        probe.require()
    prefault_with_progress(path)
    ends = chunk_ends(_extents(index), index.file_bytes)
    return PreparedSource(HostSource(chunk_ends=ends), PinnedFile(path), index.file_bytes)


def _extents(index: WeightsIndex) -> Iterable[tuple[int, int]]:
    return [(entry.offset_bytes, entry.length_bytes) for entry in index.unique_entries]


def _staged(cap_bytes: int, extra_bytes: int) -> PreparedSource:
    buffer_bytes = min(_BUFFER_BYTES, cap_bytes // _LEAST_BUFFERS // _LEAST_BUFFER_BYTES * _LEAST_BUFFER_BYTES)
    if buffer_bytes < _LEAST_BUFFER_BYTES:
        raise HostMemoryError(
            f"host_memory is {cap_bytes} bytes; staging needs at least {_LEAST_BUFFERS * _LEAST_BUFFER_BYTES}"
        )
    buffers = cap_bytes // buffer_bytes
    check_host_memory(buffers * buffer_bytes + extra_bytes, "the staging buffers")
    threads = max(1, min(_READERS, buffers, (os.cpu_count() or 1) // 2))
    return PreparedSource(HostSource((), buffer_bytes, buffers, threads), None, buffers * buffer_bytes)


def read_weights_index(path: Path) -> WeightsIndex:
    try:
        return read_index(path)
    except OSError as error:
        raise WeightsFileError(f"the weights file {path} cannot be read: {error}") from error


def stored_bytes(index: WeightsIndex, name: str) -> bytes:
    entry: Entry = index[name]
    if entry.packing is not None:  # as in a file that does not tell states from weights: ExecuTorch's
        return bytes(raw_content(index, entry))
    with io.BufferedReader(open_regular(index.path, WeightsFileError)) as file:
        file.seek(entry.offset_bytes)
        content = file.read(entry.length_bytes)
    if len(content) != entry.length_bytes:
        raise WeightsChangedError(
            f"{index.path}: has {len(content)} bytes of {name!r}, needs {entry.length_bytes}: it was truncated"
        )
    return content
