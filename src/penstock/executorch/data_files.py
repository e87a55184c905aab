"""The .ptd files of a program: opens them, finds the one that holds the weights, and merges several into one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import OutputExistsError, PenstockError, WeightsFileError
from penstock.regular_file import open_regular
from penstock.runtime.weights_source import read_weights_index
from penstock.weight import Weight
from penstock.weights import Entry, WeightsIndex, layout_identity, write_ptd
from penstock.weights.packing import require_raw

_PIECE_BYTES = 8 << 20


def data_files(program: Path, weights: Any) -> list[WeightsIndex]:
    """Reads the index of each file: ExecuTorch itself looks only at the header, and a damaged index can crash it."""
    if weights is None:
        paths = [program.with_suffix(".ptd")]
    elif isinstance(weights, (str, os.PathLike)):
        paths = [Path(weights)]
    else:
        paths = [Path(file) for file in weights]
    if not paths:
        raise PenstockError("weights is an empty list; leave it out for the .ptd beside the program")
    indices = [read_weights_index(path) for path in paths]
    # Each file holds our metadata under the same name, and ExecuTorch refuses a name that is in two files.
    ours = [str(index.path) for index in indices if index.identity is not None]
    if len(ours) > 1:
        raise WeightsFileError(
            f"{' and '.join(ours)} were written by Penstock, and ExecuTorch takes one such file at a time: "
            "penstock.executorch.merge_weights makes one of them"
        )
    return indices


def weights_file(files: Sequence[WeightsIndex], names: Sequence[Sequence[str]]) -> Path:
    """The file that holds the weights, each of which may have several names.

    Copies to the device read from one mapping, so all weights must lie in one file.
    """
    held = [(index, [known[0] for known in names if any(name in index for name in known)]) for index in files]
    best, found = max(held, key=lambda pair: len(pair[1]))
    together = {name for _, some in held for name in some}
    if len(found) < len(together):
        spread = ", ".join(f"{index.path} has {len(some)}" for index, some in held if some)
        raise WeightsFileError(
            f"the {len(names)} weights of the program lie in several files ({spread}), and weights are streamed from "
            "one: penstock.executorch.merge_weights makes one of them"
        )
    return best.path


def merge_weights(
    files: Iterable[str | os.PathLike[str]], path: str | os.PathLike[str], *, overwrite: bool = False
) -> Path:
    """Writes one .ptd with everything that the given files hold; no name may be in two of them."""
    indices = [read_weights_index(Path(file)) for file in files]
    for index in indices:
        require_raw(index, "merging it with others")
    out = Path(path)
    if out.exists() and not overwrite:
        raise OutputExistsError(f"{out} exists; pass overwrite=True to replace")
    homes: dict[str, tuple[WeightsIndex, Entry]] = {}
    for index in indices:
        for entry in index:
            if entry.kind == "blob":
                raise WeightsFileError(f"{index.path}: entry {entry.name!r} has no dtype and shape, so it is no weight")
            if entry.name in homes:
                raise WeightsFileError(f"{entry.name!r} is in {homes[entry.name][0].path} and in {index.path}")
            homes[entry.name] = (index, entry)
    weights = [_weight(index, entry) for index in indices for entry in index.unique_entries]
    write_ptd(out, weights, lambda item: _pieces(*homes[item.name]), identity=layout_identity(weights, ()))
    return out


def _weight(index: WeightsIndex, entry: Entry) -> Weight:
    aliases = tuple(other.name for other in index if other.alias_of == entry.name)
    return Weight(entry.name, entry.dtype, entry.shape, entry.dim_order, aliases)


def _pieces(index: WeightsIndex, entry: Entry) -> Iterator[bytes]:
    left = entry.length_bytes
    with io.BufferedReader(open_regular(index.path, WeightsFileError)) as file:
        file.seek(entry.offset_bytes)
        while left:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise WeightsFileError(f"{index.path} ends {left} bytes before the end of {entry.name!r}")
            left -= len(piece)
            yield piece
