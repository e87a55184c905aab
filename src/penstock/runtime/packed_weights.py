"""Where plans find the bytes of each weight: in the weights file, or, of packed ones, as if they lay behind its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError, WeightsFileError
from penstock.plan.packed import BLOCK_BYTES, Begins
from penstock.printable import printable
from penstock.program import Program
from penstock.runtime.records import Numbers, packed_numbers
from penstock.weights import Entry, WeightsIndex
from penstock.weights.packing import Blocks, read_blocks

# Everything else reads weights in host memory, or takes them as they come: packed ones are decoded as a plan says.
PLACEMENTS = ("auto", "stream")


@dataclass(frozen=True)
class PackedWeights:
    # Of all weights.
    offsets: Mapping[str, int]
    # Of packed ones.
    begins: Begins
    # As the core reads them; None where no weight is packed.
    numbers: Numbers | None


def read_packed_weights(
    program: Program, index: WeightsIndex, entries: Mapping[str, Entry], placement: str
) -> PackedWeights:
    """Refuses what packed weights cannot do."""
    offsets = {weight.name: entries[weight.name].offset_bytes for weight in program.weights}
    packed = {weight.name: entries[weight.name] for weight in program.weights if entries[weight.name].packing}
    if not packed:
        return PackedWeights(offsets, {}, None)
    _check(program, index, packed, placement)
    blocks: dict[str, Blocks] = {}
    end_bytes = index.file_bytes
    for name, entry in packed.items():
        blocks[name] = read_blocks(index, entry)
        offsets[name] = -(-end_bytes // BLOCK_BYTES) * BLOCK_BYTES
        end_bytes = offsets[name] + blocks[name].raw_bytes
    numbers = packed_numbers((offsets[name], one) for name, one in blocks.items())
    return PackedWeights(offsets, {name: one.begins_bytes for name, one in blocks.items()}, numbers)


def _check(program: Program, index: WeightsIndex, packed: Mapping[str, Entry], placement: str) -> None:
    if placement not in PLACEMENTS:
        raise PenstockError(
            f"placement={placement!r} needs weights as they are, and {index.path} has {len(packed)} packed ones; use "
            f'placement="auto" or "stream", or `penstock unpack`'
        )
    for method in program.methods:
        for access in method.schedule.accesses:
            if access.gathered and access.weight in packed:
                raise WeightsFileError(
                    f"{index.path}: method {method.name!r} gathers from {printable(access.weight)!r}, which is packed: "
                    "rows of it cannot be read alone. Pack the file again with the program, which keeps such tables as "
                    "they are: penstock pack ... --program, with its .pt2 or .pte"
                )
