"""The kernels of csrc/experts/experts.cu, compiled for the host: their threads run in orders that tests choose."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.experts.reference import MOST_USES
from tests.runtime.builds import COMPILER, SOURCES
from tests.runtime.expert_decisions import Bank, ChooseCall, MoveCall, address_of

# From the first thread on, from the last, and at random.
ORDERS = (0, 1, 2, 3)
GUARD = 0xA5


class ShiftCall(ctypes.Structure):
    """As in csrc/experts/expert_table.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("to", "from_", "ends", "ends_out")),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "first", "end")),
    ]


def build(folder: Path, kernels: str | None = None) -> ctypes.CDLL:
    """`kernels`: other than those of the source."""
    source = Path(__file__).with_name("kernels_on_host.cpp")
    found = [f"-I{SOURCES}"]
    if kernels is not None:
        (folder / "experts").mkdir(parents=True)
        (folder / "experts" / "experts.cu").write_text(kernels)
        found.insert(0, f"-I{folder}")
    library = folder / "kernels.so"
    # Jumps from one stack to another are what a fortified library refuses.
    options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run([COMPILER, *options, *found, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class KernelBank(Bank):
    """Whose calls are the kernels'."""

    def __init__(
        self,
        library: ctypes.CDLL,
        orders: Sequence[int],
        experts: int,
        slots: int,
        seed: int,
        row_bytes: tuple[int, int] = (48, 16),
    ) -> None:
        super().__init__(experts, slots, seed, row_bytes)
        self._library = library
        self._orders = itertools.cycle(orders)
        # Of a grid that is shorter than the work, and one that is longer.
        self._blocks = itertools.cycle((1, 2, 7))

    def choose(self, call: ChooseCall) -> None:
        assert self._library.choose_on_host(ctypes.byref(call), next(self._orders)) == 0

    def move(self, call: MoveCall) -> None:
        assert self._library.move_on_host(ctypes.byref(call), next(self._blocks), next(self._orders)) == 0


def play(bank: Bank, calls: int, seed: int) -> None:
    """By index and by groups, over the calls at which everything counts half."""
    draw, experts = random.Random(seed), bank.experts
    for number in range(calls):
        begins_run = draw.random() < 0.3
        if draw.random() < 0.2:
            rows = [draw.choice([0, 0, 0, 1, 2, MOST_USES, MOST_USES + 1, 40]) for _ in range(experts)]
            bank.group(rows, draw.choice([1, 3, experts]), begins_run=begins_run)
        else:
            ids = [
                min(int(draw.expovariate(5 / experts)), experts - 1) for _ in range(draw.choice([0, 1, 2, 3, 20, 40]))
            ]
            bank.take([one - experts * (draw.random() < 0.3) for one in ids], begins_run=begins_run)
        if number % 50 == 20:
            bank.later(draw.choice([63, 64, 65, 64 * 31, 64 * 32, 64 * 33, 64 * 40]))


def play_all(library: ctypes.CDLL, orders: Sequence[int] = ORDERS) -> None:
    for seed, (experts, slots) in enumerate([(1, 1), (2, 1), (5, 5), (16, 3), (40, 12), (70, 33), (128, 40)]):
        play(KernelBank(library, orders, experts, slots, seed=seed), 40, seed)


class Shifted:
    """Rows of a grouped product, and what is brought to the beginning of a buffer between guards."""

    def __init__(self, library: ctypes.CDLL, ends: Sequence[int], row_bytes: int, count: int) -> None:
        self._library = library
        self.ends = (ctypes.c_int32 * len(ends))(*ends)
        self.row_bytes, self.count = row_bytes, count
        self.rows = random.Random(1).randbytes(count * row_bytes)
        self.whole = self.guarded()

    def guarded(self) -> ctypes.Array[ctypes.c_ubyte]:
        """A row before, a row behind."""
        nbytes = (self.count + 2) * self.row_bytes
        return (ctypes.c_ubyte * nbytes)(*[GUARD] * nbytes)

    def at(self, buffer: ctypes.Array[ctypes.c_ubyte]) -> int:
        return ctypes.addressof(buffer) + self.row_bytes

    def shift(self, to: int, source: int, first: int, end: int, ends_out: int, order: int) -> bool:
        """Whether it went through."""
        call = ShiftCall(to, source, ctypes.addressof(self.ends), ends_out, self.row_bytes, self.count, first, end)
        return not self._library.shift_on_host(ctypes.byref(call), 2, order)

    def content(self, buffer: ctypes.Array[ctypes.c_ubyte]) -> bytes:
        found, guard = bytes(buffer), bytes([GUARD]) * self.row_bytes
        assert found.startswith(guard) and found.endswith(guard), "written beyond the rows"
        return found[self.row_bytes : -self.row_bytes]

    @property
    def source(self) -> int:
        address = address_of(self.rows)
        assert address is not None
        return address
