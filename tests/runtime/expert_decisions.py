"""What stands in a table after every call, word for word, beside a cache that is written apart from the core's: by
index and by groups, for which sessions need torch. Scenarios, because each decision must be missed when it goes wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.plan.experts import table_bytes
from tests.experts.reference import MOST_USES, USE, ReferenceTable
from tests.native.library import testing
from tests.runtime.scenario_tools import scenario

POISON = 0xFF
NOT_WANTED, READ_WHOLE, FIRST_SLOT = 0, 1, 2
LOG_CALLS = 256


class ChooseCall(ctypes.Structure):
    """As in csrc/experts/expert_table.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("table", "index")),
        *((name, ctypes.c_int32) for name in ("experts", "slots", "rows", "by_ends", "begins_run")),
    ]


class MoveCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("table", "index", "whole", "slots_at", "out")),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("experts", "slots", "rows", "by_ends", "first", "end")),
    ]


def address_of(data: bytes) -> int | None:
    return ctypes.cast(data, ctypes.c_void_p).value


class Bank:
    """A table, slots of two weights, and the cache that says what should stand in them."""

    def __init__(self, experts: int, slots: int, seed: int, row_bytes: tuple[int, int] = (48, 16)) -> None:
        self.reference = ReferenceTable(experts, slots)
        self.experts, self.slots = experts, slots
        draw = random.Random(seed)
        nbytes = testing().penstock_test_table_bytes(experts, slots)
        assert nbytes == table_bytes(experts, slots)
        self.table = (ctypes.c_uint64 * -(-nbytes // 8))()
        self.row_bytes = row_bytes
        self.whole = [draw.randbytes(experts * size) for size in self.row_bytes]
        self.in_slots = [(ctypes.c_ubyte * (slots * size))(*[POISON] * (slots * size)) for size in self.row_bytes]
        # By call: a bit for each expert that it asked for.
        self.log: list[int] = []
        self.run_counts = (0, 0)

    def words(self, at: int, count: int) -> list[int]:
        found = array("I")
        found.frombytes(bytes(self.table)[at : at + 4 * count])
        return found.tolist()

    def choose(self, call: ChooseCall) -> None:
        assert testing().penstock_test_choose_experts(ctypes.byref(call)) == 0

    def move(self, call: MoveCall) -> None:
        assert testing().penstock_test_move_experts(ctypes.byref(call)) == 0

    def _choose(self, index: Any, rows: int, *, by_ends: bool, begins_run: bool) -> None:
        self.choose(
            ChooseCall(
                ctypes.addressof(self.table),
                ctypes.addressof(index),
                self.experts,
                self.slots,
                rows,
                by_ends,
                begins_run,
            )
        )

    def _move(self, weight: int, index: Any, rows: int, out: Any, ends: tuple[int, int] | None = None) -> None:
        first, end = ends or (0, 0)
        self.move(MoveCall(
            ctypes.addressof(self.table), ctypes.addressof(index), address_of(self.whole[weight]),
            ctypes.addressof(self.in_slots[weight]), ctypes.addressof(out), self.row_bytes[weight],
            self.experts, self.slots, rows, ends is not None, first, end,
        ))  # fmt: skip

    def row(self, weight: int, expert: int) -> bytes:
        return self.whole[weight][expert * self.row_bytes[weight] :][: self.row_bytes[weight]]

    def take(self, ids: Sequence[int], *, begins_run: bool = False) -> None:
        before = dict(self.reference.held)
        counts = self.reference.take(one % self.experts for one in ids)
        index = (ctypes.c_int64 * len(ids))(*ids)
        self._choose(index, len(ids), by_ends=False, begins_run=begins_run)
        wanted = sorted({one % self.experts for one in ids})
        self.log.append(sum(1 << expert for expert in wanted))
        self.check(wanted, before, counts, begins_run)
        for weight in (0, 1):
            out = (ctypes.c_ubyte * (len(ids) * self.row_bytes[weight]))()
            self._move(weight, index, len(ids), out)
            assert bytes(out) == b"".join(self.row(weight, one % self.experts) for one in ids)
        self.check_slots()

    def group(self, rows: Sequence[int], parts: int, *, begins_run: bool = False) -> None:
        before = dict(self.reference.held)
        counts = self.reference.group(rows)
        ends = (ctypes.c_int32 * self.experts)(*itertools.accumulate(rows))
        self._choose(ends, self.experts, by_ends=True, begins_run=begins_run)
        wanted = [expert for expert in range(self.experts) if rows[expert]]
        self.check(wanted, before, counts, begins_run)
        for weight, size in enumerate(self.row_bytes):
            for first in range(0, self.experts, parts):
                end = min(first + parts, self.experts)
                out = (ctypes.c_ubyte * ((end - first) * size))()
                self._move(weight, ends, self.experts, out, (first, end))
                for expert in range(first, end):
                    found = bytes(out)[(expert - first) * size :][:size]
                    assert found == (self.row(weight, expert) if rows[expert] else bytes(size))
        self.check_slots()

    def later(self, calls: int) -> None:
        """As if so many calls had been made by which nothing was used."""
        self.reference.calls += calls
        words = (ctypes.c_uint32 * (len(self.table) * 2)).from_buffer(self.table)
        words[16] = self.reference.calls

    def check(self, wanted: list[int], before: dict[int, int], counts: tuple[int, int], begins_run: bool) -> None:
        """Of a table as it is laid out: counts of 64 bits, three numbers, then by expert and by slot, and the log."""
        reference, experts = self.reference, self.experts
        calls, hits, misses, run_hits, run_misses = self.table[:5]
        assert (calls, hits, misses) == (reference.taken, reference.hits, reference.misses)
        last = (0, 0) if begins_run else self.run_counts
        self.run_counts = (last[0] + counts[0], last[1] + counts[1])
        assert (run_hits, run_misses) == self.run_counts
        now, found, logged, _ = self.words(64, 4)
        assert (now, found, logged) == (reference.calls, len(wanted), len(self.log))
        slot_of, uses, last_used, source, listed = (self.words(80 + 4 * experts * n, experts) for n in range(5))
        owner = self.words(80 + 20 * experts, self.slots)
        assert owner == [reference.held.get(slot, -1) + 1 for slot in range(self.slots)]
        held = {expert: slot for slot, expert in reference.held.items()}
        assert slot_of == [held.get(expert, -1) + 1 for expert in range(experts)]
        assert listed[:found] == wanted
        for expert, use in reference.uses.items():
            assert (uses[expert], last_used[expert]) == (use.weight, use.last)
        for expert in range(experts):
            if expert not in wanted:
                assert source[expert] == NOT_WANTED
            elif expert not in held:
                assert source[expert] == READ_WHOLE
            else:
                is_new = before.get(held[expert]) != expert
                assert source[expert] == FIRST_SLOT + 2 * held[expert] + is_new
        log = bytes(self.table)[80 + 20 * experts + 4 * self.slots :]
        call_bytes = -(-experts // 32) * 4
        for number, call in list(enumerate(self.log))[-LOG_CALLS:]:
            assert int.from_bytes(log[number % LOG_CALLS * call_bytes :][:call_bytes], "little") == call

    def check_slots(self) -> None:
        """Each holds its expert of both weights, or nothing yet."""
        for weight, size in enumerate(self.row_bytes):
            held = bytes(self.in_slots[weight])
            for slot in range(self.slots):
                expert = self.reference.held.get(slot)
                wanted = bytes([POISON]) * size if expert is None else self.row(weight, expert)
                assert held[slot * size :][:size] == wanted


@scenario
def tables_are_as_a_second_cache_has_them(folder: Path) -> None:
    """Calls by index and by groups, in any order, over the calls at which everything counts half."""
    for seed, (experts, slots) in enumerate([(1, 1), (2, 1), (5, 5), (16, 1), (16, 3), (16, 15), (40, 12)]):
        bank, draw = Bank(experts, slots, seed), random.Random(seed)
        for number in range(300):
            begins_run = draw.random() < 0.3
            if draw.random() < 0.15:
                rows = [draw.choice([0, 0, 0, 1, 2, MOST_USES, MOST_USES + 1, 40]) for _ in range(experts)]
                bank.group(rows, draw.choice([1, 3, experts]), begins_run=begins_run)
            else:
                some = draw.choice([1, 2, 3, 20])
                ids = [min(int(draw.expovariate(5 / experts)), experts - 1) for _ in range(some)]
                bank.take([one - experts * (draw.random() < 0.3) for one in ids], begins_run=begins_run)
            if number % 50 == 20:
                bank.later(draw.choice([63, 64, 65, 64 * 31, 64 * 32, 64 * 33, 64 * 40]))


@scenario
def groups_replace_nobody(folder: Path) -> None:
    """Empty slots go to those with the most rows, the first of equals; and how much they count is bounded."""
    bank = Bank(8, 3, 1)
    bank.take([7])
    bank.group([1, 5, 0, 5, 2, 0, 0, 0], 3)
    assert bank.reference.held == {0: 7, 1: 1, 2: 3}
    bank.group([90] * 8, 8)
    assert bank.reference.held == {0: 7, 1: 1, 2: 3}
    assert bank.reference.uses[1].weight == 5 * USE
    # Then by index: who was used longest ago of those that count alike, and never one that is asked for.
    bank.take([2])
    assert bank.reference.held == {0: 2, 1: 1, 2: 3}
    bank.take([0, 1, 2])
    assert bank.reference.held == {0: 2, 1: 1, 2: 0}
    full = Bank(8, 2, 1)
    full.group([100, 14, 0, 0, 0, 0, 0, 0], 8)
    assert full.reference.uses[0].weight == MOST_USES * USE and full.reference.uses[1].weight == 14 * USE
    full.take([5])
    assert full.reference.held == {0: 0, 1: 5}


@scenario
def without_a_table_rows_are_read_where_they_lie(folder: Path) -> None:
    whole = random.Random(2).randbytes(5 * 16)
    index, out = (ctypes.c_int64 * 4)(4, 0, -1, 2), (ctypes.c_ubyte * (4 * 16))()
    call = MoveCall(0, ctypes.addressof(index), address_of(whole), 0, ctypes.addressof(out), 16, 5, 0, 4, False, 0, 0)
    assert testing().penstock_test_move_experts(ctypes.byref(call)) == 0
    assert bytes(out) == b"".join(whole[16 * one :][:16] for one in (4, 0, 4, 2))
