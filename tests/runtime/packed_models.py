"""Models whose weights are packed in the file, and plans for them: the planner's, and some that are made by hand."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from penstock.native import core
from penstock.plan.check import check_plan
from penstock.plan.packed import BLOCK_BYTES, SlotSizes, with_packed
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.runtime.records import Numbers, packed_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight
from penstock.weights.packing import Blocks
from tests.native.session import HostSource
from tests.plan.planning import make_plan, placed_floor
from tests.runtime.session_harness import PAGE, Model, chain
from tests.runtime.soft import SoftDriver

BFLOAT16 = 6  # PackedKind::bfloat16_levels in csrc/packed/packed_block.h
# Three blocks, the last of them short; no multiple of a page.
WEIGHT_BYTES = 2 * BLOCK_BYTES + 5000


@functools.cache
def _gaussian() -> bytes:
    """Four blocks of bfloat16, and a bit: where a longer weight repeats them, no block is another's."""
    draw = random.Random(5)
    return b"".join(struct.pack("<f", draw.gauss(0, 0.02))[2:] for _ in range(2 * BLOCK_BYTES + 123))


def weight_content(index: int, nbytes: int) -> bytes:
    """No part of it is another's, packed or not: they have other mantissas, and begin elsewhere."""
    assert nbytes % 2 == 0 and index < 127
    begin = 2 * (37 * index + 11)
    content = bytearray((_gaussian() * (2 + nbytes // len(_gaussian())))[begin : begin + nbytes])
    content[::2] = content[::2].translate(bytes(low ^ (index + 1) for low in range(256)))
    return bytes(content)


@functools.cache
def packed_blocks(content: bytes) -> tuple[bytes, tuple[int, ...]]:
    """Their bytes, one behind the other; and where each begins, and the last ends."""
    room_bytes = core().penstock_packed_most_bytes(BFLOAT16, len(content))
    assert room_bytes > 0
    out = ctypes.create_string_buffer(room_bytes)
    sizes = (ctypes.c_int64 * -(-len(content) // BLOCK_BYTES))()
    made_bytes = core().penstock_pack_blocks(BFLOAT16, content, len(content), out, room_bytes, sizes, 1)
    assert made_bytes == sum(sizes)
    return out.raw[:made_bytes], tuple(accumulate(sizes, initial=0))


@functools.cache
def _hash(content: bytes) -> int:
    """By the kernel itself, which tests/runtime/test_soft_driver.py holds against Python."""
    with SoftDriver(PAGE, 0, poison=False) as driver:
        held = ctypes.create_string_buffer(content, len(content))
        return driver.hash(None, ctypes.addressof(held), len(content)).value


@functools.cache
def _planner(
    schedules: tuple[Schedule, ...], weights: tuple[Weight, ...], begins: tuple[tuple[str, tuple[int, ...]], ...]
) -> Planner:
    by_name = {weight.name: weight for weight in weights}
    return Planner(schedules, by_name, page_bytes=PAGE, begins=dict(begins))


@functools.cache
def _plan(planner: Planner, budget_bytes: int) -> Plan:
    return planner.plan(budget_bytes)


@functools.cache
def _divided(
    schedules: tuple[Schedule, ...],
    weights: tuple[Weight, ...],
    begins: tuple[tuple[str, tuple[int, ...]], ...],
    slots: SlotSizes,
    stored_bytes: int,
    spare_bytes: int,
) -> Plan:
    by_name = {weight.name: weight for weight in weights}
    lowest = placed_floor(schedules, by_name, page_bytes=PAGE)
    # At the floor, everything that may stream does, as a whole.
    unpacked = lowest.plan
    if spare_bytes:
        budget_bytes = lowest.floor_bytes + spare_bytes
        unpacked = make_plan(schedules, by_name, budget_bytes=budget_bytes, page_bytes=PAGE)
    plan = with_packed(unpacked, dict(begins), slots, stored_bytes)
    check_plan(plan, schedules, by_name, packed=dict(begins))
    return plan


@dataclass(frozen=True)
class PackedModel(Model):
    """Weights as they are in the file: packed, but for some."""

    blocks: Mapping[str, Blocks]
    raw: Mapping[str, bytes]

    @cached_property
    def content(self) -> dict[str, bytes]:
        return dict(self.raw)

    @cached_property
    def hashes(self) -> dict[str, int]:
        return {name: _hash(content) for name, content in self.raw.items()}

    @cached_property
    def begins(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(one.begins_bytes) for name, one in self.blocks.items()}

    @property
    def packed(self) -> Numbers:
        return packed_numbers(
            (number, self.offsets[name], self.blocks[name])
            for number, name in enumerate(self.weights)
            if name in self.blocks
        )

    @property
    def extents(self) -> list[tuple[int, int]]:
        stored = {name: blocks.begins_bytes[-1] for name, blocks in self.blocks.items()}
        return [(self.offsets[name], stored.get(name, weight.nbytes)) for name, weight in self.weights.items()]

    @cached_property
    def planner(self) -> Planner:
        return _planner(self.schedules, tuple(self.weights.values()), tuple(self.begins.items()))

    @cached_property
    def floor_bytes(self) -> int:
        return self.planner.floor_bytes

    @cached_property
    def full_bytes(self) -> int:
        return self.planner.full_bytes

    @cached_property
    def largest_block_bytes(self) -> int:
        return max(end - begin for begins in self.begins.values() for begin, end in pairwise(begins))

    def plan(self, budget_bytes: int) -> Plan:
        return _plan(self.planner, budget_bytes)

    def divided(self, *, slots: int = 2, blocks_a_slot: int = 1, stored_bytes: int = 0, spare_bytes: int = 0) -> Plan:
        """As little as can be decoded at a time, and `spare_bytes`; so much stays packed; and slots for the rest."""
        nbytes = -(-blocks_a_slot * self.largest_block_bytes // 256) * 256
        sizes = SlotSizes(slots, nbytes, -(-slots * nbytes // PAGE) * PAGE)
        return _divided(
            *(self.schedules, tuple(self.weights.values()), tuple(self.begins.items())),
            sizes,
            stored_bytes,
            spare_bytes,
        )

    def packed_of(self, name: str, begin_bytes: int, nbytes: int) -> bytes:
        """The blocks in which these bytes of a weight lie, as they are in the file."""
        data, begins = packed_blocks(self.raw[name])
        return data[begins[begin_bytes // BLOCK_BYTES] : begins[-(-(begin_bytes + nbytes) // BLOCK_BYTES)]]

    def registered(self, chunks: int = 3) -> HostSource:
        starts = sorted({one.data_offset_bytes for one in self.blocks.values()} - {0})
        ends = starts[:: max(len(starts) // chunks, 1)] if chunks > 1 else []
        return HostSource(chunk_ends=(*ends, -(-self.file_bytes // PAGE) * PAGE))


def write_packed(
    path: Path, schedules: Sequence[Schedule], sizes: Mapping[str, int], *, unpacked: Mapping[str, int] | None = None
) -> PackedModel:
    """`sizes`: of weights that are packed; `unpacked`: of others. All begin on pages of the file."""
    offsets: dict[str, int] = {}
    blocks: dict[str, Blocks] = {}
    raw: dict[str, bytes] = {}
    data = bytearray()
    for index, (name, nbytes) in enumerate({**sizes, **(unpacked or {})}.items()):
        raw[name] = weight_content(index, nbytes)
        data += bytes(-len(data) % PAGE)
        offsets[name] = len(data)
        if name in sizes:
            packed, begins = packed_blocks(raw[name])
            blocks[name] = Blocks(BFLOAT16, nbytes, len(data), array("q", begins))
            data += packed
        else:
            data += raw[name]
    path.write_bytes(data)
    weights = {name: Weight(name, "bfloat16", (len(content) // 2,), (0,)) for name, content in raw.items()}
    return PackedModel(tuple(schedules), weights, offsets, path, blocks, raw)


def packed_chain(folder: Path, *, count: int = 5, back: bool = False) -> PackedModel:
    """Packed weights one after the other, and one among them that is not. `back`: and a method that reads them in
    the opposite order."""
    names = [f"w{index}" for index in range(count)]
    order = [*names[:2], "plain", *names[2:]]
    schedules = [chain(*order), *([chain(*reversed(order), method="back")] if back else [])]
    sizes = dict.fromkeys(names, WEIGHT_BYTES)
    return write_packed(folder / "packed.ptd", schedules, sizes, unpacked={"plain": 3 * PAGE})


def random_packed(choose: random.Random, path: Path) -> PackedModel:
    """Weights of some blocks each, whole or not, some read twice, and one or two that are not packed. Others stream at
    the floor."""
    lengths = (BLOCK_BYTES - 10, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 700, 3 * BLOCK_BYTES + PAGE)
    while True:
        sizes = {f"w{index}": choose.choice(lengths) for index in range(choose.randint(6, 8))}
        plain = {f"u{index}": choose.choice((2 * PAGE, 5 * PAGE + 100, 300)) for index in range(choose.randint(1, 2))}
        methods = [f"m{index}" for index in range(choose.choice((1, 2)))]
        schedules = [_random_schedule(choose, [*sizes, *plain], method) for method in methods]
        model = write_packed(path, schedules, sizes, unpacked=plain)
        if all(method.warm.bytes_decoded > 5 * BLOCK_BYTES for method in model.divided().methods):
            return model


def _random_schedule(choose: random.Random, names: Sequence[str], method: str) -> Schedule:
    order = [*choose.sample(names, len(names)), *choose.sample(names, 2)]
    steps: list[str] = []
    while order:
        count = choose.choice((1, 1, 2))
        steps.append(" ".join(order[:count]))
        order = order[count:]
    return chain(*steps, method=method)
