"""What a program needs in the file that its weights are packed into: entries that stay as they are, and plans if it
can be run without Python. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import IdentityError, MissingWeightError, WeightMismatchError
from penstock.printable import printable
from penstock.weights.format import PLANS_PREFIX
from penstock.weights.index import Entry, WeightsIndex
from penstock.weights.packed_reader import Blocks

if TYPE_CHECKING:
    from penstock.executorch.lowered_file import LoweredFile


@dataclass(frozen=True)
class PlansEntry:
    """Plans for what was packed, as an entry of the file."""

    name: str
    # Takes the blocks of each packed entry, by the entry's first name: plans depend on them.
    content: Callable[[Mapping[str, Blocks]], bytes]


@dataclass(frozen=True)
class PackedFor:
    # One name or several of each entry that stays as it is.
    left: frozenset[str] = frozenset()
    plans: PlansEntry | None = None


def packed_for(program: Path, index: WeightsIndex) -> PackedFor:
    """Refuses a program that the file is not for."""
    return _of_pte(program, index) if program.suffix == ".pte" else _of_pt2(program, index)


def _of_pt2(path: Path, index: WeightsIndex) -> PackedFor:
    from penstock.program import read_program  # which imports this room

    program = read_program(path)
    if program.identity != index.identity:
        raise IdentityError(f"{index.path} has identity {index.identity}, {path} needs {program.identity}")
    return PackedFor(program.gathered_weights)


def _of_pte(path: Path, index: WeightsIndex) -> PackedFor:
    from penstock.executorch.file_seal import check_seal
    from penstock.executorch.lowered_file import read_lowered

    check_seal(path)
    lowered = read_lowered(path)
    found = lowered_entries(path, lowered, index)
    first_names = {name: entry.alias_of or entry.name for name, entry in found.items()}
    gathered = {first_names[name] for name in lowered.program.gathered_weights}
    # ExecuTorch itself reads what no delegate of ours reads, and it knows no packed tensors.
    others = {entry.name for entry in index.unique_entries} - {*first_names.values()}
    return PackedFor(frozenset(gathered | others), _plans(lowered, first_names))


def _plans(lowered: LoweredFile, first_names: Mapping[str, str]) -> PlansEntry:
    from penstock.executorch.packed_plans import make_packed_plans

    program = lowered.program

    def content(blocks: Mapping[str, Blocks]) -> bytes:
        return make_packed_plans(
            lowered.name,
            [method.schedule for method in program.methods],
            program.weights,
            {name: blocks[first] for name, first in first_names.items() if first in blocks},
            page_bytes=lowered.page_bytes,
            device=program.device,
        )

    return PlansEntry(f"{PLANS_PREFIX}{lowered.name}", content)


def lowered_entries(path: Path, lowered: LoweredFile, index: WeightsIndex) -> dict[str, Entry]:
    """The entry of each weight, by the weight's name in the program. The file may hold more than the delegates read. So
    no identity is checked, as at load: only that every weight is there, with its dtype and shape."""
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
