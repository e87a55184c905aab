"""What the core is told about the packed weights of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import WeightsFileError
from penstock.plan.packed import Begins
from penstock.printable import printable
from penstock.program import Program
from penstock.runtime.records import Numbers, packed_numbers
from penstock.weights import Entry, WeightsIndex
from penstock.weights.packing import read_blocks


@dataclass(frozen=True)
class PackedWeights:
    # Where the blocks of each weight begin.
    begins: Begins
    # As the core reads them; None if no weight is packed.
    numbers: Numbers | None


def read_packed_weights(program: Program, index: WeightsIndex, entries: Mapping[str, Entry]) -> PackedWeights:
    packed = {weight.name: entries[weight.name] for weight in program.weights if entries[weight.name].packing}
    if not packed:
        return PackedWeights({}, None)
    _check_gathers(program, index, packed)
    blocks = {name: read_blocks(index, entry) for name, entry in packed.items()}
    numbers = packed_numbers(
        (number, entries[weight.name].offset_bytes, blocks[weight.name])
        for number, weight in enumerate(program.weights)
        if weight.name in blocks
    )
    return PackedWeights({name: one.begins_bytes for name, one in blocks.items()}, numbers)


def _check_gathers(program: Program, index: WeightsIndex, packed: Mapping[str, Entry]) -> None:
    for method in program.methods:
        for access in method.schedule.accesses:
            if access.gathered and access.weight in packed:
                raise WeightsFileError(
                    f"{index.path}: method {method.name!r} gathers from {printable(access.weight)!r}, which is packed: "
                    "rows of it cannot be read alone. Pack the file again with the program, which keeps such tables as "
                    "they are: penstock pack ... --program, with its .pt2 or .pte"
                )
