"""Which entries of a weights file stay as they are when it is packed, because of its program. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import IdentityError, MissingWeightError, WeightMismatchError
from penstock.printable import printable
from penstock.weights.index import Entry, WeightsIndex

if TYPE_CHECKING:
    from penstock.executorch.lowered_file import LoweredFile


def left_raw(program: Path, index: WeightsIndex) -> frozenset[str]:
    """Of each of them one name or several. Refuses a program that the file is not for."""
    return _of_pte(program, index) if program.suffix == ".pte" else _of_pt2(program, index)


def _of_pt2(path: Path, index: WeightsIndex) -> frozenset[str]:
    from penstock.program import read_program  # which imports this room

    program = read_program(path)
    if program.identity != index.identity:
        raise IdentityError(f"{index.path} has identity {index.identity}, {path} needs {program.identity}")
    return program.gathered_weights


def _of_pte(path: Path, index: WeightsIndex) -> frozenset[str]:
    from penstock.executorch.file_seal import check_seal
    from penstock.executorch.lowered_file import read_lowered

    check_seal(path)
    lowered = read_lowered(path)
    found = _entries(path, lowered, index)
    gathered = {found[name].name for name in lowered.program.gathered_weights}
    # What no delegate of ours reads, ExecuTorch reads itself: it knows no packed tensors.
    streamed = {entry.alias_of or entry.name for entry in found.values()}
    others = {entry.name for entry in index.unique_entries if entry.name not in streamed}
    return frozenset(gathered | others)


def _entries(path: Path, lowered: LoweredFile, index: WeightsIndex) -> dict[str, Entry]:
    """Of each weight, by its name in the program. The file may be for more than the delegates: so no identity is asked
    for, as none is at load; that every weight is there and of its kind is all there is."""
    known = {names[0]: names for names in lowered.weight_names if names}
    found: dict[str, Entry] = {}
    for weight in lowered.program.weights:
        names = known.get(weight.name, (weight.name,))
        stored = next((name for name in names if name in index), None)
        if stored is None:
            raise MissingWeightError(f"{index.path} lacks {printable(weight.name)!r}, which {path} reads")
        entry = index[stored]
        if (entry.dtype, entry.shape) != (weight.dtype, weight.shape):
            raise WeightMismatchError(
                f"{index.path}: entry {printable(stored)!r} is {entry.dtype} of shape {list(entry.shape)},"
                f" {path} needs {weight.dtype} of shape {list(weight.shape)}"
            )
        found[weight.name] = entry
    return found
