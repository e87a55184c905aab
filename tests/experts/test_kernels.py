"""Experts' kernels without a GPU: every word of a table, every slot and every row is that of a cache written apart."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
from pathlib import Path

import pytest

from tests.experts.kernel_banks import GUARD, ORDERS, KernelBank, Shifted, build, play, play_all
from tests.runtime.builds import COMPILER, SOURCES
from tests.runtime.expert_decisions import MoveCall, address_of

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no compiler {COMPILER}")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("kernels"))


def test_tables_and_slots_are_those_of_a_second_cache(kernels: ctypes.CDLL) -> None:
    play_all(kernels)


def test_a_table_of_as_many_experts_as_there_may_be(kernels: ctypes.CDLL) -> None:
    bank = KernelBank(kernels, ORDERS, 4096, 40, seed=1, row_bytes=(16, 16))
    bank.take([0, 4095, 2048, -4096, -1])
    bank.group([number % 3 for number in range(4096)], 4096)
    bank.take([*range(4095, 3900, -1), *range(100)])
    assert bank.reference.hits and bank.reference.misses


def test_a_log_begins_anew_behind_its_last_call(kernels: ctypes.CDLL) -> None:
    bank = KernelBank(kernels, ORDERS, 40, 5, seed=1)
    for number in range(300):
        bank.take([number % 40, number * 7 % 40, 3])


def test_rows_of_several_tiles(kernels: ctypes.CDLL) -> None:
    """Of 1,024 units each: one that ends with a tile, and one that does not."""
    play(KernelBank(kernels, ORDERS, 9, 4, seed=2, row_bytes=(16 * 2100, 16 * 1024)), 12, 2)


def test_as_many_rows_as_a_move_carries(kernels: ctypes.CDLL) -> None:
    """Rows of one expert are written by what has read it once."""
    bank = KernelBank(kernels, ORDERS, 300, 7, seed=3, row_bytes=(16, 32))
    bank.take([(number * number) % 300 for number in range(4096)])
    bank.take([5] * 4096)


def test_without_a_table_rows_are_read_where_they_lie(kernels: ctypes.CDLL) -> None:
    whole = bytes(range(80))
    index, out = (ctypes.c_int64 * 4)(4, 0, -1, 2), (ctypes.c_ubyte * 64)()
    call = MoveCall(0, ctypes.addressof(index), address_of(whole), 0, ctypes.addressof(out), 16, 5, 0, 4, False, 0, 0)
    assert kernels.move_on_host(ctypes.byref(call), 1, 1) == 0
    assert bytes(out) == b"".join(whole[16 * one :][:16] for one in (4, 0, 4, 2))


@pytest.mark.parametrize("order", ORDERS)
def test_an_index_beyond_the_experts_ends_the_kernel_and_changes_no_slot(kernels: ctypes.CDLL, order: int) -> None:
    for wrong in (9, -10, 2**62):
        bank = KernelBank(kernels, [order], 9, 4, seed=1)
        bank.take([1, 2, 3])
        before, slots = bytes(bank.table), [bytes(one) for one in bank.in_slots]
        index = (ctypes.c_int64 * 40)(*[5] * 39, wrong)
        with pytest.raises(AssertionError):
            bank._choose(index, 40, by_ends=False, begins_run=False)
        assert bytes(bank.table) == before
        out = (ctypes.c_ubyte * (40 * 48))(*[GUARD] * (40 * 48))
        with pytest.raises(AssertionError):
            bank._move(0, index, 40, out)
        assert bytes(out) == bytes([GUARD]) * len(out) and [bytes(one) for one in bank.in_slots] == slots


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_groups_are_brought_to_the_beginning_and_put_back(kernels: ctypes.CDLL, order: int) -> None:
    for rows in ([1, 0, 4, 0, 0, 2, 3], [0, 0, 5, 1, 0, 0, 0], [0] * 7, [300, 1, 0, 0, 0, 0, 700]):
        ends = [*itertools.accumulate(rows)]
        given = Shifted(kernels, ends, 48, ends[-1])
        back = given.guarded()
        for first in range(0, 7, 3):
            end = min(first + 3, 7)
            begin, count = sum(rows[:first]), sum(rows[first:end])
            to, counted = given.guarded(), (ctypes.c_int32 * 3)(-7, -7, -7)
            assert given.shift(given.at(to), given.source, first, end, ctypes.addressof(counted), order)
            assert given.content(to)[: count * 48] == given.rows[begin * 48 : (begin + count) * 48]
            assert [*counted] == [*itertools.accumulate(rows[first:end]), *[-7] * (3 - end + first)]
            assert given.shift(given.at(back), given.at(to), first, end, 0, order)
        assert given.content(back) == given.rows


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ends", [[2, 4, 11], [2, 11, 10], [-3, 4, 10], [2, -5, 9], [2**31 - 1, 3, 10], [0, 0, 2**30]])
def test_ends_beyond_the_rows_end_the_kernel_before_a_row_is_written(
    kernels: ctypes.CDLL, ends: list[int], order: int
) -> None:
    """Of ten rows. Whichever group it is that has them, nothing is read or written for it."""
    given = Shifted(kernels, ends, 16, 10)
    outcomes = []
    for first, end in ((0, 3), (0, 1), (1, 3)):
        has_wrong = any(
            ends[one] > before and (before < 0 or ends[one] > 10)
            for one in range(first, end)
            for before in [ends[one - 1] if one else 0]
        )
        for counted in (ctypes.addressof((ctypes.c_int32 * 3)()), 0):
            to = given.guarded()
            went_through = given.shift(given.at(to), given.source, first, end, counted, order)
            assert went_through is not has_wrong
            content = given.content(to)
            assert went_through or content == bytes([GUARD]) * 160
            outcomes.append(went_through)
    assert not all(outcomes)


# What is taken out of the source, one at a time. Places that need none in between are those that nobody reads again.
MEETINGS = re.compile(r"^ *__sync(?:warp|threads)\(\);\n", re.MULTILINE)


@pytest.mark.slow
def test_without_a_barrier_something_goes_wrong(tmp_path: Path) -> None:
    text = (SOURCES / "experts" / "experts.cu").read_text()
    survived = []
    for number, place in enumerate(MEETINGS.finditer(text)):
        library = build(tmp_path / str(number), text[: place.start()] + text[place.end() :])
        try:
            play_all(library)
            for order in ORDERS:
                test_an_index_beyond_the_experts_ends_the_kernel_and_changes_no_slot(library, order)
                test_ends_beyond_the_rows_end_the_kernel_before_a_row_is_written(library, [2, 4, 11], order)
        except AssertionError:
            continue
        survived.append(text[: place.start()].count("\n") + 1)
    assert number > 6 and not survived, f"lines of experts.cu: {survived}"
